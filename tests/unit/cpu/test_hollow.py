"""Stand-ins for packages of GPU kernels can be imported, and raise when they would compute."""

import importlib
import sys

import pytest
import torch

from verl_ext.cpu.hollow import Finder, Torch


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder("kernels_of_a_gpu")])
    yield importlib.import_module("kernels_of_a_gpu.attention")
    for name in [name for name in sys.modules if name.startswith("kernels_of_a_gpu")]:
        del sys.modules[name]


def test_names_are_there_and_calls_raise(kernels):
    class Derived(kernels.Attention):
        pass

    assert kernels.Mode.NEAREST is not None
    for call in (kernels.Attention, Derived, kernels.forward, kernels.Mode.NEAREST):
        with pytest.raises(RuntimeError, match="needs a GPU: it has no stand-in on CPU cores"):
            call()


def test_a_package_that_is_not_named_is_not_found(kernels):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kernels_of_another_gpu")


def test_a_modules_torch_makes_what_the_change_leaves():
    made = Torch(lambda keywords: keywords.pop("pin_memory", None))
    assert torch.equal(made.zeros(2, pin_memory=True), torch.zeros(2))
    assert made.float32 is torch.float32
