"""
How fast is it: train-step and decode throughput, FLOP/s or MFU, peak memory, of one model or of several in turn.

    python bench.py                                              # the default model: train step and cached decoding
    python bench.py --preset=pocket --n_recur=2 --n_loop=2 --vs="--n_loop=1 --n_recur=4 --inject=none"     # A/B
    python bench.py --preset=pocket --n_embd=384 --nanogpt=PATH   # against a clone of karpathy/nanoGPT (fp32 and bf16)
    python bench.py --n_embd=384 --what=decode --hf_gpt2         # against transformers' GPT-2: pip install transformers
    python bench.py --what=moe --hf_mixtral                      # experts against the dense layer of equal FLOPs

All flags of train.py that shape the model or the step are accepted. Each contender lives in its own process and they
take turns, one measurement each, so that a machine whose speed drifts slows all of them alike; what to quote is the
ratio column: the median over rounds of (time of this contender) / (time of the first). Leave the machine idle.
"""
import argparse
import importlib.util
import json
import resource
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import moe
from lib.console import misused, stop
from lib.flags import config_of, flops_of, parse
from lib.machine import keep_freed_memory, peak_flops, pick_device, pick_dtype, read_clock
from lib.ops import Linear
from lib.optim import make_optimizers
from lib.tricks import model_class
from model import SwiGLU
from train import clip_and_measure


# --- contenders: each returns (function to time once, tokens per measurement, FLOPs per token or None) ---
def ours(spec):
    args, _ = parse(spec["flags"])
    cfg = config_of(args, args.vocab_size or 4096)
    device = pick_device(args.device)
    if device == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    model = model_class(args.trick, args.trick_args)(cfg).to(device)
    if spec["what"] == "decode":
        prompt, n = torch.zeros(1, 1, dtype=torch.long, device=device), cfg.block_size - 1
        flops = model.flops_per_token(cfg, train=False)
        return timed(lambda: model.generate(prompt, n, temperature=0), device), n, flops
    if args.compile or (args.compile is None and device == "cuda"):
        model.compile_blocks()
    optimizers = make_optimizers(model, args)
    bf16 = pick_dtype(device, args.dtype) == "bfloat16"
    batches = torch.randint(0, cfg.vocab_size, (2, args.batch_size, cfg.block_size), device=device)

    def step():
        for _ in range(args.grad_accum):
            with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=bf16):
                _, out = model(*batches, loss=args.loss, norm_penalty=args.norm_penalty, bptt=args.bptt)
            (out["loss"] / args.grad_accum).backward()
        clip_and_measure(model, args.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return timed(step, device), args.grad_accum * batches[0].numel(), flops_of(args, cfg)


def nanogpt(spec):
    """The model of a nanoGPT clone at the same depth, width, context, batch and vocabulary, with its own optimizer."""
    args, _ = parse(spec["flags"])
    cfg = config_of(args, args.vocab_size or 4096)
    location = importlib.util.spec_from_file_location("nanogpt_model", Path(spec["path"]) / "model.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(block_size=cfg.block_size, vocab_size=cfg.vocab_size, n_layer=cfg.depth(),
                                        n_head=cfg.n_head, n_embd=cfg.n_embd, dropout=0.0, bias=False))
    if spec["what"] == "decode":
        prompt, n = torch.zeros(1, 1, dtype=torch.long), cfg.block_size - 1
        return timed(lambda: model.generate(prompt, n, top_k=1), "cpu"), n, None
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    x, y = torch.randint(0, cfg.vocab_size, (2, args.batch_size, cfg.block_size))

    def step():
        for _ in range(args.grad_accum):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=spec["bf16"]):
                _, loss = model(x, y)
            (loss / args.grad_accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return timed(step, "cpu"), args.grad_accum * x.numel(), None


def hf_gpt2(spec):
    """transformers' GPT-2 of the same shape, greedy, with its own cache (decode only)."""
    from transformers import GPT2Config, GPT2LMHeadModel
    args, _ = parse(spec["flags"])
    cfg = config_of(args, args.vocab_size or 4096)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=cfg.vocab_size, n_positions=cfg.block_size, n_embd=cfg.n_embd,
                                       n_layer=cfg.depth(), n_head=cfg.n_head, bos_token_id=0,
                                       eos_token_id=None)).eval()
    prompt, n = torch.zeros(1, 1, dtype=torch.long), cfg.block_size - 1
    settings = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0,
                    attention_mask=torch.ones_like(prompt))
    return timed(lambda: model.generate(prompt, **settings), "cpu"), n, None


# --- one feed-forward layer: forward and backward of EXPERTS, top ACTIVE, against the dense layer of equal FLOPs ---
WIDTH, HIDDEN, EXPERTS, ACTIVE, TOKENS = 256, 1024, 8, 2, 4096


def feed_forward(spec):
    """spec["layer"]: dense | one_by_one | grouped (moe.py with that dispatch and its router losses) | what transformers
    calls a way to run the experts of its Mixtral block."""
    args, _ = parse(spec["flags"])
    device, bf16, layer = pick_device(args.device), spec["bf16"], spec["layer"]
    if device == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    if layer == "dense":
        module = SwiGLU(WIDTH, HIDDEN)
    elif layer in ("one_by_one", "grouped"):
        module = moe.Mixture(Linear(WIDTH, EXPERTS), [SwiGLU(WIDTH, HIDDEN // ACTIVE) for _ in range(EXPERTS)], ACTIVE,
                             "loss")
        moe.one_by_one = moe.grouped = getattr(moe, layer)
    else:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
        settings = MixtralConfig(hidden_size=WIDTH, intermediate_size=HIDDEN // ACTIVE, num_local_experts=EXPERTS,
                                 num_experts_per_tok=ACTIVE)
        settings._experts_implementation = layer
        module = MixtralSparseMoeBlock(settings)
        for p in module.parameters():
            torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    module = module.to(device)
    x, upstream = torch.randn(2, 8, TOKENS // 8, WIDTH, device=device).unbind()
    x.requires_grad_()

    def step():
        routing = moe.Routing()
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=bf16):
            y = module(x, routing) if layer in ("one_by_one", "grouped") else module(x)
        objective = [y] + [moe.BALANCE * b + moe.Z * z for b, z in zip(routing.balance, routing.z)]
        torch.autograd.backward(objective, [upstream.to(y.dtype), *[None] * len(routing.z)])
        module.zero_grad(set_to_none=True)
        x.grad = None
    return timed(step, device), TOKENS, 3 * 2 * 3 * WIDTH * HIDDEN


def timed(work, device):
    """A function that does the work once and returns its seconds."""
    def measure():
        start = read_clock(device)
        work()
        return read_clock(device) - start
    return measure


# --- taking turns ---
def worker(spec):
    """Child process: warm up, then one measurement for every line on stdin."""
    threads = parse(spec["flags"])[0].threads
    if threads:
        torch.set_num_threads(threads)
    contender = {"ours": ours, "nanogpt": nanogpt, "hf_gpt2": hf_gpt2, "feed_forward": feed_forward}[spec["kind"]]
    measure, tokens, flops = contender(spec)
    for _ in range(spec["warmup"]):
        measure()
    print("@", json.dumps({"tokens": tokens, "flops": flops}), flush=True)
    for _ in sys.stdin:
        print("@", json.dumps(measure()), flush=True)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else \
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print("@", json.dumps(peak), flush=True)


def read_answer(process):
    """What a worker says next: the content of a line that begins with @. The contenders print other lines too."""
    for line in process.stdout:
        if line.startswith("@"):
            return json.loads(line[1:])
    stop("a contender ended early; its error message is above")


def measure_in_turns(contenders, rounds):
    """A row per contender: seconds (median), tok_per_s, flop_per_s, ratio to the first and its quartiles, MB."""
    processes = []
    for spec in contenders:                      # started one after the other: each warms up alone
        processes.append(subprocess.Popen([sys.executable, __file__, "--worker", json.dumps(spec)], text=True,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        spec.update(read_answer(processes[-1]))
    times = [[] for _ in contenders]
    for i in range(rounds):
        for process, seconds in zip(processes, times):
            process.stdin.write("go\n")
            process.stdin.flush()
            seconds.append(read_answer(process))
        if sys.stderr.isatty():
            print(f"\rround {i + 1}/{rounds}", end="", file=sys.stderr)
    rows = []
    for spec, process, seconds in zip(contenders, processes, times):
        process.stdin.close()
        median = statistics.median(seconds)
        rate = spec["tokens"] / median
        ratios = sorted(own / first for first, own in zip(times[0], seconds))
        i = len(ratios) // 4
        rows.append({"name": spec["name"], "what": spec["what"], "seconds": median, "tok_per_s": rate,
                     "flop_per_s": spec["flops"] and spec["flops"] * rate, "ratio": statistics.median(ratios),
                     "ratio_quartiles": [ratios[i], ratios[-1 - i]], "peak_mb": read_answer(process) / 2 ** 20})
        process.wait()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    parser.add_argument("--what", choices=["train", "decode", "both", "moe"], default="both",
                        help="train step, decoding, both, or one layer of experts (default: both)")
    parser.add_argument("--vs", action="append", default=[], metavar="FLAGS", help="another config: flags added here")
    parser.add_argument("--nanogpt", metavar="PATH", help="a clone of nanoGPT to compare with, on CPU")
    parser.add_argument("--hf_gpt2", action="store_true", help="compare decoding with transformers' GPT-2")
    parser.add_argument("--hf_mixtral", action="store_true", help="with --what=moe: transformers' Mixtral block too")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each contender (default: 15)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a, flags = parser.parse_known_args()
    if a.worker:
        return worker(json.loads(a.worker))
    args, _ = parse(flags)                       # refuses bad flags before any process starts
    if args.sample_loops or model_class(args.trick, args.trick_args).schedule(config_of(args, 4096), 0, 100):
        stop("bench.py times steps of one depth: drop --sample_loops, or take a trick without a schedule")
    config_of(args, 4096)
    if a.nanogpt and not (Path(a.nanogpt) / "model.py").is_file():
        stop(f"--nanogpt={a.nanogpt}: no model.py there; give a clone of github.com/karpathy/nanoGPT")
    if (a.hf_gpt2 or a.hf_mixtral) and importlib.util.find_spec("transformers") is None:
        stop("--hf_gpt2 and --hf_mixtral need the package transformers: pip install transformers")
    if a.rounds < 1:
        stop(f"--rounds={a.rounds}: must be at least 1")
    if a.json and not Path(a.json).resolve().parent.is_dir():
        stop(f"--json={a.json}: no such folder; make it first")
    rows = []
    for what in {"both": ("train", "decode"), "moe": ("fp32", "bf16")}.get(a.what, (a.what,)):
        base = {"what": what, "flags": flags, "warmup": 1 if what == "decode" else 3}
        if a.what == "moe":
            layers = {"dense": "dense", "one_by_one": "experts, one after the other"}
            if hasattr(torch.nn.functional, "grouped_mm"):
                layers["grouped"] = "experts, grouped_mm"
            if a.hf_mixtral:
                layers.update(eager="Mixtral, eager", grouped_mm="Mixtral, grouped_mm")
            base |= {"kind": "feed_forward", "bf16": what == "bf16"}
            contenders = [{**base, "layer": layer, "name": name} for layer, name in layers.items()]
        else:
            contenders = [{**base, "kind": "ours", "name": "nanoloop " + " ".join(flags)}]
            for extra in a.vs:
                more_flags = flags + shlex.split(extra)
                config_of(parse(more_flags)[0], 4096)
                contenders.append({**base, "kind": "ours", "name": f"  with {extra}", "flags": more_flags})
            for bf16 in (False, True) if what == "train" else (False,):
                name = "nanoGPT bf16 autocast" if bf16 else "nanoGPT fp32"
                if a.nanogpt:
                    contenders.append({**base, "kind": "nanogpt", "path": a.nanogpt, "bf16": bf16, "name": name})
            if a.hf_gpt2 and what == "decode":
                contenders.append({**base, "kind": "hf_gpt2", "name": "transformers GPT-2, cached"})
        rows += measure_in_turns(contenders, max(3, a.rounds // 3) if what == "decode" else a.rounds)
    peak = peak_flops(args.peak_tflops, pick_device(args.device))
    print("          median  tokens/s  GFLOP/s    MFU    ratio (quartiles)  peak MB")
    for row in rows:
        rate, (low, high) = row["flop_per_s"], row["ratio_quartiles"]
        gflops = f"{rate / 1e9:.1f}" if rate else "-"
        mfu = f"{100 * rate / peak:.1f}%" if peak and rate else "-"
        print(f"{row['what']:6s} {1e3 * row['seconds']:7.0f}ms {row['tok_per_s']:9.0f} {gflops:>8s} {mfu:>6s} "
              f"{row['ratio']:7.2f} ({low:.2f}..{high:.2f}){row['peak_mb']:9.0f}  {row['name']}")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
