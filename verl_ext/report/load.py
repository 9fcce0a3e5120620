"""Read the metrics that verl's file logger wrote: one `{"step": int, "data": {name: value}}` a line."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


class ReportError(ValueError):
    """The metrics cannot be read; the message is one line, names the file, and is meant for the user."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it, NaN where the value was not a number."""

    steps: np.ndarray  # int64, ascending, each step once
    values: np.ndarray  # float64, same length

    def finite(self) -> "Series":
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


@dataclass(frozen=True)
class Run:
    """Every numeric metric of a run by its name; `get` answers None where nothing finite was logged."""

    file: Path
    steps: np.ndarray  # every step that logged anything, ascending
    metrics: dict[str, Series] = field(repr=False)

    def get(self, name: str) -> Series | None:
        """The finite values of a metric."""
        series = self.metrics.get(name)
        if series is None:
            return None
        finite = series.finite()
        return finite if finite.steps.size else None

    def layers(self, name: str) -> dict[int, Series]:
        """`name/layer_00`, `name/layer_01`, ... by layer number; layers with nothing finite are left out."""
        prefix = f"{name}/layer_"
        keys = {key.removeprefix(prefix): key for key in self.metrics if key.startswith(prefix)}
        found = {int(number): self.get(key) for number, key in keys.items() if number.isdigit()}
        return {number: series for number, series in sorted(found.items()) if series is not None}


def find_metrics_file(run: Path) -> Path:
    """The file itself, or the only `.jsonl` file in a folder besides the guard's events."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise ReportError(f"{run}: no such file or folder")
    files = sorted(file for file in run.glob("*.jsonl") if not file.name.endswith(".guard.jsonl"))
    if not files:
        raise ReportError(f"{run}: no .jsonl file in this folder; add `file` to trainer.logger to get one")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ReportError(f"{run}: several .jsonl files in this folder; name one of {names}")
    return files[0]


def load_run(run: Path) -> Run:
    """Load a metrics file, or a folder's only one.

    A last line that was cut off by a crash or is still being written is ignored; a broken line before
    it is an error. A step may have several lines (verl logs a validation on its own line): they are
    merged, and the later value of a metric stands. NaN arrives as null, because verl writes with orjson.
    """
    file = find_metrics_file(Path(run))
    table: dict[str, dict[int, float]] = {}
    steps: set[int] = set()
    for step, data in _read_lines(file):
        steps.add(step)
        for name, value in data.items():
            number = _as_number(value)
            if number is not None:
                table.setdefault(name, {})[step] = number
    if not steps:
        raise ReportError(f"{file}: no complete step in this file; has the run finished its first step?")
    return Run(
        file=file,
        steps=np.array(sorted(steps), dtype=np.int64),
        metrics={name: _as_series(by_step) for name, by_step in table.items()},
    )


def _read_lines(file: Path) -> list[tuple[int, dict]]:
    # errors="replace": a last line that was cut inside a character must not make the file unreadable.
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ReportError(f"{file}: line {number} is not JSON ({error.msg})") from error
        match record:
            case {"step": int(step), "data": dict(data)}:
                rows.append((step, data))
            case _:
                raise ReportError(f'{file}: line {number} is not {{"step": int, "data": {{...}}}}')
    return rows


def _as_number(value: object) -> float | None:
    """A number, NaN for null, None for what is not a metric (text, lists)."""
    if value is None:
        return float("nan")
    return float(value) if isinstance(value, (int, float)) else None


def _as_series(by_step: dict[int, float]) -> Series:
    steps = sorted(by_step)
    return Series(np.array(steps, dtype=np.int64), np.array([by_step[step] for step in steps], dtype=np.float64))
