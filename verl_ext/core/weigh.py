"""The product of several corrections' weights, block by block.

Shape legend: N response tokens, n tokens of a block, B trajectories.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from verl_ext.core.corrections import CORRECTIONS, Correction, Weights
from verl_ext.core.mismatch import Gap, log_ratio, probabilities
from verl_ext.core.segments import RunSums, Workspace, expand, overlap
from verl_ext.core.tokens import Tokens

Settings = Mapping[str, Any]


def blocks(count: int, size: int) -> Iterator[slice]:
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


class Composition:
    """Corrections by name with their settings, applied to the tokens of one batch.

    Corrections of whole sequences need each sequence's log-ratio before the first token can be weighed: they take a
    pass of their own.

    Attributes:
        outside: per-token correction -> [2] float64, how many tokens were below and above its bounds so far.
        sequences: per-sequence correction -> its Weights, [B] each.
    """

    def __init__(self, tokens: Tokens, corrections: Mapping[str, Settings], block: int, memory: Workspace):
        self.tokens, self.memory = tokens, memory
        chosen = [(CORRECTIONS[name], settings) for name, settings in corrections.items()]
        self.of_tokens = [(correction, settings) for correction, settings in chosen if not correction.per_sequence]
        of_sequences = [(correction, settings) for correction, settings in chosen if correction.per_sequence]
        zeros = torch.zeros(2, dtype=torch.float64, device=tokens.mask.device)
        self.outside = {correction.name: zeros.clone() for correction, _ in self.of_tokens}
        self.sequences = self._weigh_sequences(of_sequences, block) if of_sequences else {}
        self.rows: tuple[Tensor, ...] | None = None  # weight, low and high of all sequence corrections together
        if self.sequences:
            product = reduce(_times, self.sequences.values())
            self.rows = (product.weight.float(), product.low.float(), product.high.float())

    def _weigh_sequences(self, chosen: list[tuple[Correction, Settings]], block: int) -> dict[str, Weights]:
        sums = RunSums(self.tokens.offsets, 2)
        for part in blocks(len(self.tokens.mask), block):
            log_k, counts, total = log_ratio(self.tokens, part, self.memory)
            sums.add(part, (log_k, counts if total is None else None))
        log_rho, count = sums.sums.T
        quantities = {"log_rho": log_rho, "log_g": log_rho / count.clamp(min=1)}
        return {
            correction.name: correction.function(*(quantities[name] for name in correction.reads), **settings)
            for correction, settings in chosen
        }

    def weigh(self, part: slice, gap: Gap) -> Weights:
        """The block's product of weights, [n], and who is outside the bounds of any correction."""
        quantities = {"k": gap.k}
        if any("p_infer" in correction.reads or "p_old" in correction.reads for correction, _ in self.of_tokens):
            quantities |= probabilities(self.tokens, part, self.memory)
        found = []
        for correction, settings in self.of_tokens:
            weights = correction.function(*(quantities[name] for name in correction.reads), **settings)
            sides = (weights.low, weights.high)
            counted = sides if gap.clean else [side * gap.counts for side in sides]
            self.outside[correction.name] += torch.stack([side.sum() for side in counted])
            found.append(weights)
        if self.rows is not None:
            runs, lengths = overlap(self.tokens.offsets, part)
            rows = [values[runs] for values in self.rows]
            # Most blocks have no sequence that weighs other than 1 or is out of bounds.
            if not found or bool(((rows[0] != 1) | (rows[1] != 0)).any()):
                found.append(Weights(*(expand(values, lengths) for values in rows)))
        return reduce(_times, found)


def _times(a: Weights, b: Weights) -> Weights:
    return Weights(a.weight * b.weight, torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))
