"""The description of a metric."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Scale = Literal["linear", "log"]
Better = Literal["higher", "lower", ""]
Worst = Literal["highest", "lowest", "largest", ""]
When = Literal["before", "after", "validation", ""]
NATS = "nats per token"  # the unit of every metric that is made of log-probabilities


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them.

    Attributes:
        name: as it is logged; in a family's, `*` stands for one part, `**` for all that follows, `{a,b}` for a or b.
        meaning: a few words.
        unit: "" for a number without one.
        better: which direction is better for the level of a run; "" if neither is.
        worst: which single reading of a run is the worst, "largest" by absolute value; "" if none is.
        scale: "log" where runs are compared by their ratio, because single tokens move it by tens of times.
        when: "before" the guard judges the batch, "after" that (with or after the update), or with a "validation";
            "" where the members of a family differ.
        rare: may be absent for many steps, so that a rule waits for it.
        finite: the guard refuses to continue if it is NaN or infinite, with or without a rule.
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

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names of the family in full."""
        text = re.escape(self.name).replace(r"\*\*", ".*").replace(r"\*", "[^/]+")
        return re.compile(re.sub(r"\\\{(.+?)\\\}", lambda found: f"({found[1].replace(',', '|')})", text), re.DOTALL)


@dataclass(frozen=True)
class Section:
    """Metrics that are logged together.

    Attributes:
        logged: which part logs them and when, in a paragraph.
        override: the setting that makes a run log them.
    """

    title: str
    logged: str
    metrics: tuple[Metric, ...]
    override: str = ""
