"""The definition of a finding, and the table of all findings."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps

from verl_ext.diagnosis.series import NotLoggedError, Readings


@dataclass(frozen=True)
class Finding:
    """What the metrics of a run show in one respect.

    Attributes:
        name: the name of its rule.
        level: one of the levels of this finding.
        text: the fact in numbers, a clause.
        step: the step at which it began or was largest; None if it has none.
        notable: whether it is worth reporting by itself; usual levels are only evidence for or against causes.
    """

    name: str
    level: str
    text: str
    step: int | None = None
    notable: bool = False

    @property
    def mark(self) -> str:
        return f"{self.name}.{self.level}"

    @property
    def dated(self) -> str:
        """The fact behind its step, unless it has none, names it, or the run has ended before its first one."""
        named = not self.step or f"step {self.step}" in self.text or "the first step" in self.text
        return self.text if named else f"step {self.step}: {self.text}"

    @property
    def subsumed_by(self) -> tuple[str, ...]:
        return RULES[self.name].subsumed_by if self.name in RULES else ()


Seen = tuple[str, str] | tuple[str, str, int | None] | None  # level, text and step


@dataclass(frozen=True)
class FindingRule:
    """A function that finds something, as it was registered.

    Attributes:
        family: findings of one family show the same in other numbers; only the strongest of them counts.
        needs: the metrics that it is computed from; a report may ask for those that are not logged.
        levels: everything that it can find.
        usual: the levels of a sound run.
        subsumed_by: findings, other facts and states, such as `learning.flat`, that say the same with more detail.
        check: the one thing to look at if no cause explains the finding; "" if there is none.
    """

    name: str
    family: str
    needs: tuple[str, ...]
    levels: tuple[str, ...]
    usual: tuple[str, ...]
    look: Callable[[Readings], Seen]
    subsumed_by: tuple[str, ...] = ()
    check: str = ""


# Of a number that is odd in one step.
OF_BATCH = "the batch of that step: a mask without a token, a probability of 0, its rarest tokens and longest answers"
RULES: dict[str, FindingRule] = {}


def finding(
    name: str,
    levels: str,
    *,
    family: str = "",
    needs: tuple[str, ...] = (),
    subsumed_by: tuple[str, ...] = (),
    check: str = "",
) -> Callable[[Callable[[Readings], Seen]], Callable[[Readings], Seen]]:
    """Registers a function that returns a level, the fact as a clause and its step. If the run lacks what it needs, it
    returns None or raises NotLoggedError.

    Args:
        levels: separated by blanks; those after a `|` are as in a sound run, or mean nothing by themselves.
        family: shared by findings that show the same in other numbers; its own by default.
        needs: the metrics that it is computed from.
        subsumed_by, check: as in FindingRule.

    Raises:
        ValueError: the name is taken.
    """
    notable, _, usual = levels.partition("|")

    def register(look: Callable[[Readings], Seen]) -> Callable[[Readings], Seen]:
        if name in RULES:
            raise ValueError(f"a finding {name} is registered already")

        @wraps(look)
        def seen(run: Readings) -> Seen:
            try:
                return look(run)
            except NotLoggedError:
                return None

        every = (*notable.split(), *usual.split())
        RULES[name] = FindingRule(name, family or name, needs, every, tuple(usual.split()), seen, subsumed_by, check)
        return seen

    return register


def find_all(run: Readings) -> dict[str, Finding]:
    """Returns everything that the metrics of a run show, by the name of the finding."""
    found = {}
    for rule in RULES.values():
        try:
            seen = rule.look(run)
        except Exception as error:  # a finding may be the user's: it must not end a run that trains
            if rule.look.__module__.startswith("verl_ext."):
                raise
            warnings.warn(f"the finding {rule.name} failed: {error!r}", stacklevel=2)
            seen = None
        if seen is not None:
            level, text, *step = seen
            found[rule.name] = Finding(rule.name, level, text, step[0] if step else None, level not in rule.usual)
    return found


def notable(found: Mapping[str, Finding]) -> list[Finding]:
    """Returns the findings that are worth reporting, the earliest step first."""
    told = [each for each in found.values() if each.notable]
    return sorted(told, key=lambda each: (each.step is None, each.step or 0))
