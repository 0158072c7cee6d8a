"""model.py and lib/ops.py against independent computations: torch.nn modules, torch's FLOP counter, the uncached forward."""
import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import model as M
from lib import ops
from model import Config, KVCache, LoopedLM

SMALL = dict(vocab_size=100, block_size=32, n_embd=32, n_head=2)
VARIANTS = [dict(inject=i, readout=r, loop_norm=n) for i, r, n in
            itertools.product(("none", "add", "linear"), ("norm", "raw", "final"), (True, False))]


def small(**kw):
    torch.manual_seed(0)
    model = LoopedLM(Config(**{**SMALL, **kw}))
    nn.init.normal_(model.head.weight, std=0.2)          # away from the near-zero head, so that differences show
    return model


def tokens(B=2, T=12, seed=1):
    return torch.randint(0, 100, (B, T), generator=torch.Generator().manual_seed(seed))


# --- counts ---
@pytest.mark.parametrize("d", [384, 768])
@pytest.mark.parametrize("r, matrices", [(1, 240), (2, 146), (4, 98), (8, 74)])
def test_parameters_match_the_papers_table(d, r, matrices):
    cfg = Config(n_embd=d, n_head=d // 128, n_prelude=2, n_recur=16 // r, n_coda=2, n_loop=r,
                 inject="linear" if r > 1 else "none")
    n = LoopedLM.param_counts(cfg)
    assert n["once"] + n["recurrent"] + n["injection"] == matrices * d * d
    assert cfg.depth() == 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_groups_sum_to_numel(variant):
    model = small(**variant)
    assert sum(LoopedLM.param_counts(model.cfg).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("r, inject", [(1, "none"), (4, "linear"), (4, "none"), (4, "add")])
def test_flops_agree_with_torchs_counter(r, inject):
    """Counted by torch: all matmuls, attention scores included, forward and backward. Excluded on both sides: the
    embedding lookup, norms, activations, softmax, the loss."""
    cfg = Config(vocab_size=512, block_size=64, n_embd=128, n_head=2, n_recur=4 // r, n_loop=r, inject=inject)
    model, x = LoopedLM(cfg), torch.randint(0, 512, (2, 64))
    with FlopCounterMode(display=False) as train:
        model(x, x)[1]["loss"].backward()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(x, x)
    assert train.get_total_flops() / x.numel() == pytest.approx(LoopedLM.flops_per_token(cfg), rel=0.02)
    assert forward.get_total_flops() / x.numel() == pytest.approx(LoopedLM.flops_per_token(cfg, train=False), rel=0.02)
    with FlopCounterMode(display=False) as shorter, torch.no_grad():
        model(x, x, n_loop=2)
    assert shorter.get_total_flops() / x.numel() == pytest.approx(LoopedLM.flops_per_token(cfg, 2, train=False), rel=0.02)


@pytest.mark.parametrize("how, flops", [(dict(bptt=1), dict(bptt=1)), (dict(bptt=3), dict(bptt=3)),
                                        (dict(loss="per_loop"), dict(readouts=4))])
def test_flops_of_truncation_and_of_readouts_agree_with_torchs_counter(how, flops):
    cfg = Config(vocab_size=512, block_size=64, n_embd=128, n_head=2)
    model, x = LoopedLM(cfg), torch.randint(0, 512, (2, 64))
    with FlopCounterMode(display=False) as counted:
        model(x, x, **how)[1]["loss"].backward()
    assert counted.get_total_flops() / x.numel() == pytest.approx(LoopedLM.flops_per_token(cfg, **flops), rel=0.02)


# --- one block against torch.nn ---
class ReferenceBlock(nn.Module):
    """The block again, from torch.nn and explicit 2 x 2 rotations."""

    def __init__(self, D, H, d_ff):
        super().__init__()
        self.H, self.norm, self.head_norm = H, nn.RMSNorm(D, eps=1e-6, elementwise_affine=False), nn.RMSNorm(
            D // H, eps=1e-6, elementwise_affine=False)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.value, self.down = (nn.Linear(D, d_ff, bias=False), nn.Linear(D, d_ff, bias=False),
                                            nn.Linear(d_ff, D, bias=False))

    def rotate(self, x):                                  # (B, H, T, head_dim)
        T, width = x.shape[-2:]
        rotations = torch.stack([torch.block_diag(*(
            torch.tensor([[c, -s], [s, c]], dtype=x.dtype) for c, s in
            ((torch.cos(a).item(), torch.sin(a).item()) for a in
             t * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)))) for t in range(T)])
        return torch.einsum("tij,bhtj->bhti", rotations, x)

    def forward(self, x):
        B, T, D = x.shape
        u = self.norm(x)
        q, k, v = (f(u).view(B, T, self.H, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.head_norm(self.rotate(q)), self.head_norm(self.rotate(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        u = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(u)) * self.value(u))


def test_block_equals_reference_in_value_and_gradient():
    torch.manual_seed(0)
    cfg = Config(**SMALL)
    block, D, d_ff = M.Block(cfg).double(), cfg.n_embd, cfg.d_ff
    reference = ReferenceBlock(D, cfg.n_head, d_ff).double()
    with torch.no_grad():
        for name, part in zip("qkv", block.attn.qkv.weight.split(D)):
            getattr(reference, name).weight.copy_(part)
        reference.o.weight.copy_(block.attn.proj.weight)
        for name in ("gate", "value", "down"):
            getattr(reference, name).weight.copy_(getattr(block.ffn, name).weight)
    table = ops.rotary_table(32, D // cfg.n_head).double()
    x1 = torch.randn(2, 16, D, dtype=torch.float64, requires_grad=True)
    x2 = x1.detach().clone().requires_grad_()
    mask = torch.full((16, 16), -torch.inf, dtype=torch.float64).triu(1)
    y1, y2 = block(x1, M.Context(table[:16], mask), 0), reference(x2)
    upstream = torch.randn_like(y1)
    y1.backward(upstream)
    y2.backward(upstream)
    close = dict(rtol=1e-5, atol=1e-6)                    # the rotary table is kept in float32
    torch.testing.assert_close(y1, y2, **close)
    torch.testing.assert_close(x1.grad, x2.grad, **close)
    qkv_grad = torch.cat([reference.q.weight.grad, reference.k.weight.grad, reference.v.weight.grad])
    torch.testing.assert_close(block.attn.qkv.weight.grad, qkv_grad, **close)
    torch.testing.assert_close(block.ffn.down.weight.grad, reference.down.weight.grad, **close)


def test_norm_equals_torchs_and_its_gradient():
    x = torch.randn(5, 7, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.norm, x)
    torch.testing.assert_close(ops.norm(x), F.rms_norm(x, (16,), eps=1e-6))


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_few_rows_multiply_as_a_batch_of_slices(rows, monkeypatch):
    """Linear's decoding path on AMD equals the plain product, also where the output does not divide by eight."""
    monkeypatch.setattr(ops.Linear, "sliced", True)
    for n_out in (48, 30):
        matrix, x = ops.Linear(20, n_out), torch.randn(rows, 1, 20)
        plain = x @ matrix.weight.T
        with torch.no_grad():
            torch.testing.assert_close(matrix(x), plain, rtol=1e-5, atol=1e-5)
            strided = x.repeat(1, 1, 2)[..., :20]          # not contiguous, as a slice of a longer input is
            torch.testing.assert_close(matrix(strided), plain, rtol=1e-5, atol=1e-5)


def test_written_out_attention_equals_the_fused_kernel():
    q, k, v = torch.randn(3, 2, 2, 16, 8).unbind()
    mask = torch.full((16, 16), -torch.inf).triu(1)
    torch.testing.assert_close(ops.attend(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, is_causal=True),
                               rtol=1e-5, atol=1e-5)
    long = torch.randn(1, 1, 1100, 8)                     # past 1024 keys the fused kernel is used
    mask = torch.full((1100, 1100), -torch.inf).triu(1)
    plain = (long @ long.transpose(-2, -1) / 8 ** 0.5 + mask).softmax(-1) @ long
    torch.testing.assert_close(ops.attend(long, long, long, mask), plain, rtol=1e-5, atol=1e-5)


# --- the loop ---
def test_plain_model_is_the_stack_of_its_blocks():
    """n_loop = 1 without injection or loop norm: embedding, blocks in order, norm, head and nothing else."""
    model = small(n_prelude=1, n_recur=2, n_coda=1, n_loop=1, inject="none", loop_norm=False)
    idx = tokens()
    h, mask = model.embed(idx), torch.full((12, 12), -torch.inf).triu(1)
    for block in (model.prelude[0], model.recur[0], model.recur[1], model.coda[0]):
        h = block(h, M.Context(model.table[:12], mask), 0)
    torch.testing.assert_close(model(idx, idx)[0], F.rms_norm(h, (32,), eps=1e-6) @ model.head.weight.T[:, :100])


def test_linear_injection_starts_as_the_pass_that_sees_only_e():
    """W = [I | 0] ignores h, so every pass computes the same state until training moves W."""
    model = small(inject="linear", n_loop=3)
    states = model.loop_states(tokens(), model.context(tokens(), 3, None), 3)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


@pytest.mark.parametrize("inject", ["none", "add", "linear"])
def test_first_pass_gets_the_preludes_output(inject):
    model, idx = small(inject=inject, loop_norm=False), tokens()
    context = model.context(idx, 1, None)
    e = model.encode(idx, context)
    torch.testing.assert_close(model.loop_states(idx, context, 1)[0], model.run(model.recur, e, context, 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_bit_for_bit(variant):
    model, idx = small(**variant), tokens()
    changed = idx.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 100
    for training in (True, False):
        model.train(training)
        for bf16 in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                a, b = model(idx, idx)[0], model(changed, idx)[0]
            assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_targets_only_the_last_position(variant):
    model, idx = small(**variant), tokens()
    torch.testing.assert_close(model(idx)[0], model(idx, idx)[0][:, -1:], rtol=1e-5, atol=1e-5)
    assert model(idx)[0].shape == (2, 1, 100)


def storages(model):
    return {p.data_ptr() for p in model.parameters()}


def test_passes_share_storage_through_a_step_and_a_save(tmp_path):
    """One set of tensors whatever the number of passes, and no other set after a step or a reload."""
    model = small(n_loop=4)
    n, before = sum(p.numel() for p in model.parameters()), storages(model)
    assert n == sum(p.numel() for p in small(n_loop=8).parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(), tokens())[1]["loss"].backward()
    optimizer.step()
    assert storages(model) == before
    torch.save(model.state_dict(), tmp_path / "m.pt")
    other = small(n_loop=4)
    other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert len(storages(other)) == len(before) and len(other.state_dict()) == len(list(other.parameters()))
    visited, block = [], other.recur[0]
    block.attn.qkv.register_forward_hook(lambda m, i, o: visited.append(m.weight.data_ptr()))
    other(tokens(), tokens())
    assert len(visited) == 4 and len(set(visited)) == 1   # four passes read one matrix


def test_losses():
    model, x, y = small(n_loop=3, readout="final", inject="none", loop_norm=False), tokens(seed=1), tokens(seed=2)
    logits, terminal = model(x, y)
    plain = F.cross_entropy(logits.reshape(-1, 100), y.reshape(-1))
    torch.testing.assert_close(terminal["loss"], plain)
    torch.testing.assert_close(terminal["ce"], plain[None])
    _, per_loop = model(x, y, loss="per_loop")
    assert per_loop["ce"].shape == (3,) and per_loop["norm"].shape == (3,)
    torch.testing.assert_close(per_loop["loss"], per_loop["ce"].mean())
    torch.testing.assert_close(per_loop["ce"][-1], plain)
    states = model.loop_states(x, model.context(x, 3, None), 3)
    raw = model.head(model.run(model.coda, states[0], model.context(x, 3, None), 0))[..., :100]   # final: no norm
    torch.testing.assert_close(per_loop["ce"][0], F.cross_entropy(raw.reshape(-1, 100), y.reshape(-1)))
    _, penalised = model(x, y, norm_penalty=0.5)
    torch.testing.assert_close(penalised["loss"], plain + 0.5 * torch.stack(states).square().mean())
    torch.testing.assert_close(penalised["ce"], terminal["ce"])
    torch.testing.assert_close(penalised["norm"], torch.stack(states).norm(dim=-1).mean((1, 2)))


def test_padded_vocabulary_is_neither_scored_nor_sampled():
    model = small(readout="raw", loop_norm=False)
    with torch.no_grad():
        model.head.weight[100:] = 1e3                     # the 28 padding rows would win every argmax
        model.embed.weight[:] = model.embed.weight.abs()
    assert model(tokens(), tokens())[0].shape[-1] == 100
    assert model.generate(tokens(), 10).max() < 100


# --- cache and generation ---
@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt", [1, 7])
@pytest.mark.parametrize("inject", ["none", "add", "linear"])
def test_cached_decoding_equals_uncached(r, prompt, inject):
    model = small(n_loop=4, n_recur=2, inject=inject).eval()          # r other than 4 differs from the trained one
    if inject == "linear":
        nn.init.normal_(model.inject.weight, std=0.2)
    idx, cache = tokens(T=prompt), KVCache(model.cfg, 2, r)
    with torch.no_grad():
        fed = idx
        for _ in range(8):
            cached, plain = model(fed, n_loop=r, cache=cache)[0], model(idx, n_loop=r)[0]
            torch.testing.assert_close(cached, plain, rtol=0, atol=1e-4)
            assert len(cache.k) == model.cfg.depth(r) and cache.length == idx.size(1)
            fed = cached[:, -1].argmax(-1, keepdim=True)
            idx = torch.cat([idx, fed], 1)
    greedy = dict(max_new_tokens=8, temperature=0, n_loop=r)
    assert torch.equal(model.generate(tokens(T=prompt), **greedy), idx)
    assert torch.equal(model.generate(tokens(T=prompt), **greedy, use_cache=False), idx)


def test_state_stays_in_full_precision_under_autocast():
    for inject in ("none", "add", "linear"):
        model = small(inject=inject)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = model.loop_states(tokens(), model.context(tokens(), 3, None), 3)
        assert all(h.dtype == torch.float32 for h in states), inject


def test_number_of_passes_changes_the_output():
    model = small(inject="none", n_loop=4)
    assert not torch.allclose(model(tokens(), n_loop=2)[0], model(tokens())[0])


def test_generation_past_the_context_window_and_from_long_prompts():
    """Defined for any length: the window restarts from its last half, with a cache or without."""
    model = small(inject="none").eval()
    for T in (20, 32, 50):
        a = model.generate(tokens(T=T), 40, temperature=0)
        b = model.generate(tokens(T=T), 40, temperature=0, use_cache=False)
        assert a.shape == (2, T + 40) and torch.equal(a, b)
    # a long prompt counts by its last block_size tokens only
    assert torch.equal(model.generate(tokens(T=50), 1, temperature=0)[:, -1],
                       model(tokens(T=50)[:, -32:])[0][:, -1].argmax(-1))


def test_sampling_is_seeded_and_top_k_bounds_it():
    model = small()
    sample = [model.generate(tokens(), 12, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(sample[0], sample[1]) and not torch.equal(sample[0], sample[2])
    assert torch.equal(model.generate(tokens(), 12, top_k=1), model.generate(tokens(), 12, temperature=0))


@pytest.mark.parametrize("bad", [dict(temperature=-1.0), dict(temperature=float("nan")), dict(temperature=1e-45),
                                 dict(temperature=float("inf")), dict(top_k=-1), dict(top_k=2.5)])
def test_sampling_refuses_what_means_nothing(bad):
    name, = bad
    for call in (lambda: small().generate(tokens(), 3, **bad), lambda: ops.sample(torch.zeros(1, 5), **bad)):
        with pytest.raises(ValueError, match=f"{name}="):
            call()
    assert small().generate(tokens(), 3, temperature=1e-3, top_k=0).shape == (2, 15)


@pytest.mark.parametrize("variant", [dict(), dict(inject="none", readout="raw"), dict(n_expert=4, n_loop=2)])
def test_a_model_in_bfloat16_runs_on_cpu(variant):
    """As people load checkpoints: logits near those in fp32, trained on, and generated from with a cache."""
    model, x = small(**variant), tokens()
    plain = model(x, x)[0]
    model.to(torch.bfloat16)
    logits, out = model(x, x)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - plain).norm() / plain.norm() < 0.05
    out["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.generate(x, 4, temperature=0).shape == (2, 16)


def test_what_cannot_be_run_is_refused_in_a_sentence():
    model = small()
    cache = KVCache(model.cfg, 2, 4)
    model(tokens(T=30), cache=cache)
    with pytest.raises(ValueError, match="30 cached . 3 new tokens exceed block_size=32"):
        model(tokens(T=3), cache=cache)
    with pytest.raises(ValueError, match="exceed block_size=32"):
        model(tokens(T=33))
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"n_loop={bad}: must be at least 1"):
            model(tokens(), n_loop=bad)
    with pytest.raises(ValueError, match="cache was made for 4 passes"):
        model(tokens(T=1), n_loop=2, cache=cache)
    with pytest.raises(ValueError, match="targets and a cache"):
        model(tokens(T=1), tokens(T=1), cache=cache)
    with pytest.raises(ValueError, match="terminal or per_loop"):
        model(tokens(), tokens(), loss="perloop")
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(tokens()[:, :0], 3)


@pytest.mark.parametrize("bad, why", [
    (dict(n_head=3), "n_head=3"), (dict(n_embd=33, n_head=1), "even"), (dict(n_loop=0), "n_loop=0"),
    (dict(n_recur=0), "n_recur=0"), (dict(n_prelude=-1), "n_prelude=-1"), (dict(inject="x"), "none, add, linear"),
    (dict(readout="x"), "norm, raw, final")])
def test_config_refuses_bad_combinations(bad, why):
    with pytest.raises(ValueError, match=why):
        Config(**{**SMALL, **bad})


# --- compile ---
def test_compiled_blocks_keep_names_and_do_not_recompile_when_r_varies(monkeypatch):
    """More values of r than torch's recompile limit of 8; the eager backend counts graphs without a C++ compiler."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    model = small(inject="none")
    names, before = list(model.state_dict()), model(tokens(), tokens())[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    real = model(tokens(), tokens())[0]                    # the real-valued rotation that compilers get
    monkeypatch.undo()
    torch.testing.assert_close(real, before)
    torch._dynamo.reset()
    for block in (*model.prelude, *model.recur, *model.coda):
        block.compile(backend=backend)
    torch.testing.assert_close(model(tokens(), tokens())[0], before)
    seen = len(graphs)
    assert 0 < seen
    for r in range(1, 12):
        model(tokens(), tokens(), n_loop=r)
    assert len(graphs) == seen
    assert list(model.state_dict()) == names
    model.compile_nothing()
    model.generate(tokens(), 8)                            # decoding is eager: every step has another shape
    assert len(graphs) == seen
    torch._dynamo.reset()


# --- tied embedding ---
def test_a_tied_head_is_the_embedding():
    model = LoopedLM(Config(**SMALL, tied=True))
    assert model.head.weight is model.embed.weight and LoopedLM.param_counts(model.cfg)["head"] == 0
    assert sum(LoopedLM.param_counts(model.cfg).values()) == sum(p.numel() for p in model.parameters())
    assert LoopedLM.flops_per_token(model.cfg) == LoopedLM.flops_per_token(Config(**SMALL))
    h = torch.randn(1, 3, 32)
    context = model.context(tokens(1, 3), 4, None)
    state = model.run(model.coda, h, context, 5)
    torch.testing.assert_close(model.logits(h, context, 4), (ops.norm(state) @ model.embed.weight.T)[..., :100])
    with pytest.raises(ValueError, match="tied"):
        Config(**SMALL, tied=True, mup_base=16)


# --- truncated backpropagation ---
def open_loop(**kw):
    """A model whose passes read the state: as initialised, [I | 0], the linear injection passes e only."""
    model = small(**kw)
    nn.init.normal_(model.inject.weight, std=0.1)
    return model


def gradients(model, bptt, n_loop=4):
    model.zero_grad()
    _, out = model(tokens(), tokens(seed=2), n_loop=n_loop, bptt=bptt)
    out["loss"].backward()
    return out["loss"].item(), {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                                for name, p in model.named_parameters()}


def test_truncation_at_the_full_depth_is_no_truncation():
    model = open_loop(n_loop=4)
    loss, full = gradients(model, 0)
    for bptt in (4, 9):
        same, truncated = gradients(model, bptt)
        assert same == loss
        for name in full:
            torch.testing.assert_close(truncated[name], full[name], rtol=0, atol=0)


def test_truncation_leaves_the_forward_pass_and_cuts_early_passes_off():
    model, seen = open_loop(n_loop=4, n_recur=2), []
    loss, full = gradients(model, 0)
    original = model.combine

    def combine(e, h, k):                                    # the state that enters each pass
        if h.requires_grad:
            h.register_hook(lambda g, i=len(seen): seen.__setitem__(i, True))
        seen.append(False)
        return original(e, h, k)
    model.combine = combine
    same, truncated = gradients(model, 2)
    assert same == loss
    assert seen[1:] == [False, False, True]               # pass 3 starts from a constant: only pass 4 reaches back to it
    assert not torch.equal(truncated["recur.0.attn.qkv.weight"], full["recur.0.attn.qkv.weight"])
    assert truncated["prelude.0.attn.qkv.weight"].any()   # through the injection of the last two passes


def test_truncated_gradient_is_that_of_a_loop_with_a_constant_start():
    model = open_loop(n_loop=3)
    _, truncated = gradients(model, 1, n_loop=3)
    model.zero_grad()
    idx, context = tokens(), model.context(tokens(), 3, None)
    before = model.loop_states(idx, context, 2)[-1].detach()
    e = model.encode(idx, context)
    h = ops.norm(model.run(model.recur, model.combine(e, before, 2), context, 3))
    F.cross_entropy(model.logits(h, context, 3).flatten(0, 1), tokens(seed=2).flatten()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(truncated[name], p.grad, rtol=1e-5, atol=1e-7)


def test_truncated_gradients_survive_autocast():
    """Autocast keeps casts of weights: one made in a pass without gradients must not serve the passes that have some."""
    model = open_loop(n_loop=4)
    _, full = gradients(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = gradients(model, 2)
    for name in full:
        assert rounded[name].norm() == pytest.approx(full[name].norm().item(), rel=0.05), name


def test_truncation_and_a_per_loop_loss_exclude_each_other():
    with pytest.raises(ValueError, match="per_loop"):
        small()(tokens(), tokens(), bptt=1, loss="per_loop")


@pytest.mark.slow
@pytest.mark.parametrize("changes, settings", [
    (dict(inject="linear"), {}), (dict(inject="none", n_loop=1), {}), (dict(inject="add", n_prelude=0, n_coda=0), {}),
    (dict(inject="linear"), dict(bptt=1)), (dict(inject="none"), dict(loss="per_loop", norm_penalty=0.1))])
def test_compiled_blocks_have_the_gradients_of_eager_code(changes, settings):
    model, idx, targets = small(**{"n_recur": 2, "n_loop": 3, **changes}), tokens(), tokens().roll(1, dims=1)

    def gradients():
        model.zero_grad(set_to_none=True)
        _, result = model(idx, targets, **settings)
        result["loss"].backward()
        return [result["loss"].detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
    before, names = gradients(), list(model.state_dict())
    torch._dynamo.reset()
    model.compile_blocks()
    torch.testing.assert_close(gradients(), before, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == names
    model.compile_nothing()
    assert all(block._compiled_call_impl is None for block in model.blocks())
    torch._dynamo.reset()
