"""The growth of a mismatch, and whether it is more than noise: pure Python, because a launch imports it.

IcePop's appendix shows that past a critical size the mismatch delta grows at least geometrically,
delta_{t+1} >= (1 + eta mu) delta_t ("Small Leak Can Sink a Great Ship", compounding lemma). log delta against the step
is then a straight line before a collapse. `estimate_growth` takes its slope as the median of all pairwise slopes
(Theil-Sen), which one spiked step in four cannot move. Two intervals show whether the slope is more than noise, and the
narrower one counts:

- Sen's interval, from the variance of Kendall's S, widened if the readings of neighbouring steps depend on each other
  (after Hamed and Rao, 1998). It finds a weak trend under strong noise.
- SCATTERS times the scatter around the line, divided by the length of the window. It finds a strong trend whose
  curvature Sen's interval mistakes for dependence.
"""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median, pstdev

HORIZON = 1000  # steps; a boundary further away than this is not in sight
FLOOR = 1e-12  # smaller mismatches are raised to this before the logarithm
HIGHEST = math.log(sys.float_info.max)  # exp of more than this overflows
FEWEST_FOR_GROWTH = 8  # readings before there is an estimate of growth
BOUNDARY = 0.1  # k3 past which a run counts as collapsing, by default
GROWTH_READINGS = 32  # the latest readings, to which a line is fitted by default
SEN_DEVIATIONS = 4.0  # half-width of Sen's interval in standard deviations; test_growth.py counts false alarms
SCATTERS, SCATTER_FEWEST = 6.0, 16  # half-width of the other interval in scatters; the fewest readings for it
ROUNDING = 1e-9  # smaller residuals come from the arithmetic, not from the run
NORMAL_MAD = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
LARGEST_AUTOCORRELATION = 0.9


def spread(values: Collection[float]) -> tuple[float, float]:
    """Returns the median, and the median absolute deviation as standard deviations of a normal distribution."""
    middle = median(values)
    return middle, NORMAL_MAD * median(abs(value - middle) for value in values)


def scatter(residuals: Collection[float]) -> float:
    """Returns the larger of the standard deviation and its robust estimate."""
    _, robust = spread(residuals)
    return max(pstdev(residuals), robust)


@dataclass(frozen=True)
class Growth:
    """The estimate at one step.

    Attributes:
        rate: slope of log delta, per step; exp(rate) - 1 is the relative growth of a step.
        low, high: the interval of the slope.
        level: the delta of the line at the last step.
        steps: predicted steps until delta passes the boundary: 0 if `level` is past it, HORIZON if growth is not
            certain (low <= 0) or the boundary is further away.
    """

    rate: float
    low: float
    high: float
    level: float
    steps: float


def estimate_growth(readings: Iterable[tuple[int, float]], boundary: float) -> Growth | None:
    """Fits a line to the logarithm of the last readings of delta.

    Args:
        readings: (step, delta) with ascending steps; delta is a divergence, never negative, or a difference.
        boundary: the delta whose crossing is predicted, above 0.

    Returns None for fewer than FEWEST_FOR_GROWTH readings.
    """
    points = [(step, math.log(max(delta, FLOOR))) for step, delta in readings]
    if len(points) < FEWEST_FOR_GROWTH:
        return None
    slopes = sorted((later - earlier) / (t - s) for (s, earlier), (t, later) in combinations(points, 2))
    rate = median(slopes)
    last = points[-1][0]
    at_last = [y - rate * (t - last) for t, y in points]  # the line's height at the last step, from each reading
    level = median(at_last)
    residuals = [y - level for y in at_last]
    n = len(points)
    # The variance of Kendall's S, rising pairs minus falling ones, for independent readings.
    variance = n * (n - 1) * (2 * n + 5) / 18
    outside = (len(slopes) - SEN_DEVIATIONS * math.sqrt(variance * _inflation(residuals))) / 2
    low = slopes[int(outside)] if outside >= 0 else -math.inf
    high = slopes[len(slopes) - 1 - int(outside)] if outside >= 0 else math.inf
    if len(points) >= SCATTER_FEWEST:
        half = SCATTERS * scatter(residuals) / (last - points[0][0])
        low, high = max(low, rate - half), min(high, rate + half)
    left = math.log(boundary) - level
    if left <= 0:
        steps = 0.0
    elif low <= 0:
        steps = float(HORIZON)
    else:
        steps = min(left / rate, float(HORIZON))
    return Growth(rate, low, high, math.exp(min(level, HIGHEST)), steps)


def is_seen_enough(steps: list[int], now: int, window: int) -> bool:
    """Returns True if there are enough readings, and recent ones.

    Rescoring is rare, so the last reading may be older: by up to one window, or the span of the last FEWEST_FOR_GROWTH
    readings.
    """
    return len(steps) >= FEWEST_FOR_GROWTH and now - steps[-1] <= max(window, steps[-1] - steps[-FEWEST_FOR_GROWTH])


def _inflation(residuals: Sequence[float]) -> float:
    """Returns the factor, at least 1, by which first-order dependence of neighbouring readings widens the variance of
    S."""
    n = len(residuals)
    if max(map(abs, residuals)) < ROUNDING:
        return 1.0
    order = sorted(residuals)
    centred = [order.index(value) - (n - 1) / 2 for value in residuals]  # ranks: a spike must not hide the dependence
    power = sum(value * value for value in centred)
    if power == 0:
        return 1.0
    observed = sum(a * b for a, b in pairwise(centred)) / power
    # Residuals of a fitted line understate the dependence by about (2 + 4 rho) / n.
    rho = min(max(observed + (2 + 4 * max(observed, 0.0)) / n, 0.0), LARGEST_AUTOCORRELATION)
    return (1 + rho) / (1 - rho)
