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
    python fit_law.py table                             # the scoreboard, results/phi_table.csv, ranked and drawn

The grids of `plan` and the tables of runs are in sweep.py, the pictures in lib/plots.py.
"""
import argparse
import csv
import json
import os
import signal
import sys

import numpy as np
from scipy.optimize import brentq

from law import (FORMS, bootstrap, bootstrap_weights, descend, fit_law, form_parameters, grouped, interval,
                 natural_units, predict, predict_at, rms, span, why_unidentified, worth)
from lib.console import misused, stop
from lib.files import check_writable
from lib.plots import plot_law, plot_scoreboard
from sweep import (CONVENTIONS, GRIDS, SAME_BUDGET, cmd_collect, cmd_plan, count_parameters, load_runs,
                   nominal_budgets, number, select)

HERE = os.path.dirname(os.path.abspath(__file__))
PUBLISHED = os.path.join(HERE, "data", "isodepth_runs.csv")


def check_fittable(runs, path, form):
    n, loops = len(runs["val_loss"]), np.unique(runs["n_loop"])
    if n < 10:
        stop(f"{path} has {n} runs but the law has 6 parameters: at least 10 runs are needed")
    for key in ("sweep", "n_expert", "inject", "trick"):
        kinds = np.unique(runs[key][runs["n_loop"] > 1])  # r=1 has nothing to inject
        if len(kinds) > 1:
            stop(f"{path} mixes {key} {', '.join(map(str, kinds))}: give each its own file, or use `compare`")
    missing = max(1 + len(form_parameters(form, loops)[0]), 2 if form == "free" else 1) - len(loops)
    if missing > 0:
        stop(f"{path} has only n_loop {', '.join(f'{r:g}' for r in loops)}, so the recurrence term of --form={form} is "
             f"not identifiable: add runs with {missing} more n_loop, or use --form=none")


def print_fit(runs, fit, draws, convention):
    """Print the law, its intervals and what each r is worth; returns them for --json."""
    form, sampled = fit["form"], natural_units(draws, fit["x"], fit["form"])
    reason = why_unidentified(fit, draws) if form == "power" else None
    cells = "cells and their seeds" if len(np.unique(runs["seed"])) > 1 else "cells, one seed each"
    print(f"{len(runs['val_loss'])} runs at {len(np.unique(runs['budget']))} budgets, form {form}; 95% intervals from "
          f"{len(draws) - 1} resamples of (budget, r) {cells}\nconvention {convention}: {CONVENTIONS[convention]}")
    for name, values in sampled.items():
        print(f"{name:6s} " + (f"not identified: {reason}" if reason and name == "phi" else span(values, 4)))
    print(f"R2 {fit['r2']:.4f}, RMSE {fit['rmse']:.4f} nats, Huber {fit['huber'] * 1e5:.2f}e-5")
    table = [] if reason else worth(runs, form, draws)
    for r, stored, multiplier, effective in table[1:]:
        print(f"r={r:g}: m(r) {multiplier[0]:.3f}; at equal width N/N(r={table[0][0]:g}) {stored:.3f}, "
              f"N_eff/N(r={table[0][0]:g}) {span(effective)}")
    return dict({k: v for k, v in fit.items() if isinstance(v, (float, str))}, convention=convention,
                phi=None if reason else dict(power=fit.get("phi"), none=0.0, full=1.0).get(form),
                phi_ci=interval(sampled["phi"]) if form == "power" else None, n=len(runs["val_loss"]),
                n_eff_ratio={f"{r:g}": float(effective[0]) for r, *_, effective in table})


# --- commands ---

def write_json(path, content):
    if path:
        text = json.dumps(content, indent=1)
        try:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text + "\n")
        except OSError as error:
            stop(f"cannot write --json={path} ({error.strerror}): give a file in a folder that exists")


def wrote(path):
    print("wrote " + os.path.relpath(path))


def cmd_fit(args):
    runs = load_runs(args.runs, args.convention)
    if args.budgets:
        near = np.abs(np.log(runs["budget"][:, None] / args.budgets)) < np.log(SAME_BUDGET)   # (n, budgets asked for)
        if not near.any(0).all():
            stop(f"--budgets={args.budgets[int(near.any(0).argmin())]:g}: {args.runs} has "
                 f"{', '.join(f'{b:g}' for b in np.unique(runs['budget']))}")
        runs = select(runs, near.any(1))
    check_fittable(runs, args.runs, args.form)
    if args.plot and args.form != "power":
        stop(f"--plot draws r^phi and --form={args.form} has none: use --form=power")
    if args.compare and len(np.unique(runs["budget"])) == 1:
        stop(f"--compare predicts each budget from the others and {args.runs} has one only: add a budget")
    fit = fit_law(runs, args.form)
    draws = bootstrap(fit, bootstrap_weights(runs, args.resamples))
    result = print_fit(runs, fit, draws, args.convention)
    if args.compare:
        result["ranking"] = rank_forms(runs)
    if args.plot:
        plot_law(runs, fit, draws, result, args.plot)
        wrote(args.plot)
    write_json(args.json, result)


def cmd_published():
    """No command: the published runs, with the counts behind the published phi and then with the others."""
    runs = load_runs(PUBLISHED, "page")
    fit = fit_law(runs)
    draws = bootstrap(fit, bootstrap_weights(runs, 1000))
    result = print_fit(runs, fit, draws, "page")
    print("published (Table 2): phi 0.459 [0.41, 0.53], alpha 0.199, beta 0.369, E 1.57, R2 0.9972\n")
    for convention, meaning in CONVENTIONS.items():
        other = load_runs(PUBLISHED, convention)
        fitted = fit_law(other)
        effective = "/".join(f"{row[3][0]:.3f}" for row in worth(other, "power", fitted["theta"])[1:])
        print(f"  {convention:8s}  phi {fitted['phi']:.4f}, N_eff/N(r=1) {effective} for r = 2/4/8   {meaning}")
    stored = worth(load_runs(PUBLISHED), "power", fit["theta"])[2][1]
    print(f"\nin words: {1e3 * stored:.0f}M parameters with r=4 act like {1e3 * result['n_eff_ratio']['4']:.0f}M in a "
          "plain model and cost the training FLOPs\nof a plain model of 1,000M, the one of the same width and depth")
    path = os.path.join("out", "isodepth_law.png")
    check_writable("the folder out/", "out")
    plot_law(runs, fit, draws, result, path)
    wrote(path)


def held_out(runs, fit, key):
    """actual - predicted (n,), each run predicted by a fit without all the runs that share its key."""
    group = grouped(runs, key)
    weights = (group != np.arange(group.max() + 1)[:, None]).astype(float)  # (G, n)
    guess = np.repeat(fit["theta"], len(weights), axis=0)
    theta = descend(guess, weights, fit["x"], fit["form"], fit["delta"], tolerance=1e-9)[0]
    return runs["val_loss"] - predict(theta, fit["x"], fit["form"])[group, np.arange(len(group))]


def rank_forms(runs):
    """Every recurrence term on the same runs, best first by its error on budgets it was not fitted to (nats)."""
    loops, ranking = np.unique(runs["n_loop"]), []
    for form in FORMS:
        n_q = len(form_parameters(form, loops)[0])
        if n_q >= len(loops) or len(loops) == 1 and form == "free":
            continue
        fit = fit_law(runs, form)
        row = dict(form=form, parameters=5 + n_q, r2=fit["r2"], huber=fit["huber"])
        for key in ["budget", "n_loop"][:2 if n_q < len(loops) - 1 else 1]:  # without one r, can it still be fitted?
            residual = held_out(runs, fit, key)
            last = residual[runs[key] == runs[key].max()]
            row[key] = rms([rms(residual[runs[key] == v]) for v in np.unique(runs[key])])
            row[f"top_{key}"], row[f"top_{key}_bias"] = rms(last), float(last.mean())
        ranking.append(row)
    ranking.sort(key=lambda row: row["budget"])
    print(f"\nRMSE in nats on runs held out of the fit (bias: actual - predicted); largest r here: {loops[-1]:g}\n"
          "form     par   R2      Huber e-5   each budget   largest (bias)     each r   largest (bias)")
    for row in ranking:
        print(f"{row['form']:8s} {row['parameters']}     {row['r2']:.4f}  {row['huber'] * 1e5:6.2f}      "
              f"{row['budget']:.4f}        {row['top_budget']:.4f} ({row['top_budget_bias']:+.4f})   " + (
                  f"{row['n_loop']:.4f}   {row['top_n_loop']:.4f} ({row['top_n_loop_bias']:+.4f})" if "n_loop" in row
                  else "needs every r"))
    return ranking


def cmd_compare(args):
    """phi of each intervention minus phi of the baseline at the same budgets, both fitted to the same resamples."""
    base, tricks, result = load_runs(args.baseline, args.convention), load_runs(args.runs, args.convention), {}
    check_fittable(base, args.baseline, "power")
    print(f"convention {args.convention}: {CONVENTIONS[args.convention]}; {args.resamples} resamples of the budgets of "
          "each r, the same for both")
    for sweep in dict.fromkeys(tricks["sweep"]):
        trick = select(tricks, tricks["sweep"] == sweep)
        both = {k: np.concatenate([base[k], trick[k]]) for k in base.keys() & trick.keys()}
        both["budget"] = nominal_budgets(both["flops"])
        both["sweep"] = np.repeat(["without", "with"], [len(base["flops"]), len(trick["flops"])])
        both = select(both, np.isin(both["budget"], both["budget"][both["sweep"] == "with"])  # phi is local: equal r
                      & np.isin(both["n_loop"], [1, *trick["n_loop"]]))
        new = both["sweep"] == "with"
        if new.all():
            stop(f"{args.baseline} has no run at the budgets of {args.runs} ("
                 f"{', '.join(f'{b:g}' for b in np.unique(trick['budget']))} FLOPs) with its n_loop: run the baseline "
                 "there, or plan the trick with --budgets of the baseline")
        shared = (both["n_loop"] == 1) & (1 not in trick["n_loop"])  # r=1 has no loop to change
        weights, phi = bootstrap_weights(both, args.resamples, within_r=True), []
        for path, mask in ((args.baseline, ~new), (args.runs, new | shared)):
            runs = select(both, mask)
            check_fittable(runs, path, "power")
            fit = fit_law(runs)
            draws = bootstrap(fit, weights[:, mask])
            reason = why_unidentified(fit, draws)
            if reason:
                stop(f"phi of {path} is not identified, {reason}: add budgets, widths or n_loop")
            phi.append(draws[:, 5])
        change, name = phi[1] - phi[0], str(sweep) or os.path.basename(args.runs)
        print(f"{name}: phi {span(phi[0])} -> {span(phi[1])}, difference {span(change)}, above 0 in "
              f"{np.nanmean(change[1:] > 0):.1%} of resamples; {mask.sum()} runs, R2 {fit['r2']:.4f}")
        result[name] = {k: dict(phi=float(v[0]), ci=interval(v))
                        for k, v in dict(baseline=phi[0], intervention=phi[1], difference=change).items()}
        if args.table:
            add_line(args.table, name, result[name], trick, args)
    write_json(args.json, result)


# --- the scoreboard: one line for each thing that was done to the loop ---

COLUMNS = ["trick", "phi", "phi_low", "phi_high", "baseline", "difference", "difference_low", "difference_high", "runs",
           "n_loop", "budgets", "seeds", "convention", "file"]


def read_table(path):
    try:
        with open(path, newline="", encoding="utf-8") as f:
            rows = list(csv.DictReader(f))
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}): `compare ... --table={path}` writes it")
    for line, row in enumerate(rows, 2):
        if not np.isfinite([number(row.get(k)) for k in COLUMNS[1:8]]).all():
            stop(f"{path} line {line}: needs a number for each of {', '.join(COLUMNS[1:8])}: repair or remove it")
    return rows


def add_line(path, name, phi, trick, args):
    """Write the line of a trick into the scoreboard, in place of an older one of that name and file."""
    rows, source = read_table(path) if os.path.exists(path) else [], os.path.basename(args.runs)
    values = [phi["intervention"]["phi"], *phi["intervention"]["ci"], phi["baseline"]["phi"], phi["difference"]["phi"],
              *phi["difference"]["ci"]]
    row = dict(zip(COLUMNS, [name, *(f"{v:.4f}" for v in values), len(trick["flops"]),
                             " ".join(f"{r:g}" for r in np.unique(trick["n_loop"])), len(np.unique(trick["budget"])),
                             len(np.unique(trick["seed"])), args.convention, source]))
    rows = [r for r in rows if (r["trick"], r["file"]) != (name, source)] + [row]
    try:
        with open(path, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        stop(f"cannot write --table={path} ({error.strerror}): give a file in a folder that exists")


def cmd_table(args):
    """The scoreboard, ranked by what each trick adds to the phi of the same loop without it, and its picture."""
    rows = sorted(read_table(args.table), key=lambda row: float(row["difference"]))
    if not rows:
        stop(f"{args.table} has no line yet: `compare base.csv trick.csv --table={args.table}` adds one")
    for row in reversed(rows):
        print("{trick:28s} phi {phi} [{phi_low}, {phi_high}]   {difference} [{difference_low}, {difference_high}] over "
              "its baseline {baseline}; {runs} runs, r = {n_loop}, convention {convention}, {file}".format(**row))
    path = args.plot or os.path.splitext(args.table)[0] + ".png"
    plot_scoreboard(rows, path)
    wrote(path)


# --- optima ---

def cmd_isoflop(args):
    """Optima without a law: a parabola of loss in log N per (budget, variant), N the matrix parameters n_once + n_rec:
    those stored, and of experts those that work on one token."""
    runs, rng, cells = load_runs(args.runs), np.random.default_rng(0), {}
    by = ["sweep"] * (len(np.unique(runs["sweep"])) > 1) + args.by.split(",")
    unknown = [k for k in by if k not in runs]
    if unknown:
        stop(f"--by={args.by}: {args.runs} has no column {', '.join(unknown)}; it has {', '.join(runs)}")
    for *variant, budget in sorted(set(zip(*(runs[k].tolist() for k in [*by, "budget"])))):
        cell = select(runs, np.all([runs[k] == v for k, v in zip([*by, "budget"], [*variant, budget])], axis=0))
        name = ",".join(f"{v:g}" if isinstance(v, float) else v for v in variant)
        if len(np.unique(cell["n_embd"])) < 3:
            print(f"skipped {name} at {budget:.3g} FLOPs: a parabola needs 3 widths", file=sys.stderr)
            continue
        log_n = np.log(cell["n_once"] + cell["n_rec"])
        basis = np.vander(log_n - log_n.mean(), 3)
        cells[name, budget] = cell, log_n, basis, basis @ np.linalg.pinv(basis) @ cell["val_loss"]
    spare = sum(len(log_n) - 3 for _, log_n, *_ in cells.values())
    if not spare:
        stop(f"{args.runs} has no budget with 4 widths, so nothing shows the noise around a parabola: add widths")
    noise = (sum(((fitted - cell["val_loss"]) ** 2).sum() for cell, *_, fitted in cells.values()) / spare) ** 0.5
    print(f"95% intervals: {args.resamples} parabolas refitted to noise of sd {noise:.4f} nats, pooled over all\n"
          f"{','.join(by)}: FLOPs, N*, D*, L* in nats, L* minus that of the first {by[-1]}")
    optima = {}  # name: {budget: [N*, D*, L*]}, each the estimate and then the draws
    for (name, budget), (cell, log_n, basis, fitted) in cells.items():
        loss = np.vstack([cell["val_loss"], fitted + noise * rng.standard_normal((args.resamples, len(log_n)))])
        a, b, c = np.linalg.pinv(basis) @ loss.T
        vertex = np.where(a > 0, -b / (2 * a), np.nan)  # one that bends down has no optimum
        log_d = np.polyval(np.polyfit(basis[:, 1], np.log(cell["tokens"]), 2), vertex)
        with np.errstate(over="ignore"):         # the vertex of a nearly straight line is far away
            star = [np.exp(vertex + log_n.mean()), np.exp(log_d), c - b ** 2 / (4 * a)]
        optima.setdefault(name, {})[budget] = star
        first = optima[next(iter(optima))].get(budget, star)
        print(f"{name:4s} {budget:.2e}  " + "  ".join(map(span, star, (3, 3, 5)))
              + ("" if first is star else f"  {span(star[2] - first[2])}")
              + ("" if log_n.min() < np.log(star[0][0]) < log_n.max() else "  outside the widths tried"))
    print("\nexponents of C: N*, D*, L* with its sign changed, and a of L* = E + k C^-a")
    for name, at in optima.items():
        c, (n, d, loss) = np.array(list(at)), (np.stack(star, axis=1) for star in zip(*at.values()))  # (1 + S, budgets)
        if len(c) > 1:
            slope = np.linalg.pinv(np.vander(np.log(c), 2))[0]
            with np.errstate(all="ignore"):      # N* of a nearly straight line may be 0 or infinite
                exponents = [np.log(n) @ slope, np.log(d) @ slope, -np.log(loss) @ slope]
            exponents += [saturating_exponent(c, loss)] if len(c) > 3 else []
            print(f"{name:4s} " + "   ".join(map(span, exponents)))


def saturating_exponent(c, loss):
    """a of L = E + k C^-a with E >= 0, for each row of loss (S, budgets): a scan, since E and k are linear given a."""
    exponents, squares = np.geomspace(0.01, 1, 400), []
    for a in exponents:
        basis = np.stack([np.ones_like(c), (c / c[0]) ** -a], axis=1)
        solved = loss @ np.linalg.pinv(basis).T
        squares.append(np.where(solved[:, 0] >= 0, ((loss - solved @ basis.T) ** 2).sum(1), np.inf))
    return exponents[np.argmin(squares, axis=0)]


def cmd_allocate(args):
    """Width and tokens with the lowest loss under the fitted law, and the FLOPs at which r=1 reaches that loss."""
    from model import Config, LoopedLM  # brings torch along, which the fits do not need
    runs = load_runs(args.runs, args.convention)
    check_fittable(runs, args.runs, "power")
    missing = [k for k in ("n_prelude", "n_recur", "n_coda") if k not in runs]
    if missing:
        stop(f"{args.runs} lacks the column {', '.join(missing)}, which says what a model of the law looks like")
    fit, head_dim = fit_law(runs), int(np.gcd.reduce(runs["n_embd"].astype(int)))
    widths = range(head_dim, 200 * head_dim, head_dim)

    def models(r):
        """Width, training FLOPs per token, N_once and N_rec of models with r loops, an array each."""
        like = np.flatnonzero(runs["n_loop"] == (r if r in runs["n_loop"] else runs["n_loop"].max()))[0]
        prelude, recur, coda, loops = (int(runs[k][like]) for k in ("n_prelude", "n_recur", "n_coda", "n_loop"))
        if loops * recur % r:
            stop(f"--n_loop={r}: the {loops * recur} layers of the loop in {args.runs} do not divide by it")
        rows = []
        for d in widths:
            cfg = Config(vocab_size=args.vocab_size, block_size=args.block_size, n_embd=d, n_head=d // head_dim,
                         n_prelude=prelude, n_recur=loops * recur // r, n_coda=coda, n_loop=r,
                         inject=str(runs["inject"][like]) if r > 1 else "none")
            n = LoopedLM.param_counts(cfg)
            rows.append((d, LoopedLM.flops_per_token(cfg), *count_parameters(
                n["once"], n["recurrent"] + n["injection"], n["injection"], d, r, args.convention)))
        return np.array(rows).T

    def best(r, table, flops):
        d, per_token, once, rec = table
        loss = predict_at(fit, once, rec, flops / per_token, r)
        k = loss.argmin()
        return loss[k], d[k], once[k] + rec[k], flops / per_token[k]

    looped, table = best(args.n_loop, models(args.n_loop), args.flops), models(1)
    cost = args.flops * 10 ** brentq(lambda x: best(1, table, args.flops * 10 ** x)[0] - looped[0], -3, 3)
    plain = best(1, table, cost)
    if widths[-1] in (looped[1], plain[1]):
        stop(f"--flops={args.flops:g}: the best width is beyond {widths[-1]}, too far from the runs of {args.runs}; "
             "take a smaller budget")
    print(f"law of {os.path.relpath(args.runs)}: phi {fit['phi']:.4f}, convention {args.convention}")
    for r, flops, (loss, d, n, tokens) in ((args.n_loop, args.flops, looped), (1, cost, plain)):
        print(f"r={r}: {flops:.3g} FLOPs reach {loss:.4f} nats with n_embd {d:.0f} (N {n:.3g}) on {tokens:.3g} tokens")
    beyond = args.flops / runs["budget"].max()
    print(f"so r=1 needs {cost / args.flops:.3f} of the FLOPs for that loss"
          + (f"; the budget is {beyond:.3g}x the largest that was fitted" if beyond > SAME_BUDGET else ""))


# --- command line ---

def positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < np.inf:
            raise argparse.ArgumentTypeError(f"{text} must be positive")
        return value
    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description="The joint scaling law of looped models; without "
                                     "a command, that of the published runs. The top of this file has examples.")
    parser.error = misused
    commands = parser.add_subparsers(required=True)

    def command(function, text):
        sub = commands.add_parser(function.__name__[4:], help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.error = misused
        return sub.add_argument

    table = dict(help="table of runs, from `collect` or data/isodepth*.csv")
    convention = dict(choices=CONVENTIONS, default="written", help="where the injection matrix is counted; "
                      + "; ".join(f"{k}: {v}" for k, v in CONVENTIONS.items()) + " (default written)")
    resamples = dict(type=positive(int), default=1000, help="draws behind the intervals (default 1000)")
    to_json = dict(metavar="FILE", help="also write the numbers to this file")

    add = command(cmd_plan, "print a sweep, one train.py command a line")
    add("--preset", choices=GRIDS, default="pocket", help="which grid (default pocket)")
    add("--budgets", type=positive(float), nargs="+", help="training FLOPs of a run, instead of the preset's")
    add("--widths", type=positive(int), nargs="+", help="n_embd at every budget, instead of the preset's")
    add("--loops", type=positive(int), nargs="+", help="n_loop, instead of the preset's")
    add("--seeds", type=int, nargs="+", default=[42], help="a run for each (default 42)")
    add("--flags", default="", metavar="'--a=1 --b=2'", help="more flags of train.py for every run: the trick to test")
    add("--name", help="folder under out/, the name of the sweep (default: PRESET-sweep)")
    add("--vocab_size", type=positive(int), help="of the data, for the FLOPs (default: the preset's)")
    add("--speed", type=positive(float), help="FLOP/s that you reach, for the time (default: the preset's)")

    add = command(cmd_collect, "one table, to stdout, from the summary.json files of finished runs")
    add("folders", nargs="+", help="the --out_dir folders of train.py")

    add = command(cmd_fit, "fit the joint law, with intervals")
    add("runs", **table)
    add("--convention", **convention)
    add("--budgets", type=positive(float), nargs="+", help="only the runs at these training FLOPs (default: all)")
    add("--form", choices=FORMS, default="power", help="recurrence term: power is r^phi, none phi = 0, full phi = 1, "
        "free a multiplier for each r (default power)")
    add("--compare", action="store_true", help="rank all forms by their error on held-out budgets and r")
    add("--plot", metavar="FILE", help="draw the law to this PNG")
    add("--resamples", **resamples)
    add("--json", **to_json)

    add = command(cmd_isoflop, "the optimum of each budget by parabolas, and its exponents")
    add("runs", **table)
    add("--by", default="n_loop", help="columns that tell variants apart, such as n_loop,n_expert (default n_loop)")
    add("--resamples", **resamples)

    add = command(cmd_allocate, "the best width under the law, and what the same loss costs at r=1")
    add("--runs", default=PUBLISHED, help="table of runs to fit (default: the published ones)")
    add("--convention", **convention)
    add("--flops", type=positive(float), required=True, help="training budget")
    add("--n_loop", type=positive(int), required=True, help="r, passes through the loop")
    add("--vocab_size", type=positive(int), default=32064, help="of the data, for the FLOPs (default: the paper's)")
    add("--block_size", type=positive(int), default=2048, help="context, for the FLOPs (default: the paper's)")

    add = command(cmd_compare, "phi with an intervention minus phi without it")
    add("baseline", help="table of the runs without it")
    add("runs", **table)
    add("--convention", **convention)
    add("--resamples", **resamples)
    add("--table", metavar="FILE", help="also add a line to this scoreboard, such as results/phi_table.csv")
    add("--json", **to_json)

    add = command(cmd_table, "the scoreboard of tricks, ranked, with its plot")
    add("table", nargs="?", default=os.path.join(HERE, "results", "phi_table.csv"), help="as `compare --table` writes "
        "it (default: results/phi_table.csv)")
    add("--plot", metavar="FILE", help="picture to draw (default: beside the table, as .png)")

    if len(sys.argv) == 1:
        cmd_published()
    else:
        args = parser.parse_args()
        for flag in ("json", "plot", "table"):
            path = getattr(args, flag, None)
            if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):  # before the work, not after it
                stop(f"--{flag}={path}: no such folder; give a file in a folder that exists")
        args.function(args)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)      # `| head` ends the program, without a traceback
    main()
