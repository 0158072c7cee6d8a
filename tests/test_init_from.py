"""--init_from: finetune, retrofit, unroll; what it carries over, refuses, keeps, and that such a run resumes."""
import json
import shutil
import signal

import pytest
import torch

import train as T
from conftest import tiny_flags
from data.load import open_data
from data.prepare import prepare
from lib import init_from as I
from lib import tricks
from lib.checkpoint import load_model
from model import Config, LoopedLM
from test_train import equal, interrupt_at, losses, rows, stops, train, weights

SMALL = dict(vocab_size=100, block_size=32, n_embd=32, n_head=2, inject="none", loop_norm=False)


def drawn(seed=0, trick="", **kw):
    """A small model whose head is not almost zero."""
    torch.manual_seed(seed)
    model = tricks.model_class(trick)(Config(**{**SMALL, **kw})).eval()
    torch.nn.init.normal_(model.head.weight, std=0.2)
    return model


def carried(source, tie="mean", **kw):
    """A model of another shape with the weights of source, and the names (fresh, left out)."""
    target = drawn(seed=1, **{**vars(source.cfg), **kw})
    state = dict(config=vars(source.cfg), model=source.state_dict())
    return target, *I.carry_over(target, state, tie)


def logits(model):
    idx = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(idx, idx)[0]


def config(folder):
    return json.loads((folder / "config.json").read_text())


def text_of(corpus, tmp_path, name, word, **more):
    """A corpus of other text."""
    source = tmp_path / f"{name}.txt"
    source.write_text("".join(f"{word} {i} of a book, {i * i % 97}\n" for i in range(3000)))
    return prepare(inputs=[source], out_dir=tmp_path / name, **more)


@pytest.fixture(scope="module")
def plain_once(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_flags(corpus, folder / "plain", "--n_loop=1", "--n_recur=4", "--max_steps=3"))
    return folder / "plain"


@pytest.fixture
def plain(plain_once, tmp_path):
    """A trained plain model of 1 + 4 + 1 layers, in tmp_path/plain."""
    shutil.copytree(plain_once, tmp_path / "plain")
    return tmp_path / "plain"


def flags_after(source, tiny, *more, out="run"):
    """Of tiny, those that are no shape, and --init_from."""
    left = ("--n_embd", "--head_dim", "--block_size", "--data", "--max_steps")
    keep = [f for f in tiny(out=out) if not f.startswith(left)]
    return [*keep, f"--init_from={source}", "--max_steps=4", *more]


# --- unroll ---
@pytest.mark.parametrize("kw", [dict(n_loop=2), dict(n_loop=3, n_prelude=0, n_coda=2, tied=True),
                                dict(n_loop=2, n_expert=4, readout="raw"), dict(n_loop=2, n_recur=1, readout="final")])
def test_an_unrolled_loop_has_the_logits_of_the_loop(kw):
    source = drawn(**{"n_recur": 2, **kw})
    cfg = source.cfg
    target, fresh, left_out = carried(source, n_loop=1, n_recur=cfg.n_loop * cfg.n_recur)
    torch.testing.assert_close(logits(target), logits(source), rtol=0, atol=1e-5)
    assert fresh == left_out == []
    assert I.why_outputs_change(cfg, target.cfg, joined=False, other_trick=False) == []
    last = target.recur[-1].attn.qkv.weight                # each layer has weights of its own
    assert last.data_ptr() != target.recur[0].attn.qkv.weight.data_ptr()


def test_what_changes_the_outputs_of_an_unrolled_loop_is_said():
    for kw, reason in ((dict(inject="linear"), "inject"), (dict(inject="add"), "inject"),
                       (dict(loop_norm=True), "loop_norm")):
        source = drawn(n_recur=2, n_loop=2, **kw)
        target, fresh, left_out = carried(source, n_loop=1, n_recur=4, inject="none")
        assert I.why_outputs_change(source.cfg, target.cfg, joined=False, other_trick=False) == [reason]
        assert (logits(target) - logits(source)).abs().max() > 1e-3
        assert left_out == ["inject.weight"] * ("linear" in kw.values())


# --- retrofit ---
def test_layers_that_become_one_are_averaged_and_keep_their_norm():
    source = drawn(n_loop=1, n_recur=4)
    target, fresh, _ = carried(source, n_loop=2, n_recur=2, inject="linear")
    theirs = {name: w.double().numpy() for name, w in source.state_dict().items()}
    for name, w in target.state_dict().items():
        part, i, *rest = name.split(".")
        if part == "recur":                                # of recur.0: layers 0 and 2, of recur.1: 1 and 3
            a, b = (theirs[".".join(["recur", str(int(i) + step), *rest])] for step in (0, 2))
            expected = (a + b) / 2
            size = ((a ** 2).sum() ** 0.5 + (b ** 2).sum() ** 0.5) / 2
            expected *= size / (expected ** 2).sum() ** 0.5
            torch.testing.assert_close(w.double(), torch.tensor(expected), rtol=1e-5, atol=1e-7)
            assert w.norm() == pytest.approx(size, rel=1e-5)
        elif name == "inject.weight":
            assert torch.equal(w, torch.eye(32, 64)) and fresh == [name]
        else:
            assert torch.equal(w, source.state_dict()[name])


@pytest.mark.parametrize("tie, layer", [("first", 0), ("last", 6)])
def test_one_layer_may_be_taken(tie, layer):
    source = drawn(n_loop=1, n_recur=8)
    target, _, _ = carried(source, tie, n_loop=4, n_recur=2)
    for i in (0, 1):
        assert equal(target.recur[i].state_dict(), source.recur[layer + i].state_dict())


def test_a_plain_model_of_equal_layers_is_the_loop_it_becomes():
    """Two models of the same function: a loop, unrolled, and tied again by any rule."""
    source = drawn(n_recur=2, n_loop=3)
    unrolled, _, _ = carried(source, n_loop=1, n_recur=6)
    for tie in ("mean", "first", "last"):
        again, _, _ = carried(unrolled, tie, n_loop=3, n_recur=2)
        torch.testing.assert_close(logits(again), logits(source), rtol=0, atol=1e-5)


def test_a_retrofit_counts_as_the_looped_run(plain, tiny, tmp_path, capsys):
    """Parameters and FLOPs are those of the looped run from scratch, and only its own steps are counted."""
    loop = ("--n_loop=2", "--n_recur=2")
    train(flags_after(plain, tiny, *loop, out="retrofit"))
    assert "tied by --tie=mean; from scratch: inject.weight; its outputs change" in capsys.readouterr().out
    train([*tiny(*loop, out="scratch"), "--max_steps=4"])
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("retrofit", "scratch")]
    for key in ("n_total", "n_once", "n_rec", "flops", "tokens", "n_loop", "n_recur", "inject"):
        assert summaries[0][key] == summaries[1][key], key
    assert summaries[0]["val_loss"] != summaries[1]["val_loss"]
    source = config(tmp_path / "retrofit")["source"]
    assert source["path"] == str(plain) and source["step"] == 3 and source["tie"] == "mean"
    assert source["sha256"] == tricks.file_hash(plain / "ckpt.pt") and source["layers"] == "1 + 1 x 4 + 1"
    assert torch.load(tmp_path / "retrofit" / "ckpt.pt", weights_only=True)["source"] == source


def test_other_passes_of_the_same_layers(plain, tiny, tmp_path, capsys):
    """From a plain or a looped model; --learning_rate=0 shows what the run starts with."""
    train(flags_after(plain, tiny, "--n_loop=3", "--inject=add", "--learning_rate=0", out="more"))
    assert "change at the start (inject, n_loop)" in capsys.readouterr().out
    assert equal(weights(tmp_path / "more"), weights(plain))
    train(flags_after(tmp_path / "more", tiny, "--n_loop=2", "--learning_rate=0", out="fewer"))
    assert equal(weights(tmp_path / "fewer"), weights(plain))
    assert config(tmp_path / "fewer")["config"]["inject"] == "add"


# --- finetune ---
def test_a_finetune_has_the_shape_and_the_weights_of_its_source(plain, tiny, tmp_path, corpus, capsys):
    """Without a flag of the shape; the corpus is another, encoded with the same tokenizer; the optimizer is new."""
    book = text_of(corpus, tmp_path, "book", "chapter", tokenizer=str(corpus))
    train(flags_after(plain / "ckpt.pt", tiny, f"--data={book}", "--learning_rate=0", out="book"))
    told = capsys.readouterr().out
    assert "change at the start" not in told and "before the first step" in told
    assert equal(weights(tmp_path / "book"), weights(plain))
    assert config(tmp_path / "book")["config"] == config(plain)["config"]
    train(flags_after(plain, tiny, f"--data={book}", "--warmup_steps=4", out="warm"))
    assert [float(row["lr"]) for row in rows(tmp_path / "warm")] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert float(rows(tmp_path / "warm")[0]["train_loss"]) != float(rows(plain)[0]["train_loss"])


def test_an_interrupted_finetune_resumes_bit_for_bit_without_its_source(plain, tiny, tmp_path, monkeypatch):
    train(flags_after(plain, tiny, "--eval_interval=0", out="straight"))
    flags = flags_after(plain, tiny, "--eval_interval=0", out="broken")
    with monkeypatch.context() as m:
        interrupt_at(m, 2)
        with pytest.raises(SystemExit) as e:
            train(flags)
        assert e.value.code == 128 + signal.SIGTERM
    shutil.rmtree(plain)
    train(flags)                                           # the same line again
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken") and len(losses(tmp_path / "broken")) == 4
    assert config(tmp_path / "straight")["source"] == config(tmp_path / "broken")["source"]


def test_a_complete_run_returns_at_once_without_its_source(plain, tiny, tmp_path, monkeypatch, capsys):
    flags = flags_after(plain, tiny, "--n_loop=2", "--n_recur=2")
    train(flags)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    shutil.rmtree(plain)
    monkeypatch.setattr(T, "start_from", lambda *a: pytest.fail("it started again"))
    train(flags)
    assert "is complete" in (told := capsys.readouterr().out) and "begun with" not in told
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert "contradicts" in stops([*flags, "--tie=last"], capsys)
    assert "contradicts" in stops([f for f in flags if "init" not in f] + [f"--init_from={tmp_path}/run"], capsys)
    train([f"--out_dir={tmp_path / 'run'}", "--resume", "--max_steps=5"])          # longer, by its own checkpoint
    assert int(rows(tmp_path / "run")[-1]["step"]) == 5


def test_another_tokenizer_is_refused_by_its_hash(plain, tiny, tmp_path, corpus, capsys):
    """Of the same size; also where an older checkpoint does not hold the hash, but its corpus does."""
    other = text_of(corpus, tmp_path, "other", "another", vocab_size=300)
    book = text_of(corpus, tmp_path, "book", "chapter", tokenizer=str(corpus))
    state = torch.load(plain / "ckpt.pt", weights_only=True)
    assert state.pop("tokenizer_sha256") == json.loads((corpus / "meta.json").read_text())["tokenizer_sha256"]
    old = tmp_path / "old.pt"
    torch.save(state, old)
    for source in (plain, old):
        says = stops(flags_after(source, tiny, f"--data={other}"), capsys)
        assert "another tokenizer" in says and f"--tokenizer {corpus}" in says
        assert not (tmp_path / "run").exists()
        train(flags_after(source, tiny, f"--data={book}", out=f"from-{source.stem}"))
    state["data_sha256"] = "0" * 64                        # and its corpus is gone
    torch.save(state, old)
    assert "not the text" in stops(flags_after(old, tiny, f"--data={book}"), capsys)


# --- refusals ---
@pytest.mark.parametrize("flags, says", [
    (["--n_embd=48", "--head_dim=16"], ["embed.weight is 320 x 32, here 320 x 48", "more"]),
    (["--n_recur=3"], ["recur.3.attn.qkv.weight has no place here", "1 + 1 x 4 + 1", "1 + 1 x 3 + 1"]),
    (["--n_loop=2", "--n_recur=5"], ["recur.4.attn.qkv.weight is missing"]),
    (["--n_expert=4"], ["prelude.0.ffn.router.weight is missing"]),
    (["--n_head=1"], ["--n_head=1", "with 2"]), (["--mup_base=32"], ["--mup_base=32"]), (["--tied"], ["--tied"])])
def test_what_does_not_fit_is_named(plain, tiny, tmp_path, capsys, flags, says):
    told = stops(flags_after(plain, tiny, *flags), capsys)
    assert all(part in told for part in says), told
    assert not (tmp_path / "run").exists()


def test_sources_that_are_none(plain, tiny, tmp_path, capsys):
    assert "no checkpoint there" in stops(flags_after(tmp_path / "nosuch", tiny), capsys)
    assert "--init_from" in stops(tiny("--tie=first"), capsys)
    state = torch.load(plain / "ckpt.pt", weights_only=True)
    torch.save({"config": state["config"], "model": state["model"]}, tmp_path / "bare.pt")
    assert "what text" in stops(flags_after(tmp_path / "bare.pt", tiny), capsys)
    torch.save({**state, "config": {**state["config"], "n_new": 1}}, tmp_path / "new.pt")
    assert "another version" in stops(flags_after(tmp_path / "new.pt", tiny), capsys)
    assert "contradicts" in stops([f"--out_dir={plain}", f"--init_from={plain}"], capsys)          # its own folder


# --- flags and tricks ---
def test_flags_come_before_the_source(plain, tiny):
    """A flag, or a preset that is named, replaces what the source has; a loop that begins or ends injects as new."""
    def parsed(*more):
        return T.parse(flags_after(plain, tiny, *more))[0]
    assert (parsed().n_recur, parsed().n_head, parsed().block_size, parsed().inject) == (4, 2, 32, "none")
    assert parsed("--block_size=64").block_size == 64 and parsed().data == config(plain)["args"]["data"]
    assert parsed("--n_loop=2", "--n_recur=2").inject == "linear"
    assert parsed("--n_loop=2", "--n_recur=2", "--inject=none").inject == "none"
    assert parsed("--preset=isodepth-r4").n_prelude == 2
    by_default, _ = T.parse([f"--init_from={plain}", f"--out_dir={plain.parent / 'new'}"])         # no preset is named
    assert (by_default.n_embd, by_default.inject, by_default.preset) == (32, "none", "laptop")
    assert parsed("--preset=laptop").n_embd == 128


def test_a_trick_goes_on_or_begins(tiny, tmp_path, capsys):
    """Its parameters come along with it, in the same loop; another trick's start as from scratch."""
    train(tiny("--trick=tricks/gate.py", "--n_loop=2", "--max_steps=3", out="gate"))
    gate = tmp_path / "gate"
    train(flags_after(gate, tiny, "--learning_rate=0", out="same"))
    assert equal(weights(tmp_path / "same"), weights(gate)) and weights(gate)["gate"].abs().min() > 0
    assert config(tmp_path / "same")["trick"]["file"] == "tricks/gate.py"
    capsys.readouterr()
    train(flags_after(gate, tiny, "--learning_rate=0", "--trick=tricks/pass_scale_gate.py", out="other"))
    told = capsys.readouterr().out
    assert "from scratch: gate, scale; left out: gate; its outputs change at the start (trick)" in told
    assert torch.equal(weights(tmp_path / "other")["gate"], torch.ones(2, 1, 2, 32))
    train(flags_after(gate, tiny, "--trick=", "--n_loop=1", "--n_recur=2", "--learning_rate=0", out="none"))
    assert "gate" not in weights(tmp_path / "none") and config(tmp_path / "none")["trick"] is None


def test_code_outside_tricks_runs_only_where_it_is_named(tiny, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("from model import LoopedLM\nclass Mine(LoopedLM):\n    pass\n")
    train(tiny(f"--trick={mine}", "--max_steps=2", out="mine"))
    mine.write_text(mine.read_text() + f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "which is missing or has changed" in stops(flags_after(tmp_path / "mine", tiny), capsys)
    assert not (tmp_path / "ran").exists()
    train(flags_after(tmp_path / "mine", tiny, "--trick="))
    model, state = load_model(tmp_path / "run")
    assert type(model) is LoopedLM and not (tmp_path / "ran").exists()


def test_every_trick_can_be_retrofitted(plain, tiny, tmp_path):
    """From the plain model: what the trick adds is as drawn from scratch, the backbone is carried over."""
    for file in sorted((T.Path(T.__file__).parent / "tricks").glob("*.py")):
        args = T.parse(flags_after(plain, tiny, f"--trick={file}", "--n_loop=2", "--n_recur=2"))[0]
        folder, meta = open_data(args)
        torch.manual_seed(args.seed)
        first = tricks.model_class(args.trick)(T.config_of(args, meta["vocab_size"]))
        torch.manual_seed(args.seed)
        model = tricks.model_class(args.trick)(T.config_of(args, meta["vocab_size"]))
        source = I.start_from(model, args, meta)
        assert all(torch.equal(model.state_dict()[name], first.state_dict()[name]) for name in source["fresh"])
        assert torch.equal(model.coda[0].ffn.down.weight, weights(plain)["coda.0.ffn.down.weight"])
