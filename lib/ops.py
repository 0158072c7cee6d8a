"""
The operations below a layer: RMSNorm, matrix product, rotary positions, attention, sampling. Plain torch would do; what
is longer here than a line is faster on a CPU (results/bench.md).
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from lib.machine import is_amd


def inverse_rms(x):
    return torch.rsqrt((x * x).sum(-1, keepdim=True) * (1 / x.size(-1)) + 1e-6)


class FastRMSNorm(torch.autograd.Function):
    """RMSNorm whose backward makes three passes over memory instead of eight: 2.4x faster on CPU, where torch composes
    rms_norm of single operations. On other devices torch has a fused kernel."""

    @staticmethod
    def forward(ctx, x):
        scale = inverse_rms(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):                     # remove the radial part, then rescale
        y, scale = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1).mul_(scale)


def norm(x):
    """RMSNorm over the last axis, without gain, in the precision of x; eps 1e-6."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.size(-1),), eps=1e-6)
    return FastRMSNorm.apply(x) if x.requires_grad else x * inverse_rms(x)


class Linear(nn.Linear):
    """A matrix, without bias. Decoding multiplies it by one to four rows, which takes as long as reading the matrix. On
    AMD's CPUs the batched kernel reads it two to three times faster than the plain one, so there the product is written
    as a batch of eight horizontal slices; on Intel's it is the other way round (results/bench.md)."""
    sliced = is_amd()

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        if not self.sliced:
            return F.linear(x, self.weight)
        rows = x.numel() // x.size(-1)
        if (rows > 4 or torch.is_grad_enabled() or x.device.type != "cpu" or torch.is_autocast_enabled("cpu")
                or self.out_features % 8):
            return F.linear(x, self.weight)
        slices = self.weight.view(8, -1, self.in_features)                         # (8, out / 8, in)
        y = torch.bmm(slices, x.reshape(rows, -1).t().expand(8, -1, -1))           # (8, out / 8, rows)
        return y.view(-1, rows).t().contiguous().view(*x.shape[:-1], -1)


def rotary_table(block_size, head_dim, base=10000.0):
    """(T, head_dim/2, 2): cosine and sine of position times frequency, for consecutive pairs of channels."""
    freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(block_size, dtype=torch.float64)[:, None] * freq
    return torch.stack([angle.cos(), angle.sin()], -1).float()


def rotate(x, table):
    """Rotary positions: pairs of channels of x (B, T, H, head_dim) seen as complex numbers, times e^(i angle). Eager
    CPU code multiplies them as such, 2.5 times faster; compilers and other devices want real arithmetic."""
    pairs, table = x.view(*x.shape[:-1], -1, 2), table[:, None]                    # (B, T, H, hd/2, 2), (T, 1, hd/2, 2)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table)).flatten(-2)
    (a, b), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def attend(q, k, v, mask, scale=None):
    """softmax(scale q k^T) v, scale 1 / sqrt(head_dim) if None: q (B, H, Tq, head_dim), k and v (B, H, Tk, head_dim),
    mask additive (Tq, Tk) or None. Written out on CPU for short contexts, where it is faster than the fused kernel
    (results/bench.md)."""
    if q.device.type == "cpu" and k.size(-2) <= 1024:
        scores = (q * (scale or q.size(-1) ** -0.5)) @ k.transpose(-2, -1)         # (B, H, Tq, Tk)
        return (scores if mask is None else scores + mask).softmax(-1) @ v
    if mask is not None and q.size(-2) == k.size(-2):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def check_sampling(temperature, top_k=None):
    """ValueError, a sentence, for what cannot be sampled with."""
    if not (temperature == 0 or 1e-3 <= temperature < math.inf):                   # nan fails every comparison
        raise ValueError(f"temperature={temperature}: must be 0, the likeliest token, or a number from 0.001 on")
    if top_k is not None and (top_k < 0 or top_k != int(top_k)):
        raise ValueError(f"top_k={top_k}: must be a whole number, at least 1; 0 or None samples from all tokens")


def distribution(logits, temperature=1.0, top_k=None):
    """Probabilities (..., V) with which the next token is drawn from logits (..., V): all on the likeliest one at
    temperature 0, else the softmax at this temperature, over the top_k if set."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits.softmax(-1)


def sample(logits, temperature=1.0, top_k=None, generator=None):
    """Next tokens (B, 1) from logits (B, V): the likeliest ones at temperature 0, else drawn, from the top_k if set.
    ValueError for a temperature or top_k that means nothing."""
    check_sampling(temperature, top_k)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(distribution(logits, temperature, top_k), 1, generator=generator)
