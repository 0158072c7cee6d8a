"""readout_study.py: the lemmas, each diagnostic against plain arithmetic, the study end to end on a tiny corpus."""
import csv
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import readout_study as R
import train as T
from lib import machine
from lib.checkpoint import data_of, load_model
from model import Config, LoopedLM
from test_model import tokens

LOOP = dict(vocab_size=100, block_size=32, n_embd=32, n_head=2, n_prelude=0, n_coda=0, n_loop=3, inject="none",
            loop_norm=False)


def looped(**kw):
    torch.manual_seed(0)
    model = LoopedLM(Config(**{**LOOP, **kw}))
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model.eval()


# --- lemmas ---
def some_states(n=50, D=24):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(n, D, generator=g, dtype=torch.float64) * torch.logspace(-1, 3, n, dtype=torch.float64)[:, None]
    return h, torch.randn(60, D, generator=g, dtype=torch.float64), torch.arange(n)


def test_visibility():
    h, weight, targets = some_states()
    cosine = {name: R.visibility(f, h, weight, targets) for name, f in R.readouts(0.0).items()}
    assert cosine["RMSNorm"].max() < 1e-10 and cosine["LayerNorm"].max() < 1e-10 and cosine["raw"].min() > 1e-4
    unit, with_eps = h[:10] / h[:10].norm(dim=-1, keepdim=True), R.readouts(1e-4)["RMSNorm"]
    short, long = (R.visibility(with_eps, s * unit, weight, targets[:10]).mean() for s in (1, 10))
    assert short / long == pytest.approx(100, rel=0.1)     # what eps lets through falls with the square of the length


def test_visibility_is_the_derivative_along_the_state():
    """|<g, h>| from finite differences of the loss in the length of h."""
    h, weight, targets = some_states()
    raw = R.readouts(0.0)["raw"]

    def loss(c):
        return F.cross_entropy((c * h) @ weight.T, targets, reduction="none")
    slope = (loss(1 + 1e-6) - loss(1 - 1e-6)) / 2e-6
    x = h.clone().requires_grad_()
    g, = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets, reduction="sum"), x)
    expected = slope.abs() / (g.norm(dim=-1) * h.norm(dim=-1))
    torch.testing.assert_close(R.visibility(raw, h, weight, targets), expected, rtol=1e-4, atol=1e-7)


def test_first_order_residuals_fall_with_the_scale():
    u = torch.randn(20, 16, dtype=torch.float64)
    u = u / u.square().mean(-1, keepdim=True).sqrt()
    b = torch.randn(20, 16, dtype=torch.float64)
    rows = R.activity(lambda x: b, u, (10.0, 100.0, 1000.0))
    for (_, rms, turn), (_, rms10, turn10) in zip(rows, rows[1:]):
        assert rms / rms10 == pytest.approx(10, rel=0.2) and turn / turn10 == pytest.approx(100, rel=0.3)
    assert R.activity(lambda x: b + 0.01 * x ** 2, u, (10.0, 1000.0))[1][2] > rows[2][2] * 100


# --- diagnostics ---
def test_clamp_keeps_the_length_of_the_first_pass_and_leaves_it_unchanged():
    model, idx = looped(), tokens()
    free, _ = R.passes(model, idx, 4)
    clamped, _ = R.passes(model, idx, 4, clamp=True)
    torch.testing.assert_close(clamped[0], free[0], rtol=0, atol=0)
    for h in clamped[1:]:
        torch.testing.assert_close(h.norm(dim=-1), clamped[0].norm(dim=-1))
    assert not torch.allclose(clamped[-1], free[-1])


def test_clamp_is_the_identity_where_the_length_does_not_grow():
    model, idx = looped(loop_norm=True), tokens()
    for free, clamped in zip(R.passes(model, idx, 4)[0], R.passes(model, idx, 4, clamp=True)[0]):
        torch.testing.assert_close(clamped, free, rtol=1e-4, atol=1e-5)


def test_update_splits_into_radial_and_orthogonal():
    g = torch.Generator().manual_seed(0)
    before, after = torch.randn(40, 8, generator=g).double() * 5, torch.randn(40, 8, generator=g).double() * 5
    u = R.update_of_pass(before, after)
    b = (after - before).square().mean(-1)
    s = before.square().mean(-1).sqrt()
    a = ((after - before) * before).mean(-1) / s
    assert u["update_along"] == pytest.approx(a.mean().item()) and u["rms_before"] == pytest.approx(s.mean().item())
    assert u["update_across"] == pytest.approx((b - a ** 2).sqrt().mean().item())        # Pythagoras
    grown = R.update_of_pass(before, 3 * before)
    assert grown["update_across"] == pytest.approx(0, abs=1e-9) and grown["turned"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("readout, visible", [("norm", False), ("raw", True), ("final", None)])
def test_radial_share_sees_the_length_through_a_raw_readout_only(readout, visible):
    model, x, y = looped(readout=readout).double(), tokens(), tokens(seed=2)
    model.table = model.table.double()
    states, context = R.passes(model, x, 3)
    first, last = (R.radial_share(model, states, context, y, k) for k in (0, 2))
    for share, sees in ((first, visible if visible is not None else True), (last, bool(visible))):
        assert (share["cos_per_token"] > 0.2 * share["chance_per_token"]) == sees
        assert (abs(share["dloss_dlog_length"]) > 1e-3) == sees
    chance = F.cosine_similarity(torch.randn(20000, 32), torch.randn(20000, 32)).abs().mean().item()
    assert first["chance_per_token"] == pytest.approx(chance, rel=0.05)


def test_tail_index_of_known_tails():
    rng = np.random.default_rng(0)
    assert R.tail_index(rng.pareto(1.5, 200_000) + 1) == pytest.approx(1.5, rel=0.1)
    assert R.tail_index(10 + rng.standard_normal(200_000)) > 20


def test_tail_tokens_name_what_is_long():
    idx, lengths = torch.full((4, 50), 7), np.ones(200)
    idx[2, 0], idx[3, 0] = 9, 9
    lengths[[100, 150]] = 5.0                              # two states, both token 9 at the first position
    tail = R.tail_tokens(lengths, idx, type("", (), {"decode": staticmethod(str)}))
    assert tail["tail_first"] == 1
    assert json.loads(tail["tail_tokens"]) == [{"token": "[9]", "share_of_tail": 1.0, "in_tail": 1.0}]


def test_ratio_is_geometric_and_paired():
    middle, low, high = R.ratio([20, 80, 40], [2, 8, 4])
    assert (middle, low, high) == pytest.approx((10, 10, 10))
    middle, low, high = R.ratio([10, 1000], [1, 1])
    assert middle == pytest.approx(100) and low < 10 and high > 1000
    assert math.isnan(R.ratio([3], [1])[1])


def test_penalty_is_the_mean_square_and_reaches_the_blocks():
    model, x, y = looped(), tokens(), tokens(seed=2)
    plain, penalised = (model(x, y, norm_penalty=v)[1]["loss"] for v in (0.0, 0.3))
    states, _ = R.passes(model, x, 3)
    mean_square = np.mean([h.square().mean().item() for h in states])
    assert (penalised - plain).item() == pytest.approx(0.3 * mean_square, rel=1e-4)
    (penalised - plain).backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.recur.parameters())


def test_the_penalty_shortens_and_the_readout_norm_lets_grow():
    """The signature in small: fifty steps on random text, the state ends longer without the penalty than with it."""
    length = {}
    for penalty in (0.0, 0.1):
        model, x = looped(), tokens(8, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(50):
            _, out = model(x, x.roll(-1, 1), loss="per_loop", norm_penalty=penalty)
            optimizer.zero_grad()
            out["loss"].backward()
            optimizer.step()
        length[penalty] = out["norm"][-1].item()
    assert length[0.0] > 1.5 * length[0.1]


def test_diagnosis_of_a_run(tiny, tmp_path):
    """Losses at K equal an n_loop = K evaluation, and the table has a row for each pass."""
    T.train(*T.parse(tiny("--loss=per_loop", "--n_prelude=0", "--n_coda=0", "--inject=none", "--loop_norm=false",
                          "--n_loop=2")))
    R.main([f"--ckpt={tmp_path / 'run'}", "--tokens=640", f"--csv={tmp_path / 'run.csv'}"])
    with open(tmp_path / "run.csv", newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert [row["pass"] for row in rows] == ["1", "2", "3", "4"] and all(row["tok_per_s"] for row in rows)
    for name, there in (("cos_per_token", [1, 1, 0, 0]), ("update_along", [0, 1, 1, 1]), ("clamp_nats", [0, 1, 0, 0])):
        assert [row[name] != "" for row in rows] == [bool(x) for x in there]
    model, state = load_model(tmp_path / "run")
    folder, meta = data_of(state)
    x, y = R.even_windows(folder, meta, "val", 640, 32)
    with torch.no_grad():
        for k, row in enumerate(rows, 1):
            assert float(row["nats"]) == pytest.approx(model(x, y, n_loop=k)[1]["ce"].item(), rel=1e-4)
        lengths = model(x, y)[1]["norm"]
    assert float(rows[1]["length_mean"]) == pytest.approx(lengths[1].item(), rel=1e-4)
    assert float(rows[1]["cos_per_token"]) < 1e-5 and json.loads(rows[1]["tail_tokens"])


def test_a_model_of_one_pass_has_no_second(tiny, tmp_path, capsys):
    """Nothing is said of a pass that was never trained."""
    T.train(*T.parse(tiny("--n_loop=1", "--max_steps=1")))
    row, = R.diagnose(tmp_path / "run", 256)
    assert "update_along" not in row and row["length_mean"] > 0
    R.main([f"--ckpt={tmp_path / 'run'}", "--tokens=256"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run") and " -" in line)
    assert "nan" not in row


def test_speed_is_read_when_the_device_is_done(monkeypatch):
    """Stand-in for a GPU: a clock is read after it is waited for, before and after the work."""
    events = []
    monkeypatch.setattr(machine.torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: events.append("read") or float(len(events)))
    assert machine.read_clock("cuda:0") == 2 and machine.read_clock(torch.device("cuda")) == 4
    assert events == ["wait", "read"] * 2
    machine.read_clock("cpu")
    assert events[4:] == ["read"]


def test_one_gpu_gets_one_run_at_a_time(monkeypatch):
    monkeypatch.setattr(machine, "pick_device", lambda: "cuda")
    assert machine.default_jobs() == 1
    monkeypatch.setattr(machine, "pick_device", lambda: "cpu")
    assert machine.default_jobs() == machine.os.cpu_count()


def test_title_and_picture_of_the_study(tmp_path):
    """The title is the quotient of lengths, and no finding where one of the two cells is missing."""
    def runs(length):
        return [[{"n_loop": 1, "pass": 1, "nats": 4.0, "length_mean": length * seed}] for seed in (1, 2, 4)]
    cells = {("perloop-norm", ""): runs(30), ("perloop-raw", ""): runs(10), ("perloop-raw", "tied"): runs(1)}
    title = R.plot_title(cells)
    assert title.endswith("the state is 3 [3, 3] times as long as raw")
    cells["perloop-norm", "tied"] = runs(50)
    assert R.plot_title(cells).endswith("as raw, 50 [50, 50] times with tied embedding")
    assert "times" not in R.plot_title({("terminal-norm", ""): runs(30)})
    R.plot_readout(cells, title, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
