"""Pictures of what is inside a trained model: passes, routing, exits, drafts, the state, tasks."""
import numpy as np

from lib.plots import GREY, finish, legend_below, legend_under, pyplot, reach, save, values

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
