"""
Value residual: every block in the loop mixes the values of its attention with those of the model's first layer,
v <- v + lambda_i (v_first - v), lambda_i one number per looped block, 0 at the start. v_first is what the first block
of the prelude makes; without a prelude, the first looped block in pass 1. The state holds h and v_first: under --bptt
both are constants before the last passes. A model trained with one pass mixes nothing. Source: parameter-golf #363;
arXiv 2410.17897 has it without a loop.

Claim: +0.14 bits/byte, worse, in loops (parameter-golf #363).
Here (10 pairs of runs, r = 2 and 4, one seed): saves 3% [0, 7] of the compute, not decided (results/tricks.md).
"""
from functools import partial

import torch
import torch.nn as nn

from model import LoopedLM


class ValueResidual(LoopedLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.mix = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in self.recur)
        self.first = None                        # v_first (B, T, D) of the rows at work
        for block in self.prelude[:1]:
            block.attn.qkv.register_forward_hook(self.note)
        for block, mix in zip(self.recur, self.mix):    # here, not in layer: exits project values of skipped passes
            block.attn.qkv.register_forward_hook(partial(self.mixed, mix))

    def note(self, module, args, qkv):
        self.first = qkv[..., 2 * self.cfg.n_embd:]

    def mixed(self, mix, module, args, qkv):
        v = qkv[..., 2 * self.cfg.n_embd:]
        if self.first is None:                   # no prelude, pass 1: block 0 makes it
            self.first = v
        first = self.first.to(v.dtype) if self.cfg.n_loop > 1 else v
        return qkv.slice_scatter(v + mix * (first - v), dim=-1, start=2 * self.cfg.n_embd)

    def start(self, e):
        h = super().start(e)
        first = self.first if self.prelude and self.cfg.n_loop > 1 else torch.zeros_like(h)
        return torch.stack([h, first], 2)                                          # (B, T, 2, D)

    def combine(self, e, h, k):
        h, first = h.unbind(2)
        self.first = first if self.prelude or k else None
        return super().combine(e, h, k)

    def finish(self, e, h, x, k):
        first = self.first if self.cfg.n_loop > 1 else h[:, :, 1]
        return torch.stack([super().finish(e, h, x, k), first], 2)

    def read(self, h):
        return h[:, :, 0]

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + cfg.n_recur}
