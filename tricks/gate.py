"""
Gate: the injection as one number per channel, x = h + g * e, g = 0 at the start: D parameters instead of the 2 D^2 of
the linear map. Source: none, it is the example of how to write a trick.

Here (20 pairs of runs, r = 2 and 4, two seeds, against the linear map): costs 3% [-4, 11] more compute, not decided; on
an older grid (18 pairs, one seed) 6% [-1, 12], and phi moves by -0.02 [-0.32, +0.14] (results/tricks.md and pocket.md).
"""
import torch
import torch.nn as nn

from model import LoopedLM


class Gate(LoopedLM):
    requires = {"inject": "none"}                # the gate takes the place of the matrix

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = nn.Parameter(torch.zeros(cfg.n_embd))

    def combine(self, e, h, k):
        return h + self.gate * e                 # (B, T, D): how much of the input each channel sees again

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + cfg.n_embd}
