"""
The joint scaling law of looped language models (arXiv 2604.21106, section 4), its fit and its intervals

    L(N_once, N_rec, D, r) = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta

L validation loss in nats/token, D training tokens, r = n_loop, N_once the parameters that run once (prelude and coda
matrices), N_rec those that run r times. phi = 1: a loop is worth a fresh block; phi = 0: it adds nothing.

The fit is nonlinear least squares. For fixed alpha, beta and phi the law is linear in E, A and B, so a start needs only
the first three. From there Levenberg-Marquardt with the exact Jacobian goes downhill on many problems at once: all 12
starts take 10 ms and 1,000 bootstrap resamples 0.3 s on one core
(python -m pytest tests/test_fit_law.py -m study -n 0 -s).

Runs are a dict of columns, as runs.load_runs reads them. Shapes: n runs, R different loop counts, P parameters, S
problems fitted side by side (starts or resamples).
"""
from itertools import product

import numpy as np

DELTA = 1e-3  # Huber threshold on log L (section 4)


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
    # a multiplier of its own for each r but the smallest: `scale` counts them in the runs
    "free": (None, None, lambda r, *m: (np.concatenate([np.ones_like(m[0]), *m], axis=1), 0)),
}
# Two sweeps under one law, which differ in phi alone: r is negative in the runs of the second.
SHARED = (["phi", "change"], [[0.0, 0.0], [0.8, 0.0]],
          lambda r, phi, change: (np.abs(r) ** (phi + change * (r < 0)), 0))


def recurrence(x, q):
    """Multiplier and extra loss of each loop count, (S, R) each, for the form's parameters q (S, P - 5)."""
    multiplier, extra = x["function"](x["loops"], *q.T[:, :, None])
    shape = (len(q), len(x["loops"]))
    return np.broadcast_to(multiplier, shape), np.broadcast_to(extra, shape)


# --- the law and its Jacobian ---

def scale(runs, form, delta):
    """What the optimiser sees, x below: N and D over their geometric means, so that every parameter is of order 1."""
    loops, which = np.unique(runs["n_loop"], return_inverse=True)  # r of each run is loops[which]
    names, guesses, function = SHARED if form == "shared" else FORMS[form]
    if form == "free":
        names, guesses = [f"m_{r:g}" for r in loops[1:]], [loops[1:] ** 0.5]
    n0 = np.exp(np.log(runs["n_once"] + runs["n_rec"]).mean())
    d0 = np.exp(np.log(runs["tokens"]).mean())
    return dict(once=runs["n_once"] / n0, rec=runs["n_rec"] / n0, log_d=np.log(runs["tokens"] / d0),
                log_loss=np.log(runs["val_loss"]), loops=loops, which=which, n0=n0, d0=d0, function=function,
                names=names, guesses=guesses, delta=delta)


def law(theta, x):
    """log L (S, n) and its Jacobian (S, P, n) at parameters theta (S, P) = log E, log A, log B, alpha, beta, q."""
    log_e, log_a, log_b, alpha, beta = theta.T[:5, :, None]  # (S, 1) each
    q, which = theta[:, 5:], x["which"]
    multiplier, extra = recurrence(x, q)
    n_eff = x["once"] + multiplier[:, which] * x["rec"]  # (S, n)
    log_n = np.log(n_eff)
    from_e = np.exp(log_e)
    from_n = np.exp(log_a - alpha * log_n)
    from_d = np.exp(log_b - beta * x["log_d"])
    loss = from_e + from_n + from_d + extra[:, which]

    # d log L = dL / L. By log E, log A, log B: the share of that term in L. By alpha, beta: times -log N, -log D.
    by_e = from_e / loss
    by_a = from_n / loss
    by_b = from_d / loss
    jac = [by_e, by_a, by_b, -log_n * by_a, -x["log_d"] * by_b]

    # By q, through the multiplier and the extra loss. Complex step: f(q + ih) has the imaginary part h f'(q), exact for
    # a tiny h, so no form needs its derivative written out.
    by_multiplier = -alpha * by_a * x["rec"] / n_eff  # d log L / d multiplier
    for k in range(q.shape[1]):
        shifted = q + 0j
        shifted[:, k] += 1e-30j
        multiplier, extra = recurrence(x, shifted)
        d_multiplier = multiplier.imag[:, which] / 1e-30
        d_extra = extra.imag[:, which] / 1e-30
        jac.append(d_extra / loss + by_multiplier * d_multiplier)
    return np.log(loss), np.stack(jac, axis=1)


def predict(theta, x):
    """L in nats, (S, n)."""
    log_loss, _ = law(theta, x)
    return np.exp(log_loss)


# --- the fit ---

@np.errstate(all="ignore")  # a wild step gives NaN, which is never better
def objective(theta, weights, x):
    """Sum of weighted Huber losses on log L (S,), its gradient (S, P) and Gauss-Newton Hessian (S, P, P)."""
    log_loss, jac = law(theta, x)
    residual = log_loss - x["log_loss"]  # (S, n)
    size = np.abs(residual)
    delta = x["delta"]
    square, straight = 0.5 * residual ** 2, delta * (size - 0.5 * delta)
    huber = np.where(size <= delta, square, straight)
    value = (weights * huber).sum(1)
    # Beyond delta the slope is delta, not |residual|: that of least squares with a smaller weight on that run.
    shrink = np.minimum(1, delta / np.maximum(size, 1e-300))
    weighted = jac * (weights * shrink)[:, None]  # (S, P, n)
    gradient = weighted @ residual[:, :, None]
    hessian = weighted @ jac.transpose(0, 2, 1)
    return value, gradient[:, :, 0], hessian


def descend(theta, weights, x, tolerance):
    """Levenberg-Marquardt on S problems at once, theta (S, P) and weights (S, n): where each ends, its objective.

    A step solves (H + damping diag H) step = gradient. Small damping is Gauss-Newton, fast near the optimum; large
    damping is a short step downhill, safe far from it.
    """
    best = theta.copy()
    best_value = np.empty(len(theta))
    state = [theta.copy(), *objective(theta, weights, x)]
    damping = np.full(len(theta), 1e-2)
    live = np.arange(len(theta))  # the problems that still move
    diagonal = np.arange(theta.shape[1])
    for _ in range(500):
        theta, value, gradient, hessian = state
        damped = hessian.copy()
        damped[:, diagonal, diagonal] *= 1 + damping[:, None]
        damped[:, diagonal, diagonal] += 1e-14  # a parameter that no row touches stays where it is
        step = np.linalg.solve(damped, gradient[:, :, None])  # (S, P, 1)
        trial = theta - step[:, :, 0]
        trial_value, *slopes = objective(trial, weights, x)
        better = trial_value < value
        gain = np.where(better, 1 - trial_value / np.maximum(value, 1e-300), np.inf)
        damping = np.where(better, damping / 4, damping * 4)
        for old, new in zip(state, [trial, trial_value, *slopes]):
            old[better] = new[better]
        best[live] = theta
        best_value[live] = value
        # A problem stops when a step gains next to nothing, or when no step, however short, gains anything.
        moving = (gain > tolerance) & (damping < 1e8)
        if not moving.any():
            break
        live, damping, weights = live[moving], damping[moving], weights[moving]
        state = [part[moving] for part in state]
    return best, best_value


def starts(x):
    """A grid of (alpha, beta, q), each with the E, A, B that minimise the squared relative error: a linear problem."""
    grid = []
    loss = np.exp(x["log_loss"])
    for alpha, beta, q in product((0.15, 0.4), (0.2, 0.4, 0.8), x["guesses"]):
        multiplier, extra = recurrence(x, np.array([q]))
        n_eff = x["once"] + multiplier[0, x["which"]] * x["rec"]
        terms = np.stack([np.ones_like(n_eff), n_eff ** -alpha, np.exp(-beta * x["log_d"])], axis=1)  # (n, 3)
        target = 1 - extra[0, x["which"]] / loss
        solution, *_ = np.linalg.lstsq(terms / loss[:, None], target, rcond=None)
        grid.append([*np.log(np.maximum(solution, 1e-3)), alpha, beta, *q])
    return np.array(grid)


def fit_law(runs, form="power", delta=DELTA):
    """The best end of all starts: the law's parameters in natural units, the fit's quality, `theta` in scaled units."""
    x = scale(runs, form, delta)
    grid = starts(x)
    weights = np.ones((len(grid), len(runs["val_loss"])))
    ends, values = descend(grid, weights, x, tolerance=1e-9)
    best = np.nanargmin(values)
    theta = ends[[best]]  # (1, P)
    point = {name: float(value) for name, (value,) in natural_units(theta, x).items()}
    residual = runs["val_loss"] - predict(theta, x)[0]
    r2 = 1 - (residual ** 2).mean() / runs["val_loss"].var()
    return dict(point, form=form, delta=delta, theta=theta, x=x, residual=residual, huber=float(values[best]),
                rmse=rms(residual), r2=float(r2))


def predict_at(fit, once, rec, tokens, r):
    """L in nats of models that are not among the runs: arrays of parameters and tokens, all looped r times."""
    x = dict(fit["x"], loops=np.array([float(r)]), which=np.zeros(len(once), int))
    x["once"] = once / x["n0"]
    x["rec"] = rec / x["n0"]
    x["log_d"] = np.log(tokens / x["d0"])
    return predict(fit["theta"], x)[0]


def natural_units(theta, x):
    """The recurrence parameters by name, then alpha, beta, E, A, B for N in parameters and D in tokens, (S,) each."""
    log_e, log_a, log_b, alpha, beta, *q = theta.T
    values = dict(zip(x["names"], q), alpha=alpha, beta=beta)
    values["E"] = np.exp(log_e)
    values["A"] = np.exp(log_a + alpha * np.log(x["n0"]))
    values["B"] = np.exp(log_b + beta * np.log(x["d0"]))
    return values


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


# --- how sure: bootstrap over (budget, r) cells, and over seeds where a run has several ---

def label_groups(runs, *keys):
    """A number for each run, the same for runs whose keys agree, in the order in which they appear."""
    labels = {}
    rows = zip(*(runs[k] for k in keys))
    return np.array([labels.setdefault(row, len(labels)) for row in rows])


def bootstrap_weights(runs, n, seed=0, within_r=False):
    """(n, runs) how often each run is drawn: first (budget, r) cells with all their widths, then the seeds of a width.

    within_r draws the cells of each r among themselves, which the difference between two sweeps needs: otherwise some
    resamples hold hardly any r=1 run, and phi swings by more than the sweeps differ.
    """
    rng = np.random.default_rng(seed)
    cell = label_groups(runs, "n_loop", "budget")
    stratum = runs["n_loop"] if within_r else np.zeros(len(cell))
    counts = np.zeros((n, cell.max() + 1))
    for s in np.unique(stratum):
        cells = np.unique(cell[stratum == s])
        k = len(cells)
        counts[:, cells] = rng.multinomial(k, np.full(k, 1 / k), size=n)
    weights = counts[:, cell]
    model = label_groups(runs, "sweep", "n_loop", "budget", "n_embd")
    for repeated in np.flatnonzero(np.bincount(model) > 1):
        seeds = np.flatnonzero(model == repeated)
        k = len(seeds)
        weights[:, seeds] *= rng.multinomial(k, np.full(k, 1 / k), size=n)
    return weights


def bootstrap(fit, weights):
    """theta (1 + S, P): the estimate, then every resample, NaN where it holds too few different r for the form."""
    x, estimate = fit["x"], fit["theta"]
    n_parameters = estimate.shape[1]
    has_r = x["which"][:, None] == np.arange(len(x["loops"]))  # (n, R)
    n_r = (weights @ has_r > 0).sum(1)
    enough = n_r > n_parameters - 5  # E, A, B, alpha and beta need one r, each parameter of the form one more
    theta = np.full((len(weights), n_parameters), np.nan)
    guess = np.repeat(estimate, enough.sum(), axis=0)
    theta[enough], _ = descend(guess, weights[enough], x, tolerance=1e-6)
    return np.vstack([estimate, theta])


def interval(values):
    """95% interval of an estimate, values[0], from its resamples, values[1:]: their 2.5 and 97.5 percentiles.

    None where fewer than half of the resamples have a value (the others are NaN): those do not stand for all.
    """
    resamples = values[1:]
    n_valid = np.count_nonzero(~np.isnan(resamples))
    if n_valid == 0 or n_valid < len(resamples) / 2:
        return None
    return np.nanpercentile(resamples, [2.5, 97.5]).tolist()


def span(values, digits=3):
    """The estimate as text, and its interval where there is one."""
    bounds = interval(values)
    estimate, *edges = (f"{v:.{digits}g}" for v in (values[0], *(bounds or [])))
    return f"{estimate} [{', '.join(edges)}]" if bounds else estimate


def count_resamples(draws):
    """How many resamples hold enough different r for the form, and how many there are."""
    n_valid = np.count_nonzero(~np.isnan(draws[1:, 0]))
    return n_valid, len(draws) - 1


def why_no_interval(draws):
    """None, or the reason why the resamples do not say how sure the estimate is."""
    n_valid, n = count_resamples(draws)
    if n_valid < n / 2:
        return f"only {n_valid} of {n} resamples hold enough different r, fewer than half"
    resamples = draws[1:][~np.isnan(draws[1:, 0])]
    if np.allclose(resamples, resamples[0], rtol=1e-6, atol=1e-9):
        return f"all {n_valid} resamples with enough different r give the same law"
    return None


def why_unidentified(fit, draws):
    """None, or the reason why the runs do not say what phi is."""
    _, jac = law(fit["theta"], fit["x"])
    others, by_phi = jac[0, :5].T, jac[0, 5]
    solution, *_ = np.linalg.lstsq(others, by_phi, rcond=None)
    unexplained = by_phi - others @ solution
    if np.linalg.norm(unexplained) <= 1e-6 * np.linalg.norm(by_phi):
        return "the other parameters make up for any phi on these runs"
    low, high = interval(draws[:, 5]) or (np.nan, np.nan)
    if low < 0 and high > 1:
        return f"its 95% interval [{low:.2f}, {high:.2f}] holds both 0 (adds nothing) and 1 (a fresh block)"
    return None


def worth(runs, fit, theta):
    """Rows (r, N/N0, m(r) (S,), N_eff/N0 (S,)) at equal width, where N0 belongs to the smallest r, normally 1."""
    loops = fit["x"]["loops"]
    multiplier, _ = recurrence(fit["x"], theta[:, 5:])
    table, size = [], {}
    columns = [runs[k] for k in ("n_loop", "n_embd", "n_once", "n_rec")]
    for r, d, *n in zip(*columns):
        size[r, d] = np.array(n)
    for r, m in zip(loops, multiplier.T):
        widths = [d for s, d in size if s == r and (loops[0], d) in size]
        if widths:  # without a common width there is nothing to compare with
            once, rec = np.mean([size[r, d] / size[loops[0], d].sum() for d in widths], axis=0)
            table.append((r, once + rec, m, once + m * rec))
    return table
