"""draft.py against plain generation: the same greedy text, the same distribution, the same cache."""
import itertools

import pytest
import torch

import draft as D
from lib import ops
from model import Config, KVCache, LoopedLM
from test_early_exit import CODA, PLAIN, small, tokens

VARIANTS = [PLAIN, CODA, dict(n_recur=1, inject="add", readout="raw"), dict(CODA, readout="final", loop_norm=False),
            dict(PLAIN, n_expert=4), dict(n_recur=1, n_coda=2, n_loop=4, inject="none")]


def both(model, x, n_new=25, **how):
    """Greedy: the plain text, the drafted one, and its rounds."""
    text, rounds = D.generate(model, x, n_new, temperature=0, **how)
    assert sum(accepted + 1 for _, accepted in rounds) == n_new
    return model.generate(x, n_new, temperature=0), text, rounds


# --- greedy ---
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_that_of_the_full_model(variant):
    """Through three windows of 12 tokens, from prompts shorter and longer than one, at batch 1 and 3."""
    model, accepted = small(**variant), set()
    for (B, T), (d, n) in zip([(1, 1), (3, 5), (1, 12), (1, 20)], [(1, 3), (2, 2), (1, "auto"), (2, 8)]):
        plain, text, rounds = both(model, tokens(B, T, seed=T), draft_passes=d, draft_tokens=n)
        assert torch.equal(plain, text), (B, T, d, n)
        accepted |= {a == n for n, a in rounds if n}
    assert accepted == {True, False}                       # guesses were refused, and whole drafts accepted


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_of_200_prompts(variant):
    model = small(**variant)
    choices = itertools.cycle(itertools.product((1, 2), (1, 2, 3, 5, "auto")))
    for seed, (d, n) in zip(range(200), choices):
        plain, text, _ = both(model, tokens(1, 1 + seed % 15, seed), draft_passes=d, draft_tokens=n)
        assert torch.equal(plain, text), (seed, d, n)


def test_another_number_of_passes_than_in_training():
    model, x = small(**PLAIN), tokens(1, 5)
    text, _ = D.generate(model, x, 15, temperature=0, n_loop=6, draft_passes=4, draft_tokens=3)
    assert torch.equal(text, model.generate(x, 15, temperature=0, n_loop=6))


def replace_draft_readout(model, readout):
    """The readout of drafts becomes readout(position) -> logits (B, V); the full model keeps its own."""
    own = model.logits

    def logits(h, context, n_loop, last_pass=True, last=0):
        if last_pass:
            return own(h, context, n_loop, last_pass, last)
        return readout(context.cache.length + h.size(1))[:, None]
    model.logits = logits


def test_drafts_that_are_always_wrong():
    model, x = small(**CODA), tokens(2, 3)
    plain = model.generate(x, 25, temperature=0)
    unused = next(t for t in range(100) if not (plain == t).any())
    replace_draft_readout(model, lambda position: torch.nn.functional.one_hot(torch.full((2,), unused), 100))
    text, rounds = D.generate(model, x, 25, temperature=0, draft_tokens=3)
    assert torch.equal(text, plain) and all(accepted == 0 for _, accepted in rounds) and len(rounds) == 25


def test_drafts_that_are_always_right():
    model, x = small(**CODA, block_size=40), tokens(2, 3)
    plain = model.generate(x, 25, temperature=0)
    replace_draft_readout(model, lambda position: torch.nn.functional.one_hot(plain[:, position], 100))
    text, rounds = D.generate(model, x, 25, temperature=0, draft_tokens=3)
    assert torch.equal(text, plain) and rounds == 6 * [(3, 3)] + [(0, 0)]


def test_a_window_that_ends_within_a_draft():
    """12 positions: a draft of 8 after 7 tokens has room for 5; the next window begins with 6 tokens, room for 6."""
    model, x = small(**PLAIN, block_size=12), tokens(1, 7)
    plain = model.generate(x, 14, temperature=0)
    replace_draft_readout(model, lambda position: torch.zeros(1, 100).index_fill_(1, plain[0, position], 1))
    text, rounds = D.generate(model, x, 14, temperature=0, draft_tokens=8)
    assert torch.equal(text, plain) and rounds[:2] == [(5, 5), (6, 0)]             # right in the first window only


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("d", [1, 2])
def test_the_cache_is_that_of_plain_decoding(variant, d, monkeypatch):
    model, caches = small(**variant, block_size=40), []

    class Kept(KVCache):
        def __init__(self, *shape):
            super().__init__(*shape)
            caches.append(self)
    monkeypatch.setattr(D, "KVCache", Kept)
    text, rounds = D.generate(model, tokens(2, 5), 20, temperature=0, draft_passes=d, draft_tokens=3)
    assert any(accepted < drafted for drafted, accepted in rounds)
    (cache,), plain = caches, KVCache(model.cfg, 2, model.cfg.n_loop)
    with torch.inference_mode():
        for t in range(24):
            model(text[:, t:t + 1], cache=plain)
    assert cache.length == plain.length == 24              # the newest token is not in it
    for ours, expected in zip([*cache.k, *cache.v], [*plain.k, *plain.v]):
        torch.testing.assert_close(ours[:, :, :24], expected[:, :, :24], rtol=1e-5, atol=1e-5)


# --- sampling ---
def surprise(drawn, expected):
    """How many standard deviations Pearson's chi-squared of counts drawn (cells,) is above its mean, given the expected
    probabilities (cells,). Above 5 the draws come from something else."""
    expected = expected * drawn.sum()
    chi2 = ((drawn - expected) ** 2 / expected).sum()
    cells = len(expected) - 1
    return ((chi2 - cells) / (2 * cells) ** 0.5).item()


def chain(seed, V=4):
    """Probabilities (V, V) of the next token after each token: a model without a network."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


def draw_from_chains(p, q, n, draws, rows):
    """Counts of the next two tokens after token 0, drawn round by round with drafts from q that p accepts."""
    sampler = D.Sampler(1.0, None, torch.Generator().manual_seed(0))
    counts = torch.zeros(len(p) ** 2)
    for _ in range(draws // rows):
        text = torch.zeros(rows, 1, dtype=torch.long)
        while text.size(1) < 3:
            guesses, used, token = [], [], text[:, -1:]
            for _ in range(n):
                used.append(q[token[:, 0]])
                token = sampler.draw(used[-1])
                guesses.append(token)
            full = p[torch.cat([text[:, -1:], *guesses], 1)]
            text = torch.cat([text, D.accept(full, used, guesses, sampler)], 1)
        counts += torch.bincount(text[:, 1] * len(p) + text[:, 2], minlength=len(counts))
    return counts


@pytest.mark.parametrize("rows", [1, 3])
def test_accepted_and_redrawn_tokens_have_the_full_models_distribution(rows, monkeypatch):
    p, q = chain(1), chain(2)
    expected = (p[0][:, None] * p).flatten()
    assert surprise(draw_from_chains(p, q, 2, 3000, rows), expected) < 5
    monkeypatch.setattr(torch, "rand", lambda shape, **how: torch.zeros(shape))            # no guess is refused
    assert surprise(draw_from_chains(p, q, 2, 3000, rows), expected) > 20


def tiny_model():
    torch.manual_seed(0)
    model = LoopedLM(Config(vocab_size=5, block_size=6, n_embd=8, n_head=1, n_coda=1, n_loop=3, inject="none")).eval()
    torch.nn.init.normal_(model.head.weight, std=0.4)
    return model


def exact_distribution(model, prompt, n, temperature, top_k):
    """Probabilities (5^n,) of the n tokens after the prompt (1, T), from whole forward passes."""
    p = torch.ones(1)
    texts = prompt
    for _ in range(n):
        with torch.no_grad():
            logits = torch.stack([model(text[None])[0][0, -1] for text in texts]) / temperature
        if top_k:
            logits[logits < logits.sort(-1).values[:, -top_k, None]] = -torch.inf
        p = (p[:, None] * logits.softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(5, 0), torch.arange(5).repeat(len(texts))[:, None]], 1)
    return p


def count_texts(model, rows, calls, n, **how):
    generator, counts = torch.Generator().manual_seed(1), torch.zeros(5 ** n)
    powers = 5 ** torch.arange(n - 1, -1, -1)
    for _ in range(calls):
        text, _ = D.generate(model, torch.tensor([[1, 3]]).expand(rows, 2), n, generator=generator, **how)
        counts += torch.bincount((text[:, 2:] * powers).sum(1), minlength=len(counts))
    return counts


@pytest.mark.parametrize("temperature, top_k, rows", [
    (1.0, 3, 20_000), pytest.param(1.0, None, 100_000, marks=pytest.mark.slow),
    pytest.param(0.7, 3, 100_000, marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_full_models_distribution(temperature, top_k, rows, monkeypatch):
    """Two tokens in all rows side by side; without the rejection they have the draft's distribution."""
    model, how = tiny_model(), dict(temperature=temperature, top_k=top_k, draft_tokens=2)
    expected = exact_distribution(model, torch.tensor([[1, 3]]), 2, temperature, top_k)
    possible = expected > 0
    drawn = count_texts(model, rows, 1, 2, **how)
    assert drawn[~possible].sum() == 0 and surprise(drawn[possible], expected[possible]) < 5
    monkeypatch.setattr(torch, "rand", lambda shape, **how: torch.zeros(shape))
    drawn = count_texts(model, rows, 1, 2, **how)
    assert drawn[~possible].sum() > 0 or surprise(drawn[possible], expected[possible]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("rows, calls", [(1, 5000), (8, 12_500)])
def test_sampled_texts_of_few_rows(rows, calls):
    """Three tokens from drafts of two, which are often accepted whole."""
    model = tiny_model()
    expected = exact_distribution(model, torch.tensor([[1, 3]]), 3, 1.0, None)
    assert surprise(count_texts(model, rows, calls, 3, draft_tokens=2), expected) < 5


def test_sampling_is_seeded_and_top_1_is_greedy():
    model, x = small(**PLAIN), tokens(2, 3)
    texts = [D.generate(model, x, 12, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert torch.equal(D.generate(model, x, 12, top_k=1)[0], model.generate(x, 12, temperature=0))


def test_the_distribution_is_what_is_sampled_from():
    logits = torch.randn(3, 7)
    top = logits.sort(-1).values[:, -3, None]
    expected = (logits / 0.7).masked_fill(logits < top, -torch.inf).softmax(-1)
    torch.testing.assert_close(ops.distribution(logits, 0.7, 3), expected)
    torch.testing.assert_close(ops.distribution(logits[:, None], 0.7, 3), expected[:, None])
    greedy = ops.distribution(logits, 0)
    assert torch.equal(greedy.argmax(-1), logits.argmax(-1)) and greedy.sum() == 3


# --- how many ---
def test_the_automatic_count_follows_acceptance_and_cost():
    good, bad = [(4, 4)] * 20, [(4, 0)] * 20
    assert D.best_count(bad, 0.3) == 1 < D.best_count([], 0.3) < D.best_count(good, 0.3) == D.MOST
    assert D.best_count([(4, 3)] * 20, 0.8) < D.best_count([(4, 3)] * 20, 0.2)
    a, cost = (2 + 60) / (2.5 + 80), 0.3 + D.POSITION      # theorem 3.8, its own way
    speed_up = [(1 - a ** (n + 1)) / ((1 - a) * (n * cost + 1)) for n in range(1, D.MOST + 1)]
    assert D.best_count([(4, 3)] * 20, 0.3) == speed_up.index(max(speed_up)) + 1


@pytest.mark.parametrize("how, says", [
    (dict(draft_passes=3), "draft_passes=3: must be at least 1 and fewer than the model's 3 passes"),
    (dict(draft_passes=0), "draft_passes=0"), (dict(draft_tokens=0), "draft_tokens=0"), (dict(n_loop=1), "one pass"),
    (dict(temperature=-1.0), "temperature=-1")])
def test_what_cannot_be_drafted_is_refused_in_a_sentence(how, says):
    with pytest.raises(ValueError, match=says):
        D.generate(small(**PLAIN), tokens(1, 3), 4, **how)
    with pytest.raises(ValueError, match="prompt is empty"):
        D.generate(small(**PLAIN), tokens(1, 3)[:, :0], 4)
