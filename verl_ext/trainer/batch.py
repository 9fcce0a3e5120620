"""Reads a step's batch from TransferQueue: its fields, whole or in blocks, the rows that verl has added, the lags.

Shape legend: N response tokens of a block, B trajectories of the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base import names
from verl_ext.base.errors import BatchError
from verl_ext.base.patching import patch
from verl_ext.core.advantages import Sessions
from verl_ext.core.answers import FRESH, Servers, answer_metrics
from verl_ext.core.filters import FilterBatch
from verl_ext.core.mismatch import signs_of_rows, sums_by_row, sums_by_sign
from verl_ext.core.tokens import BLOCK_TOKENS, Lag, Tokens, jagged, row_matrix, segment_sums
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.verl_config import is_asynchronous, replay_mode
from verl_ext.trainer.queue import JoinedCalls, get_fields, part_of, put_fields, schema_of

FIELDS = (names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS, names.RESPONSE_MASK, names.ENTROPY, names.AGREEMENT)
FILTER_FIELDS = (names.RESPONSE_MASK, names.RESPONSES, names.ADVANTAGES, names.REWARDS)
GAP_FIELDS = (names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS, names.RESPONSE_MASK)
SIGN_FIELDS = (names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS, names.LOSS_MASK, names.ADVANTAGES)


def read_batch(batch: KVBatchMeta, features: RunFeatures, step: int, tokenizer: Any, servers: Servers) -> "QueueBatch":
    """Returns the step's batch, with the fields read that this run's features need first.

    Args:
        servers: those of the rollout, by which the gap is broken down.
    """
    needs, config = features.needs, features.config
    numbers = [names.ANSWER_FACTS] if Need.MEASURED_BATCHES in needs else []
    if Need.COMPARED_ROUTERS in needs:
        numbers.append(names.ROUTER_SUMS)
    if features.compares_top_tokens:
        numbers.append(names.TOP_TOKEN_SUMS)
    if Need.COMPARED_ROUTERS in needs or replay_mode(config) == "R3":
        numbers.append(names.ROUTE_SUM)
    measured = Need.MEASURED_BATCHES in needs
    lag = lag_of(batch.tags, step) if measured and is_asynchronous(config) else None  # `fresh` follows with the facts
    view = partial(filter_batch, models=config.actor_rollout_ref, tokenizer=tokenizer)
    by_server = servers if features.stability.breakdown else Servers()
    read = QueueBatch(batch, lag, view if Need.LOSS_MASK in needs else None, by_server)
    read.start(numbers, measured=measured)
    return read


@dataclass(frozen=True)
class Rows:
    """A part of a batch; all trajectories of a prompt are in the same part.

    Attributes:
        rows: the places of its trajectories in the batch.
        batch: the meta of these rows.
        offsets: where the tokens of each row start; None until the tokens have been read.
    """

    rows: list[int]
    batch: KVBatchMeta
    offsets: Tensor | None = None


def parts_of(batch: KVBatchMeta) -> list[Rows]:
    """Returns parts of up to BLOCK_TOKENS tokens each, or of one larger group; a single part if lengths are unknown."""
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


class QueueBatch:
    """A step's batch, as the step and the run use it.

    A batch of up to BLOCK_TOKENS tokens is one block: `start` reads it, and new fields wait for `write`, verl's own too
    (`joined`). A larger batch is read block by block, again for each operation, and `put` writes fields at once.

    Args:
        lag: the lag of its trajectories; None if no rollout is older than the policy.
        view: makes the filters' view from tokens, keys and FILTER_FIELDS; None if nothing is filtered.
        servers: those that the gap is broken down by.

    Attributes:
        is_one_block: the batch is read at once.
    """

    def __init__(
        self,
        batch: KVBatchMeta,
        lag: Lag | None = None,
        view: Callable[..., FilterBatch] | None = None,
        servers: Servers | None = None,
    ):
        self._batch, self._lag, self._view, self._servers = batch, lag, view, servers or Servers()
        self._parts = parts_of(batch)
        self.is_one_block = len(self._parts) == 1
        self._tokens: Tokens | None = None  # if the batch is one block
        self._numbers: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}  # the fields that `start` has read, if the batch is one block
        self._waiting: dict[str, Tensor] = {}
        self._calls = JoinedCalls(batch, self._held, self._waiting)
        self._is_weighed = False
        self._by_row: Tensor | None = None

    def start(self, numbers: Sequence[str] = (), *, measured: bool = True) -> None:
        """Reads fields with a few numbers per trajectory, and the tokens of a batch that is one block.

        Args:
            numbers: the names of these fields.
            measured: whether to read the tokens.
        """
        whole = self.is_one_block and measured
        asked = [*numbers, *FIELDS, names.REWARDS] if whole else list(numbers)
        data = dict(get_fields(self._batch, asked).items()) if asked else {}
        self._numbers = {name: row_matrix(data[name]) for name in numbers if name in data}
        if whole:
            self._tokens = self._response_tokens(data, self._parts[0].rows)
            self._held.update(data)

    def numbers(self, name: str) -> Tensor | None:
        """Returns [B, n] of a field that `start` has read; None if the batch does not have it."""
        return self._numbers.get(name)

    def rows(self, name: str, count: int | None = None) -> Sequence[Any] | None:
        """Returns a field's value for the first `count` trajectories, or for all; None if the batch lacks the field."""
        batch = self._batch if count is None else part_of(self._batch, range(min(count, len(self._batch.keys))))
        data = get_fields(batch, [name])
        if name not in data.keys():  # noqa: SIM118 (a TensorDict)
            return None
        return data[name].unbind() if isinstance(data[name], Tensor) else list(data[name])

    def dtype_of(self, name: str) -> Any:
        """Returns the dtype in which a field is sent."""
        return schema_of(self._batch).get(name, {}).get("dtype")

    def blocks(self, *, by_sign: bool = False) -> Iterator[tuple[Rows, Tokens]]:
        if by_sign and not self.is_one_block:
            self._by_row = torch.zeros(len(self._batch.keys), 4, dtype=torch.float64)
        for part, tokens in self._read(FIELDS):
            if self._by_row is not None:
                self._by_row[part.rows] = sums_by_row(tokens)
            yield replace(part, offsets=tokens.offsets), tokens

    def put(self, block: Rows, fields: Mapping[str, Tensor]) -> None:
        assert block.offsets is not None
        found = {name: jagged(values, block.offsets) for name, values in fields.items() if name != names.RESPONSE_MASK}
        if names.RESPONSE_MASK in fields:
            # verl 0.9.1 divides token-mean by the tokens of loss_mask, a copy made at rollout: both have to change.
            mask = jagged(fields[names.RESPONSE_MASK].long(), block.offsets)
            found |= {names.RESPONSE_MASK: mask, names.LOSS_MASK: mask}
        self._is_weighed |= names.WEIGHTS in found
        if self.is_one_block:
            self._waiting |= found
        else:
            put_fields(block.batch, found)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Context in which verl computes the advantages of a batch that is one block: it does not read again what
        `start` has read, and what it writes waits for `write`."""
        from verl.trainer.ppo.v1 import trainer_base

        undo = patch("joined_calls", trainer_base, "tq", self._calls)
        try:
            yield
        finally:
            undo()

    def write(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Writes the waiting fields; returns the meta with the fields that the batch has then."""
        return put_fields(batch, self._waiting) if self._waiting else batch

    def sums_by_sign(self) -> Tensor:
        """See `trainer.step.Batch`. `blocks` has kept each trajectory's sums; only trajectories whose tokens differ in
        sign are read again."""
        if self._tokens is not None:
            return sums_by_sign(self._tokens, self._advantages[names.ADVANTAGES].values())
        assert self._by_row is not None
        found, mixed = torch.zeros(3, 3, dtype=torch.float64), list[int]()
        for part in self._parts:
            advantages = get_fields(part.batch, [names.ADVANTAGES])[names.ADVANTAGES]
            sums, rows = signs_of_rows(self._by_row[part.rows], advantages)
            found += sums
            mixed += [part.rows[row] for row in rows]
        for part in parts_of(part_of(self._batch, mixed)) if mixed else ():
            data = get_fields(part.batch, SIGN_FIELDS)
            found += sums_by_sign(_sampled_tokens(data), data[names.ADVANTAGES].values())
        return found

    def views(self, *, weighed: bool) -> Iterator[tuple[Rows, FilterBatch, Tensor | None]]:
        assert self._view is not None
        weighed = weighed and self._is_weighed
        for part in self._parts:
            if self._tokens is not None:
                data, tokens, weights = self._advantages, self._tokens, self._waiting
            else:
                fields = {*FIELDS, names.LOSS_MASK, *FILTER_FIELDS}
                if weighed:
                    fields.add(names.WEIGHTS)
                data = weights = dict(get_fields(part.batch, sorted(fields)).items())
                tokens = _sampled_tokens(data, self._lag_of(part.rows))
            view = self._view(tokens, part.batch.keys, data)
            yield replace(part, offsets=tokens.offsets), view, weights[names.WEIGHTS].values() if weighed else None

    @property
    def added(self) -> set[int]:
        """Returns the rows that verl has added to fill the batch."""
        return {row for row, tag in enumerate(self._batch.tags) if tag.get("is_padding", False)}

    def scores(self) -> tuple[list[str], Tensor]:
        """Returns the trajectories' keys and the sum of each one's rewards, [B] float64; rows `added` are left out."""
        scores = torch.zeros(len(self._batch.keys), dtype=torch.float64)
        for part in self._parts:
            here = self._held or get_fields(part.batch, [names.REWARDS])
            rewards = here[names.REWARDS]
            scores[part.rows] = segment_sums(rewards.values().double(), rewards.offsets().diff())
        added = self.added
        real = [row for row in range(len(scores)) if row not in added]
        return [self._batch.keys[row] for row in real], scores[real]

    def answer_metrics(self, models: DictConfig, tokenizer: Any) -> dict[str, float]:
        """Returns `core.answers.answer_metrics`; {} if the rollout brought no facts. `models` is actor_rollout_ref."""
        if (facts := self.numbers(names.ANSWER_FACTS)) is None:
            return {}
        lengths, limit = [tag["response_len"] for tag in self._batch.tags], models.rollout.response_length
        return answer_metrics(facts, lengths, self.added, limit, end_tokens(models.model.path, tokenizer.eos_token_id))

    def log_k_sums(self) -> tuple[Tensor, Tensor]:
        """[B] each, see `Tokens.log_k_sums`."""
        sums, counts = torch.zeros(2, len(self._batch.keys), dtype=torch.float64).unbind()
        for part, tokens in self._read(GAP_FIELDS):
            sums[part.rows], counts[part.rows] = tokens.log_k_sums()
        return sums, counts

    def rows_of(self, keys: Iterable[str]) -> list[int]:
        """Returns the places of some trajectories."""
        return [self._batch.keys.index(key) for key in keys]

    def tokens_of(self, rows: Sequence[int]) -> tuple[Tokens, Tensor | None]:
        """Returns the tokens of some trajectories before verl has computed advantages, and their weights if any were
        put."""
        if self._tokens is not None:
            tokens, places = self._tokens.of_rows(rows)
            return tokens, self._waiting[names.WEIGHTS].values()[places] if self._is_weighed else None
        fields = (*FIELDS, names.WEIGHTS) if self._is_weighed else FIELDS
        data = dict(get_fields(part_of(self._batch, rows), fields).items())
        weight = data[names.WEIGHTS].values() if self._is_weighed else None
        return self._response_tokens(data, rows), weight

    def _response_tokens(self, data: Mapping[str, Tensor], rows: Sequence[int]) -> Tokens:
        buckets = {axis: of_row[list(rows)] for axis, of_row in self._buckets.items()}
        return response_tokens(data, self._lag_of(rows), buckets)

    @cached_property
    def _buckets(self) -> dict[str, Tensor]:
        facts = self.numbers(names.ANSWER_FACTS)
        return {} if facts is None else self._servers.buckets(facts)

    def _lag_of(self, rows: Sequence[int]) -> Lag | None:
        if self._lag is None:
            return None
        facts = self.numbers(names.ANSWER_FACTS)
        return replace(self._lag, fresh=None if facts is None else facts[:, FRESH]).of_rows(rows)

    @cached_property
    def _advantages(self) -> Mapping[str, Tensor]:
        """Returns the advantages of a one-block batch, and the other fields that filters read; verl computes them."""
        asked = [names.ADVANTAGES] if self._view is None else [*FILTER_FIELDS]
        return dict(self._calls.kv_batch_get(self._batch.keys, self._batch.partition_id, asked).items())

    def _read(self, fields: Sequence[str]) -> Iterator[tuple[Rows, Tokens]]:
        for part in self._parts:
            if self._tokens is not None:
                yield part, self._tokens
            else:
                data = dict(get_fields(part.batch, fields).items())
                yield part, self._response_tokens(data, part.rows)


def _sampled_tokens(data: Mapping[str, Tensor], lag: Lag | None = None) -> Tokens:
    """Returns the tokens as they were measured: verl's own rejection may have removed some from response_mask since."""
    return response_tokens({**dict(data.items()), names.RESPONSE_MASK: data[names.LOSS_MASK]}, lag)


def response_tokens(
    data: Mapping[str, Tensor], lag: Lag | None = None, buckets: Mapping[str, Tensor] | None = None
) -> Tokens:
    """Returns the tokens of FIELDS in `data`, verl's nested tensors; entropy and router_agreement are optional.

    As in verl's bypass mode, the rollout's log-probs stand for l_old if no pass has computed it.

    Args:
        lag, buckets: see `Tokens`.

    Raises:
        BatchError: a field is missing or has another number of tokens than response_mask.
    """
    if names.ROLLOUT_LOG_PROBS not in data:
        raise BatchError(
            "the rollout returned no rollout_log_probs", fix=("actor_rollout_ref.rollout.calculate_log_probs=True",)
        )
    packed = packed_like_mask(data, FIELDS)
    return Tokens(
        l_infer=packed[names.ROLLOUT_LOG_PROBS],
        l_old=packed.get(names.OLD_LOG_PROBS, packed[names.ROLLOUT_LOG_PROBS]),
        mask=packed[names.RESPONSE_MASK].bool(),
        offsets=data[names.RESPONSE_MASK].offsets(),
        entropy=packed.get(names.ENTROPY),
        agreement=packed.get(names.AGREEMENT),
        lag=lag,
        buckets=buckets or {},
    )


def packed_like_mask(data: Mapping[str, Tensor], fields: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns name -> [N] values of the nested fields in `data`. Raises BatchError if one has other row lengths than
    response_mask."""
    mask = data[names.RESPONSE_MASK]
    packed = {name: data[name].values() for name in fields if name in data}
    for name, values in packed.items():
        if values.shape != mask.values().shape or not torch.equal(data[name].offsets(), mask.offsets()):
            raise BatchError(
                f"{name} has {len(values)} tokens and response_mask {len(mask.values())}, or the trajectories' "
                "lengths differ: every response token needs one value"
            )
    return packed


def lag_of(tags: Sequence[Mapping[str, Any]], step: int) -> Lag:
    """Returns how many versions old each trajectory's weights are in this step, by the tags of verl's agent loop.

    A version has the number of the step after which it was synchronised. l_old is of version `step - 1`, even if the
    step has several local updates (`separate_async`).
    """
    newest, oldest = (
        torch.tensor([step - 1 - tag[f"{end}_global_steps"] for tag in tags], dtype=torch.long)
        for end in ("max", "min")
    )
    return Lag(newest, oldest)


def filter_batch(
    tokens: Tokens, keys: Sequence[str], data: Mapping[str, Tensor], models: DictConfig, tokenizer: Any
) -> FilterBatch:
    """Returns the batch as filters see it.

    Args:
        tokens: as they were measured.
        keys: trajectory ids in the order of the rows.
        data: FILTER_FIELDS as nested tensors; verl's own rejection may have taken tokens out of response_mask since.
        models: the config's actor_rollout_ref.
    """
    packed = packed_like_mask(data, FILTER_FIELDS)
    return FilterBatch(
        tokens=replace(tokens, mask=packed[names.RESPONSE_MASK].bool()),
        keys=keys,
        rewards_B=tokens.row_sums(packed[names.REWARDS]),
        advantages_N=packed[names.ADVANTAGES],
        responses_N=packed[names.RESPONSES],
        max_response_length=models.rollout.response_length,
        eos_ids=end_tokens(models.model.path, tokenizer.eos_token_id),
        decode=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


@lru_cache
def end_tokens(model_path: str, of_tokenizer: int | None) -> frozenset[int]:
    """Returns the token ids that end a response: the tokenizer's, and those of the model's generation config."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset((*ids, of_tokenizer)) - {None}
