"""repeat_study.py: what it plans are runs of equal FLOPs that differ as they say, and what it shows equals a calculation
by hand."""
import csv
import shlex

import pytest
from scipy.stats import t

import repeat_study as R
from lib.flags import config_of, flops_of, parse, steps_of


def write_table(path, rows):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, ["sweep", "n_loop", "n_embd", "seed", "tokens", "flops", "val_loss"])
        writer.writeheader()
        for row in rows:
            writer.writerow({"n_loop": 1, "n_embd": 64, "seed": 42, "tokens": 4e6, "flops": 2.4e13, **row})


def test_what_is_planned_can_be_run_and_costs_the_same(capsys):
    R.main(["plan"])
    lines = capsys.readouterr().out.splitlines()
    runs = [parse(shlex.split(line)[2:])[0] for line in lines]
    assert len({args.out_dir for args in runs}) == len(runs) == 64   # 2 shares, 2 budgets, 2 widths, 2 seeds, 4 models
    for args in runs:
        sweep, run = args.out_dir.split("/")[1:]
        share, model = R.NAME.fullmatch(sweep).groups()
        layers = args.n_prelude + args.n_recur * args.n_loop + args.n_coda
        assert args.data == f"sotu-1024-{share}" and f"d{args.n_embd}-r{args.n_loop}-s{args.seed}" in run
        assert (layers, args.n_loop) in {None: [(10, 1), (10, 4), (10, 8)], "short": [(4, 1)]}[model] and args.bptt == 0
        cfg = config_of(args, 1024)
        flops = steps_of(args, cfg) * args.batch_size * cfg.block_size * flops_of(args, cfg)
        assert args.max_flops in R.BUDGETS and flops == pytest.approx(args.max_flops, rel=6e-3)


def test_each_model_is_taken_at_its_best_and_compared_by_hand(tmp_path, capsys):
    write_table(tmp_path / "runs.csv", [
        dict(sweep="repeat-0.05", val_loss=4.00), dict(sweep="repeat-0.05", val_loss=4.02, seed=43),
        dict(sweep="repeat-0.05", val_loss=3.80, flops=6e12, tokens=1e6),          # the plain model stops earlier
        dict(sweep="repeat-0.05", n_loop=4, val_loss=3.9), dict(sweep="repeat-0.05", n_loop=4, val_loss=3.7, n_embd=96),
        dict(sweep="repeat-0.05", n_loop=4, val_loss=3.72, n_embd=96, seed=43),
        dict(sweep="repeat-0.05-short", val_loss=3.85), dict(sweep="repeat-1", n_loop=8, val_loss=3.1)])
    R.main(["show", f"--runs={tmp_path / 'runs.csv'}", f"--plot={tmp_path / 'x.png'}"])
    _, best = capsys.readouterr().out.split("each at its best")
    lines = {tuple(line[:27].split()): line for line in best.splitlines()[2:] if "%" in line}
    half = t.ppf(0.975, 2) * 2 ** 0.5 * 0.01                   # two cells with two seeds, 0.02 apart: sd 0.02 / sqrt(2)
    half *= (1 / 2 + 1) ** 0.5                                 # the mean of two against one
    assert f"3.710   {-0.09:+.3f} [{-0.09 - half:+.3f}, {-0.09 + half:+.3f}]" in lines["5%", "loop,", "4", "passes"]
    assert " 6e+12 " in lines["5%", "plain,", "10", "layers"] and " 5.4 " in lines["5%", "plain,", "10", "layers"]
    assert "+0.050 [" in lines["5%", "plain,", "4", "layers"]
    assert "[" not in lines["100%", "loop,", "8", "passes"]    # no plain run of its text
    assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize("rows, why", [
    ([dict(sweep="start", val_loss=3)], "line 2: is no run of this study"),
    ([dict(sweep="repeat-0.2-wide", val_loss=3)], "line 2: is no run of this study"),
    ([dict(sweep="repeat-0.2", val_loss=3, flops=1e12)], "line 2: is no run of this study"),
    ([dict(sweep="repeat-0.2", val_loss=3)], "one seed only")])
def test_refusals(rows, why, tmp_path, capsys):
    write_table(tmp_path / "runs.csv", rows)
    with pytest.raises(SystemExit) as e:
        R.main(["show", f"--runs={tmp_path / 'runs.csv'}"])
    assert e.value.code == 2 and why in capsys.readouterr().err
