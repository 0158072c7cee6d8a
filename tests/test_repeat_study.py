"""repeat_study.py: what it plans are runs of equal FLOPs that differ as they say, and what it shows equals a
calculation by hand."""
import csv
import shlex

import pytest
from scipy.stats import t

import repeat_study as R
from lib.files import ROOT
from lib.flags import config_of, flops_of, parse, steps_of


def write_table(path, rows):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, ["sweep", "n_loop", "n_embd", "seed", "n_once", "n_rec", "tokens", "flops", "val_loss"])
        writer.writeheader()
        for row in rows:
            writer.writerow({"n_loop": 1, "n_embd": 64, "seed": 42, "n_once": 1e5, "n_rec": 1e5, "tokens": 4e6,
                             "flops": 2.4e13, **row})


def test_what_is_planned_can_be_run_and_costs_the_same(capsys):
    R.main(["plan"])
    lines = capsys.readouterr().out.splitlines()
    runs = [parse(shlex.split(line)[2:])[0] for line in lines]
    assert len({args.out_dir for args in runs}) == len(runs) == 96   # 2 shares, 3 budgets, 2 widths, 2 seeds, 4 models
    for args in runs:
        sweep, run = args.out_dir.split("/")[1:]
        share, model = R.NAME.fullmatch(sweep).groups()
        layers = args.n_prelude + args.n_recur * args.n_loop + args.n_coda
        assert args.data == f"sotu-1024-{share}" and f"d{args.n_embd}-r{args.n_loop}-s{args.seed}" in run
        assert (layers, args.n_loop) in {None: [(10, 1), (10, 4), (10, 8)], "short": [(4, 1)]}[model] and args.bptt == 0
        cfg = config_of(args, 1024)
        flops = steps_of(args, cfg) * args.batch_size * cfg.block_size * flops_of(args, cfg)
        assert args.max_flops in R.BUDGETS and flops == pytest.approx(args.max_flops, rel=6e-3)


def test_differences_at_one_cell_and_at_the_best_by_hand(tmp_path, capsys):
    rows = []
    for sweep, n_loop, losses in (("repeat-0.05", 1, (3.8, 4.0)), ("repeat-0.05", 4, (3.9, 3.7)),
                                  ("repeat-0.05", 8, (3.9, 3.7)), ("repeat-0.05-short", 1, (3.6, 3.5))):
        for flops, loss in zip((6e12, 2.4e13), losses):
            rows.append(dict(sweep=sweep, n_loop=n_loop, flops=flops, val_loss=loss, tokens=flops / 6e6))
    rows.append(dict(sweep="repeat-0.05", n_loop=4, flops=2.4e13, val_loss=3.72, seed=43, tokens=4e6))
    rows.append(dict(sweep="repeat-0.05", n_loop=4, flops=2.4e13, val_loss=3.0, n_embd=96))      # the others have it not
    write_table(tmp_path / "runs.csv", rows)
    R.main(["show", f"--runs={tmp_path / 'runs.csv'}", f"--plot={tmp_path / 'x.png'}"])
    every, best = capsys.readouterr().out.split("each model at its best")
    error = t.ppf(0.975, 1) * 0.02 / 2 ** 0.5                  # one cell with two seeds, 0.02 apart

    def said(text, name, width, flops):
        lines = [line for line in text.splitlines() if f" 5%   {name}" in line and f" {width} " in line]
        lines = [line for line in lines if flops in line]
        assert len(lines) == 1, lines
        return lines[0]
    half = error * (1 / 2 + 1) ** 0.5                          # a mean of two against one
    assert f"3.710 (2)   {-0.29:+.3f} [{-0.29 - half:+.3f}, {-0.29 + half:+.3f}]" in said(every, "loop, 4", 64, "2.4e+13")
    assert f"3.710 (2)   {-0.09:+.3f} [{-0.09 - half:+.3f}, {-0.09 + half:+.3f}]" in said(best, "loop, 4", 64, "2.4e+13")
    half = error * 2 ** 0.5
    assert f"3.500 (1)   {-0.3:+.3f} [{-0.3 - half:+.3f}, {-0.3 + half:+.3f}]" in said(best, "plain, 4", 64, "2.4e+13")
    assert "3.800 (1)" in said(best, "plain, 10", 64, "6e+12") and " 5.4 " in said(best, "plain, 10", 64, "6e+12")
    assert "3.000 (1)" in said(every, "loop, 4", 96, "2.4e+13") and "3.000" not in best
    assert (tmp_path / "x.png").is_file()


def test_the_page_has_what_the_committed_runs_say(tmp_path, capsys):
    """The table of the best, the table of all cells, and the differences at one cell that the text names."""
    path = ROOT / "results" / "repeat_runs.csv"
    R.main(["show", f"--runs={path}", f"--plot={tmp_path / 'x.png'}"])
    every, best = capsys.readouterr().out.split("each model at its best")
    page = (ROOT / "results" / "repeat.md").read_text(encoding="utf-8")
    rows = [line for line in best.splitlines() if "%" in line]
    assert len(rows) == 8
    for line in rows:
        loss, difference = line[55:60], line[64:].strip()
        assert f"| {loss} | {difference} |" in page, line
    named = [line[64:].strip() for line in every.splitlines() if line.startswith("  5%   loop") and "2.4e+13" in line]
    assert sum(difference in " ".join(page.split()) for difference in named) == 4  # two models, two widths
    losses = R.mean_losses(R.load_runs(path), path)
    for row in losses:
        seeds = f" ({row['seeds']})" if row["seeds"] > 1 else ""
        budget = f"{row['budget']:g}".replace("e+", "e")
        lines = [line for line in page.splitlines() if line.startswith(f"| {row['width']} | {budget} |")]
        assert any(f"{row['loss']:.3f}{seeds} |" in line.replace("**", "") for line in lines), row


@pytest.mark.parametrize("rows, why", [
    ([dict(sweep="start", val_loss=3)], "start with r = 1, width 64 and 2.4e+13 FLOPs is no run"),
    ([dict(sweep="repeat-0.2-wide", val_loss=3)], "repeat-0.2-wide with r = 1"),
    ([dict(sweep="repeat-0.2", val_loss=3, flops=1e12)], "1e+12 FLOPs is no run of this study"),
    ([dict(sweep="repeat-0.2", val_loss=3)], "one seed only")])
def test_refusals(rows, why, tmp_path, capsys):
    write_table(tmp_path / "runs.csv", rows)
    with pytest.raises(SystemExit) as e:
        R.main(["show", f"--runs={tmp_path / 'runs.csv'}"])
    assert e.value.code == 2 and why in capsys.readouterr().err
