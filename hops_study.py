"""
What a pass is for, on a task whose depth is known (data/hops.py). How many hops does a model answer after 1, 2, ..
passes, also more passes and hops than it was trained with? What does its state name in between? And what does it cost
to learn p hops, looped or plain?

    python train.py --preset=hops --seed=1 --out_dir=out/hops/looped-s1                           # 3 min on a core
    python train.py --preset=hops --n_loop=1 --n_recur=8 --seed=1 --out_dir=out/hops/plain-s1
    python hops_study.py --ckpt out/hops/*       # tables, and pictures in out/hops-study

Runs that differ in nothing but their seed are one group: means over seeds, with 95% t intervals.

Shapes: B examples, T tokens, Q queries, N symbols, K passes, V vocabulary.
"""
import argparse
import json
from pathlib import Path

import numpy as np
import torch

from data.hops import MAX_HOPS, count_right, draw_examples, hops_of, inputs_and_targets
from lib.checkpoint import load_on_task, run_folder
from lib.console import misused, progress, require_at_least, stop
from lib.files import check_writable, write_atomic, write_csv
from lib.flags import FREE
from lib.machine import pick_device
from lib.plots import read_metrics
from lib.plots_hops import plot_hops, plot_learning, plot_staircase
from lib.stats import mean_interval

LEARNED = 0.95                                   # share of right answers from which a number of hops counts as learned


# --- one run ---
@torch.no_grad()
def read_passes(model, x, n_passes, batch_size=256):
    """Logits (K, B, T, V) of x (B, T) after 1 .. K = n_passes passes: those of the model run with as many."""
    parts = []
    for idx in x.to(model.table.device).split(batch_size):
        context = model.context(idx, n_passes, None)
        states = model.loop_states(idx, context, n_passes)
        logits = [model.logits(h, context, k) for k, h in enumerate(states, 1)]
        parts.append(torch.stack(logits).float().cpu())
    return torch.cat(parts, dim=1)


def accuracies(model, meta, n_passes, hops, n, seed):
    """Share of right answers (K, P) after each pass, at hops 1 .. P, over n examples of test maps."""
    examples = draw_examples(np.random.default_rng((seed, hops)), n, meta, "test", range(1, hops + 1))
    x, y = inputs_and_targets(examples, meta)
    table = []
    for logits in read_passes(model, x, n_passes):
        right, asked = count_right(logits, x, y, meta)[:, :hops]
        table.append((right / asked).tolist())
    return table


def chains(x, meta):
    """What each query of x (B, T) asks: its hops p (B, Q), and the symbols on its way (J, B, Q), f^0(s) = s to
    f^J-1(s), J = MAX_HOPS + 1. The map is read out of the N pairs."""
    N = meta["symbols"]
    pairs = x[:, :N] - N
    maps = torch.zeros_like(pairs).scatter_(1, pairs // N, pairs % N)              # (B, N)
    p = hops_of(x[:, N::3], N)
    here = x[:, N + 1::3]
    way = [here]
    for _ in range(MAX_HOPS):
        here = maps.gather(1, here)
        way.append(here)
    return p, torch.stack(way)


def named_steps(model, meta, n_passes, n, seed):
    """Share (K, H + 1) of the queries for H hops, the most trained with, whose readout after pass k names f^j(s), j = 0
    .. H. Only queries whose way visits H + 1 different symbols, so that a name means one step."""
    H = meta["hops"]
    examples = draw_examples(np.random.default_rng((seed, H)), n, meta, "test", range(1, H + 1))
    x, y = inputs_and_targets(examples, meta)
    p, way = chains(x, meta)
    way = way[:H + 1]
    returned = (way[1:] == way[0]).any(0)        # a permutation comes back to s before it meets any other symbol twice
    asked = (p == H) & ~returned                                                   # (B, Q)
    if not asked.any():
        return None
    named = read_passes(model, x, n_passes)[:, :, meta["symbols"] + 1::3].argmax(-1)       # (K, B, Q)
    agree = named[:, None] == way                                                  # (K, H + 1, B, Q)
    return agree[:, :, asked].float().mean(-1).tolist()


def learned_at(folder, p):
    """Training FLOPs after which p hops were first learned, None if they never were."""
    _, rows = read_metrics(folder)
    reached = rows["flops"][rows[f"val_acc_{p}"] >= LEARNED]
    return float(reached[0]) if len(reached) else None


def study_run(ckpt, n_passes, beyond, n, device, seed=0):
    """All numbers of one run, as plain Python. beyond: hops to ask for in the test of extrapolation."""
    model, state, _, meta = load_on_task(ckpt, device)
    cfg, H = model.cfg, meta["hops"]
    n_passes = max(n_passes, cfg.n_loop)         # those it was trained with are always measured
    if cfg.n_loop == 1:                          # a plain model has never seen what a second pass makes of its state
        n_passes = 1
    accuracy = accuracies(model, meta, n_passes, H, n, seed)
    if beyond > H:                               # asked among more hops, but only what is new is kept
        for row, wider in zip(accuracy, accuracies(model, meta, n_passes, beyond, n, seed)):
            row.extend(wider[H:])
    counts = model.param_counts(cfg)
    run = run_folder(ckpt)
    flags = {name: value for name, value in state["args"].items() if name == "data" or name not in FREE}
    return {"run": str(run), "flags": flags, "hops": H, "n_loop": cfg.n_loop,
            "in_blocks": counts["once"] + counts["recurrent"] + counts["injection"], "accuracy": accuracy,
            "named": named_steps(model, meta, n_passes, n, seed),
            "learned_at": [learned_at(run, p) for p in range(1, H + 1)], "asked": most_asked(run)}


def most_asked(folder):
    """The most hops that training asked for: where a curriculum was stuck, fewer than the task has."""
    table, _ = read_metrics(folder)
    return int(table["hops"].max())


# --- groups of runs ---
WORDS = {"raise_passes": "growing", "sample_loops": "sampled depth"}               # flags in the name of a group


def group_runs(runs):
    """{name: [runs]}: those that differ in their seed only. The name says the shape, and what else differs between the
    groups."""
    differing = []
    for flag in runs[0]["flags"]:
        values = {str(run["flags"].get(flag)) for run in runs}
        if len(values) > 1 and flag not in ("seed", "n_prelude", "n_loop", "n_recur", "n_coda"):
            differing.append(flag)
    groups = {}
    for run in runs:
        flags = run["flags"]
        parts = [shape_name(**flags)]
        for flag in differing:
            value = flags.get(flag)
            if flag not in WORDS:
                parts.append(f"{flag} {value}")
            elif value and flags["n_loop"] > 1:            # of the passes of a loop
                parts.append(WORDS[flag])
        groups.setdefault(", ".join(parts), []).append(run)
    return groups


def shape_name(n_prelude, n_loop, n_recur, n_coda, **_):
    """A shape in words."""
    around = n_prelude + n_coda
    if n_loop == 1:
        return f"{around + n_recur} layers, no loop"
    name = f"{n_loop} passes of {n_recur} layers"
    return f"{name}, {around} around" if around else name


def flops_to_learn(runs, p):
    """(geometric mean of the training FLOPs, how many learned p hops) of some runs; the mean is over those only."""
    flops = [run["learned_at"][p - 1] for run in runs if len(run["learned_at"]) >= p]
    reached = [value for value in flops if value is not None]
    return float(np.exp(np.mean(np.log(reached)))) if reached else None, len(reached)


def print_group(name, runs):
    first = runs[0]
    accuracy = np.array([run["accuracy"] for run in runs])                         # (seeds, K, P)
    n_seeds, _, P = accuracy.shape
    print(f"\n{name}: {n_seeds} seeds, {first['in_blocks'] / 1e3:.0f}k parameters in blocks")
    print(f"right after pass, asked for 1 to {P} hops; trained with 1 to {first['hops']}")
    print(" " * 16 + "".join(f"{p:>5d} hops" for p in range(1, P + 1)))
    for k, row in enumerate(accuracy.mean(0), 1):
        mark = " trained" if k == first["n_loop"] else ""
        print(f"{k:16d}" + "".join(f"{share:10.3f}" for share in row) + mark)
    for p in range(1, first["hops"] + 1):
        flops, reached = flops_to_learn(runs, p)
        mean, low, high = mean_interval(accuracy[:, first["n_loop"] - 1, p - 1])
        interval = f" [{low:.3f}, {high:.3f}]" if n_seeds > 1 else ""
        cost = f" after {flops:.2e} FLOPs" if reached else ""
        print(f"  {p} hops: {mean:.3f}{interval} as trained; {reached} of {n_seeds} seeds learned it{cost}")
    named = [run["named"] for run in runs if run["named"]]
    if named and first["n_loop"] > 1:
        print(f"asked for {first['hops']} hops, the readout after a pass names the symbol 0, 1, .. steps on the way")
        for k, row in enumerate(np.mean(named, axis=0), 1):
            print(f"{k:16d}" + "".join(f"{share:10.3f}" for share in row))


def accuracy_rows(groups):
    """One row for each run, pass and number of hops."""
    rows = []
    for name, runs in groups.items():
        for run in runs:
            where = {"group": name, "run": run["run"], "seed": run["flags"]["seed"]}
            for k, shares in enumerate(run["accuracy"], 1):
                for p, share in enumerate(shares, 1):
                    rows.append({**where, "pass": k, "hops": p, "accuracy": round(share, 4)})
    return rows


def learned_rows(groups):
    """One row for each run: the most hops that training asked for, the FLOPs after which 1, 2, .. hops were learned
    (empty: never), and the share of readouts that name step k after pass k."""
    rows = []
    for name, runs in groups.items():
        for run in runs:
            row = {"group": name, "run": run["run"], "seed": run["flags"]["seed"], "in_blocks": run["in_blocks"],
                   "asked": run["asked"]}
            for p, flops in enumerate(run["learned_at"], 1):
                row[f"learned_{p}"] = f"{flops:.3g}" if flops else ""
            for k, shares in enumerate(run["named"] or [], 1):
                if k < len(shares):
                    row[f"names_{k}"] = round(shares[k], 4)
            rows.append(row)
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", nargs="+", required=True, help="run folders of train.py --data=hops")
    add("--passes", type=int, default=16, help="passes at evaluation (default: 16)")
    add("--hops", type=int, default=8, help="hops to ask for, also more than trained with (default: 8)")
    add("--examples", type=int, default=1024, help="test examples of each measurement (default: 1024)")
    add("--device", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--out_dir", default="out/hops-study", help="folder of pictures and tables (default: out/hops-study)")
    args = parser.parse_args(argv)
    require_at_least(args, passes=1, hops=1, examples=1, threads=0)
    if args.hops > MAX_HOPS:
        stop(f"--hops={args.hops}: the vocabulary has tokens for {MAX_HOPS} hops at most")
    if args.threads:
        torch.set_num_threads(args.threads)
    out = Path(args.out_dir)
    check_writable("--out_dir", out)
    runs = []
    for i, ckpt in enumerate(args.ckpt, 1):
        progress(f"run {i} of {len(args.ckpt)}", False)
        runs.append(study_run(ckpt, args.passes, args.hops, args.examples, pick_device(args.device)))
    groups = group_runs(runs)
    for name, same in groups.items():
        print_group(name, same)
    folders = {str(run_folder(ckpt)): run_folder(ckpt) for ckpt in args.ckpt}
    plot_hops(groups, out / "hops.png")
    plot_learning(groups, folders, out / "learning.png")
    for same in groups.values():
        if all(run["named"] for run in same) and same[0]["n_loop"] > 1:
            plot_staircase(same, out / "staircase.png")    # of the first looped group
            break
    write_csv(out / "hops.csv", accuracy_rows(groups))
    write_csv(out / "learned.csv", learned_rows(groups))
    write_atomic(out / "hops.json", json.dumps(groups, indent=1).encode())
    print(f"wrote pictures and tables to {out}")


if __name__ == "__main__":
    main()
