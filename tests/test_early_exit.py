"""exits.py and early_exit.py against a reference that recomputes the whole prefix, teacher forcing, plain generation,
torch's FLOP counter, and its properties."""
import csv
import json
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import early_exit as X
import exit_cost as C
import exit_speed as S
import exits as E
import train as T
from lib.plots_model import frontier_title
from model import Config, KVCache, LoopedLM

SMALL = dict(vocab_size=100, block_size=12, n_embd=32, n_head=2, n_loop=3)
PLAIN = dict(n_prelude=0, n_coda=0, n_recur=2, inject="none", loop_norm=False)         # the looped-MoE paper's shape
CODA = dict(n_prelude=1, n_recur=2, n_coda=2, inject="linear")
UNLOOPED = dict(n_loop=1, n_prelude=1, n_recur=3, n_coda=0, inject="none")
VARIANTS = [PLAIN, CODA, dict(n_recur=1, inject="add", readout="raw"), dict(PLAIN, n_expert=4), UNLOOPED,
            dict(UNLOOPED, n_coda=1, inject="linear")]


def small(**kw):
    torch.manual_seed(0)
    model = LoopedLM(Config(**{**SMALL, **kw})).eval()
    for p in model.parameters():
        p.data.mul_(1.5)
    nn.init.normal_(model.head.weight, std=0.5)               # predictions that differ between tokens and passes
    if model.inject is not None:
        nn.init.normal_(model.inject.weight, std=0.2)
    return model


def tokens(B=4, T=12, seed=1):
    return torch.randint(0, 100, (B, T), generator=torch.Generator().manual_seed(seed))


def policies(model):
    return ("copy", "reuse") if model.cfg.n_loop > 1 else ("copy",)


def middle_tau(model, criterion="entropy"):
    """A tau below which half the tokens are at the last exit point."""
    x = tokens(8, seed=9)                                      # other tokens than the tests use: no ties with tau
    values = X.score_exit_points(model, [(x, x)])[criterion]
    return values[-1].quantile(0.5).item()


def test_an_unlooped_model_enters_its_only_pass_as_the_forward_pass_does(monkeypatch):
    """Whatever combine does, also an injection that a fork adds: positions one by one equal the forward pass."""
    monkeypatch.setattr(LoopedLM, "combine", lambda self, e, h, k: h + 0.7 * e)
    model, x = small(**UNLOOPED), tokens(2)
    cache = E.RowCache(model, 2)
    with torch.inference_mode():
        logits = torch.stack([E.step(model, x[:, t], cache)[0] for t in range(x.size(1))], 1)
    torch.testing.assert_close(logits, model(x, x)[0], rtol=1e-4, atol=1e-4)


# --- distributions ---
def test_divergence_and_entropy_at_their_landmarks():
    p = torch.randn(5, 7).log_softmax(-1)
    assert E.jsd(p, p).abs().max() < 1e-6
    one, two = torch.full((2, 4), -torch.inf)
    one[:2], two[2:] = math.log(0.5), math.log(0.5)
    assert E.jsd(one, two).item() == pytest.approx(1) and E.jsd(one, one).item() == 0
    assert E.entropy(one).item() == pytest.approx(math.log(2)) and E.entropy(torch.zeros(1)).item() == 0
    sharp, flat = torch.tensor([1e4, 0, -1e4]).log_softmax(-1), torch.zeros(3).log_softmax(-1)
    assert E.entropy(sharp).item() == 0 and 0 < E.jsd(sharp, flat).item() < 1     # p underflows to 0: finite
    q = torch.randn(5, 7).log_softmax(-1)
    a, b = p.double().exp(), q.double().exp()
    m = (a + b) / 2
    plain = ((a * (a / m).log2()).sum(-1) + (b * (b / m).log2()).sum(-1)) / 2
    torch.testing.assert_close(E.jsd(p, q).double(), plain, rtol=1e-5, atol=1e-6)


def test_doubts_against_their_definitions():
    logits, last, state, before = torch.randn(5, 7), torch.randn(5, 7), torch.randn(5, 3), torch.randn(5, 3)
    p, q = logits.double().softmax(-1), last.double().softmax(-1)
    top = p.sort(-1).values
    expected = {"entropy": -(p * p.log()).sum(-1), "margin": 1 - top[:, -1] + top[:, -2],
                "kl": (p * (p / q).log()).sum(-1),
                "change": ((state - before) ** 2).sum(-1).sqrt() / (state ** 2).sum(-1).sqrt()}
    for criterion in E.CRITERIA:
        value = E.doubt(criterion, logits, last, state, before)
        torch.testing.assert_close(value.double(), expected[criterion].double(), rtol=1e-4, atol=1e-5)
    assert E.doubt("kl", logits, None, state, before).isinf().all()
    with pytest.raises(ValueError, match="no such branch"):            # not silently another criterion
        E.doubt("nosuch", logits, last, state, before)
    for criterion in ("entropy", "margin", "kl"):             # certain, and the same as before: no doubt, no NaN
        sharp = torch.tensor([[1e5, 0.0, -1e5]])
        assert E.doubt(criterion, sharp, sharp, None, None).item() == 0


# --- the ends of tau ---
@pytest.mark.parametrize("variant", VARIANTS)
def test_tau_zero_is_plain_generation(variant):
    model, x = small(**variant), tokens(2, 5)
    rule = E.exit_below("entropy", 0.0)
    cache, row_cache = KVCache(model.cfg, 2, model.cfg.n_loop), E.RowCache(model, 2)
    with torch.inference_mode():
        for t in range(5):
            expected, _ = model(x[:, t:t + 1], cache=cache)
            logits, depth = E.step(model, x[:, t], row_cache, rule)
            assert torch.equal(logits, expected[:, 0]) and (depth == E.n_stages(model.cfg)).all()
    rows, _ = E.generate(model, x.tolist(), 8, rule)
    assert rows == model.generate(x, 8, temperature=0).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_tau_infinite_is_the_model_of_one_pass(variant):
    model, x, y = small(**variant), tokens(2), tokens(2, seed=2)
    if model.cfg.n_loop > 1:
        one, n_loop = model, 1
    else:                                                     # of an unlooped model: its first layer
        cut = dict(variant, n_prelude=0, n_recur=1, inject="none")
        one, n_loop = small(**cut), 1
        weights = {name.replace("prelude", "recur"): value for name, value in model.state_dict().items()
                   if not name.startswith("recur")}
        one.load_state_dict({name: weights[name] for name in one.state_dict()})
    with torch.no_grad():
        expected = F.cross_entropy(one(x, y, n_loop=n_loop)[0].transpose(1, 2), y, reduction="none")
    for kv in policies(model):
        nats, depth = E.score_by_step(model, x, y, E.exit_below("entropy", math.inf), kv)
        assert (depth == 1).all()
        torch.testing.assert_close(nats, expected, rtol=1e-4, atol=1e-4)
        rows, depths = E.generate(model, x[:, :3].tolist(), 6, E.exit_below("entropy", math.inf), kv)
        assert rows == one.generate(x[:, :3], 6, temperature=0, n_loop=n_loop).tolist()
        assert depths == [[1] * 8] * 2


def test_readout_final_exits_as_it_was_trained():
    """Its earlier passes are read raw in training, so an exit reads raw, too."""
    model, x = small(**PLAIN, readout="final"), tokens(2)
    nats, _ = E.score_by_step(model, x, x, E.exit_below("entropy", math.inf))
    ce = X.score_exit_points(model, [(x, x)])["ce"]
    with torch.no_grad():
        trained = model(x, x, loss="per_loop")[1]["ce"]
    torch.testing.assert_close(nats.mean(), trained[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ce.mean(1), trained, rtol=1e-4, atol=1e-4)


# --- policies ---
def reference(model, ids, rule_tau, kv):
    """Logits and depth of every position of ids, each from a fresh run over its whole prefix, one vector at a time,
    keys in plain dictionaries; the depths of earlier positions are known when a later one is computed."""
    cfg, S = model.cfg, E.n_stages(model.cfg)
    blocks = [*model.prelude, *model.recur]
    hd = cfg.n_embd // cfg.n_head

    def heads(attn, x, t, i):
        y = (attn.qkv.weight[i * cfg.n_embd:(i + 1) * cfg.n_embd] @ x).view(cfg.n_head, hd)
        if i == 2:
            return y
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        angle = t * 10000.0 ** (-torch.arange(0, hd, 2) / hd)
        a, b = y[:, ::2], y[:, 1::2]
        return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(1)

    def unit(x):
        return x / (x.square().mean() + 1e-6).sqrt()

    def layer(block, x, t, past):
        past[t] = heads(block.attn, unit(x), t, 1), heads(block.attn, unit(x), t, 2)
        q = heads(block.attn, unit(x), t, 0)
        k, v = (torch.stack([past[j][i] for j in range(t + 1)]) for i in (0, 1))              # (t + 1, H, hd)
        w = (torch.einsum("hd,thd->ht", q, k) / hd ** 0.5).softmax(-1)
        x = x + block.attn.proj.weight @ torch.einsum("ht,thd->hd", w, v).flatten()
        return x + block.ffn(unit(x)[None])[0]

    def enter(s, e, h):
        if cfg.n_loop > 1:
            if cfg.inject == "add":
                return e + (h if s else 0)
            return model.inject.weight @ torch.cat([e, h]) if cfg.inject == "linear" else h
        return model.inject.weight @ torch.cat([h, h]) if cfg.inject == "linear" and s == cfg.n_prelude else h

    def readout(s, state, t, past):
        for i, block in enumerate(model.coda):
            state = layer(block, state, t, past.setdefault(("coda", i), {}))
        plain = cfg.readout == "raw"
        return (model.head.weight @ (state if plain else unit(state)))[:cfg.vocab_size]

    result, depths = [], []
    for last in range(len(ids)):
        past = {}
        for t in range(last + 1):
            h = model.embed.weight[ids[t]]
            if cfg.n_loop > 1:
                for i, block in enumerate(model.prelude):
                    h = layer(block, h, t, past.setdefault(("prelude", i), {}))
            e = h
            for s in range(S):
                stage = model.recur if cfg.n_loop > 1 else [blocks[s]]
                h = enter(s, e, h)
                for i, block in enumerate(stage):
                    h = layer(block, h, t, past.setdefault((s, i), {}))
                state = unit(h) if cfg.loop_norm else h
                h = state if cfg.n_loop > 1 else h
                if t < last and s + 1 < depths[t]:
                    continue
                logits = readout(s, state, t, past)
                logp = logits.log_softmax(-1)
                if s == S - 1 or (depths[t] == s + 1 if t < last else -(logp.exp() * logp).sum() < rule_tau):
                    break
            for later in range(s + 1, S):                     # what the token leaves where it did not go
                for i, block in enumerate(model.recur if cfg.n_loop > 1 else [blocks[later]]):
                    x = unit(enter(later, e, h))
                    past.setdefault((later, i), {})[t] = past[s, i][t] if kv == "reuse" else (
                        heads(block.attn, x, t, 1), heads(block.attn, x, t, 2))
        result.append(logits)
        depths.append(s + 1)
    return torch.stack(result), depths


@pytest.mark.parametrize("variant", VARIANTS)
def test_policies_equal_a_reference_that_recomputes_the_prefix(variant):
    model, ids = small(**variant), tokens(1, 9, seed=3)[0]
    tau = middle_tau(model)
    for kv in policies(model):
        with torch.inference_mode():
            expected, depths = reference(model, ids, tau, kv)
            cache, exits = E.RowCache(model, 1), []
            for t in range(len(ids)):
                logits, depth = E.step(model, ids[t:t + 1], cache, E.exit_below("entropy", tau), kv)
                exits.append(int(depth))
                torch.testing.assert_close(logits[0], expected[t], rtol=1e-4, atol=1e-4)
        assert exits == depths and len(set(depths)) > 1, depths


@pytest.mark.parametrize("variant", VARIANTS)
def test_scorers_equal_teacher_forcing_when_no_token_exits(variant):
    model, x, y = small(**variant), tokens(), tokens(seed=2)
    with torch.no_grad():
        expected = F.cross_entropy(model(x, y)[0].transpose(1, 2), y, reduction="none")
    scorers = [E.score_by_step] + ([] if model.cfg.n_coda else [E.score_at_once])
    for scorer in scorers:
        nats, depth = scorer(model, x, y, E.exit_below("entropy", 0.0))
        torch.testing.assert_close(nats, expected, rtol=1e-4, atol=1e-4)
    ce = X.score_exit_points(model, [(x, y)])["ce"][-1]
    torch.testing.assert_close(ce.view(x.shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.get("n_coda", 1)])
@pytest.mark.parametrize("criterion", E.CRITERIA)
def test_scoring_at_once_is_exact_without_a_coda(variant, criterion):
    model, x, y = small(**variant), tokens(), tokens(seed=2)
    rule = E.exit_below(criterion, middle_tau(model, criterion))
    for kv in policies(model):
        nats, depth = E.score_by_step(model, x, y, rule, kv)
        again, same = E.score_at_once(model, x, y, rule, kv)
        assert torch.equal(depth, same) and 1 < depth.float().mean() < E.n_stages(model.cfg)
        torch.testing.assert_close(nats, again, rtol=1e-4, atol=1e-4)
        forced = E.score_at_once(model, x, y, E.exit_at(depth), kv)[0]
        torch.testing.assert_close(nats, forced, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [CODA, dict(CODA, readout="final", loop_norm=False), dict(UNLOOPED, n_coda=1)])
def test_scoring_at_once_is_exact_with_a_coda_where_no_test_reads(variant):
    """Depths that are known, as of random exits, and the change of the state: no decision waits for the coda."""
    model, x, y = small(**variant), tokens(), tokens(seed=2)
    known = torch.randint(1, E.n_stages(model.cfg) + 1, x.shape, generator=torch.Generator().manual_seed(3))
    for rule in (E.exit_at(known), E.exit_below("change", middle_tau(model, "change"))):
        for kv in policies(model):
            nats, depth = E.score_by_step(model, x, y, rule, kv)
            again, same = E.score_at_once(model, x, y, rule, kv)
            assert torch.equal(depth, same) and len(depth.unique()) > 1
            torch.testing.assert_close(nats, again, rtol=1e-4, atol=1e-4)


def test_fewer_windows_have_the_numbers_they_had():
    """A policy on every second window: the nats and depths that these windows have among all of them."""
    model, x, y = small(**CODA), tokens(6), tokens(6, seed=2)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    test = X.TestText(batches, torch.arange(6), X.score_exit_points(model, batches), None, 1.0, C.costs(model))
    some = X.thin_out(test, 3 * 12, batch_size=2)
    assert [len(x) for x, _ in some.batches] == [2, 1] and some.document.tolist() == [0, 2, 4]
    rules = [E.exit_below("entropy", middle_tau(model))] * 2
    scored = (X.score_batches(model, parts, rules, "copy") for parts in (batches, some.batches))
    for whole, part in zip(*scored):
        torch.testing.assert_close(part.view(3, 12), whole.view(6, 12)[::2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(some.scores["ce"].view(-1, 3, 12), test.scores["ce"].view(-1, 6, 12)[:, ::2])
    assert X.thin_out(test, 10 ** 6, 2).scores["ce"].shape == test.scores["ce"].shape


# --- rows ---
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("criterion", ["entropy", "change"])
def test_batched_rows_equal_batch_1(variant, criterion):
    model, x, y = small(**variant), tokens(), tokens(seed=2)
    rule = E.exit_below(criterion, middle_tau(model, criterion))
    for kv in policies(model):
        nats, depth = E.score_by_step(model, x, y, rule, kv)
        assert len(depth.unique()) > 1
        for i in range(len(x)):
            alone, alone_depth = E.score_by_step(model, x[i:i + 1], y[i:i + 1], rule, kv)
            assert torch.equal(alone_depth[0], depth[i])
            torch.testing.assert_close(alone[0], nats[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_any_length_generate_as_alone(temperature):
    model = small(**PLAIN)
    prompts, rule = [[5], [7, 8, 9, 10], [1, 2]], E.exit_below("entropy", middle_tau(model))
    rows, depths = E.generate(model, prompts, 5, rule, "copy", temperature, seed=3)
    for i, prompt in enumerate(prompts):
        alone, alone_depths = E.generate(model, [prompt], 5, rule, "copy", temperature, seed=3 + i)
        assert alone == [rows[i]] and alone_depths == [depths[i]]
        assert len(rows[i]) == len(prompt) + 5 == len(depths[i]) + 1


def test_rows_that_left_are_not_computed():
    model, x, rows = small(**PLAIN), tokens(), []
    rule = E.exit_below("entropy", middle_tau(model))
    model.recur[0].register_forward_hook(lambda module, inputs, out: rows.append(len(inputs[0])))
    _, depth = E.score_by_step(model, x, x, rule)
    assert sum(rows) == depth.sum() and max(rows) == 4 and min(rows) < 4


def test_a_decision_looks_at_no_later_token():
    model, x = small(**CODA), tokens()
    changed = x.clone()
    changed[:, 6:] = (x[:, 6:] + 1) % 100
    rule = E.exit_below("entropy", middle_tau(model))
    for scorer, m in ((E.score_by_step, model), (E.score_at_once, small(**PLAIN))):
        a, b = scorer(m, x, x, rule), scorer(m, changed, changed, rule)
        assert torch.equal(a[1][:, :6], b[1][:, :6]) and not torch.equal(a[1], b[1])


# --- cost ---
@pytest.mark.parametrize("variant", VARIANTS)
def test_costs_agree_with_the_counter_of_torch(variant):
    """At the last position of the context, where attention reads all T keys, routers aside."""
    model = small(**dict(variant, n_expert=0))
    cfg, c = model.cfg, C.costs(model)
    assert c.full == LoopedLM.flops_per_token(cfg, train=False)
    for d in range(1, c.stages + 1):
        for reads in (False, True):
            for kv in policies(model):
                cache = E.RowCache(model, 1)
                cache.length = cfg.block_size - 1
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    E.step(model, torch.tensor([3]), cache, E.exit_at(torch.full((1, cfg.block_size), d), reads), kv)
                share = C.saved(c, torch.tensor([d]), reads, kv)["charged"]
                assert counter.get_total_flops() == pytest.approx(c.full * (1 - share), rel=1e-9)


def test_saved_is_monotone_in_tau_and_each_token_leaves_once():
    model, x = small(**PLAIN), tokens(16)
    scores, c = X.score_exit_points(model, [(x, x)]), C.costs(model)
    before = -math.inf
    for tau in (0.0, *scores["entropy"].flatten().quantile(torch.linspace(0, 1, 9)).tolist(), math.inf):
        depth = X.first_below(scores["entropy"], tau)
        assert depth.shape == (x.numel(),) and 1 <= depth.min() and depth.max() <= 3
        share = C.saved(c, depth, True, "copy")
        assert share["charged"] >= before and share["charged"] <= share["head"] <= share["layers"]
        before = share["charged"]
        plain = [next((s + 1 for s in range(2) if scores["entropy"][s, i] < tau), 3) for i in range(x.numel())]
        assert depth.tolist() == plain
    assert before > 0 and C.saved(c, torch.full((5,), 3), False)["charged"] == 0
    assert C.saved(c, torch.tensor([1]), False)["layers"] == pytest.approx(2 / 3)


# --- frontier ---
def test_tau_reaches_its_target_on_the_split_it_was_chosen_on():
    model, x = small(**PLAIN), tokens(64)
    scores, c = X.score_exit_points(model, [(x, x)]), C.costs(model)
    for way in ("layers", "charged"):
        def saving(depth):
            return C.saved(c, depth, True)[way]
        tau = X.calibrate(scores["entropy"], 0.2, saving)
        assert saving(X.first_below(scores["entropy"], tau)) == pytest.approx(0.2, abs=0.003)
        assert X.calibrate(scores["entropy"], 0.9, saving) is None


def test_baselines_cost_what_the_exits_cost():
    model, x = small(**PLAIN), tokens(64)
    scores, c = X.score_exit_points(model, [(x, x)]), C.costs(model)
    depth = X.first_below(scores["entropy"], middle_tau(model))
    for way in ("layers", "charged"):
        saving = C.saved(c, depth, True)
        q = C.exit_chance(c, depth, saving, way, "reuse")
        random = q * C.saved(c, depth, False)[way]
        assert random == pytest.approx(max(saving[way], 0), abs=1e-9) and 0 <= q <= 1 and (q == 1) == (way == "layers")
        fixed = [C.saved(c, torch.tensor([d]), False)[way] for d in (1, 2, 3)]
        for saving in (0.0, 0.1, 0.4, fixed[0]):
            d, share = C.neighbours(fixed, saving)
            assert share * fixed[d - 1] + (1 - share) * fixed[d] == pytest.approx(saving, abs=1e-6)
        assert C.neighbours(fixed, -0.1) == (2, 0)


def test_intervals_resample_documents():
    document = torch.arange(12).repeat_interleave(5)
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)).repeat_interleave(5 * 4)
    boot = X.Bootstrap(document, 4)
    got = boot(values)
    assert boot.unit == "documents" and boot.groups == 12
    spread = values[::20].std().item() / 12 ** 0.5            # of 12 documents, not of 240 tokens
    assert got["nats"] == pytest.approx(values.mean().item())
    assert (got["high"] - got["low"]) / (2 * 1.96) == pytest.approx(spread, rel=0.15)
    assert X.Bootstrap(document[:10], 4).unit == "windows"


def test_schedule_claims_what_was_asked():
    c = C.costs(LoopedLM(Config(**{**SMALL, **PLAIN})))
    for target in (0.1, 0.3, 0.5):
        depth = S.plan_depths(c, 1000, target, True)
        assert C.saved(c, depth[0], True)["charged"] == pytest.approx(target, abs=0.001)
        each, count = depth.unique(return_counts=True)
        assert len(each) == 2 and each[1] == each[0] + 1
        assert (depth[0, :500] == each[0]).sum() == pytest.approx(count[0] / 2, abs=1)       # spread evenly


# --- as a script ---
@pytest.fixture
def folder(corpus, tmp_path):
    """folder(name, **config) writes the checkpoint of an untrained model, as train.py would."""
    def make(name, **kw):
        model = small(**{**kw, "vocab_size": 300, "block_size": 32})
        (tmp_path / name).mkdir()
        args = dict(data=str(corpus), vocab_size=0, block_size=32, seed=0)
        T.save_checkpoint(tmp_path / name / "ckpt.pt", model=model.state_dict(), config=asdict(model.cfg), args=args)
        return str(tmp_path / name)
    return make


@pytest.mark.parametrize("variant", [PLAIN, CODA, UNLOOPED, dict(PLAIN, n_expert=4, n_loop=2)])
def test_study_of_a_run(folder, tmp_path, capsys, variant):
    X.main(["--ckpt", folder("run", **variant), "--tokens=320", "--device=cpu"])
    (r,) = json.loads((tmp_path / "run" / "early_exit.json").read_text())
    out, cfg = capsys.readouterr().out, Config(**{**SMALL, **variant})
    assert (tmp_path / "run" / "early_exit.png").stat().st_size > 20_000
    assert len(r["layers"]) == cfg.depth() - cfg.n_coda and r["layers"][-1]["jsd"] == pytest.approx(0, abs=1e-6)
    assert r["layers"][0]["jsd"] > 0.01 and sum(x["boundary"] for x in r["layers"]) == r["stages"]
    assert set(r["policies"]) == ({"copy", "reuse"} if cfg.n_loop > 1 else {"copy"})
    first = r["frontier"]["layers"]["entropy"][0]
    assert first["target"] == 0 and first["exits"] == 0 and first["lost"]["nats"] == 0
    assert r["oracle"]["saved"]["layers"] >= 0 and "out of reach" in out + "out of reach"
    for points in (*r["frontier"]["charged"].values(), *r["policies"].values()):
        for p in points:
            if p["tau"] is not None:
                assert p["lost"]["low"] <= p["lost"]["nats"] <= p["lost"]["high"]
                assert p["nats"] - r["fixed"][-1]["nats"] == pytest.approx(p["lost"]["nats"], abs=1e-5)


def test_title_of_the_frontier_says_what_the_numbers_say():
    def run(low, high, tau=1.0):
        points = [{"target": 0.1, "tau": tau, "vs_fixed": {"nats": (low + high) / 2, "low": low, "high": high}},
                  {"target": 0.2, "tau": 1.0, "vs_fixed": {"nats": 9, "low": 8, "high": 10}}]
        return {"criterion": "change", "frontier": {"charged": {"change": points}}}
    worse, better, level = run(0.001, 0.003), run(-0.003, -0.001), run(-0.001, 0.001)
    assert "exits by change lose +0.0020 [+0.0010, +0.0030] nats more" in frontier_title([worse])
    assert "in 2 of 4 models, less in 1" in frontier_title([worse, better, level, worse])
    assert "out of reach" in frontier_title([run(0, 0, tau=None)])


def test_several_runs_share_one_plot(folder, tmp_path):
    a, b = folder("a", **PLAIN), folder("b", **UNLOOPED)
    X.main(["--ckpt", a, b, "--tokens=64", "--kv=full", f"--out_dir={tmp_path / 'both'}", "--device=cpu"])
    results = json.loads((tmp_path / "both" / "early_exit.json").read_text())
    assert [r["run"] for r in results] == ["a", "b"] and all(r["policies"] == {} for r in results)
    assert (tmp_path / "both" / "early_exit.png").is_file() and not (tmp_path / "a" / "early_exit.png").exists()


def test_generation_prints_passes_and_speed(folder, tmp_path, capsys):
    run = folder("run", **PLAIN)
    X.main(["--ckpt", run, "--prompt", "abc", "bad cab", "--exit_tau=4", "--max_new_tokens=6", "--rounds=1",
            f"--json={tmp_path / 'g.json'}", "--device=cpu"])
    out, results = capsys.readouterr().out, json.loads((tmp_path / "g.json").read_text())
    assert len(results) == 2 and out.count("tokens/s with exits") == 2 and "passes before each token" in out
    assert results[0]["text"].startswith("abc") and set(results[0]["depths"]) <= {1, 2, 3}


@pytest.mark.parametrize("flags", [["--draft_tokens=3"], ["--temperature=0.8", "--top_k=5"]])
def test_drafting_prints_text_acceptance_and_speed(folder, tmp_path, capsys, flags):
    run = folder("run", **CODA)
    X.main(["--ckpt", run, "--prompt", "abc", "bad cab", "--draft_passes=2", "--max_new_tokens=40", "--rounds=1",
            f"--json={tmp_path / 'd.json'}", "--device=cpu", *flags])
    out, results = capsys.readouterr().out, json.loads((tmp_path / "d.json").read_text())
    assert out.count("tokens/s with drafting") == 2 and out.count("accepted by position of the draft") == 2
    assert out.count("the same text") == (0 if "--top_k=5" in flags else 2)
    assert results[0]["text"].startswith("abc") and sum(n + 1 for _, n in results[0]["rounds"]) == 40


def test_acceptance_by_position():
    """Four drafts: a position counts where all guesses before it were accepted."""
    assert S.acceptance([(3, 0), (3, 1), (3, 3), (1, 1)]) == [3 / 4, 1 / 2, 1]
    assert S.acceptance([(2, 0)]) == [0] and S.acceptance([(0, 0)]) == []


def test_study_of_drafting(folder, tmp_path, capsys):
    a, b = folder("a", **PLAIN), folder("b", **dict(CODA, n_loop=2))
    X.main(["--ckpt", a, b, "--draft_study", "--rounds=1", "--max_new_tokens=6", "--temperature=0.8", "--device=cpu",
            f"--out_dir={tmp_path / 'both'}"])
    results = json.loads((tmp_path / "both" / "draft_study.json").read_text())
    assert (tmp_path / "both" / "draft_study.png").stat().st_size > 20_000
    assert [(r["run"], r["temperature"]) for r in results] == [("a", 0), ("b", 0), ("a", 0.8), ("b", 0.8)]
    assert [len(r["rows"]) for r in results] == 2 * [2 * len(S.LENGTHS), len(S.LENGTHS)]
    rows = [row for r in results for row in r["rows"]]
    assert all(row["text"] == "the same text" for r in results[:2] for row in r["rows"])
    assert all(row["low"] <= row["speed_up"] <= row["high"] for row in rows)
    assert "accepted by position" in capsys.readouterr().out
    with open(tmp_path / "both" / "draft_study.csv", encoding="utf-8") as f:
        table = list(csv.DictReader(f))
    assert [line["run"] for line in table] == [r["run"] for r in results for _ in r["rows"]]
    for line, row in zip(table, rows, strict=True):
        assert (line["draft_passes"], line["draft_tokens"]) == (str(row["draft_passes"]), str(row["draft_tokens"]))
        assert float(line["cost"]) * float(line["speed_up"]) == pytest.approx(row["tokens_per_round"], rel=2e-3)


def test_forced_savings_are_timed(folder, tmp_path):
    X.main(["--ckpt", folder("run", **PLAIN), "--force_saved", "30", "50", "--rounds=1", "--device=cpu",
            f"--json={tmp_path / 'f.json'}"])
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert rows["30%"]["claimed"] == pytest.approx(0.3, abs=0.02) and rows["50%"]["time_saved"] < 1


@pytest.mark.parametrize("flags, says", [
    (["--exit_tau=-1", "--prompt", "a"], "exit_tau=-1"), (["--prompt", ""], "prompt is empty"),
    (["--prompt", "ab " * 200], "block_size=32"), (["--kv", "full", "--prompt", "a"], "--kv=full"),
    (["--force_saved", "99"], "force_saved=99"), (["--tokens=0"], "tokens=0"), (["--nosuch"], "--nosuch"),
    (["--exit_tau=nan"], "exit_tau=nan"), (["--json=/proc/x/y.json"], "cannot write"),
    (["--criterion=luck"], "criterion"), (["--exit_tau=2"], "--exit_tau says how to generate"),
    (["--prompt", "a", "--kv", "copy", "reuse"], "one --kv"),
    (["--prompt", "a", "--force_saved", "30"], "two measurements"),
    (["--draft_study", "--force_saved", "30"], "two measurements"), (["--draft_passes=1"], "give --prompt as well"),
    (["--prompt", "a", "--draft_passes=3"], "--draft_passes=3: must be at least 1 and fewer than the model's 3"),
    (["--prompt", "a", "--draft_passes=1", "--draft_tokens=few"], "--draft_tokens=few"),
    (["--prompt", "a", "--draft_passes=1", "--draft_tokens=0"], "--draft_tokens=0"),
    (["--prompt", "a", "--draft_passes=1", "--exit_tau=2"], "--exit_tau is for exits"),
    (["--prompt", "a", "--draft_passes=1", "--kv", "copy"], "--kv is for exits")])
def test_bad_input_is_one_sentence(folder, capsys, flags, says):
    run = folder("run", **PLAIN)
    with pytest.raises(SystemExit) as e:
        X.main(["--ckpt", run, "--device=cpu", *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1


def test_checkpoints_that_cannot_exit(folder, tmp_path, capsys):
    plain, one = folder("plain", **UNLOOPED), folder("one", n_loop=1, n_prelude=0, n_recur=1, n_coda=0, inject="none")
    for flags, says in (([str(tmp_path / "nosuch")], "no checkpoint"), ([one], "no place to exit"),
                        ([plain, "--kv", "reuse"], "has no loop"),
                        ([plain, plain, "--prompt", "a"], "takes one --ckpt"),
                        ([plain, "--prompt", "a", "--draft_passes=1"], "one pass"),
                        ([plain, "--draft_study"], "one pass")):
        with pytest.raises(SystemExit) as e:
            X.main(["--ckpt", *flags, "--device=cpu"])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize("kv", ["copy", "reuse"])
def test_a_model_in_bfloat16_exits_and_generates(kv):
    model = LoopedLM(Config(**SMALL)).to(torch.bfloat16).eval()
    rows, depths = E.generate(model, [[1, 2, 3], [4]], 4, E.exit_below("entropy", 100.0), kv)
    assert [len(row) for row in rows] == [7, 5] and all(d == 1 for depth in depths for d in depth)


@pytest.mark.parametrize("flags, says", [
    (["--temperature=nan"], "temperature=nan"), (["--temperature=1e-45"], "temperature=1e-45"),
    (["--temperature=-1"], "temperature=-1"), (["--top_k=-1"], "top_k=-1")])
def test_sampling_flags_that_mean_nothing(capsys, flags, says):
    with pytest.raises(SystemExit) as e:
        X.parse(["--ckpt", "x", "--prompt", "a", *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1


def test_full_depth_and_exits_are_timed_alike(monkeypatch):
    """Every contender's clock is read after the device is done, or full depth, which never waits, would look faster."""
    clocks = []
    monkeypatch.setattr(S, "read_clock", lambda device: clocks.append(device) or float(len(clocks)))
    S.time_in_turns({"full depth": list, "exits": list}, 1, "cpu")
    assert len(clocks) == 2 + 2 * 2                        # two contenders: before the warm-up, around the round
