"""
Parcae: a diagonal injection that always shrinks the state: before the blocks x = exp(-d exp(a)) h + d (B e), with
d = softplus(b) > 0 and a per channel. At the start B = I, a = 0 and exp(-d) = sqrt(1/5), as in the published code. B is
a bare parameter, so that AdamW moves it without decay, also as there. What differs: the state starts as e, not as
noise, and the loop norm stays. Source: arXiv 2604.12946, github.com/SandyResearch/parcae.

Claim: up to 6.3% lower perplexity than concatenating e, at equal parameters and data (arXiv 2604.12946); nothing gained
over h + e at 135M, neutral at 2 to 30M (OpenMythos #21).
Here (10 pairs of runs, r = 2 and 4, one seed): costs 8% [4, 13] more compute (results/tricks.md).
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import LoopedLM


class Parcae(LoopedLM):
    requires = {"inject": "none"}

    def __init__(self, cfg):
        super().__init__(cfg)
        D, d = cfg.n_embd, math.log(5) / 2
        self.a = nn.Parameter(torch.zeros(D))
        self.b = nn.Parameter(torch.full((D,), math.log(math.expm1(d))))           # softplus(b) = d
        self.B = nn.Parameter(torch.eye(D))

    def combine(self, e, h, k):
        d = F.softplus(self.b)
        return torch.exp(-d * self.a.exp()) * h + d * F.linear(e, self.B)          # (B, T, D)

    @classmethod
    def param_counts(cls, cfg, active=False):
        return {**super().param_counts(cfg, active), "injection": cfg.n_embd ** 2 + 2 * cfg.n_embd}

    @classmethod
    def pass_flops(cls, cfg, k):
        return super().pass_flops(cfg, k) + 2 * cfg.n_embd ** 2                       # B e, anew in every pass
