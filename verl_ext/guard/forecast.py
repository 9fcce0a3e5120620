"""Forecasts a run, and warns: growth or a jump of the engines' gap, a mask that misses the growth, a collapsed reward.

The statistics are `diagnosis.statistics` and `diagnosis.collapse`, which the report applies to finished runs. The guard
uses these two and the names of metrics, but no findings and no causes.

`vllm_kl/*` compares the rollout's log-probabilities with those of the policy before the update. If the weights are the
same, the difference is the engines' part of the gap. If the rollout's weights are older, it also includes the policy's
movement since then. Trajectories of lag 0, and those that were rescored with the weights that sampled them, show only
the engines' part.
"""

import math
from collections.abc import Mapping

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.collapse import RECORDED, find_collapse
from verl_ext.diagnosis.growth import HORIZON, Growth, estimate_growth, is_seen_enough
from verl_ext.diagnosis.names import K3, LOG_RATIO, REWARD, engines_names
from verl_ext.diagnosis.series import Readings
from verl_ext.diagnosis.statistics import JUMP_BEFORE, STRETCH, jump_bound
from verl_ext.guard.state import Boundary, Decision, Event, GuardState

REMEMBERED = 512  # readings in which a collapse is looked for
ENGINES = "vllm_kl/"  # begins the name of every metric of the gap
BY_LAG = "vllm_kl/share/lag/"  # shares of the batch by age: logged if rollouts can be older than the policy
FORECAST = ("guard/steps_to_boundary", "guard/growth_rate")
MIXED = "guard/growth_mixed"
LAYERS = "router/agreement/layer_"
AGE_IN_IT = " (includes the age of the rollouts)"
# The name of a metric that covers only a part of the gap has one of these.
PARTS = ("/lag/", "/engine/", "/stale/", "/share/", "/replica/", "/node/")


def foresee(
    state: GuardState, boundary: Boundary, mask: str, step: int, signals: Mapping[str, float]
) -> tuple[dict[str, float], Decision]:
    """Updates `state` with the signals that are known before an update.

    Returns `guard/*` metrics, and a decision with the events that have just begun.

    Args:
        mask: the metric of the share of tokens that a mask with a fixed band drops; "" for none.
        signals: finite values; a step with several updates counts once, with the signals of the first.

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
        state.dropped = _append(state.dropped, step, signals.get(mask), boundary.window)
        metrics["guard/mask_blind"] = float(_is_mask_blind(state, of_all))
    events = _jump_events(state, step, signals) if LOG_RATIO in signals else ()
    if REWARD in signals:
        remember(state, step, signals)
        events += _collapse_events(state, step, old_rollouts=holds_age(K3, signals))
        metrics["guard/collapsed"] = float(state.collapsed)
    return metrics, Decision(events)


def _append(readings: list[tuple[int, float]], step: int, value: float | None, window: int) -> list[tuple[int, float]]:
    """Appends the reading of this step, if it has one that is not there yet; returns the last `window` readings."""
    if value is None or (readings and readings[-1][0] >= step):
        return readings
    return [*readings, (step, value)][-window:]


def remember(state: GuardState, step: int, signals: Mapping[str, float]) -> None:
    """Records the signals of a step that show how a collapse came about: finite values, each signal once per step."""
    for name in filter(signals.__contains__, RECORDED):
        state.record[name] = _append(state.record.get(name, []), step, signals[name], REMEMBERED)


def _is_mask_blind(state: GuardState, growth: Growth | None) -> bool:
    """Returns True from the step at which the gap surely grows and the mask surely drops fewer tokens, until a trend
    turns.

    KPop's authors saw this with IcePop's fixed band before training became unstable (ringtech.notion.site/kpop,
    figure 1).
    """
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

    Judges the mean |log k|, to which all tokens contribute alike; a single token can move k3. Judges the engines' part
    if the batch shows it, because the gap of an older rollout is larger too.
    """
    name, gap, before = LOG_RATIO, signals[LOG_RATIO], state.gaps
    state.gaps = [*before, gap][-JUMP_BEFORE:]
    if part := engines_part(LOG_RATIO, signals):
        (name, gap), before = part, state.gaps_alone
        state.gaps_alone = [*before, gap][-JUMP_BEFORE:]
    if (judged := jump_bound(before)) is None:
        return ()
    usual, bound = judged
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
    """Reports once that the reward has collapsed, and once that the run has regained half of the reward that it
    lost."""
    if not state.collapsed:
        found = find_collapse(Readings.of_pairs(state.record))
        if found is None:
            return ()
        state.collapsed, state.recovers_at = True, (found.best + found.now) / 2
        # The weights of these steps were measured, and nothing contradicted them yet.
        state.good = [saved for saved in state.good if saved < found.since]
        reason = f"{found} {found.remedy}"
        if found.gap_first and old_rollouts:
            reason += " Rollouts are older than the policy: k3 includes the policy's own movement."
        return (Event(step, "collapse", REWARD, found.now, None, "warn", reason),)
    level = sum(value for _, value in state.record[REWARD][-STRETCH:]) / STRETCH
    if level <= state.recovers_at:
        return ()
    state.collapsed = False
    reason = f"{REWARD} is back at {level:.3g}: half of the loss is regained"
    return (Event(step, "collapse", REWARD, level, state.recovers_at, "recover", reason),)


def engines_part(signal: str, signals: Mapping[str, float]) -> tuple[str, float] | None:
    """Returns the name and the value of the engines' part of a metric; None if no trajectory shows it."""
    return next(((name, signals[name]) for name in engines_names(signal) if name in signals), None)


def holds_age(signal: str, signals: Mapping[str, float]) -> bool:
    """Returns True if the metric includes the policy's movement since the rollouts.

    A metric of the whole gap does, if some trajectories of the batch are older than the policy.
    """
    of_all = signal.startswith(ENGINES) and not any(part in signal for part in PARTS)
    return of_all and any(name.startswith(BY_LAG) and name != f"{BY_LAG}0" for name in signals)


def owner_clause(signal: str, signals: Mapping[str, float]) -> str:
    """Returns a clause on whether `signal` is only the engines' gap or includes the rollouts' age; "" if that is
    clear."""
    if signal.startswith(FORECAST) and MIXED in signals:
        return AGE_IN_IT if signals[MIXED] else " (engines only)"
    if not holds_age(signal, signals):
        return ""
    if part := engines_part(signal, signals):
        return f" (engines only: {part[0]}={part[1]:.3g})"
    return AGE_IN_IT


def engines_value(signal: str, signals: Mapping[str, float]) -> float | None:
    """Returns the value of a metric without the age of the rollouts; None if the batch does not show it."""
    if part := engines_part(signal, signals):
        return part[1]
    return None if holds_age(signal, signals) else signals.get(signal)


def place_clause(signal: str, threshold: float, signals: Mapping[str, float]) -> str:
    """Returns a clause about where a gap begins; "" if nothing is logged that shows it.

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
