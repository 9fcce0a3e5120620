"""A weight that is part of a larger storage is sent without the rest of it."""

import io
import pickle

import torch

from verl_ext.cpu.sglang import ByValue


def test_a_part_of_a_storage_is_pickled_without_the_rest():
    buffer = torch.arange(100_000.0)
    weights = {"part": buffer[10:14].view(2, 2), "turned": buffer[:6].view(2, 3).T, "whole": torch.ones(3)}
    file = io.BytesIO()
    ByValue(file).dump(weights)
    assert file.tell() < 5_000
    found = pickle.loads(file.getvalue())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
