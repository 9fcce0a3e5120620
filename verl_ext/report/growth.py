"""Where the gap between the engines is going: the guard's forecast, on the last readings of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_ext.guard.collapse import STRETCH
from verl_ext.guard.forecast import HORIZON, Growth, engines_names, estimate_growth, speaks
from verl_ext.guard.state import Boundary
from verl_ext.report.run import Run, Series

K3, DROPPED = "vllm_kl/k3", "correction/dropped"
LAST = 5  # readings whose median is "now"
STALE = 1.0  # versions that rollouts are behind, on average
SOON = 20  # steps to the boundary: a forecast of fewer is a warning, as in the lab


@dataclass(frozen=True)
class Gap:
    """k3 as a verdict on the engines reads it.

    Attributes:
        name: what it is called.
        alone: whether it is of the engines alone, where rollouts are older than the policy.
    """

    series: Series
    name: str = "k3"
    alone: bool = False


def gap_of(run: Run) -> Gap | None:
    """k3 of trajectories of lag 0, and of rescored ones, where it was lately seen often enough; else k3 as it is."""
    whole = run.get(K3)
    alone: dict[int, float] = {}
    for name in reversed(engines_names(K3)):
        if (series := run.get(name)) is not None:
            alone |= dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    steps = sorted(alone)
    if speaks(steps, int(run.steps[-1]), Boundary.window):
        series = Series(np.array(steps), np.array([alone[step] for step in steps]))
        return Gap(series, "k3 of the engines alone", alone=True)
    return None if whole is None else Gap(whole)


def age_drives(run: Run) -> bool:
    """Whether the rollouts' age, and not the engines, is what something has to be done about.

    It is where k3 is past the boundary and the engines' part is not. Where no metric shows that part, it is wherever
    rollouts are old.
    """
    gap, whole = gap_of(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None:
        return now_of(gap.series) <= boundary_of(run) < now_of(whole)
    return staleness(run) > STALE


def staleness(run: Run) -> float:
    """Versions that rollouts are behind, on average."""
    series = run.get("training/off_policy/trajectory_staleness/mean")
    return 0.0 if series is None else now_of(series)


def now_of(series: Series) -> float:
    return float(np.median(series.values[-LAST:]))


def passed_at(run: Run, until: int) -> tuple[str, int] | None:
    """What stayed past the boundary until this step, and the step at which it passed; the engines' own gap first."""
    gap, whole = gap_of(run), run.get(K3)
    found = [(gap.name, gap.series)] if gap is not None else []
    found += [("k3", whole)] if whole is not None else []
    boundary = boundary_of(run)
    steps = ((name, _since(series, lambda values: values > boundary, until)) for name, series in found)
    return next(((name, step) for name, step in steps if step is not None), None)


def foretold_at(run: Run, until: int) -> int | None:
    """The step from which the guard's forecast warned until this step."""
    forecast = run.get("guard/steps_to_boundary")
    return None if forecast is None else _since(forecast, lambda values: values < SOON, until)


def _since(series: Series, outside: Callable[[np.ndarray], np.ndarray], until: int) -> int | None:
    """The step from which on all readings until this one are outside, but for one in any STRETCH of them."""
    seen = series.steps <= until
    out = outside(series.values[seen])
    if len(out) < STRETCH:
        return None
    inside = np.convolve(~out, np.ones(STRETCH, dtype=int), mode="valid")  # readings, from each one on
    broken = np.flatnonzero(inside > 1)
    start = int(broken[-1]) + 1 if broken.size else 0
    if start == len(inside):
        return None
    return int(series.steps[seen][start + int(np.argmax(out[start:]))])


def growth_of(run: Run) -> tuple[Series, Growth] | None:
    """The last readings of k3, as of `gap_of`, and the line through their logarithms; None for too few."""
    gap = gap_of(run)
    return None if gap is None else _growth(gap.series, boundary_of(run))


def _growth(series: Series | None, boundary: float) -> tuple[Series, Growth] | None:
    if series is None:
        return None
    window = Series(series.steps[-Boundary.window :], series.values[-Boundary.window :])
    readings = zip(window.steps.tolist(), window.values.tolist(), strict=True)
    growth = estimate_growth(readings, boundary)
    return None if growth is None else (window, growth)


def blind_mask(run: Run) -> tuple[Growth, Growth] | None:
    """How the share of dropped tokens and k3 move, where the guard has found IcePop's mask blind (`guard.forecast`)."""
    found = run.get("guard/mask_blind")
    share, gap = _growth(run.get(DROPPED), 1.0), _growth(run.get(K3), boundary_of(run))  # a mask sees all of k3
    if found is None or not found.values[-1] or share is None or gap is None:
        return None
    return share[1], gap[1]


def boundary_of(run: Run) -> float:
    """The mismatch past which a run is taken to collapse: as the guard logged it, or its default."""
    logged = run.get("guard/boundary")
    return Boundary.value if logged is None or logged.values[-1] <= 0 else float(logged.values[-1])


def growth_sentence(run: Run) -> str:
    """What the fit says, for the text below the figure."""
    found = growth_of(run)
    if found is None:
        return ""
    window, growth = found
    percent, low, high = (
        100 * math.expm1(min(max(value, -50.0), 50.0)) for value in (growth.rate, growth.low, growth.high)
    )
    span = f"over the last {len(window.steps)} readings"
    if growth.low <= 0 <= growth.high:
        return f"No certain growth {span}: {percent:+.1f} % a step, and the interval holds 0."
    gap = gap_of(run)
    text = f"{gap.name if gap else 'k3'} changes by {percent:+.1f} % a step ({low:+.1f} to {high:+.1f}) {span}"
    if growth.low > 0 and growth.steps == 0:
        return f"{text}, and is past {boundary_of(run):g}."
    if growth.low > 0 and growth.steps < HORIZON:
        return f"{text}; it would pass {boundary_of(run):g} in about {growth.steps:.0f} steps."
    return text + "."
