"""
Does looping pay when text is scarce? Models see a part of the text again and again, at equal training FLOPs: the plain
model of 10 layers, loops of 4 and 8 passes of the same depth, and the plain model of 4 layers, the best on fresh text.

    python data/prepare.py --vocab_size 1024 --train_share 0.05              # and 0.2
    python repeat_study.py plan > out/repeat.sh                              # 64 runs of 1 to 5 minutes of a core
    python sweep.py run out/repeat.sh
    python fit_law.py collect out/repeat-*/* > results/repeat_runs.csv
    python repeat_study.py show                                              # the tables below, and repeat.png

Claim: on 100M tokens seen ten times the best number of passes climbs from about 1 to about 7 (arXiv 2609.19107,
abstract). Who has little text may also train a smaller model, or stop earlier. So each kind of model is taken at the
best of two widths and two lengths of training. Intervals come from the noise between seeds of all these runs. They do
not say that the best of four is better by luck than it would be again; all kinds choose from as many.
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

BUDGETS = (6e12, 2.4e13)                                   # training FLOPs: the lower one stops earlier
TOKENS = {1.0: 3_633_722, 0.2: 734_615, 0.05: 186_733}     # of training text, by the share of its documents
WORDS = {"plain": "plain, 10 layers", "loop4": "loop, 4 passes", "loop8": "loop, 8 passes", "short": "plain, 4 layers"}
NAME = re.compile(r"repeat-([\d.]+)(?:-(\w+))?")           # how a sweep is called


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
            for share in (0.05, 0.2):
                for flags in plan_share(share, width, seed):
                    print(f"python train.py {shlex.join(flags)}")


# --- what came out ---
def read_cells(path):
    """{(share, model): {(width, budget): {seed: loss}}} and {the same keys: tokens} of a table of runs. model: a key of
    WORDS."""
    _, rows = read_rows(path, "give a table made by `fit_law.py collect`")
    cells, tokens = {}, {}
    for line, row in rows.items():
        match = NAME.fullmatch(row.get("sweep", ""))
        budget = min(BUDGETS, key=lambda flops: abs(np.log(number(row["flops"]) / flops)))
        share, model = match.groups() if match else (0, None)
        model = model or ("plain" if row["n_loop"] == "1" else f"loop{row['n_loop']}")
        if float(share) not in TOKENS or model not in WORDS or abs(number(row["flops"]) / budget - 1) > 0.01:
            stop(f"{path} line {line}: is no run of this study: give a table of the runs of `repeat_study.py plan`")
        cell = int(row["n_embd"]), budget
        seeds = cells.setdefault((float(share), model), {}).setdefault(cell, {})
        seeds[int(row["seed"])] = number(row["val_loss"])
        tokens[float(share), model, *cell] = number(row["tokens"])
    return cells, tokens


def noise_between_seeds(cells):
    """Standard deviation of the loss between seeds in nats, and its degrees of freedom."""
    squares, spare = 0.0, 0
    for of_model in cells.values():
        for seeds in of_model.values():
            losses = np.array(list(seeds.values()))
            squares += np.sum((losses - losses.mean()) ** 2)
            spare += len(losses) - 1
    if spare == 0:
        stop("every run has one seed only, which does not tell the noise: run `repeat_study.py plan` with two --seeds")
    return (squares / spare) ** 0.5, spare


def best_cell(of_model):
    """((width, budget), mean loss, number of seeds) of the cell with the lowest mean."""
    means = {cell: np.mean(list(seeds.values())) for cell, seeds in of_model.items()}
    cell = min(means, key=means.get)
    return cell, means[cell], len(of_model[cell])


def compare(cells, tokens):
    """A row for each share of the text and model: its best width and FLOPs, how often it saw its text, and its loss less
    that of the plain model of 10 layers at its own best, with the half-width of the interval."""
    noise, spare = noise_between_seeds(cells)
    found = []
    for share, model in cells:
        (width, budget), loss, seeds = best_cell(cells[share, model])
        row = dict(share=share, model=model, width=width, budget=budget, loss=loss, seeds=seeds,
                   seen=tokens[share, model, width, budget] / TOKENS[share])
        if model != "plain" and (share, "plain") in cells:
            _, plain, plain_seeds = best_cell(cells[share, "plain"])
            half = t.ppf(0.975, spare) * noise * (1 / seeds + 1 / plain_seeds) ** 0.5
            row |= dict(difference=loss - plain, half=half)
        found.append(row)
    order = list(WORDS)
    found.sort(key=lambda row: (-row["share"], order.index(row["model"])))
    return found, noise, spare


def cmd_show(args):
    """The tables, and the picture."""
    cells, tokens = read_cells(args.runs)
    rows, noise, spare = compare(cells, tokens)
    heads = "".join(f"{budget:<14g}" for budget in BUDGETS)
    print(f"loss in nats, the mean of the seeds (their number)\ntext   model               D    {heads}FLOPs")
    for row in rows:
        share, model = row["share"], row["model"]
        for width in sorted({width for width, _ in cells[share, model]}):
            line = f"{share:4.0%}   {WORDS[model]:20s}{width:<5d}"
            for budget in BUDGETS:
                losses = list(cells[share, model].get((width, budget), {}).values())
                line += f"{np.mean(losses):.3f} ({len(losses)})     " if losses else " " * 14
            print(line.rstrip())
    print("\neach at its best; 95% intervals from the noise between seeds, "
          f"sd {noise:.3f} nats ({spare} degrees of freedom)\n"
          "text   model               D    FLOPs     times seen   loss    less plain, 10 layers")
    for row in rows:
        line = "{share:4.0%}   {words:20s}{width:<5d}{budget:<10g}{seen:<13.1f}{loss:.3f}".format(
            words=WORDS[row["model"]], **row)
        if "half" in row:
            low, high = row["difference"] - row["half"], row["difference"] + row["half"]
            line += f"   {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        print(line)
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
