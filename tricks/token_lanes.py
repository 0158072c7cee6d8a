"""
Token lanes: two or more residual streams, the lanes, that every pass reads, keeps and writes with gates of its own.
Each token sets them by what its lanes hold. In pass k, with Y_j lane j and z = norm([Y_1; Y_2; ..]):

    x = sum_j read_j Y_j;  Y_j <- keep_j Y_j + 2 write_j (norm(blocks(x)) + p_k);  H_k = mean_j Y_j
    read, keep, write = sigmoid(W_k z + b_k), one number per lane each

The biases b are ours. At the start p = 0, W is small, the reads add up to about 1, 2 write is near 1 and keep near
0.05: near the loop without the trick, whose keep of 0 no sigmoid reaches. W is not 0, or equal lanes would stay equal.
Passes beyond the trained number take the last gates. Source: arXiv 2604.21254 (abstract; the formula from notes on it).
With numbers that are the same for all tokens: hyperconnections.py.

Claim: beats models of equal depth with half the parameters (arXiv 2604.21254, abstract).
Here (10 pairs of runs, r = 2 and 4, one seed): costs 3% [-10, 13] more compute, not decided (results/tricks.md).
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from lib.ops import norm
from model import LoopedLM


class TokenLanes(LoopedLM):
    n_lanes: int = 2                             # residual streams

    def __init__(self, cfg):
        super().__init__(cfg)
        r, D, n = cfg.n_loop, cfg.n_embd, self.n_lanes
        std = 0.1 * (n * D) ** -0.5              # so that W z has 0.1
        bias = {"read": -math.log(n - 1), "keep": -3.0, "write": 0.0}
        self.W = nn.ParameterDict({gate: nn.Parameter(std * torch.randn(r, n, n * D)) for gate in bias})
        self.b = nn.ParameterDict({gate: nn.Parameter(torch.full((r, n), b)) for gate, b in bias.items()})
        self.vectors = nn.Parameter(torch.zeros(r, D))

    def gate(self, name, h, k):
        k = min(k, self.cfg.n_loop - 1)
        z = norm(h.flatten(2))                                                     # (B, T, lanes D)
        return torch.sigmoid(F.linear(z, self.W[name][k], self.b[name][k]))[..., None]  # (B, T, lanes, 1)

    def start(self, e):
        return super().start(e)[:, :, None].expand(-1, -1, self.n_lanes, -1)              # (B, T, lanes, D)

    def combine(self, e, h, k):
        x = (self.gate("read", h, k) * h).sum(2)
        return super().combine(e, x, k)

    def finish(self, e, h, x, k):
        made = super().finish(e, h, x, k) + self.vectors[min(k, self.cfg.n_loop - 1)]
        return self.gate("keep", h, k) * h + 2 * self.gate("write", h, k) * made[:, :, None]

    def read(self, h):
        return h.mean(2)                                                           # (B, T, D)

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        gates = 3 * cls.n_lanes * (cls.n_lanes * cfg.n_embd + 1)
        return {**counts, "injection": counts["injection"] + cfg.n_loop * (gates + cfg.n_embd)}

    @classmethod
    def pass_flops(cls, cfg, k):
        return super().pass_flops(cfg, k) + 6 * cls.n_lanes ** 2 * cfg.n_embd  # three gates, lanes D to lanes
