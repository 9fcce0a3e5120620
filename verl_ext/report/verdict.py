"""What a run's metrics say, in plain words: a state, the evidence for it, and what to try next.

The state is about the gap between the engines and about what it can end in, a reward that breaks down. It is decided by
the first of these that holds:

    collapsed           the reward has lost nine tenths of its best and stays there (`guard.collapse`)
    past the boundary   the gap is past the boundary, is not a number, or most of the last updates were skipped
    drifting            the gap grows for certain and would cross the boundary; it has risen far and stayed; more than
                        5 % of the tokens are dropped, or ever fewer while the gap grows; the reward broke down; or the
                        guard lately rolled back or stopped
    not enough data     fewer than 8 readings of the gap
    healthy             none of them
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verl_ext.guard.boundary import FEWEST, HORIZON
from verl_ext.guard.state import Boundary, Event
from verl_ext.metrics import is_of_the_gap
from verl_ext.report.advice import Override, State, advice, measuring, revival
from verl_ext.report.growth import (
    K3,
    LAST,
    STALE,
    Gap,
    age_drives,
    blind_mask,
    boundary_of,
    gap_of,
    growth_of,
    now_of,
    staleness,
)
from verl_ext.report.reward import STRETCHES, broken_reward, collapse_of
from verl_ext.report.run import Run

WINDOW = 10  # steps of which most were skipped, for a run that no longer learns
RISE = 25.0  # times the k3 of the run's best stretch: 5 times the mean gap of a token, which the guard calls a jump
HARMLESS = 0.01  # of the boundary; a rise to below it is not one
FAR = 1000  # times below the boundary; how many thousands says nothing more
FAILING_DIFFERENCE = 0.05  # mean |p rollout - p training| past which training was seen to fail (IcePop)
TOO_MANY_DROPPED = 0.05  # share of tokens; IcePop's authors saw 0.001 to 0.002


@dataclass(frozen=True)
class Verdict:
    state: State
    sentence: str
    evidence: tuple[str, ...]
    overrides: tuple[Override, ...]


def judge(run: Run) -> Verdict:
    """The verdict on a run as far as it has come."""
    k3 = gap_of(run)
    past, gap, acts = list(_past(run)), list(_gap_moves(run)), list(_acts(run))
    around = tuple(_surroundings(run))
    if collapse := collapse_of(run):
        evidence = (str(collapse), *past, *gap, *acts, *_level(run), *around)
        return Verdict("collapsed", f"The run is dead. {collapse.remedy}", evidence, tuple(revival(run, collapse)))
    fell = broken_reward(run)
    if past:
        state: State = "past the boundary"
        sentence = "The engines have come apart so far that updates no longer follow the rollouts."
        if k3 is not None and k3.alone and age_drives(run):
            sentence = "The rollouts are so much older than the policy that updates no longer follow them."
    elif gap or fell or acts:
        state, sentence = "drifting", "Something moves that should stand still: act before it costs the run."
        if any(event.action == "stop" for event in _acted(run)):
            sentence = "The guard stopped the run: see why before you start it again."
    elif k3 is None or len(k3.series.steps) < FEWEST:
        return Verdict("not enough data", _too_little(k3), around, tuple(measuring(run)))
    else:
        state = "healthy"
        sentence = "The engines stay together, and what difference there is does not grow."
    lost = [f"The reward fell from {fell[0]:.3g} to {fell[1]:.3g}."] if fell else []
    evidence = (*past, *gap, *lost, *acts, *_level(run), *around)
    of_gap = bool(past or gap) or any(is_of_the_gap(event.signal) for event in _acted(run))
    return Verdict(state, sentence, evidence, tuple(advice(run, state, of_gap=of_gap, reward_fell=fell is not None)))


def _too_little(k3: Gap | None) -> str:
    if k3 is None:
        return "Nothing compares the rollout's log-probabilities with the training engine's."
    count = len(k3.series.steps)
    return f"The gap was measured in {count} step{'s' * (count != 1)}; {FEWEST} are needed to see where it goes."


def _past(run: Run) -> Iterator[str]:
    boundary = boundary_of(run)
    gap, k3 = gap_of(run), run.get(K3)
    if gap is not None and (now := now_of(gap.series)) > boundary:
        count = min(LAST, len(gap.series.steps))
        yield f"{gap.name} is {now:.3g}, past the boundary of {boundary:g} (median of the last {count})."
    elif k3 is not None and (now := now_of(k3)) > boundary:
        yield f"k3 is {now:.3g}, past the boundary of {boundary:g}; what the policy moved since the rollouts is in it."
    if (mean := run.get("vllm_kl/prob_diff_mean")) is not None and (now := now_of(mean)) > FAILING_DIFFERENCE:
        yield (f"Probabilities differ by {now:.3g} on average; past {FAILING_DIFFERENCE:g}, training was seen to fail.")
    logged = run.logged(K3)
    tail = np.empty(0) if logged is None else logged.values[-LAST:]
    if len(tail) == LAST and (bad := int((~np.isfinite(tail)).sum())) > LAST // 2:  # infinite: too far apart for exp
        yield f"k3 was not a number in {bad} of the last {LAST} steps."
    skipped = run.get("guard/skipped")
    if skipped is not None and (count := int((skipped.values[-WINDOW:] > 0).sum())) > WINDOW // 2:
        of = min(WINDOW, len(skipped.steps))
        yield f"{count} of the last {of} updates were skipped: the run hardly learns any more."


def _gap_moves(run: Run) -> Iterator[str]:
    found = growth_of(run)
    if found and (growth := found[1]).low > 0 and 0 < growth.steps < HORIZON:
        percent = 100 * np.expm1([growth.low, growth.high])
        yield (
            f"{_name(run)} grows by {percent[0]:.1f} to {percent[1]:.1f} % a step; at this pace it passes "
            f"{boundary_of(run):g} in about {growth.steps:.0f} steps."
        )
    if rise := _rise(run):
        best, now = rise
        yield (
            f"{_name(run)} is {now / best:.0f} times what it was in the run's best stretch ({best:.2g} to {now:.2g}) "
            "and stays there: did weight syncs fail, or a setting change?"
        )
    if (dropped := run.get("correction/dropped")) is not None and (now := now_of(dropped)) > TOO_MANY_DROPPED:
        yield f"The correction drops {100 * now:.1f} % of the tokens; IcePop's authors saw 0.1 to 0.2 %."
    if moves := blind_mask(run):
        shares, gaps = (100 * np.expm1(growth.rate) for growth in moves)
        yield (
            f"IcePop drops fewer and fewer tokens ({shares:+.1f} % a step) while k3 grows ({gaps:+.1f} % a step): its "
            "fixed band does not see what comes apart."
        )


ACTED = {"undo": "took an update back", "rollback": "rolled back", "stop": "stopped the run"}


def _acts(run: Run) -> Iterator[str]:
    for event in _acted(run):
        yield f"The guard {ACTED[event.action]} in step {event.step}: {event.reason}."


def _acted(run: Run) -> list[Event]:
    """What the guard lately did that ends a run, or goes back in it."""
    return [e for e in run.events if e.action in ACTED and e.step > run.steps[-1] - WINDOW]


def _name(run: Run) -> str:
    gap = gap_of(run)
    return gap.name if gap else "k3"


def _rise(run: Run) -> tuple[float, float] | None:
    """k3 in the run's best stretch and now, where it has risen far."""
    gap = gap_of(run)
    if gap is None or len(gap.series.steps) < 2 * FEWEST:
        return None
    k3 = gap.series
    best = min(float(np.median(part)) for part in np.array_split(k3.values, STRETCHES))
    now = now_of(k3)
    return (best, now) if best > 0 and now > max(RISE * best, HARMLESS * boundary_of(run)) else None


def _level(run: Run) -> Iterator[str]:
    """Where the gap stands, whatever the state."""
    gap = gap_of(run)
    if gap is not None and (now := now_of(k3 := gap.series)) <= (boundary := boundary_of(run)):
        text = f"{now:.2g}, {_far_below(now, boundary)} the boundary of {boundary:g}"
        found = growth_of(run)
        steady = found is not None and not (found[1].low > 0 and found[1].steps < HORIZON)
        if not gap.alone and (logged := run.logged(K3)) is not None and logged.steps[-1] > k3.steps[-1]:
            yield f"k3 was {text}, when it was last a number, in step {k3.steps[-1]}."
        else:
            yield f"{gap.name} is {text}" + (", and shows no growth that would reach it." if steady else ".")
        if (since := int(run.steps[-1] - k3.steps[-1])) > Boundary.window:
            yield f"{gap.name} was last measured {since} steps ago: all of this is about the time before."


def _far_below(now: float, boundary: float) -> str:
    if boundary >= FAR * now:
        return f"more than {FAR:,} times below"
    return f"{boundary / now:.0f} times below" if boundary >= 10 * now else f"{100 * now / boundary:.0f} % of"


def _surroundings(run: Run) -> Iterator[str]:
    """What else belongs to the picture."""
    if (dropped := run.get("correction/dropped")) is not None and (now := now_of(dropped)) <= TOO_MANY_DROPPED:
        yield f"The correction drops {100 * now:.2g} % of the tokens."
    if (agreement := run.get("router/agreement")) is not None:
        error = run.get("router/agreement/error")
        within = "" if error is None else f" (by a share of the trajectories: +- {200 * now_of(error):.2g} % a step)"
        yield f"The engines choose {100 * now_of(agreement):.2f} % of the experts alike{within}."
    if (skipped := run.get("guard/skipped")) is not None and (count := int((skipped.values > 0).sum())):
        yield f"{count} of {len(skipped.values)} updates were skipped."
    if warned := [event.step for event in run.events if event.action in ("warn", "tighten")]:
        often = "once" if len(warned) == 1 else f"{len(warned)} times"
        yield f"The guard warned or narrowed the band {often}, last in step {warned[-1]}."
    stale, gap, whole = staleness(run), gap_of(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None and (part := now_of(gap.series)) != now_of(whole):
        yield (
            f"Rollouts are {stale:.1f} versions behind: k3 is {now_of(whole):.2g} with the policy's own movement, "
            f"{part:.2g} without."
        )
    elif stale > STALE:
        yield f"Rollouts are {stale:.1f} versions behind: part of the gap is the policy's own movement."
    if (norm := run.metrics.get("actor/grad_norm")) is not None and (bad := int((~np.isfinite(norm.values)).sum())):
        yield f"The gradient norm was not a number in {bad} step{'s' * (bad != 1)}."
