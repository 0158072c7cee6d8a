"""
What one recurrence is worth: plan a sweep, collect its runs, fit the joint scaling law of law.py (arXiv 2604.21106).

    python fit_law.py                                   # the 116 published runs: phi 0.458 [0.416, 0.517], a plot; 3 s
    python fit_law.py plan --preset=pocket > sweep.sh   # a sweep, one train.py command a line; 'paper' is the 116 runs
    python fit_law.py collect out/pocket-sweep/* > runs.csv  # its summary.json files as one table
    python fit_law.py fit runs.csv --compare            # the law with intervals; laws ranked by held-out error; 2 s
    python fit_law.py isoflop runs.csv                  # optimum N*, D*, L* of each budget, no law assumed; 1 s
    python fit_law.py allocate --flops=1e20 --n_loop=4  # best width under the law, what the same loss costs at r=1; 3 s
    python fit_law.py plan --preset=trick --name=gate --flags=--trick=tricks/gate.py > sweep.sh  # a looping trick
    python fit_law.py compare base.csv trick.csv        # phi with it minus phi without; --table=FILE adds a line
    python fit_law.py verdict base.csv trick.csv        # whether it saves compute, from pairs of runs; verdict.py; 1 s
    python fit_law.py table                             # the scoreboard, results/phi_table.csv, ranked and drawn

The grids of `plan` and the tables of runs are in sweep.py, `isoflop` and `allocate` in optima.py, `verdict` in
verdict.py, the pictures in lib/plots_runs.py.
"""
import argparse
import csv
import os
import signal
import sys

import numpy as np

from law import (FORMS, bootstrap, bootstrap_weights, count_resamples, descend, fit_law, interval, label_groups,
                 natural_units, predict, rms, span, why_no_interval, why_unidentified, worth)
from lib.console import add_command, misused, stop
from lib.files import ROOT, check_writable, write_json, writing
from lib.plots_runs import plot_law, plot_scoreboard
from optima import cmd_allocate, cmd_isoflop
from runs import (CONVENTIONS, at_budgets, check_fittable, load_runs, load_tables, loops_needed, nominal_budgets, number,
                  read_rows, select)
from sweep import GRIDS, cmd_collect, cmd_plan
from verdict import cmd_verdict

PUBLISHED = str(ROOT / "data" / "isodepth_runs.csv")


def print_fit(runs, fit, draws, convention):
    """Print the law, its intervals and what each r is worth; returns them for --json."""
    form, n = fit["form"], len(runs["val_loss"])
    cells = "cells and their seeds" if len(np.unique(runs["seed"])) > 1 else "cells, one seed each"
    n_valid, resamples = count_resamples(draws)
    intervals = f"95% intervals from {resamples} resamples of (budget, r) {cells}"
    if n_valid < resamples:
        intervals += f", of which {n_valid} hold enough different r and count"
    no_interval = why_no_interval(draws)
    if no_interval:
        intervals, draws = f"no intervals: {no_interval}", draws[:1]
    print(f"{n} runs at {len(np.unique(runs['budget']))} budgets, form {form}; {intervals}\n"
          f"convention {convention}: {CONVENTIONS[convention]}")
    reason = why_unidentified(fit, draws) if form == "power" else None
    parameters = natural_units(draws, fit["x"])
    for name, values in parameters.items():
        text = f"not identified: {reason}" if reason and name == "phi" else span(values, 4)
        print(f"{name:6s} {text}")
    print(f"R2 {fit['r2']:.4f}, RMSE {fit['rmse']:.4f} nats, Huber {fit['huber'] * 1e5:.2f}e-5")

    table = [] if reason else worth(runs, fit, draws)
    for r, stored, multiplier, effective in table[1:]:
        first = f"N(r={table[0][0]:g})"
        print(f"r={r:g}: m(r) {multiplier[0]:.3f}; at equal width N/{first} {stored:.3f}, "
              f"N_eff/{first} {span(effective)}")

    result = {k: v for k, v in fit.items() if isinstance(v, (float, str))}
    phi = dict(power=fit.get("phi"), none=0.0, full=1.0).get(form)
    result |= dict(convention=convention, phi=None if reason else phi, n=n)
    result["phi_ci"] = interval(parameters["phi"]) if form == "power" else None
    result["n_eff_ratio"] = {f"{r:g}": float(effective[0]) for r, *_, effective in table}
    return result


# --- commands ---

def cmd_fit(args):
    runs, path = load_tables(args.runs, args.convention), " and ".join(args.runs)
    if args.budgets:
        runs = at_budgets(runs, args.budgets, path)
    if args.max_tokens:
        runs = select(runs, runs["tokens"] <= args.max_tokens)
    if args.form is None:                        # plain models have no recurrence to fit
        args.form = "power" if (runs["n_loop"] > 1).any() else "none"
    check_fittable(runs, path, args.form)
    if args.plot and args.form != "power":
        stop(f"--plot draws r^phi and --form={args.form} has none: use --form=power")
    if args.compare and len(np.unique(runs["budget"])) == 1:
        stop(f"--compare predicts each budget from the others and {path} has one only: add a budget")
    fit = fit_law(runs, args.form)
    draws = bootstrap(fit, bootstrap_weights(runs, args.resamples))
    no_interval = why_no_interval(draws)
    if args.plot and no_interval:
        stop(f"--plot draws the interval of phi and there is none, {no_interval}: drop --plot or add budgets")
    result = print_fit(runs, fit, draws, args.convention)
    if args.compare:
        result["ranking"] = rank_forms(runs)
    if args.plot:
        with writing("plot", args.plot):
            plot_law(runs, fit, draws, result, args.plot)
        print(f"wrote {os.path.relpath(args.plot)}")
    if args.json:
        write_json(args.json, result)


def cmd_published():
    """No command: the published runs, with the counts that give the published phi and then with the others."""
    runs = load_runs(PUBLISHED, "page")
    fit = fit_law(runs)
    draws = bootstrap(fit, bootstrap_weights(runs, 1000))
    result = print_fit(runs, fit, draws, "page")
    print("published (Table 2): phi 0.459 [0.41, 0.53], alpha 0.199, beta 0.369, E 1.57, R2 0.9972\n")
    for convention, meaning in CONVENTIONS.items():
        runs_of = load_runs(PUBLISHED, convention)
        fit_of = fit_law(runs_of)
        table = worth(runs_of, fit_of, fit_of["theta"])
        ratios = "/".join(f"{effective[0]:.3f}" for *_, effective in table[1:])
        print(f"  {convention:8s}  phi {fit_of['phi']:.4f}, N_eff/N(r=1) {ratios} for r = 2/4/8   {meaning}")
    _, stored, *_ = worth(load_runs(PUBLISHED), fit, fit["theta"])[2]  # r=4
    print(f"\nin words: {1e3 * stored:.0f}M parameters with r=4 act like {1e3 * result['n_eff_ratio']['4']:.0f}M in a "
          "plain model and cost the training FLOPs\nof a plain model of 1,000M, the one of the same width and depth")
    path = "out/isodepth_law.png"
    check_writable("the folder out/", "out")
    with writing("plot", path):
        plot_law(runs, fit, draws, result, path)
    print(f"wrote {path}")


def cross_validate(runs, fit, key):
    """actual - predicted (n,), each run predicted by a fit without all the runs that share its key."""
    group = label_groups(runs, key)
    weights = (group != np.arange(group.max() + 1)[:, None]).astype(float)  # (groups, n): each row leaves a group out
    guess = np.repeat(fit["theta"], len(weights), axis=0)
    theta, _ = descend(guess, weights, fit["x"], tolerance=1e-9)
    predicted = predict(theta, fit["x"])  # (groups, n)
    return runs["val_loss"] - predicted[group, np.arange(len(group))]


def rank_forms(runs):
    """Every recurrence term on the same runs, best first by its error on budgets it was not fitted to (nats)."""
    loops = np.unique(runs["n_loop"])
    ranking = []
    for form in FORMS:
        needed = loops_needed(form, loops)
        if needed > len(loops):
            continue
        fit = fit_law(runs, form)
        row = dict(form=form, parameters=fit["theta"].shape[1], r2=fit["r2"], huber=fit["huber"])
        for key in ["budget", "n_loop"] if needed < len(loops) else ["budget"]:  # can it spare one r?
            residual = cross_validate(runs, fit, key)
            values = np.unique(runs[key])
            row[key] = rms([rms(residual[runs[key] == v]) for v in values])
            top = residual[runs[key] == values[-1]]
            row[f"top_{key}"], row[f"top_{key}_bias"] = rms(top), float(top.mean())
        ranking.append(row)
    ranking.sort(key=lambda row: row["budget"])
    print(f"\nRMSE in nats on runs held out of the fit (bias: actual - predicted); largest r here: {loops[-1]:g}\n"
          "form     par   R2      Huber e-5   each budget   largest (bias)     each r   largest (bias)")
    for row in ranking:
        fields = "{form:8s} {parameters}     {r2:.4f}  " + f"{row['huber'] * 1e5:6.2f}"
        fields += "      {budget:.4f}        {top_budget:.4f} ({top_budget_bias:+.4f})   "
        fields += "{n_loop:.4f}   {top_n_loop:.4f} ({top_n_loop_bias:+.4f})" if "n_loop" in row else "needs every r"
        print(fields.format(**row))
    return ranking


def fit_phi(runs, weights, path):
    """(the fit, phi (1 + S,)), phi that of the fit and then of every resample."""
    check_fittable(runs, path, "power")
    fit = fit_law(runs)
    draws = bootstrap(fit, weights)
    reason = why_no_interval(draws) or why_unidentified(fit, draws)
    if reason:
        stop(f"phi of {path} cannot be compared at the budgets and n_loop that the tables share, {reason}: "
             "add budgets, widths or n_loop")
    return fit, draws[:, 5]


def fit_shared(both, with_trick, weights):
    """phi without the trick and what the trick adds to it, (1 + S,) each, under one law for both sweeps."""
    looped = with_trick & (both["n_loop"] > 1)
    signed = both | {"n_loop": np.where(looped, -both["n_loop"], both["n_loop"])}
    draws = bootstrap(fit_law(signed, "shared"), weights)
    return draws[:, 5], draws[:, 6]


def cmd_compare(args):
    """phi of each trick minus phi of the baseline at the same budgets, both fitted to the same resamples: each with a
    law of its own, as the paper does, and with one law for both, which differ in phi alone."""
    base, tricks = load_runs(args.baseline, args.convention), load_runs(args.runs, args.convention)
    check_fittable(base, args.baseline, "power")
    if args.table and os.path.isfile(args.table):
        read_table(args.table)  # refuses a damaged one before the work
    print(f"convention {args.convention}: {CONVENTIONS[args.convention]}; {args.resamples} resamples of the budgets of "
          "each r, the same for both")
    result = {}
    for sweep in dict.fromkeys(tricks["sweep"]):
        trick = select(tricks, tricks["sweep"] == sweep)
        both = {k: np.concatenate([base[k], trick[k]]) for k in base.keys() & trick.keys()}
        both["budget"] = nominal_budgets(both["flops"])
        both["sweep"] = np.repeat(["without", "with"], [len(base["flops"]), len(trick["flops"])])
        # phi changes with the budgets and the r that it is fitted to, so the baseline is cut to those of the trick
        budgets = both["budget"][both["sweep"] == "with"]
        both = select(both, np.isin(both["budget"], budgets) & np.isin(both["n_loop"], [1, *trick["n_loop"]]))
        of_trick = both["sweep"] == "with"
        with_trick, without = of_trick, ~of_trick
        if not without.any():
            stop(f"{args.baseline} has no run at a budget and n_loop of {args.runs}: run the baseline there, or plan "
                 "the trick with --budgets of the baseline")
        if 1 not in trick["n_loop"]:
            with_trick = of_trick | (both["n_loop"] == 1)  # r=1 has no loop to change, so both share its runs
        weights = bootstrap_weights(both, args.resamples, within_r=True)
        _, before = fit_phi(select(both, without), weights[:, without], args.baseline)
        fit, after = fit_phi(select(both, with_trick), weights[:, with_trick], args.runs)
        _, shared = fit_shared(both, of_trick, weights)
        change = after - before
        name = str(sweep) or os.path.basename(args.runs)
        print(f"{name}: phi {span(before)} -> {span(after)}, difference {span(change)}, above 0 in "
              f"{np.nanmean(change[1:] > 0):.1%} of resamples; {with_trick.sum()} runs, R2 {fit['r2']:.4f}\n"
              f"    with one law for both: difference {span(shared)}")
        phis = dict(baseline=before, intervention=after, difference=change, shared_difference=shared)
        result[name] = {k: dict(phi=float(v[0]), ci=interval(v)) for k, v in phis.items()}
        if args.table:
            add_line(args.table, name, result[name], trick, args)
    if args.json:
        write_json(args.json, result)


# --- the scoreboard: one line for each thing that was done to the loop ---

NUMBERS = ["phi", "phi_low", "phi_high", "baseline", "difference", "difference_low", "difference_high"]
COLUMNS = ["trick", *NUMBERS, "runs", "n_loop", "budgets", "seeds", "convention", "file"]


def read_table(path):
    names, rows = read_rows(path, f"`compare ... --table={path}` writes it")
    if names not in ([], COLUMNS):
        stop(f"{path} is no scoreboard, whose columns are {','.join(COLUMNS)}: give one that `compare --table` wrote")
    for line, row in rows.items():
        if not np.isfinite([number(row[k]) for k in NUMBERS]).all():
            stop(f"{path} line {line}: needs a number for each of {', '.join(NUMBERS)}: repair or remove it")
    return list(rows.values())


def add_line(path, name, phi, trick, args):
    """Write the line of a trick into the scoreboard, in place of an older one of that name and file."""
    after, before, change = phi["intervention"], phi["baseline"], phi["difference"]
    values = [after["phi"], *after["ci"], before["phi"], change["phi"], *change["ci"]]
    new = dict(zip(NUMBERS, (f"{v:.4f}" for v in values)), trick=name, file=os.path.basename(args.runs))
    new["runs"], new["convention"] = len(trick["flops"]), args.convention
    new["n_loop"] = " ".join(f"{r:g}" for r in np.unique(trick["n_loop"]))
    new["budgets"], new["seeds"] = len(np.unique(trick["budget"])), len(np.unique(trick["seed"]))
    rows = read_table(path) if os.path.isfile(path) else []
    rows = [row for row in rows if (row["trick"], row["file"]) != (name, new["file"])]
    with writing("table", path), open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, new])


def cmd_table(args):
    """The scoreboard, ranked by what each trick adds to the phi of the same loop without it, and its picture."""
    rows = sorted(read_table(args.scoreboard), key=lambda row: float(row["difference"]))
    if not rows:
        stop(f"{args.scoreboard} has no line yet: add one with `compare base.csv trick.csv --table={args.scoreboard}`")
    for row in reversed(rows):
        print("{trick:28s} phi {phi} [{phi_low}, {phi_high}]   {difference} [{difference_low}, {difference_high}] over "
              "its baseline {baseline}; {runs} runs, r = {n_loop}, convention {convention}, {file}".format(**row))
    path = args.plot or os.path.splitext(args.scoreboard)[0] + ".png"
    with writing("plot", path):
        plot_scoreboard(rows, path)
    print(f"wrote {os.path.relpath(path)}")


# --- command line ---

def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False, description="The joint scaling law of looped models; without "
                                     "a command, that of the published runs. The top of this file has examples.")
    parser.error = misused
    commands = parser.add_subparsers(required=True)

    integers, reals = dict(type=int, nargs="+"), dict(type=float, nargs="+")
    resamples = dict(type=int, default=1000)
    convention = dict(choices=CONVENTIONS, default="written")
    meanings = "; ".join(f"{k}: {v}" for k, v in CONVENTIONS.items())
    where = f"where the injection matrix is counted; {meanings} (default written)"
    table = "table of runs, from `collect` or data/isodepth*.csv"

    add = add_command(commands, cmd_plan, "print a sweep, one train.py command a line")
    add("--preset", "which grid (default pocket)", choices=GRIDS, default="pocket")
    add("--budgets", "training FLOPs of a run, instead of the preset's", **reals)
    add("--widths", "n_embd at every budget, instead of the preset's", **integers)
    add("--loops", "n_loop, instead of the preset's", **integers)
    add("--seeds", "a run for each (default 42)", type=int, nargs="+", default=[42])
    add("--flags", "more flags of train.py for every run: the trick to test", default="", metavar="'--a=1 --b=2'")
    add("--name", "folder under out/, the name of the sweep (default: PRESET-sweep)")
    add("--vocab_size", "of the data, for the FLOPs (default: the preset's)", type=int)
    add("--speed", "FLOP/s that you reach, for the time (default: the preset's)", type=float)
    add = add_command(commands, cmd_collect, "one table, to stdout, from the summary.json files of finished runs")
    add("folders", "the --out_dir folders of train.py", nargs="+")
    add = add_command(commands, cmd_fit, "fit the joint law, with intervals")
    add("runs", f"{table}; several are taken as one", nargs="+")
    add("--convention", where, **convention)
    add("--budgets", "only the runs at these training FLOPs (default: all)", **reals)
    add("--form", "recurrence term: power is r^phi, none phi = 0, full phi = 1, free a multiplier for each r (default "
        "power, or none if all runs have r = 1)", choices=FORMS)
    add("--max_tokens", "only the runs on at most this many tokens, such as those that see no text twice", type=float)
    add("--compare", "rank all forms by their error on held-out budgets and r", action="store_true")
    add("--plot", "draw the law to this PNG", metavar="FILE")
    add("--resamples", "resamples for the intervals (default 1000)", **resamples)
    add("--json", "also write the numbers to this file", metavar="FILE")
    add = add_command(commands, cmd_isoflop, "the optimum of each budget by parabolas, and its exponents")
    add("runs", f"{table}; several are taken as one", nargs="+")
    add("--by", "columns that tell variants apart, such as n_loop,n_expert (default n_loop)", default="n_loop")
    add("--resamples", "resamples for the intervals (default 1000)", **resamples)
    add = add_command(commands, cmd_allocate, "the best width under the law, and what the same loss costs at r=1")
    add("--runs", "table of runs to fit (default: the published ones)", default=PUBLISHED)
    add("--convention", where, **convention)
    add("--flops", "training budget", required=True, type=float)
    add("--n_loop", "r, passes through the loop", required=True, type=int)
    add("--vocab_size", "of the data, for the FLOPs (default: the paper's)", type=int, default=32064)
    add("--block_size", "context, for the FLOPs (default: the paper's)", type=int, default=2048)
    add = add_command(commands, cmd_compare, "phi with a trick minus phi without it")
    add("baseline", "table of the runs without it")
    add("runs", table)
    add("--convention", where, **convention)
    add("--resamples", "resamples for the intervals (default 1000)", **resamples)
    add("--table", "also add a line to this scoreboard, such as results/phi_table.csv", metavar="FILE")
    add("--json", "also write the numbers to this file", metavar="FILE")
    add = add_command(commands, cmd_verdict, "whether a trick saves compute, from pairs of runs with and without it")
    add("baseline", "table of the runs without it")
    add("runs", "table of the runs with it, several tricks told apart by the column sweep")
    add("--curve", "table that says how the baseline's loss falls with compute (default: the baseline's)")
    add("--budgets", "only the pairs at these training FLOPs (default: all that both tables have)", **reals)
    add("--scoreboard", "also put the verdicts into this table, such as results/tricks.csv, and draw it", metavar="FILE")
    add("--json", "also write the numbers to this file", metavar="FILE")
    add = add_command(commands, cmd_table, "the scoreboard of tricks, ranked, with its plot")
    default = str(ROOT / "results" / "phi_table.csv")
    add("scoreboard", "as `compare --table` writes it (default: results/phi_table.csv)", nargs="?", default=default)
    add("--plot", "picture to draw (default: next to the table, as .png)", metavar="FILE")
    return parser.parse_args()


def main():
    if len(sys.argv) == 1:
        cmd_published()
        return
    args = parse_args()
    for flag in ("budgets", "widths", "loops", "vocab_size", "block_size", "speed", "flops", "n_loop", "resamples",
                 "max_tokens"):
        values = getattr(args, flag, None)
        if values is None:
            continue
        for value in values if isinstance(values, list) else [values]:
            if not 0 < value < np.inf:
                text = f"{value:g}" if isinstance(value, float) else value
                stop(f"--{flag}={text}: must be positive and finite")
            if isinstance(value, int) and value > 10 ** 9:
                stop(f"--{flag}={value}: must be at most 1000000000")
    if not 20 <= getattr(args, "resamples", 20) <= 100_000:
        stop(f"--resamples={args.resamples}: 95% intervals take from 20 to 100000")
    for flag in ("json", "plot", "table", "scoreboard"):  # before the work, not after it
        path = getattr(args, flag, None)
        if path is None:
            continue
        if not path or os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK):
            stop(f"--{flag}={path}: cannot write there; give a file in a folder that exists")
        if flag == "plot" and not path.lower().endswith((".png", ".pdf", ".svg")):
            stop(f"--plot={path}: give the picture a name that ends in .png, .pdf or .svg")
    args.function(args)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)      # `| head` ends the program, without a traceback
    main()
