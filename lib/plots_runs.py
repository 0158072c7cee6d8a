"""Pictures of tables of runs: the law, the verdicts on tricks, models started from others, repeated text, depths."""
import numpy as np

from lib.plots import GREY, finish, legend_under, pyplot, save, values

PUBLISHED = {"truncbptt": "truncated backpropagation", "hyperconnect": "hyperconnections"}     # in the published table


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


def plot_depths(rows, models, path):
    """rows of depth_study.compare_models; models: their names in order, the first of which is the zero of the axis."""
    fig, axis = pyplot().subplots(figsize=(8.5, 5.2))
    for i, model in enumerate(models):
        line = [row for row in rows if row["model"] == model]
        style = dict(color=f"C{i}", ls="--" if "4 layers" in model else "-", marker="o", label=model)
        side_by_side = values(line, "budget") * 1.03 ** (i - len(models) / 2)
        axis.errorbar(side_by_side, values(line, "difference"), values(line, "half"), **style)
    axis.set_xscale("log")
    budgets = sorted({row["budget"] for row in rows})
    axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axis.minorticks_off()
    lowest = [min((row for row in rows if row["budget"] == budget), key=lambda row: row["loss"]) for budget in budgets]
    shallow = sum("4 layers" in row["model"] for row in lowest)
    finish(axis, f"Models of 4 layers have the lowest loss at {shallow} of {len(budgets)} budgets",
           "training FLOPs, each model at its best width", f"nats per token, less {models[0]}")
    save(fig, path)
