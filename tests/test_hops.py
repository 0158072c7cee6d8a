"""data/hops.py, training on it and hops_study.py: the generator against brute force, disjoint splits, answers only,
scores against a loop over tokens, resume with a curriculum, and that text is trained on as before."""
import csv
import json
import math
import re
import signal
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hops_study as S
import train as T
from data import hops as H
from data.load import even_windows, open_data
from data.prepare import load_tokenizer, main as prepare_main, prepare_hops, token_bytes
from lib.checkpoint import load_model
from model import LoopedLM
from test_train import equal, losses, rows, stops, weights


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folder of the task with 8 symbols, 8 queries and up to 4 hops, and its meta.json."""
    folder = prepare_hops(4, out_dir=tmp_path_factory.mktemp("hops") / "task")
    return folder, json.loads((folder / "meta.json").read_text())


@pytest.fixture
def flags(task, tmp_path):
    """Command-line flags of a model that trains in a second."""
    def call(*more, out="run"):
        return ["--preset=hops", f"--data={task[0]}", f"--out_dir={tmp_path / out}", "--n_embd=32", "--n_prelude=0",
                "--n_recur=2", "--n_coda=0", "--n_loop=4", "--raise_hops=0", "--raise_passes=false",
                "--batch_size=8", "--max_steps=12",
                "--eval_tokens=1024", "--eval_interval=6", "--log_interval=1", "--dtype=float32", "--device=cpu",
                "--threads=1", *more]
    return call


def train(line):
    T.train(*T.parse(line))


def read_example(text):
    """(map, [(hops, start, answer)]) of an example, from its text alone."""
    pairs = re.findall(r"([a-p])>([a-p]) ", text)
    queries = [(int(p), s, answer) for p, s, answer in re.findall(r"\n(\d+) hops: ([a-p])([a-p])", text)]
    assert "".join(f"{x}>{y} " for x, y in pairs) + "".join(f"\n{p} hops: {s}{a}" for p, s, a in queries) == text
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs), queries


def walk(where, start, p):
    for _ in range(p):
        start = where[start]
    return start


# --- the generator ---
@pytest.mark.parametrize("N, Q, hops", [(8, 8, 4), (8, 3, 6), (5, 5, 16), (16, 7, 2)])
def test_examples_equal_brute_force(tmp_path, N, Q, hops):
    """Read back from their text: a permutation, its pairs in random order, different starts, answers by walking."""
    folder = prepare_hops(hops, N, Q, out_dir=tmp_path / "task")
    meta, encoding = json.loads((folder / "meta.json").read_text()), load_tokenizer(folder)
    asked = np.zeros(hops + 1)
    first_pairs = set()
    val, test = (np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]) for split in ("val", "test"))
    val, test = (ids.reshape(-1, N + 3 * Q)[:300] for ids in (val, test))
    for example in [*H.draw_batch(meta, 1, 5, 300, range(1, hops + 1)), *val, *test]:
        where, queries = read_example(encoding.decode(example.tolist()))
        assert sorted(where) == sorted(where.values()) == list(H.LETTERS[:N])
        assert len(queries) == Q == len({s for _, s, _ in queries})
        assert all(answer == walk(where, s, p) for p, s, answer in queries)
        first_pairs.add(next(iter(where)))
        for p, _, _ in queries:
            asked[p] += 1
    assert asked[0] == 0 and asked[1:] == pytest.approx(900 * Q / hops, rel=0.25)
    assert len(first_pairs) == N
    assert encoding.encode_ordinary(encoding.decode(example.tolist())) == example.tolist()
    assert encoding.n_vocab == meta["vocab_size"] and encoding.eot_token == meta["vocab_size"] - 1


def test_no_map_is_in_two_splits(task):
    """Every permutation of 8 belongs to one split by its hash; what is drawn for a split holds maps of it only."""
    folder, meta = task
    encoding = load_tokenizer(folder)
    found = {"train": set(), "val": set(), "test": set()}
    for split in ("val", "test"):
        examples = np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]).reshape(-1, 32)
        assert len(examples) == 2000 == meta["splits"][split]["documents"]
        found[split] = {tuple(sorted(read_example(encoding.decode(e.tolist()))[0].items())) for e in examples}
    for step in range(50):
        for e in H.draw_batch(meta, 7, step, 64, range(1, 5)):
            found["train"].add(tuple(sorted(read_example(encoding.decode(e.tolist()))[0].items())))
    assert len(found["train"]) > 2900 and min(len(found["val"]), len(found["test"])) > 1000
    assert not found["train"] & (found["val"] | found["test"]) and not found["val"] & found["test"]
    every = H.split_of(np.array(list(permutations(range(8)))))
    shares = [np.mean(every == split) for split in ("train", "val", "test")]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.01) and sum(shares) == 1


def test_batches_are_a_function_of_seed_step_and_hops(task):
    meta = task[1]
    first = H.draw_batch(meta, 1, 5, 8, [1, 2])
    assert (first == H.draw_batch(meta, 1, 5, 8, [1, 2])).all()
    for seed, step, hops in ((2, 5, [1, 2]), (1, 6, [1, 2]), (1, 5, [1, 3])):
        assert (first != H.draw_batch(meta, seed, step, 8, hops)).any()


# --- answers only ---
class Stub(torch.nn.Module):
    """A model whose logits (B, T, V) are made of its input by a function."""

    def __init__(self, logits, vocab_size):
        super().__init__()
        self.make, self.cfg = logits, SimpleNamespace(block_size=32, n_loop=1, vocab_size=vocab_size)
        self.table = torch.zeros(1)

    def forward(self, x, y, n_loop=None, loss="terminal"):
        logits = self.make(x)
        ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        return logits, {"ce": ce[None], "norm": torch.zeros(1)}


def look_up(x, V=89):
    """What a perfect model says: it reads the map and walks."""
    logits = torch.zeros(*x.shape, V)
    for row, example in zip(logits, x.tolist()):
        where = {(pair - 8) // 8: (pair - 8) % 8 for pair in example[:8]}
        for t in range(9, 32, 3):
            row[t, walk(where, example[t], example[t - 1] - 71)] = 50
    return logits


def copy_answer(x, V=89):
    """Each query is answered like the one before it, the first by its start."""
    logits = torch.zeros(*x.shape, V)
    for t in range(9, 32, 3):
        logits[torch.arange(len(x)), t, x[:, t - 2] if t > 9 else x[:, t]] = 50
    return logits


def test_a_lookup_scores_1_and_chance_is_an_eighth(task):
    folder, meta = task
    lengths = token_bytes(load_tokenizer(folder))
    torch.manual_seed(0)
    scores = {}
    def guess(x):
        return torch.rand(*x.shape, 8)
    for name, make in (("lookup", look_up), ("copy", copy_answer), ("guess", guess)):
        scores[name] = T.evaluate(Stub(make, 89), folder, meta, 64_000, 64, lengths)
    assert scores["lookup"]["accuracy"] == [1, 1, 1, 1] and scores["lookup"]["loss"] < 1e-6
    assert scores["guess"]["accuracy"] == pytest.approx([1 / 8] * 4, abs=0.02)
    assert scores["guess"]["bpb"] == pytest.approx(scores["guess"]["loss"] / math.log(2))      # an answer is one byte
    assert scores["copy"]["accuracy"] == pytest.approx([0.1] * 4, abs=0.03)


def test_only_answers_are_targets(task):
    folder, meta = task
    x, y = even_windows(folder, meta, "test", 3200, 32)
    assert x.shape == y.shape == (100, 32)
    asked = torch.zeros(32, dtype=torch.bool)
    asked[9:31:3] = True                                   # the start of a query, which is followed by its answer
    assert (y[:, ~asked] == -100).all() and torch.equal(y[:, asked], x[:, 10::3])
    examples = H.draw_batch(meta, 0, 0, 4, [1, 4])
    a, b = H.inputs_and_targets(examples, meta)
    assert (a.numpy() == examples).all() and torch.equal(b[:, asked], a[:, 10::3]) and (b[:, ~asked] == -100).all()


def test_scores_equal_a_loop_over_tokens(flags, task, tmp_path):
    train(flags("--loss=per_loop"))
    folder, meta = task
    model, _ = load_model(tmp_path / "run")
    got = T.evaluate(model, folder, meta, 1600, 8, token_bytes(load_tokenizer(folder)), per_loop=True)
    ids = np.fromfile(folder / "val.bin", dtype=meta["dtype"]).astype(int)
    available = (len(ids) - 1) // 32
    right, asked, nats = [0] * 5, [0] * 5, 0.0
    for i in range(50):
        example = ids[i * available // 50 * 32:][:32]
        logits = model(torch.tensor(example[None]), torch.tensor(example[None]))[0][0]
        for t in range(10, 32, 3):
            p = example[t - 2] - 71
            right[p] += int(logits[t - 1].argmax()) == example[t]
            asked[p] += 1
            nats -= logits[t - 1].log_softmax(-1)[example[t]].item()
    assert sum(asked) == 400
    assert got["accuracy"] == pytest.approx([right[p] / asked[p] for p in range(1, 5)])
    assert got["loss"] == got["ce"][-1] == pytest.approx(nats / 400, abs=1e-5)
    last = rows(tmp_path / "run")[-1]
    assert all(0 <= float(last[f"val_acc_{p}"]) <= 1 for p in range(1, 5))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_acc"] == [float(last[f"val_acc_{p}"]) for p in range(1, 5)]


def test_text_is_trained_on_as_before(tiny, tmp_path, corpus):
    """The losses of a run on text, bit for bit, by a loop that knows nothing of targets that do not count."""
    train(tiny("--max_steps=5", "--loss=per_loop"))
    args = T.parse(tiny("--max_steps=5", "--loss=per_loop"))[0]
    folder, meta = open_data(args)
    torch.manual_seed(args.seed)
    model = T.model_class("", "")(T.config_of(args, meta["vocab_size"]))
    optimizers = T.make_optimizers(model, args)
    for step, row in enumerate(rows(tmp_path / "run")):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = T.lr_at(step, args, 5) * group.get("lr_scale", 1)
        starts = T.batch_starts(args.seed, step, args.batch_size, meta["splits"]["train"]["tokens"], 32)
        x, y = T.read_windows(folder / "train.bin", meta["dtype"], starts, 32)
        context = model.context(x, 4, None)
        ce = []
        for h in model.loop_states(x, context, 4):
            logits = model.logits(h, context, 4).flatten(0, 1).float()
            ce.append(torch.nn.functional.cross_entropy(logits, y.flatten(), ignore_index=10 ** 6))
        torch.stack(ce).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        assert float(row["train_loss"]) == ce[-1].item() and float(row["grad_norm"]) == norm.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- runs ---
def test_a_run_leaves_a_complete_folder(flags, tmp_path, capsys):
    train(flags())
    out = tmp_path / "run"
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.csv", "ckpt.pt", "loss.png", "sample.txt",
                                               "summary.json"}
    where, queries = read_example("\n".join((out / "sample.txt").read_text().split("\n")[:-2]))
    n_right = sum(answer == walk(where, s, p) for p, s, answer in queries)
    assert (out / "sample.txt").read_text().endswith(f"\n{n_right} of 8 right\n")
    assert "right at 1, 2, .. hops" in capsys.readouterr().out
    assert float(rows(out)[0]["train_loss"]) == pytest.approx(math.log(89), abs=0.05)


def test_the_curriculum_asks_for_more_when_the_last_is_learned():
    curriculum = H.Curriculum()
    assert curriculum.numbers() == [1]
    for loss in [2.0] + [0.0] * 21:
        curriculum.update(loss, 0.2, 3)
    assert curriculum.hops == 1 and curriculum.loss > 0.2      # one lucky step is not enough
    curriculum.update(0.0, 0.2, 3)
    assert curriculum == H.Curriculum(2)
    curriculum.update(0.1, 0.2, 3)
    assert curriculum == H.Curriculum(3)
    curriculum.update(0.1, 0.2, 3)
    assert curriculum == H.Curriculum(3, 0.1)                  # no more than there are
    assert sorted(curriculum.numbers()) == [1, 2, 3, 3, 3]     # half ask for the newest


def test_passes_rise_with_the_hops_and_their_flops_are_charged(flags, tmp_path, monkeypatch):
    seen, forward = [], LoopedLM.forward

    def watching(self, *a, **kw):
        if self.training:
            seen.append(kw["n_loop"])
        return forward(self, *a, **kw)
    monkeypatch.setattr(LoopedLM, "forward", watching)
    line = flags("--raise_hops=4.4", "--raise_passes", "--n_loop=3")
    train(line)
    assert seen[0] == 1 and seen[-1] == 3                      # four hops, but the loop has three passes
    table = rows(tmp_path / "run")                             # "hops" of a row: those of the step after it
    assert seen[1:] == [min(int(row["hops"]), 3) for row in table[:-1]]
    cfg = T.config_of(T.parse(line)[0], 89)
    spent = np.cumsum([8 * 32 * LoopedLM.flops_per_token(cfg, r) for r in seen])
    assert [float(row["flops"]) for row in table] == pytest.approx(spent)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["flops"] == pytest.approx(spent[-1])


def test_only_steps_with_enough_passes_count_for_the_curriculum(flags, tmp_path, monkeypatch):
    """With sampled depth a step may run fewer passes than hops: its loss says nothing of what has been learned."""
    counted, seen, original = [], [], T.settings_at
    monkeypatch.setattr(H.Curriculum, "update", lambda self, *a: counted.append(len(seen) - 1))

    def watching(*a):
        seen.append(original(*a)["n_loop"])
        return original(*a)
    monkeypatch.setattr(T, "settings_at", watching)
    monkeypatch.setattr(T, "Curriculum", lambda: H.Curriculum(hops=3))
    train(flags("--raise_hops=4.4", "--sample_loops", "--n_loop=3"))
    assert counted == [step for step, passes in enumerate(seen) if passes >= 3] and 0 < len(counted) < len(seen)


def test_a_resumed_run_cannot_get_around_a_refusal(flags, capsys):
    line = flags("--raise_hops=4.4", "--raise_passes")
    train(line)
    longer = [f for f in line if not f.startswith(("--preset", "--max_steps", "--raise_passes"))]
    assert "--max_steps" in stops([*longer, "--block_size=32", "--resume", "--max_flops=1e12"], capsys)
    assert "--n_loop=4" in stops(flags("--raise_hops=4.4", "--raise_passes", "--n_loop=5", out="more"), capsys)


@pytest.mark.parametrize("step, hops", [(6, 1), (10, 3)])
def test_resumed_run_equals_unbroken_one_bit_for_bit(flags, tmp_path, monkeypatch, step, hops):
    """What is asked next depends on the losses so far: broken off while their mean falls, and between two hops."""
    line = ("--raise_hops=4.4", "--raise_passes", "--grad_accum=2")
    train(flags(*line, out="straight"))
    asked = [int(row["hops"]) for row in rows(tmp_path / "straight")]
    assert asked[:8] == [1] * 8 and asked[8:] == [2, 3, 4, 4]
    original, calls = T.inputs_and_targets, []

    def reading(*a):
        calls.append(1)
        if len(calls) == 2 * step:
            signal.raise_signal(signal.SIGTERM)
        return original(*a)
    with monkeypatch.context() as m:
        m.setattr(T, "inputs_and_targets", reading)
        with pytest.raises(SystemExit) as e:
            train(flags(*line, out="broken"))
    assert e.value.code == 128 + signal.SIGTERM
    state = torch.load(tmp_path / "broken" / "ckpt.pt", weights_only=True)
    assert state["step"] == step and state["curriculum"]["hops"] == hops
    train(flags(*line, out="broken"))
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "broken")
    for column in ("hops", "flops"):
        straight, broken = rows(tmp_path / "straight"), rows(tmp_path / "broken")
        assert [row[column] for row in straight] == [row[column] for row in broken]


@pytest.mark.slow
def test_two_processes_train_the_same_run(flags, tmp_path, torchrun):
    line = ("--raise_hops=4.4", "--raise_passes", "--grad_accum=2", "--eval_interval=2")
    train(flags(*line, out="one"))
    torchrun(*flags(*line, out="two"))
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert a["hops"] == b["hops"]
        for key in ("train_loss", "grad_norm", "val_loss", "val_bpb", "val_acc_1", "val_acc_4"):
            if a[key]:
                assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-3, abs=1e-6), key


@pytest.mark.parametrize("more", [["--n_expert=4"], ["--trick=tricks/gate.py"], ["--sample_loops", "--inject=add"],
                                  ["--max_steps=0", "--max_flops=2e9"], ["--n_loop=1", "--n_recur=8"]])
def test_the_rest_of_a_run_works_as_it_does_on_text(flags, tmp_path, more):
    line = [f for f in flags() if not (f.startswith("--max_steps") and "--max_flops=2e9" in more)]
    train([*line, *[f for f in more if f != "--max_steps=0"]])
    assert len(json.loads((tmp_path / "run" / "summary.json").read_text())["val_acc"]) == 4


def test_refusals(flags, tiny, tmp_path, capsys):
    assert "--block_size=32" in stops(flags("--block_size=64"), capsys)
    assert "--data=hops" in stops(tiny("--raise_hops=0.1"), capsys)
    for more, says in (([], "--raise_hops"), (["--raise_hops=1", "--sample_loops"], "--sample_loops"),
                       (["--raise_hops=1", "--trick=tricks/growing_r.py"], "growing_r"),
                       (["--raise_hops=1", "--max_flops=1e9"], "--max_steps")):
        line = [f for f in flags() if not f.startswith("--max_steps")]
        assert says in stops([*line, "--raise_passes", *more], capsys)
    for line, says in ((["--hops=17"], "1 to 16"), (["--symbols=4"], "5 to 16"), (["--queries=9"], "1 to 8")):
        with pytest.raises(SystemExit) as e:
            prepare_main(["--dataset=hops", f"--out_dir={tmp_path / 'x'}", *line])
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        prepare_main(["--hops=3"])
    assert "--dataset hops" in capsys.readouterr().err
    prepare_main(["--dataset=hops", f"--out_dir={tmp_path / 'x'}"])
    before = (tmp_path / "x" / "val.bin").read_bytes()
    prepare_main(["--dataset=hops", f"--out_dir={tmp_path / 'x'}"])
    assert (tmp_path / "x" / "val.bin").read_bytes() == before
    with pytest.raises(SystemExit):
        prepare_main(["--dataset=hops", "--hops=5", f"--out_dir={tmp_path / 'x'}"])
    assert "--overwrite" in capsys.readouterr().err


def test_the_task_is_prepared_where_it_is_asked_for(tmp_path, monkeypatch):
    from data import load
    monkeypatch.setattr(load, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(data="hops-4", vocab_size=0, block_size=32)
    folder, meta = open_data(args)
    assert folder == tmp_path / "data" / "hops-4" and meta["hops"] == 4 and open_data(args) == (folder, meta)
    assert open_data(SimpleNamespace(data="hops", vocab_size=0, block_size=32))[1]["hops"] == 6
    assert sum(f.stat().st_size for f in folder.iterdir()) < 300_000


# --- the study ---
def test_chains_equal_brute_force(task):
    meta, examples = task[1], H.draw_batch(task[1], 3, 3, 20, range(1, 5))
    p, way = S.chains(torch.tensor(examples), meta)
    for b, example in enumerate(examples.tolist()):
        where = {(pair - 8) // 8: (pair - 8) % 8 for pair in example[:8]}
        for q in range(8):
            hop, start = example[8 + 3 * q:10 + 3 * q]
            assert p[b, q] == hop - 71
            assert way[:, b, q].tolist() == [walk(where, start, j) for j in range(17)]


def test_a_model_that_takes_a_hop_a_pass_is_a_staircase(task, monkeypatch):
    """Stand-in: after pass k each query is answered with min(k, p) hops."""
    meta = task[1]

    def staircase(model, x, n_passes):
        p, way = S.chains(x, meta)
        logits = torch.zeros(n_passes, *x.shape, 89)
        for k in range(1, n_passes + 1):
            named = way.gather(0, p.clamp(max=k)[None])[0]
            logits[k - 1, :, 9::3] = torch.nn.functional.one_hot(named, 89).float()
        return logits
    monkeypatch.setattr(S, "read_passes", staircase)
    accuracy = np.array(S.accuracies(None, meta, 6, 6, 400, 0))
    assert (accuracy[np.tri(6, dtype=bool)] == 1).all() and accuracy[~np.tri(6, dtype=bool)].max() < 0.6
    named = np.array(S.named_steps(None, meta, 6, 400, 0))
    assert (named[:4, 1:] == np.eye(4)).all() and (named[4:] == [0, 0, 0, 0, 1]).all() and not named[:, 0].any()


def test_passes_are_read_out_as_the_model_does(flags, task, tmp_path):
    train(flags("--max_steps=3", "--n_coda=1", "--readout=final"))
    model, _ = load_model(tmp_path / "run")
    x, y = even_windows(*task, "test", 320, 32)
    with torch.no_grad():
        for k, logits in enumerate(S.read_passes(model, x, 6, batch_size=4), 1):
            torch.testing.assert_close(logits, model(x, y, n_loop=k)[0], rtol=1e-4, atol=1e-5)


def test_the_study_of_two_groups(flags, tmp_path, capsys, monkeypatch):
    folders = []
    for more in (["--seed=1"], ["--seed=2"], ["--seed=1", "--n_loop=1", "--n_recur=8"]):
        folders.append(str(tmp_path / f"run{len(folders)}"))
        train(flags(*more, out=f"run{len(folders) - 1}"))
    monkeypatch.setattr(S, "LEARNED", 0.0)
    S.main(["--ckpt", *folders, "--passes=5", "--hops=6", "--examples=50", "--threads=1",
            f"--out_dir={tmp_path / 'study'}"])
    told = capsys.readouterr().out
    assert "4 passes of 2 layers: 2 seeds" in told and "8 layers, no loop: 1 seed" in told and "2 of 2 seeds learned" in told
    groups = json.loads((tmp_path / "study" / "hops.json").read_text())
    looped, plain = groups.values()
    assert np.shape(looped[0]["accuracy"]) == (5, 6) and np.shape(plain[0]["accuracy"]) == (1, 6)
    assert np.shape(looped[0]["named"]) == (5, 5)
    first = next(row for row in rows(folders[0]) if row["val_acc_1"])
    assert looped[0]["learned_at"] == [float(first["flops"])] * 4
    with open(tmp_path / "study" / "hops.csv", newline="") as f:
        table = list(csv.DictReader(f))
    assert len(table) == (5 + 5 + 1) * 6 and (tmp_path / "study" / "hops.png").is_file()
    assert (tmp_path / "study" / "staircase.png").is_file() and (tmp_path / "study" / "learning.png").is_file()
    with open(tmp_path / "study" / "learned.csv", newline="") as f:
        table = list(csv.DictReader(f))
    assert len(table) == 3 and {row["asked"] for row in table} == {"4"} and table[2]["names_2"] == "" != table[0]["names_2"]


def test_the_study_refuses_text(tiny, tmp_path, capsys):
    train(tiny("--max_steps=1"))
    with pytest.raises(SystemExit):
        S.main(["--ckpt", str(tmp_path / "run")])
    assert "--preset=hops" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        S.main(["--ckpt", "x", "--hops=17"])
    assert "16 hops" in capsys.readouterr().err
