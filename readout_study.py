"""
The readout blind spot (arXiv 2606.24898): a loss behind a scale-invariant readout cannot see how long the state is, but
a pre-norm loop goes on changing its length. Does the length drift, and does dense supervision stop it?

    python readout_study.py                      # 8 cells x 3 seeds, then tables, plots and JSON in out/readout
    python readout_study.py --quick              # a few steps of the same, 2 seeds: 3 min
    python readout_study.py --sweep=lambda       # what the paper leaves open: lambda | schedule | init | long
    python readout_study.py --plan               # the train.py commands instead, a line each
    python readout_study.py --plan --preset=readout-44m      # the paper's scale, for a GPU
    python readout_study.py --ckpt out/x         # the diagnostics of one run; --lemmas: the two lemmas, with residuals

The cells: loss terminal | perloop (cross-entropy after every pass) x readout norm | raw; and four controls, a penalty
on the norm with either loss, the norm at the last pass only (final), a norm between passes (loopnorm). Finished runs
are used again, so a study that was stopped goes on. Everything is measured in fp32 on fixed validation windows.

Shapes: B windows, T positions, D width, K passes, N = B T tokens; s = |h| / sqrt(D) the rms of a state h, u = h / s.
"""
import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.load import even_windows, open_data
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import check_same_run, data_of, load_model
from lib.console import duration, misused, progress, stop
from lib.files import ROOT, check_writable, read_json, write_atomic
from lib.flags import PRESETS, parse
from lib.machine import pick_device
from lib.plots import plot_readout
from model import Config, LoopedLM

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
               **{f"lambda{v:g}": (["perloop-penalty"], f"--norm_penalty={v:g}") for v in (1e-4, 1e-3, 1e-1)}},
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


# --- lemmas: visibility and activity ---
def readouts(eps):
    """Scale-invariant readouts and, to compare, the raw one: functions of states (N, D)."""
    def rms_norm(h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)

    def layer_norm(h):
        h = h - h.mean(-1, keepdim=True)
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return {"RMSNorm": rms_norm, "LayerNorm": layer_norm, "raw": lambda h: h}


def visibility(readout, h, weight, targets):
    """|<g, h>| / (|g| |h|) (N,), g the gradient of the cross-entropy of weight (V, D) behind the readout at states h
    (N, D): 0 where the loss is the same for h and c h, so that it cannot see the length of h."""
    h = h.detach().requires_grad_()
    loss = F.cross_entropy(readout(h) @ weight.T, targets, reduction="sum")
    g, = torch.autograd.grad(loss, h)
    h = h.detach()
    return (g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1))


def activity(update, u, scales):
    """A pre-norm residual stack is F(h) = h + update(h) with update(s u) independent of s. First order in 1/s: the rms
    s becomes s + a, a = <b, u> / D, and the direction u moves by b_perp / s. For unit-rms directions u (N, D): the
    largest residual of both at each scale, [(scale, |rms - (s + a)|, rms of direction - (u + b_perp / s))]."""
    rows = []
    for s in scales:
        b = update(s * u)
        a = (b * u).mean(-1, keepdim=True)
        after = s * u + b
        rms = after.square().mean(-1, keepdim=True).sqrt()
        turned = after / rms - (u + (b - a * u) / s)
        rows.append((s, (rms - (s + a)).abs().max().item(), turned.square().mean(-1).sqrt().max().item()))
    return rows


def check_lemmas():
    """Both lemmas on random states and a random pre-norm block, in float64; prints the residuals."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 32, generator=generator, dtype=torch.float64) * 3
    weight, targets = torch.randn(100, 32, generator=generator, dtype=torch.float64), torch.arange(64)
    print("visibility, largest |cos(gradient, state)| over 64 states of 32 channels, float64 (chance: about 0.14)")
    for eps in (0.0, 1e-6):
        print(f"  eps {eps:g}: " + ", ".join(f"{name} {visibility(f, h, weight, targets).max():.1e}"
                                             for name, f in readouts(eps).items()))
    torch.manual_seed(0)
    model = LoopedLM(Config(vocab_size=64, n_embd=32, n_head=1, n_prelude=0, n_coda=0, inject="none")).double()
    model.table = model.table.double()           # or attention would round to fp32
    context = model.context(torch.zeros(1, 64, dtype=torch.long), 1, None)
    u = h / h.square().mean(-1, keepdim=True).sqrt()

    def update(x):
        return model.run(model.recur, x[None], context, 0)[0] - x
    print("activity of one pre-norm block: what first order in 1/s leaves of the new rms and of the new direction")
    for s, rms, direction in activity(update, u, (1e1, 1e2, 1e3, 1e4)):
        print(f"  s {s:8g}: {rms:.1e}, {direction:.1e}")


# --- diagnostics of one model ---
def passes(model, idx, n_loop, clamp=False):
    """[H_1 .. H_n_loop] (B, T, D), and the context that reads them out. clamp: after every later pass each token is
    scaled back to its rms after the first, before it is read or goes on (the paper's intervention at inference)."""
    context, states = model.context(idx, n_loop, None), []
    if not clamp:
        return model.loop_states(idx, context, n_loop), context
    e = model.encode(idx, context)
    h = model.start(e)
    for k in range(n_loop):
        h = model.one_pass(e, h, k, context)
        if k:
            factor = states[0].norm(dim=-1) / model.read(h).norm(dim=-1)           # (B, T)
            h = h * factor.view(*factor.shape, *[1] * (h.ndim - 2))
        states.append(model.read(h))
    return states, context


def tail_index(lengths, share=0.01):
    """Hill's estimate from the largest share of the lengths: P(length > x) falls like x^-index; below 2 the variance
    does not exist, a normal tail gives large values."""
    top = np.sort(lengths)[-max(2, int(len(lengths) * share)) - 1:]
    return float(1 / np.maximum(np.log(top[1:] / top[0]).mean(), 1e-12))


def spread(lengths):
    return {"mean": float(lengths.mean()), **{name: float(np.quantile(lengths, q)) for name, q in
            (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}, "tail_index": tail_index(lengths)}


def tail_tokens(lengths, idx, text, share=0.01):
    """Where the longest 1% of the states sit: share at the first position and in the first 8 (beside the share that an
    even spread would give), and the commonest tokens among them, each with how often it is among the longest."""
    n, T = max(1, int(len(lengths) * share)), idx.size(1)
    order, flat = np.argsort(lengths)[-n:], idx.flatten().numpy()
    position, ids, counts = order % T, *np.unique(flat[order], return_counts=True)
    all_of = np.bincount(flat, minlength=ids.max() + 1)
    return {"first": float((position == 0).mean()), "first8": float((position < 8).mean()), "even_first8": 8 / T,
            "tokens": [{"token": text.decode([int(ids[i])]), "share_of_tail": float(counts[i] / n),
                        "in_tail": float(counts[i] / all_of[ids[i]])} for i in np.argsort(-counts)[:5]]}


def radial_share(model, states, context, targets, k, n_loop):
    """How much of the gradient of pass k's own loss at its state H_k lies along the state. By both readings of the
    paper's r_k: the mean over tokens of |cos|, and one |cos| of the flattened batch; each beside what a random
    direction gives; and g, d loss / d log(length)."""
    h = states[k].detach().requires_grad_()
    logits = model.logits(h, context, n_loop, last_pass=k == n_loop - 1)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    g, = torch.autograd.grad(loss, h)
    inner, N, D = (g * h).sum(-1), h[..., 0].numel(), h.size(-1)
    return {"per_token": (inner.abs() / (g.norm(dim=-1) * h.norm(dim=-1)).clamp(min=1e-30)).mean().item(),
            "chance_per_token": math.sqrt(2 / (math.pi * D)),
            "flattened": (inner.sum().abs() / (g.norm() * h.norm())).item(),
            "chance_flattened": math.sqrt(2 / (math.pi * N * D)), "g": inner.sum().item()}


def update_of_pass(before, after):
    """The change b = after - before of states (N, D) in the direction u of before: a = <b, u> / D is what the rms gains
    to first order; b_perp the rest, which turns the direction by b_perp / s."""
    s = before.square().mean(-1, keepdim=True).sqrt()
    u, b = before / s, after - before
    a = (b * u).mean(-1, keepdim=True)
    perp = (b - a * u).square().mean(-1).sqrt()
    turned = (after / after.square().mean(-1, keepdim=True).sqrt() - u).square().mean(-1).sqrt()
    return {"s": s.mean().item(), "a": a.mean().item(), "b": b.square().mean(-1).sqrt().mean().item(),
            "b_perp": perp.mean().item(), "turned": turned.mean().item(), "first_order": (perp / s[:, 0]).mean().item()}


def throughput(model, idx, n_loop, rounds=3):
    """Tokens per second of a forward pass with one readout, the best of some rounds."""
    best = math.inf
    for _ in range(rounds):
        begun = time.perf_counter()
        states, context = passes(model, idx, n_loop)
        model.logits(states[-1], context, n_loop)
        best = min(best, time.perf_counter() - begun)
    return idx.numel() / best


def diagnose(ckpt, n_tokens, device="cpu", trick=""):
    """Everything the study says of one run, as plain numbers."""
    model, state = load_model(ckpt, device, trick)
    cfg = model.cfg
    folder, meta = data_of(state)
    text, K, T = load_tokenizer(folder), cfg.n_loop, cfg.block_size
    x, y = even_windows(folder, meta, "val", max(n_tokens, T), T)
    n_bytes, depths = int(token_bytes(text)[y.numpy()].sum()), list(range(1, BEYOND * K + 1))

    def loss(h, context, k, targets):            # of a model that ends at pass k: a pass does not see those after it
        return F.cross_entropy(model.logits(h, context, k).flatten(0, 1).float(), targets.flatten()).item()
    with torch.no_grad():
        speed = [throughput(model, x[:8].to(device), k) for k in depths]
        kept, updates, ce, clamped = [[] for _ in depths], [[] for _ in depths[1:]], [], []
        for i in range(0, len(x), 8):
            idx, targets = x[i:i + 8].to(device), y[i:i + 8].to(device)
            states, context = passes(model, idx, depths[-1])
            ce.append([len(idx) * loss(h, context, k, targets) for k, h in zip(depths, states)])
            for k, h in enumerate(states):
                kept[k].append(h.float().norm(dim=-1).flatten().cpu().numpy())
            for k in range(len(depths) - 1):
                updates[k].append(update_of_pass(states[k].flatten(0, 1).float(), states[k + 1].flatten(0, 1).float()))
            free, held = states[K - 1], passes(model, idx, K, clamp=True)[0][-1]
            clamped.append([len(idx) * v for v in (loss(held, context, K, targets) - loss(free, context, K, targets),
                                                   held.norm(dim=-1).mean().item(), free.norm(dim=-1).mean().item())])
    ce = np.sum(ce, axis=0) / len(x)
    kept = [np.concatenate(v) for v in kept]
    idx, targets = x[:8].to(device), y[:8].to(device)
    with torch.no_grad():
        states, context = passes(model, idx, K)
    d_ce, held, free = np.sum(clamped, axis=0) / len(x)
    return {"run": Path(ckpt).name, "seed": state["args"]["seed"], "n_loop": K, "n_embd": cfg.n_embd,
            "tokens": len(x) * T, "ce": ce.tolist(), "bpb": (ce * y.numel() / n_bytes / math.log(2)).tolist(),
            "tok_per_s": speed,
            "norm": [spread(v) for v in kept], "tail": tail_tokens(kept[K - 1], x, text),
            "radial": [radial_share(model, states, context, targets, k, K) for k in range(K)],
            "update": [{key: float(np.mean([u[key] for u in v])) for key in v[0]} for v in updates],
            "clamp": {"delta_ce": float(d_ce), "ratio": float(held / free)}}


# --- the study ---
def plan(a):
    """{(cell, variant, seed): (folder, command line of train.py)}."""
    runs, seeds = {}, a.seeds or ([42, 101] if a.quick else [42, 101, 202])
    base = f"--preset={a.preset}" if a.preset else LAPTOP
    if a.quick:
        base += " --n_embd=32 --max_steps=60 --eval_interval=20"
    variants = {"": (list(CELLS), "")} if not a.sweep else SWEEPS[a.sweep]
    for variant, (cells, more) in variants.items():
        for cell in a.cells or cells:
            for seed in seeds:
                name = "-".join(filter(None, [cell, variant, f"s{seed}"]))
                folder = Path(a.out_dir, name)
                runs[cell, variant, seed] = folder, f"{base} {CELLS[cell]} {more} --seed={seed} --out_dir={folder}"
    return runs


def train_all(runs, jobs):
    """Run what is not finished, jobs processes at a time; returns when all are."""
    for folder, line in runs.values():
        if (folder / "config.json").is_file():   # finished or not, it has to be the run that is asked for
            saved = read_json(folder / "config.json")
            check_same_run(parse(shlex.split(line))[1], saved, saved["data_sha256"], folder, False)
    todo = [(folder, line) for folder, line in runs.values() if not (folder / "summary.json").is_file()]
    running, done, begun = [], 0, time.time()
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before", flush=True)
    try:
        while todo or running:
            while todo and len(running) < jobs:
                folder, line = todo.pop(0)
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / "log.txt", "w") as log:
                    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(line)]
                    running.append((folder, subprocess.Popen(command, stdout=log, stderr=log)))
            for folder, process in list(running):
                if process.poll() is not None:
                    running.remove((folder, process))
                    done += 1
                    if process.returncode:
                        stop(f"the run {folder} failed, {folder / 'log.txt'} says why: "
                             + (folder / "log.txt").read_text().strip()[-200:])
                    left = (time.time() - begun) / done * (len(todo) + len(running))
                    progress(f"{folder.name} done, {len(todo) + len(running)} to go, ETA {duration(left)}", True)
            time.sleep(0.2)
    finally:
        for _, process in running:               # stopped by hand: the runs save and go on next time
            process.terminate()


def mean_sd(values):
    return f"{np.mean(values):.4g}" + (f" +- {np.std(values, ddof=1):.2g}" if len(values) > 1 else "")


def mean_interval(values):
    """Mean over seeds with its 95% t interval: (mean, low, high)."""
    from scipy.stats import t
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return np.mean(values) + np.array([0, -half, half])


def ratio(over, under):
    """Geometric mean of over / under, paired by seed, with its 95% t interval: (ratio, low, high)."""
    return tuple(np.exp(mean_interval(np.log(np.asarray(over) / np.asarray(under)))))


def label(cell, variant):
    return "-".join(filter(None, [cell, variant]))


def report(found):
    """found: {(cell, variant): [diagnosis of each seed]}."""
    def table(title, columns):
        """A row per cell; columns: (head, function of a diagnosis, how to show the values of all seeds)."""
        print(f"\n{title}")
        widths = [max(len(head), 16) + 2 for head, _, _ in columns]
        print(f"{'':{name_width}s}" + "".join(f"{head:>{w}s}" for w, (head, _, _) in zip(widths, columns)))
        for key, runs in found.items():
            print(f"{label(*key):{name_width}s}" + "".join(
                f"{show([get(r) for r in runs]):>{w}s}" for w, (_, get, show) in zip(widths, columns)))

    def mean(digits):
        return lambda values: f"{np.mean(values):.{digits}g}"

    def last(r):
        return r["n_loop"] - 1
    name_width = max(len(label(*key)) for key in found) + 2
    table("Length of the last state over tokens, mean +- sd over seeds. clamp: each token's length held at that of "
          "pass 1, at inference", [
              ("mean", lambda r: r["norm"][last(r)]["mean"], mean_sd),
              ("after pass 1", lambda r: r["norm"][0]["mean"], mean_sd),
              ("median", lambda r: r["norm"][last(r)]["median"], mean(3)),
              ("p99", lambda r: r["norm"][last(r)]["p99"], mean(3)),
              ("max", lambda r: r["norm"][last(r)]["max"], mean(3)),
              ("tail index", lambda r: r["norm"][last(r)]["tail_index"], mean(2)),
              ("clamp: nats", lambda r: r["clamp"]["delta_ce"], lambda v: f"{np.mean(v):+.4f}"),
              ("clamp: ratio", lambda r: r["clamp"]["ratio"], mean(2))])
    table("Cross-entropy in nats after K passes, trained with n_loop; gain: of pass n_loop over pass 1", [
        ("1", lambda r: r["ce"][0], mean_sd), ("2", lambda r: r["ce"][1], mean_sd),
        ("n_loop", lambda r: r["ce"][last(r)], mean_sd),
        ("gain", lambda r: r["ce"][0] - r["ce"][last(r)], mean_sd),
        ("2 n_loop", lambda r: r["ce"][2 * last(r) + 1], mean_sd)])
    table("Share of the readout's gradient along the state at pass n_loop: |cos| per token, and of the flattened "
          "batch; g: d loss / d log length.\nUpdate of the last pass: a the gain of the rms, b_perp the rest, turned "
          "the move of the direction, beside b_perp / s", [
              ("per token", lambda r: r["radial"][last(r)]["per_token"], mean(2)),
              ("(chance)", lambda r: r["radial"][last(r)]["chance_per_token"], mean(2)),
              ("flattened", lambda r: r["radial"][last(r)]["flattened"], mean(2)),
              ("(chance)", lambda r: r["radial"][last(r)]["chance_flattened"], mean(2)),
              ("g", lambda r: r["radial"][last(r)]["g"], mean(2)),
              ("a", lambda r: r["update"][last(r) - 1]["a"], mean(3)),
              ("b_perp", lambda r: r["update"][last(r) - 1]["b_perp"], mean(3)),
              ("turned", lambda r: r["update"][last(r) - 1]["turned"], mean(3)),
              ("b_perp / s", lambda r: r["update"][last(r) - 1]["first_order"], mean(3))])
    print("\nWho is in the longest 1% of the states")
    for key, runs in found.items():
        tail = runs[0]["tail"]
        common = ", ".join(f"{t['token']!r} {t['share_of_tail']:.0%}" for t in tail["tokens"])
        print(f"{label(*key):{name_width}s}{np.mean([r['tail']['first'] for r in runs]):4.0%} at the first position, "
              f"{np.mean([r['tail']['first8'] for r in runs]):4.0%} in the first 8 (even: {tail['even_first8']:.0%}); "
              f"seed {runs[0]['seed']}: {common}")
    print("\nGain of the rms in each pass after the first; nats gained from pass 1 to n_loop, with the 95% interval "
          "over seeds; best K")
    for key, runs in found.items():
        rms = np.mean([[u["a"] for u in r["update"]] for r in runs], axis=0)
        gain = mean_interval([r["ce"][0] - r["ce"][last(r)] for r in runs])
        print(f"{label(*key):{name_width}s}" + " ".join(f"{v:.2f}" for v in rms)
              + "   {:+.3f} [{:+.3f}, {:+.3f}]   ".format(*gain)
              + " ".join(str(1 + int(np.argmin(r["ce"]))) for r in runs))
    report_pairs(found)


def report_pairs(found):
    """Differences between cells, paired by seed."""
    def paired(one, other, get):
        by_seed = [{r["seed"]: get(r) for r in found[key]} for key in (one, other)]
        return [[values[seed] for seed in by_seed[0] if seed in by_seed[1]] for values in by_seed]

    def norm_of(loss, variant):                  # the cell to compare with: of the same variant, or the study's own
        return next((key for key in ((f"{loss}-norm", variant), (f"{loss}-norm", "")) if key in found), None)
    print("\nPaired by seed, 95% intervals: final norm of per-loop + norm over that of a cell; cross-entropy at n_loop "
          "minus\nthat of the norm cell with the same loss, and of per-loop minus terminal")
    for cell, variant in found:
        here, (loss, _, readout) = (cell, variant), cell.partition("-")
        drift = norm_of("perloop", variant)
        if drift not in (None, here):
            over, under = paired(drift, here, lambda r: r["norm"][r["n_loop"] - 1]["mean"])
            print(f"final norm of {label(*drift)} over that of {label(*here)}: "
                  "{:.3g} [{:.3g}, {:.3g}], {} seeds".format(*ratio(over, under), len(over)))
        for other in (norm_of(loss, variant), (f"terminal-{readout}", variant) if loss == "perloop" else None):
            if other in found and other != here:
                mine, theirs = paired(here, other, lambda r: r["ce"][r["n_loop"] - 1])
                print(f"cross-entropy of {label(*here)} minus that of {label(*other)}: "
                      "{:+.3f} [{:+.3f}, {:+.3f}]".format(*mean_interval(np.subtract(mine, theirs))))


def finding(found):
    """The title: the length of the last state behind the norm and without it, or of every cell."""
    length = {key: np.mean([r["norm"][r["n_loop"] - 1]["mean"] for r in runs]) for key, runs in found.items()}
    pairs = [f"{length['perloop-norm', v]:.3g} behind the norm, {length['perloop-raw', v]:.3g} raw{v and f' ({v})'}"
             for v in dict.fromkeys(v for _, v in found) if {("perloop-norm", v), ("perloop-raw", v)} <= length.keys()]
    return "length of the last state, " + ("loss after every pass: " + "; ".join(pairs) if pairs else
                                           ", ".join(f"{label(*key)} {v:.3g}" for key, v in length.items()))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", help="diagnose this run folder or ckpt.pt only")
    add("--trick", default="", help="with --ckpt: file of the run's trick, if it is outside tricks/")
    add("--preset", choices=[p for p in PRESETS if p.startswith("readout")],
        help="the paper's scale instead of a laptop's")
    add("--plan", action="store_true", help="print the train.py commands and exit")
    add("--quick", action="store_true", help="D 32 and 60 steps: shows what the study does, not what it finds")
    add("--lemmas", action="store_true", help="check the two lemmas and exit")
    add("--sweep", choices=SWEEPS, help="instead of the cells: lambda of the penalty | a falling rate | tied N(0,1) | "
        "20,000 steps of a smaller model")
    add("--cells", nargs="+", choices=CELLS, help="only these cells")
    add("--seeds", nargs="+", type=int, help="default: 42 101 202")
    add("--jobs", type=int, default=0, help="runs at a time (default: one per core)")
    add("--tokens", type=int, help="validation tokens of the diagnostics (default: 20480, with --quick 4096)")
    add("--threads", type=int, default=0, help="CPU threads of the diagnostics; 0: one per core")
    add("--device", default="", help="of the diagnostics: cuda, mps or cpu (default: the first that is there)")
    add("--out_dir", default="", help="folder of the runs and results (default: out/readout, or out/readout-quick)")
    add("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/readout.json, or OUT_DIR/SWEEP.json")
    a = parser.parse_args(argv)
    if a.tokens is None:
        a.tokens = 4096 if a.quick else 20480
    for name, low in (("tokens", 1), ("jobs", 0), ("threads", 0)):
        if getattr(a, name) < low:
            stop(f"--{name}={getattr(a, name)}: must be at least {low}")
    for name, others in (("lemmas", ("ckpt", "plan", "quick", "preset", "sweep", "cells")),
                         ("ckpt", ("plan", "quick", "preset", "sweep", "cells")), ("sweep", ("cells",))):
        clash = [other for other in others if getattr(a, name) and getattr(a, other)]
        if clash:
            stop(f"--{name} and --{clash[0]} are two things to do: give one of them")
    a.out_dir = a.out_dir or f"out/readout{'-quick' if a.quick else ''}{f'-{a.preset[8:]}' if a.preset else ''}"
    if a.lemmas:
        return check_lemmas()
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.ckpt:
        found = diagnose(a.ckpt, a.tokens, pick_device(a.device), a.trick)
        report({(found["run"], ""): [found]})
        if a.json:
            write_atomic(Path(a.json), json.dumps(found, indent=1).encode())
        return
    runs = plan(a)
    for _, line in runs.values():
        args, _ = parse(shlex.split(line))       # refuses now what train.py would refuse later
    if a.plan:
        print("\n".join(f"python train.py {' '.join(line.split())}" for _, line in runs.values()))
        return
    out = Path(a.out_dir, a.sweep or "readout")
    target = Path(a.json) if a.json else out.with_suffix(".json")
    check_writable("--out_dir or --json", out.parent, target.parent)
    open_data(args)                              # all runs have the same
    train_all(runs, a.jobs or os.cpu_count())
    found, folders = {}, {}
    for i, ((cell, variant, seed), (folder, _)) in enumerate(runs.items()):
        progress(f"diagnosing {folder.name}, {i + 1} of {len(runs)}", False)
        found.setdefault((cell, variant), []).append(diagnose(folder, a.tokens, pick_device(a.device)))
        folders.setdefault((cell, variant), []).append(folder)
    report(found)
    plot_readout(found, folders, finding(found), out.with_suffix(".png"))
    write_atomic(target, json.dumps([r for runs in found.values() for r in runs], indent=1).encode())
    print(f"wrote {out.with_suffix('.png')} and {target}")


if __name__ == "__main__":
    main()
