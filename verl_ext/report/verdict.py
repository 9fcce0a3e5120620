"""A run's metrics in plain words: what happened, why, and what to do.

The state describes the gap between the engines and its possible result, a reward that breaks down. The first of these
that holds decides it:

    stopped             the guard ended the run in its last step
    collapsed           the reward is below half of its best and has not come back (`report.signals` has the rules)
    past the boundary   the gap is past the boundary, is not a number, or most updates of the last steps were skipped
    drifting            the gap grows significantly and would cross the boundary; it has risen far and stayed; more than
                        5 % of the tokens are dropped, or fewer and fewer while the gap grows; the reward lost most of
                        what it had gained; or the guard lately rolled back or stopped
    not enough data     fewer than 8 readings of the gap
    suspect             a cause other than rounding is named (`guard.diagnosis`), or the gap is large and none is
    healthy             none of them

Every state includes the likeliest causes, and the first advice is the remedy of the first cause.

While an alarm is active (the guard stopped the run, or refused or took back an update in its last steps), there is no
advice on tuning: only the remedy of the likeliest cause remains, or the way to start a collapsed run again.

The most useful remedy comes first. Settings that only measure come last, unless nothing is wrong. The choice of
remedies follows docs/methods.md, "Which one, when", and the runs of docs/lab.md.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_ext.base.causes import CAUSES, settling_sentence
from verl_ext.base.metrics import is_of_the_gap
from verl_ext.guard.collapse import GRADIENT, REWARD, Collapse
from verl_ext.guard.diagnosis import LARGE, Suspect, find_question, find_suspects
from verl_ext.guard.forecast import FEWEST, HORIZON
from verl_ext.guard.marks import READ, STALENESS
from verl_ext.guard.marks import WINDOW as JUDGED
from verl_ext.guard.rules import REFUSING
from verl_ext.guard.state import Boundary, Event
from verl_ext.report.run import Run, Series
from verl_ext.report.signals import (
    DROPPED,
    K3,
    LAST,
    SOUND,
    STALE,
    STRETCHES,
    Fall,
    Gap,
    age_drives,
    beginning_label,
    beginning_of,
    blind_mask,
    boundary_of,
    broken_reward,
    fall_of,
    foretold_at,
    gap_of,
    growth_of,
    is_moe,
    latest,
    level_of,
    now_label,
    now_of,
    passed_at,
    routing_drives,
    skipped_share,
    staleness,
    usual_level,
)
from verl_ext.report.sources.ends import ENDED

State = Literal["stopped", "collapsed", "healthy", "suspect", "drifting", "past the boundary", "not enough data"]

WINDOW = 10  # a run no longer learns if more than half of the updates of this many steps were skipped
ALARM = 3  # last steps in which an action of the guard is an active alarm
RISE = 25.0  # times the k3 of the run's best stretch: 5 times a token's mean gap, which the guard calls a jump
HARMLESS = 0.01  # share of the boundary; a rise to a smaller value does not count
FAR = 1000  # times below the boundary; more thousands add no information
FAILING_DIFFERENCE = 0.05  # mean |p rollout - p training| past which training was seen to fail (IcePop)
TOO_MANY_DROPPED = 0.05  # share of tokens; IcePop's authors saw 0.001 to 0.002
TOO_FAR = "The engines differ so much that the rollouts say little about the policy that is trained on them."
TOO_OLD = "The rollouts are so old that they say little about the policy that is trained on them."
DEFAULT_RATE = 1e-6  # of verl's actor
MOST_SUSPECTS = 3
MENDED_BY_CORRECTION = ("quantized", "router_bias")
# Causes whose remedy depends on the run's own numbers.
KNOWN_ADVICE = ("old_weights", "learning_rate", "two_precisions")


@dataclass(frozen=True)
class Override:
    """One remedy to try: overrides of `python -m verl_ext.main_ppo`, and the reason.

    Attributes:
        corrects: whether it brings the engines together or keeps their gap out of the update. That does not repair a
            fault.
    """

    text: str
    why: str
    corrects: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.why[0].upper()}{self.why[1:]}."


SYNC = Override(
    "trainer.v1.trainer_mode=sync", "samples with the current weights, so rollouts are never old; steps take longer"
)
REFERENCE = Override("actor_rollout_ref.actor.use_kl_loss=true", "holds the policy near the reference model")
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"
AFTER_ALARM = "The page docs/guard.md#after-the-guard-stopped-a-run lists what to read, to change and to run."
SPOILED = "the last weights are spoiled"


@dataclass(frozen=True)
class RunVerdict:
    """The verdict, in the order in which a reader sees it.

    Attributes:
        sentence: what happened.
        why: the warnings before it, then the explanation; one sentence each.
        overrides: the remedies, the most useful first.
        evidence: further findings in the metrics.
        alarm: the guard's actions in the last steps, which must be dealt with first; "" if there are none.
        suspects: the likeliest causes, the first one first.
        measure: the metric to switch on to distinguish the first two causes; "" if none would.
        settle: the command that decides between them, and what it shows for each; "" if none does.
    """

    state: State
    sentence: str
    why: tuple[str, ...]
    overrides: tuple[Override, ...]
    evidence: tuple[str, ...]
    alarm: str = ""
    suspects: tuple[Suspect, ...] = ()
    measure: str = ""
    settle: str = ""

    @property
    def first(self) -> Override | None:
        """The first remedy; None if nothing is known to be wrong, or the cause is unknown."""
        idle = self.state in ("healthy", "not enough data") or (self.state == "suspect" and not self.suspects)
        return None if idle or not self.overrides else self.overrides[0]

    @property
    def others(self) -> tuple[Override, ...]:
        return self.overrides if self.first is None else self.overrides[1:]

    @property
    def judged_by(self) -> str:
        """What the numbers of the suspects are of; "" if there are none."""
        if not self.suspects:
            return ""
        window = f"the last {JUDGED} readings, or {4 * JUDGED} where k1 is used"
        return f"The numbers of the causes are means over {window}, unless they say otherwise."

    def labelled(self) -> Iterator[tuple[str, Suspect]]:
        """The suspects, each with what the report calls it.

        Harmless rounding explains a gap. If a suspect before it explains the gap already, it is an alternative.
        """
        for place, suspect in enumerate(self.suspects):
            explained = any(before.cause.of_gap for before in self.suspects[:place])
            if not suspect.harmless:
                yield ("or" if place else "likely cause"), suspect
            elif explained:
                yield "or, which would be harmless", suspect
            else:
                yield "cause of the gap, which is harmless", suspect


def judge_run(run: Run) -> RunVerdict:
    """Returns the verdict on a run, up to its last step."""
    found = _with_alarm(run, _with_suspects(run, _verdict_of_metrics(run)))
    for end in run.events[-1:]:
        if end.rule == ENDED and end.step >= run.steps[-1]:
            found = replace(found, sentence=f"The run {end.reason.rstrip('.')}. {found.sentence}")
    stop = next((event for event in run.events if event.action == "stop" and event.step >= run.steps[-1]), None)
    if stop is None:
        return found
    act = _act_sentence(stop)
    why, evidence = (
        tuple(sentence for sentence in sentences if sentence != act)
        for sentences in ((found.sentence, *found.why), found.evidence)
    )
    return replace(found, state="stopped", sentence=act, why=why, evidence=evidence)


def _verdict_of_metrics(run: Run) -> RunVerdict:
    if fall := fall_of(run):
        return _collapse_verdict(run, fall)
    fell = broken_reward(run)
    if past := list(_limit_sentences(run)):
        return _boundary_verdict(run, past, fell)
    gap, acts = list(_movement_sentences(run)), list(map(_act_sentence, _recent_acts(run)))
    if gap or acts or fell:
        return _drift_verdict(run, gap, acts, fell)
    if (k3 := gap_of(run)) is None or len(k3.series.steps) < FEWEST:
        why = (f"The reward is {reward}.",) if (reward := _reward_since_start(run)) else ()
        return RunVerdict(
            "not enough data", _missing_sentence(k3), why, tuple(_measuring_overrides(run)), tuple(_surroundings(run))
        )
    return _healthy_verdict(run)


def _with_suspects(run: Run, found: RunVerdict) -> RunVerdict:
    """Adds the likeliest causes to the verdict, and the remedy of the first cause before all other advice."""
    series = {
        name: np.column_stack([found.steps, found.values])
        for name, found in run.canonical.items()
        if name.startswith(READ)
    }
    suspects = tuple(find_suspects(series)[:MOST_SUSPECTS])
    first = suspects[0] if suspects and not suspects[0].harmless else None
    question = first.question if first is not None else None
    if not suspects and (k3 := gap_of(run)) is not None and now_of(k3.series) > LARGE:
        question = find_question(series)
    found = replace(found, suspects=suspects, measure=question.sentence if question else "")
    if first is not None:
        rivals = [suspect.cause for suspect in suspects[1:] if not suspect.harmless or first.cause.of_gap]
        second = rivals[0] if rivals else question.second if question else None
        found = replace(found, settle=settling_sentence(first.cause, second))
    if found.state == "healthy":
        k3 = gap_of(run)
        if first is not None:
            sentence = f"The reward holds, but something is wrong: {_lower_first(first.cause.title)}."
        elif k3 is None or suspects or (staleness(run) > STALE and not k3.alone):  # the rollouts' age explains it
            return found
        elif (now := now_of(k3.series)) > max(LARGE, usual_level(run)):
            now_said = f"{k3.name} is {now:.2g} ({now_label(k3.series)})"
            sentence = f"The reward holds, but {now_said}, and nothing that was measured explains it."
            if run.get(REWARD) is None:
                sentence = f"{now_said}, and nothing that was measured explains it. No reward was logged."
        else:
            return found
        held = found.sentence.removeprefix("The run is healthy: ")
        held = held if held.startswith("k3") else f"{held[:1].upper()}{held[1:]}"
        found = replace(found, state="suspect", sentence=sentence, why=(held, *found.why))
    if first is None or first.cause.name in KNOWN_ADVICE or not first.cause.override:
        return found
    change = Override(first.cause.override, first.cause.title)
    if found.state == "collapsed" and (fall := fall_of(run)):
        change = _with_checkpoint(run, change, fall.sound)
    idle = first.cause.name not in MENDED_BY_CORRECTION
    others = (each for each in found.overrides if each.text != change.text and not (idle and each.corrects))
    return replace(found, overrides=(change, *others))


def _with_alarm(run: Run, found: RunVerdict) -> RunVerdict:
    """Removes advice on tuning from the verdict, if an alarm is active."""
    lately = [event for event in run.events if event.action in REFUSING and event.step > run.steps[-1] - ALARM]
    if not lately:
        return found
    event = lately[-1]
    named = bool(found.suspects) and not found.suspects[0].harmless
    mends = named and bool(found.suspects[0].cause.override or found.suspects[0].cause.name in KNOWN_ADVICE)
    kept = found.overrides[: found.state == "collapsed" or mends]
    alarm = f"Deal with this first, before you tune anything: {_lower_first(_act_sentence(event))} {AFTER_ALARM}"
    return replace(found, alarm=alarm, overrides=kept)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _collapse_verdict(run: Run, fall: Fall) -> RunVerdict:
    before = fall.collapse.step - 1
    by_gap = fall.collapse.gap_first or any(at(run, before) is not None for at in (passed_at, foretold_at))
    why = (_warning_sentence(run, fall.collapse), *_cause_sentences(run, by_gap), *fall.moved(but=K3 if by_gap else ""))
    return RunVerdict(
        "collapsed", str(fall), why, tuple(_revival_overrides(run, fall, by_gap=by_gap)), _evidence(run, why)
    )


def _boundary_verdict(run: Run, past: list[str], fell: tuple[float, float] | None) -> RunVerdict:
    level = level_of(run)
    holds = level is not None and fell is None and level.last >= SOUND * level.best > 0
    first, *others = past
    why: list[str] = []
    refused = next((event for event in reversed(run.events) if event.action == "skip"), None)
    if refused and any(_skip_sentence(run)):
        why.append(f"The last skipped update was refused because {refused.reason}.")
    why += others
    if (passed := passed_at(run, int(run.steps[-1]))) and (forecast := foretold_at(run, passed[1] - 1)) is not None:
        why.append(f"The guard's forecast warned at step {forecast}, {_steps_before(passed[1] - forecast)} that.")
    if fell:
        why.append(_fall_sentence(fell))
    elif level:
        means = f"the mean of its last {level.count} readings is {level.last:.3g}, of its best ones {level.best:.3g}"
        why.append(f"The reward holds: {means}." if holds else f"The reward: {means}.")
    if not holds and any(_past_gap_sentence(run)):
        why.append(TOO_OLD if age_drives(run) else TOO_FAR)
    why += _driver_sentences(run)
    overrides = _advice_overrides(
        run, "past the boundary", of_gap=True, reward_fell=fell is not None, reward_holds=holds
    )
    return RunVerdict("past the boundary", first, tuple(why), tuple(overrides), _evidence(run, (first, *why)))


def _drift_verdict(run: Run, gap: list[str], acts: list[str], fell: tuple[float, float] | None) -> RunVerdict:
    of_gap = bool(gap) or any(is_of_the_gap(event.signal) for event in _recent_acts(run))
    first, *others = (*([_fall_sentence(fell)] if fell else []), *acts, *gap)
    why = (*others, *(_driver_sentences(run) if of_gap else ()))
    overrides = _advice_overrides(run, "drifting", of_gap=of_gap, reward_fell=fell is not None, reward_holds=False)
    return RunVerdict("drifting", first, why, tuple(overrides), _evidence(run, (first, *why)))


def _healthy_verdict(run: Run) -> RunVerdict:
    gap, *why = _gap_sentences(run)
    reward = _reward_since_start(run)
    sentence = f"The run is healthy: the reward is {reward}; {gap}" if reward else f"The run is healthy: {gap}"
    overrides = _advice_overrides(run, "healthy", of_gap=False, reward_fell=False, reward_holds=True)
    return RunVerdict("healthy", sentence, tuple(why), tuple(overrides), _evidence(run, (gap, *why)))


def _evidence(run: Run, used: Collection[str]) -> tuple[str, ...]:
    """Returns all sentences about the run, except those in `used`."""
    sentences = (
        *_limit_sentences(run),
        *_movement_sentences(run),
        *map(_act_sentence, _recent_acts(run)),
        *_gap_sentences(run),
        *_surroundings(run),
    )
    return tuple(sentence for sentence in sentences if sentence not in used)


def _warning_sentence(run: Run, collapse: Collapse) -> str:
    """Returns what warned before the reward began to fall."""
    began, boundary = collapse.step, f"{boundary_of(run):g}"
    forecast, passed = foretold_at(run, began - 1), passed_at(run, began - 1)
    if forecast is not None and passed is not None:
        name, step = passed
        return (
            f"The guard's forecast warned at step {forecast}, and {name} passed {boundary} at step {step}: "
            f"{began - forecast} and {began - step} steps before the reward began to fall."
        )
    if forecast is not None:
        return (
            f"The guard's forecast warned at step {forecast}, {_steps_before(began - forecast)} "
            "the reward began to fall."
        )
    if passed is not None:
        name, step = passed
        return f"{name} passed {boundary} at step {step}, {_steps_before(began - step)} the reward began to fall."
    if collapse.gap_first:
        k3 = collapse.moves[0]
        return f"k3 rose from {k3.before:.2g} to {k3.after:.2g} from step {k3.step} on; the fall began at step {began}."
    if late := passed_at(run, int(run.steps[-1])):
        return f"Nothing warned before the fall: {late[0]} passed {boundary} at step {late[1]}, after it had begun."
    if run.get(K3) is None:
        return "Nothing could warn of it: k3 was not logged."
    return f"Nothing warned of it: k3 did not stay past {boundary}."


def _steps_before(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)} before"


def _cause_sentences(run: Run, by_gap: bool) -> Iterator[str]:
    """Yields why the reward collapsed, as far as the metrics show it."""
    if by_gap and age_drives(run):
        yield "The likely cause is the age of the rollouts."
    elif by_gap:
        yield "The likely cause is that the engines came apart."
    elif run.get(K3) is None:
        yield "The metrics do not show whether the engines came apart first."
    else:
        yield "Nothing shows that the engines came apart first, so the learning rate is the first suspect."
    if by_gap:
        yield from _driver_sentences(run)
        yield from _past_gap_sentence(run)
    else:
        yield from _gap_sentences(run)


def _driver_sentences(run: Run) -> Iterator[str]:
    """Yields the causes of the gap that a metric shows."""
    if age_drives(run):
        yield from _age_sentence(run)
    elif routing_drives(run):
        yield from _agreement_sentence(run)


def _fall_sentence(fell: tuple[float, float]) -> str:
    return f"The reward fell from {fell[0]:.3g} to {fell[1]:.3g} (means of an eighth of the run)."


def _reward_since_start(run: Run) -> str:
    if (reward := run.get(REWARD)) is None:
        return ""
    now = f"{now_of(reward):.3g} ({now_label(reward)})"
    return (
        now if len(reward.steps) == 1 else f"{now} and began at {beginning_of(reward):.3g} ({beginning_label(reward)})"
    )


def _missing_sentence(k3: Gap | None) -> str:
    if k3 is None:
        return "Nothing compares the rollout's log-probabilities with the training engine's, so the gap is not known."
    count = len(k3.series.steps)
    return f"The gap was measured in {count} step{'s' * (count != 1)}; {FEWEST} are needed to see where it goes."


def _limit_sentences(run: Run) -> Iterator[str]:
    """Yields the metrics past a limit. Skipped updates come first, because such a run learns nothing."""
    yield from _skip_sentence(run)
    yield from _past_gap_sentence(run)
    apart = run.get("vllm_kl/prob_diff_mean")
    if apart is not None and (now := now_of(apart)) > FAILING_DIFFERENCE:
        said = f"Probabilities differ by {now:.3g} on average ({now_label(apart)})"
        yield f"{said}; past {FAILING_DIFFERENCE:g}, training was seen to fail."
    logged = run.logged(K3)
    tail = np.empty(0) if logged is None else logged.values[-LAST:]
    if len(tail) == LAST and (bad := int((~np.isfinite(tail)).sum())) > LAST // 2:  # infinite: too far apart for exp
        yield f"k3 was not a number in {bad} of the last {LAST} steps."


def _skip_sentence(run: Run) -> Iterator[str]:
    share, steps = skipped_share(run, WINDOW) or (0.0, 0)
    if share * steps > WINDOW / 2:
        skipped = f"{100 * share:.3g} % of the updates of the last {steps} steps were skipped"
        yield f"The run hardly learns any more: {skipped}."


def _past_gap_sentence(run: Run) -> Iterator[str]:
    gap, k3 = gap_of(run), run.get(K3)
    boundary = boundary_of(run)
    if gap is not None and (now := now_of(gap.series)) > boundary:
        past = f"past the boundary of {boundary:g}{_since_step(run, gap.name)}"
        yield f"{gap.name} is {now:.3g}, {past} ({now_label(gap.series)})."
    elif k3 is not None and (now := now_of(k3)) > boundary:
        past = f"past the boundary of {boundary:g}{_since_step(run, 'k3')} ({now_label(k3)})"
        yield f"k3 is {now:.3g}, {past}; it includes the policy's movement since the rollouts."


def _since_step(run: Run, name: str) -> str:
    passed = passed_at(run, int(run.steps[-1]))
    return f" since step {passed[1]}" if passed is not None and passed[0] == name else ""


def _movement_sentences(run: Run) -> Iterator[str]:
    found, gap = growth_of(run), gap_of(run)
    name = gap.name if gap else "k3"
    if found and (growth := found[1]).low > 0 and 0 < growth.steps < HORIZON:
        percent = 100 * np.expm1([growth.low, growth.high])
        yield (
            f"{name} grows by {percent[0]:.1f} to {percent[1]:.1f} % per step, over the last {len(found[0].steps)} "
            f"readings; at this pace it passes {boundary_of(run):g} in about {growth.steps:.0f} steps."
        )
    if gap is not None and (rise := _rise(run)):
        best, now = rise
        suspect = "." if age_drives(run) else ": did weight syncs fail, or did a setting change?"
        yield (
            f"{name} is {now / best:.0f} times what it was in the run's best stretch, and stays there: from {best:.2g} "
            f"(median of an eighth of the run) to {now:.2g} ({now_label(gap.series)}){suspect}"
        )
    dropped = run.get(DROPPED)
    if dropped is not None and (share := now_of(dropped)) > TOO_MANY_DROPPED:
        drops = f"{100 * share:.1f} % of the tokens ({now_label(dropped)})"
        yield f"The correction drops {drops}; IcePop's authors saw 0.1 to 0.2 %."
    if moves := blind_mask(run):
        shares, gaps = (100 * np.expm1(growth.rate) for growth in moves)
        yield (
            f"IcePop drops fewer and fewer tokens ({shares:+.1f} % per step) while k3 grows ({gaps:+.1f} % per step), "
            f"both over at most {Boundary.window} readings: its fixed band does not catch the gap."
        )


ACTED = {
    "undo": "took an update back",
    "rollback": "rolled back",
    "stop": "stopped the run",
    "skip": "skipped an update",
}
TAKEN_BACK = ("undo", "rollback", "stop")


def _act_sentence(event: Event) -> str:
    return f"The guard {ACTED[event.action]} in step {event.step}: {event.reason}."


def _recent_acts(run: Run) -> list[Event]:
    """Returns the guard's recent actions that stop a run or take it back."""
    return [e for e in run.events if e.action in TAKEN_BACK and e.step > run.steps[-1] - WINDOW]


def _rise(run: Run) -> tuple[float, float] | None:
    """Returns k3 in the run's best stretch and now, if it has risen far."""
    gap = gap_of(run)
    if gap is None or len(gap.series.steps) < 2 * FEWEST:
        return None
    k3 = gap.series
    best = min(float(np.median(part)) for part in np.array_split(k3.values, STRETCHES))
    now = now_of(k3)
    return (best, now) if best > 0 and now > max(RISE * best, HARMLESS * boundary_of(run)) else None


def _gap_sentences(run: Run) -> Iterator[str]:
    """Yields the size of the gap, for any state."""
    gap = gap_of(run)
    if gap is not None and (now := now_of(k3 := gap.series)) <= (boundary := boundary_of(run)):
        text = f"{now:.2g} ({now_label(k3)}), {_far_below(now, boundary)} the boundary of {boundary:g}"
        found = growth_of(run)
        steady = found is not None and not (found[1].low > 0 and found[1].steps < HORIZON)
        if not gap.alone and (logged := run.logged(K3)) is not None and logged.steps[-1] > k3.steps[-1]:
            yield f"k3 was last a number in step {k3.steps[-1]}: it was {text}."
        else:
            yield f"{gap.name} is {text}" + (", and shows no growth that would reach it." if steady else ".")
        if (since := int(run.steps[-1] - k3.steps[-1])) > Boundary.window:
            yield f"{gap.name} was last measured {since} steps ago: all of this describes the run up to then."


def _far_below(now: float, boundary: float) -> str:
    if boundary >= FAR * now:
        return f"more than {FAR:,} times below"
    return f"{boundary / now:.0f} times below" if boundary >= 10 * now else f"{100 * now / boundary:.0f} % of"


def _surroundings(run: Run) -> Iterator[str]:
    """Yields sentences on dropped tokens, routing, skips, warnings, age and gradients."""
    if (dropped := run.get(DROPPED)) is not None and now_of(dropped) <= TOO_MANY_DROPPED:
        yield _dropped_sentence(dropped)
    yield from _level_sentence(run)
    yield from _agreement_sentence(run)
    skipped, steps = skipped_share(run) or (0.0, 0)
    if skipped > 0:
        yield f"{100 * skipped:.3g} % of the updates of {steps} steps were skipped."
    if warned := [event.step for event in run.events if event.action in ("warn", "tighten")]:
        often = "once, in" if len(warned) == 1 else f"{len(warned)} times, last in"
        yield f"The guard warned or narrowed the band {often} step {warned[-1]}."
    yield from _age_sentence(run)
    if (norm := run.logged("actor/grad_norm")) is not None and (bad := int((~np.isfinite(norm.values)).sum())):
        yield f"The gradient norm was not a number in {bad} step{'s' * (bad != 1)}."


def _level_sentence(run: Run) -> Iterator[str]:
    """Yields a sentence if the gap is above the level that the guard takes as normal for the model."""
    gap, level = gap_of(run), usual_level(run)
    if gap is not None and 0 < level < (now := now_of(gap.series)):
        above = f"above the normal level of {level:.2g}, where the guard warns (guard/level)"
        yield f"{gap.name} is {now:.2g} ({now_label(gap.series)}), {above}."


def _dropped_sentence(share: Series) -> str:
    """Describes the whole run, because its last steps often drop nothing."""
    steps, most = len(share.steps), int(share.values.argmax())
    if not share.values[most]:
        return f"The correction looked at every token of {steps} steps and dropped none: none was outside its bounds."
    return (
        f"The correction dropped {100 * share.values.mean():.2g} % of the tokens in {steps} steps; the most was "
        f"{100 * share.values[most]:.2g} %, in step {share.steps[most]}."
    )


def _agreement_sentence(run: Run) -> Iterator[str]:
    if (agreement := run.get("router/agreement")) is not None:
        error = latest(run, "router/agreement/error")
        within = "" if np.isnan(error) else f"; from a share of the trajectories: +- {200 * error:.2g} % per step"
        share = f"{100 * now_of(agreement):.2f} % of the experts"
        yield f"The engines agree on {share} ({now_label(agreement)}{within})."


def _age_sentence(run: Run) -> Iterator[str]:
    stale, gap, whole = staleness(run), gap_of(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None and (part := now_of(gap.series)) != now_of(whole):
        yield (
            f"Rollouts are {stale:.1f} versions behind: k3 is {now_of(whole):.2g} with the policy's own movement, "
            f"{part:.2g} without (each the {now_label(whole)})."
        )
    elif stale > STALE and (age := run.get(STALENESS)) is not None:
        behind = f"{stale:.1f} versions behind ({now_label(age)})"
        yield f"Rollouts are {behind}: part of the gap is the policy's own movement."


def _advice_overrides(
    run: Run, state: State, *, of_gap: bool, reward_fell: bool, reward_holds: bool
) -> Iterator[Override]:
    """Yields changes for a run that has not collapsed.

    Args:
        of_gap: whether the gap of the engines is the problem.
        reward_fell, reward_holds: whether the reward lost most of what it had gained; whether it is near its best.
    """
    if of_gap:
        yield from _gap_overrides(run, tighten=state == "drifting")
        if state == "past the boundary" and not reward_holds:
            yield Override(RESUME, f"goes back to a checkpoint from before the gap grew: {SPOILED}")
    elif reward_fell:
        yield _lower_rate(run)
        yield REFERENCE
    yield from _measuring_overrides(run)
    if state == "healthy" and run.get("guard/threshold") is None:
        yield Override("stability.batch_skip.threshold=0.1", "refuses the one batch that would spoil the weights")


def _revival_overrides(run: Run, fall: Fall, *, by_gap: bool) -> Iterator[Override]:
    """Yields the ways to start a collapsed run again: a sound checkpoint together with the change that helps most.

    Args:
        by_gap: whether the engines came apart, or rollouts were too old, before the reward fell.
    """
    norm = next((str(move) for move in fall.collapse.moves if move.signal == GRADIENT), "")
    rate = _lower_rate(run, f"; {norm} rose at the old one" if norm else "")
    first, *others = (*_gap_overrides(run, tighten=False), rate) if by_gap else (rate, REFERENCE)
    yield _with_checkpoint(run, first, fall.sound)
    yield from others
    yield from _measuring_overrides(run)


def _with_checkpoint(run: Run, change: Override, sound: int) -> Override:
    """Returns the change together with the weights to start from, as one command line."""
    if sound <= 1:
        why = f"{change.why}. No checkpoint is from before the fall, so the run starts from its beginning"
        return replace(change, text=f"{change.text} trainer.resume_mode=disable", why=why)
    stale = staleness(run)
    dated = f" (the reward of a step is that of weights {stale:.0f} versions older)" if stale > STALE else ""
    why = f"{change.why}. {SPOILED.capitalize()}: CHECKPOINT is one from before step {sound}{dated}"
    return replace(change, text=f"{change.text} {RESUME}", why=why)


def _gap_overrides(run: Run, *, tighten: bool) -> Iterator[Override]:
    """Yields changes that bring the engines together, or keep their gap out of the update. The lab has tested which one
    helps.

    If rollouts are old, routers disagree because they have moved: then replay does not help, and masks of single tokens
    help little. If routers disagree by themselves, replay helps, weights combine with it, and masks do harm
    (docs/lab.md).
    """
    if age_drives(run):
        yield from _age_overrides(run)
        return
    corrected, blind, routed = run.get(DROPPED) is not None, blind_mask(run) is not None, routing_drives(run)
    if routed:
        yield Override(
            "stability=r3 stability.correction=tis",
            "trains with the experts that the rollout chose and bounds weights: routing is part of the gap",
            corrects=True,
        )
    if blind:
        tight = "bounds each token's KL instead, which is tight for likely tokens"
        yield Override("stability=kpop", tight, corrects=True)
    if not corrected and not routed:
        yield Override(
            "stability=tis",
            "bounds the weight of the tokens on which the engines differ, and skips batches whose k3 is past 0.1",
            corrects=True,
        )
    yield Override(
        "precision=fp16",
        "rounds eight times finer than bfloat16, in both engines; use fp16_megatron if Megatron trains",
        corrects=True,
    )
    if tighten and corrected and not blind:
        rule = "{gap:{signal:guard/steps_to_boundary,below:20,recover:50,action:tighten}}"
        yield Override(
            f"stability.guard.rules='{rule}'",
            "narrows the band while the boundary is near, if IcePop is the correction",
        )


def _age_overrides(run: Run) -> Iterator[Override]:
    """Yields a preset with OPSM, unless OPSM is on; then rollouts that are not old. The preset is that of
    docs/methods.md, "Which one, when".

    OPSM tolerates the gap without closing it: once k3 passes the boundary, the preset's batch skip would refuse
    updates.
    """
    if run.get("actor/opsm/dropped") is None:
        old, why = CAUSES["old_weights"], "leaves out bad responses that the policy has moved away from"
        if is_moe(run):
            text = old.moe_override
            why += ", trains with the experts that the rollout chose and bounds weights"
        else:
            text = old.override
            why += ", which helped old rollouts most in the lab"
        whole, boundary = run.get(K3), boundary_of(run)
        if whole is not None and whole.values[-Boundary.window :].max() > boundary:
            text += " stability.batch_skip.threshold=null"
            why += f". The batch skip would refuse updates while k3 is past {boundary:g}"
        yield Override(text, why)
    yield SYNC


def _lower_rate(run: Run, also: str = "") -> Override:
    """Returns a third of the highest logged learning rate; verl's default if none was logged."""
    logged = run.get("actor/lr")
    highest = 0.0 if logged is None else float(logged.values.max())
    rate, why = (
        (highest / 3, "lowers the learning rate to a third")
        if highest > 0
        else (DEFAULT_RATE, "sets verl's own learning rate")
    )
    return Override(f"actor_rollout_ref.actor.optim.lr={rate:.0e}", why + also)


def _measuring_overrides(run: Run) -> Iterator[Override]:
    """Yields settings that would measure more of the same run."""
    if run.get(K3) is None or run.get("vllm_kl/log_ratio_abs_mean") is None:
        yield Override("stability.metrics=true", "measures the gap of the engines, by probability and position too")
    if run.get("router/agreement") is None:
        yield Override("stability.router_agreement=true", "shows whether the engines choose the same experts (MoE)")
