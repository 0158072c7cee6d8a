"""start_study.py: what it plans can be run, and what it shows equals a calculation by hand."""
import csv
import shlex

import numpy as np
import pytest
from scipy.stats import t

import start_study as S
from lib.flags import config_of, parse, steps_of

COLUMNS = ["sweep", "run", "seed", "n_loop", "n_embd", "n_expert", "n_once", "n_rec", "tokens", "flops", "val_loss"]


def write_table(path, rows):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({"sweep": "x", "n_embd": 64, "n_expert": 0, "n_once": 1e5, "n_rec": 1e5, "tokens": 1e6, **row})


@pytest.fixture
def tables(tmp_path):
    """A baseline with two seeds of three shapes, and runs that start from others."""
    base = [dict(run=f"b-r{r}-s{seed}", seed=seed, n_loop=r, flops=9.6e12, val_loss=3 + 0.1 * r + 0.01 * (seed - 42))
            for r in (1, 2, 4) for seed in (42, 43)]
    runs = [dict(run="plain25-s42", seed=42, n_loop=1, flops=2.4e12, val_loss=4),
            dict(run="plain25-to-r2-s42", seed=1042, n_loop=2, flops=7.2e12, val_loss=3.25),
            dict(run="plain25-to-r2-s43", seed=1043, n_loop=2, flops=7.2e12, val_loss=3.24),
            dict(run="plain50-to-r4-last-s43", seed=1043, n_loop=4, flops=4.8e12, val_loss=3.31),
            dict(run="loop50-to-r1-s42", seed=1042, n_loop=1, flops=4.8e12, val_loss=3.2)]
    write_table(tmp_path / "base.csv", base)
    write_table(tmp_path / "runs.csv", runs)
    return [f"--baseline={tmp_path / 'base.csv'}", f"--runs={tmp_path / 'runs.csv'}", f"--plot={tmp_path / 'x.png'}"]


def test_what_is_planned_can_be_run(capsys):
    folders, flops = set(), {}
    for part in ("first", "then"):
        S.main(["plan", part])
        for line in capsys.readouterr().out.splitlines():
            words = shlex.split(line)
            assert words[:2] == ["python", "train.py"]
            flags = dict(word[2:].split("=") for word in words[2:])
            source = flags.pop("init_from", None)
            assert source is None or source in folders         # it is there before
            flags.pop("tie", None)
            args, _ = parse([f"--{name}={value}" for name, value in flags.items()])
            assert args.n_prelude + args.n_loop * args.n_recur + args.n_coda == 10 and args.n_embd == S.WIDTH
            assert args.bptt == 0                          # as in the baseline that they are compared with
            assert steps_of(args, config_of(args, 1024)) > 10
            folders.add(args.out_dir)
            flops[args.out_dir] = args.max_flops + flops.get(source, 0)
            if part == "then":
                assert S.NAME.fullmatch(args.out_dir.rpartition("/")[2]) and flops[args.out_dir] == S.BUDGET
                assert args.seed == int(source[-2:]) + 1000
    assert len(folders) == 38


def test_differences_and_intervals_by_hand(tables, tmp_path, capsys):
    S.main(["show", *tables])
    lines = capsys.readouterr().out.splitlines()
    rows = {tuple(line.split()[:6]): line for line in lines if "r = " in line}
    noise = np.sqrt(3 * 2 * 0.005 ** 2 / 3)                    # three shapes with two seeds, 0.01 apart
    half = t.ppf(0.975, 3) * noise
    mean = (0.05 + 0.03) / 2
    assert f"2     {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]" in rows["plain", "25%", "r", "=", "2", "mean"]
    half *= 2 ** 0.5                                           # one seed
    assert f"1     {0.1:+.3f} [{0.1 - half:+.3f}, {0.1 + half:+.3f}]" in rows["loop", "50%", "r", "=", "1", "mean"]
    assert f"{-0.1:+.3f} [" in rows["plain", "50%", "r", "=", "4", "last"] and len(rows) == 3
    assert (tmp_path / "x.png").is_file()


def test_refusals(tables, tmp_path, capsys):
    def says(line, words):
        with pytest.raises(SystemExit) as e:
            S.main(line)
        assert e.value.code == 2 and words in capsys.readouterr().err
    write_table(tmp_path / "runs.csv", [dict(run="plain25-to-r2-s42", seed=1, n_loop=2, flops=9.6e12, val_loss=3)])
    says(["show", *tables], "start_study.py plan")
    write_table(tmp_path / "runs.csv", [dict(run="plain25-to-r2-s44", seed=1, n_loop=2, flops=7.2e12, val_loss=3)])
    says(["show", *tables], "seed 44")
    write_table(tmp_path / "runs.csv", [dict(run="plain25-s42", seed=42, n_loop=1, flops=2.4e12, val_loss=4)])
    says(["show", *tables], "plan then")
