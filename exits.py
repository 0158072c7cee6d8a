"""
Early exits: a token leaves the loop as soon as its prediction is certain. This file is the mechanism: when to leave,
what later tokens find in the cache. exit_cost.py says what it saves; early_exit.py is the study.

Exit points are the loop boundaries, of an unlooped model its layers. A test asks how much the model doubts the next
token, mostly from a readout of the state through coda, norm and head; below tau the token exits (arXiv 2605.09165:
entropy). What later tokens find in the skipped slots of the KV cache is one of three policies (--kv):

    full    keys and values of the full depth, as if the token had gone on: teacher forcing, what the paper reports.
            A bound, since nothing is saved; a coda reads exit point k as if all tokens had left there
    copy    the skipped layers project them from the exit state, as the next pass would (CALM, arXiv 2207.07061)
    reuse   those of the last pass that ran, same layer: a loop has the same weights in every pass, so they fit

copy and reuse work one position at a time, as generation does; score_at_once gives the same for whole windows, without
a coda or where no test looks at its readout. The coda has one cache for all tokens, whatever their depth: a token's
keys there come from the state it exits with. A prompt goes through the same loop as what follows, token by token.

A stage is what runs between two exit points: a pass of the loop, or a layer of an unlooped model.

Shapes: B rows, T positions, D width, V vocabulary, S exit points, the last of which is the whole model, N tokens.
"""
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from lib.ops import norm, rotate, sample
from model import LoopedLM

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
class Rule(NamedTuple):
    """When to exit. leave(s, rows, position, at, before) tells which tokens exit at point s (0 .. S - 2), bool (b, T).
    before and at (InLoop) are these tokens before and after stage s; rows (b, 1) and position ((T,) or an int) say
    which of all tokens they are."""
    reads: bool                                  # does leave look at the logits? If so each test pays a readout
    leave: Callable


def exit_below(criterion, tau):
    """Exit where the doubt is below tau."""
    def leave(s, rows, position, at, before):
        return doubt(criterion, at.logits, before.logits, at.state, before.state) < tau
    return Rule(CRITERIA[criterion], leave)


def exit_at(depth, reads=False):
    """Exit at depth (B, T), 1 .. S. reads: compute and discard the entropy, as a test would."""
    def leave(s, rows, position, at, before):
        if reads:
            entropy(at.logits.log_softmax(-1)).tolist()
        return depth[rows, position] == s + 1
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
    logits: torch.Tensor | None = None           # the readout there (b, T, V), where one was made

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
    return InLoop(at.e, x, model.read(model.finish(at.e, model.start(at.e), x, 0)))


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


# --- the cache ---
class RowCache:
    """model.KVCache for rows that leave the loop one by one: rows names those at work (None: all). Keys and values
    (slot, B, H, T, head_dim), slots numbered as a token meets them; the coda's come after those of n_loop passes."""

    def __init__(self, model, batch_size):
        cfg, device = model.cfg, model.table.device
        shape = (cfg.depth(), batch_size, cfg.n_head, cfg.block_size, cfg.n_embd // cfg.n_head)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=model.embed.weight.dtype) for _ in "kv")
        self.slots = list(zip(self.k, self.v))   # views made once: an indexing call a layer is time, too
        self.n_loop, self.length, self.size, self.rows = cfg.n_loop, 0, batch_size, None
        inside = slice(cfg.n_prelude, cfg.n_prelude + cfg.n_loop * cfg.n_recur)
        self.loop = [c[inside].view(cfg.n_loop, cfg.n_recur, *shape[1:]) for c in (self.k, self.v)]

    def only(self, rows):
        self.rows = None if len(rows) == self.size else rows

    def update(self, slot, k, v):
        """Store k, v (b, H, 1, head_dim) of the rows at work; returns theirs so far (b, H, length + 1, head_dim)."""
        t, pair = self.length, []
        for cache, new in zip(self.slots[slot], (k, v)):
            past = cache[:, :, :t + 1]
            if self.rows is None:
                past[:, :, t:] = new
                pair.append(past)
            else:
                cache[self.rows, :, t:t + 1] = new
                pair.append(past.index_select(0, self.rows))
        return pair

    def skip(self, s, pair, layer=slice(None)):
        """Put pair, k and v (.., b, H, 1, head_dim), into the slots of a loop's layer(s) in all passes after s."""
        rows = slice(None) if self.rows is None else self.rows
        for cache, new in zip(self.loop, pair):
            cache[s + 1:, layer][..., rows, :, self.length:self.length + 1, :] = new


class Recorder:
    """Stands for a cache, to see the keys and values of a layer that a trick has changed."""
    def update(self, slot, k, v):
        self.pair = k, v
        return k, v


def project(model, s, at, context):
    """[(k, v), ...], keys and values (b, H, T, head_dim) that the layers of stage s, which is skipped, make of its
    input: Attention.forward without the rest. The queries are computed too, in the same product, and dropped."""
    cfg, pairs = model.cfg, []
    x = entering(model, s, at)
    looped, first = cfg.n_loop > 1, s - cfg.n_prelude
    blocks = model.recur if looped else [[*model.prelude, *model.recur][s]]
    own_layers = type(model).layer is not LoopedLM.layer and (looped or first >= 0)
    normed = norm(x)
    for i, block in enumerate(blocks):
        if own_layers:
            recorder = Recorder()
            model.layer(x, i if looped else first, s if looped else 0, context._replace(cache=recorder))
            pairs.append(recorder.pair)
            continue
        _, k, v = (y.view(*x.shape[:2], cfg.n_head, -1) for y in block.attn.qkv(normed).chunk(3, dim=-1))
        k = rotate(norm(k.to(context.table.dtype)), context.table).to(v.dtype)
        pairs.append((k.transpose(1, 2), v.transpose(1, 2)))
    return pairs


def fill(model, s, at, context, kv):
    """What later tokens find where rows that exit at s did not go: kv is copy or reuse."""
    cache = context.cache
    now = slice(cache.length, cache.length + 1)
    rows = slice(None) if cache.rows is None else cache.rows
    if kv == "reuse":
        cache.skip(s, [c[s][:, rows, :, now] for c in cache.loop])
    elif model.cfg.n_loop > 1:                   # those of the next pass, in all the skipped ones
        for i, pair in enumerate(project(model, s + 1, at, context)):
            cache.skip(s, pair, i)
    else:
        for later in range(s + 1, n_stages(model.cfg)):
            (pair,) = project(model, later, at, context)
            for store, new in zip(cache.slots[later], pair):
                store[rows, :, now] = new


def step(model, tokens, cache, rule=None, kv="reuse"):
    """One position of B rows, tokens (B,): logits (B, V) and the number of stages (B,) that each row went through. A
    row that exits is taken out of all that follows; without a rule none is tested."""
    S, t = n_stages(model.cfg), cache.length
    context = model.context(tokens[:, None], model.cfg.n_loop, cache)
    rows = torch.arange(len(tokens), device=tokens.device)                         # the rows still in the loop, b of B
    depth = torch.full_like(rows, S)
    logits = model.embed.weight.new_empty(len(tokens), model.cfg.vocab_size)
    cache.only(rows)
    at = begin(model, tokens[:, None], context)
    for s in range(S - 1):
        before, at = at, advance(model, s, at, context)
        if rule is None:
            continue
        if rule.reads:
            at.logits = read(model, s, at.state, context)
        leave = rule.leave(s, rows[:, None], t, at, before)[:, 0]
        if leave.any():
            exits, at_exit = rows[leave], at[leave]
            cache.only(exits)
            if not rule.reads:                   # a test without a readout: only the rows that exit need one
                at_exit.logits = read(model, s, at_exit.state, context)
            logits[exits], depth[exits] = at_exit.logits[:, 0], s + 1
            fill(model, s, at_exit, context, kv)
            rows, at = rows[~leave], at[~leave]
            cache.only(rows)
            if not len(rows):
                break
    if len(rows):
        at = advance(model, S - 1, at, context)
        logits[rows] = read(model, S - 1, at.state, context)[:, 0]
    cache.length += 1
    return logits, depth
# --- end exit ---


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


def choose(mask, new, old):
    """[new where the mask holds, else old] of two lists of tensors; the mask gets the axes that it lacks."""
    return [torch.where(mask.view(*mask.shape, *[1] * (a.ndim - mask.ndim)), a, b) for a, b in zip(new, old)]


class Merged:
    """A cache for whole windows at once: where a position is not active, it keeps the pair that was put there."""

    def __init__(self):
        self.pairs, self.active = {}, None       # slot: keys and values (B, H, T, head_dim); (B, 1, T, 1)

    def update(self, slot, k, v):
        if slot in self.pairs:
            k, v = choose(self.active, (k, v), self.pairs[slot])
        self.pairs[slot] = k, v
        return k, v


@torch.inference_mode()
def score_at_once(model, x, y, rule, kv="reuse"):
    """What score_by_step gives, stage by stage over whole windows, several times as fast."""
    logits, depth = run_at_once(model, x, rule, kv)
    return F.cross_entropy(logits.float().transpose(1, 2), y, reduction="none"), depth


@torch.inference_mode()
def run_at_once(model, x, rule, kv="reuse"):
    """Logits (B, T, V) and depths (B, T) of windows x (B, T), as step gives them: for a model without a coda, or a rule
    that looks at no readout. It is exact because the keys that stage s of a token sees depend on earlier tokens' stages
    up to s only. A coda's readout sees the state with which each of them exits, later in this order."""
    cfg, S, cache = model.cfg, n_stages(model.cfg), Merged()
    whole = model.context(x, cfg.n_loop, None)
    context = whole._replace(cache=cache)
    depth, active = torch.full_like(x, S), torch.ones_like(x, dtype=torch.bool)    # active: tokens still in the loop
    rows, positions = torch.arange(len(x), device=x.device)[:, None], torch.arange(x.size(1), device=x.device)
    at = begin(model, x, context)
    for s in range(S):
        cache.active = active[:, None, :, None]
        if s:
            freeze(model, s, at, context, kv, just_left=depth == s)
        before, new = at, advance(model, s, at, context)
        at = InLoop(*choose(active, (new.e, new.h, new.state), (at.e, at.h, at.state)))
        if s == S - 1:
            break
        if rule.reads:
            at.logits = read(model, s, at.state, context)
        leave = active & rule.leave(s, rows, positions, at, before)
        depth[leave] = s + 1
        active = active & ~leave
    logits = read(model, S - 1, at.state, whole)
    if cfg.readout == "final":                   # an exit before the last is read without the norm
        logits, = choose(depth == S, [logits], [read(model, 0, at.state, whole)])
    return logits, depth


def freeze(model, s, at, context, kv, just_left):
    """Before stage s of whole windows: the pairs of tokens that left, as fill leaves them. just_left (B, T): at the
    exit point before this one."""
    cfg, pairs = model.cfg, context.cache.pairs
    if cfg.n_loop == 1:
        (pairs[s],) = project(model, s, at, context)
        return
    n, slot = cfg.n_recur, cfg.n_prelude + s * cfg.n_recur
    if kv == "reuse":
        for i in range(slot, slot + n):
            pairs[i] = pairs[i - n]
        return
    for i, pair in enumerate(project(model, s, at, context), slot):
        pairs[i] = pair if s == 1 else choose(just_left[:, None], pair, pairs[i - n])


@torch.inference_mode()
def generate(model, prompts, n_new, rule=None, kv="reuse", temperature=0.0, *, top_k=None, seed=0):
    """Continue prompts, lists of ids of any length, by n_new tokens each: lists of all ids and of the depths of all but
    the last. Row i draws from its own generator, seeded seed + i, so its answer does not depend on the others."""
    device, lengths = model.table.device, [len(p) for p in prompts]
    rows, depths = [list(p) for p in prompts], [[] for _ in prompts]
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
