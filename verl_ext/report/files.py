"""Reads and writes files that others can write to: only regular files are read, a growing file line by line from where
the last read ended, and nothing is written through a link."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 1 << 20
MOST_LINE = 16 << 20  # bytes; a line of 100,000 metrics has less than half
FINGERPRINT_BYTES = 64
# Kinds of things that are not a file.
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def not_a_file(path: Path, mode: int) -> OSError:
    """Returns an error that names the kind of thing, by its `st_mode`."""
    what = KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.EINVAL, f"this is {what}, not a file", str(path))


def is_regular(path: Path) -> bool:
    """Returns True for a regular file, or a link to one; False if the name cannot be looked up at all."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # too long a name, no permission; a NUL in it
        return False


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading without waiting: a FIFO without a writer would block, and a device may have no end.

    Raises:
        OSError: it does not exist, may not be read, or is not a regular file.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        raise not_a_file(path, mode)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(mode := os.fstat(file).st_mode):  # it has been replaced meanwhile
        os.close(file)
        raise not_a_file(path, mode)
    return open(file, "rb")


def fingerprint(files: Iterable[Path]) -> tuple[object, ...]:
    """Returns a value that changes when a file was written to, replaced, added or removed."""
    statuses = [(file, os.stat(file)) for file in files]
    return tuple((file, status.st_ino, status.st_size, status.st_mtime_ns) for file, status in statuses)


class GrowingFile:
    """Continues to read a file where the last refresh ended. Time is linear in the file, memory in a line.

    Args:
        take_lines: called with whole lines, each with its newline. Its second argument is True if the first of them is
            the end of a line beyond MOST_LINE, whose beginning was skipped.
        take_tail: called with what follows the last newline; returns how many of its bytes were complete. The others
            are given again at the next refresh, with what has followed them.
        start_over: called when the file has been replaced.
    """

    def __init__(
        self,
        path: Path,
        take_lines: Callable[[bytes, bool], None],
        take_tail: Callable[[bytes], int],
        start_over: Callable[[], None],
    ):
        self.path = path
        self._take_lines, self._take_tail, self._start_over = take_lines, take_tail, start_over
        self._reset()

    def _reset(self) -> None:
        self._skipping = False  # the rest of a line that is too long
        self._offset = 0
        self._inode: int | None = None
        self._before = b""  # the bytes before the offset

    def refresh(self) -> bool:
        """Reads what is new; returns True if there was anything."""
        with open_regular(self.path) as file:
            again = self._replaced(file.fileno())
            if again:
                self._reset()
                self._start_over()
            self._inode = os.fstat(file.fileno()).st_ino
            start = self._offset
            file.seek(start)
            parts: list[bytes] = []  # joined only at a newline: a file without one would be copied for every block
            held = 0
            while block := file.read(READ_BYTES):
                end = block.rfind(b"\n") + 1
                if end:
                    lines = b"".join([*parts, block[:end]])
                    self._take_lines(lines, self._skipping)
                    self._skipping = False
                    self._advance(lines)
                    parts, held, block = [], 0, block[end:]
                parts.append(block)
                held += len(block)
                if held > MOST_LINE or self._skipping:
                    self._skipping = True
                    self._advance(b"".join(parts))
                    parts, held = [], 0
            tail = b"".join(parts)
            self._advance(tail[: self._take_tail(tail)])
        return again or self._offset > start

    def _replaced(self, file: int) -> bool:
        # The bytes before the offset reveal a file that was emptied and has grown past the offset since.
        status = os.fstat(file)
        if self._inode is None:
            return False
        before = os.pread(file, len(self._before), self._offset - len(self._before))
        return status.st_ino != self._inode or status.st_size < self._offset or before != self._before

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._before = (self._before + text[-FINGERPRINT_BYTES:])[-FINGERPRINT_BYTES:]


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """Writes a file in one step: a reader must never see half of it.

    An existing file is replaced; a link itself is replaced, not its target. A failed write leaves nothing.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        # O_EXCL does not follow a link with this name.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as out:
            yield out
        temporary.replace(file)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(file)  # the user's, not the temporary one
        raise
