"""Reads and writes a batch's fields in TransferQueue, and chooses the fields that each of verl's stages gets.

Shape legend: B trajectories of the batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.names import (
    OLD_ROUTES,
    RESPONSE_MASK,
    ROLLOUT_ROUTES,
    ROUTER_SUMS,
    TOP_TOKEN_IDS,
    TOP_TOKEN_LOG_PROBS,
    TOP_TOKEN_SUMS,
)
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.routing import replayed_field
from verl_ext.features.verl_config import passes_at_once

TOP_TOKEN_FIELDS = (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS)
MODEL_INPUTS = "multi_modal_inputs"  # images and the like: the only field without numbers that workers read
HEAVY_FIELDS = (ROLLOUT_ROUTES, OLD_ROUTES, ROUTER_SUMS, *TOP_TOKEN_FIELDS, TOP_TOKEN_SUMS)


def get_fields(batch: KVBatchMeta, names: Sequence[str] | None) -> TensorDict:
    """Returns those of the named fields that the batch has; all of its fields for None."""
    asked = None if names is None else list(names)
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=asked)


def computed_log_probs(batch: KVBatchMeta) -> Tensor:
    """Returns the log-probabilities of each response, nested, which compute_log_prob has left in the batch."""
    from verl.workers.utils.padding import response_from_nested

    data = get_fields(batch, ["log_probs", RESPONSE_MASK])
    return response_from_nested(data["log_probs"], data[RESPONSE_MASK])


def put_fields(batch: KVBatchMeta, fields: Mapping[str, Tensor]) -> KVBatchMeta:
    """Writes fields of the batch; returns the meta that names all of its fields, these included."""
    data = TensorDict(dict(fields), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


class JoinedCalls:
    """TransferQueue as verl's `_compute_advantage` of one batch uses it: what was read before is not read again, and
    what is written waits to be written with other fields.

    A call costs as much as many fields, because each goes over the controller's and the storage units' sockets.

    Args:
        batch: its meta.
        held: the fields that were read.
        waiting: takes the fields that are written.
    """

    def __init__(self, batch: KVBatchMeta, held: Mapping[str, Any], waiting: dict[str, Any]):
        self._batch, self._held, self._waiting = batch, held, waiting

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None) -> TensorDict:
        if not self._is_of(keys, partition_id) or not isinstance(select_fields, list):
            return tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=select_fields)
        here = {**self._held, **self._waiting}
        found = {name: here[name] for name in select_fields if name in here}
        if missing := [name for name in select_fields if name not in here]:
            found.update(get_fields(self._batch, missing).items())
        return TensorDict(found, batch_size=len(keys))

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, **more: Any) -> KVBatchMeta:
        if not self._is_of(keys, partition_id) or fields is None or more:
            return tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=fields, **more)
        self._waiting.update(fields.items())
        return self._batch

    def __getattr__(self, name: str) -> Any:
        return getattr(tq, name)

    def _is_of(self, keys: Any, partition_id: str) -> bool:
        return keys == self._batch.keys and partition_id == self._batch.partition_id


def schema_of(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """Returns field -> `dtype` and `is_non_tensor` of its rows, from TransferQueue's metadata only."""
    return tq.get_client().kv_retrieve_meta(keys=list(batch.keys), partition_id=batch.partition_id).field_schema


def drop_fields(batch: KVBatchMeta, unread: Collection[str]) -> KVBatchMeta:
    """Returns a copy of the meta without these fields."""
    if batch.fields is None:
        return replace(batch)
    return replace(batch, fields=[field for field in batch.fields if field not in unread])


def drop_heavy_fields(
    batch: KVBatchMeta, read: Collection[str | None] = (), unread: Collection[str] = ()
) -> KVBatchMeta:
    """Returns a copy of the meta without routing and top tokens, hundreds of bytes per token each, except those that a
    stage reads; and without the fields `unread`."""
    return drop_fields(batch, (set(HEAVY_FIELDS) - set(read)) | set(unread))


class WorkerFields:
    """Chooses the fields of the current batch that each stage sends to the actor's workers: a copy of its meta."""

    def __init__(self) -> None:
        self._unread: frozenset[str] = frozenset()

    def log_prob_batch(self, batch: KVBatchMeta, features: RunFeatures) -> KVBatchMeta:
        """Returns the batch for compute_log_prob, the first stage that goes to the workers.

        Columns of the dataset and the agent loop's notes on a trajectory are left out, because no worker reads them:
        some twenty fields, and fetching a row of each costs as much as a row of numbers.
        """
        if not features.own_workers:  # other people's workers may read all of it
            self._unread = frozenset()
            return replace(batch)
        schema = schema_of(batch)
        self._unread = frozenset(name for name, of in schema.items() if of["is_non_tensor"] and name != MODEL_INPUTS)
        return replace(batch, fields=[name for name in batch.fields or schema if name not in self._unread])

    def reference_batch(self, batch: KVBatchMeta, features: RunFeatures, *, in_actor: bool) -> KVBatchMeta:
        # A LoRA's reference is the actor without its adapter, and is routed as the actor is.
        read = {replayed_field(features.config)} if in_actor else set()
        return drop_heavy_fields(batch, read, self._unread)

    def canary_batch(self, batch: KVBatchMeta, features: RunFeatures) -> KVBatchMeta:
        return drop_heavy_fields(batch, {replayed_field(features.config)}, self._unread)

    def update_batch(self, batch: KVBatchMeta, features: RunFeatures, *, late: bool) -> KVBatchMeta:
        top_tokens = TOP_TOKEN_FIELDS if Need.TOP_TOKENS_IN_UPDATE in features.needs else ()
        read = {replayed_field(features.config), *top_tokens}
        if late and Need.COMPARED_ROUTERS in features.needs:
            read.add(ROLLOUT_ROUTES)
        return drop_heavy_fields(batch, read, self._unread)


def ranks_of(workers: Any) -> int:
    """Returns how many data-parallel ranks share a batch; verl has fetched it from the actor's workers, to balance the
    batch."""
    return max(workers._dispatch_info["actor"]) + 1


def row_multiple(workers: Any, config: DictConfig) -> int:
    """Returns the number of which the rows that the actor's workers score must be a multiple: the ranks, times the
    passes that each makes at once."""
    return ranks_of(workers) * passes_at_once(config)


def part_of(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    keys, tags = ([values[row] for row in rows] for values in (batch.keys, batch.tags))
    return replace(batch, keys=keys, tags=tags)
