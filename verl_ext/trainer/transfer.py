"""A batch's fields in TransferQueue: reading and writing them, and which of them a stage is sent."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.names import (
    HEAD_IDS,
    HEAD_LOG_PROBS,
    HEAD_SUMS,
    OLD_ROUTES,
    ROLLOUT_ROUTES,
    ROUTER_SUMS,
    SHIFT_EXPERTS,
    SHIFT_SCORES,
)

SHIFT_FIELDS = (SHIFT_EXPERTS, SHIFT_SCORES)  # what the loss router_shift compares the current router with
HEAD_FIELDS = (HEAD_IDS, HEAD_LOG_PROBS)
SEEN = "multi_modal_inputs"  # by the model, beside its tokens: the one field without numbers that workers read
HEAVY_FIELDS = (ROLLOUT_ROUTES, OLD_ROUTES, ROUTER_SUMS, *SHIFT_FIELDS, *HEAD_FIELDS, HEAD_SUMS)


def get_fields(batch: KVBatchMeta, names: Sequence[str] | None) -> TensorDict:
    """Those of the fields that the batch has; all of its fields for None."""
    asked = None if names is None else list(names)
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=asked)


def put_fields(batch: KVBatchMeta, fields: Mapping[str, Tensor]) -> KVBatchMeta:
    """Write fields of the batch; the meta that names all of its fields, these among them."""
    data = TensorDict(dict(fields), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def of_rows(field: Tensor) -> Tensor:
    """[B, n] of a field whose rows have as many numbers each, in whatever way TransferQueue has put them together."""
    return field.values().view(len(field), -1) if field.is_nested else field


def without(batch: KVBatchMeta, unread: Collection[str]) -> KVBatchMeta:
    """A copy of the meta without these fields."""
    if batch.fields is None:
        return replace(batch)
    return replace(batch, fields=[field for field in batch.fields if field not in unread])


def without_heavy(batch: KVBatchMeta, read: Collection[str | None] = ()) -> KVBatchMeta:
    """A copy of the meta without routing and heads, hundreds of bytes a token each, but for what a stage reads."""
    return without(batch, set(HEAVY_FIELDS) - set(read))


def schema_of(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """All fields of the batch, with `dtype` and `is_non_tensor` of their rows; from TransferQueue's metadata alone."""
    return tq.get_client().kv_retrieve_meta(keys=list(batch.keys), partition_id=batch.partition_id).field_schema
