"""
What exits save: FLOPs per token, three ways to count them, the threshold that saves so much, and the baselines that
cost as much.
"""
from dataclasses import dataclass

import torch

from exits import n_stages


@dataclass
class Costs:
    """FLOPs per token at full context, as LoopedLM.flops_per_token counts them."""
    base: int                                    # prelude of a looped model
    stage: int
    readout: int                                 # coda and head
    full: int                                    # the whole model: base + stages * stage + readout
    copy: int                                    # keys and values of what was skipped: once for a loop, else per stage
    stages: int
    looped: bool


def costs(model):
    cfg, looped = model.cfg, model.cfg.n_loop > 1
    full = model.flops_per_token(cfg, train=False)
    readout = model.flops_per_token(cfg, train=False, readouts=2) - full
    layer, copy = model.layer_flops(cfg), 6 * cfg.n_embd ** 2
    stage = layer
    if looped:                                   # every pass but perhaps the first costs what the last one does
        stage = model.pass_flops(cfg, cfg.n_loop - 1)
        copy = cfg.n_recur * copy + model.combine_flops(cfg)
    base = full - n_stages(cfg) * stage - readout
    return Costs(base, stage, readout, full, copy, n_stages(cfg), looped)


def saved(c, depth, tests, kv="reuse"):
    """Share of the FLOPs of the full model that tokens exiting at depth (N,) save, three ways. layers: as the paper
    counts, the blocks alone. head: with the one readout that every token needs. charged: also every test's readout
    (tests: does a test need one?) and the projections of copy. c: Costs."""
    depth = depth.double()
    skipped = c.stages - depth
    extra = (depth - 1) * c.readout if tests else torch.zeros_like(depth)
    if kv == "copy":
        extra = extra + c.copy * ((skipped > 0) if c.looped else skipped)
    less = skipped * c.stage
    return {"layers": (less.mean() / (c.full - c.readout)).item(), "head": (less.mean() / c.full).item(),
            "charged": ((less - extra).mean() / c.full).item()}


def savings_by_depth(c, way, tests=False, kv="reuse"):
    """What 1 .. S stages for every token save."""
    return [saved(c, torch.tensor([d]), tests, kv)[way] for d in range(1, c.stages + 1)]


def neighbours(savings, saving):
    """(d, share): to save this, a share of the tokens takes d stages, the rest d + 1. savings: of 1 .. S stages."""
    d, saving = 1, max(saving, savings[-1])
    while saving < savings[d]:
        d += 1
    more, less = savings[d - 1], savings[d]
    return d, min(1.0, (saving - less) / (more - less))


def exit_chance(c, depth, saving, way, kv):
    """Random exits take the depths (N,) with this chance, else all stages, so that they save what the exits save: 1
    when counted by layers, less when charged, since random exits need no tests."""
    at_chance_1 = saved(c, depth, False, kv)[way]
    if at_chance_1 <= 0:
        return 0.0
    return max(0.0, min(1.0, saving[way] / at_chance_1))


def fixed_depth(c, by_depth, saving, way):
    """What a fixed depth that saves as much gets, of by_depth (S, ..), what 1 .. S stages for every token get."""
    d, share = neighbours(savings_by_depth(c, way), saving[way])
    return share * by_depth[d - 1] + (1 - share) * by_depth[d]


def random_exits(c, by_depth, depth, saving, way, kv="reuse"):
    """What random exits that save as much are expected to get, no draw needed: by_depth as above, depth (N,) of the
    exits."""
    chance = exit_chance(c, depth, saving, way, kv)
    share = torch.bincount(depth - 1, minlength=len(by_depth)) / len(depth)        # of each depth (S,)
    shuffled = torch.tensordot(share.to(by_depth.dtype), by_depth, 1)
    return chance * shuffled + (1 - chance) * by_depth[-1]


def first_below(score, tau):
    """Exit depth (N,), 1 .. S, of scores (S - 1, N): the first below tau, else S."""
    depth = torch.full(score.shape[1:], len(score) + 1)
    for s in reversed(range(len(score))):
        depth = torch.where(score[s] < tau, s + 1, depth)
    return depth


def calibrate(score, target, saving):
    """The tau at which saving(depth) reaches the target, by bisection; None where none does."""
    finite = score[score.isfinite()]
    low, high = 0.0, 0.0
    if len(finite):                              # of two passes, kl has no score at all
        high = finite.max().item() * 1.001 + 1e-9
    if saving(first_below(score, high)) < target:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        reached = saving(first_below(score, middle)) >= target
        low, high = (low, middle) if reached else (middle, high)
    return high
