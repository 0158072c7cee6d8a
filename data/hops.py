"""
Hops: a task whose depth is known. A map f of N symbols is given, then Q queries "p hops from s" have to be answered:

    c>a b>f a>h f>b ...  2 hops: ch  1 hops: bf  3 hops: ...

that is N tokens that each stand for a pair x>f(x), in random order, then for each query a token for p, one for s and
one for the answer, f applied p times to s. Only answers count in the loss and in every evaluation. f is a random
permutation, so that all answers are equally likely at every p. A random map has fewer and fewer images as it is
repeated: whoever follows it for 4 hops can answer 86% of the questions for 6, of a permutation 63% (40,000 maps). But
f^p(s) = s where p is a multiple of the length of the cycle of s, so the start itself is the answer with a probability
of d / N, d the number of divisors of p up to N: 1/8 for one hop, 4/8 for six. Training examples follow from (seed,
step) and are never stored; a hash of f says whether it is for train, val or test.

Shapes: n examples, N symbols, Q queries, T = N + 3 Q tokens of an example.
"""
import math
from dataclasses import dataclass

import numpy as np
import torch

IGNORED = -100                    # torch's cross_entropy leaves such a target out
MAX_HOPS = 16                     # the vocabulary has tokens for as many, whatever is asked in training
LETTERS = "abcdefghijklmnop"      # the symbols; N^N numbers of maps then fit into 64 bits


# --- tokens ---
def vocabulary(N):
    """The text of each token but the last, which is <|endoftext|>: N symbols, N^2 pairs, MAX_HOPS numbers of hops."""
    symbols = list(LETTERS[:N])
    pairs = [f"{x}>{y} " for x in symbols for y in symbols]
    return [*symbols, *pairs, *[f"\n{p} hops: " for p in range(1, MAX_HOPS + 1)]]


def example_tokens(meta):
    """T, the tokens of an example."""
    return meta["symbols"] + 3 * meta["queries"]


def hops_of(x, N):
    """How many hops each token of x asks for: 0 for all but the tokens of hops."""
    return (x - (N + N * N - 1)).clip(0)


# --- examples ---
def split_of(maps):
    """The split (n,) of maps (n, N): "val" or "test" for one of 20 each, by a multiplicative hash of all N images."""
    N = maps.shape[1]
    numbers = np.zeros(len(maps), dtype=np.uint64)
    for images in maps.T:
        numbers = numbers * np.uint64(N) + images.astype(np.uint64)
    bucket = (numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) % np.uint64(20)
    return np.where(bucket == 0, "test", np.where(bucket == 10, "val", "train"))


def draw_maps(rng, n, N, split):
    """n random permutations (n, N) of a split: those that belong to another are drawn again."""
    maps = np.tile(np.arange(N), (n, 1))
    wrong = np.ones(n, dtype=bool)
    while wrong.any():
        maps[wrong] = rng.permuted(maps[wrong], axis=1)
        wrong = split_of(maps) != split
    return maps


def follow(maps, start, hops):
    """Where one is after hops (n, Q) steps from start (n, Q) under maps (n, N)."""
    here = start
    for k in range(hops.max()):
        here = np.where(k < hops, np.take_along_axis(maps, here, axis=1), here)
    return here


def draw_examples(rng, n, meta, split, hops):
    """n examples (n, T) of a split. hops: the numbers of hops to ask for, each as often as another."""
    N, Q = meta["symbols"], meta["queries"]
    maps = draw_maps(rng, n, N, split)
    symbols = np.tile(np.arange(N), (n, 1))
    x = rng.permuted(symbols, axis=1)            # the order of the pairs
    pairs = N + N * x + np.take_along_axis(maps, x, axis=1)
    start = rng.permuted(symbols, axis=1)[:, :Q]
    p = rng.choice(hops, size=(n, Q))
    queries = np.stack([N + N * N - 1 + p, start, follow(maps, start, p)], axis=2)
    return np.concatenate([pairs, queries.reshape(n, 3 * Q)], axis=1)


def draw_batch(meta, seed, step, n, hops):
    """The n training examples (n, T) of a step: they depend on these arguments only. hops as in draw_examples."""
    rng = np.random.default_rng((seed, step, 3))
    return draw_examples(rng, n, meta, "train", hops)


# --- targets and scores ---
def keep_answers(y, meta):
    """Next tokens y (B, T) of whole examples with all but the answers IGNORED."""
    place = torch.arange(y.size(1)) - meta["symbols"]      # 0, 1, 2 from a token of hops on: the answer follows 1
    return torch.where((place >= 0) & (place % 3 == 1), y, IGNORED)


def inputs_and_targets(examples, meta):
    """Examples (B, T) as inputs and targets (B, T) int64."""
    x = torch.from_numpy(examples.astype(np.int64))
    return x, keep_answers(x.roll(-1, dims=1), meta)


def count_right(logits, x, y, meta):
    """(2, MAX_HOPS): how many answers of each number of hops are right, and how many were asked for. logits (B, T, V),
    inputs x and targets y (B, T) as inputs_and_targets gives them."""
    asked = y >= 0
    p = hops_of(x.roll(1, dims=1), meta["symbols"])[asked] - 1                     # the token before the start
    right = logits.argmax(-1)[asked] == y[asked]
    return torch.stack([torch.bincount(p[right], minlength=MAX_HOPS), torch.bincount(p, minlength=MAX_HOPS)])


# --- curriculum ---
@dataclass
class Curriculum:
    """--raise_hops: training asks for one more hop whenever the training loss, a running mean over about 10 steps, is
    below a threshold in nats. Two numbers are its state, so they are in the checkpoint."""
    hops: int = 1                                # the most asked for so far
    loss: float = math.inf                       # running mean since the last hop was added

    def numbers(self):
        """What to draw the hops of a query from: half of the queries ask for the newest, the most hops so far."""
        return [*range(1, self.hops + 1), *[self.hops] * (self.hops - 1)]

    def update(self, train_loss, threshold, most):
        """Take in the loss of a step."""
        self.loss = train_loss if self.loss == math.inf else 0.9 * self.loss + 0.1 * train_loss
        if self.loss < threshold and self.hops < most:
            self.hops, self.loss = self.hops + 1, math.inf
