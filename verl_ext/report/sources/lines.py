"""JSON lines of a file that may still be written to, may have been cut by a crash, and may be replaced."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import orjson

BLOCK = 1 << 20
FINGERPRINT = 64
RECORD = re.compile(r'\{\s*"step"\s*:')
SPACE = re.compile(r"\s*")
DECODER = json.JSONDecoder()


class JsonLines:
    """Gives every record to `take` once, over any number of refreshes.

    The last line is left for the next refresh while it is cut. A line of which a part cannot be read gives the records
    that can: a crash leaves half a line, and the logger of a resumed run may go on behind it.

    Args:
        take: False for a record that it does not understand.
        start_over: called when the file is another one than before.

    Attributes:
        broken: lines with something unreadable in them, except for a cut last one.
        first_broken: the number of the first, from 1.
    """

    def __init__(self, path: Path, take: Callable[[object], bool], start_over: Callable[[], None]):
        self.path = path
        self._take = take
        self._start_over = start_over
        self._reset()

    def _reset(self) -> None:
        self.broken = self.first_broken = 0
        self._lines = 0
        self._offset = 0
        self._inode: int | None = None
        self._before = b""  # the bytes before the offset

    def note(self) -> tuple[str, ...]:
        if not self.broken:
            return ()
        if self.broken == 1:
            return (f"line {self.first_broken} of {self.path.name} could not be read and is left out",)
        first = f"the first is line {self.first_broken}"
        return (f"{self.broken} lines of {self.path.name} could not be read and are left out ({first})",)

    def refresh(self) -> bool:
        """Read on; whether there was anything new."""
        with open(self.path, "rb", buffering=0) as file:
            again = self._replaced(file.fileno())
            if again:
                self._reset()
                self._start_over()
            self._inode = os.fstat(file.fileno()).st_ino
            start = self._offset
            file.seek(start)
            parts: list[bytes] = []  # joined at a newline only: a file without any would be copied for every block
            while block := file.read(BLOCK):
                end = block.rfind(b"\n")
                if end < 0:
                    parts.append(block)
                else:
                    self._read_lines(b"".join([*parts, block[: end + 1]]))
                    parts = [block[end + 1 :]]
            self._read_tail(b"".join(parts))
        return again or self._offset > start

    def _replaced(self, file: int) -> bool:
        # A file that was emptied and has grown past the offset since is told by the bytes before the offset.
        status = os.fstat(file)
        if self._inode is None:
            return False
        before = os.pread(file, len(self._before), self._offset - len(self._before))
        return status.st_ino != self._inode or status.st_size < self._offset or before != self._before

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._before = (self._before + text[-FINGERPRINT:])[-FINGERPRINT:]

    def _read_lines(self, lines: bytes) -> None:
        for line in lines[:-1].split(b"\n"):
            self._lines += 1
            self._read(line)
        self._advance(lines)

    def _read(self, line: bytes) -> None:
        try:
            if self._take(orjson.loads(line)):
                return
        except orjson.JSONDecodeError:
            if not line.strip():
                return
        records, whole = _records(line)
        taken = [self._take(record) for record in records]
        if not whole or not all(taken):
            self.broken += 1
            self.first_broken = self.first_broken or self._lines

    def _read_tail(self, tail: bytes) -> None:
        """A last line without a newline is read as far as it is complete: the braces of a record close."""
        while (end := _end_of_record(tail)) and self._take(_records(tail[:end])[0][0]):
            self._advance(tail[:end])
            tail = tail[end:]


def _records(line: bytes) -> tuple[list[object], bool]:
    """The JSON values in a line, and whether they are all there is in it. Slow, and reads NaN, which orjson refuses."""
    text = line.decode("utf-8", errors="replace").rstrip()
    records, whole, position = [], True, _behind_space(text, 0)
    while position < len(text):
        try:
            record, end = DECODER.raw_decode(text, position)
            records.append(record)
            position = _behind_space(text, end)
        except (ValueError, RecursionError):
            whole = False
            found = RECORD.search(text, position + 1)
            position = found.start() if found else len(text)
    return records, whole


def _end_of_record(tail: bytes) -> int:
    """How many bytes the first JSON value takes; 0 when it is cut."""
    text = tail.decode("utf-8", errors="surrogateescape")
    try:
        end = DECODER.raw_decode(text, _behind_space(text, 0))[1]
    except (ValueError, RecursionError):
        return 0
    return len(text[:end].encode("utf-8", errors="surrogateescape"))


def _behind_space(text: str, position: int) -> int:
    return SPACE.match(text, position).end()  # type: ignore[union-attr]
