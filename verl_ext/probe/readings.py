"""The measurements of a probe: readings of the same tokens, also after a sync and an update, and hidden states.

Shape legend: N response tokens, F sign flips; n tokens of a sequence, E experts, K of them chosen, P positions, d
width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_ext.base.errors import HookError
from verl_ext.base.names import BUCKETS, HEAD, INDEXER, POSITION_EDGES, PROBABILITY_EDGES, ROUTER
from verl_ext.core.mismatch import k3_of
from verl_ext.core.routing import expert_overlap
from verl_ext.diagnosis.probed import DECODE, PAIRS, TRAIN, Pair, Place, Stage
from verl_ext.routing.recorder import Passes, order_of

SIGN_FLIPS = 999
SIGN_TOKENS = 1 << 12  # tokens whose signs are drawn at once, in 32 MB


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
