"""Findings about the guard: the gap against its boundary, what it and a correction left out, what it did, and what
warned before the reward fell."""

import math

import numpy as np

from verl_ext.diagnosis.collapse import SIGNAL_WORDS, Move, moves_before
from verl_ext.diagnosis.findings.gap import STALENESS, Gap, gap_of
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.findings.reward import reward_course
from verl_ext.diagnosis.findings.routers import OWN, replayed
from verl_ext.diagnosis.growth import BOUNDARY, GROWTH_READINGS, HORIZON, Growth, estimate_growth
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, PROB_DIFF
from verl_ext.diagnosis.series import Readings, Series, cached_per_run, holds_from, now_label, now_of, require_logged
from verl_ext.diagnosis.statistics import STRETCH

SKIPPED_STEPS = 10  # a run no longer learns if more than half of the updates of this many last steps were skipped
FAILING_DIFFERENCE = 0.05  # mean |p rollout - p training| past which training was seen to fail (IcePop)
TOO_MANY_DROPPED = 0.05  # share of tokens; IcePop's authors saw 0.001 to 0.002
LOW_AGREEMENT = 0.98  # share of the experts on which the engines agree, below which routing is part of the gap
SOON_STEPS = 20  # a forecast of fewer steps to the boundary is a warning, as in the lab
RECENT_STEPS = 10  # last steps in which an action of the guard still counts
MOST_RATE = math.log(100)  # of the logarithm per step; a larger one is shown as this
SKIPPED, DROPPED, AGREEMENT = "guard/skipped", "correction/dropped", "router/agreement"
# Action of the guard -> what it did, and the levels of the finding: a skipped update is told by the share of all.
ACTS = {
    "skip": ("skipped an update", "| lately earlier"),
    "undo": ("took an update back", "lately failed | earlier"),
    "rollback": ("rolled back", "lately failed | earlier"),
    "stop": ("stopped the run", "lately | earlier"),
    "lower_lr": ("lowered the learning rate", "lately | earlier"),
}
# Action -> the action of the guard in the same step if it could not be done, and what to say then.
FAILED = {
    "undo": ("warn", "had no update that it could take back"),
    "rollback": ("stop", "had no checkpoint to go back to"),
}
# Series that may move before the reward falls -> the finding, and others that say so.
MOVES = {
    K3: ("k3_moved", "gap_jumped", "gap_grew", "gap_at_once"),
    GRADIENT: ("gradient_moved", "gradient_grew", "gradient_large", "gradient_spike", "gradient_zero"),
    ENTROPY: ("entropy_moved", "entropy_gone", "entropy_exploded"),
    LENGTH: ("length_moved", "length_exploded", "length_collapsed", "answers_cut"),
}


# ------------------------------------------------------------------------------------------------------- the boundary


def judged_k3(run: Readings) -> Gap | None:
    """Returns the k3 by which the run is judged: the engines' part of it if that is known; None without any k3."""
    gap = gap_of(run)
    return gap if gap is not None and gap.measure.name == K3 else None


def boundary_of(run: Readings) -> float:
    """Returns the k3 past which a run counts as collapsing: the one that the guard logged, or its default."""
    logged = run.get("guard/boundary")
    return float(logged.values[-1]) if logged is not None and logged.values[-1] > 0 else BOUNDARY


@cached_per_run
def growth_of(run: Readings) -> tuple[Series, Growth] | None:
    """Returns the last readings of k3, and the line through their logarithms; None for too few."""
    gap = judged_k3(run)
    return None if gap is None else _fit(gap.series, boundary_of(run))


def _fit(series: Series | None, boundary: float) -> tuple[Series, Growth] | None:
    if series is None:
        return None
    window = Series(series.steps[-GROWTH_READINGS:], series.values[-GROWTH_READINGS:])
    growth = estimate_growth(window.pairs(), boundary)
    return None if growth is None else (window, growth)


def growth_clause(run: Readings) -> str:
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


def nears(growth: Growth) -> bool:
    """Returns True if the growth is certain, and the boundary ahead and in sight."""
    return growth.low > 0 and 0 < growth.steps < HORIZON


def _percent_per_step(rate: float) -> float:
    return 100 * math.expm1(min(max(rate, -MOST_RATE), MOST_RATE))


def staleness_of(run: Readings) -> float:
    """Returns the number of versions that rollouts are behind now; 0 if that was not logged."""
    series = run.get(STALENESS)
    return 0.0 if series is None else now_of(series)


def age_drives(run: Readings) -> bool:
    """Returns True if the age of the rollouts is the problem, and not the engines.

    That holds if k3 is past the boundary and the engines' part of it is not. If no metric shows that part, it holds
    whenever rollouts are old.
    """
    gap, whole = judged_k3(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None:
        return now_of(gap.series) <= boundary_of(run) < now_of(whole)
    return staleness_of(run) > 1


@finding("past_boundary", "engines with_movement")
def past_boundary(run: Readings) -> Seen:
    """Whether k3 is past the guard's boundary, by the engines' part or only with the policy's own movement."""
    gap, whole, boundary = judged_k3(run), run.get(K3), boundary_of(run)
    if gap is not None and (now := now_of(gap.series)) > boundary:
        return "engines", f"{gap.name} is {now:.2g} ({now_label(gap.series)}), past the boundary of {boundary:g}"
    if whole is not None and (now := now_of(whole)) > boundary:
        text = f"k3 is {now:.2g} ({now_label(whole)}), past the boundary of {boundary:g}"
        return "with_movement", f"{text}, with the policy's movement since the rollouts"
    return None


@finding("nears_boundary", "ahead skips")
def nears_boundary(run: Readings) -> Seen:
    """Whether k3 certainly grows, and at this pace passes the guard's boundary in the next 1,000 steps; or, with the
    policy's own movement, the threshold from which updates are skipped."""
    _, growth = require_logged(growth_of(run))
    if nears(growth):
        return "ahead", growth_clause(run)
    threshold, gap = run.get("guard/threshold"), judged_k3(run)
    if threshold is None or gap is None or not gap.alone or (limit := float(threshold.values[-1])) <= 0:
        return None
    whole = _fit(run.get(K3), limit)
    if whole is None or not nears(whole[1]):
        return None
    pace = f"at its pace it passes {limit:g}, where updates are skipped, in about {whole[1].steps:.0f} steps"
    return "skips", f"k3 grows with the policy's own movement: {pace}"


@finding("probabilities_apart", "past_limit")
def probabilities_apart(run: Readings) -> Seen:
    """Whether the probabilities differ by more than runs have survived."""
    apart = run.need(PROB_DIFF)
    if (now := now_of(apart)) <= FAILING_DIFFERENCE:
        return None
    text = f"probabilities differ by {now:.3g} on average ({now_label(apart)})"
    return "past_limit", f"{text}; past {FAILING_DIFFERENCE:g}, training was seen to fail"


@finding("above_level", "above")
def above_level(run: Readings) -> Seen:
    """Whether k3 is above the level from which the guard warns."""
    gap, level = require_logged(judged_k3(run)), float(run.need("guard/level").values[-1])
    if not 0 < level < (now := now_of(gap.series)):  # 0 before the guard knows a level
        return None
    text = f"{gap.name} is {now:.2g} ({now_label(gap.series)}), above the normal level of {level:.2g}"
    return "above", f"{text}, where the guard warns (guard/level)"


@finding("gap_not_measured", "lately")
def gap_not_measured(run: Readings) -> Seen:
    """Whether k3 was last measured so long ago that it shows nothing about the run now."""
    gap = require_logged(judged_k3(run))
    last = int(gap.series.steps[-1])
    if (since := run.last_step - last) <= GROWTH_READINGS:
        return None
    text = f"{gap.name} was last measured {since} steps ago: what is said of it describes the run up to then"
    return "lately", text, last


@finding("gap_of_engines", "known")
def gap_of_engines(run: Readings) -> Seen:
    """How much of k3 is the engines', if rollouts are older than the policy and that was measured."""
    gap, whole = require_logged(judged_k3(run)), run.need(K3)
    if not gap.alone or (part := now_of(gap.series)) == now_of(whole):
        return None
    text = f"rollouts are {staleness_of(run):.1f} versions behind: k3 is {now_of(whole):.2g} with the policy's own"
    return "known", f"{text} movement, {part:.2g} without (each the {now_label(whole)})"


@finding("rollouts_old", "old", subsumed_by=("rollout_age", "gap_of_engines"))
def rollouts_old(run: Readings) -> Seen:
    """Whether rollouts are so old that part of the gap is the policy's own movement."""
    if (staleness := staleness_of(run)) <= 1:
        return None
    return "old", f"rollouts are {staleness:.1f} versions behind: part of the gap is the policy's own movement"


@finding("experts_agree", "low usual")
def experts_agree(run: Readings) -> Seen:
    """On how many experts the engines agree now."""
    own = run.get(OWN) if replayed(run) else None  # the replayed experts always agree
    agreement, error = own or run.need(AGREEMENT), run.get(f"{AGREEMENT}/error") if own is None else None
    now = now_of(agreement)
    before = " before the replay" if own is not None else ""
    part = f"; from a share of the trajectories: +- {200 * now_of(error):.2g} % per step" if error is not None else ""
    level = "low" if now < LOW_AGREEMENT else "usual"
    return level, f"the engines agree on {100 * now:.2f} % of the experts{before} ({now_label(agreement)}{part})"


# ---------------------------------------------------------------------------------------------------- what is left out


def skipped_share(run: Readings, last: int | None = None) -> tuple[float, int] | None:
    """Returns the share of the updates that were skipped, and in how many steps; None if no step logged it.

    A step may have several updates. Then guard/skipped is the share of them, and a step must not count as a whole.

    Args:
        last: number of last steps; all by default.
    """
    skipped = run.get(SKIPPED)
    if skipped is None:
        return None
    shares = skipped.values if last is None else skipped.values[-last:]
    return float(shares.mean()), len(shares)


@finding("updates_skipped", "most some | none")
def updates_skipped(run: Readings) -> Seen:
    """How many updates the guard skipped: most of the last ones, some of all, or none."""
    share, steps = require_logged(skipped_share(run, SKIPPED_STEPS))
    if share * steps > SKIPPED_STEPS / 2:
        text = f"{100 * share:.3g} % of the updates of the last {steps} steps were skipped"
        return "most", f"{text}, so the run hardly learns any more"
    share, steps = require_logged(skipped_share(run))
    return ("some" if share > 0 else "none"), f"{100 * share:.3g} % of the updates of {steps} steps were skipped"


@finding("tokens_dropped", "many some none")
def tokens_dropped(run: Readings) -> Seen:
    """How many tokens the correction drops: more than in sound runs, some, or none."""
    dropped = run.need(DROPPED)
    if (share := now_of(dropped)) > TOO_MANY_DROPPED:
        text = f"the correction drops {100 * share:.1f} % of the tokens ({now_label(dropped)})"
        return "many", f"{text}; IcePop's authors saw 0.1 to 0.2 %"
    most, steps = int(dropped.values.argmax()), len(dropped.steps)
    text = f"the correction dropped {100 * dropped.values.mean():.2g} % of the tokens in {steps} steps"
    if not dropped.values.any():
        return "none", text
    return "some", f"{text}; the most was {100 * dropped.values[most]:.2g} %, in step {dropped.steps[most]}"


@finding("mask_blind", "blind")
def mask_blind(run: Readings) -> Seen:
    """Whether the guard found IcePop's mask blind: it drops fewer and fewer tokens while k3 grows."""
    if run.need("guard/mask_blind").values[-1] <= 0.5:  # a mean over the updates of the step
        return None
    share, gap = _fit(run.get(DROPPED), 1.0), _fit(run.get(K3), boundary_of(run))  # a mask sees all of k3
    if share is None or gap is None:
        return None
    share_rate, gap_rate = (_percent_per_step(growth.rate) for _, growth in (share, gap))
    text = f"IcePop drops fewer and fewer tokens ({share_rate:+.1f} % per step) while k3 grows ({gap_rate:+.1f} % per"
    return "blind", f"{text} step): its fixed band does not catch the gap"


# ------------------------------------------------------------------------------------------------------ what it did


def _add_act(action: str, words: str, levels: str) -> None:
    def acted(run: Readings) -> Seen:
        act = next((each for each in reversed(run.acts) if each.action == action), None)
        if act is None:
            return None
        instead, failure = FAILED.get(action, ("", ""))
        failed = any((each.step, each.rule, each.action) == (act.step, action, instead) for each in run.acts)
        lately = act.step > run.last_step - RECENT_STEPS
        level = "earlier" if not lately else "failed" if failed else "lately"
        text = f"the guard {failure if failed else words} in step {act.step}: {act.reason.rstrip('.')}"
        return level, text, act.step

    acted.__doc__ = f"When the guard last {words}: in the last steps or earlier, or it could not."
    finding(f"guard_{action}", levels)(acted)


for each_action, each_words in ACTS.items():
    _add_act(each_action, *each_words)


@finding("guard_warned", "warned")
def guard_warned(run: Readings) -> Seen:
    """How often the guard warned, or narrowed a correction's band."""
    warned = [act.step for act in run.acts if act.action in ("warn", "tighten")]
    if not warned:
        return None
    often = "once, in" if len(warned) == 1 else f"{len(warned)} times, last in"
    return "warned", f"the guard warned or narrowed the band {often} step {warned[-1]}"


# ---------------------------------------------------------------------------------------------- before the reward fell


@finding("warned_before", "forecast passed both")
def warned_before(run: Readings) -> Seen:
    """What warned before the reward fell: the guard's forecast, or k3 past its boundary."""
    if (began := fell_at(run)) is None:
        return None
    gap, forecast, boundary = judged_k3(run), run.get("guard/steps_to_boundary"), boundary_of(run)
    found = [] if gap is None else [(gap.name, gap.series)]
    found += [] if (whole := run.get(K3)) is None else [("k3", whole)]
    steps = ((name, outside_since(series, series.values > boundary, began)) for name, series in found)
    passed = [(step, f"{name} passed {boundary:g} at step {step}") for name, step in steps if step is not None][:1]
    told = None if forecast is None else outside_since(forecast, forecast.values < SOON_STEPS, began)
    warned = [] if told is None else [(told, f"the guard's forecast warned at step {told}")]
    if not (clauses := sorted(passed + warned)):
        return None
    ahead = " and ".join(str(began - step) for step, _ in clauses)
    text = f"{' and '.join(clause for _, clause in clauses)}, {ahead} step{'' if ahead == '1' else 's'} before"
    level = "both" if passed and warned else "passed" if passed else "forecast"
    return level, f"{text} the reward fell (step {began})", clauses[0][0]


def outside_since(series: Series, outside: np.ndarray, began: int) -> int | None:
    """Returns the step from which on the readings before `began` are outside, but for one in STRETCH."""
    out = outside[series.steps < began]
    start = holds_from(out, 1 - 1 / STRETCH)
    return int(series.steps[start]) if start <= len(out) - STRETCH else None


def fell_at(run: Readings) -> int | None:
    """Returns the step at which the reward fell; None if it did not."""
    course = reward_course(run)
    return course.step if course is not None and (course.collapsed or course.falls) else None


@cached_per_run
def moves_of(run: Readings) -> tuple[Move, ...]:
    """Returns what else moved, up to now, in a run whose reward fell."""
    return () if (began := fell_at(run)) is None else moves_before(run, began, run.last_step)


def _add_move(signal: str, name: str, *said_by: str) -> None:
    def moved(run: Readings) -> Seen:
        move = next((each for each in moves_of(run) if each.signal == signal), None)
        if move is None:
            return None
        return "moved", f"{SIGNAL_WORDS[signal]} went from {move.before:.3g} to {move.after:.3g}", move.step

    moved.__doc__ = f"Whether {SIGNAL_WORDS[signal]} left its calm level in a run whose reward fell."
    finding(name, "moved", subsumed_by=said_by)(moved)


for each_signal, each_names in MOVES.items():
    _add_move(each_signal, *each_names)
