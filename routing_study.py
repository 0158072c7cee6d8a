"""
Do the passes of a loop use different experts (arXiv 2605.09165)? How much the experts of consecutive passes agree, layer
by layer, compared with three baselines that the paper leaves out (uniform chance, chance at the measured loads, the
untrained model), and a test by intervention: what the loss becomes when later passes must take the experts of pass 1,
or those of another token.

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
from lib.console import misused, stop
from lib.files import check_writable, write_atomic
from lib.machine import pick_device
from lib.plots import plot_routing
from moe import Routing


def overlap(a, b):
    """How many experts the choices a and b (N, k) of a token have in common: (N,), 0 .. k."""
    return (a[:, :, None] == b[:, None, :]).sum((1, 2))


def agreement(shared, k, weight=None):
    """Shares of tokens whose sets are identical, partly shared and disjoint, and the mean Jaccard index, from counts of
    shared experts (N,) of k; weight (N,) if the entries are not equally likely."""
    weight = torch.full(shared.shape, 1 / len(shared)) if weight is None else weight

    def total(x):
        return (x.double() * weight).sum().item()
    return {"identical": total(shared == k), "partial": total((shared > 0) & (shared < k)),
            "disjoint": total(shared == 0), "jaccard": total(shared / (2 * k - shared))}


def uniform_chance(E, k):
    """agreement of two independent, uniform draws of k from E: 15/28 disjoint and 1/28 identical for 2 of 8."""
    shared = torch.arange(k + 1)
    ways = torch.tensor([comb(k, i) * comb(E - k, k - i) / comb(E, k) for i in range(k + 1)])
    return agreement(shared, k, ways)


def shuffled_chance(a, b, k, generator, n=20):
    """agreement when pass 2 keeps its loads but not its tokens: its rows are permuted, n times."""
    rows = [b[torch.randperm(len(b), generator=generator)] for _ in range(n)]
    return agreement(torch.cat([overlap(a, row) for row in rows]), k)


def seen(passes, E):
    """Mean number of different experts that a token meets in one layer over all passes (K, N, k)."""
    return F.one_hot(passes, E).amax((0, 2)).sum(-1).float().mean().item()


def loss_change(loss, base, generator, n=2000):
    """Mean of loss - base (windows,) in nats and its 95% interval, from resampled windows."""
    change = (loss - base).double()
    drawn = change[torch.randint(len(change), (n, len(change)), generator=generator)].mean(1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return {"nats": change.mean().item(), "low": low, "high": high}


@torch.no_grad()
def observe(model, batches, direct=None):
    """Loss of each window (windows,), and what the loop's routers chose (layer, pass, token, k)."""
    cfg, losses, chosen = model.cfg, [], []
    for x, y in batches:
        routing = Routing(direct)
        logits, _ = model(x, y, routing=routing)
        losses.append(F.cross_entropy(logits.transpose(1, 2).float(), y, reduction="none").mean(1))
        slots = torch.stack([routing.chosen[s] for s in range(cfg.n_prelude, cfg.depth() - cfg.n_coda)])
        chosen.append(slots.view(cfg.n_loop, cfg.n_recur, -1, cfg.n_active))
    return torch.cat(losses).cpu(), torch.cat(chosen, 2).transpose(0, 1).cpu()


def study(model, untrained, batches):
    """All numbers of the report, as plain Python."""
    cfg, generator = model.cfg, torch.Generator().manual_seed(0)
    E, k, first, behind = cfg.n_expert, cfg.n_active, cfg.n_prelude, cfg.n_prelude + cfg.n_recur

    def looped_again(slot):                      # is this slot in pass 2 or later?
        return behind <= slot < cfg.depth() - cfg.n_coda

    def reuse(routing, slot, chosen):
        return routing.chosen[first + (slot - first) % cfg.n_recur] if looped_again(slot) else chosen

    def scramble(routing, slot, chosen):
        return chosen[torch.randperm(len(chosen), generator=generator)] if looped_again(slot) else chosen

    base, chosen = observe(model, batches)
    fresh = observe(untrained, batches)[1]
    layers = []
    for i, (mine, raw) in enumerate(zip(chosen, fresh)):
        for p in range(cfg.n_loop - 1):
            layers.append({"layer": i + 1, "passes": [p + 1, p + 2], **agreement(overlap(mine[p], mine[p + 1]), k),
                           "experts_seen": seen(mine, E),
                           "shuffled": shuffled_chance(mine[p], mine[p + 1], k, generator),
                           "untrained": {**agreement(overlap(raw[p], raw[p + 1]), k), "experts_seen": seen(raw, E)}})
    load = F.one_hot(chosen, E).float().mean((2, 3))                               # (layer, pass, E), sums to 1
    return {"n_expert": E, "n_active": k, "n_loop": cfg.n_loop, "tokens": chosen.size(2), "windows": len(base),
            "loss": base.mean().item(), "uniform": uniform_chance(E, k), "layers": layers, "load": load.tolist(),
            "reuse_pass_1": loss_change(observe(model, batches, reuse)[0], base, generator),
            "other_token": loss_change(observe(model, batches, scramble)[0], base, generator)}


def report(r):
    def line(name, a, rest=""):
        print(f"{name:22s} {a['disjoint']:9.1%} {a['partial']:8.1%} {a['identical']:10.1%} {a['jaccard']:8.3f} {rest}")
    print(f"{r['tokens']} tokens in {r['windows']} windows; {r['n_active']} of {r['n_expert']} experts, "
          f"{r['n_loop']} passes; chance at the measured loads and the untrained model in brackets\n"
          f"{'':22s} {'disjoint':>9s} {'partial':>8s} {'identical':>10s} {'Jaccard':>8s} {'(loads, untrained)':>18s} "
          f"{'seen':>5s} {'max load':>8s}")
    for a in r["layers"]:
        load = max(max(r["load"][a["layer"] - 1][p - 1]) for p in a["passes"]) * r["n_expert"]
        line(f"layer {a['layer']}, pass {a['passes'][0]} to {a['passes'][1]}", a,
             f"   ({a['shuffled']['jaccard']:.3f}, {a['untrained']['jaccard']:.3f}) {a['experts_seen']:5.2f} "
             f"{load:7.2f}x")
    for name in ("shuffled", "untrained"):
        mean = {key: sum(a[name][key] for a in r["layers"]) / len(r["layers"]) for key in r["uniform"]}
        line({"shuffled": "chance, measured loads", "untrained": "untrained, all layers"}[name], mean)
    line("chance, uniform", r["uniform"])
    print(f"loss {r['loss']:.4f} nats/token; when every later pass takes")
    for key, text in (("reuse_pass_1", "the experts of pass 1"), ("other_token", "those of another token")):
        c = r[key]
        print(f"  {text:24s} {c['nats']:+.4f} [{c['low']:+.4f}, {c['high']:+.4f}]")


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    parser.add_argument("--ckpt", required=True, help="run folder of train.py, or its ckpt.pt")
    parser.add_argument("--tokens", type=int, default=65536, help="validation tokens to look at (default: 65536)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows at a time (default: 8)")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument("--trick", default="", help="file of the run's trick, if it is outside tricks/")
    parser.add_argument("--out_dir", default="", help="folder for routing.png and routing.json (default: the run's)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/routing.json")
    a = parser.parse_args()
    device = pick_device(a.device)
    model, state = load_model(a.ckpt, device, a.trick)
    cfg = model.cfg
    if not cfg.n_expert or cfg.n_loop < 2:
        stop(f"--ckpt={a.ckpt}: n_expert={cfg.n_expert} and n_loop={cfg.n_loop}, but routing across passes needs "
             f"experts and at least two passes: train one with --n_expert=8 --n_loop=2")
    for name, least in (("tokens", 1), ("batch_size", 1), ("threads", 0)):
        if getattr(a, name) < least:
            stop(f"--{name}={getattr(a, name)}: must be at least {least}")
    if a.threads:
        torch.set_num_threads(a.threads)
    out = Path(a.out_dir) if a.out_dir else run_folder(a.ckpt)
    target = Path(a.json) if a.json else out / "routing.json"
    check_writable("--out_dir or --json", out, target.parent)
    x, y = even_windows(*data_of(state), "val", a.tokens, cfg.block_size)
    batches = list(zip(x.to(device).split(a.batch_size), y.to(device).split(a.batch_size)))
    torch.manual_seed(state["args"]["seed"])     # the model as it was before its first step
    untrained = type(model)(cfg).to(device).eval()
    result = {"ckpt": str(a.ckpt), "step": state["step"], **study(model, untrained, batches)}
    report(result)
    name = run_folder(a.ckpt).name
    plot_routing(result, out / "routing.png", f"{name}: which experts a token takes in consecutive passes")
    write_atomic(target, json.dumps(result, indent=1).encode())
    print(f"wrote {target} and {out / 'routing.png'}")


if __name__ == "__main__":
    main()
