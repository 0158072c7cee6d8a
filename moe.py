"""
Sparse feed-forward layers for the loop: every token takes n_active of n_expert small SwiGLUs, so that the same physical
layer can do different work in each pass (arXiv 2605.09165). A model with --n_expert=8 has them in every block; its
active parameters and FLOPs per token are those of the dense model, since each expert is n_active times narrower.

    python train.py --n_expert=8 --out_dir=out/mix            # train one; presets looped-moe-* have the paper's shapes
    python routing_study.py --ckpt=out/mix                    # do passes differ in experts?

Shapes: N = B T tokens, D width, H hidden width of one expert, E experts, k chosen per token, A = N k assignments,
R rows sorted by expert, r of them of one expert.
"""
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
