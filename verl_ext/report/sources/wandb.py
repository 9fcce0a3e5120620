"""W&B's local files: `wandb/run-TIME-ID/run-ID.wandb`, `offline-run-TIME-ID` if it ran offline.

Each training process writes one, online and offline. A row of its history is written when the next step begins. After
seven bytes of identification, the file has LevelDB's log format (chunks in blocks of 32 KiB, a record is one or
several) with zlib's CRC-32. Each record is a message of wandb.proto. The log itself is read here, because wandb (0.31)
no longer has a reader in Python.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.store import Process, StoreSource
from verl_ext.report.sources.table import MetricTable, flat

ENDING = ".wandb"
# verl's steps are in the first; the second is W&B's own, which also counts other logging.
STEP, WANDB_STEP = "training/global_step", "_step"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MOST_NESTED = 8
FIRST_BYTES = b":W&B\xe1\xbe\0"  # name, magic number, version
BLOCK_BYTES = 1 << 15
CHUNK = struct.Struct("<IHB")  # checksum of kind and data, length of the data, kind
FULL, FIRST, LAST = 1, 2, 4  # kinds of chunks; 3 is between a record's first and last
MOST_RECORD = 16 << 20  # bytes; a row of 100,000 metrics has less than half


class WandbFolder:
    """One W&B file, the files in a folder of one run, or those in a folder of run folders."""

    def __init__(self, path: Path):
        self._path = path

    def files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        found = [*self._path.glob(f"*{ENDING}")] or [*self._path.glob(f"*/*{ENDING}")]
        latest = {file for file in found if file.parent != self._path and file.parent.is_symlink()}  # latest-run
        return sorted(file for file in found if file not in latest and is_regular(file))

    def processes(self) -> list[Process]:
        return [_wandb_process(file) for file in self.files()]


def _wandb_folder(folder: Path, files: Sequence[str], depth: int) -> list[Path]:
    """Returns the folder of all runs, but none above the one that was named."""
    found = any(file.endswith(ENDING) and is_regular(folder / file) for file in files)
    return [folder if depth == 0 else folder.parent] if found else []


register_kind(
    Kind(
        title="a local folder of W&B, or one of its .wandb files",
        example="wandb, wandb/run-*, wandb/latest-run",
        remarks="`trainer.logger=[console,wandb]`, online or offline",
        order=2,
        open=lambda path, which: StoreSource(WandbFolder(path), path, which),
        is_named=lambda path: path.suffix.lower() == ENDING,
        in_folder=_wandb_folder,
        owns_folder=True,
    )
)


def _wandb_process(file: Path) -> Process:
    """Reads the beginning of the file: its run, and its first row."""
    name, project, started, first = file.stem.removeprefix("run-"), "", (0, 0), None
    with open_regular(file) as opened:
        for message in _wandb_records(opened):
            if message is None:
                continue
            if message.HasField("run"):
                run = message.run
                name, project = run.display_name or run.run_id or name, run.project
                started = run.start_time.seconds, run.start_time.nanos
            elif message.HasField("history") and (first := _history_row(message.history)[0]) is not None:
                break
    return Process(name, project, (*started, file.parent.name), first, (file,), lambda table: _add_history(file, table))


def _add_history(file: Path, table: MetricTable) -> Iterable[str]:
    unreadable = elsewhere = 0
    with open_regular(file) as opened:
        for message in _wandb_records(opened):
            if message is None:
                unreadable += 1
            elif message.HasField("history"):
                step, own, data = _history_row(message.history)
                if step is None:
                    unreadable += 1
                else:
                    elsewhere += step != own
                    table.add(step, data)
    if unreadable:
        yield f"records of {file.name} that could not be read: {unreadable}; left out"
    if elsewhere:
        yield f"rows of {file.name} in which W&B counted other steps than verl: {elsewhere}; {STEP} is used"


def _history_row(history: Any) -> tuple[int | None, object, dict[str, object]]:
    """Returns a row's step, W&B's own step, and the numbers by name; nested ones as `outer.inner`, as W&B does."""
    # An empty value is not a metric. It is dropped before parsing: it takes two bytes, so a file may have millions, and
    # the error of parsing one costs more than the rest of the row.
    items = [(item, text) for item in history.item if (text := item.value_json)]
    keys = [tuple(item.nested_key) or (item.key,) for item, _ in items]
    media = {key[:-1] for key in keys if key[-1] == "_type"}  # a table, an image: its size is not a metric
    data: dict[str, object] = {}
    for key, value in zip(keys, _json_values([text for _, text in items]), strict=True):
        inside = media and any(key[:length] in media for length in range(1, len(key)))
        if inside or len(key) > MOST_NESTED:
            continue
        found = flat({".".join(key): value}, joint=".")
        data.update((name, each) for name, each in found if not isinstance(each, (str, list)))
    own = data.pop(WANDB_STEP, None)
    if history.HasField("step"):
        own = history.step.num
    return next(filter(is_step, (data.get(STEP), own)), None), own, data


def _json_values(texts: list[str]) -> list[object]:
    """Parses JSON values, all at once because that takes a fifth of the time; one by one if one is not JSON."""
    try:
        values = orjson.loads(f"[{','.join(texts)}]")
        if len(values) == len(texts):
            return values
    except orjson.JSONDecodeError:
        pass
    return [_json_value(text) for text in texts]


def _json_value(text: str) -> object:
    """Parses a JSON value; returns "", which is no metric, if it cannot be read."""
    if text in NOT_FINITE:
        return NOT_FINITE[text]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return ""


def _wandb_records(file: BinaryIO) -> Iterator[Any]:
    """Yields each `Record` of the file; None for one that cannot be read, or is beyond MOST_RECORD.

    A cut last record is left out: it may still be being written.

    Raises:
        ReportError: this is not W&B's file, or wandb is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise ReportError("this is W&B's file; to read it, pip install wandb") from error
    for record in _log_records(file):
        try:
            yield None if record is None else Record.FromString(record)
        except DecodeError:
            yield None


def _log_records(file: BinaryIO) -> Iterator[bytes | None]:
    block = file.read(BLOCK_BYTES)
    if not FIRST_BYTES.startswith(block[: len(FIRST_BYTES)]):
        raise ReportError("this is not a file of W&B: its first bytes differ")
    at = len(FIRST_BYTES)
    parts: list[bytes] | None = None  # of the record that has begun
    size = 0
    while block:
        while at + CHUNK.size <= len(block):
            checksum, length, kind = CHUNK.unpack_from(block, at)
            start, end = at + CHUNK.size, at + CHUNK.size + length
            if end > len(block) and len(block) < BLOCK_BYTES:
                return  # the rest is cut, or still being written
            if not FULL <= kind <= LAST or zlib.crc32(block[at + CHUNK.size - 1 : end]) != checksum:
                parts = None
                yield None
                break  # the next block can be read again
            data, at = block[start:end], end
            if kind in (FULL, FIRST):
                if parts is not None:  # the one before has no end
                    yield None
                parts, size = [], 0
            elif parts is None:  # the rest of a record that could not be read
                continue
            parts.append(data)
            size += length
            if size > MOST_RECORD:
                parts = None
                yield None
            elif kind in (FULL, LAST):
                yield b"".join(parts)
                parts = None
        block, at = file.read(BLOCK_BYTES) if len(block) == BLOCK_BYTES else b"", 0
