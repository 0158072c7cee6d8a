"""
Hyperconnections: two or more residual streams, the lanes, that every pass reads, mixes and writes with scalars of its
own (arXiv 2604.21106, interventions). In pass k, j and i number the lanes:

    x = sum_j read_kj lane_j;  s = norm(blocks(x));  lane_i <- sum_j mix_kij lane_j + write_ki s;  H_k = sum_i lane_i

At the start all lanes are equal and this is the residual loop h <- h + norm(blocks(h)). Passes beyond the trained
number begin the scalars anew. Claim: phi rises from 0.453 to 0.646 (arXiv 2604.21106).

Here (18 pairs of runs, r = 2 and 4, one seed): saves 1% [-6, 8] of the compute, not decided (results/tricks.md); phi
moves by +0.28 [-0.07, +0.36] (results/pocket.md).
"""
import torch
import torch.nn as nn

from model import LoopedLM


class Hyperconnections(LoopedLM):
    requires = {"inject": "none"}
    n_lanes: int = 2                             # residual streams

    def __init__(self, cfg):
        super().__init__(cfg)
        r, n = cfg.n_loop, self.n_lanes
        eye = torch.eye(n)
        self.lanes = nn.ParameterDict({
            "read": nn.Parameter(eye[torch.arange(r) % n].clone()),                # pass k reads lane k mod n
            "mix": nn.Parameter(eye.repeat(r, 1, 1)),
            "write": nn.Parameter(torch.ones(r, n))})

    def start(self, e):
        return e[:, :, None].expand(-1, -1, self.n_lanes, -1)                      # (B, T, lanes, D)

    def combine(self, e, h, k):
        read = self.lanes["read"][k % self.cfg.n_loop]                             # (lanes,)
        return (read[:, None] * h).sum(2)

    def finish(self, e, h, x, k):
        mix, write = self.lanes["mix"][k % self.cfg.n_loop], self.lanes["write"][k % self.cfg.n_loop]
        written = write[:, None] * super().finish(e, h, x, k)[:, :, None]             # (B, T, lanes, D)
        return (mix[..., None] * h[:, :, None]).sum(3) + written

    def read(self, h):
        return h.sum(2)                                                            # (B, T, D)

    @classmethod
    def param_counts(cls, cfg, active=False):
        counts = super().param_counts(cfg, active)
        return {**counts, "injection": counts["injection"] + cfg.n_loop * cls.n_lanes * (cls.n_lanes + 2)}

    @classmethod
    def pass_flops(cls, cfg, k):
        return super().pass_flops(cfg, k) + 2 * cls.n_lanes * (cls.n_lanes + 2) * cfg.n_embd
