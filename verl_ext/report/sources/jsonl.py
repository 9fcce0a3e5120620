"""Metrics of verl's file logger: one `{"step": int, "data": {name: value}}` a line."""

from pathlib import Path

from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.lines import JsonLines
from verl_ext.report.sources.table import Part, Table


class JsonlSource:
    def __init__(self, path: Path):
        self.files = (path,)
        # --run-dir of `verl-ext submit` calls every run's file metrics.jsonl
        self.name = path.resolve().parent.name.lstrip(".") if path.stem == "metrics" else path.stem
        self._lines = JsonLines(path, self._take, self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        self._table = Table(rows_are_units=True)

    def _take(self, record: object) -> bool:
        try:
            step, data = record["step"], record["data"]  # type: ignore[index]
        except (TypeError, KeyError):
            return False
        if not is_step(step) or type(data) is not dict:
            return False
        self._table.add(step, data)
        return True

    def refresh(self) -> bool:
        return self._lines.refresh()

    def run(self, which: int | None) -> Part:
        if not len(self._table):
            if self._lines.broken:
                raise ReportError('no line of it is {"step": int, "data": {...}}, which verl\'s file logger writes')
            raise ReportError("no complete step in this file; has the run finished its first step?")
        return self._table.run(which)

    def notes(self) -> tuple[str, ...]:
        return self._lines.note()
