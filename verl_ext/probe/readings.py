"""The measurements of a probe: readings of the same tokens, also after a sync and an update, and hidden states.

A reading is the tokens' log-probabilities, computed by one engine in one way. `decode`: the rollout while sampling;
`prefill`: the rollout, given all tokens at once; `train`: the training engine with its own routing; `replayed`: the
training engine with the rollout's experts; `packed`: the training engine with several sequences in one pass; `base`:
the training engine without its LoRA; `prefill_again`, `train_again`: the same a second time, the rollout in the reverse
order. The distance of the second time from the first is the noise floor.

Shape legend: N response tokens, F sign flips; n tokens of a sequence, E experts, K of them chosen, P positions, d
width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.base.errors import HookError
from verl_ext.base.names import BUCKETS, POSITION_EDGES, PROBABILITY_EDGES
from verl_ext.core.mismatch import k3_of
from verl_ext.core.routing import expert_overlap
from verl_ext.routing.recorder import HEAD, INDEXER, ROUTER, Passes, order_of

DECODE, PREFILL, TRAIN, REPLAYED, PACKED, BASE = "decode", "prefill", "train", "replayed", "packed", "base"
PREFILL_AGAIN, TRAIN_AGAIN = "prefill_again", "train_again"
FLOORS = ((PREFILL, PREFILL_AGAIN), (TRAIN, TRAIN_AGAIN))
PAIRS = (
    (DECODE, TRAIN),
    (DECODE, PREFILL),
    (PREFILL, TRAIN),
    (DECODE, REPLAYED),
    (DECODE, PACKED),
    (DECODE, BASE),
    *FLOORS,
)
SIGN_FLIPS = 999
SIGN_TOKENS = 1 << 12  # tokens whose signs are drawn at once, in 32 MB
SYNC, UPDATE = "sync", "update"  # a sync of the same weights; one update and the sync after it


@dataclass(frozen=True)
class Pair:
    """The distance between two readings, in float64, over the tokens that are finite in both.

    Attributes:
        one, other: names of the readings; k3 takes the tokens as sampled from `one`.
        k3: mean over the tokens, in nats. This and the next three are None if no token is finite in both.
        k3_error: its standard error, as if tokens were independent.
        largest: the largest |log p - log q|.
        equal: share of tokens whose log-probabilities are equal bit for bit.
        by_probability, by_position: bucket -> k3 of its tokens, for buckets with tokens.
        tokens: number of tokens, finite or not.
        not_finite: tokens left out because one of the readings is NaN or infinite.
        one_not_finite, other_not_finite: tokens for which that reading is NaN or infinite.
        chance: p-value of the difference between this k3 and the k3 of (decode, train), see `chance_of`.
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


@dataclass(frozen=True)
class Stage:
    """The same tokens scored again after a sync or an update.

    Attributes:
        name: SYNC or UPDATE.
        before, after: k3 between the rollout engine, given all tokens at once, and the training engine. This and the
            next two are means over the finite tokens, and None if there are none.
        rollout_moved, train_moved: mean of |log p after - log p before|, in nats.
        tokens: how many were scored.
        rollout_not_finite, train_not_finite: tokens whose log-probability is then NaN or infinite, in each engine.
    """

    name: str
    before: float | None
    after: float | None
    rollout_moved: float | None
    train_moved: float | None
    tokens: int = 0
    rollout_not_finite: int = 0
    train_not_finite: int = 0

    @property
    def not_finite(self) -> bool:
        return self.rollout_not_finite + self.train_not_finite > 0


@dataclass(frozen=True)
class Place:
    """The distance between both engines at one point on the way from tokens to logits.

    Attributes:
        point: see `recorder.point_of`.
        error: the norm of the difference divided by the norm of the training engine's state. At an indexer, the share
            of the training engine's positions that the rollout did not choose. Computed over the tokens that are finite
            in both engines; None if there are none.
        differs: share of the tokens whose experts (at a router) or positions (at an indexer) differ; else None.
        weight_gap: at a router, total variation between the softmax weights of the chosen experts, a mean over the
            tokens; else None.
        rollout_not_finite, train_not_finite: tokens whose state has NaN or infinity, in each engine.
        rollout_dtype, train_dtype: dtype of the state in each engine, such as `bfloat16`; at a router, of its logits.
    """

    point: str
    error: float | None
    differs: float | None = None
    weight_gap: float | None = None
    rollout_not_finite: int = 0
    train_not_finite: int = 0
    rollout_dtype: str = ""
    train_dtype: str = ""

    @property
    def not_finite(self) -> bool:
        return self.rollout_not_finite + self.train_not_finite > 0


def compare_readings(readings: Mapping[str, Tensor], positions_N: Tensor) -> list[Pair]:
    """Compares each of PAIRS whose readings are given.

    Args:
        readings: name -> [N] float32 log-probabilities of the tokens.
        positions_N: each token's position in its response, from 0.
    """
    return [_pair_of(readings, one, other, positions_N) for one, other in PAIRS if {one, other} <= readings.keys()]


def compare_stage(name: str, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Stage:
    """Compares [N] log-probabilities of the rollout and the training engine before and after the event `name`."""
    rollout_before, train_before, rollout_after, train_after = (log_p_N.double() for log_p_N in (*before, *after))
    return Stage(
        name,
        before=_finite_mean(k3_of(train_before - rollout_before)),
        after=_finite_mean(k3_of(train_after - rollout_after)),
        rollout_moved=_finite_mean((rollout_after - rollout_before).abs()),
        train_moved=_finite_mean((train_after - train_before).abs()),
        tokens=len(train_after),
        rollout_not_finite=int((~rollout_after.isfinite()).sum()),
        train_not_finite=int((~train_after.isfinite()).sum()),
    )


def compare_states(rollout: Mapping[str, Tensor], train: Mapping[str, Tensor], top_k: int = 0) -> list[Place]:
    """Compares every place that both engines have, in the order of the computation.

    Args:
        rollout, train: point -> [n, d], [n, E] logits at routers, or [n, P] positions at indexers (-1 for none).
        top_k: experts per token; 0 for a dense model.

    Raises:
        HookError: the engines did not record the same tokens, or the same width.
    """
    found: list[Place] = []
    for point in sorted(rollout.keys() & train.keys(), key=order_of):
        ours, theirs = rollout[point].double(), train[point].double()
        same_shape = len(ours) == len(theirs) if point.endswith(INDEXER) else ours.shape == theirs.shape
        if not same_shape:
            raise HookError(f"{point} is {tuple(ours.shape)} in the rollout and {tuple(theirs.shape)} in training")
        finite, others_finite = ours.isfinite().all(1), theirs.isfinite().all(1)
        both = finite & others_finite
        error, differs, gap = _place_numbers(point, ours[both], theirs[both], top_k) if both.any() else (None,) * 3
        place = Place(
            point,
            error,
            differs,
            gap,
            rollout_not_finite=int((~finite).sum()),
            train_not_finite=int((~others_finite).sum()),
            rollout_dtype=_dtype_of(rollout[point]),
            train_dtype=_dtype_of(train[point]),
        )
        found.append(place)
    return found


def head_dtypes(*engines: Passes) -> list[str]:
    """Returns the dtype of each engine's logits; "" if it recorded none."""
    return [_dtype_of(passes[HEAD][0]) if HEAD in passes else "" for passes in engines]


def _dtype_of(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def chance_of(k3_N: Tensor, others_N: Tensor) -> float:
    """Returns the two-sided p-value of a paired sign-flip test: how often noise alone makes two k3 differ this much.

    If the two k3 differ by noise alone, the difference at each token is as likely to have the other sign. The observed
    sum is compared with the sums under SIGN_FLIPS random choices of all signs, drawn from a fixed seed. This is exact
    however heavy the tails are. The differences are taken between the square roots of the k3 terms, each about
    |log p - log q| / sqrt(2), because a few tokens hold most of the mean of k3 and would decide the test.

    Args:
        k3_N, others_N: terms of the same tokens, taken as independent of each other; NaN leaves a token out.
    """
    difference_N = k3_N.clamp(min=0).sqrt() - others_N.clamp(min=0).sqrt()
    difference_N = difference_N[difference_N.isfinite()]
    generator = torch.Generator().manual_seed(0)
    sums_F = -difference_N.sum().repeat(SIGN_FLIPS)  # with every sign negative
    for block in difference_N.split(SIGN_TOKENS):
        sums_F += 2 * torch.randint(2, (SIGN_FLIPS, len(block)), generator=generator, dtype=torch.float64) @ block
    observed = difference_N.sum().abs() * (1 - 1e-9)  # the same terms in another order must not count as smaller
    return (1 + int((sums_F.abs() >= observed).sum())) / (SIGN_FLIPS + 1)


def _pair_of(readings: Mapping[str, Tensor], one: str, other: str, positions_N: Tensor) -> Pair:
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
        by_probability=_k3_by_bucket(k3, log_q.exp(), PROBABILITY_EDGES, BUCKETS["prob"]),
        by_position=_k3_by_bucket(k3, positions_N[finite_N], POSITION_EDGES, BUCKETS["position"]),
        tokens=len(k3_N),
        not_finite=len(k3_N) - n,
        one_not_finite=int((~log_q_N.isfinite()).sum()),
        other_not_finite=int((~log_p_N.isfinite()).sum()),
        chance=chance_of(k3_N, k3_of(readings[TRAIN].double() - readings[DECODE].double())),
    )


def _k3_by_bucket(k3_N: Tensor, values_N: Tensor, edges: tuple[float, ...], names: list[str]) -> dict[str, float]:
    bucket_N = torch.bucketize(values_N.double(), torch.tensor(edges[1:], dtype=torch.float64), right=True)
    parts = {name: k3_N[bucket_N == index] for index, name in enumerate(names)}
    return {name: float(part.mean()) for name, part in parts.items() if len(part)}


def _finite_mean(values_N: Tensor) -> float | None:
    finite = values_N[values_N.isfinite()]
    return float(finite.mean()) if len(finite) else None


def _place_numbers(point: str, ours: Tensor, theirs: Tensor, top_k: int) -> tuple[float, float | None, float | None]:
    """Returns `error`, `differs` and `weight_gap` of a Place."""
    if point.endswith(INDEXER):
        return *_attended(ours.long(), theirs.long()), None
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))
    return error, *(_router_gap(ours, theirs, top_k) if point.endswith(ROUTER) and top_k else (None, None))


def _attended(ours_nP: Tensor, theirs_nP: Tensor) -> tuple[float, float]:
    """Returns the share of `theirs` that is not in `ours`, and the share of tokens that lack any. Both are over the
    tokens with a choice."""
    most = int(max(ours_nP.max(), theirs_nP.max())) + 1
    ours, theirs = (_marked(one, most) for one in (ours_nP, theirs_nP))
    count_n = theirs.sum(1)
    chose_n = (count_n == count_n.max()) & (ours.sum(1) > 0)  # earlier tokens have fewer positions than K, and use all
    lacking_n = (theirs & ~ours).sum(1)[chose_n] / count_n.max().clamp(min=1)
    if not len(lacking_n):
        return 0.0, 0.0
    return float(lacking_n.double().mean()), float((lacking_n > 0).double().mean())


def _marked(positions_nP: Tensor, most: int) -> Tensor:
    """Returns [n, most] bool, True at each token's positions."""
    marked = torch.zeros(len(positions_nP), most + 1, dtype=torch.bool)
    return marked.scatter(1, positions_nP % (most + 1), True)[:, :most]  # drops the last column, which is that of -1


def _router_gap(ours_nE: Tensor, theirs_nE: Tensor, top_k: int) -> tuple[float, float]:
    """Compares the experts with the largest logits, and their weights by a softmax over them."""
    chosen = [logits.topk(top_k, -1) for logits in (ours_nE, theirs_nE)]
    overlap = expert_overlap(*(one.indices.unsqueeze(1) for one in chosen)).squeeze(1)
    weights = [torch.zeros_like(ours_nE).scatter(1, one.indices, one.values.softmax(-1)) for one in chosen]
    apart = (weights[0] - weights[1]).abs().sum(1) / 2
    return float((overlap < top_k).double().mean()), float(apart.mean())
