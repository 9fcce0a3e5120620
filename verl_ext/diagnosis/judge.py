"""Judges a run: the state of the learning, the state of the engines, what the numbers show, and the likeliest causes.

The learning is judged without the gap, and the engines without the reward (docs/report.md lists the states). The
sentences about both are written here; nothing edits them later.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np

from verl_ext.diagnosis.causes import Cause, known_causes
from verl_ext.diagnosis.findings import finite, gap, reward, routers
from verl_ext.diagnosis.findings.registry import Finding, find_all
from verl_ext.diagnosis.names import REWARD, by_quantity, unread_names
from verl_ext.diagnosis.rank import MayAsk, OpenQuestion, Suspect, name_causes
from verl_ext.diagnosis.series import LEVEL_READINGS, Readings, now_label, now_of
from verl_ext.diagnosis.statistics import FEWEST, LIKELY, SAME, SURE, Course

LearningState = Literal["learns", "weak", "flat", "falling", "collapsed", "dead", "unstable", "too short"]
EnginesState = Literal["unmeasured", "close", "apart", "broken", "growing"]
# Findings of exploding metrics of the learning itself, the strongest first.
BLOWS_UP = (
    "entropy_exploded.exploded",
    "reference_kl_grew.grew",
    "length_exploded.exploded",
    "gradient_grew.grew",
    "stride.far",
    "reward_part.fell",
)
LIKE_A_REWARD = re.compile(r"(?i)reward|score|return|accura|correct|success|solve")
# Findings of a growing gap.
JUMPED = ("gap_jumped.at_first_sync", "gap_jumped.later", "gap_jumped.later_and_grows")
GROWS = (*JUMPED, "gap_grew.grew")


@dataclass(frozen=True)
class Judged:
    """One of the two states, its reason as a clause with numbers, and the step at which it began, if known."""

    state: LearningState | EnginesState
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Judgement:
    """The judgement of a run.

    Attributes:
        learning, engines: the two states.
        findings: everything that the metrics show, by name.
        suspects: the likeliest causes, the first one first.
        question: the metric that would decide between the first two causes; None if no metric would.
        moe: whether the model is a mixture of experts, by its metrics.
    """

    learning: Judged
    engines: Judged
    findings: Mapping[str, Finding]
    suspects: tuple[Suspect, ...]
    question: OpenQuestion | None
    moe: bool

    @property
    def first(self) -> Suspect | None:
        """The likeliest cause; None if there is none, or it is harmless rounding."""
        return self.suspects[0] if self.suspects and not self.suspects[0].harmless else None

    def has(self, *marks: str) -> bool:
        """Returns True if one of these marks (`finding.level`) was found."""
        return any(each.mark in marks for each in self.findings.values())


def judge(run: Readings, causes: Iterable[Cause] = (), may_ask: MayAsk = lambda setting: True) -> Judgement:
    """Returns the judgement of a run, from all its readings.

    Args:
        causes: the causes to choose from; all known ones by default.
        may_ask: tells whether the question may be for a setting.
    """
    chosen = list(causes) or list(known_causes().values())  # before the findings: a package may bring both
    found = find_all(run)
    suspects, question = name_causes(run, found, chosen, may_ask)
    return Judgement(
        judge_learning(run, found), judge_engines(run, found), found, tuple(suspects), question, routers.is_moe(run)
    )


def judge_learning(run: Readings, found: Mapping[str, Finding]) -> Judged:
    """Returns the state of the learning; `found` are the findings of the run."""
    marks = {each.mark: each for each in found.values()}
    not_finite = marks.get("not_finite.training")
    lost, course = marks.get("not_finite.reward"), reward.reward_course(run)
    before = "".join(f"{each.text}; " for each in (not_finite, lost) if each is not None)
    if lost is not None and (course is None or not (course.collapsed or course.falls)):
        return Judged("unstable", lost.text, lost.step)
    if course is None:
        return Judged("too short", before + _too_few_rewards(run))
    if course.collapsed:
        text = f"{before}the reward collapsed at step {course.step}, from {course.fell}"
        return Judged("collapsed", text, course.step)
    ended = float(np.ptp(course.series.values[-LEVEL_READINGS:])) <= SAME * course.height
    stands = abs(course.rise.errors) < SURE and not reward.at_ceiling(run, course)
    possible = {"reward_constant.constant": True, "gradient_zero.zero": ended, "gradient_zero.lost": stands}
    possible["groups_dead.all"] = stands
    dead = next((marks[mark] for mark, counts in possible.items() if counts and mark in marks), None)
    if reward.is_solved(run):  # then there is nothing left to learn
        dead = None
    if dead is not None and "validation_fell.rose" not in marks:
        return Judged("dead", f"{before}nothing can be learnt, because {dead.text}", dead.step)
    if course.falls:
        return Judged("falling", f"{before}the reward falls since step {course.step}, from {course.fell}", course.step)
    now = f"{now_of(course.series):.3g} ({now_label(course.series)})"
    if course.rise.errors < SURE and (validation := marks.get("validation_fell.fell")):
        return Judged("falling", f"the reward stands at {now}, and {validation.text}", validation.step)
    if not_finite:
        return Judged("unstable", not_finite.text, not_finite.step)
    if blown := next((marks[mark] for mark in BLOWS_UP if mark in marks), None):
        course_text = f"rose from {course.moved}" if course.rise.errors >= SURE else f"holds at {now}"
        return Judged("unstable", f"the reward {course_text}, but {blown.text}", blown.step)
    if penalties := marks.get("penalties_vanish.only"):
        return Judged("flat", f"the reward went from {course.moved}, but {penalties.text}")
    return _judge_rise(course, now, at_ceiling="reward_flat.at_ceiling" in marks)


def _too_few_rewards(run: Readings) -> str:
    series = run.get(REWARD)
    if series is None:
        likely = [name for name in unread_names(run.every_name()) if LIKE_A_REWARD.search(name)]
        return f"{likely[0]} may be the reward, but the report does not know it" if likely else "no reward was logged"
    if len(series.steps) == 1:
        return f"there is 1 reading of the reward, and {FEWEST} are needed"
    return f"there are {len(series.steps)} readings of the reward, and {FEWEST} are needed"


def _judge_rise(course: Course, now: str, *, at_ceiling: bool) -> Judged:
    """Returns the state of a reward that did not fall, in a run without exploding metrics."""
    if course.rise.errors >= SURE:
        return Judged("learns", f"the reward rose from {course.moved}")
    if course.rise.errors >= LIKELY:
        return Judged("weak", f"the reward rose a little, from {course.rise.beyond_noise}")
    if at_ceiling:
        return Judged("learns", f"the reward is at its ceiling, at {now}")
    if course.is_open:
        count = len(course.series.values)
        return Judged("too short", f"{count} readings do not show whether the reward moves: {course.rise.text}")
    went = "fell" if course.rise.errors <= -LIKELY else "hardly moved"
    return Judged("flat", f"the reward {went}, from {course.rise.beyond_noise}")


def judge_engines(run: Readings, found: Mapping[str, Finding]) -> Judged:
    """Returns the state of the engines; `found` are the findings of the run."""
    marks = {each.mark: each for each in found.values()}
    if (lost := finite.lost_gap(run)) is not None:
        name, step = lost
        return Judged("broken", f"{name} is not a number from step {step} on", step)
    level = found.get("gap_level")
    if level is None:
        for measure in gap.MEASURES:
            if run.logged(measure.name) is not None:
                return Judged("broken", f"{measure.name} was never a number")
        return Judged("unmeasured", "no metric that the report knows compares the engines")
    grew = next((marks[mark] for mark in GROWS if mark in marks), None)
    if level.level == "broken":
        return Judged("broken", level.text, grew.step if grew is not None else None)
    if level.level == "apart":
        return Judged("apart", level.text) if grew is None else Judged("growing", grew.text, grew.step)
    grew = marks.get("gap_grew.grew")
    return Judged("close", level.text) if grew is None else Judged("growing", grew.text, grew.step)


LOOK_EVERY, LOOKS = 5, 3  # steps between two looks; looks in a row that must find the same cause before it is reported
FIRST_KEPT, LAST_KEPT = 20, 512  # readings of a metric that a running diagnosis keeps


class RunningDiagnosis:
    """The diagnosis of a run while it trains. It reports a cause each time that the likeliest one changes.

    Attributes:
        reported: the name of the cause that was reported last; "" for none.

    Raises:
        CauseError: the file of a cause cannot be used.
    """

    def __init__(self) -> None:
        self._readings: dict[str, list[tuple[int, float]]] = {}
        self._seen: list[str] = []
        self.reported = ""
        known_causes()  # an unusable file must be found before the run has trained

    def add(self, step: int, metrics: Mapping[str, float]) -> Suspect | None:
        """Takes the metrics of a step, and returns the likeliest cause if it is not the one reported last.

        The cause has to come first in LOOKS looks in a row, one every LOOK_EVERY steps, so that one odd batch reports
        nothing. Rounding of a harmless size is not reported.
        """
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        for name, logged in by_quantity(numbers).items():
            values = {each: float(alias.convert(numbers[each])) for each, alias in logged.items()}
            value = next((each for each in values.values() if math.isfinite(each)), next(iter(values.values())))
            readings = self._readings.setdefault(name, [])
            readings.append((step, value))
            del readings[FIRST_KEPT:-LAST_KEPT]
        if step % LOOK_EVERY:
            return None
        found = self.look()
        named = found.cause.name if found is not None else ""
        self._seen = [*self._seen, named][-LOOKS:]
        if found is None or named == self.reported or self._seen != [named] * LOOKS:
            return None
        self.reported = named
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns all readings so far, in plain numbers, lists and dicts."""
        first = {name: readings[:FIRST_KEPT] for name, readings in self._readings.items()}
        last = {name: readings[FIRST_KEPT:] for name, readings in self._readings.items() if readings[FIRST_KEPT:]}
        return {"first": first, "last": last, "seen": self._seen, "reported": self.reported}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned. Raises ValueError if this is no such state."""
        try:
            first, last = (
                {str(name): [(int(step), float(value)) for step, value in pairs] for name, pairs in saved[part].items()}
                for part in ("first", "last")
            )
            seen, reported = [str(name) for name in saved["seen"]], str(saved["reported"])
            self._readings = {name: readings + last.get(name, []) for name, readings in first.items()}
            self._seen, self.reported = seen, reported
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no readings of a run: {error!r}") from error

    def look(self) -> Suspect | None:
        """Returns the cause that all readings so far point to; None if there is none, or it is harmless rounding."""
        return judge(Readings.of_pairs(self._readings)).first
