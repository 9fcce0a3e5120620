"""Three readings of the same tokens, and which pair of them holds the gap.

`decode`: the rollout as it sampled them; `prefill`: the same engine, given all of them at once; `train`: the training
engine, with its own routing; `replayed`: the training engine with the experts of the rollout.

Shape legend: N response tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.buckets import NAMES, POSITION_EDGES, PROBABILITY_EDGES
from verl_ext.core.mismatch import k3_of

DECODE, PREFILL, TRAIN, REPLAYED = "decode", "prefill", "train", "replayed"
PAIRS = ((DECODE, TRAIN), (DECODE, PREFILL), (PREFILL, TRAIN), (DECODE, REPLAYED))


@dataclass(frozen=True)
class Pair:
    """How far two readings are apart, in float64.

    Attributes:
        one, other: their names; `one` is the one that is sampled from.
        k3: mean over the tokens, in nats.
        k3_error: its standard error, as of tokens that do not depend on each other.
        largest: of |log p - log q|.
        equal: share of tokens whose log-probabilities are equal bit for bit.
        by_probability, by_position: bucket -> k3 of its tokens, where it has any.
        not_finite: tokens left out.
    """

    one: str
    other: str
    k3: float
    k3_error: float
    largest: float
    equal: float
    by_probability: dict[str, float]
    by_position: dict[str, float]
    not_finite: int = 0


def compare(readings: Mapping[str, Tensor], positions_N: Tensor) -> list[Pair]:
    """Each of PAIRS whose readings are there.

    Args:
        readings: name -> [N] float32 log-probabilities of the tokens.
        positions_N: of each in its response, from 0.
    """
    return [_pair(readings, one, other, positions_N) for one, other in PAIRS if {one, other} <= readings.keys()]


def _pair(readings: Mapping[str, Tensor], one: str, other: str, positions_N: Tensor) -> Pair:
    log_q, log_p = readings[one].double(), readings[other].double()
    finite = (log_p - log_q).isfinite()
    log_q, log_p, positions = log_q[finite], log_p[finite], positions_N[finite]
    n = max(len(log_q), 1)
    k3 = k3_of(log_p - log_q)
    by_probability = _by_bucket(k3, log_q.exp(), PROBABILITY_EDGES, NAMES["prob"])
    by_position = _by_bucket(k3, positions, POSITION_EDGES, NAMES["position"])
    return Pair(
        one,
        other,
        k3=float(k3.sum()) / n,
        k3_error=float(k3.std()) / n**0.5 if n > 1 else 0.0,
        largest=float((log_p - log_q).abs().max()) if len(log_q) else 0.0,
        equal=float((log_p == log_q).sum()) / n,
        by_probability=by_probability,
        by_position=by_position,
        not_finite=int((~finite).sum()),
    )


def _by_bucket(k3_N: Tensor, values_N: Tensor, edges: tuple[float, ...], names: list[str]) -> dict[str, float]:
    bucket_N = torch.bucketize(values_N.double(), torch.tensor(edges[1:], dtype=torch.float64), right=True)
    parts = {name: k3_N[bucket_N == index] for index, name in enumerate(names)}
    return {name: float(part.mean()) for name, part in parts.items() if len(part)}
