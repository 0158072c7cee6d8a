"""
Attention again: attention is repeated in every pass, the feed-forward branch runs once per token, in the first pass:
x + attention(x) from the second pass on. Under --bptt a feed-forward layer in the loop is out of reach and not trained.
Source: arXiv 2608.18230 (abstract; which pass has the feed-forward is our choice).

Claim: 46% fewer FLOPs in the projections of the loop (arXiv 2608.18230, abstract).
Here (10 pairs of runs, r = 2 and 4, one seed): saves 2% [-14, 14] of the compute, not decided (results/tricks.md).
"""
from model import LoopedLM


class AttentionAgain(LoopedLM):
    def layer(self, x, i, k, context):
        if k == 0:
            return super().layer(x, i, k, context)
        return x + self.recur[i].attention(x, context, self.slot(i, k))

    @classmethod
    def pass_flops(cls, cfg, k):
        feed_forward = cfg.n_recur * 6 * cfg.n_embd * cfg.d_ff
        return super().pass_flops(cfg, k) - (feed_forward if k else 0)
