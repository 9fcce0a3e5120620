"""A text file that a run may still write to: its complete lines once each, over any number of refreshes."""

import os
from collections.abc import Callable
from pathlib import Path

from verl_ext.report.files import open_regular

BLOCK = 1 << 20
MOST_LINE = 16 << 20  # bytes; a line of 100,000 metrics has less than half
FINGERPRINT = 64


class GrowingFile:
    """Reads a file on from where the last refresh ended. Time is linear in the file, memory in a line.

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
        """Reads on; returns whether there was anything new."""
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
            while block := file.read(BLOCK):
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
        self._before = (self._before + text[-FINGERPRINT:])[-FINGERPRINT:]
