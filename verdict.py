"""
Is a looping trick worth its compute? The verdict of runs with it, paired with runs without it.

    python fit_law.py verdict results/pocket_runs.csv results/trick_runs.csv     # six tricks; 1 s

A pair is two runs of the same budget, width, r, experts and seed, one with the trick and one without. They differ in
the trick alone, so no law is needed to compare them, and what is hard or easy about a width cancels.

- Difference: the mean over the pairs of (loss with - loss without), in nats per token.
- Compute multiplier m: how many times its FLOPs the baseline would need for the loss of the trick. Above 1 the trick
  saves compute, below 1 it costs compute. The baseline's losses at each r are fitted by a quadratic in log C and log N;
  its minimum over N is the optimum loss L*(C), a quadratic in log C. m solves, over the pairs,
  mean(L*(m C, r) - L*(C, r)) = difference. The trick is taken to change the best width's loss by the mean change over
  the widths that were run. L* is fitted to all budgets of the baseline from the cheapest of the pairs upwards.
- Tokens: how many times the tokens of its pair a run with the trick sees, since its steps are cheaper: the geometric
  mean over the pairs. A trick whose m equals this saves by cheaper steps, and is neither better nor worse per token.
  (To about 4%: m lets the width move to its optimum at m C, the runs of a pair keep theirs.)
- Share of the loop, as the tables call it: m at r > 1 divided by m at r = 1. A trick that helps the plain model as much
  has the share 1. It is no part of a whole, and may be above 1.
- Against the plain model: the same m, but with the plain model's L*(C) as the curve,
  mean(L*(m C, 1) - L*(C, r)) = difference. Both sides are at their best width; this one does depend on the fitted L*.

Intervals, 95%: (budget, r) cells of pairs are resampled, both sides of a pair together and all its seeds with it. The
seed noise of a run is in the scatter between cells, because no two cells share a run; resampling the pairs within a
cell as well would count that noise twice. Few cells scatter too little, so every resample is widened to Student's t.
The curve adds its own uncertainty: each resample refits it to the baseline's losses with fresh noise, of the size that
the fit left over. Table shapes: n runs or pairs, S resamples; row 0 of (1 + S, ...) is the estimate.
"""
import csv
import os

import numpy as np

from law import interval, label_groups
from lib.console import stop
from lib.files import write_json, writing
from lib.plots_runs import plot_verdicts
from runs import at_budgets, load_runs, nominal_budgets, read_rows, select

RESAMPLES = 2000
PAIRS_NEEDED, CELLS_NEEDED = 6, 3
SAME_FLOPS = 0.01  # the two runs of a pair differ by at most this share of their FLOPs
PAIR = ["budget", "n_embd", "n_loop", "n_expert", "seed"]


# --- pairs ---

def pair_runs(base, trick, name):
    """The trick's runs that have a pair, with its loss as `without` (n,) and how many times its tokens they saw as
    `token_ratio` (n,), and the number of runs without a pair."""
    rows = index_runs(base, "the baseline")
    keys = index_runs(trick, name)
    has_pair = np.array([key in rows for key in keys], bool)
    partner = [rows[key] for key in keys if key in rows]
    pairs = select(trick, has_pair)
    without = select(base, np.array(partner, int))
    pairs["without"] = without["val_loss"]
    pairs["token_ratio"] = pairs["tokens"] / without["tokens"]
    ratios = pairs["flops"] / without["flops"]
    for r, d, ratio in zip(pairs["n_loop"], pairs["n_embd"], ratios):
        if abs(ratio - 1) > SAME_FLOPS:
            stop(f"{name}: the run with n_loop {r:g} and n_embd {d:g} took {ratio:.3f} times the FLOPs of its pair: "
                 "train both with the same --max_flops")
    return pairs, len(keys) - len(partner)


def index_runs(runs, name):
    """{what has to agree in a pair: row}"""
    rows = {}
    columns = [runs[k] for k in PAIR]
    for row, key in enumerate(zip(*columns)):
        if key in rows:
            stop(f"{name} has two runs with the same {', '.join(PAIR)}: keep one of them in the file")
        rows[key] = row
    return rows


def seed_noise(runs, *keys):
    """Standard deviation of the loss between seeds in nats, and its degrees of freedom. keys: columns in which models
    differ, besides budget, width, r and experts."""
    model = label_groups(runs, "budget", "n_embd", "n_loop", "n_expert", *keys)
    counts = np.bincount(model)
    means = np.bincount(model, runs["val_loss"]) / counts
    spare = np.sum(counts - 1)
    if spare == 0:
        return np.nan, 0
    residual = runs["val_loss"] - means[model]
    variance = np.sum(residual ** 2) / spare
    return variance ** 0.5, spare


# --- what the baseline's compute is worth ---

def surface_basis(runs):
    """1, x, x^2, y, y^2, x y of runs (n, 6), where x = log C and y = log N around their means; None if the runs are too
    few or too alike for a surface."""
    if len(runs["flops"]) < 7:
        return None
    log_c = np.log(runs["flops"])
    log_n = np.log(runs["n_once"] + runs["n_rec"])
    x = log_c - log_c.mean()
    y = log_n - log_n.mean()
    columns = [x ** 0, x, x ** 2, y, y ** 2, x * y]
    basis = np.stack(columns, axis=1)
    return basis if np.linalg.matrix_rank(basis) == 6 else None


def fit_surface(runs, r):
    """The quadratic surface of the loss of runs (n,) with r loops: the matrix from losses to its six coefficients
    (6, n), and the losses on the surface (n,)."""
    basis = surface_basis(runs)
    if basis is None:
        stop(f"the baseline has too few runs with n_loop {r:g} for a curve of its loss: it takes three budgets with "
             "three widths each")
    inverse = np.linalg.pinv(basis)
    return inverse, basis @ inverse @ runs["val_loss"]


def minimise_over_n(coefficients):
    """The optimum loss constant + slope x + bend x^2 of a surface: (constant, slope, bend), from its six coefficients
    (6, ...)."""
    constant, by_x, by_xx, by_y, by_yy, by_xy = coefficients
    by_yy = np.where(by_yy > 0, by_yy, np.nan)  # a parabola that bends down has no lowest loss
    # minimum over y: constant + by_x x + by_xx x^2 - (by_y + by_xy x)^2 / (4 by_yy)
    tilt = by_xy / (2 * by_yy)
    constant = constant - by_y ** 2 / (4 * by_yy)
    slope = by_x - by_y * tilt
    bend = by_xx - by_xy * tilt / 2
    return constant, slope, bend


def fit_curves(base, kinds, rng):
    """L* for each (n_loop, n_expert) of kinds: {kind: (log C where x = 0, constant, slope, bend)}, the last three
    (1 + S,)."""
    fits, squares, spare = {}, 0, 0
    for kind in sorted(kinds):
        runs = choose(base, *kind)
        inverse, smooth = fit_surface(runs, kind[0])
        residual = runs["val_loss"] - smooth
        squares += np.sum(residual ** 2)
        spare += len(residual) - 6
        fits[kind] = runs, inverse, smooth
    noise = (squares / spare) ** 0.5  # of all curves together

    curves = {}
    for kind, (runs, inverse, smooth) in fits.items():
        shape = (RESAMPLES, len(smooth))
        noisy = smooth + noise * rng.standard_normal(shape)
        losses = np.vstack([runs["val_loss"], noisy])  # (1 + S, runs)
        curves[kind] = np.log(runs["flops"]).mean(), *minimise_over_n(inverse @ losses.T)
    return curves


def mean_optimum(curves, pairs):
    """Means over the pairs, (1 + S,) each: L* at the compute of a pair, its slope by log C there, and its bend.
    curves: those of the pairs' kinds, or the one that all of them are compared with."""
    value, slope, bend = 0, 0, 0
    for kind in set(zip(pairs["n_loop"], pairs["n_expert"])):
        centre, constant, by_x, by_xx = curves[kind]
        part = choose(pairs, *kind)
        share = len(part["flops"]) / len(pairs["flops"])
        x = np.log(part["flops"]) - centre
        value = value + share * (constant + by_x * x.mean() + by_xx * np.mean(x ** 2))
        slope = slope + share * (by_x + 2 * by_xx * x.mean())
        bend = bend + share * by_xx
    return value, slope, bend


def choose(runs, r, n_expert):
    same_r = runs["n_loop"] == r
    same_experts = runs["n_expert"] == n_expert
    return select(runs, same_r & same_experts)


def solve_multiplier(difference, slope, bend):
    """log m, where slope log m + bend (log m)^2 = difference, (1 + S,) each. Beyond the lowest point of the curve the
    root is continued in a straight line; NaN where the curve does not fall."""
    slope = np.where(slope < 0, slope, np.nan)
    inside = slope ** 2 + 4 * bend * difference
    root = np.sqrt(np.maximum(inside, 0))
    return 2 * difference / (slope - root)


def resample_difference(pairs, rng):
    """The mean of loss with - loss without over the pairs, and its resamples by cells, (1 + S,)."""
    change = pairs["val_loss"] - pairs["without"]
    cell = label_groups(pairs, "budget", "n_loop")
    sizes = np.bincount(cell)
    sums = np.bincount(cell, change)
    k = len(sizes)
    draws = rng.multinomial(k, np.full(k, 1 / k), size=RESAMPLES)  # (S, cells)
    means = draws @ sums / (draws @ sizes)
    # The scatter of k cells is too small by (k - 1) / k, and known from k - 1 degrees of freedom only: t, not normal.
    widening = np.sqrt(k / rng.chisquare(k - 1, size=RESAMPLES))
    estimate = change.mean()
    resampled = estimate + widening * (means - estimate)
    return np.concatenate([[estimate], resampled])


def measure_pairs(base, pairs, seed=0):
    """(1 + S,) each, the estimate and then every resample: the difference in nats, log m, and log m against the plain
    model, all NaN if the baseline's plain runs are too few for a curve. base: the runs for the curves."""
    rng = np.random.default_rng(seed)
    difference = resample_difference(pairs, rng)
    base = select(base, base["budget"] >= pairs["budget"].min())
    kinds = set(zip(pairs["n_loop"], pairs["n_expert"]))
    curves = fit_curves(base, kinds, rng)
    optimum, slope, bend = mean_optimum(curves, pairs)
    log_m = solve_multiplier(difference, slope, bend)

    if surface_basis(choose(base, 1, 0)) is None:
        return difference, log_m, np.full_like(log_m, np.nan)
    plain = fit_curves(base, [(1, 0)], rng)[1, 0]
    plain_optimum, slope, bend = mean_optimum({kind: plain for kind in kinds}, pairs)
    gap = optimum + difference - plain_optimum
    return difference, log_m, solve_multiplier(gap, slope, bend)


# --- the verdict ---

def judge(base, trick, name, curve=None):
    """A dict of what the pairs of a trick say; `decided` is missing where they are too few. curve: the runs for the
    baseline's curve, if others."""
    curve = curve or base
    pairs, n_alone = pair_runs(base, trick, name)
    looped = select(pairs, pairs["n_loop"] > 1)
    plain = select(pairs, pairs["n_loop"] == 1)
    result = dict(pairs=len(looped["flops"]), without_pair=n_alone)
    for key in ("budget", "n_loop", "seed"):
        values = np.unique(looped[key])
        result[key] = values.tolist()
    if not is_enough(looped):
        return result
    difference, log_m, log_against_plain = measure_pairs(curve, looped)
    add_estimate(result, "nats", difference)
    add_estimate(result, "multiplier", np.exp(log_m))
    add_estimate(result, "against_plain", np.exp(log_against_plain))
    result["tokens"] = float(np.exp(np.mean(np.log(looped["token_ratio"]))))
    if "multiplier" not in result:
        stop(f"{name}: the baseline's loss does not fall with compute at these budgets: choose others with --budgets")
    low, high = result["multiplier_ci"]
    result["decided"] = "not decided"
    if low > 1:
        result["decided"] = "better"
    if high < 1:
        result["decided"] = "worse"

    same_budgets = np.isin(looped["budget"], plain["budget"])
    at_same = select(looped, same_budgets)
    if is_enough(plain) and is_enough(at_same):
        _, log_looped, _ = measure_pairs(curve, at_same, seed=1)
        _, log_plain, _ = measure_pairs(curve, plain, seed=2)
        add_estimate(result, "plain", np.exp(log_plain))
        add_estimate(result, "share", np.exp(log_looped - log_plain))
    return result


def add_estimate(result, key, values):
    """The estimate and the interval of values (1 + S,), if there are both."""
    bounds = interval(values)
    if bounds and np.isfinite(values[0]):
        result[key] = float(values[0])
        result[f"{key}_ci"] = bounds


def is_enough(pairs):
    n_pairs = len(pairs["flops"])
    cells = set(zip(pairs["budget"], pairs["n_loop"]))
    return n_pairs >= PAIRS_NEEDED and len(cells) >= CELLS_NEEDED


def bracket(bounds, form):
    low, high = (format(v, form) for v in bounds)
    return f"[{low}, {high}]"


def percent_text(m, bounds):
    """A compute multiplier and its interval as the share of compute saved, or what it costs more."""
    low, high = bounds
    if m >= 1:
        saved, *edges = (round(100 - 100 / v) for v in (m, low, high))
        return f"saves {saved}% {bracket(edges, 'd')} of the compute"
    cost, *edges = (round(100 / v - 100) for v in (m, high, low))
    return f"costs {cost}% {bracket(edges, 'd')} more compute"


def count(n, word):
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def print_verdict(name, result):
    """Five lines: what a trick saves, how many more tokens it sees, whether the loop has a share in it, what the loop
    with it is worth beside a plain model, and what is decided."""
    pairs = count(result["pairs"], "pair")
    budgets = count(len(result["budget"]), "budget")
    seeds = count(len(result["seed"]), "seed")
    n_alone = result["without_pair"]
    alone = f"; {count(n_alone, 'run')} without a pair left out" if n_alone else ""
    if "decided" not in result:
        print(f"{name}: no verdict, {pairs}, {budgets}, {seeds} at r > 1: it takes {PAIRS_NEEDED} pairs in "
              f"{CELLS_NEEDED} (budget, r) cells{alone}")
        return
    m, bounds = result["multiplier"], result["multiplier_ci"]
    effect = percent_text(m, bounds)
    loops = " and ".join(f"{r:g}" for r in result["n_loop"])
    nats = bracket(result["nats_ci"], "+.3f")
    print(f"{name}: {effect} at r = {loops} ({pairs}, {budgets}, {seeds}; {result['nats']:+.3f} nats {nats}{alone})")
    beyond = bracket([bound / result["tokens"] for bound in bounds], ".2f")
    print(f"    at the same FLOPs it sees {result['tokens']:.2f} times the tokens; per token it is worth "
          f"{m / result['tokens']:.2f} {beyond}")
    share = "unknown, there are too few r = 1 runs with a pair"
    if "plain" in result and "share" in result:
        edges = bracket(result["share_ci"], ".2f")
        share = percent_text(result["plain"], result["plain_ci"])
        share += f"; the loop's multiplier over this one {result['share']:.2f} {edges}"
    print(f"    the trick in a plain model, r = 1: {share}")
    if "against_plain" in result:
        effect = percent_text(result["against_plain"], result["against_plain_ci"])
        print(f"    the loop with it against the plain model: {effect}")
    print(f"    {result['decided']}: compute multiplier {m:.2f} {bracket(bounds, '.2f')}")


def judge_tables(baseline, path, curve=None, *, budgets=None, only=None, json=None, scoreboard=None):
    """The verdict on each trick in the table of runs at path, or on the one called `only`: printed, returned as {name:
    result}, and added to a scoreboard with its picture. curve: the table for the baseline's curve, if another."""
    tables = [load_runs(table) for table in (baseline, path, curve or baseline)]
    flops = np.concatenate([table["flops"] for table in tables])
    names = nominal_budgets(flops)  # one name for a budget of all tables
    ends = np.cumsum([len(table["flops"]) for table in tables])
    for table, budget in zip(tables, np.split(names, ends[:-1])):
        table["budget"] = budget
    base, tricks, curve_runs = tables
    if budgets:
        tricks = at_budgets(tricks, budgets, path)
    noise, spare = seed_noise(base)
    seeds = f"sd {noise:.3f} nats ({spare} degrees of freedom)" if spare else "unknown, no run has a second seed"
    print(f"95% intervals from {RESAMPLES} resamples of (budget, r) cells of pairs; noise between seeds {seeds}")
    results = {}
    for sweep in dict.fromkeys(tricks["sweep"]):
        name = str(sweep) or os.path.basename(path)
        if only in (None, name):
            trick = select(tricks, tricks["sweep"] == sweep)
            results[name] = judge(base, trick, name, curve_runs)
            print_verdict(name, results[name])
    if only and not results:
        stop(f"{path} has no run of {only}: give the name that its column sweep holds")
    if json:
        write_json(json, results)
    if scoreboard:
        sources = (os.path.basename(baseline), os.path.basename(path))
        add_to_scoreboard(scoreboard, results, sources)
    return results


# --- the scoreboard of verdicts: a line for each trick ---

# each with its interval; `plain` is the multiplier at r = 1
SCORES = ["multiplier", "against_plain", "plain", "share", "nats"]
COLUMNS = ["trick", "decided", *[f"{key}{end}" for key in SCORES for end in ("", "_low", "_high")], "tokens", "pairs",
           "n_loop", "budgets", "seeds", "baseline", "runs"]


def score_line(name, result, sources):
    """A line of the scoreboard; a number that the pairs do not give stays empty."""
    line = dict.fromkeys(COLUMNS, "")
    for key in SCORES:
        if key in result:
            low, high = result[f"{key}_ci"]
            for column, value in zip((key, f"{key}_low", f"{key}_high"), (result[key], low, high)):
                line[column] = f"{value:.4f}"
    line.update(trick=name, decided=result["decided"], tokens=f"{result['tokens']:.4f}", pairs=result["pairs"],
                baseline=sources[0], runs=sources[1])
    line["n_loop"] = " ".join(f"{r:g}" for r in result["n_loop"])
    line["budgets"], line["seeds"] = len(result["budget"]), len(result["seed"])
    return line


def add_to_scoreboard(path, results, sources):
    """Put the verdicts into the table at path and draw it. A trick has one line: a verdict takes the place of an older
    one from the same table of runs, and of one from another table with no more pairs."""
    names, rows = read_rows(path, "`verdict --scoreboard` writes it") if os.path.isfile(path) else (COLUMNS, {})
    if names != COLUMNS:
        stop(f"{path} is no scoreboard, whose columns are {','.join(COLUMNS)}: give another file")
    lines = {row["trick"]: row for row in rows.values()}
    for name, result in results.items():
        old = lines.get(name)
        better_known = old and old["runs"] != sources[1] and int(old["pairs"]) > result["pairs"]
        if better_known:
            print(f"kept the line of {name} from {old['runs']}, which has {old['pairs']} pairs")
        elif "decided" in result:
            lines[name] = score_line(name, result, sources)
    ranked = sorted(lines.values(), key=lambda line: -float(line["multiplier"]))
    with writing("scoreboard", path), open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ranked)
    picture = os.path.splitext(path)[0] + ".png"
    plot_verdicts(ranked, picture)
    print(f"wrote {os.path.relpath(path)} and {os.path.relpath(picture)}")


def cmd_verdict(args):
    """Whether each trick saves compute: pairs of runs with and without it."""
    judge_tables(args.baseline, args.runs, args.curve, budgets=args.budgets, json=args.json,
                 scoreboard=args.scoreboard)
