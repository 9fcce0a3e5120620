"""What the seeds of a variant say together: means with intervals, and differences that are paired by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

import numpy as np

from verl_ext.lab.summary import Summary
from verl_ext.report.noise import student_quantile

COVERAGE = 0.95
# What has a mean over seeds: not `last`, which is a final reward of one run and the level at a stop of another.
MEASURES = tuple(each.name for each in fields(Summary) if each.name != "last")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half-width of its interval after Student's t; None with one seed."""

    mean: float
    half: float | None
    seeds: int

    @property
    def sure(self) -> bool:
        """Whether 0 lies outside."""
        return self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True)
class Variant:
    """One arm over its seeds.

    Attributes:
        runs: by seed, those that were done.
        failed: by seed, the error in a line.
    """

    name: str
    overrides: tuple[str, ...]
    runs: Mapping[int, Summary]
    failed: Mapping[int, str] = field(default_factory=dict)

    def of(self, measure: str) -> dict[int, float]:
        """By seed, where the run has it."""
        return {seed: value for seed, run in self.runs.items() if (value := getattr(run, measure)) is not None}

    def mean(self, measure: str) -> Interval | None:
        """Over the seeds. Of the final reward None where the guard ended runs: those that are left were selected."""
        if measure == "final" and self.stopped:
            return None
        return interval(list(self.of(measure).values()))

    def against(self, other: "Variant", measure: str = "final") -> Interval | None:
        """This less the other, on the seeds that both have; None where the guard ended runs of either early."""
        if self.stopped or other.stopped:
            return None
        ours, theirs = self.of(measure), other.of(measure)
        return interval([value - theirs[seed] for seed, value in ours.items() if seed in theirs])

    @property
    def collapsed(self) -> dict[int, int]:
        """The steps, by seed."""
        return {seed: int(step) for seed, step in self.of("collapsed").items()}

    @property
    def stopped(self) -> dict[int, int]:
        """The last steps of the runs that the guard ended early, by seed."""
        return {seed: int(step) for seed, step in self.of("stopped").items()}

    @property
    def reward_then(self) -> Interval | None:
        """The last level of the runs that the guard ended early; None where none came to one."""
        ended = [self.runs[seed].last for seed in self.stopped]
        return interval([level for level in ended if level is not None])

    @property
    def known(self) -> int:
        """Runs of which it is known whether they collapse."""
        return sum(run.known for run in self.runs.values())

    @property
    def false_alarms(self) -> list[int]:
        """The seeds that were warned, trained to their end, and did not collapse."""
        return [seed for seed, run in self.runs.items() if run.false_alarm]


def interval(values: Sequence[float]) -> Interval | None:
    """Of the mean of independent values; None without any."""
    if not values:
        return None
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Interval(mean, None, 1)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, error * _student(n - 1), n)


@lru_cache
def _student(freedom: int) -> float:
    return student_quantile(COVERAGE, freedom)


def ranked(variants: Sequence[Variant]) -> list[Variant]:
    """The exact one first, then by the final reward; what has none, as where the guard ended runs early, is last."""

    def place(variant: Variant) -> tuple[bool, float]:
        final = variant.mean("final")
        return variant.name != "exact", math.inf if final is None else -final.mean

    return sorted(variants, key=place)


def named(variants: Sequence[Variant], name: str) -> Variant | None:
    return next((variant for variant in variants if variant.name == name), None)
