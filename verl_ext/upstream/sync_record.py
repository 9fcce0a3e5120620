"""Records a weight sync at both ends: the tensors that training hands to verl, and those that the rollout's processes
load, with the parameters that the load wrote.

`engine_calls.call` calls `record_arrivals`, `end_record` and `arrived_tensors` in the processes of the rollout. vLLM's
worker is recorded where verl hands it a bucket, in `_update_weights` of verl's extension: buffers and LoRA adapters
pass there too. SGLang is recorded in the model's `load_weights`, before which nothing of verl's runs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_ext.base.patching import Undo, wrap
from verl_ext.core.checksums import SentTensor, TensorRecorder, digest

TAKES = "self, weights, peft_config, base_sync_done"
EXAMPLES = 3  # of the slices of a parameter that nothing was written to


@dataclass(frozen=True)
class Recorded:
    """What one process saw of a sync, without the tensors.

    Attributes:
        count, digest: of the tensors.
        twice: a name passed more than once.
        unwritten: parameter of the engine -> what nothing was written to; None if parameters were not watched.
        widened: parameters that are kept in a wider dtype than both what was sent and the model's: name -> dtypes.
    """

    count: int
    digest: int
    twice: bool = False
    unwritten: dict[str, str] | None = None
    widened: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[SentTensor], **engine: Any) -> "Recorded":
        seen = [*tensors]
        names = Counter(each.name for each in seen)
        return cls(len(seen), digest(seen), any(times > 1 for times in names.values()), **engine)


# In a training worker


class SentRecord:
    """Wraps a training engine's `get_per_tensor_param`, and records the weights that it yields, if asked to.

    Attributes:
        tensors, before: what the last two recorded syncs sent.
    """

    def __init__(self) -> None:
        self.tensors: tuple[SentTensor, ...] = ()
        self.before: tuple[SentTensor, ...] = ()
        self._recorder: TensorRecorder | None = None

    def __call__(self, verls: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        weights, adapter = verls(*args, **kwargs)
        return self._recorded(weights), adapter

    def _recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if self._recorder is not None:
                self._recorder.add(name, weight)
            yield name, weight

    def begin(self) -> None:
        self._recorder = TensorRecorder()

    def end(self) -> Recorded:
        assert self._recorder is not None
        self.before, self.tensors = self.tensors, self._recorder.close()
        self._recorder = None
        return Recorded.of(self.tensors)


# In a process of the rollout


def record_arrivals(model_runner: Any) -> None:
    """Records the next syncs, until `end_record`."""
    earlier = getattr(model_runner, "verl_ext_arrivals", None)
    if earlier is not None and earlier.recorded is None:
        earlier.undo()  # of a sync that raised
    model_runner.verl_ext_arrivals = Arrivals(model_runner)


def end_record(model_runner: Any) -> dict[str, Any]:
    """Returns a `Recorded` of the sync as a dict, because vLLM makes one of any dataclass on its way."""
    return asdict(model_runner.verl_ext_arrivals.close())


def last_record(model_runner: Any) -> dict[str, Any] | None:
    """Returns the `Recorded` of the last recorded sync as a dict; None before the first."""
    arrivals = getattr(model_runner, "verl_ext_arrivals", None)
    return None if arrivals is None or arrivals.recorded is None else asdict(arrivals.recorded)


def arrived_tensors(model_runner: Any) -> list[tuple[Any, ...]]:
    """Returns the tensors of the last recorded sync; `read_tensors` reads them."""
    return [astuple(each) for each in model_runner.verl_ext_arrivals.tensors]


def read_tensors(answer: Iterable[Sequence[Any]]) -> tuple[SentTensor, ...]:
    return tuple(SentTensor(name, tuple(shape), *rest) for name, shape, *rest in answer)


class Arrivals:
    """Records what arrives in a process of the rollout, and which parameters are written.

    Attributes:
        recorded, tensors: the result, after `close`.
    """

    recorded: Recorded | None = None
    tensors: tuple[SentTensor, ...] = ()
    undo: Undo

    def __init__(self, runner: Any) -> None:
        self._runner, self._recorder = runner, TensorRecorder()
        self._writes: Writes | None = None
        if hasattr(runner, "server_args"):
            self.undo = wrap("sglang_sync_record", runner.model, "load_weights", self._load, "weights, ...")
        else:
            from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

            self.undo = wrap("vllm_sync_record", vLLMColocateWorkerExtension, "_update_weights", self._take, TAKES)

    def _load(self, sglangs: Callable[..., Any], weights: Iterable[tuple[str, Tensor]], *args: Any, **kw: Any) -> Any:
        weights = [*weights]
        self._record(weights)
        with self._watched():
            return sglangs(weights, *args, **kw)

    def _take(
        self, verls: Callable[..., Any], worker: Any, weights: Any, peft_config: Any, base_sync_done: bool
    ) -> Any:
        self._record(weights)
        with nullcontext() if peft_config and base_sync_done else self._watched():  # an adapter writes no parameter
            return verls(worker, weights, peft_config=peft_config, base_sync_done=base_sync_done)

    def _record(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._recorder.add(name, weight)

    def _watched(self) -> AbstractContextManager[Any]:
        """Returns a context that notes writes to parameters, unless the engine quantises what it loads."""
        if self._runner.model_config.quantization is not None:
            return nullcontext()
        if self._writes is None:  # only now, because verl may replace parameters before the first bucket
            self._writes = Writes(self._runner.model, getattr(self._runner, "dtype", None))
        return self._writes

    def close(self) -> Recorded:
        self.undo()
        self.tensors, seen = self._recorder.close(), {}
        if self._writes is not None:
            seen = {"unwritten": self._writes.unwritten(self._runner.model), "widened": self._writes.widened}
        self.recorded = Recorded.of(self.tensors, **seen)
        self._recorder, self._writes = TensorRecorder(), None  # they hold numbers on the device
        return self.recorded


class Writes(TorchDispatchMode):
    """Context that notes which parts of a model's parameters torch writes to, by whatever loader.

    Attributes:
        widened: of `Recorded`.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.widened: dict[str, str] = {}
        self._dtype = dtype
        self._names: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # storage -> start, end, parameter
        self._parts: dict[str, set[tuple[Any, ...]]] = {}  # parameter -> offset, sizes, strides of each part
        self._writing: dict[Any, list[tuple[int, str]]] = {}  # operator -> the arguments that it writes to
        for name, parameter in model.named_parameters():
            start, ends = parameter.storage_offset(), zip(parameter.shape, parameter.stride(), strict=True)
            end = start + sum((size - 1) * stride for size, stride in ends)
            self._names[_storage(parameter)].append((start, end, name))
            self._parts[name] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in self._written_by(func):
            written = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(written, Tensor):
                self._note(written, args[1] if func is torch.ops.aten.copy_.default else None)
        return func(*args, **kwargs)

    def _written_by(self, func: Any) -> list[tuple[int, str]]:
        if (found := self._writing.get(func)) is None:
            arguments = enumerate(func._schema.arguments)
            found = [(place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write]
            self._writing[func] = found
        return found

    def _note(self, written: Tensor, source: Any) -> None:
        offset = written.storage_offset()
        for start, end, name in self._names.get(_storage(written), ()):
            if start <= offset <= end:
                self._parts[name].add((offset, tuple(written.shape), written.stride()))
                if isinstance(source, Tensor) and written.dtype.itemsize > max(
                    source.itemsize, _item_size(self._dtype)
                ):
                    self.widened[name] = f"{_dtype_name(source.dtype)} to {_dtype_name(written.dtype)}"

    def unwritten(self, model: Any) -> dict[str, str]:
        """Returns parameter -> what nothing was written to.

        A parameter whose storage was replaced counts as written.
        """
        found = {}
        for name, parameter in model.named_parameters():
            parts = self._parts.get(name)
            if parts is None or parameter.numel() == 0 or _storage(parameter) not in self._names:
                continue
            if not parts:
                found[name] = "nothing was written to it"
            elif (count := sum(prod(shape) for _, shape, _ in parts)) < parameter.numel():
                found[name] = f"only {count} of its {parameter.numel()} numbers were written"
                if parameter.ndim > 2:
                    short = _short(parameter, parts)
                    some = ", ".join(map(str, short[:EXAMPLES])) + (", ..." if len(short) > EXAMPLES else "")
                    found[name] += f"; matrices that are not whole: {some}"
        return found


def _short(parameter: Tensor, parts: Iterable[tuple[Any, ...]]) -> list[int]:
    """Returns the places of the first dimension, such as experts, that the parts do not fill."""
    step, filled = parameter.stride(0), [0.0] * len(parameter)
    for offset, shape, stride in parts:
        first = (offset - parameter.storage_offset()) // step
        count = 1 + sum((size - 1) * each for size, each in zip(shape, stride, strict=True)) // step
        for place in range(first, first + count):
            filled[place] += prod(shape) / count
    return [place for place, numbers in enumerate(filled) if numbers < parameter[0].numel()]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _item_size(dtype: torch.dtype | None) -> int:
    return 8 if dtype is None else dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
