"""Every picture of the project. The scripts compute the numbers, and their docstrings say what they are."""
from pathlib import Path

import numpy as np

STYLE = {"backend": "Agg", "figure.constrained_layout.use": True, "savefig.dpi": 110, "legend.fontsize": 8,
         "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "lines.markersize": 4, "errorbar.capsize": 2,
         "axes.formatter.min_exponent": 4}       # a log axis says 20 rather than 2 x 10^1
GREY = {"color": "0.6", "lw": 1}                 # a thin line, mostly one that marks a place
POLICIES = {"copy": "C2v-", "reuse": "C5D-"}     # early_exit.py --kv


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


def save(fig, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    pyplot().close(fig)


def values(rows, *keys):
    """An array with row[key], or row[key][key].., of each row. Text from a CSV file becomes a number."""
    for key in keys:
        rows = [row[key] for row in rows]
    return np.array(rows, dtype=float)


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
    from law import bootstrap, bootstrap_weights, fit_law, predict_at  # here, as no other picture needs them
    from runs import select
    loops = fit["x"]["loops"]
    budgets = np.unique(runs["budget"])
    shades = pyplot().cm.viridis(np.linspace(0, 0.85, len(budgets)))
    phi, *resamples = draws[:, 5]
    fig = pyplot().figure(figsize=(15, 9))
    upper, lower = fig.subfigures(2)
    law_axes = upper.subplots(1, len(loops), sharex=True, sharey=True, squeeze=False)[0]
    residual_axis, worth_axis, phi_axis = lower.subplots(1, 3)
    # the runs of each r, and the law between their widths, where N is a line in d^2 and D is smooth
    for i, (axis, r) in enumerate(zip(law_axes, loops)):
        at_r = runs["n_loop"] == r
        flops = runs["budget"][at_r] * 1.05 ** i       # each r a little to the right of the one before
        residual_axis.semilogx(flops, fit["residual"][at_r], "o", label=f"r = {r:g}")
        axis.set(title=f"r = {r:g}", xlabel="stored parameters N")
        for budget, shade in zip(budgets, shades):
            cell = select(runs, at_r & (runs["budget"] == budget))
            stored = cell["n_once"] + cell["n_rec"]
            axis.semilogx(stored, cell["val_loss"], "o", color=shade, label=f"{budget:.3g}")
            if len(np.unique(stored)) > 2:
                d2 = cell["n_embd"] ** 2
                fine = np.geomspace(d2.min(), d2.max(), 50)
                once = np.polyval(np.polyfit(d2, cell["n_once"], 1), fine)
                rec = np.polyval(np.polyfit(d2, cell["n_rec"], 1), fine)
                parabola = np.polyfit(np.log(d2), np.log(cell["tokens"]), 2)
                tokens = np.exp(np.polyval(parabola, np.log(fine)))
                axis.plot(once + rec, predict_at(fit, once, rec, tokens, r), color=shade)
    law_axes[0].set_ylabel("validation loss (nats/token)")
    law_axes[0].legend(title="FLOPs; lines: the law", loc="lower left")
    residual_axis.set_xticks(budgets, [f"{budget:.3g}" for budget in budgets])
    residual_axis.minorticks_off()
    residual_axis.axhline(0, **GREY)
    title = f"What the law misses: RMSE {fit['rmse']:.4f} nats, R2 {fit['r2']:.4f}"
    finish(residual_axis, title, "training FLOPs", "actual - predicted (nats)")
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
    finish(worth_axis, "Effective parameters of the looped block", "passes r", "worth, in fresh blocks")
    low, high = result["phi_ci"]
    phi_axis.hist(resamples, bins=40, range=np.nanpercentile(resamples, [0.5, 99.5]), color="steelblue")
    phi_axis.axvspan(low, high, alpha=0.2, color="gray", label=f"95% interval {low:.3f} to {high:.3f}")
    phi_axis.axvline(phi, color="black", label=f"fit {phi:.3f}")
    title = f"How sure: {len(resamples):,} resamples of (budget, r) cells"
    finish(phi_axis, title, f"phi (convention {result['convention']})", "resamples")
    title = "These runs do not say what phi is"
    if result["phi"] is not None:
        title = f"phi = {phi:.3f}, 95% interval {low:.2f} to {high:.2f}"
        title = f"One block passed r times is worth r^phi fresh blocks: {title}"
    fig.suptitle(title, fontsize=17)
    save(fig, path)


def plot_scoreboard(rows, path):
    """rows of fit_law.read_table."""
    n = len(rows)
    fig, (phi_axis, gain_axis) = pyplot().subplots(1, 2, figsize=(11, 1.9 + 0.42 * n), sharey=True)
    files = list(dict.fromkeys(row["file"] for row in rows))
    colours = [f"C{files.index(row['file'])}" for row in rows]
    names = [row["trick"] + (", published" if row["file"].startswith("isodepth") else "") for row in rows]
    for axis, key in ((phi_axis, "phi"), (gain_axis, "difference")):
        low, high = values(rows, key + "_low"), values(rows, key + "_high")
        axis.hlines(range(n), low, high, colors=colours, lw=2.5)
        axis.scatter(values(rows, key), range(n), s=49, c=colours)
    phi_axis.plot(values(rows, "baseline"), range(n), "k|", ms=16, label="the same loop without it")
    phi_axis.set(yticks=range(n), yticklabels=names, ylim=(-0.6, n - 0.4))
    gain_axis.axvline(0, **GREY)
    for i, file in enumerate(files):
        gain_axis.plot([], [], "o-", color=f"C{i}", label=file)
    fig.legend(loc="outside lower center", ncols=3)
    finish(phi_axis, "phi with the trick", "phi: 0 a repeat adds nothing, 1 it is worth a fresh block", "")
    finish(gain_axis, "what the trick adds", "phi with it - phi without it (95% interval)", "")
    clear = np.sum(values(rows, "difference_low") > 0)
    fig.suptitle(f"{clear} of {n} tricks: phi rises by more than chance (interval above 0)")
    save(fig, path)


def plot_verdicts(rows, path):
    """rows of a scoreboard of verdict.py, best first: what each trick saves against the loop without it (left), and
    what the loop with it saves against the plain model (right)."""
    rows = rows[::-1]                            # the best at the top
    fig, (loop_axis, plain_axis) = pyplot().subplots(1, 2, figsize=(11, 1.6 + 0.33 * len(rows)), sharey=True)
    for y, row in enumerate(rows):
        draw_multiplier(loop_axis, row, "multiplier", y)
        if row["plain"]:
            loop_axis.hlines(y - 0.25, float(row["plain_low"]), float(row["plain_high"]), color="0.75", lw=1.2)
            loop_axis.plot(float(row["plain"]), y - 0.25, "o", color="white", mec="0.5", ms=5)
        if row["against_plain"]:
            draw_multiplier(plain_axis, row, "against_plain", y)
    names = []
    for row in rows:
        seeds = "1 seed" if row["seeds"] == "1" else f"{row['seeds']} seeds"
        names.append(f"{row['trick']}, {seeds}".replace("_", " "))
    loop_axis.set(yticks=range(len(rows)), yticklabels=names, ylim=(-0.7, len(rows) - 0.4))
    for label, colour in (("saves compute", "C0"), ("costs compute", "C3"), ("not decided", "0.55")):
        loop_axis.plot([], [], "o-", color=colour, lw=3, label=label)
    loop_axis.plot([], [], "o-", color="0.75", mfc="white", mec="0.5", label="the same trick in the plain model, r = 1")
    fig.legend(loc="outside lower center", ncols=4)
    better = sum(row["decided"] == "better" for row in rows)
    ahead = sum(float(row["against_plain_low"] or 0) > 1 for row in rows)
    finish(loop_axis, f"{better} of {len(rows)} verdicts: the trick saves compute",
           "FLOPs that the loop without it needs for the same loss", "")
    finish(plain_axis, f"{ahead} of {len(rows)}: the loop with it beats the plain model",
           "FLOPs that the plain model needs for the same loss", "")
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


def plot_routing(result, path, title):
    """result: what routing_study.py writes to routing.json."""
    fig, (share_axis, jaccard_axis, load_axis) = pyplot().subplots(1, 3, figsize=(15, 4.6))
    fig.suptitle(title)
    layers = result["layers"]
    chance = result["uniform"]
    names = ["{layer}\n{passes[0]}-{passes[1]}".format(**layer) for layer in layers]
    bottom = 0
    for key, colour in (("disjoint", "C0"), ("partial", "0.8"), ("identical", "C3")):
        share = values(layers, key)
        share_axis.bar(names, share, bottom=bottom, color=colour, label=key, width=0.7)
        bottom = bottom + share
    share_axis.axhline(chance["disjoint"], color="black", ls="--", label="disjoint, uniform chance")
    share_axis.set_ylim(0, 1.4)                  # room for the legend
    finish(share_axis, "expert sets of consecutive passes", "layer and its passes", "share of tokens")
    jaccard_axis.plot(names, values(layers, "jaccard"), "C3o-", label="trained")
    jaccard_axis.plot(names, values(layers, "untrained", "jaccard"), "C0s-", label="untrained")
    jaccard_axis.plot(names, values(layers, "shuffled", "jaccard"), "C7^-", label="chance, measured loads")
    jaccard_axis.axhline(chance["jaccard"], color="black", ls="--", label="chance, uniform")
    jaccard_axis.set_ylim(0, 1)
    finish(jaccard_axis, "agreement of passes (1: the same experts)", "layer and its passes", "mean Jaccard index")
    E = result["n_expert"]
    n_loop = result["n_loop"]
    load = np.reshape(result["load"], (-1, E)) * E     # (layers * passes, E)
    image = load_axis.imshow(load, aspect="auto", vmin=0)
    names = [f"layer {i // n_loop + 1}, pass {i % n_loop + 1}" for i in range(len(load))]
    load_axis.set_yticks(range(len(load)), names, fontsize=8)
    load_axis.set(title="load, in units of an even share", xlabel="expert")
    load_axis.grid(False)
    fig.colorbar(image)
    save(fig, path)


def plot_frontier(results, path):
    """results: what early_exit.py writes to early_exit.json. A single run is drawn with baselines, in nats lost."""
    fig, (depth_axis, layers_axis, charged_axis) = pyplot().subplots(1, 3, figsize=(16, 5))
    single = len(results) == 1
    full = []                                    # nats of each run at full depth
    highs = []                                   # upper ends of the intervals, in nats lost
    for i, run in enumerate(results):
        colour = f"C{i}"
        name = run["run"] + ": "
        layers = run["layers"]
        fixed = run["fixed"]
        oracle = run["oracle"]
        origin = fixed[-1]["nats"] if single else 0
        full.append(fixed[-1]["nats"] - origin)
        depth = values(layers, "layer")
        exits = [layer["boundary"] for layer in layers]
        depth_axis.plot(depth, values(layers, "jsd"), "o-", markevery=exits, color=colour, label=name + "mean JSD")
        for axis, way in ((layers_axis, "layers"), (charged_axis, "charged")):
            saved = values(fixed, "saved", way)
            nats = values(fixed, "nats") - origin
            axis.plot(saved, nats, "s--", color=colour, lw=1, label=name + "fixed depth")
            points = [point for point in run["frontier"][way][run["criterion"]] if point["tau"] is not None]
            lost = values(points, "lost", "nats")
            low = values(points, "lost", "low")
            high = values(points, "lost", "high")
            highs.extend(high)
            saved = values(points, "saved", way)
            nats = values(points, "nats") - origin
            axis.errorbar(saved, nats, [lost - low, high - lost], fmt="o-", color=colour, label=name + "exits")
            if single:
                axis.plot(saved, values(points, "random", "nats"), "C3^:", label="random exits")
                axis.plot(oracle["saved"][way], oracle["lost"]["nats"], "C4*", ms=13, label="oracle")
    if single:
        depth_axis.plot(depth, values(layers, "below_half"), "C1", label="share of tokens below 0.5")
        for kv, points in run["policies"].items():
            saved = values(points, "saved", "charged")
            charged_axis.plot(saved, values(points, "lost", "nats"), POLICIES[kv], label=f"exits, {kv} (as generated)")
    depth_axis.set_ylim(0, 1)
    depth_axis.axhline(0.5, **GREY)
    finish(depth_axis, "predictions settle with depth", "effective layer", "divergence (JSD) from the last readout")
    bottom = min(full) - 0.02 - 0.05 * max(highs)
    top = max(full) + 0.02 + 1.15 * max(highs)   # room for the legend
    ylabel = "nats per token lost against full depth" if single else "nats per token"
    finish(layers_axis, "layers only, as the paper counts", "FLOPs saved, share of the full model", ylabel)
    finish(charged_axis, "every test and readout charged", "FLOPs saved, share of the full model", ylabel)
    for axis in (layers_axis, charged_axis):
        axis.set_xlim(-0.2, 0.8)
        axis.set_ylim(bottom, top)
        axis.axvline(0, **GREY)
    fig.suptitle(frontier_title(results), wrap=True)
    save(fig, path)


def frontier_title(results):
    """What 10% saved costs each run, counted both ways."""
    lines = [f"nats lost by {results[0]['criterion']} exits at 10% saved"]
    for way, text in (("layers", "counting layers only"), ("charged", "with every test charged")):
        losses = []
        for run in results:
            points = run["frontier"][way][run["criterion"]]
            point = next(point for point in points if point["target"] == 0.1)
            if point["tau"] is None:
                losses.append(f"{run['run']} out of reach")
            else:
                lost, random, fixed = (f"{point[key]['nats']:+.3f}" for key in ("lost", "random", "fixed"))
                losses.append(f"{run['run']} {lost} (random exits {random}, fixed depth {fixed})")
        lines.append(f"{text}: {', '.join(losses)}")
    return "\n".join(lines)


def plot_drafts(results, path):
    """results: what early_exit.py --draft_study writes to draft_study.json; a row of panels for each temperature, a
    panel for each run."""
    temperatures = sorted({run["temperature"] for run in results})
    n_rows = len(temperatures)
    n = len(results) // n_rows
    fig, axes = pyplot().subplots(n_rows, n, figsize=(2 + 4.3 * n, 1 + 3.4 * n_rows), sharex=True, sharey=True,
                                  squeeze=False)
    best = dict.fromkeys(temperatures, 0)
    for axis, run in zip(axes.flat, results):
        t = run["temperature"]
        fastest = draw_drafts(axis, run)
        best[t] = max(best[t], fastest)
        how = f"temperature {t:g}" if t else "greedy"
        name = run["run"].replace("_", " ")
        axis.set_title(f"{name}, {how}")
    for axis in axes[-1]:
        axis.set_xlabel("tokens drafted at a time")
    for axis in axes[:, 0]:
        axis.set_ylabel("times as fast as plain decoding")
    axes[0, 0].legend()
    gains = [f"{best[t]:.2f} times as fast " + (f"at temperature {t:g}" if t else "when greedy") for t in temperatures]
    fig.suptitle(f"The loop drafts for itself, and loses nothing: at best {', '.join(gains)}", fontsize=14)
    save(fig, path)


def draw_drafts(axis, run):
    """How many times as fast drafts of each length and number of passes are, with quartiles; returns the best."""
    K = run["n_loop"]
    for d in range(1, K):
        colour = f"C{d - 1}"
        rows = [row for row in run["rows"] if row["draft_passes"] == d]
        middle = values(rows, "speed_up")
        below = middle - values(rows, "low")
        above = values(rows, "high") - middle
        lengths = [str(row["draft_tokens"]) for row in rows]
        axis.errorbar(lengths, middle, [below, above], fmt="o", color=colour)
        *numbers, auto = lengths
        axis.plot(numbers, middle[:-1], color=colour, label=f"drafted with {d} of {K} passes")
    axis.axhline(1, **GREY)
    fastest = max(run["rows"], key=lambda row: row["speed_up"])
    speed_up = fastest["speed_up"]
    axis.annotate(f"{speed_up:.2f}", (str(fastest["draft_tokens"]), fastest["high"]), (0, 4), ha="center",
                  textcoords="offset points", weight="bold")
    axis.margins(y=0.15)                         # room for that number
    return speed_up


def plot_readout(cells, folders, title, path):
    """cells {(cell, variant): [readout_study.diagnose of each seed]}, folders likewise."""
    fig, axes = pyplot().subplots(2, 2, figsize=(13, 9.5), sharey="row")
    norm_axis, training_axis = axes[0]
    pass_axis, speed_axis = axes[1]
    lowest = []                                  # the lowest perplexity of each cell
    for i, ((cell, variant), runs) in enumerate(cells.items()):
        K = runs[0]["n_loop"]
        name = f"{cell}-{variant}" if variant else cell
        style = dict(color=f"C{i}", ls="--" if cell.startswith("terminal") else "-", marker="o", label=name)
        norms = [values(run["norm"], "mean") for run in runs]      # (seeds, passes)
        passes = range(1, len(norms[0]) + 1)
        norm_axis.semilogy(passes, np.mean(norms, axis=0), **style)
        metrics = [read_metrics(folder)[1] for folder in folders[cell, variant]]
        norms = [rows[f"val_norm_{K}"] for rows in metrics]
        training_axis.plot(metrics[0]["step"], np.mean(norms, axis=0), **style)
        perplexity = np.exp(values(runs, "ce").mean(axis=0))
        lowest.append(min(perplexity))
        pass_axis.plot(passes, perplexity, **style)
        speed = values(runs, "tok_per_s").mean(axis=0)[:K]
        speed_axis.plot(speed / speed[-1], perplexity[:K], **style)
    fig.legend(*norm_axis.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    finish(norm_axis, "how the state grows over passes", "passes (grey: as trained)", "mean norm of the state")
    finish(training_axis, "and over training", "training step", "mean norm after K passes")
    finish(pass_axis, "what a pass less or more is worth", "passes at inference", "validation perplexity")
    xlabel = f"tokens per second, in units of K = {K}; K = 1 on the right"
    finish(speed_axis, "perplexity against speed", xlabel, "validation perplexity")
    pass_axis.set_ylim(0.95 * min(lowest), 3 * min(lowest))
    norm_axis.yaxis.set_minor_formatter(pyplot().LogFormatter(minor_thresholds=(4, 1)))     # 20, 40, 60 too
    norm_axis.axvline(K, **GREY)
    pass_axis.axvline(K, **GREY)
    fig.suptitle(title)
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


def plot_tasks(columns, axes, unit, path):
    """Axis scores against validation loss and, where a checkpoint ran at several depths, against passes."""
    text = {"loss": "nats per token", "bpb": "bits per byte"}[unit]
    ylabel = f"loss on the right continuation ({text})"
    loss_key = f"val_{unit}"
    names = [name for name in axes if all(name in column["axes"] for column in columns)]
    runs = {}
    for column in columns:
        runs.setdefault(column["ckpt"], []).append(column)
    looped = [run for run in runs.values() if len(run) > 1]
    n = 2 if looped else 1
    fig, panels = pyplot().subplots(1, n, figsize=(1 + 7 * n, 5.6), squeeze=False)
    loss_axis = panels[0, 0]
    pass_axis = panels[0, -1]                    # drawn on only where there are two
    ranking = sorted(columns, key=lambda column: column[loss_key])
    draw_scores(loss_axis, ranking, names, loss_key)
    fig.legend(loc="outside lower center", ncols=3)
    above = loss_axis.get_xaxis_transform()      # x in nats, y from 0 at the bottom to 1 at the top
    for column in ranking:
        loss_axis.text(column[loss_key], 0.99, column["label"], transform=above, rotation=90, va="top", fontsize=7)
    loss_axis.margins(y=0.2)                     # room for these labels
    title = f"{columns[0]['name']}: continuation loss by axis"
    if len(runs) > 1:
        rising = [np.all(np.diff(values(ranking, "axes", name, "score")) > 0) for name in names]
        title = f"{sum(rising)} of {len(names)} axes rank them as validation loss does"
    finish(loss_axis, title, f"validation loss ({text})", ylabel)
    lines, means = [], []
    for run, style in zip(looped, ("-", "--", ":", "-.") * len(looped)):
        draw_scores(pass_axis, run, names, "n_loop", style)
        label = f"{run[0]['name']}: validation text"
        lines += pass_axis.plot(values(run, "n_loop"), values(run, loss_key), "k" + style, label=label)
        pass_axis.axvline(run[0]["trained_n_loop"], color="0.7", lw=6, alpha=0.4, zorder=0)
        scores = [values(run, "axes", name, "score") for name in names]
        means.append(", ".join(f"{mean:.2f}" for mean in np.mean(scores, axis=0)))
    if looped:
        title = f"test-time compute, mean over axes: {'; '.join(means)}"
        finish(pass_axis, title, "passes at evaluation (grey: as trained)", ylabel)
        pass_axis.set_xscale("log", base=2)
        pass_axis.legend(handles=lines)
    save(fig, path)


def draw_scores(axis, columns, names, x, style="-"):
    for i, name in enumerate(names):
        score = values(columns, "axes", name, "score")
        error = values(columns, "axes", name, "score_se")
        axis.errorbar(values(columns, x), score, error, color=f"C{i}", ls=style, marker="o", lw=1, label=name)
