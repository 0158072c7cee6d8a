"""Checkpoints: write one so that it is never half a file, load one without running code."""
import argparse
import os
from pathlib import Path

import torch

from data.load import is_task, open_data
from lib.console import stop
from lib.tricks import class_of_checkpoint
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


def checkpoint_file(ckpt):
    """The ckpt.pt of a run that is named as a folder or as that file."""
    return Path(ckpt) / "ckpt.pt" if Path(ckpt).is_dir() else Path(ckpt)


def load_checkpoint(ckpt, device="cpu"):
    """The dict of a ckpt.pt, or of the run folder that holds one. Never runs code found in the file."""
    path = checkpoint_file(ckpt)
    if not path.is_file():
        stop(f"{ckpt}: no checkpoint there; give a run folder or its ckpt.pt")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        state["config"], state["model"]
    except Exception as e:                       # pickle errors, zip errors, a payload that was refused
        stop(f"{path}: not a checkpoint of train.py, or damaged ({type(e).__name__}); nothing in it was run")
    return state


def config_in(state, ckpt):
    """The Config of a loaded checkpoint."""
    try:
        return Config(**state["config"])
    except (TypeError, ValueError) as e:         # a field or a choice of another version
        stop(f"{ckpt}: a model of another version of this code ({e})")


def load_model(ckpt, device="cpu", trick=""):
    """(model in evaluation mode, state of its checkpoint) from a run folder or a ckpt.pt. trick: the file of a trick
    outside tricks/, which only runs when it is named."""
    state = load_checkpoint(ckpt, device)
    cfg = config_in(state, ckpt)
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


def load_on_task(path, device):
    """(model, checkpoint, folder of the data, its meta.json) of a run on the task hops. Refuses one on text."""
    model, state = load_model(path, device)
    folder, meta = data_of(state)
    if not is_task(meta):
        stop(f"--ckpt {path}: trained on {folder.name}, but this study is about the task hops: train.py --preset=hops")
    return model, state, folder, meta
