"""passes.py: the loss by passes against train.evaluate, what it refuses, and that it tells an idle loop from another."""
import csv

import pytest
import torch

import passes as P
import train as T
from data.load import even_windows
from lib.checkpoint import data_of, load_model
from test_train import train


@pytest.fixture
def looped(tiny, tmp_path):
    train(tiny("--n_loop=2", "--max_steps=10"))
    return tmp_path / "run"


def test_losses_are_those_of_evaluation(looped, tmp_path, capsys):
    P.main([f"--ckpt={looped}", "--tokens=512", "--threads=1", f"--out_dir={tmp_path / 'out'}"])
    rows = list(csv.DictReader((tmp_path / "out" / "passes.csv").open()))
    model, state = load_model(looped)
    folder, meta = data_of(state)
    lengths = torch.ones(meta["vocab_size"]).numpy()
    assert [int(row["passes"]) for row in rows] == [1, 2, 3, 4] and float(rows[1]["lost"]) == 0
    for row in rows:
        val = T.evaluate(model, folder, meta, 512, 8, lengths, n_loop=int(row["passes"]))
        assert float(row["nats"]) == pytest.approx(val["loss"], abs=1e-5)
        assert float(row["lost"]) == pytest.approx(float(row["nats"]) - float(rows[1]["nats"]), abs=1e-6)
    assert (tmp_path / "out" / "passes.png").stat().st_size > 5000
    assert "trained with 2 passes" in capsys.readouterr().out


def test_an_idle_loop_loses_nothing(looped):
    """Blocks that add nothing to e: every pass gives the same state, by the norm."""
    model, state = load_model(looped)
    folder, meta = data_of(state)
    x, y = even_windows(folder, meta, "val", 512, model.cfg.block_size)
    busy = P.measure_run("busy", model, x, y, 8)
    with torch.no_grad():
        for block in model.recur:
            block.attn.proj.weight.zero_()
            block.ffn.down.weight.zero_()
        model.inject.weight.copy_(torch.eye(*model.inject.weight.shape))           # [I | 0]: the state is not looked at
    idle = P.measure_run("idle", model, x, y, 8)
    assert abs(busy[0]["lost"]) > 1e-5 and all(abs(row["lost"]) < 1e-6 for row in idle)


def test_what_it_refuses(looped, tiny, capsys):
    train(tiny("--n_loop=1", "--max_steps=1", out="plain"))
    def refused(*ckpt):
        with pytest.raises(SystemExit) as stopped:
            P.main(["--ckpt", *map(str, ckpt), "--tokens=64"])
        assert stopped.value.code == 2
        return capsys.readouterr().err
    assert "no loop" in refused(looped.parent / "plain")
    assert "called alike" in refused(looped, looped / "ckpt.pt")


def test_runs_of_one_name_have_that_of_the_folder_around_them(tmp_path):
    here, there = tmp_path / "gate" / "s42", tmp_path / "carry" / "s42"
    assert P.name_runs([here, there]) == {"gate": here, "carry": there}
    assert list(P.name_runs([here, tmp_path / "other"])) == ["s42", "other"]
