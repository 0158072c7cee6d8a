"""
The readout blind spot (arXiv 2606.24898): after a norm, h and 10 h give the same loss, so training cannot see how long
a state is, but a pre-norm loop changes it in every pass. Does the length drift? Does a loss on every pass stop that?

    python readout_study.py                      # 8 cells x 3 seeds, then tables and a picture in out/readout
    python readout_study.py --quick              # a few steps of the same, 2 seeds: 3 min
    python readout_study.py --sweep=lambda       # what the paper leaves open: lambda | schedule | init | long
    python readout_study.py --plan               # the train.py commands instead, a line each
    python readout_study.py --plan --preset=readout-44m      # the paper's scale, for a GPU
    python readout_study.py --ckpt out/x         # the diagnostics of one run; --lemmas: the two lemmas, with residuals

The cells: loss terminal | perloop (cross-entropy after every pass) x readout norm | raw; and four controls, a penalty
on the norm with either loss, the norm at the last pass only (final), a norm between passes (loopnorm). A study that was
stopped resumes when it is run again. Everything is measured in fp32 on fixed validation windows.

Shapes: B windows, T positions, D width, K passes, N = B T tokens; s = |h| / sqrt(D) the rms of a state h, u = h / s.
"""
import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.load import even_windows, open_data
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import data_of, load_model
from lib.console import misused, progress, require_at_least, stop
from lib.files import check_writable, write_csv
from lib.flags import PRESETS, parse
from lib.machine import default_jobs, pick_device, read_clock
from lib.plots_model import VARIANTS, plot_readout
from lib.stats import mean_interval
from model import Config, LoopedLM
from sweep import find_unfinished, run_all

CELLS = {
    "terminal-norm": "--loss=terminal --readout=norm",
    "terminal-raw": "--loss=terminal --readout=raw",
    "perloop-norm": "--loss=per_loop --readout=norm",
    "perloop-raw": "--loss=per_loop --readout=raw",
    "perloop-final": "--loss=per_loop --readout=final",
    "terminal-penalty": "--loss=terminal --readout=norm --norm_penalty=0.01",
    "perloop-penalty": "--loss=per_loop --readout=norm --norm_penalty=0.01",
    "perloop-loopnorm": "--loss=per_loop --readout=norm --loop_norm=true",
}
THREE = ["terminal-norm", "perloop-norm", "perloop-raw"]
SWEEPS = {  # name of a variant: (cells, more flags); "" is the study's own, whose runs are used again
    "lambda": {"": (["perloop-norm", "perloop-penalty"], ""),
               **{f"lambda{v}": (["perloop-penalty"], f"--norm_penalty={v}") for v in ("0.0001", "0.001", "0.1")}},
    "schedule": {"": (THREE, ""), "cosine": (THREE, "--schedule=cosine --warmup_steps=20 --final_lr=0")},
    "init": {"": (THREE, ""), "tied": (THREE, "--tied=true")},
    "long": {"long": (THREE, "--n_embd=32 --n_recur=2 --block_size=128 --batch_size=4 --max_steps=20000 "
                             "--eval_interval=1000")},
}
# 4 passes of 4 layers, trained as the paper does (AdamW, constant rate, no warm-up) on the pocket corpus
LAPTOP = ("--preset=pocket --vocab_size=1024 --n_embd=64 --head_dim=32 --n_prelude=0 --n_recur=4 --n_coda=0 --n_loop=4 "
          "--inject=none --loop_norm=false --optimizer=adamw --embed_lr=1 --learning_rate=1e-3 --weight_decay=0.01 "
          "--beta2=0.999 --schedule=constant --warmup_steps=0 --max_steps=800 --eval_interval=100 --eval_tokens=32768 "
          "--threads=1")
BEYOND = 2   # states are followed to this many times the trained depth
TAIL = 0.01  # the share of states, the longest, that is called the tail


def rms(h):
    return h.square().mean(-1, keepdim=True).sqrt()                                # (..., 1)


def split_update(b, u):
    """An update b (N, D) = a u + b_perp: to first order in 1/s, a = <b, u> / D (N, 1) is what the rms gains, and
    b_perp / s (N, D) is how far the direction u moves."""
    a = (b * u).mean(-1, keepdim=True)
    return a, b - a * u


# --- lemmas: visibility and activity ---
def readouts(eps):
    """Scale-invariant readouts and, to compare, the raw one: functions of states (N, D)."""
    def rms_norm(h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)

    def layer_norm(h):
        return rms_norm(h - h.mean(-1, keepdim=True))
    return {"RMSNorm": rms_norm, "LayerNorm": layer_norm, "raw": lambda h: h}


def visibility(readout, h, weight, targets):
    """|<g, h>| / (|g| |h|) (N,), g the gradient of the cross-entropy of weight (V, D) after the readout at states h
    (N, D): 0 where the loss is the same for h and c h, so that it cannot see the length of h."""
    h = h.detach().requires_grad_()
    loss = F.cross_entropy(readout(h) @ weight.T, targets, reduction="sum")
    g, = torch.autograd.grad(loss, h)
    h = h.detach()
    return (g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1))


def activity(update, u, scales):
    """A pre-norm residual stack is F(h) = h + update(h) with update(s u) independent of s. What first order in 1/s
    leaves of it, the largest over unit-rms directions u (N, D): [(s, of the new rms, of the new direction)]."""
    rows = []
    for s in scales:
        b = update(s * u)
        a, b_perp = split_update(b, u)
        after = s * u + b
        length = (rms(after) - (s + a)).abs()
        direction = rms(after / rms(after) - (u + b_perp / s))
        rows.append((s, length.max().item(), direction.max().item()))
    return rows


def check_lemmas():
    """Both lemmas on random states and a random pre-norm block, in float64; prints the residuals."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 32, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(100, 32, generator=generator, dtype=torch.float64)
    targets = torch.arange(64)
    print("visibility, largest |cos(gradient, state)| over 64 states of 32 channels, float64 (chance: about 0.14)")
    for eps in (0.0, 1e-6):
        largest = [f"{name} {visibility(f, h, weight, targets).max():.1e}" for name, f in readouts(eps).items()]
        print(f"  eps {eps:g}: " + ", ".join(largest))
    torch.manual_seed(0)
    model = LoopedLM(Config(vocab_size=64, n_embd=32, n_head=1, n_prelude=0, n_coda=0, inject="none")).double()
    model.table = model.table.double()           # or attention would round to fp32
    context = model.context(torch.zeros(1, 64, dtype=torch.long), 1, None)

    def update(x):
        return model.run(model.recur, x[None], context, 0)[0] - x
    print("activity of one pre-norm block: what first order in 1/s leaves of the new rms and of the new direction")
    for s, length, direction in activity(update, h / rms(h), (1e1, 1e2, 1e3, 1e4)):
        print(f"  s {s:8g}: {length:.1e}, {direction:.1e}")


# --- diagnostics of one model ---
def passes(model, idx, n_loop, clamp=False):
    """[H_1 .. H_n_loop] (B, T, D), and the context that reads them out. clamp: after every later pass each token is
    scaled back to its rms after the first, before it is read or passed on (the paper's intervention at inference)."""
    context = model.context(idx, n_loop, None)
    e = model.encode(idx, context)
    h, states = model.start(e), []
    for k in range(n_loop):
        h = model.one_pass(e, h, k, context)
        if clamp and k > 0:
            factor = states[0].norm(dim=-1) / model.read(h).norm(dim=-1)           # (B, T)
            h = h * factor.view(*factor.shape, *[1] * (h.ndim - 2))                # a trick's state has more axes
        states.append(model.read(h))
    return states, context


def readout_loss(model, h, context, n_loop, targets, last_pass=True):
    """Mean cross-entropy in nats of a model that reads out h (B, T, D)."""
    logits = model.logits(h, context, n_loop, last_pass)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tail_index(lengths):
    """Hill's estimate from the tail of the lengths (N,): P(length > x) falls like x^-index; below 2 the variance does
    not exist, a normal tail gives large values."""
    n = max(2, int(len(lengths) * TAIL))
    tail = np.sort(lengths)[-n - 1:]
    log_ratio = np.log(tail[1:] / tail[0]).mean()
    return float(1 / np.maximum(log_ratio, 1e-12))


def describe_lengths(lengths):
    numbers = {"length_mean": float(lengths.mean())}
    for name, q in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        numbers[f"length_{name}"] = float(np.quantile(lengths, q))
    return {**numbers, "tail_index": tail_index(lengths)}


def tail_tokens(lengths, idx, tokenizer):
    """Where the tail is: its share at the first position and in the first 8 (even_first8: if spread evenly), and its
    commonest tokens as JSON, each with its share of the tail and the share of its occurrences that are in the tail."""
    n = max(1, int(len(lengths) * TAIL))
    tail = np.argsort(lengths)[-n:]
    position = tail % idx.size(1)
    tokens = idx.flatten().numpy()
    ids, counts = np.unique(tokens[tail], return_counts=True)
    counts_of_all = np.bincount(tokens)
    common = []
    for i in np.argsort(-counts)[:5]:
        common.append({"token": tokenizer.decode([int(ids[i])]), "share_of_tail": float(counts[i] / n),
                       "in_tail": float(counts[i] / counts_of_all[ids[i]])})
    return {"tail_first": float((position == 0).mean()), "tail_first8": float((position < 8).mean()),
            "even_first8": 8 / idx.size(1), "tail_tokens": json.dumps(common)}


def radial_share(model, states, context, targets, k):
    """How much of the gradient of pass k's own loss at its state H_k lies along the state. By both readings of the
    paper's r_k: the mean over tokens of |cos|, and one |cos| of the flattened batch; each with what a random direction
    gives; and d loss / d log(length)."""
    K = len(states)
    h = states[k].detach().requires_grad_()
    g, = torch.autograd.grad(readout_loss(model, h, context, K, targets, last_pass=k == K - 1), h)
    inner = (g * h).sum(-1)                                                        # (B, T)
    per_token = inner.abs() / (g.norm(dim=-1) * h.norm(dim=-1)).clamp(min=1e-30)
    flattened = inner.sum().abs() / (g.norm() * h.norm())
    return {"cos_per_token": per_token.mean().item(), "chance_per_token": math.sqrt(2 / (math.pi * h.size(-1))),
            "cos_flattened": flattened.item(), "chance_flattened": math.sqrt(2 / (math.pi * h.numel())),
            "dloss_dlog_length": inner.sum().item()}


def update_of_pass(before, after):
    """What a pass does to states (N, D), means over tokens: s, their rms before it; its update b = a u + b_perp, of
    which a lengthens the state and b_perp turns it; how far it turned, and the estimate b_perp / s of that."""
    s = rms(before)
    u, b = before / s, after - before
    a, b_perp = split_update(b, u)
    numbers = {"rms_before": s, "update_along": a, "update": rms(b), "update_across": rms(b_perp),
               "turned": rms(after / rms(after) - u), "turned_first_order": rms(b_perp) / s}
    return {name: value.mean().item() for name, value in numbers.items()}


def clamp_effect(model, idx, targets, free):
    """(loss with the clamp minus that without it, mean length of H_K with it, without it); free: H_K without it."""
    K = model.cfg.n_loop
    states, context = passes(model, idx, K, clamp=True)
    loss, loss_free = (readout_loss(model, h, context, K, targets).item() for h in (states[-1], free))
    length, length_free = (h.norm(dim=-1).mean().item() for h in (states[-1], free))
    return loss - loss_free, length, length_free


def throughput(model, idx, n_loop):
    """Tokens per second of a forward pass with one readout, the best of three."""
    best = math.inf
    for _ in range(3):
        start = read_clock(idx.device)
        states, context = passes(model, idx, n_loop)
        model.logits(states[-1], context, n_loop)
        best = min(best, read_clock(idx.device) - start)
    return idx.numel() / best


def diagnose(ckpt, n_tokens, device="cpu", trick=""):
    """Everything the study says of one run, a flat row for each pass: loss of its readout, length of its state, its own
    gradient (trained passes only) and update (not of the first). Clamp and tail are of the last state, H_K."""
    model, state = load_model(ckpt, device, trick)
    K, T = model.cfg.n_loop, model.cfg.block_size
    followed = BEYOND * K if K > 1 else 1        # a model of one pass has never seen what a second makes of its state
    folder, meta = data_of(state)
    tokenizer = load_tokenizer(folder)
    x, y = even_windows(folder, meta, "val", max(n_tokens, T), T)
    asked = y[y >= 0]                            # of the task hops only answers count
    n_bytes = int(token_bytes(tokenizer)[asked.numpy()].sum())
    batches = list(zip(x.to(device).split(8), y.to(device).split(8)))
    # follow the state through every batch
    ce, lengths, updates, clamps = [], [], [], []
    with torch.no_grad():
        speed = [throughput(model, batches[0][0], k) for k in range(1, followed + 1)]
        for idx, targets in batches:
            states, context = passes(model, idx, followed)
            ce.append([readout_loss(model, h, context, k, targets).item() for k, h in enumerate(states, 1)])
            clamps.append(clamp_effect(model, idx, targets, states[K - 1]))
            states = [h.flatten(0, 1).float() for h in states]                     # (N, D)
            lengths.append([h.norm(dim=-1).cpu().numpy() for h in states])
            updates.append([update_of_pass(*pair) for pair in zip(states, states[1:])])
        states, context = passes(model, batches[0][0], K)
    # put the batches together: means, and all lengths of a pass
    sizes = [len(idx) for idx, _ in batches]
    ce = np.average(ce, axis=0, weights=sizes).tolist()
    delta_ce, length, length_free = np.average(clamps, axis=0, weights=sizes)
    lengths = [np.concatenate(parts) for parts in zip(*lengths)]
    rows = []
    for k in range(followed):
        row = {"run": Path(ckpt).name, "seed": state["args"]["seed"], "n_loop": K, "n_embd": model.cfg.n_embd,
               "tokens": x.numel(), "pass": k + 1, "nats": ce[k], "bpb": ce[k] * asked.numel() / n_bytes / math.log(2),
               "tok_per_s": speed[k], **describe_lengths(lengths[k])}
        if k < K:
            row.update(radial_share(model, states, context, batches[0][1], k))
        if k:
            parts = [batch[k - 1] for batch in updates]
            row.update({name: float(np.mean([u[name] for u in parts])) for name in parts[0]})
        if k == K - 1:
            row.update(clamp_nats=float(delta_ce), clamp_ratio=float(length / length_free))
            row.update(tail_tokens(lengths[k], x, tokenizer))
        rows.append(row)
    return rows


# --- the runs ---
def label(cell, variant):
    return f"{cell}-{variant}" if variant else cell


def plan_runs(args):
    """{(cell, variant, seed): (folder, flags of train.py)}."""
    seeds = args.seeds or ([42, 101] if args.quick else [42, 101, 202])
    base = f"--preset={args.preset}" if args.preset else LAPTOP
    if args.quick:
        base += " --n_embd=32 --max_steps=60 --eval_interval=20"
    variants = SWEEPS[args.sweep] if args.sweep else {"": (list(CELLS), "")}
    runs = {}
    for variant, (cells, more) in variants.items():
        for cell in args.cells or cells:
            for seed in seeds:
                folder = Path(args.out_dir, f"{label(cell, variant)}-s{seed}")
                flags = f"{base} {CELLS[cell]} {more} --seed={seed} --out_dir={folder}"
                runs[cell, variant, seed] = folder, flags.split()
    return runs


# --- statistics over seeds ---
def ratio(over, under):
    """Geometric mean of over / under, paired by seed, with its 95% t interval: (ratio, low, high)."""
    log_ratio = np.log(np.divide(over, under))
    return tuple(np.exp(mean_interval(log_ratio)))


# --- tables; cells: {(cell, variant): [rows of each seed]} ---
TABLES = {  # title: columns, each (head, name in table_numbers, format of the mean or "+-": mean +- sd)
    "Length of the last state, mean +- sd over seeds. clamp: each token kept at its length after pass 1": [
        ("mean", "length_mean", "+-"), ("after pass 1", "length_1", "+-"), ("median", "length_median", ".3g"),
        ("p99", "length_p99", ".3g"), ("max", "length_max", ".3g"), ("tail index", "tail_index", ".2g"),
        ("clamp: nats", "clamp_nats", "+.4f"), ("clamp: ratio", "clamp_ratio", ".2g")],
    "Cross-entropy in nats after K passes, trained with n_loop; gain: how much lower it is at n_loop than at 1": [
        ("1", "nats_1", "+-"), ("2", "nats_2", "+-"), ("n_loop", "nats", "+-"), ("gain", "gain", "+-"),
        ("2 n_loop", "nats_2K", "+-")],
    "Gradient at the last state: |cos| with the state, per token and flattened; g: d loss / d log length.\n"
    "Update of the last pass: a along the state, b_perp across it; turned: the direction's move, about b_perp / s": [
        ("per token", "cos_per_token", ".2g"), ("(chance)", "chance_per_token", ".2g"),
        ("flattened", "cos_flattened", ".2g"), ("(chance)", "chance_flattened", ".2g"),
        ("g", "dloss_dlog_length", ".2g"), ("a", "update_along", ".3g"), ("b_perp", "update_across", ".3g"),
        ("turned", "turned", ".3g"), ("b_perp / s", "turned_first_order", ".3g")],
}


def table_numbers(rows):
    """The numbers of one run by name: those of pass n_loop, where the name says no other. A model of one pass lacks
    those of a second."""
    first, last = rows[0], rows[rows[0]["n_loop"] - 1]
    numbers = {**last, "nats_1": first["nats"], "length_1": first["length_mean"],
               "gain": first["nats"] - last["nats"]}
    if len(rows) > 1:
        numbers.update(nats_2=rows[1]["nats"], nats_2K=rows[-1]["nats"])
    return numbers


def over_seeds(runs, name):
    return [table_numbers(rows).get(name, math.nan) for rows in runs]


def show(values, spec):
    if np.isnan(values).all():
        return "-"
    if spec != "+-":
        return f"{np.mean(values):{spec}}"
    sd = f" +- {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{sd}"


def print_table(title, columns, rows):
    print(f"\n{title}")
    indent = " " * len(next(iter(rows)))
    print(indent + "".join(f"{head:>18s}" for head, _, _ in columns))
    for name, runs in rows.items():
        numbers = [show(over_seeds(runs, key), spec) for _, key, spec in columns]
        print(name + "".join(f"{number:>18s}" for number in numbers))


def print_tail(rows):
    print("\nThe longest 1% of the states: their positions and their commonest tokens")
    for name, runs in rows.items():
        first, first8 = (np.mean(over_seeds(runs, key)) for key in ("tail_first", "tail_first8"))
        tail = table_numbers(runs[0])
        tokens = ", ".join(f"{t['token']!r} {t['share_of_tail']:.0%}" for t in json.loads(tail["tail_tokens"]))
        print(f"{name}{first:4.0%} at the first position, {first8:4.0%} in the first 8 (even: "
              f"{tail['even_first8']:.0%}); seed {tail['seed']}: {tokens}")


def print_passes(rows):
    print("\nWhat each later pass adds to the rms; nats gained from pass 1 to n_loop, 95% interval; best K by seed")
    for name, runs in rows.items():
        growth = np.mean([[row["update_along"] for row in rows_of_run[1:]] for rows_of_run in runs], axis=0)
        gain, low, high = mean_interval(over_seeds(runs, "gain"))
        best = [min(rows_of_run, key=lambda row: row["nats"])["pass"] for rows_of_run in runs]
        print(name + " ".join(f"{v:.2f}" for v in growth), f"  {gain:+.3f} [{low:+.3f}, {high:+.3f}]  ", *best)


def print_pairs(cells):
    """Differences between cells, paired by seed: all cells have the same seeds."""
    print("\nPaired by seed, 95% intervals: length of the last state (final norm) of perloop-norm over that of a cell; "
          "cross-entropy\nat n_loop minus that of the norm cell with the same loss, and of per-loop minus terminal")

    def norm_cell(loss, variant):                # of the same variant, or the study's own
        same = f"{loss}-norm", variant
        return same if same in cells else (f"{loss}-norm", "")
    for key, runs in cells.items():
        cell, variant = key
        loss, _, readout = cell.partition("-")
        other = norm_cell("perloop", variant)
        if other in cells and other != key:
            lengths = over_seeds(cells[other], "length_mean")
            quotient, low, high = ratio(lengths, over_seeds(runs, "length_mean"))
            print(f"final norm of {label(*other)} over that of {label(*key)}: {quotient:.3g} [{low:.3g}, {high:.3g}], "
                  f"{len(lengths)} seeds")
        for other in (norm_cell(loss, variant), (f"terminal-{readout}", variant)):
            if other in cells and other != key:
                differences = np.subtract(over_seeds(runs, "nats"), over_seeds(cells[other], "nats"))
                mean, low, high = mean_interval(differences)
                print(f"cross-entropy of {label(*key)} minus that of {label(*other)}: "
                      f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]")


def print_tables(cells):
    width = max(len(label(*key)) for key in cells) + 2
    rows = {f"{label(*key):{width}s}": runs for key, runs in cells.items()}
    for title, columns in TABLES.items():
        print_table(title, columns, rows)
    print_tail(rows)
    print_passes(rows)
    print_pairs(cells)


def plot_title(cells):
    """How many times as long the last state is behind the norm as raw, under the loss after every pass."""
    findings = []
    for (cell, variant), runs in cells.items():
        norm = cells.get(("perloop-norm", variant))
        if cell == "perloop-raw" and norm:
            quotient = ratio(over_seeds(norm, "length_mean"), over_seeds(runs, "length_mean"))
            where = f"with {VARIANTS.get(variant, variant)}" if variant else "as long as raw"
            findings.append("{:.2g} [{:.2g}, {:.2g}] times {}".format(*quotient, where))
    if not findings:
        return "The state and the loss after each pass"
    return f"Loss on every pass: behind a norm the state is {', '.join(findings)}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--ckpt", help="diagnose this run folder or ckpt.pt only")
    only.add_argument("--lemmas", action="store_true", help="check the two lemmas and exit")
    only.add_argument("--sweep", choices=SWEEPS, help="instead of the cells: lambda of the penalty | a falling rate | "
                      "tied N(0,1) | 20,000 steps of a smaller model")
    only.add_argument("--cells", nargs="+", choices=CELLS, help="only these cells")
    add("--trick", help="with --ckpt: file of the run's trick, if it is outside tricks/")
    add("--preset", choices=[p for p in PRESETS if p.startswith("readout")],
        help="the paper's scale instead of a laptop's")
    add("--plan", action="store_true", help="print the train.py commands and exit")
    add("--quick", action="store_true", help="D 32 and 60 steps: shows what the study does, not what it finds")
    add("--seeds", nargs="+", type=int, help="default: 42 101 202")
    add("--jobs", type=int, default=0, help="runs at a time (default: one per core; on a GPU one)")
    add("--tokens", type=int, help="validation tokens of the diagnostics (default: 20480, with --quick 4096)")
    add("--threads", type=int, default=0, help="CPU threads of the diagnostics; 0: one per core")
    add("--device", help="of the diagnostics: cuda, mps or cpu (default: the first that is there)")
    add("--out_dir", help="folder of the runs and results (default: out/readout, or out/readout-quick)")
    add("--csv", metavar="FILE", help="write the numbers here instead of OUT_DIR/readout.csv, or OUT_DIR/SWEEP.csv")
    args = parser.parse_args(argv)
    if args.tokens is None:
        args.tokens = 4096 if args.quick else 20480
    require_at_least(args, tokens=1, jobs=0, threads=0)
    if (args.lemmas or args.ckpt) and (args.plan or args.quick or args.preset):
        stop("--plan, --quick and --preset train or plan a study: drop them, or drop --lemmas and --ckpt")
    scale = (args.preset or "").removeprefix("readout")                            # "-44m"
    args.out_dir = args.out_dir or "out/readout" + "-quick" * args.quick + scale
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.lemmas:
        return check_lemmas()
    if args.ckpt:
        rows = diagnose(args.ckpt, args.tokens, pick_device(args.device), args.trick)
        print_tables({(rows[0]["run"], ""): [rows]})
        if args.csv:
            write_csv(Path(args.csv), rows)
        return
    # the study: train what is not trained yet, diagnose every run, report
    runs = plan_runs(args)
    for _, flags in runs.values():
        train_args, _ = parse(flags)             # refuses now what train.py would refuse later
    if args.plan:
        for _, flags in runs.values():
            print("python train.py", *flags)
        return
    out = Path(args.out_dir, args.sweep or "readout")
    target, plot = Path(args.csv or out.with_suffix(".csv")), out.with_suffix(".png")
    check_writable("--out_dir or --csv", out.parent, target.parent)
    open_data(train_args)                        # all runs have the same
    run_all(find_unfinished([flags for _, flags in runs.values()]), args.jobs or default_jobs())
    cells = {}
    for i, ((cell, variant, seed), (folder, _)) in enumerate(runs.items(), 1):
        progress(f"diagnosing {folder.name}, {i} of {len(runs)}", False)
        cells.setdefault((cell, variant), []).append(diagnose(folder, args.tokens, pick_device(args.device)))
    print_tables(cells)
    plot_readout(cells, plot_title(cells), plot)
    write_csv(target, sum(sum(cells.values(), []), []))                            # the rows of all runs of all cells
    print(f"wrote {plot} and {target}")


if __name__ == "__main__":
    main()
