"""
Train one looped language model of any variant.

    python train.py                                              # pocket preset, real English, 2 CPU cores: ~4 min
    python train.py --n_loop=1 --n_recur=4 --inject=none         # the plain model of the same depth
    python train.py --preset=isodepth-r4 --n_embd=640 --data=fineweb-edu-32000 --max_flops=1e18   # one GPU
    torchrun --standalone --nproc_per_node=8 train.py --preset=...                              # several GPUs
    python train.py --list_presets                               # parameters, FLOPs and expected time of each

A run is a folder (--out_dir): config.json, metrics.csv, ckpt.pt, loss.png, sample.txt and, last, summary.json. Running
the same command again returns at once when the folder is complete and goes on from its checkpoint when it is not.
Batch t depends on (seed, t) only and evaluation reads fixed windows: a resumed run equals an unbroken one bit for bit.
"""
import os
import sys

import argparse
import csv
import ctypes
import json
import math
import shlex
import shutil
import signal
import time
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data.prepare import load_tokenizer, prepare, read_json, stop, token_bytes, write_atomic
from model import Config, LoopedLM

ROOT = Path(__file__).resolve().parent

# --- flags: (name, type, default, help); a preset sets some of them, the command line overrides both ---
def boolean(text):
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


FLAGS = {
    "run": [
        ("preset", str, "pocket", "group of flags that later flags override; --list_presets shows them"),
        ("out_dir", str, "", "run folder (default: out/PRESET); another run needs another folder"),
        ("data", str, "sotu", "folder written by data/prepare.py, or its name under data/; sotu is prepared if absent"),
        ("seed", int, 1337, "initial weights and order of the batches"),
        ("resume", boolean, False, "go on from the checkpoint, also of a complete run: give it a longer horizon")],
    "model (fields of model.Config)": [
        ("n_embd", int, 192, "width D"),
        ("n_head", int, 0, "attention heads; 0: n_embd / head_dim"),
        ("head_dim", int, 64, "width of a head where n_head is 0"),
        ("block_size", int, 256, "context length T in tokens"),
        ("vocab_size", int, 0, "0: as the data has it; for --data=sotu the vocabulary to train (default 4096)"),
        ("n_prelude", int, 1, "blocks before the loop"),
        ("n_recur", int, 1, "blocks inside the loop, shared by all passes"),
        ("n_coda", int, 1, "blocks after the loop"),
        ("n_loop", int, 4, "passes r through the loop; 1 is a plain transformer"),
        ("inject", str, "linear", "how a pass sees the prelude's output: none | add | linear | hyper"),
        ("loop_norm", boolean, True, "RMSNorm at the end of every pass"),
        ("readout", str, "norm", "norm before the head: norm (always) | raw (never) | final (last pass only)"),
        ("n_expert", int, 0, "experts in every feed-forward layer; 0: dense layers"),
        ("n_active", int, 2, "experts that a token takes, each 1/n_active as wide as the dense layer"),
        ("balance", str, "loss", "keep the experts in use by a loss | a bias on the choice, without that loss"),
        ("tied", boolean, False, "the head uses the embedding's matrix, drawn from N(0, 1)"),
        ("mup_base", int, 0, "muP: the width for which learning_rate was found; 0: off")],
    "loss": [
        ("loss", str, "terminal", "terminal: cross-entropy after the last pass | per_loop: mean over all passes"),
        ("norm_penalty", float, 0.0, "lambda: adds lambda * mean square of the loop states"),
        ("bptt", int, 0, "gradients flow through the last bptt passes only; 0: through all"),
        ("sample_loops", boolean, False, "train each step at a depth of 1 .. 2 n_loop - 1 passes, n_loop on average")],
    "batch and horizon (give exactly one of the three)": [
        ("batch_size", int, 8, "sequences per micro-batch, over all processes; lower it when memory runs out"),
        ("grad_accum", int, 1, "micro-batches per step: the step sees batch_size * grad_accum sequences"),
        ("max_steps", int, 0, "optimizer steps"),
        ("max_tokens", float, 0.0, "training tokens, rounded to whole steps"),
        ("max_flops", float, 0.0, "training FLOPs, rounded to whole steps; Config.flops_per_token counts them")],
    "optimizer": [
        ("optimizer", str, "muon", "muon (torch's, for the blocks' matrices; AdamW for embedding and head) | adamw"),
        ("learning_rate", float, 1e-2, "peak; Muon's update is scaled to AdamW's size, so one rate serves both"),
        ("embed_lr", float, 10.0, "rate of the embedding, in units of learning_rate: its entries start at unit scale"),
        ("weight_decay", float, 0.1, "on matrices, not on the embedding"),
        ("beta2", float, 0.95, "AdamW's second-moment decay; lower for few, large steps"),
        ("grad_clip", float, 1.0, "longest gradient; 0: no clipping"),
        ("schedule", str, "cosine", "after warm-up: cosine | linear | wsd (falls over the last 20%%) | constant"),
        ("warmup_steps", int, 20, "steps of linear warm-up"),
        ("final_lr", float, 0.1, "learning rate of the last step, as a fraction of the peak")],
    "evaluation and logging": [
        ("eval_interval", int, 100, "steps between evaluations and checkpoints; 0: only after the last step"),
        ("eval_tokens", int, 65536, "validation tokens, in windows spread evenly over val.bin"),
        ("log_interval", int, 10, "steps between rows of metrics.csv")],
    "machine": [
        ("device", str, "", "cuda, mps or cpu (default: the first of them that is there)"),
        ("dtype", str, "", "bfloat16 | float32 (default: bfloat16 autocast where the hardware has it)"),
        ("compile", boolean, None, "torch.compile the blocks (default: on CUDA only)"),
        ("threads", int, 0, "CPU threads; 0: one per core; use 1 for runs side by side"),
        ("peak_tflops", float, 0.0, "peak of the device for MFU; 0: known GPUs only")],
}
DEFAULTS = {name: default for group in FLAGS.values() for name, _, default, _ in group}
HORIZON = ("max_steps", "max_tokens", "max_flops")
CHOICES = {"inject": ("none", "add", "linear", "hyper"), "readout": ("norm", "raw", "final"),
           "loss": ("terminal", "per_loop"), "balance": ("loss", "bias"), "optimizer": ("muon", "adamw"),
           "dtype": ("", "bfloat16", "float32"), "schedule": ("cosine", "linear", "wsd", "constant")}
# what may change when a run goes on: not the model, nor its training up to rounding; the data is compared by its hash
FREE = {"preset", "out_dir", "data", "vocab_size", "resume", "log_interval", "eval_interval", "eval_tokens", "device",
        "dtype", "compile", "threads", "peak_tflops", "head_dim"}
# and with --resume also these
EXTENDABLE = {*HORIZON, "learning_rate"}

ISODEPTH = dict(n_embd=640, head_dim=128, block_size=2048, n_prelude=2, n_coda=2, batch_size=32, grad_accum=4,
                data="fineweb-edu-32000", max_flops=1e18, weight_decay=0.0,
                schedule="linear", warmup_steps=0, eval_interval=500, eval_tokens=2 ** 22)
LOOPED_MOE = dict(n_embd=704, block_size=1024, n_prelude=0, n_coda=0, inject="none", loop_norm=False, batch_size=32,
                  grad_accum=4, data="fineweb-edu-gpt2", max_flops=1e18, optimizer="adamw", learning_rate=2e-3,
                  embed_lr=1, weight_decay=1e-4, schedule="wsd", warmup_steps=200, final_lr=0.05, eval_interval=500,
                  eval_tokens=2 ** 20)
READOUT = dict(block_size=256, n_prelude=0, n_coda=0, n_loop=4, inject="none", loop_norm=False, loss="per_loop",
               data="wikitext103-20000", optimizer="adamw", learning_rate=3e-4, embed_lr=1, weight_decay=0.01,
               beta2=0.999, schedule="constant", warmup_steps=0, eval_interval=2000, eval_tokens=2 ** 18)
PRESETS = {
    "pocket": dict(max_steps=600),
    "isodepth-r1": dict(ISODEPTH, n_recur=16, n_loop=1, inject="none"),
    "isodepth-r2": dict(ISODEPTH, n_recur=8, n_loop=2),
    "isodepth-r4": dict(ISODEPTH, n_recur=4, n_loop=4),
    "isodepth-r8": dict(ISODEPTH, n_recur=2, n_loop=8),
    "looped-moe-base": dict(LOOPED_MOE, n_recur=16, n_loop=1),
    "looped-moe-looped": dict(LOOPED_MOE, n_recur=8, n_loop=2),
    "looped-moe-moe": dict(LOOPED_MOE, n_recur=16, n_loop=1, n_expert=8),
    "looped-moe-both": dict(LOOPED_MOE, n_recur=8, n_loop=2, n_expert=8),
    "readout-44m": dict(READOUT, n_embd=512, n_recur=8, batch_size=64, max_steps=105_000),
    "readout-129m": dict(READOUT, n_embd=768, n_recur=12, batch_size=32, max_steps=210_000),
}


def parse(argv=None):
    """Flags of one run: (args, given), args complete, given only those that the command line asks for, by name or with
    a --preset."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("--list_presets", action="store_true", help="print the presets and exit")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, kind, default, text in flags:
            shown = "" if default in ("", None) else f" (default: {default})"
            bare = dict(nargs="?", const=True) if kind is boolean else {}
            group.add_argument(f"--{name}", type=kind, choices=CHOICES.get(name), help=text + shown,
                               metavar=None if name in CHOICES else name.upper(), **bare)
    line = vars(parser.parse_args(argv))
    if line.pop("list_presets", False):
        list_presets()
        raise SystemExit(0)
    name = line.get("preset", DEFAULTS["preset"])
    if name not in PRESETS:
        stop(f"--preset={name}: choose one of {', '.join(PRESETS)}")
    args = complete(line)
    asked = {*line, *(PRESETS[name].keys() - EXTENDABLE if "preset" in line else ())}
    if "head_dim" in asked:
        asked.add("n_head")
    return args, {name: getattr(args, name) for name in asked}


def complete(line):
    """Fill the flags of a command line up with its preset's and the defaults. A horizon on the line replaces the
    preset's; every flag that cannot work is refused here, before any work is done."""
    preset = dict(PRESETS[line.get("preset", DEFAULTS["preset"])])
    if len([h for h in HORIZON if line.get(h)]) > 1:
        stop("give exactly one of --max_steps, --max_tokens and --max_flops")
    if any(line.get(h) for h in HORIZON):
        preset = {k: v for k, v in preset.items() if k not in HORIZON}
    a = {**DEFAULTS, **preset, **line}
    if not any(a[h] for h in HORIZON):
        stop("the run has no end: give one of --max_steps, --max_tokens and --max_flops")
    a["out_dir"] = a["out_dir"] or f"out/{a['preset']}"
    a["n_head"] = a["n_head"] or max(1, a["n_embd"] // max(1, a["head_dim"]))
    for name in ("batch_size", "grad_accum", "eval_tokens", "log_interval"):
        if a[name] < 1:
            stop(f"--{name}={a[name]}: must be at least 1")
    for name in ("learning_rate", "embed_lr", "weight_decay", "grad_clip", "warmup_steps", "norm_penalty", "bptt",
                 "eval_interval", "threads", "peak_tflops", *HORIZON):
        if not 0 <= a[name] < math.inf:
            stop(f"--{name}={a[name]}: must be a finite number and not negative")
    for name, fits, limit in (("beta2", a["beta2"] < 1, "below 1"), ("final_lr", a["final_lr"] <= 1, "at most 1"),
                              ("seed", a["seed"] < 2 ** 63, "below 2^63")):
        if not (fits and a[name] >= 0):
            stop(f"--{name}={a[name]}: must be at least 0 and {limit}")
    if a["bptt"] and a["loss"] == "per_loop":
        stop("--bptt with --loss=per_loop: the early readouts would train nothing but the head; drop one of them")
    return argparse.Namespace(**a)


def config_of(args, vocab_size):
    try:
        return Config(**{f.name: getattr(args, f.name) for f in fields(Config) if f.name != "vocab_size"},
                      vocab_size=vocab_size)
    except ValueError as e:
        stop(f"--{e}")


def steps_of(args, cfg):
    """Optimizer steps of the horizon: the one place where tokens and FLOPs become steps."""
    per_step = args.batch_size * args.grad_accum * cfg.block_size
    steps = args.max_steps or (args.max_tokens or args.max_flops / flops_of(args, cfg)) / per_step
    return max(1, round(steps))


def flops_of(args, cfg):
    """Training FLOPs per token, on average over the depths that --sample_loops visits."""
    depths = range(1, 2 * cfg.n_loop) if args.sample_loops else [cfg.n_loop]
    return sum(cfg.flops_per_token(r, bptt=args.bptt, readouts=r if args.loss == "per_loop" else 1)
               for r in depths) / len(depths)


def loops_at(seed, step, n_loop):
    """Passes of a step under --sample_loops: 2 n_loop - 1 consecutive steps take each of 1 .. 2 n_loop - 1 once, in an
    order drawn from (seed, block of steps). So the mean is n_loop, not only expected to be, and all ranks agree."""
    block, i = divmod(step, 2 * n_loop - 1)
    return 1 + int(np.random.default_rng((seed, block, 2)).permutation(2 * n_loop - 1)[i])


def list_presets():
    """Estimates: 2e11 FLOP/s for two CPU cores with bf16, 2e14 for one current GPU."""
    print(f"{'preset':18s} {'parameters':>11s} {'unique N':>9s} {'depth':>5s} {'FLOPs/token':>11s} {'tokens':>8s} "
          f"{'FLOPs':>8s} {'2 cores':>9s} {'1 GPU':>9s}")
    for name in PRESETS:
        args = complete({"preset": name})
        size = str(args.data).rpartition("-")[2]
        cfg = config_of(args, {"gpt2": 50257, "sotu": 4096}.get(size) or int(size))
        n, F = cfg.param_counts(), flops_of(args, cfg)
        tokens = steps_of(args, cfg) * args.batch_size * args.grad_accum * cfg.block_size
        print(f"{name:18s} {sum(n.values()) / 1e6:10.1f}M {(n['once'] + n['recurrent'] + n['injection']) / 1e6:8.1f}M "
              f"{cfg.depth():5d} {F:11.2e} {tokens:8.1e} {F * tokens:8.1e} {duration(F * tokens / 2e11):>9s} "
              f"{duration(F * tokens / 2e14):>9s}")


def duration(seconds):
    s = int(seconds)
    if s >= 360_000:
        return f"{s / 86400:.0f} days"
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


# --- machine ---
def keep_freed_memory():
    """Tell glibc to keep freed memory instead of returning it to the system. Otherwise every large activation is mapped
    and page-faulted anew in each step, a tenth of its time on CPU (results/bench.md). No effect elsewhere."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2 ** 30)                     # M_MMAP_THRESHOLD: serve blocks up to 1 GiB from the heap
        mallopt(-1, 2 ** 31 - 1)                 # M_TRIM_THRESHOLD: and do not shrink the heap
    except (OSError, AttributeError, TypeError):
        pass


def pick_device(asked=""):
    if asked:
        try:
            torch.zeros(1, device=asked).item()
        except (RuntimeError, AssertionError) as e:
            stop(f"--device={asked}: not usable on this machine ({str(e).splitlines()[0][:120]})")
        return asked
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def pick_dtype(device, asked=""):
    """bfloat16 where the hardware computes in it (AVX512-BF16 and AMX among CPUs), float32 elsewhere."""
    if asked:
        return asked
    if device.startswith("cuda"):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        has_bf16 = device == "cpu" and probe()
    return "bfloat16" if has_bf16 else "float32"


PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}    # dense bf16


def peak_flops(args, device):
    name = torch.cuda.get_device_name() if device.startswith("cuda") else ""
    return 1e12 * (args.peak_tflops or next((t for key, t in PEAK_TFLOPS.items() if key in name), 0))


def try_compile(model, idx, autocast):
    """Compile the blocks; where that fails (no compiler, no Triton) train eagerly and say so in one line."""
    try:
        model.compile_blocks()
        with autocast():
            model(idx, idx)[1]["loss"].backward()
    except Exception as e:                       # whatever the compiler raises, the eager model still works
        print(f"warning: torch.compile failed ({type(e).__name__}), training eagerly", file=sys.stderr)
        model.compile_blocks(on=False)
    model.zero_grad(set_to_none=True)


# --- data ---
def open_data(args):
    """(folder, meta) of the prepared corpus, checked against its meta.json; the default one is prepared if absent."""
    name = f"sotu-{args.vocab_size or 4096}" if args.data == "sotu" else args.data
    folder = next((f for f in (Path(name), ROOT / "data" / name) if (f / "meta.json").is_file()), None)
    if folder is None and args.data == "sotu":   # moved into place whole: another process may be doing the same
        folder, temporary = ROOT / "data" / name, ROOT / "data" / f"{name}.{os.getpid()}.tmp"
        prepare(vocab_size=args.vocab_size or 4096, out_dir=temporary)
        try:
            os.rename(temporary, folder)
        except OSError:                          # the other one was faster
            shutil.rmtree(temporary)
    if folder is None:
        known = sorted(m.parent.name for m in ROOT.glob("data/*/meta.json"))
        stop(f"--data={args.data}: no prepared corpus there; prepared are {', '.join(['sotu', *known])}; "
             f"data/prepare.py makes others")
    meta = read_json(folder / "meta.json")
    if args.vocab_size not in (0, meta["vocab_size"]):
        stop(f"--vocab_size={args.vocab_size}: the corpus {folder} has {meta['vocab_size']} tokens; drop the flag")
    for split in ("train", "val"):
        expected, path = meta["splits"][split]["tokens"], folder / f"{split}.bin"
        found = path.stat().st_size // np.dtype(meta["dtype"]).itemsize if path.is_file() else 0
        if found != expected:
            stop(f"{path}: {found} tokens where meta.json says {expected}; run data/prepare.py again")
        if found <= args.block_size:
            stop(f"{path}: {found} tokens are too few for block_size={args.block_size}; lower it or give more text")
    return folder, meta


@lru_cache(maxsize=2)
def shuffled(seed, epoch, n):
    return np.random.default_rng((seed, epoch)).permutation(n)


def batch_starts(seed, step, n_sequences, n_tokens, block_size):
    """Where the windows of a step begin: each epoch visits all windows once, in an order drawn from (seed, epoch) and
    shifted so that the borders between windows move. A function of its arguments only: nothing to save, to resume."""
    windows = (n_tokens - 1) // block_size - 1 or 1
    starts = []
    for i in range(step * n_sequences, (step + 1) * n_sequences):
        epoch, j = divmod(i, windows)
        room = n_tokens - windows * block_size   # the shift leaves one token behind the last window, its target
        shift = int(np.random.default_rng((seed, epoch, 1)).integers(room))
        starts.append(int(shuffled(seed, epoch, windows)[j]) * block_size + shift)
    return starts


def read_windows(path, dtype, starts, block_size):
    """Inputs and targets (B, T) int64. Plain reads: a memory map would grow with every page it has touched."""
    size = np.dtype(dtype).itemsize
    rows = [np.fromfile(path, dtype=dtype, count=block_size + 1, offset=start * size) for start in starts]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def evaluate(model, folder, meta, n_tokens, batch_size, lengths, per_loop=False, n_loop=None, split="val"):
    """Loss on fixed windows spread evenly over a split: {"loss" nats/token of the last pass, "bpb" bits per byte of the
    text those targets stand for, "ce" nats after each supervised pass, "norm" mean length of each H_k}."""
    T, total, device = model.cfg.block_size, meta["splits"][split]["tokens"], model.table.device
    available = (total - 1) // T
    n = max(1, min(available, n_tokens // T))
    starts = [i * available // n * T for i in range(n)]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sums, n_bytes = 0, 0
    for i in range(rank * batch_size, n, world * batch_size):
        x, y = read_windows(folder / f"{split}.bin", meta["dtype"], starts[i:i + batch_size], T)
        n_bytes += int(lengths[y.numpy()].sum())
        _, out = model(x.to(device), y.to(device), n_loop=n_loop, loss="per_loop" if per_loop else "terminal")
        sums = sums + torch.cat([out["ce"], out["norm"]]).cpu().double() * len(x)
    K = model.cfg.n_loop if n_loop is None else n_loop
    sums = torch.as_tensor(sums if n > rank * batch_size else [0.0] * ((K if per_loop else 1) + K), dtype=torch.double)
    sums = torch.cat([sums, torch.tensor([n_bytes], dtype=torch.double)])
    if world > 1:
        sums = sums.to(device) if device.type == "cuda" else sums
        dist.all_reduce(sums)
    *means, n_bytes = sums.tolist()
    means = [m / n for m in means]
    ce, norms = means[:-K], means[-K:]
    return {"loss": ce[-1], "bpb": ce[-1] * n * T / n_bytes / math.log(2), "ce": ce, "norm": norms}


# --- optimizer ---
def make_optimizers(model, args):
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for embedding and head. Muon's update has
    AdamW's usual size (match_rms_adamw), so both follow one learning rate."""
    matrices = [p for name, p in model.named_parameters() if not name.startswith(("embed", "head", "lanes"))]
    w = model.cfg.width_ratio                    # 1 without muP

    def slower(factor):                          # muP: a lower rate, while rate times decay stays what it was
        return {"weight_decay": args.weight_decay * factor, "lr_scale": 1 / factor}
    groups = [] if model.cfg.tied else [{"params": [model.head.weight], **slower(w)}]
    groups.append({"params": [model.embed.weight], "weight_decay": 0.0, "lr_scale": args.embed_lr})
    if model.cfg.inject == "hyper":
        groups.append({"params": list(model.lanes.parameters()), "weight_decay": 0.0})
    optimizers = []
    if args.optimizer == "muon":                 # all singular values equal: an update's norm grows as sqrt(w), not w
        optimizers.append(torch.optim.Muon([{"params": matrices, **slower(w ** 0.5)}], lr=args.learning_rate,
                                           adjust_lr_fn="match_rms_adamw"))
    else:
        groups.append({"params": matrices, **slower(w)})
    fused = model.table.device.type in ("cuda", "cpu")
    optimizers.append(torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, args.beta2), fused=fused))
    return optimizers


def lr_at(step, args, max_steps):
    """Learning rate of step 0 .. max_steps - 1: rises linearly to the peak, then never rises again."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    x = (step - args.warmup_steps) / max(1, max_steps - 1 - args.warmup_steps)     # 0 after warm-up, 1 at the end
    falling = {"constant": 0.0, "linear": x, "cosine": (1 - math.cos(math.pi * min(1, x))) / 2,
               "wsd": max(0.0, (x - 0.8) / 0.2)}[args.schedule]
    return args.learning_rate * (1 - (1 - args.final_lr) * min(1, falling))


def clip_and_measure(model, grad_clip):
    """Clip the gradient to length grad_clip (0: leave it); returns its length before."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)


# --- checkpoint ---
def save_checkpoint(path, **state):
    """Tensors and plain Python only, so that it loads without running code; renamed into place when complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:         # a full disk is a RuntimeError to torch
        temporary.unlink(missing_ok=True)
        stop(f"{path}: could not be written ({str(e).splitlines()[0][:120]}); an older one is as it was")


def load_checkpoint(ckpt, device="cpu"):
    """The dict of a ckpt.pt, or of the run folder that holds one. Never runs code found in the file."""
    path = Path(ckpt) / "ckpt.pt" if Path(ckpt).is_dir() else Path(ckpt)
    if not path.is_file():
        stop(f"{ckpt}: no checkpoint there; give a run folder or its ckpt.pt")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        state["config"], state["model"]
    except Exception as e:                       # pickle errors, zip errors, a payload that was refused
        stop(f"{path}: not a checkpoint of train.py, or damaged ({type(e).__name__}); nothing in it was run")
    return state


def load_model(ckpt, device="cpu"):
    """(model in evaluation mode, state of its checkpoint) from a run folder or a ckpt.pt."""
    state = load_checkpoint(ckpt, device)
    model = LoopedLM(Config(**state["config"])).to(device)
    model.load_state_dict(state["model"])
    return model.eval(), state


def check_same_run(given, saved, data_sha256, where, resume):
    """A run goes on with the flags and data it began with: what says otherwise is an error, not silently dropped."""
    if saved["data_sha256"] != data_sha256:
        stop(f"--data: not the corpus that {where} was trained on; choose another --out_dir")
    for name, value in given.items():
        may_differ = name in FREE or (resume and name in EXTENDABLE)
        if not may_differ and saved["args"].get(name, value) != value:
            stop(f"--{name}={value} contradicts {where}, begun with {name}={saved['args'][name]}: drop the flag, or "
                 f"choose another --out_dir")


# --- what a run leaves behind ---
def open_metrics(path, step, columns):
    """A function that appends rows to metrics.csv. Those behind the checkpoint at step are dropped: the resumed run
    writes them again."""
    kept = []
    if step and path.is_file():
        with open(path, newline="", encoding="utf-8") as f:
            kept = [row for row in csv.DictReader(f) if row["step"].isdigit() and int(row["step"]) <= step]

    def write(*rows, mode="a"):
        with open(path, mode, newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, columns, restval="", extrasaction="ignore")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)
    write(*kept, mode="w")
    return write


def progress(line, keep):
    """One line that rewrites itself on a terminal; in a log, the lines worth keeping and one a minute."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if keep else "", flush=True)
    elif keep or time.time() - progress.printed > 60:
        print(line, flush=True)
        progress.printed = time.time()


progress.printed = time.time()


def plot_loss(out, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    with open(out / "metrics.csv", newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    fig, ax = plt.subplots(figsize=(7, 4.2))
    ax.plot([float(r["tokens"]) / 1e6 for r in rows], [float(r["train_loss"]) for r in rows], color="0.65", lw=1,
            label="training batch")
    val = [(float(r["tokens"]) / 1e6, float(r["val_loss"])) for r in rows if r["val_loss"]]
    ax.plot(*zip(*val), "o-", color="C0", ms=4, label="validation")
    ax.set(xlabel="tokens seen (millions)", ylabel="loss (nats per token)", title=title)
    ax.grid(alpha=0.25)
    ax.legend()
    fig.tight_layout()
    fig.savefig(out / "loss.png", dpi=120)
    plt.close(fig)


def finish(out, model, encoding, args, cfg, val, tokens, wall_s):
    """Sample, plot and, last, summary.json: the row that fit_law.py collects, and the sign that the run is complete."""
    model.eval()
    model.compile_blocks(on=False)
    start = torch.tensor([[encoding.eot_token]], device=model.table.device)
    generator = torch.Generator(device=model.table.device).manual_seed(args.seed)
    ids = model.generate(start, min(200, cfg.block_size), temperature=0.8, top_k=50, generator=generator)
    sample = encoding.decode([t for t in ids[0].tolist() if t != encoding.eot_token])
    write_atomic(out / "sample.txt", sample.encode())
    counts = cfg.param_counts(active=True)       # what the scaling law counts: the experts that work on a token
    summary = dict(run=out.name, seed=args.seed, n_loop=cfg.n_loop, n_prelude=cfg.n_prelude, n_recur=cfg.n_recur,
                   n_coda=cfg.n_coda, n_embd=cfg.n_embd, n_expert=cfg.n_expert, inject=cfg.inject,
                   n_once=counts["once"], n_rec=counts["recurrent"] + counts["injection"],
                   n_total=sum(cfg.param_counts().values()), tokens=tokens,
                   flops=flops_of(args, cfg) * tokens, val_loss=val["loss"], val_bpb=val["bpb"],
                   wall_s=round(wall_s, 1), tok_per_s=round(tokens / wall_s, 1), val_ce=val["ce"], val_norm=val["norm"])
    plot_loss(out, f"{out.name}: {cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda} layers, "
                   f"{val['bpb']:.3f} bits per byte")
    write_atomic(out / "summary.json", json.dumps(summary, indent=1).encode())
    print(f"\n{sample[:400]}\n\nval {val['loss']:.4f} nats/token, {val['bpb']:.4f} bits/byte; "
          f"{tokens / 1e6:.2f}M tokens in {duration(wall_s)}; {out}/ holds loss.png, sample.txt, metrics.csv, ckpt.pt")


# --- the run ---
def train(args, given):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    master = rank == 0
    out = Path(args.out_dir)
    summary, ckpt_path = out / "summary.json", out / "ckpt.pt"
    if "data" not in given and (out / "config.json").is_file():
        begun = read_json(out / "config.json")["args"]
        args.data, args.vocab_size = begun["data"], given.get("vocab_size", begun["vocab_size"])
    config_of(args, args.vocab_size or 4096)     # refuses a bad model before the corpus is prepared
    folder, meta = open_data(args)
    data_sha256 = meta["splits"]["train"]["sha256"]
    if summary.is_file() and not args.resume:
        check_same_run(given, read_json(out / "config.json"), data_sha256, out, False)
        if master:
            print(f"{out} is complete (val {read_json(summary)['val_bpb']:.4f} bits/byte): nothing to do; "
                  f"--resume with a longer horizon goes on, another --out_dir starts anew")
        return
    state = None
    if ckpt_path.is_file():
        state = load_checkpoint(ckpt_path)
        if {"args", "optimizers", "step", "wall_s", "data_sha256"} - state.keys():
            stop(f"{ckpt_path}: holds weights but no optimizer, so training cannot go on; choose another --out_dir")
        check_same_run(given, state, data_sha256, ckpt_path, args.resume)
        changed = {name: given[name] for name in FREE & given.keys()}
        if args.resume:
            changed.update({name: given[name] for name in EXTENDABLE & given.keys()})
            if any(given.get(h) for h in HORIZON):
                changed.update({h: given.get(h, 0) for h in HORIZON})
        args = argparse.Namespace(**{**DEFAULTS, **state["args"], **changed, "out_dir": args.out_dir})
    elif args.resume:
        stop(f"--resume: no checkpoint in {out}; drop the flag to start the run")
    if args.batch_size % world:
        stop(f"--batch_size={args.batch_size} does not divide over {world} processes: "
             f"the nearest that does is {max(1, round(args.batch_size / world)) * world}")

    device = pick_device(args.device)
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if device == "cpu":
        keep_freed_memory()
    encoding = load_tokenizer(folder)
    lengths = token_bytes(encoding)
    cfg = config_of(args, meta["vocab_size"])
    max_steps, F = steps_of(args, cfg), flops_of(args, cfg)
    tokens_per_step = args.batch_size * args.grad_accum * cfg.block_size
    dtype = pick_dtype(device, args.dtype)
    device_type = device.split(":")[0]

    def autocast():
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")

    torch.manual_seed(args.seed)
    model = LoopedLM(cfg).to(device)
    optimizers = make_optimizers(model, args)
    step, wall_s = 0, 0.0
    if state:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step, wall_s = state["step"], state["wall_s"]
        if step > max_steps:
            stop(f"{ckpt_path} is at step {step}, past the {max_steps} steps asked for: give a longer horizon")
    if args.compile if args.compile is not None else device_type == "cuda":
        example = torch.zeros(args.batch_size // world, cfg.block_size, dtype=torch.long, device=device)
        try_compile(model, example, autocast)
    ddp = DistributedDataParallel(model) if world > 1 else model

    if master:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if step < max_steps:
                summary.unlink(missing_ok=True)  # of a complete run that is extended: not complete any more
            plain = dict(config=asdict(cfg), args=vars(args), torch=torch.__version__, python=sys.version.split()[0],
                         data_sha256=data_sha256, val_sha256=meta["splits"]["val"]["sha256"],
                         command=shlex.join(["python", *sys.argv]))
            write_atomic(out / "config.json", json.dumps(plain, indent=1).encode())
        except OSError as e:
            stop(f"--out_dir={out}: cannot write there ({e.strerror}); choose another folder")
        counts = cfg.param_counts()
        tokens = max_steps * tokens_per_step
        print(" + ".join(f"{name} {n / 1e6:.2f}M" for name, n in counts.items())
              + f" = {sum(counts.values()) / 1e6:.2f}M parameters"
              + (f", {sum(cfg.param_counts(active=True).values()) / 1e6:.2f}M active" if cfg.n_expert else "") + "\n"
              f"{cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda} = {cfg.depth()} layers deep, "
              f"{F / 1e6:.1f} MFLOPs/token\n{max_steps} steps x {tokens_per_step} = {tokens / 1e6:.2f}M tokens "
              f"({tokens / meta['splits']['train']['tokens']:.2f} epochs), {F * tokens:.2e} FLOPs\n"
              f"{device}, {dtype}, {torch.get_num_threads()} threads"
              + (f", {world} processes" if world > 1 else "") + (f"; going on from step {step}" if step else ""))
        passes = range(1, cfg.n_loop + 1)
        write_rows = open_metrics(out / "metrics.csv", step, [
            "step", "tokens", "flops", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm", "tok_per_s",
            *(f"val_ce_{k}" for k in passes if args.loss == "per_loop"), *(f"val_norm_{k}" for k in passes),
            *(("balance", "z") if cfg.n_expert else ())])

    signals = []
    previous = {s: signal.signal(s, lambda number, _: signals.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    peak = peak_flops(args, device) * world

    def refuse_to_go_on(what):
        kept = f"{ckpt_path} keeps the last good weights" if ckpt_path.is_file() else "no checkpoint was written yet"
        stop(f"step {step}: {what} is not finite; {kept}: --resume with a lower --learning_rate goes on from there, "
             f"more --warmup_steps need another --out_dir")

    def save():
        if not all(p.isfinite().all() for p in model.parameters()):
            refuse_to_go_on("a weight")
        if master:
            save_checkpoint(ckpt_path, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers],
                            step=step, wall_s=wall_s, config=asdict(cfg), args=vars(args), data_sha256=data_sha256)

    def validate():
        model.eval()
        with autocast():
            val = evaluate(model, folder, meta, args.eval_tokens, args.batch_size, lengths, args.loss == "per_loop")
        model.train()
        return val

    biased = cfg.n_expert and cfg.balance == "bias"
    val, begun, first = None, time.time(), step
    window, window_steps = 0.0, 0
    while step < max_steps:
        tick = time.perf_counter()
        lr = lr_at(step, args, max_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1)
        starts = batch_starts(args.seed, step, args.batch_size * args.grad_accum, meta["splits"]["train"]["tokens"],
                              cfg.block_size)
        n_loop = loops_at(args.seed, step, cfg.n_loop) if args.sample_loops else cfg.n_loop
        loss, router, load = torch.zeros((), device=device), torch.zeros(2, device=device), 0
        for micro in range(args.grad_accum):
            mine = starts[micro * args.batch_size:(micro + 1) * args.batch_size][rank::world]
            x, y = read_windows(folder / "train.bin", meta["dtype"], mine, cfg.block_size)
            if world > 1:                        # average the gradients over processes once, at the last micro-batch
                ddp.require_backward_grad_sync = micro == args.grad_accum - 1
            with autocast():
                _, result = ddp(x.to(device), y.to(device), n_loop=n_loop, loss=args.loss,
                                norm_penalty=args.norm_penalty, bptt=args.bptt)
            (result["loss"] / args.grad_accum).backward()
            loss += result["ce"][-1].detach() / args.grad_accum
            if cfg.n_expert:
                router += torch.stack([result["balance"], result["z"]]).detach() / args.grad_accum
                load = load + result["load"]
        grad_norm = clip_and_measure(model, args.grad_clip)
        report = torch.stack([loss / world, grad_norm / world, torch.tensor(float(bool(signals)), device=device),
                              *router / world])
        if world > 1:
            dist.all_reduce(report)
            if biased:
                dist.all_reduce(load)
        train_loss, grad_norm, stopping, balance, z = report.tolist()
        if not math.isfinite(train_loss + grad_norm):
            refuse_to_go_on(f"the loss ({train_loss}) or the gradient ({grad_norm})")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if biased:
            model.rebalance(load)
        step += 1
        window, window_steps = window + time.perf_counter() - tick, window_steps + 1
        wall_s += time.perf_counter() - tick

        last = step == max_steps
        evaluates = last or (args.eval_interval and step % args.eval_interval == 0)
        if evaluates:
            tick = time.perf_counter()
            val = validate()
            wall_s += time.perf_counter() - tick
            if not math.isfinite(val["loss"]):
                refuse_to_go_on("the validation loss")
        if master and (evaluates or step % args.log_interval == 0):
            speed = tokens_per_step * window_steps / window
            window, window_steps = 0.0, 0
            row = dict(step=step, tokens=step * tokens_per_step, flops=F * step * tokens_per_step, lr=lr,
                       train_loss=train_loss, grad_norm=grad_norm, tok_per_s=round(speed))
            if cfg.n_expert:
                row.update(balance=balance, z=z)
            if evaluates:
                row.update(val_loss=val["loss"], val_bpb=val["bpb"])
                row.update({f"val_norm_{k}": n for k, n in enumerate(val["norm"], 1)})
                if args.loss == "per_loop":
                    row.update({f"val_ce_{k}": ce for k, ce in enumerate(val["ce"], 1)})
            write_rows(row)
            eta = (time.time() - begun) / (step - first) * (max_steps - step)
            mfu = f" {100 * F * speed / peak:.1f}% MFU" if peak else ""
            seen = f" val {val['bpb']:.3f} bits/byte" if val else ""
            progress(f"step {step}/{max_steps} loss {train_loss:.3f}{seen} {speed / 1e3:.1f}k tok/s{mfu} "
                     f"ETA {duration(eta)}", evaluates)
        if evaluates or stopping:
            save()
        if stopping and not last:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if master:
                print(f"\nstopped after step {step}, saved to {ckpt_path}: the same command goes on from there")
            raise SystemExit(128 + (signals or [signal.SIGTERM])[0])
    for number, handler in previous.items():
        signal.signal(number, handler)

    val = val or validate()                      # resumed at the very end: the summary alone was missing
    if master:
        finish(out, model, encoding, args, cfg, val, step * tokens_per_step, wall_s)
    if world > 1:
        dist.barrier()                           # nobody leaves while another still needs the group


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # a sample may hold characters that the terminal's encoding lacks
    status = 0
    try:
        train(*parse())
    except SystemExit as e:
        status = e.code
    if dist.is_initialized():                    # gloo's destructor can wait for a thread that waits for the GIL: leave
        sys.stdout.flush()                       # without taking anything down
        os._exit(status or 0)
    sys.exit(status)
