"""
Start from the weights of another run (--init_from), with a fresh optimizer and schedule: on other text (finetune), as a
loop made of a plain model's layers (retrofit), as a plain model made of a loop (unroll), or with other passes.

Shapes of the same effective depth fit together: a layer is made from those that stand in the source at its places, in
the order in which a token passes through them. A looped layer has r places, so r layers of a plain model become one:

    source   prelude.0   recur.0  recur.1  recur.2  recur.3   coda.0         1 + 1 x 4 + 1
    target   prelude.0   recur.0  recur.1  recur.0  recur.1   coda.0         1 + 2 x 2 + 1: recur.0 of 0 and 2, ...
"""
from dataclasses import fields
from pathlib import Path

import torch

from lib.checkpoint import checkpoint_file, config_in, data_of, load_checkpoint
from lib.console import stop
from lib.files import read_json
from lib.tricks import class_of_checkpoint, describe, file_hash
from model import Config, LoopedLM


# --- flags ---
def load_source(path):
    """The checkpoint that --init_from names."""
    state = load_checkpoint(path)
    if {"args", "step", "data_sha256"} - state.keys():
        stop(f"--init_from={path}: holds weights but not what text they were trained on, so it is not train.py's")
    config_in(state, path)                       # refuses that of another version
    return state


def source_flags(asked, out_dir):
    """The flags {name: value} that --init_from brings along: shape, trick and corpus of the source. asked: the flags
    that are set otherwise. A run that was begun has its own in its folder, and its source may be gone."""
    out = Path(out_dir)
    begun = any((out / name).is_file() for name in ("ckpt.pt", "summary.json"))
    saved = read_json(out / "config.json") if begun else load_source(asked["init_from"])
    names = {f.name for f in fields(Config)} - {"vocab_size"}
    flags = {name: value for name, value in saved["config"].items() if name in names}
    if "head_dim" in asked:                      # says how many heads there are
        del flags["n_head"]
    n_loop = flags["n_loop"]
    if (asked.get("n_loop", n_loop) == 1) != (n_loop == 1):                        # a loop begins, or ends:
        del flags["inject"]                      # it injects as one from scratch
    if "trick" not in asked and saved.get("trick"):
        class_of_checkpoint(saved, asked["init_from"])                             # only what this allows is run
        flags.update(trick=saved["trick"]["file"], trick_args=saved["args"].get("trick_args", ""))
    if "data" not in asked:
        flags.update(data=saved["args"]["data"], vocab_size=saved["args"]["vocab_size"])
    return flags


def check_tokenizer(state, path, meta):
    """Refuse a source whose token ids stand for other text than those of the corpus with this meta."""
    if state["data_sha256"] == meta["splits"]["train"]["sha256"]:
        return
    theirs = state.get("tokenizer_sha256")
    if theirs is None:                           # an older run: its corpus knows
        theirs = data_of(state)[1]["tokenizer_sha256"]
    if theirs != meta["tokenizer_sha256"]:
        name = state["args"]["data"]
        name = f"sotu-{state['config']['vocab_size']}" if name == "sotu" else name
        stop(f"--init_from={path}: trained with another tokenizer than that of --data, so its tokens would mean "
             f"something else; encode the text with data/prepare.py --tokenizer {name}")


# --- weights ---
def walk(cfg):
    """Names of the layers in the order in which a token passes through them, a looped one r times."""
    prelude = [f"prelude.{i}" for i in range(cfg.n_prelude)]
    loop = [f"recur.{i}" for i in range(cfg.n_recur)]
    coda = [f"coda.{i}" for i in range(cfg.n_coda)]
    return prelude + cfg.n_loop * loop + coda


def same_layers(source, target):
    return set(walk(source)) == set(walk(target))


def origins(source, target):
    """{layer of target: the layers of source that it is made from}: those at its places if the effective depths are
    equal, else, and where both store the same layers, the one of its name."""
    if same_layers(source, target) or source.depth() != target.depth():
        return {layer: [layer] for layer in walk(target)}
    made_of = {}
    for layer, original in zip(walk(target), walk(source)):
        made_of.setdefault(layer, []).append(original)
    return made_of


def tie_matrices(matrices, how):
    """One matrix out of several of one shape: the first, the last, or their mean, which is brought back to the mean of
    their Frobenius norms (of r independent matrices it has only 1 / sqrt(r))."""
    if how != "mean":
        return matrices[0 if how == "first" else -1]
    stack = torch.stack(matrices)
    mean = stack.mean(0)
    norm = stack.flatten(1).norm(dim=1).mean()
    return mean * (norm / mean.norm().clamp(min=1e-12))


def backbone(cfg):
    """Names of the matrices that a model cannot do without: not the injection, and nothing that a trick adds."""
    with torch.device("meta"):                   # shapes only
        names = LoopedLM(cfg).state_dict()
    return {name for name in names if name.endswith(".weight") and name != "inject.weight"}


def carry_over(model, state, tie, trick=None):
    """Load the weights of a checkpoint into a model whose shape may differ, each layer from its origins. trick: what
    tricks.describe says of the model's. Returns two lists of names: what stays as it was drawn, and what of the source
    is left out. Stops, naming the matrices, if the backbone does not fit."""
    source, target = Config(**state["config"]), model.cfg
    needed, offered = backbone(target), backbone(source)
    weights = dict(state["model"])
    if hash_of(trick) != hash_of(state.get("trick")):      # what another trick calls the same is something else
        weights = {name: w for name, w in weights.items() if name in offered or name == "inject.weight"}
    made_of, used = origins(source, target), set()
    new, fresh, misfits = {}, [], []
    for name, drawn in model.state_dict().items():
        layer = ".".join(name.split(".")[:2])
        names = [original + name[len(layer):] for original in made_of.get(layer, [layer])]
        found = [weights[n] for n in names if n in weights]
        used.update(names)
        if not found and name not in needed:
            fresh.append(name)
            new[name] = drawn
        elif not found:
            misfits.append(f"{name} is missing")
        elif any(w.shape != drawn.shape for w in found):
            misfits.append(f"{name} is {size_of(found[0])}, here {size_of(drawn)}")
        else:
            new[name] = found[0] if len(found) == 1 else tie_matrices(found, tie)
    left_out = sorted(state["model"].keys() - (used & weights.keys()))
    misfits += [f"{name} has no place here" for name in left_out if name in offered]
    if misfits:
        more = f" and {len(misfits) - 4} more" if len(misfits) > 4 else ""
        stop(f"--init_from: matrices of the source, {shape_of(source)} layers, do not fit this model, "
             f"{shape_of(target)}: {', '.join(misfits[:4])}{more}; the same effective depth would, or the same layers "
             f"with another n_loop")
    model.load_state_dict(new)
    return fresh, left_out


def hash_of(trick):
    return trick["sha256"] if trick else None


def size_of(matrix):
    return " x ".join(map(str, matrix.shape))


def shape_of(cfg):
    return f"{cfg.n_prelude} + {cfg.n_loop} x {cfg.n_recur} + {cfg.n_coda}"


def start_from(model, args, meta):
    """Load the weights that --init_from names into a model of these flags, for the corpus with this meta. Returns what
    config.json and the checkpoints keep of the source."""
    path = args.init_from
    state = load_source(path)
    check_tokenizer(state, path, meta)
    source, target, trick = Config(**state["config"]), model.cfg, describe(args.trick, args.trick_args)
    fresh, left_out = carry_over(model, state, args.tie, trick)
    for name in ("n_head", "mup_base"):          # no matrix has another size for it, but another meaning
        if getattr(source, name) != getattr(target, name):
            stop(f"--{name}={getattr(target, name)}: the weights of {path} were trained with {getattr(source, name)}")
    if target.tied and not source.tied:
        stop(f"--tied: embedding and head of {path} are two matrices; drop the flag")
    joined = any(len(layers) > 1 for layers in origins(source, target).values())
    return dict(path=path, sha256=file_hash(checkpoint_file(path)), step=state["step"], layers=shape_of(source),
                tie=args.tie if joined else None, fresh=fresh, left_out=left_out,
                changes=why_outputs_change(source, target, joined, trick != state.get("trick")))


def why_outputs_change(source, target, joined, other_trick):
    """What makes the outputs before the first step differ from the source's; an empty list if nothing does."""
    regrouped = not same_layers(source, target)
    changed = {name for name in ("inject", "loop_norm", "readout") if getattr(source, name) != getattr(target, name)}
    if regrouped and target.inject != "none":
        changed.add("inject")
    if regrouped and target.loop_norm:           # after other layers than before
        changed.add("loop_norm")
    if not regrouped and source.n_loop != target.n_loop:
        changed.add("n_loop")
    return sorted(changed) + ["tied layers"] * joined + ["trick"] * other_trick


def describe_source(source):
    """A line about what start_from did."""
    line = f"weights of {source['path']}, step {source['step']}, {source['layers']} layers"
    if source["tie"]:
        line += f", those that become one tied by --tie={source['tie']}"
    for what, names in (("from scratch", source["fresh"]), ("left out", source["left_out"])):
        if names:
            line += f"; {what}: {', '.join(names)}"
    if source["changes"]:
        line += f"; its outputs change at the start ({', '.join(source['changes'])})"
    return line
