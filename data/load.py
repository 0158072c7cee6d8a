"""Read what prepare.py wrote: the folder of a corpus, the batches of training, the fixed windows of evaluation."""
import os
import re
import shutil
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from data.hops import example_tokens, keep_answers
from data.prepare import prepare, prepare_hops
from lib.console import stop
from lib.files import ROOT, read_json


def is_task(meta):
    """Is it the task of data/hops.py, of which only answers count, rather than text?"""
    return meta["dataset"] == "hops"


def open_data(args):
    """(folder, meta) of the prepared corpus, checked against its meta.json; sotu and hops are prepared if absent."""
    name, make = args.data, None
    if args.data == "sotu":
        vocab_size = args.vocab_size or 4096
        name, make = f"sotu-{vocab_size}", partial(prepare, vocab_size=vocab_size)
    elif task := re.fullmatch(r"hops(?:-(\d+))?", args.data):
        hops = int(task[1] or 6)
        name, make = f"hops-{hops}", partial(prepare_hops, hops)
    folder = next((f for f in (Path(name), ROOT / "data" / name) if (f / "meta.json").is_file()), None)
    if folder is None and make:                  # written elsewhere, then renamed: another process may do the same
        folder, temporary = ROOT / "data" / name, ROOT / "data" / f"{name}.{os.getpid()}.tmp"
        try:
            make(out_dir=temporary)
            with suppress(OSError):              # the other process was faster
                os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if folder is None:
        known = sorted(m.parent.name for m in ROOT.glob("data/*/meta.json"))
        stop(f"--data={args.data}: no prepared corpus there; prepared are {', '.join(['sotu', 'hops', *known])}; "
             f"data/prepare.py makes others")
    meta = read_json(folder / "meta.json")
    if args.vocab_size not in (0, meta["vocab_size"]):
        stop(f"--vocab_size={args.vocab_size}: the corpus {folder} has {meta['vocab_size']} tokens; drop the flag")
    if is_task(meta) and args.block_size != example_tokens(meta):
        stop(f"--block_size={args.block_size}: an example of {folder} has {example_tokens(meta)} tokens, and a window "
             f"is an example; give --block_size={example_tokens(meta)}")
    for split in ("val",) if is_task(meta) else ("train", "val"):
        expected, path = meta["splits"][split]["tokens"], folder / f"{split}.bin"
        n_tokens = path.stat().st_size // np.dtype(meta["dtype"]).itemsize if path.is_file() else 0
        if n_tokens != expected:
            stop(f"{path}: {n_tokens} tokens where meta.json says {expected}; run data/prepare.py again")
        if n_tokens <= args.block_size:
            stop(f"{path}: {n_tokens} tokens are too few for block_size={args.block_size}; lower it or give more text")
    return folder, meta


@lru_cache(maxsize=2)
def shuffled(seed, epoch, n):
    return np.random.default_rng((seed, epoch)).permutation(n)


def batch_starts(seed, step, n_sequences, n_tokens, block_size):
    """Where the windows of a step begin. Each epoch visits all windows once, in a random order, and shifts them so that
    their borders move. Order and shift follow from (seed, epoch), so a run resumes without any state to save."""
    windows = (n_tokens - 1) // block_size - 1 or 1
    starts = []
    for i in range(step * n_sequences, (step + 1) * n_sequences):
        epoch, j = divmod(i, windows)
        room = n_tokens - windows * block_size   # one token stays after the last window: its target
        shift = int(np.random.default_rng((seed, epoch, 1)).integers(room))
        starts.append(int(shuffled(seed, epoch, windows)[j]) * block_size + shift)
    return starts


def read_windows(path, dtype, starts, block_size):
    """Inputs and targets (B, T) int64. Plain reads, since a memory map keeps every page it has read in memory."""
    size = np.dtype(dtype).itemsize
    rows = [np.fromfile(path, dtype=dtype, count=block_size + 1, offset=start * size) for start in starts]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def held_out_windows(folder, meta, split, starts, block_size):
    """Inputs and targets (B, T) of a split that is not train. Of the task hops all targets but the answers are
    ignored (-100)."""
    x, y = read_windows(folder / f"{split}.bin", meta["dtype"], starts, block_size)
    return x, keep_answers(y, meta) if is_task(meta) else y


def even_windows(folder, meta, split, n_tokens, block_size):
    """Inputs and targets (n, T) of windows of about n_tokens in all, spread evenly over a split."""
    starts = even_starts(meta["splits"][split]["tokens"], n_tokens, block_size)
    return held_out_windows(folder, meta, split, starts, block_size)


def even_starts(n_total, n_tokens, block_size):
    """Where windows of about n_tokens in all begin, spread evenly over n_total tokens: the same for all who ask."""
    available = (n_total - 1) // block_size
    n = max(1, min(available, n_tokens // block_size))
    return [i * available // n * block_size for i in range(n)]
