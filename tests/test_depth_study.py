"""depth_study.py: what it plans are runs of equal FLOPs and the depths it says, and what it shows equals a calculation
by hand."""
import csv
import shlex

import pytest
from scipy.stats import t

import depth_study as D
from lib.files import ROOT
from lib.flags import config_of, flops_of, parse, steps_of

COLUMNS = ["sweep", "n_loop", "n_prelude", "n_recur", "n_coda", "n_embd", "seed", "n_once", "n_rec", "tokens", "flops",
           "val_loss"]
PAGE = (ROOT / "results" / "depth.md").read_text(encoding="utf-8")


def write_table(path, rows):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({"sweep": "plain-10", "n_loop": 1, "n_prelude": 1, "n_recur": 8, "n_coda": 1, "n_embd": 32,
                             "seed": 42, "n_once": 1e5, "n_rec": 1e5, "tokens": 4e6, **row})


def test_what_is_planned_can_be_run_and_costs_the_same(capsys):
    D.main(["plan"])
    runs = [parse(shlex.split(line)[2:])[0] for line in capsys.readouterr().out.splitlines()]
    assert len({args.out_dir for args in runs}) == len(runs) == 112            # 8 models, 7 widths and budgets, 2 seeds
    shapes = set()
    for args in runs:
        layers = args.n_prelude + args.n_recur * args.n_loop + args.n_coda
        sweep = args.out_dir.split("/")[1]
        shapes.add((layers, args.n_loop, args.bptt == 1))
        assert sweep.endswith(f"-{layers}") and sweep.startswith("last_pass") == (args.bptt == 1)
        cfg = config_of(args, 1024)
        flops = steps_of(args, cfg) * args.batch_size * cfg.block_size * flops_of(args, cfg)
        assert args.n_embd in D.WIDTHS[args.max_flops] and flops == pytest.approx(args.max_flops, rel=6e-3)
    assert shapes == set(D.MODELS.values())


def test_the_best_width_and_its_difference_by_hand(tmp_path, capsys):
    rows = []
    for budget in D.WIDTHS:
        width = D.WIDTHS[budget][0]
        rows.append(dict(flops=budget, n_embd=width, val_loss=3.0))
        rows.append(dict(flops=budget, n_embd=width, val_loss=3.2, seed=43))
    last = dict(sweep="last_pass-10", n_loop=2, n_recur=4, flops=1.5e12)
    for width, loss in ((48, 2.5), (32, 2.6), (96, 1.0)):      # 96 is not among the widths of this budget
        rows.append(dict(last, n_embd=width, val_loss=loss))
    write_table(tmp_path / "a.csv", rows)
    write_table(tmp_path / "b.csv", [dict(last, sweep="last_pass-b", n_embd=48, val_loss=0.1)])       # there already
    D.main(["show", "--runs", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), f"--plot={tmp_path / 'x.png'}"])
    out = capsys.readouterr().out
    half = t.ppf(0.975, 4) * 0.02 ** 0.5 * 1.5 ** 0.5      # four pairs of seeds 0.2 apart: sd 0.141; one against two
    assert "sd 0.141 nats (4 degrees" in out and "| 1.5e12 | plain, 10 layers | 32 | 3.100 (2) | |" in out
    assert f"| 1.5e12 | last pass, r = 2 | 48 | 2.500 (1) | -0.600 [{-0.6 - half:+.3f}, {-0.6 + half:+.3f}] |" in out
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize("seeds, changes, why", [
    ([42], {}, "tell the noise"), ([42, 43], {}, "10 layers at 3.8e+12"), ([42, 43], {"sweep": "gate"}, "runs of gate"),
    ([42, 43], {"flops": 5e12}, "no run at the FLOPs"), ([42, 43], {"n_embd": 96}, "no run at the FLOPs")])
def test_tables_that_do_not_do(tmp_path, capsys, seeds, changes, why):
    write_table(tmp_path / "a.csv", [{"flops": 1.5e12, "val_loss": 3, "seed": seed, **changes} for seed in seeds])
    with pytest.raises(SystemExit):
        D.main(["show", "--runs", str(tmp_path / "a.csv")])
    assert why in capsys.readouterr().err


def test_a_run_of_other_flops_does_not_stand_for_one(tmp_path):
    write_table(tmp_path / "a.csv", [dict(flops=6e11, val_loss=4), dict(flops=1.5e12, val_loss=3)])
    assert D.read_tables([str(tmp_path / "a.csv")])["val_loss"].tolist() == [3]


def test_a_table_without_depths(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("N,D,loss\n1e5,1e6,3\n2e5,1e6,2.9\n")
    with pytest.raises(SystemExit):
        D.main(["show", "--runs", str(tmp_path / "a.csv")])
    assert "lack the column n_prelude" in capsys.readouterr().err


def test_runs_that_two_tables_hold_are_the_same():
    """The loop of last_pass_runs.csv is that of `try`, and its plain models are those of the baseline."""
    def losses(name, sweep, n_loop):
        with open(ROOT / "results" / f"{name}_runs.csv", newline="") as f:
            rows = [row for row in csv.DictReader(f) if row["sweep"] == sweep and row["n_loop"] in n_loop]
        return {(row["n_loop"], row["n_embd"], row["seed"], row["tokens"]): row["val_loss"] for row in rows}
    tried, plain = losses("try", "last_pass", "24"), losses("baseline", "baseline", "1")
    assert len(tried) == 30 and tried.items() <= losses("last_pass", "last_pass-10", "24").items()
    assert len(plain) == 15 and plain.items() <= losses("last_pass", "plain-10", "1").items()


def test_the_table_on_the_page():
    rows, noise, spare = D.compare_models(D.read_tables(D.TABLES))
    assert f"{noise:.3f} nats, {spare} degrees of freedom" in PAGE
    for model in D.MODELS:
        cells = []
        for budget in D.WIDTHS:
            row = next((row for row in rows if (row["model"], row["budget"]) == (model, budget)), None)
            lowest = min(other["loss"] for other in rows if other["budget"] == budget)
            cells.append(cell_of(row, row and row["loss"] == lowest))
        assert f"| {model} | {' | '.join(cells)} |" in PAGE, f"| {model} | {' | '.join(cells)} |"


def test_loop_of_4_layers_less_the_plain_one_on_the_page():
    rows, _, _ = D.compare_models(D.read_tables(D.TABLES))
    loss = {(row["model"], row["budget"]): row["loss"] for row in rows}
    differences = [loss["4 layers, last pass, r = 2", budget] - loss["plain, 4 layers", budget] for budget in D.WIDTHS]
    first, second, third, fourth = [f"{value:+.3f}" for value in differences]
    half = next(row["half"] for row in rows if row["model"] == "plain, 4 layers") * 2 ** 0.5           # two seeds each
    mean = sum(differences) / 4
    words = " ".join(PAGE.split())
    assert f"{first}, {second}, {third} and {fourth} (each +- {half:.3f})" in words
    assert f"on average {mean:+.3f} [{mean - half / 2:+.3f}, {mean + half / 2:+.3f}]" in words


def cell_of(row, is_lowest):
    if row is None:
        return "not run"
    low, high = row["difference"] - row["half_difference"], row["difference"] + row["half_difference"]
    text = f"{row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]" if row["difference"] else f"{row['loss']:.3f} nats"
    return f"**{text}**" if is_lowest else text
