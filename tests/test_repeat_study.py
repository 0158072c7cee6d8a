"""repeat_study.py: what it plans are runs of one budget that differ as they say, and what it shows equals a calculation
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
            writer.writerow({"n_embd": 64, "seed": 42, "tokens": 4e6, "flops": 2.4e13, **row})


def test_what_is_planned_can_be_run_and_costs_the_same(capsys):
    R.main(["plan"])
    lines = capsys.readouterr().out.splitlines()
    runs = [parse(shlex.split(line)[2:])[0] for line in lines]
    assert len({args.out_dir for args in runs}) == len(runs) == 32                 # shares, widths, seeds, models: 2 2 2 4
    for args in runs:
        sweep, run = args.out_dir.split("/")[1:]
        share, model = R.NAME.fullmatch(sweep).groups()
        layers = args.n_prelude + args.n_recur * args.n_loop + args.n_coda
        assert args.data == f"sotu-1024-{share}" and f"d{args.n_embd}-r{args.n_loop}-s{args.seed}" in run
        assert (layers, args.n_loop, args.bptt) in {None: [(10, 1, 0), (10, 4, 0)], "last": [(10, 4, 1)],
                                                    "short": [(4, 1, 0)]}[model]
        cfg = config_of(args, 1024)
        flops = steps_of(args, cfg) * args.batch_size * cfg.block_size * flops_of(args, cfg)
        assert flops == pytest.approx(R.BUDGET, rel=2e-3)


def test_differences_and_intervals_by_hand(tmp_path, capsys):
    write_table(tmp_path / "runs.csv", [
        dict(sweep="repeat-0.05", n_loop=1, val_loss=4.00), dict(sweep="repeat-0.05", n_loop=1, val_loss=4.02, seed=43),
        dict(sweep="repeat-0.05", n_loop=4, val_loss=3.97), dict(sweep="repeat-0.05", n_loop=4, val_loss=3.95, seed=43),
        dict(sweep="repeat-0.05-last", n_loop=4, val_loss=3.9), dict(sweep="repeat-0.05-short", n_loop=1, val_loss=4.1),
        dict(sweep="repeat-1", n_loop=4, val_loss=3.1)])
    R.main(["show", f"--runs={tmp_path / 'runs.csv'}", f"--plot={tmp_path / 'x.png'}"])
    lines = capsys.readouterr().out.splitlines()
    half = t.ppf(0.975, 2) * 0.02 / 2 ** 0.5                   # two models with two seeds, 0.02 apart: sd 0.02 / sqrt(2)
    mean = (-0.03 - 0.07) / 2
    loop = next(line for line in lines if line.endswith("loop, 4 passes") and " 5%" in line)
    assert f"3.960   {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]" in loop and " 21.4 " in loop
    half *= 2 ** 0.5                                           # one pair
    last = next(line for line in lines if line.endswith("the last"))
    assert f"{-0.1:+.3f} [{-0.1 - half:+.3f}, {-0.1 + half:+.3f}]" in last
    alone = next(line for line in lines if "100%" in line)     # no plain run of its text
    assert "[" not in alone and " 1.1 " in alone
    assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize("rows, why", [
    ([dict(sweep="start", n_loop=1, val_loss=3)], "line 2: is no run of this study"),
    ([dict(sweep="repeat-0.2", n_loop=1, val_loss=3, flops=1e12)], "line 2: is no run of this study"),
    ([dict(sweep="repeat-0.2", n_loop=1, val_loss=3)], "one seed only")])
def test_refusals(rows, why, tmp_path, capsys):
    write_table(tmp_path / "runs.csv", rows)
    with pytest.raises(SystemExit) as e:
        R.main(["show", f"--runs={tmp_path / 'runs.csv'}"])
    assert e.value.code == 2 and why in capsys.readouterr().err

