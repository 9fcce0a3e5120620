"""A batch's fields in TransferQueue: reading and writing them, and which of them a stage is sent."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

SHIFT_FIELDS = ("router_experts", "router_scores")  # what the loss router_shift compares the current router with
ROUTING_FIELDS = ("routed_experts", "old_routed_experts", "router_sums", *SHIFT_FIELDS)


def get_fields(batch: KVBatchMeta, names: Sequence[str]) -> TensorDict:
    """Those of the fields that the batch has."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def put_fields(batch: KVBatchMeta, fields: Mapping[str, Tensor]) -> KVBatchMeta:
    """Write fields of the batch; the meta that names all of its fields, these among them."""
    data = TensorDict(dict(fields), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def nested(values: Tensor, offsets: Tensor) -> Tensor:
    """Packed values, one a response token, as the nested [B, r] tensor that verl keeps; offsets: [B + 1]."""
    # Without max_seqlen, torch 2.13 pads each row to the length of all rows together.
    return torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=int(offsets.diff().max()))


def without_routing(batch: KVBatchMeta, read: Collection[str | None] = ()) -> KVBatchMeta:
    """A copy of the meta without the routing, hundreds of bytes a token, but for what of it a stage reads."""
    if batch.fields is None:
        return replace(batch)
    unread = set(ROUTING_FIELDS) - set(read)
    return replace(batch, fields=[field for field in batch.fields if field not in unread])
