"""Where the tokens of a micro-batch lie among the rows that a rank's routers see.

Shape legend: T tokens of a micro-batch (prompt and response), n rows of the forward pass on this rank, B trajectories.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import gather_outputs_and_unpad, get_ulysses_sequence_parallel_group

from verl_ext.errors import HookError


@dataclass(frozen=True)
class Layout:
    """verl 0.9.1 runs the packed tokens, padded at their end and split over Ulysses sequence parallelism; or, without
    padding removal, every sequence padded to the longest.

    Attributes:
        lengths: [B] int64, prompt and response.
        packed: whether padding is removed.
    """

    lengths: Tensor
    packed: bool

    @classmethod
    def of(cls, micro_batch: TensorDict, device: torch.device) -> "Layout":
        lengths = micro_batch["input_ids"].offsets().diff().to(device)
        return cls(lengths, tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True))

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def spread(self, values_T: Tensor, rows: int) -> Tensor:
        """[n, ...], one row for each that this rank's routers see, 0 on padding, from [T, ...] packed tokens.

        Raises:
            HookError: the routers see fewer rows than there are tokens, or not as many as the padded batch has.
        """
        self._check(rows)
        whole = values_T.new_zeros(rows * _ranks(), *values_T.shape[1:])
        if self.packed:
            whole[: len(values_T)] = values_T
        else:
            whole[self._padded_rows()] = values_T
        return whole.tensor_split(_ranks())[_rank()]

    def collect(self, values_n: Tensor) -> Tensor:
        """[T, ...] packed tokens from the [n, ...] rows of every rank: the inverse of `spread`.

        Raises:
            HookError: as `spread`.
        """
        self._check(len(values_n))
        if not self.packed:
            return values_n[self._padded_rows()]
        # No gradient passes here, and without a sequence-parallel group this returns what it is given.
        return gather_outputs_and_unpad(values_n.contiguous(), gather_dim=0)[: self.tokens]

    def _padded_rows(self) -> Tensor:
        width = int(self.lengths.max())
        firsts_B = torch.arange(len(self.lengths), device=self.lengths.device) * width
        starts_B = self.lengths.cumsum(0) - self.lengths
        return torch.repeat_interleave(firsts_B - starts_B, self.lengths) + torch.arange(
            self.tokens, device=self.lengths.device
        )

    def _check(self, rows: int) -> None:
        expected = self.tokens if self.packed else len(self.lengths) * int(self.lengths.max())
        if rows * _ranks() < expected or (not self.packed and rows != expected):
            raise HookError(
                f"the routers saw {rows} tokens on each of {_ranks()} rank(s) for a micro-batch of {expected}: this "
                "engine splits sequences in a way that stability.router_agreement, router_replay and the loss "
                "router_shift do not know; unset them"
            )


def _ranks() -> int:
    group = get_ulysses_sequence_parallel_group()
    return 1 if group is None else torch.distributed.get_world_size(group)


def _rank() -> int:
    group = get_ulysses_sequence_parallel_group()
    return 0 if group is None else torch.distributed.get_rank(group)
