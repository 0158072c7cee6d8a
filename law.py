"""
The joint scaling law of looped language models (arXiv 2604.21106, section 4), its fit and its intervals

    L(N_once, N_rec, D, r) = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta

L validation loss in nats/token, D training tokens, r = n_loop, N_once the parameters that run once (prelude and coda
matrices), N_rec those that run r times. phi = 1: a loop is worth a fresh block; phi = 0: it adds nothing.

For fixed alpha, beta and phi the law is linear in E, A and B, so a start needs only the first three; from there
Levenberg-Marquardt with the exact Jacobian goes downhill on many problems at once: all 12 starts take 10 ms and 1,000
bootstrap resamples 0.3 s on one core (python -m pytest tests/test_fit_law.py -m slow -s measures it).

Runs are a dict of columns, as sweep.load_runs reads them. Shapes: n runs, R different loop counts, P parameters, S
problems fitted side by side (starts or resamples).
"""
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

def grouped(runs, *keys):
    """A number for each run, the same for runs whose keys agree."""
    rows = list(zip(*(runs[k] for k in keys)))
    numbers = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    return np.array([numbers[row] for row in rows])


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
    multiplier = np.broadcast_to(multiplier, (len(theta), len(loops)))  # a form without parameters has one row
    size = {(r, d): np.array(n) for r, d, *n in zip(*(runs[k] for k in ("n_loop", "n_embd", "n_once", "n_rec")))}
    table = []
    for k, r in enumerate(loops):
        shares = [size[r, d] / size[loops[0], d].sum() for s, d in size if s == r and (loops[0], d) in size]
        if shares:  # without a common width there is nothing to compare with
            once, rec = np.mean(shares, axis=0)
            table.append((r, once + rec, multiplier[:, k], once + multiplier[:, k] * rec))
    return table
