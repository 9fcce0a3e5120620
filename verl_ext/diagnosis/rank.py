"""Ranks the causes of a run by its findings, and finds the metric that would decide between the first two.

A cause gets points for each finding whose level its file lists (`causes.WORDS`). Findings of one family show the same
in other numbers, so only the strongest of them for a cause and the strongest against it count. Metrics that are not
logged add nothing. A cause is named if it has LEAST points, or SECOND points as the alternative to the first, and no
finding has a level that its file lists as "never". docs/diagnosis.md shows how often the right cause comes first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from verl_ext.diagnosis.causes import LEAST, WORDS, Cause
from verl_ext.diagnosis.findings.registry import RULES, Finding, FindingRule
from verl_ext.diagnosis.findings.routers import is_moe
from verl_ext.diagnosis.names import setting_for
from verl_ext.diagnosis.series import Readings

SECOND = 1.5  # points from which the alternative to the first cause is shown
DECIDED = 2.0  # lead in points that decides between two causes, and that a finding must be able to change
MOST_NAMED = 3  # causes that are named
MayAsk = Callable[[str], bool]  # of a setting
# Prefixes of the settings that only measure, and do not change the training.
MEASURES = tuple(f"stability.{name}" for name in ("metrics", "router_agreement", "sync_canary"))


@dataclass(frozen=True)
class Evidence:
    """A finding as evidence for a cause, or against it if the points are negative."""

    points: float
    finding: Finding


@dataclass(frozen=True)
class OpenQuestion:
    """Two causes between which the metrics of a run do not decide.

    Attributes:
        setting: switches on a metric that the run does not log and that would decide.
    """

    first: Cause
    second: Cause
    setting: str

    @property
    def sentence(self) -> str:
        return f'{self.setting} would show whether it is "{self.first.title}" or "{self.second.title}"'


@dataclass(frozen=True)
class Suspect:
    """A cause that the findings of a run point to.

    Attributes:
        evidence: for the cause and against it, the strongest for it first.
        harmless: whether it is rounding, and no larger than in sound runs.
        moe: whether the run's model is a mixture of experts, by its metrics.
        question: only of the first suspect, if a metric that is not logged would decide between it and the next cause.
    """

    cause: Cause
    evidence: tuple[Evidence, ...]
    harmless: bool = False
    moe: bool = False
    question: OpenQuestion | None = None

    @property
    def points(self) -> float:
        return sum(each.points for each in self.evidence)

    @property
    def speaks_for(self) -> tuple[str, ...]:
        return tuple(each.finding.text for each in self.evidence if each.points > 0)

    @property
    def speaks_against(self) -> tuple[str, ...]:
        return tuple(each.finding.text for each in reversed(self.evidence) if each.points < 0)

    @property
    def sentence(self) -> str:
        """The cause, the evidence for it, and what to do, on one line."""
        return f"likely cause: {self.cause.title} ({'; '.join(self.speaks_for)}); {self.advice}"

    @property
    def advice(self) -> str:
        """The things to check, to try and to measure."""
        return self.cause.advice_for(self.moe) + (f"; {self.question.sentence}" if self.question else "")

    @property
    def override(self) -> str:
        return self.cause.override_for(self.moe)


def name_causes(
    run: Readings, found: Mapping[str, Finding], causes: Iterable[Cause], may_ask: MayAsk = lambda setting: True
) -> tuple[list[Suspect], OpenQuestion | None]:
    """Returns the causes with at least LEAST points, the likeliest first, and the question that would decide between
    the first two, even if no cause has LEAST.

    The second one needs only SECOND points if it is about the same: it is shown as the alternative. No cause is named
    after harmless rounding, because the run may be sound.

    Args:
        found: the findings of the run, by name.
        causes: those to choose from.
        may_ask: tells whether the question may be for a setting.
    """
    marks = {each.mark for each in found.values()}
    judged = _judged(found, marks, is_moe(run), causes)
    ranked = [suspect for suspect in judged if _is_seen(suspect.cause, marks)]
    possible = [each for each in judged if each in ranked or _may_be(run, found, each.cause, may_ask)]
    question = _question(run, found, possible, may_ask)
    if not ranked or ranked[0].points < LEAST:
        return [], question
    named = [
        suspect
        for place, suspect in enumerate(ranked)
        if suspect.points >= LEAST or (place == 1 and suspect.points >= SECOND and _is_alternative(suspect, ranked[0]))
    ]
    others = [suspect for suspect in named if suspect.cause.about != "run"]  # the report shows anyway what ended a run
    named = others if others and others[0].points >= LEAST else named
    harmless = next((place for place, suspect in enumerate(named) if suspect.harmless), len(named))
    named = named[: min(harmless + 1, MOST_NAMED)]
    if named[0].harmless:
        return named, question
    return [replace(named[0], question=question), *named[1:]], question


def _judged(found: Mapping[str, Finding], marks: set[str], moe: bool, causes: Iterable[Cause]) -> list[Suspect]:
    """Returns the causes that nothing rules out, the one with the most points first.

    Rounding of a harmless size explains a gap, but no falling reward. If it is the likeliest cause of the gap, causes
    in the learning with at least LEAST points come first.
    """
    close = (level := found.get("gap_level")) is not None and level.level in ("close", "none")
    close = close and "gap_grew.grew" not in marks  # rounding does not grow
    judged = [
        Suspect(cause.seen_with(marks), evidence_of(cause, found), close and cause.harmless_if_close, moe)
        for cause in causes
    ]
    judged = [suspect for suspect in judged if all(each.points > WORDS["never"] for each in suspect.evidence)]
    judged = _unexplained(judged, found, marks)
    judged.sort(key=lambda suspect: -suspect.points)
    of_gap = next((suspect for suspect in judged if suspect.cause.of_gap), None)
    if of_gap is not None and of_gap.harmless:
        judged.sort(key=lambda suspect: suspect.cause.of_gap or suspect.points < LEAST)
    return judged


def _is_alternative(suspect: Suspect, first: Suspect) -> bool:
    """Returns True if a cause would explain the same as the first: of the gap, or of the learning."""
    return suspect.cause.about == first.cause.about and not suspect.harmless


def _is_seen(cause: Cause, marks: set[str]) -> bool:
    """Returns True if the cause requires no finding, or one that was found."""
    return not cause.only_with or bool(marks & set(cause.only_with))


def _unexplained(judged: list[Suspect], found: Mapping[str, Finding], marks: set[str]) -> list[Suspect]:
    """Returns the suspects without the evidence that follows from another one: that a batch has no signal is no cause
    if all answers are cut."""
    sure = [each.cause for each in judged if each.points >= LEAST and _is_seen(each.cause, marks)]
    of = {mark: cause for cause in sure for mark in cause.explains}

    def own(suspect: Suspect) -> Suspect:
        left = {name: each for name, each in found.items() if of.get(each.mark, suspect.cause) == suspect.cause}
        return replace(suspect, evidence=evidence_of(suspect.cause, left))

    return [own(suspect) for suspect in judged] if of else judged


def _may_be(run: Readings, found: Mapping[str, Finding], cause: Cause, may_ask: MayAsk) -> bool:
    """Returns True if a metric that can be switched on may show a level that this cause requires (`only_with`)."""
    names = {mark.partition(".")[0] for mark in cause.only_with} - found.keys()
    return any(_setting(run, RULES[name], may_ask) for name in names)


def evidence_of(cause: Cause, found: Mapping[str, Finding]) -> tuple[Evidence, ...]:
    """Returns the evidence for and against a cause, the strongest for it first; at most one of each kind from a
    family."""
    best: dict[tuple[str, bool], Evidence] = {}
    for name, seen in found.items():
        if points := cause.points(name, seen.level):
            key = (RULES[name].family, points > 0)
            if key not in best or abs(points) > abs(best[key].points):
                best[key] = Evidence(points, seen)
    return tuple(sorted(best.values(), key=lambda each: (-each.points, not each.finding.notable)))


def _question(
    run: Readings, found: Mapping[str, Finding], possible: Sequence[Suspect], may_ask: MayAsk
) -> OpenQuestion | None:
    """Returns the question for the finding whose possible levels move the first cause and another one furthest apart.

    A finding counts only if one of its levels would reverse the order of the two and another would confirm it.
    """
    if not possible or possible[0].harmless:
        return None
    furthest, chosen = DECIDED, None
    unseen = [(rule, _setting(run, rule, may_ask)) for rule in RULES.values() if rule.name not in found]
    likely = [suspect for suspect in possible if suspect.points > max(possible[0].points - DECIDED, 0)]
    rivals = [each for each in likely[1:] if each.cause.about == likely[0].cause.about]  # others may hold too
    for rival, (rule, setting) in product(rivals, unseen):
        first, second = likely[0].cause, rival.cause
        lead = likely[0].points - rival.points
        moves = [lead + first.points(rule.name, level) - second.points(rule.name, level) for level in rule.levels]
        if setting and max(moves) > 0 > min(moves) and max(moves) - min(moves) >= furthest:
            furthest, chosen = max(moves) - min(moves) + 1e-9, OpenQuestion(first, second, setting)
    return chosen


def _setting(run: Readings, rule: FindingRule, may_ask: MayAsk) -> str:
    """Returns the setting that makes a run log what a finding needs and the run lacks; "" if there is none."""
    asked = (setting_for(name) for name in rule.needs if run.get(name) is None)
    return next((setting for setting in asked if setting.startswith(MEASURES) and may_ask(setting)), "")
