"""
Early exits: a token leaves the loop as soon as its prediction is certain. This file is the mechanism: when to leave,
what later tokens find in the cache, what it saves. early_exit.py is the study.

Exit points are the loop boundaries, of an unlooped model its layers. A test asks how much the model doubts the next
token, mostly from a readout of the state through coda, norm and head; below tau the token exits (arXiv 2605.09165:
entropy). What later tokens find in the skipped slots of the KV cache is one of three policies (--kv):

    full    keys and values of the full depth, as if the token had gone on: teacher forcing, what the paper reports.
            A bound, since nothing is saved; a coda reads exit point k as if all tokens had left there
    copy    the skipped layers project them from the exit state, as the next pass would (CALM, arXiv 2207.07061)
    reuse   those of the last pass that ran, same layer: a loop has the same weights in every pass, so they fit

copy and reuse work one position at a time, as generation does; without a coda score_at_once gives the same for whole
windows. The coda has one cache for all tokens, whatever their depth: a token's keys there come from the state it left
with. A prompt goes through the same loop as what follows, token by token.

A stage is what runs between two exit points: a pass of the loop, or a layer of an unlooped model.

Shapes: B rows, T positions, D width, V vocabulary, S exit points, the last of which is the whole model, N tokens.
"""
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from lib.ops import norm, rotate, sample
from model import Context

# name of a criterion: does it look at the readout, which a test then has to pay for?
CRITERIA = {"entropy": True, "margin": True, "kl": True, "change": False}


# --- distributions ---
def expect(p, x):
    """sum p x over the last axis, where p = 0 counts for nothing even if x is infinite."""
    return torch.where(p > 0, p * x, 0).sum(-1)


def entropy(logp):
    """Entropy in nats of log-probabilities (..., V)."""
    return -expect(logp.exp(), logp)


def jsd(logp, logq):
    """Jensen-Shannon divergence (...) of log-probabilities (..., V), base 2: 0 for equal, 1 for disjoint ones."""
    mean = torch.logaddexp(logp, logq) - math.log(2)
    total = expect(logp.exp(), logp - mean) + expect(logq.exp(), logq - mean)
    return (total / (2 * math.log(2))).clamp(0, 1)


def doubt(criterion, logits, earlier, state, before):
    """How unsure the model still is at an exit point (...,), at least 0; below tau a token exits. logits (..., V) and
    state (..., D) are those of this exit point, earlier and before those of the one before (earlier None: no such).
    entropy: of the readout, in nats. margin: 1 - (p of the likeliest token - p of the second). kl: KL in nats from the
    earlier readout to this one, infinite at the first. change: |state - before| / |state|, without readout."""
    if criterion == "change":
        return (state - before).norm(dim=-1) / state.norm(dim=-1)
    logp = logits.float().log_softmax(-1)
    if criterion == "entropy":
        return entropy(logp).clamp(min=0)
    if criterion == "margin":
        top = logp.topk(2).values.exp()
        return 1 - (top[..., 0] - top[..., 1])
    if criterion == "kl":
        if earlier is None:
            return torch.full(logp.shape[:-1], torch.inf, device=logp.device)
        return expect(logp.exp(), logp - earlier.float().log_softmax(-1)).clamp(min=0)
    raise ValueError(f"criterion={criterion}: doubt has no such branch, it has {', '.join(CRITERIA)}")


# --- exit ---
class ExitPoint(NamedTuple):
    """What a rule may look at, for b rows still in the loop: the exit point s (0 .. S - 2), the rows and their position
    (whole windows at once: (B, 1) and (T,)), readouts (b, V) here and at the exit point before (None: no such), states
    (b, D) after and before the stage."""
    s: int
    rows: torch.Tensor
    position: int | torch.Tensor
    logits: torch.Tensor | None
    earlier: torch.Tensor | None
    state: torch.Tensor
    before: torch.Tensor


class Rule(NamedTuple):
    reads: bool                                  # does the test look at logits? If so each test pays a readout
    leave: Callable                              # ExitPoint -> which rows exit (b,), bool


def exit_below(criterion, tau):
    return Rule(CRITERIA[criterion], lambda t: doubt(criterion, t.logits, t.earlier, t.state, t.before) < tau)


def exit_at(depth, reads=False):
    """Exits prescribed: depth (B, T), 1 .. S. reads: compute and discard the entropy, as a test would."""
    def leave(t):
        if reads:
            entropy(t.logits.log_softmax(-1)).tolist()
        return depth[t.rows, t.position] == t.s + 1
    return Rule(reads, leave)


# --- stages: the model's own methods, one exit point after the other ---
def n_stages(cfg):
    """S, the number of stages."""
    return cfg.n_loop if cfg.n_loop > 1 else cfg.n_prelude + cfg.n_recur


@dataclass
class InLoop:
    """Where b rows are in the model, after a stage or before the first; [mask] takes some of the rows."""
    e: torch.Tensor                              # the prelude's output (b, T, D)
    h: torch.Tensor                              # the state (b, T, ...); in an unlooped model what its next layer gets
    state: torch.Tensor                          # what is read out at this exit point (b, T, D)
    logits: torch.Tensor | None = None           # the readout there (b, V), where one was made

    def __getitem__(self, mask):
        logits = None if self.logits is None else self.logits[mask]
        return InLoop(self.e[mask], self.h[mask], self.state[mask], logits)


def begin(model, idx, context):
    """Tokens idx (B, T) before the first stage. The prelude of an unlooped model is stages itself."""
    if model.cfg.n_loop == 1:
        x = model.embed(idx)
        return InLoop(x, x, x)
    e = model.encode(idx, context)
    return InLoop(e, model.start(e), e)


def advance(model, s, at, context):
    """Stage s of rows at, an InLoop."""
    cfg = model.cfg
    if cfg.n_loop > 1:
        h = model.one_pass(at.e, at.h, s, context)
        return InLoop(at.e, h, model.read(h))
    if s < cfg.n_prelude:
        x = model.prelude[s](at.h, context, s)
        return InLoop(x, x, norm(x) if cfg.loop_norm else x)
    x = model.layer(entering(model, s, at), s - cfg.n_prelude, 0, context)
    return InLoop(at.e, x, model.read(model.finish(model.start(at.e), x, 0)))


def entering(model, s, at):
    """Input (b, T, D) of the first layer of stage s."""
    if model.cfg.n_loop > 1:
        return model.combine(at.e, at.h, s)
    if s == model.cfg.n_prelude:                 # the only pass of the loop begins
        return model.combine(at.h, model.start(at.h), 0)
    return at.h


def read(model, s, state, context):
    """Readout of exit point s, (b, T, V). It always uses the coda's slots after the full depth."""
    return model.logits(state, context, model.cfg.n_loop, last_pass=s == n_stages(model.cfg) - 1)


def blocks_of(model, s):
    """The blocks of stage s and the cache slot of the first."""
    cfg = model.cfg
    if cfg.n_loop > 1:
        return model.recur, cfg.n_prelude + s * cfg.n_recur
    return [[*model.prelude, *model.recur][s]], s


# --- the cache ---
class RowCache:
    """model.KVCache for rows that leave the loop one by one: rows names those at work (None: all). Keys and values
    (slot, B, H, T, head_dim), slots numbered as a token meets them; the coda's come after those of n_loop passes."""

    def __init__(self, model, batch_size):
        cfg, device = model.cfg, model.table.device
        shape = (cfg.depth(), batch_size, cfg.n_head, cfg.block_size, cfg.n_embd // cfg.n_head)
        self.k, self.v = (torch.zeros(shape, device=device) for _ in "kv")
        self.slots = list(zip(self.k, self.v))   # views made once: an indexing call a layer is time, too
        self.length, self.size, self.rows = 0, batch_size, None
        inside = slice(cfg.n_prelude, cfg.n_prelude + cfg.n_loop * cfg.n_recur)
        self.loop = [c[inside].view(cfg.n_loop, cfg.n_recur, *shape[1:]) for c in (self.k, self.v)]

    def only(self, rows):
        self.rows = None if len(rows) == self.size else rows

    def update(self, slot, k, v):
        """Store k, v (b, H, 1, head_dim) of the rows at work; returns theirs so far (b, H, length + 1, head_dim)."""
        t, found = self.length, []
        for cache, new in zip(self.slots[slot], (k, v)):
            if self.rows is None:
                cache[:, :, t:t + 1] = new
                found.append(cache[:, :, :t + 1])
            else:
                cache[self.rows, :, t:t + 1] = new
                found.append(cache[:, :, :t + 1].index_select(0, self.rows))
        return found

    def skip(self, s, pair, layer=slice(None)):
        """Put pair, k and v (.., b, H, 1, head_dim), into the slots of a loop's layer(s) in all passes after s."""
        rows = slice(None) if self.rows is None else self.rows
        for cache, new in zip(self.loop, pair):
            cache[s + 1:, layer][..., rows, :, self.length:self.length + 1, :] = new


def keys_values(attn, x, table):
    """The keys and values (B, H, T, head_dim) that an attention layer makes of x (B, T, D): Attention.forward without
    the rest. Its queries are computed too, in the same product, and dropped."""
    _, k, v = (y.view(*x.shape[:2], attn.n_head, -1) for y in attn.qkv(x).chunk(3, dim=-1))
    return rotate(norm(k), table).transpose(1, 2), v.transpose(1, 2)


def fill(model, s, at, context, kv):
    """What later tokens find where rows that exit at s did not go: kv is copy or reuse."""
    cache, table = context.cache, context.table
    now = slice(cache.length, cache.length + 1)
    rows = slice(None) if cache.rows is None else cache.rows
    if kv == "reuse":
        cache.skip(s, [c[s][:, rows, :, now] for c in cache.loop])
    elif model.cfg.n_loop > 1:                   # those of the next pass, in all the skipped ones
        x = norm(entering(model, s + 1, at))
        for i, block in enumerate(model.recur):
            cache.skip(s, keys_values(block.attn, x, table), i)
    else:
        for later in range(s + 1, n_stages(model.cfg)):
            blocks, slot = blocks_of(model, later)
            pair = keys_values(blocks[0].attn, norm(entering(model, later, at)), table)
            for store, new in zip(cache.slots[slot], pair):
                store[rows, :, now] = new


def step(model, tokens, cache, rule=None, kv="reuse"):
    """One position of B rows, tokens (B,): logits (B, V) and the number of stages (B,) that each row went through. A
    row that exits is taken out of all that follows; without a rule none is tested."""
    S, device, t = n_stages(model.cfg), tokens.device, cache.length
    context = Context(model.table[t:t + 1], cache=cache)
    rows, depth = torch.arange(len(tokens), device=device), torch.full((len(tokens),), S, device=device)
    cache.only(rows)
    at, result = begin(model, tokens[:, None], context), None
    if rule is None:
        for s in range(S):
            at = advance(model, s, at, context)
        cache.length += 1
        return read(model, S - 1, at.state, context)[:, 0], depth
    for s in range(S):
        last, before = s == S - 1, at
        at = advance(model, s, at, context)
        if last or rule.reads:
            at.logits = read(model, s, at.state, context)[:, 0]
        if last:
            leave = torch.ones_like(rows, dtype=torch.bool)
        else:
            leave = rule.leave(ExitPoint(s, rows, t, at.logits, before.logits, at.state[:, 0], before.state[:, 0]))
        if leave.any():
            gone, leaving = (rows, at) if last else (rows[leave], at[leave])
            cache.only(gone)
            if leaving.logits is None:
                leaving.logits = read(model, s, leaving.state, context)[:, 0]
            if result is None:
                result = leaving.logits.new_empty(len(tokens), leaving.logits.size(-1))
            result[gone], depth[gone] = leaving.logits, s + 1
            if last:
                break
            fill(model, s, leaving, context, kv)
            rows, at = rows[~leave], at[~leave]
            if not len(rows):
                break
            cache.only(rows)
    cache.length += 1
    return result, depth
# --- end exit ---


# --- cost ---
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

    def flops(n_loop, readouts=1):
        return model.flops_per_token(cfg, n_loop, train=False, readouts=readouts)
    layer, full = model.layer_flops(cfg), flops(cfg.n_loop)
    readout = flops(cfg.n_loop, 2) - full
    stage, copy = layer, 6 * cfg.n_embd ** 2
    if looped:                                   # the next pass combines once, then every layer projects
        stage = model.pass_flops(cfg)
        copy = cfg.n_recur * copy + stage - cfg.n_recur * layer
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


# --- as generation works ---
@torch.inference_mode()
def score_by_step(model, x, y, rule=None, kv="reuse"):
    """Nats (B, T) and depths (B, T) of windows x with targets y (B, T), one position at a time."""
    cache, nats, depths = RowCache(model, len(x)), [], []
    for t in range(x.size(1)):
        logits, depth = step(model, x[:, t], cache, rule, kv)
        nats.append(F.cross_entropy(logits.float(), y[:, t], reduction="none"))
        depths.append(depth)
    return torch.stack(nats, 1), torch.stack(depths, 1)


class Merged:
    """A cache for whole windows at once: where a position is not active, it keeps the pair that was put there."""

    def __init__(self):
        self.pairs, self.active = {}, None       # slot: keys and values (B, H, T, head_dim); (B, 1, T, 1)

    def update(self, slot, k, v):
        old = self.pairs.get(slot, (k, v))
        self.pairs[slot] = choose(self.active, (k, v), old)
        return self.pairs[slot]


def choose(mask, new, old):
    """[new where the mask holds, else old] of two lists of tensors; the mask gets the axes that it lacks."""
    return [torch.where(mask.view(*mask.shape, *[1] * (a.ndim - mask.ndim)), a, b) for a, b in zip(new, old)]


@torch.inference_mode()
def score_at_once(model, x, y, rule, kv="reuse"):
    """What score_by_step gives, for a model without a coda, stage by stage over whole windows, several times as fast.
    It is exact because the keys that stage s of a token sees depend on earlier tokens' stages up to s only; a coda
    would see the state each of them leaves with, later in this order."""
    S, cfg, cache = n_stages(model.cfg), model.cfg, Merged()
    context = model.context(x, cfg.n_loop, None)._replace(cache=cache)
    active, cache.active = torch.ones_like(x, dtype=torch.bool), torch.ones((), dtype=torch.bool, device=x.device)
    nats, depth = torch.empty(x.shape, device=x.device), torch.full_like(x, S)
    rows, positions = torch.arange(len(x), device=x.device)[:, None], torch.arange(x.size(1), device=x.device)
    at = begin(model, x, context)
    for s in range(S):
        cache.active = active[:, None, :, None]
        if s:
            freeze(model, s, at, context, kv, just_left=depth == s)
        before, new = at, advance(model, s, at, context)
        e, h, state = choose(active, (new.e, new.h, new.state), (at.e, at.h, at.state))
        at = InLoop(e, h, state)
        leave = active
        if s < S - 1:
            if rule.reads:
                at.logits = read(model, s, state, context)
            leave = active & rule.leave(ExitPoint(s, rows, positions, at.logits, before.logits, state, before.state))
        if leave.any():
            out = read(model, s, state[leave][None], context)[0] if at.logits is None else at.logits[leave]
            nats[leave] = F.cross_entropy(out.float(), y[leave], reduction="none")
            depth[leave] = s + 1
        active = active & ~leave
    return nats, depth


def freeze(model, s, at, context, kv, just_left):
    """Before stage s of whole windows: the pairs of tokens that left, as fill leaves them. just_left (B, T): at the
    exit point before this one."""
    cache, (blocks, slot), looped = context.cache, blocks_of(model, s), model.cfg.n_loop > 1
    if looped and kv == "reuse":
        for i in range(len(blocks)):
            cache.pairs[slot + i] = cache.pairs[slot + i - len(blocks)]
        return
    x = norm(entering(model, s, at))
    for i, block in enumerate(blocks):
        pair = keys_values(block.attn, x, context.table)
        if looped and s > 1:
            pair = choose(just_left[:, None], pair, cache.pairs[slot + i - len(blocks)])
        cache.pairs[slot + i] = pair


@torch.inference_mode()
def generate(model, prompts, n_new, rule=None, kv="reuse", temperature=0.0, top_k=None, seed=0):
    """Continue prompts, lists of ids of any length, by n_new tokens each: lists of all ids and of the depths of all but
    the last. Row i draws from its own generator, seeded seed + i, so its answer does not depend on the others."""
    device, lengths = model.table.device, [len(p) for p in prompts]
    rows = [list(p) for p in prompts]
    depths = [[] for _ in prompts]
    generators = [torch.Generator(device).manual_seed(seed + i) for i in range(len(prompts))]
    cache = RowCache(model, len(prompts))
    for t in range(max(lengths) + n_new - 1):
        column = torch.tensor([row[min(t, len(row) - 1)] for row in rows], device=device)
        logits, depth = step(model, column, cache, rule, kv)
        for i, row in enumerate(rows):
            if t < lengths[i] + n_new - 1:       # a shorter row is done before the others
                depths[i].append(int(depth[i]))
                if t == len(row) - 1:
                    row.append(int(sample(logits[i:i + 1].float(), temperature, top_k, generators[i])))
    return rows, depths
