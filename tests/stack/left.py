"""What a run left in its folder: checkpoints and the guard's events."""

import json

import torch
from safetensors.torch import load_file

SAVES = ("trainer.save_freq=1", "trainer.default_local_dir=checkpoints")


def events(folder):
    (file,) = (folder / "verl_ext").glob("*.guard.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def shards(folder, step, kind="model"):
    return torch.load(
        folder / "checkpoints" / f"global_step_{step}" / "actor" / f"{kind}_world_size_1_rank_0.pt", weights_only=False
    )


def saved(folder, step):
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return tracker.exists() and tracker.read_text().isdigit() and int(tracker.read_text()) >= step


def weights(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(one, other):
    """Whether the tensors of two of `shards` are equal bit for bit."""
    return all(torch.equal(full(one[name]), full(other[name])) for name in one)


def full(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
