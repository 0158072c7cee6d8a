"""
Train one looped language model of any variant.

    python train.py                                              # pocket preset, real English, 2 CPU cores: 2:49
    python train.py --n_loop=1 --n_recur=4 --inject=none         # the plain model of the same depth
    python train.py --preset=isodepth-r4 --n_embd=640 --data=fineweb-edu-32000 --max_flops=1e18   # one GPU
    torchrun --standalone --nproc_per_node=8 train.py --preset=...                              # several GPUs
    python train.py --list_presets                               # parameters, FLOPs and expected time of each

A run is a folder (--out_dir): config.json, metrics.csv, ckpt.pt, loss.png, sample.txt and, last, summary.json. Running
the same command again returns at once when the folder is complete and goes on from its checkpoint when it is not.
Batch t depends on (seed, t) only and evaluation reads fixed windows: a resumed run equals an unbroken one bit for bit.
"""
import argparse
import csv
import ctypes
import json
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data.load import batch_starts, even_starts, open_data, read_windows
from data.prepare import load_tokenizer, read_json, stop, token_bytes, write_atomic
from flags import DEFAULTS, EXTENDABLE, FREE, HORIZON, config_of, duration, flops_of, parse, steps_of
from model import Config, LoopedLM
from optim import lr_at, make_optimizers
from plots import plot_loss


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


# --- evaluation ---
@torch.no_grad()
def evaluate(model, folder, meta, n_tokens, batch_size, lengths, per_loop=False, n_loop=None):
    """Loss on fixed windows spread evenly over the validation text, lengths as data.prepare.token_bytes gives them:
    {"loss" nats/token of the last pass, "bpb" bits per byte of the text those targets stand for, "ce" nats after each
    supervised pass, "norm" mean length of each H_k}."""
    T, device = model.cfg.block_size, model.table.device
    starts = even_starts(meta["splits"]["val"]["tokens"], n_tokens, T)
    n = len(starts)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sums, n_bytes = 0, 0
    for i in range(rank * batch_size, n, world * batch_size):
        x, y = read_windows(folder / "val.bin", meta["dtype"], starts[i:i + batch_size], T)
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


# --- one step ---
def loops_at(seed, step, n_loop):
    """Passes of a step under --sample_loops: 2 n_loop - 1 consecutive steps take each of 1 .. 2 n_loop - 1 once, in an
    order drawn from (seed, block of steps). So the mean is n_loop, not only expected to be, and all ranks agree."""
    block, i = divmod(step, 2 * n_loop - 1)
    return 1 + int(np.random.default_rng((seed, block, 2)).permutation(2 * n_loop - 1)[i])


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


def run_folder(ckpt):
    """The folder of a run that is given as a folder or as its ckpt.pt."""
    return Path(ckpt) if Path(ckpt).is_dir() else Path(ckpt).parent


def data_of(state):
    """(folder, meta) of the corpus that a checkpoint was trained on."""
    return open_data(argparse.Namespace(**state["args"]))


def check_same_run(given, saved, data_sha256, where, resume):
    """A run goes on with the flags and data it began with: what says otherwise is an error, not silently dropped."""
    if saved["data_sha256"] != data_sha256:
        stop(f"--data or --vocab_size: not the corpus that {where} was trained on; choose another --out_dir")
    for name, value in given.items():
        may_differ = name in FREE or (resume and name in EXTENDABLE)
        if not may_differ and saved["args"].get(name, value) != value:
            value, begun = (f"{v:g}" if isinstance(v, float) else v for v in (value, saved["args"][name]))
            stop(f"--{name}={value} contradicts {where}, begun with {name}={begun}: drop the flag, "
                 + ("add --resume, " if name in EXTENDABLE else "") + "or choose another --out_dir")


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
            saved = read_json(out / "config.json")["args"]
            other = [f"{k}={v}" for k, v in saved.items() if k not in FREE and getattr(args, k, v) != v]
            print(f"{out} is complete (val {read_json(summary)['val_bpb']:.4f} bits/byte"
                  + f"; begun with {', '.join(other)}" * bool(other) + "): nothing to do; --resume with a longer "
                  "horizon goes on, another --out_dir starts anew")
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
    for name in ("n_active", "balance"):
        if name in given and not args.n_expert:
            stop(f"--{name} is for a layer of experts: give --n_expert as well, or drop it")
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
        train(*parse(description=__doc__))
    except SystemExit as e:
        status = e.code
    if dist.is_initialized():                    # gloo's destructor can wait for a thread that waits for the GIL: leave
        sys.stdout.flush()                       # without taking anything down
        os._exit(status or 0)
    sys.exit(status)
