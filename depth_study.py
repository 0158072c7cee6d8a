"""
A loop, or fewer layers? Both make a model smaller. At equal FLOPs, and each at its best width: the plain model of 10
layers, the loop of 10 with gradients through all passes or through the last one only, and models of 4 layers.

    python depth_study.py show                             # 1 s: the table, and depth.png, from the runs in results/
    python depth_study.py plan > out/depth.sh              # to run them again: 112, 22 seconds to 7 minutes of a core
    python sweep.py run out/depth.sh
    python fit_law.py collect out/{plain,loop,last_pass}-{4,10}/C* > out/depth.csv
    python depth_study.py show --runs out/depth.csv

The tables in results/ have some of the runs from other sweeps: those of the baseline, of the pocket recipe and of
`sweep.py try`. A run that two tables hold is taken from the first. Intervals come from the noise between seeds. The
best width is that of the lowest mean, of the widths below.
"""
import shlex

import numpy as np
from scipy.stats import t

from lib.console import add_command, parser_of_commands, stop
from lib.files import ROOT
from lib.plots_runs import plot_depths
from runs import load_tables, select
from sweep import plan_runs
from verdict import seed_noise

WIDTHS = {1.5e12: [32, 48], 3.8e12: [48, 64], 9.6e12: [64], 2.4e13: [64, 96]}      # by the training FLOPs
TABLES = [ROOT / "results" / f"{name}_runs.csv" for name in ("last_pass", "baseline", "depth", "pocket")]
MODELS = {                                       # layers, passes, and whether gradients take the last pass only
    "plain, 10 layers": (10, 1, False),
    "loop, r = 2": (10, 2, False),
    "loop, r = 4": (10, 4, False),
    "last pass, r = 2": (10, 2, True),
    "last pass, r = 4": (10, 4, True),
    "last pass, r = 8": (10, 8, True),
    "plain, 4 layers": (4, 1, False),
    "4 layers, last pass, r = 2": (4, 2, True),
}
SWEEPS = ("plain", "loop", "last_pass", "baseline", "pocket")  # how the sweeps of such runs begin
PLAIN = next(iter(MODELS))                       # what the others are compared with


# --- what to run ---
def plan_model(layers, n_loop, last_pass, seeds):
    """The flags of the runs of one model: a list for each."""
    folder = f"{'last_pass' if last_pass else 'plain' if n_loop == 1 else 'loop'}-{layers}"
    flags = "--compile=true --bptt=1" if last_pass else "--compile=true"
    runs = []
    for budget, widths in WIDTHS.items():
        for run_flags, _, _ in plan_runs("pocket", folder, flags, seeds, [budget], widths, [n_loop]):
            n_recur = f"--n_recur={(layers - 2) // n_loop}"
            runs.append([n_recur if flag.startswith("--n_recur=") else flag for flag in run_flags])
    return runs


def cmd_plan(args):
    """Print the commands of the runs."""
    for model in MODELS.values():
        for flags in plan_model(*model, args.seeds):
            print(f"python train.py {shlex.join(flags)}")


# --- what came out ---
def read_tables(paths):
    """The runs of all tables at the widths of this study, with `layers` (n,) and `last_pass` (n,), 0 or 1."""
    runs, names = load_tables(paths), " and ".join(map(str, paths))
    missing = [key for key in ("n_prelude", "n_recur", "n_coda") if key not in runs]
    if missing:
        stop(f"{names} lack the column {', '.join(missing)}: give tables made by `collect`")
    others = [sweep for sweep in np.unique(runs["sweep"]) if not sweep.startswith(SWEEPS)]
    if others:
        stop(f"{names} have runs of {others[0]}, which may be a trick's: give tables of {', '.join(SWEEPS)} only")
    runs["layers"] = runs["n_prelude"] + runs["n_loop"] * runs["n_recur"] + runs["n_coda"]
    runs["last_pass"] = np.array([sweep.startswith("last_pass") for sweep in runs["sweep"]], float)
    budgets = np.array(list(WIDTHS))
    nearest = np.abs(np.log(runs["flops"][:, None] / budgets)).argmin(1)
    runs["budget"] = budgets[nearest]
    seen, keep = set(), []
    columns = [runs[key] for key in ("layers", "n_loop", "last_pass", "budget", "n_embd", "seed")]
    for row, key in enumerate(zip(*columns)):
        same_flops = abs(runs["flops"][row] / runs["budget"][row] - 1) < 0.01
        if key not in seen and same_flops and runs["n_embd"][row] in WIDTHS[runs["budget"][row]]:
            keep.append(row)
            seen.add(key)
    if not keep:
        stop(f"{names} have no run at the FLOPs and widths of this study: run what `depth_study.py plan` prints")
    return select(runs, np.array(keep))


def best_of(runs, model, budget):
    """The width with the lowest mean loss of a model (a key of MODELS) at a budget: a row; None if it was not run."""
    layers, n_loop, last_pass = MODELS[model]
    here = (runs["layers"] == layers) & (runs["n_loop"] == n_loop) & (runs["last_pass"] == last_pass)
    here = select(runs, here & (runs["budget"] == budget))
    rows = []
    for width in np.unique(here["n_embd"]):
        losses = here["val_loss"][here["n_embd"] == width]
        rows.append(dict(model=model, budget=budget, width=int(width), loss=losses.mean(), seeds=len(losses)))
    return min(rows, key=lambda row: row["loss"], default=None)


def compare_models(runs):
    """Rows of best_of, for each budget and model; with the half-width of the interval of the loss as `half`, and the
    difference to the plain model of 10 layers as `difference` +- `half_difference`."""
    noise, spare = seed_noise(runs, "layers", "last_pass")
    if spare == 0:
        stop("every run has one seed only, which does not tell the noise: run `depth_study.py plan` with two --seeds")
    error = t.ppf(0.975, spare) * noise          # of a single run
    rows = []
    for budget in WIDTHS:
        of_budget = [row for row in (best_of(runs, model, budget) for model in MODELS) if row]
        if not of_budget or of_budget[0]["model"] != PLAIN:
            stop(f"no run of the plain model of 10 layers at {budget:g} FLOPs: give its table with --runs")
        plain = of_budget[0]
        for row in of_budget:
            row["half"] = error / row["seeds"] ** 0.5
            row["difference"] = row["loss"] - plain["loss"]
            row["half_difference"] = error * (1 / row["seeds"] + 1 / plain["seeds"]) ** 0.5
        rows += of_budget
    return rows, noise, spare


def line_of(row):
    """A row of the printed table; results/depth.md has a column for each budget."""
    text = "| {budget:g} | {model} | {width} | {loss:.3f} ({seeds}) |".format(**row).replace("e+", "e")
    low, high = row["difference"] - row["half_difference"], row["difference"] + row["half_difference"]
    return text + (f" {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}] |" if row["difference"] else " |")


def cmd_show(args):
    """The table, and the picture."""
    rows, noise, spare = compare_models(read_tables(args.runs))
    print(f"95% intervals from the noise between seeds, sd {noise:.3f} nats ({spare} degrees of freedom)\n"
          "| FLOPs | model | D | loss (seeds) | less plain, 10 layers |\n|---|---|---|---|---|")
    for row in rows:
        print(line_of(row))
    plot_depths(rows, list(MODELS), args.plot)
    print(f"wrote {args.plot}")


def main(argv=None):
    parser, commands = parser_of_commands(__doc__)
    add = add_command(commands, cmd_plan, "print the commands of the runs")
    add("--seeds", "a run for each (default: 42 43)", type=int, nargs="+", default=[42, 43])
    add = add_command(commands, cmd_show, "compare the models")
    add("--runs", "tables of the runs (default: those in results/)", nargs="+", default=TABLES)
    add("--plot", "picture to write (default: %(default)s)", default="out/depth.png")
    args = parser.parse_args(argv)
    args.function(args)


if __name__ == "__main__":
    main()
