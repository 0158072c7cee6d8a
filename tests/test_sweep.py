"""sweep.py: a list of runs on all cores, a table that says what is done, and one command from a trick to a verdict."""
import csv
import json
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

import sweep as S
import verdict as V
from lib.files import ROOT
from lib.flags import parse
from lib.tricks import model_class


@pytest.fixture
def command(call_main):
    """sweep.py with these arguments."""
    return partial(call_main, S)


def summary_of(folder, val_loss, **changes):
    """Write the summary that a finished run of these flags would have."""
    flags = dict(part[2:].split("=", 1) for part in changes.pop("flags"))
    row = dict.fromkeys(S.SUMMARY[1:], 0) | dict(
        run=folder.name, seed=int(flags["seed"]), n_loop=int(flags["n_loop"]), n_prelude=1, n_coda=1, trick="",
        n_recur=int(flags["n_recur"]), n_embd=int(flags["n_embd"]), inject=flags["inject"], n_once=1000, n_rec=9000,
        n_total=10000, tokens=1000, flops=float(flags["max_flops"]), val_loss=val_loss)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(row | changes))


# --- the grid ---

def test_grid_of_a_trick_has_the_seeds_and_names_of_the_baseline():
    """A pair is two runs of one name, so they read the same batches from the same first weights."""
    baseline = {S.folder_of(flags).name: flags for flags, _, _ in S.plan_runs("try", "baseline", seeds=[42, 43, 44])}
    trick = S.plan_runs("try", "vector", "--trick=tricks/pass_vector.py", seeds=[42, 43])
    assert len(baseline) == 45 and len(trick) == 30
    for flags, budget, _ in trick:
        other = baseline[S.folder_of(flags).name]
        args, pair = parse(flags)[0], parse(other)[0]
        assert (args.seed, args.max_flops, args.n_embd, args.n_loop) == (pair.seed, pair.max_flops, pair.n_embd, pair.n_loop)
        differ = {name for name in vars(args) if getattr(args, name) != getattr(pair, name)}
        assert differ == {"trick", "out_dir"}
    required = model_class("tricks/boundary.py", "").requires
    runs = [parse(flags)[0] for flags, _, _ in S.plan_runs("try", "boundary", "--trick=tricks/boundary.py")]
    assert {(args.inject, args.n_loop) for args in runs} >= {(required["inject"], 1), (required["inject"], 4)}


@pytest.mark.parametrize("flags, blocks", [("--n_prelude=3 --n_coda=3", 4), ("--n_prelude=5", 4), ("--bptt=1", 8)])
def test_blocks_that_flags_put_around_the_loop_leave_it(flags, blocks):
    """A try compares models of equal depth."""
    planned = [parse(run)[0] for run, _, _ in S.plan_runs("try", "place", flags)]
    assert {args.n_prelude + args.n_recur * args.n_loop + args.n_coda for args in planned} == {10}
    assert {args.n_recur * args.n_loop for args in planned} == {blocks}


# --- what is done ---

def test_runs_in_the_table_are_not_run_again_and_finished_ones_are_added(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planned = S.plan_runs("try", "baseline", seeds=[42])
    asked = []

    def train_half(todo, jobs):
        """Finishes every second run, then fails."""
        asked.append(len(todo))
        for folder, (flags, _) in list(todo.items())[::2]:
            summary_of(folder, 4.0, flags=flags)
        raise SystemExit(2)
    monkeypatch.setattr(S, "run_all", train_half)
    for _ in range(4):
        with pytest.raises(SystemExit):
            S.complete_table(tmp_path / "runs.csv", planned, jobs=2)
    S.complete_table(tmp_path / "runs.csv", planned, jobs=2)
    assert asked == [15, 7, 3, 1]                          # what is done already is left out; at the end all of it is
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(rows) == 15 and {row["sweep"] for row in rows} == {"baseline"}
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        S.complete_table(tmp_path / "runs.csv", planned, jobs=2)
    assert "is no table of" in capsys.readouterr().err


def test_committed_runs_are_those_of_the_committed_tricks():
    """`try` takes them as done: their flags, and the code of their files, have not changed since."""
    done = S.read_done(ROOT / "results" / "try_runs.csv")
    names = {name for name, _ in done if (ROOT / "tricks" / f"{name}.py").is_file()}
    assert len(names) > 5
    for name in names:
        for flags, _, _ in S.plan_runs("try", name, f"--trick=tricks/{name}.py", seeds=[42, 43, 44]):
            row = done.get((name, S.folder_of(flags).name))
            assert row is None or row["recipe"] == S.recipe_of(flags), name


def test_another_trick_of_the_same_name_is_not_taken_as_done(tmp_path, monkeypatch, capsys):
    """Other options, or other code: neither the table nor a folder counts as done. A docstring may say more by then."""
    monkeypatch.chdir(tmp_path)
    trick = tmp_path / "mine.py"
    trick.write_text((ROOT / "tricks" / "pass_vector.py").read_text())
    planned = S.plan_runs("try", "mine", f"--trick={trick}", seeds=[42])

    def train(todo, jobs):
        for folder, (flags, _) in todo.items():
            summary_of(folder, 4.0, flags=flags)
    monkeypatch.setattr(S, "run_all", train)
    S.complete_table(tmp_path / "runs.csv", planned, jobs=2)
    S.complete_table(tmp_path / "runs.csv", planned, jobs=2)       # the same once more is fine
    trick.write_text(trick.read_text().replace('"""', '"""Measured: nothing.', 1) + "\n# a comment\n")
    S.complete_table(tmp_path / "runs.csv", planned, jobs=2)
    trick.write_text(trick.read_text() + "\nchanged = True\n")
    with pytest.raises(SystemExit):
        S.complete_table(tmp_path / "runs.csv", S.plan_runs("try", "mine", f"--trick={trick}", seeds=[42]), jobs=2)
    assert "another code of its trick" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        S.complete_table(tmp_path / "runs.csv", S.plan_runs("try", "mine", "--bptt=1", seeds=[42]), jobs=2)
    assert "--name" in capsys.readouterr().err


def test_try_says_what_a_trick_saves_and_puts_it_on_the_scoreboard(tmp_path, monkeypatch, command):
    """The trick's runs are the baseline's with losses lower by 0.05 nats at r > 1 and 0.02 at r = 1."""
    monkeypatch.chdir(tmp_path)
    table = ROOT / "results" / "baseline_runs.csv"
    losses = {row["run"]: row for row in csv.DictReader(table.open())}

    def train(todo, jobs):
        for folder in todo:
            row = dict(losses[folder.name], trick="gate")
            del row["sweep"], row["recipe"]
            gain = 0.05 if int(row["n_loop"]) > 1 else 0.02
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps(row | {"val_loss": float(row["val_loss"]) - gain}))
    monkeypatch.setattr(S, "run_all", train)
    files = [f"--table={tmp_path / 'try.csv'}", f"--scoreboard={tmp_path / 'tricks.csv'}"]
    trick = ROOT / "tricks" / "gate.py"
    done = command("try", trick, *files)
    assert done.returncode == 0, done.stderr
    line, = csv.DictReader((tmp_path / "tricks.csv").open())
    assert (line["trick"], line["decided"], line["pairs"]) == ("gate", "better", "20")
    assert float(line["nats"]) == pytest.approx(-0.05) and float(line["share"]) > 1
    assert 1 < float(line["plain"]) < float(line["multiplier"])
    assert "gate: saves" in done.stdout and "the trick in a plain model, r = 1: saves" in done.stdout
    assert (tmp_path / "tricks.png").stat().st_size > 10_000
    monkeypatch.setattr(S, "run_all", None)                # all runs are in the table: nothing is run
    again = command("try", trick, *files)
    assert again.returncode == 0 and again.stdout.count("gate: saves") == 1
    assert (tmp_path / "tricks.csv").read_text().count("gate") == 1


def test_scoreboard_comes_out_again_from_the_committed_tables(tmp_path, cli):
    for old in csv.DictReader((ROOT / "results" / "tricks.csv").open()):
        base, runs = ROOT / "results" / old["baseline"], ROOT / "results" / old["runs"]
        if not (tmp_path / f"{old['runs']}.csv").is_file():
            curve = ["--curve", ROOT / "results" / "pocket_runs.csv"]
            done = cli("verdict", base, runs, *curve, f"--scoreboard={tmp_path / old['runs']}.csv")
            assert done.returncode == 0, done.stderr
        new = {row["trick"]: row for row in csv.DictReader((tmp_path / f"{old['runs']}.csv").open())}
        assert new[old["trick"]] == old


def test_a_trick_has_one_line_on_the_scoreboard_that_of_more_pairs(tmp_path, cli):
    """e + h and the gate were run on two grids; whichever is judged last, the one with 20 pairs stays."""
    results = ROOT / "results"
    older, newer = ("pocket_runs.csv", "trick_runs.csv"), ("baseline_runs.csv", "try_runs.csv")
    for order in ((older, newer), (newer, older)):
        board = tmp_path / f"{order[0][0]}.csv"
        for base, runs in order:
            done = cli("verdict", results / base, results / runs, "--curve", results / "pocket_runs.csv",
                       f"--scoreboard={board}")
            assert done.returncode == 0, done.stderr
        rows = list(csv.DictReader(board.open()))
        assert len({row["trick"] for row in rows}) == len(rows)
        pairs = {row["trick"]: (row["pairs"], row["runs"]) for row in rows}
        assert pairs["gate"] == pairs["e_plus_h"] == ("20", "try_runs.csv") and pairs["no_injection"] == ("18", "trick_runs.csv")


@pytest.mark.parametrize("flags, why", [
    (["try"], "either the file of a trick"), (["try", "tricks/gate.py", "--flags=--bptt=1"], "either the file"),
    (["try", "--flags=--bptt=1"], "--name"), (["try", "tricks/nosuch.py"], "nosuch"),
    (["try", "--flags=--n_loop=2", "--name=x"], "--loops"), (["run", "nosuch.sh"], "nosuch.sh"),
    (["try", "tricks/gate.py", "--name=a/b"], "--name=a/b"), (["try", "tricks/gate.py", "--name=baseline"], "--name"),
    (["try", "--flags=--n_expert=8", "--name=x"], "for 0 of the 20 looped"), (["try", "tricks/gate.py", "--seeds", "7"], "--seeds"),
    (["try", "tricks/gate.py", "--curve=nosuch.csv"], "nosuch.csv"), (["baseline", "--jobs=0"], "--jobs=0"), (["try", "tricks/gate.py", "--table=/dev/null/x.csv"], "--table")])
def test_bad_input_is_one_sentence(flags, why, command):
    done = command(*flags)
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("text, why", [
    ("rm -rf out", "rm -rf out"), ("python train.py '--seed=1", "list.sh"), ("python train.py --nosuch=1", "--nosuch"),
    ("python train.py --n_loop=2\npython train.py --n_loop=4", "out/laptop")])
def test_a_file_of_other_commands_is_refused(text, why, tmp_path, command):
    (tmp_path / "list.sh").write_text(text)
    done = command("run", tmp_path / "list.sh")
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1


# --- the runs themselves ---

@pytest.mark.slow
def test_runs_of_one_shape_in_one_process_equal_single_runs(tiny, tmp_path, run):
    """Two seeds of one shape, compiled, and another shape; the same by train.py; then nothing is left to do."""
    for place in ("together", "alone"):
        lines = [[*tiny(f"--seed={seed}", "--compile=true", f"--n_loop={r}", out=f"{place}/r{r}-s{seed}")]
                 for r, seed in ((4, 1), (4, 2), (2, 1))]
        if place == "alone":
            for flags in lines:
                done = run("train.py", *flags)
                assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        else:
            commands = "\n".join("python train.py " + shlex.join(flags) + "  # a comment" for flags in lines)
            (tmp_path / "list.sh").write_text(commands)
            done = run("sweep.py", "run", tmp_path / "list.sh", "--jobs=2")
            assert done.returncode == 0, done.stderr
            assert "3 runs, 0 of them finished before" in done.stdout
            again = run("sweep.py", "run", tmp_path / "list.sh")
            assert again.returncode == 0 and "3 of them finished before" in again.stdout
    for name in ("r4-s1", "r4-s2", "r2-s1"):
        one, other = (json.loads((tmp_path / place / name / "summary.json").read_text()) for place in ("together", "alone"))
        assert one["val_loss"] == other["val_loss"]
    log = (tmp_path / "together" / "r4-s2" / "log.txt").read_text()
    assert "bits/byte" in log and "warning" not in log


@pytest.mark.slow
def test_a_compiled_run_resumes_as_if_unbroken(tiny, tmp_path, run):
    same = ["--compile=true", "--schedule=constant", "--seed=3"]
    for flags in (tiny(*same, out="whole"), tiny(*same, "--max_steps=10", out="parts"),
                  tiny(*same, "--resume=true", out="parts")):
        done = run("train.py", *flags)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    whole, parts = (torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(parts[name], matrix) for name, matrix in whole.items())


@pytest.mark.slow
def test_a_failing_run_ends_the_sweep_with_its_last_words(tiny, tmp_path, run):
    bad = tiny("--learning_rate=1e6", "--grad_clip=0", "--seed=1", out="bad")
    good = tiny("--seed=2", out="good")
    (tmp_path / "list.sh").write_text("\n".join("python train.py " + shlex.join(flags) for flags in (bad, good)))
    done = run("sweep.py", "run", tmp_path / "list.sh")
    assert done.returncode == 2 and "1 of 2 runs failed" in done.stderr and "not finite" in done.stderr
    assert (tmp_path / "good" / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_saves_and_goes_on(number, tiny, tmp_path):
    """Stopped in the middle of two long runs, no process is left, and the same command resumes them."""
    lines = [shlex.join(["python", "train.py", *tiny(f"--seed={seed}", "--max_steps=3000", "--eval_interval=0",
                                                     "--log_interval=10", out=f"s{seed}")]) for seed in (1, 2)]
    (tmp_path / "list.sh").write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "sweep.py"), "run", str(tmp_path / "list.sh")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.time() + 120
    while not S.share_done(tmp_path / "s1", 1e30) and time.time() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on from there" in err
    assert (tmp_path / "s1" / "ckpt.pt").is_file() and not (tmp_path / "s1" / "summary.json").is_file()
    begun = torch.load(tmp_path / "s1" / "ckpt.pt", weights_only=True)["step"]
    rows = (tmp_path / "s1" / "metrics.csv").read_text().count("\n")
    time.sleep(1)
    assert 0 < begun < 3000 and (tmp_path / "s1" / "metrics.csv").read_text().count("\n") == rows


def test_a_sweep_without_pairs_is_refused_unless_it_only_adds_plain_models():
    base, curve = (str(ROOT / "results" / f"{name}_runs.csv") for name in ("baseline", "pocket"))
    S.check_pairs(S.plan_runs("try", "gate", seeds=[42], loops=[2, 4]), base, curve)
    S.check_pairs(S.plan_runs("try", "gate", seeds=[42], loops=[1]), base, curve)
    with pytest.raises(SystemExit):              # the baseline has no seed 50
        S.check_pairs(S.plan_runs("try", "gate", seeds=[50], loops=[2, 4]), base, curve)


def test_share_done(tmp_path):
    assert S.share_done(tmp_path, 100) == 0
    (tmp_path / "metrics.csv").write_text("step,tokens,flops\n")
    assert S.share_done(tmp_path, 100) == 0
    (tmp_path / "metrics.csv").write_text("step,tokens,flops\n1,10,25\n2,20,50\n")
    assert S.share_done(tmp_path, 100) == 0.5
    (tmp_path / "summary.json").touch()
    assert S.share_done(tmp_path, 100) == 1


def test_verdict_table_columns_are_those_of_the_picture():
    line = V.score_line("x", dict(decided="better", pairs=6, n_loop=[2], budget=[1], seed=[42], multiplier=1.1,
                                  multiplier_ci=[1.0, 1.2], tokens=1.5), ("a.csv", "b.csv"))
    assert list(line) == V.COLUMNS and line["plain"] == "" and line["multiplier_low"] == "1.0000" and line["tokens"] == "1.5000"
