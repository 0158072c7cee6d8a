"""moe.py, and muP in model.py, against a plain loop over tokens in float64, the paper's tables, and their properties."""
import json
import math
import statistics

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import bench
import moe
import train as T
from data.load import open_data
from lib.checkpoint import load_model
from model import Config, KVCache, LoopedLM
from test_model import tokens
from test_train import equal, interrupt_at, losses, rows, train, weights

SMALL = dict(vocab_size=100, block_size=32, n_embd=32, n_head=2, n_loop=2, n_expert=4, inject="none")
SPARSE = [dict(), dict(n_active=1), dict(balance="bias"), dict(n_prelude=0, n_coda=0, n_recur=2, loop_norm=False),
          dict(inject="linear", n_loop=3), dict(mup_base=16)]


def small(**kw):
    torch.manual_seed(0)
    model = LoopedLM(Config(**{**SMALL, **kw}))
    nn.init.normal_(model.head.weight, std=0.2)
    for layer in mixtures(model):
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.1)
    return model


def mixtures(model):
    return [m for m in model.modules() if isinstance(m, moe.Mixture)]


# --- dispatch against a loop over tokens ---
def one_token_at_a_time(x, gates, chosen, weights):
    rows = []
    for t, own in enumerate(chosen.tolist()):
        y = 0
        for j, e in enumerate(own):
            gate, value, down = weights[3 * e:3 * e + 3]
            y = y + gates[t, j] * (down @ (F.silu(gate @ x[t]) * (value @ x[t])))
        rows.append(y)
    return torch.stack(rows)


def choices(kind, k, E, N):
    if kind == "one expert":
        return torch.full((N, 1), 2) if k == 1 else torch.arange(k).expand(N, k).contiguous()
    last = E if kind == "all" else E - 2                  # two experts that nobody chooses
    return torch.stack([torch.randperm(last)[:k] for _ in range(N)])


def value_and_gradients(dispatch, chosen, dtype, E=6, D=32, H=24):
    torch.manual_seed(1)
    N, k = chosen.shape
    shapes = [(N, D), (N, k), *[(H, D), (H, D), (D, H)] * E]
    leaves = [(torch.randn(shape, dtype=torch.float64) / 5).to(dtype).requires_grad_() for shape in shapes]
    x, gates, *weights = leaves
    y = dispatch(x, gates, chosen, weights)
    y.backward(torch.randn(N, D, dtype=torch.float64).to(dtype))
    return [y, *(t.grad for t in leaves)]


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("kind", ["all", "unused", "one expert"])
def test_dispatch_equals_a_loop_over_tokens_in_value_and_gradient(k, kind):
    if kind == "unused":
        k = min(k, 4)
    torch.manual_seed(0)
    chosen = choices(kind, k, 6, 41)
    expected = value_and_gradients(one_token_at_a_time, chosen, torch.float64)
    for dispatch, dtype, close in ((moe.one_by_one, torch.float64, 1e-12), (moe.one_by_one, torch.float32, 1e-4),
                                   (moe.grouped, torch.float32, 1e-4)):
        if dispatch is moe.grouped and not hasattr(F, "grouped_mm"):
            continue
        for actual, plain in zip(value_and_gradients(dispatch, chosen, dtype), expected, strict=True):
            plain = torch.zeros_like(actual) if plain is None else plain.to(dtype)   # nobody chose it: zero, not None
            torch.testing.assert_close(actual, plain, rtol=close, atol=close)


def test_no_assignment_is_lost():
    """Dropless: each assignment has a row of its own, in its expert's range, and the row belongs to its token."""
    torch.manual_seed(0)
    for kind in ("all", "unused", "one expert"):
        chosen = choices(kind, 2, 6, 50)
        for multiple in (1, 8):
            source, place, ends = moe.arrange(chosen, 6, multiple)
            assert len(set(place.flatten().tolist())) == chosen.numel()
            assert torch.equal(source[place], torch.arange(50)[:, None].expand(50, 2))
            starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
            assert ((starts[chosen] <= place) & (place < ends[chosen])).all()
            assert ends[-1] == len(source) and ((ends - starts) % multiple == 0).all()


def test_all_experts_active_is_the_dense_mixture_and_equal_experts_are_one():
    torch.manual_seed(0)
    layer, x = small(n_active=4).recur[0].ffn.double(), torch.randn(3, 7, 32, dtype=torch.float64)
    gates = (x @ layer.router.weight.T).softmax(-1)
    dense = sum(gates[..., i, None] * expert(x) for i, expert in enumerate(layer.experts))
    torch.testing.assert_close(layer(x), dense)
    for k in (1, 2):
        layer = small(n_active=k).recur[0].ffn.double()
        for expert in layer.experts:
            expert.load_state_dict(layer.experts[0].state_dict())
        torch.testing.assert_close(layer(x), layer.experts[0](x))                  # gates sum to 1


# --- what no token may see ---
@pytest.mark.parametrize("variant", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_causal_and_batch_invariant_bit_for_bit(variant, dtype):
    """Edit a later token, or another sequence: group sizes change, outputs and choices that do not see it do not."""
    model, idx = small(**variant), tokens(B=3, T=32)
    model = model.double() if dtype == torch.float64 else model
    later, other = idx.clone(), idx.clone()
    later[:, 20:] = tokens(B=3, T=12, seed=5)
    other[0], other[2] = tokens(B=2, T=32, seed=6)
    for training in (True, False):
        model.train(training)
        runs = []
        for x in (idx, later, other, idx):
            routing = moe.Routing()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                runs.append((model(x, x, routing=routing)[0], {s: c.view(3, 32, -1) for s, c in
                                                               routing.chosen.items()}))
        (a, chosen), (b, chosen_b), (c, chosen_c), (again, _) = runs
        assert torch.equal(a[:, :20], b[:, :20]) and not torch.equal(a[:, 20:], b[:, 20:])
        assert torch.equal(a[1], c[1]) and not torch.equal(a[0], c[0])
        assert torch.equal(a, again)
        assert len(chosen) == model.cfg.depth()
        for slot in chosen:
            assert torch.equal(chosen[slot][:, :20], chosen_b[slot][:, :20])
            assert torch.equal(chosen[slot][1], chosen_c[slot][1])
        assert any(not torch.equal(chosen[slot], chosen_b[slot]) for slot in chosen)   # the probe does move tokens


@pytest.mark.parametrize("variant", SPARSE)
def test_a_row_alone_equals_the_row_in_a_batch(variant):
    model, idx = small(**variant).eval(), tokens(B=3, T=32)
    torch.testing.assert_close(model(idx, idx)[0][1:2], model(idx[1:2], idx[1:2])[0], rtol=0, atol=1e-5)


# --- router and its losses ---
def note(logits, k=2):
    routing = moe.Routing()
    routing.note(0, logits, logits.topk(k).indices)
    return routing.losses()


def test_balance_loss_at_its_landmarks():
    zero = note(torch.zeros(64, 8))
    assert zero["balance"].item() == 1.0                  # whatever is chosen, probabilities are uniform
    assert zero["z"].item() == pytest.approx(math.log(8) ** 2)
    even = torch.full((64, 8), -50.0).scatter_(1, torch.arange(128).view(64, 2) % 8, 0.0)
    assert note(even)["balance"].item() == pytest.approx(1)
    collapsed = torch.tensor([0.0, 0.0] + [-50.0] * 6).expand(64, 8)
    assert note(collapsed)["balance"].item() == pytest.approx(4)                   # E / k
    torch.manual_seed(0)
    assert 1 < note(torch.randn(64, 8) + torch.arange(8) / 2)["balance"].item() < 4


def test_balance_loss_by_itself_reaches_the_router():
    """Through the full softmax: every expert's logit gets a gradient, finite at balance, non-zero away from it."""
    for skewed in (False, True):
        layer, routing = small(n_expert=8).recur[0].ffn, moe.Routing()
        if not skewed:
            nn.init.zeros_(layer.router.weight)
        layer(torch.randn(2, 16, 32) + skewed, routing)
        routing.losses()["balance"].backward()
        grad = layer.router.weight.grad
        assert grad.isfinite().all() and (not skewed or (grad.abs().sum(1) > 0).all())
        assert all(p.grad is None for p in layer.experts.parameters())


def test_objective_is_ce_plus_weighted_router_losses_and_ce_is_pure():
    model, x, y = small(), tokens(seed=1), tokens(seed=2)
    logits, out = model(x, y)
    plain = F.cross_entropy(logits.reshape(-1, 100), y.reshape(-1))
    torch.testing.assert_close(out["ce"], plain[None])
    torch.testing.assert_close(out["loss"], plain + 0.01 * out["balance"] + 0.001 * out["z"])
    biased = small(balance="bias")(x, y)[1]
    torch.testing.assert_close(biased["loss"], biased["ce"][0] + 0.001 * biased["z"])
    assert not {"balance", "z", "load"} & small(n_expert=0)(x, y)[1].keys()


def test_one_router_loss_per_layer_and_pass():
    """n_prelude + n_loop * n_recur + n_coda calls, each on its own, so that one unbalanced layer shows in the mean."""
    model, x = small(n_recur=2, n_loop=3), tokens()
    routing = moe.Routing()
    out = model(x, x, routing=routing)[1]
    assert len(routing.balance) == len(routing.z) == model.cfg.depth() == 8
    assert out["load"].shape == (8, 4) and (out["load"].sum(1) == x.numel() * 2).all()
    for slot in range(8):
        assert torch.equal(torch.bincount(routing.chosen[slot].flatten(), minlength=4), out["load"][slot])
    torch.testing.assert_close(out["balance"], torch.stack(routing.balance).mean())
    with torch.no_grad():
        model.recur[1].ffn.router.weight.mul_(100)
    assert model(x, x)[1]["z"] > 10 * out["z"]


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    """Also the router's, when all micro-batches have the same loads: its losses are counted once, not per part."""
    model, x = small(), tokens(B=2)
    grads = []
    for parts in (1, 3):
        model.zero_grad()
        for _ in range(parts):
            (model(x, x)[1]["loss"] / parts).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_router_computes_in_float32_under_autocast():
    layer, x = small().recur[0].ffn, torch.randn(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = layer.route(x)
    assert logits.dtype == torch.float32 and torch.equal(logits, layer.route(x)[0])


def test_bias_changes_the_choice_never_the_gate_and_stays_mean_zero():
    layer, x = small(balance="bias").recur[0].ffn.double(), torch.randn(50, 32, dtype=torch.float64)
    nn.init.zeros_(layer.bias)
    layer.bias[3] = 10                                    # everybody takes expert 3
    logits, chosen = layer.route(x)
    assert (chosen == 3).any(1).all()
    gates = logits.softmax(-1).gather(1, chosen)
    gates = gates / gates.sum(1, keepdim=True)
    by_hand = sum(gates[:, j, None] * torch.stack([layer.experts[e](row) for e, row in zip(chosen[:, j].tolist(), x)])
                  for j in range(2))
    torch.testing.assert_close(layer(x), by_hand)
    nn.init.zeros_(layer.bias)
    for _ in range(200):                                  # feeding the loads back evens them out
        load = torch.bincount(layer.route(x)[1].flatten(), minlength=4)
        layer.rebalance(load)
        assert layer.bias.mean().abs() < 1e-12
    assert load.max() - load.min() < 50 * 2 / 4 / 3
    assert not layer.bias.requires_grad


def test_rebalance_adds_the_passes_of_a_layer():
    model = small(balance="bias", n_recur=2, n_loop=2)
    for layer in mixtures(model):
        nn.init.zeros_(layer.bias)
    load = torch.tensor([[4, 0, 0, 0], [9, 1, 0, 0], [0, 0, 0, 4], [0, 9, 0, 1], [0, 0, 4, 0], [1, 1, 1, 1]])
    model.rebalance(load)                                 # prelude, recur 0, recur 1, recur 0, recur 1, coda
    u = moe.BIAS_STEP
    for layer, signs in zip(mixtures(model), ([-1, 1, 1, 1], [-1, -1, 1, 1], [1, 1, -1, -1], [0, 0, 0, 0])):
        expected = u * torch.tensor(signs, dtype=torch.float)
        torch.testing.assert_close(layer.bias, expected - expected.mean())


# --- counts ---
PAPER = [(128, 384, 16, 18, 23), (256, 704, 39, 45, 65), (384, 1024, 67, 81, 124), (512, 1408, 103, 129, 207),
         (640, 1728, 144, 184, 303), (768, 2048, 190, 247, 417), (896, 2432, 246, 325, 560),
         (1024, 2752, 305, 407, 711)]                     # width, d_ff, active M, looped MoE stored M, MoE stored M


@pytest.mark.parametrize("d, d_ff, active, both, sparse", PAPER)
def test_parameter_counts_match_the_papers_table(d, d_ff, active, both, sparse):
    def millions(preset, active):
        args, _ = T.parse([f"--preset=looped-moe-{preset}", f"--n_embd={d}"])
        cfg = T.config_of(args, 50257)
        assert cfg.d_ff == d_ff and cfg.n_head == d // 64 and cfg.depth() == 16
        padding = 2 * (cfg.padded_vocab - 50257) * d      # the paper's matrices have 50,257 rows, these 50,304
        n = LoopedLM.param_counts(cfg, active)
        return round((sum(n.values()) + active * (cfg.n_loop - 1) * n["recurrent"] - padding) / 1e6)
    for preset in ("base", "looped", "moe", "both"):
        assert millions(preset, True) == active           # a looped layer counts once per pass there
    assert (millions("both", False), millions("moe", False)) == (both, sparse)


@pytest.mark.parametrize("variant", SPARSE)
def test_groups_sum_to_numel_and_flops_agree_with_torchs_counter(variant):
    model = small(**variant)
    assert sum(LoopedLM.param_counts(model.cfg).values()) == sum(p.numel() for p in model.parameters())
    dense = Config(**{**SMALL, **variant, "n_expert": 0})
    assert LoopedLM.param_counts(model.cfg, active=True) == LoopedLM.param_counts(dense)
    assert LoopedLM.flops_per_token(model.cfg) == LoopedLM.flops_per_token(dense)
    cfg = Config(vocab_size=512, block_size=64, n_embd=128, n_head=2, n_expert=8, n_recur=2, n_loop=2)
    model, x = LoopedLM(cfg), torch.randint(0, 512, (32, 64))
    with FlopCounterMode(display=False) as counter:
        model(x, x)[1]["loss"].backward()
    assert counter.get_total_flops() / x.numel() == pytest.approx(LoopedLM.flops_per_token(cfg), rel=0.02)


# --- decoding, saving, several processes ---
@pytest.mark.parametrize("variant", SPARSE)
@pytest.mark.parametrize("prompt", [1, 7])
def test_cached_decoding_equals_uncached(variant, prompt):
    model = small(**variant).eval()
    idx, cache = tokens(T=prompt), KVCache(model.cfg, 2, 2)
    with torch.no_grad():
        fed = idx
        for _ in range(8):
            cached, plain = model(fed, n_loop=2, cache=cache)[0], model(idx, n_loop=2)[0]
            torch.testing.assert_close(cached, plain, rtol=0, atol=1e-4)
            fed = cached[:, -1].argmax(-1, keepdim=True)
            idx = torch.cat([idx, fed], 1)
    greedy = dict(max_new_tokens=8, temperature=0, n_loop=2)
    assert torch.equal(model.generate(tokens(T=prompt), **greedy), idx)
    assert torch.equal(model.generate(tokens(T=prompt), **greedy, use_cache=False), idx)


VARIANTS = {"base": ["--n_recur=4", "--n_loop=1"], "looped": ["--n_recur=2", "--n_loop=2"],
            "moe": ["--n_recur=4", "--n_loop=1", "--n_expert=4"],
            "both": ["--n_recur=2", "--n_loop=2", "--n_expert=4"]}
PLAIN = ["--n_prelude=0", "--n_coda=0", "--inject=none", "--loop_norm=false", "--optimizer=adamw"]


def test_the_four_variants_train_and_are_told_apart(tiny, tmp_path, run):
    """Equal active parameters and FLOPs; summary.json counts active parameters and stores the total beside them."""
    folders = []
    for name, flags in VARIANTS.items():
        train(tiny(*PLAIN, *flags, out=name))
        folders.append(tmp_path / name)
    summaries = {f.name: json.loads((f / "summary.json").read_text()) for f in folders}
    assert len({s["flops"] for s in summaries.values()}) == 1
    for dense, sparse in (("base", "moe"), ("looped", "both")):
        d, s = summaries[dense], summaries[sparse]
        assert (d["n_once"], d["n_rec"]) == (s["n_once"], s["n_rec"]) and s["n_total"] > d["n_total"]
        assert (d["n_expert"], s["n_expert"]) == (0, 4)
    last = rows(tmp_path / "both")[-1]
    assert 1 <= float(last["balance"]) < 2 and float(last["z"]) > 0 and "balance" not in rows(tmp_path / "base")[-1]
    table = run("fit_law.py", "collect", *folders)
    assert table.returncode == 0 and table.stdout.count("\n") == 5


@pytest.mark.parametrize("flags", [["--balance=bias", "--n_loop=2"], ["--optimizer=adamw", "--mup_base=16"]])
def test_resumed_mixture_equals_unbroken_one_bit_for_bit(tiny, tmp_path, monkeypatch, flags):
    train(tiny("--n_expert=4", *flags, out="straight"))
    with monkeypatch.context() as m:
        interrupt_at(m, 13)
        with pytest.raises(SystemExit):
            train(tiny("--n_expert=4", *flags, out="broken"))
    train(tiny("--n_expert=4", *flags, out="broken"))
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken")
    model, _ = load_model(tmp_path / "broken")          # what belongs to the model is in its checkpoint
    assert model.cfg.mup_base == (16 if "--mup_base=16" in flags else 0)
    if "--balance=bias" in flags:
        assert all(layer.bias.abs().sum() > 0 for layer in mixtures(model))


@pytest.mark.slow
def test_two_processes_train_a_mixture(tiny, tmp_path, torchrun):
    """Some expert of the eight has no token in some process; the bias follows the loads of both together."""
    flags = ("--n_expert=8", "--balance=bias", "--grad_accum=2", "--max_steps=4", "--eval_interval=2")
    train(tiny(*flags, out="one"))
    torchrun(*tiny(*flags, out="two"))
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for key in ("train_loss", "balance", "z"):
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-2 if key == "balance" else 1e-3), key
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    torch.testing.assert_close(one["recur.0.ffn.bias"], two["recur.0.ffn.bias"])


# --- muP ---
@pytest.mark.parametrize("w", [1, 2, 4])
def test_mup_follows_the_papers_table(w):
    """Initial standard deviation and learning rate of each group at base width 128 (paper notes, section 3)."""
    D = 128 * w
    args, _ = T.parse([f"--n_embd={D}", "--mup_base=128", "--n_expert=8", "--optimizer=adamw", "--embed_lr=1",
                       "--n_recur=1", "--n_prelude=0", "--n_coda=0", "--inject=none"])
    torch.manual_seed(0)
    model = LoopedLM(T.config_of(args, 4096))
    ffn, attn = model.recur[0].ffn, model.recur[0].attn
    for p, std in ((model.embed.weight, 1), (attn.qkv.weight, (2 / 256 / w) ** 0.5),
                   (attn.proj.weight, (2 / 256 / w) ** 0.5), (ffn.experts[5].gate.weight, (2 / 512 / w) ** 0.5),
                   (ffn.experts[5].down.weight, (2 / 512 / w) ** 0.5), (ffn.router.weight, (2 / 136 / w) ** 0.5),
                   (model.head.weight, (2 / (128 + 4096) / w) ** 0.5)):
        assert p.std().item() == pytest.approx(std, rel=0.06)
        assert p.abs().max() <= 3.01 * std or p is model.embed.weight
    rates = {p: (g.get("lr_scale", 1), g["weight_decay"]) for o in T.make_optimizers(model, args)
             for g in o.param_groups for p in g["params"]}
    assert len(rates) == len(list(model.parameters()))
    for p, (scale, decay) in rates.items():
        assert scale == (1 if p is model.embed.weight else 1 / w)
        assert scale * decay == (0 if p is model.embed.weight else args.weight_decay)
    assert attn.scale == 8 / 64
    off = Config(n_embd=D, n_head=2 * w)
    assert off.width_ratio == 1 and off.attention_scale == 1 / 8
    muon = T.make_optimizers(model, T.parse([f"--n_embd={D}", "--mup_base=128"])[0])[0].param_groups[0]
    assert muon["lr_scale"] == pytest.approx(w ** -0.5)


def short_run(width, rate, steps, corpus, flags):
    """Train a looped mixture of 2 x 2 layers for some steps without warm-up: (training loss of each step, mean size of
    the activations in the last forward pass by name)."""
    args, _ = T.parse([f"--n_embd={width}", f"--learning_rate={rate}", f"--data={corpus}", "--head_dim=32",
                       "--block_size=32", "--n_prelude=0", "--n_coda=0", "--n_recur=2", "--inject=none",
                       "--n_loop=2", "--loop_norm=false", "--n_expert=4", "--embed_lr=1", *flags])
    folder, meta = open_data(args)
    torch.manual_seed(0)
    model = LoopedLM(T.config_of(args, meta["vocab_size"]))
    optimizers, losses, size = T.make_optimizers(model, args), [], {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1)

    def watch(name):
        return lambda module, inputs, out: size.update({name: out.detach().abs().mean().item()})
    for i, block in enumerate(model.recur):
        block.register_forward_hook(watch(f"state {i}"))
        block.attn.register_forward_hook(watch(f"attention {i}"))
        block.ffn.register_forward_hook(watch(f"experts {i}"))
        block.ffn.register_forward_hook(lambda m, inputs, out, i=i: size.update(
            {f"router {i}": m.route(inputs[0].flatten(0, 1))[0].detach().abs().mean().item()}))
    model.head.register_forward_hook(watch("logits"))
    for step in range(steps):
        starts = T.batch_starts(0, step, 16, meta["splits"]["train"]["tokens"], 32)
        x, y = T.read_windows(folder / "train.bin", meta["dtype"], starts, 32)
        out = model(x, y)[1]
        losses.append(out["ce"].item())
        out["loss"].backward()
        T.clip_and_measure(model, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses, size


def slopes(widths, corpus, flags):
    """Coordinate check: log-log slope against width of each activation's size at step 10."""
    sizes = [short_run(width, 1e-3, 11, corpus, flags)[1] for width in widths]
    x = [math.log(width) for width in widths]
    return {name: statistics.linear_regression(x, [math.log(size[name]) for size in sizes]).slope for name in sizes[0]}


@pytest.mark.slow
def test_activations_keep_their_size_over_widths_under_mup_only(corpus):
    """States, layer outputs, router and output logits; without muP the widest model is left out, to save time."""
    with_mup = slopes((64, 128, 256, 512), corpus, ["--optimizer=adamw", "--mup_base=64"])
    without = slopes((64, 128, 256), corpus, ["--optimizer=adamw"])
    print({k: round(v, 2) for k, v in with_mup.items()}, {k: round(v, 2) for k, v in without.items()})
    assert all(abs(slope) < 0.1 for slope in with_mup.values()), with_mup
    assert min(without["logits"], without["state 1"], without["router 1"]) > 0.25, without


@pytest.mark.study
def test_best_learning_rate_stays_within_one_grid_step_over_widths():
    """Mean loss of the last 20 of 100 steps at 3 widths, on real text; the table is in results/moe.md."""
    rates, best = [2 ** -k for k in range(10, 4, -1)], {}
    for flags in (["--mup_base=64"], []):
        for width in (64, 128, 256):
            runs = [short_run(width, rate, 100, "sotu", ["--vocab_size=1024", "--optimizer=adamw", *flags])[0]
                    for rate in rates]
            loss = [statistics.mean(run[-20:]) for run in runs]
            best[width, bool(flags)] = min(range(len(rates)), key=loss.__getitem__)
            print("muP" if flags else "off", width, " ".join(f"{v:.3f}" for v in loss), flush=True)
    optimum = [best[width, True] for width in (64, 128, 256)]
    assert max(optimum) - min(optimum) <= 1 and 0 < min(optimum) and max(optimum) < len(rates) - 1


# --- directed choices, compiling, speed ---
def test_reusing_the_first_pass_moves_the_choice_only():
    """Forced experts get the later pass's own gates; forcing what a router chose anyway changes nothing."""
    model, x = small(n_recur=2, n_loop=2, n_prelude=1).eval(), tokens(T=32)
    plain, forced = moe.Routing(), moe.Routing(lambda routing, slot, chosen: routing.chosen[slot - 2]
                                               if slot in (3, 4) else chosen)
    same = moe.Routing(lambda routing, slot, chosen: chosen.flip(-1))              # the same sets in another order
    a, b, c = (model(x, x, routing=routing)[0] for routing in (plain, forced, same))
    assert all(torch.equal(plain.chosen[s], forced.chosen[s]) for s in (0, 1, 2))
    assert all(torch.equal(forced.chosen[s], forced.chosen[s - 2]) for s in (3, 4))
    assert not torch.allclose(a, b)
    torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_compiled_blocks_with_experts_give_the_same():
    model, x = small(), tokens()
    before = model(x, x)
    torch._dynamo.reset()
    for block in (*model.prelude, *model.recur, *model.coda):
        block.compile(backend="eager")
    after = model(x, x)
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[1]["loss"], before[1]["loss"])
    after[1]["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()


@pytest.mark.parametrize("layer", ["dense", "one_by_one", "grouped", "eager"])
def test_contenders_of_the_bench_run(monkeypatch, layer):
    if layer == "grouped" and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    if layer == "eager":
        pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "TOKENS", 64)
    monkeypatch.setattr(moe, "one_by_one", moe.one_by_one)         # which the bench replaces
    monkeypatch.setattr(moe, "grouped", moe.grouped)
    measure, tokens, flops = bench.feed_forward({"flags": ["--device=cpu"], "bf16": True, "layer": layer})
    assert measure() > 0 and tokens == 64 and flops == 18 * 256 * 1024


# --- bad input ---
@pytest.mark.parametrize("flags, says", [
    (["--n_expert=4", "--n_active=5"], "n_active=5 of n_expert=4"), (["--n_expert=1"], "n_expert=1"),
    (["--n_expert=4", "--n_active=3", "--n_embd=192"], "must divide the hidden width"), (["--n_expert=4", "--n_active=0"], "n_active=0"),
    (["--n_expert=-2"], "n_expert=-2"), (["--balance=both"], "--balance"), (["--mup_base=-1"], "mup_base=-1")])
def test_bad_input_is_one_sentence(capsys, flags, says):
    with pytest.raises(SystemExit) as e:
        T.config_of(T.parse(flags)[0], 300)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1
