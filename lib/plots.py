"""
Every picture of the project: functions from the numbers that a script has computed to a PNG. The scripts say in their
docstrings what the numbers are; nothing is measured here, except that plot_law also fits a free multiplier for each r.
"""
import csv
import math
import os
import textwrap

import numpy as np

from law import bootstrap, bootstrap_weights, fit_law, predict_at


def pyplot():
    """matplotlib without a window, imported only when something is drawn: it takes longer than most of the commands."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save(fig, path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    fig.savefig(path, dpi=110)
    pyplot().close(fig)


# --- train.py ---
def plot_loss(out, title):
    with open(out / "metrics.csv", newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    fig, ax = pyplot().subplots(figsize=(7, 4.2))
    ax.plot([float(r["tokens"]) / 1e6 for r in rows], [float(r["train_loss"]) for r in rows], color="0.65", lw=1,
            label="training batch")
    val = [(float(r["tokens"]) / 1e6, float(r["val_loss"])) for r in rows if r["val_loss"]]
    ax.plot(*zip(*val), "o-", color="C0", ms=4, label="validation")
    ax.set(xlabel="tokens seen (millions)", ylabel="loss (nats per token)", title=title)
    ax.grid(alpha=0.25)
    ax.legend()
    fig.tight_layout()
    save(fig, out / "loss.png")


# --- fit_law.py ---
def plot_law(runs, fit, draws, result, path):
    """runs of sweep.load_runs, fit of law.fit_law, draws of law.bootstrap, result of fit_law.print_fit."""
    loops, budgets, (low, high) = fit["x"]["loops"], np.unique(runs["budget"]), result["phi_ci"]
    plt = pyplot()
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
    residual_axis.set_xticks(budgets, [f"{b:.3g}" for b in budgets])
    residual_axis.minorticks_off()
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
    save(fig, path)


def plot_scoreboard(rows, path):
    """rows of fit_law.read_table."""
    fig, axes = pyplot().subplots(1, 2, figsize=(11, 1.9 + 0.42 * len(rows)), sharey=True, layout="constrained")
    files = list(dict.fromkeys(row["file"] for row in rows))
    names = [row["trick"] + ", published" * row["file"].startswith("isodepth") for row in rows]
    for y, row in enumerate(rows):
        v, colour = {k: float(row[k]) for k in list(row)[1:8]}, f"C{files.index(row['file'])}"
        for axis, at, low, high in ((axes[0], v["phi"], v["phi_low"], v["phi_high"]),
                                    (axes[1], v["difference"], v["difference_low"], v["difference_high"])):
            axis.plot([low, high], [y, y], color=colour, lw=2.5, solid_capstyle="round")
            axis.plot(at, y, "o", color=colour, ms=7)
        axes[0].plot(v["baseline"], y, "|", color="0.3", ms=16, mew=2)
    for k, source in enumerate(files):
        axes[1].plot([], [], "o-", color=f"C{k}", label=source)
    axes[0].plot([], [], "|", color="0.3", ms=12, mew=2, label="the same loop without it")
    axes[0].set(yticks=range(len(rows)), yticklabels=names, ylim=(-0.6, len(rows) - 0.4),
                xlabel="phi: 0 a repeat adds nothing, 1 it is worth a fresh block", title="phi with the trick")
    axes[1].axvline(0, color="0.3", lw=1)
    axes[1].set(xlabel="phi with it - phi without it (95% interval)", title="what the trick adds")
    for axis in axes:
        axis.grid(alpha=0.25, axis="x")
    clear = sum(float(row["difference_low"]) > 0 for row in rows)
    fig.suptitle(f"{clear} of {len(rows)} tricks raise{'s' * (clear == 1)} phi by more than chance (interval above 0)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    save(fig, path)


# --- routing_study.py ---
def plot_routing(r, path, title):
    """r of routing_study.measure_routing."""
    fig, (bars, jaccard, heat) = pyplot().subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    fig.suptitle(title)
    names = [str(a["layer"]) if r["n_loop"] == 2 else f"{a['layer']}\n{a['passes'][0]}-{a['passes'][1]}"
             for a in r["layers"]]
    below = [0.0] * len(names)
    for key, colour in (("disjoint", "C0"), ("partial", "0.8"), ("identical", "C3")):
        share = [a[key] for a in r["layers"]]
        bars.bar(names, share, bottom=below, color=colour, label=key, width=0.7)
        below = [b + s for b, s in zip(below, share)]
    bars.axhline(r["uniform"]["disjoint"], color="black", ls="--", lw=1, label="disjoint, uniform chance")
    bars.set(xlabel="layer of the loop", ylabel="share of tokens", ylim=(0, 1.4),         # room for the legend
             title="expert sets of consecutive passes")
    jaccard.plot(names, [a["jaccard"] for a in r["layers"]], "o-", color="C3", label="trained")
    jaccard.plot(names, [a["untrained"]["jaccard"] for a in r["layers"]], "s-", color="C0", label="untrained")
    jaccard.plot(names, [a["shuffled"]["jaccard"] for a in r["layers"]], "^-", color="0.5",
                 label="chance, measured loads")
    jaccard.axhline(r["uniform"]["jaccard"], color="black", ls="--", lw=1, label="chance, uniform")
    jaccard.set(xlabel="layer of the loop", ylabel="mean Jaccard index", ylim=(0, 1),
                title="agreement of passes (1: the same experts)")
    rows = [load for layer in r["load"] for load in layer]
    image = heat.imshow([[x * r["n_expert"] for x in row] for row in rows], aspect="auto", cmap="viridis", vmin=0)
    heat.set(xlabel="expert", title="load, in units of an even share")
    heat.set_yticks(range(len(rows)), [f"layer {i + 1}, pass {p + 1}" for i in range(len(r["load"]))
                                       for p in range(r["n_loop"])], fontsize=8)
    fig.colorbar(image)
    for axis in (bars, jaccard):
        axis.legend(fontsize=8)
    save(fig, path)


# --- early_exit.py ---
def plot_frontier(results, path):
    """results of early_exit.measure_run, one for each run."""
    fig, (conv, *axes) = pyplot().subplots(1, 3, figsize=(16, 5), layout="constrained")
    many = len(results) > 1
    for i, r in enumerate(results):
        colour = f"C{i}" if many else "C0"
        x, jsds = [v["layer"] for v in r["layers"]], [v["jsd"] for v in r["layers"]]
        conv.plot(x, jsds, color=colour, label=f"{r['run']}: mean JSD" if many else "mean JSD to the final readout")
        marks = [v for v in r["layers"] if v["boundary"]]
        conv.plot([v["layer"] for v in marks], [v["jsd"] for v in marks], "o", color=colour,
                  label=None if many else "exit point")
        if not many:
            conv.plot(x, [v["below_half"] for v in r["layers"]], color="C1", label="share of tokens below 0.5")
        for ax, way in zip(axes, ("layers", "charged")):
            points = [p for p in r["frontier"][way][r["criterion"]] if p["tau"] is not None]
            sx = [100 * p["saved"][way] for p in points]
            error = [[p["lost"]["nats"] - p["lost"]["low"] for p in points],
                     [p["lost"]["high"] - p["lost"]["nats"] for p in points]]
            base = r["fixed"][-1]["nats"] if many else 0
            ax.errorbar(sx, [base + p["lost"]["nats"] for p in points], error, fmt="o-", color=colour, capsize=3,
                        label=f"{r['run']}: exits" if many else f"exits by {r['criterion']}, keys of the full depth")
            ax.plot([100 * v["saved"][way] for v in r["fixed"]], [v["nats"] - r["fixed"][-1]["nats"] + base
                    for v in r["fixed"]], "s--", color=colour if many else "0.4", ms=4, lw=1,
                    label=f"{r['run']}: fixed depth" if many else "fixed smaller depth")
            if not many:
                ax.plot(sx, [p["random"]["nats"] for p in points], "^:", color="C3", label="random exits")
                ax.plot(100 * r["oracle"]["saved"][way], r["oracle"]["lost"]["nats"], "*", color="C4", ms=13,
                        label="oracle")
                if way == "charged":
                    for (kv, found), style in zip(r["policies"].items(), ("v-", "D-")):
                        ax.plot([100 * p["saved"][way] for p in found], [p["lost"]["nats"] for p in found], style,
                                color={"copy": "C2", "reuse": "C5"}[kv], label=f"exits, {kv} (as generated)")
    conv.set(xlabel="effective layer", ylabel="Jensen-Shannon divergence, 0 to 1", ylim=(0, 1),
             title="predictions settle with depth")
    conv.axhline(0.5, color="0.7", lw=1, ls=":")
    for ax, title in zip(axes, ("layers only, as the paper counts", "every test and readout charged")):
        top = max(p["lost"]["high"] for r in results for w in r["frontier"].values() for p in w[r["criterion"]]
                  if p["tau"] is not None)
        low = min(r["fixed"][-1]["nats"] for r in results) if many else 0
        high = max(r["fixed"][-1]["nats"] for r in results) if many else 0
        ax.set(xlabel="FLOPs saved, % of the full model", title=title, xlim=(-20, 80),
               ylabel="nats per token" if many else "nats per token lost against full depth",
               ylim=(low - 0.02 - 0.05 * top, high + 1.15 * top + 0.02))
        ax.axvline(0, color="0.8", lw=1)
    for ax in (conv, *axes):
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8)
    fig.suptitle(finding(results))
    save(fig, path)


def finding(results):
    """The title: what 10% saved costs, by layers and with tests charged; of a single run beside its baselines."""
    lines = []
    for way, text in (("layers", "counting layers only"), ("charged", "with every test charged")):
        costs_of = []
        for r in results:
            p = next(p for p in r["frontier"][way][r["criterion"]] if p["target"] == 0.1)
            if p["tau"] is None:
                costs_of.append(f"{r['run']} out of reach")
            elif len(results) > 1:
                costs_of.append(f"{r['run']} {p['lost']['nats']:+.3f}")
            else:
                costs_of.append(f"exits {p['lost']['nats']:+.3f}, random exits {p['random']['nats']:+.3f}, "
                                f"fixed smaller depth {p['fixed']['nats']:+.3f}")
        lines.append(textwrap.fill(f"{text}: " + ", ".join(costs_of), 170))
    name = results[0]["run"] + ", " if len(results) == 1 else ""
    return "\n".join([f"{name}nats lost by {results[0]['criterion']} exits at 10% saved", *lines])


# --- readout_study.py ---
def trajectory(folder):
    """(steps, mean norm of H_K) over training, from metrics.csv."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if r["val_loss"]]
    last = max((k for k in rows[0] if k.startswith("val_norm_")), key=lambda k: int(k.rpartition("_")[2]))
    return [int(r["step"]) for r in rows], [float(r[last]) for r in rows]


def plot_readout(found, folders, title, path):
    """found {(cell, variant): [readout_study.diagnose of each seed]}, folders likewise."""
    fig, axes = pyplot().subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    for i, ((cell, variant), runs) in enumerate(found.items()):
        K = runs[0]["n_loop"]
        style = dict(color=f"C{i}", ls="--" if cell.startswith("terminal") else "-",
                     label="-".join(filter(None, (cell, variant))))
        ks = range(1, len(runs[0]["ce"]) + 1)
        axes[0, 0].plot(ks, np.mean([[n["mean"] for n in r["norm"]] for r in runs], axis=0), "o", ms=3, **style)
        curves = [trajectory(folder) for folder in folders[cell, variant]]
        axes[0, 1].plot(curves[0][0], np.mean([c[1] for c in curves], axis=0), **style)
        ppl = np.exp(np.mean([r["ce"] for r in runs], axis=0))
        axes[1, 0].plot(ks, ppl, "o", ms=3, **style)
        speed = np.mean([r["tok_per_s"] for r in runs], axis=0)[:K]
        axes[1, 1].plot(speed / speed[-1], ppl[:K], "o", ms=3, **style)
    axes[0, 0].axvline(K, color="0.7", lw=1)
    axes[1, 0].axvline(K, color="0.7", lw=1)
    axes[0, 0].set(yscale="log", xlabel=f"pass (trained with {K})", ylabel="mean norm of the state",
                   title="how the state grows over passes")
    axes[0, 1].set(yscale="log", xlabel="training step", ylabel=f"mean norm of H_{K}", title="and over training")
    low = min(np.exp(r["ce"][K - 1]) for runs in found.values() for r in runs)
    axes[1, 0].set(xlabel="passes at inference", ylabel="validation perplexity", ylim=(0.95 * low, 3 * low),
                   title="what a pass less or more is worth")
    axes[1, 1].set(xlabel=f"tokens per second, in units of K = {K}; K = 1 on the right", ylabel="validation perplexity",
                   ylim=(0.95 * low, 3 * low), title="perplexity against speed")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    for axis in axes[0]:                         # 20, 30, .. rather than powers of ten
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(lambda y, _: f"{y:g}" if f"{y:.0e}"[0] in "1235" else "")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    fig.suptitle(title)
    save(fig, path)


# --- downstream.py ---
def plot_tasks(columns, axes, unit, path):
    """Axis scores against validation loss and, where a checkpoint ran at several depths, against passes."""
    text = {"loss": "nats per token", "bpb": "bits per byte"}[unit]
    runs = [[c for c in columns if c["ckpt"] == ckpt] for ckpt in dict.fromkeys(c["ckpt"] for c in columns)]
    deep = [run for run in runs if len(run) > 1]
    shown = [axis for axis in axes if all(axis in c["axes"] for c in columns)]
    fig, axs = pyplot().subplots(1, 2 if deep else 1, figsize=(15 if deep else 8, 5.6), layout="constrained",
                                 squeeze=False)

    def draw(ax, cells, x, **style):
        for i, axis in enumerate(shown):
            scores = [c["axes"][axis] for c in cells]
            ax.errorbar([c[x] for c in cells], [s["score"] for s in scores], [s["score_se"] for s in scores],
                        color=f"C{i}", marker="o", ms=4, lw=1, capsize=2, label=axis, **style)
    left, order = axs[0, 0], sorted(columns, key=lambda c: c[f"val_{unit}"])
    draw(left, order, f"val_{unit}")
    for c in order:
        left.annotate(c["label"], (c[f"val_{unit}"], 0.99), xycoords=("data", "axes fraction"), rotation=90, va="top",
                      xytext=(2, 0), textcoords="offset points", color="0.4", fontsize=7)
    left.margins(y=0.2)                          # room for these labels
    ranked = sum(all(a["axes"][axis]["score"] < b["axes"][axis]["score"] for a, b in zip(order, order[1:]))
                 for axis in shown)
    left.set(xlabel=f"validation loss ({text})", ylabel=f"loss on the right continuation ({text})",
             title=f"{ranked} of {len(shown)} axes rank them as validation loss does" if len(runs) > 1 else
             f"{columns[0]['name']}: continuation loss by axis")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    for run, style in zip(deep, ("-", "--", ":", "-.") * len(deep)):
        draw(axs[0, 1], run, "n_loop", ls=style)
        axs[0, 1].plot([c["n_loop"] for c in run], [c[f"val_{unit}"] for c in run], style, color="black", lw=1.5,
                       label=f"{run[0]['name']}: validation text")
        axs[0, 1].axvline(run[0]["trained_n_loop"], color="0.7", lw=6, alpha=0.4, zorder=0)
    if deep:
        mean = [[math.fsum(c["axes"][axis]["score"] for axis in shown) / len(shown) for c in run] for run in deep]
        axs[0, 1].set_xscale("log", base=2)
        axs[0, 1].set_xticks(*zip(*((r, str(r)) for r in sorted({c["n_loop"] for run in deep for c in run}))))
        axs[0, 1].set(xlabel="passes at evaluation (grey: as trained)", ylabel=left.get_ylabel(),
                      title="test-time compute, mean over axes: "
                            + "; ".join(", ".join(f"{x:.2f}" for x in run) for run in mean))
        axs[0, 1].legend(handles=[h for h in axs[0, 1].lines if "validation" in str(h.get_label())], fontsize=8)
    for ax in axs[0]:
        ax.grid(alpha=0.25)
    save(fig, path)
