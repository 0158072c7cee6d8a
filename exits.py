"""
Early exits: a token leaves the loop as soon as its prediction is certain. This file is the mechanism: when to leave,
what later tokens find in the cache, what it saves. early_exit.py is the study.

Exit points are the loop boundaries, of an unlooped model its layers. A test takes the chosen doubt about the next
token, mostly from a readout of the state through coda, norm and head; below tau the token exits (arXiv 2605.09165:
entropy). What later tokens find in the skipped slots of the KV cache is one of three policies (--kv):

    full    keys and values of the full depth, as if the token had gone on: teacher forcing, what the paper reports.
            A bound, since nothing is saved; a coda reads exit point k as if all tokens had left there
    copy    the skipped layers project them from the exit state (CALM, arXiv 2207.07061)
    reuse   those of the last pass that ran, same layer: a loop has the same weights in every pass, so they fit

copy and reuse work one position at a time, as generation does; without a coda score_at_once gives the same for whole
windows. The coda has one cache for all tokens, whatever their depth: a token's keys there come from the state it left
with. A prompt goes through the same loop as what follows, token by token.

A stage is what runs between two exit points: a pass of the loop, or a layer of an unlooped model.

Shapes: B rows, T positions, D width, V vocabulary, S exit points, the last of which is the whole model, N tokens.
"""
import math
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from ops import norm, rotate, sample

# name of a doubt: does it look at the readout, which a test then has to pay for?
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
    (b, D) behind and before the stage."""
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
        """Put pair, k and v (.., b, H, 1, head_dim), into the slots of a loop's layer(s) in all passes behind s."""
        rows = slice(None) if self.rows is None else self.rows
        for cache, new in zip(self.loop, pair):
            cache[s + 1:, layer][..., rows, :, self.length:self.length + 1, :] = new


def n_stages(cfg):
    """S: a stage is what runs between two exit points, a pass of the loop or a layer of an unlooped model."""
    return cfg.n_loop if cfg.n_loop > 1 else cfg.n_prelude + cfg.n_recur


def stage(model, s):
    """The blocks of stage s and the slot of the first."""
    if model.cfg.n_loop > 1:
        return model.recur, model.cfg.n_prelude + s * model.cfg.n_recur
    return [[*model.prelude, *model.recur][s]], s


def begin(model, idx, context, seen=None):
    """The state (B, T, D) before the first stage: behind the prelude, which in an unlooped model is stages itself."""
    h = model.embed(idx)
    if model.cfg.n_loop > 1:
        h = through(model, model.prelude, h, context, 0, seen)
    return h


def through(model, blocks, x, context, slot, seen=None):
    """model.run; seen collects the state behind every layer as if the loop ended there, with its norm if it has one."""
    for i, block in enumerate(blocks):
        x = block(x, *context, slot + i)
        if seen is not None:
            seen.append(norm(x) if model.cfg.loop_norm else x)
    return x


def entering(model, s, e, h):
    """Input of stage s from the state h and the first one, e."""
    cfg = model.cfg
    if cfg.n_loop > 1:
        return model.combine(e, model.start(e) if s == 0 else h)
    return model.combine(h, model.start(h)) if s == cfg.n_prelude else h           # the only pass of the loop


def advance(model, s, e, h, context, seen=None):
    """One stage: (what goes on, what is read out), which differ where an unlooped model has a norm behind its loop."""
    blocks, slot = stage(model, s)
    h = through(model, blocks, entering(model, s, e, h), context, slot, seen)
    state = norm(h) if model.cfg.loop_norm else h
    return (state if model.cfg.n_loop > 1 else h), state


def read(model, s, state, context):
    """Readout of exit point s, (b, T, V). It always uses the coda's slots behind the full depth."""
    return model.logits(state, context, model.cfg.n_loop, last_pass=s == n_stages(model.cfg) - 1)


def keys_values(attn, x, table):
    """The keys and values (B, H, T, head_dim) that an attention layer makes of x (B, T, D): Attention.forward without
    the rest. Its queries are computed too, in the same product, and dropped."""
    _, k, v = (y.view(*x.shape[:2], attn.n_head, -1) for y in attn.qkv(x).chunk(3, dim=-1))
    return rotate(norm(k), table).transpose(1, 2), v.transpose(1, 2)


def fill(model, s, e, h, context, kv):
    """What later tokens find where rows that exit at s did not go: kv is copy or reuse."""
    cfg, (table, _, cache, _) = model.cfg, context
    now = slice(cache.length, cache.length + 1)
    rows = slice(None) if cache.rows is None else cache.rows
    if kv == "reuse":
        cache.skip(s, [c[s][:, rows, :, now] for c in cache.loop])
    elif cfg.n_loop > 1:                         # the state and the weights are the same in all skipped passes
        x = norm(entering(model, s + 1, e, h))
        for i, block in enumerate(model.recur):
            cache.skip(s, keys_values(block.attn, x, table), i)
    else:
        for j in range(s + 1, n_stages(cfg)):
            pair = keys_values(stage(model, j)[0][0].attn, norm(entering(model, j, e, h)), table)
            for store, new in zip(cache.slots[j], pair):
                store[rows, :, now] = new


def step(model, tokens, cache, rule=None, kv="reuse"):
    """One position of B rows, tokens (B,): logits (B, V) and the number of stages (B,) that each row went through. A
    row that exits is taken out of all that follows; without a rule none is tested."""
    S, device = n_stages(model.cfg), tokens.device
    context = (model.table[cache.length:cache.length + 1], None, cache, None)
    rows, depth = torch.arange(len(tokens), device=device), torch.full((len(tokens),), S, device=device)
    cache.only(rows)
    e = h = state = begin(model, tokens[:, None], context)
    result = earlier = None
    for s in range(S):
        before, (h, state) = state, advance(model, s, e, h, context)
        if rule is None:
            result = read(model, s, state, context)[:, 0] if s == S - 1 else None
            continue
        logits = read(model, s, state, context)[:, 0] if s == S - 1 or rule.reads else None
        if s == S - 1:
            leave = torch.ones_like(rows, dtype=torch.bool)
        else:
            leave = rule.leave(ExitPoint(s, rows, cache.length, logits, earlier, state[:, 0], before[:, 0]))
        if leave.any():
            gone = rows[leave]
            cache.only(gone)
            out = read(model, s, state[leave], context)[:, 0] if logits is None else logits[leave]
            result = out.new_empty(len(tokens), out.size(-1)) if result is None else result
            result[gone], depth[gone] = out, s + 1
            if s < S - 1:
                fill(model, s, e[leave], h[leave], context, kv)
            rows = rows[~leave]
            if not len(rows):
                break
            cache.only(rows)
            e, h, state, logits = (None if x is None else x[~leave] for x in (e, h, state, logits))
        earlier = logits
    cache.length += 1
    return result, depth
# --- end exit ---


# --- cost ---
def costs(cfg):
    """FLOPs per token at full context, as Config.flops_per_token counts them: base (prelude), each stage, each readout
    (coda and head), copy (keys and values of what was skipped: once for a loop, else for each stage), full = all."""
    def flops(n_loop, readouts=1):
        return cfg.flops_per_token(n_loop, train=False, readouts=readouts)
    n, D, looped = cfg.param_counts(active=True), cfg.n_embd, cfg.n_loop > 1
    full, readout = flops(cfg.n_loop), flops(cfg.n_loop, 2) - flops(cfg.n_loop)
    stage = flops(2) - flops(1) if looped else 2 * n["recurrent"] // cfg.n_recur + 4 * D * cfg.block_size
    return {"base": full - n_stages(cfg) * stage - readout, "stage": stage, "readout": readout, "full": full,
            "copy": 6 * D * D * (cfg.n_recur if looped else 1) + looped * 2 * n["injection"],
            "stages": n_stages(cfg), "looped": looped}


def saved(c, depth, tests, kv="reuse"):
    """Share of the FLOPs of the full model that tokens exiting at depth (N,) save, three ways. layers: as the paper
    counts, the blocks alone. head: with the one readout that every token needs. charged: also every test's readout
    (tests: does a test need one?) and the projections of copy."""
    depth = depth.double()
    skipped = c["stages"] - depth
    extra = (depth - 1) * c["readout"] if tests else torch.zeros_like(depth)
    if kv == "copy":
        extra = extra + c["copy"] * ((skipped > 0) if c["looped"] else skipped)
    less = skipped * c["stage"]
    return {"layers": (less.mean() / (c["full"] - c["readout"])).item(), "head": (less.mean() / c["full"]).item(),
            "charged": ((less - extra).mean() / c["full"]).item()}


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
        self.pairs[slot] = [torch.where(self.active, new, kept) for new, kept in zip((k, v), old)]
        return self.pairs[slot]


@torch.inference_mode()
def score_at_once(model, x, y, rule, kv="reuse"):
    """What score_by_step gives, for a model without a coda, stage by stage over whole windows, several times as fast.
    It is exact because the keys that stage s of a token sees depend on earlier tokens' stages up to s only; a coda
    would see the state each of them leaves with, later in this order."""
    S, cfg, cache = n_stages(model.cfg), model.cfg, Merged()
    table, mask, *_ = model.context(x, cfg.n_loop, None)
    context = (table, mask, cache, None)
    active, cache.active = torch.ones_like(x, dtype=torch.bool), torch.ones((), dtype=torch.bool, device=x.device)
    nats, depth = torch.empty(x.shape, device=x.device), torch.full_like(x, S)
    rows, positions = torch.arange(len(x), device=x.device)[:, None], torch.arange(x.size(1), device=x.device)
    e = h = state = begin(model, x, context)
    earlier = None
    for s in range(S):
        cache.active = active[:, None, :, None]
        if s and cfg.n_loop > 1 and kv == "reuse":
            for slot in range(cfg.n_prelude + s * cfg.n_recur, cfg.n_prelude + (s + 1) * cfg.n_recur):
                cache.pairs[slot] = cache.pairs[slot - cfg.n_recur]
        elif s:
            frozen = norm(entering(model, s, e, h))
            for i, block in enumerate(stage(model, s)[0]):
                cache.pairs[stage(model, s)[1] + i] = keys_values(block.attn, frozen, table)
        before, (new, read_out) = state, advance(model, s, e, h, context)
        h, state = (torch.where(active[..., None], a, b) for a, b in ((new, h), (read_out, state)))
        logits, leave = read(model, s, state, context) if rule.reads and s < S - 1 else None, active
        if s < S - 1:
            leave = active & rule.leave(ExitPoint(s, rows, positions, logits, earlier, state, before))
        if leave.any():
            out = read(model, s, state[leave][None], context)[0] if logits is None else logits[leave]
            nats[leave] = F.cross_entropy(out.float(), y[leave], reduction="none")
            depth[leave] = s + 1
        active, earlier = active & ~leave, logits
    return nats, depth


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
