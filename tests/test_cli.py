"""Every command of the README and of the pages it sends to, as a user types it (long ones with fewer steps); links, length."""
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

import bench
import train as T
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("data/*.md"), *ROOT.glob("results/*.md"), *ROOT.glob("tricks/*.md")]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def blocks_of(text, language):
    """The commands in the blocks of a language, without their comments."""
    lines = "".join(re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.S | re.M)).splitlines()
    commands = [line.split(" #")[0].strip() for line in lines if not line.strip().startswith("#")]
    return [command for command in dict.fromkeys(commands) if command]


PYTHON = [c for c in blocks_of(TEXT, "sh") if c.startswith("python ")]
BIG = [c for c in blocks_of(TEXT, "text") if "train.py" in c]
SHORT = {"train.py": ["--max_steps=2", "--eval_tokens=512", "--n_embd=64", "--batch_size=2", "--device=cpu"],
         "bench.py": ["--rounds=1", "--n_embd=64", "--batch_size=1", "--block_size=32"], "routing_study.py": ["--tokens=512"],
         "early_exit.py": ["--tokens=256", "--rounds=1", "--max_new_tokens=8", "--device=cpu"],
         "downstream.py": ["--limit=2", "--eval_tokens=512", "--device=cpu"], "hops_study.py": ["--examples=64", "--device=cpu"],
         "hops_exits.py": ["--examples=32", "--device=cpu"],
         "sample.py": ["--max_new_tokens=8", "--device=cpu"],
         "readout_study.py": ["--cells", "perloop-norm", "--seeds", "1", "--tokens=256"]}


def test_readme_begins_with_two_set_up_commands():
    setup = [c for c in blocks_of(README, "sh") if c.startswith("python3 -m venv")]
    assert len(setup) == 2 and all("requirements.txt" in c for c in setup)
    assert setup[0].endswith("python train.py") and "pytest" in setup[1]


QUICK = ("train.py -h", "--trick=", "fit_law.py fit", "--lemmas", "downstream.py --list", "data/prepare.py --vocab")


@pytest.mark.parametrize("command", [c if any(part in c for part in QUICK) else
                                     pytest.param(c, marks=pytest.mark.slow) for c in PYTHON])
def test_readme_command(command, run, tmp_path):
    script, *flags = shlex.split(command)[1:]
    trains = script == "train.py" and flags not in (["--list_presets"], ["-h"])
    needed = re.findall(r"out/[\w/]+", command)     # the runs it looks at, made by the commands above it
    if trains:
        needed = re.findall(r"--init_from=(out/[\w/]+)", command)
    for folder in needed if script != "fit_law.py" else []:
        made = next((c for c in PYTHON if c.endswith(f"--out_dir={folder}")), f"python train.py --out_dir={folder}")
        window = ["--block_size=128"] * ("hops" not in made)       # the task hops has one of its own
        made = run("train.py", *shlex.split(made)[2:], *SHORT["train.py"], *window, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    if trains:
        flags = [f for f in flags if not f.startswith(("--out_dir", "--max_"))] + [f"--out_dir={tmp_path / 'run'}"]
        flags += [f for f in SHORT[script] if not f.startswith("--n_embd") or not any("n_embd" in g for g in flags)]
        flags = [f for f in flags if f != "--resume"]
    elif script != "train.py":
        (tmp_path / "README.md").write_text(README[:300])          # one command asks for its loss
        flags += SHORT.get(script, []) * ("--lemmas" not in flags)
        if "--input" in flags:
            text = tmp_path / "book.txt"
            text.write_text("".join(f"line {i} of a book about nothing, number {i * i}\n" for i in range(2000)))
            flags = ["--input", str(text), f"--out_dir={tmp_path / 'data'}", "--vocab_size=280"]
    r = run(script, *flags, cwd=ROOT if script == "fit_law.py" else tmp_path)
    assert r.returncode == 0, r.stderr
    if trains:
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] > 0


@pytest.mark.parametrize("script", ["bench", "downstream", "early_exit", "fit_law", "hops_exits", "hops_study", "readout_study",
                                    "passes", "routing_study", "sample", "sweep"])
def test_every_flag_of_a_script_is_read(script):
    """train.py's are tried one by one in test_train.py; here each --flag must at least be looked at somewhere."""
    parts = {"fit_law": ["sweep", "optima", "verdict"], "early_exit": ["exit_speed"]}.get(script, [])
    text = "".join((ROOT / f"{name}.py").read_text() for name in [script, *parts])
    flags = re.findall(r"(?:add|add_argument)\(\"--(\w+)\"", text)
    assert len(flags) > 4
    for flag in flags:
        assert re.search(rf"\b(?:a|args)\.{flag}\b|\"{flag}\"", text.replace(f'"--{flag}"', "")), flag


@pytest.mark.parametrize("command", BIG)
def test_commands_for_bigger_machines_parse(command):
    words = shlex.split(command)
    T.config_of(T.parse(words[words.index("train.py") + 1:])[0], 32000)


def test_the_readmes_trick_is_the_file_that_runs(run, tiny, tmp_path):
    """The class in the README is that of tricks/gate.py; it trains what it adds, and a sweep of it is planned."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "class Gate" in b)
    assert block in (ROOT / "tricks" / "gate.py").read_text(encoding="utf-8")
    r = run("train.py", *tiny("--trick=tricks/gate.py", "--max_steps=3"))
    assert r.returncode == 0, r.stderr
    saved = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    assert saved["model"]["gate"].abs().min() > 0
    plan = run("fit_law.py", "plan", "--preset=try", "--name=gate", "--flags=--trick=tricks/gate.py", "--seeds", 42, 43, 44)
    assert plan.returncode == 0 and plan.stdout.count("out/gate/") == 45, plan.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_is_short_and_names_every_script():
    assert len(README.splitlines()) <= 230 and len(README.split()) <= 2400
    for script in ROOT.glob("*.py"):
        assert f"]({script.name})" in README, script.name


def test_the_readmes_loop_is_that_of_the_model():
    """Each line of the block stands in model.py between the two marks, in this order."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "one_pass" in b)
    loop = (ROOT / "model.py").read_text(encoding="utf-8").split("# --- loop ---")[1].split("# --- end loop ---")[0]
    functions = [re.findall(rf"def {name}\(.*?(?=\n    def |$)", loop, re.S)[0] for name in ("loop_states", "one_pass")]
    rest = iter("\n".join(functions).splitlines())
    for line in filter(None, map(str.strip, block.splitlines())):
        assert any(line == given.strip() for given in rest), line


@pytest.mark.slow
def test_resume_command_goes_on(run, tiny):
    assert run("train.py", *tiny()).returncode == 0
    r = run("train.py", *tiny("--max_steps=24", "--resume"))
    assert r.returncode == 0 and "resumed from step 20" in r.stdout
    again = run("train.py", *tiny("--max_steps=24"))
    assert again.returncode == 0 and "is complete" in again.stdout


@pytest.mark.slow
def test_a_planned_sweep_trains_and_is_collected(run, tmp_path):
    """plan -> the shell -> collect: every line runs as printed, and collect skips the run that is not finished."""
    plan = run("fit_law.py", "plan", "--preset=pocket", "--budgets", "2e9", "--widths", "32", "--loops", "1", "4")
    lines = [line.split("  #")[0] for line in plan.stdout.splitlines()]
    assert plan.returncode == 0 and len(lines) == 2
    for line in lines:
        r = run("train.py", *shlex.split(line)[2:], "--eval_tokens=256", cwd=tmp_path)
        assert r.returncode == 0, r.stderr
    again = run("train.py", *shlex.split(lines[0])[2:], cwd=tmp_path)
    assert again.returncode == 0 and "is complete" in again.stdout, again.stderr
    folders = sorted((tmp_path / "out" / "pocket-sweep").iterdir())
    (tmp_path / "unfinished").mkdir()
    r = run("fit_law.py", "collect", *folders, tmp_path / "unfinished")
    assert r.returncode == 0 and "skipped" in r.stderr and "unfinished" in r.stderr
    header, *rows = [line.split(",") for line in r.stdout.splitlines()]
    assert [row[header.index("n_loop")] for row in rows] == ["1", "4"]
    (tmp_path / "runs.csv").write_text(r.stdout, encoding="utf-8")
    r = run("fit_law.py", "fit", tmp_path / "runs.csv")
    assert r.returncode == 2 and "at least 10 runs" in r.stderr


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_goes_on_to_the_same_table(run, tmp_path):
    """The list is stopped while its second run trains, and run again: the table equals that of an unbroken list."""
    plan = run("fit_law.py", "plan", *"--budgets 6e10 --widths 32 --loops 1 2 --flags".split(),
               "--eval_tokens=256 --log_interval=1")
    sweep = plan.stdout.replace("python train.py", f"{sys.executable} {ROOT / 'train.py'}")

    def start(folder):
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(["sh", "-c", sweep], cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL)

    def table(folder):
        r = run("fit_law.py", "collect", *sorted((folder / "out" / "pocket-sweep").iterdir()))
        assert r.returncode == 0 and not r.stderr
        return [{k: v for k, v in row.items() if k not in ("wall_s", "tok_per_s")}
                for row in csv.DictReader(r.stdout.splitlines())]
    broken = start(tmp_path / "broken")
    second = tmp_path / "broken" / "out" / "pocket-sweep" / "C6e+10-d32-r2-s42"
    while broken.poll() is None and not ((second / "metrics.csv").is_file() and
                                         len((second / "metrics.csv").read_text().splitlines()) > 2):
        time.sleep(0.02)
    os.killpg(broken.pid, signal.SIGTERM)
    broken.wait()
    deadline = time.time() + 60                            # the shell is gone, its run still saves
    while not (second / "ckpt.pt").is_file() and time.time() < deadline:
        time.sleep(0.02)
    assert not (second / "summary.json").exists()
    assert start(tmp_path / "broken").wait() == 0 and start(tmp_path / "whole").wait() == 0
    assert table(tmp_path / "broken") == table(tmp_path / "whole") and len(table(tmp_path / "whole")) == 2


@pytest.mark.slow
def test_bench_writes_its_rows(run, tmp_path):
    r = run("bench.py", "--n_embd=32", "--head_dim=16", "--block_size=32", "--batch_size=1", "--rounds=3",
            "--device=cpu", "--vs=--n_loop=2", f"--json={tmp_path / 'b.json'}")
    assert r.returncode == 0, r.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [row["what"] for row in rows] == ["train", "train", "decode", "decode"]
    assert rows[0]["ratio"] == 1 and all(row["tok_per_s"] > 0 and row["peak_mb"] > 50 for row in rows)


@pytest.mark.parametrize("flags, says", [
    (["--nanogpt=/nosuch"], "nanoGPT"), (["--n_head=3", "--n_embd=64"], "n_head=3"), (["--nosuch"], "--nosuch"),
    (["--vs=--n_loop=x"], "n_loop"), (["--rounds=0"], "rounds"), (["--json=/no/such/x.json"], "json")])
def test_bench_refuses_in_one_sentence(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as e:
        bench.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1
