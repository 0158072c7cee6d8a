"""
Residual scale: both branches F of a block in the loop are times 1 / r, x + F(norm(x)) / r, or 1 / sqrt(r) with
--trick_args=root=true. The same weights add up r times: like shares grow as r, independent ones as sqrt(r). It comes on
top of the initial weights, which every depth draws smaller by sqrt(2 L_eff). The source has lambda / (r sqrt(L)) for L
looped layers; its lambda / sqrt(L) is left out here. Source: arXiv 2606.18524 (abstract).

r is the number of passes of this run, n_loop as given: twice the passes are half as long and lead equally far. It
follows --sample_loops and a schedule. Early exits cannot know when they will leave: there r is the full depth.

Claim: the best learning rate no longer depends on r; lower loss than with 1 / sqrt(r) (arXiv 2606.18524, abstract).
Here (10 pairs of runs, r = 2 and 4, one seed): costs 9% [4, 13] more compute, with 1 / sqrt(r) 6% [1, 12]
(results/tricks.md). Of three learning rates the loop's own is the best for it as well.
"""
from model import LoopedLM


class ResidualScale(LoopedLM):
    root: bool = False

    def layer(self, x, i, k, context):
        block, slot = self.recur[i], self.slot(i, k)
        factor = context.n_loop ** (-0.5 if self.root else -1)
        x = x + factor * block.attention(x, context, slot)
        return x + factor * block.feed_forward(x, context, slot)
