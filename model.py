"""
A looped language model: one block of layers runs r times, where a plain transformer has r different blocks.

    e = prelude(embed(tokens))                 n_prelude blocks, run once
    h = e
    for k in 1..n_loop:                        n_loop = r, may differ from training at inference
        h = blocks(inject(e, h))               the same n_recur blocks in every pass
        h = norm(h)                            if loop_norm: keeps the scale out of the recurrence
        H_k = h                                a loop boundary: a place to read out, to exit, to measure
    logits = head(norm(coda(h)))               n_coda blocks, run once

With n_loop = 1, inject = none and loop_norm = False this is a plain pre-norm decoder. What differs from GPT-2: rotary
positions instead of learned ones, queries and keys are normalised, SwiGLU instead of GELU, RMSNorm without gain (a gain
would fold into the matrix that follows), no biases, no dropout, embedding and head are separate matrices.

Shapes: B batch, T time, D width, H heads, V vocabulary, K = n_loop passes.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from lib.ops import Linear, attend, check_sampling, norm, rotary_table, rotate, sample
from moe import BALANCE, Mixture, Routing, Z


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def ff_width(n_embd):
    return round_up(math.ceil(8 * n_embd / 3), 64)


CHOICES = {"inject": ("none", "add", "linear"), "readout": ("norm", "raw", "final"), "balance": ("loss", "bias")}


@dataclass
class Config:
    vocab_size: int = 4096    # V, as the tokenizer has it; the matrices are padded to a multiple of 64
    block_size: int = 256     # context length T in tokens
    n_embd: int = 192         # width D
    n_head: int = 3           # attention heads; D / n_head must be even, since rotary positions turn pairs
    n_prelude: int = 1        # blocks before the loop, run once
    n_recur: int = 1          # blocks inside the loop, shared by all passes
    n_coda: int = 1           # blocks after the loop, run once
    n_loop: int = 4           # passes r through the loop; 1, with inject=none: a plain transformer
    inject: str = "linear"    # what a pass gets: none (h) | add (e + h) | linear (W [e; h])
    loop_norm: bool = True    # RMSNorm at the end of every pass
    readout: str = "norm"     # norm before the head: norm (always) | raw (never) | final (at the last pass only)
    n_expert: int = 0         # experts E in every feed-forward layer (moe.py); 0: dense layers
    n_active: int = 2         # experts k that a token takes, each 1/k as wide as the dense layer: equal FLOPs
    balance: str = "loss"     # keeps experts in use: loss (over each micro-batch of a process) | bias (over the step)
    tied: bool = False        # the head uses the embedding's matrix, drawn from N(0, 1)
    mup_base: int = 0         # muP: the width at which the learning rate was tuned; 0: off

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_embd", "n_head", "n_recur", "n_loop"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("n_prelude", "n_coda"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} over n_head={self.n_head}: the width of a head must be a whole, "
                             f"even number, since rotary positions turn pairs of channels")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)}: choose one of {', '.join(choices)}")
        if self.mup_base < 0:
            raise ValueError(f"mup_base={self.mup_base}: must not be negative; 0 turns muP off")
        if self.mup_base and self.tied:
            raise ValueError("tied with mup_base: under muP embedding and head have different scales; drop one of them")
        if self.n_expert < 0 or self.n_expert == 1:
            raise ValueError(f"n_expert={self.n_expert}: a mixture needs at least 2 experts; 0 is a dense layer")
        if self.n_expert and not 1 <= self.n_active <= self.n_expert:
            raise ValueError(f"n_active={self.n_active} of n_expert={self.n_expert}: a token takes at least one expert "
                             f"and at most all of them")
        if self.n_expert and self.d_ff % self.n_active:
            raise ValueError(f"n_active={self.n_active}: must divide the hidden width {self.d_ff}")

    @property
    def d_ff(self):           # SwiGLU has three matrices, so 8D/3 costs what 4D costs with two
        return ff_width(self.n_embd)

    @property
    def padded_vocab(self):   # matmuls like multiples of 64; the padding is never a target and never sampled
        return round_up(self.vocab_size, 64)

    def depth(self, n_loop=None):
        """Effective depth L_eff in blocks: what a token passes through."""
        passes = self.n_loop if n_loop is None else n_loop
        return self.n_prelude + passes * self.n_recur + self.n_coda

    # --- muP ---
    @property
    def width_ratio(self):
        """w: learning rate and init variance of every matrix but the embedding go with 1/w; 1 where muP is off."""
        return self.n_embd / self.mup_base if self.mup_base else 1.0

    @property
    def attention_scale(self):
        """Factor of the attention scores: 1/sqrt(head_dim), under muP 8/head_dim, which is the same at the paper's
        head_dim of 64. The paper's 1/head_dim would bound the scores by 1, since queries and keys are normalised here:
        almost uniform attention (results/moe.md)."""
        head_dim = self.n_embd // self.n_head
        return 8 / head_dim if self.mup_base else head_dim ** -0.5

    def mup_std(self, name):
        """Initial standard deviation of a matrix, by its sizes at the base width d: sqrt(2 / (fan_in + fan_out)) /
        sqrt(w). Experts count as wide as the dense layer they divide (arXiv 2605.09165, published code)."""
        other = {"head": self.padded_vocab, "router": self.n_expert, "qkv": self.mup_base, "proj": self.mup_base}
        fan = other.get(name.split(".")[-2], ff_width(self.mup_base))              # the side that is not d
        return (2 / (self.mup_base + fan) / self.width_ratio) ** 0.5
    # --- end muP ---


class KVCache:
    """Keys and values of past tokens, one slot per (layer, pass): a looped layer makes different keys in every pass, so
    r passes need r slots. Slots are numbered in the order in which a token meets them, 0 .. L_eff - 1."""

    def __init__(self, cfg, batch_size, n_loop):
        self.n_loop, self.length = n_loop, 0     # length: tokens stored so far
        self.shape = (batch_size, cfg.n_head, cfg.block_size, cfg.n_embd // cfg.n_head)
        self.k, self.v = ([None] * cfg.depth(n_loop) for _ in "kv")

    def update(self, slot, k, v):
        """Store k, v (B, H, T, head_dim) after the past ones; returns all of them (B, H, length + T, head_dim)."""
        if self.k[slot] is None:                 # allocated when first used, in the precision that arrives
            self.k[slot], self.v[slot] = k.new_zeros(self.shape), v.new_zeros(self.shape)
        end = self.length + k.size(2)
        self.k[slot][:, :, self.length:end] = k
        self.v[slot][:, :, self.length:end] = v
        return self.k[slot][:, :, :end], self.v[slot][:, :, :end]


class Context(NamedTuple):
    """What every block needs besides its input."""
    table: torch.Tensor                          # rotary table at these positions (T, head_dim/2, 2)
    mask: torch.Tensor | None = None             # additive (T, length + T); None for a single query
    cache: KVCache | None = None
    routing: Routing | None = None               # notes of the routers, or the experts they have to take
    n_loop: int = 0                              # passes of this run, which may differ from those in training


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.scale = cfg.n_head, cfg.attention_scale
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, context, slot):
        B, T, D = x.shape
        qk, v = self.qkv(x).split([2 * D, D], dim=-1)
        qk = qk.reshape(B, T, 2 * self.n_head, -1).to(context.table.dtype)
        qk = rotate(norm(qk), context.table).to(v.dtype)                           # QK-norm bounds the scores
        q, k = qk.transpose(1, 2).chunk(2, dim=1)                                  # (B, H, T, head_dim) each
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.update(slot, k, v)
        y = attend(q, k, v, context.mask, self.scale)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    def __init__(self, n_embd, hidden):
        super().__init__()
        self.gate = Linear(n_embd, hidden)
        self.value = Linear(n_embd, hidden)
        self.down = Linear(hidden, n_embd)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.value(x))


class Block(nn.Module):
    """Two residual branches. slot: where this layer, in this pass, keeps its keys and values in a cache."""

    def __init__(self, cfg):
        super().__init__()
        D, E, k = cfg.n_embd, cfg.n_expert, cfg.n_active
        self.attn = Attention(cfg)
        self.sparse = E > 0
        if self.sparse:
            self.ffn = Mixture(Linear(D, E), [SwiGLU(D, cfg.d_ff // k) for _ in range(E)], k, cfg.balance)
        else:
            self.ffn = SwiGLU(D, cfg.d_ff)

    def attention(self, x, context, slot):
        return self.attn(norm(x), context, slot)

    def feed_forward(self, x, context, slot):
        return self.ffn(norm(x), context.routing, slot) if self.sparse else self.ffn(norm(x))

    def forward(self, x, context, slot):
        x = x + self.attention(x, context, slot)
        return x + self.feed_forward(x, context, slot)


class LoopedLM(nn.Module):
    """The model. A trick is a subclass (tricks/README.md): it overrides some of the five methods that say what the loop
    is (start, combine, layer, finish, read), and the counts or the schedule where it changes them."""
    requires = {}                                # flags of train.py that a trick needs, such as {"inject": "none"}

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        D = cfg.n_embd
        self.embed = nn.Embedding(cfg.padded_vocab, D)
        self.prelude = nn.ModuleList(Block(cfg) for _ in range(cfg.n_prelude))
        self.recur = nn.ModuleList(Block(cfg) for _ in range(cfg.n_recur))
        self.coda = nn.ModuleList(Block(cfg) for _ in range(cfg.n_coda))
        self.inject = Linear(2 * D, D) if cfg.inject == "linear" else None
        self.head = Linear(D, cfg.padded_vocab)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("table", rotary_table(cfg.block_size, D // cfg.n_head), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw the matrices made so far. What a trick adds after super().__init__ stays as the trick made it."""
        for name, p in self.named_parameters():
            if name == "embed.weight":
                p.normal_(0, 1)                  # unit scale, like every state after a loop norm
            elif self.cfg.mup_base and name != "inject.weight":
                std = self.cfg.mup_std(name)
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
            elif name == "head.weight":
                p.normal_(0, 0.001)              # first predictions are uniform: the loss starts at ln V
            elif name == "inject.weight":        # [I | 0]: before training a pass sees e, not h
                p.copy_(torch.eye(*p.shape))
            else:                                # keeps the scale; residual branches share one unit of variance
                branch = name.endswith(("proj.weight", "down.weight"))
                p.normal_(0, p.size(1) ** -0.5 * ((2 * self.cfg.depth()) ** -0.5 if branch else 1))

    # --- counts ---
    @classmethod
    def param_counts(cls, cfg, active=False):
        """Stored parameters by group; the groups sum to the model's numel(). once + recurrent + injection is the
        paper's unique non-embedding N: 240, 146, 98, 74 D^2 for r = 1, 2, 4, 8 at depth 20 (arXiv 2604.21106). A trick
        adds its own to the injection. active: those that work on one token, n_active of n_expert, which are as many as
        in the dense model; the routers, D n_expert each, are stored but not counted as active (arXiv 2605.09165)."""
        D = cfg.n_embd
        block = 4 * D * D + 3 * D * cfg.d_ff
        if cfg.n_expert and not active:
            block = 4 * D * D + cfg.n_expert * 3 * D * (cfg.d_ff // cfg.n_active) + D * cfg.n_expert
        return {"embedding": cfg.padded_vocab * D,
                "once": (cfg.n_prelude + cfg.n_coda) * block,                      # N_once
                "recurrent": cfg.n_recur * block,                                  # N_rec, without the injection
                "injection": 2 * D * D if cfg.inject == "linear" else 0,
                "head": 0 if cfg.tied else cfg.padded_vocab * D}

    @classmethod
    def layer_flops(cls, cfg):
        """Forward FLOPs of one block per token: 2 per multiply-add, attention over all T keys (no causal halving)."""
        return 8 * cfg.n_embd ** 2 + 6 * cfg.n_embd * cfg.d_ff + 4 * cfg.n_embd * cfg.block_size

    @classmethod
    def combine_flops(cls, cfg):
        """Forward FLOPs of the injection per token and pass."""
        return 4 * cfg.n_embd ** 2 if cfg.inject == "linear" else 0

    @classmethod
    def pass_flops(cls, cfg, k):
        """Forward FLOPs of pass k per token: its blocks and the injection. A trick adds its own here."""
        return cls.combine_flops(cfg) + cfg.n_recur * cls.layer_flops(cfg)

    @classmethod
    def flops_per_token(cls, cfg, n_loop=None, train=True, bptt=0, readouts=1):
        """FLOPs per token at full context; shared parameters count once per pass, the backward pass twice the forward
        one, through the last bptt passes (0: all of them). readouts: how often coda and head run, n_loop times under a
        per-loop loss. Embedding lookups, norms, activations and routers are not counted (arXiv 2604.21106, sec. 4:
        F = 6 (once + V D + r (rec + inj)) + 12 L_eff D T)."""
        r = cfg.n_loop if n_loop is None else n_loop
        layer, passes = cls.layer_flops(cfg), [cls.pass_flops(cfg, k) for k in range(r)]
        head = 2 * cfg.padded_vocab * cfg.n_embd
        once = cfg.n_prelude * layer + readouts * (cfg.n_coda * layer + head)
        forward = once + sum(passes)
        backward = 2 * (once + sum(passes[-bptt:]))
        return forward + backward if train else forward
    # --- end counts ---

    @classmethod
    def schedule(cls, cfg, step, max_steps):
        """What a trick changes from one training step to the next: {"n_loop": ..., "bptt": ...}, or a part of it."""
        return {}

    @classmethod
    def loop_rates(cls, cfg):
        """Two factors for the matrices that the passes share: of their learning rate, and of their weight decay."""
        return 1.0, 1.0

    # --- loop ---
    def encode(self, idx, context):
        """The prelude's output e (B, T, D) of tokens idx (B, T)."""
        return self.run(self.prelude, self.embed(idx), context, 0)

    def start(self, e):
        """The state before the first pass, batch first: here h (B, T, D), which a trick may replace by more."""
        return torch.zeros_like(e) if self.cfg.inject == "add" else e

    def combine(self, e, h, k):
        """Input (B, T, D) of the blocks in pass k = 0 .. r - 1, from e and the state. The first pass gets e under every
        rule: h(0) is e, or 0 for add; the linear map starts as [I | 0] (arXiv 2604.21106, sec. 3)."""
        if self.cfg.inject == "none":
            return h
        if self.cfg.inject == "add":
            return e + h
        return self.inject(torch.cat([e, h], dim=-1)).to(e.dtype)                  # the state stays fp32 under autocast

    def layer(self, x, i, k, context):
        """Block i of the loop in pass k, x (B, T, D) to x."""
        return self.recur[i](x, context, self.slot(i, k))

    def slot(self, i, k):
        """Where block i of the loop keeps its keys and values of pass k."""
        return self.cfg.n_prelude + k * self.cfg.n_recur + i

    def finish(self, e, h, x, k):
        """The state after pass k, from e, the state h before it and what its blocks made, x (B, T, D)."""
        return norm(x) if self.cfg.loop_norm else x

    def read(self, h):
        """What is read out of a state: H_k (B, T, D)."""
        return h

    def one_pass(self, e, h, k, context):
        """The state after pass k from the state h before it. Training, generation, exits and the readout study loop
        through here; early_exit.layer_states repeats it to look inside a pass."""
        x = self.combine(e, h, k)
        for i in range(self.cfg.n_recur):
            x = self.layer(x, i, k, context)
        return self.finish(e, h, x, k)

    def loop_states(self, idx, context, n_loop, bptt=0):
        """Tokens idx (B, T) to [H_1 .. H_K], what is read at each loop boundary. bptt > 0: gradients flow only through
        the last bptt passes; the state before them is a constant (arXiv 2604.21106, interventions)."""
        e = self.encode(idx, context)
        h = self.start(e)
        states = []
        for k in range(n_loop):
            within_reach = bptt == 0 or k >= n_loop - bptt
            with torch.set_grad_enabled(torch.is_grad_enabled() and within_reach):
                h = self.one_pass(e, h, k, context)
                states.append(self.read(h))
        return states
    # --- end loop ---

    def run(self, blocks, x, context, slot):
        """x (B, T, D) through blocks, of which the first has this slot in the cache."""
        for i, block in enumerate(blocks):
            x = block(x, context, slot + i)
        return x

    def logits(self, h, context, n_loop, last_pass=True, last=0):
        """Turn H_k (B, T, D) into logits (B, T, V) through the coda, or (B, last, V) at the last positions only."""
        h = self.run(self.coda, h, context, self.cfg.n_prelude + n_loop * self.cfg.n_recur)
        if last:
            h = h[:, -last:]
        if self.cfg.readout == "norm" or (self.cfg.readout == "final" and last_pass):
            h = norm(h)
        logits = self.head(h)
        return logits if logits.size(-1) == self.cfg.vocab_size else logits[..., :self.cfg.vocab_size]

    def context(self, idx, n_loop, cache, routing=None):
        """The Context of tokens idx (B, T). Refuses what cannot be run, with a sentence."""
        T, past = idx.size(1), cache.length if cache else 0
        if n_loop < 1:
            raise ValueError(f"n_loop={n_loop}: must be at least 1")
        if cache and cache.n_loop != n_loop:
            raise ValueError(f"n_loop={n_loop}, but the cache was made for {cache.n_loop} passes: make a new cache")
        if past + T > self.cfg.block_size:
            raise ValueError(f"{past} cached + {T} new tokens exceed block_size={self.cfg.block_size}: "
                             f"shorten the input or start a new cache")
        mask = None
        if T > 1:
            mask = torch.full((T, past + T), -torch.inf, device=idx.device, dtype=self.compute_dtype()).triu(past + 1)
        table = self.table[past:past + T]
        table = table.to(torch.promote_types(table.dtype, torch.float32))          # of a model in bfloat16, too
        return Context(table, mask, cache, routing, n_loop)

    def compute_dtype(self):
        device = self.table.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype

    def forward(self, idx, targets=None, *, n_loop=None, cache=None, loss="terminal", norm_penalty=0.0, bptt=0,
                routing=None):
        """idx, targets (B, T) of token ids; n_loop passes (default: as trained).
        Without targets: logits (B, 1, V) of the last position, and None. With targets: logits (B, T, V) of the last
        pass, and a dict: "ce" the cross-entropy in nats of each supervised pass (the last one, or all K of them with
        loss="per_loop"), "norm" (K,) the mean Euclidean length of H_k, and "loss", the objective: mean of ce plus
        norm_penalty times the mean square of H_k over passes, tokens, channels (arXiv 2606.24898, sec. 3). With
        experts also "balance" and "z", the router losses averaged over (layer, pass), which "loss" includes and "ce"
        never does, and "load" (L_eff, E), assignments per expert; routing: a moe.Routing to keep or direct choices.
        bptt: see loop_states."""
        if loss not in ("terminal", "per_loop"):
            raise ValueError(f"loss={loss}: choose terminal or per_loop")
        if bptt and loss == "per_loop":
            raise ValueError("bptt with loss=per_loop: the early readouts would train nothing but the head")
        if targets is not None and cache:
            raise ValueError("targets and a cache: the loss is computed on whole windows, without a cache")
        K = self.cfg.n_loop if n_loop is None else n_loop
        if self.cfg.n_expert and routing is None and targets is not None:
            routing = Routing()
        context = self.context(idx, K, cache, routing)
        states = self.loop_states(idx, context, K, bptt)
        if targets is None:
            logits = self.logits(states[-1], context, K, last=1)
            if cache:
                cache.length += idx.size(1)      # only now: every slot has stored these tokens
            return logits, None
        ce = []
        for k in range(K) if loss == "per_loop" else [K - 1]:
            logits = self.logits(states[k], context, K, last_pass=k == K - 1)
            ce.append(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))
        ce = torch.stack(ce)
        objective = ce.mean()
        if norm_penalty:
            objective = objective + norm_penalty * torch.stack([h.square().mean() for h in states]).mean()
        router = routing.losses() if self.cfg.n_expert else {}
        if router:
            objective = objective + (BALANCE * router["balance"] if self.cfg.balance == "loss" else 0) + Z * router["z"]
        with torch.no_grad():
            length = torch.stack([h.float().norm(dim=-1).mean() for h in states])
        return logits, {"loss": objective, "ce": ce, "norm": length, **router}

    def rebalance(self, load):
        """For balance="bias", after an optimizer step: load (L_eff, E) as forward gives it, summed over the batches of
        the step. A layer has one bias for all its passes, so their loads are added up."""
        first, last = self.cfg.n_prelude, len(load) - self.cfg.n_coda
        loop = load[first:last].view(-1, self.cfg.n_recur, self.cfg.n_expert).sum(0)
        load = torch.cat([load[:first], loop, load[last:]])                        # (layers, E)
        for block, assignments in zip(self.blocks(), load):
            block.ffn.rebalance(assignments)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, *, n_loop=None, use_cache=True,
                 generator=None):
        """Continue idx (B, T) by max_new_tokens tokens; temperature 0 is greedy. Contexts longer than block_size are
        cut from the left: a prompt to its last block_size tokens; after that, each time the window is full, it
        restarts from its last half, so that the cache is rebuilt once per block_size / 2 tokens."""
        new = self.stream(idx, max_new_tokens, temperature, top_k, n_loop=n_loop, use_cache=use_cache,
                          generator=generator)
        return torch.cat([idx, *new], dim=1)     # an ordinary tensor again

    @torch.inference_mode()                      # without autograd's bookkeeping a token takes 0.83 of the time
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, *, n_loop=None, use_cache=True, generator=None):
        """The new tokens of generate, (B, 1) each, as they come."""
        check_sampling(temperature, top_k)
        if idx.size(1) < 1:
            raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
        K, size = self.cfg.n_loop if n_loop is None else n_loop, self.cfg.block_size
        start, cache = max(0, idx.size(1) - size), None
        for _ in range(max_new_tokens):
            if idx.size(1) - start > size:
                start, cache = idx.size(1) - max(1, size // 2), None
            if use_cache and cache is None:
                cache = KVCache(self.cfg, idx.size(0), K)
            logits, _ = self(idx[:, start + (cache.length if cache else 0):], n_loop=K, cache=cache)
            token = sample(logits[:, -1].float(), temperature, top_k, generator)
            idx = torch.cat([idx, token], dim=1)
            yield token

    # --- compile ---
    def blocks(self):
        return [*self.prelude, *self.recur, *self.coda]

    def compile_blocks(self):
        """torch.compile each block and leave the loop to Python: n_loop may vary without recompiling, and the names in
        the state dict stay as they are."""
        for block in self.blocks():
            block.compile()

    def compile_nothing(self):
        """Back to eager code, as cached decoding wants: its shapes change with every token."""
        for block in self.blocks():
            block._compiled_call_impl = None
