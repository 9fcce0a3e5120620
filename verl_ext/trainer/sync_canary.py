"""Checks that weight syncs arrive, on a few trajectories that both engines score repeatedly: the training engine after
each update, and the rollout engines after the sync.

Before the first update of a run, the gap on them is due to the engines only (with a LoRA, that of B = 0). From then on,
a change of the training engine's log-probabilities must show in those of every rollout engine (`core.arrival`).

If only a part of an update arrives, such as some layers, tokens get different shares. An update that is scaled by a
factor moves every token by the same share, as long as the updates are small. So the first syncs are always checked, and
the median of y / x is logged with its spread. How far the rollout has moved since the last check separates a small part
from none: an engine whose weights stayed the same gives each token the same score again, up to its own noise.

A tensor that never arrives may be a part too small for one check. But what is missing of all updates together grows
with them, and rounding does not: each check is also made against the first scores.

Shape legend: N tokens of the canary's trajectories (`CanaryTrajectories`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import FEWEST_PROMPTS
from verl_ext.core.arrival import MISSING_SHARE, arrival, movement
from verl_ext.features.settings import SyncCanarySettings
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer.canary_scores import CanaryTrajectories

FIRST_CHECKS = 3  # syncs that are checked whatever `every` says, because updates are still small
RULE = "weight_sync"  # of its events, and of the guard's jump
SIGNAL = "sync/arrived_high"


@dataclass
class Replica:
    """The state of a rollout engine.

    Attributes:
        train, infer: [N] scores after the last sync that arrived.
        step: the step of that sync.
        first, last: [N] scores at the first and at the last check.
        missing: an update did not arrive, and the loss has not been seen to end.
    """

    train: Tensor
    infer: Tensor
    step: int
    first: Tensor
    last: Tensor
    missing: bool = False


class SyncCanary:
    """Compares the scores after a sync with those after the last one that arrived.

    Args:
        every: check every N-th sync, and the first ones.
    """

    def __init__(self, every: int = 1) -> None:
        self._replicas: list[Replica] = []
        self._first_train = self._last_train = self._prompt_N = torch.empty(0)
        self._every, self._checks = every, 0

    @property
    def begun(self) -> bool:
        return bool(self._replicas)

    def is_due(self, step: int) -> bool:
        """Returns True if the sync of this step is to be checked."""
        return self._checks < FIRST_CHECKS or step % self._every == 0

    def begin(self, step: int, train_N: Tensor, infer: Sequence[Tensor], prompt_N: Tensor) -> None:
        """Stores these scores, of training and of each rollout engine, as those of the same weights.

        Args:
            prompt_N: see `arrival`.
        """
        self._replicas = [Replica(train_N, infer_N, step, infer_N, infer_N) for infer_N in infer]
        self._first_train, self._last_train, self._prompt_N = train_N, train_N, prompt_N

    def check(self, step: int, train_N: Tensor, infer: Sequence[Tensor]) -> tuple[dict[str, float], Decision]:
        """Checks a sync. Returns `sync/*` of the worst rollout engine, and an event for each engine that begins or
        ceases to miss updates."""
        found, whole, followed = [], [], []
        events: list[Event] = []
        self._checks += 1
        for number, (replica, infer_N) in enumerate(zip(self._replicas, infer, strict=True)):
            seen = arrival((replica.train, train_N), (replica.infer, infer_N), self._prompt_N)
            found.append(seen)
            whole.append(arrival((self._first_train, train_N), (replica.first, infer_N), self._prompt_N))
            followed.append(movement((self._last_train, train_N), (replica.last, infer_N)))
            replica.last = infer_N
            engine = f"rollout engine {number} of {len(infer)}"
            if seen.missing and not replica.missing:
                reason = (
                    f"at most {seen.high:.0%} of the change since step {replica.step} ({seen.moved:.2g} nats per "
                    f"token) arrived in {engine}; check that the weight sync reaches it, with parameter names that "
                    "it knows"
                )
                events.append(Event(step, RULE, SIGNAL, seen.high, MISSING_SHARE, "warn", reason))
            if seen.arrived:
                if replica.missing:
                    reason = f"{engine} has the weights again"
                    events.append(Event(step, RULE, SIGNAL, min(seen.high, 1.0), MISSING_SHARE, "recover", reason))
                replica.train, replica.infer, replica.step = train_N, infer_N, step
            replica.missing = (replica.missing or seen.missing) and not seen.arrived
        metrics = {"sync/moved": max(seen.moved for seen in found)}
        if lows := [seen.low for seen in found if seen.known]:
            metrics["sync/arrived_low"] = min(lows)
        if math.isfinite(high := min(seen.high for seen in found)):
            metrics[SIGNAL] = high
        if moved := [seen for seen in found if not math.isnan(seen.median)]:
            furthest = max(moved, key=lambda seen: abs(seen.median - 1))
            metrics |= {"sync/arrived_median": furthest.median, "sync/arrived_spread": furthest.spread}
        if sums := [seen for seen in whole if math.isfinite(seen.high)]:
            furthest = max(sums, key=lambda seen: seen.apart)
            metrics |= {"sync/apart": furthest.apart, "sync/rounding": furthest.rounding}
        self._last_train = train_N
        if known := [share for share in followed if not math.isnan(share)]:
            metrics["sync/followed"] = min(known)
        return metrics, Decision(tuple(events))


class CanaryRun:
    """Runs the canary in a run's steps: before the first update, after each update, and after each sync.

    Args:
        settings: trajectories, every.
        comparable: whether a rollout's log-probabilities equal a server's for given tokens, so that those of the first
            batch serve as the first comparison.
        required: whether the user asked for it. A canary that is on by default and cannot work prints why and is off.
    """

    def __init__(self, settings: SyncCanarySettings, comparable: bool, required: bool = True):
        self.canary = SyncCanary(settings.every)
        self.metrics: dict[str, float] = {}
        self._settings, self._comparable, self._required = settings, comparable, required
        self._off = self._waited = False
        self._trajectories: CanaryTrajectories | None = None
        self._first: Tensor | None = None
        self._train: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether it still has to choose its trajectories."""
        return self._trajectories is None and not self._off

    def choose(self, batch: KVBatchMeta, workers: Any, multiple: int) -> None:
        """Chooses the trajectories from the first batch that has enough prompts, and scores them before its update.

        Filters may leave few prompts in a batch.

        Args:
            multiple: `queue.row_multiple`.

        Raises:
            HookError: the trajectories cannot be scored, and the user asked for the canary.
        """
        try:
            chosen = CanaryTrajectories(batch, self._settings.trajectories or 0, multiple)
        except HookError as error:
            self._switch_off(error)
            return
        if (prompts := len(chosen.prompt_N.unique())) < FEWEST_PROMPTS:
            chosen.release()
            if not self._waited:
                print(
                    f"verl_ext: weight syncs are checked from the first batch with answers to {FEWEST_PROMPTS} prompts "
                    f"on; this one has answers to {prompts}",
                    flush=True,
                )
            self._waited = True
            return
        self._trajectories = chosen
        if self._comparable and not self._waited:
            self._first = chosen.score_in_workers(workers)

    def after_update(self, step: int, workers: Any) -> None:
        """Scores with the updated weights before the sync, when the workers may have to make room for the rollout."""
        self._train = None
        if self._trajectories is not None and self.canary.is_due(step):
            self._train = self._trajectories.score_in_workers(workers)

    def after_sync(self, step: int, handles: Sequence[Any]) -> Decision:
        """Checks the sync of this step; `metrics` are what it logs.

        Raises:
            HookError: a rollout engine does not score, and the user asked for the canary.
        """
        self.metrics = {}
        if self._trajectories is None or self._train is None:
            return Decision()
        try:
            infer = self._trajectories.score_in_servers(handles)
        except HookError as error:
            self._switch_off(error)
            return Decision()
        if not self.canary.begun:
            prompt_N = self._trajectories.prompt_N
            if self._first is None:
                self.canary.begin(step, self._train, infer, prompt_N)
                return Decision()
            self.canary.begin(step - 1, self._first, [self._trajectories.l_infer_N] * len(infer), prompt_N)
        self.metrics, decision = self.canary.check(step, self._train, infer)
        return decision

    def _switch_off(self, error: HookError) -> None:
        if self._required:
            raise error
        self._off, self._trajectories, self._train = True, None, None
        print(f"verl_ext: weight syncs are not checked: {error}", flush=True)
