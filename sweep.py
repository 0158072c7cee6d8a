"""
Sweeps of train.py: print one as a list of commands, collect its finished runs into a table, read such a table and count
its parameters by a convention. The commands are fit_law.py's `plan` and `collect`.
"""
import csv
import json
import os
import re
import shlex
import sys
from itertools import product

import numpy as np

from law import FORMS
from lib.console import stop

SAME_BUDGET = 1.1  # runs whose FLOPs differ by less than this factor share a budget: each rounds it to whole steps


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
    "trick": dict(POCKET, loops=[2, 4], widths={6e11: [16, 24, 32], 1.5e12: [24, 32, 48], 3.8e12: [32, 48, 64]}),
    "moe": dict(POCKET,  # base, looped, moe and looped-moe of arXiv 2605.09165: 8 layers, half of them passed twice
        widths={1.5e12: [16, 24, 32, 48], 3.8e12: [24, 32, 48, 64], 9.6e12: [32, 48, 64, 96]}, loops=[1, 2],
        experts=[0, 8], inject="none",
        flags=POCKET["flags"] + " --n_prelude=0 --n_coda=0 --loop_norm=false --n_expert={n_expert}"),
}


def cmd_plan(args):
    """Print a grid, one train.py command a line."""
    from lib.flags import config_of, flops_of, parse  # bring torch along, which the fits do not need
    from lib.tricks import model_class
    grid = GRIDS[args.preset]
    if args.preset == "trick" and not args.flags:
        stop("--preset=trick: name the trick, such as --flags=--trick=tricks/gate.py --name=gate; the loop without it "
             "is --preset=pocket")
    clash = re.search(r"--(n_embd|n_recur|n_loop|seed|max_flops|out_dir)\b", args.flags)
    if clash:
        stop(f"--flags: {clash[0]} differs between the runs; use --widths, --loops, --seeds, --budgets and --name")
    shared, _ = parse(shlex.split(args.flags))
    requires = model_class(shared.trick, shared.trick_args).requires
    speed, vocab_size = args.speed or grid["speed"], args.vocab_size or grid["vocab_size"]
    folder = args.name or f"{args.preset}-sweep"
    lines, total = [], 0
    for budget in args.budgets or grid["widths"]:
        widths = args.widths or grid["widths"].get(budget)
        if not widths:
            stop(f"--budgets={budget:g}: the {args.preset} preset has no widths for it: give --widths")
        for d, r, n_expert, seed in product(widths, args.loops or grid["loops"], grid["experts"], args.seeds):
            if d % grid["multiple"] or grid["looped"] % r:
                stop(f"--widths={d} --loops={r}: {args.preset} takes multiples of {grid['multiple']} as widths and "
                     f"loop counts that divide {grid['looped']}")
            inject = requires.get("inject", grid["inject"] if r > 1 else "none")
            n_recur = grid["looped"] // r
            flags = grid["flags"].format(n_embd=d, n_loop=r, n_recur=n_recur, inject=inject, n_expert=n_expert)
            experts = f"-e{n_expert}" if n_expert else ""
            flags += f" {args.flags} --max_flops={budget:g} --seed={seed} " \
                     f"--out_dir=out/{folder}/C{budget:g}-d{d}-r{r}{experts}-s{seed}"
            run, _ = parse(shlex.split(flags))  # refuses flags that train.py would refuse
            F = flops_of(run, config_of(run, vocab_size))
            lines.append(f"python train.py {' '.join(flags.split())}  # F={F:.4g} tokens={budget / F:.4g} "
                         f"~{budget / speed / 60:.3g} min at {speed:.2g} FLOP/s")
            total += budget
    print("\n".join(lines))
    print(f"{len(lines)} runs, {total:.4g} FLOPs: {total / speed / 3600:.3g} hours of a core or GPU", file=sys.stderr)


SUMMARY = ["sweep", "run", "seed", "n_loop", "n_prelude", "n_recur", "n_coda", "n_embd", "n_expert", "inject", "trick",
           "n_once", "n_rec", "n_total", "tokens", "flops", "val_loss", "val_bpb", "wall_s", "tok_per_s"]


def cmd_collect(args):
    """The summary.json files of finished runs as one table, to stdout."""
    rows = []
    for folder in args.folders:
        path = os.path.join(folder, "summary.json")
        try:
            with open(path, encoding="utf-8") as f:
                summary = json.load(f)
            sweep = os.path.basename(os.path.dirname(os.path.abspath(folder)))  # out/SWEEP/RUN
            summary.setdefault("trick", "")      # a run of an earlier version
            rows.append([sweep, *(summary[k] for k in SUMMARY[1:])])
        except OSError:
            print(f"skipped {folder}: it has no summary.json, which a finished run writes", file=sys.stderr)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            stop(f"{path} is not a summary of train.py ({type(error).__name__}: {error}): remove it and run again")
    if not rows:
        stop(f"none of the {len(args.folders)} folders holds a finished run: give the --out_dir folders of train.py")
    csv.writer(sys.stdout, lineterminator="\n").writerows([SUMMARY, *rows])


# --- reading runs ---

ALIASES = {"C_flops": "flops", "r": "n_loop", "d_model": "n_embd", "N_once": "n_once", "N_rec": "n_rec",
           "D_tokens": "tokens", "val_loss_nats": "val_loss"}  # names in the digitised tables
REQUIRED = ["flops", "n_loop", "n_embd", "n_once", "n_rec", "tokens", "val_loss"]
OPTIONAL = dict(sweep="", trick="", n_expert=0.0, seed=0.0)  # columns that some tables leave out, besides inject
WHOLE = ["n_loop", "n_embd", "n_prelude", "n_recur", "n_coda", "n_expert", "seed"]
TEXT = ["sweep", "run", "inject", "trick"]  # a sweep called 7 is a name
IDENTITY = ["sweep", "budget", "n_loop", "n_expert", "inject", "trick", "n_embd", "seed"]  # runs differ in one of these


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return np.nan


def read_rows(path, source):
    """The column names of a CSV file and {line number: {column: text}}; stops where a cell's column is in doubt.

    source: what the error says about where such a file comes from.
    """
    lines, line = {}, 1
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            reader = csv.reader(f, strict=True)
            for cells in reader:
                if cells:  # not a blank line
                    lines[line] = [cell.strip() for cell in cells]
                line = reader.line_num + 1
    except csv.Error as error:
        stop(f"{path} line {line} is not CSV ({error}): repair that line")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}): {source}")
    if not lines:
        return [], {}
    top = min(lines)
    names = [ALIASES.get(name, name) for name in lines.pop(top)]
    if "" in names:
        stop(f"{path} line {top}: column {names.index('') + 1} has no name: name it or remove it")
    for name in names:
        if names.count(name) > 1:
            stop(f"{path} line {top}: {names.count(name)} columns hold {name}: keep one of them")
    for line, cells in lines.items():
        if len(cells) != len(names):
            stop(f"{path} line {line} has {len(cells)} cells, but there are {len(names)} columns: repair or remove it, "
                 "and write numbers without a comma")
    return names, {line: dict(zip(names, cells)) for line, cells in lines.items()}


def load_runs(path, convention="written"):
    """A table of runs as a dict of columns (n,), checked, with N_once and N_rec counted by the convention.

    Adds `budget`, the nominal FLOPs, and the columns OPTIONAL and inject that the table leaves out.
    """
    names, rows = read_rows(path, "give a table made by `collect`, or one of data/isodepth*.csv")
    missing = [k for k in REQUIRED if not rows or k not in names]
    if missing:
        stop(f"{path} has no runs or lacks the column {', '.join(missing)}: make it with `collect out/* > runs.csv`")
    for line, row in rows.items():
        for key in REQUIRED:
            value = number(row[key])
            if not (0 < value < np.inf or value == 0 and key == "n_once"):  # NaN fails both
                stop(f"{path} line {line}: {key} is {row[key]!r}, not a positive number: repair or remove that run")
        for key in WHOLE:
            if key in row and not number(row[key]) % 1 == 0:  # NaN is not equal
                stop(f"{path} line {line}: {key} is {row[key]!r}, not a whole number: repair or remove that run")
        if row.get("inject") == "":
            stop(f"{path} line {line}: inject is empty: write none, linear or what the run had")
    runs = {key: np.full(len(rows), value) for key, value in OPTIONAL.items()}
    for key in names:
        texts = np.array([row[key] for row in rows.values()])
        values = np.array([number(text) for text in texts])
        runs[key] = texts if key in TEXT or np.isnan(values).any() else values
    if "inject" not in names:
        runs["inject"] = np.where(runs["n_loop"] > 1, "linear", "none")
    runs["budget"] = nominal_budgets(runs["flops"])
    first = {}
    for line, key in zip(rows, zip(*(runs[k] for k in IDENTITY))):
        if first.setdefault(key, line) != line:
            stop(f"{path} lines {first[key]} and {line} are one run (same {', '.join(IDENTITY)}): keep one of them")
    if convention == "page" and not ({"n_prelude", "n_recur", "n_coda"} <= runs.keys() and np.all(
            runs["n_prelude"] + runs["n_loop"] * runs["n_recur"] + runs["n_coda"] == 20)):
        stop(f"--convention=page holds for the paper's grid of 20 layers only and {path} is another: use written")
    has_matrix = (runs["inject"] == "linear") & (runs["sweep"] != "hyperconnect")
    matrix = 2 * runs["n_embd"] ** 2 * has_matrix
    for line, size, rec in zip(rows, matrix, runs["n_rec"]):
        if rec <= size:
            stop(f"{path} line {line}: n_rec is {rec:g}, but its injection matrix alone has {size:g}: repair that run")
    runs["n_once"], runs["n_rec"] = count_parameters(runs["n_once"], runs["n_rec"], matrix, runs["n_embd"],
                                                     runs["n_loop"], convention)
    return runs


# Where the injection matrix W (d x 2d) is counted: phi depends on it, N_eff/N(r=1) hardly does.
CONVENTIONS = {"written": "injection matrix in N_rec, the formula the paper prints",
               "inj_once": "injection matrix in N_once",
               "page": "the counts behind the published 0.459",
               "no_inj": "injection matrix not counted"}


def count_parameters(once, rec, inj, d, r, convention):
    """(N_once, N_rec) of the law, from matrix parameters of which rec includes the injection matrix inj."""
    if convention == "page":  # a straight line through N = 240, 146, 98, 74 d^2 against 16/r
        block = 1363 / 115 * d ** 2
        return 139.5 * d ** 2 - 7.5 * block, 16 / r * block
    return (once + inj if convention == "inj_once" else once), (rec if convention == "written" else rec - inj)


def nominal_budgets(flops):
    """Each run's budget: the median FLOPs, to three digits, of the runs within SAME_BUDGET of the cheapest of them."""
    budget, rest = np.empty(len(flops)), np.ones(len(flops), bool)
    while rest.any():
        group = rest & (flops < SAME_BUDGET * flops[rest].min())
        budget[group] = float(f"{np.median(flops[group]):.2e}")
        rest &= ~group
    return budget


def select(runs, mask):
    return {k: v[mask] for k, v in runs.items()}


def at_budgets(runs, budgets, path):
    """The runs at these training FLOPs, each within SAME_BUDGET of one; stops at a budget without a run."""
    ratio = runs["budget"][:, None] / budgets  # (n, budgets on the command line)
    near = np.abs(np.log(ratio)) < np.log(SAME_BUDGET)
    for budget, present in zip(budgets, near.any(0)):
        if not present:
            names = ", ".join(f"{b:g}" for b in np.unique(runs["budget"]))
            stop(f"--budgets={budget:g}: {path} has {names}")
    return select(runs, near.any(1))


# --- can a law be fitted to them? ---

def loops_needed(form, loops):
    """How many different loop counts a fit of this form needs."""
    return max(2, len(loops)) if form == "free" else 1 + len(FORMS[form][0])


def check_fittable(runs, path, form):
    n, loops = len(runs["val_loss"]), np.unique(runs["n_loop"])
    if n < 10:
        stop(f"{path} has {n} runs but the law has 6 parameters: at least 10 runs are needed")
    if np.ptp(runs["val_loss"]) == 0:
        stop(f"{path}: all runs have the loss {runs['val_loss'][0]:g}, so there is nothing to fit: check val_loss")
    looped = runs["n_loop"] > 1
    for key in ("sweep", "n_expert", "inject", "trick"):
        kinds, plain = set(runs[key][looped]), set(runs[key][~looped])
        # r=1 without injection or trick serves every sweep, injection and trick, but only its own n_expert
        serves_all = len(plain) == 1 if key == "sweep" else plain == {dict(inject="none", trick="").get(key)}
        if not serves_all:
            kinds |= plain
        if len(kinds) > 1:
            names = ", ".join(f"{kind:g}" if key == "n_expert" else kind or "none" for kind in sorted(kinds))
            stop(f"{path} mixes {key} {names}: keep the runs of one {key} in the file, or use `compare`")
    needed = loops_needed(form, loops)
    if needed > len(loops):
        stop(f"{path} has only n_loop {', '.join(f'{r:g}' for r in loops)}, so the recurrence term of --form={form} is "
             f"not identifiable: add runs with {needed - len(loops)} more n_loop, or use --form=none")
