"""
Load a trick: a file with one subclass of model.LoopedLM (tricks/README.md says how to write one).

`--trick=tricks/gate.py` runs the file that the user names. A checkpoint holds only its name, its SHA-256 and the
options: no code comes out of a checkpoint, and a file that is missing or has changed is refused.
"""
import argparse
import ast
import hashlib
import importlib.util
import inspect
import sys
from functools import lru_cache
from pathlib import Path

from lib.console import boolean, stop
from lib.files import ROOT
from model import LoopedLM


def find_file(path):
    """The file of a trick, by its path or by that path from the folder of this project; None if there is none."""
    return next((file.resolve() for file in (Path(path), ROOT / path) if file.is_file()), None)


def trick_file(path):
    """The file that --trick names."""
    file = find_file(path)
    if file is None:
        stop(f"--trick={path}: no such file; give a Python file with a subclass of LoopedLM, such as tricks/gate.py")
    return file


def file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def code_of(path):
    """What a file does, as text: without its docstring and its comments, which may say later what was measured."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.unparse(tree)


@lru_cache
def model_class(path, options=""):
    """The class of model that a run trains: LoopedLM without a trick, else the subclass in the file, with options
    such as "n_lanes=4,rank=1" set. An option is a class attribute with a type and a default: n_lanes: int = 2."""
    if not path:
        if options:
            stop(f"--trick_args={options}: options of a trick; give --trick as well")
        return LoopedLM
    trick = class_in(trick_file(path), path)
    types, values = option_types(trick), {}
    for part in filter(None, options.split(",")):
        name, _, text = part.partition("=")
        if name not in types:
            stop(f"--trick_args={options}: {path} has no option {name!r}; it has {', '.join(types) or 'none'}")
        read = boolean if types[name] is bool else types[name]
        try:
            values[name] = read(text)
        except (ValueError, argparse.ArgumentTypeError):
            stop(f"--trick_args={options}: {name}={text!r} is not of type {types[name].__name__}")
    return type(trick.__name__, (trick,), values)


def class_in(file, path):
    """Run a trick's file and return its subclass of LoopedLM; path: how the user named it."""
    name = f"trick_{file.stem}_{file_hash(file)[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module                   # where a compiled block looks up what the file imports
    try:
        spec.loader.exec_module(module)
    except Exception as e:                       # whatever the user's code raises
        del sys.modules[name]
        line = f", line {e.lineno}" if isinstance(e, SyntaxError) else ""
        stop(f"--trick={path}: the file does not run ({type(e).__name__}: {e}{line})")
    found = [c for c in vars(module).values()
             if isinstance(c, type) and issubclass(c, LoopedLM) and c.__module__ == module.__name__]
    if len(found) != 1:
        stop(f"--trick={path}: has {len(found)} subclasses of LoopedLM, but a trick is exactly one")
    return found[0]


def option_types(trick):
    """{name: type} of the options of a model class, with those of a trick that it extends."""
    types = {}
    for parent in reversed(trick.__mro__):
        if issubclass(parent, LoopedLM):
            types.update(inspect.get_annotations(parent, eval_str=True))
    return {name: kind for name, kind in types.items() if hasattr(trick, name)}


def options_of(trick):
    """{name: value} of all options of a model class."""
    return {name: getattr(trick, name) for name in option_types(trick)}


def describe(path, options):
    """What a run folder and a checkpoint keep of a trick, or None: its file's name and hash, its options."""
    if not path:
        return None
    return {"file": path, "sha256": file_hash(trick_file(path)), "args": options_of(model_class(path, options))}


def class_of_checkpoint(state, ckpt, named=None):
    """The model class of a loaded checkpoint. A file in tricks/ is run if it is the one that was trained with; any
    other file only if the user names it (--trick), wherever that very file is now."""
    trick = state.get("trick")
    if not trick:
        return LoopedLM
    named_file = find_file(named) if named else None
    if named_file and file_hash(named_file) == trick["sha256"]:
        file = named_file
    else:                                        # several checkpoints, of which the user named the trick of one
        file = find_file(trick["file"])
        if file is None or file_hash(file) != trick["sha256"]:
            stop(f"{ckpt} was trained with {trick['file']}, which is missing or has changed: put that version back, or "
                 f"name the copy in the run folder with --trick, to run its code")
        if file.parent != ROOT / "tricks":
            stop(f"{ckpt} was trained with {trick['file']}, a file outside tricks/: to run its code, name it with "
                 f"--trick={trick['file']}")
    base = class_in(file, trick["file"])
    options = {name: trick["args"][name] for name in option_types(base) if name in trick["args"]}
    return type(base.__name__, (base,), options)
