"""
Gradients in turn: they run through the last pass only, then through the last two, and so on to all r, and then from the
start, step by step. Most steps are cheap, and each pass is trained now and then. Source: none; a fixed number of passes
is in arXiv 2604.21106 (interventions), one drawn at random in other work.

Claim: none.
Here (10 pairs of runs, r = 2 and 4, one seed): saves 16% [8, 23] of the compute (results/tricks.md). The last pass
alone saves more.
"""
from model import LoopedLM


class GradientsInTurn(LoopedLM):
    requires = {"loss": "terminal"}

    @classmethod
    def schedule(cls, cfg, step, max_steps):
        return {"bptt": 1 + step % cfg.n_loop}
