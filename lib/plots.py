"""Every picture of the project. The scripts compute the numbers, and their docstrings say what they are."""
from pathlib import Path

import numpy as np

STYLE = {"backend": "Agg", "figure.constrained_layout.use": True, "savefig.dpi": 110, "legend.fontsize": 8,
         "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "lines.markersize": 4, "errorbar.capsize": 2,
         "axes.formatter.min_exponent": 4}       # a log axis says 20 rather than 2 x 10^1
GREY = {"color": "0.6", "lw": 1}                 # a thin line, mostly one that marks a place
PUBLISHED = {"truncbptt": "truncated backpropagation", "hyperconnect": "hyperconnections"}     # in the published table
LOSSES = {                                       # cells of readout_study.py: where the loss is, its line and words
    "perloop": ("-", "loss on every pass"),
    "terminal": ("--", "loss on the last pass"),
}
READOUTS = {                                     # and what reads the state out, its colour and words
    "norm": ("C0", "norm before the readout"),
    "raw": ("C1", "raw readout"),
    "penalty": ("C2", "norm, and a penalty on the length"),
    "final": ("C3", "norm at the last pass only"),
    "loopnorm": ("C4", "norm between passes"),
}
VARIANTS = {"": "as in the study", "tied": "tied embedding", "cosine": "falling rate"}


def pyplot():
    """matplotlib without a window, imported only when something is drawn: it takes longer than most of the commands."""
    import matplotlib
    matplotlib.rcParams.update(STYLE)
    import matplotlib.pyplot as plt
    return plt


def finish(axis, title, xlabel, ylabel):
    """The text around what is drawn, and a legend unless the figure has one."""
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if not axis.figure.legends:
        axis.legend()


def legend_below(fig, axis, n):
    """One legend for the figure, with what axis shows, in n columns."""
    handles, labels = axis.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=n)


def legend_under(axis, n, title=None):
    """The legend of one of several panels, where it covers nothing."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=n, title=title)


def save(fig, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    pyplot().close(fig)


def values(rows, *keys):
    """An array with row[key], or row[key][key].., of each row. Text from a CSV file becomes a number."""
    for key in keys:
        rows = [row[key] for row in rows]
    return np.array(rows, dtype=float)


def reach(rows, *keys):
    """How far the interval of each row reaches below and above its middle, the last key; its ends are low and high."""
    *where, middle = keys
    middle = values(rows, *where, middle)
    low = values(rows, *where, "low")
    high = values(rows, *where, "high")
    return middle - low, high - middle


def read_metrics(folder):
    """The columns of metrics.csv by name: of all rows, and of those with a validation loss."""
    rows = np.genfromtxt(folder / "metrics.csv", delimiter=",", names=True, ndmin=1)
    return rows, rows[~np.isnan(rows["val_loss"])]


def hops_text(p):
    return "1 hop" if p == 1 else f"{p} hops"


def plot_loss(out, title):
    batches, evaluations = read_metrics(out)
    hops = [name for name in evaluations.dtype.names if name.startswith("val_acc_")]
    if hops:                                     # the task hops has a second picture
        fig, (axis, hops_axis) = pyplot().subplots(1, 2, figsize=(13, 4.2))
    else:
        fig, axis = pyplot().subplots(figsize=(7, 4.2))
    axis.plot(batches["tokens"] / 1e6, batches["train_loss"], label="training batch", **GREY)
    axis.plot(evaluations["tokens"] / 1e6, evaluations["val_loss"], "C0o-", label="validation")
    finish(axis, title, "tokens seen (millions)", "loss (nats per token)")
    for p, name in enumerate(hops, 1):
        hops_axis.plot(evaluations["tokens"] / 1e6, evaluations[name], "o-", label=hops_text(p))
    if hops:
        hops_axis.set_ylim(0, 1.02)
        finish(hops_axis, "maps it was not trained on", "tokens seen (millions)", "share of right answers")
    save(fig, out / "loss.png")


def plot_law(runs, fit, draws, result, path):
    """runs of runs.load_runs, fit of law.fit_law, draws of law.bootstrap, result of fit_law.print_fit."""
    from law import bootstrap, bootstrap_weights, fit_law      # here, as no other picture needs them
    loops = fit["x"]["loops"]
    phi, *resamples = draws[:, 5]
    fig, (worth_axis, residual_axis) = pyplot().subplots(1, 2, figsize=(13, 5))
    # what r passes are worth: by the estimate and its resamples, and by a fit with a free multiplier for each r
    r = np.geomspace(loops[0], loops[-1], 50)
    low, high = np.nanpercentile(r[:, None] ** resamples, [2.5, 97.5], axis=1)
    worth_axis.fill_between(r, low, high, alpha=0.3)
    worth_axis.loglog(r, r ** phi, base=2, label=f"r^{phi:.3f}, the joint law, and its 95% interval")
    worth_axis.plot(r, r, "--", color="gray", label="phi = 1: a loop is worth a fresh block")
    worth_axis.plot(r, r ** 0, ":", color="gray", label="phi = 0: a loop adds nothing")
    free = bootstrap(fit_law(runs, "free"), bootstrap_weights(runs, len(resamples)))[:, 5:]
    low, high = np.nanpercentile(free[1:], [2.5, 97.5], axis=0)
    worth_axis.vlines(loops[1:], low, high, color="black")
    worth_axis.plot(loops[1:], free[0], "ko", label="each r with a multiplier of its own")
    for axis in (worth_axis.xaxis, worth_axis.yaxis):
        axis.set_major_formatter("{x:g}")
    finish(worth_axis, "what r passes are worth", "passes r", "fresh blocks")
    # what the law misses, each r a little to the right of the one before
    shades = pyplot().cm.viridis(np.linspace(0, 0.85, len(loops)))
    budget = runs["budget"]
    for i, (r, shade) in enumerate(zip(loops, shades)):
        at_r = runs["n_loop"] == r
        flops = budget[at_r] * 1.05 ** i
        residual_axis.semilogx(flops, fit["residual"][at_r], "o", color=shade, label=f"r = {r:g}")
    budgets = np.unique(budget)
    residual_axis.set_xticks(budgets, [f"{budget:.2g}" for budget in budgets])
    residual_axis.minorticks_off()
    residual_axis.axhline(0, **GREY)
    title = f"what the law misses: {fit['rmse']:.3f} nats (root mean square)"
    finish(residual_axis, title, "training FLOPs", "measured loss - loss by the law (nats)")
    legend_under(residual_axis, len(loops))
    title = "These runs do not say what phi is"
    if result["phi"] is not None:
        low, high = result["phi_ci"]
        title = f"phi = {phi:.3f}, 95% interval {low:.2f} to {high:.2f}"
        title = f"One block passed r times is worth r^phi fresh blocks: {title}"
    fig.suptitle(title, fontsize=14)
    save(fig, path)


def plot_scoreboard(rows, path):
    """rows of fit_law.read_table, the best last."""
    fig, axis = pyplot().subplots(figsize=(8, 1.5 + 0.38 * len(rows)))
    names = []
    for y, row in enumerate(rows):
        name = row["trick"].replace("_", " ")
        colour = "C0"
        if row["file"].startswith("isodepth"):
            colour = "C1"
            name = f"{PUBLISHED.get(name, name)} (published runs)"
        low, high = float(row["difference_low"]), float(row["difference_high"])
        axis.hlines(y, low, high, color=colour, lw=2.5)
        axis.plot(float(row["difference"]), y, "o", color=colour, ms=7)
        names.append(name)
    axis.axvline(0, **GREY)
    axis.set(yticks=range(len(rows)), yticklabels=names, ylim=(-0.6, len(rows) - 0.4))
    clear = sum(float(row["difference_low"]) > 0 for row in rows)
    verb = "raises" if clear == 1 else "raise"
    fig.suptitle(f"{clear} of {len(rows)} tricks {verb} phi, what a repeat is worth, by more than chance", fontsize=13)
    axis.set_xlabel("phi with the trick minus phi of the loop without it (95% interval)")
    save(fig, path)


def plot_verdicts(rows, path):
    """rows of a scoreboard of verdict.py, best first: what each trick saves against the loop without it (left), with a
    mark at the tokens that its steps buy, and what the loop with it saves against the plain model (right)."""
    rows = rows[::-1]                            # the best at the top
    fig, (loop_axis, plain_axis) = pyplot().subplots(1, 2, figsize=(11, 1.6 + 0.33 * len(rows)), sharey=True)
    for y, row in enumerate(rows):
        draw_multiplier(loop_axis, row, "multiplier", y)
        loop_axis.plot(float(row["tokens"]), y, "|", color="k", ms=15, mew=1.5)
        if row["plain"]:
            loop_axis.hlines(y - 0.25, float(row["plain_low"]), float(row["plain_high"]), color="0.75", lw=1.2)
            loop_axis.plot(float(row["plain"]), y - 0.25, "o", color="white", mec="0.5", ms=5)
        if row["against_plain"]:
            draw_multiplier(plain_axis, row, "against_plain", y)
    names = []
    for row in rows:
        seeds = "1 seed" if int(row["seeds"]) == 1 else f"{row['seeds']} seeds"
        names.append(f"{row['trick']}, {seeds}".replace("_", " "))
    loop_axis.set(yticks=range(len(rows)), yticklabels=names, ylim=(-0.7, len(rows) - 0.4))
    for label, colour in (("saves compute", "C0"), ("costs compute", "C3"), ("not decided", "0.55")):
        loop_axis.plot([], [], "o-", color=colour, lw=3, label=label)
    loop_axis.plot([], [], "o-", color="0.75", mfc="white", mec="0.5", label="the same trick in the plain model, r = 1")
    loop_axis.plot([], [], "|", color="k", ms=10, mew=1.5, label="tokens seen, with it / without it")
    fig.legend(loc="outside lower center", ncols=5)
    better = sum(row["decided"] == "better" for row in rows)
    ahead = sum(float(row["against_plain_low"] or 0) > 1 for row in rows)
    finish(loop_axis, f"{better} of {len(rows)} tricks save compute",
           "FLOPs for the same loss, without it / with it", "")
    finish(plain_axis, f"{ahead} of {len(rows)} beat the plain model of equal depth",
           "FLOPs for the same loss, plain / loop with it", "")
    for axis in (loop_axis, plain_axis):
        axis.axvline(1, color="k", lw=1)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [t for t in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3) if low < t < high]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
    save(fig, path)


def draw_multiplier(axis, row, key, y):
    """A multiplier of a scoreboard's row with its interval: blue above 1, red below, grey across."""
    value, low, high = (float(row[column]) for column in (key, f"{key}_low", f"{key}_high"))
    colour = "C0" if low > 1 else "C3" if high < 1 else "0.55"
    axis.hlines(y, low, high, color=colour, lw=3)
    axis.plot(value, y, "o", color=colour, ms=7)


def plot_passes(runs, path):
    """runs: {name: rows of passes.py}. What each run loses with one pass, and with two, of those it was trained with."""
    fig, axis = pyplot().subplots(figsize=(8.5, 1.6 + 0.33 * len(runs)))
    first = {name: rows[0]["lost"] for name, rows in runs.items()}
    ranked = sorted(runs, key=first.get)
    for y, name in enumerate(ranked):
        for row in runs[name][:min(2, runs[name][0]["trained"] - 1)]:
            style = dict(color="C3", mfc="C3") if row["passes"] == 1 else dict(color="C0", mfc="white")
            axis.hlines(y, row["low"], row["high"], color=style["color"])
            axis.plot(row["lost"], y, "o", **style)
    axis.plot([], [], "o", color="C3", label="1 pass")
    axis.plot([], [], "o", color="C0", mfc="white", label="2 passes, where trained with more")
    axis.set_xscale("symlog", linthresh=0.01)
    axis.axvline(0, color="k", lw=1)
    axis.set(yticks=range(len(ranked)), yticklabels=[name.replace("_", " ") for name in ranked])
    legend_below(fig, axis, 2)
    idle = sum(lost < 0.01 for lost in first.values())
    finish(axis, f"{idle} of {len(runs)} loops lose less than 0.01 nats with a single pass",
           "nats per token lost with fewer passes than in training (95% interval)", "")
    save(fig, path)


def plot_routing(result, path):
    """result: what routing_study.py writes to routing.json. Bars: each layer, and means of two baselines."""
    layers = result["layers"]
    fig, axis = pyplot().subplots(figsize=(8, 2 + 0.4 * len(layers)))
    names = ["layer {layer}, pass {passes[0]} to {passes[1]}".format(**layer) for layer in layers]
    names += ["untrained model", "chance at these loads"]
    left = 0
    for key, colour, words in (("identical", "C0", "the same experts"), ("partial", "0.8", "some of them"),
                               ("disjoint", "C1", "none of them")):
        baselines = [np.mean(values(layers, who, key)) for who in ("untrained", "shuffled")]
        share = np.append(values(layers, key), baselines)
        axis.barh(names, share, left=left, color=colour, label=words)
        left = left + share
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter("{x:.0%}")
    legend_below(fig, axis, 3)
    same = values(layers, "identical")
    untrained = np.mean(values(layers, "untrained", "identical"))
    title = f"{same.min():.0%} to {same.max():.0%} of the tokens keep their experts; untrained {untrained:.0%}"
    finish(axis, title, "share of the tokens to which the next pass gives", "")
    save(fig, path)


def plot_frontier(results, path):
    """results: what early_exit.py writes to early_exit.json. A single run in nats lost, several in nats, to compare."""
    single = len(results) == 1
    fig, axes = pyplot().subplots(1, 2, figsize=(12, 5), sharex=True, sharey=True)
    titles = {"layers": "only layers counted, as the paper counts", "charged": "every test of a token counted too"}
    for axis, (way, title) in zip(axes, titles.items()):
        for i, run in enumerate(results):
            full = 0 if single else run["fixed"][-1]["nats"]
            colour = "C0" if single else f"C{i + 1}"
            points = [point for point in run["frontier"][way][run["criterion"]] if point["tau"] is not None]
            saved = values(points, "saved", way)
            lost = values(points, "lost", "nats")
            label = f"exits by {run['criterion']}" if single else run["run"]
            axis.errorbar(saved, full + lost, reach(points, "lost", "nats"), fmt="o-", color=colour, label=label)
            if single:
                axis.plot(saved, values(points, "random", "nats"), "^:", color="0.5", label="random exits")
            fixed = values(points, "fixed", "nats")
            axis.plot(saved, full + fixed, "s--", color="k" if single else colour, ms=3)
        axis.plot([], [], "s--", color="k", ms=3, label="fewer passes (no loop: layers) for all")
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.set(title=title, xlabel="FLOPs saved")
    axes[0].set_ylabel("nats per token lost" if single else "nats per token")
    legend_below(fig, axes[0], 5)
    fig.suptitle(frontier_title(results), fontsize=13)
    save(fig, path)


def frontier_title(results):
    """Do exits beat fewer passes for all at 10% of the FLOPs saved, tests charged?"""
    criterion = results[0]["criterion"]
    aim = f"At 10% of the FLOPs saved, tests counted, exits by {criterion}"
    at_aim = []
    for run in results:
        points = run["frontier"]["charged"][criterion]
        at_aim += [point["vs_fixed"] for point in points if point["target"] == 0.1 and point["tau"] is not None]
    if not at_aim:
        return f"{aim} are out of reach"
    if len(results) == 1:
        more = "{nats:+.4f} [{low:+.4f}, {high:+.4f}]".format(**at_aim[0])
        return f"{aim} lose {more} nats more than fewer passes for all"
    worse = sum(gap["low"] > 0 for gap in at_aim)
    better = sum(gap["high"] < 0 for gap in at_aim)
    return f"{aim} lose more than fewer passes for all in {worse} of {len(results)} models, less in {better}"


def plot_drafts(results, path):
    """results: what early_exit.py --draft_study writes to draft_study.json. A panel for each temperature, a line for
    each run, drafting with one pass; quartiles over rounds."""
    temperatures = sorted({run["temperature"] for run in results})
    n = len(temperatures)
    fig, axes = pyplot().subplots(1, n, figsize=(1 + 5.5 * n, 4.8), sharey=True, squeeze=False)
    fastest = 0
    for axis, t in zip(axes[0], temperatures):
        at_t = [run for run in results if run["temperature"] == t]
        for i, run in enumerate(at_t):
            colour = f"C{i}"
            rows = [row for row in run["rows"] if row["draft_passes"] == 1]
            speed_up = values(rows, "speed_up")
            best = max(speed_up)
            fastest = max(fastest, best)
            name = run["run"].replace("_", " ")
            lengths = [str(row["draft_tokens"]) for row in rows]
            axis.errorbar(lengths, speed_up, reach(rows, "speed_up"), fmt="o", color=colour)
            *numbers, auto = lengths             # auto is no length: no line leads there
            axis.plot(numbers, speed_up[:-1], color=colour, label=f"{name}: {best:.2f}")
        axis.axhline(1, **GREY)
        title = f"sampled at temperature {t:g}" if t else "greedy"
        finish(axis, title, "tokens drafted at a time", "times as fast as without drafts")
        legend_under(axis, 3, "at best")
    fig.suptitle(f"One pass drafts, all passes check: the same model, up to {fastest:.2f} times as fast", fontsize=14)
    save(fig, path)


def plot_readout(cells, title, path):
    """cells {(cell, variant): [rows of readout_study.diagnose of each seed]}: means over seeds, pass by pass."""
    fig, (length_axis, loss_axis) = pyplot().subplots(1, 2, figsize=(13, 5.4))
    variants = dict.fromkeys(variant for _, variant in cells)
    markers = dict(zip(variants, "os^Dv"))
    lowest = np.inf
    for (cell, variant), runs in cells.items():
        loss, _, readout = cell.partition("-")
        line, _ = LOSSES[loss]
        colour, _ = READOUTS[readout]
        style = {"ls": line, "color": colour, "marker": markers[variant]}
        first = runs[0]
        passes = values(first, "pass")
        nats = np.mean([values(rows, "nats") for rows in runs], axis=0)
        lengths = np.mean([values(rows, "length_mean") for rows in runs], axis=0)
        lowest = min(lowest, *nats)
        loss_axis.plot(passes, nats, **style)
        length_axis.semilogy(passes, lengths, **style)
    names = "-".join(cell for cell, _ in cells).split("-")
    for readout, (colour, words) in READOUTS.items():
        if readout in names:
            length_axis.plot([], [], color=colour, lw=3, label=words)
    for loss, (line, words) in LOSSES.items():
        if loss in names:
            length_axis.plot([], [], color="k", ls=line, label=words)
    if len(markers) > 1:
        for variant, marker in markers.items():
            length_axis.plot([], [], "k" + marker, label=VARIANTS.get(variant, variant))
    legend_below(fig, length_axis, 4)
    length_axis.yaxis.set_minor_formatter(pyplot().LogFormatter(minor_thresholds=(4, 1)))     # 20, 40, 60 too
    _, top = loss_axis.get_ylim()
    loss_axis.set_ylim(lowest - 0.1, min(top, lowest + 1.6))
    for axis in (length_axis, loss_axis):
        axis.axvline(first[0]["n_loop"], **GREY)
    finish(length_axis, "length of the state", "passes (grey: as trained)", "mean norm of the state")
    finish(loss_axis, "loss of its readout", "passes (grey: as trained)", "validation loss (nats per token)")
    fig.suptitle(title, fontsize=13)
    save(fig, path)


def plot_hops(groups, path):
    """groups {name: [hops_study.study_run of each seed]}. A row of pictures for each looped group: right answers
    against passes, and what the state names."""
    looped = {name: runs for name, runs in groups.items() if runs[0]["n_loop"] > 1}
    if not looped:
        return
    fig, axes = pyplot().subplots(len(looped), 2, figsize=(12, 4.4 * len(looped)), squeeze=False)
    for (name, runs), (pass_axis, name_axis) in zip(looped.items(), axes):
        first = runs[0]
        H = first["hops"]
        accuracy = [run["accuracy"] for run in runs]
        accuracy = np.array(accuracy)            # (seeds, passes, hops)
        shades = pyplot().cm.viridis(np.linspace(0, 0.9, accuracy.shape[2]))
        draw_passes(pass_axis, accuracy, H, shades)
        pass_axis.axvline(first["n_loop"], **GREY)
        pass_axis.set_ylim(0, 1.02)
        finish(pass_axis, name, "passes (grey: as trained; dotted: hops not trained)", "share of right answers")
        named = [run["named"] for run in runs if run["named"]]
        if named:
            draw_names(name_axis, np.mean(named, axis=0))
        name_axis.set(title=f"asked for {H} hops: what the readout names")
    save(fig, path)


def plot_learning(groups, folders, path):
    """groups as in plot_hops, folders {run: its folder}: right answers for the most hops, and for half as many, against
    training FLOPs, a line for each seed."""
    H = min(run["hops"] for runs in groups.values() for run in runs)
    fig, axes = pyplot().subplots(1, 2, figsize=(13, 4.8), sharey=True)
    for axis, p in zip(axes, (max(1, H // 2), H)):
        for i, (name, runs) in enumerate(groups.items()):
            for run in runs:
                _, rows = read_metrics(folders[run["run"]])
                label = name if run is runs[0] else None
                axis.plot(rows["flops"], rows[f"val_acc_{p}"], color=f"C{i}", lw=1.2, label=label)
        axis.set_xscale("log")
        finish(axis, f"asked for {hops_text(p)}", "training FLOPs", "share of right answers")
    fig.suptitle("what it takes to learn them: a line for each seed")
    save(fig, path)


def plot_staircase(runs, path):
    """runs: hops_study.study_run of each seed of one looped model. What its readout names after each pass, and how many
    answers are right after each: the picture of the README."""
    first = runs[0]
    H, K = first["hops"], first["n_loop"]
    fig, (name_axis, pass_axis) = pyplot().subplots(1, 2, figsize=(13, 5))
    named = [run["named"] for run in runs]
    named = np.mean(named, axis=0)[:K, 1:]       # the start itself is no step
    name_axis.imshow(named.T, vmin=0, vmax=1, origin="lower", cmap="Blues", extent=(0.5, K + 0.5, 0.5, H + 0.5))
    for (k, step), share in np.ndenumerate(named):
        if share >= 0.05:
            name_axis.text(k + 1, step + 1, f"{share:.0%}", ha="center", va="center", color="w" if share > 0.5 else "k")
    name_axis.grid(False)
    name_axis.set(title=f"asked for {H} hops: which step of the way the model names",
                  xlabel="after this many passes", ylabel="step of the way")
    accuracy = [run["accuracy"] for run in runs]
    accuracy = np.mean(accuracy, axis=0)[:K, :H]           # (passes, hops)
    passes = np.arange(K) + 1
    for p, shade in enumerate(pyplot().cm.viridis(np.linspace(0, 0.9, H)), 1):
        pass_axis.plot(passes, accuracy[:, p - 1], "o-", color=shade)
        label = hops_text(p)
        rise = accuracy[max(p - 2, 0):p, p - 1].mean()     # beside the line where it rises
        pass_axis.annotate(label, (max(p - 0.5, 1), rise), xytext=(-8, 0), textcoords="offset points", ha="right",
                           va="center", color=shade)
    pass_axis.set(title="so a question for p hops takes p passes", xlabel="passes of the loop", xlim=(0.4, K + 0.2),
                  ylim=(0, 1.04), ylabel="share of right answers")
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    fig.suptitle(f"Each pass of the loop follows one more link of the chain ({seeds})", fontsize=14)
    save(fig, path)


def draw_passes(axis, accuracy, H, shades):
    """Mean and range over seeds of accuracy (seeds, passes, hops), a line for each number of hops; trained: up to H."""
    passes = np.arange(accuracy.shape[1]) + 1
    for p, shade in enumerate(shades, 1):
        style = {"color": shade, "label": hops_text(p)}
        if p > H:
            style = {"color": "0.6", "ls": ":"}
        seeds = accuracy[:, :, p - 1]
        low = seeds.min(0)
        high = seeds.max(0)
        axis.plot(passes, seeds.mean(0), marker="o", **style)
        axis.fill_between(passes, low, high, color=style["color"], alpha=0.15, lw=0)


def draw_names(axis, named):
    """named (passes, steps): the share of readouts that name each step of the way."""
    n_passes, n_steps = named.shape
    extent = (0.5, n_passes + 0.5, -0.5, n_steps - 0.5)
    image = axis.imshow(named.T, vmin=0, vmax=1, origin="lower", aspect="auto", extent=extent)
    axis.figure.colorbar(image)
    axis.set(xlabel="after pass", ylabel="steps from the start")
    axis.grid(False)


def plot_hops_exits(points, aim, tokens, meta, n_passes, path):
    """points {(rule, aim): [what hops_exits.measure_rule says of each run]}; aim: the one to look at closely;
    tokens: the texts of an example."""
    fig, (cost_axis, hops_axis, text_axis) = pyplot().subplots(1, 3, figsize=(17, 4.8))
    savings = {}
    for (rule, _), same in points.items():
        saving = np.mean(values(same, "saved"))
        lost = 100 * np.mean(values(same, "full") - values(same, "accuracy"))
        random = 100 * np.mean(values(same, "full") - values(same, "random"))
        fixed = 100 * np.mean(values(same, "full") - values(same, "fixed"))
        savings.setdefault(rule, []).append((saving, lost, random, fixed))
    for i, (rule, rows) in enumerate(savings.items()):
        saving, lost, random, fixed = np.array(rows).T
        if rule == "oracle":
            cost_axis.plot(saving, lost, "*", color="k", ms=12, label="p passes for p hops")
            continue
        cost_axis.plot(saving, lost, "o-", color=f"C{i}", label=rule)
        if rule == "change":
            cost_axis.plot(saving, fixed, ":", color="0.4", label="fixed depth, same cost")
            cost_axis.plot(saving, random, "--", color="0.4", label="random exits, same cost")
    at_aim = []
    for rule in ("change", "entropy"):
        for same in [points[rule, aim]] if (rule, aim) in points else []:
            lost = 100 * np.mean(values(same, "full") - values(same, "accuracy"))
            at_aim.append(f"{rule} loses {lost:.1f}")
    title = f"of 100 answers, at {aim:.0%} saved: " + ", ".join(at_aim)
    finish(cost_axis, title, "FLOPs of the answers saved, tests charged", "right answers lost, of 100")
    cost_axis.xaxis.set_major_formatter("{x:.0%}")
    hops = range(1, meta["hops"] + 1)
    for i, rule in enumerate(savings):
        same = points.get((rule, aim), [])
        if same:
            hops_axis.plot(hops, np.mean([run["passes"] for run in same], axis=0), "o-", color=f"C{i}", label=rule)
    hops_axis.plot(hops, hops, color="k", lw=1, label="p passes for p hops")
    finish(hops_axis, f"passes used, at {aim:.0%} saved", "hops asked for", "mean passes")
    draw_example(text_axis, tokens, points.get(("change", aim)), meta, n_passes)
    save(fig, path)


def draw_example(axis, tokens, same, meta, n_passes):
    """The queries of an example, a line each, with the passes that the answer took as its shade."""
    N, Q = meta["symbols"], meta["queries"]
    axis.axis("off")
    axis.text(0, 1, "".join(tokens[:N]), family="monospace", fontsize=10, va="top", transform=axis.transAxes)
    if not same:
        return
    shades = pyplot().cm.YlOrRd(np.linspace(0.1, 0.8, n_passes))
    for q in range(Q):
        hop, start, answer = tokens[N + 3 * q:N + 3 * q + 3]
        k = same[0]["first"][N + 3 * q + 1]
        y = 0.88 - 0.85 * q / Q
        style = dict(family="monospace", fontsize=11, va="top", transform=axis.transAxes)
        axis.text(0.05, y, f"{hop.strip()} {start}", **style)
        axis.text(0.42, y, f" {answer} ", bbox={"facecolor": shades[k - 1], "edgecolor": "none", "pad": 3}, **style)
        word = "pass" if k == 1 else "passes"
        axis.text(0.52, y, f"after {k} {word}", fontsize=10, va="top", transform=axis.transAxes)
    axis.set_title("an example: when each answer left, by change")


def plot_starts(rows, path):
    """rows: what start_study.py shows, a dict for each way to start."""
    fig, axis = pyplot().subplots(figsize=(8, 5))
    for r, colour in ((2, "C0"), (4, "C1")):
        tied = [row for row in rows if row["source"] == "plain" and row["r"] == r and row["how"] == "mean"]
        axis.errorbar(100 * values(tied, "share"), values(tied, "mean"), values(tied, "half"), marker="o", color=colour,
                      label=f"plain, then tied into {r} passes")
    others = {("plain", 1): ("C2", "plain, trained on"), ("loop", 1): ("C3", "2 passes, then untied"),
              ("loop", 2): ("C4", "2 passes, trained on")}
    for i, (key, (colour, label)) in enumerate(others.items()):
        for row in rows:
            if (row["source"], row["r"]) == key:
                x = 100 * row["share"] + 2 * (i + 1)       # side by side
                axis.errorbar(x, row["mean"], row["half"], fmt="s", color=colour, label=label)
    axis.axhline(0, **GREY)
    axis.set_xticks([25, 50, 75])
    finish(axis, "Starting from a model one has, against training from scratch",
           "share of the training FLOPs spent on it, %", "loss more than from scratch, nats per token")
    save(fig, path)


def plot_repeats(rows, words, error, path):
    """rows: mean losses of repeat_study.py, a dict for each share of the text, model, width and budget; words: a name
    for each model; error: the half-width of the interval of a single run. A panel for each share, the best width at
    each budget."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    fig, axes = pyplot().subplots(1, len(shares), figsize=(5.5 * len(shares), 4.8), squeeze=False)
    for axis, share in zip(axes[0], shares):
        for i, (model, name) in enumerate(words.items()):
            best = {}                            # the best width at each budget
            for row in sorted(rows, key=lambda row: (row["budget"], row["loss"])):
                if (row["share"], row["model"]) == (share, model):
                    best.setdefault(row["budget"], row)
            line = list(best.values())
            half = [error / row["seeds"] ** 0.5 for row in line]
            side_by_side = values(line, "budget") * 1.02 ** i
            axis.errorbar(side_by_side, values(line, "loss"), half, marker="o", color=f"C{i}", label=name)
        axis.set_xscale("log")
        budgets = sorted({row["budget"] for row in rows if row["share"] == share})
        axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axis.minorticks_off()
        finish(axis, f"{share:.0%} of the text", "training FLOPs, at the best width", "loss, nats per token")
    save(fig, path)


def plot_tasks(columns, axes, unit, path):
    """Scores on the axes: of a checkpoint at several depths, against passes; else of each checkpoint, or how far it is
    from the first."""
    text = {"loss": "nats per token", "bpb": "bits per byte"}[unit]
    names = [name for name in axes if all(name in column["axes"] for column in columns)]
    runs = {}
    for column in columns:
        runs.setdefault(column["ckpt"], []).append(column)
    deep = [run for run in runs.values() if len(run) > 1]
    fig, axis = pyplot().subplots(figsize=(9, 5.4))
    if deep:
        title = draw_depths(axis, deep, names, f"val_{unit}")
        axis.set(xlabel="passes (grey: as trained)", ylabel=f"loss on the right continuation ({text})")
    else:
        title = draw_axes(axis, columns, names)
        axis.set_xlabel(f"loss on the right continuation ({text})")
        if len(columns) > 1:
            axis.set_xlabel(f"loss on the right continuation minus that of {columns[0]['name']} ({text})")
    legend_below(fig, axis, 4)
    fig.suptitle(title, fontsize=13)
    save(fig, path)


def draw_depths(axis, runs, names, val):
    """Lines of score against passes, a colour for each axis and a style for each run; returns what they say."""
    means = []
    shades = pyplot().cm.Dark2.colors
    for run, style in zip(runs, ("-", "--", ":", "-.") * len(runs)):
        first = run[0]
        who = first["name"]
        passes = values(run, "n_loop")
        total = np.zeros(len(run))
        for name, shade in zip(names, shades):
            score = values(run, "axes", name, "score")
            error = values(run, "axes", name, "score_se")
            label = name if run is runs[0] else None
            axis.errorbar(passes, score, error, color=shade, ls=style, marker="o", label=label)
            total = total + score
        axis.plot(passes, values(run, val), "k" + style, label=f"validation text, {who}")
        axis.axvline(first["trained_n_loop"], color="0.7", lw=6, alpha=0.4, zorder=0)
        means.append(f"{who} " + ", ".join(f"{loss:.2f}" for loss in total / max(1, len(names))))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    passes = ", ".join(f"{n:g}" for n in values(runs[0], "n_loop"))
    return f"Mean loss of the axes after {passes} passes: {'; '.join(means)}"


def draw_axes(axis, columns, names):
    """A point for each axis and checkpoint, with its standard error over items; returns what they say."""
    first, *others = columns
    base = first["name"]
    key = "change" if others else "score"
    names = [name for name in names if all(key in column["axes"][name] for column in others)]
    rows = np.arange(len(names))[::-1]           # the first at the top
    axis.set_yticks(rows, names)
    changes = []
    shown = others or columns
    for i, column in enumerate(shown):
        who = column["name"]
        scores = [column["axes"][name] for name in names]
        y = rows + 0.12 * ((len(shown) - 1) / 2 - i)
        score = values(scores, key)
        error = values(scores, f"{key}_se")
        axis.errorbar(score, y, xerr=error, fmt="o", color=f"C{i}", label=who)
        changes += [(abs(change), f"{who}, {change:+.2f} on {name}") for change, name in zip(score, names)]
    if not others or not names:
        return f"Loss by axis: {base}"
    axis.axvline(0, **GREY)
    _, furthest = max(changes)
    return f"Furthest from {base}: {furthest}"
