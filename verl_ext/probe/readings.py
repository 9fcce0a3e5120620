"""Three readings of the same tokens, and which pair of them holds the gap.

`decode`: the rollout as it sampled them; `prefill`: the same engine, given all of them at once; `train`: the training
engine, with its own routing; `replayed`: the training engine with the experts of the rollout.

Shape legend: N response tokens, F sign flips.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.buckets import NAMES, POSITION_EDGES, PROBABILITY_EDGES
from verl_ext.core.mismatch import k3_of

DECODE, PREFILL, TRAIN, REPLAYED = "decode", "prefill", "train", "replayed"
SIDES = {DECODE: "rollout", PREFILL: "rollout", TRAIN: "training", REPLAYED: "training"}
PAIRS = ((DECODE, TRAIN), (DECODE, PREFILL), (PREFILL, TRAIN), (DECODE, REPLAYED))
FLIPS = 999
BLOCK = 1 << 12  # tokens whose signs are drawn at once: 32 MB of them


@dataclass(frozen=True)
class Pair:
    """How far two readings are apart, in float64, over the tokens that are finite in both.

    Attributes:
        one, other: their names; `one` is the one that is sampled from.
        k3: mean over the tokens, in nats. This and the next three are None where no token is finite in both.
        k3_error: its standard error, as of tokens that do not depend on each other.
        largest: of |log p - log q|.
        equal: share of tokens whose log-probabilities are equal bit for bit.
        by_probability, by_position: bucket -> k3 of its tokens, where it has any.
        tokens: how many both readings have, finite or not.
        not_finite: tokens left out, because either reading is NaN or infinite there.
        one_not_finite, other_not_finite: tokens where that reading is NaN or infinite.
        chance: p-value of the difference between this k3 and that of sampling against training, see `chance_of`.
    """

    one: str
    other: str
    k3: float | None
    k3_error: float | None
    largest: float | None
    equal: float | None
    by_probability: dict[str, float]
    by_position: dict[str, float]
    tokens: int = 0
    not_finite: int = 0
    one_not_finite: int = 0
    other_not_finite: int = 0
    chance: float = 1.0


def compare(readings: Mapping[str, Tensor], positions_N: Tensor) -> list[Pair]:
    """Each of PAIRS whose readings are there.

    Args:
        readings: name -> [N] float32 log-probabilities of the tokens.
        positions_N: of each in its response, from 0.
    """
    return [_pair(readings, one, other, positions_N) for one, other in PAIRS if {one, other} <= readings.keys()]


def _pair(readings: Mapping[str, Tensor], one: str, other: str, positions_N: Tensor) -> Pair:
    log_q_N, log_p_N = readings[one].double(), readings[other].double()
    k3_N = k3_of(log_p_N - log_q_N)
    finite_N = k3_N.isfinite()
    log_q, log_p, k3 = log_q_N[finite_N], log_p_N[finite_N], k3_N[finite_N]
    n = len(k3)
    return Pair(
        one,
        other,
        k3=float(k3.mean()) if n else None,
        k3_error=(float(k3.std()) / n**0.5 if n > 1 else 0.0) if n else None,
        largest=float((log_p - log_q).abs().max()) if n else None,
        equal=float((log_p == log_q).double().mean()) if n else None,
        by_probability=_by_bucket(k3, log_q.exp(), PROBABILITY_EDGES, NAMES["prob"]),
        by_position=_by_bucket(k3, positions_N[finite_N], POSITION_EDGES, NAMES["position"]),
        tokens=len(k3_N),
        not_finite=len(k3_N) - n,
        one_not_finite=int((~log_q_N.isfinite()).sum()),
        other_not_finite=int((~log_p_N.isfinite()).sum()),
        chance=chance_of(k3_N, k3_of(readings[TRAIN].double() - readings[DECODE].double())),
    )


def chance_of(k3_N: Tensor, others_N: Tensor) -> float:
    """Returns the two-sided p-value of a paired sign-flip test: how often noise alone makes two k3 differ this much.

    If the two k3 differ by noise alone, the difference at each token is as likely to have the other sign. The observed
    sum is compared with the sums under FLIPS random choices of all signs, drawn from a fixed seed. This is exact
    however heavy the tails are. The differences are taken between the square roots of the k3 terms, each about
    |log p - log q| / sqrt(2), because a few tokens hold most of the mean of k3 and would decide the test.

    Args:
        k3_N, others_N: terms of the same tokens, taken as independent of each other; NaN leaves a token out.
    """
    difference_N = k3_N.clamp(min=0).sqrt() - others_N.clamp(min=0).sqrt()
    difference_N = difference_N[difference_N.isfinite()]
    generator = torch.Generator().manual_seed(0)
    sums_F = -difference_N.sum().repeat(FLIPS)  # with every sign negative
    for block in difference_N.split(BLOCK):
        sums_F += 2 * torch.randint(2, (FLIPS, len(block)), generator=generator, dtype=torch.float64) @ block
    observed = difference_N.sum().abs() * (1 - 1e-9)  # the same terms in another order must not come out as less
    return (1 + int((sums_F.abs() >= observed).sum())) / (FLIPS + 1)


def not_finite_words(counts: Mapping[str, int], tokens: int) -> str:
    """Says how many of the tokens are not finite in which reading, from reading -> count; "" where none is."""
    words = [
        f"{count} of {tokens}{'' if number else ' tokens have a log-probability of NaN or infinity'} "
        f"on the {SIDES[name]} side ({name})"
        for number, (name, count) in enumerate((name, count) for name, count in counts.items() if count)
    ]
    return ", ".join(words)


def _by_bucket(k3_N: Tensor, values_N: Tensor, edges: tuple[float, ...], names: list[str]) -> dict[str, float]:
    bucket_N = torch.bucketize(values_N.double(), torch.tensor(edges[1:], dtype=torch.float64), right=True)
    parts = {name: k3_N[bucket_N == index] for index, name in enumerate(names)}
    return {name: float(part.mean()) for name, part in parts.items() if len(part)}
