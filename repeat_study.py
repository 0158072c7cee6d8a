"""
Does looping pay when text is scarce? Models see a part of the text again and again. The plain model of 10 layers, the
loop of 4 passes, and two whose steps are cheaper are compared at equal training FLOPs, 2.4e13.

    python data/prepare.py --vocab_size 1024 --train_share 0.05              # and 0.2
    python repeat_study.py plan > out/repeat.sh                              # 24 runs, 7 minutes of a core each
    python sweep.py run out/repeat.sh
    python fit_law.py collect out/repeat-*/* > results/repeat_runs.csv
    python repeat_study.py show                                              # the table below, and repeat.png

Claim: on 100M tokens seen ten times the best number of passes climbs from about 1 to about 7 (arXiv 2609.19107,
abstract). A difference is paired by seed and width with the plain model on the same text. Its interval comes from the
noise between seeds of these runs (verdict.py), not from their scatter, since a cell has two seeds.
"""
import argparse
import re
import shlex

import numpy as np
from scipy.stats import t

from lib.console import add_command, misused, stop
from lib.plots import plot_repeats
from runs import number, read_rows
from sweep import plan_runs

BUDGET = 2.4e13
TOKENS = {1.0: 3_633_722, 0.2: 734_615, 0.05: 186_733}           # of training text, by the share of its documents
WORDS = {"plain": "plain, 10 layers", "loop": "loop, 4 passes", "last": "loop, 4 passes, gradients through the last",
         "short": "plain, 4 layers"}
NAME = re.compile(r"repeat-([\d.]+)(?:-(last|short))?")    # how a sweep is called


# --- what to run ---
def plan_share(share, width, seed):
    """The flags of the four models, a list for each."""
    data = f"--data=sotu-1024-{share:g} --compile=true"
    grid = dict(preset="pocket", seeds=[seed], budgets=[BUDGET], widths=[width])
    runs = plan_runs(folder=f"repeat-{share:g}", flags=data, loops=[1, 4], **grid)
    runs += plan_runs(folder=f"repeat-{share:g}-last", flags=f"{data} --bptt=1", loops=[4], **grid)
    short = plan_runs(folder=f"repeat-{share:g}-short", flags=data, loops=[1], **grid)[0][0]
    return [flags for flags, _, _ in runs] + [[flag.replace("--n_recur=8", "--n_recur=2") for flag in short]]


def cmd_plan(args):
    """Print the commands of the runs."""
    for seed in args.seeds:
        for width in args.widths:
            for share in (0.05, 0.2):
                for flags in plan_share(share, width, seed):
                    print(f"python train.py {shlex.join(flags)}")


# --- what came out ---
def read_runs(path):
    """The runs of a table, a dict each: share, width, seed, model (a key of WORDS), tokens, loss."""
    _, rows = read_rows(path, "give a table made by `fit_law.py collect`")
    runs = []
    for line, row in rows.items():
        match = NAME.fullmatch(row.get("sweep", ""))
        if not match or not 0.99 < number(row["flops"]) / BUDGET < 1.01:
            stop(f"{path} line {line}: is no run of this study: give a table of the runs of `repeat_study.py plan`")
        share, model = match.groups()
        model = model or ("plain" if row["n_loop"] == "1" else "loop")
        runs.append(dict(share=float(share), width=int(row["n_embd"]), seed=int(row["seed"]), model=model,
                         tokens=number(row["tokens"]), loss=number(row["val_loss"])))
    return runs


def noise_between_seeds(runs):
    """Standard deviation of the loss between seeds in nats, and its degrees of freedom."""
    cells = {}
    for run in runs:
        cells.setdefault((run["share"], run["width"], run["model"]), []).append(run["loss"])
    spare = sum(len(losses) - 1 for losses in cells.values())
    if spare == 0:
        stop("every model has one seed only, which does not tell the noise: run `repeat_study.py plan` with two --seeds")
    squares = sum(np.sum((np.array(losses) - np.mean(losses)) ** 2) for losses in cells.values())
    return (squares / spare) ** 0.5, spare


def compare(runs):
    """A row for each share, width and model: its mean loss, how often its text was seen, and the difference to the plain
    model of the same text, width and seeds with the half-width of its interval."""
    noise, spare = noise_between_seeds(runs)
    losses = {(run["share"], run["width"], run["model"], run["seed"]): run["loss"] for run in runs}
    found = []
    for share, width, model in sorted({key[:3] for key in losses}, key=lambda key: (-key[0], *key[1:])):
        mine = [run for run in runs if (run["share"], run["width"], run["model"]) == (share, width, model)]
        pairs = [(run["loss"], losses.get((share, width, "plain", run["seed"]))) for run in mine]
        differences = [loss - plain for loss, plain in pairs if plain is not None]
        row = dict(share=share, width=width, model=model, seeds=len(mine), loss=np.mean([run["loss"] for run in mine]),
                   epochs=mine[0]["tokens"] / TOKENS[share])
        if model != "plain" and differences:
            half = t.ppf(0.975, spare) * noise * (2 / len(differences)) ** 0.5     # of two runs, each with its own noise
            row |= dict(mean=np.mean(differences), half=half)
        found.append(row)
    return found, noise, spare


def cmd_show(args):
    """The table, and the picture."""
    rows, noise, spare = compare(read_runs(args.runs))
    print(f"loss after {BUDGET:g} training FLOPs, and less that of the plain model of 10 layers of the same width and seed\n"
          f"95% intervals from the noise between seeds, sd {noise:.3f} nats ({spare} degrees of freedom)\n"
          "text   times seen   D    seeds   loss    less plain                 model")
    for row in rows:
        difference = ""
        if "half" in row:
            difference = f"{row['mean']:+.3f} [{row['mean'] - row['half']:+.3f}, {row['mean'] + row['half']:+.3f}]"
        print(f"{row['share']:4.0%}   {row['epochs']:10.1f}   {row['width']:<5d}{row['seeds']:<8d}{row['loss']:.3f}   "
              f"{difference:25s}  {WORDS[row['model']]}")
    plot_repeats(rows, WORDS, args.plot)
    print(f"wrote {args.plot}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    commands = parser.add_subparsers(required=True)
    add = add_command(commands, cmd_plan, "print the commands of the runs")
    add("--seeds", "a run for each (default: 42 43)", type=int, nargs="+", default=[42, 43])
    add("--widths", "n_embd (default: 64 96)", type=int, nargs="+", default=[64, 96])
    add = add_command(commands, cmd_show, "compare the models")
    add("--runs", "table of the runs (default: %(default)s)", default="results/repeat_runs.csv")
    add("--plot", "picture to write (default: %(default)s)", default="out/repeat.png")
    args = parser.parse_args(argv)
    args.function(args)


if __name__ == "__main__":
    main()
