"""routing_study.py: agreement of passes against counting sets, chance against its formula, the whole study."""
import json
import statistics

import pytest
import torch

import routing_study
import train as T
from data.load import open_data
from lib.checkpoint import load_model
from test_moe import choices
from test_train import train


def test_agreement_against_counting_sets():
    torch.manual_seed(0)
    a, b = choices("all", 3, 8, 200), choices("all", 3, 8, 200)
    sets = [(set(p), set(q)) for p, q in zip(a.tolist(), b.tolist())]
    shares = routing_study.agreement(routing_study.overlap(a, b), 3)
    assert shares["identical"] == pytest.approx(sum(p == q for p, q in sets) / 200)
    assert shares["disjoint"] == pytest.approx(sum(not p & q for p, q in sets) / 200)
    assert shares["jaccard"] == pytest.approx(statistics.mean(len(p & q) / len(p | q) for p, q in sets))
    assert shares["identical"] + shares["partial"] + shares["disjoint"] == pytest.approx(1)
    both = routing_study.compare_passes(torch.stack([a, b]), 0, 8, 3)
    assert both == {**shares, "experts_seen": pytest.approx(statistics.mean(len(p | q) for p, q in sets))}


def test_chance_baselines():
    """2 of 8 drawn twice: 15/28 disjoint, 1/28 identical, Jaccard 0.179; skewed loads agree more than that."""
    chance = routing_study.uniform_chance(8, 2)
    assert (chance["disjoint"], chance["partial"], chance["identical"]) == pytest.approx((15 / 28, 12 / 28, 1 / 28))
    assert chance["jaccard"] == pytest.approx(0.179, abs=5e-4)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(4000, 8, generator=generator).topk(2).indices for _ in "ab")
    shuffled = routing_study.shuffled_chance(a, b, 2, generator)
    assert all(shuffled[key] == pytest.approx(chance[key], abs=0.01) for key in chance)
    assert routing_study.shuffled_chance(a, a, 2, generator)["jaccard"] == pytest.approx(chance["jaccard"], abs=0.01)
    skew = torch.tensor([2, 2, 0, 0, 0, 0, 0, 0])
    a, b = ((torch.rand(4000, 8, generator=generator) + skew).topk(2).indices for _ in "ab")
    assert routing_study.shuffled_chance(a, b, 2, generator)["identical"] == pytest.approx(1)


def test_study_of_a_run(capsys, tiny, tmp_path):
    train(tiny("--n_expert=8", "--n_recur=2", "--n_loop=3", "--inject=none"))
    routing_study.main([f"--ckpt={tmp_path / 'run'}", f"--out_dir={tmp_path / 'study'}", "--tokens=1024"])
    out = capsys.readouterr().out
    assert "chance, uniform" in out and "untrained" in out and "the experts of pass 1" in out
    assert (tmp_path / "study" / "routing.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "study" / "routing.json").read_text())
    assert result["tokens"] == 1024 and len(result["layers"]) == 2 * 2
    assert all(sum(load) == pytest.approx(1) for layer in result["load"] for load in layer)
    for layer in result["layers"]:
        assert 0 <= layer["jaccard"] <= 1 and 2 <= layer["experts_seen"] <= 8
    for key in ("reuse_pass_1", "other_token"):
        assert result[key]["low"] <= result[key]["nats"] <= result[key]["high"]
    assert result["reuse_pass_1"]["nats"] != 0
    model, _ = load_model(tmp_path / "run")              # the loss is that of the plain model
    folder, meta = open_data(T.parse(tiny())[0])
    lengths = T.token_bytes(T.load_tokenizer(folder))
    assert result["loss"] == pytest.approx(T.evaluate(model, folder, meta, 1024, 8, lengths)["loss"], abs=1e-5)


def test_study_refuses_what_has_no_experts_or_no_passes(capsys, tiny, tmp_path):
    for name, flags in (("dense", []), ("once", ["--n_expert=4", "--n_loop=1", "--inject=none"])):
        train(tiny("--max_steps=1", *flags, out=name))
        with pytest.raises(SystemExit) as e:
            routing_study.main([f"--ckpt={tmp_path / name}"])
        err = capsys.readouterr().err
        assert e.value.code == 2 and "needs experts" in err and err.count("\n") == 1
