"""Memory that is used again, block by block."""

import math

import torch
from torch import Tensor


class Scratch:
    """Memory for the temporaries of one block of tokens, handed out in order and used again for the next block.

    On a CPU, fresh memory for each of them costs more than the arithmetic.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: list[Tensor] = []  # of bytes
        self.taken = 0

    def next_block(self) -> None:
        """What was handed out before is overwritten from here on."""
        self.taken = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor with whatever its memory held before."""
        size = math.prod(shape) * dtype.itemsize
        if self.taken == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if len(self.buffers[self.taken]) < size:
            self.buffers[self.taken] = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.taken += 1
        return self.buffers[self.taken - 1][:size].view(dtype).view(shape)

    def copy(self, values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """A copy to compute in, in place."""
        return self.empty(*values.shape, dtype=dtype).copy_(values)
