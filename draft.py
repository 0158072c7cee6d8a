"""
Drafting: a looped model guesses its own next tokens with fewer passes, then checks several guesses in one call with all
passes. The text is that of the full model: the same tokens when greedy, the same distribution when sampled.

Decoding reads all weights in every pass of every token, and at batch 1 that is what takes the time. A round of drafting

    drafts      n tokens, one after the other, each from the readout after d of the r passes
    verifies    all of them in one call of passes d + 1 .. r, which reads the weights once
    accepts     the drafted tokens before the first that is refused, and one token from the full model
    rolls back  the cache to what was accepted

The draft is no second model: it has the same weights, and the verification goes on from its states, with its keys and
values of passes 1 .. d. Speculative decoding is arXiv 2211.17192, drafting with part of the same layers 2404.16710.

In the cache, drafted tokens fill the slots of passes 1 .. d, the verification those of the later passes. The coda, if
there is one, sees draft states where a token is drafted; the verification puts the full depth there. The newest token
of the text is never in the cache: its passes begin with the next round, as those of the whole prompt with the first.

Shapes: B rows, T new tokens, n drafted ones, D width, V vocabulary.
"""
from typing import NamedTuple

import torch

from lib.ops import check_sampling, distribution
from model import KVCache

MOST = 8                                         # tokens that draft_tokens="auto" drafts in a round, at most
POSITION = 0.08                                  # what one more position in a call adds to its time (results/bench.md)


class Sampler(NamedTuple):
    """How tokens are drawn: as model.generate draws them, but with the probabilities at hand."""
    temperature: float
    top_k: int | None
    generator: torch.Generator | None

    def probabilities(self, logits):             # (..., V) of logits (..., V)
        return distribution(logits.float(), self.temperature, self.top_k)

    def draw(self, weights):                     # (B, 1) from weights (B, V), which need not sum to 1
        if self.temperature == 0:                # all weight is on one token
            return weights.argmax(-1, keepdim=True)
        return torch.multinomial(weights, 1, generator=self.generator)


# --- draft ---
def draft(model, tokens, cache, d, n, sampler):
    """Guess what follows tokens (B, T), the newest ones, which are not in the cache. Returns n guesses (B, 1), the
    probabilities (B, V) that each was drawn with, and of all T + n positions the prelude's output e and the state after
    d passes, both (B, T + n, ...)."""
    guesses, q, inputs, states = [], [], [], []
    stored = cache.length
    while True:
        context = model.context(tokens, cache.n_loop, cache)
        e = model.encode(tokens, context)
        h = model.start(e)
        for k in range(d):
            h = model.one_pass(e, h, k, context)
        inputs.append(e)
        states.append(h)
        if len(guesses) == n:                    # the last guess is verified, but nothing is drafted after it
            break
        logits = model.logits(model.read(h), context, cache.n_loop, last_pass=False, last=1)
        cache.length += tokens.size(1)
        q.append(sampler.probabilities(logits[:, 0]))
        tokens = sampler.draw(q[-1])
        guesses.append(tokens)
    cache.length = stored
    return guesses, q, torch.cat(inputs, 1), torch.cat(states, 1)


def verify(model, e, h, cache, d, n):
    """Logits (B, n + 1, V) of the full model after the newest token and after each of the n guesses, from e and the
    state h after d passes (B, T + n, ...), whose keys and values are in the cache."""
    context = model.context(e[..., 0], cache.n_loop, cache)                        # of these positions, any (B, T + n)
    for k in range(d, cache.n_loop):
        h = model.one_pass(e, h, k, context)
    return model.logits(model.read(h), context, cache.n_loop, last=n + 1)


def accept(p, q, guesses, sampler):
    """The tokens (B, 1 .. n + 1) that the full model makes of n guesses. p (B, n + 1, V): its probabilities; q: n times
    those of the draft (B, V). A guess x is kept with probability min(1, p(x) / q(x)); in place of a refused one comes a
    draw from max(0, p - q), rescaled, which together is a draw from p (arXiv 2211.17192, section 2.3). Greedy, p and q
    have one token each, and a guess is kept where they agree.

    Rows stay equally long: all stop where the first of them refuses, and the others keep their guess there. This is
    exact, too, since whether a row stops does not depend on the guesses that it then drops."""
    for i, (guess, drafted) in enumerate(zip(guesses, q)):
        full = p[:, i]                                                             # (B, V)
        chance = torch.rand(guess.shape, device=guess.device, generator=sampler.generator)
        kept = chance * drafted.gather(1, guess) < full.gather(1, guess)           # (B, 1)
        if not kept.all():
            rest = (full - drafted).clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, full)         # where p = q, a row that keeps
            return torch.cat([*guesses[:i], torch.where(kept, guess, sampler.draw(rest))], 1)
    return torch.cat([*guesses, sampler.draw(p[:, len(guesses)])], 1)


def best_count(rounds, cost):
    """How many tokens to draft next, 1 .. MOST: the count that promises most tokens for the time. rounds: (drafted,
    accepted) so far; cost: of drafting a token, in units of one at full depth. With a share a accepted, n guesses give
    (1 - a^(n + 1)) / (1 - a) tokens and take 1 + n (cost + POSITION) (arXiv 2211.17192, theorem 3.8)."""
    tested = sum(min(accepted + 1, drafted) for drafted, accepted in rounds)
    a = (2 + sum(accepted for _, accepted in rounds)) / (2.5 + tested)             # 0.8 before anything is seen

    def promise(n):
        return sum(a ** i for i in range(n + 1)) / (1 + n * (cost + POSITION))
    return max(range(1, MOST + 1), key=promise)


@torch.inference_mode()
def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, *, draft_passes=1, draft_tokens="auto", n_loop=None,
           generator=None):
    """The rounds of generate as they come: how many tokens were drafted, and the new tokens (B, 1 .. n + 1)."""
    cfg, d = model.cfg, draft_passes
    K, size = cfg.n_loop if n_loop is None else n_loop, cfg.block_size
    check_drafting(K, d, draft_tokens)
    check_sampling(temperature, top_k)
    if idx.size(1) < 1:
        raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
    sampler, rounds = Sampler(temperature, top_k, generator), []
    cost = model.flops_per_token(cfg, d, train=False) / model.flops_per_token(cfg, K, train=False)
    end, start = idx.size(1) + max_new_tokens, max(0, idx.size(1) - size)
    cache = KVCache(cfg, idx.size(0), K)
    while idx.size(1) < end:
        if idx.size(1) - start > size:           # a full window restarts from its last half
            start, cache = idx.size(1) - max(1, size // 2), KVCache(cfg, idx.size(0), K)
        window = idx[:, start:]
        room = min(size - window.size(1), end - idx.size(1) - 1)
        n = min(room, best_count(rounds, cost) if draft_tokens == "auto" else draft_tokens)
        guesses, q, e, h = draft(model, window[:, cache.length:], cache, d, n, sampler)
        p = sampler.probabilities(verify(model, e, h, cache, d, n))
        new = accept(p, q, guesses, sampler)                                       # (B, 1 .. n + 1)
        rounds.append((n, new.size(1) - 1))
        idx = torch.cat([idx, new], 1)
        cache.length = idx.size(1) - start - 1                                     # all but the newest token
        yield n, new


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, **how):
    """What model.generate(idx, ...) gives, faster: idx (B, T) and max_new_tokens more, in the same windows. Also the
    rounds, a list of (drafted, accepted) tokens. how: draft_passes, d, at least 1 and fewer than the passes of the
    model; draft_tokens, n, or "auto", by what was accepted so far; n_loop and generator as in model.generate.
    ValueError, a sentence, for what cannot be."""
    parts, rounds = [idx], []
    for n, new in stream(model, idx, max_new_tokens, temperature, top_k, **how):
        parts.append(new)
        rounds.append((n, new.size(1) - 1))
    return torch.cat(parts, 1), rounds
# --- end draft ---


def check_drafting(n_loop, draft_passes, draft_tokens):
    """ValueError, a sentence, for drafts that cannot be made."""
    if n_loop == 1:
        raise ValueError("draft_passes: a model of one pass has no earlier readout to draft from; train with more")
    if not 1 <= draft_passes < n_loop:
        raise ValueError(f"draft_passes={draft_passes}: must be at least 1 and fewer than the model's {n_loop} passes")
    if draft_tokens != "auto" and draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens}: must be at least 1, or auto")
