"""What a run left in its folder: checkpoints and the guard's events."""

import json

import torch
from safetensors.torch import load_file

SAVES = ("trainer.save_freq=1", "trainer.default_local_dir=checkpoints")


def events(folder):
    (file,) = (folder / "verl_ext").glob("*.guard.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def shards(folder, step, kind="model", rank=0, of=1):
    actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
    return torch.load(actor / f"{kind}_world_size_{of}_rank_{rank}.pt", weights_only=False)


def last_saved(folder):
    """The step of the last checkpoint, 0 without one."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    text = tracker.read_text() if tracker.exists() else ""
    return int(text) if text.isdigit() else 0


def saved(folder, step):
    return last_saved(folder) >= step


def weights(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(one, other):
    """Whether the tensors of two of `shards` are equal bit for bit."""
    return all(torch.equal(full(one[name]), full(other[name])) for name in one)


def full(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
