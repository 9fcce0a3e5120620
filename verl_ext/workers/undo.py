"""What one update of the workers changes, kept so that it can be taken back bit for bit: the guard's action `undo`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class KeptUpdate:
    """One update taken back: what it changes is kept in the host's memory before its first optimizer step.

    For FSDP2, whose ranks each keep their own shards: 12 bytes for a parameter that is trained with Adam in float32.

    Args:
        weights: name -> parameter or buffer, as they are now.
        optimizer, scheduler: of them.
        scaler: of the loss, where there is one.

    Attributes:
        of: the step whose update can be taken back; None where there is none.
    """

    def __init__(self, weights: Callable[[], dict[str, Tensor]], optimizer: Any, scheduler: Any, scaler: Any = None):
        self._weights, self._optimizer = weights, optimizer
        self._states = [part for part in (scheduler, scaler) if part is not None]
        self.of: int | None = None
        self._kept: dict[Any, Any] = {}  # by name; its memory is written anew each time
        self._settings: dict[str, Any] = {}

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy what this step is about to change; called before its first change of the weights."""
        now: dict[Any, Any] = {**self._weights(), **{moment: state[moment[1]] for moment, state in self._moments()}}
        self._kept = {name: _copy_to_host(value, self._kept.get(name)) for name, value in now.items()}
        groups = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        self._settings = copy.deepcopy({"groups": groups, "states": [part.state_dict() for part in self._states]})
        self.of = step

    @torch.no_grad()
    def take_back(self, after: int) -> int | None:
        """Make everything again what it was, bit for bit; the step that `keep` was called in.

        Nothing where that is not after the step `after`, at whose end weights were given up already.
        """
        of, self.of = self.of, None
        if of is None or of <= after:
            return None
        for name, weight in self._weights().items():
            _local(weight).copy_(self._kept[name])
        for moment, state in list(self._moments()):
            key = moment[1]
            if moment not in self._kept:  # there was none before the first step
                del state[key]
            elif isinstance(state[key], Tensor):
                _local(state[key]).copy_(self._kept[moment])
            else:
                state[key] = self._kept[moment]
        settings = copy.deepcopy(self._settings)
        for group, kept in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            group.update(kept)
        for part, kept in zip(self._states, settings["states"], strict=True):
            part.load_state_dict(kept)
        return of

    def _moments(self) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
        """((number of a parameter, name of what the optimizer holds of it), where that stands)."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            state = self._optimizer.state.get(parameter, {})
            for key in state:
                yield (number, key), state


def keep_updates_of(engine: Any) -> KeptUpdate:
    """The undo of a started FSDP2 engine of verl's, or of another whose module is whole in this process."""

    def weights() -> dict[str, Tensor]:
        for module in engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is gathered for a pass is a copy
        trained = {name: value for name, value in engine.module.named_parameters() if value.requires_grad}
        return {**trained, **dict(engine.module.named_buffers())}

    return KeptUpdate(weights, engine.optimizer, engine.lr_scheduler, getattr(engine, "scaler", None))


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _copy_to_host(value: Any, into: Any) -> Any:
    """A copy in the host's memory, in `into` where that fits."""
    if not isinstance(value, Tensor):
        return value
    value = _local(value)
    if into is None or into.shape != value.shape or into.dtype != value.dtype:
        into = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return into.copy_(value)
