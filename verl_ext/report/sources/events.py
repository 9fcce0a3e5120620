"""The guard's event log: one decision a line."""

from pathlib import Path
from typing import Any

from verl_ext.guard.state import Event
from verl_ext.printable import printable
from verl_ext.report.run import is_step
from verl_ext.report.sources.lines import JsonLines
from verl_ext.report.sources.table import Part

MOST_WORDS = 1000  # characters of a reason


class EventLog:
    def __init__(self, path: Path):
        self.path = path
        self._lines = JsonLines(path, self._take, self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        self._events: list[Event] = []

    def _take(self, record: object) -> bool:
        if not isinstance(record, dict) or not is_step(record.get("step")):
            return False
        words = {name: record.get(name, "") for name in ("rule", "signal", "action", "reason")}
        numbers: dict[str, Any] = {name: record.get(name) for name in ("value", "threshold")}
        if not all(isinstance(word, str) for word in words.values()):
            return False
        if not all(number is None or isinstance(number, (int, float)) for number in numbers.values()):
            return False
        shown: dict[str, Any] = {name: printable(" ".join(word.split()), MOST_WORDS) for name, word in words.items()}
        self._events.append(Event(step=record["step"], **shown, **numbers))
        return True

    def refresh(self) -> bool:
        return self._lines.refresh()

    def notes(self) -> tuple[str, ...]:
        return self._lines.note()

    def of(self, part: Part) -> tuple[Event, ...]:
        """The decisions of one run.

        No line says which run it is of. Where the log falls into as many parts of rising steps as there are runs, they
        are taken for theirs; else all is the last run's. A decision is left out when a later line of the same run has
        an earlier step (the run was resumed before it), and when its step's metrics were abandoned.
        """
        events = self._events
        if part.runs > 1:
            back = [at for at in range(1, len(events)) if events[at].step < events[at - 1].step]
            bounds = [0, *back, len(events)]
            if len(bounds) - 1 == part.runs:
                events = events[bounds[part.number - 1] : bounds[part.number]]
            elif part.number < part.runs:
                return ()
        gone = set(part.gone.tolist())
        standing: list[Event] = []
        for event in reversed(events):
            if not standing or event.step <= standing[-1].step:
                standing.append(event)
        return tuple(event for event in reversed(standing) if event.step not in gone)
