"""sample.py: the tokens of generate, text as it comes, the loss of a prompt, refusals."""
import math
import re
from types import SimpleNamespace

import pytest
import torch

import sample as S
from data.prepare import EOT, load_tokenizer, token_bytes
from lib.checkpoint import load_model
from test_train import train


@pytest.fixture
def trained(tiny, tmp_path, corpus):
    """trained(*flags): (folder, model, tokenizer) of a tiny run, with noise, so that passes differ."""
    def make(*flags):
        train(tiny("--max_steps=1", "--eval_interval=0", *flags))
        state = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
        torch.manual_seed(5)
        for matrix in state["model"].values():
            matrix.add_(0.2 * torch.randn(matrix.shape))
        torch.save(state, tmp_path / "run" / "ckpt.pt")
        return tmp_path / "run", load_model(tmp_path / "run")[0], load_tokenizer(corpus)
    return make


def output(capsys, *flags):
    capsys.readouterr()
    S.main([str(f) for f in flags] + ["--device=cpu"])
    return capsys.readouterr().out


def texts(told):
    """The samples in what is printed: each ends at the line with its speed."""
    without_headers = re.sub(r"^(--- |prompt: ).*\n", "", told, flags=re.M)
    return re.split(r"\n\[\d+ tokens, \d+ tokens/s\]\n\n", without_headers)[:-1]


@pytest.mark.parametrize("flags", [[], ["--trick=tricks/hyperconnections.py"], ["--n_expert=4"],
                                   ["--n_loop=1", "--n_recur=2"]])
def test_samples_are_those_of_generate(trained, capsys, flags):
    """For a seed, under several numbers of passes, beyond the context; the second sample has the next seed."""
    folder, model, encoding = trained(*flags)
    told = output(capsys, "--ckpt", folder, "--prompt", "abc de", "--n_loop", 1, 3, "--max_new_tokens", 40, "--seed", 7,
                  "--num_samples", 2, "--top_k", 20, "--temperature", 0.9, "--ignore_eot")
    prompt, expected = torch.tensor([encoding.encode("abc de")]), []
    for n_loop in (1, 3):
        for seed in (7, 8):
            ids = model.generate(prompt, 40, 0.9, 20, n_loop=n_loop, generator=torch.Generator().manual_seed(seed))
            expected.append(encoding.decode(ids[0].tolist()))
    assert texts(told) == expected and len(set(expected)) == 4
    assert told.count("[40 tokens, ") == 4
    assert ("never repeated" in told) == ("--n_loop=1" in flags)


def test_greedy_from_the_beginning_of_a_text(trained, capsys):
    folder, model, encoding = trained()
    told = output(capsys, "--ckpt", folder / "ckpt.pt", "--temperature", 0, "--max_new_tokens", 12, "--ignore_eot")
    ids = model.generate(torch.tensor([[encoding.eot_token]]), 12, temperature=0)[0, 1:]
    assert texts(told) == [encoding.decode(ids.tolist())] and "n_loop=4 (as trained)" in told


def test_drafting_writes_the_same_greedy_text(trained, capsys):
    folder, _, _ = trained("--n_loop=4")
    asked = ["--ckpt", folder, "--prompt", "abc de", "--n_loop", 2, 4, "--max_new_tokens", 45, "--temperature", 0]
    assert texts(output(capsys, *asked, "--draft_passes", 1)) == texts(output(capsys, *asked))


def test_a_sample_ends_at_end_of_text_unless_told_otherwise(trained, capsys, monkeypatch):
    folder, model, encoding = trained()
    ids = [*encoding.encode("ab"), encoding.eot_token, *encoding.encode("cd")]
    monkeypatch.setattr(type(model), "stream", lambda *a, **kw: iter(torch.tensor(ids)[:, None, None]))
    told = output(capsys, "--ckpt", folder, "--prompt", "x")
    assert texts(told) == ["xab"] and f"[{len(encoding.encode('ab'))} tokens" in told
    assert texts(output(capsys, "--ckpt", folder, "--prompt", "x", "--ignore_eot")) == [f"xab{EOT}cd"]


def test_characters_of_several_tokens_come_whole(corpus):
    """The corpus has no such letters, so each of their bytes is a token."""
    encoding, text = load_tokenizer(corpus), "naïve 你好 🙂."
    pieces = list(S.as_text(encoding, encoding.encode(text)))
    assert "".join(pieces) == text and pieces.count("") > 5
    broken = encoding.encode("a🙂")[:-1] + encoding.encode("b") + encoding.encode("你")[:2]
    assert "".join(S.as_text(encoding, broken)) == encoding.decode(broken)


def test_the_score_is_the_loss_token_by_token(trained, tmp_path, capsys):
    """Of a text longer than the context: windows one after the other, each token but the first predicted once."""
    folder, model, encoding = trained()
    text = tmp_path / "text.txt"
    text.write_text("abc é fgh ij " * 12, encoding="utf-8")
    told = output(capsys, "--ckpt", folder, "--prompt", f"FILE:{text}", "--score", "--max_new_tokens=0",
                  "--n_loop", 1, 4)
    ids = encoding.encode(text.read_text(encoding="utf-8"))
    assert len(ids) > 2 * 32 and texts(told) == [] and "block_size" not in told
    for n_loop, line in zip((1, 4), re.findall(r"prompt: (.*) nats/token, (.*) bits/byte over (\d+) tokens", told)):
        nats, n_bytes = 0.0, 0
        for i in range(1, len(ids)):
            start = (i - 1) // 32 * 32
            logits, _ = model(torch.tensor([ids[start:i]]), n_loop=n_loop)
            nats -= logits[0, -1].log_softmax(-1)[ids[i]].item()
            n_bytes += len(encoding.decode_single_token_bytes(ids[i]))
        assert [float(number) for number in line] == pytest.approx(
            [nats / (len(ids) - 1), nats / math.log(2) / n_bytes, len(ids) - 1], abs=1e-4)
    short = torch.tensor([ids[:20]])
    assert S.score(model, short, 4, token_bytes(encoding))[0] == pytest.approx(
        model(short[:, :-1], short[:, 1:])[1]["ce"][-1].item(), abs=1e-5)


def test_a_prompt_longer_than_the_context_is_cut_and_that_is_said(trained, capsys):
    folder, model, encoding = trained()
    text = "abc de fgh " * 20
    told = output(capsys, "--ckpt", folder, "--prompt", text, "--max_new_tokens", 5, "--temperature=0", "--ignore_eot")
    ids = encoding.encode(text)
    assert f"the prompt has {len(ids)} tokens" in told and "last 32" in told
    new = model.generate(torch.tensor([ids]), 5, temperature=0)[0, len(ids):]
    assert told.split("---")[1].count(text + encoding.decode(new.tolist())) == 1


@pytest.mark.parametrize("flags, says", [
    (["--n_loop", "0"], "--n_loop=0"), (["--score"], "--prompt"), (["--score", "--prompt", "a"], "--prompt"),
    (["--prompt", "FILE:/nosuch"], "/nosuch"), (["--temperature=-1"], "--temperature"), (["--top_k=-1"], "--top_k"),
    (["--draft_passes=4"], "--draft_passes=4"), (["--draft_passes=1", "--n_loop", "1"], "--draft_passes"),
    (["--num_samples=0"], "--num_samples"), (["--seed=x"], "--seed"), (["--nosuch"], "--nosuch")])
def test_bad_flags_are_one_sentence(capsys, monkeypatch, corpus, flags, says):
    monkeypatch.setattr(S, "load_model", lambda *a: (SimpleNamespace(cfg=SimpleNamespace(n_loop=4, block_size=32)), {}))
    monkeypatch.setattr(S, "data_of", lambda state: (corpus, {}))
    with pytest.raises(SystemExit) as e:
        S.main(["--ckpt=run", "--device=cpu", *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1
