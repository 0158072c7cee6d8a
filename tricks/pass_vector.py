"""
Pass vector: every pass adds a vector of its own to what enters the blocks, x = inject(e, h) + p_k, p_k = 0 at the
start, so that equal blocks can tell the passes apart. Passes beyond the trained number take the last vector. Source:
parameter-golf #1110, after the Universal Transformer (arXiv 1807.03819); there one vector per pass, as here.

Claim: none, no ablation published.
Here (10 pairs of runs, r = 2 and 4, one seed): costs 0% [-3, 3] more compute, not decided (results/tricks.md).
"""
import torch
import torch.nn as nn

from model import LoopedLM


class PassVector(LoopedLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.vectors = nn.Parameter(torch.zeros(cfg.n_loop, cfg.n_embd))

    def combine(self, e, h, k):
        return super().combine(e, h, k) + self.vectors[min(k, self.cfg.n_loop - 1)]

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + cfg.n_loop * cfg.n_embd}
