"""
Early exits: let a token leave the loop as soon as its prediction is certain, and measure what that saves and costs.

    python train.py --loss=per_loop --out_dir=out/x            # supervise every pass; terminal models work, badly
    python early_exit.py --ckpt out/x                          # convergence, frontier, KV policies; table, PNG, JSON
    python early_exit.py --ckpt out/a out/b                    # frontiers of several runs in one plot
    python early_exit.py --ckpt out/x --prompt "The state" --exit_tau 2        # generate, with and without exits
    python early_exit.py --ckpt out/x --force_saved 30 50      # time of a schedule of exits that saves these FLOPs

exits.py has the mechanism: criteria, cache policies (full, copy, reuse), cost, generation. Here tokens of known text
are scored: with keys and values of the full depth, as the paper does, and as generation works, one position at a time;
tau comes from validation text, everything else from test text. Every point of a frontier stands beside a fixed smaller
depth and random exits at the same saving. Arithmetic is fp32.

Shapes: B rows, T positions, S exit points, the last of which is the whole model, N tokens.
"""
import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.load import even_starts, read_windows
from data.prepare import load_tokenizer, token_bytes
from exits import (CRITERIA, RowCache, costs, doubt, exit_at, exit_below, generate, jsd, n_stages, read, saved,
                   score_at_once, score_by_step, step)
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import duration, misused, progress, stop
from lib.files import check_writable, write_atomic
from lib.machine import pick_device
from lib.ops import norm
from lib.plots import plot_frontier
from model import KVCache

SAVED = (0.0, 0.05, 0.10, 0.20, 0.30)            # the savings the paper reports


# --- teacher forcing: every exit point of every token at once ---
def layer_states(model, idx, context):
    """What would be read after every effective layer but the coda's if the loop ended there, and what enters the first
    stage: tokens idx (B, T) to (e, [state (B, T, D), ...])."""
    cfg, x, seen = model.cfg, model.embed(idx), []
    first = x
    for i, block in enumerate(model.prelude):
        x = block(x, context, i)
        seen.append(norm(x) if cfg.loop_norm else x)
    e, h = x, model.start(x)
    for k in range(cfg.n_loop):
        x = model.combine(e, h, k)
        for i in range(cfg.n_recur):
            x = model.layer(x, i, k, context)
            seen.append(model.read(model.finish(h, x, k)))
        h = model.finish(h, x, k)
    return e if cfg.n_loop > 1 else first, seen


@torch.no_grad()
def observe(model, batches, say=lambda i: None):
    """Per token, keys and values of the full depth: "ce" (S, N) nats at each exit point, "agree" (S, N) whether its
    likeliest token is the final one, each criterion (S - 1, N); "layers": mean JSD to the final readout, share of
    tokens below 0.5 and nats behind every effective layer but the coda's, whose last is the final readout."""
    cfg, S, found = model.cfg, n_stages(model.cfg), []
    for i, (x, y) in enumerate(batches):
        context = model.context(x, cfg.n_loop, None)
        e, seen = layer_states(model, x, context)
        states = [state for layer, state in enumerate(seen) if is_boundary(cfg, layer)]
        final = read(model, S - 1, states[-1], context).float().log_softmax(-1)
        out = {"ce": [], "agree": [], "layers": [], **{name: [] for name in CRITERIA}}
        earlier, before = None, e
        for s, state in enumerate(states):
            logits = read(model, s, state, context)
            out["ce"].append(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none"))
            out["agree"].append((logits.argmax(-1) == final.argmax(-1)).flatten())
            if s < S - 1:
                for name in CRITERIA:
                    out[name].append(doubt(name, logits, earlier, state, before).flatten())
            earlier, before = logits, state
        for j, state in enumerate(seen):
            logp = read(model, S - 1 if j == len(seen) - 1 else 0, state, context).float().log_softmax(-1)
            d = jsd(logp, final)
            nats = F.nll_loss(logp.flatten(0, 1), y.flatten())
            out["layers"].append(torch.stack([d.mean(), (d < 0.5).float().mean(), nats]) * len(x))
        found.append({name: torch.stack(values).cpu() for name, values in out.items() if values})
        say(i + 1)
    every = {name: torch.cat([f[name] for f in found], 1) for name in found[0] if name != "layers"}
    n = sum(len(x) for x, _ in batches)
    return {**every, "layers": (sum(f["layers"] for f in found) / n).tolist()}


def first_below(score, tau):
    """Exit depth (N,), 1 .. S, of scores (S - 1, N): the first below tau, else S."""
    below = torch.cat([score < tau, torch.ones_like(score[:1], dtype=torch.bool)])
    return below.int().argmax(0) + 1


def at_depth(values, depth):
    """values (S, N) at depth (N,)."""
    return values.gather(0, depth[None] - 1)[0]


def calibrate(score, target, saving):
    """The tau at which saving(depth) reaches the target, by bisection; None where none does."""
    known = score[score.isfinite()]              # of two passes, kl has no score at all
    high = known.max().item() * 1.001 + 1e-9 if len(known) else 0.0
    if saving(first_below(score, high)) < target:
        return None
    low = min(0.0, known.min().item()) if len(known) else 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if saving(first_below(score, middle)) >= target else (middle, high)
    return high


# --- the study ---
def windows(folder, meta, split, n_tokens, T, lengths):
    """Inputs and targets (n, T), spread evenly over a split, bytes (n,) that the targets stand for, and the document
    (n,) in which each begins."""
    path, total = Path(folder) / f"{split}.bin", meta["splits"][split]["tokens"]
    if not path.is_file() or total <= T:
        stop(f"{path}: missing, or too few tokens for block_size={T}; run data/prepare.py again, with more text")
    starts = even_starts(total, n_tokens, T)
    x, y = read_windows(path, meta["dtype"], starts, T)
    borders = (np.fromfile(path, dtype=meta["dtype"]) == meta["eot"]).cumsum()
    return x, y, torch.from_numpy(lengths[y.numpy()].sum(1)), torch.from_numpy(borders[starts])


class Bootstrap:
    """95% intervals of means over tokens: documents are drawn with replacement (windows, where they come from fewer
    than 10 documents), 2,000 times, the same draws for all, so that differences are paired."""

    def __init__(self, document, T, n=2000):
        self.unit = "documents" if len(document.unique()) >= 10 else "windows"
        group = document if self.unit == "documents" else torch.arange(len(document))
        self.group = group.unique(return_inverse=True)[1].repeat_interleave(T)             # (N,)
        self.groups = int(self.group.max()) + 1
        drawn = torch.randint(self.groups, (n, self.groups), generator=torch.Generator().manual_seed(0))
        self.counts = torch.zeros(n, self.groups, dtype=torch.double)
        self.counts.scatter_add_(1, drawn, torch.ones_like(self.counts))
        self.size = self.total(torch.ones(len(self.group)))

    def total(self, values):
        return torch.zeros(self.groups, dtype=torch.double).index_add(0, self.group, values.double())

    def __call__(self, values):
        draws = (self.counts @ self.total(values)) / (self.counts @ self.size)
        low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
        return {"nats": values.double().mean().item(), "low": low, "high": high}


def fixed_at(fixed, ce, saving):
    """Nats (N,) of a fixed number of stages at any saving: part of the windows with one number, part with the next.
    fixed: the saving of 1 .. S stages, falling to 0; ce (S, N)."""
    for d in range(len(fixed) - 1):
        if saving >= fixed[d + 1]:
            share = min(1.0, (saving - fixed[d + 1]) / (fixed[d] - fixed[d + 1]))
            return share * ce[d] + (1 - share) * ce[d + 1]
    return ce[-1]


def dealt(c, depth, tests, way, kv):
    """The chance that a random exit takes one of the depths (N,) dealt to it, else goes all the way, so that it costs
    what the exits cost: counted by layers 1, charged less, since a random exit needs no tests."""
    mine, free = saved(c, depth, tests, kv)[way], saved(c, depth, False, kv)[way]
    return max(0.0, min(1.0, mine / free)) if free > 0 else 0.0


def row(c, boot, depth, nats, ce, random, tests, way, kv, bytes_per_token):
    """One point of a frontier: what depth (N,) saves, what nats (N,) lose, and both baselines at the same saving."""
    saving = saved(c, depth, tests, kv)
    fixed = [saved(c, torch.tensor([d]), False)[way] for d in range(1, c.stages + 1)]
    mean = nats.double().mean().item()
    return {"saved": saving, "depth": depth.double().mean().item(), "nats": mean, "ppl": math.exp(mean),
            "bpb": mean / math.log(2) / bytes_per_token, "lost": boot(nats - ce[-1]),
            "random": boot(random - ce[-1]), "fixed": boot(fixed_at(fixed, ce, saving[way]) - ce[-1]),
            "vs_random": boot(nats - random), "vs_fixed": boot(nats - fixed_at(fixed, ce, saving[way])),
            "exits": (depth < c.stages).double().mean().item()}


def frontier(c, boot, calibration, test, criterion, way, bytes_per_token):
    """Points at SAVED: tau from the calibration tokens, everything else from the test tokens, full keys and values,
    which cost what those of reuse do: nothing."""
    tests, points = CRITERIA[criterion], []
    for target in SAVED:
        tau = calibrate(calibration[criterion], target, lambda d: saved(c, d, tests)[way])
        point = {"target": target, "tau": tau}
        if tau is not None:
            depth, ce = first_below(test[criterion], tau), test["ce"]
            share = torch.bincount(depth - 1, minlength=len(ce)) / len(depth)
            q = dealt(c, depth, tests, way, "reuse")
            random = q * (share[:, None] * ce).sum(0) + (1 - q) * ce[-1]       # its expectation, no draw needed
            point.update(row(c, boot, depth, at_depth(ce, depth), ce, random, tests, way, "reuse", bytes_per_token))
        points.append(point)
    return points


def policy(model, c, boot, x, y, test, points, criterion, kv, batch_size, say, bytes_per_token):
    """The charged points again, scored as generation works, beside the same depths dealt at random."""
    tests, found, device = CRITERIA[criterion], [], model.table.device
    generator = torch.Generator().manual_seed(0)
    scorer = score_by_step if model.cfg.n_coda else score_at_once

    def run(rule_of, text):
        parts = []
        for i in range(0, len(x), batch_size):
            s = slice(i, i + batch_size)
            parts.append([v.cpu() for v in scorer(model, x[s].to(device), y[s].to(device), rule_of(s), kv)])
            say(text)
        return (torch.cat(p).flatten() for p in zip(*parts))
    for p in points:
        if p["tau"] is None:
            continue
        nats, depth = run(lambda s: exit_below(criterion, p["tau"]), f"{kv}, tau {p['tau']:.3g}")
        q = dealt(c, depth, tests, "charged", kv)
        shuffled = depth[torch.randperm(len(depth), generator=generator)]
        chance = torch.where(torch.rand(len(depth), generator=generator) < q, shuffled, c.stages).view(x.shape)
        random, _ = run(lambda s: exit_at(chance[s].to(device)), f"{kv}, random exits")
        found.append({"target": p["target"], "tau": p["tau"], **row(
            c, boot, depth, nats, test["ce"], random, tests, "charged", kv, bytes_per_token)})
    return found


def study(name, model, folder, meta, a):
    """All numbers of one run, as plain Python."""
    cfg, c, device = model.cfg, costs(model), model.table.device
    lengths = token_bytes(load_tokenizer(folder))
    sets = {split: windows(folder, meta, split, a.tokens, cfg.block_size, lengths) for split in ("val", "test")}
    seen, B = {}, a.batch_size
    for split, (x, y, _, _) in sets.items():
        batches = [[t[i:i + B].to(device) for t in (x, y)] for i in range(0, len(x), B)]
        seen[split] = observe(model, batches, lambda i: progress(
            f"{name}: {split} {i}/{len(batches)} batches of teacher forcing", False))
    x, y, n_bytes, document = sets["test"]
    test, boot = seen["test"], Bootstrap(document, cfg.block_size)
    bytes_per_token = n_bytes.sum().item() / x.numel()
    ways = {way: {k: frontier(c, boot, seen["val"], test, k, way, bytes_per_token) for k in CRITERIA}
            for way in ("layers", "charged")}
    first = test["agree"].int().argmax(0) + 1    # the last exit point always agrees with itself
    result = {"run": name, "stages": c.stages, "looped": c.looped, "criterion": a.criterion, "costs": asdict(c),
              "tokens": x.numel(), "calibration_tokens": sets["val"][0].numel(), "unit": boot.unit,
              "units": boot.groups, "bytes_per_token": bytes_per_token,
              "layers": [{"layer": i + 1, "jsd": d, "below_half": share, "nats": nats, "boundary": is_boundary(cfg, i)}
                         for i, (d, share, nats) in enumerate(test["layers"])],
              "fixed": [{"stages": d, "saved": saved(c, torch.tensor([d]), False), "nats": ce, "ppl": math.exp(ce),
                         "bpb": ce / math.log(2) / bytes_per_token}
                        for d, ce in enumerate(test["ce"].double().mean(1).tolist(), 1)],
              "oracle": row(c, boot, first, at_depth(test["ce"], first), test["ce"], test["ce"][-1], False, "charged",
                            "reuse", bytes_per_token),
              "frontier": ways, "policies": {}}
    kinds = [k for k in a.kv if k != "full" and (k != "reuse" or c.looped)]
    points = ways["charged"][a.criterion]
    jobs = len(kinds) * 2 * sum(p["tau"] is not None for p in points) * -(-len(x) // a.batch_size)
    begun, done = time.time(), 0

    def say(text):
        nonlocal done
        done += 1
        progress(f"{name}: {text}, batch {done}/{jobs}, ETA {duration((time.time() - begun) / done * (jobs - done))}",
                 False)
    for kv in kinds:
        result["policies"][kv] = policy(model, c, boot, x, y, test, points, a.criterion, kv, a.batch_size, say,
                                        bytes_per_token)
    return result


def is_boundary(cfg, layer):
    """Does an exit point lie behind this effective layer (0-based, the prelude's first)?"""
    return cfg.n_loop == 1 or (layer >= cfg.n_prelude and (layer - cfg.n_prelude + 1) % cfg.n_recur == 0)


def between(d):
    return f"{d['nats']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}]"


def report(r):
    c = r["costs"]
    print(f"\n{r['run']}: {r['stages']} {'passes' if r['looped'] else 'layers'}; {c['full'] / 1e6:.2f} MFLOPs per "
          f"token, a stage {c['stage'] / c['full']:.1%}, a readout {c['readout'] / c['full']:.1%} of them\n"
          f"{r['tokens']} test tokens; tau from {r['calibration_tokens']} validation tokens; intervals over "
          f"{r['units']} {r['unit']}\n\n{'layer':>5s} {'JSD to final':>12s} {'below 0.5':>9s} {'nats':>7s}")
    for x in r["layers"]:
        print(f"{x['layer']:5d} {x['jsd']:12.3f} {x['below_half']:9.1%} {x['nats']:7.3f}"
              + ("  exit point" if x["boundary"] else ""))
    print(f"\n{'fixed depth':>11s} {'saved: layers':>14s} {'charged':>8s} {'nats':>7s} {'ppl':>7s} {'bits/byte':>9s}")
    for x in r["fixed"]:
        print(f"{x['stages']:11d} {x['saved']['layers']:14.1%} {x['saved']['charged']:8.1%} {x['nats']:7.4f} "
              f"{x['ppl']:7.2f} {x['bpb']:9.4f}")
    print("\naim: FLOPs to save; then those saved on the test tokens, counting layers, the head too, the tests too; "
          "exits: tokens\nthat leave early; nats lost against full depth, and that less what random exits and a fixed "
          "depth of the same cost lose\n(below 0: exits win)")
    head = (f"{'aim':>4s} {'tau':>7s} {'layers':>7s} {'+ head':>7s} {'+ tests':>7s} {'exits':>6s} {'ppl':>8s} "
            f"{'bits/byte':>9s}  {'nats lost':26s}  {'less random':26s}  less fixed depth")

    def lines(title, points):
        print(f"\n{title}\n{head}")
        for p in points:
            if p["tau"] is None:
                print(f"{p['target']:4.0%} out of reach: the tests cost more than the exits save")
                continue
            s = p["saved"]
            print(f"{p['target']:4.0%} {p['tau']:7.3g} {s['layers']:7.1%} {s['head']:7.1%} {s['charged']:7.1%} "
                  f"{p['exits']:6.1%} {p['ppl']:8.2f} {p['bpb']:9.4f}  {between(p['lost']):26s}  "
                  f"{between(p['vs_random']):26s}  {between(p['vs_fixed'])}")
    lines(f"{r['criterion']}, saved layers only, keys and values of the full depth (the paper's table)",
          r["frontier"]["layers"][r["criterion"]])
    lines(f"{r['criterion']}, tests charged, keys and values of the full depth",
          r["frontier"]["charged"][r["criterion"]])
    for kv, points in r["policies"].items():
        lines(f"{r['criterion']}, tests charged, scored as generation works: {kv}", points)
    o = r["oracle"]
    print(f"\noracle (leaves when its likeliest token is the final one; no tests): saves {o['saved']['layers']:.1%} of "
          f"the layers, {o['saved']['charged']:.1%} charged; nats lost {between(o['lost'])}")
    print("nats lost at 10 and 20% saved, layers only | charged:")
    for k in CRITERIA:
        print(f"  {k:10s}" + " | ".join("  ".join(
            "out of reach" if p["tau"] is None else between(p["lost"])
            for p in r["frontier"][way][k] if p["target"] in (0.1, 0.2)) for way in ("layers", "charged")))


# --- time ---
def decode(model, ids, rule, kv):
    cache = RowCache(model, 1)
    for t in range(len(ids)):
        step(model, ids[t:t + 1], cache, rule, kv)


def decode_plainly(model, ids):
    """model.py's own loop, for comparison: exits must not win against a slow baseline."""
    cache = KVCache(model.cfg, 1, model.cfg.n_loop)
    for t in range(len(ids)):
        model(ids[None, t:t + 1], cache=cache)


@torch.inference_mode()
def race(contenders, rounds):
    """Seconds of each contender, a function, in turns: {name: [rounds]}. The first round only warms up."""
    times = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, run in contenders.items():
            begun = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - begun)
        progress(f"timing, round {i}/{rounds}", False)
    return times


def quartiles(values):
    return [float(q) for q in np.quantile(values, [0.25, 0.5, 0.75])]


def compare(times, name, claim):
    """Time saved by a contender against full depth in the same round, beside the claimed share of FLOPs."""
    low, middle, high = quartiles([1 - mine / full for mine, full in zip(times[name], times["full depth"])])
    return {"claimed": claim, "time_saved": middle, "low": low, "high": high, "speed_up": 1 / (1 - middle),
            "ratio": middle / claim if claim > 0 else None}


def schedule(c, n, target, tests, kv="reuse"):
    """Depths (1, n) that save the target share, charged: two neighbouring depths, evenly interleaved."""
    each = [saved(c, torch.tensor([d]), tests, kv)["charged"] for d in range(1, c.stages + 1)]
    if not each[-1] <= target <= each[0]:
        stop(f"--force_saved={100 * target:g}: this model can save from {each[-1]:.0%} to {each[0]:.0%} of its FLOPs")
    d = next(i for i in range(len(each) - 1) if each[i + 1] <= target)
    early = round(n * (target - each[d + 1]) / (each[d] - each[d + 1]))
    steps = torch.arange(n + 1) * early // n
    return torch.where(steps[1:] > steps[:-1], d + 1, d + 2)[None]


def forced(model, a):
    """Times of schedules of exits that save the asked shares, tests computed as if they decided."""
    c, tests, device = costs(model), CRITERIA[a.criterion], model.table.device
    T, kv = model.cfg.block_size, a.kv[0]
    ids = torch.randint(model.cfg.vocab_size, (T,), generator=torch.Generator().manual_seed(0)).to(device)
    plans = {f"{share:g}%": schedule(c, T, share / 100, tests, kv) for share in a.force_saved}
    rules = {"full depth": None, **{name: exit_at(depth.to(device), tests) for name, depth in plans.items()}}
    contenders = {name: lambda rule=rule: decode(model, ids, rule, kv) for name, rule in rules.items()}
    times = race({"model.py": lambda: decode_plainly(model, ids), **contenders}, a.rounds)
    ms = {name: 1e3 * quartiles(t)[1] / T for name, t in times.items()}
    print(f"\n{T} tokens at batch 1, {torch.get_num_threads()} threads, keys and values by {kv}; {a.rounds} rounds, "
          f"quartiles in brackets\nms per token: " + ", ".join(f"{name} {t:.2f}" for name, t in ms.items()))
    rows = {name: compare(times, name, saved(c, depth[0], tests, kv)["charged"]) for name, depth in plans.items()}
    for r in rows.values():
        print_time(r)
    return {"ms_per_token": ms, "kv": kv, "rows": rows}


def print_time(r):
    print(f"claimed {r['claimed']:.1%} of FLOPs, saved {r['time_saved']:.1%} [{r['low']:.1%}, {r['high']:.1%}] of time"
          + (f": {r['ratio']:.2f} of the claim" if r["ratio"] else "") + f"; {r['speed_up']:.2f} times as fast")


def talk(model, folder, a):
    """Generate from the prompts with exits, then time the same tokens with and without them."""
    text, c, tests = load_tokenizer(folder), costs(model), CRITERIA[a.criterion]
    prompts = [text.encode_ordinary(p) for p in a.prompt]
    for shown, ids in zip(a.prompt, prompts):
        if not ids:
            stop("--prompt is empty: give at least one character")
        if len(ids) > model.cfg.block_size:
            stop(f"--prompt: {len(ids)} tokens, but block_size={model.cfg.block_size}; shorten it: {shown[:40]!r}")
    room = model.cfg.block_size - max(map(len, prompts)) + 1
    rule, kv, result = exit_below(a.criterion, a.exit_tau), a.kv[0], []
    rows, depths = generate(model, prompts, min(a.max_new_tokens, room), rule, kv, a.temperature, a.top_k, a.seed)
    for ids, depth in zip(rows, depths):
        words = [text.decode([t]).replace("\n", "\\n") for t in ids[1:]]
        print(f"\n{text.decode(ids)}\n\n{'passes' if c.looped else 'layers'} before each token: "
              + " ".join(f"{w.strip()}/{d}" for w, d in zip(words, depth)))
        share = saved(c, torch.tensor(depth), tests, kv)
        print(f"mean {sum(depth) / len(depth):.2f} of {c.stages}; FLOPs saved: layers {share['layers']:.1%}, "
              f"with head {share['head']:.1%}, with tests {share['charged']:.1%}")
        ids = torch.tensor(ids[:-1], device=model.table.device)
        times = race({"full depth": lambda: decode(model, ids, None, kv),
                      "exits": lambda: decode(model, ids, rule, kv)}, a.rounds)
        timing = compare(times, "exits", share["charged"])
        for name, how in (("full depth", "without"), ("exits", "with")):
            print(f"{len(ids) / quartiles(times[name])[1]:7.1f} tokens/s {how} exits")
        print_time(timing)
        result.append({"text": text.decode(rows[len(result)]), "depths": depth, "saved": share, "timing": timing})
    return result


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", nargs="+", action="extend", required=True,
        help="run folders of train.py, or their ckpt.pt; several: one plot")
    add("--criterion", choices=CRITERIA, default="entropy", help="what is compared with tau (default: entropy)")
    add("--kv", nargs="+", choices=["full", "copy", "reuse"], default=None,
        help="policies to score (default: all that the model allows); when generating, the one to use (default: reuse, "
             "without a loop copy)")
    add("--tokens", type=int, default=65536, help="test tokens, and as many validation tokens for tau (default: 65536)")
    add("--quick", action="store_true", help="an eighth of the tokens, for a first look")
    add("--batch_size", type=int, default=16, help="windows scored side by side (default: 16)")
    add("--prompt", nargs="+", help="generate from these texts instead")
    add("--exit_tau", type=float, default=1.0, help="tau of the generation (default: 1.0); 0 never exits")
    add("--max_new_tokens", type=int, default=100, help="at most this many, and what block_size leaves (default: 100)")
    add("--temperature", type=float, default=0.0, help="0: the likeliest token (default)")
    add("--top_k", type=int, default=0, help="sample from the likeliest ones only; 0: all (default)")
    add("--seed", type=int, default=0, help="of sampling; row i draws with seed + i (default: 0)")
    add("--force_saved", nargs="+", type=float, metavar="PERCENT", help="time exits that save these FLOPs instead")
    add("--rounds", type=int, default=7, help="timed rounds, in turns (default: 7)")
    add("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--trick", default="", help="file of the runs' trick, if it is outside tricks/")
    add("--out_dir", default="", help="folder for early_exit.png and .json (default: the run's; for several "
        "out/early_exit)")
    add("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/early_exit.json")
    a = parser.parse_args(argv)
    for name in ("tokens", "batch_size", "max_new_tokens", "rounds"):
        if getattr(a, name) < 1:
            stop(f"--{name}={getattr(a, name)}: must be at least 1")
    for name in ("exit_tau", "temperature", "top_k", "threads", "seed"):
        if not getattr(a, name) >= 0:
            stop(f"--{name}={getattr(a, name)}: must not be negative")
    if a.quick:
        a.tokens = max(1, a.tokens // 8)
    if a.prompt and a.force_saved:
        stop("--prompt and --force_saved are two measurements: give one of them")
    single = "--prompt" if a.prompt else "--force_saved" if a.force_saved else ""
    if single and len(a.ckpt) > 1:
        stop(f"{single} takes one --ckpt, not {len(a.ckpt)}")
    for name in ("exit_tau", "temperature", "top_k", "seed"):
        if not a.prompt and getattr(a, name) != parser.get_default(name):
            stop(f"--{name} says how to generate: give --prompt as well, or drop it")
    if single and len(a.kv or []) > 1:
        stop(f"{single} takes one --kv, not {len(a.kv)}")
    a.single = single
    return a


def open_run(path, a, device):
    """(name, model, data folder, its meta), or a sentence on what cannot exit."""
    model, state = load_model(path, device, a.trick)
    cfg = model.cfg
    if n_stages(cfg) < 2:
        stop(f"--ckpt={path}: one layer and no loop, so there is no place to exit; train with --n_loop=2 or more")
    if cfg.n_loop == 1 and a.kv and "reuse" in a.kv:
        stop(f"--kv=reuse: {path} has no loop, so a skipped layer has no earlier pass to take from; use copy")
    return run_folder(path), model, *data_of(state)


def main(argv=None):
    a = parse(argv)
    device = pick_device(a.device)
    if a.threads:
        torch.set_num_threads(a.threads)
    runs = [open_run(path, a, device) for path in a.ckpt]
    looped = all(model.cfg.n_loop > 1 for _, model, _, _ in runs)
    if a.single:
        a.kv = a.kv or ["reuse" if looped else "copy"]
        if a.kv[0] == "full":
            stop("--kv=full needs every pass of every token, so it cannot generate: use copy or reuse")
    a.kv = a.kv or ["full", "copy", "reuse"]
    out = Path(a.out_dir or ("out/early_exit" if len(runs) > 1 else runs[0][0]))     # no run's own results are replaced
    target = Path(a.json) if a.json else None if a.single and not a.out_dir else out / "early_exit.json"
    check_writable("--out_dir or --json", out, *([target.parent] if target else []))
    if a.prompt:
        result = talk(runs[0][1], runs[0][2], a)
    elif a.force_saved:
        result = forced(runs[0][1], a)
    else:
        result = []
        for run, model, folder, meta in runs:
            result.append(study(run.name, model, folder, meta, a))
            report(result[-1])
        plot_frontier(result, out / "early_exit.png")
    if target:
        write_atomic(target, json.dumps(result, indent=1).encode())
        print(f"wrote {target}" + ("" if a.single else f" and {out / 'early_exit.png'}"))


if __name__ == "__main__":
    main()
