"""
First keys: every pass attends to the keys and values that the same block made in the first pass; only the queries are
made anew. This saves 4 D^2 FLOPs per token and block in each later pass, and the loop's share of the cache is 1 / r as
large: the slots of later passes stay empty. A token that exits early leaves no gap in the cache. The state holds h and
the keys and values of every block. A model trained with one pass is a plain one. Under --bptt the first pass is a
constant, so what projects keys and values in the loop is not trained. Source: MoR (arXiv 2507.10524, abstract).

Claim: less time to read a prompt and less memory; no loss is given in the abstract (MoR).
Here (20 pairs of runs, r = 2 and 4, two seeds): saves 4% [1, 7] of the compute (results/tricks.md), as much as its
cheaper steps buy in tokens.
"""
import torch
import torch.nn.functional as F

from lib.ops import Linear
from model import LoopedLM


class FirstPair(Linear):
    def __init__(self, shared):
        super().__init__(shared.in_features, shared.out_features)
        self.weight = shared.weight
        self.pair = None                         # keys and values (B, T, 2 D), once the first pass has made them

    def forward(self, x):
        D = self.in_features
        if self.pair is None:
            qkv = super().forward(x)
            self.pair = qkv[..., D:]
            return qkv
        q = F.linear(x, self.weight[:D])
        return torch.cat([q, self.pair.to(q.dtype)], dim=-1)


class FirstKeys(LoopedLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        for attn in [block.attn for block in self.recur if cfg.n_loop > 1]:
            attn.qkv = FirstPair(attn.qkv)
        self.shared = [block.attn.qkv for block in self.recur if cfg.n_loop > 1]

    def start(self, e):
        return F.pad(super().start(e), (0, 2 * self.cfg.n_embd * len(self.shared)))  # (B, T, D + 2 D n_recur)

    def combine(self, e, h, k):
        D = self.cfg.n_embd
        h, *pairs = h.split([D] + len(self.shared) * [2 * D], dim=-1)
        for qkv, pair in zip(self.shared, pairs):
            qkv.pair = pair if k else None
        return super().combine(e, h, k)

    def layer(self, x, i, k, context):
        block = self.recur[i]
        x = x + block.attention(x, context, self.slot(i, 0 if self.shared else k))
        return x + block.feed_forward(x, context, self.slot(i, k))

    def finish(self, e, h, x, k):
        pairs = [qkv.pair for qkv in self.shared if qkv.pair is not None]
        return torch.cat([super().finish(e, h, x, k), *pairs], dim=-1)

    def read(self, h):
        return h[..., :self.cfg.n_embd]

    @classmethod
    def pass_flops(cls, cfg, k):
        saved = 4 * cfg.n_recur * cfg.n_embd ** 2
        return super().pass_flops(cfg, k) - (saved if k and cfg.n_loop > 1 else 0)
