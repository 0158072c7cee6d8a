"""
Boundary operator: the core starts from a e; after every pass h <- norm(h) + a e, also before the coda, so that a block
always finds a state of one size with the input in it. That is one map, norm(h) + a e, at both ends of the core, since
h = 0 before it. Also valid at r = 1. No parameters: a is a constant. Source: arXiv 2609.19107, equations 2 and 3, as a
replication has them (marin #9281, where a = 1 was better than 0.707).

Claim: 1.25 times the compute (arXiv 2609.19107, abstract); an independent try: -0.010 nats under the plain recipe,
+0.208 under the paper's (marin #9292), +0.004 with experts (#9280).
Here (20 pairs of runs, r = 2 and 4, two seeds): saves 9% [1, 16] of the compute (results/tricks.md). One pass of the
trained loop is as good as four.
"""
from model import LoopedLM


class Boundary(LoopedLM):
    requires = {"inject": "none", "loop_norm": True}
    a: float = 1.0

    def start(self, e):
        return self.a * e

    def finish(self, e, h, x, k):
        return super().finish(e, h, x, k) + self.a * e
