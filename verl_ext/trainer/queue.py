"""A step's batch in TransferQueue: its fields, those that each of verl's stages gets, and the batch that the step takes
(`trainer.step.Batch`), some tokens at a time.

Shape legend: N response tokens of a block, B trajectories of the batch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.names import (
    ADVANTAGES,
    LOSS_MASK,
    OLD_LOG_PROBS,
    OLD_ROUTES,
    RESPONSE_MASK,
    REWARDS,
    ROLLOUT_LOG_PROBS,
    ROLLOUT_ROUTES,
    ROUTER_SUMS,
    SHIFT_EXPERTS,
    SHIFT_SCORES,
    TOP_TOKEN_IDS,
    TOP_TOKEN_LOG_PROBS,
    TOP_TOKEN_SUMS,
    WEIGHTS,
)
from verl_ext.core.advantages import Sessions
from verl_ext.core.filters import FilterBatch
from verl_ext.core.mismatch import signs_of_rows, sums_by_row, sums_by_sign
from verl_ext.core.tokens import BLOCK_TOKENS, Lag, Tokens, jagged, segment_sums
from verl_ext.features.feature import Part, RunFeatures
from verl_ext.features.routing import replayed_field
from verl_ext.trainer.batch import FIELDS, FILTER_FIELDS, log_k_sums, pick_lag, pick_rows, response_tokens

SHIFT_FIELDS = (SHIFT_EXPERTS, SHIFT_SCORES)  # the loss router_shift compares the current router with these
HEAD_FIELDS = (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS)
MODEL_INPUTS = "multi_modal_inputs"  # other inputs of the model: the only field without numbers that workers read
HEAVY_FIELDS = (ROLLOUT_ROUTES, OLD_ROUTES, ROUTER_SUMS, *SHIFT_FIELDS, *HEAD_FIELDS, TOP_TOKEN_SUMS)
ENGINES = (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, RESPONSE_MASK)


def get_fields(batch: KVBatchMeta, names: Sequence[str] | None) -> TensorDict:
    """Returns those of the named fields that the batch has; all of its fields for None."""
    asked = None if names is None else list(names)
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=asked)


def put_fields(batch: KVBatchMeta, fields: Mapping[str, Tensor]) -> KVBatchMeta:
    """Writes fields of the batch; returns the meta that names all of its fields, these included."""
    data = TensorDict(dict(fields), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def row_matrix(field: Tensor) -> Tensor:
    """Returns [B, n] of a field whose rows have equal lengths, however TransferQueue has put them together."""
    return field.values().view(len(field), -1) if field.is_nested else field


def schema_of(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """Returns all fields of the batch, with `dtype` and `is_non_tensor` of their rows; only from TransferQueue's
    metadata."""
    return tq.get_client().kv_retrieve_meta(keys=list(batch.keys), partition_id=batch.partition_id).field_schema


def drop_fields(batch: KVBatchMeta, unread: Collection[str]) -> KVBatchMeta:
    """Returns a copy of the meta without these fields."""
    if batch.fields is None:
        return replace(batch)
    return replace(batch, fields=[field for field in batch.fields if field not in unread])


def drop_heavy_fields(batch: KVBatchMeta, read: Collection[str | None] = ()) -> KVBatchMeta:
    """Returns a copy of the meta without routing and heads, hundreds of bytes per token each, except those that a
    stage reads."""
    return drop_fields(batch, set(HEAVY_FIELDS) - set(read))


class Stages:
    """The fields of the batch at hand that go to the actor's workers: a copy of its meta for each of verl's stages."""

    def __init__(self) -> None:
        self._unread: frozenset[str] = frozenset()

    def log_prob_batch(self, batch: KVBatchMeta, features: RunFeatures) -> KVBatchMeta:
        """Returns the batch for compute_log_prob: the first stage of a batch that goes to the workers.

        verl's workers and ours read no columns of the dataset, nor the agent loop's notes on a trajectory: some twenty
        fields, and fetching a row of each costs as much as a row of numbers.
        """
        if not features.own_workers:  # other people's workers may read all of it
            self._unread = frozenset()
            return replace(batch)
        schema = schema_of(batch)
        self._unread = frozenset(name for name, of in schema.items() if of["is_non_tensor"] and name != MODEL_INPUTS)
        return drop_fields(replace(batch, fields=batch.fields or list(schema)), self._unread)

    def reference_batch(self, batch: KVBatchMeta, features: RunFeatures, *, in_actor: bool) -> KVBatchMeta:
        # A LoRA's reference is the actor without its adapter, and is routed as the actor is.
        read = {replayed_field(features.config)} if in_actor else set()
        return drop_fields(drop_heavy_fields(batch, read), self._unread)

    def update_batch(self, batch: KVBatchMeta, features: RunFeatures) -> KVBatchMeta:
        heads = HEAD_FIELDS if features.uses(Part.HEADS_IN_UPDATE) else ()
        read = {replayed_field(features.config), *SHIFT_FIELDS, *heads}
        return drop_fields(drop_heavy_fields(batch, read), self._unread)


@dataclass(frozen=True)
class Rows:
    """Whole groups of trajectories: all trajectories of a prompt are in one part.

    Attributes:
        rows: their places in the batch.
        batch: the meta of these rows.
        offsets: where their tokens start, once they have been read.
    """

    rows: list[int]
    batch: KVBatchMeta
    offsets: Tensor | None = None


def parts_of(batch: KVBatchMeta) -> list[Rows]:
    """Returns parts of BLOCK_TOKENS tokens, or of one group; one part if that is all, or if lengths are not known."""
    lengths = [tag.get("response_len") for tag in batch.tags]
    if None in lengths or sum(lengths) <= BLOCK_TOKENS:
        return [Rows(list(range(len(batch.keys))), batch)]
    sessions, groups = Sessions.from_keys(batch.keys), dict[object, list[int]]()
    for row, session in enumerate(sessions.session_B):
        groups.setdefault(sessions.uid_S[session], []).append(row)
    blocks, room = list[list[int]](), 0
    for rows in groups.values():
        tokens = sum(lengths[row] for row in rows)
        if not blocks or tokens > room:
            blocks.append([])
            room = BLOCK_TOKENS
        blocks[-1] += rows
        room -= tokens
    return [Rows(rows, part_of(batch, rows)) for rows in blocks]


def part_of(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    keys, tags = ([values[row] for row in rows] for values in (batch.keys, batch.tags))
    return replace(batch, keys=keys, tags=tags)


class QueueBatch:
    """A step's batch, as the step and the run use it.

    Up to BLOCK_TOKENS are one block: `start` reads it, new fields wait for `write`, and the advantages are read once. A
    larger batch is read block by block, once for each operation, and written as fields are put.

    Args:
        lag: the lag of its trajectories; None if no rollout is older than the policy.
        view: makes the filters' view from tokens, keys and FILTER_FIELDS; None if nothing is filtered.

    Attributes:
        whole: it is one block.
    """

    def __init__(self, batch: KVBatchMeta, lag: Lag | None = None, view: Callable[..., FilterBatch] | None = None):
        self._batch, self._lag, self._view = batch, lag, view
        self._parts = parts_of(batch)
        self.whole = len(self._parts) == 1
        self._tokens: Tokens | None = None  # of a whole one
        self._rewards: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}
        self._is_weighed = False
        self._by_row: Tensor | None = None

    def start(self, names: Sequence[str] = ()) -> TensorDict:
        """Reads these fields, a few numbers per trajectory, and with them the tokens of a batch that is one block."""
        asked = [*names, *((*FIELDS, REWARDS) if self.whole else ())]
        data = get_fields(self._batch, asked) if asked else TensorDict({}, batch_size=len(self._batch))
        if self.whole:
            self._tokens, self._rewards = response_tokens(dict(data.items()), self._lag), data[REWARDS]
        return data

    def blocks(self, *, by_sign: bool = False) -> Iterator[tuple[Rows, Tokens]]:
        if by_sign and not self.whole:
            self._by_row = torch.zeros(len(self._batch.keys), 4, dtype=torch.float64)
        for part, tokens in self._read(FIELDS):
            if self._by_row is not None:
                self._by_row[part.rows] = sums_by_row(tokens)
            yield replace(part, offsets=tokens.offsets), tokens

    def put(self, block: Rows, fields: Mapping[str, Tensor]) -> None:
        assert block.offsets is not None
        found = {name: jagged(values, block.offsets) for name, values in fields.items() if name != RESPONSE_MASK}
        if RESPONSE_MASK in fields:
            # verl 0.9.1 divides token-mean by the tokens of loss_mask, a copy made at rollout: both have to change.
            found[RESPONSE_MASK] = found[LOSS_MASK] = jagged(fields[RESPONSE_MASK].long(), block.offsets)
        self._is_weighed |= WEIGHTS in found
        if self.whole:
            self._waiting |= found
        else:
            put_fields(block.batch, found)

    def write(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Writes the waiting fields; returns the meta with the fields that the batch has then."""
        return replace(batch, fields=put_fields(batch, self._waiting).fields) if self._waiting else batch

    def sums_by_sign(self) -> Tensor:
        """See `trainer.step.Batch`. `blocks` has kept the sums of each trajectory; it is read again only if its tokens
        differ in sign."""
        if self._tokens is not None:
            return sums_by_sign(self._tokens, self._advantages[ADVANTAGES].values())
        assert self._by_row is not None
        found, mixed = torch.zeros(3, 3, dtype=torch.float64), list[int]()
        for part in self._parts:
            advantages = get_fields(part.batch, [ADVANTAGES])[ADVANTAGES]
            sums, rows = signs_of_rows(self._by_row[part.rows], advantages)
            found += sums
            mixed += [part.rows[row] for row in rows]
        for part in parts_of(part_of(self._batch, mixed)) if mixed else ():
            data = get_fields(part.batch, (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, LOSS_MASK, ADVANTAGES))
            found += sums_by_sign(_sampled_tokens(data), data[ADVANTAGES].values())
        return found

    def views(self, *, weighed: bool) -> Iterator[tuple[Rows, FilterBatch, Tensor | None]]:
        assert self._view is not None
        weighed = weighed and self._is_weighed
        for part in self._parts:
            if self._tokens is not None:
                data, tokens, weights = self._advantages, self._tokens, self._waiting
            else:
                names = dict.fromkeys((*FIELDS, LOSS_MASK, *FILTER_FIELDS, *[WEIGHTS] * weighed))
                data = weights = dict(get_fields(part.batch, list(names)).items())
                tokens = _sampled_tokens(data, pick_lag(self._lag, part.rows))
            view = self._view(tokens, part.batch.keys, data)
            yield replace(part, offsets=tokens.offsets), view, weights[WEIGHTS].values() if weighed else None

    @property
    def added(self) -> set[int]:
        """Returns the rows that verl has added to fill the batch."""
        return {row for row, tag in enumerate(self._batch.tags) if tag.get("is_padding", False)}

    def scores(self) -> tuple[list[str], Tensor]:
        """Returns the trajectories' keys and the sum of each one's rewards, [B] float64; rows `added` are left out."""
        scores = torch.zeros(len(self._batch.keys), dtype=torch.float64)
        for part in self._parts:
            rewards = get_fields(part.batch, [REWARDS])[REWARDS] if self._rewards is None else self._rewards
            scores[part.rows] = segment_sums(rewards.values().double(), rewards.offsets().diff())
        real = [row for row in range(len(scores)) if row not in self.added]
        return [self._batch.keys[row] for row in real], scores[real]

    def log_k_sums(self) -> tuple[Tensor, Tensor]:
        """[B] each, see `trainer.batch.log_k_sums`."""
        sums, counts = torch.zeros(2, len(self._batch.keys), dtype=torch.float64).unbind()
        for part, tokens in self._read(ENGINES):
            sums[part.rows], counts[part.rows] = log_k_sums(tokens)
        return sums, counts

    def tokens_of(self, rows: Sequence[int]) -> tuple[Tokens, Tensor | None]:
        """Returns the tokens of some trajectories before verl has computed advantages, and their weights if any were
        put."""
        if self._tokens is not None:
            tokens, places = pick_rows(self._tokens, rows)
            return tokens, self._waiting[WEIGHTS].values()[places] if self._is_weighed else None
        data = dict(get_fields(part_of(self._batch, rows), (*FIELDS, *[WEIGHTS] * self._is_weighed)).items())
        return response_tokens(data, pick_lag(self._lag, rows)), data[WEIGHTS].values() if self._is_weighed else None

    @cached_property
    def _advantages(self) -> Mapping[str, Tensor]:
        """Returns the advantages of a whole batch, once verl has computed them, and the other fields that filters
        read."""
        return dict(get_fields(self._batch, [ADVANTAGES] if self._view is None else FILTER_FIELDS).items())

    def _read(self, names: Sequence[str]) -> Iterator[tuple[Rows, Tokens]]:
        for part in self._parts:
            if self._tokens is not None:
                yield part, self._tokens
            else:
                data = dict(get_fields(part.batch, names).items())
                yield part, response_tokens(data, pick_lag(self._lag, part.rows))


def _sampled_tokens(data: Mapping[str, Tensor], lag: Lag | None = None) -> Tokens:
    """Returns the tokens as they were measured: verl's own rejection may have removed some from response_mask since."""
    return response_tokens({**dict(data.items()), RESPONSE_MASK: data[LOSS_MASK]}, lag)
