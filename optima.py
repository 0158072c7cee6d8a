"""
The best model of a budget: `fit_law.py isoflop` finds it from the runs alone, by a parabola of loss in log N in every
budget; `fit_law.py allocate` from the fitted law, with what the same loss would cost without a loop.

Shapes: n runs of a cell, S resamples; row 0 of (1 + S, ...) is the estimate.
"""
import os
import sys

import numpy as np
from scipy.optimize import brentq

from law import fit_law, label_groups, predict_at, span
from lib.console import stop
from runs import SAME_BUDGET, check_fittable, count_parameters, load_runs, load_tables, select


# --- isoflop ---

def fit_parabolas(runs, by):
    """{(variant, budget): its runs}, with log_n (n,), the basis (n, 3) of a parabola in it, and the loss on it (n,)."""
    keys = [*by, "budget"]
    cells = {}
    columns = [runs[k].tolist() for k in keys]
    for values in sorted(set(zip(*columns))):
        *variant, budget = values
        matches = [runs[k] == v for k, v in zip(keys, values)]
        cell = select(runs, np.all(matches, axis=0))
        names = [f"{v:.12g}" if isinstance(v, float) else v for v in variant]
        name = ",".join(names)
        if len(np.unique(cell["n_embd"])) < 3:
            print(f"skipped {name} at {budget:.3g} FLOPs: a parabola needs 3 widths", file=sys.stderr)
            continue
        log_n = np.log(cell["n_once"] + cell["n_rec"])
        basis = np.vander(log_n - log_n.mean(), 3)
        parabola = basis @ np.linalg.pinv(basis) @ cell["val_loss"]
        cells[name, budget] = dict(cell, log_n=log_n, basis=basis, parabola=parabola)
    return cells


def find_optimum(cell, noise, n, rng):
    """[N*, D*, L*], each (1 + n,): the minimum of the parabola, then of n parabolas fitted to it with fresh noise. NaN
    where a parabola bends down: its vertex is a maximum."""
    log_n, basis = cell["log_n"], cell["basis"]
    shape = (n, len(log_n))
    noisy = cell["parabola"] + noise * rng.standard_normal(shape)
    loss = np.vstack([cell["val_loss"], noisy])
    a, b, c = np.linalg.pinv(basis) @ loss.T
    a = np.where(a > 0, a, np.nan)
    vertex = -b / (2 * a)
    log_tokens = np.polyfit(basis[:, 1], np.log(cell["tokens"]), 2)
    log_d = np.polyval(log_tokens, vertex)
    with np.errstate(over="ignore"):  # the vertex of a nearly straight line is far away
        n_star = np.exp(vertex + log_n.mean())
        d_star = np.exp(log_d)
    lowest = c - b ** 2 / (4 * a)
    return [n_star, d_star, lowest]


def columns_of_variants(runs, names, path):
    """The columns of --by=names, and sweep if there are several. Stops where runs of a cell would differ in another."""
    by = names.split(",")
    sweeps = np.unique(runs["sweep"])
    if "sweep" not in by and len(sweeps) > 1:
        by = ["sweep", *by]
    unknown = [k for k in by if k not in runs]
    if unknown:
        stop(f"--by={names}: {path} has no column {', '.join(map(repr, unknown))}; it has {', '.join(runs)}")
    n_variants = label_groups(runs, *by).max()
    pooled = []
    for key in ("n_loop", "n_expert", "inject", "trick"):
        finer = label_groups(runs, *by, key)
        if finer.max() > n_variants:
            pooled.append(key)
    if pooled:
        stop(f"--by={names}: {path} has runs that differ in {', '.join(pooled)}, which one parabola would mix: "
             f"use --by={','.join([names, *pooled])}")
    return by


def pool_noise(cells, path):
    """Standard deviation in nats of the losses around all parabolas, each of which takes three degrees of freedom."""
    spare, squares = 0, 0
    for cell in cells.values():
        residual = cell["parabola"] - cell["val_loss"]
        squares += (residual ** 2).sum()
        spare += len(residual) - 3
    if not spare:
        stop(f"{path} has no budget with 4 widths, so nothing shows the noise around a parabola: add widths")
    return (squares / spare) ** 0.5


def cmd_isoflop(args):
    """Optima without a law: a parabola of loss in log N for each variant and budget, N the matrix parameters n_once +
    n_rec: those stored, and of experts those that work on one token."""
    runs, path = load_tables(args.runs), " and ".join(args.runs)
    by = columns_of_variants(runs, args.by, path)
    cells = fit_parabolas(runs, by)
    noise = pool_noise(cells, path)
    (baseline, _), *_ = cells
    title = ",".join(by)
    print(f"95% intervals: {args.resamples} parabolas refitted to noise of sd {noise:.4f} nats, pooled over all\n"
          f"{title}: FLOPs, N*, D*, L* in nats, L* minus that of {title} {baseline}")
    optima = {name: {} for name, _ in cells}  # {variant: {budget: [N*, D*, L*]}}
    rng = np.random.default_rng(0)
    for (name, budget), cell in cells.items():
        optimum = find_optimum(cell, noise, args.resamples, rng)
        line = f"{name:4s} {budget:.2e}  "
        reason = why_no_minimum(cell, optimum[0][0])
        if reason:
            print(f"{line}no minimum inside the widths, {reason}: left out of the differences and exponents")
            continue
        optima[name][budget] = optimum
        line += "  ".join(map(span, optimum, (3, 3, 5)))
        if name != baseline and budget in optima[baseline]:
            line += f"  {span(optimum[2] - optima[baseline][budget][2])}"
        lowest = optimum[2][1:]
        n_valid = np.isfinite(lowest).sum()
        if n_valid < args.resamples:
            line += f"  ({n_valid} of {args.resamples} parabolas have a minimum)"
        print(line)
    print("\nexponents of C: N*, D*, L* with its sign changed, and a of L* = E + k C^-a")
    for name, by_budget in optima.items():
        n_budgets = sum(variant == name for variant, _ in cells)
        print_exponents(name, by_budget, n_budgets)


def print_exponents(name, optima, n_budgets):
    """How N*, D* and L* of {budget: [N*, D*, L*]} go with the budget; n_budgets: those with and without a minimum."""
    left = f"{len(optima)} of {n_budgets} budgets have a minimum inside the widths"
    if len(optima) < 2:
        if n_budgets > 1:
            print(f"{name:4s} none: {left}")
        return
    c = np.array(list(optima))
    n, d, loss = np.stack(list(optima.values()), axis=2)  # (1 + S, budgets) each
    line_in_log_c = np.vander(np.log(c), 2)
    slope = np.linalg.pinv(line_in_log_c)[0]
    with np.errstate(all="ignore"):  # N* of a nearly straight line may be 0 or infinite
        exponents = [np.log(values) @ slope for values in (n, d, loss)]
    exponents[2] = -exponents[2]
    if len(c) > 3:
        exponents.append(saturating_exponent(c, loss))
    line = f"{name:4s} " + "   ".join(map(span, exponents))
    if len(optima) < n_budgets:
        line += f"   ({left})"
    print(line)


def why_no_minimum(cell, n_star):
    """None, or the reason why the parabola of a cell has no minimum between its smallest and largest N."""
    if np.isnan(n_star):
        return "the parabola bends down"
    if n_star <= np.exp(cell["log_n"].min()):
        return "the loss still falls at the smallest N"
    if n_star >= np.exp(cell["log_n"].max()):
        return "the loss still falls at the largest N"
    return None


def saturating_exponent(c, loss):
    """a of L = E + k C^-a with E >= 0, for each row of loss (S, budgets): a scan, since E and k are linear given a."""
    exponents = np.geomspace(0.01, 1, 400)
    squares = []
    for a in exponents:
        power = (c / c[0]) ** -a
        basis = np.stack([np.ones_like(c), power], axis=1)
        solution = loss @ np.linalg.pinv(basis).T  # (S, 2): E and k
        residual = loss - solution @ basis.T
        error = (residual ** 2).sum(1)
        possible = solution[:, 0] >= 0
        squares.append(np.where(possible, error, np.inf))
    best = exponents[np.argmin(squares, axis=0)]
    lowest = np.min(squares, axis=0)
    return np.where(np.isfinite(lowest), best, np.nan)


# --- allocate ---

def size_models(runs, r, args):
    """n_embd, training FLOPs per token, N_once and N_rec of models with r loops and the depth of the runs, one array
    (widths,) each."""
    from model import Config, LoopedLM  # brings torch along, which the fits do not need
    if any(runs["trick"]):
        stop(f"{args.runs}: its models have no known size without their trick; give runs without one")
    nearest = r if r in runs["n_loop"] else runs["n_loop"].max()
    like = select(runs, runs["n_loop"] == nearest)
    prelude, recur, coda, loops = (int(like[k][0]) for k in ("n_prelude", "n_recur", "n_coda", "n_loop"))
    depth = loops * recur
    if depth % r:
        stop(f"--n_loop={r}: the {depth} layers of the loop in {args.runs} do not divide by it")
    inject = str(like["inject"][0]) if r > 1 or 1 in runs["n_loop"] else "none"
    head_dim = int(np.gcd.reduce(runs["n_embd"].astype(int)))
    rows = []
    for d in range(head_dim, 200 * head_dim, head_dim):
        try:
            cfg = Config(vocab_size=args.vocab_size, block_size=args.block_size, n_embd=d, n_head=d // head_dim,
                         n_prelude=prelude, n_recur=depth // r, n_coda=coda, n_loop=r, inject=inject)
        except ValueError as error:
            stop(f"{args.runs}: its models cannot be sized without their trick ({error}); take runs without a trick")
        n = LoopedLM.param_counts(cfg)
        rec = n["recurrent"] + n["injection"]
        counts = count_parameters(n["once"], rec, n["injection"], d, r, args.convention)
        rows.append((d, LoopedLM.flops_per_token(cfg), *counts))
    models = np.array(rows).T
    per_token = dict(zip(models[0], models[1]))
    for d, spent in zip(like["n_embd"], like["flops"] / like["tokens"]):
        expected = per_token.get(d, spent)
        if loops == r and not 1 / SAME_BUDGET < spent / expected < SAME_BUDGET:
            stop(f"--vocab_size={args.vocab_size} --block_size={args.block_size}: n_loop {r} and n_embd {d:.0f} take "
                 f"{expected:.3g} FLOPs a token, but in {args.runs} {spent:.3g}: give the runs' vocabulary and context")
    return models


def best_model(fit, models, r, flops):
    """(loss, n_embd, N, tokens) of the model with the lowest loss for these training FLOPs."""
    d, per_token, once, rec = models
    tokens = flops / per_token
    loss = predict_at(fit, once, rec, tokens, r)
    k = loss.argmin()
    return loss[k], d[k], once[k] + rec[k], tokens[k]


def check_width(model, models, args):
    """Stop where the best model is the narrowest or the widest that was tried: the best of all is beyond it."""
    width, widths = model[1], models[0]
    where = f"too far from the runs of {args.runs}"
    if width == widths.max():
        stop(f"--flops={args.flops:g}: the best width is beyond {width:.0f}, {where}; take a smaller budget")
    if width == widths.min():
        stop(f"--flops={args.flops:g}: the best width is at most {width:.0f}, {where}; take a larger budget")


def cmd_allocate(args):
    """Width and tokens with the lowest loss under the fitted law, and the FLOPs at which r=1 reaches that loss."""
    runs = load_runs(args.runs, args.convention)
    check_fittable(runs, args.runs, "power")
    missing = [k for k in ("n_prelude", "n_recur", "n_coda") if k not in runs]
    if missing:
        stop(f"{args.runs} lacks the column {', '.join(missing)}, which says what a model of the law looks like")
    fit = fit_law(runs)
    looped_models = size_models(runs, args.n_loop, args)
    plain_models = size_models(runs, 1, args)
    looped = best_model(fit, looped_models, args.n_loop, args.flops)
    check_width(looped, looped_models, args)

    def excess(x):
        """Lowest loss of r=1 with 10^x times the FLOPs, minus that of the looped model."""
        lowest, *_ = best_model(fit, plain_models, 1, args.flops * 10 ** x)
        return lowest - looped[0]

    if not excess(3) <= 0 <= excess(-3):
        stop(f"--flops={args.flops:g}: r=1 reaches that loss at no budget within a factor of 1000, too far from the "
             f"runs of {args.runs}; take another budget")
    cost = args.flops * 10 ** brentq(excess, -3, 3)
    plain = best_model(fit, plain_models, 1, cost)
    check_width(plain, plain_models, args)
    print(f"law of {os.path.relpath(args.runs)}: phi {fit['phi']:.4f}, convention {args.convention}")
    for r, flops, (loss, d, n, tokens) in ((args.n_loop, args.flops, looped), (1, cost, plain)):
        print(f"r={r}: {flops:.3g} FLOPs reach {loss:.4f} nats with n_embd {d:.0f} (N {n:.3g}) on {tokens:.3g} tokens")
    beyond = args.flops / runs["budget"].max()
    below = args.flops / runs["budget"].min()
    warning = f"; the budget is {beyond:.3g}x the largest that was fitted" if beyond > SAME_BUDGET else ""
    if below * SAME_BUDGET < 1:
        warning = f"; the budget is {below:.3g}x the smallest that was fitted"
    if args.n_loop not in runs["n_loop"]:
        warning += f"; no run with r={args.n_loop} was fitted"
    print(f"so r=1 needs {cost / args.flops:.3f} of the FLOPs for that loss{warning}")
