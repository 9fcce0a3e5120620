"""The description of a metric."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Scale = Literal["linear", "log"]
Better = Literal["higher", "lower", ""]
Worst = Literal["highest", "lowest", "largest", ""]
When = Literal["before", "after", "validation", ""]


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them.

    Attributes:
        name: as it is logged; in a family's, `*` stands for one part, `**` for all that follows, `{a,b}` for a or b.
        meaning: in a few words.
        unit: "" for a number without one.
        better: which way the level of a run is better; "" where neither is.
        worst: which single reading is the worst of a run, "largest" by its size; "" where none is.
        scale: "log" where runs are compared by their ratio, because single tokens move it by tens of times.
        when: "before" the guard judges the batch, "after" that, with the update or behind it, or with a "validation";
            "" where the members of a family differ.
        rare: may stay away for many steps, so that a rule may wait for it.
        finite: where it is NaN or infinite, the guard does not go on, rule or none.
        label: in tables.
        verls: what verl itself logs of the same quantity.
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
    verls: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names of the family in full."""
        text = re.escape(self.name).replace(r"\*\*", ".*").replace(r"\*", "[^/]+")
        return re.compile(re.sub(r"\\\{(.+?)\\\}", lambda found: f"({found[1].replace(',', '|')})", text), re.DOTALL)


@dataclass(frozen=True)
class Section:
    """Metrics that come together.

    Attributes:
        logged: by whom and with what, in a paragraph.
        override: makes a run log them.
        of_gap: whether they tell of the gap between the engines, or of what the guard does about it.
    """

    title: str
    logged: str
    metrics: tuple[Metric, ...]
    override: str = ""
    of_gap: bool = False
