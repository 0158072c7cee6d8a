"""
Train one looped language model of any variant.

    python train.py                                              # preset laptop, real English, 2 CPU cores: 3:37
    python train.py --n_loop=1 --n_recur=4 --inject=none         # the plain model of the same depth
    python train.py --preset=hops                                # a task that needs depth (data/hops.py)
    python train.py --trick=tricks/gate.py                       # a looping idea from a file
    python train.py --init_from=out/laptop --data=book-4096 --out_dir=out/book   # finetune; or into another shape
    python train.py --preset=isodepth-r4                         # the papers' sizes: one GPU
    torchrun --standalone --nproc_per_node=8 train.py --preset=...                              # several GPUs
    python train.py --list_presets                               # parameters, FLOPs and expected time of each

A run is a folder (--out_dir): config.json, metrics.csv, ckpt.pt, loss.png, sample.txt and, last, summary.json. Running
the same command again returns at once when the folder is complete and resumes from its checkpoint when it is not.
Batch t depends on (seed, t) only and evaluation reads fixed windows: a resumed run equals an unbroken one bit for bit.
"""
import math
import os
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
from data.load import batch_starts, even_starts, held_out_windows, is_task, read_windows
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import save_checkpoint
from lib.console import stop
from lib.flags import config_of, flops_of, flops_with, parse, steps_of
from lib.init_from import describe_source, start_from
from lib.machine import keep_freed_memory, peak_flops, pick_device, pick_dtype
from lib.optim import lr_at, make_optimizers
from lib.run_folder import (Log, describe_run, find_run, finish, metrics_columns, open_folder, sample_answers,
                            sample_text, say_complete)
from lib.tricks import class_of_checkpoint, describe, model_class


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
    """How a step runs the model: arguments of LoopedLM.forward. A trick's schedule may change n_loop and bptt. hops:
    the most that the step asks for, of the task hops."""
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
    """Are two lists of gradients the same but for rounding? bfloat16 moves them by some percent of their length, a wrong
    graph mostly by all of it: half is between."""
    total = torch.stack([g.norm() for g in grads]).norm()
    return all((a - b).norm() <= 0.5 * a.norm() + 1e-6 * total for a, b in zip(grads, others))


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
    """Put the state of a checkpoint back into model and optimizers; returns its step, and the seconds and FLOPs spent
    so far."""
    if state["step"] > plan.steps:
        stop(f"{ckpt_path} is at step {state['step']}, past the {plan.steps} steps asked for: give a longer horizon")
    model.load_state_dict(state["model"])
    for optimizer, its_state in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(its_state)
    return state["step"], state["wall_s"], state["flops"]


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
    source = state["source"] if state else None
    if args.init_from and not state:
        source = start_from(model, args, meta)
    optimizers = make_optimizers(model, args)
    plan = plan_steps(args, cfg)
    step, wall_s, flops = restore(state, model, optimizers, plan, ckpt_path) if state else (0, 0.0, 0.0)
    curriculum = Curriculum(**state["curriculum"]) if state else Curriculum()
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
        if args.raise_hops and settings["n_loop"] >= min(curriculum.hops, cfg.n_loop):     # enough passes to answer all
            curriculum.update(train_loss, args.raise_hops, meta["hops"])
        step += 1
        step_flops = flops_with(settings, args, cfg) * plan.tokens_per_step
        flops += step_flops
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
            log.steps, log.seconds, log.flops = log.steps + 1, log.seconds + seconds, log.flops + step_flops
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
