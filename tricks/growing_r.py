"""
Growing r: half of the passes, rounded up, for the first 40% of the steps, then all of them. Evaluation always runs all.
Source: parameter-golf #835 (2 passes, 3 from 40% and 4 from 65% of the time, not of the steps); arXiv 2609.19107
(abstract).

Claim: -0.009 bits/byte at equal time (parameter-golf #835); tied growth 1.35 times the compute (arXiv 2609.19107,
abstract); starting to loop at 15% instead of 35% of the steps cost 0.050 bits/byte (parameter-golf #1726).
Here (20 pairs of runs, r = 2 and 4, two seeds): saves 12% [7, 18] of the compute (results/tricks.md), as much as its
cheaper steps buy in tokens. For 65% of the steps (--trick_args=share=0.65; 10 pairs) it saves 21% [8, 31].
"""
from model import LoopedLM


class GrowingR(LoopedLM):
    share: float = 0.4                           # of the steps

    @classmethod
    def schedule(cls, cfg, step, max_steps):
        return {"n_loop": (cfg.n_loop + 1) // 2} if step < cls.share * max_steps else {}
