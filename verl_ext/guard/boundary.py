"""How fast the mismatch of the engines grows, and how many steps are left until it passes a boundary.

IcePop's appendix shows that past a critical size the mismatch delta grows at least geometrically, delta_{t+1} >=
(1 + eta mu) delta_t ("Small Leak Can Sink a Great Ship", compounding lemma). log delta against the step is then a
straight line before a collapse. Its slope is estimated as the median of all pairwise slopes (Theil-Sen), which one
spiked step in four cannot move. Two intervals tell whether it is more than noise, and the narrower one stands:

- Sen's, from the variance of Kendall's S, widened where the readings of neighbouring steps depend on each other (after
  Hamed and Rao, 1998): it finds a weak trend under strong noise;
- the scatter around the line, SCATTERS times, spread over the window: it finds a strong trend, whose curve the first
  takes for dependence.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median, pstdev

from verl_ext.guard.rules import spread

HORIZON = 1000  # steps; further away than this is the same as not in sight
FLOOR = 1e-12  # a mismatch below this is 0 for the logarithm
HIGHEST = math.log(sys.float_info.max)  # what the line passes there is no number any more
FEWEST = 8  # readings before there is an estimate
SIGMAS = 4.0  # half-width of Sen's interval in standard deviations; test_boundary.py counts false alarms
SCATTERS, SCATTER_FEWEST = 6.0, 16  # and of the other one in scatters; from so many readings on
ROUNDING = 1e-9  # residuals below this are the arithmetic's, not the run's
LARGEST_AUTOCORRELATION = 0.9


@dataclass(frozen=True)
class Growth:
    """The estimate at one step.

    Attributes:
        rate: slope of log delta, per step; exp(rate) - 1 is the relative growth of a step.
        low, high: the interval of the slope.
        level: the delta of the line at the last step.
        steps: predicted steps until delta passes the boundary: 0 where `level` is past it, HORIZON where growth is not
            certain (low <= 0) or the boundary further away.
    """

    rate: float
    low: float
    high: float
    level: float
    steps: float


def estimate_growth(readings: Iterable[tuple[int, float]], boundary: float) -> Growth | None:
    """Fit the last readings of delta.

    Args:
        readings: (step, delta) with ascending steps; delta is a divergence, never negative, or a difference.
        boundary: the delta whose crossing is predicted, above 0.

    Returns None for fewer than FEWEST readings.
    """
    points = [(step, math.log(max(delta, FLOOR))) for step, delta in readings]
    if len(points) < FEWEST:
        return None
    slopes = sorted((later - earlier) / (t - s) for (s, earlier), (t, later) in combinations(points, 2))
    rate = median(slopes)
    last = points[-1][0]
    at_last = [y - rate * (t - last) for t, y in points]  # the line's height at the last step, by each reading
    level = median(at_last)
    residuals = [y - level for y in at_last]
    outside = (len(slopes) - SIGMAS * math.sqrt(_variance_of_s(len(points)) * _inflation(residuals))) / 2
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


def _variance_of_s(n: int) -> float:
    """Of Kendall's S, the number of rising pairs less that of falling ones, for n independent readings."""
    return n * (n - 1) * (2 * n + 5) / 18


def scatter(residuals: Sequence[float]) -> float:
    """The larger of the standard deviation and its robust estimate."""
    _, robust = spread(residuals)
    return max(pstdev(residuals), robust)


def _inflation(residuals: Sequence[float]) -> float:
    """What first-order dependence of neighbouring readings multiplies that variance by, at least 1."""
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
