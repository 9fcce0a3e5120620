"""The load format with which vLLM rounds, with vLLM's own loaders, on a model that only keeps its weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_ext.core.fake_quant import fake_quantized
from verl_ext.upstream.fake_quantization import LOAD_FORMAT, register_load_format, report

pytest.importorskip("vllm")

from vllm.config import LoadConfig
from vllm.model_executor import model_loader

FP4 = {"format": "fp4", "group": 16, "router": False, "head": False}
FLOAT32 = SimpleNamespace(quantization=None, dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(32, 4, bias=False)

    def load_weights(self, weights):
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


@pytest.fixture
def loader():
    """loader("dummy", their own extra config) -> vLLM's loader for our format."""
    register_load_format(model_loader)

    def of(inner, **theirs):
        extra = {"verl_ext": {**FP4, "load_format": inner}, **theirs}
        return model_loader.get_model_loader(LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config=extra))

    yield of
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.pop(LOAD_FORMAT)


def test_a_model_that_starts_with_dummy_weights_rounds_what_comes_later(loader):
    model, weight = Model(), torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    loader("dummy").load_weights(model, FLOAT32)
    assert report(SimpleNamespace(model=model)) == {"settings": FP4, "rounded": {"linear": 0}}
    model.load_weights([("q_proj.weight", weight)])
    assert torch.equal(model.q_proj.weight, fake_quantized(weight, "fp4", 16))
    assert report(SimpleNamespace(model=model))["rounded"] == {"linear": 1}


def test_the_inner_format_keeps_its_own_settings(loader):
    inner = loader("auto", enable_multithread_load=True).inner
    assert type(inner) is model_loader.DefaultModelLoader
    assert inner.load_config.load_format == "auto"
    assert inner.load_config.model_loader_extra_config == {"enable_multithread_load": True}


def test_a_model_that_is_quantised_for_real_is_refused(loader):
    with pytest.raises(ValueError, match=r"quantizes this model for real \(gptq\)"):
        loader("dummy").load_weights(Model(), SimpleNamespace(quantization="gptq"))
