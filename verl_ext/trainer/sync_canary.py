"""Whether weight syncs happen, seen on a few trajectories that both engines score again and again: after each update,
and after the sync that brings it to the rollout.

Before the first update of a run the gap on them is the engines' own (with a LoRA, that of B = 0). From then on, what
the training engine's log-probabilities moved must show in those of every rollout engine.

Shape legend: N tokens of these trajectories.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_ext.core.arrival import MISSING, arrival
from verl_ext.guard.state import Decision, Event

RULE = "weight_sync"  # of its events, as of the guard's jump
SIGNAL = "sync/arrived_high"


@dataclass
class Replica:
    """What is known of a rollout engine: the scores, [N] each, and the step of the last sync that arrived."""

    train: Tensor
    infer: Tensor
    step: int
    missing: bool = False


class SyncCanary:
    """Compares the scores after each sync with those after the last one that arrived."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []

    @property
    def begun(self) -> bool:
        return bool(self._replicas)

    def begin(self, step: int, train_N: Tensor, infer: Sequence[Tensor]) -> None:
        """Take these scores, of training and of each rollout engine, for those of the same weights."""
        self._replicas = [Replica(train_N, infer_N, step) for infer_N in infer]

    def check(self, step: int, train_N: Tensor, infer: Sequence[Tensor]) -> tuple[dict[str, float], Decision]:
        """After a sync: `sync/*`, the worst of the rollout engines, and what has begun or ended in this step."""
        found = []
        events: list[Event] = []
        for number, (replica, infer_N) in enumerate(zip(self._replicas, infer, strict=True)):
            seen = arrival((replica.train, train_N), (replica.infer, infer_N))
            found.append(seen)
            engine = f"rollout engine {number} of {len(infer)}"
            if seen.missing and not replica.missing:
                reason = (
                    f"of what the updates since step {replica.step} moved ({seen.moved:.2g} nats a token), at most "
                    f"{seen.high:.0%} is in {engine}: did the weight sync reach it, and under names that it takes?"
                )
                events.append(Event(step, RULE, SIGNAL, seen.high, MISSING, "warn", reason))
            if seen.arrived:
                if replica.missing:
                    reason = f"{engine} has the weights again"
                    events.append(Event(step, RULE, SIGNAL, min(seen.high, 1.0), MISSING, "recover", reason))
                replica.train, replica.infer, replica.step = train_N, infer_N, step
            replica.missing = (replica.missing or seen.missing) and not seen.arrived
        metrics = {
            "sync/moved": max(seen.moved for seen in found),
            "sync/arrived_low": min(seen.low for seen in found),
        }
        if math.isfinite(high := min(seen.high for seen in found)):
            metrics[SIGNAL] = high
        return metrics, Decision(tuple(events))
