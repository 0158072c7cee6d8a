"""
Early exits: let a token leave the loop as soon as its prediction is certain, and measure what that saves and costs. And
drafting, which costs nothing: early passes guess the next tokens, one call of the other passes checks them.

    python train.py --loss=per_loop --out_dir=out/x            # supervise every pass; terminal models work, badly
    python early_exit.py --ckpt out/x                          # convergence, frontier, KV policies; table, PNG, JSON
    python early_exit.py --ckpt out/a out/b                    # frontiers of several runs in one plot
    python early_exit.py --ckpt out/x --prompt "The state" --exit_tau 2        # generate, with and without exits
    python early_exit.py --ckpt out/x --force_saved 30 50      # time of a schedule of exits that saves these FLOPs
    python early_exit.py --ckpt out/x --prompt "The state" --draft_passes=1    # generate, with and without drafting
    python early_exit.py --ckpt out/a out/b --draft_study      # how much faster, by passes and length of the drafts

exits.py has the mechanism of exits, draft.py that of drafting, exit_speed.py takes the times. Here tokens of known
text are scored: with keys and values of the full depth, as the paper does, and as generation works. tau comes from
validation text, everything else from test text. Every point is compared with a fixed smaller depth and with random
exits that save the same FLOPs. Arithmetic is fp32.

Shapes: B rows, T positions, S exit points, the last of which is the whole model, N tokens.
"""
import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.load import even_starts, is_task, read_windows
from data.prepare import load_tokenizer, token_bytes
from draft import check_drafting
from exit_cost import Costs, calibrate, costs, exit_chance, first_below, fixed_depth, random_exits, saved
from exit_speed import study_drafts, time_drafts, time_prompts, time_schedules, write_drafts
from exits import CRITERIA, begin, doubt, exit_at, exit_below, jsd, n_stages, read, score_at_once, score_by_step
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import duration, misused, progress, require_at_least, stop
from lib.files import check_writable, write_atomic
from lib.machine import pick_device
from lib.ops import check_sampling, norm
from lib.plots_model import plot_drafts, plot_frontier

SAVED = (0.0, 0.05, 0.10, 0.20, 0.30)            # the savings the paper reports
STEP_TOKENS = 16384                              # of the test tokens, those for a policy that goes position by position
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


def score_layers(model, x, y, layers):
    """score_exit_points for one batch x, y (B, T); "layers" (L, 3) is summed over the rows."""
    context = model.context(x, model.cfg.n_loop, None)
    states = layer_states(model, x, context)
    S = n_stages(model.cfg)
    final = read(model, S - 1, states[-1], context).float().log_softmax(-1)
    earlier, before = None, begin(model, x, context).state
    scores = {name: [] for name in ("ce", "agree", *CRITERIA, *layers * ["layers"])}
    for layer, state in enumerate(states):
        last, boundary = layer == len(states) - 1, is_exit_point(model.cfg, layer)
        if not (layers or boundary):
            continue
        logits = read(model, S - 1 if last else 0, state, context)
        logp = logits.float().log_softmax(-1).flatten(0, 1)                        # (N, V)
        if layers:
            divergence = jsd(logp, final.flatten(0, 1))
            means = [divergence.mean(), (divergence < 0.5).float().mean(), F.nll_loss(logp, y.flatten())]
            scores["layers"].append(torch.stack(means) * len(x))
        if not boundary:
            continue
        scores["ce"].append(F.nll_loss(logp, y.flatten(), reduction="none"))
        scores["agree"].append((logits.argmax(-1) == final.argmax(-1)).flatten())
        for name in CRITERIA if not last else ():
            scores[name].append(doubt(name, logits, earlier, state, before).flatten())
        earlier, before = logits, state
    return {name: torch.stack(values).cpu() for name, values in scores.items()}


@torch.no_grad()
def score_exit_points(model, batches, label="", layers=True):
    """Per token, keys and values of the full depth: "ce" (S, N) nats at each exit point, "agree" (S, N) whether its
    likeliest token is the final one, each criterion (S - 1, N). layers: also "layers", mean JSD to the final readout,
    share of tokens below 0.5 and nats after every effective layer but the coda's, whose last is the final readout."""
    parts = []
    for i, (x, y) in enumerate(batches, 1):
        parts.append(score_layers(model, x, y, layers))
        progress(f"{label} {i}/{len(batches)} batches of teacher forcing", False)
    sums = [part.pop("layers") for part in parts if layers]
    scores = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    if layers:
        scores["layers"] = (sum(sums) / sum(len(x) for x, _ in batches)).tolist()
    return scores


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


def starts_of_texts(model, folder, meta, n=4):
    """Prompts [(1, T / 8)] for the study of drafting: where n windows spread over the test text begin."""
    T = model.cfg.block_size
    x, _, _ = load_windows(folder, meta, "test", n * T, T)
    return list(x[:n, :max(1, T // 8)].to(model.table.device).split(1))


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
    document: torch.Tensor                       # in which each window begins
    scores: dict                                 # of score_exit_points
    interval: Bootstrap
    bytes_per_token: float
    costs: Costs


def thin_out(test, n_tokens, batch_size):
    """About so many of the test tokens: windows evenly spread over those there are."""
    x, y = (torch.cat(parts) for parts in zip(*test.batches))
    n, T = x.shape
    fewer = max(1, min(n, n_tokens // T))
    kept = torch.arange(fewer) * n // fewer
    batches = list(zip(x[kept].split(batch_size), y[kept].split(batch_size)))
    scores = {name: test.scores[name].view(-1, n, T)[:, kept].flatten(1) for name in ("ce", *CRITERIA)}
    document = test.document[kept]
    return replace(test, batches=batches, document=document, scores=scores, interval=Bootstrap(document, T))


def in_units(nats, bytes_per_token):
    """Nats per token, also as perplexity and as bits per byte."""
    return {"nats": nats, "ppl": math.exp(nats), "bpb": nats / math.log(2) / bytes_per_token}


def measure_point(test, depth, nats, random, saving, way):
    """One point of a frontier. Exits at depth (N,) save saving and have nats (N,); random (N,) are the nats of random
    exits that save as much."""
    c, interval = test.costs, test.interval
    ce = test.scores["ce"]
    full = ce[-1]
    fixed = fixed_depth(c, ce, saving, way)
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
        random = random_exits(c, ce, depth, saving, way)
        point.update(measure_point(test, depth, nats, random, saving, way))
    return points


def score_batches(model, batches, rules, kv):
    """Nats and depths (N,) of batches, each with its rule of exit, scored as generation works."""
    parts = []
    for (x, y), rule in zip(batches, rules):
        score = score_by_step if model.cfg.n_coda and rule.reads else score_at_once
        parts.append(score(model, x, y, rule, kv))
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


def measure_policies(name, model, test, frontier, a):
    """The points of the charged frontier again, as generation works, under the policies of --kv. Where that goes one
    position at a time, on fewer windows, more of them side by side."""
    by_step = model.cfg.n_coda and CRITERIA[a.criterion]
    n_tokens = a.policy_tokens or (STEP_TOKENS if by_step else a.tokens)
    test = thin_out(test, n_tokens, a.batch_size * (4 if by_step else 1))
    points = [p for p in frontier["charged"][a.criterion] if p["tau"] is not None]
    kinds = [kv for kv in a.kv if kv == "copy" or (kv == "reuse" and test.costs.looped)]
    policies, jobs, done, start = {}, len(kinds) * len(points), 0, time.time()
    for kv in kinds:
        policies[kv], generator = [], torch.Generator().manual_seed(0)
        for point in points:
            policies[kv].append(score_policy(model, test, point, a.criterion, kv, generator))
            done += 1
            left = (time.time() - start) / done * (jobs - done)
            progress(f"{name}: {kv}, point {done}/{jobs}, ETA {duration(left)}", False)
    return {"policies": policies, "policy_tokens": test.scores["ce"].size(1)}


def measure_run(name, model, folder, meta, a):
    """All numbers of one run, as plain Python."""
    cfg, c, device = model.cfg, costs(model), model.table.device
    texts = {split: load_windows(folder, meta, split, a.tokens, cfg.block_size) for split in ("val", "test")}
    scores = {}
    for split, (x, y, document) in texts.items():
        inputs = x.to(device).split(a.batch_size)
        targets = y.to(device).split(a.batch_size)
        batches = list(zip(inputs, targets))
        scores[split] = score_exit_points(model, batches, f"{name}: {split}", layers=split == "test")
    # From here on y, document and batches are those of the test text.
    lengths = token_bytes(load_tokenizer(folder))
    bytes_per_token = lengths[y.numpy()].sum().item() / y.numel()
    interval = Bootstrap(document, cfg.block_size)
    test = TestText(batches, document, scores["test"], interval, bytes_per_token, c)
    layers, fixed, frontier = [], [], {}
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
    return {"run": name, "stages": c.stages, "looped": c.looped, "criterion": a.criterion, "costs": asdict(c),
            "tokens": y.numel(), "calibration_tokens": texts["val"][1].numel(), "unit": interval.unit,
            "units": interval.groups, "bytes_per_token": bytes_per_token, "layers": layers, "fixed": fixed,
            "oracle": oracle, "frontier": frontier, **measure_policies(name, model, test, frontier, a)}


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
        print_points(f"{criterion}, tests charged, scored as generation works ({result['policy_tokens']} tokens): {kv}",
                     points)
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
    add("--policy_tokens", 0, f"of the test tokens, those for the policies copy and reuse; 0: all, or {STEP_TOKENS:,} "
        "where a coda makes them slow")
    add("--batch_size", 16, "windows scored side by side")
    parser.add_argument("--prompt", nargs="+", help="generate from these texts instead")
    add("--exit_tau", 1.0, "tau of the generation; 0 never exits")
    add("--draft_passes", 0, "draft with this many passes and verify with the others; 0: exits instead")
    add("--draft_tokens", "auto", "how many to draft at a time; auto: by what was accepted so far")
    parser.add_argument("--draft_study", action="store_true", help="time every --draft_passes with many --draft_tokens, "
                        "greedy and, if given, at --temperature")
    add("--max_new_tokens", 100, "this many; with exits at most, and what block_size leaves")
    add("--temperature", 0.0, "0: the likeliest token")
    add("--top_k", 0, "sample from the likeliest ones only; 0: all")
    add("--seed", 0, "of sampling; row i draws with seed + i")
    parser.add_argument("--force_saved", nargs="+", type=float, metavar="PERCENT", help="time exits with this saving")
    add("--rounds", 7, "timed rounds, in turns")
    add("--device", "", "cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", 0, "CPU threads; 0: one per core")
    add("--trick", "", "file of the runs' trick, if it is outside tricks/")
    add("--out_dir", "", "folder for early_exit.png and .json, or draft_study (default: the run's; for several "
        "out/early_exit)")
    add("--json", "", "file to write the numbers to instead of OUT_DIR/early_exit.json")
    a = parser.parse_args(argv)
    require_at_least(a, tokens=1, batch_size=1, max_new_tokens=1, rounds=1, threads=0)
    require_at_least(a, policy_tokens=0, exit_tau=0, draft_passes=0, temperature=0, top_k=0, seed=0)

    def given(*names):
        return [name for name in names if getattr(a, name) != parser.get_default(name)]
    for name in given("exit_tau", "draft_passes", "draft_tokens", "temperature", "top_k", "seed"):
        if not a.prompt and not (a.draft_study and name in ("temperature", "top_k", "seed")):
            stop(f"--{name} says how to generate: give --prompt as well, or drop it")
    for name in given("exit_tau", "kv"):
        if a.draft_passes or a.draft_study:
            stop(f"--{name} is for exits, and drafting makes none: drop it")
    if a.draft_tokens != "auto":
        if not a.draft_tokens.isdecimal():
            stop(f"--draft_tokens={a.draft_tokens}: must be a number, or auto")
        a.draft_tokens = int(a.draft_tokens)
    try:
        check_sampling(a.temperature, a.top_k)
    except ValueError as e:
        stop(f"--{e}")
    if a.quick:
        a.tokens = max(1, a.tokens // 8)
    measurements = given("prompt", "force_saved", "draft_study")
    if len(measurements) > 1:
        stop(f"--{measurements[0]} and --{measurements[1]} are two measurements: give one of them")
    a.single = f"--{measurements[0]}" if a.prompt or a.force_saved else ""
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
        if a.draft_passes or a.draft_study:
            try:
                check_drafting(model.cfg.n_loop, a.draft_passes or 1, a.draft_tokens)
            except ValueError as e:
                stop(f"--{e}")
        runs.append((run_folder(path), model, *data_of(state)))
    run, model, folder, _ = runs[0]
    if a.single:
        a.kv = a.kv or ["reuse" if model.cfg.n_loop > 1 else "copy"]
        if a.kv[0] == "full":
            stop("--kv=full needs every pass of every token, so it cannot generate: use copy or reuse")
    a.kv = a.kv or ["full", "copy", "reuse"]
    out = Path(a.out_dir or ("out/early_exit" if len(runs) > 1 else run))          # no run's own results are replaced
    name = "draft_study" if a.draft_study else "early_exit"
    target = Path(a.json) if a.json else None if a.single and not a.out_dir else out / f"{name}.json"
    check_writable("--out_dir or --json", out, target.parent if target else out)
    if a.draft_passes:
        results = time_drafts(model, folder, a)
    elif a.prompt:
        results = time_prompts(model, folder, a)
    elif a.force_saved:
        results = time_schedules(model, a)
    elif a.draft_study:
        results = []
        for temperature in sorted({0.0, a.temperature}):
            at = argparse.Namespace(**{**vars(a), "temperature": temperature})
            for run, model, folder, meta in runs:
                prompts = starts_of_texts(model, folder, meta)
                results.append(study_drafts(run.name, model, prompts, at))
        write_drafts(out / "draft_study.csv", results)
        plot_drafts(results, out / "draft_study.png")
    else:
        results = []
        for run, model, folder, meta in runs:
            results.append(measure_run(run.name, model, folder, meta, a))
            print_run(results[-1])
        plot_frontier(results, out / "early_exit.png")
    if target:
        write_atomic(target, json.dumps(results, indent=1).encode())
        print(f"wrote {target}" + ("" if a.single else f" and {out / name}.png"))


if __name__ == "__main__":
    main()
