"""A load format of vLLM's under which a model rounds the weights that it is given.

Chosen by vLLM's arguments alone, so that of a run's engines it reaches the rollout's, and no reward model's:
    load_format=verl_ext_fake_quantized
    model_loader_extra_config={"verl_ext": {"format": "fp4", ..., "load_format": "auto"}}
"""

from dataclasses import replace
from typing import Any

from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader, register_model_loader

from verl_ext.upstream.fake_quantization import LOAD_FORMAT, OURS, round_while_loading


class FakeQuantizedLoader(BaseModelLoader):
    """Loads by another load format, `load_format` of our part of the extra config, and leaves a Rounding behind."""

    def __init__(self, load_config: Any):
        super().__init__(load_config)
        theirs = dict(load_config.model_loader_extra_config)
        self.settings = dict(theirs.pop(OURS))
        inner = self.settings.pop("load_format")
        self.inner = get_model_loader(replace(load_config, load_format=inner, model_loader_extra_config=theirs))

    def download_model(self, model_config: Any) -> None:
        self.inner.download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        if model_config.quantization is not None:
            raise ValueError(
                f"stability.fake_quantization: vLLM quantizes this model for real ({model_config.quantization})"
            )
        round_while_loading(model, self.settings)
        self.inner.load_weights(model, model_config)


def on_import(_module: object) -> None:
    """Register the format, as the hook that `vllm_plugin.register` sets on vLLM's loaders."""
    register_model_loader(LOAD_FORMAT)(FakeQuantizedLoader)
