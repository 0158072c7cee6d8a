"""
Sparse feed-forward layers for the loop: every token takes n_active of n_expert small SwiGLUs, so that the same physical
layer can do different work in each pass (arXiv 2605.09165). A model with --n_expert=8 has them in every block; its
active parameters and FLOPs per token are those of the dense model, since each expert is n_active times narrower.

    python train.py --n_expert=8 --out_dir=out/mix            # train one; presets looped-moe-* have the paper's shapes
    python moe.py --ckpt=out/mix                              # do passes differ in experts? beside chance

As a script: how much the experts of consecutive passes agree, layer by layer, beside three baselines the paper leaves
out (uniform chance, chance at the measured loads, the untrained model), and the test by intervention: what the loss
becomes when later passes must take the experts of pass 1, or those of another token. Prints a table and writes
routing.png and routing.json into the run folder; about a minute on CPU for the default 65,536 tokens of a small model.

Shapes: N = B T tokens, D width, H hidden width of one expert, E experts, k chosen per token, A = N k assignments,
R rows sorted by expert, r of them of one expert.
"""
import argparse
import json
from math import comb
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

BALANCE, Z = 0.01, 0.001    # weight of the two router losses in the objective (arXiv 2605.09165, the published config)
BIAS_STEP = 1e-3            # how far balance="bias" moves an expert's bias after each optimizer step


class Routing:
    """What the routers of one forward pass did, in the order in which a token meets them; one slot per (layer, pass),
    numbered as in KVCache. direct(routing, slot, chosen) may put other experts (N, k) in place of the chosen ones."""

    def __init__(self, direct=None):
        self.direct = direct
        self.chosen, self.load = {}, {}          # slot: experts of each token (N, k); assignments per expert (E,)
        self.balance, self.z = [], []            # one loss per router call

    def note(self, slot, logits, chosen):
        """Balance loss E * sum f_i p_i, f the share of assignments and p the mean probability of expert i, so that it
        is 1 for uniform routing and E/k when all tokens take the same k; the gradient flows through p. z-loss: mean
        squared logsumexp, which keeps the logits small. logits (N, E), chosen (N, k)."""
        E, p = logits.size(-1), logits.softmax(-1).mean(0)
        load = (chosen.flatten()[:, None] == torch.arange(E, device=chosen.device)).sum(0)
        self.chosen[slot] = chosen
        self.load[slot] = self.load.get(slot, 0) + load    # a coda read out after every pass comes several times
        self.balance.append(E * (load / chosen.numel() * p).sum())
        self.z.append(logits.logsumexp(-1).square().mean())

    def losses(self):
        """Means over all router calls, and the loads (L_eff, E): each (layer, pass) is to be balanced by itself."""
        return {"balance": torch.stack(self.balance).mean(), "z": torch.stack(self.z).mean(),
                "load": torch.stack([self.load[slot] for slot in sorted(self.load)])}


class Mixture(nn.Module):
    """k of E experts per token: y = sum over the chosen of gate_i * expert_i(x), the gates a softmax over the chosen
    logits, which is the softmax over all, renormalised. No capacity, so no token is dropped on account of others."""

    def __init__(self, router, experts, n_active, balance):
        super().__init__()
        self.router, self.experts, self.n_active = router, nn.ModuleList(experts), n_active
        # added to the probabilities when experts are chosen, never to a gate (arXiv 2408.15664)
        self.register_buffer("bias", torch.zeros(len(self.experts)) if balance == "bias" else None)

    def route(self, x):
        """Router logits (N, E) in the precision of the weights, also under autocast, and the chosen experts (N, k)."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(self.router.weight.dtype), self.router.weight)
        scores = logits if self.bias is None else logits.softmax(-1) + self.bias
        return logits, scores.topk(self.n_active).indices

    @torch.compiler.disable                      # group sizes and notes differ in each call: graphs would never settle
    def forward(self, x, routing=None, slot=0):
        flat = x.flatten(0, -2)                                                    # (N, D)
        logits, chosen = self.route(flat)
        if routing is not None:
            chosen = routing.direct(routing, slot, chosen) if routing.direct else chosen
            routing.note(slot, logits, chosen)
        gates = logits.gather(1, chosen).softmax(-1)                               # (N, k)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weights = [w for e in self.experts for w in (e.gate.weight, e.value.weight, e.down.weight)]
        aligned = all(n * dtype.itemsize % 16 == 0 for n in weights[0].shape)      # what the grouped kernel asks for
        fused = device == "cuda" and dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")
        return (grouped if fused else one_by_one)(flat.to(dtype), gates.to(dtype), chosen, weights).view(x.shape)

    @torch.no_grad()
    def rebalance(self, load):
        """After an optimizer step, load (E,) its assignments: overloaded experts become less likely to be chosen. The
        mean stays zero, since a shift common to all would choose nothing and only grow."""
        self.bias += BIAS_STEP * torch.sign(load.float().mean() - load)
        self.bias -= self.bias.mean()


# --- experts ---
def arrange(chosen, n_expert, multiple):
    """Sort the assignments chosen (N, k) by expert, each expert's rows padded to a multiple. Returns the token behind
    each row (R,), the row of each assignment (N, k) and where each expert's rows end (E,). Padding rows repeat token 0
    and nothing reads them."""
    flat = chosen.flatten()
    hit = flat[:, None] == torch.arange(n_expert, device=flat.device)              # (A, E)
    rank = hit.cumsum(0).gather(1, flat[:, None])[:, 0] - 1                        # among the rows of its expert
    size = -(-hit.sum(0) // multiple) * multiple
    ends = size.cumsum(0)
    place = (ends - size)[flat] + rank
    source = flat.new_zeros(flat.numel() if multiple == 1 else int(ends[-1]))
    source[place] = torch.arange(flat.numel(), device=flat.device) // chosen.size(1)
    return source, place.view_as(chosen), ends


def grouped(x, gates, chosen, weights):
    """torch's grouped matrix product, one kernel for all experts: x (N, D), gates (N, k), weights 3 E matrices."""
    source, place, ends = arrange(chosen, len(weights) // 3, 1)
    gate, value, down = (torch.stack(weights[i::3]).to(x.dtype).transpose(1, 2) for i in range(3))     # (E, in, out)
    rows, ends = x[source], ends.int()                                             # (A, D)
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, value, offs=ends)        # (A, H)
    y = F.grouped_mm(hidden, down, offs=ends)
    return (gates[..., None] * y[place]).sum(1)


def one_by_one(x, gates, chosen, weights):
    """One expert after the other, only those that were hit. Rows are padded to multiples of 8, because the CPU's matrix
    product rounds a row differently in a group of 1 to 3: with the padding, an edit of one token leaves all others
    that do not see it bit-equal."""
    source, place, ends = arrange(chosen, len(weights) // 3, 8)
    return LoopOverExperts.apply(x, gates, source, place, ends.tolist(), *weights)


class LoopOverExperts(torch.autograd.Function):
    """Written out with its backward because autograd would fill a zero tensor of full size for every slice. An expert
    without rows gets a zero gradient, not None: DistributedDataParallel waits for every parameter."""

    @staticmethod
    def forward(ctx, x, gates, source, place, ends, *weights):
        cast = [w.to(x.dtype) for w in weights]
        rows = x[source]                                                           # (R, D)
        a, b = (rows.new_empty(len(source), weights[0].size(0)) for _ in "ab")     # (R, H) before the activation
        y = torch.empty_like(rows)
        for e, (start, end) in enumerate(zip([0, *ends], ends)):
            if start < end:
                s, (gate, value, down) = slice(start, end), cast[3 * e:3 * e + 3]
                torch.mm(rows[s], gate.t(), out=a[s])
                torch.mm(rows[s], value.t(), out=b[s])
                torch.mm(F.silu(a[s]).mul_(b[s]), down.t(), out=y[s])
        ctx.save_for_backward(rows, a, b, gates, source, place, *weights)
        ctx.ends = ends
        return torch.bmm(gates[:, None], y[place])[:, 0]                           # (N, 1, k) x (N, k, D)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rows, a, b, gates, source, place, *weights = ctx.saved_tensors
        grad, grad_rows, grad_weights = grad.contiguous(), torch.empty_like(rows), []
        weight, grad_gate = rows.new_zeros(2, len(source))                         # of each row; 0 for padding
        weight[place] = gates
        for e, (start, end) in enumerate(zip([0, *ctx.ends], ctx.ends)):
            mine = weights[3 * e:3 * e + 3]
            if start == end:
                grad_weights += [torch.zeros_like(w) for w in mine]
                continue
            s, (gate, value, down) = slice(start, end), [w.to(rows.dtype) for w in mine]
            grad_y, g = grad[source[s]], weight[s, None]                           # (r, D), (r, 1)
            grad_hidden, act = grad_y @ down, F.silu(a[s])                         # (r, H), not yet times the gate
            hidden = act * b[s]
            grad_gate[s] = (grad_hidden * hidden).sum(-1)
            grad_hidden *= g
            grad_b = act.mul_(grad_hidden)
            grad_a = torch.ops.aten.silu_backward(grad_hidden.mul_(b[s]), a[s])
            torch.addmm(grad_a @ gate, grad_b, value, out=grad_rows[s])
            products = (grad_a.t() @ rows[s], grad_b.t() @ rows[s], grad_y.t() @ hidden.mul_(g))
            grad_weights += [p.to(w.dtype) for p, w in zip(products, mine)]
        return grad_rows[place].sum(1), grad_gate[place], None, None, None, *grad_weights
# --- end experts ---


# --- routing across passes ---
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
    from data.load import even_windows           # here, not above, because model.py imports this file
    from data.prepare import check_writable, misused, stop, write_atomic
    from model import LoopedLM
    from plots import plot_routing
    from train import data_of, load_model, pick_device, run_folder
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    parser.add_argument("--ckpt", required=True, help="run folder of train.py, or its ckpt.pt")
    parser.add_argument("--tokens", type=int, default=65536, help="validation tokens to look at (default: 65536)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows at a time (default: 8)")
    parser.add_argument("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument("--out_dir", default="", help="folder for routing.png and routing.json (default: the run's)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here instead of OUT_DIR/routing.json")
    a = parser.parse_args()
    device = pick_device(a.device)
    model, state = load_model(a.ckpt, device)
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
    untrained = LoopedLM(cfg).to(device).eval()
    result = {"ckpt": str(a.ckpt), "step": state["step"], **study(model, untrained, batches)}
    report(result)
    name = run_folder(a.ckpt).name
    plot_routing(result, out / "routing.png", f"{name}: which experts a token takes in consecutive passes")
    write_atomic(target, json.dumps(result, indent=1).encode())
    print(f"wrote {target} and {out / 'routing.png'}")


if __name__ == "__main__":
    main()
