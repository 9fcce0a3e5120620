"""The guard's part of a report: its boundary, its forecast, its level, skipped updates, and signals past a limit."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from verl_ext.diagnosis.findings.gap import Gap, gap_of
from verl_ext.diagnosis.growth import HORIZON, Growth, estimate_growth
from verl_ext.diagnosis.names import K3, PROB_DIFF
from verl_ext.diagnosis.series import Series, holds_from, now_label, now_of
from verl_ext.diagnosis.statistics import STRETCH
from verl_ext.guard.state import Boundary, Event
from verl_ext.report.run import Run

SKIPPED_STEPS = 10  # a run no longer learns if more than half of the updates of this many last steps were skipped
FAILING_DIFFERENCE = 0.05  # mean |p rollout - p training| past which training was seen to fail (IcePop)
TOO_MANY_DROPPED = 0.05  # share of tokens; IcePop's authors saw 0.001 to 0.002
DROPPED = "correction/dropped"
SOON_STEPS = 20  # a forecast of fewer steps to the boundary is a warning, as in the lab
RECENT_STEPS = 10  # last steps in which an action of the guard still counts
MOST_RATE = 50.0  # of the logarithm per step; a larger one is shown as this
INTERVENTIONS = ("undo", "rollback", "stop")
# What the guard did: as a verb in a sentence, and as the name of a mark or of a decision.
ACTED = {
    "undo": "took an update back",
    "rollback": "rolled back",
    "stop": "stopped the run",
    "skip": "skipped an update",
}
# Action -> the action of the guard in the same step if it could not be done, and what to say then.
FAILED = {
    "undo": ("warn", "had no update that it could take back"),
    "rollback": ("stop", "had no checkpoint to go back to"),
}
DECIDED = {
    "skip": "update skipped",
    "lower_lr": "learning rate lowered",
    "tighten": "band narrowed",
    "warn": "warning",
    "recover": "recovered",
}


@dataclass(frozen=True)
class Fact:
    """A clause about something that the metrics or the guard's log show.

    Attributes:
        id: the name of a finding, or of a fact about the guard and its boundary.
        subsumed_by: as in `findings.registry.FindingRule`.
    """

    id: str
    text: str
    step: int | None = None
    subsumed_by: tuple[str, ...] = ()

    @property
    def dated(self) -> str:
        return dated(self.text, self.step)


def dated(text: str, step: int | None) -> str:
    """Returns a clause behind its step, unless it has none or names it."""
    return text if step is None or f"step {step}" in text or "the first step" in text else f"step {step}: {text}"


def sentence_of(clause: str) -> str:
    """Returns a clause as a sentence; a name of a metric keeps its beginning."""
    start = clause if re.match(r"\S*[/_\d]", clause) else clause[:1].upper() + clause[1:]
    return f"{start}." if start else ""


def judged_k3(run: Run) -> Gap | None:
    """Returns the k3 by which the run is judged: the engines' part of it if that is known; None without any k3."""
    gap = gap_of(run.readings)
    return gap if gap is not None and gap.measure.name == K3 else None


def boundary_of(run: Run) -> float:
    """Returns the k3 past which a run counts as collapsing: the one that the guard logged, or its default."""
    logged = run.last_value("guard/boundary") or 0.0
    return logged if logged > 0 else Boundary.value


def skipped_share(run: Run, last: int | None = None) -> tuple[float, int] | None:
    """Returns the share of the updates that were skipped, and in how many steps; None if no step logged it.

    A step may have several updates. Then guard/skipped is the share of them, and a step must not count as a whole.

    Args:
        last: number of last steps; all by default.
    """
    skipped = run.get("guard/skipped")
    if skipped is None:
        return None
    shares = skipped.values if last is None else skipped.values[-last:]
    return float(shares.mean()), len(shares)


def growth_of(run: Run) -> tuple[Series, Growth] | None:
    """Returns the last readings of k3, and the line through their logarithms; None for too few."""
    gap = judged_k3(run)
    return None if gap is None else _fit(gap.series, boundary_of(run))


def growth_clause(run: Run) -> str:
    """Returns how fast k3 grows, a clause; "" for too few readings."""
    fit, gap = growth_of(run), judged_k3(run)
    if fit is None or gap is None:
        return ""
    window, growth = fit
    span = f"over the last {len(window.steps)} readings"
    low, high = _percent_per_step(growth.low), _percent_per_step(growth.high)
    if growth.low <= 0 <= growth.high:
        return f"no certain growth {span}: {low:+.1f} to {high:+.1f} % per step"
    if growth.low <= 0:
        return f"{gap.name} changes by {low:+.1f} to {high:+.1f} % per step, {span}"
    text = f"{gap.name} grows by {low:.1f} to {high:.1f} % per step, {span}"
    if growth.steps == 0:
        return f"{text}, and is past {boundary_of(run):g}"
    if growth.steps < HORIZON:
        return f"{text}; at this pace it passes {boundary_of(run):g} in about {growth.steps:.0f} steps"
    return text


def nears_boundary(growth: Growth) -> bool:
    """Returns True if the growth is certain, and the boundary ahead and in sight."""
    return growth.low > 0 and 0 < growth.steps < HORIZON


def _percent_per_step(rate: float) -> float:
    return 100 * math.expm1(min(max(rate, -MOST_RATE), MOST_RATE))


@lru_cache(maxsize=8)
def _fit_of(pairs: tuple[tuple[int, float], ...], boundary: float) -> Growth | None:
    return estimate_growth(pairs, boundary)


def _fit(series: Series | None, boundary: float) -> tuple[Series, Growth] | None:
    if series is None:
        return None
    window = Series(series.steps[-Boundary.window :], series.values[-Boundary.window :])
    growth = _fit_of(tuple(window.pairs()), boundary)
    return None if growth is None else (window, growth)


def blind_mask(run: Run) -> tuple[Growth, Growth] | None:
    """Returns the growth of the share of dropped tokens and of k3, if the guard found IcePop's mask blind
    (`guard.forecast`)."""
    share, gap = _fit(run.get(DROPPED), 1.0), _fit(run.get(K3), boundary_of(run))  # a mask sees all of k3
    is_blind = (run.last_value("guard/mask_blind") or 0.0) > 0.5  # a mean over the updates of the step
    return (share[1], gap[1]) if is_blind and share is not None and gap is not None else None


def passed_at(run: Run, until: int) -> tuple[str, int] | None:
    """Returns the name of the k3 that passed the boundary and stayed there up to this step, and when it passed."""
    gap, whole = judged_k3(run), run.get(K3)
    found = [(gap.name, gap.series)] if gap is not None else []
    found += [("k3", whole)] if whole is not None else []
    boundary = boundary_of(run)
    steps = ((name, _outside_since(series, series.values > boundary, until)) for name, series in found)
    return next(((name, step) for name, step in steps if step is not None), None)


def foretold_at(run: Run, until: int) -> int | None:
    """Returns the step from which on the guard's forecast warned, up to this step."""
    forecast = run.get("guard/steps_to_boundary")
    return None if forecast is None else _outside_since(forecast, forecast.values < SOON_STEPS, until)


def _outside_since(series: Series, outside: np.ndarray, until: int) -> int | None:
    """Returns the step from which on the readings up to `until` are outside, but for one in STRETCH."""
    out = outside[series.steps <= until]
    start = holds_from(out, 1 - 1 / STRETCH)
    return int(series.steps[start]) if start <= len(out) - STRETCH else None


def act_sentence(run: Run, event: Event) -> str:
    """Returns what the guard did, or could not do."""
    instead, failure = FAILED.get(event.action, ("", ""))
    failed = any((each.step, each.rule, each.action) == (event.step, event.action, instead) for each in run.events)
    act = failure if failed else ACTED[event.action]
    return f"The guard {act} in step {event.step}: {event.reason}."


def recent_acts(run: Run, actions: Collection[str] = INTERVENTIONS, steps: int = RECENT_STEPS) -> list[Event]:
    """Returns the guard's actions of the last steps; by default those that stop a run or take it back."""
    return [event for event in run.events if event.action in actions and event.step > run.steps[-1] - steps]


def warning_of(run: Run, began: int) -> Iterator[Fact]:
    """Yields the warnings from before the step at which the reward began to fall."""
    forecast, passed = foretold_at(run, began - 1), passed_at(run, began - 1)
    if forecast is not None:
        text = f"the guard's forecast warned at step {forecast}, {_before(began - forecast)} the reward began to fall"
        yield Fact("warned_before", text, forecast)
    if passed is not None:
        name, step = passed
        text = f"{name} passed {boundary_of(run):g} at step {step}, {_before(began - step)} the reward began to fall"
        yield Fact("warned_before", text, step)


def _before(steps: int) -> str:
    return "1 step before" if steps == 1 else f"{steps} steps before"


def age_drives(run: Run) -> bool:
    """Returns True if the age of the rollouts is the problem, and not the engines.

    That holds if k3 is past the boundary and the engines' part of it is not. If no metric shows that part, it holds
    whenever rollouts are old.
    """
    gap, whole = judged_k3(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None:
        return now_of(gap.series) <= boundary_of(run) < now_of(whole)
    return run.staleness > 1


def limits(run: Run) -> Iterator[Fact]:
    """Yields the values that are past a limit."""
    k3, whole, boundary = judged_k3(run), run.get(K3), boundary_of(run)
    if k3 is not None and (now := now_of(k3.series)) > boundary:
        text = f"{k3.name} is {now:.2g} ({now_label(k3.series)}), past the boundary of {boundary:g}"
        yield Fact("past_boundary", text)
    elif whole is not None and (now := now_of(whole)) > boundary:
        text = f"k3 is {now:.2g} ({now_label(whole)}), past the boundary of {boundary:g}, with the policy's movement"
        yield Fact("past_boundary", f"{text} since the rollouts")
    share, steps = skipped_share(run, SKIPPED_STEPS) or (0.0, 0)
    if share * steps > SKIPPED_STEPS / 2:
        skipped = f"{100 * share:.3g} % of the updates of the last {steps} steps were skipped"
        yield Fact("hardly_learns", f"{skipped}, so the run hardly learns any more")
    apart = run.get(PROB_DIFF)
    if apart is not None and (now := now_of(apart)) > FAILING_DIFFERENCE:
        text = f"probabilities differ by {now:.3g} on average ({now_label(apart)})"
        yield Fact("probabilities_apart", f"{text}; past {FAILING_DIFFERENCE:g}, training was seen to fail")


def drifts(run: Run) -> Iterator[Fact]:
    """Yields signs that the gap is on its way to the boundary, or that a mask does not catch it."""
    fit = growth_of(run)
    if fit is not None and nears_boundary(fit[1]):
        yield Fact("nears_boundary", growth_clause(run))
    dropped = run.get(DROPPED)
    if dropped is not None and (share := now_of(dropped)) > TOO_MANY_DROPPED:
        text = f"the correction drops {100 * share:.1f} % of the tokens ({now_label(dropped)})"
        yield Fact("many_dropped", f"{text}; IcePop's authors saw 0.1 to 0.2 %")
    if moves := blind_mask(run):
        share_rate, gap_rate = _percent_per_step(moves[0].rate), _percent_per_step(moves[1].rate)
        text = f"IcePop drops fewer and fewer tokens ({share_rate:+.1f} % per step)"
        text = f"{text} while k3 grows ({gap_rate:+.1f} % per step)"
        yield Fact("mask_blind", f"{text}: its fixed band does not catch the gap")


def surroundings(run: Run) -> Iterator[Fact]:
    """Yields facts on the guard's level, dropped tokens, routing, skips, warnings and the age of the rollouts."""
    gap, level = judged_k3(run), run.last_value("guard/level") or 0.0  # 0 before the guard knows a level
    if gap is not None and 0 < level < (now := now_of(gap.series)):
        text = f"{gap.name} is {now:.2g} ({now_label(gap.series)}), above the normal level of {level:.2g}"
        yield Fact("above_level", f"{text}, where the guard warns (guard/level)")
    if gap is not None and (since := int(run.steps[-1] - gap.series.steps[-1])) > Boundary.window:
        text = f"{gap.name} was last measured {since} steps ago: what is said of it describes the run up to then"
        yield Fact("gap_not_measured", text, int(gap.series.steps[-1]))
    if (dropped := run.get(DROPPED)) is not None:
        most, steps = int(dropped.values.argmax()), len(dropped.steps)
        text = f"the correction dropped {100 * dropped.values.mean():.2g} % of the tokens in {steps} steps"
        if dropped.values.any():
            text = f"{text}; the most was {100 * dropped.values[most]:.2g} %, in step {dropped.steps[most]}"
        yield Fact("tokens_dropped", text, subsumed_by=("many_dropped",))
    if (agreement := run.get("router/agreement")) is not None:
        error = run.get("router/agreement/error")
        within = (
            f"; from a share of the trajectories: +- {200 * now_of(error):.2g} % per step" if error is not None else ""
        )
        text = f"the engines agree on {100 * now_of(agreement):.2f} % of the experts ({now_label(agreement)}{within})"
        yield Fact("routers_agree", text)
    skipped, steps = skipped_share(run) or (0.0, 0)
    if skipped > 0:
        text = f"{100 * skipped:.3g} % of the updates of {steps} steps were skipped"
        yield Fact("updates_skipped", text, subsumed_by=("hardly_learns",))
    if warned := [event.step for event in run.events if event.action in ("warn", "tighten")]:
        often = "once, in" if len(warned) == 1 else f"{len(warned)} times, last in"
        yield Fact("guard_warned", f"the guard warned or narrowed the band {often} step {warned[-1]}")
    whole = run.get(K3)
    if gap is not None and gap.alone and whole is not None and (part := now_of(gap.series)) != now_of(whole):
        text = f"rollouts are {run.staleness:.1f} versions behind: k3 is {now_of(whole):.2g} with the policy's own"
        yield Fact("gap_of_engines", f"{text} movement, {part:.2g} without (each the {now_label(whole)})")
    elif run.staleness > 1:
        text = f"rollouts are {run.staleness:.1f} versions behind: part of the gap is the policy's own movement"
        yield Fact("rollouts_old", text, subsumed_by=("rollout_age",))
