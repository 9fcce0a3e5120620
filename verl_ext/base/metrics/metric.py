"""The description of a metric."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Scale = Literal["linear", "log"]
Better = Literal["higher", "lower", ""]
Worst = Literal["highest", "lowest", "largest", ""]
When = Literal["before", "after", "validation", ""]
NATS = "nats per token"  # the unit of every metric that is computed from log-probabilities


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them.

    Attributes:
        name: as it is logged. In the name of a family, `*` matches one part, `**` all that follows, `{a,b}` a or b.
        meaning: a few words.
        unit: "" for a number without a unit.
        better: which direction is better for the level of a run; "" if neither is.
        worst: which single reading of a run is the worst, "largest" by absolute value; "" if none is.
        scale: "log" if runs are compared by their ratio, because single tokens change the metric tenfold or more.
        when: "before" the guard judges the batch, "after" that (with or after the update), or with a "validation"; ""
            if the members of a family differ.
        rare: whether it may be absent for many steps, so that a rule waits for it.
        finite: whether the guard acts if it is NaN or infinite, even without a rule.
        label: its name in tables.
    """

    name: str
    meaning: str
    unit: str = ""
    better: Better = ""
    worst: Worst = ""
    scale: Scale = "linear"
    when: When = "before"
    rare: bool = False
    finite: bool = False
    label: str = ""

    def has(self, name: str) -> bool:
        """Returns True for the name of the metric, or of a member of the family."""
        # Few names begin as the family does, so that few patterns are ever compiled.
        return name.startswith(self._beginning) and self._pattern.fullmatch(name) is not None

    @cached_property
    def _beginning(self) -> str:
        return re.split(r"[*{]", self.name, maxsplit=1)[0]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.name).replace(r"\*\*", ".*").replace(r"\*", "[^/]+")
        return re.compile(re.sub(r"\\\{(.+?)\\\}", lambda found: f"({found[1].replace(',', '|')})", text), re.DOTALL)


@dataclass(frozen=True)
class Section:
    """Metrics that are logged together.

    Attributes:
        logged: a paragraph about which part logs them and when.
        override: the setting that makes a run log them.
    """

    title: str
    logged: str
    metrics: tuple[Metric, ...]
    override: str = ""
