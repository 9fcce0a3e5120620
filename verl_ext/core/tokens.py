"""The response tokens of a batch, packed: the input of every measure, correction and filter.

Shape legend: N response tokens of all trajectories, n tokens of a block, B trajectories, T columns of a padded batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_ext.base.names import LAG_EDGES
from verl_ext.core import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Lag:
    """The number of versions by which the sampling weights are behind the weights of l_old; 0 is the same version.

    Attributes:
        newest, oldest: [B] int64, of the weights that sampled a trajectory's last token, and its first.
        fresh: [B] int64, how many of its last generated tokens the newest of its weights sampled; None if that is not
            known.
    """

    newest: Tensor
    oldest: Tensor
    fresh: Tensor | None = None

    def of_rows(self, rows: Sequence[int]) -> Lag:
        """Returns the lag of some trajectories, in this order."""
        places = list(rows)
        return Lag(self.newest[places], self.oldest[places], None if self.fresh is None else self.fresh[places])


EXACT_COUNT = 2**24  # float32 counts exactly up to here, and then stops
# Response tokens that the controller holds at a time: 120 MB of a step's fields, and as much again in transfer.
BLOCK_TOKENS = 2**22


def blocks(offsets: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Yields the tokens and trajectories of each block: as many whole trajectories as fit in `size` tokens, at least
    one."""
    starts = offsets.tolist()
    first, count = 0, len(starts) - 1
    while first < count:
        last = max(first + 1, bisect_right(starts, starts[first] + size) - 1)
        if starts[first] < starts[last]:
            yield slice(starts[first], starts[last]), slice(first, last)
        first = last


def total(values: Tensor) -> Tensor:
    """Returns the float64 sum of [n] values; adds float32 in parts that it counts exactly, at float32's cost."""
    return torch.stack([part.sum().double() for part in values.split(EXACT_COUNT)]).sum()


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns sums of consecutive stretches of [n] values, 0 for an empty one; in float64 if n passes EXACT_COUNT."""
    if len(values) > EXACT_COUNT:
        values = values.double()
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns [n]: each run's value for all of its tokens."""
    return values.index_select(0, torch.repeat_interleave(lengths.int()))


# exp(20) is 4.9e8: beyond any threshold in use, and its square still fits float32.
LOG_RATIO_BOUND = 20.0


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns packed values [N, ...] as a nested tensor [B, r, ...], as verl keeps them; offsets: [B + 1]."""
    # Without max_seqlen, torch 2.13 pads each row to the length of all rows together.
    return torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=int(offsets.diff().max()))


def row_matrix(field: Tensor) -> Tensor:
    """Returns [B, n] of a field whose rows have equal lengths, nested or not."""
    return field.values().view(len(field), -1) if field.is_nested else field


def fill_added_rows(field: Tensor, lengths: Tensor, generated: Tensor) -> Tensor:
    """Returns the values [N, ...] of a nested field [B, n, ...], with zeros in the rows that verl added to fill the
    batch.

    Such a row is a copy of a trajectory. verl shortens the fields that it knows and removes the mask, but a field of
    ours keeps the length of the copied trajectory (padding_utils.py of verl 0.9.1).

    Args:
        lengths: [B] int64, the length that each row ought to have; a trajectory of another length is not changed.
        generated: nested [B, r], 1 on tokens that the model generated: nowhere in a row that verl has added.
    """
    if torch.equal(field.offsets().diff().cpu(), lengths.cpu()):
        return field.values()
    read_B = torch.stack([mask.any() for mask in generated.unbind()]).cpu()
    return torch.cat(
        [
            row if len(row) == length or read else row.new_zeros(length, *row.shape[1:])
            for row, length, read in zip(field.unbind(), lengths.tolist(), read_B.tolist(), strict=True)
        ]
    )


def left_out_rows(field: Tensor, lengths: Tensor) -> Tensor:
    """Returns [B] bool: the rows of a nested field [B, n, ...] that are empty although `lengths`, [B] int64, is not 0.

    Their routing was not sent (upstream/agent_loop.py).
    """
    return (field.offsets().diff().to(lengths.device) == 0) & (lengths > 0)


def fill_gaps(values: Tensor, lengths: Tensor, left_out_B: Tensor) -> Tensor:
    """Returns [N, ...]: the packed values of the rows that have any, and zeros for the tokens of the left-out rows."""
    if not left_out_B.any():
        return values
    there = (~left_out_B).repeat_interleave(lengths)
    whole = values.new_zeros(len(there), *values.shape[1:])
    whole[there.to(values.device)] = values
    return whole


@dataclass(frozen=True)
class Tokens:
    """The response tokens of B trajectories, one after another.

    Attributes:
        l_infer, l_old: [N] float, log-probabilities of the sampled tokens under the rollout engine and under the
            training engine before the update.
        mask: [N] bool, true on tokens the model generated (tool output and padding are false).
        offsets: [B + 1] int64, where each trajectory starts; the last entry is N.
        entropy: [N] entropy of the training policy in nats, or None where it was not computed.
        agreement: [N] float, share of a token's experts that both engines chose, mean over layers: 1 where all are the
            same, and where the rollout's routing is unknown; NaN in a trajectory whose routing was not compared. None
            if no routing was compared.
        lag_bucket: [N] int64, the tokens' places in `BUCKETS["lag"]`, where `lag` itself is not known, as in workers.
        lag: of the trajectories; None where no rollout is older than the policy, as in synchronous training.
        buckets: axis of a breakdown -> [B] int64, the trajectories' places in `BUCKETS[axis]`.
    """

    l_infer: Tensor
    l_old: Tensor
    mask: Tensor
    offsets: Tensor
    entropy: Tensor | None = None
    agreement: Tensor | None = None
    lag_bucket: Tensor | None = None
    lag: Lag | None = None
    buckets: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {name: tuple(value.shape) for name, value in self.per_token().items()}
        if len(set(shapes.values())) > 1 or self.mask.dim() != 1:
            raise ValueError(
                f"every response token needs one value in each of these [N] tensors; their shapes are {shapes}"
            )

    @classmethod
    def from_padded(
        cls, l_infer_BT: Tensor, l_old_BT: Tensor, mask_BT: Tensor, entropy_BT: Tensor | None = None
    ) -> Tokens:
        """Returns the tokens of a padded batch as views; padding becomes tokens that the mask leaves out."""
        B, T = mask_BT.shape
        offsets = torch.arange(0, (B + 1) * T, T, device=mask_BT.device) if T else mask_BT.new_zeros(B + 1).long()
        return cls(
            l_infer_BT.reshape(-1),
            l_old_BT.reshape(-1),
            mask_BT.reshape(-1).bool(),
            offsets,
            None if entropy_BT is None else entropy_BT.reshape(-1),
        )

    @property
    def count(self) -> int:
        """The number of tokens that the model generated."""
        return int(self.mask.count_nonzero())

    def per_token(self) -> dict[str, Tensor]:
        """Returns the [N] tensors by name."""
        named = {name: value for name, value in vars(self).items() if name not in ("offsets", "lag", "buckets")}
        return {name: value for name, value in named.items() if value is not None}

    def lag_buckets(self) -> Tensor | None:
        """Returns [N] int64, the tokens' places in `BUCKETS["lag"]`; None where no rollout is older than the policy.

        A trajectory's tokens are in the bucket of its lag. If it spans versions, the last bucket has its older tokens,
        or all of them where `Lag.fresh` is not known.
        """
        if (lag := self.lag) is None:
            return self.lag_bucket
        place = torch.bucketize(lag.newest, torch.tensor(LAG_EDGES[1:], device=lag.newest.device), right=True)
        spans = lag.newest != lag.oldest
        lengths = self.offsets.diff().to(spans.device)
        if lag.fresh is None or not bool(spans.any()):
            return torch.where(spans, len(LAG_EDGES), place).repeat_interleave(lengths)
        generated = torch.cat([self.mask.new_zeros(1, dtype=torch.long), self.mask.cumsum(0)])
        still_B = generated[self.offsets[1:]] - lag.fresh.to(self.mask.device)  # generated up to the first fresh one
        old_N = generated[1:] <= still_B.repeat_interleave(lengths)
        return torch.where(old_N & spans.repeat_interleave(lengths), len(LAG_EDGES), place.repeat_interleave(lengths))

    def row_of_token(self) -> Tensor:
        """Returns [N] int64, the trajectory of each token."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=len(self.mask))

    def row_sums(self, values: Tensor) -> Tensor:
        """Returns [B] float64 sums of [N] values over each trajectory; 0 for a trajectory without tokens."""
        return segment_sums(values.double(), self.offsets.diff())

    def of_rows(self, rows: Sequence[int]) -> tuple[Tokens, Tensor]:
        """Returns the trajectories `rows`, in this order, and the places of their tokens among the N."""
        ends = self.offsets.tolist()
        places = torch.cat([torch.arange(ends[row], ends[row + 1]) for row in rows])
        lengths = self.offsets.diff()[list(rows)]
        picked = Tokens(
            **{name: values[places] for name, values in self.per_token().items()},
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            lag=None if self.lag is None else self.lag.of_rows(rows),
            buckets={axis: places_B[list(rows)] for axis, places_B in self.buckets.items()},
        )
        return picked, places

    def log_k_sums(self) -> tuple[Tensor, Tensor]:
        """Returns two [B] float64 tensors: the sum of |log k| over a trajectory's generated tokens, inf if a value is
        NaN; and the number of these tokens."""
        log_k = (self.l_old.double() - self.l_infer.double()).abs_().nan_to_num_(torch.inf)
        return self.row_sums(log_k.masked_fill_(~self.mask, 0.0)), self.row_sums(self.mask)
