"""The same tokens once more, after something has happened to the weights.

Shape legend: N response tokens, sampled before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_ext.core.mismatch import k3_of
from verl_ext.probe.readings import PREFILL, TRAIN, not_finite_words

SYNC, UPDATE = "sync", "update"  # a weight sync of the same weights; one update, and the sync after it
AFTER = {SYNC: "a sync of the same weights", UPDATE: "an update and its sync"}
SAME = 1e-9  # nats a token: what float32 leaves
WIDER, ARRIVED = 2.0, 0.5  # times the gap before; share of the training engine's movement


@dataclass(frozen=True)
class Stage:
    """Attributes:
    name: SYNC or UPDATE.
    before, after: k3 between the rollout engine, given all tokens at once, and the training engine; over the tokens
        that are finite in both, as the next two, and None if there are none.
    rollout_moved, train_moved: mean of |log p after - log p before|, in nats.
    tokens: how many were scored.
    rollout_not_finite, train_not_finite: tokens whose log-probability is NaN or infinite after it, in each engine.
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


def stage(name: str, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Stage:
    """Of [N] log-probabilities of the rollout and the training engine before and after."""
    (rollout_before, train_before), (rollout_after, train_after) = before, after
    return Stage(
        name,
        before=_k3(rollout_before, train_before),
        after=_k3(rollout_after, train_after),
        rollout_moved=_moved(rollout_before, rollout_after),
        train_moved=_moved(train_before, train_after),
        tokens=len(train_after),
        rollout_not_finite=int((~rollout_after.isfinite()).sum()),
        train_not_finite=int((~train_after.isfinite()).sum()),
    )


def said_of(stages: Sequence[Stage]) -> list[str]:
    """What they say, a sentence each."""
    return [_said(one) for one in stages]


def _said(one: Stage) -> str:
    if one.not_finite:
        words = not_finite_words({PREFILL: one.rollout_not_finite, TRAIN: one.train_not_finite}, one.tokens)
        return f"After {AFTER[one.name]}, {words}."
    if one.before is None or one.after is None or one.rollout_moved is None or one.train_moved is None:
        return f"Before {AFTER[one.name]}, no token was finite in both engines: what it changed is not known."
    return _SAID[one.name](one.before, one.after, one.rollout_moved, one.train_moved)


def _of_sync(before: float, after: float, rollout_moved: float, train_moved: float) -> str:
    if after > WIDER * max(before, SAME):
        return (
            f"A weight sync widens the gap: k3 was {before:.1e} and is {after:.1e}. What it sends is not what "
            "the rollout held."
        )
    if rollout_moved**2 > WIDER * max(before, SAME):
        return f"A sync of the same weights moves the rollout by {rollout_moved:.1e} nats a token."
    return "A weight sync changes nothing that was right."


def _of_update(before: float, after: float, rollout_moved: float, train_moved: float) -> str:
    if train_moved == 0:
        return "The update moved nothing: its learning rate is 0, or its gradients are."
    if rollout_moved < ARRIVED * train_moved and after > WIDER * max(before, SAME):
        return (
            f"The update does not arrive in the rollout: training moved by {train_moved:.1e} nats a token, the "
            f"rollout by {rollout_moved:.1e}."
        )
    if after > WIDER * max(before, SAME):
        return f"One update widens the gap: k3 was {before:.1e} and is {after:.1e}."
    return (
        f"An update moves training by {train_moved:.1e} nats a token, the rollout by {rollout_moved:.1e}; "
        f"k3 is {after:.1e}."
    )


_SAID = {SYNC: _of_sync, UPDATE: _of_update}


def _k3(log_q_N: Tensor, log_p_N: Tensor) -> float | None:
    return _mean(k3_of(log_p_N.double() - log_q_N.double()))


def _moved(before_N: Tensor, after_N: Tensor) -> float | None:
    return _mean((after_N.double() - before_N.double()).abs())


def _mean(values_N: Tensor) -> float | None:
    finite = values_N[values_N.isfinite()]
    return float(finite.mean()) if len(finite) else None
