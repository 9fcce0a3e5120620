"""A batch in blocks of whole trajectories: the counted tokens of each, memory for its temporaries, and sums of all.

Shape legend: N tokens of the batch, p tokens of a block, n of these that count, b trajectories of a block.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.tokens import Tokens, blocks


class Scratch:
    """Memory for the temporaries of one block of tokens, allocated in order and reused for the next block.

    Fresh memory for each of them costs more than the arithmetic on a CPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: list[Tensor] = []  # of bytes
        self.taken = 0

    def next_block(self) -> None:
        """Starts a new block; earlier tensors are overwritten from now on."""
        self.taken = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Returns a tensor with undefined content."""
        size = math.prod(shape) * dtype.itemsize
        if self.taken == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if len(self.buffers[self.taken]) < size:
            self.buffers[self.taken] = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.taken += 1
        return self.buffers[self.taken - 1][:size].view(dtype).view(shape)

    def copy(self, values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Returns a copy for in-place computation."""
        return self.empty(*values.shape, dtype=dtype).copy_(values)


@dataclass(frozen=True)
class Block:
    """Some trajectories' tokens that count: masked in, and both log-probabilities finite.

    Attributes:
        span: the trajectories' place in the batch, p tokens.
        mask: [p] bool, as in `Tokens`.
        starts: [b + 1] int64, where in `span` each trajectory begins; the last entry is p.
        lengths: [b] int64, how many tokens of each trajectory count.
        places: [n] int64, the places in `span` of the tokens that count; None if all of them count.
        l_infer, l_old: [n], in their original dtype.
        entropy: [n] float64, NaN as 0; None where it was not computed.
        agreement: [n] float64, NaN where it was not compared; None if no token was compared.
        lag: [n] int64, each token's place in `BUCKETS["lag"]`; None where no rollout is older than the policy.
        buckets: axis of a breakdown -> [b] int64, each trajectory's place in `BUCKETS[axis]`.
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
    buckets: dict[str, Tensor]

    def put(self, values: Tensor, into: Tensor) -> None:
        """Writes [n] values into [N], each at its token's place."""
        if self.places is None:
            into[self.span] = values
        else:
            into[self.span].index_copy_(0, self.places, values)


def read_blocks(tokens: Tokens, size: int, scratch: Scratch) -> Iterator[Block]:
    """Yields the blocks in which any token counts, each of at most `size` tokens or one trajectory; a block is valid
    until the next."""
    lag = tokens.lag_buckets()
    for span, rows in blocks(tokens.offsets, size):
        scratch.next_block()
        mask, l_infer, l_old = tokens.mask[span], tokens.l_infer[span], tokens.l_old[span]
        places = _places(mask, l_infer, l_old)
        if places is not None and len(places) == 0:
            continue
        starts = tokens.offsets[rows.start : rows.stop + 1] - span.start
        entropy = agreement = None
        if tokens.entropy is not None:
            entropy = scratch.copy(_select(places, tokens.entropy[span])).nan_to_num_(0.0)
        if tokens.agreement is not None:
            agreement = scratch.copy(_select(places, tokens.agreement[span]))
        yield Block(
            span=span,
            mask=mask,
            starts=starts,
            lengths=lengths_between(starts, places),
            places=places,
            l_infer=_select(places, l_infer),
            l_old=_select(places, l_old),
            entropy=entropy,
            agreement=agreement,
            lag=None if lag is None else _select(places, lag[span]),
            buckets={axis: of_row[rows] for axis, of_row in tokens.buckets.items()},
        )


def lengths_between(starts: Tensor, places: Tensor | None) -> Tensor:
    """Returns how many of the tokens at `places` (None: all tokens) lie between each of `starts` and the next."""
    return (starts if places is None else torch.searchsorted(places, starts)).diff()


def _places(mask: Tensor, l_infer: Tensor, l_old: Tensor) -> Tensor | None:
    # If a sum is finite, so is each term: this check costs a fraction of checking the terms.
    if not bool((l_infer.sum() + l_old.sum()).isfinite()):
        mask = mask & l_infer.isfinite() & l_old.isfinite()
    elif int(mask.count_nonzero()) == len(mask):
        return None
    return mask.nonzero().squeeze(1)


def _select(places: Tensor | None, values: Tensor) -> Tensor:
    return values if places is None else values.index_select(0, places)


Sums = dict[str, Tensor]
"""Name -> a value of any shape, which is added up over blocks; a name that begins with LARGEST takes the largest."""
LARGEST = "largest/"


def add_up(blocks: Sequence[Sums]) -> Sums:
    """Returns the sums of all blocks, float64; all have the same names."""

    def over_blocks(name: str) -> Tensor:
        values = torch.stack([sums[name] for sums in blocks]).double()
        return values.amax(0) if name.startswith(LARGEST) else values.sum(0)

    return {name: over_blocks(name) for name in blocks[0]}


def copy_to_host(sums: Sums) -> Sums:
    """Returns a copy on the host of sums of one dtype, in one transfer, from any device."""
    flat = torch.cat([values.flatten() for values in sums.values()]).cpu()
    parts = flat.split([values.numel() for values in sums.values()])
    return {name: part.view(values.shape) for (name, values), part in zip(sums.items(), parts, strict=True)}
