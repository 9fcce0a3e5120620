"""The final value of a metric, and whether those of two runs differ by more than the noise of their steps.

The metric should not move at the end of a run (`final`). rho, the correlation of neighbours (`statistics`), is too
small and scatters in a short window: it is corrected (Marriott and Pope, 1954), and CAUTION standard errors are added,
because a slow wave looks like a level. Single spikes hide the dependence of the readings between them, so rho is
estimated from residuals that are cut. Two means are compared by Welch's t; Holm's procedure (1979) covers all
comparisons of one table.
`python tools/compare_alarms.py` counts how often differences are found, and falsely.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from verl_ext.base.metrics.metric import Scale
from verl_ext.diagnosis.growth import FLOOR, NORMAL_MAD
from verl_ext.diagnosis.series import Series

TOO_FEW: Literal["too few readings to tell"] = "too few readings to tell"
NoiseVerdict = Literal["differs", "within noise", "too few readings to tell"]

CAVEAT = (
    "noise = step-to-step noise within each run; it does not include the difference between seeds: for that, run "
    "each setting with several seeds"
)
LEVEL = 0.01  # probability of a false alarm: in one interval, and in a whole table after `judge_differences`
WINDOW_SHARE, WINDOW_FEWEST, WINDOW_MOST = 0.1, 20, 100  # of the readings; its bounds in readings
FEWEST_FOR_ERROR = 4  # readings
FEWEST_FOR_DRIFT = 3.0  # degrees of freedom that are left after fitting the line
CAUTION = 1.9  # standard errors that are added to the correlation
LEAST_SCATTER = 0.4  # of sqrt(1 - rho^2): near rho = 1 the standard error is no estimate
LARGEST_CORRELATION = 0.99
FEWEST_EFFECTIVE = 3.0  # independent readings; fewer give no verdict
CUT = 1.5  # robust standard deviations at which residuals are cut before they are correlated
ROUNDING = 1e-12  # relative; a smaller difference is only arithmetic


@dataclass(frozen=True)
class Final:
    """A metric at the end of a run.

    Attributes:
        mean: the mean of the window, in the metric's unit; the geometric mean on the log scale; NaN without a reading.
        error: one standard error of the mean, in the same unit; on the log scale, that of its natural logarithm. It is
            an upper estimate, as the correlation is. None if the window has less information than FEWEST_EFFECTIVE
            independent readings, or fewer than FEWEST_FOR_ERROR readings.
        freedom: degrees of freedom of the error.
        drift: the rise of a straight line from the first to the last step of the window, on the scale; 0 if it is
            within noise. Otherwise the metric is still moving, and the scatter is measured around the line.
        steps: the first and the last step of the window; None without a reading.
        scale: "log" compares ratios: for metrics that single tokens change tenfold or more.
    """

    mean: float
    error: float | None
    freedom: float | None = None
    drift: float = 0.0
    steps: tuple[int, int] | None = None
    scale: Scale = "linear"

    @property
    def centre(self) -> float:
        """The mean on its scale."""
        return math.log(max(self.mean, FLOOR)) if self.scale == "log" else self.mean


@dataclass(frozen=True)
class Difference:
    """The difference between the final values of two runs.

    Attributes:
        change: second minus first; on the log scale the logarithm of second over first.
        error: one standard error of `change`; None if one of the runs has too few readings.
        freedom: degrees of freedom after Welch; infinite if neither run scatters.
        p: two-sided probability of a change at least this large if the means are equal.
        verdict: for this comparison by itself, at LEVEL; see `judge_differences` for the comparisons of a table.
    """

    change: float
    error: float | None
    freedom: float | None
    p: float | None
    verdict: NoiseVerdict

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `change`, with a coverage of 1 - LEVEL; None without an error."""
        if self.error is None or self.freedom is None:
            return None
        half = self.error * student_quantile(1 - LEVEL, self.freedom) if self.error else 0.0
        return self.change - half, self.change + half


def final(series: Series, window: int | None = None, scale: Scale = "linear") -> Final:
    """Returns the mean over the last steps of a run, and its standard error.

    The error covers the noise between steps (CAVEAT).

    Args:
        series: the series of one metric; values that are not finite are left out.
        window: steps, counted back from the last finite reading, at least 1; None for the last tenth of the readings,
            at least WINDOW_FEWEST and at most WINDOW_MOST of them.
        scale: "log" for positive metrics that span decades.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 step")
    series = series.finite()
    if not series.steps.size:
        return Final(math.nan, None, scale=scale)
    if window is None:
        start = -min(max(math.ceil(WINDOW_SHARE * series.steps.size), WINDOW_FEWEST), WINDOW_MOST)
    else:
        start = int(np.searchsorted(series.steps, series.steps[-1] - window, side="right"))
    at: np.ndarray = series.steps[start:].astype(np.float64)
    values = series.values[start:]
    steps, n = (int(at[0]), int(at[-1])), len(values)
    if np.ptp(values) == 0:  # the mean would be rounded: two constants must compare exactly
        constant = float(values[0])
        if n < FEWEST_FOR_ERROR:
            return Final(constant, None, steps=steps, scale=scale)
        return Final(constant, 0.0, n - 1, steps=steps, scale=scale)
    heights = np.log(np.maximum(values, FLOOR)) if scale == "log" else values
    centre = float(heights.mean())
    mean = math.exp(centre) if scale == "log" else centre
    if n < FEWEST_FOR_ERROR:
        return Final(mean, None, steps=steps, scale=scale)
    scatter, drift = _scatter(heights - centre, fitted=1), 0.0
    slope, line = _slope(at, heights)
    around = _scatter(heights - line, fitted=2)
    if around is not None and around.freedom >= FEWEST_FOR_DRIFT:
        slope_error = around.error * math.sqrt(n / np.sum((at - at.mean()) ** 2))
        if _p(slope, slope_error, around.freedom) < LEVEL:
            scatter, drift = around, slope * (steps[1] - steps[0])
    if scatter is None:
        return Final(mean, None, steps=steps, scale=scale)
    return Final(mean, scatter.error, scatter.freedom, drift, steps, scale)


def compare_finals(a: Final, b: Final) -> Difference:
    """Compares b with a, which must be on the same scale."""
    if a.scale != b.scale:
        raise ValueError(f"a final value on the {a.scale} scale cannot be compared with one on the {b.scale} scale")
    change = b.centre - a.centre
    if a.error is None or b.error is None or a.freedom is None or b.freedom is None:
        return Difference(change, None, None, None, TOO_FEW)
    if abs(change) <= ROUNDING * max(abs(a.centre), abs(b.centre)):
        change = 0.0
    error = math.hypot(a.error, b.error)
    # a's share of the variance, instead of the variances, whose squares could underflow.
    share = (a.error / error) ** 2 if error else 0.0
    freedom = 1 / (share**2 / a.freedom + (1 - share) ** 2 / b.freedom) if error else math.inf
    p = _p(change, error, freedom)
    return Difference(change, error, freedom, p, "differs" if p < LEVEL else "within noise")


def judge_differences(differences: Sequence[Difference]) -> list[NoiseVerdict]:
    """Returns the verdicts of one table, in its order. If there is no true difference, at most a share LEVEL of tables
    has a "differs".

    Holm's procedure: the smallest p of m has to be below LEVEL / m, the next below LEVEL / (m - 1), and so on; after
    the first that is not, nothing differs. Comparisons with too few readings do not count.
    """
    verdicts = [difference.verdict for difference in differences]
    order = sorted((difference.p, index) for index, difference in enumerate(differences) if difference.p is not None)
    passing = True
    for rank, (p, index) in enumerate(order):
        passing = passing and p < LEVEL / (len(order) - rank)
        verdicts[index] = "differs" if passing else "within noise"
    return verdicts


def student_p(t: float, freedom: float) -> float:
    """Returns the probability that Student's |t| is at least this large. `freedom`, above 0, may be a fraction."""
    from scipy import special  # here, because importing it takes 0.2 s

    return 2 * float(special.stdtr(freedom, -abs(t)))


@lru_cache
def student_quantile(coverage: float, freedom: float) -> float:
    """Returns the half-width, in standard errors, of the interval that covers `coverage` of Student's distribution."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + coverage) / 2))


def _p(change: float, error: float, freedom: float) -> float:
    if error == 0:
        return 0.0 if change else 1.0
    return student_p(change / error, freedom)


@dataclass(frozen=True)
class _Scatter:
    error: float  # standard error of the mean
    freedom: float


def _scatter(residuals: np.ndarray, fitted: int) -> _Scatter | None:
    """Returns the scatter of the mean, from the residuals after fitting a constant (`fitted` is 1) or a line (2).

    None if the effective readings are fewer than FEWEST_EFFECTIVE, or exceed the fitted parameters by less than 1.
    """
    n, power = len(residuals), float(residuals @ residuals)
    if power == 0:
        return _Scatter(0.0, n - fitted)
    cut = CUT * NORMAL_MAD * float(np.median(np.abs(residuals)))
    kept = np.clip(residuals, -cut, cut) if cut else residuals  # cut is 0 if most are equal: nothing defines a spike
    rho = float(kept[1:] @ kept[:-1]) / float(kept @ kept)
    rho += (fitted + 4 * max(rho, 0.0)) / n  # the fit reduces rho by this
    rho += CAUTION * max(math.sqrt(max(1 - rho * rho, 0.0)), LEAST_SCATTER) / math.sqrt(n)
    rho = min(max(rho, 0.0), LARGEST_CORRELATION)
    effective = n * (1 - rho) / (1 + rho)
    freedom = effective - fitted
    if effective < FEWEST_EFFECTIVE or freedom < 1:
        return None
    # The variance of a reading is power / (n - n fitted / effective), that of the mean 1 / effective of it.
    return _Scatter(math.sqrt(power / n / freedom), freedom)


def _slope(at: np.ndarray, heights: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the slope of the least-squares line, and its heights; residuals of pure rounding become exactly 0."""
    apart, centre = at - at.mean(), heights.mean()
    slope = float(apart @ (heights - centre) / (apart @ apart))
    line = centre + slope * apart
    if np.max(np.abs(heights - line)) <= ROUNDING * np.max(np.abs(heights)):
        return slope, heights
    return slope, line
