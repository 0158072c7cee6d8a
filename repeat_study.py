"""
Does looping pay when text is scarce? Four kinds of model see a part of the text again and again: the plain model of 10
layers, loops of 4 and 8 passes of the same depth, and the plain model of 4 layers, the best on fresh text.

    python data/prepare.py --vocab_size 1024 --train_share 0.05              # and 0.2
    python repeat_study.py plan > out/repeat.sh                              # 96 runs of 1 to 5 minutes of a core
    python sweep.py run out/repeat.sh
    python fit_law.py collect out/repeat-*/* > results/repeat_runs.csv
    python repeat_study.py show                                              # the tables below, and repeat.png

Claim: on 100M tokens seen ten times the best number of passes climbs from about 1 to about 7 (arXiv 2609.19107,
abstract). Who has little text may also train a smaller model, or stop earlier. So each kind is also taken at its best
width and length of training, of those that were run for all kinds. Intervals come from the noise between seeds of all
these runs. They do not say that the best of several is better by luck than it would be again.
"""
import re
import shlex
from itertools import product

import numpy as np
from scipy.stats import t

from lib.console import add_command, parser_of_commands, stop
from lib.plots_runs import plot_repeats
from runs import load_runs
from sweep import plan_runs
from verdict import seed_noise

BUDGETS = (6e12, 1.2e13, 2.4e13)                           # training FLOPs: the lower ones stop earlier
TOKENS = {0.2: 734_615, 0.05: 186_733}                     # of training text, by the share of its documents
WORDS = {"plain": "plain, 10 layers", "loop4": "loop, 4 passes", "loop8": "loop, 8 passes", "short": "plain, 4 layers"}
NAME = re.compile(r"repeat-([\d.]+)(?:-(\w+))?")           # how a sweep is called
COLUMNS = ("sweep", "n_loop", "n_embd", "flops", "tokens", "val_loss")


# --- what to run ---
def plan_share(share, width, seed):
    """The flags of the runs of one share of the text, width and seed: a list for each."""
    grid = dict(preset="pocket", seeds=[seed], budgets=BUDGETS, widths=[width],
                flags=f"--data=sotu-1024-{share:g} --compile=true")
    runs = plan_runs(folder=f"repeat-{share:g}", loops=[1, 4, 8], **grid)
    short = plan_runs(folder=f"repeat-{share:g}-short", loops=[1], **grid)
    fewer = [[flag.replace("--n_recur=8", "--n_recur=2") for flag in flags] for flags, _, _ in short]
    return [flags for flags, _, _ in runs] + fewer


def cmd_plan(args):
    """Print the commands of the runs."""
    for seed in args.seeds:
        for width in args.widths:
            for share in TOKENS:
                for flags in plan_share(share, width, seed):
                    print(f"python train.py {shlex.join(flags)}")


# --- what came out ---
def mean_losses(runs, path):
    """A row for each share, model (a key of WORDS), width and budget: mean loss, number of seeds, and how often the
    text was seen. runs: the table at path."""
    cells = {}
    for sweep, r, width, flops, tokens, loss in zip(*(runs[key] for key in COLUMNS)):
        match = NAME.fullmatch(sweep)
        share, model = match.groups() if match else (0, None)
        model = model or ("plain" if r == 1 else f"loop{r:g}")
        budget = min(BUDGETS, key=lambda known: abs(flops / known - 1))
        if float(share) not in TOKENS or model not in WORDS or abs(flops / budget - 1) > 0.01:
            stop(f"{path}: {sweep} with r = {r:g}, width {width:g} and {flops:.3g} FLOPs is no run of this study: give "
                 "a table of the runs of `repeat_study.py plan`")
        cells.setdefault((float(share), model, int(width), budget), []).append((loss, tokens / TOKENS[float(share)]))
    rows = []
    for share, model in product(TOKENS, WORDS):
        for key in sorted(key for key in cells if key[:2] == (share, model)):
            losses, seen = zip(*cells[key])
            rows.append(dict(share=share, model=model, width=key[2], budget=key[3], loss=np.mean(losses),
                             seeds=len(losses), seen=seen[0]))
    return rows


def subtract_plain(rows, error):
    """Add to each row its loss less that of the plain model of 10 layers in rows, if that is there, and the half-width
    of the interval. error: that of a single run, times Student's t."""
    plain = next((row for row in rows if row["model"] == "plain"), None)
    for row in rows:
        if plain and row is not plain:
            row["difference"] = row["loss"] - plain["loss"]
            row["half"] = error * (1 / row["seeds"] + 1 / plain["seeds"]) ** 0.5


def at_their_best(rows):
    """Of the rows of one share, the best of each model among the widths and budgets that all four have."""
    have = [{(row["width"], row["budget"]) for row in rows if row["model"] == model} for model in WORDS]
    common = set.intersection(*have)
    rows = [dict(row) for row in rows if (row["width"], row["budget"]) in common]
    rows.sort(key=lambda row: row["loss"])
    return [next(row for row in rows if row["model"] == model) for model in WORDS if common]


def print_rows(rows):
    for row in rows:
        line = "{share:4.0%}   {words:20s}{width:<5d}{budget:<10g}{seen:<13.1f}{loss:.3f} ({seeds})".format(
            words=WORDS[row["model"]], **row)
        if "half" in row:
            low, high = row["difference"] - row["half"], row["difference"] + row["half"]
            line += f"   {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        print(line)


def cmd_show(args):
    """The tables, and the picture."""
    runs = load_runs(args.runs)
    rows = mean_losses(runs, args.runs)
    noise, spare = seed_noise(runs, "sweep")
    if spare == 0:
        stop(f"{args.runs}: every run has one seed only, which does not tell the noise: run `repeat_study.py plan` "
             "with two --seeds")
    error = t.ppf(0.975, spare) * noise
    print(f"95% intervals from the noise between seeds, sd {noise:.3f} nats ({spare} degrees of freedom)\n"
          "text   model               D    FLOPs     times seen   loss (seeds)   less plain, 10 layers")
    for share in TOKENS:
        of_share = [row for row in rows if row["share"] == share]
        for cell in sorted({(row["budget"], row["width"]) for row in of_share}):
            together = [row for row in of_share if (row["budget"], row["width"]) == cell]
            subtract_plain(together, error)
            print_rows(together)
    print("\neach model at its best, of the widths and FLOPs that were run for all four")
    for share in TOKENS:
        best = at_their_best([row for row in rows if row["share"] == share])
        subtract_plain(best, error)
        print_rows(best)
    plot_repeats(rows, WORDS, error, args.plot)
    print(f"wrote {args.plot}")


def main(argv=None):
    parser, commands = parser_of_commands(__doc__)
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
