"""
Early exits: let a token leave the loop as soon as its prediction is certain, and measure what that saves and costs.

    python train.py --loss=per_loop --out_dir=out/x            # supervise every pass; terminal models work, badly
    python early_exit.py --ckpt out/x                          # convergence, frontier, KV policies; table, PNG, JSON
    python early_exit.py --ckpt out/a out/b                    # frontiers of several runs in one plot
    python early_exit.py --ckpt out/x --prompt "The state" --exit_tau 2        # generate, with and without exits
    python early_exit.py --ckpt out/x --force_saved 30 50      # time of a schedule of exits that saves these FLOPs

exits.py has the mechanism. Here tokens of known text are scored: with keys and values of the full depth, as the paper
does, and as generation works. tau comes from validation text, everything else from test text. Every point is compared
with a fixed smaller depth and with random exits that save the same FLOPs. Arithmetic is fp32.

Shapes: B rows, T positions, S exit points, the last of which is the whole model, N tokens.
"""
import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.load import even_starts, is_task, read_windows
from data.prepare import load_tokenizer, token_bytes
from exits import (CRITERIA, Costs, RowCache, begin, costs, doubt, exit_at, exit_below, generate, jsd, n_stages, read,
                   saved, score_at_once, score_by_step, step)
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import duration, misused, progress, require_at_least, stop
from lib.files import check_writable, write_atomic
from lib.machine import pick_device, read_clock
from lib.ops import check_sampling, norm
from lib.plots import plot_frontier
from model import KVCache

SAVED = (0.0, 0.05, 0.10, 0.20, 0.30)            # the savings the paper reports
INTERVAL = "{nats:+.4f} [{low:+.4f}, {high:+.4f}]"


# --- teacher forcing: every exit point of every token at once ---
def layer_states(model, idx, context):
    """What is read after each layer but the coda's if the loop ends there: idx (B, T) to [state (B, T, D), ...]."""
    cfg, states = model.cfg, []
    x = model.embed(idx)
    for i, block in enumerate(model.prelude):
        x = block(x, context, i)
        states.append(norm(x) if cfg.loop_norm else x)
    e, h = x, model.start(x)
    for k in range(cfg.n_loop):
        x = model.combine(e, h, k)
        for i in range(cfg.n_recur):
            x = model.layer(x, i, k, context)
            states.append(model.read(model.finish(e, h, x, k)))
        h = model.finish(e, h, x, k)
    return states


def is_exit_point(cfg, layer):
    """Is there an exit point after this effective layer (0-based, the prelude's first)?"""
    return cfg.n_loop == 1 or (layer >= cfg.n_prelude and (layer - cfg.n_prelude + 1) % cfg.n_recur == 0)


def score_layers(model, x, y):
    """score_exit_points for one batch x, y (B, T); "layers" (L, 3) is summed over the rows."""
    context = model.context(x, model.cfg.n_loop, None)
    states = layer_states(model, x, context)
    S = n_stages(model.cfg)
    final = read(model, S - 1, states[-1], context).float().log_softmax(-1)
    earlier, before = None, begin(model, x, context).state
    scores = {name: [] for name in ("layers", "ce", "agree", *CRITERIA)}
    for layer, state in enumerate(states):
        last = layer == len(states) - 1
        logits = read(model, S - 1 if last else 0, state, context)
        logp = logits.float().log_softmax(-1).flatten(0, 1)                        # (N, V)
        divergence = jsd(logp, final.flatten(0, 1))
        means = [divergence.mean(), (divergence < 0.5).float().mean(), F.nll_loss(logp, y.flatten())]
        scores["layers"].append(torch.stack(means) * len(x))
        if not is_exit_point(model.cfg, layer):
            continue
        scores["ce"].append(F.nll_loss(logp, y.flatten(), reduction="none"))
        scores["agree"].append((logits.argmax(-1) == final.argmax(-1)).flatten())
        for name in CRITERIA if not last else ():
            scores[name].append(doubt(name, logits, earlier, state, before).flatten())
        earlier, before = logits, state
    return {name: torch.stack(values).cpu() for name, values in scores.items()}


@torch.no_grad()
def score_exit_points(model, batches, label=""):
    """Per token, keys and values of the full depth: "ce" (S, N) nats at each exit point, "agree" (S, N) whether its
    likeliest token is the final one, each criterion (S - 1, N). "layers": mean JSD to the final readout, share of
    tokens below 0.5 and nats after every effective layer but the coda's, whose last is the final readout."""
    parts = []
    for i, (x, y) in enumerate(batches, 1):
        parts.append(score_layers(model, x, y))
        progress(f"{label} {i}/{len(batches)} batches of teacher forcing", False)
    layers = sum(part.pop("layers") for part in parts) / sum(len(x) for x, _ in batches)
    scores = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    return {**scores, "layers": layers.tolist()}


def first_below(score, tau):
    """Exit depth (N,), 1 .. S, of scores (S - 1, N): the first below tau, else S."""
    below = F.pad(score < tau, (0, 0, 0, 1), value=True)
    return below.int().argmax(0) + 1


def calibrate(score, target, saving):
    """The tau at which saving(depth) reaches the target, by bisection; None where none does."""
    finite = score[score.isfinite()]
    low, high = 0.0, 0.0
    if len(finite):                              # of two passes, kl has no score at all
        high = finite.max().item() * 1.001 + 1e-9
    if saving(first_below(score, high)) < target:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        reached = saving(first_below(score, middle)) >= target
        low, high = (low, middle) if reached else (middle, high)
    return high


# --- the study ---
def load_windows(folder, meta, split, n_tokens, T):
    """Inputs and targets (n, T), spread evenly over a split, and the document (n,) in which each begins."""
    if is_task(meta):
        stop(f"{folder}: a task of which only answers count, but this study counts every token; give a run on text")
    path, total = Path(folder) / f"{split}.bin", meta["splits"][split]["tokens"]
    if not path.is_file() or total <= T:
        stop(f"{path}: missing, or too few tokens for block_size={T}; run data/prepare.py again, with more text")
    starts = even_starts(total, n_tokens, T)
    x, y = read_windows(path, meta["dtype"], starts, T)
    document = (np.fromfile(path, dtype=meta["dtype"]) == meta["eot"]).cumsum()
    return x, y, torch.from_numpy(document[starts])


class Bootstrap:
    """95% intervals of means over tokens: documents are drawn with replacement (windows, where they come from fewer
    than 10 documents), 2,000 times, the same draws for all, so that differences are paired."""

    def __init__(self, document, T, n=2000):
        enough = len(document.unique()) >= 10
        self.unit = "documents" if enough else "windows"
        group = document if enough else torch.arange(len(document))
        self.group = group.unique(return_inverse=True)[1].repeat_interleave(T)             # (N,)
        self.groups = int(self.group.max()) + 1
        draws = torch.randint(self.groups, (n, self.groups), generator=torch.Generator().manual_seed(0))
        self.counts = torch.zeros(n, self.groups, dtype=torch.double)
        self.counts.scatter_add_(1, draws, torch.ones_like(self.counts))
        self.sizes = self.counts @ self.total(torch.ones(len(self.group)))

    def total(self, values):                     # (N,) to the sums of the groups
        return torch.zeros(self.groups, dtype=torch.double).index_add(0, self.group, values.double())

    def __call__(self, values):
        means = self.counts @ self.total(values) / self.sizes
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
        return {"nats": values.double().mean().item(), "low": low, "high": high}


@dataclass
class TestText:
    """The test tokens of a run, and what all points measured on them share."""
    batches: list                                # [(x, y)], each (B, T)
    scores: dict                                 # of score_exit_points
    interval: Bootstrap
    bytes_per_token: float
    costs: Costs


def in_units(nats, bytes_per_token):
    """Nats per token, also as perplexity and as bits per byte."""
    return {"nats": nats, "ppl": math.exp(nats), "bpb": nats / math.log(2) / bytes_per_token}


def savings_by_depth(c, way, tests=False, kv="reuse"):
    """What 1 .. S stages for every token save."""
    return [saved(c, torch.tensor([d]), tests, kv)[way] for d in range(1, c.stages + 1)]


def neighbours(savings, saving):
    """(d, share): to save this, a share of the tokens takes d stages, the rest d + 1. savings: of 1 .. S stages."""
    d, saving = 1, max(saving, savings[-1])
    while saving < savings[d]:
        d += 1
    more, less = savings[d - 1], savings[d]
    return d, min(1.0, (saving - less) / (more - less))


def exit_chance(c, depth, saving, way, kv):
    """Random exits take the depths (N,) with this chance, else all stages, so that they save what the exits save: 1
    when counted by layers, less when charged, since random exits need no tests."""
    at_chance_1 = saved(c, depth, False, kv)[way]
    if at_chance_1 <= 0:
        return 0.0
    return max(0.0, min(1.0, saving[way] / at_chance_1))


def measure_point(test, depth, nats, random, saving, way):
    """One point of a frontier. Exits at depth (N,) save saving and have nats (N,); random (N,) are the nats of random
    exits that save as much."""
    c, interval = test.costs, test.interval
    ce = test.scores["ce"]
    full = ce[-1]
    d, share = neighbours(savings_by_depth(c, way), saving[way])
    fixed = share * ce[d - 1] + (1 - share) * ce[d]
    mean = nats.double().mean().item()
    return {"saved": saving, "depth": depth.double().mean().item(), **in_units(mean, test.bytes_per_token),
            "lost": interval(nats - full), "random": interval(random - full), "fixed": interval(fixed - full),
            "vs_random": interval(nats - random), "vs_fixed": interval(nats - fixed),
            "exits": (depth < c.stages).double().mean().item()}


def trace_frontier(test, calibration, criterion, way):
    """Points at SAVED: tau from the scores of the calibration tokens, everything else from the test tokens, full keys
    and values, which cost what those of reuse do: nothing."""
    c, points = test.costs, []
    ce = test.scores["ce"]
    tests = CRITERIA[criterion]
    for target in SAVED:
        tau = calibrate(calibration[criterion], target, lambda depth: saved(c, depth, tests)[way])
        point = {"target": target, "tau": tau}
        points.append(point)
        if tau is None:
            continue
        depth = first_below(test.scores[criterion], tau)
        nats = ce.gather(0, depth[None] - 1)[0]
        saving = saved(c, depth, tests)
        chance = exit_chance(c, depth, saving, way, "reuse")
        share = torch.bincount(depth - 1, minlength=len(ce)) / len(depth)          # of each depth (S,)
        random = chance * (share[:, None] * ce).sum(0) + (1 - chance) * ce[-1]     # its expectation, no draw needed
        point.update(measure_point(test, depth, nats, random, saving, way))
    return points


def score_batches(model, batches, rules, kv):
    """Nats and depths (N,) of batches, each with its rule of exit, scored as generation works."""
    score = score_by_step if model.cfg.n_coda else score_at_once
    parts = [score(model, x, y, rule, kv) for (x, y), rule in zip(batches, rules)]
    return [torch.cat(values).cpu().flatten() for values in zip(*parts)]


def score_policy(model, test, point, criterion, kv, generator):
    """A point of the charged frontier again, scored as generation works, and random exits with the same depths."""
    c, tau, batches = test.costs, point["tau"], test.batches
    rules = [exit_below(criterion, tau)] * len(batches)
    nats, depth = score_batches(model, batches, rules, kv)
    saving = saved(c, depth, CRITERIA[criterion], kv)
    # Random exits: a token gets the depth of another one, or all stages.
    shuffled = depth[torch.randperm(len(depth), generator=generator)]
    chance = exit_chance(c, depth, saving, "charged", kv)
    early = torch.rand(len(depth), generator=generator) < chance
    random_depth = torch.where(early, shuffled, c.stages)
    B, T = batches[0][0].shape
    windows = random_depth.view(-1, T).to(model.table.device)
    random, _ = score_batches(model, batches, map(exit_at, windows.split(B)), kv)
    return {"target": point["target"], "tau": tau, **measure_point(test, depth, nats, random, saving, "charged")}


def measure_run(name, model, folder, meta, a):
    """All numbers of one run, as plain Python."""
    cfg, c, device = model.cfg, costs(model), model.table.device
    texts = {split: load_windows(folder, meta, split, a.tokens, cfg.block_size) for split in ("val", "test")}
    scores = {}
    for split, (x, y, document) in texts.items():
        inputs = x.to(device).split(a.batch_size)
        targets = y.to(device).split(a.batch_size)
        batches = list(zip(inputs, targets))
        scores[split] = score_exit_points(model, batches, f"{name}: {split}")
    # From here on y, document and batches are those of the test text.
    lengths = token_bytes(load_tokenizer(folder))
    bytes_per_token = lengths[y.numpy()].sum().item() / y.numel()
    interval = Bootstrap(document, cfg.block_size)
    test = TestText(batches, scores["test"], interval, bytes_per_token, c)
    layers, fixed, frontier, policies = [], [], {}, {}
    for i, (divergence, share, nats) in enumerate(test.scores["layers"]):
        layers.append({"layer": i + 1, "jsd": divergence, "below_half": share, "nats": nats,
                       "boundary": is_exit_point(cfg, i)})
    ce, agree = test.scores["ce"], test.scores["agree"]
    for d, nats in enumerate(ce.double().mean(1).tolist(), 1):
        saving = saved(c, torch.tensor([d]), False)
        fixed.append({"stages": d, "saved": saving, **in_units(nats, bytes_per_token)})
    # The oracle exits as soon as the likeliest token is the final one; the last exit point always agrees with itself.
    depth = agree.int().argmax(0) + 1
    nats = ce.gather(0, depth[None] - 1)[0]
    oracle = measure_point(test, depth, nats, ce[-1], saved(c, depth, False), "charged")
    for way in ("layers", "charged"):
        frontier[way] = {criterion: trace_frontier(test, scores["val"], criterion, way) for criterion in CRITERIA}
    # Cache policies at the points of the charged frontier.
    points = [p for p in frontier["charged"][a.criterion] if p["tau"] is not None]
    kinds = [kv for kv in a.kv if kv == "copy" or (kv == "reuse" and c.looped)]
    jobs, done, start = len(kinds) * len(points), 0, time.time()
    for kv in kinds:
        policies[kv], generator = [], torch.Generator().manual_seed(0)
        for point in points:
            policies[kv].append(score_policy(model, test, point, a.criterion, kv, generator))
            done += 1
            left = (time.time() - start) / done * (jobs - done)
            progress(f"{name}: {kv}, point {done}/{jobs}, ETA {duration(left)}", False)
    return {"run": name, "stages": c.stages, "looped": c.looped, "criterion": a.criterion, "costs": asdict(c),
            "tokens": y.numel(), "calibration_tokens": texts["val"][1].numel(), "unit": interval.unit,
            "units": interval.groups, "bytes_per_token": bytes_per_token, "layers": layers, "fixed": fixed,
            "oracle": oracle, "frontier": frontier, "policies": policies}


def print_points(title, points):
    print(f"\n{title}\n aim     tau  layers  + head + tests  exits      ppl bits/byte  nats lost                   "
          f"less random                 less fixed depth")
    for point in points:
        if point["tau"] is None:
            print("{target:4.0%} out of reach: the tests cost more than the exits save".format(**point))
            continue
        numbers = ("{target:4.0%} {tau:7.3g} {saved[layers]:7.1%} {saved[head]:7.1%} {saved[charged]:7.1%} "
                   "{exits:6.1%} {ppl:8.2f} {bpb:9.4f}").format(**point)
        intervals = [INTERVAL.format(**point[key]).ljust(26) for key in ("lost", "vs_random", "vs_fixed")]
        print("  ".join([numbers, *intervals]))


def print_run(result):
    """The tables of one run, of what measure_run returns."""
    criterion, frontier, full = result["criterion"], result["frontier"], result["costs"]["full"]
    stages = "passes" if result["looped"] else "layers"
    stage, readout = result["costs"]["stage"] / full, result["costs"]["readout"] / full
    print(f"\n{result['run']}: {result['stages']} {stages}; {full / 1e6:.2f} MFLOPs per token, a stage {stage:.1%}, a "
          f"readout {readout:.1%} of them")
    print("{tokens} test tokens; tau from {calibration_tokens} validation tokens; intervals over {units} {unit}"
          .format(**result))
    print("\nlayer JSD to final below 0.5    nats")
    for layer in result["layers"]:
        mark = "  exit point" if layer["boundary"] else ""
        print("{layer:5d} {jsd:12.3f} {below_half:9.1%} {nats:7.3f}".format(**layer) + mark)
    print("\nfixed depth  saved: layers  charged    nats     ppl bits/byte")
    for depth in result["fixed"]:
        print("{stages:11d} {saved[layers]:14.1%} {saved[charged]:8.1%} {nats:7.4f} {ppl:7.2f} {bpb:9.4f}"
              .format(**depth))
    print("\naim: FLOPs to save; then those saved on the test tokens, counting layers, the head too, the tests too; "
          "exits: tokens\nthat leave early; nats lost against full depth, and that less what random exits and a fixed "
          "depth of the same cost lose\n(below 0: exits win)")
    print_points(f"{criterion}, saved layers only, keys and values of the full depth (the paper's table)",
                 frontier["layers"][criterion])
    print_points(f"{criterion}, tests charged, keys and values of the full depth", frontier["charged"][criterion])
    for kv, points in result["policies"].items():
        print_points(f"{criterion}, tests charged, scored as generation works: {kv}", points)
    print("\noracle (leaves when its likeliest token is the final one; no tests): saves {saved[layers]:.1%} of the "
          "layers, {saved[charged]:.1%} charged; nats lost ".format(**result["oracle"])
          + INTERVAL.format(**result["oracle"]["lost"]))
    print("nats lost at 10 and 20% saved, layers only | charged:")
    for name in CRITERIA:
        sides = []
        for way in ("layers", "charged"):
            points = [p for p in frontier[way][name] if p["target"] in (0.1, 0.2)]
            lost = ["out of reach" if p["tau"] is None else INTERVAL.format(**p["lost"]) for p in points]
            sides.append("  ".join(lost))
        print(f"  {name:10s}" + " | ".join(sides))


# --- time ---
@torch.inference_mode()
def time_rules(model, ids, rules, kv, rounds):
    """Seconds of decoding ids (T,) with each rule, in turns: {name: [rounds]}. The first round only warms up. The name
    "model.py" stands for that file's own loop: exits must not win against a slow baseline."""
    times = {name: [] for name in rules}
    for i in range(rounds + 1):
        for name, rule in rules.items():
            plain = name == "model.py"
            start = read_clock(model.table.device)
            cache = KVCache(model.cfg, 1, model.cfg.n_loop) if plain else RowCache(model, 1)
            for t in range(len(ids)):
                if plain:
                    model(ids[None, t:t + 1], cache=cache)
                else:
                    step(model, ids[t:t + 1], cache, rule, kv)
            if i:
                times[name].append(read_clock(model.table.device) - start)
        progress(f"timing, round {i}/{rounds}", False)
    return times


def compare_with_claim(times, name, claim):
    """Print and return the time a rule saves compared with full depth in the same round, and the FLOPs it claims to."""
    shares = [1 - seconds / full for seconds, full in zip(times[name], times["full depth"])]
    low, middle, high = np.quantile(shares, [0.25, 0.5, 0.75]).tolist()
    speed_up = 1 / (1 - middle)
    ratio = middle / claim if claim > 0 else None
    part = f": {ratio:.2f} of the claim" if ratio else ""
    print(f"claimed {claim:.1%} of FLOPs, saved {middle:.1%} [{low:.1%}, {high:.1%}] of time{part}; "
          f"{speed_up:.2f} times as fast")
    return {"claimed": claim, "time_saved": middle, "low": low, "high": high, "speed_up": speed_up, "ratio": ratio}


def plan_depths(c, n, target, tests, kv="reuse"):
    """Depths (1, n) that save the target share, charged: two neighbouring depths, evenly interleaved."""
    savings = savings_by_depth(c, "charged", tests, kv)
    if not savings[-1] <= target <= savings[0]:
        stop(f"--force_saved={100 * target:g}: this model can save {savings[-1]:.0%} to {savings[0]:.0%} of its FLOPs")
    d, share = neighbours(savings, target)
    steps = torch.arange(n + 1) * round(n * share) // n
    return torch.where(steps[1:] > steps[:-1], d, d + 1)[None]


def time_schedules(model, a):
    """Times of schedules of exits that save the shares of --force_saved, with tests computed as if they decided."""
    c, tests, device = costs(model), CRITERIA[a.criterion], model.table.device
    T = model.cfg.block_size
    kv = a.kv[0]
    ids = torch.randint(model.cfg.vocab_size, (T,), generator=torch.Generator().manual_seed(0)).to(device)
    depths = {f"{share:g}%": plan_depths(c, T, share / 100, tests, kv) for share in a.force_saved}
    rules = {"model.py": None, "full depth": None}
    for name, depth in depths.items():
        rules[name] = exit_at(depth.to(device), tests)
    times = time_rules(model, ids, rules, kv, a.rounds)
    ms = {name: 1e3 * float(np.median(seconds)) / T for name, seconds in times.items()}
    print(f"\n{T} tokens at batch 1, {torch.get_num_threads()} threads, keys and values by {kv}; {a.rounds} rounds, "
          f"quartiles in brackets\nms per token: " + ", ".join(f"{name} {t:.2f}" for name, t in ms.items()))
    rows = {}
    for name, depth in depths.items():
        claim = saved(c, depth[0], tests, kv)["charged"]
        rows[name] = compare_with_claim(times, name, claim)
    return {"ms_per_token": ms, "kv": kv, "rows": rows}


def time_prompts(model, folder, a):
    """Generate from the prompts with exits, then time the same tokens with and without them."""
    tokenizer, c, tests = load_tokenizer(folder), costs(model), CRITERIA[a.criterion]
    T, prompts = model.cfg.block_size, [tokenizer.encode_ordinary(text) for text in a.prompt]
    for text, ids in zip(a.prompt, prompts):
        if not ids:
            stop("--prompt is empty: give at least one character")
        if len(ids) > T:
            stop(f"--prompt: {len(ids)} tokens, but block_size={T}; shorten it: {text[:40]!r}")
    n_new = min(a.max_new_tokens, T - max(map(len, prompts)) + 1)
    rule, kv, results = exit_below(a.criterion, a.exit_tau), a.kv[0], []
    rows, depths = generate(model, prompts, n_new, rule, kv, a.temperature, top_k=a.top_k, seed=a.seed)
    for row, depth in zip(rows, depths):
        text = tokenizer.decode(row)
        words = [tokenizer.decode([t]).replace("\n", "\\n").strip() for t in row[1:]]
        print(f"\n{text}\n\n{'passes' if c.looped else 'layers'} before each token: "
              + " ".join(f"{word}/{d}" for word, d in zip(words, depth)))
        saving = saved(c, torch.tensor(depth), tests, kv)
        print(f"mean {np.mean(depth):.2f} of {c.stages}; FLOPs saved: layers {saving['layers']:.1%}, with head "
              f"{saving['head']:.1%}, with tests {saving['charged']:.1%}")
        ids = torch.tensor(row[:-1], device=model.table.device)
        times = time_rules(model, ids, {"full depth": None, "exits": rule}, kv, a.rounds)
        print(f"{len(ids) / np.median(times['full depth']):7.1f} tokens/s without exits")
        print(f"{len(ids) / np.median(times['exits']):7.1f} tokens/s with exits")
        timing = compare_with_claim(times, "exits", saving["charged"])
        results.append({"text": text, "depths": depth, "saved": saving, "timing": timing})
    return results


# --- command line ---
def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused

    def add(flag, default, text, **how):
        if default != "":
            text += f" (default: {default})"
        parser.add_argument(flag, type=type(default), default=default, help=text, **how)
    parser.add_argument("--ckpt", nargs="+", action="extend", required=True, help="run folders, or their ckpt.pt")
    add("--criterion", "entropy", "what is compared with tau", choices=CRITERIA)
    parser.add_argument("--kv", nargs="+", choices=["full", "copy", "reuse"], help="policies to score (default: all "
                        "that the model allows); when generating, the one to use (default: reuse, without a loop copy)")
    add("--tokens", 65536, "test tokens, and as many validation tokens for tau")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, for a first look")
    add("--batch_size", 16, "windows scored side by side")
    parser.add_argument("--prompt", nargs="+", help="generate from these texts instead")
    add("--exit_tau", 1.0, "tau of the generation; 0 never exits")
    add("--max_new_tokens", 100, "at most this many, and what block_size leaves")
    add("--temperature", 0.0, "0: the likeliest token")
    add("--top_k", 0, "sample from the likeliest ones only; 0: all")
    add("--seed", 0, "of sampling; row i draws with seed + i")
    parser.add_argument("--force_saved", nargs="+", type=float, metavar="PERCENT", help="time exits with this saving")
    add("--rounds", 7, "timed rounds, in turns")
    add("--device", "", "cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", 0, "CPU threads; 0: one per core")
    add("--trick", "", "file of the runs' trick, if it is outside tricks/")
    add("--out_dir", "", "folder for early_exit.png and .json (default: the run's; for several out/early_exit)")
    add("--json", "", "file to write the numbers to instead of OUT_DIR/early_exit.json")
    a = parser.parse_args(argv)
    require_at_least(a, tokens=1, batch_size=1, max_new_tokens=1, rounds=1, threads=0)
    require_at_least(a, exit_tau=0, temperature=0, top_k=0, seed=0)
    for name in ("exit_tau", "temperature", "top_k", "seed"):
        if not a.prompt and getattr(a, name) != parser.get_default(name):
            stop(f"--{name} says how to generate: give --prompt as well, or drop it")
    try:
        check_sampling(a.temperature, a.top_k)
    except ValueError as e:
        stop(f"--{e}")
    if a.quick:
        a.tokens = max(1, a.tokens // 8)
    if a.prompt and a.force_saved:
        stop("--prompt and --force_saved are two measurements: give one of them")
    a.single = "--prompt" if a.prompt else "--force_saved" if a.force_saved else ""
    for name in ("ckpt", "kv"):
        n = len(getattr(a, name) or [])
        if a.single and n > 1:
            stop(f"{a.single} takes one --{name}, not {n}")
    return a


def main(argv=None):
    a = parse(argv)
    device, runs = pick_device(a.device), []
    if a.threads:
        torch.set_num_threads(a.threads)
    for path in a.ckpt:
        model, state = load_model(path, device, a.trick)
        if n_stages(model.cfg) < 2:
            stop(f"--ckpt={path}: one layer and no loop, so there is no place to exit; train with --n_loop=2 or more")
        if model.cfg.n_loop == 1 and a.kv and "reuse" in a.kv:
            stop(f"--kv=reuse: {path} has no loop, so a skipped layer has no earlier pass to take from; use copy")
        runs.append((run_folder(path), model, *data_of(state)))
    run, model, folder, _ = runs[0]
    if a.single:
        a.kv = a.kv or ["reuse" if model.cfg.n_loop > 1 else "copy"]
        if a.kv[0] == "full":
            stop("--kv=full needs every pass of every token, so it cannot generate: use copy or reuse")
    a.kv = a.kv or ["full", "copy", "reuse"]
    out = Path(a.out_dir or ("out/early_exit" if len(runs) > 1 else run))          # no run's own results are replaced
    target = Path(a.json) if a.json else None if a.single and not a.out_dir else out / "early_exit.json"
    check_writable("--out_dir or --json", out, target.parent if target else out)
    if a.prompt:
        results = time_prompts(model, folder, a)
    elif a.force_saved:
        results = time_schedules(model, a)
    else:
        results = []
        for run, model, folder, meta in runs:
            results.append(measure_run(run.name, model, folder, meta, a))
            print_run(results[-1])
        plot_frontier(results, out / "early_exit.png")
    if target:
        write_atomic(target, json.dumps(results, indent=1).encode())
        print(f"wrote {target}" + ("" if a.single else f" and {out / 'early_exit.png'}"))


if __name__ == "__main__":
    main()
