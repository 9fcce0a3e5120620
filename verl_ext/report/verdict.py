"""The verdict on a run: one word, one sentence about both states, the facts, the causes, and what to do.

Everything that is printed, drawn or written as JSON comes from here, as it is. The terminal and the page leave out what
they have said already. The first of these that holds decides the word:

    stopped             the guard ended the run in its last step
    collapsed           the reward collapsed
    dead                nothing can be learnt: all answers get the same reward, or the gradient is 0
    past the boundary   the engines are broken, k3 is past the boundary, or most updates of the last steps were skipped
    drifting            the reward falls or the metrics of the learning blow up; the gap grows, or would cross the
                        boundary; more than 5 % of the tokens are dropped, or fewer and fewer while the gap grows; or
                        the guard lately rolled back
    suspect             a cause other than harmless rounding is named, the gap is larger than rounding makes it, or it
                        arises after the last router
    flat                the reward does not move
    not enough data     too few readings of the reward; or no reward was logged, and the gap too seldom
    healthy             none of these: the reward rose, or the engines agree and no reward was logged

While an alarm is active (the guard stopped the run, or refused or took back an update in its last steps), there is no
advice on tuning: only the remedy of the likeliest cause remains, or the way to start a collapsed run again.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from verl_ext.base.names import needs_our_module
from verl_ext.diagnosis.causes import Cause, Settling, settling_of
from verl_ext.diagnosis.findings.gap import gap_of
from verl_ext.diagnosis.findings.registry import RULES, Finding, notable
from verl_ext.diagnosis.growth import FEWEST_FOR_GROWTH
from verl_ext.diagnosis.judge import Judged, Judgement, judge
from verl_ext.diagnosis.names import REWARD
from verl_ext.diagnosis.rank import Evidence, OpenQuestion, Suspect
from verl_ext.diagnosis.series import LEVEL_READINGS
from verl_ext.guard.rules import REFUSING
from verl_ext.report.advice import NextStep, may_ask, next_steps, steps_elsewhere
from verl_ext.report.run import ENDED, Run, sentence_of

State = Literal[
    "stopped", "collapsed", "dead", "past the boundary", "drifting", "suspect", "flat", "not enough data", "healthy"
]

ALARM_STEPS = 3  # last steps in which an action of the guard is an active alarm
FACTS_HEADING = "What else the numbers show"
REASONS = f"reasons for a cause: means of the last {LEVEL_READINGS} readings, unless stated otherwise"
AFTER_ALARM = "The page docs/guard.md#after-the-guard-stopped-a-run lists what to read, to change and to run."
WRONG = ("gradient_large.absurd", "not_finite.reference")  # whatever the reward does
AFTER_ROUTERS = "routers_agree.everywhere"  # a gap that rounding does not make, however small it is
AGREES = "probe_gap.none"  # a probe of a sound launch shows the same
# State of the engines -> what its level means.
ROUNDING = {"close": "as small as rounding makes it", "apart": "larger than rounding makes it"}
# Findings past a limit, and signs of a run on its way there.
LIMITS = (
    "past_boundary.engines",
    "past_boundary.with_movement",
    "updates_skipped.most",
    "probabilities_apart.past_limit",
)
DRIFTS = (
    "nears_boundary.ahead",
    "tokens_dropped.many",
    "mask_blind.blind",
    *(f"guard_{action}.{level}" for action in ("undo", "rollback", "stop") for level in ("lately", "failed")),
)


@dataclass(frozen=True)
class RunVerdict:
    """The verdict, in the order in which a reader sees it.

    Attributes:
        sentence: what happened, of both states.
        learning, engines: the two states.
        facts: all that the numbers and the guard show, the earliest first.
        suspects: the likeliest causes, the first one first.
        measure: the metric to switch on to distinguish the first two causes; "" if none would.
        settle: the command that decides between them, and what it shows for each; "" if none does.
        alarm: the guard's actions in the last steps, which must be dealt with first; "" if there are none.
        steps: what to do, the most useful first.
        of_verl: whether verl logged the run; the steps are in the words of its trainer.
    """

    state: State
    sentence: str
    learning: Judged
    engines: Judged
    facts: tuple[Finding, ...]
    suspects: tuple[Suspect, ...] = ()
    measure: str = ""
    settle: str = ""
    alarm: str = ""
    steps: tuple[NextStep, ...] = ()
    of_verl: bool = True

    @property
    def first(self) -> NextStep | None:
        """The first thing to do; None if nothing is known to be wrong, or no setting or command is known to help."""
        if self.state in ("healthy", "not enough data") or not self.steps:
            return None
        first = self.steps[0]
        return None if first.only_measures and not self.measure.startswith(first.do) else first

    @property
    def first_heading(self) -> str:
        """The line above the first step: what to do with it."""
        run_it = self.first is not None and self.first.is_command
        restart = f"start the run again{_by_our_module(self.steps[:1])} with"
        what = "run, with the overrides of the launch:" if run_it else restart
        said = f" {what}" if self.of_verl and self.first is not None and not self.first.in_words else ""
        return f"{'After that' if self.alarm else 'Do this first'}:{said}"

    @property
    def others_heading(self) -> str:
        by = _by_our_module(self.others)
        adds = "Worth doing" if any(step.in_words for step in self.others) else "Worth adding"
        return f"{adds if self.first is None else 'Then'}{',' * bool(by)}{by}"

    @property
    def others(self) -> tuple[NextStep, ...]:
        return self.steps if self.first is None else self.steps[1:]

    @property
    def other_facts(self) -> tuple[Finding, ...]:
        """The facts that neither the sentence, a step nor another fact says already."""
        steps = " ".join(step.why for step in self.steps)
        said, ids = f"{self.sentence} {self.alarm} {steps}".lower(), {fact.name for fact in self.facts}
        ids |= {sign.finding.name for suspect in self.suspects for sign in suspect.evidence}
        ids.add(f"learning.{self.learning.state}")
        return tuple(
            fact for fact in self.facts if fact.text.lower() not in said and not ids.intersection(fact.subsumed_by)
        )

    @property
    def facts_beyond_causes(self) -> tuple[Finding, ...]:
        """The facts of `other_facts` that no suspect has as evidence."""
        evidence = {text for suspect in self.suspects for text in (*suspect.speaks_for, *suspect.speaks_against)}
        return tuple(fact for fact in self.other_facts if fact.text not in evidence)

    def is_said(self, finding: str) -> bool:
        """Returns True if the state of the learning says the same in the sentence."""
        return finding in RULES and f"learning.{self.learning.state}" in RULES[finding].subsumed_by

    def check_of(self, suspect: Suspect) -> str:
        """Returns the one thing to look at for a suspect; "" if it is harmless, or if a step says the same."""
        said = suspect.harmless or any(f"check {suspect.cause.check}" in f"{step.do} {step.why}" for step in self.steps)
        return "" if said else suspect.cause.check

    def reason_of(self, step: NextStep) -> str:
        """Returns why a step is worth doing, as a sentence; "" if that is the title of a suspect."""
        return "" if step.why in (suspect.cause.title for suspect in self.suspects) else step.sentence

    def labelled(self) -> Iterator[tuple[str, Suspect]]:
        """Yields each suspect with the report's label for it.

        Causes of one subject are alternatives; of two, both may hold. Harmless rounding explains a gap. If a suspect
        before it explains the gap already, it is an alternative.
        """
        for place, suspect in enumerate(self.suspects):
            explained = any(before.cause.of_gap for before in self.suspects[:place])
            rival = any(before.cause.about == suspect.cause.about for before in self.suspects[:place])
            if not suspect.harmless:
                yield ("or" if rival else "also" if place else "likely cause"), suspect
            elif explained:
                yield "or, which would be harmless", suspect
            else:
                yield "cause of the gap, which is harmless", suspect

    def as_json(self, run: Run) -> dict[str, Any]:
        """Returns the verdict as dicts, lists, numbers and texts, for `verl-ext report RUN --json`. docs/report.md
        describes the form, which is stable: entries may be added, and none changes its meaning."""
        return {
            "run": run.name,
            "steps": {"first": run.span[0], "last": run.span[1], "logged": len(run.steps)},
            "state": self.state,
            "sentence": self.sentence,
            "learning": vars(self.learning),
            "engines": vars(self.engines),
            "findings": [{"id": fact.name, "text": fact.text, "step": fact.step} for fact in self.facts],
            "causes": [
                {
                    "id": suspect.cause.name,
                    "title": suspect.cause.title,
                    "harmless": suspect.harmless,
                    "for": list(suspect.speaks_for),
                    "against": list(suspect.speaks_against),
                    "check": suspect.cause.check,
                }
                for suspect in self.suspects
            ],
            "measure": self.measure,
            "settle": self.settle,
            "alarm": self.alarm,
            "next": [vars(step) for step in self.steps],
            "notes": list(run.all_notes()),
        }


def _by_our_module(steps: Iterable[NextStep]) -> str:
    return (
        " by python -m verl_ext.main_ppo"
        if any(needs_our_module(step.do) for step in steps if not step.is_command)
        else ""
    )


def reasons(signs: Sequence[Evidence]) -> tuple[list[str], list[str]]:
    """Returns the evidence for and against a suspect, each finding with its step, the strongest first."""
    speaks_for = [sign.finding.dated for sign in signs if sign.points > 0]
    return speaks_for, [sign.finding.dated for sign in reversed(signs) if sign.points < 0]


def judge_run(run: Run, causes: Iterable[Cause] = ()) -> RunVerdict:
    """Returns the verdict on a run, up to its last step.

    Args:
        causes: those to choose from; all known ones by default.
    """
    found = judge(run.readings, causes, partial(may_ask, run))
    if not run.of_verl:
        found = _worded_by(run, found)
    lately = _refusals(run, found)
    stopped = next((act for act in lately if act.name == "guard_stop" and (act.step or 0) >= run.steps[-1]), None)
    state: State = "stopped" if stopped is not None else _word(run, found)
    question, settle = (_open_question(found), _settling(found)) if run.of_verl else (None, None)
    steps = tuple(next_steps(run, found, state, question, settle) if run.of_verl else steps_elsewhere(run, found))
    alarm = ""
    if lately:  # then there is one remedy, or none
        remedies = [step for step in steps if not step.only_measures]
        steps = tuple(remedies[:1]) if found.learning.state == "collapsed" or found.first is not None else ()
        act = "" if lately[-1] == stopped else f": {lately[-1].text}"  # the sentence already reports a stop
        alarm = f"Deal with this first, before you tune anything{act}. {AFTER_ALARM}"
    return RunVerdict(
        state,
        _sentence(run, found, state, sentence_of(stopped.text) if stopped is not None else ""),
        found.learning,
        found.engines,
        tuple(_facts(run, found)),
        found.suspects,
        measure=question.sentence if question is not None else "",
        settle=settle.sentence if settle is not None else "",
        alarm=alarm,
        steps=steps,
        of_verl=run.of_verl,
    )


def _worded_by(run: Run, found: Judgement) -> Judgement:
    """Returns a judgement whose texts have the names that the run gives its metrics."""
    say = run.in_own_names
    findings = {name: replace(each, text=say(each.text)) for name, each in found.findings.items()}

    def said(suspect: Suspect) -> Suspect:
        evidence = tuple(replace(each, finding=findings[each.finding.name]) for each in suspect.evidence)
        return replace(suspect, cause=replace(suspect.cause, check=say(suspect.cause.check)), evidence=evidence)

    learning, engines = (replace(each, text=say(each.text)) for each in (found.learning, found.engines))
    suspects = tuple(map(said, found.suspects))
    return replace(found, learning=learning, engines=engines, findings=findings, suspects=suspects)


def _refusals(run: Run, found: Judgement) -> list[Finding]:
    """Returns the guard's refusals of updates in the last steps, one of a kind, the last one last."""
    acts = [act for action in REFUSING if (act := found.findings.get(f"guard_{action}")) is not None]
    return sorted((act for act in acts if (act.step or 0) > run.steps[-1] - ALARM_STEPS), key=lambda act: act.step or 0)


def _open_question(found: Judgement) -> OpenQuestion | None:
    """Returns the question for the metric that would decide, if there is more than one cause to decide between."""
    asked = found.question
    if asked is None or len(found.suspects) == 1:
        return None
    return asked if found.first is not None and found.first.cause == asked.first else None


def _settling(found: Judgement) -> Settling | None:
    """Returns the command that decides between the first two causes; None if none does.

    A probe that only shows no gap does not settle a single cause.
    """
    first = found.first
    rival = found.suspects[1].cause if len(found.suspects) > 1 and not found.suspects[1].harmless else None
    if first is None or (rival is None and first.cause.probe == (AGREES,)):
        return None
    return settling_of(first.cause, rival)


def _word(run: Run, found: Judgement) -> State:
    learning, engines = found.learning.state, found.engines.state
    if learning in ("collapsed", "dead"):
        return "collapsed" if learning == "collapsed" else "dead"
    if engines == "broken" or found.has(*LIMITS):
        return "past the boundary"
    if learning in ("falling", "unstable") or engines == "growing" or found.has(*DRIFTS):
        return "drifting"
    if found.first is not None or engines == "apart" or found.has(AFTER_ROUTERS, *WRONG):
        return "suspect"
    if learning == "flat":
        return "flat"
    gap = gap_of(run.readings)
    unjudged = run.readings.logged(REWARD) is not None or gap is None or len(gap.series.steps) < FEWEST_FOR_GROWTH
    if learning == "too short" and unjudged:
        return "not enough data"
    return "healthy"


def _sentence(run: Run, found: Judgement, state: State, stopped: str) -> str:
    """Returns one sentence on both states, after one on what ended the run, if anything did."""
    good = found.learning.state in ("learns", "weak") and found.engines.state in ("apart", "broken", "growing")
    learning, engines = _with_step(run, found.learning), _of_engines(run, found, state)
    both = sentence_of(f"{learning}{', but' if good else ';'} {engines}")
    if run.end is not None:
        return f"The run {run.end.reason.removesuffix('.')}. {both}"
    return f"{stopped} {both}" if stopped else both


def _with_step(run: Run, judged: Judged) -> str:
    """Returns the reason for a state with its step, unless it names one or has been so from the start."""
    if judged.step is None or judged.step <= run.steps[0] or re.search(r"\bstep \d", judged.text):
        return judged.text
    jumped = " jumped from " in judged.text
    return f"in step {judged.step}, {judged.text}" if jumped else f"{judged.text} (step {judged.step})"


def _of_engines(run: Run, found: Judgement, state: State) -> str:
    """Returns the clause on the engines, with what it means: that of rounding, or what is past a limit."""
    text, level = found.engines.text, found.findings.get("gap_level")
    limit = next((each for mark in LIMITS for each in found.findings.values() if each.mark == mark), None)
    is_level = level is not None and level.text == text
    if limit is not None and limit.name == "past_boundary" and limit.text.startswith(text):
        return limit.text
    if limit is not None and state == "past the boundary":
        return f"{_with_step(run, found.engines)}; {limit.text}"
    if is_level and found.has(AFTER_ROUTERS):
        return f"{text}, and it arises after the last router"
    if is_level and found.engines.state in ROUNDING:
        return f"{text}, {ROUNDING[found.engines.state]}"
    return _with_step(run, found.engines)


def _facts(run: Run, found: Judgement) -> list[Finding]:
    """Returns what the numbers and the guard show, the earliest first, those without a step last."""
    facts = [each for each in notable(found.findings) if each.name != "run_ended"]
    facts += [Finding(ENDED, ENDED, event.reason, event.step, True) for event in run.events if event.rule == ENDED]
    return sorted(facts, key=lambda fact: (fact.step is None, fact.step or 0))
