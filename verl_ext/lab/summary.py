"""What a run of the lab came to, in numbers; and the one rule by which a run has collapsed.

A run has collapsed where the mean of the reward over 20 steps is below half of the highest such mean so far. Rewards
are 0 and above. A run that the guard ended early has neither survived nor, for that alone, collapsed: nobody knows what
it would have come to.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_ext.report.run import Run, Series

REWARD, K3, DROPPED, NORM = "critic/score/mean", "vllm_kl/k3", "correction/dropped", "actor/grad_norm"
FORECAST, SKIPPED, ROLLBACKS = "guard/steps_to_boundary", "guard/skipped", "guard/rollbacks"

WINDOW = 20  # steps of a level
COLLAPSED, FALLEN = 0.5, 0.8  # of the highest level so far
START, BEFORE, AHEAD = 5, 10, 10  # steps: of k3 at the start; of k3 before the collapse, and from there to it
FEW_STEPS, LARGE_K3 = 20, 0.1  # a forecast below, a k3 above: a warning
FEW, SMOOTH = 5, 10  # readings of k3 whose mean has to pass it to count as past; of stretches that are compared


@dataclass(frozen=True)
class Summary:
    """One run. None is what the run did not log, or was too short for.

    Attributes:
        steps: the last one.
        peak, last: the highest level of the reward, and the last.
        final: `last`, of a run that trained to its end; None of one that the guard ended early.
        collapsed: the step, or None.
        stopped: the last step of a run that the guard ended early, or None.
        k3_start, k3_before: mean over the first steps, and shortly before the collapse, or at the end without one.
        dropped: mean share of tokens.
        dropped_with_k3: how far the share rises and falls with k3, Spearman's rank correlation over stretches of
            SMOOTH steps: 1 where a mask drops more the larger the gap, below 0 where it sees less of a larger one.
        grad_norm_median, grad_norm_max: over the run.
        warned: the first step with a warning.
        warning: steps from there to the one at which the reward began to fall; negative where it came late. None
            without a collapse, or without a warning.
        foretold: steps from the first forecast below FEW_STEPS to the one at which the mean of FEW readings of k3
            passed LARGE_K3; 0 or negative where it came no earlier. None where either did not happen.
        skipped: updates refused.
    """

    steps: int
    peak: float | None
    last: float | None
    final: float | None
    collapsed: int | None
    stopped: int | None
    k3_start: float | None
    k3_before: float | None
    dropped: float | None
    dropped_with_k3: float | None
    grad_norm_median: float | None
    grad_norm_max: float | None
    warned: int | None
    warning: int | None
    foretold: int | None
    skipped: int | None
    rollbacks: int | None

    @property
    def known(self) -> bool:
        """Whether it is known if the run collapses: it did, or it trained to its end and did not."""
        return self.collapsed is not None or self.stopped is None

    @property
    def false_alarm(self) -> bool:
        return self.warned is not None and self.collapsed is None and self.known


def summarise(run: Run, steps: int | None = None) -> Summary:
    """The run in numbers.

    Args:
        steps: as many as were asked for, where that is known: a guard that asks for the end after the last of them has
            ended nothing early.
    """
    reward = run.get(REWARD)
    level = None if reward is None else levels(reward)
    fell, collapsed = (None, None) if level is None else fall(level)
    warned = first_warning(run.get(FORECAST), run.get(K3))
    end = int(run.steps[-1])
    before = end if collapsed is None else collapsed - AHEAD
    asked_to_end = any(event.action == "stop" and event.step >= end for event in run.events)
    stopped = end if asked_to_end and end != steps else None
    last = None if level is None else float(level.values[-1])
    skipped, rollbacks = (run.get(name) for name in (SKIPPED, ROLLBACKS))
    return Summary(
        steps=end,
        peak=None if level is None else float(level.values.max()),
        last=last,
        final=last if stopped is None else None,
        collapsed=collapsed,
        stopped=stopped,
        k3_start=_over(run.get(K3), np.mean, last=int(run.steps[0]) + START - 1),
        k3_before=_over(run.get(K3), np.mean, first=before - BEFORE + 1, last=before),
        dropped=_over(run.get(DROPPED), np.mean),
        dropped_with_k3=_together(run.get(DROPPED), run.get(K3)),
        grad_norm_median=_over(run.get(NORM), np.median),
        grad_norm_max=_over(run.get(NORM), np.max),
        warned=warned,
        warning=None if fell is None or warned is None else fell - warned,
        foretold=_foretold(run.get(FORECAST), run.get(K3)),
        skipped=None if skipped is None else int((skipped.values > 0).sum()),
        rollbacks=None if rollbacks is None else int(rollbacks.values.max()),
    )


def levels(series: Series) -> Series | None:
    """The mean of the last WINDOW finite readings, from the WINDOWth on; None where there are fewer."""
    series = series.finite()
    if len(series.steps) < WINDOW:
        return None
    means = np.lib.stride_tricks.sliding_window_view(series.values, WINDOW).mean(axis=1)
    return Series(series.steps[WINDOW - 1 :], means)


def fall(level: Series) -> tuple[int, int] | tuple[None, None]:
    """Of a run that has collapsed: the step at which the last stretch below FALLEN before it began, and its own."""
    peaks = np.maximum.accumulate(level.values)
    below = np.flatnonzero(level.values < COLLAPSED * peaks)
    if not below.size:
        return None, None
    collapsed = int(below[0])
    sound = np.flatnonzero((level.values >= FALLEN * peaks)[:collapsed])  # the first is: it is its own peak
    return int(level.steps[sound[-1] + 1]), int(level.steps[collapsed])


def first_warning(forecast: Series | None, k3: Series | None) -> int | None:
    """The first step at which the guard's forecast, or k3 itself, spoke."""
    spoke = [] if forecast is None else [*forecast.steps[forecast.values < FEW_STEPS]]
    spoke += [] if k3 is None else [*k3.steps[k3.values > LARGE_K3]]
    return int(min(spoke)) if spoke else None


def _foretold(forecast: Series | None, k3: Series | None) -> int | None:
    if forecast is None or k3 is None or len(k3.steps) < FEW:
        return None
    means = np.convolve(k3.values, np.ones(FEW) / FEW, mode="valid")
    spoke, passed = forecast.steps[forecast.values < FEW_STEPS], k3.steps[FEW - 1 :][means > LARGE_K3]
    return int(passed[0] - spoke[0]) if len(spoke) and len(passed) else None


def _together(one: Series | None, other: Series | None) -> float | None:
    if one is None or other is None:
        return None
    both = np.intersect1d(one.steps, other.steps)
    whole = len(both) // SMOOTH * SMOOTH
    ranks = []
    for series in (one, other):
        values = series.values[np.isin(series.steps, both[:whole])].reshape(-1, SMOOTH).mean(axis=1)
        ranks.append(np.unique(values, return_inverse=True)[1])
    if len(ranks[0]) < FEW or not all(np.ptp(rank) for rank in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _over(
    series: Series | None, of: Callable[[np.ndarray], float], first: float = -np.inf, last: float = np.inf
) -> float | None:
    if series is None:
        return None
    inside = series.values[(series.steps >= first) & (series.steps <= last)]
    return float(of(inside)) if inside.size else None
