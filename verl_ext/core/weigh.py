"""The product of several corrections' weights, block by block.

Shape legend: N response tokens, n tokens of a block, B trajectories.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from verl_ext.core.corrections import CORRECTIONS, Weights
from verl_ext.core.mismatch import Gap, probabilities
from verl_ext.core.segments import Workspace, expand, segment_sums, total
from verl_ext.core.tokens import Tokens

Settings = Mapping[str, Any]
FEW = 16  # sequences of a block that are weighed one by one, where the others weigh 1


class Composition:
    """Corrections by name with their settings, applied to the tokens of one batch.

    Attributes:
        outside: per-token correction -> [2] tensors, how many tokens of a block were below and above its bounds.
        sequences: per-sequence correction -> its Weights, [B] float64 each; 1, 0 and 0 for one without tokens.
    """

    def __init__(self, tokens: Tokens, corrections: Mapping[str, Settings], memory: Workspace):
        self.tokens, self.memory = tokens, memory
        chosen = [(CORRECTIONS[name], settings) for name, settings in corrections.items()]
        self.of_tokens = [(correction, settings) for correction, settings in chosen if not correction.per_sequence]
        self.of_sequences = [(correction, settings) for correction, settings in chosen if correction.per_sequence]
        self.outside: dict[str, list[Tensor]] = {correction.name: [] for correction, _ in self.of_tokens}
        ones = torch.ones(len(tokens.offsets) - 1, dtype=torch.float64, device=tokens.mask.device)
        self.sequences = {
            correction.name: Weights(ones.clone(), torch.zeros_like(ones), torch.zeros_like(ones))
            for correction, _ in self.of_sequences
        }

    def weigh(self, part: slice, rows: slice, gap: Gap, log_rho: Tensor | None) -> Weights:
        """The block's product of weights, [n], and who is outside the bounds of any correction.

        Args:
            log_rho: sum of log k over each trajectory of the block; None without corrections of sequences.
        """
        quantities = {"k": gap.k}
        if any("p_infer" in correction.reads or "p_old" in correction.reads for correction, _ in self.of_tokens):
            quantities |= probabilities(self.tokens, part, self.memory)
        found = []
        for correction, settings in self.of_tokens:
            weights = correction.function(*(quantities[name] for name in correction.reads), **settings)
            sides = (weights.low, weights.high)
            counted = sides if gap.clean else [side * gap.counts for side in sides]
            self.outside[correction.name].append(torch.stack([total(side) for side in counted]))
            found.append(weights)
        if log_rho is None:
            return reduce(_times, found)
        starts = self.tokens.offsets[rows.start : rows.stop + 1] - part.start
        whole = self._weigh_sequences(rows, starts.diff(), gap, log_rho)
        fields = (whole.weight, whole.low, whole.high)
        acted = ((whole.weight != 1) | (whole.low + whole.high != 0)).nonzero().flatten().tolist()
        if not found or len(acted) > FEW:
            found.append(Weights(*(expand(values.float(), starts.diff()) for values in fields)))
            return reduce(_times, found)
        product = reduce(_times, found)
        if acted:
            product = Weights(product.weight.clone(), product.low.clone(), product.high.clone())
            bounds = starts.tolist()
            for row in acted:
                tokens = slice(bounds[row], bounds[row + 1])
                product.weight[tokens].mul_(whole.weight[row])
                product.low[tokens].clamp_(min=whole.low[row])
                product.high[tokens].clamp_(min=whole.high[row])
        return product

    def _weigh_sequences(self, rows: slice, lengths: Tensor, gap: Gap, log_rho: Tensor) -> Weights:
        count = lengths.double() if gap.clean else segment_sums(gap.counts, lengths).double()
        quantities = {"log_rho": log_rho, "log_g": log_rho / count.clamp(min=1)}
        found = []
        for correction, settings in self.of_sequences:
            weights = correction.function(*(quantities[name] for name in correction.reads), **settings)
            kept = self.sequences[correction.name]
            kept.weight[rows], kept.low[rows], kept.high[rows] = weights.weight, weights.low, weights.high
            found.append(weights)
        return reduce(_times, found)


def _times(a: Weights, b: Weights) -> Weights:
    return Weights(a.weight * b.weight, torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))
