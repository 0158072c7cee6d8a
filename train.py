"""
Train one looped language model of any variant.

    python train.py                                              # pocket preset, real English, 2 CPU cores: 2:49
    python train.py --n_loop=1 --n_recur=4 --inject=none         # the plain model of the same depth
    python train.py --preset=hops                                # a task that needs depth (data/hops.py)
    python train.py --trick=tricks/gate.py                       # a looping idea from a file
    python train.py --init_from=out/pocket --data=book-4096 --out_dir=out/book   # finetune; or into another shape
    python train.py --preset=isodepth-r4 --n_embd=640 --data=fineweb-edu-32000 --max_flops=1e18   # one GPU
    torchrun --standalone --nproc_per_node=8 train.py --preset=...                              # several GPUs
    python train.py --list_presets                               # parameters, FLOPs and expected time of each

A run is a folder (--out_dir): config.json, metrics.csv, ckpt.pt, loss.png, sample.txt and, last, summary.json. Running
the same command again returns at once when the folder is complete and resumes from its checkpoint when it is not.
Batch t depends on (seed, t) only and evaluation reads fixed windows: a resumed run equals an unbroken one bit for bit.
"""
import argparse
import csv
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data.hops import MAX_HOPS, Curriculum, count_right, draw_batch, inputs_and_targets
from data.load import batch_starts, even_starts, held_out_windows, is_task, open_data, read_windows
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import load_checkpoint, save_checkpoint
from lib.console import duration, progress, stop
from lib.files import read_json, write_atomic
from lib.flags import DEFAULTS, EXTENDABLE, FREE, HORIZON, check_same_run, config_of, flops_of, flops_with, parse, steps_of
from lib.init_from import describe_source, start_from
from lib.machine import keep_freed_memory, peak_flops, pick_device, pick_dtype
from lib.optim import lr_at, make_optimizers
from lib.plots import plot_loss
from lib.tricks import class_of_checkpoint, describe, model_class, trick_file


# --- evaluation ---
@torch.no_grad()
def evaluate(model, folder, meta, n_tokens, batch_size, lengths, *, per_loop=False, n_loop=None):
    """Loss on fixed windows spread evenly over the validation text, lengths as data.prepare.token_bytes gives them:
    {"loss" nats/token of the last pass, "bpb" bits per byte of the text those targets stand for, "ce" nats after each
    supervised pass, "norm" mean length of each H_k}. Of the task hops only answers count, and "accuracy" is the share
    of right ones at 1, 2, .. hops."""
    T, device = model.cfg.block_size, model.table.device
    K = model.cfg.n_loop if n_loop is None else n_loop
    n_ce = K if per_loop else 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    starts = even_starts(meta["splits"]["val"]["tokens"], n_tokens, T)
    per_window = meta.get("queries", T)                                            # targets that count
    was_training = model.training
    model.eval()
    sums = torch.zeros(n_ce + K + 1, dtype=torch.double)                           # ce, norms, bytes
    answers = torch.zeros(2, MAX_HOPS, dtype=torch.double)                         # right ones, all
    for i in range(rank * batch_size, len(starts), world * batch_size):
        x, y = held_out_windows(folder, meta, "val", starts[i:i + batch_size], T)
        logits, out = model(x.to(device), y.to(device), n_loop=n_loop, loss="per_loop" if per_loop else "terminal")
        sums[:-1] += torch.cat([out["ce"], out["norm"]]).cpu().double() * len(x)
        sums[-1] += int(lengths[y[y >= 0].numpy()].sum())
        if is_task(meta):
            answers += count_right(logits.cpu(), x, y, meta)
    model.train(was_training)
    if world > 1:
        if device.type == "cuda":
            sums, answers = sums.to(device), answers.to(device)
        dist.all_reduce(sums)
        dist.all_reduce(answers)
    *totals, n_bytes = sums.tolist()
    means = [total / len(starts) for total in totals]
    ce, norms = means[:n_ce], means[n_ce:]
    bits_per_byte = ce[-1] * len(starts) * per_window / n_bytes / math.log(2)
    val = {"loss": ce[-1], "bpb": bits_per_byte, "ce": ce, "norm": norms}
    if is_task(meta):
        right, asked = answers[:, :meta["hops"]]
        val["accuracy"] = (right / asked).tolist()
    return val


# --- one step ---
@dataclass
class Plan:
    """How long a run is."""
    steps: int                                   # optimizer steps in all
    tokens_per_step: int
    flops_per_step: float                        # mean, where the number of passes changes from step to step; with
                                                 # --raise_passes the most that a step takes


def plan_steps(args, cfg):
    steps = steps_of(args, cfg)
    tokens_per_step = args.batch_size * args.grad_accum * cfg.block_size
    return Plan(steps, tokens_per_step, flops_of(args, cfg, steps) * tokens_per_step)


def loops_at(seed, step, n_loop):
    """Passes of a step under --sample_loops: 2 n_loop - 1 consecutive steps take each of 1 .. 2 n_loop - 1 once, in an
    order drawn from (seed, block of steps). So the mean is n_loop, not only expected to be, and all ranks agree."""
    block, i = divmod(step, 2 * n_loop - 1)
    return 1 + int(np.random.default_rng((seed, block, 2)).permutation(2 * n_loop - 1)[i])


def settings_at(step, args, model, max_steps, hops):
    """How a step runs the model: arguments of LoopedLM.forward. A trick's schedule may change n_loop and bptt. hops: the
    most that the step asks for, of the task hops."""
    n_loop = model.cfg.n_loop
    if args.sample_loops:
        n_loop = loops_at(args.seed, step, n_loop)
    if args.raise_passes:
        n_loop = min(hops, n_loop)
    settings = dict(n_loop=n_loop, loss=args.loss, norm_penalty=args.norm_penalty, bptt=args.bptt)
    return {**settings, **model.schedule(model.cfg, step, max_steps)}


def sequences_at(args, meta, step, curriculum):
    """The training sequences of a step, in order: where their windows begin in the text, or the examples (n, T) of the
    task hops."""
    n = args.batch_size * args.grad_accum
    if is_task(meta):
        hops = curriculum.numbers() if args.raise_hops else range(1, meta["hops"] + 1)
        return draw_batch(meta, args.seed, step, n, hops)
    return batch_starts(args.seed, step, n, meta["splits"]["train"]["tokens"], args.block_size)


def read_share(share, folder, meta, block_size):
    """Inputs and targets (B, T) of some sequences that sequences_at gave."""
    if is_task(meta):
        return inputs_and_targets(share, meta)
    return read_windows(folder / "train.bin", meta["dtype"], share, block_size)


def clip_and_measure(model, grad_clip):
    """Clip the gradient to the norm grad_clip (0: leave it); returns its norm before."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)


# --- compile ---
def try_compile(model, autocast, settings, batch_size):
    """Compile the blocks. Where that fails, or computes other gradients, train eagerly and say so in one line.
    settings: how the first step runs the model."""
    cfg, device = model.cfg, model.table.device
    idx = torch.arange(batch_size * cfg.block_size, device=device).view(batch_size, -1) % cfg.vocab_size

    def gradients():
        with autocast():
            _, result = model(idx, idx, **settings)
        result["loss"].backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return grads
    eager = gradients()
    problem = None
    try:
        model.compile_blocks()
        if not agree(eager, gradients()):
            problem = "computes other gradients"
    except Exception as e:                       # no compiler, no Triton: whatever it raises, eager code still works
        problem = f"failed ({type(e).__name__})"
    if problem:
        print(f"warning: torch.compile {problem}, training eagerly", file=sys.stderr)
        model.compile_nothing()
        model.zero_grad(set_to_none=True)


def agree(grads, others):
    """Are two lists of gradients the same but for rounding? In bfloat16 they differ by some percent of their length."""
    total = torch.stack([g.norm() for g in grads]).norm()
    return all((a - b).norm() <= 0.5 * a.norm() + 1e-6 * total for a, b in zip(grads, others))


# --- what the folder of a run holds ---
def find_run(args, explicit):
    """What --out_dir holds already: (args, state, folder, meta). args are the flags that the run began with and those
    that may change, state its checkpoint or None, folder and meta the corpus. args is None if the run is complete."""
    out = Path(args.out_dir)
    if "data" not in explicit and (out / "config.json").is_file():          # a run stays with its corpus
        first_args = read_json(out / "config.json")["args"]
        args.data = first_args["data"]
        args.vocab_size = explicit.get("vocab_size", first_args["vocab_size"])
    config_of(args, args.vocab_size or 4096)     # refuses a bad model before the corpus is prepared
    folder, meta = open_data(args)
    if args.raise_hops and not is_task(meta):
        stop("--raise_hops is for the task hops: give --data=hops as well, or drop it")
    data_sha256 = meta["splits"]["train"]["sha256"]
    if (out / "summary.json").is_file() and not args.resume:
        check_same_run(explicit, read_json(out / "config.json"), data_sha256, out, resume=False)
        return None, None, folder, meta
    ckpt = out / "ckpt.pt"
    if not ckpt.is_file():
        if args.resume:
            stop(f"--resume: no checkpoint in {out}; drop the flag to start the run")
        return args, None, folder, meta
    state = load_checkpoint(ckpt)
    if {"args", "optimizers", "step", "wall_s", "data_sha256"} - state.keys():
        stop(f"{ckpt}: holds weights but no optimizer, so training cannot be resumed; choose another --out_dir")
    if state["args"].get("trick", "") != (state.get("trick") or {}).get("file", ""):
        stop(f"{ckpt}: its flags and its trick name different files, so it is not train.py's; nothing in it was run")
    check_same_run(explicit, state, data_sha256, ckpt, args.resume)
    may_change = FREE | EXTENDABLE if args.resume else FREE
    changes = {name: explicit[name] for name in (may_change | {"trick"}) & explicit.keys()}        # a trick's path
    if args.resume and any(explicit.get(h) for h in HORIZON):               # one horizon replaces another
        changes.update({h: explicit.get(h, 0) for h in HORIZON})
    resumed = {**DEFAULTS, **state["args"], **changes, "out_dir": args.out_dir}
    return argparse.Namespace(**resumed), state, folder, meta


def say_complete(out, args):
    """The run is complete: what it reached, and which of its flags are not those of the command line."""
    saved = read_json(out / "config.json")["args"]
    val_bpb = read_json(out / "summary.json")["val_bpb"]
    others = [f"{name}={value}" for name, value in saved.items()
              if name not in FREE and getattr(args, name, value) != value]
    note = f"; begun with {', '.join(others)}" if others else ""
    print(f"{out} is complete (val {val_bpb:.4f} bits/byte{note}): nothing to do; "
          "--resume with a longer horizon trains it further, another --out_dir starts anew")


class Log:
    """metrics.csv, and with each row a line of progress: speed since the row before, time to go. Rows after `step`,
    that of the checkpoint, are dropped: the resumed run writes them again."""

    def __init__(self, path, columns, step, plan, peak):
        self.path, self.columns, self.first_step, self.plan, self.peak = path, columns, step, plan, peak
        self.started_at, self.steps, self.seconds = time.time(), 0, 0.0            # since the row before
        rows = []
        if step and path.is_file():
            with open(path, newline="", encoding="utf-8") as f:
                rows = [row for row in csv.DictReader(f) if row["step"].isdigit() and int(row["step"]) <= step]
        self.write(rows, mode="w")

    def write(self, rows, mode="a"):
        """Append rows; what is no column of this run is left out."""
        with open(self.path, mode, newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, self.columns, restval="", extrasaction="ignore")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)

    def add_row(self, step, numbers, val, evaluated):
        """numbers: those of this step, val: the last evaluation, if any; evaluated: was it in this step?"""
        plan, steps_per_s = self.plan, self.steps / self.seconds
        speed = plan.tokens_per_step * steps_per_s
        row = dict(numbers, step=step, tokens=step * plan.tokens_per_step, tok_per_s=round(speed))
        self.write([{**row, **val_columns(val)} if evaluated else row])
        eta = (time.time() - self.started_at) / (step - self.first_step) * (plan.steps - step)
        mfu = 100 * plan.flops_per_step * steps_per_s / self.peak if self.peak else 0
        progress(f"step {step}/{plan.steps} loss {numbers['train_loss']:.3f}"
                 + (f" val {describe_score(val)}" if val else "") + f" {speed / 1e3:.1f}k tok/s"
                 + (f" {mfu:.1f}% MFU" if self.peak else "") + f" ETA {duration(eta)}", keep=evaluated)
        self.steps, self.seconds = 0, 0.0


def metrics_columns(args, cfg, meta):
    passes = range(1, cfg.n_loop + 1)
    columns = "step tokens flops train_loss val_loss val_bpb lr grad_norm tok_per_s".split()
    if args.loss == "per_loop":
        columns += [f"val_ce_{k}" for k in passes]
    columns += [f"val_norm_{k}" for k in passes]
    if is_task(meta):                            # hops asked for in training; right answers by number of hops
        columns += ["hops"] + [f"val_acc_{p}" for p in range(1, meta["hops"] + 1)]
    return columns + ["balance", "z"] if cfg.n_expert else columns


def val_columns(val):
    """The columns of an evaluation, a dict as evaluate gives it."""
    norms = {f"val_norm_{k}": length for k, length in enumerate(val["norm"], 1)}
    losses = {f"val_ce_{k}": ce for k, ce in enumerate(val["ce"], 1)}
    accuracy = {f"val_acc_{p}": share for p, share in enumerate(val.get("accuracy", []), 1)}
    return {"val_loss": val["loss"], "val_bpb": val["bpb"], **norms, **losses, **accuracy}


def describe_score(val):
    """What an evaluation found, for a line of progress."""
    if "accuracy" in val:
        return "right at 1, 2, .. hops: " + " ".join(f"{share:.2f}" for share in val["accuracy"])
    return f"{val['bpb']:.3f} bits/byte"


def open_folder(out, identity, meta, trick, extends):
    """Make the run folder with config.json and a copy of the trick. extends: more steps follow, so that a complete run
    is not complete any more."""
    about = dict(identity, val_sha256=meta["splits"]["val"]["sha256"], torch=torch.__version__,
                 python=sys.version.split()[0], command=shlex.join(["python", *sys.argv]))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if extends:
            (out / "summary.json").unlink(missing_ok=True)
        write_atomic(out / "config.json", json.dumps(about, indent=1).encode())
        if trick and trick_file(trick).parent != out.resolve():
            shutil.copy(trick_file(trick), out)
    except OSError as e:
        stop(f"--out_dir={out}: cannot write there ({e.strerror}); choose another folder")


def describe_run(args, model, plan, epoch_tokens):
    """The lines before the first step: parameters by group, depth, FLOPs, tokens."""
    cfg, tokens = model.cfg, plan.steps * plan.tokens_per_step
    epochs = tokens / epoch_tokens
    counts = model.param_counts(cfg)
    groups = " + ".join(f"{name} {n / 1e6:.2f}M" for name, n in counts.items())
    active = sum(model.param_counts(cfg, active=True).values())
    print(f"{groups} = {sum(counts.values()) / 1e6:.2f}M parameters"
          + (f", {active / 1e6:.2f}M active" if cfg.n_expert else ""))
    print(f"{cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda} = {cfg.depth()} layers deep, "
          f"{plan.flops_per_step / plan.tokens_per_step / 1e6:.1f} MFLOPs/token"
          + (f"; {args.trick}" if args.trick else ""))
    print(f"{plan.steps} steps x {plan.tokens_per_step} = {tokens / 1e6:.2f}M tokens ({epochs:.2f} epochs), "
          f"{'at most ' if args.raise_passes else ''}{plan.steps * plan.flops_per_step:.2e} FLOPs")


def sample_text(args, model, encoding):
    """200 tokens that the model writes after <|endoftext|>."""
    start = torch.tensor([[encoding.eot_token]], device=model.table.device)
    generator = torch.Generator(device=model.table.device).manual_seed(args.seed)
    ids = model.generate(start, min(200, model.cfg.block_size), temperature=0.8, top_k=50, generator=generator)
    return encoding.decode([t for t in ids[0].tolist() if t != encoding.eot_token])


@torch.no_grad()
def sample_answers(model, encoding, folder, meta):
    """The first held-out example of the task hops with the model's answers: "2 hops: ac" if it says that 2 hops from a
    end at c."""
    x, y = held_out_windows(folder, meta, "val", [0], model.cfg.block_size)
    logits, _ = model(x.to(model.table.device), y.to(model.table.device))
    answers = logits.argmax(-1).cpu()
    asked = y >= 0                               # where the next token is an answer
    example = torch.where(asked.roll(1, dims=1), answers.roll(1, dims=1), x)
    n_right = int((answers == y).sum())
    return f"{encoding.decode(example[0].tolist())}\n{n_right} of {meta['queries']} right\n"


def finish(args, model, sample, val, plan, spent):
    """Sample, plot and, last, summary.json: the row that fit_law.py collects, and the sign that the run is complete."""
    out, cfg, tokens = Path(args.out_dir), model.cfg, plan.steps * plan.tokens_per_step
    write_atomic(out / "sample.txt", sample.encode())
    active = model.param_counts(cfg, active=True)          # what the law counts: the experts that work on a token
    summary = dict(run=out.name, seed=args.seed, n_loop=cfg.n_loop, n_prelude=cfg.n_prelude, n_recur=cfg.n_recur,
                   n_coda=cfg.n_coda, n_embd=cfg.n_embd, n_expert=cfg.n_expert, inject=cfg.inject,
                   trick=f"{Path(args.trick).stem} {args.trick_args}".strip(),     # with other options another trick
                   n_once=active["once"], n_rec=active["recurrent"] + active["injection"],
                   n_total=sum(model.param_counts(cfg).values()), tokens=tokens,
                   flops=spent["flops"], val_loss=val["loss"], val_bpb=val["bpb"],
                   wall_s=round(spent["wall_s"], 1), tok_per_s=round(tokens / spent["wall_s"], 1),
                   val_ce=val["ce"], val_norm=val["norm"])
    if "accuracy" in val:
        summary["val_acc"] = val["accuracy"]
    plot_loss(out, f"{out.name}: {cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda} layers, "
                   f"{describe_score(val)}")
    write_atomic(out / "summary.json", json.dumps(summary, indent=1).encode())
    score = describe_score(val) if "accuracy" in val else f"{val['bpb']:.4f} bits/byte"
    print(f"\n{sample[:400]}\n\nval {val['loss']:.4f} nats/token, {score}; "
          f"{tokens / 1e6:.2f}M tokens in {duration(spent['wall_s'])}; {out}/ holds loss.png, sample.txt, metrics.csv, ckpt.pt")


def stop_diverged(what, step, ckpt_path):
    weights = f"{ckpt_path} keeps the last good weights" if ckpt_path.is_file() else "no checkpoint was written yet"
    stop(f"step {step}: {what} is not finite; {weights}: --resume with a lower --learning_rate starts from there, "
         f"more --warmup_steps need another --out_dir")


# --- the run ---
def start_process(args, explicit, world):
    """The device of this process, of world processes that train together. Refuses flags that cannot be used."""
    for name in ("n_active", "balance"):
        if name in explicit and not args.n_expert:
            stop(f"--{name} is for a layer of experts: give --n_expert as well, or drop it")
    if args.batch_size % world:
        nearest = max(1, round(args.batch_size / world)) * world
        stop(f"--batch_size={args.batch_size} does not divide over {world} processes: the nearest that does is "
             f"{nearest}")
    device = pick_device(args.device)
    if world > 1:
        on_gpu = device.startswith("cuda")
        dist.init_process_group("nccl" if on_gpu else "gloo")
        if on_gpu:                               # each process its own, also where --device names one of them
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if device == "cpu":
        keep_freed_memory()
    return device


def restore(state, model, optimizers, plan, ckpt_path):
    """Put the state of a checkpoint back into model and optimizers; returns its step, and the seconds and FLOPs spent so
    far."""
    if state["step"] > plan.steps:
        stop(f"{ckpt_path} is at step {state['step']}, past the {plan.steps} steps asked for: give a longer horizon")
    model.load_state_dict(state["model"])
    for optimizer, its_state in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(its_state)
    return state["step"], state["wall_s"], state.get("flops", state["step"] * plan.flops_per_step)


def train(args, explicit):
    """One run, from its flags to summary.json. explicit: the flags that the command line sets, {name: value}."""
    # 1. Is there anything to do? A complete run returns, an interrupted one resumes from its checkpoint.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    master = rank == 0
    out = Path(args.out_dir)
    ckpt_path = out / "ckpt.pt"
    run_args, state, folder, meta = find_run(args, explicit)
    if run_args is None:
        return say_complete(out, args) if master else None
    args = run_args

    # 2. The device. Under torchrun each process has its own.
    device = start_process(args, explicit, world)
    dtype = pick_dtype(device, args.dtype)

    def autocast():
        return torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=dtype == "bfloat16")

    # 3. The model and its optimizers, as they were at the checkpoint if there is one.
    cfg = config_of(args, meta["vocab_size"])
    if state:                                    # first: only what this allows may be run
        trick = class_of_checkpoint(state, ckpt_path, explicit.get("trick"))
    else:
        trick = model_class(args.trick, args.trick_args)
    torch.manual_seed(args.seed)
    model = trick(cfg).to(device)
    source = state.get("source") if state else None
    if args.init_from and not state:
        source = start_from(model, args, meta)
    optimizers = make_optimizers(model, args)
    plan = plan_steps(args, cfg)
    step, wall_s, flops = restore(state, model, optimizers, plan, ckpt_path) if state else (0, 0.0, 0.0)
    curriculum = Curriculum(**state.get("curriculum", {})) if state else Curriculum()
    if args.compile if args.compile is not None else device.startswith("cuda"):
        settings = settings_at(step, args, model, plan.steps, curriculum.hops)
        try_compile(model, autocast, settings, args.batch_size // world)
    ddp = DistributedDataParallel(model) if world > 1 else model

    # 4. The run folder: what is known before the first step.
    encoding = load_tokenizer(folder)
    lengths = token_bytes(encoding)
    identity = dict(config=asdict(cfg), args=vars(args), trick=describe(args.trick, args.trick_args),
                    data_sha256=meta["splits"]["train"]["sha256"], tokenizer_sha256=meta["tokenizer_sha256"],
                    source=source)
    if master:
        open_folder(out, identity, meta, args.trick, extends=step < plan.steps)
        describe_run(args, model, plan, meta["splits"]["train"].get("tokens", math.inf))
        print(f"{device}, {dtype}, {torch.get_num_threads()} threads"
              + (f", {world} processes" if world > 1 else "") + (f"; resumed from step {step}" if step else ""))
        log = Log(out / "metrics.csv", metrics_columns(args, cfg, meta), step, plan,
                  peak=peak_flops(args.peak_tflops, device) * world)
    signals = []                                 # Ctrl-C or SIGTERM: finish the step, save, leave
    handlers = {s: signal.signal(s, lambda number, _: signals.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}

    def save():
        if not all(p.isfinite().all() for p in model.parameters()):
            stop_diverged("a weight", step, ckpt_path)
        if master:
            save_checkpoint(ckpt_path, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers],
                            step=step, wall_s=wall_s, flops=flops, curriculum=asdict(curriculum), **identity)

    def validate():                              # eager on a CPU, where a graph for it would take longer to compile
        stance = "force_eager" if device == "cpu" else "default"
        with autocast(), torch.compiler.set_stance(stance):
            return evaluate(model, folder, meta, args.eval_tokens, args.batch_size // world, lengths,
                            per_loop=args.loss == "per_loop")

    if source and not state:
        val = validate()
        if master:
            print(f"{describe_source(source)}; val {val['loss']:.4f} nats/token before the first step")

    # 5. The training loop.
    uses_bias = cfg.n_expert and cfg.balance == "bias"
    val = None
    while step < plan.steps:
        tick = time.perf_counter()
        # 5.1 the learning rate of this step
        lr = lr_at(step, args, plan.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1)

        # 5.2 forward and backward, one micro-batch after the other; every process takes its share of each
        batch = sequences_at(args, meta, step, curriculum)
        settings = settings_at(step, args, model, plan.steps, curriculum.hops)
        loss, router, load = torch.zeros((), device=device), torch.zeros(2, device=device), 0
        for micro in range(args.grad_accum):
            share = batch[micro * args.batch_size:(micro + 1) * args.batch_size][rank::world]
            x, y = read_share(share, folder, meta, cfg.block_size)
            if world > 1:                        # average the gradients over processes once, at the last micro-batch
                ddp.require_backward_grad_sync = micro == args.grad_accum - 1
            with autocast():
                _, result = ddp(x.to(device), y.to(device), **settings)
            (result["loss"] / args.grad_accum).backward()
            loss += result["ce"][-1].detach() / args.grad_accum
            if cfg.n_expert:
                router += torch.stack([result["balance"], result["z"]]).detach() / args.grad_accum
                load = load + result["load"]
        if model.embed.weight.grad is None:
            stop(f"step {step}: no gradient reaches the embedding: none of the passes that gradients flow through "
                 f"(bptt={settings['bptt']}; 0: all) reads the prelude's output")

        # 5.3 clip the gradient; what the processes have to agree on goes around in one message
        grad_norm = clip_and_measure(model, args.grad_clip)
        message = torch.stack([loss / world, grad_norm / world, torch.tensor(float(bool(signals)), device=device),
                               *router / world])
        if world > 1:
            dist.all_reduce(message)
            if uses_bias:
                dist.all_reduce(load)
        train_loss, grad_norm, stopping, balance, z = message.tolist()
        if not math.isfinite(train_loss + grad_norm):
            stop_diverged(f"the loss ({train_loss}) or the gradient ({grad_norm})", step, ckpt_path)

        # 5.4 the step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if uses_bias:
            model.rebalance(load)
        if args.raise_hops:
            curriculum.update(train_loss, args.raise_hops, meta["hops"])
        step += 1
        flops += flops_with(settings, args, cfg) * plan.tokens_per_step
        seconds = time.perf_counter() - tick
        wall_s += seconds

        # 5.5 evaluate, log, save
        last = step == plan.steps
        evaluates = last or (args.eval_interval and step % args.eval_interval == 0)
        if evaluates:
            tick = time.perf_counter()
            val = validate()
            wall_s += time.perf_counter() - tick
            if not math.isfinite(val["loss"]):
                stop_diverged("the validation loss", step, ckpt_path)
        if master:
            log.steps, log.seconds = log.steps + 1, log.seconds + seconds
            if evaluates or step % args.log_interval == 0:
                numbers = dict(flops=flops, train_loss=train_loss, grad_norm=grad_norm, lr=lr, balance=balance, z=z,
                               hops=curriculum.hops if args.raise_hops else meta.get("hops"))
                log.add_row(step, numbers, val, evaluates)
        if evaluates or stopping:
            save()
        if stopping and not last:
            break
    for number, handler in handlers.items():
        signal.signal(number, handler)

    # 6. The end: stopped by a signal, or complete.
    if step < plan.steps:
        if master:
            print(f"\nstopped after step {step}, saved to {ckpt_path}: the same command resumes from there")
        raise SystemExit(128 + (signals or [signal.SIGTERM])[0])
    val = val or validate()                      # resumed at the very end: the summary alone was missing
    if master:
        model.eval()
        model.compile_nothing()
        is_text = not is_task(meta)
        sample = sample_text(args, model, encoding) if is_text else sample_answers(model, encoding, folder, meta)
        finish(args, model, sample, val, plan, dict(wall_s=wall_s, flops=flops))
    if world > 1:
        dist.barrier()                           # nobody leaves while another still needs the group


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # a sample may hold characters that the terminal's encoding lacks
    status = 0
    try:
        train(*parse(description=__doc__))
    except SystemExit as e:
        status = e.code
    if dist.is_initialized():                    # gloo's destructor can wait for a thread that waits for the GIL: leave
        sys.stdout.flush()                       # without taking anything down
        os._exit(status or 0)
    sys.exit(status)
