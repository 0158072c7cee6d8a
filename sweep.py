"""
Sweeps of train.py: run a list of its commands on all cores, or try a trick.

    python sweep.py try tricks/gate.py                  # does it save compute? 30 runs, 16 min on two idle cores
    python sweep.py try --flags=--inject=add --name=e_plus_h      # a trick that is a flag
    python sweep.py run sweep.sh                        # the commands of a file, such as `fit_law.py plan` prints
    python sweep.py baseline                            # the runs that a trick is paired with: results/baseline_runs.csv

Every command goes on where it was stopped: finished runs are not run again, and `try` and `baseline` also take a run as
done that their table in results/ holds. A grid as a list of commands, `plan`, and a table of any runs, `collect`, are
commands of fit_law.py. Runs of one shape share a process: it imports torch once and compiles the model once.
"""
import argparse
import csv
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

from lib.console import add_command, duration, misused, progress, require_at_least, stop
from lib.files import ROOT, check_writable, read_json, write_atomic

# --- plan ---

# Grids: n_embd for each budget in FLOPs, n_loop and n_expert, the injection where r > 1, what widths are a multiple of,
# the blocks of all passes together (`looped`), the vocabulary, the FLOP/s of the time estimate, and the flags of a run.
POCKET = dict(  # the paper's proportions at half its depth, 1 + 8/r x r + 1; one head, and a core for each run
    widths={6e11: [16, 24, 32, 48], 1.5e12: [16, 24, 32, 48], 3.8e12: [24, 32, 48, 64], 9.6e12: [32, 48, 64, 96],
            2.4e13: [48, 64, 96, 128]},
    loops=[1, 2, 4, 8], experts=[0], inject="linear", multiple=2, looped=8, vocab_size=1024, speed=4e10,
    flags="--preset=pocket --vocab_size=1024 --n_embd={n_embd} --n_head=1 --n_recur={n_recur} --n_loop={n_loop} "
          "--inject={inject} --batch_size=4 --learning_rate=0.02 --eval_interval=0 --eval_tokens=131072 --threads=1")
GRIDS = {
    "paper": dict(  # the 116 runs of arXiv 2604.21106
        widths={4.64e17: [384, 512, 640, 768], 1e18: [384, 512, 640, 768, 896], 2.15e18: [512, 640, 768, 896, 1024],
                4.64e18: [640, 768, 896, 1024, 1152, 1280], 1e19: [768, 1024, 1152, 1280, 1536],
                2.15e19: [1152, 1536, 1792, 2176]},
        loops=[1, 2, 4, 8], experts=[0], inject="linear", multiple=128, looped=16, vocab_size=32064, speed=4e14,
        flags="--preset=isodepth-r{n_loop} --n_embd={n_embd}"),
    "pocket": POCKET,
    "try": dict(POCKET, loops=[1, 2, 4], widths={1.5e12: [32, 48], 3.8e12: [48, 64], 9.6e12: [64]},
                flags=POCKET["flags"] + " --compile=true"),
    "trick": dict(POCKET, loops=[2, 4], widths={6e11: [16, 24, 32], 1.5e12: [24, 32, 48], 3.8e12: [32, 48, 64]}),
    "moe": dict(POCKET,  # base, looped, moe and looped-moe of arXiv 2605.09165: 8 layers, half of them passed twice
        widths={1.5e12: [16, 24, 32, 48], 3.8e12: [24, 32, 48, 64], 9.6e12: [32, 48, 64, 96]}, loops=[1, 2],
        experts=[0, 8], inject="none",
        flags=POCKET["flags"] + " --n_prelude=0 --n_coda=0 --loop_norm=false --n_expert={n_expert}"),
}


def plan_runs(preset, folder, flags="", seeds=(42,), budgets=None, widths=None, loops=None, vocab_size=None):
    """The runs of a grid: a list of (flags of train.py, training FLOPs, FLOPs per token)."""
    from lib.flags import config_of, flops_of, parse  # bring torch along, which the fits do not need
    from lib.tricks import model_class
    grid = GRIDS[preset]
    clash = re.search(r"--(n_embd|n_recur|n_loop|seed|max_flops|out_dir)\b", flags)
    if clash:
        stop(f"--flags: {clash[0]} differs between the runs; use --widths, --loops, --seeds, --budgets and --name")
    shared, _ = parse(shlex.split(flags))
    requires = model_class(shared.trick, shared.trick_args).requires
    of_grid = grid["flags"].format(n_embd=128, n_loop=1, n_recur=grid["looped"], inject="none", n_expert=0)
    before, _ = parse(shlex.split(of_grid))
    after, _ = parse(shlex.split(f"{of_grid} {flags}"))
    moved = after.n_prelude + after.n_coda - before.n_prelude - before.n_coda
    looped = grid["looped"] - moved              # blocks that --flags puts around the loop leave it: equal depth
    planned = []
    for budget in budgets or grid["widths"]:
        at_budget = widths or grid["widths"].get(budget)
        if not at_budget:
            stop(f"--budgets={budget:g}: the {preset} preset has no widths for it: give --widths")
        for d, r, n_expert, seed in product(at_budget, loops or grid["loops"], grid["experts"], seeds):
            if d % grid["multiple"] or looped % r or looped < r:
                stop(f"--widths={d} --loops={r}: {preset} takes multiples of {grid['multiple']} as widths and loop "
                     f"counts that divide its {looped} blocks of all passes")
            inject = requires.get("inject", grid["inject"] if r > 1 else "none")
            n_recur = looped // r
            text = grid["flags"].format(n_embd=d, n_loop=r, n_recur=n_recur, inject=inject, n_expert=n_expert)
            experts = f"-e{n_expert}" if n_expert else ""
            text += f" {flags} --max_flops={budget:g} --seed={seed} " \
                    f"--out_dir=out/{folder}/C{budget:g}-d{d}-r{r}{experts}-s{seed}"
            run_flags = shlex.split(text)
            args, _ = parse(run_flags)  # refuses flags that train.py would refuse
            per_token = flops_of(args, config_of(args, vocab_size or grid["vocab_size"]))
            planned.append((run_flags, budget, per_token))
    return planned


def cmd_plan(args):
    """Print a grid, one train.py command a line."""
    if args.preset in ("trick", "try") and not args.flags:
        stop(f"--preset={args.preset}: name the trick, such as --flags=--trick=tricks/gate.py --name=gate; the loop "
             "without it is --preset=pocket")
    speed = args.speed or GRIDS[args.preset]["speed"]
    planned = plan_runs(args.preset, args.name or f"{args.preset}-sweep", args.flags, args.seeds, args.budgets,
                        args.widths, args.loops, args.vocab_size)
    for flags, budget, per_token in planned:
        print(f"python train.py {shlex.join(flags)}  # F={per_token:.4g} tokens={budget / per_token:.4g} "
              f"~{budget / speed / 60:.3g} min at {speed:.2g} FLOP/s")
    total = sum(budget for _, budget, _ in planned)
    print(f"{len(planned)} runs, {total:.4g} FLOPs: {total / speed / 3600:.3g} hours of a core or GPU", file=sys.stderr)


# --- run ---

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)      # exit status of a run that was stopped by hand
NO_SHAPE = ("--seed", "--max_flops", "--out_dir", "--init_from", "--tie")      # flags that leave the graph as it is


def folder_of(flags):
    from lib.flags import parse
    args, _ = parse(flags)
    return Path(args.out_dir)


def train_in_turn(commands):
    """The work of one process: these runs, lists of flags, of one shape. The log of a run is in its folder. A run that
    fails leaves its reason there, and the next one begins."""
    from lib.flags import parse
    from train import train
    for flags in commands:
        args, explicit = parse(flags)
        folder = Path(args.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        sys.argv = ["train.py", *flags]          # what config.json notes as the command
        with open(folder / "log.txt", "w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                train(args, explicit)
            except SystemExit as e:
                if e.code in STOPPED:
                    raise
            except Exception:                    # a trick may raise anything
                traceback.print_exc()


def share_done(folder, max_flops):
    """How much of a run is done, 0 to 1, by its metrics.csv."""
    if (folder / "summary.json").is_file():
        return 1.0
    try:
        last = (folder / "metrics.csv").read_text().splitlines()[-1]
        return min(1.0, float(last.split(",")[2]) / max_flops)
    except (OSError, IndexError, ValueError):    # not begun, or only the line of names
        return 0.0


def find_unfinished(commands):
    """{folder: (flags, FLOPs)} of the runs, lists of flags of train.py, that still have to be trained. Stops where two of
    them share a folder, or where a folder holds another run than the one that is asked for."""
    from lib.flags import check_same_run, config_of, parse
    from train import plan_steps
    folders, todo = set(), {}
    for flags in commands:
        args, _ = parse(flags)
        plan = plan_steps(args, config_of(args, args.vocab_size or 4096))
        folder = Path(args.out_dir)
        if folder in folders:
            stop(f"--out_dir={folder}: two runs of the list have this folder; give each its own")
        folders.add(folder)
        if (folder / "config.json").is_file():   # all its flags, not only those on the command line
            saved = read_json(folder / "config.json")
            check_same_run(vars(args), saved, saved["data_sha256"], folder, False)
        if not (folder / "summary.json").is_file():
            todo[folder] = flags, plan.steps * plan.flops_per_step
    print(f"{len(commands)} runs, {len(commands) - len(todo)} of them finished before", flush=True)
    return todo


def run_all(todo, jobs):
    """Train the runs of find_unfinished, jobs processes at a time. Stopped by hand, each run saves and resumes the next
    time. A failing run does not keep the others from being trained."""
    groups = {}
    for flags, flops in todo.values():
        shape = tuple(flag for flag in flags if flag.split("=")[0] not in NO_SHAPE)
        commands, size = groups.get(shape, ([], 0))
        groups[shape] = [*commands, flags], size + flops
    queue = [commands for commands, _ in sorted(groups.values(), key=lambda group: -group[1])]

    def work_done():
        return sum(flops * share_done(folder, flops) for folder, (_, flops) in todo.items())
    context = multiprocessing.get_context("spawn")
    total = sum(flops for _, flops in todo.values())
    begin, before, running = time.time(), work_done(), []
    signal.signal(signal.SIGTERM, signal.default_int_handler)                      # ends as Ctrl-C does
    try:
        while queue or running:
            while queue and len(running) < jobs:
                process = context.Process(target=train_in_turn, args=(queue.pop(0),))
                process.start()
                running.append(process)
            time.sleep(1)
            running = [process for process in running if process.is_alive()]
            work = work_done()
            finished = sum((folder / "summary.json").is_file() for folder in todo)
            eta = (time.time() - begin) / max(work - before, 1) * (total - work)
            progress(f"{finished} of {len(todo)} runs, {work / total:.0%} of the FLOPs"
                     + (f", ETA {duration(eta)}" if work > before else ""), keep=False)
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)      # a second one must not break off the saving
        print("\nstopping: every run finishes its step and saves", file=sys.stderr)
        for process in running:
            while process.is_alive():            # again, if a run ended just then and another began
                process.terminate()
                process.join(1)
        print("stopped: the same command goes on from there", file=sys.stderr)
        raise SystemExit(130)
    failed = [folder for folder in todo if not (folder / "summary.json").is_file()]
    if failed:
        log = failed[0] / "log.txt"
        last_words = log.read_text().strip()[-300:] if log.is_file() else "nothing: its process did not even begin"
        stop(f"{len(failed)} of {len(todo)} runs failed; the log.txt of {failed[0]} ends with: {last_words}")
    if todo:
        progress(f"{len(todo)} runs in {duration(time.time() - begin)}", keep=True)


def cmd_run(args):
    """Run the train.py commands of a file, several at a time; finished runs are skipped."""
    runs = []
    try:
        lines = Path(args.file).read_text(encoding="utf-8").splitlines()
        commands = [shlex.split(line, comments=True) for line in lines]
    except (OSError, ValueError) as error:       # not UTF-8 or an open quote are ValueErrors
        stop(f"{args.file}: cannot read it ({error}): give a file that `fit_law.py plan` wrote")
    for words in commands:
        if not words:
            continue
        if words[:2] != ["python", "train.py"]:
            stop(f"{args.file}: {shlex.join(words)[:60]!r} is not a command python train.py --flags: remove it")
        runs.append(words[2:])
    run_all(find_unfinished(runs), args.jobs)


# --- collect ---

SUMMARY = ["sweep", "run", "seed", "n_loop", "n_prelude", "n_recur", "n_coda", "n_embd", "n_expert", "inject", "trick",
           "n_once", "n_rec", "n_total", "tokens", "flops", "val_loss", "val_bpb", "wall_s", "tok_per_s"]


def read_summary(folder):
    """The row of a finished run, {column: value}; None if it is not finished."""
    path = os.path.join(folder, "summary.json")
    try:
        with open(path, encoding="utf-8") as f:
            summary = json.load(f)
        summary["sweep"] = os.path.basename(os.path.dirname(os.path.abspath(folder)))  # out/SWEEP/RUN
        return {key: summary[key] for key in SUMMARY}
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        stop(f"{path} is not a summary of train.py ({type(error).__name__}: {error}): remove it and run again")


def cmd_collect(args):
    """The summary.json files of finished runs as one table, to stdout."""
    rows = []
    for folder in args.folders:
        row = read_summary(folder)
        if row is None:
            print(f"skipped {folder}: it has no summary.json, which a finished run writes", file=sys.stderr)
        else:
            rows.append(row)
    if not rows:
        stop(f"none of the {len(args.folders)} folders holds a finished run: give the --out_dir folders of train.py")
    write_rows(sys.stdout, rows, SUMMARY)


def write_rows(file, rows, columns):
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


# --- try ---
TABLE = [*SUMMARY, "recipe"]  # columns of a table that says what is done already


def recipe_of(flags):
    """A short hash of what makes a run: its flags that are not defaults, but for those that change rounding or nothing,
    and the code of its trick."""
    from lib.flags import DEFAULTS, FREE, parse
    from lib.tricks import code_of, trick_file
    args, _ = parse(flags)
    facts = {name: value for name, value in vars(args).items() if value != DEFAULTS[name]}
    facts = {name: value for name, value in facts.items() if name not in FREE}
    if args.trick:
        facts["trick"] = code_of(trick_file(args.trick))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def read_done(path):
    """{(sweep, run): row} of a table that is extended run by run; empty if there is none yet."""
    if not os.path.isfile(path):
        return {}
    with open(path, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        if reader.fieldnames != TABLE:
            stop(f"{path}: is no table of `try` or `baseline`, whose columns are {','.join(TABLE)}: give another --table")
        return {(row["sweep"], row["run"]): row for row in reader}


def complete_table(path, planned, jobs):
    """Run what the table at path does not hold yet of the planned runs, and add it there."""
    done, runs, recipes = read_done(path), [], {}
    for flags, _, _ in planned:
        folder = folder_of(flags)
        key = folder.parent.name, folder.name
        recipes[key] = recipe_of(flags)
        if key not in done:
            runs.append(flags)
        elif done[key]["recipe"] != recipes[key]:
            stop(f"{path} holds {key[1]} of {key[0]} already, run with other flags or another code of its trick: give "
                 "this one another --name, or remove the rows of the old one and its folder under out/")
    if len(runs) < len(planned):
        print(f"{len(planned) - len(runs)} runs are in {os.path.relpath(path)}")
    if not runs:
        return
    todo = find_unfinished(runs)                 # refuses folders of other runs, whose rows must not come into the table
    try:
        run_all(todo, jobs)
    finally:                                     # what is finished counts, whatever stopped the rest
        done = read_done(path)                   # another `try` may have added its own
        for flags in runs:
            folder = folder_of(flags)
            row = read_summary(folder)
            if row:
                key = folder.parent.name, folder.name
                done[key] = row | {"recipe": recipes[key]}
        text = io.StringIO()
        write_rows(text, done.values(), TABLE)
        write_atomic(Path(path), text.getvalue().encode())


def check_pairs(planned, baseline, curve):
    """Stop, before the work, if a planned looped run has no pair in the baseline."""
    from lib.flags import parse
    from runs import load_runs
    load_runs(curve)
    base = load_runs(baseline)
    columns = [base[key] for key in ("n_embd", "n_loop", "n_expert", "seed")]
    there = set(zip(*columns))
    runs = [parse(flags)[0] for flags, _, _ in planned]
    looped = [a for a in runs if a.n_loop > 1]
    n_pairs = sum((a.n_embd, a.n_loop, a.n_expert, a.seed) in there for a in looped)
    if n_pairs < len(looped):
        stop(f"{baseline} has the same run without the trick for {n_pairs} of the {len(looped)} looped runs only: take "
             "the --seeds, --loops and experts of the baseline, or another --baseline")


def cmd_baseline(args):
    """Train the runs that every trick is paired with, and write their table."""
    check_writable("--table", Path(args.table).parent)
    complete_table(args.table, plan_runs("try", "baseline", seeds=args.seeds), args.jobs)


def cmd_try(args):
    """Train the grid with a trick, and say whether it saves compute against the same runs without it."""
    from verdict import judge_tables
    if bool(args.trick) == bool(args.flags):
        stop("try: give either the file of a trick, such as tricks/gate.py, or --flags with --name")
    name = args.name or Path(args.trick).stem
    if not re.fullmatch(r"[\w.+-]+", name) or name == "baseline":
        stop(f"--name={name}: give the trick a name of letters, digits, _ and -, under which the scoreboard lists it")
    check_writable("--table", Path(args.table).parent)
    flags = args.flags
    if args.trick:
        flags = shlex.join([f"--trick={args.trick}", f"--trick_args={args.trick_args}"])
    planned = plan_runs("try", name, flags, args.seeds, loops=args.loops)
    check_pairs(planned, args.baseline, args.curve)
    complete_table(args.table, planned, args.jobs)
    judge_tables(args.baseline, args.table, curve=args.curve, only=name, scoreboard=args.scoreboard)


# --- command line ---

def parse_args():
    from lib.machine import default_jobs
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Sweeps: try a trick, or run a list of commands")
    parser.error = misused
    commands = parser.add_subparsers(required=True)

    results = ROOT / "results"
    seeds = dict(type=int, nargs="+")
    baseline = str(results / "baseline_runs.csv")
    add = add_command(commands, cmd_try, "train the grid with a trick, pair it with the baseline, print the verdict")
    add("trick", "file of the trick, such as tricks/gate.py", nargs="?", default="")
    add("--trick_args", "its options, name=value,...", default="")
    add("--flags", "instead of a file: flags of train.py that are the trick", default="", metavar="'--a=1 --b=2'")
    add("--name", "of the trick in the tables (default: that of its file)", default="")
    add("--seeds", "a run for each (default 42 43; the baseline has 44 as well)", default=[42, 43], **seeds)
    add("--loops", "n_loop (default 1 2 4); 1 alone adds the plain model to a trick that was tried before", type=int,
        nargs="+")
    add("--baseline", "table of the runs without it (default results/baseline_runs.csv)", default=baseline)
    add("--curve", "table that says how the baseline's loss falls with compute (default results/pocket_runs.csv)",
        default=str(results / "pocket_runs.csv"))
    add("--table", "table of the runs with tricks (default results/try_runs.csv)", default=str(results / "try_runs.csv"))
    add("--scoreboard", "table of verdicts (default results/tricks.csv)", default=str(results / "tricks.csv"))
    add = add_command(commands, cmd_baseline, "train the runs without a trick")
    add("--seeds", "a run for each (default 42 43 44)", default=[42, 43, 44], **seeds)
    add("--table", "where they go (default results/baseline_runs.csv)", default=baseline)
    add = add_command(commands, cmd_run, "run a list of train.py commands on all cores")
    add("file", "one command a line, as `fit_law.py plan` prints them")
    for sub in commands.choices.values():
        sub.add_argument("--jobs", help="runs side by side (default: one per core, or one on a GPU)", type=int)
    args = parser.parse_args()
    args.jobs = default_jobs() if args.jobs is None else args.jobs
    require_at_least(args, jobs=1)
    return args


def main():
    args = parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
