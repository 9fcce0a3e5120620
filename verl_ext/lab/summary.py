"""The outcome of runs in numbers: of one run, of a variant over its seeds, and of all runs of an experiment.

A run has collapsed if the mean of the reward over 20 steps is below half of the highest such mean so far. Rewards are
at least 0. If the guard stopped a run early, before a collapse, its outcome is unknown: it has neither survived nor
collapsed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from verl_ext.diagnosis.names import GRADIENT as NORM
from verl_ext.diagnosis.names import K3, REWARD
from verl_ext.diagnosis.noise import student_quantile
from verl_ext.diagnosis.series import Series
from verl_ext.diagnosis.statistics import level_means
from verl_ext.lab.grid import METRICS, GridCell
from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError, Run

EXACT, NONE = "exact", "none"  # variants: the rollout without a gap, and no method
DROPPED = "correction/dropped"
FORECAST, SKIPPED, ROLLBACKS = "guard/steps_to_boundary", "guard/skipped", "guard/rollbacks"

LEVEL_STEPS = 20  # a level is the mean reward over this many steps
COLLAPSED_SHARE, FALLEN_SHARE = 0.5, 0.8  # of the highest level so far
START_STEPS, BEFORE_STEPS = 5, 10  # of k3 at the start, and before the collapse
AHEAD_STEPS = 10  # between these and the collapse
FEW_STEPS, LARGE_K3 = 20, 0.1  # a forecast below FEW_STEPS, or k3 above LARGE_K3, is a warning
STRETCH_STEPS, FEWEST_STRETCHES = 10, 5  # stretches whose drops and k3 are compared, and how many there must be
COVERAGE = 0.95  # coverage of intervals over the seeds


@dataclass(frozen=True)
class Summary:
    """One run in numbers. None means that the run did not log it, or was too short for it.

    Attributes:
        steps: the last step.
        peak, last: the highest level of the reward, and the last.
        final: `last`, if the run trained to its end; None if the guard stopped it early.
        collapsed: the step, or None.
        stopped: the last step of a run that the guard stopped early, or None.
        k3_start, k3_before: mean k3 over the first steps, and shortly before the collapse, or at the end without one.
        dropped: mean share of tokens that the correction drops.
        dropped_with_k3: Spearman's rank correlation of this share with k3, over stretches of STRETCH_STEPS steps: 1 if
            a mask drops more the larger the gap is, below 0 if it drops less.
        grad_norm_median, grad_norm_max: over the run.
        warned: the first step with a warning.
        warning: steps from `warned` to the step at which the reward began to fall; negative if the warning came late.
            None without a collapse, or without a warning.
        skipped: number of refused updates; a step may have several, and its share counts.
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
    skipped: float | None
    rollbacks: int | None

    @property
    def known(self) -> bool:
        """True if it is known whether the run collapses: it did, or it trained to its end and did not."""
        return self.collapsed is not None or self.stopped is None

    @property
    def false_alarm(self) -> bool:
        return self.warned is not None and self.collapsed is None and self.known


# Measures with a mean over seeds: not `last`, which is a final reward for one run and the level at a stop for another.
MEASURES = tuple(each.name for each in fields(Summary) if each.name != "last")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and the half-width of its interval after Student's t, which is None with one seed."""

    mean: float
    half: float | None
    seeds: int

    @property
    def sure(self) -> bool:
        """True if 0 lies outside the interval."""
        return self.half is not None and abs(self.mean) > self.half

    def text(self, form: str = ".2f") -> str:
        """Returns the mean in this format, and the half-width."""
        return f"{self.mean:{form}}" + ("" if self.half is None else f" ±{self.half:.2f}")


@dataclass(frozen=True)
class Variant:
    """One arm over its seeds.

    Attributes:
        runs: the finished runs, by seed.
        failed: the error in one line, by seed.
        curves: the metrics of the finished runs, by seed; empty if only their numbers are kept.
    """

    name: str
    overrides: tuple[str, ...]
    runs: dict[int, Summary] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    curves: dict[int, Run] = field(default_factory=dict)

    def by_seed(self, measure: str) -> dict[int, float]:
        """Returns the measure by seed, without the runs that do not have it."""
        return {seed: value for seed, run in self.runs.items() if (value := getattr(run, measure)) is not None}

    def mean(self, measure: str) -> Interval | None:
        """Returns the mean over the seeds. None for the final reward if the guard stopped runs: the others are a
        selection."""
        if measure == "final" and self.stopped:
            return None
        return interval(list(self.by_seed(measure).values()))

    def difference_to(self, other: "Variant | None") -> Interval | None:
        """Returns this final reward minus the other's, on the seeds that both have. None if the guard stopped runs of
        either early, if there is no other, or if it is this one."""
        if other is None or other is self or self.stopped or other.stopped:
            return None
        ours, theirs = self.by_seed("final"), other.by_seed("final")
        return interval([value - theirs[seed] for seed, value in ours.items() if seed in theirs])

    @property
    def collapsed(self) -> dict[int, int]:
        """The steps of the collapses, by seed."""
        return {seed: int(step) for seed, step in self.by_seed("collapsed").items()}

    @property
    def stopped(self) -> dict[int, int]:
        """The last steps of the runs that the guard stopped early, by seed."""
        return {seed: int(step) for seed, step in self.by_seed("stopped").items()}

    @property
    def reward_then(self) -> Interval | None:
        """The last level of the runs that the guard stopped early; None if none reached one."""
        ended = [self.runs[seed].last for seed in self.stopped]
        return interval([level for level in ended if level is not None])

    @property
    def known(self) -> int:
        """The number of runs whose outcome is known."""
        return sum(run.known for run in self.runs.values())

    @property
    def false_alarms(self) -> list[int]:
        """The seeds whose runs had a warning, trained to their end, and did not collapse."""
        return [seed for seed, run in self.runs.items() if run.false_alarm]


def collect_variants(cells: Sequence[GridCell], out: Path, failed: Mapping[GridCell, str]) -> list[Variant]:
    """Returns the variants of a grid with their finished runs; a run whose files cannot be used has failed."""
    variants = {cell.arm: Variant(cell.arm.name, cell.arm.overrides) for cell in cells}
    for cell in cells:
        variant = variants[cell.arm]
        if cell in failed:
            variant.failed[cell.seed] = failed[cell]
        elif cell.settings_done(out) == cell.settings:
            try:
                run = read_run(cell.folder(out) / METRICS)
            except ReportError as error:
                variant.failed[cell.seed] = str(error)
                continue
            summary = summarise(run, cell.steps)
            if summary.steps < cell.steps and summary.stopped is None:
                variant.failed[cell.seed] = (
                    f"it ended at step {summary.steps} of {cell.steps}, but the guard did not stop it; "
                    f"remove {cell.folder(out)} to run it again"
                )
            else:
                variant.runs[cell.seed], variant.curves[cell.seed] = summary, run
    return list(variants.values())


def summarise(run: Run, steps: int | None = None) -> Summary:
    """Summarises a run in numbers.

    Args:
        steps: the requested number of steps, if it is known. A stop by the guard after the last one is not early.
    """
    reward = run.get(REWARD)
    level = None if reward is None else levels(reward)
    fell, collapsed = (None, None) if level is None else fall(level)
    warned = first_warning(run.get(FORECAST), run.get(K3))
    end = int(run.steps[-1])
    before = end if collapsed is None else collapsed - AHEAD_STEPS
    asked_to_end = any(event.action == "stop" and event.step >= end for event in run.events)
    stopped = end if asked_to_end and end != steps else None
    last = None if level is None else float(level.values[-1])
    rollbacks = run.get(ROLLBACKS)
    return Summary(
        steps=end,
        peak=None if level is None else float(level.values.max()),
        last=last,
        final=last if stopped is None else None,
        collapsed=collapsed,
        stopped=stopped,
        k3_start=_statistic(run.get(K3), np.mean, last=int(run.steps[0]) + START_STEPS - 1),
        k3_before=_statistic(run.get(K3), np.mean, first=before - BEFORE_STEPS + 1, last=before),
        dropped=_statistic(run.get(DROPPED), np.mean),
        dropped_with_k3=_rank_correlation(run.get(DROPPED), run.get(K3)),
        grad_norm_median=_statistic(run.get(NORM), np.median),
        grad_norm_max=_statistic(run.get(NORM), np.max),
        warned=warned,
        warning=None if fell is None or warned is None else fell - warned,
        skipped=_statistic(run.get(SKIPPED), np.sum),
        rollbacks=None if rollbacks is None else int(rollbacks.values.max()),
    )


def ranked_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Returns the exact variant, then the others by final reward, the highest first; variants without one come last."""

    def place(variant: Variant) -> tuple[bool, float]:
        final = variant.mean("final")
        return variant.name != EXACT, math.inf if final is None else -final.mean

    return sorted(variants, key=place)


def interval(values: Sequence[float]) -> Interval | None:
    """Returns the mean of independent values with its interval; None without any."""
    if not values:
        return None
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Interval(mean, None, 1)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, error * student_quantile(COVERAGE, n - 1), n)


def levels(series: Series) -> Series | None:
    """Returns the means of LEVEL_STEPS finite readings in a row, each at its last step; None if there are fewer
    readings."""
    series = series.finite()
    if len(series.steps) < LEVEL_STEPS:
        return None
    return Series(series.steps[LEVEL_STEPS - 1 :], level_means(series.values, LEVEL_STEPS))


def fall(level: Series) -> tuple[int, int] | tuple[None, None]:
    """Returns (the step at which the reward began to fall, the step of the collapse), or None twice without a collapse.

    The fall begins with the last stretch below FALLEN_SHARE before the collapse.
    """
    peaks = np.maximum.accumulate(level.values)
    below = np.flatnonzero(level.values < COLLAPSED_SHARE * peaks)
    if not below.size:
        return None, None
    collapsed = int(below[0])
    # Not empty: the first level is its own peak.
    sound = np.flatnonzero((level.values >= FALLEN_SHARE * peaks)[:collapsed])
    return int(level.steps[sound[-1] + 1]), int(level.steps[collapsed])


def first_warning(forecast: Series | None, k3: Series | None) -> int | None:
    """Returns the first step at which the guard's forecast, or k3 itself, gave a warning."""
    spoke = [] if forecast is None else [*forecast.steps[forecast.values < FEW_STEPS]]
    spoke += [] if k3 is None else [*k3.steps[k3.values > LARGE_K3]]
    return int(min(spoke)) if spoke else None


def _rank_correlation(one: Series | None, other: Series | None) -> float | None:
    if one is None or other is None:
        return None
    both = np.intersect1d(one.steps, other.steps)
    whole = len(both) // STRETCH_STEPS * STRETCH_STEPS
    ranks = []
    for series in (one, other):
        values = series.values[np.isin(series.steps, both[:whole])].reshape(-1, STRETCH_STEPS).mean(axis=1)
        ranks.append(np.unique(values, return_inverse=True)[1])
    if len(ranks[0]) < FEWEST_STRETCHES or not all(np.ptp(rank) for rank in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _statistic(
    series: Series | None, reduce: Callable[[np.ndarray], float], first: float = -np.inf, last: float = np.inf
) -> float | None:
    if series is None:
        return None
    inside = series.values[(series.steps >= first) & (series.steps <= last)]
    return float(reduce(inside)) if inside.size else None
