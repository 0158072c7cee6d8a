"""
Scale and gate per pass: both branches F of a block see the pass, per channel: x + g_k * F((1 + s_k) * norm(x)).
Passes beyond the trained number take the last pair.

At the start g = 1 and s = 0, the loop without the trick, so that a difference of two runs is due to what the pairs
learn. The sources draw (g, s) from a map of the pass that starts at zero, so g = 0: all their branches are shut at
first. With whole passes as input such a map is a table, one row per pass. Source: LoopFormer (arXiv 2602.11451, a map
of time and step size), LoopMoE (arXiv 2606.04438, abstract).

Claim: more than one point on average in LoopMoE (arXiv 2606.04438, abstract).
Here (10 pairs of runs, r = 2 and 4, one seed): costs 11% [4, 19] more compute (results/tricks.md).
"""
import torch
import torch.nn as nn

from lib.ops import norm
from model import LoopedLM


class PassScaleGate(LoopedLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        shape = cfg.n_loop, cfg.n_recur, 2, cfg.n_embd                             # pass, block, branch, channel
        self.gate, self.scale = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def layer(self, x, i, k, context):
        block, slot = self.recur[i], self.slot(i, k)
        pair = min(k, self.cfg.n_loop - 1), i
        gate, scale = self.gate[pair], 1 + self.scale[pair]                        # (2, D) each
        x = x + gate[0] * block.attn(scale[0] * norm(x), context, slot)
        y = scale[1] * norm(x)
        return x + gate[1] * (block.ffn(y, context.routing, slot) if block.sparse else block.ffn(y))

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + 4 * cfg.n_loop * cfg.n_recur * cfg.n_embd}
