"""What all pictures share, and the one of a training run. The others are in the files beside this one: plots_runs.py,
plots_model.py and plots_hops.py. The scripts compute the numbers, and their docstrings say what they are."""
from pathlib import Path

import numpy as np

STYLE = {"backend": "Agg", "figure.constrained_layout.use": True, "savefig.dpi": 110, "legend.fontsize": 8,
         "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "lines.markersize": 4, "errorbar.capsize": 2,
         "axes.formatter.min_exponent": 4}       # a log axis says 20 rather than 2 x 10^1
GREY = {"color": "0.6", "lw": 1}                 # a thin line, mostly one that marks a place


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
