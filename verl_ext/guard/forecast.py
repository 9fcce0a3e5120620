"""Forecasts a run: growth of the engines' gap, a jump of it, a mask that does not see it, a reward that collapses.

IcePop's appendix shows that past a critical size the mismatch delta grows at least geometrically, delta_{t+1} >=
(1 + eta mu) delta_t ("Small Leak Can Sink a Great Ship", compounding lemma). log delta against the step is then a
straight line before a collapse. `estimate_growth` takes its slope as the median of all pairwise slopes (Theil-Sen),
which one spiked step in four cannot move. Two intervals show whether the slope is more than noise, and the narrower one
counts:

- Sen's interval, from the variance of Kendall's S, widened if the readings of neighbouring steps depend on each other
  (after Hamed and Rao, 1998). It finds a weak trend under strong noise.
- SCATTERS times the scatter around the line, divided by the length of the window. It finds a strong trend whose curve
  Sen's interval takes for dependence.

`vllm_kl/*` compares the rollout's log-probabilities with those of the policy before the update. If the weights are the
same, the difference is the engines' part of the gap. If the rollout's weights are older, it also holds the movement of
the policy since then. Trajectories of lag 0, and those that were rescored with the weights that sampled them, show only
the engines' part.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from verl_ext.base.names import BUCKETS
from verl_ext.guard.collapse import K3, READ, REWARD, STRETCH, find_collapse
from verl_ext.guard.rules import scatter, spread
from verl_ext.guard.state import Boundary, Decision, Event, GuardState

# Growth towards the boundary.
HORIZON = 1000  # steps; further away than this is the same as not in sight
FLOOR = 1e-12  # a mismatch below this is 0 for the logarithm
HIGHEST = math.log(sys.float_info.max)  # exp of more than this overflows
FEWEST = 8  # readings before there is an estimate
SIGMAS = 4.0  # half-width of Sen's interval in standard deviations; test_forecast.py counts false alarms
SCATTERS, SCATTER_FEWEST = 6.0, 16  # half-width of the other interval in scatters; the fewest readings for it
ROUNDING = 1e-9  # residuals below this are the arithmetic's, not the run's
LARGEST_AUTOCORRELATION = 0.9
# A jump of the gap, and a collapse of the reward.
GAP = "vllm_kl/log_ratio_abs_mean"  # of all tokens alike, while a single one can move k3
JUMP = 5.0  # a gap of this many times its median, in one step, is a jump
JUMP_DEVIATIONS = 6.0  # and this many robust standard deviations above it
JUMP_FEWEST, JUMP_WINDOW = 3, 8  # readings before there is a jump; how many of the last ones count
REMEMBERED = 512  # readings in which a collapse is looked for
# The engines' part of the gap.
ENGINES = "vllm_kl/"  # begins the name of every metric of the gap
BY_LAG = "vllm_kl/share/lag/"  # shares of the batch by age: logged if rollouts can be older than the policy
FORECAST = ("guard/steps_to_boundary", "guard/growth_rate")
MIXED = "guard/growth_mixed"
LAYERS = "router/agreement/layer_"
AGE_IN_IT = " (the age of the rollouts is in it)"
PARTS = ("/lag/", "/engine/", "/stale/", "/share/")  # in names of metrics that are one part of the gap


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


def foresee(
    state: GuardState, boundary: Boundary, mask: str, step: int, signals: Mapping[str, float]
) -> tuple[dict[str, float], Decision]:
    """Updates `state` with the signals that are known before an update.

    Returns `guard/*` metrics, and a decision with the events that have just begun.

    Args:
        mask: the metric of the share of tokens that a mask with a fixed band drops; "" for none.
        signals: finite values; a step with several updates counts once, with the first.

    guard/steps_to_boundary is 0 past the boundary, and HORIZON if the boundary is not in sight. It forecasts the
    engines' part of the gap if that is seen often enough, otherwise the whole gap.
    """
    part = engines_part(boundary.signal, signals)
    state.growth = _append(state.growth, step, signals.get(boundary.signal), boundary.window)
    state.growth_alone = _append(state.growth_alone, step, part[1] if part else None, boundary.window)
    of_all = growth = estimate_growth(state.growth, boundary.value)
    metrics = {"guard/steps_to_boundary": float(HORIZON)}
    if is_seen_enough([at for at, _ in state.growth_alone], step, boundary.window):
        growth, mixed = estimate_growth(state.growth_alone, boundary.value), False
    else:
        mixed = holds_age(boundary.signal, signals)
    if any(name.startswith(BY_LAG) for name in signals):
        metrics[MIXED] = float(mixed)
    if growth is not None:
        interval = {"guard/growth_rate_low": growth.low, "guard/growth_rate_high": growth.high}
        metrics |= {"guard/steps_to_boundary": growth.steps, "guard/growth_rate": growth.rate}
        metrics |= {name: value for name, value in interval.items() if math.isfinite(value)}
    if mask:
        share = (step, signals[mask]) if mask in signals else None
        metrics["guard/mask_blind"] = float(_is_mask_blind(state, share, boundary.window, of_all))
    events = _jump_events(state, step, signals) if GAP in signals else ()
    if REWARD in signals:
        remember(state, step, signals)
        events += _collapse_events(state, step, old_rollouts=holds_age(K3, signals))
        metrics["guard/collapsed"] = float(state.collapsed)
    return metrics, Decision(events)


def _append(readings: list[tuple[int, float]], step: int, value: float | None, window: int) -> list[tuple[int, float]]:
    """Returns the last `window` readings, with the reading of this step if it has one that is not there yet."""
    if value is None or (readings and readings[-1][0] >= step):
        return readings
    return [*readings, (step, value)][-window:]


def is_seen_enough(steps: Sequence[int], now: int, window: int) -> bool:
    """Returns True if there are enough readings, and recent ones.

    Rescoring is rare. So the last reading may be as far back as the last FEWEST readings took, or one window.
    """
    return len(steps) >= FEWEST and now - steps[-1] <= max(window, steps[-1] - steps[-FEWEST])


def remember(state: GuardState, step: int, signals: Mapping[str, float]) -> None:
    """Keeps the signals of a step that show how a collapse came about; finite values, each signal once per step."""
    for name in READ:
        readings = state.record.get(name, [])
        if name in signals and (not readings or readings[-1][0] < step):
            state.record[name] = [*readings, (step, signals[name])][-REMEMBERED:]


def _is_mask_blind(state: GuardState, dropped: tuple[int, float] | None, window: int, growth: Growth | None) -> bool:
    """Returns True from when the gap surely grows while the mask surely drops fewer tokens, until either trend turns.

    KPop's authors saw this with IcePop's fixed band before training became unstable (ringtech.notion.site/kpop,
    figure 1).
    """
    if dropped is not None and (not state.dropped or state.dropped[-1][0] < dropped[0]):
        state.dropped = [*state.dropped, dropped][-window:]
    share = estimate_growth(state.dropped, 1.0)
    if growth is None or share is None:
        state.mask_blind = False
    elif state.mask_blind:
        state.mask_blind = growth.rate > 0 > share.rate
    else:
        state.mask_blind = growth.low > 0 > share.high
    return state.mask_blind


def _jump_events(state: GuardState, step: int, signals: Mapping[str, float]) -> tuple[Event, ...]:
    """Warns of a mismatch that is suddenly far above its earlier level. In a collapse it grows instead of jumping.

    Judges the engines' part if the batch shows it, because the gap of an older rollout is larger too.
    """
    name, gap, before = GAP, signals[GAP], state.gaps
    state.gaps = [*before, gap][-JUMP_WINDOW:]
    if part := engines_part(GAP, signals):
        (name, gap), before = part, state.gaps_alone
        state.gaps_alone = [*before, gap][-JUMP_WINDOW:]
    if len(before) < JUMP_FEWEST:
        return ()
    usual, deviation = spread(before)
    bound = max(JUMP * usual, usual + JUMP_DEVIATIONS * deviation)
    was, state.jumped = state.jumped, gap > bound
    if was or not state.jumped:
        return ()
    reason = (
        f"{name} jumped to {gap:.3g} from {usual:.3g}, the median of {len(before)} readings: did the last weight "
        f"sync reach every rollout engine? (or: {'' if part else 'stale rollouts, '}another precision, another "
        "sampling setting)"
    )
    return (Event(step, "weight_sync", name, gap, bound, "warn", reason),)


def _collapse_events(state: GuardState, step: int, old_rollouts: bool) -> tuple[Event, ...]:
    """Reports once that the run is dead, and once when it has got back half of the reward that it lost."""
    if not state.collapsed:
        found = find_collapse(state.record)
        if found is None:
            return ()
        state.collapsed, state.recovers_at = True, (found.best + found.now) / 2
        # The weights of these steps were measured, and nothing contradicted them yet.
        state.good = [saved for saved in state.good if saved < found.since]
        reason = f"{found} {found.remedy}"
        if found.gap_first and old_rollouts:
            reason += " Rollouts are older than the policy: k3 has its own movement in it."
        return (Event(step, "collapse", REWARD, found.now, None, "warn", reason),)
    level = sum(value for _, value in state.record[REWARD][-STRETCH:]) / STRETCH
    if level <= state.recovers_at:
        return ()
    state.collapsed = False
    reason = f"{REWARD} is back at {level:.3g}, half of what it had lost"
    return (Event(step, "collapse", REWARD, level, state.recovers_at, "recover", reason),)


def estimate_growth(readings: Iterable[tuple[int, float]], boundary: float) -> Growth | None:
    """Fits a line to the logarithm of the last readings of delta.

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
    n = len(points)
    variance = (
        n * (n - 1) * (2 * n + 5) / 18
    )  # of Kendall's S, rising pairs less falling ones, for independent readings
    outside = (len(slopes) - SIGMAS * math.sqrt(variance * _inflation(residuals))) / 2
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


def _inflation(residuals: Sequence[float]) -> float:
    """Returns the factor, at least 1, by which first-order dependence of neighbouring readings widens that variance."""
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


def engines_names(signal: str) -> tuple[str, ...]:
    """Returns the names under which the engines' part of a metric is logged: at lag 0, and of rescored trajectories."""
    return (f"{signal}/lag/0", signal.replace(ENGINES, f"{ENGINES}engine/", 1)) if signal.startswith(ENGINES) else ()


def engines_part(signal: str, signals: Mapping[str, float]) -> tuple[str, float] | None:
    """Returns the name and the value of the engines' part of a metric; None if no trajectory shows it."""
    return next(((name, signals[name]) for name in engines_names(signal) if name in signals), None)


def holds_age(signal: str, signals: Mapping[str, float]) -> bool:
    """Returns True if the metric includes the policy's movement since the rollouts.

    That is so for a metric of the whole gap, if some trajectories of the batch are older than the policy.
    """
    of_all = signal.startswith(ENGINES) and not any(part in signal for part in PARTS)
    return of_all and any(name.startswith(BY_LAG) and name != f"{BY_LAG}0" for name in signals)


def owner_clause(signal: str, signals: Mapping[str, float]) -> str:
    """Returns a clause for a reason about `signal`: is it the engines' gap, or also the rollouts' age; "" if clear."""
    if signal.startswith(FORECAST) and MIXED in signals:
        return AGE_IN_IT if signals[MIXED] else " (of the engines alone)"
    if not holds_age(signal, signals):
        return ""
    if part := engines_part(signal, signals):
        return f" (of the engines alone: {part[0]}={part[1]:.3g})"
    return AGE_IN_IT


def engines_value(signal: str, signals: Mapping[str, float]) -> float | None:
    """Returns the value of a metric without the age of the rollouts; None if the batch does not show it."""
    if part := engines_part(signal, signals):
        return part[1]
    return None if holds_age(signal, signals) else signals.get(signal)


def place_clause(signal: str, threshold: float, signals: Mapping[str, float]) -> str:
    """Returns a clause about where a gap begins; "" if neither of the two is logged.

    It names the first layer whose routers disagree, and the first positions of the response at which `signal` is above
    `threshold`.
    """
    layers = {int(name.removeprefix(LAYERS)): value for name, value in signals.items() if name.startswith(LAYERS)}
    places = []
    if differing := [layer for layer, agreement in layers.items() if agreement < 1]:
        places.append(f"routers disagree from layer {min(differing)} on")
    elif layers:
        places.append("routers agree in all layers")
    by_position = {bucket: signals.get(f"{signal}/position/{bucket}") for bucket in BUCKETS["position"]}
    if past := [bucket for bucket, value in by_position.items() if value is not None and value > threshold]:
        places.append(f"the gap begins at positions {past[0]}")
    return f" ({'; '.join(places)})" if places else ""
