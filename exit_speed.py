"""
What exits (exits.py) and drafting (draft.py) save by the clock. Contenders take turns, one measurement each in a round,
so that a machine whose speed drifts slows all of them alike; ratios are taken within a round. early_exit.py has the
commands.
"""
import csv
import itertools
from functools import partial

import numpy as np
import torch

import draft
from data.prepare import load_tokenizer
from exit_cost import costs, neighbours, saved, savings_by_depth
from exits import CRITERIA, RowCache, exit_at, exit_below, generate, step
from lib.console import progress, stop
from lib.machine import read_clock
from model import KVCache

LENGTHS = (1, 2, 3, 4, 6, 8, "auto")             # drafted tokens that the study tries


def time_in_turns(contenders, rounds, device, label="timing", warm_up=True):
    """Seconds of contenders {name: function without arguments}, {name: [rounds]}. warm_up: a round before these, which
    does not count."""
    times = {name: [] for name in contenders}
    for i in range(0 if warm_up else 1, rounds + 1):
        for name, work in contenders.items():
            start = read_clock(device)
            work()
            if i:
                times[name].append(read_clock(device) - start)
        progress(f"{label}, round {i}/{rounds}", False)
    return times


def compare(times, name, base):
    """How many times as fast as base a contender is: median and quartiles over rounds."""
    ratios = np.divide(times[base], times[name])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return {"speed_up": middle, "low": low, "high": high}


def encode_prompts(tokenizer, a):
    """Ids of the prompts (T,), as lists."""
    prompts = [tokenizer.encode_ordinary(text) for text in a.prompt]
    if not all(prompts):
        stop("--prompt is empty: give at least one character")
    return prompts


# --- exits ---
@torch.inference_mode()
def decode(model, ids, rule, kv):
    """Run ids (T,) one by one, with exits by this rule."""
    cache = RowCache(model, 1)
    for t in range(len(ids)):
        step(model, ids[t:t + 1], cache, rule, kv)


@torch.inference_mode()
def decode_plainly(model, ids):
    """The same with model.py's own loop: exits must not win against a slow baseline."""
    cache = KVCache(model.cfg, 1, model.cfg.n_loop)
    for t in range(len(ids)):
        model(ids[None, t:t + 1], cache=cache)


def compare_with_claim(times, name, claim):
    """Print and return the time a rule saves compared with full depth in the same round, and the FLOPs it claims to."""
    shares = [1 - seconds / full for seconds, full in zip(times[name], times["full depth"])]
    low, middle, high = np.quantile(shares, [0.25, 0.5, 0.75]).tolist()
    speed_up = 1 / (1 - middle)
    ratio = middle / claim if claim > 0 else None
    part = f": {ratio:.2f} of the claim" if ratio else ""
    print(f"claimed {claim:.1%} of FLOPs, saved {middle:.1%} [{low:.1%}, {high:.1%}] of time{part}; "
          f"{speed_up:.2f} times as fast")
    return {"claimed": claim, "time_saved": middle, "low": low, "high": high, "speed_up": speed_up, "ratio": ratio}


def plan_depths(c, n, target, tests, kv="reuse"):
    """Depths (1, n) that save the target share, charged: two neighbouring depths, evenly interleaved."""
    savings = savings_by_depth(c, "charged", tests, kv)
    if not savings[-1] <= target <= savings[0]:
        stop(f"--force_saved={100 * target:g}: this model can save {savings[-1]:.0%} to {savings[0]:.0%} of its FLOPs")
    d, share = neighbours(savings, target)
    steps = torch.arange(n + 1) * round(n * share) // n
    return torch.where(steps[1:] > steps[:-1], d, d + 1)[None]


def time_schedules(model, a):
    """Times of schedules of exits that save the shares of --force_saved, with tests computed as if they decided."""
    c, device = costs(model), model.table.device
    tests = CRITERIA[a.criterion]
    T = model.cfg.block_size
    kv = a.kv[0]
    ids = torch.randint(model.cfg.vocab_size, (T,), generator=torch.Generator().manual_seed(0)).to(device)
    depths = {f"{share:g}%": plan_depths(c, T, share / 100, tests, kv) for share in a.force_saved}
    contenders = {"model.py": partial(decode_plainly, model, ids), "full depth": partial(decode, model, ids, None, kv)}
    for name, depth in depths.items():
        contenders[name] = partial(decode, model, ids, exit_at(depth.to(device), tests), kv)
    times = time_in_turns(contenders, a.rounds, device)
    ms = {name: 1e3 * float(np.median(seconds)) / T for name, seconds in times.items()}
    print(f"\n{T} tokens at batch 1, {torch.get_num_threads()} threads, keys and values by {kv}; {a.rounds} rounds, "
          f"quartiles in brackets\nms per token: " + ", ".join(f"{name} {t:.2f}" for name, t in ms.items()))
    rows = {}
    for name, depth in depths.items():
        claim = saved(c, depth[0], tests, kv)["charged"]
        rows[name] = compare_with_claim(times, name, claim)
    return {"ms_per_token": ms, "kv": kv, "rows": rows}


def time_prompts(model, folder, a):
    """Generate from the prompts with exits, then time the same tokens with and without them."""
    tokenizer, c, tests = load_tokenizer(folder), costs(model), CRITERIA[a.criterion]
    T, prompts = model.cfg.block_size, encode_prompts(tokenizer, a)
    for text, ids in zip(a.prompt, prompts):
        if len(ids) > T:
            stop(f"--prompt: {len(ids)} tokens, but block_size={T}; shorten it: {text[:40]!r}")
    n_new = min(a.max_new_tokens, T - max(map(len, prompts)) + 1)
    rule, kv, results = exit_below(a.criterion, a.exit_tau), a.kv[0], []
    rows, depths = generate(model, prompts, n_new, rule, kv, a.temperature, top_k=a.top_k, seed=a.seed)
    for row, depth in zip(rows, depths):
        text = tokenizer.decode(row)
        words = [tokenizer.decode([t]).replace("\n", "\\n").strip() for t in row[1:]]
        print(f"\n{text}\n\n{'passes' if c.looped else 'layers'} before each token: "
              + " ".join(f"{word}/{d}" for word, d in zip(words, depth)))
        saving = saved(c, torch.tensor(depth), tests, kv)
        print(f"mean {np.mean(depth):.2f} of {c.stages}; FLOPs saved: layers {saving['layers']:.1%}, with head "
              f"{saving['head']:.1%}, with tests {saving['charged']:.1%}")
        ids = torch.tensor(row[:-1], device=model.table.device)
        contenders = {}
        for name, this in (("full depth", None), ("exits", rule)):
            contenders[name] = partial(decode, model, ids, this, kv)
        times = time_in_turns(contenders, a.rounds, ids.device)
        print(f"{len(ids) / np.median(times['full depth']):7.1f} tokens/s without exits")
        print(f"{len(ids) / np.median(times['exits']):7.1f} tokens/s with exits")
        timing = compare_with_claim(times, "exits", saving["charged"])
        results.append({"text": text, "depths": depth, "saved": saving, "timing": timing})
    return results


# --- drafting ---
def acceptance(rounds):
    """Share of the guesses accepted at each position of a draft, of those tested. rounds: of draft.generate."""
    shares = []
    for i in itertools.count():
        tested = [accepted > i for drafted, accepted in rounds if drafted > i and accepted >= i]
        if not tested:
            break
        shares.append(sum(tested) / len(tested))
    return shares


def write(model, prompts, a, **how):
    """Continue prompts [(1, T)] one by one: the texts [(1, T + max_new_tokens)] and all rounds. how: draft_passes and
    draft_tokens, or nothing for model.generate."""
    texts, rounds = [], []
    for i, prompt in enumerate(prompts):
        seed = a.seed + i
        generator = torch.Generator(prompt.device).manual_seed(seed)
        asked = (prompt, a.max_new_tokens, a.temperature, a.top_k)
        if how:
            text, of_this = draft.generate(model, *asked, **how, generator=generator)
            rounds += of_this
        else:
            text = model.generate(*asked, generator=generator)
        texts.append(text)
    return texts, rounds


def compare_texts(texts, plain, temperature):
    """Of greedy texts: whether they are those of the full model, which rounding could change where two tokens tie."""
    if temperature:
        return "sampled: other draws from the same distribution"
    same = sum(map(torch.equal, texts, plain))
    n = len(plain)
    if same == n:
        return "the same text"
    return f"{same} of {n} texts the same, the others up to a tie"


def time_drafts(model, folder, a):
    """Generate from the prompts with drafting, and time it beside model.generate."""
    tokenizer, device, results = load_tokenizer(folder), model.table.device, []
    how = {"draft_passes": a.draft_passes, "draft_tokens": a.draft_tokens}
    for ids in encode_prompts(tokenizer, a):
        prompts = [torch.tensor([ids], device=device)]
        plain, _ = write(model, prompts, a)
        texts, rounds = write(model, prompts, a, **how)
        text = tokenizer.decode(texts[0][0].tolist())
        shares = acceptance(rounds)
        by_position = " ".join(f"{share:.0%}" for share in shares)
        per_round = a.max_new_tokens / len(rounds)
        print(f"\n{text}\n\naccepted by position of the draft: {by_position}; {per_round:.2f} tokens a round; "
              + compare_texts(texts, plain, a.temperature))
        contenders = {"plain": partial(write, model, prompts, a)}
        contenders["drafts"] = partial(write, model, prompts, a, **how)
        times = time_in_turns(contenders, a.rounds, device)
        rates = {}
        for name, seconds in times.items():
            rates[name] = a.max_new_tokens / float(np.median(seconds))
        ratio = compare(times, "drafts", "plain")
        print("{plain:7.1f} tokens/s without drafting\n{drafts:7.1f} tokens/s with drafting".format(**rates)
              + ": {speed_up:.2f} [{low:.2f}, {high:.2f}] times as fast".format(**ratio))
        results.append({"text": text, "acceptance": shares, "rounds": rounds, "tokens_per_s": rates, **ratio})
    return results


def study_drafts(name, model, prompts, a):
    """Every number of draft passes with every length, beside model.generate, on prompts [(1, T)]. What a round costs is
    its time over that of a token of model.generate."""
    K = model.cfg.n_loop
    written = len(prompts) * a.max_new_tokens
    plain, _ = write(model, prompts, a)
    contenders = {"plain": partial(write, model, prompts, a)}
    rows = []
    for d, n in itertools.product(range(1, K), LENGTHS):
        how = {"draft_passes": d, "draft_tokens": n}
        texts, rounds = write(model, prompts, a, **how)
        shares = acceptance(rounds)
        verdict = compare_texts(texts, plain, a.temperature)
        per_round = written / len(rounds)
        rows.append({**how, "tokens_per_round": per_round, "acceptance": shares, "text": verdict})
        contenders[d, n] = partial(write, model, prompts, a, **how)
        progress(f"{name}: first texts, {len(rows)}/{(K - 1) * len(LENGTHS)}", False)
    times = time_in_turns(contenders, a.rounds, model.table.device, name, warm_up=False)     # the texts did
    rate = written / float(np.median(times["plain"]))
    print(f"\n{name}: {K} passes; {written} tokens after {len(prompts)} prompts of the test text, batch 1, temperature "
          f"{a.temperature:g}, {torch.get_num_threads()} threads; {rate:.1f} tokens/s without drafting\n"
          f"passes drafted  tokens a round  its cost  times as fast       accepted by position")
    for row in rows:
        contender = row["draft_passes"], row["draft_tokens"]
        row.update(compare(times, contender, "plain"))
        row["cost"] = row["tokens_per_round"] / row["speed_up"]
        numbers = ("{draft_passes:6d} {draft_tokens!s:>7} {tokens_per_round:15.2f} {cost:9.2f}  {speed_up:.2f} "
                   "[{low:.2f}, {high:.2f}]").format(**row)
        by_position = " ".join(f"{share:4.0%}" for share in row["acceptance"])
        print(f"{numbers}   {by_position}   {row['text']}")
    return {"run": name, "n_loop": K, "temperature": a.temperature, "tokens": written, "plain_tokens_per_s": rate,
            "rows": rows}


def write_drafts(path, results):
    """results of study_drafts as a table, a line for each contender."""
    numbers = "tokens_per_round", "cost", "speed_up", "low", "high"
    names = "run", "temperature", "plain_tokens_per_s", "draft_passes", "draft_tokens", *numbers, "accepted"
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for run in results:
            rate = round(run["plain_tokens_per_s"], 1)
            for row in run["rows"]:
                line = {**run, **row, "plain_tokens_per_s": rate}
                for key in numbers:
                    line[key] = round(row[key], 3)
                line["accepted"] = " ".join(f"{share:.3f}" for share in row["acceptance"])
                writer.writerow(line)
