"""
Every flag of a training run, the presets, and what follows from them before anything is built: the model's Config, the
steps of a horizon, FLOPs per token. `python train.py -h` prints the flags, `--list_presets` the presets.
"""
import argparse
import inspect
import math
import re
from dataclasses import fields

from lib.console import boolean, duration, misused, stop
from lib.init_from import source_flags
from lib.tricks import file_hash, model_class, trick_file
from model import CHOICES as MODEL_CHOICES
from model import Config, LoopedLM


def model_flags():
    """The fields of model.Config as flags: (name, type, default, help), the help being the comment on its line."""
    comments = dict(re.findall(r"^    (\w+): \w+ = \S+ +# (.+)$", inspect.getsource(Config), re.M))
    flags = []
    for f in fields(Config):
        if f.name == "vocab_size":
            flags.append((f.name, int, 0, "0: as the data has it; for --data=sotu the vocabulary to train (4096)"))
        elif f.name == "n_head":
            flags.append((f.name, int, 0, "attention heads; 0: n_embd / head_dim"))
            flags.append(("head_dim", int, 64, "width of a head where n_head is 0"))
        else:
            flags.append((f.name, boolean if f.type is bool else f.type, f.default, comments[f.name]))
    return flags


# group: (name, type, default, help); a preset sets some of them, the command line overrides both
FLAGS = {
    "run": [
        ("preset", str, "laptop", "group of flags that later flags override; --list_presets shows them"),
        ("out_dir", str, "", "run folder (default: out/PRESET); another run needs another folder"),
        ("data", str, "sotu", "folder written by data/prepare.py, or its name under data/; sotu is prepared if absent"),
        ("seed", int, 1337, "initial weights and order of the batches"),
        ("resume", boolean, False, "resume a run, also a complete one: give it a longer horizon")],
    "start": [
        ("init_from", str, "", "run folder or ckpt.pt: start from its weights, by default with its shape and data"),
        ("tie", str, "mean", "how its layers that become one of a loop are joined: mean | first | last")],
    "model (fields of model.Config)": model_flags(),
    "trick": [
        ("trick", str, "", "file with a subclass of LoopedLM that changes the loop, such as tricks/gate.py"),
        ("trick_args", str, "", "its options, joined by commas: n_lanes=4,rank=1")],
    "task hops (data/hops.py)": [
        ("raise_hops", float, 0.0, "begin with 1 hop, one more when the training loss is below this; 0: all at once"),
        ("raise_passes", boolean, False, "with --raise_hops: as many passes as hops are asked for, up to n_loop")],
    "loss": [
        ("loss", str, "terminal", "terminal: cross-entropy after the last pass | per_loop: mean over all passes"),
        ("norm_penalty", float, 0.0, "lambda: adds lambda * mean square of the loop states"),
        ("bptt", int, 0, "gradients flow through the last bptt passes only; 0: through all"),
        ("sample_loops", boolean, False, "train each step at a depth of 1 .. 2 n_loop - 1 passes, n_loop on average")],
    "batch and horizon (one --max_*, or the preset's)": [
        ("batch_size", int, 8, "sequences per micro-batch, over all processes; lower it when memory runs out"),
        ("grad_accum", int, 1, "micro-batches per step: the step sees batch_size * grad_accum sequences"),
        ("max_steps", int, 0, "optimizer steps"),
        ("max_tokens", float, 0.0, "training tokens, rounded to whole steps"),
        ("max_flops", float, 0.0, "training FLOPs, rounded to whole steps; LoopedLM.flops_per_token counts them")],
    "optimizer": [
        ("optimizer", str, "muon", "muon (torch's, for the blocks' matrices; AdamW for embedding and head) | adamw"),
        ("learning_rate", float, 1e-2, "peak; Muon's update is scaled to AdamW's size, so one rate serves both"),
        ("embed_lr", float, 10.0, "rate of the embedding, in units of learning_rate: its entries start at unit scale"),
        ("weight_decay", float, 0.1, "on matrices, not on the embedding"),
        ("beta2", float, 0.95, "AdamW's second-moment decay; lower for few, large steps"),
        ("grad_clip", float, 1.0, "maximum gradient norm; 0: no clipping"),
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
CHOICES = {**MODEL_CHOICES, "tie": ("mean", "first", "last"), "loss": ("terminal", "per_loop"),
           "optimizer": ("muon", "adamw"), "dtype": ("", "bfloat16", "float32"),
           "schedule": ("cosine", "linear", "wsd", "constant")}
# what may change when a run is resumed: not the model, nor its training up to rounding; the data has its hash
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
HOPS = dict(n_embd=64, head_dim=64, block_size=32, n_prelude=0, n_recur=2, n_coda=0, n_loop=6, inject="none",
            loop_norm=False, data="hops", raise_hops=0.1, raise_passes=True, batch_size=64, max_steps=1200,
            weight_decay=0.3, schedule="wsd", eval_tokens=16384)
PRESETS = {
    "laptop": dict(n_embd=128, bptt=1, learning_rate=0.006, max_steps=2300),
    "pocket": dict(max_steps=600),
    "hops": HOPS,
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


def parse(argv=None, description=None):
    """Flags of one run: (args, explicit), args complete, explicit only those that the command line sets, by name or
    with a --preset."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
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
    explicit = set(line)
    if "preset" in line:
        explicit |= PRESETS[name].keys() - EXTENDABLE
    if "head_dim" in explicit:
        explicit.add("n_head")
    return args, {name: getattr(args, name) for name in explicit}


def complete(line):
    """Fill the flags of a command line up with its preset's and the defaults. A horizon on the line replaces the
    preset's. What --init_from brings along replaces the preset by default, and is replaced by one that is named. Every
    flag that cannot work is refused here, before any work is done."""
    preset = dict(PRESETS[line.get("preset", DEFAULTS["preset"])])
    if len([h for h in HORIZON if line.get(h)]) > 1:
        stop("give exactly one of --max_steps, --max_tokens and --max_flops")
    if any(line.get(h) for h in HORIZON):
        preset = {k: v for k, v in preset.items() if k not in HORIZON}
    out_dir = line.get("out_dir") or f"out/{line.get('preset', DEFAULTS['preset'])}"
    source = {}                                  # what --init_from brings along
    if line.get("init_from"):
        source = source_flags({**preset, **line}, out_dir)
    elif "tie" in line:
        stop("--tie says how layers of --init_from are joined: give that as well, or drop the flag")
    given = {**source, **preset, **line} if "preset" in line else {**preset, **source, **line}
    a = {**DEFAULTS, **given, "out_dir": out_dir}
    if a["n_loop"] == 1 and "inject" not in given:
        a["inject"] = "none"                     # one pass has nothing to inject, so the default is no matrix
    if not any(a[h] for h in HORIZON):
        stop("the run has no end: give one of --max_steps, --max_tokens and --max_flops")
    trick = model_class(a["trick"], a["trick_args"])
    if a["sample_loops"] and trick.schedule.__func__ is not LoopedLM.schedule.__func__:
        stop(f"--sample_loops: the schedule of {a['trick']} sets the passes of a step, too; drop the flag")
    check_raise_passes(a)
    for name, value in trick.requires.items():
        if name not in DEFAULTS:
            stop(f"--trick={a['trick']}: requires {name}, which is no flag of train.py")
        if line.get(name, value) != value:
            stop(f"--{name}={line[name]} contradicts {a['trick']}, which needs {name}={value}: drop the flag")
        a[name] = value
    if "bptt" not in line and (a["inject"] == "none" or a["loss"] == "per_loop" or a["trick"]):
        a["bptt"] = 0                            # a preset's gives way where it cannot work, or may starve a trick
    if not a["n_head"] and a["head_dim"] > 0 and a["n_embd"] > a["head_dim"] and a["n_embd"] % a["head_dim"]:
        stop(f"--n_embd={a['n_embd']}: not a multiple of --head_dim={a['head_dim']}; change one, or give --n_head")
    a["n_head"] = a["n_head"] or max(1, a["n_embd"] // max(1, a["head_dim"]))
    for name in ("batch_size", "grad_accum", "eval_tokens", "log_interval"):
        if a[name] < 1:
            stop(f"--{name}={a[name]}: must be at least 1")
    for name in ("learning_rate", "embed_lr", "weight_decay", "grad_clip", "warmup_steps", "norm_penalty", "bptt",
                 "raise_hops", "eval_interval", "threads", "peak_tflops", *HORIZON):
        if not 0 <= a[name] < math.inf:
            stop(f"--{name}={a[name]}: must be a finite number and not negative")
    for name, fits, limit in (("beta2", a["beta2"] < 1, "below 1"), ("final_lr", a["final_lr"] <= 1, "at most 1"),
                              ("seed", a["seed"] < 2 ** 63, "below 2^63")):
        if not (fits and a[name] >= 0):
            stop(f"--{name}={a[name]}: must be at least 0 and {limit}")
    if a["bptt"] and a["loss"] == "per_loop":
        stop("--bptt with --loss=per_loop: the early readouts would train nothing but the head; drop one of them")
    deepest = 2 * a["n_loop"] - 1 if a["sample_loops"] else a["n_loop"]
    if 0 < a["bptt"] < deepest and a["inject"] == "none" and not a["trick"]:
        stop("--bptt with --inject=none: only the first pass sees the embedding, so no gradient would reach it; use "
             "--inject=linear or add")
    if a["norm_penalty"] and a["loop_norm"]:
        stop("--norm_penalty with --loop_norm: the norm fixes what the penalty would shrink; give --loop_norm=false")
    return argparse.Namespace(**a)


def check_raise_passes(a):
    """Refuse the flags that set the passes of a step as well, or that count on them. a: all flags by name."""
    if not a["raise_passes"] or a["n_loop"] == 1:
        return
    trick = model_class(a["trick"], a["trick_args"])
    if not a["raise_hops"]:
        stop("--raise_passes goes by the hops of --raise_hops: give that as well, or --raise_passes=false")
    if a["sample_loops"] or trick.schedule.__func__ is not LoopedLM.schedule.__func__:
        other = "--sample_loops" if a["sample_loops"] else f"the schedule of {a['trick']}"
        stop(f"--raise_passes: {other} sets the passes of a step, too; give --raise_passes=false")
    if a["max_flops"]:
        stop("--max_flops: with --raise_passes the FLOPs of a step follow from what the model learns; give --max_steps")


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
    if steps < 0.5:
        horizon = next(h for h in HORIZON if getattr(args, h))
        stop(f"--{horizon}={getattr(args, horizon):g}: less than one step, which takes {per_step} tokens and "
             f"{per_step * flops_of(args, cfg):.3g} FLOPs; raise it, or lower --batch_size")
    return max(1, round(steps))


def flops_of(args, cfg, n_steps=100):
    """Training FLOPs per token, the mean over a run of n_steps: --sample_loops and a trick's schedule change the number
    of passes from step to step."""
    trick = model_class(args.trick, args.trick_args)
    if args.sample_loops:
        settings = [{"n_loop": r} for r in range(1, 2 * cfg.n_loop)]
    else:
        settings = [trick.schedule(cfg, step, n_steps) for step in range(n_steps)]
    return sum(flops_with(setting, args, cfg) for setting in settings) / len(settings)


def flops_with(settings, args, cfg):
    """Training FLOPs per token of a step. settings: its n_loop and bptt, where they are not those of the run."""
    trick = model_class(args.trick, args.trick_args)
    r = settings.get("n_loop", cfg.n_loop)
    readouts = r if args.loss == "per_loop" else 1
    return trick.flops_per_token(cfg, r, bptt=settings.get("bptt", args.bptt), readouts=readouts)


def check_same_run(explicit, saved, data_sha256, where, resume):
    """A run is resumed with the flags, the data and the trick it began with: a command line that says otherwise is an
    error, not silently dropped. saved: the dict of a config.json or of a checkpoint."""
    if saved["data_sha256"] != data_sha256:
        stop(f"--data or --vocab_size: not the corpus that {where} was trained on; choose another --out_dir")
    same_trick = False                           # the same file under another path, such as the run folder's copy
    if explicit.get("trick") and saved.get("trick"):
        same_trick = file_hash(trick_file(explicit["trick"])) == saved["trick"]["sha256"]
        if not same_trick and explicit["trick"] == saved["trick"]["file"]:
            stop(f"--trick={explicit['trick']}: the file has changed since {where} was begun; choose another --out_dir")
    for name, value in explicit.items():
        may_differ = name in FREE or (resume and name in EXTENDABLE) or (name == "trick" and same_trick)
        first_value = saved["args"].get(name, DEFAULTS.get(name))
        if not may_differ and first_value != value:
            value, first_value = (f"{v:g}" if isinstance(v, float) else v for v in (value, first_value))
            hint = "add --resume, " if name in EXTENDABLE else ""
            stop(f"--{name}={value} contradicts {where}, begun with {name}={first_value}: drop the flag, {hint}or "
                 f"choose another --out_dir")


def list_presets():
    """Estimates: 1.9e11 FLOP/s for two CPU cores with bf16, 2e14 for one current GPU."""
    print(f"{'preset':18s} {'parameters':>11s} {'unique N':>9s} {'depth':>5s} {'FLOPs/token':>11s} {'tokens':>8s} "
          f"{'FLOPs':>8s} {'2 cores':>9s} {'1 GPU':>9s}")
    for name in PRESETS:
        args = complete({"preset": name})
        size = str(args.data).rpartition("-")[2]
        cfg = config_of(args, {"gpt2": 50257, "sotu": 4096, "hops": 89}.get(size) or int(size))
        n, F = LoopedLM.param_counts(cfg), flops_of(args, cfg)
        tokens = steps_of(args, cfg) * args.batch_size * args.grad_accum * cfg.block_size
        print(f"{name:18s} {sum(n.values()) / 1e6:10.1f}M {(n['once'] + n['recurrent'] + n['injection']) / 1e6:8.1f}M "
              f"{cfg.depth():5d} {F:11.2e} {tokens:8.1e} {F * tokens:8.1e} {duration(F * tokens / 1.9e11):>9s} "
              f"{duration(F * tokens / 2e14):>9s}")

