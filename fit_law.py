"""
What one recurrence is worth: fit the joint scaling law of looped language models (arXiv 2604.21106, section 4)

    L(N_once, N_rec, D, r) = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta

L validation loss in nats/token, D training tokens, r = n_loop, N_once the parameters that run once (prelude and coda
matrices), N_rec those that run r times. phi = 1: a loop is worth a fresh block; phi = 0: it adds nothing.

    python fit_law.py                                   # the 116 published runs: phi 0.458 [0.416, 0.517], a plot; 3 s
    python fit_law.py plan --preset=pocket > sweep.sh   # a sweep, one train.py command a line; 'paper' is the 116 runs
    python fit_law.py collect out/pocket/* > runs.csv   # its summary.json files as one table
    python fit_law.py fit runs.csv --compare            # the law with intervals; laws ranked by held-out error; 2 s
    python fit_law.py isoflop runs.csv                  # optimum N*, D*, L* of each budget, no law assumed; 1 s
    python fit_law.py allocate --flops=1e20 --n_loop=4  # best width under the law, what the same loss costs at r=1; 3 s
    python fit_law.py plan --preset=trick --name=mine --flags='--inject=hyper' > sweep.sh     # a looping trick of yours
    python fit_law.py compare base.csv trick.csv        # phi with it minus phi without it; --table adds a line to the
    python fit_law.py table                             # scoreboard, results/phi_table.csv, drawn by this one

For fixed alpha, beta and phi the law is linear in E, A and B, so a start needs only the first three; from there
Levenberg-Marquardt with the exact Jacobian goes downhill on many problems at once: all 12 starts take 10 ms and 1,000
bootstrap resamples 0.3 s on one core (python -m pytest tests/test_fit_law.py -m slow -s measures it).
"""
import argparse
import csv
import json
import os
import shlex
import sys
from itertools import product

import numpy as np
from scipy.optimize import brentq

from data.prepare import stop

HERE = os.path.dirname(os.path.abspath(__file__))
PUBLISHED = os.path.join(HERE, "data", "isodepth_runs.csv")
DELTA = 1e-3  # Huber threshold on log L (section 4)
SAME_BUDGET = 1.1  # runs whose FLOPs differ by less than this factor share a budget: each rounds it to whole steps


# --- the recurrence term: what r passes through the recurrent block are worth ---

# name: (parameters, starts, function). The function takes the loop counts r (R,) and each parameter (S, 1), and returns
# the multiplier m(r) of N_rec and what it adds to the loss in nats. To try another law, add a line.
FORMS = {
    "power": (["phi"], [[0.0], [0.8]], lambda r, phi: (r ** phi, 0)),
    "none": ([], [[]], lambda r: (r ** 0, 0)),  # phi = 0
    "full": ([], [[]], lambda r: (r, 0)),  # phi = 1
    "bounded": (["k1", "k2"], [[1, 2], [2, 5]], lambda r, k1, k2: (1 + k1 * (1 - np.exp((1 - r) / k2)), 0)),
    "linear": (["c"], [[0.2]], lambda r, c: (1 + c * (r - 1), 0)),
    "log": (["c"], [[0.5]], lambda r, c: (1 + c * np.log2(r), 0)),
    "shifted": (["c", "g"], [[0.4, 0.7]], lambda r, c, g: (1 + c * (r - 1 + 1e-300) ** g, 0)),  # 0^g has no derivative
    "additive": (["K", "g"], [[0.1, 0.7]], lambda r, k, g: (r ** 0, -k * (1 - r ** -g))),
    # a multiplier of its own for each r but the smallest, so the runs say how many parameters it has
    "free": (None, None, lambda r, *m: (np.concatenate([np.ones_like(m[0]), *m], axis=1), 0)),
}


def form_parameters(form, loops):
    """(names, starts) of a form for runs with these loop counts, ascending."""
    return ([f"m_{r:g}" for r in loops[1:]], [list(loops[1:] ** 0.5)]) if form == "free" else FORMS[form][:2]


def recurrence(form, loops, q):
    """Multiplier and extra loss of each loop count, (S, R) each, for parameters q, a list of (S, 1) columns."""
    shape = (len(q[0]) if q else 1, len(loops))
    return [np.broadcast_to(part, shape) for part in FORMS[form][2](loops, *q)]


# --- reading runs ---

ALIASES = {"C_flops": "flops", "r": "n_loop", "d_model": "n_embd", "N_once": "n_once", "N_rec": "n_rec",
           "D_tokens": "tokens", "val_loss_nats": "val_loss"}  # names in the digitised tables
REQUIRED = ["flops", "n_loop", "n_embd", "n_once", "n_rec", "tokens", "val_loss"]
IDENTITY = ["sweep", "budget", "n_loop", "n_expert", "inject", "n_embd", "seed"]  # two runs differ in one of these


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return np.nan


def load_runs(path, convention="written"):
    """A table of runs as a dict of columns, checked, with N_once and N_rec counted by the convention.

    Adds `budget`, the nominal FLOPs, and what the digitised tables leave out: seed, inject, n_expert.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            rows = [{ALIASES.get(k, k): v for k, v in row.items()} for row in csv.DictReader(f, restkey="beyond")]
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}): give a table made by `collect`, or one of data/isodepth*.csv")
    missing = [k for k in REQUIRED if not rows or k not in rows[0]]
    if missing:
        stop(f"{path} has no runs or lacks the column {', '.join(missing)}: make it with `collect out/* > runs.csv`")
    for line, row in enumerate(rows, 2):
        for key in REQUIRED:
            value = number(row[key])
            if not (0 < value < np.inf or value == 0 and key == "n_once"):  # NaN fails both
                stop(f"{path} line {line}: {key} is {row[key]!r}, not a positive number: repair or remove that run")
    runs = dict(sweep=np.full(len(rows), ""), inject=np.full(len(rows), "linear"), n_expert=np.zeros(len(rows)),
                seed=np.zeros(len(rows)))
    for key in rows[0]:
        values = np.array([number(row[key]) for row in rows])
        runs[key] = np.array([str(row[key]) for row in rows]) if np.isnan(values).any() else values
    runs["budget"] = nominal_budgets(runs["flops"])
    first = {}
    for line, key in enumerate(zip(*(runs[k] for k in IDENTITY)), 2):
        if first.setdefault(key, line) != line:
            stop(f"{path} lines {first[key]} and {line} are one run (same {', '.join(IDENTITY)}): keep one of them")
    if convention == "page" and not ({"n_prelude", "n_recur", "n_coda"} <= runs.keys() and np.all(
            runs["n_prelude"] + runs["n_loop"] * runs["n_recur"] + runs["n_coda"] == 20)):
        stop(f"--convention=page holds for the paper's grid of 20 layers only and {path} is another: use written")
    injected = (runs["n_loop"] > 1) & (runs["inject"] == "linear") & (runs["sweep"] != "hyperconnect")
    runs["n_once"], runs["n_rec"] = count_parameters(runs["n_once"], runs["n_rec"], 2 * runs["n_embd"] ** 2 * injected,
                                                     runs["n_embd"], runs["n_loop"], convention)
    return runs


# Where the injection matrix W (d x 2d) is counted: phi depends on it, N_eff/N(r=1) hardly does.
CONVENTIONS = {"written": "injection matrix in N_rec, the formula the paper prints",
               "inj_once": "injection matrix in N_once",
               "page": "the counts behind the published 0.459",
               "no_inj": "injection matrix not counted"}


def count_parameters(once, rec, inj, d, r, convention):
    """(N_once, N_rec) of the law, from matrix parameters of which rec includes the injection matrix inj."""
    if convention == "page":  # a straight line through N = 240, 146, 98, 74 d^2 against 16/r
        block = 1363 / 115 * d ** 2
        return 139.5 * d ** 2 - 7.5 * block, 16 / r * block
    return (once + inj if convention == "inj_once" else once), (rec if convention == "written" else rec - inj)


def nominal_budgets(flops):
    """Each run's budget: the median FLOPs, to three digits, of the runs within SAME_BUDGET of the cheapest of them."""
    budget, rest = np.empty(len(flops)), np.ones(len(flops), bool)
    while rest.any():
        group = rest & (flops < SAME_BUDGET * flops[rest].min())
        budget[group] = float(f"{np.median(flops[group]):.2e}")
        rest &= ~group
    return budget


def select(runs, mask):
    return {k: v[mask] for k, v in runs.items()}


def grouped(runs, *keys):
    """A number for each run, the same for runs whose keys agree."""
    rows = list(zip(*(runs[k] for k in keys)))
    numbers = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    return np.array([numbers[row] for row in rows])


def check_fittable(runs, path, form):
    n, loops = len(runs["val_loss"]), np.unique(runs["n_loop"])
    if n < 10:
        stop(f"{path} has {n} runs but the law has 6 parameters: at least 10 runs are needed")
    for key in ("sweep", "n_expert", "inject"):
        kinds = np.unique(runs[key][runs["n_loop"] > 1])  # r=1 has nothing to inject
        if len(kinds) > 1:
            stop(f"{path} mixes {key} {', '.join(map(str, kinds))}: give each its own file, or use `compare`")
    missing = max(1 + len(form_parameters(form, loops)[0]), 2 if form == "free" else 1) - len(loops)
    if missing > 0:
        stop(f"{path} has only n_loop {', '.join(f'{r:g}' for r in loops)}, so the recurrence term of --form={form} is "
             f"not identifiable: add runs with {missing} more n_loop, or use --form=none")


# --- the fit ---

def scaled(runs):
    """What the optimiser sees: N and D over their geometric means, so that every parameter is of order 1."""
    loops, which = np.unique(runs["n_loop"], return_inverse=True)
    n0, d0 = (np.exp(np.log(v).mean()) for v in (runs["n_once"] + runs["n_rec"], runs["tokens"]))
    return dict(once=runs["n_once"] / n0, rec=runs["n_rec"] / n0, log_d=np.log(runs["tokens"] / d0), n0=n0, d0=d0,
                loops=loops, which=which, log_loss=np.log(runs["val_loss"]))


def law(theta, x, form):
    """log L (S, n) and its Jacobian (S, P, n) at parameters theta (S, P) = log E, log A, log B, alpha, beta, q."""
    log_e, log_a, log_b, alpha, beta, *q = (column[:, None] for column in theta.T)
    multiplier, extra = recurrence(form, x["loops"], q)
    n_eff = x["once"] + multiplier[:, x["which"]] * x["rec"]
    log_n = np.log(n_eff)
    from_n, from_d = np.exp(log_a - alpha * log_n), np.exp(log_b - beta * x["log_d"])
    loss = np.exp(log_e) + from_n + from_d + extra[:, x["which"]]
    jac = np.empty((*theta.shape, len(x["log_d"])))
    jac[:, 0], jac[:, 1], jac[:, 2] = np.exp(log_e) / loss, from_n / loss, from_d / loss
    jac[:, 3], jac[:, 4] = -log_n * jac[:, 1], -x["log_d"] * jac[:, 2]
    for k in range(len(q)):  # complex step: the exact derivative of any form, none written out
        moved = [column + 1e-30j * (i == k) for i, column in enumerate(q)]
        dm, dextra = (part.imag[:, x["which"]] / 1e-30 for part in recurrence(form, x["loops"], moved))
        jac[:, 5 + k] = dextra / loss - alpha * jac[:, 1] * x["rec"] / n_eff * dm
    return np.log(loss), jac


def predict(theta, x, form):
    """L in nats, (S, n)."""
    return np.exp(law(theta, x, form)[0])


def objective(theta, weights, x, form, delta):
    """Sum of weighted Huber losses on log L (S,), its gradient (S, P) and Gauss-Newton Hessian (S, P, P)."""
    with np.errstate(all="ignore"):  # a wild step gives NaN, which is never better
        log_loss, jac = law(theta, x, form)
        residual = log_loss - x["log_loss"]
        size = np.abs(residual)
        huber = np.where(size <= delta, 0.5 * residual ** 2, delta * (size - 0.5 * delta))
        weighted = jac * (weights * np.minimum(1, delta / np.maximum(size, 1e-300)))[:, None]  # Huber by reweighting
        return (weights * huber).sum(1), (weighted @ residual[:, :, None])[:, :, 0], weighted @ jac.transpose(0, 2, 1)


def descend(theta, weights, x, form, delta, tolerance):
    """Levenberg-Marquardt on S problems at once, theta (S, P) and weights (S, n): where each ends, its objective."""
    best, best_value, live = theta.copy(), np.empty(len(theta)), np.arange(len(theta))
    state = [theta.copy(), *objective(theta, weights, x, form, delta)]
    damping, diagonal = np.full(len(theta), 1e-2), np.arange(theta.shape[1])
    for _ in range(500):
        theta, value, gradient, hessian = state
        damped = hessian.copy()
        damped[:, diagonal, diagonal] *= 1 + damping[:, None]
        damped[:, diagonal, diagonal] += 1e-14  # a parameter that no row touches stays where it is
        trial = theta - np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
        new = [trial, *objective(trial, weights, x, form, delta)]
        better = new[1] < value
        gain = np.where(better, 1 - new[1] / np.maximum(value, 1e-300), np.inf)
        damping = np.where(better, damping / 4, damping * 4)
        for old, fresh in zip(state, new):
            old[better] = fresh[better]
        best[live], best_value[live] = state[0], state[1]
        moving = (gain > tolerance) & (damping < 1e8)
        if not moving.any():
            break
        live, damping, weights, *state = (part[moving] for part in (live, damping, weights, *state))
    return best, best_value


def starts(x, form):
    """A grid of (alpha, beta, q), each with the E, A, B that minimise the squared relative error: a linear problem."""
    grid, loss = [], np.exp(x["log_loss"])
    for alpha in (0.15, 0.4):
        for beta in (0.2, 0.4, 0.8):
            for q in form_parameters(form, x["loops"])[1]:
                multiplier, extra = recurrence(form, x["loops"], [np.array([[v]]) for v in q])
                n_eff = x["once"] + multiplier[0, x["which"]] * x["rec"]
                columns = np.stack([np.ones_like(n_eff), n_eff ** -alpha, np.exp(-beta * x["log_d"])], axis=1)
                solved = np.linalg.lstsq(columns / loss[:, None], 1 - extra[0, x["which"]] / loss, rcond=None)[0]
                grid.append([*np.log(np.maximum(solved, 1e-3)), alpha, beta, *q])
    return np.array(grid)


def fit_law(runs, form="power", delta=DELTA):
    """The best end of all starts: the law's parameters in natural units, the fit's quality, `theta` in scaled units."""
    x = scaled(runs)
    grid = starts(x, form)
    theta, value = descend(grid, np.ones((len(grid), len(x["which"]))), x, form, delta, tolerance=1e-9)
    theta, huber = theta[[np.nanargmin(value)]], float(np.nanmin(value))
    residual = runs["val_loss"] - predict(theta, x, form)[0]
    point = {k: float(v[0]) for k, v in natural_units(theta, x, form).items()}
    return dict(point, form=form, delta=delta, theta=theta, x=x, residual=residual, huber=huber, rmse=rms(residual),
                r2=float(1 - (residual ** 2).mean() / runs["val_loss"].var()))


def predict_at(fit, once, rec, tokens, r):
    """L in nats of models that are not among the runs: arrays of parameters and tokens, all looped r times."""
    x = dict(fit["x"], once=once / fit["x"]["n0"], rec=rec / fit["x"]["n0"], log_d=np.log(tokens / fit["x"]["d0"]),
             loops=np.array([float(r)]), which=np.zeros(len(once), int))
    return predict(fit["theta"], x, fit["form"])[0]


def natural_units(theta, x, form):
    """The recurrence parameters by name, then alpha, beta, E, A, B for N in parameters and D in tokens, (S,) each."""
    log_e, log_a, log_b, alpha, beta, *q = theta.T
    return dict(zip(form_parameters(form, x["loops"])[0], q)) | dict(
        alpha=alpha, beta=beta, E=np.exp(log_e), A=np.exp(log_a + alpha * np.log(x["n0"])),
        B=np.exp(log_b + beta * np.log(x["d0"])))


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


# --- how sure: bootstrap over (budget, r) cells, and over seeds where a run has several ---

def bootstrap_weights(runs, n, seed=0, within_r=False):
    """(n, rows) how often each run is drawn: first (budget, r) cells with all their widths, then the seeds of a width.

    within_r draws the cells of each r among themselves, which the difference between two sweeps needs: otherwise some
    resamples hold hardly any r=1 run, and phi swings by more than the sweeps differ.
    """
    rng = np.random.default_rng(seed)
    cell = grouped(runs, "n_loop", "budget")
    stratum = runs["n_loop"] if within_r else np.zeros(len(cell))
    drawn = np.zeros((n, cell.max() + 1))
    for s in np.unique(stratum):
        cells = np.unique(cell[stratum == s])
        drawn[:, cells] = rng.multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=n)
    weights = drawn[:, cell]
    model = grouped(runs, "sweep", "n_loop", "budget", "n_embd")
    for repeated in np.flatnonzero(np.bincount(model) > 1):
        k = np.sum(model == repeated)
        weights[:, model == repeated] *= rng.multinomial(k, np.full(k, 1 / k), size=n)
    return weights


def bootstrap(fit, weights):
    """theta (1 + S, P): the estimate, then every resample that holds enough different r for the form, else NaN."""
    loops, n_parameters = np.arange(len(fit["x"]["loops"])), fit["theta"].shape[1]
    n_r = (weights @ (fit["x"]["which"][:, None] == loops) > 0).sum(1)
    enough = n_r >= (len(loops) if fit["form"] == "free" else n_parameters - 4)
    guess = np.repeat(fit["theta"], enough.sum(), axis=0)
    theta = np.full((len(weights), n_parameters), np.nan)
    theta[enough] = descend(guess, weights[enough], fit["x"], fit["form"], fit["delta"], tolerance=1e-6)[0]
    return np.vstack([fit["theta"], theta])


def interval(values):
    """95% interval of an estimate, values[0], from the draws behind it, values[1:]: their 2.5 and 97.5 percentiles."""
    return np.nanpercentile(values[1:], [2.5, 97.5]).tolist()


def span(values, digits=3):
    low, high = interval(values)
    return f"{values[0]:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


def why_unidentified(fit, draws):
    """None, or the reason why the runs do not say what phi is."""
    jac = law(fit["theta"], fit["x"], "power")[1][0].T
    others, mine = jac[:, :5], jac[:, 5]
    unexplained = mine - others @ np.linalg.lstsq(others, mine, rcond=None)[0]
    if np.linalg.norm(unexplained) <= 1e-6 * np.linalg.norm(mine):
        return "the other parameters make up for any phi on these runs"
    low, high = interval(draws[:, 5])
    if low < 0 and high > 1:
        return f"its 95% interval [{low:.2f}, {high:.2f}] holds both 0 (adds nothing) and 1 (a fresh block)"
    return None


def worth(runs, form, theta):
    """Rows (r, N/N0, m(r) (S,), N_eff/N0 (S,)) at equal width, where N0 belongs to the smallest r, normally 1."""
    loops = np.unique(runs["n_loop"])
    multiplier = recurrence(form, loops, [column[:, None] for column in theta.T[5:]])[0]
    size = {(r, d): np.array(n) for r, d, *n in zip(*(runs[k] for k in ("n_loop", "n_embd", "n_once", "n_rec")))}
    table = []
    for k, r in enumerate(loops):
        shares = [size[r, d] / size[loops[0], d].sum() for s, d in size if s == r and (loops[0], d) in size]
        if shares:  # without a common width there is nothing to compare with
            once, rec = np.mean(shares, axis=0)
            table.append((r, once + rec, multiplier[:, k], once + multiplier[:, k] * rec))
    return table


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


def cmd_fit(args):
    runs = load_runs(args.runs, args.convention)
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
    plot_law(runs, fit, draws, result, os.path.join(HERE, "results", "isodepth_law.png"))


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
              "its baseline {baseline}; {runs} runs, r = {n_loop}, {file}".format(**row))
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(11, 1.9 + 0.42 * len(rows)), sharey=True, layout="constrained")
    files = list(dict.fromkeys(row["file"] for row in rows))
    for y, row in enumerate(rows):
        v, colour = {k: float(row[k]) for k in COLUMNS[1:8]}, f"C{files.index(row['file'])}"
        for axis, at, low, high in ((axes[0], v["phi"], v["phi_low"], v["phi_high"]),
                                    (axes[1], v["difference"], v["difference_low"], v["difference_high"])):
            axis.plot([low, high], [y, y], color=colour, lw=2.5, solid_capstyle="round")
            axis.plot(at, y, "o", color=colour, ms=7)
        axes[0].plot(v["baseline"], y, "|", color="0.3", ms=16, mew=2)
    for k, source in enumerate(files):
        axes[1].plot([], [], "o-", color=f"C{k}", label=source)
    axes[0].plot([], [], "|", color="0.3", ms=12, mew=2, label="the same loop without it")
    axes[0].set(yticks=range(len(rows)), yticklabels=[row["trick"] for row in rows], ylim=(-0.6, len(rows) - 0.4),
                xlabel="phi: 0 a repeat adds nothing, 1 it is worth a fresh block", title="phi with the trick")
    axes[1].axvline(0, color="0.3", lw=1)
    axes[1].set(xlabel="phi with it - phi without it (95% interval)", title="what the trick adds")
    for axis in axes:
        axis.grid(alpha=0.25, axis="x")
    clear = sum(float(row["difference_low"]) > 0 for row in rows)
    fig.suptitle(f"{clear} of {len(rows)} tricks raise{'s' * (clear == 1)} phi by more than chance (interval above 0)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    save_figure(fig, args.plot)


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
    from model import Config  # brings torch along, which the fits do not need
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
            n = cfg.param_counts()
            rows.append((d, cfg.flops_per_token(), *count_parameters(
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
        stop(f"--flops={args.flops:g}: the best width is beyond {widths[-1]}, too far from the runs of {args.runs}")
    print(f"law of {os.path.relpath(args.runs)}: phi {fit['phi']:.4f}, convention {args.convention}")
    for r, flops, (loss, d, n, tokens) in ((args.n_loop, args.flops, looped), (1, cost, plain)):
        print(f"r={r}: {flops:.3g} FLOPs reach {loss:.4f} nats with n_embd {d:.0f} (N {n:.3g}) on {tokens:.3g} tokens")
    beyond = args.flops / runs["budget"].max()
    print(f"so r=1 needs {cost / args.flops:.3f} of the FLOPs for that loss"
          + (f"; the budget is {beyond:.3g}x the largest that was fitted" if beyond > SAME_BUDGET else ""))


# Sweeps: n_embd for each budget in FLOPs, n_loop and n_expert, the blocks of all passes together (`looped`), the flags
# of a run, and the FLOP/s that the time is estimated for.
POCKET = dict(  # the paper's proportions at half its depth, 1 + 8/r x r + 1; one head, and a core for each run
    widths={6e11: [16, 24, 32, 48], 1.5e12: [16, 24, 32, 48], 3.8e12: [24, 32, 48, 64], 9.6e12: [32, 48, 64, 96]},
    loops=[1, 2, 4, 8], experts=[0], inject="linear", multiple=2, looped=8, vocab_size=1024, speed=3.5e10,
    flags="--preset=pocket --vocab_size=1024 --n_embd={n_embd} --n_head=1 --n_recur={n_recur} --n_loop={n_loop} "
          "--inject={inject} --batch_size=4 --learning_rate=0.02 --eval_interval=0 --eval_tokens=131072 --threads=1")
PRESETS = {
    "paper": dict(  # the 116 runs of arXiv 2604.21106
        widths={4.64e17: [384, 512, 640, 768], 1e18: [384, 512, 640, 768, 896], 2.15e18: [512, 640, 768, 896, 1024],
                4.64e18: [640, 768, 896, 1024, 1152, 1280], 1e19: [768, 1024, 1152, 1280, 1536],
                2.15e19: [1152, 1536, 1792, 2176]},
        loops=[1, 2, 4, 8], experts=[0], inject="linear", multiple=128, looped=16, vocab_size=32064, speed=4e14,
        flags="--preset=isodepth-r{n_loop} --n_embd={n_embd}"),
    "pocket": POCKET,
    "trick": dict(POCKET, loops=[2, 4], widths={6e11: [16, 24, 32], 1.5e12: [24, 32, 48], 3.8e12: [32, 48, 64]}),
    "moe": dict(  # base, looped, moe and looped-moe of arXiv 2605.09165 in small; a core for each run
        widths={1.5e12: [16, 32, 64], 3.5e12: [32, 64, 96], 7e12: [32, 64, 128]},
        loops=[1, 2], experts=[0, 8], inject="none", multiple=16, looped=8, vocab_size=1024, speed=3e10,
        flags="--preset=pocket --vocab_size=1024 --n_embd={n_embd} --head_dim=16 --n_prelude=0 "
              "--n_recur={n_recur} --n_coda=0 --n_loop={n_loop} --inject=none --loop_norm=false --n_expert={n_expert} "
              "--eval_interval=0 --eval_tokens=131072 --threads=1"),
}


def cmd_plan(args):
    from train import config_of, flops_of, parse  # bring torch along, which the fits do not need
    grid, lines, total = PRESETS[args.preset], [], 0
    speed = args.speed or grid["speed"]
    for budget in args.budgets or grid["widths"]:
        if not args.widths and budget not in grid["widths"]:
            stop(f"--budgets={budget:g}: the {args.preset} preset has no widths for it: give --widths")
        for d, r, n_expert in product(args.widths or grid["widths"][budget], args.loops or grid["loops"],
                                      grid["experts"]):
            if d % grid["multiple"] or grid["looped"] % r:
                stop(f"--widths={d} --loops={r}: {args.preset} takes multiples of {grid['multiple']} as widths and "
                     f"loop counts that divide {grid['looped']}")
            flags = grid["flags"].format(n_embd=d, n_loop=r, n_recur=grid["looped"] // r,
                                         inject=grid["inject"] if r > 1 else "none", n_expert=n_expert)
            for seed in args.seeds:
                name = f"C{budget:g}-d{d}-r{r}{f'-e{n_expert}' if n_expert else ''}-s{seed}"
                flags_of_run = f"{flags} {args.flags} --max_flops={budget:g} --seed={seed} " \
                               f"--out_dir=out/{args.name or args.preset}/{name}"
                run, _ = parse(shlex.split(flags_of_run))  # refuses flags that train.py would refuse
                F = flops_of(run, config_of(run, args.vocab_size or grid["vocab_size"]))
                lines.append(f"python train.py {' '.join(flags_of_run.split())}  # F={F:.4g} tokens={budget / F:.4g} "
                             f"~{budget / speed / 60:.3g} min at {speed:.2g} FLOP/s")
                total += budget
    print("\n".join(lines))
    print(f"{len(lines)} runs, {total:.4g} FLOPs: {total / speed / 3600:.3g} hours", file=sys.stderr)


SUMMARY = ["sweep", "run", "seed", "n_loop", "n_prelude", "n_recur", "n_coda", "n_embd", "n_expert", "inject", "n_once",
           "n_rec", "n_total", "tokens", "flops", "val_loss", "val_bpb", "wall_s", "tok_per_s"]


def cmd_collect(args):
    rows = []
    for folder in args.folders:
        path = os.path.join(folder, "summary.json")
        try:
            with open(path, encoding="utf-8") as f:
                summary = json.load(f)
            sweep = os.path.basename(os.path.dirname(os.path.abspath(folder)))  # out/SWEEP/RUN
            rows.append([sweep, *(summary[k] for k in SUMMARY[1:])])
        except OSError:
            print(f"skipped {folder}: no summary.json, so its run is not finished", file=sys.stderr)
        except (ValueError, KeyError, TypeError) as error:
            stop(f"{path} is not a summary of train.py ({type(error).__name__}: {error}): remove it and run again")
    if not rows:
        stop(f"none of the {len(args.folders)} folders holds a finished run: give the --out_dir folders of train.py")
    csv.writer(sys.stdout, lineterminator="\n").writerows([SUMMARY, *rows])


# --- the picture ---

def plot_law(runs, fit, draws, result, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    loops, budgets, (low, high) = fit["x"]["loops"], np.unique(runs["budget"]), result["phi_ci"]
    colours, shades = (plt.cm.viridis(np.linspace(0, 0.85, len(v))) for v in (loops, budgets))
    fig = plt.figure(figsize=(15, 9), layout="constrained")
    fig.suptitle("These runs do not say what phi is" if result["phi"] is None else
                 f"One block passed r times is worth r^phi fresh blocks: phi = {fit['phi']:.3f}, "
                 f"95% interval {low:.2f} to {high:.2f}", fontsize=17)
    upper, lower = fig.add_gridspec(2, 1)
    law_axes = upper.subgridspec(1, len(loops)).subplots(sharex=True, sharey=True, squeeze=False)[0]
    residual_axis, worth_axis, phi_axis = lower.subgridspec(1, 3).subplots()

    for axis, r, colour in zip(law_axes, loops, colours):
        for budget, shade in zip(budgets, shades):
            cell = np.flatnonzero((runs["n_loop"] == r) & (runs["budget"] == budget))
            stored = (runs["n_once"] + runs["n_rec"])[cell]
            axis.plot(stored, runs["val_loss"][cell], "o", ms=4, color=shade, label=f"{budget:.3g}")
            if len(np.unique(stored)) > 2:  # the law between the widths, where N is a line in d^2 and D is smooth
                d2 = runs["n_embd"][cell] ** 2
                fine = np.geomspace(d2.min(), d2.max(), 50)
                once, rec = (np.polyval(np.polyfit(d2, runs[k][cell], 1), fine) for k in ("n_once", "n_rec"))
                log_d = np.polyval(np.polyfit(np.log(d2), np.log(runs["tokens"][cell]), 2), np.log(fine))
                axis.plot(once + rec, predict_at(fit, once, rec, np.exp(log_d), r), color=shade)
        axis.set(xscale="log", title=f"r = {r:g}", xlabel="stored parameters N")
        mine = runs["n_loop"] == r
        residual_axis.plot(runs["budget"][mine] * 1.05 ** np.searchsorted(loops, r), fit["residual"][mine], "o", ms=4,
                           color=colour, label=f"r = {r:g}")
    law_axes[0].set_ylabel("validation loss (nats/token)")
    law_axes[0].legend(title="FLOPs; lines: the law", fontsize=8, loc="lower left")
    residual_axis.axhline(0, color="gray", lw=1)
    residual_axis.set(xscale="log", xlabel="training FLOPs", ylabel="actual - predicted (nats)",
                      title=f"What the law misses: RMSE {fit['rmse']:.4f} nats, R2 {fit['r2']:.4f}")
    residual_axis.legend(fontsize=8)

    fine = np.geomspace(loops[0], loops[-1], 50)
    worth_axis.plot(fine, fine, "--", color="gray", label="phi = 1: a loop is worth a fresh block")
    worth_axis.plot(fine, fine ** 0, ":", color="gray", label="phi = 0: a loop adds nothing")
    worth_axis.fill_between(fine, *np.nanpercentile(fine ** draws[1:, 5:6], [2.5, 97.5], axis=0), alpha=0.3)
    worth_axis.plot(fine, fine ** fit["phi"], label=f"r^{fit['phi']:.3f}, the joint law, and its 95% interval")
    free = bootstrap(fit_law(runs, "free"), bootstrap_weights(runs, len(draws) - 1))[:, 5:]
    worth_axis.vlines(loops[1:], *np.nanpercentile(free[1:], [2.5, 97.5], axis=0), color="black")
    worth_axis.plot(loops[1:], free[0], "ko", label="each r with a multiplier of its own")
    ticks = dict(ticks=loops, labels=[f"{r:g}" for r in loops])
    worth_axis.set(xscale="log", yscale="log", xlabel="passes r", ylabel="worth, in fresh blocks",
                   title="Effective parameters of the looped block")
    worth_axis.set_xticks(**ticks)
    worth_axis.set_yticks(**ticks)
    worth_axis.minorticks_off()
    worth_axis.legend(fontsize=8)

    phi_axis.hist(draws[1:, 5], bins=40, range=np.nanpercentile(draws[1:, 5], [0.5, 99.5]), color="steelblue")
    phi_axis.axvspan(low, high, alpha=0.2, color="gray", label=f"95% interval {low:.3f} to {high:.3f}")
    phi_axis.axvline(fit["phi"], color="black", label=f"fit {fit['phi']:.3f}")
    phi_axis.set(xlabel=f"phi (convention {result['convention']})", ylabel="resamples",
                 title=f"How sure: {len(draws) - 1:,} resamples of (budget, r) cells")
    phi_axis.legend(fontsize=8)
    save_figure(fig, path)


def save_figure(fig, path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    fig.savefig(path, dpi=110)
    print("wrote " + os.path.relpath(path))


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
    parser = argparse.ArgumentParser(description="The joint scaling law of looped models; without a command, that of "
                                     "the published runs. The top of this file has examples.")
    parser.error = stop
    commands = parser.add_subparsers(required=True)

    def command(function, text):
        sub = commands.add_parser(function.__name__[4:], help=text, description=text)
        sub.set_defaults(function=function)
        sub.error = stop
        return sub.add_argument

    table = dict(help="table of runs, from `collect` or data/isodepth*.csv")
    convention = dict(choices=CONVENTIONS, default="written", help="where the injection matrix is counted; "
                      + "; ".join(f"{k}: {v}" for k, v in CONVENTIONS.items()) + " (default written)")
    resamples = dict(type=positive(int), default=1000, help="draws behind the intervals (default 1000)")
    to_json = dict(metavar="FILE", help="also write the numbers to this file")

    add = command(cmd_plan, "print a sweep, one train.py command a line")
    add("--preset", choices=PRESETS, default="pocket", help="which grid (default pocket)")
    add("--budgets", type=positive(float), nargs="+", help="training FLOPs of a run, instead of the preset's")
    add("--widths", type=positive(int), nargs="+", help="n_embd at every budget, instead of the preset's")
    add("--loops", type=positive(int), nargs="+", help="n_loop, instead of the preset's")
    add("--seeds", type=int, nargs="+", default=[42], help="a run for each (default 42)")
    add("--flags", default="", metavar="'--a=1 --b=2'", help="more flags of train.py for every run: the trick to test")
    add("--name", help="folder under out/, the name of the sweep (default: the preset)")
    add("--vocab_size", type=positive(int), help="of the data, for the FLOPs (default: the preset's)")
    add("--speed", type=positive(float), help="FLOP/s that you reach, for the time (default: the preset's)")

    add = command(cmd_collect, "one table, to stdout, from the summary.json files of finished runs")
    add("folders", nargs="+", help="the --out_dir folders of train.py")

    add = command(cmd_fit, "fit the joint law, with intervals")
    add("runs", **table)
    add("--convention", **convention)
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
    add("--plot", metavar="FILE", default=os.path.join(HERE, "results", "phi_table.png"), help="picture to draw "
        "(default: results/phi_table.png)")

    if len(sys.argv) == 1:
        cmd_published()
    else:
        args = parser.parse_args()
        args.function(args)


if __name__ == "__main__":
    main()
