"""Every file in tricks/ keeps what the loop promises: counts, causality, caches, resume, processes, exits; and how a
trick is loaded, named and refused. A new file in tricks/ is tested without a line here."""
import json
import re

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

import draft as D
import exits as E
import readout_study as R
import train as T
from conftest import ROOT
from lib import ops, tricks
from lib.checkpoint import load_model
from lib.flags import flops_of
from model import Config, KVCache, LoopedLM
from test_train import equal, interrupt_at, losses, rows, train, weights

TRICKS = sorted(f.relative_to(ROOT).as_posix() for f in (ROOT / "tricks").glob("*.py"))
SMALL = dict(vocab_size=100, block_size=32, n_embd=32, n_head=2, n_loop=3, n_recur=2)


def trick_model(path, **kw):
    """A small model whose trick is at work: what the trick added is drawn anew, since most tricks start as no change. So
    is the injection, which starts as [I | 0], where every pass would be the same."""
    trick = tricks.model_class(path)
    torch.manual_seed(0)
    requires = {name: value for name, value in trick.requires.items() if hasattr(Config, name)}    # of the model
    model = trick(Config(**{**SMALL, **requires, **kw}))
    plain = {name for name, _ in LoopedLM(model.cfg).named_parameters()}
    with torch.no_grad():
        nn.init.normal_(model.head.weight, std=0.2)
        for name, p in model.named_parameters():
            if name not in plain or name == "inject.weight":
                p.add_(0.3 * torch.randn(p.shape))
    return model


def tokens(B=2, T=12, seed=1):
    return torch.randint(0, 100, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("path", TRICKS)
def test_counts_are_those_of_the_model(path):
    """Stored parameters, FLOPs forward and backward at three numbers of passes, by torch's counter, which leaves out
    what is no matrix product."""
    model, x = trick_model(path, n_embd=64, vocab_size=512), tokens(T=32)
    cfg = model.cfg
    exact = 0.02 if "hyperconnections" in path else 1e-9   # its scalars are counted, but are no matrix product
    assert sum(model.param_counts(cfg).values()) == sum(p.numel() for p in model.parameters())
    for r in (1, 3, 6):
        with FlopCounterMode(display=False) as train_flops:
            model(x, x, n_loop=r)[1]["loss"].backward()
        with FlopCounterMode(display=False) as forward_flops, torch.no_grad():
            model(x, x, n_loop=r)
        assert train_flops.get_total_flops() / x.numel() == pytest.approx(model.flops_per_token(cfg, r), rel=exact)
        assert forward_flops.get_total_flops() / x.numel() == pytest.approx(model.flops_per_token(cfg, r, train=False),
                                                                           rel=exact)


@pytest.mark.parametrize("path", TRICKS)
def test_causal_and_cached(path):
    """A later token changes nothing before it, bit for bit; cached decoding equals uncached at 1, 2, 2 x trained."""
    model, idx = trick_model(path).eval(), tokens()
    changed = idx.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 100
    with torch.no_grad():
        a, b = model(idx, idx)[0], model(changed, idx)[0]
        assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7:], b[:, 7:])
        for r in (1, 2, 6):
            cache = KVCache(model.cfg, 2, r)
            model(idx[:, :5], n_loop=r, cache=cache)
            for t in range(5, 12):
                cached, plain = model(idx[:, t:t + 1], n_loop=r, cache=cache)[0], model(idx[:, :t + 1], n_loop=r)[0]
                torch.testing.assert_close(cached, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", TRICKS)
def test_trains_resumes_and_leaves_a_folder(path, tiny, tmp_path, monkeypatch):
    """A few steps change every parameter of the trick; a run that was stopped equals an unbroken one bit for bit; the
    folder keeps the file, config.json and the checkpoint its name and hash."""
    flags = (f"--trick={path}", "--max_steps=4", "--eval_interval=0")
    train(tiny(*flags, out="straight"))
    with monkeypatch.context() as m:
        interrupt_at(m, 2)
        with pytest.raises(SystemExit):
            train(tiny(*flags, out="broken"))
    train(tiny(*flags, out="broken"))
    ended = weights(tmp_path / "straight")
    assert equal(ended, weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken")
    args = T.parse(tiny(*flags))[0]
    torch.manual_seed(args.seed)
    first = tricks.model_class(path)(T.config_of(args, 300)).state_dict()
    added = ended.keys() - LoopedLM(T.config_of(args, 300)).state_dict().keys()
    assert all(not torch.equal(first[name], ended[name]) for name in added)
    digest = tricks.file_hash(ROOT / path)
    saved = json.loads((tmp_path / "straight" / "config.json").read_text())
    state = torch.load(tmp_path / "straight" / "ckpt.pt", weights_only=True)
    assert saved["trick"] == state["trick"] and saved["trick"]["sha256"] == digest
    assert tricks.file_hash(tmp_path / "straight" / (ROOT / path).name) == digest
    model, _ = load_model(tmp_path / "straight")
    assert type(model).__name__ == tricks.model_class(path).__name__
    summary = json.loads((tmp_path / "straight" / "summary.json").read_text())
    assert summary["flops"] == pytest.approx(summary["tokens"] * T.flops_of(args, model.cfg, 4))


@pytest.mark.slow
@pytest.mark.parametrize("path", TRICKS)
def test_two_processes_train_the_same_run(path, tiny, tmp_path, torchrun):
    flags = (f"--trick={path}", "--max_steps=3")
    train(tiny(*flags, out="one"))
    torchrun(*tiny(*flags, out="two"))
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for key in ("train_loss", "grad_norm"):
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-4), key


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("n_loop", [3, 1])
def test_exits(path, n_loop):
    """Without exits, position by position, the loss is the model's; with exits whole windows give the same as one
    position at a time, under both policies of the cache."""
    model, x, y = trick_model(path, n_loop=n_loop, n_coda=0).eval(), tokens(), tokens(seed=2)
    with torch.no_grad():
        plain = nn.functional.cross_entropy(model(x, y)[0].transpose(1, 2), y, reduction="none")
    nats, depth = E.score_by_step(model, x, y)
    torch.testing.assert_close(nats, plain, rtol=1e-4, atol=1e-4)
    assert depth.eq(E.n_stages(model.cfg)).all()
    chosen = torch.randint(1, E.n_stages(model.cfg) + 1, x.shape, generator=torch.Generator().manual_seed(3))
    for kv in ("copy", "reuse") if n_loop > 1 else ("copy",):
        by_step, at_once = (score(model, x, y, E.exit_at(chosen), kv) for score in (E.score_by_step, E.score_at_once))
        torch.testing.assert_close(by_step[0], at_once[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(by_step[1], chosen) and torch.equal(at_once[1], chosen)


@pytest.mark.parametrize("path", TRICKS)
def test_drafting_gives_the_same_text(path):
    model, x = trick_model(path).eval(), tokens(T=7)
    for d in (1, 2):
        text, _ = D.generate(model, x, 12, temperature=0, draft_passes=d, draft_tokens=3)
        assert torch.equal(text, model.generate(x, 12, temperature=0))


@pytest.mark.parametrize("path", TRICKS)
def test_readout_study_follows_the_state(path):
    """The clamp holds what is read out at the length it had after the first pass."""
    model = trick_model(path, loop_norm=False).eval()
    states, _ = R.passes(model, tokens(), 4, clamp=True)
    for h in states[1:]:
        torch.testing.assert_close(h.norm(dim=-1), states[0].norm(dim=-1), rtol=1e-4, atol=1e-4)


# --- how a trick is loaded ---
GATE = """
from model import LoopedLM
import torch
class Scaled(LoopedLM):
    factor: float = 1.5
    flip: bool = False
    def combine(self, e, h, k):
        return super().combine(e, h, k) * (-self.factor if self.flip else self.factor)
"""


@pytest.fixture
def own(tmp_path):
    """A trick of the user's own, outside tricks/."""
    file = tmp_path / "scaled.py"
    file.write_text(GATE)
    return file


def stops(do, capsys):
    with pytest.raises(SystemExit) as e:
        do()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1, err
    return err


def test_options_are_typed_and_saved(own, tiny, tmp_path, capsys):
    assert tricks.options_of(tricks.model_class(str(own), "factor=2,flip=true")) == {"factor": 2.0, "flip": True}
    for bad, says in (("factor=x", "not of type float"), ("size=2", "no option 'size'"), ("flip=2", "not of type bool")):
        assert says in stops(lambda: T.parse([f"--trick={own}", f"--trick_args={bad}"]), capsys)
    assert "give --trick" in stops(lambda: T.parse(["--trick_args=factor=2"]), capsys)
    train(tiny(f"--trick={own}", "--trick_args=factor=0.5", "--max_steps=2"))
    saved = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    assert saved["trick"]["args"] == {"factor": 0.5, "flip": False}
    model, _ = load_model(tmp_path / "run", trick=str(own))
    assert model.factor == 0.5
    assert "contradicts" in stops(lambda: train(tiny(f"--trick={own}", "--trick_args=factor=0.7")), capsys)


def test_no_code_comes_out_of_a_checkpoint(own, tiny, tmp_path, capsys):
    """A file outside tricks/ runs only if the user names it; one that is missing or has changed is refused. The copy in
    the run folder serves once it is named, to load and to resume."""
    train(tiny(f"--trick={own}", "--max_steps=2"))
    run = tmp_path / "run"
    assert "outside tricks/" in stops(lambda: load_model(run), capsys)
    load_model(run, trick=str(own))
    original = torch.load(run / "ckpt.pt", weights_only=True)
    own.write_text(GATE.replace("1.5", "2.5"))
    assert "missing or has changed" in stops(lambda: load_model(run, trick=str(own)), capsys)
    assert "has changed since" in stops(lambda: train(tiny(f"--trick={own}", "--max_steps=2")), capsys)
    own.unlink()
    assert "no such file" in stops(lambda: train(tiny(f"--trick={own}", "--max_steps=2")), capsys)
    assert "missing or has changed" in stops(lambda: load_model(run), capsys)
    load_model(run, trick=str(run / "scaled.py"))
    train([f"--out_dir={run}", f"--trick={run / 'scaled.py'}", "--max_steps=3", "--resume"])
    assert torch.load(run / "ckpt.pt", weights_only=True)["step"] == 3
    # forgeries: a checkpoint whose trick is the copy beside it, and one whose flags name a file
    forged = {**original, "trick": {**original["trick"], "file": str(run / "scaled.py")}}
    torch.save(forged, run / "ckpt.pt")
    assert "outside tricks/" in stops(lambda: load_model(run), capsys)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + GATE)
    for trick in (None, original["trick"]):
        torch.save({**original, "trick": trick, "args": {**original["args"], "trick": str(evil)}}, run / "ckpt.pt")
        (run / "summary.json").unlink(missing_ok=True)
        assert "name different files" in stops(lambda: train([f"--out_dir={run}"]), capsys)
    assert not (tmp_path / "ran").exists()


def test_two_tricks_of_which_one_is_named(own, tiny, tmp_path):
    """--trick is one for all checkpoints of a study: it serves those that were trained with that very file."""
    train(tiny(f"--trick={own}", "--max_steps=1", out="own"))
    train(tiny("--trick=tricks/gate.py", "--max_steps=1", out="gate"))
    assert type(load_model(tmp_path / "own", trick=str(own))[0]).__name__ == "Scaled"
    assert type(load_model(tmp_path / "gate", trick=str(own))[0]).__name__ == "Gate"


def test_a_trick_may_extend_another_and_have_text_as_an_option(own, tiny, tmp_path):
    own.write_text("""
from __future__ import annotations
from lib.tricks import model_class
from model import LoopedLM
class Wider(model_class("tricks/hyperconnections.py")):
    note: str = "a, b=c"
    n_lanes: int = 3
""")
    train(tiny(f"--trick={own}", "--trick_args=n_lanes=4", "--max_steps=1"))
    model, _ = load_model(tmp_path / "run", trick=str(own))
    assert model.n_lanes == 4 and model.note == "a, b=c" and model.lanes["mix"].shape == (4, 4, 4)


@pytest.mark.parametrize("text, says", [
    ("x = 1", "has 0 subclasses"), ("from model import LoopedLM\nclass A(LoopedLM): pass\nclass B(LoopedLM): pass",
                                    "has 2 subclasses"),
    ("def f(:", "SyntaxError"), ("import nosuchmodule", "nosuchmodule")])
def test_a_file_that_is_no_trick(own, capsys, text, says):
    own.write_text(text)
    assert says in stops(lambda: T.parse([f"--trick={own}"]), capsys)


def test_flags_that_a_trick_needs(tiny, capsys):
    assert T.parse(["--trick=tricks/gate.py"])[0].inject == "none"
    assert "needs inject=none" in stops(lambda: T.parse(["--trick=tricks/gate.py", "--inject=add"]), capsys)


def test_a_checkpoint_of_the_former_hyperconnections(tiny, tmp_path, capsys):
    train(tiny("--max_steps=1"))
    state = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    state["config"]["inject"] = "hyper"
    torch.save(state, tmp_path / "run" / "ckpt.pt")
    assert "inject=hyper: choose one of" in stops(lambda: load_model(tmp_path / "run"), capsys)


GROWING = """
from model import LoopedLM
class Growing(LoopedLM):
    @classmethod
    def schedule(cls, cfg, step, max_steps):
        return {"n_loop": 1} if step < max_steps / 2 else {"n_loop": cfg.n_loop, "bptt": 2}
"""


def test_a_schedule_of_passes_is_trained_and_its_flops_are_charged(own, tiny, tmp_path, monkeypatch):
    own.write_text(GROWING)
    seen, forward = [], LoopedLM.forward

    def spy(self, *a, **kw):
        if self.training:
            seen.append((kw["n_loop"], kw["bptt"]))
        return forward(self, *a, **kw)
    monkeypatch.setattr(LoopedLM, "forward", spy)
    train(tiny(f"--trick={own}", "--max_steps=6", "--eval_interval=0"))
    assert seen == [(1, 0)] * 3 + [(4, 2)] * 3
    cfg = T.config_of(T.parse(tiny())[0], 300)
    mean = (LoopedLM.flops_per_token(cfg, 1) + LoopedLM.flops_per_token(cfg, 4, bptt=2)) / 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["flops"] == pytest.approx(summary["tokens"] * mean)
    args = T.parse([f"--trick={own}", "--max_flops=1e12"])[0]
    assert T.steps_of(args, T.config_of(args, 4096)) * args.batch_size * 256 * T.flops_of(args, T.config_of(args, 4096)) \
        == pytest.approx(1e12, rel=0.01)


def test_a_schedule_and_sampled_depths_exclude_each_other(own, capsys):
    own.write_text(GROWING)
    assert "--sample_loops" in stops(lambda: T.parse([f"--trick={own}", "--sample_loops"]), capsys)


def test_a_trick_that_requires_what_is_no_flag(own, capsys):
    own.write_text(GATE.replace("factor: float = 1.5", "factor: float = 1.5\n    requires = {'injct': 'none'}"))
    assert "requires injct" in stops(lambda: T.parse([f"--trick={own}"]), capsys)


LAYERS = """
from model import LoopedLM
class Layers(LoopedLM):
    def layer(self, x, i, k, context):
        block, slot = self.recur[i], self.slot(i, k)
        x = x + block.attention(2 * x + k, context, slot)      # the keys of a pass depend on its number
        return x + block.feed_forward(x, context, slot)
"""


@pytest.mark.parametrize("n_loop", [3, 1])
def test_copied_keys_are_those_of_the_layers_that_a_trick_has_changed(own, n_loop):
    """In the first skipped stage the copies are what that stage would have made, whatever its layers do."""
    own.write_text(LAYERS)
    model = tricks.model_class(str(own))(Config(**{**SMALL, "n_recur": 1, "n_loop": n_loop, "n_coda": 0})).eval()
    with torch.no_grad():
        context = model.context(tokens(), n_loop, None)
        at = E.begin(model, tokens(), context)
        for s in range(E.n_stages(model.cfg) - 1):
            at = E.advance(model, s, at, context)
        cache, last = E.Recorder(), E.n_stages(model.cfg) - 1
        E.advance(model, last, at, context._replace(cache=cache))
        (copied,) = E.project(model, last, at, context)
    for a, b in zip(copied, cache.pair):
        torch.testing.assert_close(a, b)


def test_a_trick_that_hides_the_input_from_truncated_gradients(own, tiny, capsys):
    own.write_text(GATE.replace("super().combine(e, h, k)", "h"))
    assert "no gradient reaches the embedding" in stops(
        lambda: train(tiny(f"--trick={own}", "--bptt=1", "--inject=none")), capsys)


# --- the tricks that are there, one by one ---
def test_gate_is_its_formula():
    model = trick_model("tricks/gate.py", n_loop=2)
    idx = tokens()
    context = model.context(idx, 2, None)
    e = model.encode(idx, context)
    h = e
    for k in range(2):
        h = h + model.gate * e
        for i, block in enumerate(model.recur):
            h = block(h, context, 1 + 2 * k + i)
        h = ops.norm(h)
    torch.testing.assert_close(model.loop_states(idx, context, 2)[-1], h)


HYPER = "tricks/hyperconnections.py"


def test_flops_of_hyperconnections():
    plain = Config(inject="none")
    hyper = tricks.model_class(HYPER)
    assert hyper.flops_per_token(plain) - LoopedLM.flops_per_token(plain) == 6 * 4 * 8 * plain.n_embd
    assert hyper.param_counts(plain)["injection"] == 32                            # at r = 4
    assert tricks.model_class(HYPER, "n_lanes=3").param_counts(plain)["injection"] == 4 * 3 * 5


@pytest.mark.parametrize("n_loop", [1, 4, 6])
@pytest.mark.parametrize("loop_norm", [True, False])
def test_hyperconnections_start_as_the_residual_loop(n_loop, loop_norm):
    """h = h + norm(blocks(h)), and H_k = 2 h, the sum of two equal lanes; also at depths it was not made for."""
    torch.manual_seed(0)
    model = tricks.model_class(HYPER)(Config(**{**SMALL, "n_recur": 1}, inject="none", loop_norm=loop_norm))
    idx, context = tokens(), model.context(tokens(), n_loop, None)
    h = model.encode(idx, context)
    for k, state in enumerate(model.loop_states(idx, context, n_loop)):
        s = model.run(model.recur, h, context, 1 + k)
        h = h + (ops.norm(s) if loop_norm else s)
        torch.testing.assert_close(state, 2 * h)


def test_hyperconnections_equal_a_loop_over_lanes():
    model = trick_model(HYPER, n_recur=1)
    read, mix, write = (model.lanes[name].tolist() for name in ("read", "mix", "write"))
    idx, context = tokens(), model.context(tokens(), 3, None)
    lanes = [model.encode(idx, context)] * 2
    for k, state in enumerate(model.loop_states(idx, context, 3)):
        s = ops.norm(model.run(model.recur, read[k][0] * lanes[0] + read[k][1] * lanes[1], context, 1 + k))
        lanes = [mix[k][i][0] * lanes[0] + mix[k][i][1] * lanes[1] + write[k][i] * s for i in range(2)]
        torch.testing.assert_close(state, lanes[0] + lanes[1], rtol=1e-4, atol=1e-4)


def test_scalars_of_hyperconnections_do_not_decay_and_go_to_adamw(tiny):
    args = T.parse(tiny(f"--trick={HYPER}"))[0]
    model = tricks.model_class(HYPER)(T.config_of(args, 300))
    optimizers = T.make_optimizers(model, args)
    group = [g for g in optimizers[-1].param_groups if any(p is model.lanes["mix"] for p in g["params"])]
    assert isinstance(optimizers[-1], torch.optim.AdamW) and len(group) == 1 and group[0]["weight_decay"] == 0


def attention_by_hand(attn, x, table, change):
    """Attention of x (B, T, D), one head after the other; change(q, k, v) says which (B, T, D) each it is made of."""
    D, T = x.size(-1), x.size(1)
    outputs = []
    qkv = change(*(x @ attn.qkv.weight[j * D:(j + 1) * D].t() for j in range(3)))
    for q, k, v in zip(*(y.chunk(attn.n_head, -1) for y in qkv)):                  # (B, T, head_dim) of a head
        q, k = (ops.rotate(ops.norm(y)[:, :, None], table)[:, :, 0] for y in (q, k))
        scores = q @ k.transpose(1, 2) * q.size(-1) ** -0.5
        later = torch.ones(T, T).triu(1).bool()
        outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, -1) @ attn.proj.weight.t()


@pytest.mark.parametrize("n_prelude", [1, 0])
def test_value_residual_is_its_formula(n_prelude):
    model = trick_model("tricks/value_residual.py", n_prelude=n_prelude)
    idx, context = tokens(), model.context(tokens(), 4, None)
    x, D = model.embed(idx), model.cfg.n_embd
    first = None
    if n_prelude:
        first = ops.norm(x) @ model.prelude[0].attn.qkv.weight[2 * D:].t()
        x = model.prelude[0](x, context, 0)
    e = h = x
    for state in model.loop_states(idx, context, 4):
        x = model.inject(torch.cat([e, h], -1))
        for mix, block in zip(model.mix, model.recur):
            def mixed(q, k, v):
                nonlocal first
                first = v if first is None else first
                return q, k, v + mix * (first - v)
            x = x + attention_by_hand(block.attn, ops.norm(x), context.table, mixed)
            x = x + block.ffn(ops.norm(x))
        h = ops.norm(x)
        torch.testing.assert_close(state, h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_prelude", [1, 0])
def test_value_residual_starts_as_the_loop(n_prelude):
    states = []
    for kind in (LoopedLM, tricks.model_class("tricks/value_residual.py")):
        torch.manual_seed(0)
        model = kind(Config(**{**SMALL, "n_prelude": n_prelude}, inject="add"))
        states.append(model.loop_states(tokens(), model.context(tokens(), 3, None), 3)[-1])
    torch.testing.assert_close(*states, rtol=0, atol=0)


FIRST_KEYS = "tricks/first_keys.py"


def test_first_keys_are_those_of_the_first_pass():
    model = trick_model(FIRST_KEYS)
    idx, context, pairs = tokens(), model.context(tokens(), 4, None), {}
    e = h = model.encode(idx, context)
    for state in model.loop_states(idx, context, 4):
        x = model.inject(torch.cat([e, h], -1))
        for block in model.recur:
            def change(q, k, v):
                return q, *pairs.setdefault(block, (k, v))
            x = x + attention_by_hand(block.attn, ops.norm(x), context.table, change)
            x = x + block.ffn(ops.norm(x))
        h = ops.norm(x)
        torch.testing.assert_close(state, h, rtol=1e-4, atol=1e-4)


def test_first_keys_take_one_slot_per_block_and_no_exit_leaves_a_gap():
    """A cache has the slots of the first pass and those outside the loop; each token that exits after pass d reads what
    pass d of the whole window reads, whatever the tokens before it did."""
    model, x, y = trick_model(FIRST_KEYS, n_coda=0).eval(), tokens(), tokens(seed=2)
    cache = KVCache(model.cfg, 2, 3)
    model(x, n_loop=3, cache=cache)
    assert [k is not None for k in cache.k] == 3 * [True] + 4 * [False]            # a prelude, 2 blocks, 2 more passes
    depth = torch.randint(1, 4, x.shape, generator=torch.Generator().manual_seed(3))
    context = model.context(x, 3, None)
    with torch.no_grad():
        logits = torch.stack([model.logits(h, context, 3) for h in model.loop_states(x, context, 3)])
    chosen = logits.gather(0, (depth - 1)[None, ..., None].expand(1, -1, -1, logits.size(-1)))[0]
    nats = nn.functional.cross_entropy(chosen.transpose(1, 2), y, reduction="none")
    for kv in ("copy", "reuse"):
        torch.testing.assert_close(E.score_by_step(model, x, y, E.exit_at(depth), kv)[0], nats, rtol=1e-4, atol=1e-4)


def test_first_keys_of_one_pass_are_those_of_a_plain_model():
    """Also with more passes than it was trained with, and a cache."""
    model, x = trick_model(FIRST_KEYS, n_loop=1).eval(), tokens()
    plain = LoopedLM(model.cfg)
    plain.load_state_dict(model.state_dict())
    for use_cache in (True, False):
        assert torch.equal(model.generate(x, 8, temperature=0, n_loop=3, use_cache=use_cache),
                           plain.generate(x, 8, temperature=0, n_loop=3))


def test_first_keys_save_what_projects_keys_and_values():
    cfg, kind = Config(n_recur=2, n_loop=4), tricks.model_class(FIRST_KEYS)
    saved = LoopedLM.flops_per_token(cfg, train=False) - kind.flops_per_token(cfg, train=False)
    assert saved == 3 * 2 * 4 * cfg.n_embd ** 2                                    # 3 passes, 2 blocks


def test_token_lanes_are_their_formula():
    model = trick_model("tricks/token_lanes.py", loop_norm=False)
    idx, context = tokens(), model.context(tokens(), 4, None)
    e = model.encode(idx, context)
    lanes = [e, e]
    for k, state in enumerate(model.loop_states(idx, context, 4)):
        last = min(k, 2)                                                           # trained with 3 passes
        z = torch.cat(lanes, -1)
        z = z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gates = {}
        for name in ("read", "keep", "write"):
            logits = [z @ model.W[name][last, j] + model.b[name][last, j] for j in (0, 1)]
            gates[name] = [1 / (1 + (-y).exp()[..., None]) for y in logits]
        x = model.inject(torch.cat([e, gates["read"][0] * lanes[0] + gates["read"][1] * lanes[1]], -1))
        made = model.run(model.recur, x, context, 1 + 2 * k) + model.vectors[last]
        lanes = [gates["keep"][j] * lanes[j] + 2 * gates["write"][j] * made for j in (0, 1)]
        torch.testing.assert_close(state, (lanes[0] + lanes[1]) / 2, rtol=1e-4, atol=1e-4)


def test_token_lanes_start_near_the_loop():
    states = []
    for kind in (LoopedLM, tricks.model_class("tricks/token_lanes.py")):
        torch.manual_seed(0)
        model = kind(Config(**SMALL, inject="add"))
        states.append(model.loop_states(tokens(), model.context(tokens(), 3, None), 3)[-1])
    plain, trick = states
    assert 0.01 < (trick - plain).norm() / plain.norm() < 0.15


def test_the_list_of_tricks_is_the_folder():
    page = (ROOT / "tricks" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\.py\]", page, re.M)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "tricks").glob("*.py"))


def test_late_gradients_end_with_all_passes_under_any_preset():
    """Also where the preset truncates: the FLOPs are a mean of both parts."""
    args, _ = T.parse(["--trick=tricks/late_gradients.py", "--bptt=1", "--max_steps=100"])
    cfg = T.config_of(args, 4096)
    whole, last = LoopedLM.flops_per_token(cfg), LoopedLM.flops_per_token(cfg, bptt=1)
    assert flops_of(args, cfg) == pytest.approx(0.6 * last + 0.4 * whole)


def test_gradients_in_turn_run_through_each_number_of_passes_once():
    trick = tricks.model_class("tricks/gradients_in_turn.py")
    assert [trick.schedule(Config(n_loop=3), step, 100)["bptt"] for step in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    args, _ = T.parse(["--trick=tricks/gradients_in_turn.py", "--max_steps=100"])
    cfg = T.config_of(args, 4096)
    each = [LoopedLM.flops_per_token(cfg, bptt=bptt) for bptt in (1, 2, 3, 4)]
    assert flops_of(args, cfg) == pytest.approx(sum(each) / 4)
    args.n_loop = cfg.n_loop = 3                               # does not divide the 100 steps of the mean
    each = [LoopedLM.flops_per_token(cfg, bptt=bptt) for bptt in (1, 2, 3)]
    assert flops_of(args, cfg) == pytest.approx(sum(each) / 3, rel=5e-3)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("options, rate, decay", [("", 0.5, 0.1), ("rate=0,decay=1", 1, 0.025)])
def test_shared_rate_lowers_it_for_the_matrices_of_the_loop_alone(optimizer, options, rate, decay):
    trick = "--trick=tricks/shared_rate.py"
    args, _ = T.parse([trick, f"--trick_args={options}", f"--optimizer={optimizer}", "--n_loop=4", "--inject=linear"])
    model = tricks.model_class(args.trick, args.trick_args)(T.config_of(args, 300))
    groups = {p: group for o in T.make_optimizers(model, args) for group in o.param_groups for p in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        if name.startswith(("recur.", "inject.")):
            assert (groups[p]["lr_scale"], groups[p]["weight_decay"]) == pytest.approx((rate, decay))
        elif name.startswith(("prelude.", "coda.")):
            assert (groups[p]["lr_scale"], groups[p]["weight_decay"]) == (1, 0.1)


def test_shared_rate_comes_on_top_of_mup():
    args, _ = T.parse(["--trick=tricks/shared_rate.py", "--n_embd=256", "--mup_base=64", "--optimizer=adamw", "--n_loop=4"])
    model = tricks.model_class(args.trick)(T.config_of(args, 300))
    groups = {p: group for o in T.make_optimizers(model, args) for group in o.param_groups for p in group["params"]}
    loop, once = groups[model.recur[0].attn.qkv.weight], groups[model.coda[0].attn.qkv.weight]
    assert (once["lr_scale"], loop["lr_scale"]) == (1 / 4, 1 / 8) and once["weight_decay"] == loop["weight_decay"]
