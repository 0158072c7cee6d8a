"""
What is each pass worth? The validation loss of a run after 1, 2, .. passes, beside that with the passes of its
training. A loop that loses nothing with one pass has learned to be a plain model, whatever else it saves.

    python passes.py --ckpt out/laptop                       # half a minute; draws out/passes/passes.png
    python passes.py --ckpt out/*/C9.6e+12-d64-r4-s42        # a run of each sweep

The model runs with fewer passes than it was trained with. Intervals, 95%, are over windows of the validation text: the
windows are the same for every number of passes, so that what is hard about a window cancels. They do not say what another seed would give.
"""
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from data.load import even_windows
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import misused, progress, require_at_least, stop
from lib.files import check_writable, write_csv
from lib.machine import pick_device
from lib.plots_model import plot_passes
from lib.stats import mean_interval


@torch.no_grad()
def losses_of_windows(model, x, y, n_loop, batch_size):
    """Nats per token (n,) of windows x with targets y, (n, T) each, after n_loop passes. A target of -100 is ignored."""
    nats = []
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size)):
        logits, _ = model(inputs, targets, n_loop=n_loop)                          # (B, T, V)
        logits = logits.transpose(1, 2).float()
        per_token = F.cross_entropy(logits, targets, reduction="none")             # (B, T)
        nats.append(per_token.sum(1) / (targets >= 0).sum(1))
    return torch.cat(nats).double()


def measure_run(name, model, x, y, batch_size):
    """A row for each number of passes, from 1 to twice those of the training: the loss, and what is lost to the loss
    with all of them, with its interval. x, y: windows (n, T)."""
    trained = model.cfg.n_loop
    nats = {}
    for k in range(1, 2 * trained + 1):
        progress(f"{name}: {k} of {2 * trained} passes", False)
        nats[k] = losses_of_windows(model, x, y, k, batch_size)
    rows = []
    for k, losses in nats.items():
        lost, low, high = mean_interval((losses - nats[trained]).tolist())
        rows.append({"run": name, "trained": trained, "passes": k, "nats": losses.mean().item(), "lost": lost,
                     "low": low, "high": high})
    return rows


def name_runs(folders):
    """{name: folder}: what a folder is called; where several are called alike, what the one around it is called."""
    by_name = {folder.name: folder for folder in folders}
    if len(by_name) < len(folders):
        by_name = {folder.resolve().parent.name: folder for folder in folders}
    if len(by_name) < len(folders):
        stop("--ckpt: two of the runs are called alike, and so are the folders around them: rename one")
    return by_name


def print_run(rows):
    trained = rows[0]["trained"]
    print(f"{rows[0]['run']}, trained with {trained} passes\npasses     nats   more than after {trained}")
    for row in rows:
        print("{passes:6d} {nats:8.3f}   {lost:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", nargs="+", required=True, help="run folders of train.py")
    add("--trick", default="", help="file of their trick, if it is outside tricks/")
    add("--tokens", type=int, default=65536, help="validation tokens (default: 65536)")
    add("--batch_size", type=int, default=8, help="windows at a time (default: 8)")
    add("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--out_dir", default="out/passes", help="folder of passes.png and passes.csv (default: out/passes)")
    args = parser.parse_args(argv)
    require_at_least(args, tokens=1, batch_size=1, threads=0)
    if args.threads:
        torch.set_num_threads(args.threads)
    out, device = Path(args.out_dir), pick_device(args.device)
    check_writable("--out_dir", out)
    runs = {}
    for name, run in name_runs([run_folder(ckpt) for ckpt in args.ckpt]).items():
        model, state = load_model(run, device, args.trick)
        if model.cfg.n_loop == 1:
            stop(f"--ckpt {run}: it has no loop, so that there are no passes to leave out")
        folder, meta = data_of(state)
        x, y = even_windows(folder, meta, "val", args.tokens, model.cfg.block_size)
        runs[name] = measure_run(name, model, x.to(device), y.to(device), args.batch_size)
        print_run(runs[name])
    plot_passes(runs, out / "passes.png")
    write_csv(out / "passes.csv", sum(runs.values(), []))
    print(f"wrote passes.png and passes.csv to {out}")


if __name__ == "__main__":
    main()
