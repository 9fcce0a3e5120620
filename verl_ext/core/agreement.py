"""Do the engines disagree more about a token where they chose other experts for it?

Shape legend: n tokens of a block that count.

Only those count here that were compared: of a share of the trajectories, where the rest were left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Origin = tuple[Tensor, Tensor]  # agreement and |log k| of one token


@dataclass(frozen=True)
class AgreementSums:
    """Sums over the tokens that count and were compared; the gap is |log k|.

    What the correlation is made of is relative to one token's values: 0 where a measure is constant, and in squares at
    most n times those of differences from the mean, of which it keeps the digits.
    """

    tokens: Tensor
    equal: Tensor  # tokens with the same experts everywhere
    gap_equal: Tensor
    gap_differs: Tensor
    agreement: Tensor  # relative, and all below
    agreement_squared: Tensor
    gap: Tensor
    gap_squared: Tensor
    agreement_gap: Tensor


def origin_of(agreement: Tensor, log_k: Tensor) -> Origin | None:
    """Those of the first token that was compared; None where there is none."""
    first = agreement.isfinite().nonzero()[:1, 0].tolist()
    return (agreement[first[0]].clone(), log_k[first[0]].abs()) if first else None


def agreement_sums(agreement: Tensor, log_k: Tensor, origin: Origin | None) -> AgreementSums:
    """Of one block, [n] float64 each.

    Args:
        origin: None where no token of this block, nor of those before, was compared.
    """
    if not bool(agreement.sum().isfinite()):  # then one of them is not
        compared = agreement.isfinite()
        agreement, log_k = agreement[compared], log_k[compared]
    if origin is None:
        origin = agreement.new_zeros(()), agreement.new_zeros(())
    gap, equal = log_k.abs(), (agreement == 1).double()
    # Neither sum of the gap as a rest of the other: it would have no digits left of one that is far smaller.
    gap_equal, gap_differs = torch.dot(equal, gap), torch.dot(1 - equal, gap)
    agreement, gap = agreement - origin[0], gap.sub_(origin[1])
    return AgreementSums(
        tokens=equal.new_tensor(len(equal)),
        equal=equal.sum(),
        gap_equal=gap_equal,
        gap_differs=gap_differs,
        agreement=agreement.sum(),
        agreement_squared=torch.dot(agreement, agreement),
        gap=gap.sum(),
        gap_squared=torch.dot(gap, gap),
        agreement_gap=torch.dot(agreement, gap),
    )


def agreement_metrics(sums: AgreementSums) -> dict[str, Tensor]:
    """`router/gap_*` and the correlation of 1 - agreement with |log k|.

    A mean over none is left out, and so is a correlation with what does not vary.
    """
    metrics, n = {}, sums.tokens
    if sums.equal > 0:
        metrics["router/gap_equal"] = sums.gap_equal / sums.equal
    if sums.equal < n:
        metrics["router/gap_differs"] = sums.gap_differs / (n - sums.equal)
    of_agreement = sums.agreement_squared - sums.agreement**2 / n
    of_gap = sums.gap_squared - sums.gap**2 / n
    if of_agreement > 0 and of_gap > 0:
        covariance = sums.agreement_gap - sums.agreement * sums.gap / n
        metrics["router/disagreement_gap_correlation"] = -covariance / of_agreement.sqrt() / of_gap.sqrt()
    return metrics
