"""A small prepared corpus that the tests share, and a way to run the scripts as a user does."""
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")             # tests are small: two threads only wait for each other
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder with train/val/test.bin of 20,000 made-up words, vocabulary 300."""
    from data.prepare import prepare
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    text = "\n".join(" ".join(rng.choices(words, k=10)) for _ in range(2000))
    source = tmp_path_factory.mktemp("text") / "words.txt"
    source.write_text(text, encoding="utf-8")
    return prepare(vocab_size=300, inputs=[str(source)], out_dir=tmp_path_factory.mktemp("corpus"))


def tiny_flags(data, out_dir, *more):
    """Command-line flags of a model that trains in a second."""
    return ["--preset=pocket", f"--data={data}", f"--out_dir={out_dir}", "--n_embd=32", "--head_dim=16",
            "--block_size=32",
            "--batch_size=4", "--max_steps=20", "--eval_tokens=512", "--eval_interval=10", "--log_interval=1",
            "--dtype=float32", "--device=cpu", "--threads=1", *more]


@pytest.fixture
def tiny(corpus, tmp_path):
    """Those flags, into tmp_path/run."""
    def flags(*more, out="run"):
        return tiny_flags(corpus, tmp_path / out, *more)
    return flags


@pytest.fixture
def torchrun():
    """torchrun(*flags) trains in two processes; fails the test when they do."""
    def call(*flags):
        r = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                            str(ROOT / "train.py"), *flags], capture_output=True, text=True, timeout=300)
        assert r.returncode == 0, r.stderr[-2000:]
    return call


@pytest.fixture
def run():
    """run(script, *flags, cwd=..., env=...) as a subprocess; the result has returncode, stdout, stderr."""
    def call(script, *flags, cwd=ROOT, env=None, timeout=600):
        return subprocess.run([sys.executable, str(ROOT / script), *map(str, flags)], cwd=cwd, text=True,
                              timeout=timeout, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})
    return call


@pytest.fixture
def call_main(monkeypatch, capsys):
    """call_main(script, *flags): returncode, stdout and stderr of the main() of a script, without a new process."""
    def call(script, *flags):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, flags)])
        code = 0
        try:
            script.main()
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)
    return call


@pytest.fixture
def cli(call_main):
    """fit_law.py with these arguments."""
    import fit_law
    return partial(call_main, fit_law)
