"""Pictures of the hops task: what each pass knows, how it is learned, exits."""
import numpy as np

from lib.plots import GREY, finish, hops_text, pyplot, read_metrics, save, values


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
