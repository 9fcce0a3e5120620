"""Writes a part's results, one line of JSON at a time, so that a part that is stopped keeps those that it has."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

# Unit of a figure that is a ratio of two times, or a share.
TIMES, SHARE = "x", "share"


@dataclass(frozen=True)
class Place:
    """The device and the sizes that a part runs with.

    Attributes:
        device: "cuda", or "cpu" for a dry run.
        tiny: whether sizes are small enough for seconds on a CPU, and in Triton's interpreter.
    """

    device: str
    tiny: bool

    @property
    def repeats(self) -> int:
        """The number of timed calls of each function."""
        return 2 if self.tiny else 15


class Record:
    """Writes to an open file; `case` names the group of lines that follow, such as a size or a model."""

    def __init__(self, out: TextIO):
        self._out, self.case = out, ""

    @contextmanager
    def trying(self, case: str) -> Iterator[None]:
        """Runs one case; if it raises, this is recorded as a failed check, and the next case runs."""
        self.case = case
        try:
            yield
        except Exception:
            self.check("runs to its end", False, traceback.format_exc())

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Records a condition that must hold; if it does not, the part has failed, but continues."""
        self._write(kind="check", name=name, passed=bool(passed), detail=detail)

    def figure(
        self, name: str, repeats: Sequence[float], unit: str, *, at_most: float | None = None, note: str = ""
    ) -> None:
        """Records a measured quantity, with every repeat; `at_most` is the aim, if there is one."""
        self._write(kind="figure", name=name, repeats=[*repeats], unit=unit, at_most=at_most, note=note)

    def times(self, spent: Mapping[str, Sequence[float]]) -> None:
        """Records the seconds of each call, in milliseconds."""
        for name, every in spent.items():
            self.figure(name, [1000 * s for s in every], "ms")

    def ratio(
        self, spent: Mapping[str, Sequence[float]], one: str, other: str, *, at_most: float | None = None
    ) -> None:
        """Records the seconds of a call over those of another, repeat by repeat."""
        ratios = [a / b for a, b in zip(spent[one], spent[other], strict=True)]
        self.figure(f"{one} / {other}", ratios, TIMES, at_most=at_most)

    def note(self, text: str) -> None:
        """Records what a reader of the figures has to know: stand-ins that were used, what was left out and why."""
        self._write(kind="note", text=text)

    def _write(self, **line: object) -> None:
        self._out.write(json.dumps({"case": self.case, **line}) + "\n")
        self._out.flush()
