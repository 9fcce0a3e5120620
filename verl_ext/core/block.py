"""A batch in blocks of whole trajectories, and of each block the tokens that count.

Shape legend: N tokens of the batch, p tokens of a block, n of these that count, b trajectories of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.scratch import Scratch
from verl_ext.core.segments import blocks
from verl_ext.core.tokens import Tokens


@dataclass(frozen=True)
class Block:
    """The tokens that count of some trajectories: masked in, and both log-probabilities finite.

    Attributes:
        span: where the trajectories stand in the batch, p tokens.
        mask: [p] bool, as in `Tokens`.
        starts: [b + 1] int64, where in `span` each trajectory begins; the last entry is p.
        lengths: [b] int64, how many tokens of each trajectory count.
        places: [n] int64, where in `span` the tokens that count stand; None where all of them count.
        l_infer, l_old: [n], of the dtype that they came in.
        entropy: [n] float64, NaN as 0; None where it was not computed.
        agreement: [n] float64, NaN where it was not compared; None where it was not for any token.
        lag: [b] int64, each trajectory's bucket of `Lag`; None where no rollout is older than the policy.
    """

    span: slice
    mask: Tensor
    starts: Tensor
    lengths: Tensor
    places: Tensor | None
    l_infer: Tensor
    l_old: Tensor
    entropy: Tensor | None
    agreement: Tensor | None
    lag: Tensor | None

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write [n] values into [N], each where its token stands."""
        if self.places is None:
            into[self.span] = values
        else:
            into[self.span].index_copy_(0, self.places, values)


def read_blocks(tokens: Tokens, size: int, scratch: Scratch) -> Iterator[Block]:
    """The blocks in which any token counts, of `size` tokens or one trajectory; each is good until the next one."""
    lag = None if tokens.lag is None else tokens.lag.buckets()
    for span, rows in blocks(tokens.offsets, size):
        scratch.next_block()
        mask, l_infer, l_old = tokens.mask[span], tokens.l_infer[span], tokens.l_old[span]
        places = _places(mask, l_infer, l_old)
        if places is not None and len(places) == 0:
            continue
        starts = tokens.offsets[rows.start : rows.stop + 1] - span.start
        entropy = agreement = None
        if tokens.entropy is not None:
            entropy = scratch.copy(_at(places, tokens.entropy[span])).nan_to_num_(0.0)
        if tokens.agreement is not None:
            agreement = scratch.copy(_at(places, tokens.agreement[span]))
        yield Block(
            span=span,
            mask=mask,
            starts=starts,
            lengths=lengths_between(starts, places),
            places=places,
            l_infer=_at(places, l_infer),
            l_old=_at(places, l_old),
            entropy=entropy,
            agreement=agreement,
            lag=None if lag is None else lag[rows],
        )


def lengths_between(starts: Tensor, places: Tensor | None) -> Tensor:
    """How many of the tokens at `places` (None: of all) stand from each of `starts` to the next."""
    return (starts if places is None else torch.searchsorted(places, starts)).diff()


def _places(mask: Tensor, l_infer: Tensor, l_old: Tensor) -> Tensor | None:
    # If a sum is finite, so is each term: found out at a fraction of the cost of looking at them.
    if not bool((l_infer.sum() + l_old.sum()).isfinite()):
        mask = mask & l_infer.isfinite() & l_old.isfinite()
    elif int(mask.count_nonzero()) == len(mask):
        return None
    return mask.nonzero().squeeze(1)


def _at(places: Tensor | None, values: Tensor) -> Tensor:
    return values if places is None else values.index_select(0, places)
