"""Where a run is going: the gap of the engines, a mask that is blind to it, a jump of it, a reward that collapses."""

import math
from collections.abc import Mapping, Sequence

from verl_ext.guard.alone import BY_LAG, MIXED, alone, has_age
from verl_ext.guard.boundary import FEWEST, HORIZON, Growth, estimate_growth
from verl_ext.guard.collapse import K3, READ, REWARD, STRETCH, find_collapse
from verl_ext.guard.rules import spread
from verl_ext.guard.state import Boundary, Decision, Event, GuardState

GAP = "vllm_kl/log_ratio_abs_mean"  # of all tokens alike, while a single one can move k3
JUMP = 5.0  # a gap of this many times its median, in one step, is a jump
JUMP_DEVIATIONS = 6.0  # and this many robust standard deviations above it
JUMP_FEWEST, JUMP_WINDOW = 3, 8  # readings before there is a jump; how many of the last ones count
REMEMBERED = 512  # readings in which a collapse is looked for


def foresee(
    state: GuardState, boundary: Boundary, mask: str, step: int, signals: Mapping[str, float]
) -> tuple[dict[str, float], Decision]:
    """Take in what is known before an update, and change `state` by it: `guard/*` metrics, and what has just begun.

    Args:
        mask: the metric that is the share of tokens a mask with a fixed band drops; empty where there is none.
        signals: finite values; a step with several updates counts once, with the first.

    guard/steps_to_boundary is 0 past the boundary, `boundary.HORIZON` where it is not in sight. It is that of the
    engines alone, where that part of the gap is seen often enough.
    """
    part = alone(boundary.signal, signals)
    state.growth = _added(state.growth, step, signals.get(boundary.signal), boundary.window)
    state.growth_alone = _added(state.growth_alone, step, part[1] if part else None, boundary.window)
    of_all = growth = estimate_growth(state.growth, boundary.value)
    metrics = {"guard/steps_to_boundary": float(HORIZON)}
    if speaks([at for at, _ in state.growth_alone], step, boundary.window):
        growth, mixed = estimate_growth(state.growth_alone, boundary.value), False
    else:
        mixed = has_age(boundary.signal, signals)
    if any(name.startswith(BY_LAG) for name in signals):
        metrics[MIXED] = float(mixed)
    if growth is not None:
        interval = {"guard/growth_rate_low": growth.low, "guard/growth_rate_high": growth.high}
        metrics |= {"guard/steps_to_boundary": growth.steps, "guard/growth_rate": growth.rate}
        metrics |= {name: value for name, value in interval.items() if math.isfinite(value)}
    if mask:
        share = (step, signals[mask]) if mask in signals else None
        metrics["guard/mask_blind"] = float(_mask_blind(state, share, boundary.window, of_all))
    events = _jump(state, step, signals) if GAP in signals else ()
    if REWARD in signals:
        remember(state, step, signals)
        events += _collapse(state, step, old_rollouts=has_age(K3, signals))
        metrics["guard/collapsed"] = float(state.collapsed)
    return metrics, Decision(events)


def _added(readings: list[tuple[int, float]], step: int, value: float | None, window: int) -> list[tuple[int, float]]:
    """The last `window` readings, with that of this step where it has one and none is there yet."""
    if value is None or (readings and readings[-1][0] >= step):
        return readings
    return [*readings, (step, value)][-window:]


def speaks(steps: Sequence[int], now: int, window: int) -> bool:
    """Whether readings in these steps are enough, and have not stayed away for longer than they took: rescoring is
    rare."""
    return len(steps) >= FEWEST and now - steps[-1] <= max(window, steps[-1] - steps[-FEWEST])


def remember(state: GuardState, step: int, signals: Mapping[str, float]) -> None:
    """Keep of a step what tells how a collapse came about; finite values, each signal once a step."""
    for name in READ:
        readings = state.record.get(name, [])
        if name in signals and (not readings or readings[-1][0] < step):
            state.record[name] = [*readings, (step, signals[name])][-REMEMBERED:]


def _mask_blind(state: GuardState, dropped: tuple[int, float] | None, window: int, growth: Growth | None) -> bool:
    """Whether the gap grows for certain while the mask drops fewer tokens for certain, until either turns.

    KPop's authors saw it in IcePop's fixed band, before training became unstable (ringtech.notion.site/kpop, figure 1).
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


def _jump(state: GuardState, step: int, signals: Mapping[str, float]) -> tuple[Event, ...]:
    """Say so where the mismatch is suddenly far above what it was, which a collapse is not: that grows.

    Where the engines' part is seen, it is that which is judged: a rollout that is older has a larger gap, too.
    """
    name, gap, before = GAP, signals[GAP], state.gaps
    state.gaps = [*before, gap][-JUMP_WINDOW:]
    if part := alone(GAP, signals):
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


def _collapse(state: GuardState, step: int, old_rollouts: bool) -> tuple[Event, ...]:
    """Say once that the run is dead, and again where half of what it lost comes back."""
    if not state.collapsed:
        found = find_collapse(state.record)
        if found is None:
            return ()
        state.collapsed, state.recovers_at = True, (found.best + found.now) / 2
        # The weights of these steps were measured, and nothing spoke against them yet.
        state.good = [saved for saved in state.good if saved < found.since]
        reason = f"{found} {found.remedy}"
        if found.by_gap and old_rollouts:
            reason += " Rollouts are older than the policy: k3 has its own movement in it."
        return (Event(step, "collapse", REWARD, found.now, None, "warn", reason),)
    level = sum(value for _, value in state.record[REWARD][-STRETCH:]) / STRETCH
    if level <= state.recovers_at:
        return ()
    state.collapsed = False
    reason = f"{REWARD} is back at {level:.3g}, half of what it had lost"
    return (Event(step, "collapse", REWARD, level, state.recovers_at, "recover", reason),)
