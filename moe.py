"""
Sparse feed-forward layers for the loop: every token takes n_active of n_expert small SwiGLUs, so that the same physical
layer can do different work in each pass (arXiv 2605.09165). A model with --n_expert=8 has them in every block; its
active parameters and FLOPs per token are those of the dense model, since each expert is n_active times narrower.

    python train.py --n_expert=8 --out_dir=out/mix            # train one; presets looped-moe-* have the paper's shapes
    python routing_study.py --ckpt=out/mix                    # do passes differ in experts?

Shapes: N = B T tokens, D width, H hidden width of one expert, E experts, k chosen per token, A = N k assignments of a
token to an expert, R rows sorted by expert, n of them of one expert.
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
        """Balance loss E * sum f_i p_i, f the share of assignments and p the mean probability of expert i: 1 for
        uniform routing, E/k when all tokens take the same k; the gradient flows through p. z-loss: mean squared
        logsumexp, which keeps the logits small. logits (N, E), chosen (N, k)."""
        E = logits.size(-1)
        p = logits.softmax(-1).mean(0)                                             # (E,)
        hit = chosen.flatten()[:, None] == torch.arange(E, device=chosen.device)   # (A, E)
        load = hit.sum(0)                                                          # (E,)
        f = load / chosen.numel()
        self.balance.append(E * (f * p).sum())
        self.z.append(logits.logsumexp(-1).square().mean())
        self.chosen[slot] = chosen
        self.load[slot] = self.load.get(slot, 0) + load    # a coda read out after every pass comes several times

    def losses(self):
        """Means over all router calls, and the loads (L_eff, E): each (layer, pass) is to be balanced by itself."""
        return {"balance": torch.stack(self.balance).mean(), "z": torch.stack(self.z).mean(),
                "load": torch.stack([self.load[slot] for slot in sorted(self.load)])}


class Mixture(nn.Module):
    """k of E experts per token: y = sum over the chosen of gate_i * expert_i(x), the gates a softmax over the chosen
    logits, which is the softmax over all, renormalised. No expert has a capacity, so no token is dropped."""

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
            if routing.direct is not None:
                chosen = routing.direct(routing, slot, chosen)
            routing.note(slot, logits, chosen)
        gates = logits.gather(1, chosen).softmax(-1)                               # (N, k)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weights = []
        for expert in self.experts:
            weights += [expert.gate.weight, expert.value.weight, expert.down.weight]
        aligned = all(n * dtype.itemsize % 16 == 0 for n in weights[0].shape)      # what the grouped kernel asks for
        fused = device == "cuda" and dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")
        dispatch = grouped if fused else one_by_one
        return dispatch(flat.to(dtype), gates.to(dtype), chosen, weights).view(x.shape)

    @torch.no_grad()
    def rebalance(self, load):
        """After an optimizer step, load (E,) its assignments: overloaded experts become less likely to be chosen. The
        mean stays zero, since a shift common to all would choose nothing and only grow."""
        self.bias += BIAS_STEP * torch.sign(load.float().mean() - load)
        self.bias -= self.bias.mean()


# --- experts ---
def arrange(chosen, n_expert, multiple):
    """Sort the assignments chosen (N, k) by expert, each expert's rows padded to a multiple. Returns the token of each
    row (R,), the row of each assignment (N, k) and where each expert's rows end (E,). Padding rows repeat token 0 and
    nothing reads them."""
    flat = chosen.flatten()                                                        # (A,)
    hit = flat[:, None] == torch.arange(n_expert, device=flat.device)              # (A, E)
    rank = hit.cumsum(0).gather(1, flat[:, None])[:, 0] - 1                        # among the rows of its expert
    size = -(-hit.sum(0) // multiple) * multiple                                   # rounded up
    ends = size.cumsum(0)
    place = (ends - size)[flat] + rank
    source = flat.new_zeros(flat.numel() if multiple == 1 else int(ends[-1]))
    source[place] = torch.arange(flat.numel(), device=flat.device) // chosen.size(1)
    return source, place.view_as(chosen), ends


def grouped(x, gates, chosen, weights):
    """torch's grouped matrix product, one kernel for all experts: x (N, D), gates (N, k), weights 3 E matrices."""
    source, place, ends = arrange(chosen, len(weights) // 3, multiple=1)
    stacks = [torch.stack(weights[i::3]).to(x.dtype) for i in range(3)]            # (E, out, in)
    gate, value, down = [stack.transpose(1, 2) for stack in stacks]                # (E, in, out)
    rows, ends = x[source], ends.int()                                             # (A, D)
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, value, offs=ends)        # (A, H)
    y = F.grouped_mm(hidden, down, offs=ends)
    return (gates[..., None] * y[place]).sum(1)


def one_by_one(x, gates, chosen, weights):
    """One expert after the other, only those that were hit. Rows are padded to multiples of 8, because the CPU's matrix
    product rounds a row differently in a group of 1 to 3: with the padding, an edit of one token leaves all others
    that do not see it bit-equal."""
    source, place, ends = arrange(chosen, len(weights) // 3, multiple=8)
    ends = ends.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends)]            # the rows of each expert
    return LoopOverExperts.apply(x, gates, source, place, spans, *weights)


class LoopOverExperts(torch.autograd.Function):
    """Written out with its backward because autograd would fill a zero tensor of full size for every slice. An expert
    without rows gets a zero gradient, not None: DistributedDataParallel waits for every parameter."""

    @staticmethod
    def forward(ctx, x, gates, source, place, spans, *weights):
        cast = [w.to(x.dtype) for w in weights]
        rows = x[source]                                                           # (R, D)
        a, b = (rows.new_empty(len(source), weights[0].size(0)) for _ in "ab")     # (R, H) before the activation
        y = torch.empty_like(rows)
        for e, s in enumerate(spans):
            if s.start < s.stop:
                gate, value, down = cast[3 * e:3 * e + 3]
                torch.mm(rows[s], gate.t(), out=a[s])
                torch.mm(rows[s], value.t(), out=b[s])
                torch.mm(F.silu(a[s]).mul_(b[s]), down.t(), out=y[s])
        ctx.save_for_backward(rows, a, b, gates, source, place, *weights)
        ctx.spans = spans
        return torch.bmm(gates[:, None], y[place])[:, 0]                           # (N, 1, k) x (N, k, D)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rows, a, b, gates, source, place, *weights = ctx.saved_tensors
        grad = grad.contiguous()                                                   # (N, D)
        grad_rows = torch.empty_like(rows)
        row_gate, grad_gate = rows.new_zeros(2, len(source))                       # (R,) each; 0 for padding
        row_gate[place] = gates
        grad_weights = []
        for e, s in enumerate(ctx.spans):
            matrices = weights[3 * e:3 * e + 3]
            if s.start == s.stop:
                grad_weights += [torch.zeros_like(w) for w in matrices]
                continue
            gate, value, down = [w.to(rows.dtype) for w in matrices]
            g = row_gate[s, None]                                                  # (n, 1)
            grad_y = grad[source[s]]                                               # (n, D), not yet times g
            grad_hidden = grad_y @ down                                            # (n, H), not yet times g
            act = F.silu(a[s])
            hidden = act * b[s]
            grad_gate[s] = (grad_hidden * hidden).sum(-1)
            grad_hidden *= g
            grad_b = act.mul_(grad_hidden)
            grad_a = torch.ops.aten.silu_backward(grad_hidden.mul_(b[s]), a[s])
            torch.addmm(grad_a @ gate, grad_b, value, out=grad_rows[s])
            products = (grad_a.t() @ rows[s], grad_b.t() @ rows[s], grad_y.t() @ hidden.mul_(g))
            grad_weights += [p.to(w.dtype) for p, w in zip(products, matrices)]
        return grad_rows[place].sum(1), grad_gate[place], None, None, None, *grad_weights
# --- end experts ---
