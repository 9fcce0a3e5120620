"""Fetches routing from TransferQueue once per model replica, not once per rank.

The ranks that work on one data-parallel share together (tensor x pipeline x context parallel on Megatron, Ulysses on
FSDP) all need the whole share, and verl's tqbridge makes each of them fetch all of it. Routing has hundreds of bytes
per token, all other fields together some fifty. So each rank fetches only a part of the routing's rows, all parts about
equal in size, and the ranks gather the rest among themselves: on their devices in chunks, with gloo on CPU cores. The
batch equals that of the plain fetch, bit for bit, except for the order of its fields.

Shape legend: B trajectories, R ranks of a replica.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import BatchMeta, KVBatchMeta
from verl.utils import transferqueue_utils
from verl.utils.device import get_device_id

from verl_ext.base.errors import BatchError
from verl_ext.base.names import OLD_ROUTES, ROLLOUT_ROUTES
from verl_ext.base.patching import wrap

SHARED = (ROLLOUT_ROUTES, OLD_ROUTES)
CHUNK = 64 << 20  # bytes of all ranks' rows that a rank holds on its device at a time

Fetch = Callable[[BatchMeta | KVBatchMeta], TensorDict]


@dataclass(frozen=True)
class Layout:
    """Rows that differ only in their first dimension.

    Attributes:
        lengths: the length of each row.
        tail: the other dimensions.
    """

    lengths: tuple[int, ...]
    tail: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * prod(self.tail) * self.dtype.itemsize


@dataclass(frozen=True)
class FetchedShare:
    """A rank's report on what it has fetched, sent to the others before any of them sends rows.

    Attributes:
        contents: the trajectories and fields, and where the rows of each rank begin.
        layouts: the layout of each field's rows; None if TransferQueue made no jagged tensor of them. Empty without
            rows.
        failure: the reason why there is nothing, or "".
    """

    contents: tuple[Sequence[Any], ...] = ()
    layouts: Mapping[str, Layout | None] = field(default_factory=dict)
    failure: str = ""


def replica_group(engine: Any) -> dist.ProcessGroup | None:
    """Returns the ranks to which verl sends the same share of a batch, or None; must be called on all ranks.

    It is a group of the engine if one has exactly these ranks: another group would be one more communicator on each
    device.
    """
    share, own = engine.get_data_parallel_rank(), _model_group(engine)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (share, None if own is None else sorted(dist.get_process_group_ranks(own))))
    replicas: dict[int, list[int]] = {}
    for rank, (of, _) in enumerate(answers):
        replicas.setdefault(of, []).append(rank)
    if max(map(len, replicas.values())) == 1:
        return None
    if all(ranks == replicas[of] for of, ranks in answers):
        return own
    groups = {of: dist.new_group(ranks) for of, ranks in sorted(replicas.items()) if len(ranks) > 1}
    return groups.get(share)


def _model_group(engine: Any) -> dist.ProcessGroup | None:
    """Returns tensor x pipeline on Megatron, without its context parallelism; Ulysses on FSDP."""
    if engine.engine_config.strategy == "megatron":
        return engine.get_model_parallel_group()
    return getattr(engine, "ulysses_parallel_group", None)


class ReplicaFetch:
    """Replaces verl's `_meta_to_realdata` in a process of a training worker.

    Attributes:
        group: the ranks of a replica; None for a single rank, which fetches as verl does.
    """

    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def fetch(self, verls: Fetch, meta: BatchMeta | KVBatchMeta) -> TensorDict:
        """Returns `verls(meta)`, if all ranks of the replica make this call.

        Raises:
            BatchError: another rank could not fetch its part; it raises the reason.
        """
        names = meta.fields if isinstance(meta, KVBatchMeta) else meta.field_names
        if self.group is None or meta.size == 0 or (names is not None and not {*SHARED} & {*names}):
            return verls(meta)
        failed: Exception | None = None
        try:
            batch = transferqueue_utils.kv_batch_meta2batch_meta(meta) if isinstance(meta, KVBatchMeta) else meta
            part, data, rows = self._fetch_part(verls, batch)
        except Exception as error:
            part, failed = FetchedShare(failure=" ".join(f"{type(error).__name__}: {error}".split())), error
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, part, group=self.group)
        if failed is not None:
            raise failed
        for rank, other in enumerate(parts):
            if other.failure:
                where = f"rank {rank} of this rank's model replica"
                raise BatchError(f"{where} could not fetch its part of the batch from TransferQueue: {other.failure}")
        layouts = shared_layouts(parts)
        if layouts is None:
            return verls(batch)
        for name, of_ranks in layouts.items():
            data[name] = self._gather(rows.pop(name, None), of_ranks)
        return data

    def _fetch_part(self, verls: Fetch, batch: BatchMeta) -> tuple[FetchedShare, TensorDict, dict[str, Tensor]]:
        """Returns the report to the other ranks, the fields that are not shared, and this rank's rows of the others."""
        shared = [name for name in SHARED if name in batch.field_names]
        others = [name for name in batch.field_names if name not in shared]
        if not shared or not others:  # TransferQueue makes an empty batch of no fields
            return FetchedShare(), verls(batch), {}
        starts = divide([prod(shape or ()) for shape in batch.get_shapes(shared[0])], self.ranks)
        contents = (tuple(batch.global_indexes), tuple(batch.field_names), tuple(starts))
        rank = dist.get_rank(self.group)
        mine = list(range(starts[rank], starts[rank + 1]))
        data, rows = verls(batch.select_fields(others)), {}
        if mine:
            fetched = verls(batch.select_fields(shared).select_samples(mine))
            rows = {name: fetched[name] for name in shared}
        return FetchedShare(contents, {name: layout_of(value) for name, value in rows.items()}), data, rows

    def _gather(self, own: Tensor | None, of_ranks: Sequence[Layout]) -> Tensor:
        """Gathers the rows of all ranks into one jagged tensor on the host."""
        sizes = [layout.nbytes for layout in of_ranks]
        sent = torch.empty(0, dtype=torch.uint8) if own is None else byte_view(own)
        all_bytes = torch.empty(sum(sizes), dtype=torch.uint8)
        places = list(all_bytes.split(sizes))
        step = CHUNK // self.ranks
        for at in range(0, max(sizes), step):
            piece = torch.zeros(min(step, max(sizes) - at), dtype=torch.uint8, device=get_device_id())
            chunk = sent[at : at + step]
            piece[: len(chunk)] = chunk
            pieces = [torch.empty_like(piece) for _ in range(self.ranks)]
            dist.all_gather(pieces, piece, group=self.group)
            for place, received in zip(places, pieces, strict=True):
                free = place[at : at + step]
                free.copy_(received[: len(free)])
        lengths = list(chain.from_iterable(layout.lengths for layout in of_ranks))
        values = all_bytes.view(of_ranks[0].dtype).view(sum(lengths), *of_ranks[0].tail)
        offsets = torch.tensor([0, *accumulate(lengths)])
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))


FETCH = ReplicaFetch()


def share_fetches(engine: Any) -> None:
    """Shares fetches from now on, in all ranks of the actor's engine. Nothing changes if a replica is one rank."""
    FETCH.group = replica_group(engine)
    if FETCH.group is not None:
        wrap("replica_fetch", transferqueue_utils, "_meta_to_realdata", FETCH.fetch, "meta")


def divide(sizes_B: Sequence[int], ranks: int) -> list[int]:
    """Returns [R + 1], the start of each rank's run of rows, and the end of the last; all runs have about the same
    size.

    A row goes to the rank whose share of the sum contains the row's middle, so that no rank has more than one row too
    many.
    """
    middles_B = [end - size / 2 for end, size in zip(accumulate(sizes_B), sizes_B, strict=True)]
    return [0, *(bisect_left(middles_B, sum(sizes_B) * rank / ranks) for rank in range(1, ranks)), len(sizes_B)]


def layout_of(value: Any) -> Layout | None:
    """Returns the layout; None if the value is not a jagged tensor, or is ragged in another dimension than its rows'
    first."""
    if not (isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged):
        return None
    shapes = [tuple(row.shape) for row in value.unbind()]
    tails = {shape[1:] for shape in shapes}
    return Layout(tuple(shape[0] for shape in shapes), tails.pop(), value.dtype) if len(tails) == 1 else None


def shared_layouts(parts: Sequence[FetchedShare]) -> dict[str, list[Layout]] | None:
    """Returns the layout of each rank's rows, by field; None if the ranks have not fetched parts of one jagged tensor.

    That happens if they got different trajectories, as for a reference with another kind of parallelism.
    """
    if any(part.contents != parts[0].contents for part in parts):
        return None
    found: dict[str, list[Layout]] = {}
    for name in SHARED:
        fetched = [part.layouts[name] for part in parts if name in part.layouts]
        jagged = [layout for layout in fetched if layout is not None]
        if len(jagged) < len(fetched) or len({(layout.tail, layout.dtype) for layout in jagged}) > 1:
            return None
        if jagged:
            without_rows = replace(jagged[0], lengths=())
            found[name] = [part.layouts.get(name) or without_rows for part in parts]
    return found


def byte_view(jagged: Tensor) -> Tensor:
    """Returns [bytes] uint8, without a copy: NCCL does not support all dtypes, for example int16."""
    return jagged.values().reshape(-1).view(torch.uint8)
