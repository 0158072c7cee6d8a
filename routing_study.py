"""
Do the passes of a loop use different experts (arXiv 2605.09165)? First: how much the experts of consecutive passes
agree, layer by layer, compared with three baselines that the paper leaves out (uniform chance, chance at the measured
loads, the untrained model). Then an intervention: what the loss becomes when later passes must take the experts of
pass 1, or those of another token.

    python train.py --n_expert=8 --out_dir=out/mix
    python routing_study.py --ckpt=out/mix          # a table; routing.png and routing.json in the run folder; 1 min

Shapes: N = B T tokens, E experts, k chosen per token, K passes.
"""
import argparse
import json
from math import comb
from pathlib import Path

import torch
import torch.nn.functional as F

from data.load import even_windows
from lib.checkpoint import data_of, load_model, run_folder
from lib.console import misused, require_at_least, stop
from lib.files import check_writable, write_atomic
from lib.machine import pick_device
from lib.plots_model import plot_routing
from moe import Routing


def overlap(a, b):
    """How many experts the choices a and b (N, k) of a token have in common: (N,), 0 .. k."""
    return (a[:, :, None] == b[:, None, :]).sum((1, 2))


def agreement(shared, k, weight=None):
    """Shares of tokens whose sets are identical, partly shared and disjoint, and the mean Jaccard index, from counts of
    shared experts (N,) of k; weight (N,) if the entries are not equally likely."""
    if weight is None:
        weight = torch.full(shared.shape, 1 / len(shared))

    def total(x):
        return (x.double() * weight).sum().item()
    return {"identical": total(shared == k), "partial": total((shared > 0) & (shared < k)),
            "disjoint": total(shared == 0), "jaccard": total(shared / (2 * k - shared))}


def uniform_chance(E, k):
    """agreement of two independent, uniform draws of k from E: 15/28 disjoint and 1/28 identical for 2 of 8."""
    probability = [comb(k, i) * comb(E - k, k - i) / comb(E, k) for i in range(k + 1)]
    return agreement(torch.arange(k + 1), k, torch.tensor(probability))


def shuffled_chance(a, b, k, generator, n=20):
    """agreement when pass 2 keeps its loads but not its tokens: its rows are permuted, n times."""
    orders = [torch.randperm(len(b), generator=generator) for _ in range(n)]
    shared = torch.cat([overlap(a, b[order]) for order in orders])
    return agreement(shared, k)


def compare_passes(choices, p, E, k):
    """agreement of passes p and p + 1 of one layer, and experts_seen, the mean number of different experts that a token
    meets there over all passes; choices (K, N, k)."""
    shared = overlap(choices[p], choices[p + 1])
    met = F.one_hot(choices, E).amax((0, 2))                                       # (N, E), 0 or 1
    return {**agreement(shared, k), "experts_seen": met.sum(-1).float().mean().item()}


def loss_change(loss, base, generator, n=2000):
    """Mean of loss - base (windows,) in nats and its 95% interval, from resampled windows."""
    change = (loss - base).double()
    samples = torch.randint(len(change), (n, len(change)), generator=generator)
    means = change[samples].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return {"nats": change.mean().item(), "low": low, "high": high}


@torch.no_grad()
def run_windows(model, batches, direct=None):
    """Loss of each window (windows,), and what the loop's routers chose (layer, pass, token, k)."""
    cfg = model.cfg
    loop_slots = range(cfg.n_prelude, cfg.depth() - cfg.n_coda)
    losses, chosen = [], []
    for x, y in batches:
        routing = Routing(direct)
        logits, _ = model(x, y, routing=routing)
        nats = F.cross_entropy(logits.transpose(1, 2).float(), y, reduction="none")    # (B, T)
        losses.append(nats.sum(1) / (y >= 0).sum(1))       # of the task hops only answers count
        choices = torch.stack([routing.chosen[slot] for slot in loop_slots])
        chosen.append(choices.view(cfg.n_loop, cfg.n_recur, -1, cfg.n_active))     # (pass, layer, B T, k)
    return torch.cat(losses).cpu(), torch.cat(chosen, 2).transpose(0, 1).cpu()


def measure_routing(model, untrained, batches):
    """All numbers of the report, as plain Python."""
    cfg = model.cfg
    E, k = cfg.n_expert, cfg.n_active
    generator = torch.Generator().manual_seed(0)
    # agreement of each pass with the next, layer by layer
    base, chosen = run_windows(model, batches)
    _, chosen_untrained = run_windows(untrained, batches)
    layers = []
    for i in range(cfg.n_recur):
        for p in range(cfg.n_loop - 1):
            layers.append({"layer": i + 1, "passes": [p + 1, p + 2], **compare_passes(chosen[i], p, E, k),
                           "shuffled": shuffled_chance(chosen[i, p], chosen[i, p + 1], k, generator),
                           "untrained": compare_passes(chosen_untrained[i], p, E, k)})
    load = F.one_hot(chosen, E).float().mean((2, 3))                               # (layer, pass, E), sums to 1
    # interventions: from pass 2 on, a token gets other experts than its router chose
    later_slots = range(cfg.n_prelude + cfg.n_recur, cfg.depth() - cfg.n_coda)

    def take_pass_1(routing, slot, own):         # those of the pass before, which has taken those of pass 1
        return routing.chosen[slot - cfg.n_recur] if slot in later_slots else own

    def take_other_token(routing, slot, own):
        return own[torch.randperm(len(own), generator=generator)] if slot in later_slots else own
    changes = {}
    for name, direct in (("reuse_pass_1", take_pass_1), ("other_token", take_other_token)):
        loss, _ = run_windows(model, batches, direct)
        changes[name] = loss_change(loss, base, generator)
    return {"n_expert": E, "n_active": k, "n_loop": cfg.n_loop, "tokens": chosen.size(2), "windows": len(base),
            "loss": base.mean().item(), "uniform": uniform_chance(E, k), "layers": layers, "load": load.tolist(),
            **changes}


def print_routing(result):
    def print_row(name, row, more=""):
        shares = f"{row['disjoint']:9.1%} {row['partial']:8.1%} {row['identical']:10.1%}"
        print(f"{name:22s} {shares} {row['jaccard']:8.3f} {more}")
    layers = result["layers"]
    print(f"{result['tokens']} tokens in {result['windows']} windows; {result['n_active']} of {result['n_expert']} "
          f"experts, {result['n_loop']} passes; chance at the measured loads and the untrained model in brackets")
    print("                        disjoint  partial  identical  Jaccard (loads, untrained)  seen max load")
    for row in layers:
        first, second = row["passes"]
        load = result["load"][row["layer"] - 1]                                    # (pass, E)
        top = max(load[first - 1] + load[second - 1]) * result["n_expert"]         # of both passes, in even shares
        baselines = f"({row['shuffled']['jaccard']:.3f}, {row['untrained']['jaccard']:.3f})"
        print_row(f"layer {row['layer']}, pass {first} to {second}", row,
                  f"   {baselines} {row['experts_seen']:5.2f} {top:7.2f}x")
    for key, name in (("shuffled", "chance, measured loads"), ("untrained", "untrained, all layers")):
        mean = {head: sum(row[key][head] for row in layers) / len(layers) for head in result["uniform"]}
        print_row(name, mean)
    print_row("chance, uniform", result["uniform"])
    print(f"loss {result['loss']:.4f} nats/token; when every later pass takes")
    for key, name in (("reuse_pass_1", "the experts of pass 1"), ("other_token", "those of another token")):
        change = result[key]
        print(f"  {name:24s} {change['nats']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}]")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", required=True, help="run folder of train.py, or its ckpt.pt")
    add("--tokens", type=int, default=65536, help="validation tokens to look at (default: 65536)")
    add("--batch_size", type=int, default=8, help="windows at a time (default: 8)")
    add("--device", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--trick", help="file of the run's trick, if it is outside tricks/")
    add("--out_dir", help="folder for routing.png and routing.json (default: the run's)")
    add("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/routing.json")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    model, state = load_model(args.ckpt, device, args.trick)
    cfg = model.cfg
    if not cfg.n_expert or cfg.n_loop < 2:
        stop(f"--ckpt={args.ckpt}: n_expert={cfg.n_expert} and n_loop={cfg.n_loop}, but this study needs experts and "
             f"at least two passes; train such a model with --n_expert=8 --n_loop=2")
    require_at_least(args, tokens=1, batch_size=1, threads=0)
    if args.threads:
        torch.set_num_threads(args.threads)
    run = run_folder(args.ckpt)
    out = Path(args.out_dir or run)
    plot = out / "routing.png"
    target = Path(args.json or out / "routing.json")
    check_writable("--out_dir or --json", out, target.parent)
    x, y = even_windows(*data_of(state), "val", args.tokens, cfg.block_size)
    batches = list(zip(x.to(device).split(args.batch_size), y.to(device).split(args.batch_size)))
    torch.manual_seed(state["args"]["seed"])     # the model as it was before its first step
    untrained = type(model)(cfg).to(device).eval()
    result = {"ckpt": str(args.ckpt), "step": state["step"], **measure_routing(model, untrained, batches)}
    print_routing(result)
    plot_routing(result, plot)
    write_atomic(target, json.dumps(result, indent=1).encode())
    print(f"wrote {target} and {plot}")


if __name__ == "__main__":
    main()
