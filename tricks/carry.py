"""
Carry: block i adds alpha_i times its own output of the pass before, y_ki = block_i(x) + alpha_i y_(k-1)i, alpha = 0 at
the start. What is carried is y, the sum. Block i has one number for all passes; a model trained with one pass carries
nothing. The state holds h and the last y of every block. Source: parameter-golf #1766, and #148 with one number per
pass.

Claim: none, no isolated number published.
Here (10 pairs of runs, r = 2 and 4, one seed): costs 2% [0, 4] more compute, not decided (results/tricks.md).
"""
import torch
import torch.nn as nn

from model import LoopedLM


class Carry(LoopedLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.alpha = nn.Parameter(torch.zeros(cfg.n_recur))

    def start(self, e):
        h = super().start(e)
        return torch.stack([h] + self.cfg.n_recur * [torch.zeros_like(h)], 2)      # (B, T, 1 + n_recur, D)

    def combine(self, e, h, k):
        h, *self.before = h.unbind(2)
        self.made = []                           # what the blocks of this pass have made so far
        return super().combine(e, h, k)

    def layer(self, x, i, k, context):
        before = self.before[i] if k else torch.zeros_like(x)
        y = super().layer(x, i, k, context) + self.alpha[i] * before
        self.made.append(y)
        return y

    def finish(self, e, h, x, k):
        made = self.made if self.cfg.n_loop > 1 else h.unbind(2)[1:]
        return torch.stack([super().finish(e, h, x, k), *made], 2)

    def read(self, h):
        return h[:, :, 0]

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + cfg.n_recur}
