"""One read and one write of TransferQueue around the advantages: verl's own, with what we read and write in them.

Each is a round trip through TransferQueue, a fixed time however little it carries. verl's `_compute_advantage` makes
one of either (trainer/ppo/v1/trainer_base.py of 0.9.1): it reads the batch's rewards and log-probabilities, and writes
the advantages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from verl_ext.base.patching import moved, patch


class _Exchange:
    """In the place of `transfer_queue` in verl's module.

    Args:
        names: fields to read besides verl's.
        on_read: called with all that was read, of which verl is given what it asked for.
        on_write: called with what verl writes; what it returns is written with it.
    """

    def __init__(
        self,
        names: Sequence[str],
        on_read: Callable[[TensorDict], None],
        on_write: Callable[[TensorDict], dict[str, Tensor]],
    ):
        self._names, self._on_read, self._on_write = names, on_read, on_write
        self.reads = self.writes = 0

    def __getattr__(self, name: str) -> Any:
        raise moved("one_exchange", f"_compute_advantage uses {name} of TransferQueue")

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.reads += 1
        asked = list(dict.fromkeys([*select_fields, *self._names]))
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=asked)
        self._on_read(data)
        return data.select(*select_fields, strict=False)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.writes += 1
        data = TensorDict(dict(fields.items()) | self._on_write(fields), batch_size=len(keys))
        return tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=data)


@contextmanager
def one_exchange(
    names: Sequence[str],
    on_read: Callable[[TensorDict], None],
    on_write: Callable[[TensorDict], dict[str, Tensor]],
) -> Iterator[None]:
    """While verl computes advantages, read and write beside it; see `_Exchange`.

    Raises:
        PatchError: verl does not read once and write once here.
    """
    exchange: Any = _Exchange(names, on_read, on_write)
    undo = patch("one_exchange", trainer_base, "tq", exchange)
    try:
        yield
    finally:
        undo()
    if (exchange.reads, exchange.writes) != (1, 1):
        raise moved(
            "one_exchange",
            f"_compute_advantage reads {exchange.reads} and writes {exchange.writes} times, not once each",
        )
