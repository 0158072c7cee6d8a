"""Read and write the small files of a run, without ever leaving half of one."""
import csv
import io
import json
import os
from contextlib import contextmanager
from pathlib import Path

from lib.console import stop

ROOT = Path(__file__).resolve().parent.parent     # the folder of this project


def read_json(path):
    """The content of a JSON file that this project wrote."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stop(f"{path}: missing or damaged; make its folder again")


def check_writable(flag, *folders):
    """Make the folders, and find out before the work whether they can be written to. flag: what the error names."""
    for folder in folders:
        probe = Path(folder) / f".{os.getpid()}.tmp"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as e:
            stop(f"{flag}: cannot write to {folder} ({e.strerror}); choose another folder")


@contextmanager
def writing(flag, path):
    """A write that fails, on a full disk for example, ends in one sentence that names the flag."""
    try:
        yield
    except OSError as error:
        stop(f"--{flag}={path}: cannot write it ({error.strerror or error}); choose another folder")


def write_json(path, result):
    """Write what --json asks for."""
    with writing("json", path):
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_atomic(path, data):
    """Write bytes to path. A reader sees the old file or the whole new one, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_csv(path, rows):
    """Write rows, dicts, as a table with a column for each key. A cell is blank where a row lacks the key."""
    columns = {}
    for row in rows:
        columns.update(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())
