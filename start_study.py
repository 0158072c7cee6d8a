"""
Is it worth starting from weights one has? A plain model is trained for a part of the budget, then its layers are tied
into a loop that trains on (train.py --init_from, --tie); or a looped model is trained first and then untied. Both are
compared with models trained from scratch for the same FLOPs in all, 9.6e12.

    python start_study.py plan first > out/first.sh
    python start_study.py plan then > out/then.sh
    python sweep.py run out/first.sh && python sweep.py run out/then.sh      # 38 runs, 40 min on two cores
    python fit_law.py collect out/start/*-s* > results/start_runs.csv
    python start_study.py show                                               # the table below, and start.png

Claims: uptraining recovers a looped model (arXiv 2410.20672); growing untied saves a third of the compute (arXiv
2609.19107). The difference is paired by seed with the runs from scratch of results/baseline_runs.csv. Two seeds are too
few to tell their own scatter, so the interval comes from the noise between seeds of the whole baseline (verdict.py).
"""
import re

import numpy as np
from scipy.stats import t

from lib.console import add_command, parser_of_commands, stop
from lib.plots_runs import plot_starts
from runs import load_runs, read_rows, select
from verdict import seed_noise

BUDGET = 9.6e12                                  # training FLOPs in all
WIDTH = 64                                       # best of the baseline's at this budget
SEEDS = (42, 43)
COMMON = ("--preset=pocket --vocab_size=1024 --n_embd=64 --n_head=1 --n_prelude=1 --n_coda=1 --batch_size=4 "
          "--learning_rate=0.02 --eval_interval=0 --eval_tokens=131072 --threads=1 --compile=true")
SHAPE = {1: "--n_loop=1 --n_recur=8 --inject=none", 2: "--n_loop=2 --n_recur=4 --inject=linear",
         4: "--n_loop=4 --n_recur=2 --inject=linear"}
NAME = re.compile(r"(plain|loop)(\d+)-to-r(\d)(?:-(first|last|add))?-s(\d+)")      # how a run of the second part is called


# --- what to run ---
def first_commands(seed):
    """The runs to start from, at a constant rate: they are broken off, and whoever has a model to start from trained it
    for another end."""
    sources = [("plain", 1, 25), ("plain", 1, 50), ("plain", 1, 75), ("loop", 2, 50)]
    for kind, r, percent in sources:
        flops = BUDGET * percent / 100
        yield (f"python train.py {COMMON} {SHAPE[r]} --schedule=constant --max_flops={flops:g} --seed={seed} "
               f"--out_dir=out/start/{kind}{percent}-s{seed}")


def then_commands(seed):
    """The runs that start from them, for the rest of the budget: other batches, since these have been seen."""
    starts = []
    for r in (2, 4):
        starts += [(f"plain{percent}", r, "") for percent in (25, 50, 75)]
        starts += [("plain50", r, how) for how in ("first", "last", "add")]
    starts += [("plain50", 1, ""), ("loop50", 1, ""), ("loop50", 2, "")]           # trained on as they are, and untied
    for source, r, how in starts:
        shape = SHAPE[r].replace("linear", "add") if how == "add" else SHAPE[r]
        tie = f" --tie={how}" if how in ("first", "last") else ""
        suffix = f"-{how}" if how else ""
        flops = BUDGET * (1 - int(source[-2:]) / 100)
        yield (f"python train.py {COMMON} --init_from=out/start/{source}-s{seed} {shape}{tie} --max_flops={flops:g} "
               f"--seed={1000 + seed} --out_dir=out/start/{source}-to-r{r}{suffix}-s{seed}")


def cmd_plan(args):
    """Print the commands of one of the two parts."""
    commands = first_commands if args.part == "first" else then_commands
    for seed in SEEDS:
        print("\n".join(commands(seed)))


# --- what came out ---
def compare(runs, base):
    """{(source, share of the budget in it, passes, how): differences in nats (seeds,) from scratch}. runs: rows of
    text with those of the second part, base: table of the baseline."""
    at_budget = np.isclose(base["flops"], BUDGET, rtol=0.01) & (base["n_embd"] == WIDTH)
    scratch = select(base, at_budget)
    losses = dict(zip(zip(scratch["n_loop"], scratch["seed"]), scratch["val_loss"]))
    found = {}
    for row in runs:
        name = row["run"]
        flops, loss = float(row["flops"]), float(row["val_loss"])
        match = NAME.fullmatch(name)
        if not match:                            # one to start from
            continue
        source, percent, r, how, seed = match.groups()
        share, r = int(percent) / 100, int(r)
        if abs(flops / (BUDGET * (1 - share)) - 1) > 0.01:
            stop(f"{name} took {flops:.3g} FLOPs, not the rest of {BUDGET:g}: run the commands of `start_study.py plan`")
        if (r, int(seed)) not in losses:
            stop(f"the baseline has no run at {BUDGET:g} FLOPs with r = {r} and seed {seed}")
        found.setdefault((source, share, r, how or "mean"), []).append(loss - losses[r, int(seed)])
    return found


def cmd_show(args):
    """The table of differences, and start.png."""
    names, rows = read_rows(args.runs, "give a table made by `fit_law.py collect`")
    missing = {"run", "flops", "val_loss"} - set(names)
    if missing:
        stop(f"{args.runs} lacks the column {missing.pop()}: give a table made by `fit_law.py collect`")
    base = load_runs(args.baseline)
    noise, spare = seed_noise(base)
    quantile = t.ppf(0.975, spare)
    print(f"loss at {BUDGET:g} FLOPs in all, less that from scratch with as many passes, paired by seed\n"
          f"95% intervals from the noise between seeds, sd {noise:.3f} nats ({spare} degrees of freedom)\n"
          "from    until   to      how     seeds   nats")
    shown = []
    for (source, share, r, how), differences in sorted(compare(rows.values(), base).items()):
        n = len(differences)
        mean = np.mean(differences)
        half = quantile * noise * (2 / n) ** 0.5  # of two runs, each with its own noise
        shown.append(dict(source=source, share=share, r=r, how=how, mean=mean, half=half))
        print(f"{source:8s}{share:4.0%}    r = {r}   {how:8s}{n:3d}     {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]")
    if not shown:
        stop(f"{args.runs} has no run of the second part: `start_study.py plan then` prints their commands")
    plot_starts(shown, args.plot)
    print(f"wrote {args.plot}")


def main(argv=None):
    parser, commands = parser_of_commands(__doc__)
    add = add_command(commands, cmd_plan, "print the commands of one part")
    add("part", "first: the runs to start from; then: those that start from them", choices=["first", "then"])
    add = add_command(commands, cmd_show, "compare with runs from scratch")
    add("--runs", "table of the runs (default: %(default)s)", default="results/start_runs.csv")
    add("--baseline", "those from scratch (default: %(default)s)", default="results/baseline_runs.csv")
    add("--plot", "picture to write (default: %(default)s)", default="out/start.png")
    args = parser.parse_args(argv)
    args.function(args)


if __name__ == "__main__":
    main()
