"""
Tables of runs: read one, check it, count its parameters by a convention. The fits and the verdict start here.
"""
import csv

import numpy as np

from law import FORMS
from lib.console import stop

SAME_BUDGET = 1.1  # runs whose FLOPs differ by less than this factor share a budget: each rounds it to whole steps

# --- reading runs ---

ALIASES = {"C_flops": "flops", "r": "n_loop", "d_model": "n_embd", "N_once": "n_once", "N_rec": "n_rec",
           "D_tokens": "tokens", "val_loss_nats": "val_loss",  # names in the digitised tables
           "N": "n_rec", "D": "tokens", "C": "flops", "loss": "val_loss"}  # and in tables of plain models
REQUIRED = ["n_loop", "n_once", "n_rec", "tokens", "val_loss", "n_embd", "flops"]
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
        stop(f"cannot read {path} ({getattr(error, 'strerror', 'it is not UTF-8')}): {source}")
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


def complete_plain(names, rows):
    """Fill up a table of plain models, which has N, D and loss and perhaps C: runs with r = 1, all of whose parameters
    are in N_rec. Without C, C = 6 N D. Width and seed are not known: the rank of N and the line number tell the runs
    apart."""
    if {"n_loop", "n_once", "n_embd"} & set(names) or not {"n_rec", "tokens", "val_loss"} <= set(names):
        return names
    sizes = sorted({number(row["n_rec"]) for row in rows.values()})
    for line, row in rows.items():
        size = number(row["n_rec"])
        flops = 6 * size * number(row["tokens"])
        rank = sizes.index(size) + 1 if size in sizes else 1                       # not a number: refused below
        row |= {"n_loop": "1", "n_once": "0", "n_embd": str(rank), "seed": str(line)}
        row.setdefault("flops", f"{flops:.6g}")
    return [*names, *(k for k in ("n_loop", "n_once", "n_embd", "seed", "flops") if k not in names)]


def load_runs(path, convention="written"):
    """A table of runs as a dict of columns (n,), checked, with N_once and N_rec counted by the convention. A table of
    plain models needs the columns N, D and loss only.

    Adds `budget`, the nominal FLOPs, and the columns OPTIONAL and inject that the table leaves out.
    """
    names, rows = read_rows(path, "give a table made by `collect`, or one of data/isodepth*.csv")
    names = complete_plain(names, rows)
    missing = [k for k in REQUIRED if not rows or k not in names]
    if missing:
        stop(f"{path} has no runs or lacks the column {', '.join(missing)}: make it with `collect out/* > runs.csv`, or "
             "give the runs of plain models as columns N, D and loss")
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


def load_tables(paths, convention="written"):
    """load_runs of several tables as one, with the columns that all of them have."""
    tables = [load_runs(path, convention) for path in paths]
    columns = set.intersection(*(set(table) for table in tables))
    runs = {key: np.concatenate([table[key] for table in tables]) for key in tables[0] if key in columns}
    runs["budget"] = nominal_budgets(runs["flops"])
    identities = set(zip(*(runs[key] for key in IDENTITY)))
    if len(identities) < len(runs["budget"]):
        stop(f"{' and '.join(map(str, paths))} hold a run twice (same {', '.join(IDENTITY)}): keep one of them")
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
