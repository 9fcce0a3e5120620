"""A step's batch in TransferQueue, of which the controller holds so many tokens at a time.

Up to AT_ONCE tokens are one block, which comes with verl's own read (`trainer.exchange`), and what is made of it goes
with verl's own write. A larger batch is read block by block, once for each thing that is done with it.

Shape legend: N response tokens of a block, B trajectories of the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.names import ADVANTAGES, LOSS_MASK, OLD_LOG_PROBS, RESPONSE_MASK, REWARDS, ROLLOUT_LOG_PROBS
from verl_ext.core.advantages import Sessions
from verl_ext.core.measure import Gathered, Measured, Settings, gather, put_together
from verl_ext.core.mismatch import signs_of_rows, sums_by_row, sums_by_sign
from verl_ext.core.tokens import AT_ONCE, Lag, Tokens, jagged, segment_sums
from verl_ext.trainer.batch import FIELDS, FILTER_FIELDS, gaps, non_finite, require_generated, response_tokens
from verl_ext.trainer.transfer import get_fields, put_fields

ENGINES = (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, RESPONSE_MASK)
READ = {*FIELDS, REWARDS, *FILTER_FIELDS}  # of a batch, in all


@dataclass(frozen=True)
class Part:
    """Whole groups of trajectories: of one prompt, all are in one part.

    Attributes:
        rows: where they stand in the batch.
        batch: of these rows.
    """

    rows: list[int]
    batch: KVBatchMeta


def parts_of(batch: KVBatchMeta) -> list[Part]:
    """In blocks of AT_ONCE tokens, or of one group; one part where that is all, or where lengths are not known."""
    lengths = [tag.get("response_len") for tag in batch.tags]
    if None in lengths or sum(lengths) <= AT_ONCE:
        return [Part(list(range(len(batch.keys))), batch)]
    sessions, groups = Sessions.from_keys(batch.keys), dict[object, list[int]]()
    for row, session in enumerate(sessions.session_B):
        groups.setdefault(sessions.uid_S[session], []).append(row)
    blocks, room = list[list[int]](), 0
    for rows in groups.values():
        tokens = sum(lengths[row] for row in rows)
        if not blocks or tokens > room:
            blocks.append([])
            room = AT_ONCE
        blocks[-1] += rows
        room -= tokens
    return [Part(rows, part_of(batch, rows)) for rows in blocks]


def part_of(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    keys, tags = ([values[row] for row in rows] for values in (batch.keys, batch.tags))
    return replace(batch, keys=keys, tags=tags)


class InBlocks:
    """A batch to judge (`trainer.step.Batch`), and what is done with its tokens.

    Args:
        lag: of its trajectories; None where no rollout is older than the policy.
        to_loss: of a block's tokens, and their weight, the fields that go to the loss. No method of what holds this:
            the batch would stay until the collector of cycles comes by.

    Attributes:
        whole: it is one block. Then its fields are at hand once `take` has brought them, and what is written waits in
            `written` for verl's write.
    """

    def __init__(
        self,
        batch: KVBatchMeta,
        lag: Lag | None,
        to_loss: Callable[[Tokens, Tensor | None], Mapping[str, Tensor]] = lambda tokens, weight: {},
    ):
        self.written: dict[str, Tensor] = {}
        self._batch, self._lag, self._to_loss = batch, lag, to_loss
        self._parts = parts_of(batch)
        self.whole = len(self._parts) == 1
        self._at_hand: dict[str, Tensor] | None = None
        self._corrections: Mapping[str, Settings] = {}
        self._by_row: Tensor | None = None

    def take(self, data: TensorDict) -> None:
        """Fields of the whole batch; a second time, those that have changed."""
        if self._at_hand is None:
            self._at_hand = {LOSS_MASK: data[RESPONSE_MASK]}
        self._at_hand |= {name: value for name, value in data.items() if name in READ}

    def read(self, names: Sequence[str]) -> Iterator[tuple[Part, Mapping[str, Tensor]]]:
        for part in self._parts:
            yield part, dict(get_fields(part.batch, names).items()) if self._at_hand is None else self._at_hand

    def write(self, part: Part, fields: Mapping[str, Tensor]) -> None:
        if self.whole:
            self.written |= fields
        elif fields:
            put_fields(part.batch, fields)

    def measured(self, part: Part, data: Mapping[str, Tensor]) -> Tokens:
        """As they were measured, also where verl's own rejection has taken tokens out of response_mask since."""
        return self.tokens(part, {**data, RESPONSE_MASK: data[LOSS_MASK]})

    def tokens(self, part: Part, data: Mapping[str, Tensor]) -> Tokens:
        lag = self._lag
        if lag is not None and not self.whole:
            lag = Lag(lag.newest[part.rows], lag.oldest[part.rows])
        return response_tokens(data, lag)

    @property
    def added(self) -> set[int]:
        """Rows that verl has added to fill the batch."""
        return {row for row, tag in enumerate(self._batch.tags) if tag.get("is_padding", False)}

    @property
    def count(self) -> int:
        """Raises BatchError where there is none."""
        found = sum(int(data[RESPONSE_MASK].values().count_nonzero()) for _, data in self.read((RESPONSE_MASK,)))
        require_generated(found)
        return found

    def non_finite(self) -> dict[str, int]:
        """Field -> how many of its values on generated tokens are NaN or infinite."""
        found = [non_finite(self.tokens(part, data)) for part, data in self.read(ENGINES)]
        return {name: sum(counts[name] for counts in found) for name in found[0]}

    def mean_score(self) -> float:
        """Mean over the trajectories of their scores' sum over tokens, rows `added` left out."""
        scores = torch.zeros(len(self._batch.keys), dtype=torch.float64)
        for part, data in self.read((REWARDS,)):
            rewards = data[REWARDS]
            scores[part.rows] = segment_sums(rewards.values().double(), rewards.offsets().diff())
        scores[list(self.added)] = 0.0
        return scores.sum().item() / (len(scores) - len(self.added))

    def measure(self, corrections: Mapping[str, Settings], *, breakdown: bool) -> Measured:
        """As `core.measure.measure`; what goes to the loss is written, and no weights are returned.

        Raises:
            BatchError: no token of the batch is the model's.
        """
        self._corrections = corrections
        gathered: list[Gathered] = []
        if breakdown and not self.whole:
            self._by_row = torch.zeros(len(self._batch.keys), 4, dtype=torch.float64)
        for part, data in self.read(FIELDS):
            tokens, origin = self.tokens(part, data), gathered[-1].origin if gathered else None
            weight, one = gather(tokens, corrections, breakdown=breakdown, origin=origin)
            gathered.append(one)
            if self._by_row is not None:
                self._by_row[part.rows] = sums_by_row(tokens)
            self._pass_on(part, tokens, weight)
        require_generated(sum(one.tokens for one in gathered))
        return put_together(gathered, corrections)

    def pass_on(self) -> None:
        """Write what goes to the loss of a batch that is not measured before its update."""
        for part, data in self.read(ENGINES):
            self._pass_on(part, self.tokens(part, data), None)

    def _pass_on(self, part: Part, tokens: Tokens, weight: Tensor | None) -> None:
        fields = self._to_loss(tokens, weight)
        self.write(part, {name: jagged(values, tokens.offsets) for name, values in fields.items()})

    def weight(self, tokens: Tokens) -> Tensor | None:
        """[N], what the batch was measured with gives these; None without corrections."""
        return gather(tokens, self._corrections, breakdown=False)[0] if self._corrections else None

    def sums_by_sign(self, advantages: Tensor) -> Tensor:
        """Returns `core.mismatch.sums_by_sign` of the batch; where it was measured in blocks, trajectories whose tokens
        differ in sign are read again.

        Args:
            advantages: nested [B, r], of the whole batch.
        """
        if self._at_hand is not None:
            ((part, data),) = self.read(())
            return sums_by_sign(self.measured(part, data), advantages.values())
        assert self._by_row is not None
        found, rows = signs_of_rows(self._by_row, advantages)
        for part in parts_of(part_of(self._batch, rows)) if rows else ():
            data = get_fields(part.batch, (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, LOSS_MASK, ADVANTAGES))
            tokens = response_tokens({**dict(data.items()), RESPONSE_MASK: data[LOSS_MASK]})
            found += sums_by_sign(tokens, data[ADVANTAGES].values())
        return found

    def gaps(self) -> tuple[Tensor, Tensor]:
        """[B] each, of `trainer.batch.gaps`."""
        gap, counts = torch.zeros(2, len(self._batch.keys), dtype=torch.float64).unbind()
        for part, data in self.read(ENGINES):
            gap[part.rows], counts[part.rows] = gaps(self.tokens(part, data))
        return gap, counts

    def tokens_of(self, rows: Sequence[int]) -> Tokens:
        """Of some trajectories."""
        if self._at_hand is None:
            data = dict(get_fields(part_of(self._batch, rows), FIELDS).items())
        else:
            all_rows = {name: self._at_hand[name].unbind() for name in FIELDS if name in self._at_hand}
            some = {name: [found[row] for row in rows] for name, found in all_rows.items()}
            data = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in some.items()}
        lag = self._lag
        return response_tokens(data, None if lag is None else Lag(lag.newest[list(rows)], lag.oldest[list(rows)]))
