"""W&B's local files: `wandb/run-TIME-ID/run-ID.wandb`, `offline-run-TIME-ID` where it ran offline.

One process of training writes one. A row of its history goes to the file when the next step begins.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from verl_ext.printable import printable
from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.run import is_step
from verl_ext.report.sources.store import Process
from verl_ext.report.sources.table import Table
from verl_ext.report.sources.wandb_records import messages

FILE = ".wandb"
# verl counts in the first; the second is W&B's own, which goes on where something else logs too.
STEP, WANDB_STEP = "training/global_step", "_step"
NOT_FINITE = {b"NaN": math.nan, b"Infinity": math.inf, b"-Infinity": -math.inf}
MOST_NESTED = 8


class WandbFolder:
    """One such file, those in a folder of one run, or in a folder of run folders."""

    what = "folder"

    def __init__(self, path: Path):
        self._path = path
        if not path.is_dir():
            self.what = "file"

    def files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        found = [*self._path.glob(f"*{FILE}")] or [*self._path.glob(f"*/*{FILE}")]
        latest = {file for file in found if file.parent != self._path and file.parent.is_symlink()}  # latest-run
        return sorted(file for file in found if file not in latest and is_regular(file))

    def state(self) -> Hashable:
        statuses = [(file, file.stat()) for file in self.files()]
        return tuple((file, status.st_ino, status.st_size, status.st_mtime_ns) for file, status in statuses)

    def processes(self) -> list[Process]:
        return [_process(file) for file in self.files()]


def _process(file: Path) -> Process:
    """What the file begins with: whose it is, and its first row."""
    name, project, started, first = file.stem.removeprefix("run-"), "", (0, 0), None
    with open_regular(file) as opened:
        for message in messages(opened):
            if message is None:
                continue
            if message.HasField("run"):
                run = message.run
                name, project = _text(run.display_name) or _text(run.run_id) or name, _text(run.project)
                started = run.start_time.seconds, run.start_time.nanos
            elif message.HasField("history") and (first := _row(message.history)[0]) is not None:
                break
    return Process(name, project, (*started, file.parent.name), first, (file,), lambda table: _read(file, table))


def _read(file: Path, table: Table) -> Iterable[str]:
    unreadable = elsewhere = 0
    with open_regular(file) as opened:
        for message in messages(opened):
            if message is None:
                unreadable += 1
            elif message.HasField("history"):
                step, own, data = _row(message.history)
                if step is None:
                    unreadable += 1
                else:
                    elsewhere += step != own
                    table.add(step, data)
    if unreadable:
        yield f"records of {file.name} that could not be read: {unreadable}; left out"
    if elsewhere:
        yield f"rows of {file.name} in which W&B counted other steps than verl: {elsewhere}; {STEP} stands"


def _row(history: Any) -> tuple[int | None, object, dict[str, object]]:
    """The step of a row, W&B's own, and the numbers by name; of what is nested, `outer.inner` as W&B shows it."""
    # An empty value is no metric. It is dropped before anything is made of it: it takes two bytes, so a file may hold
    # millions, and the error of parsing one costs more than the rest of the row.
    items = [(item, text) for item in history.item if (text := item.value_json)]
    keys = [tuple(item.nested_key) or (item.key,) for item, _ in items]
    media = {key[:-1] for key in keys if key[-1] == b"_type"}  # a table, an image: its size is no metric
    data: dict[str, object] = {}
    for key, value in zip(keys, _values([text for _, text in items]), strict=True):
        if len(key) > MOST_NESTED or (media and _within(key, media)):
            continue
        if isinstance(value, dict):
            data.update(_flat(_name(key), value))
        elif not isinstance(value, (str, list)):
            data[_name(key)] = value
    own = data.pop(WANDB_STEP, None)
    if history.HasField("step"):
        own = history.step.num
    return next(filter(is_step, (data.get(STEP), own)), None), own, data


def _within(key: tuple[bytes, ...], outer: set[tuple[bytes, ...]]) -> bool:
    return any(key[:length] in outer for length in range(1, len(key)))


def _values(texts: list[bytes]) -> list[object]:
    """JSON values; together they are read in a fifth of the time. What JSON does not have is read one by one."""
    try:
        values = orjson.loads(b"[" + b",".join(texts) + b"]")
        if len(values) == len(texts):
            return values
    except orjson.JSONDecodeError:
        pass
    return [_value(text) for text in texts]


def _value(text: bytes) -> object:
    """Text where it cannot be read."""
    if text in NOT_FINITE:
        return NOT_FINITE[text]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return ""


def _flat(name: str, outer: dict) -> Iterator[tuple[str, object]]:
    """What is in dictionaries within each other, but for text, lists and media."""
    inside = [(name, outer, 1)]
    while inside:
        name, outer, depth = inside.pop()
        if depth >= MOST_NESTED or "_type" in outer:
            continue
        before = printable(name)  # a long name before many others would be copied for each
        for key, value in outer.items():
            if isinstance(value, dict):
                inside.append((f"{before}.{key}", value, depth + 1))
            elif not isinstance(value, (str, list)):
                yield f"{before}.{key}", value


@lru_cache(maxsize=4096)
def _name(key: tuple[bytes, ...]) -> str:
    return ".".join(map(_text, key))


def _text(text: bytes) -> str:
    return text.decode("utf-8", errors="surrogateescape")
