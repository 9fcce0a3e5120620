"""Reads what a run left in its folder: checkpoints and the guard's events."""

import json

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict

SAVES = ("trainer.save_freq=1", "trainer.default_local_dir=checkpoints")


def events(folder):
    (file,) = (folder / "verl_ext").glob("*.guard.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def logged_events(folder):
    """Returns the guard's events as (step, rule, action)."""
    return [(event["step"], event["rule"], event["action"]) for event in events(folder)]


def shards(folder, step, kind="model", rank=0, of=1):
    actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
    return torch.load(actor / f"{kind}_world_size_{of}_rank_{rank}.pt", weights_only=False)


def megatron_weights(folder, step):
    """Reads the Megatron weights that verl saves: in the format of Hugging Face, in the dtype of the computation."""
    return weights(folder / "checkpoints" / f"global_step_{step}" / "actor" / "model" / "huggingface")


def megatron_optimizer(folder, step):
    """Returns Megatron's weights in float32 and the moments of Adam.

    They are buffers whose padding is not initialised, or single tensors with dist_ckpt_optim_fully_reshardable=true.
    """
    saved = folder / "checkpoints" / f"global_step_{step}" / "actor" / "optimizer" / "dist_ckpt"
    found = {}
    _load_state_dict(found, FileSystemReader(saved), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in _flat(found) if torch.is_tensor(value) and value.is_floating_point()}


def _flat(tree, name=""):
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from _flat(branch, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        yield from _flat(dict(enumerate(tree)), name)
    else:
        yield name, tree


def last_saved(folder):
    """The step of the last checkpoint, 0 without one."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    text = tracker.read_text() if tracker.exists() else ""
    return int(text) if text.isdigit() else 0


def has_saved(folder, step):
    return last_saved(folder) >= step


def weights(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def equal_tensors(one, other):
    """Checks that the tensors of two of `shards` are equal bit for bit."""
    return all(torch.equal(local_part(one[name]), local_part(other[name])) for name in one)


def local_part(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
