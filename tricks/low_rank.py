"""
Low rank: in pass k the matrices of the attention, qkv and proj, are W + b_k a_k^T, rank numbers of each channel more;
b = 0 at the start and a from N(0, 1 / D), so that the first step can move b. Passes beyond the trained number take the
last pair. a and b are bare parameters: AdamW moves them and they do not decay, as in the source. Source: parameter-golf
#1096; arXiv 2410.20672.

Claim: rank 1 is stable, rank 8 under Muon diverged (parameter-golf #1096); no gain at few steps (#363); rank 512 nearly
closes the gap to the unshared model after uptraining (arXiv 2410.20672, abstract).
Here (10 pairs of runs, r = 2 and 4, one seed): saves 2% [-2, 5] of the compute, not decided (results/tricks.md); rank 4
costs 2% [-4, 7]. All four passes matter then, and the model is no better.
"""
import torch
import torch.nn as nn

from lib.ops import Linear
from model import LoopedLM


class PassLinear(Linear):
    def __init__(self, shared, n_loop, rank):
        super().__init__(shared.in_features, shared.out_features)
        self.weight, self.k = shared.weight, 0                                     # k: the pass that runs
        self.a = nn.Parameter(torch.randn(n_loop, rank, self.in_features) * self.in_features ** -0.5)
        self.b = nn.Parameter(torch.zeros(n_loop, self.out_features, rank))

    def forward(self, x):
        k = min(self.k, len(self.a) - 1)
        return super().forward(x) + x @ self.a[k].t() @ self.b[k].t()              # (B, T, D), rank, out


class LowRank(LoopedLM):
    rank: int = 1

    def __init__(self, cfg):
        super().__init__(cfg)
        for attn in [block.attn for block in self.recur]:
            attn.qkv, attn.proj = (PassLinear(m, cfg.n_loop, self.rank) for m in (attn.qkv, attn.proj))

    def combine(self, e, h, k):
        for block in self.recur:                 # here, not in layer: exits project keys of a pass that it skips
            block.attn.qkv.k = block.attn.proj.k = k
        return super().combine(e, h, k)

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + 6 * cfg.n_loop * cfg.n_recur * cfg.n_embd * cls.rank}

    @classmethod
    def pass_flops(cls, cfg, k):
        return super().pass_flops(cfg, k) + cfg.n_recur * 12 * cfg.n_embd * cls.rank  # D to rank to 3 D, D to rank to D
