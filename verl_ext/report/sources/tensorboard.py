"""Event files of TensorBoard, as torch.utils.tensorboard writes them: one scalar per event.

Events and tensors are parsed by the tensorboard package. The records are read here, because its loader computes the
checksum of every record in Python (four times as long for 50,000 scalars), allocates as much memory as a damaged length
asks for, and silently stops at the first damaged record. Here only the checksum of the length is checked, which reveals
a damaged file; a damaged record does not parse.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_ext.report.files import READ_BYTES, is_regular, open_regular
from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.table import MetricTable, TableRun, Which

MOST_RECORD = 64 << 20  # bytes; those of scalars have some 100
HEADER, FOOTER = 12, 4  # length and its checksum; checksum of the record
EVENT_FILE = "tfevents"


class DamageError(Exception):
    """No record can be read from this point on."""


class TensorBoardSource:
    """One event file, or all in a folder by time. Each is one process's; a later one is a resumed or another run's."""

    def __init__(self, path: Path):
        try:
            from google.protobuf.message import DecodeError
            from tensorboard.compat.proto import event_pb2
        except ImportError as error:
            raise ReportError(
                f"{path}: these are TensorBoard's files; to read them, pip install tensorboard"
            ) from error
        self._parse, self._parse_error = event_pb2.Event.FromString, DecodeError
        self._path = path
        folder = path if path.is_dir() else path.parent
        self.name = folder.resolve().name
        self._start_over()

    def _start_over(self) -> None:
        self._table = MetricTable(rows_are_units=False)
        self._read: dict[Path, tuple[int, int, int]] = {}  # inode and size as it was read, offset
        self._damaged: dict[Path, int] = {}  # offset of the damage
        self._unreadable = 0

    @property
    def files(self) -> tuple[Path, ...]:
        if not self._path.is_dir():
            return (self._path,)
        files = [file for file in self._path.iterdir() if EVENT_FILE in file.name and is_regular(file)]
        return tuple(sorted(files))  # their names begin with the time, in ten digits

    def refresh(self) -> bool:
        files = self.files
        again = not self._only_last_grew(files)
        if again:
            self._start_over()
        changed = [self._read_on(file) for file in files]
        return again or any(changed)

    def _only_last_grew(self, files: tuple[Path, ...]) -> bool:
        """Returns True if reading on is enough: rows are in the order of the files, so no older one may have grown."""
        known = tuple(self._read)
        if known != files[: len(known)]:
            return False
        for file, (inode, size, offset) in self._read.items():
            status = file.stat()
            longer = file != known[-1] and status.st_size > size
            if longer or status.st_ino != inode or status.st_size < offset:
                return False
        return True

    def _read_on(self, file: Path) -> bool:
        """Reads what is new in a file; returns True if there was anything."""
        if new := file not in self._read:
            self._table.begin_unit()
        if file in self._damaged:
            return False
        status, start = file.stat(), 0 if new else self._read[file][2]
        offset = start
        step, data = 0, dict[str, object]()
        try:
            with open_regular(file) as opened:
                for record, end in _event_records(opened, offset):
                    offset = end
                    if (event := self._event(record)) is None:
                        self._unreadable += 1
                        continue
                    if event.step != step:
                        self._add(step, data)
                        step, data = event.step, {}
                    for value in event.summary.value:
                        if value.HasField("simple_value"):
                            data[value.tag] = value.simple_value
                        elif value.HasField("tensor") and (number := _tensor_scalar(value.tensor)) is not None:
                            data[value.tag] = number
        except DamageError:
            self._damaged[file] = offset
        self._add(step, data)
        self._read[file] = (status.st_ino, status.st_size, offset)
        return new or offset > start

    def _event(self, record: bytes | None) -> Any | None:
        """Returns the event; None if it cannot be read, or cannot belong to a step."""
        try:
            event = None if record is None else self._parse(record)
        except self._parse_error:
            return None
        return event if event is not None and is_step(event.step) else None

    def _add(self, step: int, data: dict[str, object]) -> None:
        if data:
            self._table.add(step, data)

    def run(self, which: Which) -> TableRun:
        return self._table.run(which, "no scalar in these event files; has the run finished its first step?")

    def notes(self) -> tuple[str, ...]:
        notes = [
            f"{file.name} is damaged at byte {offset}; the rest is left out" for file, offset in self._damaged.items()
        ]
        if self._unreadable:
            notes.append(f"{self._unreadable} events could not be read and are left out")
        return tuple(notes)


def _event_folder(folder: Path, files: Sequence[str], depth: int) -> list[Path]:
    return [folder] if any(EVENT_FILE in file and is_regular(folder / file) for file in files) else []


register_kind(
    Kind(
        title="a TensorBoard folder or event file",
        example="tensorboard_log/...",
        remarks="`trainer.logger=[console,tensorboard]`; seven digits",
        order=5,
        open=lambda path, which: TensorBoardSource(path),
        is_named=lambda path: EVENT_FILE in path.name,
        in_folder=_event_folder,
    )
)


def _event_records(file, offset: int) -> Iterator[tuple[bytes | None, int]]:
    """Yields (record, the offset after it) of each complete record from `offset` on; None if beyond MOST_RECORD."""
    file.seek(offset)
    buffer, at = b"", 0
    while True:
        size = HEADER
        if len(buffer) - at >= HEADER:
            length = _record_length(buffer[at : at + HEADER])
            size = HEADER + length + FOOTER
            if len(buffer) - at >= size:
                offset += size
                yield buffer[at + HEADER : at + HEADER + length], offset
                at += size
                continue
            if length > MOST_RECORD:
                if (offset := offset + size) > os.fstat(file.fileno()).st_size:
                    return
                file.seek(offset)
                buffer, at = b"", 0
                yield None, offset
                continue
        block = file.read(max(READ_BYTES, size))
        if not block:
            return  # the rest is cut, or still being written
        buffer, at = buffer[at:] + block, 0


@lru_cache(maxsize=4096)
def _record_length(header: bytes) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length, checksum = struct.unpack("<QI", header)
    if masked_crc32c(header[:8]) != checksum:
        raise DamageError
    return length


def _tensor_scalar(tensor) -> float | None:
    from tensorboard.util import tensor_util

    if any(dimension.size != 1 for dimension in tensor.tensor_shape.dim):  # any other would be built, however large
        return None
    try:
        values = tensor_util.make_ndarray(tensor)
    except (LookupError, OverflowError, TypeError, ValueError):  # an unknown type, or no value
        return None
    return float(values.item()) if values.size == 1 and values.dtype.kind in "biuf" else None
