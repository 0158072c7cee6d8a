"""
Sample from a checkpoint, token by token as they come, with one or several numbers of passes.

    python sample.py --ckpt out/laptop --prompt "Fellow citizens," --n_loop 1 4 8
    python sample.py --ckpt out/laptop                           # from <|endoftext|>: the beginning of a text
    python sample.py --ckpt out/laptop --prompt FILE:book.txt --score --max_new_tokens 0         # the loss of a text

Any number of passes runs, whatever the model was trained with. The tokens are those of LoopedLM.generate for the same
seed, which is the same for each number of passes; the i-th sample draws with seed + i. Arithmetic is fp32.
"""
import argparse
import codecs
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import draft
from data.encode import encode_document
from data.prepare import load_tokenizer, token_bytes
from lib.checkpoint import data_of, load_model
from lib.console import misused, require_at_least, stop
from lib.machine import pick_device, read_clock
from lib.ops import check_sampling


def read_prompt(prompt):
    """The text of --prompt: as given, or the content of a file for FILE:path."""
    if not prompt.startswith("FILE:"):
        return prompt
    try:
        return Path(prompt[len("FILE:"):]).read_text(encoding="utf-8")
    except FileNotFoundError:
        stop(f"--prompt {prompt}: there is no such file")
    except (OSError, ValueError) as e:           # not UTF-8 is a ValueError
        stop(f"--prompt {prompt}: not a file of UTF-8 text ({type(e).__name__})")


def as_text(encoding, tokens):
    """The text of token ids, a piece for each, and one at the end: a character comes with the last of its tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(encoding.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def new_tokens(model, prompt, n_loop, seed, encoding, a):
    """The new token ids after a prompt (1, T), one by one; up to <|endoftext|> unless --ignore_eot."""
    asked = (prompt, a.max_new_tokens, a.temperature, a.top_k)
    how = dict(n_loop=n_loop, generator=torch.Generator(prompt.device).manual_seed(seed))
    if a.draft_passes:
        parts = (new for _, new in draft.stream(model, *asked, **how, draft_passes=a.draft_passes))
    else:
        parts = model.stream(*asked, **how)
    for part in parts:                           # (1, n) each
        for token in part[0].tolist():
            if token == encoding.eot_token and not a.ignore_eot:
                return
            yield token


@torch.inference_mode()
def score(model, ids, n_loop, lengths):
    """(nats per token, bits per byte) of ids (1, N) but for the first, in windows of block_size one after the other.
    lengths: as data.prepare.token_bytes gives them."""
    nats, n_bytes, size = 0.0, 0, model.cfg.block_size
    for x, y in zip(ids[:, :-1].split(size, dim=1), ids[:, 1:].split(size, dim=1)):
        logits, _ = model(x, y, n_loop=n_loop)                                     # (1, T, V)
        nats += F.cross_entropy(logits[0].double(), y[0], reduction="sum").item()
        n_bytes += int(lengths[y[0].cpu().numpy()].sum())
    return nats / (ids.size(1) - 1), nats / math.log(2) / n_bytes


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add, parser.error = parser.add_argument, misused
    add("--ckpt", required=True, help="run folder, or its ckpt.pt")
    add("--prompt", default="", help="text to continue, or FILE:path (default: none, from <|endoftext|>)")
    add("--n_loop", type=int, nargs="+", help="passes, a sample for each number (default: as trained)")
    add("--max_new_tokens", type=int, default=200, help="at most this many (default: 200)")
    add("--num_samples", type=int, default=1, help="samples for each number of passes (default: 1)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    add("--top_k", type=int, default=50, help="draw from the likeliest ones only; 0: from all (default: 50)")
    add("--seed", type=int, default=1337, help="of the first sample (default: 1337)")
    add("--draft_passes", type=int, default=0, help="draft with so many passes, check with all: faster (draft.py)")
    add("--ignore_eot", action="store_true", help="go on after <|endoftext|>, into the next text")
    add("--score", action="store_true", help="print the loss of the prompt as well")
    add("--trick", default="", help="file of the run's trick, if it is outside tricks/")
    add("--device", default="", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    a = parser.parse_args(argv)
    require_at_least(a, max_new_tokens=0, num_samples=1, top_k=0, seed=0, threads=0, draft_passes=0)
    if min(a.n_loop or [1]) < 1:
        stop(f"--n_loop={min(a.n_loop)}: must be at least 1")
    try:
        check_sampling(a.temperature, a.top_k)
    except ValueError as e:
        stop(f"--{e}")
    return a


def main(argv=None):
    a = parse(argv)
    device = pick_device(a.device)
    if a.threads:
        torch.set_num_threads(a.threads)
    model, state = load_model(a.ckpt, device, a.trick)
    trained, size = model.cfg.n_loop, model.cfg.block_size
    encoding = load_tokenizer(data_of(state)[0])
    text = read_prompt(a.prompt)
    ids = encode_document(encoding, text).tolist() or [encoding.eot_token]
    if a.score and len(ids) < 2:
        stop("--score needs a text: give --prompt with more than one token")
    if a.max_new_tokens and len(ids) > size:
        print(f"the prompt has {len(ids)} tokens; the model goes on from its last {size}, its block_size\n")
    prompt = torch.tensor([ids], device=device)
    if a.draft_passes:
        try:
            draft.check_drafting(min(a.n_loop or [trained]), a.draft_passes, "auto")
        except ValueError as e:
            stop(f"--{e}")
    for n_loop in a.n_loop or [trained]:
        note = "as trained" if n_loop == trained else f"trained with {trained}"
        if trained == 1 < n_loop:
            note += ", so that its blocks were never repeated"
        print(f"--- n_loop={n_loop} ({note})")
        if a.score:
            nats, bits = score(model, prompt, n_loop, token_bytes(encoding))
            print(f"prompt: {nats:.4f} nats/token, {bits:.4f} bits/byte over {len(ids) - 1} tokens")
        for i in range(a.num_samples if a.max_new_tokens else 0):
            print(text, end="", flush=True)
            clock, tokens = read_clock(device), new_tokens(model, prompt, n_loop, a.seed + i, encoding, a)
            for n, piece in enumerate(as_text(encoding, tokens)):                  # one piece more than tokens: n
                print(piece, end="", flush=True)
            seconds = read_clock(device) - clock
            print(f"\n[{n} tokens, {n / seconds:.0f} tokens/s]\n")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # a sample may hold characters that the terminal's encoding lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
