"""Text to token ids, on all cores. What comes out does not depend on how many there are."""
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiktoken

CHUNK = 2 ** 20             # characters that a thread encodes at a time
OWN = threading.local()     # what each thread has for itself: a tokenizer
LONG_RUN = 500_000          # characters of white space in a row; tiktoken and rustbpe panic at 999,999


def cut_long_runs(text):
    """The pieces of a text, cut after each LONG_RUN characters of white space in a row: usually one piece, the text."""
    ends = []
    if len(text) > LONG_RUN:
        for run in re.finditer(rf"(?<!\s)\s{{{LONG_RUN},}}", text):
            ends += range(run.start() + LONG_RUN, run.end(), LONG_RUN)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]


def encode_document(encoding, text):
    """Token ids of a text, uint32, without <|endoftext|>."""
    pieces = [encoding.encode_to_numpy(piece, disallowed_special=()) for piece in cut_long_runs(text)]
    return np.concatenate(pieces)


def copy_tokenizer(encoding):
    """Give this thread a tokenizer of its own. Threads that share one wait for each other inside its regex: two of them
    are as fast as one, with one each twice as fast."""
    OWN.encoding = tiktoken.Encoding(encoding.name, pat_str=encoding._pat_str, special_tokens=encoding._special_tokens,
                                     mergeable_ranks=encoding._mergeable_ranks)


def encode_chunk(chunk):
    """[(split, text), ...] to [(split, ids, UTF-8 bytes), ...], each document after its <|endoftext|>."""
    encoded = []
    for split, text in chunk:
        ids = np.append(np.uint32(OWN.encoding.eot_token), encode_document(OWN.encoding, text))
        encoded.append((split, ids, len(text.encode())))
    return encoded


def cut_into_chunks(stream):
    """Lists of documents that have at least CHUNK characters together, but for the last."""
    chunk, size = [], 0
    for split, text in stream:
        chunk.append((split, text))
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def encode_all(encoding, stream, workers):
    """(split, ids, bytes) of every document, in their order. Threads do: tiktoken encodes outside of Python's lock, and
    nothing has to be copied between processes. At most 2 * workers + 1 chunks are in memory, however long the text."""
    pool = ThreadPoolExecutor(workers, initializer=copy_tokenizer, initargs=(encoding,))
    pending = deque()
    try:
        for chunk in cut_into_chunks(stream):
            pending.append(pool.submit(encode_chunk, chunk))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
