"""
Late gradients: gradients run through the last pass only for the first 60% of the steps, then through all passes. The
cheap steps come first, and the loop learns as a whole at the end. --trick_args=share=0.8 sets the share. Source: none;
truncation alone is in arXiv 2604.21106 (interventions), through the last half of the passes.

Claim: none.
Here (10 pairs of runs, r = 2 and 4, one seed): saves 21% [13, 28] of the compute (results/tricks.md). The last pass
alone to the end saves more.
"""
from model import LoopedLM


class LateGradients(LoopedLM):
    requires = {"loss": "terminal"}
    share: float = 0.6                           # of the steps

    @classmethod
    def schedule(cls, cfg, step, max_steps):
        return {"bptt": 1 if step < cls.share * max_steps else 0}
