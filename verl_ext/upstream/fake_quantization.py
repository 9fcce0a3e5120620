"""Rounds the rollout's weights while vLLM or SGLang loads them: at its start, and at each sync after a training step.

All ways in which verl brings weights into a running engine end in the `load_weights` of the model, with the weights'
names on Hugging Face; so does an engine's own loading from files. `Rounding` wraps that one method.

Arguments of the engine switch it on, so it reaches the rollout's engines and not a reward model's. vLLM has a load
format of ours:
    load_format=verl_ext_fake_quantized
    model_loader_extra_config={"verl_ext": {"format": "fp4", ..., "load_format": "auto"}}
SGLang takes no other formats. There the settings are an entry of the model's config:
    json_model_override_args={"verl_ext": {"format": "fp4", ...}}
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from verl_ext.base.patching import Undo, wrap
from verl_ext.core.fake_quant import fake_quantized

LOAD_FORMAT = "verl_ext_fake_quantized"  # as vLLM's argument names it
OURS = "verl_ext"  # our part of vLLM's model_loader_extra_config and of SGLang's json_model_override_args
LINEAR, ROUTER, HEAD = "linear", "router", "head"

# Parts of the names of weights on Hugging Face, families of mixtures of experts above all.
MATRIX = re.compile(r"\.weight$|\.experts\.\w+_proj$")  # the second: weights of all experts, [E, out, in]
HEADS = {"lm_head", "shared_head", "embed_out", "output_layer"}
ROUTERS = {"gate", "router", "shared_expert_gate"}  # gate_proj is not a router
NEVER = re.compile(r"embed|\bwte\b|\bwpe\b|conv|vision|visual|audio|lora_")


def kind_of(name: str, weight: Tensor) -> str | None:
    """Returns `linear`, `router` or `head`; None for weights that a quantised rollout keeps as they are: embeddings,
    norms, biases, convolutions, vision and audio."""
    if weight.ndim not in (2, 3) or not weight.is_floating_point() or not MATRIX.search(name):
        return None
    parts = set(name.split("."))
    if parts & HEADS:
        return HEAD
    if NEVER.search(name):
        return None
    return ROUTER if parts & ROUTERS else LINEAR


LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
ATTENTION = re.compile(r"attn|attention")
EVERYTHING = "all linear weights"


def groups_of(name: str, weight: Tensor) -> tuple[str, ...]:
    """Returns the groups of weights that are rounded together, of which this one is a part: its layer and its kind."""
    kind = kind_of(name, weight)
    if kind != LINEAR:
        return (f"all {kind}s",) if kind else ()
    layer = LAYER.search(name)
    part = "attention" if ATTENTION.search(name) else "experts"
    return (EVERYTHING, f"all {part}", *([f"layer {layer[1]}"] if layer else []))


class SentRounding:
    """Wraps a training engine's `get_per_tensor_param`: weight syncs send a group of weights rounded.

    Attributes:
        group: the group that is rounded; "" for none.
        format: as of `fake_quantized`; each row has its own scale.
        modules: group -> the names of its modules, as far as they have been sent.
    """

    def __init__(self) -> None:
        self.group = self.format = ""
        self.modules: dict[str, list[str]] = {}

    def __call__(self, verls: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        weights, adapter = verls(*args, **kwargs)
        return self._rounded(weights), adapter

    def _rounded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            groups = groups_of(name, weight)
            for group in groups:
                modules, module = self.modules.setdefault(group, []), module_of(name)
                if module not in modules:
                    modules.append(module)
            yield name, fake_quantized(weight, self.format, "channel") if self.group in groups else weight


def module_of(name: str) -> str:
    """Returns the module of a weight, as `ignored_layers` of a quantization config names it: all experts of a layer are
    one."""
    module, experts, _ = name.removesuffix(".weight").partition(".experts.")
    return module + experts.rstrip(".")


class Rounding:
    """Wraps a model's `load_weights`, and fake-quantises weights of the requested kinds.

    gpt-oss and Llama 4 keep the weights of all experts as [E, in, out]: their groups lie along the outputs.

    Args:
        settings: `format`, `group`, `router`, `head`, as of `stability.fake_quantization`.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = dict(settings)
        self.names: dict[str, set[str]] = {LINEAR: set()}  # rounded so far
        self.names |= {kind: set() for kind in (ROUTER, HEAD) if settings[kind]}

    def __call__(
        self, load_weights: Callable[..., Any], weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any
    ) -> Any:
        return load_weights(self.rounded(weights), *args, **kwargs)

    def rounded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            kind = kind_of(name, weight)
            if kind in self.names:
                try:
                    weight = fake_quantized(weight, self.settings["format"], self.settings["group"])
                except ValueError as error:
                    raise ValueError(f"stability.fake_quantization.group: {name}: {error}") from error
                self.names[kind].add(name)
            yield name, weight


def round_while_loading(model: Any, settings: Mapping[str, Any]) -> Undo:
    return wrap("fake_quantization", model, "load_weights", Rounding(settings), "weights, ...")


def register_load_format(model_loader: Any) -> None:
    """Registers LOAD_FORMAT; the hook that `plugins.vllm.register` sets on vLLM's loaders calls this."""

    class FakeQuantizedLoader(model_loader.BaseModelLoader):
        """Loads with the `load_format` that our part of the extra config names, and installs a Rounding."""

        def __init__(self, load_config: Any):
            super().__init__(load_config)
            theirs = dict(load_config.model_loader_extra_config)
            self.settings = dict(theirs.pop(OURS))
            inner = self.settings.pop("load_format")
            inner_config = replace(load_config, load_format=inner, model_loader_extra_config=theirs)
            self.inner = model_loader.get_model_loader(inner_config)

        def download_model(self, model_config: Any) -> None:
            self.inner.download_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            if model_config.quantization is not None:
                raise ValueError(
                    f"stability.fake_quantization: vLLM quantizes this model for real ({model_config.quantization})"
                )
            round_while_loading(model, self.settings)
            self.inner.load_weights(model, model_config)

    model_loader.register_model_loader(LOAD_FORMAT)(FakeQuantizedLoader)


def round_in_scheduler() -> Undo:
    """Makes the SGLang scheduler of this process round the weights of a model whose config says so."""
    from sglang.srt.model_loader import loader

    return wrap("sglang_rounding", loader, "_initialize_model", _initialized, "model_config, ...")


def _initialized(sglangs: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any) -> Any:
    model = sglangs(model_config, *args, **kwargs)
    if settings := getattr(model_config.hf_config, OURS, None):
        round_while_loading(model, settings)
    return model


def report(model_runner: Any) -> dict[str, Any] | None:
    """Returns the settings of the Rounding of an engine's model and how many weights of each kind it rounded; None
    without one."""
    rounding = getattr(getattr(model_runner.model, "load_weights", None), "__verl_ext__", None)
    if not isinstance(rounding, Rounding):
        return None
    return {"settings": rounding.settings, "rounded": {kind: len(names) for kind, names in rounding.names.items()}}
