"""The same tokens once more, after something has happened to the weights.

Shape legend: N response tokens, sampled before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_ext.core.mismatch import k3_of

SYNC, UPDATE = "sync", "update"  # a weight sync of the same weights; one update, and the sync after it
SAME = 1e-9  # nats a token: what float32 leaves
WIDER, ARRIVED = 2.0, 0.5  # times the gap before; share of the training engine's movement


@dataclass(frozen=True)
class Stage:
    """Attributes:
    name: SYNC or UPDATE.
    before, after: k3 between the rollout engine, given all tokens at once, and the training engine.
    rollout_moved, train_moved: mean of |log p after - log p before|, in nats.
    """

    name: str
    before: float
    after: float
    rollout_moved: float
    train_moved: float


def stage(name: str, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Stage:
    """Of [N] log-probabilities of the rollout and the training engine before and after."""
    (rollout_before, train_before), (rollout_after, train_after) = before, after
    return Stage(
        name,
        before=_k3(rollout_before, train_before),
        after=_k3(rollout_after, train_after),
        rollout_moved=_moved(rollout_before, rollout_after),
        train_moved=_moved(train_before, train_after),
    )


def said_of(stages: Sequence[Stage]) -> list[str]:
    """What they say, a sentence each."""
    return [_SAID[one.name](one) for one in stages]


def _of_sync(one: Stage) -> str:
    if one.after > WIDER * max(one.before, SAME):
        return (
            f"A weight sync widens the gap: k3 was {one.before:.1e} and is {one.after:.1e}. What it sends is not what "
            "the rollout held."
        )
    if one.rollout_moved**2 > WIDER * max(one.before, SAME):
        return f"A sync of the same weights moves the rollout by {one.rollout_moved:.1e} nats a token."
    return "A weight sync changes nothing that was right."


def _of_update(one: Stage) -> str:
    if one.train_moved == 0:
        return "The update moved nothing: its learning rate is 0, or its gradients are."
    if one.rollout_moved < ARRIVED * one.train_moved and one.after > WIDER * max(one.before, SAME):
        return (
            f"The update does not arrive in the rollout: training moved by {one.train_moved:.1e} nats a token, the "
            f"rollout by {one.rollout_moved:.1e}."
        )
    if one.after > WIDER * max(one.before, SAME):
        return f"One update widens the gap: k3 was {one.before:.1e} and is {one.after:.1e}."
    return (
        f"An update moves training by {one.train_moved:.1e} nats a token, the rollout by {one.rollout_moved:.1e}; "
        f"k3 is {one.after:.1e}."
    )


_SAID = {SYNC: _of_sync, UPDATE: _of_update}


def _k3(log_q_N: Tensor, log_p_N: Tensor) -> float:
    return float(k3_of(_finite(log_p_N.double() - log_q_N.double())).mean())


def _moved(before_N: Tensor, after_N: Tensor) -> float:
    return float(_finite(after_N.double() - before_N.double()).abs().mean())


def _finite(values_N: Tensor) -> Tensor:
    kept = values_N[values_N.isfinite()]
    return kept if len(kept) else values_N.new_zeros(1)
