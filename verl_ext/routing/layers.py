"""Finds the layers of a model in each training engine of verl, and joins the states of ranks that share the tokens.

`ENGINES` of `routing.engines` names the function of each engine. Workers use it on a built engine.

Shape legend: n tokens of a pass, d width; R ranks that share them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_ext.base.names import HEAD
from verl_ext.routing.recorder import Recorder, StatePoint, named_points


def open_recorder_of_transformers(engine: Any) -> Recorder:
    """Hooks the model of an FSDP or a VeOmni engine.

    Raises:
        HookError: as `named_points`.
    """
    from verl.utils.ulysses import gather_outputs_and_unpad

    def gather_tokens(rows_nd: Tensor) -> Tensor:  # without sequence parallelism, returns its argument
        return gather_outputs_and_unpad(rows_nd.contiguous(), gather_dim=0)

    return Recorder(named_points(engine.module), gather_tokens)


def open_recorder_of_megatron(engine: Any) -> Recorder:
    """Hooks the layers of this rank's pipeline stage; a stage may have none."""
    return Recorder(megatron_points(engine.module), _gather_tokens_of_megatron(engine.tf_config))


def megatron_layers(module: Any) -> list[tuple[int, nn.Module]]:
    """Returns (number, layer) of each decoder layer on this rank, numbered from 0 over all pipeline stages.

    Layers for multi-token prediction, which have the numbers of the first layers, are outside of the decoder.

    Args:
        module: the model chunks of a Megatron engine.
    """
    return [(layer.layer_number - 1, layer) for model in _language_models(module) for layer in model.decoder.layers]


def megatron_points(module: Any) -> list[StatePoint]:
    """Returns the points of `routing.recorder` in the model chunks of a Megatron engine."""
    found = []
    for number, layer in megatron_layers(module):
        attention, mlp = getattr(layer, "self_attention", None), getattr(layer, "mlp", None)
        parts = (
            ("attention", attention, _with_bias),
            ("router", getattr(mlp, "router", None), _regated),
            ("experts", mlp, _with_bias),
            ("layer", layer, _first),
        )
        found += [StatePoint(f"{number}.{name}", part, read) for name, part, read in parts if part is not None]
    for model in _language_models(module):
        ends = (
            ("embedding", getattr(model, "embedding", None)),
            ("norm", model.decoder.final_layernorm),
            (HEAD, getattr(model, "output_layer", None)),
        )
        found += [StatePoint(name, part, _first) for name, part in ends if part is not None]
    return found


def heads_of(engine: Any) -> list[nn.Module]:
    """Returns the modules of a built engine that compute logits: one, or none on a pipeline stage without them."""
    module = engine.module
    points = megatron_points(module) if engine.engine_config.strategy == "megatron" else named_points(module)
    return [point.module for point in points if point.name == HEAD]


def unsplit(parts: Sequence[Tensor]) -> Tensor:
    """Returns [n, d] of a sequence from the [n / R, d] of each rank of context parallelism. Rank r has the r-th of 2 R
    equal pieces, and the r-th from the end.

    Source: "zigzag" of `preprocess_thd_engine` in verl/models/mcore/util.py, verl 0.9.1.
    """
    firsts, lasts = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*firsts, *reversed(lasts)])


def _language_models(module: Any) -> list[Any]:
    """Returns the language model of each chunk."""
    from verl.utils.megatron_utils import unwrap_model

    return [getattr(chunk, "language_model", chunk) for chunk in unwrap_model(list(module))]


def _gather_tokens_of_megatron(config: Any) -> Callable[[Tensor], Tensor]:
    """Returns the function that joins a sequence's tokens, one after another.

    With sequence parallelism, each rank of tensor parallelism has a slice of all hooked states; without it, each rank
    has the whole states.
    """
    from megatron.core import parallel_state as mpu

    def gather_tokens(rows_nd: Tensor) -> Tensor:
        if config.sequence_parallel and mpu.get_tensor_model_parallel_world_size() > 1:
            rows_nd = torch.cat(_of_all_ranks(rows_nd, mpu.get_tensor_model_parallel_group()))
        if mpu.get_context_parallel_world_size() > 1:
            rows_nd = unsplit(_of_all_ranks(rows_nd, mpu.get_context_parallel_group()))
        return rows_nd

    return gather_tokens


def _of_all_ranks(rows_nd: Tensor, group: Any) -> list[Tensor]:
    """Returns each rank's rows. All ranks of the group have equally many; no gradient passes."""
    parts = [torch.empty_like(rows_nd) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows_nd.contiguous(), group)
    return parts


def _first(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_bias(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Returns the module's output plus its bias, which Megatron adds outside of the module."""
    value, bias = output
    return value if bias is None else value + bias


def _regated(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Returns a router's logits, computed again from its input, because the router does not return them."""
    return module.gating(inputs[0])
