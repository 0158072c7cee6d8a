"""hops_exits.py: scores against whole forward passes, exits against one position at a time, costs counted by hand."""
import csv
import json

import pytest
import torch

import hops_exits as X
import train as T
from data import hops as H
from data.prepare import prepare_hops
from exit_cost import costs, saved
from exits import RowCache, entropy, exit_at, exit_below, step
from hops_study import read_passes
from lib.checkpoint import load_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs of 3 steps on the task: two seeds, a model with a coda, a plain one; and the task's meta.json."""
    folder = tmp_path_factory.mktemp("hops")
    task = prepare_hops(3, out_dir=folder / "task")
    meta = json.loads((task / "meta.json").read_text())
    lines = {"a": ["--seed=1"], "b": ["--seed=2"], "coda": ["--n_coda=1"], "plain": ["--n_loop=1"]}
    for name, line in lines.items():
        T.train(*T.parse(["--preset=hops", f"--data={task}", f"--out_dir={folder / name}", "--n_embd=32", "--n_loop=3",
                          "--raise_hops=0", "--raise_passes=false", "--batch_size=8", "--max_steps=3",
                          "--eval_tokens=1024", "--dtype=float32", "--device=cpu", "--threads=1", *line]))
    return folder, meta


@pytest.fixture(scope="module")
def model(runs):
    return load_model(runs[0] / "a", "cpu")[0]


def test_scores_equal_whole_forward_passes(runs, model):
    x, y = X.draw_split(model, runs[1], 12, "test")
    right, doubts = X.score_answers(model, x, y)
    logits = read_passes(model, x, 3)                          # (K, B, T, V)
    asked = y >= 0
    assert right.shape == (3, 12 * 8) and {len(value) for value in doubts.values()} == {2}
    for k in range(3):
        assert (right[k] == (logits[k].argmax(-1) == y)[asked]).all()
    for k in range(2):
        torch.testing.assert_close(doubts["entropy"][k], entropy(logits[k].log_softmax(-1))[asked], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("criterion", ["entropy", "change"])
def test_answers_leave_as_they_do_one_position_at_a_time(runs, model, criterion):
    x, y = X.draw_split(model, runs[1], 6, "test")
    tau = X.score_answers(model, x, y)[1][criterion].median().item()
    rule = exit_below(criterion, tau)
    right, passes = X.answer(model, x, y, rule, 8)
    cache, logits, depth = RowCache(model, len(x)), [], []
    with torch.inference_mode():
        for t in range(32):
            at_t = step(model, x[:, t], cache, rule if t >= 8 and (t - 8) % 3 == 1 else None, "reuse")
            logits.append(at_t[0])
            depth.append(at_t[1])
    depth, asked = torch.stack(depth, 1), y >= 0
    assert (depth == passes).all() and len(passes[asked].unique()) > 1
    assert (passes[~asked] == 3).all()                         # the others stay, whatever their doubt
    assert (right == (torch.stack(logits, 1).argmax(-1) == y)[asked]).all()


def test_costs_of_a_rule_by_hand(runs, model):
    meta = runs[1]
    x, y = X.draw_split(model, meta, 40, "test")
    hops = H.hops_of(x.roll(1, dims=1), 8)
    by_depth = torch.tensor([0.2, 0.6, 1.0], dtype=torch.double)
    test = X.Test(x, y, hops, by_depth, costs(model))
    point = X.measure_rule(model, test, exit_at(hops.clamp(1, 3)), False, meta)
    assert point["passes"] == [1, 2, 3] and point["full"] == 1
    share = torch.bincount(hops[y >= 0], minlength=4)[1:] / (40 * 8)               # of answers that leave at each depth
    stage, full = model.pass_flops(model.cfg, 2), model.flops_per_token(model.cfg, train=False)
    assert point["saved"] == pytest.approx(((2 * share[0] + share[1]) * stage / full).item())
    assert point["random"] == pytest.approx((share * by_depth).sum().item())
    passes = 3 - point["saved"] * full / stage                 # of a fixed depth of the same cost: between 1 and 3
    assert point["fixed"] == pytest.approx(0.2 + 0.4 * (passes - 1))


def test_tau_saves_what_was_aimed_at(runs, model):
    points, example = X.measure_run(model, runs[1], 200)
    assert len(example) == 32
    assert points["change", 0.3]["saved"] == pytest.approx(0.3, abs=0.05)          # tau is that of other maps
    assert points["entropy", 0.1]["saved"] == pytest.approx(0.1, abs=0.05)
    everybody = torch.ones(1)
    if ("entropy", 0.5) not in points:
        assert saved(costs(model), everybody, True)["charged"] < 0.5


def test_the_study_leaves_its_files(runs, tmp_path, capsys):
    folder, _ = runs
    X.main(["--ckpt", str(folder / "a"), str(folder / "b"), "--examples=40", "--threads=1", f"--out_dir={tmp_path}"])
    told = capsys.readouterr().out
    assert "2 runs" in told and "oracle" in told
    with open(tmp_path / "exits.csv", newline="") as f:
        table = list(csv.DictReader(f))
    assert {row["run"] for row in table} == {"a", "b"} and (tmp_path / "exits.png").is_file()
    assert [row["passes"] for row in table if row["rule"] == "oracle"] == ["1.00 2.00 3.00"] * 2


def test_refusals(runs, tiny, tmp_path, capsys):
    folder = runs[0]
    T.train(*T.parse(tiny("--max_steps=1")))
    for ckpt, says in ((["coda"], "no coda"), (["plain"], "need a loop"), (["a", str(tmp_path / "run")], "--preset=hops")):
        with pytest.raises(SystemExit) as e:
            X.main(["--ckpt", *[str(folder / name) for name in ckpt], f"--out_dir={tmp_path / 'x'}"])
        assert e.value.code == 2 and says in capsys.readouterr().err
