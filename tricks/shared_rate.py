"""
Shared rate: a step of a shared matrix changes r passes at once. So its learning rate is multiplied by r^-rate, here
1 / sqrt(r), or its weight decay by r^-decay (--trick_args=rate=0,decay=1: 1 / r). A lower rate lowers the decay as
well, since a step shrinks a matrix by the product of the two. Source: parameter-golf #363, which lowers the decay of
all matrices.

Claim: none for the rate. A decay of .02, .04, .06 gave 1.2955, 1.2983, 1.3060 bits/byte (parameter-golf #363).
Here (10 pairs of runs, r = 2 and 4, one seed): costs 8% [3, 13] more compute with the lower rate; with the lower decay
it saves 0% [0, 2], not decided (results/tricks.md).
"""
from model import LoopedLM


class SharedRate(LoopedLM):
    rate: float = 0.5
    decay: float = 0.0

    @classmethod
    def loop_rates(cls, cfg):
        return cfg.n_loop ** -cls.rate, cfg.n_loop ** -cls.decay
