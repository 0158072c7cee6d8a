"""
Load a trick: a file with one subclass of model.LoopedLM (tricks/README.md says how to write one).

`--trick=tricks/gate.py` runs the file that the user names. A checkpoint holds only its name, its SHA-256 and the options:
no code comes out of a checkpoint, and a file that is missing or has changed is refused.
"""
import argparse
import hashlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path

from lib.console import stop
from lib.files import ROOT
from model import LoopedLM


def trick_file(path):
    """Where a trick is: the path itself, or the same path from the folder of this project."""
    for candidate in (Path(path), ROOT / path):
        if candidate.is_file():
            return candidate.resolve()
    stop(f"--trick={path}: no such file; give a Python file with a subclass of LoopedLM, such as tricks/gate.py")


def file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def boolean(text):
    """true or false, as every flag of this project spells it."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


@lru_cache
def model_class(path, options=""):
    """The class of model that a run trains: LoopedLM without a trick, else the subclass in the file, with options
    such as "n_lanes=4,rank=1" set. An option is a class attribute with a type and a default: n_lanes: int = 2."""
    if not path:
        if options:
            stop(f"--trick_args={options}: options of a trick; give --trick as well")
        return LoopedLM
    base = class_in(trick_file(path), path)
    declared = {name: kind for name, kind in vars(base).get("__annotations__", {}).items() if hasattr(base, name)}
    values = {}
    for part in filter(None, options.split(",")):
        name, _, text = part.partition("=")
        if name not in declared:
            stop(f"--trick_args={options}: {path} has no option {name!r}; it has {', '.join(declared) or 'none'}")
        kind = boolean if declared[name] is bool else declared[name]
        try:
            values[name] = kind(text)
        except (ValueError, argparse.ArgumentTypeError):
            stop(f"--trick_args={options}: {name}={text!r} is not of type {declared[name].__name__}")
    return type(base.__name__, (base,), values)


def class_in(file, path):
    """Run a trick's file and return its subclass of LoopedLM; path: how the user named it."""
    spec = importlib.util.spec_from_file_location(f"trick_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:                       # whatever the user's code raises
        line = f", line {e.lineno}" if isinstance(e, SyntaxError) else ""
        stop(f"--trick={path}: the file does not run ({type(e).__name__}: {e}{line})")
    found = [c for c in vars(module).values()
             if isinstance(c, type) and issubclass(c, LoopedLM) and c.__module__ == module.__name__]
    if len(found) != 1:
        stop(f"--trick={path}: has {len(found)} subclasses of LoopedLM, but a trick is exactly one")
    return found[0]


def options_of(trick):
    """{name: value} of all options of a model class."""
    return {name: getattr(trick, name) for c in reversed(trick.__mro__) if issubclass(c, LoopedLM)
            for name in vars(c).get("__annotations__", {}) if hasattr(trick, name)}


def describe(path, options):
    """What a run folder and a checkpoint keep of a trick, or None: its file's name and hash, its options."""
    if not path:
        return None
    return {"file": path, "sha256": file_hash(trick_file(path)), "args": options_of(model_class(path, options))}


def class_of_checkpoint(state, ckpt, named=None):
    """The model class of a loaded checkpoint. A file in tricks/ is run if it is the one that was trained with; any other
    file only if the user names it (--trick)."""
    trick = state.get("trick")
    if not trick:
        return LoopedLM
    path = named or trick["file"]
    file = next((f for f in (Path(path), ROOT / path) if f.is_file()), None)
    if file is None:
        stop(f"{ckpt} was trained with {trick['file']}, which is not there: put it back, or name it with --trick=FILE; "
             f"the run folder holds a copy")
    if not named and file.resolve().parent != ROOT / "tricks":
        stop(f"{ckpt} was trained with {trick['file']}, a file outside tricks/: name it with --trick={trick['file']} to "
             f"run its code")
    if file_hash(file) != trick["sha256"]:
        stop(f"{ckpt} was trained with another version of {path}: put that version back; the run folder holds a copy")
    return model_class(str(path), ",".join(f"{name}={value}" for name, value in trick["args"].items()))
