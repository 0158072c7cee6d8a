"""
How the weights move: Muon for the matrices of the blocks, AdamW for the rest, and the learning rate over a run

Muon (Keller Jordan 2024) replaces a matrix's update by the nearest matrix whose singular values are all equal, found by
five Newton-Schulz steps. The optimizer is torch's. What is ours is that matrices of one shape take these steps as one
batch: with the 192 small matrices of eight experts in eight layers that is six times faster (results/bench.md), and
the update is the same.
"""
import math

import torch

BATCH = 2 ** 24             # entries orthogonalised at once: beyond, a batch costs memory and gains nothing


class Muon(torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", matrices of one shape orthogonalised together."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, same in shapes.items():
                n = max(1, BATCH // shape.numel())
                for i in range(0, len(same), n):
                    self.move(same[i:i + n], group)

    def move(self, params, group):
        """One step of params, all of one shape (m, n)."""
        lr, momentum, grads = group["lr"], group["momentum"], [p.grad for p in params]
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        updates = orthogonalize(torch.stack(torch._foreach_lerp(grads, momenta, momentum)), group["ns_steps"])
        size = 0.2 * math.sqrt(max(params[0].shape))       # entries as large as AdamW's
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, list(updates.to(params[0].dtype)), alpha=-lr * size)


def orthogonalize(x, n_steps=5):
    """x (batch, m, n) with the singular values of each matrix brought to about 1 (0.7 to 1.2), in bfloat16: n_steps of
    s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5, which is steepest at 0."""
    x = x.bfloat16()
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT.contiguous()                              # the Gram matrix on the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(n_steps):
        gram = x @ x.mT                                    # (batch, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def make_optimizers(model, args):
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest. Muon's update has AdamW's
    usual size, so both follow one learning rate. A matrix is the weight of a Linear; what a trick adds as a bare
    nn.Parameter, of whatever shape, goes to AdamW and does not decay. A trick's loop_rates put the matrices of the loop
    into a group of their own."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    matrices, scalars = [], []
    for p in model.parameters():
        if p is not model.embed.weight and p is not model.head.weight:
            (matrices if id(p) in linear else scalars).append(p)
    w = model.cfg.width_ratio                    # 1 without muP

    def slower(factor):                          # muP: a lower rate, while rate times decay stays what it was
        return {"weight_decay": args.weight_decay * factor, "lr_scale": 1 / factor}
    groups = [] if model.cfg.tied else [{"params": [model.head.weight], **slower(w)}]
    groups.append({"params": [model.embed.weight], "weight_decay": 0.0, "lr_scale": args.embed_lr})
    if scalars:
        groups.append({"params": scalars, "weight_decay": 0.0})
    muon = args.optimizer == "muon"
    rate = slower(w ** 0.5 if muon else w)       # Muon's singular values are all equal: its update grows as sqrt(w)
    of_matrices = [{"params": matrices, **rate}]
    lr_factor, decay_factor = model.loop_rates(model.cfg)
    if (lr_factor, decay_factor) != (1, 1):
        looped = {id(p) for name, p in model.named_parameters() if name.startswith(("recur.", "inject."))}
        shared = {"lr_scale": rate["lr_scale"] * lr_factor, "weight_decay": rate["weight_decay"] * decay_factor}
        of_matrices = [{"params": [p for p in matrices if id(p) not in looped], **rate},
                       {"params": [p for p in matrices if id(p) in looped], **shared}]
    optimizers = []
    if muon:
        optimizers.append(Muon(of_matrices, lr=args.learning_rate))
    else:
        groups += of_matrices
    fused = model.table.device.type in ("cuda", "cpu")
    optimizers.append(torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, args.beta2), fused=fused))
    return optimizers


def lr_at(step, args, max_steps):
    """Learning rate of step 0 .. max_steps - 1: rises linearly to the peak, then never rises again."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    x = (step - args.warmup_steps) / max(1, max_steps - 1 - args.warmup_steps)     # 0 after warm-up, 1 at the end
    falling = {"constant": 0.0, "linear": x, "cosine": (1 - math.cos(math.pi * min(1, x))) / 2,
               "wsd": max(0.0, (x - 0.8) / 0.2)}[args.schedule]
    return args.learning_rate * (1 - (1 - args.final_lr) * min(1, falling))
