"""Checkpoints: write one so that it is never half a file, load one without running code, compare it with the flags."""
import argparse
import os
from pathlib import Path

import torch

from data.load import open_data
from lib.console import stop
from lib.flags import EXTENDABLE, FREE
from lib.tricks import class_of_checkpoint, file_hash, trick_file
from model import Config


def save_checkpoint(path, **state):
    """Tensors and plain Python only, so that it loads without running code; renamed into place when complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:         # a full disk is a RuntimeError to torch
        temporary.unlink(missing_ok=True)
        stop(f"{path}: could not be written ({str(e).splitlines()[0][:120]}); an older one is as it was")


def load_checkpoint(ckpt, device="cpu"):
    """The dict of a ckpt.pt, or of the run folder that holds one. Never runs code found in the file."""
    path = Path(ckpt) / "ckpt.pt" if Path(ckpt).is_dir() else Path(ckpt)
    if not path.is_file():
        stop(f"{ckpt}: no checkpoint there; give a run folder or its ckpt.pt")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        state["config"], state["model"]
    except Exception as e:                       # pickle errors, zip errors, a payload that was refused
        stop(f"{path}: not a checkpoint of train.py, or damaged ({type(e).__name__}); nothing in it was run")
    return state


def load_model(ckpt, device="cpu", trick=""):
    """(model in evaluation mode, state of its checkpoint) from a run folder or a ckpt.pt. trick: the file of a trick
    outside tricks/, which only runs when it is named."""
    state = load_checkpoint(ckpt, device)
    try:
        cfg = Config(**state["config"])
    except (TypeError, ValueError) as e:         # a field or a choice of another version
        stop(f"{ckpt}: a model of another version of this code ({e})")
    model = class_of_checkpoint(state, ckpt, trick)(cfg).to(device)
    model.load_state_dict(state["model"])
    return model.eval(), state


def run_folder(ckpt):
    """The folder of a run that is named as a folder or as its ckpt.pt."""
    return Path(ckpt) if Path(ckpt).is_dir() else Path(ckpt).parent


def data_of(state):
    """(folder, meta) of the corpus that a checkpoint was trained on, and of no other: the hash tells them apart."""
    folder, meta = open_data(argparse.Namespace(**state["args"]))
    if state.get("data_sha256") not in (None, meta["splits"]["train"]["sha256"]):
        stop(f"{folder}: not the text that the checkpoint was trained on, so its tokens would mean something else; "
             f"prepare that text again, or train anew")
    return folder, meta


def check_same_run(explicit, saved, data_sha256, where, resume):
    """A run is resumed with the flags, the data and the trick it began with: a command line that says otherwise is an
    error, not silently dropped. saved: the dict of a config.json or of a checkpoint."""
    if saved["data_sha256"] != data_sha256:
        stop(f"--data or --vocab_size: not the corpus that {where} was trained on; choose another --out_dir")
    same_trick = False                           # the same file under another path, such as the run folder's copy
    if explicit.get("trick") and saved.get("trick"):
        same_trick = file_hash(trick_file(explicit["trick"])) == saved["trick"]["sha256"]
        if not same_trick and explicit["trick"] == saved["trick"]["file"]:
            stop(f"--trick={explicit['trick']}: the file has changed since {where} was begun; choose another --out_dir")
    for name, value in explicit.items():
        may_differ = name in FREE or (resume and name in EXTENDABLE) or (name == "trick" and same_trick)
        first_value = saved["args"].get(name, value)
        if not may_differ and first_value != value:
            value, first_value = (f"{v:g}" if isinstance(v, float) else v for v in (value, first_value))
            hint = "add --resume, " if name in EXTENDABLE else ""
            stop(f"--{name}={value} contradicts {where}, begun with {name}={first_value}: drop the flag, {hint}or "
                 f"choose another --out_dir")
