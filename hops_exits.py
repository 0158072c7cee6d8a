"""
Early exits where it is known how many passes a token needs: of the task hops (data/hops.py) a query for one hop should
leave after one pass, one for six hops after six.

    python train.py --preset=hops --seed=1 --out_dir=out/hops/looped-s1
    python hops_exits.py --ckpt out/hops/looped-s*       # tables; exits.png and exits.csv in out/hops-exits

Only tokens that answer may leave: nothing is read from the others, so they run all passes, and what is saved is a share
of the FLOPs of the tokens that answer, with every test charged (exit_cost.py). tau is chosen on maps of val, everything
else is measured on maps of test, and later tokens find the keys of the last pass that ran. Beside the criteria stand
three rules that need no test: a fixed depth and random exits of the same cost, and the oracle, which knows that p hops
take p passes. Means over the runs, with 95% t intervals.

Shapes: B examples, T tokens, S = n_loop passes, n answers of all examples.
"""
import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from data.hops import draw_examples, hops_of, inputs_and_targets
from data.prepare import load_tokenizer
from exit_cost import Costs, calibrate, costs, fixed_depth, random_exits, saved
from exits import CRITERIA, Rule, advance, begin, doubt, exit_at, exit_below, read, run_at_once
from lib.checkpoint import load_on_task, run_folder
from lib.console import misused, progress, require_at_least, stop
from lib.files import check_writable, write_csv
from lib.machine import pick_device
from lib.plots_hops import plot_hops_exits
from lib.stats import mean_interval

SAVED = (0.1, 0.2, 0.3, 0.4, 0.5)                # of the FLOPs of the tokens that answer, all tests charged
AIM = 0.3                                        # the saving at which passes are counted by hops, and an example drawn


def only_answers(rule, N):
    """The rule for the tokens that answer, of a map of N symbols; all others stay."""
    def leave(s, rows, position, at, before):
        place = position - N                     # 0, 1, 2 from a token of hops on: 1 is the start, whose next is asked
        answers = (place >= 0) & (place % 3 == 1)
        return answers & rule.leave(s, rows, position, at, before)
    return Rule(rule.reads, leave)


@torch.no_grad()
def score_answers(model, x, y):
    """Right answers (S, n) after each pass of all tokens, and each criterion's doubt (S - 1, n) after all but the last.
    x, y (B, T) as data.hops.inputs_and_targets gives them."""
    S, asked = model.cfg.n_loop, y >= 0
    context = model.context(x, S, None)
    at = begin(model, x, context)
    right = []
    doubts = {name: [] for name in CRITERIA}
    for s in range(S):
        before, at = at, advance(model, s, at, context)
        at.logits = read(model, s, at.state, context)
        answers = at.logits.argmax(-1)
        right.append(answers[asked] == y[asked])
        for name in CRITERIA if s < S - 1 else ():
            value = doubt(name, at.logits, before.logits, at.state, before.state)
            doubts[name].append(value[asked])
    doubts = {name: torch.stack(values).cpu() for name, values in doubts.items()}
    return torch.stack(right).cpu(), doubts


def answer(model, x, y, rule, N):
    """Right answers (n,) and passes (B, T) if tokens that answer leave by the rule."""
    logits, depth = run_at_once(model, x, only_answers(rule, N), "reuse")
    asked = y >= 0
    answers = logits.argmax(-1)
    right = answers[asked] == y[asked]
    return right.cpu(), depth


@dataclass
class Test:
    """Examples of test, and what all rules measured on them share."""
    x: torch.Tensor                              # (B, T)
    y: torch.Tensor                              # (B, T), IGNORED where nothing is asked
    hops: torch.Tensor                           # (B, T), asked for there
    by_depth: torch.Tensor                       # (S,) share of right answers after each pass
    costs: Costs


def draw_split(model, meta, n, split):
    """n examples of a split, x and y (n, T)."""
    rng = np.random.default_rng((0, split == "test"))
    hops = range(1, meta["hops"] + 1)
    examples = draw_examples(rng, n, meta, split, hops)
    x, y = inputs_and_targets(examples, meta)
    device = model.table.device
    return x.to(device), y.to(device)


def measure_rule(model, test, rule, tests, meta):
    """What a rule of exit saves and gets right, and what rules without a test get right at that cost. tests: does the
    rule pay for readouts?"""
    asked = test.y >= 0
    c = test.costs
    right, passes = answer(model, test.x, test.y, rule, meta["symbols"])
    depth = passes[asked].cpu()
    saving = saved(c, depth, tests)
    fixed = fixed_depth(c, test.by_depth, saving, "charged")
    random = random_exits(c, test.by_depth, depth, saving, "charged")
    asked_for = test.hops[asked].cpu()
    by_hops = []
    for p in range(1, meta["hops"] + 1):
        passes_of_p = depth[asked_for == p].double()
        by_hops.append(passes_of_p.mean().item())
    accuracy, full = right.double().mean(), test.by_depth[-1]
    return {"saved": saving["charged"], "full": full.item(), "accuracy": accuracy.item(), "fixed": fixed.item(),
            "random": random.item(), "passes": by_hops, "first": passes[0].tolist()}


def measure_run(model, meta, n):
    """({(criterion, aim): what measure_rule says}, the tokens (T,) of the first example), on n examples of val and n of
    test. An aim is left out where even one pass for everybody saves less."""
    x, y = draw_split(model, meta, n, "val")
    _, doubts = score_answers(model, x, y)
    x, y = draw_split(model, meta, n, "test")
    right, _ = score_answers(model, x, y)
    hops = hops_of(x.roll(1, dims=1), meta["symbols"])                             # an answer's: two tokens before it
    by_depth = right.double().mean(1)
    test = Test(x, y, hops, by_depth, costs(model))
    points = {}
    for criterion, tests in CRITERIA.items():
        def saving(depth):
            return saved(test.costs, depth, tests)["charged"]
        for aim in SAVED:
            tau = calibrate(doubts[criterion], aim, saving)
            if tau is not None:
                rule = exit_below(criterion, tau)
                points[criterion, aim] = measure_rule(model, test, rule, tests, meta)
    knows = exit_at(hops.clamp(1, model.cfg.n_loop))
    points["oracle", None] = measure_rule(model, test, knows, False, meta)
    return points, x[0].tolist()


def in_all(runs):
    """{(criterion, aim): [that point of each run]}, those that all runs have. runs: [points of measure_run]."""
    common = {}
    for key in runs[0]:
        if all(key in points for points in runs):
            common[key] = [points[key] for points in runs]
    return common


def gain(points, a, b):
    """(mean, low, high) in points of 100 of what a gets right more than b."""
    differences = [100 * (point[a] - point[b]) for point in points]
    return mean_interval(differences)


def print_table(runs):
    """A line for each rule and aim: means over the runs."""
    n_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"\n{n_runs}. Right answers lost, in points of 100, against all passes for everybody; then what the rule "
          "gets right\nbeyond fixed depth and random exits of the same cost; then the passes used, by hops\n"
          "rule     aim   saved   lost                  beyond fixed          beyond random         1 hop, 2 hops, ..")
    for (rule, aim), points in in_all(runs).items():
        savings = [point["saved"] for point in points]
        aim = f"{aim:.0%}" if aim else ""
        line = f"{rule:8s}{aim:>4s}  {np.mean(savings):6.1%}  "
        for more, less in (("full", "accuracy"), ("accuracy", "fixed"), ("accuracy", "random")):
            mean, low, high = gain(points, more, less)
            interval = f"[{low:5.1f}, {high:5.1f}]" if len(runs) > 1 else ""
            line += f"{mean:5.1f} {interval:16s}"
        passes = [point["passes"] for point in points]
        for k in np.mean(passes, axis=0):
            line += f" {k:5.2f}"
        print(line)


def table_rows(names, runs):
    """One row for each run, rule and aim."""
    rows = []
    for name, points in zip(names, runs):
        for (rule, aim), point in points.items():
            row = {"run": name, "rule": rule, "aim": aim}
            for column in ("saved", "full", "accuracy", "fixed", "random"):
                row[column] = round(point[column], 4)
            row["passes"] = " ".join(f"{k:.2f}" for k in point["passes"])
            rows.append(row)
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    add = parser.add_argument
    add("--ckpt", nargs="+", required=True, help="run folders of one shape, other seeds, of train.py --preset=hops")
    add("--examples", type=int, default=512, help="examples of val, and of test (default: 512)")
    add("--device", help="cuda, mps or cpu (default: the first of them that is there)")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--out_dir", default="out/hops-exits", help="folder of exits.png and exits.csv (default: out/hops-exits)")
    a = parser.parse_args(argv)
    require_at_least(a, examples=1, threads=0)
    if a.threads:
        torch.set_num_threads(a.threads)
    out = Path(a.out_dir)
    check_writable("--out_dir", out)
    device = pick_device(a.device)
    runs, shapes = [], []
    for i, ckpt in enumerate(a.ckpt, 1):
        progress(f"run {i} of {len(a.ckpt)}", False)
        model, _, folder, meta = load_on_task(ckpt, device)
        cfg = model.cfg
        if cfg.n_loop < 2 or cfg.n_coda:
            stop(f"--ckpt {ckpt}: {cfg.n_loop} passes and {cfg.n_coda} coda layers, but exits here need a loop and no "
                 "coda")
        shapes.append((asdict(cfg), meta["hops"]))
        if shapes[-1] != shapes[0]:
            stop(f"--ckpt {ckpt}: another shape or number of hops than {a.ckpt[0]}: give runs that differ in their "
                 "seed")
        points, example = measure_run(model, meta, a.examples)
        runs.append(points)
    print_table(runs)
    tokens = load_tokenizer(folder).decode_tokens_bytes(example)
    tokens = [token.decode() for token in tokens]
    plot_hops_exits(in_all(runs), AIM, tokens, meta, cfg.n_loop, out / "exits.png")
    names = [run_folder(ckpt).name for ckpt in a.ckpt]
    write_csv(out / "exits.csv", table_rows(names, runs))
    print(f"wrote exits.png and exits.csv to {out}")


if __name__ == "__main__":
    main()
