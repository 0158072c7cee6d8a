"""train.py, lib/flags.py and data/load.py: exact resume, fixed evaluation, accumulation, schedules, safe checkpoints,
refusals."""
import copy
import csv
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import early_exit
import train as T
from conftest import ROOT
from data.load import open_data
from lib import optim
from lib.checkpoint import data_of, load_model
from lib.flags import DEFAULTS, PRESETS
from model import Config, LoopedLM


def train(flags):
    T.train(*T.parse(flags))


def rows(folder):
    with open(Path(folder, "metrics.csv"), newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def losses(folder):
    return [row["train_loss"] for row in rows(folder)]


def weights(folder):
    return torch.load(Path(folder, "ckpt.pt"), weights_only=True)["model"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def interrupt_at(monkeypatch, step):
    """Send this process SIGTERM while it reads the batch of a step."""
    original = T.read_windows

    def reading(path, *a):
        if path.name == "train.bin":
            reading.step += 1
            if reading.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(path, *a)
    reading.step = 0
    monkeypatch.setattr(T, "read_windows", reading)


# --- a whole run ---
def test_a_run_leaves_a_complete_folder(tiny, tmp_path):
    train(tiny("--loss=per_loop", "--norm_penalty=0.01", "--loop_norm=false"))
    out = tmp_path / "run"
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.csv", "ckpt.pt", "loss.png", "sample.txt",
                                               "summary.json"}
    last, summary = rows(out)[-1], json.loads((out / "summary.json").read_text())
    assert int(last["step"]) == 20 and float(last["val_loss"]) == summary["val_loss"]
    assert torch.load(out / "ckpt.pt", weights_only=True)["step"] == 20
    for key in ("run seed n_loop n_prelude n_recur n_coda n_embd n_expert inject n_once n_rec n_total tokens flops "
                "val_loss val_bpb wall_s tok_per_s").split():
        assert key in summary
    assert summary["tokens"] == 20 * 4 * 32
    assert float(rows(out)[0]["train_loss"]) == pytest.approx(math.log(300), abs=0.05)
    assert summary["val_loss"] < 5.2
    assert all(last[f"val_ce_{k}"] and last[f"val_norm_{k}"] for k in (1, 2, 3, 4))
    assert len(rows(out)) == 20


def test_resumed_run_equals_unbroken_one_bit_for_bit(tiny, tmp_path, monkeypatch):
    train(tiny("--grad_accum=2", out="straight"))
    with monkeypatch.context() as m:
        interrupt_at(m, 2 * 10)
        with pytest.raises(SystemExit) as e:
            train(tiny("--grad_accum=2", out="broken"))
        assert e.value.code == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "broken" / "ckpt.pt", weights_only=True)["step"] == 10
    assert not (tmp_path / "broken" / "summary.json").exists()
    train(tiny("--grad_accum=2", out="broken"))            # the same line again, without --resume
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken") and len(losses(tmp_path / "broken")) == 20


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_between_evaluations(tiny, tmp_path, monkeypatch, optimizer):
    """The checkpoint of a signal is written at the step where it came; rows behind an older one are written again."""
    flags = (f"--optimizer={optimizer}", "--schedule=wsd")
    train(tiny(*flags, out="straight"))
    with monkeypatch.context() as m:
        interrupt_at(m, 13)
        with pytest.raises(SystemExit):
            train(tiny(*flags, out="broken"))
    train([f"--out_dir={tmp_path / 'broken'}", "--resume"])              # no other flag: the saved ones
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken")


def test_ctrl_c_in_a_terminal(tiny, tmp_path):
    """The process itself: SIGINT saves, says so and exits with 130; the same command then completes the run."""
    command = [sys.executable, str(ROOT / "train.py"), *tiny("--max_steps=4000", "--eval_interval=0")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "metrics.csv").exists() or len(rows(tmp_path / "run")) < 3:
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "saved to" in out and "Traceback" not in err
    assert torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)["step"] >= 3


def test_longer_horizon_extends_a_complete_run(tiny, tmp_path, capsys):
    train(tiny())
    train(tiny())
    assert "is complete" in capsys.readouterr().out
    train([*tiny(), "--max_steps=25", "--resume"])
    assert int(rows(tmp_path / "run")[-1]["step"]) == 25
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 25 * 4 * 32


def test_the_same_line_with_a_preset_and_a_horizon_goes_on(tiny, tmp_path, monkeypatch, capsys):
    """A preset counts as asked for, except its horizon where the line gives another one."""
    line = ["--preset=pocket", *[f for f in tiny("--n_head=0") if not f.startswith("--max_steps")], "--max_tokens=1280"]
    with monkeypatch.context() as m:
        interrupt_at(m, 5)
        with pytest.raises(SystemExit):
            train(line)
    train(line)
    assert int(rows(tmp_path / "run")[-1]["step"]) == 10
    train(line)
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(SystemExit):                        # the preset's own horizon, explicitly, is another run
        train([f for f in line if not f.startswith("--max_tokens")] + ["--max_steps=700"])


def test_contradicting_flags_are_an_error(tiny, tmp_path, capsys):
    train(tiny())
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    for flags in (tiny("--n_loop=2"), tiny("--n_loop=2", "--resume"), tiny("--learning_rate=1")):
        with pytest.raises(SystemExit) as e:
            train(flags)
        assert e.value.code == 2 and "contradicts" in capsys.readouterr().err
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    train([f for f in tiny() if not f.startswith("--batch_size")])                 # a flag less is no contradiction
    assert "begun with batch_size=4" in capsys.readouterr().out


# --- evaluation ---
def test_evaluation_is_deterministic_and_independent_of_batch_size(tiny, tmp_path, corpus):
    train(tiny())
    model, _ = load_model(tmp_path / "run")
    folder, meta = open_data(T.parse(tiny())[0])
    lengths = T.token_bytes(T.load_tokenizer(folder))
    a, b, c = (T.evaluate(model, folder, meta, 1000, size, lengths) for size in (4, 4, 16))
    assert a == b
    assert a["loss"] == pytest.approx(c["loss"], abs=1e-5) and a["bpb"] == pytest.approx(c["bpb"], abs=1e-5)


def test_evaluation_equals_a_plain_sum_over_tokens(tiny, tmp_path):
    """Nats per token and bits per byte by hand, one window at a time; the reported loss carries no penalty."""
    train(tiny("--loss=per_loop", "--norm_penalty=1", "--loop_norm=false"))
    model, _ = load_model(tmp_path / "run")
    folder, meta = open_data(T.parse(tiny())[0])
    encoding, ids = T.load_tokenizer(folder), np.fromfile(folder / "val.bin", dtype="uint16").astype(int)
    available, n = (len(ids) - 1) // 32, 1000 // 32
    nats, text = 0.0, b""
    for i in range(n):
        window = torch.tensor(ids[i * available // n * 32:][:33])
        logits = model(window[None, :-1], window[None, 1:])[0]
        nats -= logits.log_softmax(-1)[0, torch.arange(32), window[1:]].sum().item()
        text += b"".join(encoding.decode_single_token_bytes(t) for t in window[1:].tolist() if t != encoding.eot_token)
    got = T.evaluate(model, folder, meta, 1000, 8, T.token_bytes(encoding), per_loop=True)
    assert got["loss"] == got["ce"][-1] == pytest.approx(nats / (n * 32), abs=1e-5)
    assert got["bpb"] == pytest.approx(nats / math.log(2) / len(text), abs=1e-5)
    for k in (1, 2, 3):                                    # cross-entropy after pass k is the n_loop = k model's
        assert got["ce"][k - 1] == pytest.approx(T.evaluate(model, folder, meta, 1000, 8, T.token_bytes(encoding),
                                                            n_loop=k)["loss"], abs=1e-5)


def test_evaluation_does_not_touch_training(tiny, tmp_path):
    train(tiny(out="a"))
    train(tiny("--eval_interval=3", out="b"))
    train(tiny("--eval_interval=0", "--log_interval=1", out="c"))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "c")
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "c"))
    assert [r["step"] for r in rows(tmp_path / "c") if r["val_loss"]] == ["20"]


# --- batches and accumulation ---
def test_batches_are_a_function_of_seed_and_step():
    a = T.batch_starts(1, 5, 8, 10_000, 32)
    assert a == T.batch_starts(1, 5, 8, 10_000, 32) != T.batch_starts(2, 5, 8, 10_000, 32)
    assert a != T.batch_starts(1, 6, 8, 10_000, 32)
    assert T.batch_starts(1, 3, 4, 10_000, 32) == T.batch_starts(1, 1, 12, 10_000, 32)[:4]   # one stream for any batch size


@pytest.mark.parametrize("n_tokens", [33, 34, 64, 65, 96, 97, 1000, 10_000])
def test_an_epoch_visits_every_window_once(n_tokens):
    windows = max(1, (n_tokens - 1) // 32 - 1)
    for epoch in range(6):
        starts = sorted(T.batch_starts(0, epoch, windows, n_tokens, 32))
        assert starts[0] >= 0 and starts[-1] + 33 <= n_tokens
        assert [b - a for a, b in zip(starts, starts[1:])] == [32] * (windows - 1)


def test_windows_are_inputs_and_their_next_tokens(corpus):
    ids = np.fromfile(corpus / "train.bin", dtype="uint16")
    x, y = T.read_windows(corpus / "train.bin", "uint16", [0, 100], 32)
    assert x.shape == y.shape == (2, 32) and x.dtype == torch.int64
    assert (x[1].numpy() == ids[100:132]).all() and (y[1].numpy() == ids[101:133]).all()


def test_accumulation_equals_the_full_batch(tiny, tmp_path):
    """First step: the same batch in one piece or four; the gradient norm and the logged loss agree."""
    train([*tiny(out="whole"), "--batch_size=16", "--max_steps=1"])
    train([*tiny(out="parts"), "--batch_size=4", "--grad_accum=4", "--max_steps=1"])
    a, b = rows(tmp_path / "whole")[0], rows(tmp_path / "parts")[0]
    assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), abs=1e-6)
    assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-5)


def test_accumulated_gradients_equal_the_full_batchs():
    torch.manual_seed(0)
    model = LoopedLM(Config(vocab_size=50, block_size=16, n_embd=32, n_head=2))
    torch.nn.init.normal_(model.head.weight)
    x, y = torch.randint(0, 50, (2, 32, 16))
    gradients = []
    for parts in (1, 8):
        model.zero_grad()
        for i in range(parts):
            size = 32 // parts
            (model(x[i * size:(i + 1) * size], y[i * size:(i + 1) * size])[1]["loss"] / parts).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_the_same_run(tiny, tmp_path, torchrun):
    """torchrun with gloo, gradient accumulation included: losses, gradients and validation as in one process."""
    flags = ("--grad_accum=2", "--max_steps=4", "--eval_interval=2")
    train(tiny(*flags, out="one"))
    torchrun(*tiny(*flags, out="two"))
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for key in ("train_loss", "grad_norm", "val_loss", "val_bpb"):
            if a[key]:
                assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-4), key


# --- horizon, schedule, optimizer ---
def test_horizons(tiny):
    for flags, steps in ((["--max_steps=7"], 7), (["--max_tokens=1e4"], 10), (["--max_tokens=600"], 1)):
        args, _ = T.parse([f for f in tiny() if "max_steps" not in f] + flags + ["--batch_size=32"])
        assert T.steps_of(args, T.config_of(args, 300)) == steps
    args, _ = T.parse(["--preset=pocket", "--n_embd=128", "--max_flops=1e12"])
    cfg = T.config_of(args, 4096)
    assert T.steps_of(args, cfg) == round(1e12 / LoopedLM.flops_per_token(cfg) / (args.batch_size * args.block_size))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup, steps", [(0, 50), (10, 50), (1, 2), (60, 50)])
def test_schedule_rises_then_never_rises(schedule, warmup, steps):
    args, _ = T.parse([f"--schedule={schedule}", f"--warmup_steps={warmup}", "--final_lr=0.1", "--learning_rate=1"])
    lr = [T.lr_at(i, args, steps) for i in range(steps)]
    up, down = lr[:warmup], lr[warmup:]
    assert all(a < b for a, b in zip(up, up[1:])) and all(a >= b for a, b in zip(down, down[1:]))
    assert 0 < min(lr) and max(lr) <= 1
    if (schedule, warmup, steps) == ("cosine", 10, 50):    # half way down, half way between peak and end
        assert (lr[29] + lr[30]) / 2 == pytest.approx(0.55, abs=1e-3)
    if steps - 1 > warmup:
        assert max(lr) == 1 and lr[-1] == pytest.approx(1 if schedule == "constant" else 0.1) == min(down)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizers_cover_every_parameter_once_and_decay_matrices_only(optimizer):
    args, _ = T.parse([f"--optimizer={optimizer}"])
    model = LoopedLM(T.config_of(args, 300))
    groups = [g for o in T.make_optimizers(model, args) for g in o.param_groups]
    covered = [id(p) for g in groups for p in g["params"]]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())
    undecayed = [p for g in groups if g["weight_decay"] == 0 for p in g["params"]]
    assert [p is model.embed.weight for p in undecayed] == [True]


def test_muon_in_batches_is_torchs_muon(monkeypatch):
    """Tall, wide and square matrices, some without a gradient, whole batches and a last one that is smaller."""
    monkeypatch.setattr(optim, "BATCH", 2 * 24 * 8)        # two matrices of 24 x 8 at once
    torch.manual_seed(0)
    start = [torch.randn(shape) * 0.1 for shape in [(24, 8), (8, 24), (8, 8), (24, 8), (24, 8), (8, 24), (5, 3)]]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    rates = dict(lr=0.1, weight_decay=0.2)
    mine, reference = optim.Muon(ours, **rates), torch.optim.Muon(theirs, **rates, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for p, q in zip(ours[:-1], theirs):
            q.grad = p.grad = torch.randn_like(p)
        mine.step(), reference.step()
        if step == 1:                                      # checkpoints are interchangeable
            mine.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert torch.equal(ours[-1], start[-1])
    for p, q, p0 in zip(ours, theirs, start):              # equal, or a bfloat16 rounding apart
        assert (p - q).abs().max() <= 0.02 * (q - p0).abs().max()


def test_the_help_says_that_the_balance_loss_is_per_micro_batch(capsys):
    """So 4 micro-batches of 2 are not one batch of 8 with --balance=loss; the bias follows the loads of the step."""
    with pytest.raises(SystemExit):
        T.parse(["-h"])
    assert "over each micro-batch of a process" in " ".join(capsys.readouterr().out.split())


def test_default_flags_equal_the_model_config():
    for name, value in vars(Config()).items():
        if name not in ("vocab_size", "n_head"):
            assert DEFAULTS[name] == value, name


def test_presets_are_what_the_papers_say(capsys):
    for r, matrices in ((1, 240), (2, 146), (4, 98), (8, 74)):
        args, _ = T.parse([f"--preset=isodepth-r{r}", "--n_embd=768"])
        cfg = T.config_of(args, 32000)
        n = LoopedLM.param_counts(cfg)
        assert n["once"] + n["recurrent"] + n["injection"] == matrices * 768 ** 2 and cfg.n_head == 6
    base, looped = (T.config_of(T.parse([f"--preset=looped-moe-{v}"])[0], 50257) for v in ("base", "looped"))
    assert base.depth() == looped.depth() == 16
    assert sum(LoopedLM.param_counts(base).values()) == pytest.approx(167.4e6, rel=1e-3)
    assert sum(LoopedLM.param_counts(looped).values()) == pytest.approx(119.1e6, rel=1e-3)
    with pytest.raises(SystemExit) as e:
        T.parse(["--list_presets"])
    assert e.value.code == 0
    table = capsys.readouterr().out
    assert all(name in table for name in PRESETS)


# --- machine ---
@pytest.mark.parametrize("cuda, supported, avx, expected", [
    (True, True, False, "bfloat16"), (True, False, True, "float32"), (False, False, True, "bfloat16"),
    (False, False, False, "float32")])
def test_dtype_follows_the_hardware(monkeypatch, cuda, supported, avx, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx, raising=False)
    assert T.pick_dtype("cuda" if cuda else "cpu") == expected
    assert T.pick_dtype("mps") == "float32" and T.pick_dtype("cpu", "bfloat16") == "bfloat16"


@pytest.mark.parametrize("cuda, mps, expected", [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_device_is_the_first_there_is(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert T.pick_device() == expected


def test_failing_compiler_means_eager_training_and_one_warning(monkeypatch, capsys):
    model = LoopedLM(Config(vocab_size=50, block_size=16, n_embd=32, n_head=2))
    idx = torch.zeros(1, 16, dtype=torch.long)

    def broken(self, *a, **k):
        self._compiled_call_impl = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler"))
    no_triton = lambda self, *a, **k: (_ for _ in ()).throw(ImportError("no Triton"))
    for compile in (broken, no_triton):
        monkeypatch.setattr(torch.nn.Module, "compile", compile)
        T.try_compile(model, lambda: torch.autocast("cpu", enabled=False), {}, 1)
        assert capsys.readouterr().err.count("\n") == 1
        model(idx, idx)[1]["loss"].backward()


def test_a_compiler_that_computes_other_gradients_is_not_used(monkeypatch, capsys):
    model = LoopedLM(Config(vocab_size=50, block_size=16, n_embd=32, n_head=2))

    def wrong(block, *a, **k):
        block._compiled_call_impl = lambda x, context, slot: block.forward(x.detach(), context, slot)
    monkeypatch.setattr(torch.nn.Module, "compile", wrong)
    T.try_compile(model, lambda: torch.autocast("cpu", enabled=False), {}, 1)
    err = capsys.readouterr().err
    assert "other gradients" in err and err.count("\n") == 1
    assert all(block._compiled_call_impl is None for block in model.blocks())
    same, close, far = torch.ones(3), 1.2 * torch.ones(3), torch.zeros(3)
    assert T.agree([same], [close]) and not T.agree([same], [far])


# --- checkpoints ---
class Payload:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_pickle_with_a_payload_is_refused_and_not_run(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for save in (lambda f: torch.save({"model": Payload(), "config": {}}, f),
                 lambda f: Path(f).write_bytes(pickle.dumps(Payload()))):
        save(tmp_path / "run" / "ckpt.pt")
        for attempt in (lambda: load_model("run"), lambda: train(tiny())):
            with pytest.raises(SystemExit) as e:
                attempt()
            assert e.value.code == 2 and "not a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "pwned").exists()


def test_checkpoint_without_optimizer(tiny, tmp_path, capsys):
    train(tiny())
    out = tmp_path / "run"
    (out / "summary.json").unlink()
    state = torch.load(out / "ckpt.pt", weights_only=True)
    del state["optimizers"]
    torch.save(state, out / "ckpt.pt")
    before = (out / "ckpt.pt").read_bytes()
    with pytest.raises(SystemExit) as e:
        train(tiny())
    assert e.value.code == 2 and "no optimizer" in capsys.readouterr().err
    assert (out / "ckpt.pt").read_bytes() == before
    load_model(out)                                      # still good for evaluation


def test_checkpoint_of_a_bf16_run_generates_on_cpu_in_fp32(tiny, tmp_path):
    train([*tiny(), "--dtype=bfloat16"])
    model, state = load_model(tmp_path / "run")
    assert state["config"]["n_embd"] == 32
    assert model.generate(torch.zeros(1, 1, dtype=torch.long), 5).shape == (1, 6)


def stops(flags, capsys):
    """Train, expect exit status 2 and one line on stderr; returns that line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train(flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1, err
    return err


def test_nan_gradient_keeps_the_last_good_checkpoint(tiny, tmp_path, monkeypatch, capsys):
    original, calls = T.clip_and_measure, []

    def poisoned(model, limit):
        calls.append(1)
        return original(model, limit) * (math.nan if len(calls) == 15 else 1)
    with monkeypatch.context() as m:
        m.setattr(T, "clip_and_measure", poisoned)
        assert "step 14" in stops(tiny(), capsys)
    assert torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)["step"] == 10
    assert not (tmp_path / "run" / "summary.json").exists()
    train(tiny("--resume", "--learning_rate=1e-4"))        # the way out that the sentence names
    assert float(rows(tmp_path / "run")[10]["lr"]) < 1e-4


@pytest.mark.parametrize("poison_at", [13, 20])
def test_ruined_weights_are_not_saved(tiny, tmp_path, monkeypatch, capsys, poison_at):
    """An update that ruins the weights shows in the next loss, or, at the last step, in the evaluation."""
    original = T.lr_at

    def rate(step, args, max_steps):
        return 1e38 if step == poison_at - 1 else original(step, args, max_steps)
    monkeypatch.setattr(T, "lr_at", rate)
    assert "keeps the last good weights" in stops(tiny("--optimizer=adamw", "--grad_clip=0"), capsys)
    state = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    assert state["step"] == 10 and all(torch.isfinite(p).all() for p in state["model"].values())
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_interrupted_extension_is_not_complete(tiny, tmp_path, monkeypatch, capsys):
    train(tiny())
    with monkeypatch.context() as m:
        interrupt_at(m, 3)
        with pytest.raises(SystemExit):
            train([*tiny(), "--max_steps=40", "--resume"])
    assert not (tmp_path / "run" / "summary.json").exists()
    train([*tiny(), "--max_steps=40"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 40 * 4 * 32
    assert "past the 5 steps" in stops([*tiny(), "--max_steps=5", "--resume"], capsys)


def test_other_data_and_too_many_processes_are_refused(tiny, tmp_path, monkeypatch, capsys):
    from data.prepare import prepare
    text = tmp_path / "other.txt"
    text.write_text("".join(f"another text, line {i} of it, with {i * i % 97} words\n" for i in range(3000)))
    other = prepare(vocab_size=300, inputs=[text], out_dir=tmp_path / "other")
    train(tiny())
    assert "not the corpus" in stops([*tiny(), f"--data={other}"], capsys)
    (tmp_path / "run" / "summary.json").unlink()
    assert "not the corpus" in stops([*tiny(), f"--data={other}"], capsys)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "nearest that does is 3" in stops(tiny(out="new"), capsys)


@pytest.mark.parametrize("name, damage, says", [
    ("config.json", "unlink", "config.json"), ("summary.json", "truncate", "summary.json")])
def test_damaged_run_folders(tiny, tmp_path, capsys, name, damage, says):
    train(tiny())
    path = tmp_path / "run" / name
    path.unlink() if damage == "unlink" else path.write_text(path.read_text()[:20])
    assert says in stops(tiny(), capsys)


# --- what depends on the seed ---
def test_seed_draws_the_initial_weights(tiny, tmp_path, monkeypatch):
    """With the batches held fixed, so that nothing but the initial weights can differ."""
    original = T.batch_starts
    monkeypatch.setattr(T, "batch_starts", lambda seed, *a: original(0, *a))
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny(f"--seed={seed}", "--max_steps=1", out=out))
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_utilisation_is_printed_only_where_the_peak_is_known(tiny, capsys):
    train(tiny("--max_steps=2", out="unknown"))
    assert "MFU" not in capsys.readouterr().out
    train(tiny("--max_steps=2", "--peak_tflops=0.001", out="known"))
    assert "% MFU" in capsys.readouterr().out


# --- refusals: one sentence, status 2, before any work ---
@pytest.mark.parametrize("flags, says", [
    (["--nosuch=1"], "--nosuch"), (["--n_loop=two"], "n_loop"), (["--n_loop=0"], "n_loop=0"),
    (["--compile=maybe"], "maybe"), (["--preset=nosuch"], "isodepth-r4"), (["--data=nosuch"], "data/prepare.py"),
    (["--max_steps=3", "--max_tokens=5"], "exactly one"),
    (["--out_dir=/proc/x"], "/proc/x"), (["--device=cuda:99"], "cuda:99"), (["--learning_rate=-1"], "learning_rate"),
    (["--head_dim=5", "--n_embd=35"], "even"), (["--optimizer=sgd"], "adamw"), (["--resume"], "no checkpoint"),
    (["--seed=-1"], "seed"), (["--threads=-1"], "threads"), (["--beta2=2"], "beta2"), (["--device=meta"], "meta"),
    (["--max_steps=0"], "no end"), (["--final_lr=2"], "final_lr"), (["--dtype=float16"], "bfloat16"),
    (["--vocab_size=77"], "300"), (["--learning_rate=nan"], "learning_rate"),
    (["--bptt=1", "--inject=none"], "no gradient would reach"), (["--norm_penalty=0.1"], "--loop_norm=false"),
    (["--n_active=2"], "--n_active"), (["--n_embd=100"], "not a multiple of --head_dim=64"),
    (["--max_flops=10"], "less than one step"),
    (["--max_tokens=2"], "lower --batch_size"), (["--nosuch=1"], "-h lists the flags")])
def test_bad_flags(tiny, tmp_path, capsys, flags, says):
    base = [f for f in tiny() if f.split("=")[0] not in ("--head_dim", "--n_embd", "--max_steps")]
    with pytest.raises(SystemExit) as e:
        train([*base, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "run" / "ckpt.pt").exists()


def test_damaged_and_short_data(tiny, tmp_path, corpus, capsys):
    import shutil
    for name, damage, says in (("truncated", lambda f: f.write_bytes(f.read_bytes()[:-100]), "meta.json says"),
                               ("missing", lambda f: f.unlink(), "meta.json says")):
        copy = tmp_path / name
        shutil.copytree(corpus, copy)
        damage(copy / "train.bin")
        with pytest.raises(SystemExit) as e:
            train([*tiny(), f"--data={copy}"])
        assert e.value.code == 2 and says in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        train([*tiny(), "--block_size=1000000"])
    err = capsys.readouterr().err
    assert e.value.code == 2 and "block_size=1000000" in err and "tokens" in err


@pytest.mark.parametrize("flags", [["--learning_rate=1"], ["--grad_clip=0"], ["--compile=false"], ["--loop_norm=0"],
                                   ["--max_tokens=1e3"], ["--n_loop", "2"], ["--out_dir=123"]])
def test_spellings_that_must_work(tiny, flags, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    base = [f for f in tiny() if not (f.startswith("--max_steps") and "--max_tokens=1e3" in flags)]
    train([*base, *flags, *([] if "--max_tokens=1e3" in flags else ["--max_steps=2"])])


def test_truncation_is_bounded_by_the_deepest_step(capsys):
    """--sample_loops visits 2 n_loop - 1 passes: there, too, a gradient has to reach the embedding."""
    assert "--inject=none" in stops(["--bptt=2", "--sample_loops", "--n_loop=2", "--inject=none"], capsys)
    T.parse(["--bptt=3", "--sample_loops", "--n_loop=2", "--inject=none"])


def test_one_pass_has_no_injection_unless_it_is_asked_for(capsys):
    assert T.parse(["--n_loop=1"])[0].inject == "none"
    assert T.parse(["--n_loop=1", "--inject=linear"])[0].inject == "linear"
    assert T.parse(["--n_loop=2"])[0].inject == "linear"


@pytest.mark.parametrize("flags", ["--loss=per_loop", "--inject=none", "--trick=tricks/gate.py"])
def test_a_presets_truncation_gives_way_where_it_cannot_work(flags, capsys):
    assert T.parse([])[0].bptt == 1 and T.parse([flags])[0].bptt == 0
    if "trick" not in flags:                     # asked for, it is refused
        assert "--bptt" in stops([flags, "--bptt=1"], capsys)


def test_each_process_of_torchrun_takes_its_own_gpu(monkeypatch):
    """Stand-ins for the group and the GPU: also where --device names one of them."""
    began, chosen = [], []
    monkeypatch.setattr(T.dist, "init_process_group", began.append)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(T, "pick_device", lambda name: name or "cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for device in ("", "cuda", "cuda:0"):
        args = T.parse([f"--device={device}"])[0]
        assert T.start_process(args, {}, world=2) == "cuda:1"
    assert began == ["nccl"] * 3 and chosen == ["cuda:1"] * 3


def test_evaluation_takes_as_many_windows_a_process_as_training(tiny, monkeypatch):
    """Of a batch of 4 over two processes each trains on 2 windows, and must not need memory for 4 to evaluate."""
    sizes, evaluate = [], T.evaluate

    def spy(model, folder, meta, n_tokens, batch_size, *a, **kw):
        sizes.append(batch_size)
        return evaluate(model, folder, meta, n_tokens, batch_size, *a, **kw)
    monkeypatch.setattr(T, "evaluate", spy)
    monkeypatch.setattr(T, "start_process", lambda *a: "cpu")
    monkeypatch.setattr(T, "DistributedDataParallel", lambda model: model)
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(T.dist, name, lambda *a: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tiny("--max_steps=1"))
    assert sizes == [2]


def test_a_checkpoint_meets_its_own_text_only(tiny, tmp_path, corpus, capsys):
    """The corpus folder is prepared again with other text: every script that loads the checkpoint refuses."""
    copy = tmp_path / "text"
    shutil.copytree(corpus, copy)
    train([*tiny("--max_steps=1"), f"--data={copy}"])
    _, state = load_model(tmp_path / "run")
    data_of(state)
    meta = json.loads((copy / "meta.json").read_text())
    meta["splits"]["train"]["sha256"] = "0" * 64
    (copy / "meta.json").write_text(json.dumps(meta))
    for load in (lambda: data_of(state), lambda: early_exit.main(["--ckpt", str(tmp_path / "run")])):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            load()
        assert e.value.code == 2 and "not the text that" in capsys.readouterr().err


def test_help_and_another_working_directory(run, tiny, tmp_path):
    r = run("train.py", "-h")
    assert r.returncode == 0 and "--norm_penalty" in r.stdout
    r = run("train.py", *tiny("--max_steps=2"), cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert r.returncode == 0 and "bits/byte" in r.stdout, r.stderr


# --- interventions on the loop ---
def test_sampled_depths_have_the_configured_mean_and_depend_on_seed_and_step_only():
    for n_loop in (1, 2, 4, 8):
        period = 2 * n_loop - 1
        depths = [T.loops_at(7, step, n_loop) for step in range(5 * period)]
        for i in range(0, len(depths), period):
            assert sorted(depths[i:i + period]) == list(range(1, 2 * n_loop))
        assert depths == [T.loops_at(7, step, n_loop) for step in range(5 * period)]
    assert [T.loops_at(7, s, 4) for s in range(28)] != [T.loops_at(8, s, 4) for s in range(28)]
    first, second = ([T.loops_at(7, s, 8) for s in range(i, i + 15)] for i in (0, 15))
    assert first != second


def test_sampled_depths_are_trained_and_counted(tiny, monkeypatch):
    seen, forward = [], LoopedLM.forward

    def spy(self, *a, **kw):
        if self.training:
            seen.append(kw["n_loop"])
        return forward(self, *a, **kw)
    monkeypatch.setattr(LoopedLM, "forward", spy)
    flags = tiny("--sample_loops", "--n_loop=3", "--max_steps=5")
    train(flags)
    args = T.parse(flags)[0]
    assert sorted(seen) == [1, 2, 3, 4, 5]
    cfg = T.config_of(args, 300)
    summary = json.loads((Path(args.out_dir) / "summary.json").read_text())
    assert summary["flops"] == pytest.approx(summary["tokens"] * sum(LoopedLM.flops_per_token(cfg, r) for r in range(1, 6)) / 5)


@pytest.mark.parametrize("flag, flops", [("--bptt=1", dict(bptt=1)), ("--loss=per_loop", dict(readouts=4))])
def test_interventions_train_and_their_flops_are_charged(tiny, flag, flops):
    args = T.parse(tiny(flag))[0]
    train(tiny(flag))
    summary = json.loads((Path(args.out_dir) / "summary.json").read_text())
    cfg = T.config_of(args, 300)
    assert summary["flops"] == pytest.approx(summary["tokens"] * LoopedLM.flops_per_token(cfg, **flops))
    assert math.isfinite(summary["val_loss"])


# --- every flag does something ---
EFFECT = {  # flag: a value that must change the weights, the losses or what is reported, and what else it needs
    "seed": "7", "n_embd": "48", "n_head": "1", "head_dim": "32", "block_size": "16", "n_prelude": "2", "n_recur": "2",
    "n_coda": "0", "n_loop": "2", "inject": "none", "loop_norm": "false", "readout": "raw", "n_expert": "4",
    "n_active": "1 --n_expert=4", "balance": "bias --n_expert=4", "tied": "true", "mup_base": "16",
    "loss": "per_loop", "norm_penalty": "1 --loop_norm=false", "bptt": "1", "sample_loops": "true",
    "batch_size": "2", "grad_accum": "2", "max_tokens": "512 --max_steps=0", "max_flops": "1e9 --max_steps=0",
    "max_steps": "4", "optimizer": "adamw", "learning_rate": "0.1", "embed_lr": "1", "weight_decay": "5",
    "beta2": "0.5", "grad_clip": "0.01", "schedule": "constant", "warmup_steps": "0", "final_lr": "0.5",
    "eval_interval": "1", "eval_tokens": "64", "log_interval": "2", "dtype": "bfloat16", "threads": "2",
    "peak_tflops": "1e-6", "trick": "tricks/gate.py", "trick_args": "n_lanes=3 --trick=tricks/hyperconnections.py"}
MORE = [("inject", "add"), ("readout", "final --loss=per_loop --loop_norm=false"),
        ("schedule", "wsd"), ("trick", "tricks/hyperconnections.py")]
ELSEWHERE = {"preset", "out_dir", "data", "vocab_size", "resume", "device", "compile",   # the tests above are theirs, and
             "raise_hops", "raise_passes", "init_from", "tie"}               # test_hops.py and test_init_from.py


def outcome(flags, folder, capsys):
    """What a run leaves, but for its clock: weights, metrics, the machine's line and whether MFU is told."""
    threads = torch.get_num_threads()
    try:
        train([f for f in flags if f])
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr().out
    table = [{k: v for k, v in row.items() if k != "tok_per_s"} for row in rows(folder)]
    return {k: v.double().sum().item() for k, v in weights(folder).items()}, table, \
        next(line for line in told.splitlines() if line.startswith("cpu, ")), "MFU" in told


@pytest.mark.slow
def test_no_flag_is_dead(tiny, tmp_path, capsys):
    """A run of 3 steps under each flag differs from the same run without it; every field of Config is a flag."""
    assert EFFECT.keys() | ELSEWHERE == DEFAULTS.keys() and not EFFECT.keys() & ELSEWHERE
    assert {f.name for f in fields(Config)} <= DEFAULTS.keys()
    short, plain, dead = ("--max_steps=3", "--eval_interval=3", "--warmup_steps=1", "--eval_tokens=128"), {}, []
    for flag, line in [*EFFECT.items(), *MORE]:
        value, *needs = line.split()
        if (needs := tuple(needs)) not in plain:
            base = [f for f in needs if not f.startswith("--max_steps")]
            name = f"plain{len(plain)}"
            plain[needs] = outcome(tiny(*short, *base, out=name), tmp_path / name, capsys)
        name = f"{flag}-{Path(value).stem}"
        if outcome(tiny(*short, *needs, f"--{flag}={value}", out=name), tmp_path / name, capsys) == plain[needs]:
            dead.append(name)
    assert not dead
