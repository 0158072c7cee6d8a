"""
The folder of a run: what it holds before the first step and after the last, and the lines printed on the way.
config.json says what the run is, metrics.csv how it went; summary.json, the row that fit_law.py collects, comes last
and is the sign that the run is complete.
"""
import argparse
import csv
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch

from data.load import held_out_windows, is_task, open_data
from lib.checkpoint import load_checkpoint
from lib.console import duration, progress, stop
from lib.files import read_json, write_atomic
from lib.flags import DEFAULTS, EXTENDABLE, FREE, HORIZON, check_raise_passes, check_same_run, config_of
from lib.plots import plot_loss
from lib.tricks import trick_file


# --- before the first step ---
def find_run(args, explicit):
    """What --out_dir holds already: (args, state, folder, meta). args are the flags that the run began with and those
    that may change, state its checkpoint or None, folder and meta the corpus. args is None if the run is complete."""
    out = Path(args.out_dir)
    config, summary, ckpt = out / "config.json", out / "summary.json", out / "ckpt.pt"
    if "data" not in explicit and config.is_file():        # a run stays with its corpus
        first_args = read_json(config)["args"]
        args.data = first_args["data"]
        args.vocab_size = explicit.get("vocab_size", first_args["vocab_size"])
    config_of(args, args.vocab_size or 4096)     # refuses a bad model before the corpus is prepared
    folder, meta = open_data(args)
    if args.raise_hops and not is_task(meta):
        stop("--raise_hops is for the task hops: give --data=hops as well, or drop it")
    if args.raise_passes and args.n_loop > max(1, meta.get("hops", 0)):
        stop(f"--n_loop={args.n_loop}: with --raise_passes and {meta['hops']} hops no more than that are trained; "
             f"give --n_loop={meta['hops']}, or --raise_passes=false")
    data_sha256 = meta["splits"]["train"]["sha256"]
    if summary.is_file() and not args.resume:
        saved = read_json(config)
        check_same_run(explicit, saved, data_sha256, out, resume=False)
        return None, None, folder, meta
    if not ckpt.is_file():
        if args.resume:
            stop(f"--resume: no checkpoint in {out}; drop the flag to start the run")
        return args, None, folder, meta
    state = load_checkpoint(ckpt)
    needed = {"args", "optimizers", "step", "wall_s", "data_sha256"}
    if not needed <= state.keys():
        stop(f"{ckpt}: holds weights but no optimizer, so training cannot be resumed; choose another --out_dir")
    trick = state.get("trick") or {}
    if trick.get("file", "") != state["args"].get("trick", ""):
        stop(f"{ckpt}: its flags and its trick name different files, so it is not train.py's; nothing in it was run")
    check_same_run(explicit, state, data_sha256, ckpt, args.resume)
    may_change = FREE | {"trick"}                # a trick's path, not its content
    if args.resume:
        may_change = may_change | EXTENDABLE
    changes = {name: explicit[name] for name in explicit.keys() & may_change}
    horizons = [explicit.get(h, 0) for h in HORIZON]
    if args.resume and any(horizons):            # one horizon replaces another
        changes.update(zip(HORIZON, horizons))
    resumed = {**DEFAULTS, **state["args"], **changes, "out_dir": args.out_dir}
    check_raise_passes(resumed)
    return argparse.Namespace(**resumed), state, folder, meta


def say_complete(out, args):
    """The run is complete: what it reached, and which of its flags are not those of the command line."""
    saved = read_json(out / "config.json")["args"]
    val_bpb = read_json(out / "summary.json")["val_bpb"]
    others = []
    for name, value in saved.items():
        if name not in FREE and getattr(args, name, value) != value:
            others.append(f"{name}={value}")
    note = f"; begun with {', '.join(others)}" if others else ""
    print(f"{out} is complete (val {val_bpb:.4f} bits/byte{note}): nothing to do; "
          "--resume with a longer horizon trains it further, another --out_dir starts anew")


def open_folder(out, identity, meta, trick, extends):
    """Make the run folder with config.json and a copy of the trick. extends: more steps follow, so that a complete run
    is not complete any more."""
    python = sys.version.split()[0]
    command = shlex.join(["python", *sys.argv])
    val_sha256 = meta["splits"]["val"]["sha256"]
    about = dict(identity, val_sha256=val_sha256, torch=torch.__version__, python=python, command=command)
    content = json.dumps(about, indent=1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if extends:
            (out / "summary.json").unlink(missing_ok=True)
        write_atomic(out / "config.json", content.encode())
        if trick and trick_file(trick).parent != out.resolve():
            shutil.copy(trick_file(trick), out)
    except OSError as e:
        stop(f"--out_dir={out}: cannot write there ({e.strerror}); choose another folder")


def describe_run(args, model, plan, epoch_tokens):
    """The lines before the first step: parameters by group, depth, FLOPs, tokens."""
    cfg = model.cfg
    counts = model.param_counts(cfg)
    groups = " + ".join(f"{name} {n / 1e6:.2f}M" for name, n in counts.items())
    total = sum(counts.values())
    line = f"{groups} = {total / 1e6:.2f}M parameters"
    if cfg.n_expert:
        active = model.param_counts(cfg, active=True)
        line += f", {sum(active.values()) / 1e6:.2f}M active"
    print(line)
    per_token = plan.flops_per_step / plan.tokens_per_step
    trick = f"; {args.trick}" if args.trick else ""
    print(f"{cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda} = {cfg.depth()} layers deep, "
          f"{per_token / 1e6:.1f} MFLOPs/token{trick}")
    tokens = plan.steps * plan.tokens_per_step
    epochs = tokens / epoch_tokens
    flops = plan.steps * plan.flops_per_step
    at_most = "at most " if args.raise_passes and cfg.n_loop > 1 else ""
    print(f"{plan.steps} steps x {plan.tokens_per_step} = {tokens / 1e6:.2f}M tokens ({epochs:.2f} epochs), "
          f"{at_most}{flops:.2e} FLOPs")


# --- on the way ---
class Log:
    """metrics.csv, and with each row a line of progress: speed since the row before, time to go. Rows after `step`,
    that of the checkpoint, are dropped: the resumed run writes them again."""

    def __init__(self, path, columns, step, plan, peak):
        self.path, self.columns, self.plan, self.peak = path, columns, plan, peak
        self.first_step, self.started_at = step, time.time()
        self.steps, self.seconds, self.flops = 0, 0.0, 0.0         # since the row before
        rows = []
        if step and path.is_file():
            with open(path, newline="", encoding="utf-8") as f:
                rows = list(csv.DictReader(f))
        kept = [row for row in rows if row["step"].isdigit() and int(row["step"]) <= step]
        self.write(kept, mode="w")

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
        if evaluated:
            row.update(val_columns(val))
        self.write([row])
        line = f"step {step}/{plan.steps} loss {numbers['train_loss']:.3f}"
        if val:
            line += f" val {describe_score(val)}"
        line += f" {speed / 1e3:.1f}k tok/s"
        if self.peak:
            mfu = self.flops / self.seconds / self.peak
            line += f" {100 * mfu:.1f}% MFU"
        s_per_step = (time.time() - self.started_at) / (step - self.first_step)
        eta = s_per_step * (plan.steps - step)
        progress(f"{line} ETA {duration(eta)}", keep=evaluated)
        self.steps, self.seconds, self.flops = 0, 0.0, 0.0


def metrics_columns(args, cfg, meta):
    """The columns of metrics.csv."""
    passes = range(1, cfg.n_loop + 1)
    columns = "step tokens flops train_loss val_loss val_bpb lr grad_norm tok_per_s".split()
    if args.loss == "per_loop":
        columns += [f"val_ce_{k}" for k in passes]
    columns += [f"val_norm_{k}" for k in passes]
    if is_task(meta):                            # the most hops asked for in training; right answers by number of hops
        hops = range(1, meta["hops"] + 1)
        columns += ["hops", *[f"val_acc_{p}" for p in hops]]
    if cfg.n_expert:
        columns += ["balance", "z"]
    return columns


def val_columns(val):
    """The columns of an evaluation, a dict as evaluate gives it."""
    columns = {"val_loss": val["loss"], "val_bpb": val["bpb"]}
    for k, length in enumerate(val["norm"], 1):
        columns[f"val_norm_{k}"] = length
    for k, ce in enumerate(val["ce"], 1):
        columns[f"val_ce_{k}"] = ce
    for p, share in enumerate(val.get("accuracy", []), 1):
        columns[f"val_acc_{p}"] = share
    return columns


def describe_score(val):
    """What an evaluation found, for a line of progress."""
    if "accuracy" in val:
        return "right at 1, 2, .. hops: " + " ".join(f"{share:.2f}" for share in val["accuracy"])
    return f"{val['bpb']:.3f} bits/byte"


# --- after the last step ---
def sample_text(args, model, encoding):
    """200 tokens that the model writes after <|endoftext|>."""
    device, n_tokens = model.table.device, min(200, model.cfg.block_size)
    start = torch.tensor([[encoding.eot_token]], device=device)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    ids = model.generate(start, n_tokens, temperature=0.8, top_k=50, generator=generator)
    text = [token for token in ids[0].tolist() if token != encoding.eot_token]
    return encoding.decode(text)


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
    out, cfg, seconds = Path(args.out_dir), model.cfg, spent["wall_s"]
    write_atomic(out / "sample.txt", sample.encode())
    tokens = plan.steps * plan.tokens_per_step
    active = model.param_counts(cfg, active=True)          # what the law counts: the experts that work on a token
    stored = model.param_counts(cfg)
    trick = f"{Path(args.trick).stem} {args.trick_args}"   # with other options another trick
    summary = dict(run=out.name, seed=args.seed, n_loop=cfg.n_loop, n_prelude=cfg.n_prelude, n_recur=cfg.n_recur,
                   n_coda=cfg.n_coda, n_embd=cfg.n_embd, n_expert=cfg.n_expert, inject=cfg.inject, trick=trick.strip(),
                   n_once=active["once"], n_rec=active["recurrent"] + active["injection"],
                   n_total=sum(stored.values()), tokens=tokens, flops=spent["flops"],
                   val_loss=val["loss"], val_bpb=val["bpb"], wall_s=round(seconds, 1),
                   tok_per_s=round(tokens / seconds, 1), val_ce=val["ce"], val_norm=val["norm"])
    score = f"{val['bpb']:.4f} bits/byte"
    if "accuracy" in val:
        summary["val_acc"] = val["accuracy"]
        score = describe_score(val)
    shape = f"{cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda}"
    plot_loss(out, f"{out.name}: {shape} layers, {describe_score(val)}")
    content = json.dumps(summary, indent=1)
    write_atomic(out / "summary.json", content.encode())
    print(f"\n{sample[:400]}\n\nval {val['loss']:.4f} nats/token, {score}; {tokens / 1e6:.2f}M tokens in "
          f"{duration(seconds)}; {out}/ holds loss.png, sample.txt, metrics.csv, ckpt.pt")
