"""Where the gap between the engines is going: the guard's forecast, on the last readings of a run."""

import math

import numpy as np

from verl_ext.guard.boundary import HORIZON, Growth, estimate_growth
from verl_ext.guard.state import Boundary
from verl_ext.report.run import Run, Series

K3, DROPPED = "vllm_kl/k3", "correction/dropped"
LAST = 5  # readings whose median is "now"


def now_of(series: Series) -> float:
    return float(np.median(series.values[-LAST:]))


def growth_of(run: Run) -> tuple[Series, Growth] | None:
    """The last readings of k3 and the line through their logarithms; None for too few."""
    return _growth(run.get(K3), boundary_of(run))


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
    share, gap = _growth(run.get(DROPPED), 1.0), growth_of(run)
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
    text = f"k3 changes by {percent:+.1f} % a step ({low:+.1f} to {high:+.1f}) {span}"
    if growth.low > 0 and growth.steps == 0:
        return f"{text}, and is past {boundary_of(run):g}."
    if growth.low > 0 and growth.steps < HORIZON:
        return f"{text}; it would pass {boundary_of(run):g} in about {growth.steps:.0f} steps."
    return text + "."
