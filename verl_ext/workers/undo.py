"""Keeps what one update of the workers changes, so that it can be taken back bit for bit: the guard's action `undo`."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_ext.base.errors import HookError

PLAIN = (Tensor, nn.Parameter)  # these are copied bit for bit; a quantised tensor would be rebuilt from its values


@dataclass(frozen=True)
class UpdateParts:
    """Everything that an update changes on one rank of an engine.

    Attributes:
        weights: returns name -> trained parameter; called when a pass is over.
        buffers: returns name -> buffer.
        optimizers: torch's optimizers, whose parameters (also float32 copies of the weights), state and groups are
            kept.
        states: other objects with a `state_dict` that `load_state_dict` restores: schedule, scaler of the loss.
        loaded: context that loads weights and optimizer, as an update does, if they are offloaded.
    """

    weights: Callable[[], dict[str, Tensor]]
    buffers: Callable[[], dict[str, Tensor]]
    optimizers: Sequence[Any]
    states: Sequence[Any]
    loaded: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


class KeptUpdate:
    """Takes one update back: keeps all that it changes in the host's memory, from before its first optimizer step.

    Each rank keeps its own part: 12 bytes per parameter of its shards that is trained with Adam in float32. Megatron's
    ranks also keep their 16-bit weights, which all ranks of a data-parallel group have.

    Attributes:
        of: the step whose update can be taken back; None if there is none.
    """

    def __init__(self, parts: UpdateParts):
        self._parts = parts
        self.of: int | None = None
        self._kept: dict[Any, Any] = {}  # by name; its memory is reused each time
        self._begun: int | None = None
        self._buffers: dict[str, Tensor] = {}
        self._settings: dict[str, Any] = {}

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Copies the buffers before the first pass of a step's update; a second call in a step does nothing.

        megatron-core moves the bias of each router where the last micro-batch's backward pass ends
        (`finalize_model_grads`, with `moe_router_bias_update_rate`), before any optimizer step.
        """
        if self._begun != step:
            self._begun = step
            self._buffers = {name: _copy_to_host(value, None) for name, value in self._parts.buffers().items()}

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copies what this step is about to change; called before its first change of the weights.

        Raises:
            HookError: a tensor is quantised.
        """
        self.begin(step)
        now: dict[Any, Any] = dict(self._tensors())
        had = {_memory_of(value) for value in now.values()}
        for moment, state in self._moments():
            value = state[moment[2]]
            if isinstance(value, Tensor) and value.numel():
                # megatron-core's offloaded Adam has its state twice, and its copy of the weights in there as well.
                if _memory_of(value) in had:
                    continue
                had.add(_memory_of(value))
            now[moment] = value
        self._kept = {name: _copy_to_host(value, self._kept.get(name)) for name, value in now.items()}
        self._kept |= {("buffer", name): value for name, value in self._buffers.items()}
        groups = [[_group_settings(group) for group in one.param_groups] for one in self._parts.optimizers]
        states = [part.state_dict() for part in self._parts.states]
        moments = [moment for moment, _ in self._moments()]
        self._settings = copy.deepcopy({"groups": groups, "states": states, "moments": set(moments)})
        self.of = step

    @torch.no_grad()
    def take_back(self, after: int) -> int | None:
        """Restores everything, bit for bit; returns the step in which `keep` was called.

        A loss scale that an overflow lowered stays low. Does nothing, and returns None, unless that step comes after
        `after`, the step at whose end weights were last given up.
        """
        of, self.of = self.of, None
        if of is None or of <= after:
            return None
        with self._parts.loaded():
            self._restore()
        return of

    def _restore(self) -> None:
        for name, value in self._tensors():
            _local(value).copy_(self._kept[name])
        for name, value in self._parts.buffers().items():
            value.copy_(self._kept["buffer", name])
        settings = copy.deepcopy(self._settings)
        for moment, state in list(self._moments()):
            key = moment[2]
            if moment not in settings["moments"]:  # there was none before the first step
                state.pop(key, None)  # two optimizers may have one state
            elif moment in self._kept:
                if isinstance(state[key], Tensor):
                    _local(state[key]).copy_(self._kept[moment])
                else:
                    state[key] = self._kept[moment]
        for optimizer in self._parts.optimizers:
            for held in _held_by(optimizer):
                for parameter in _parameters(optimizer):
                    if not held.get(parameter, True):  # an optimizer may ask whether it has a state, not what is in it
                        del held[parameter]
        for optimizer, groups in zip(self._parts.optimizers, settings["groups"], strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                for key in _group_settings(group).keys() - kept.keys():
                    del group[key]
                group.update(kept)
        for part, kept in zip(self._parts.states, settings["states"], strict=True):
            if not _is_lowered(part.state_dict(), kept):
                part.load_state_dict(kept)

    def _tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """Yields (name, weight), and the optimizer's own copies of weights: ((number of optimizer, of parameter),
        copy)."""
        weights = self._parts.weights()
        yield from weights.items()
        had = {_memory_of(value) for value in weights.values()}
        for number, optimizer in enumerate(self._parts.optimizers):
            for index, parameter in enumerate(_parameters(optimizer)):
                if parameter.numel() and _memory_of(parameter) not in had:
                    yield (number, index), parameter

    def _moments(self) -> Iterator[tuple[tuple[int, int, str], dict[str, Any]]]:
        """Yields ((number of the dict of states, number of the parameter, name of the moment), the state that has
        it)."""
        for number, optimizer in enumerate(self._parts.optimizers):
            for kind, held in enumerate(_held_by(optimizer)):
                for index, parameter in enumerate(_parameters(optimizer)):
                    state = held.get(parameter, {})
                    for key in state:
                        yield (2 * number + kind, index, key), state


class ScheduleSteps:
    """The steps that megatron-core's `OptimizerParamScheduler` has taken, its only state.

    Its own `load_state_dict` (0.16.1) adds the steps that it loads to those that it has taken; the rates that follow
    from them are in the optimizer's groups.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self._scheduler.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._scheduler.num_steps = state["num_steps"]


def keep_updates_of(engine: Any) -> KeptUpdate:
    """Builds the undo of one of verl's started FSDP2, VeOmni or Megatron engines, or of an engine whose module is whole
    in this process."""
    megatron = engine.engine_config.strategy == "megatron"
    return KeptUpdate(_megatron_parts(engine) if megatron else _module_parts(engine))


def _module_parts(engine: Any) -> UpdateParts:
    def weights() -> dict[str, Tensor]:
        for module in engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the gathered weights of a pass are a copy
        return {name: value for name, value in engine.module.named_parameters() if value.requires_grad}

    states = [part for part in (engine.lr_scheduler, getattr(engine, "scaler", None)) if part is not None]
    return UpdateParts(weights, lambda: dict(engine.module.named_buffers()), [engine.optimizer], states)


def _megatron_parts(engine: Any) -> UpdateParts:
    """Returns the parts of every chunk of the model, and of each optimizer in megatron-core's chain."""
    chunks = list(enumerate(engine.module))

    def weights() -> dict[str, Tensor]:
        named = ((f"{number}.{name}", value) for number, chunk in chunks for name, value in chunk.named_parameters())
        return {name: value for name, value in named if value.requires_grad}

    def buffers() -> dict[str, Tensor]:
        return {f"{number}.{name}": value for number, chunk in chunks for name, value in chunk.named_buffers()}

    chain = megatron_optimizers(engine)
    outer = [one.optimizer for one in chain if one.optimizer is not None]  # a rank may have nothing to train
    # With optimizer_cpu_offload, each has an Adam on the CPU and one on the GPU, with their own copies.
    inner = [each for one in outer for each in getattr(one, "sub_optimizers", ())]
    scalers = [one.grad_scaler for one in chain if getattr(one, "grad_scaler", None) is not None]
    states = [ScheduleSteps(engine.lr_scheduler), *scalers]
    return UpdateParts(weights, buffers, [*outer, *inner], states, loaded=engine.train_mode)


def megatron_optimizers(engine: Any) -> list[Any]:
    """Returns megatron-core's optimizers of a Megatron engine: one, or a second one for its experts."""
    return list(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]))


def _held_by(optimizer: Any) -> tuple[Any, Any]:
    """Returns parameter -> an optimizer's tensors of it: moments, and for Transformer Engine's FusedAdam their
    scales."""
    return optimizer.state, getattr(optimizer, "_scales", {})


def _is_lowered(now: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Returns True if an overflow of fp16's gradients lowered the loss scale, which must stay so to avoid another."""
    return "scale" in kept and float(now["scale"]) < float(kept["scale"])


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _memory_of(value: Tensor) -> int:
    """Returns the address of the memory behind a tensor, or behind this rank's part of it; views of a tensor share
    one."""
    return _local(value).untyped_storage().data_ptr()


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _copy_to_host(value: Any, into: Any) -> Any:
    """Copies a value to the host's memory, into `into` if that fits."""
    if not isinstance(value, Tensor):
        return value
    value = _local(value)
    if type(value) not in PLAIN:
        raise HookError(f"an update of a {type(value).__name__} cannot be taken back; set action to rollback")
    if into is None or into.shape != value.shape or into.dtype != value.dtype:
        into = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return into.copy_(value)
