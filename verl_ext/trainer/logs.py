"""The files of lines that a run writes next to each other: metrics, the guard's events, trajectories.

A file keeps all of its lines: after a crash in the middle of one, in a resumed run, on a full disk.
verl's file logger empties its file whenever it is opened; here a resumed run continues it.
"""

import contextlib
import os
from pathlib import Path

from verl_ext.base.names import metrics_path
from verl_ext.base.patching import patch


def keep_metrics(*, resume: bool) -> None:
    """Gives verl's file logger a file that a resumed run continues, and that a full disk cannot break."""
    from verl.utils import tracking  # imports torch, which the lab and the watch on actors do without

    class KeepingFileLogger(tracking.FileLogger):
        def __init__(self, project_name: str, experiment_name: str):
            self.filepath = metrics_path(project_name, experiment_name)
            print(f"verl_ext: metrics go to {self.filepath.absolute()}", flush=True)
            self.fp = LineFile(self.filepath, resume=resume)  # verl's log() writes whole lines

    patch("keep_metrics", tracking, "FileLogger", KeepingFileLogger)


class LineFile:
    """Appends whole lines, each written at once. Lines that a full disk refuses are kept and tried again with the next
    line.

    Args:
        path: opened, and created with its folder.
        resume: continue after the last complete line; else start empty.
    """

    def __init__(self, path: str | os.PathLike, *, resume: bool):
        self.path = Path(path)
        self._place = self.path.absolute()  # the process may change its folder
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._place, os.O_RDWR | os.O_CREAT | (0 if resume else os.O_TRUNC), 0o644)
        self._pending: list[bytes] = []
        self._told = False
        self._end = _end_of_whole_lines(self._file) if resume else 0
        with contextlib.suppress(OSError):  # a device cannot be cut
            os.ftruncate(self._file, self._end)

    def write(self, lines: bytes) -> None:
        """Appends text that ends with a newline. A failed write raises nothing: the first one is printed."""
        self._pending.append(lines)
        try:
            while self._pending:
                self._append(self._pending[0])
                self._pending.pop(0)
        except OSError as error:
            if not self._told:
                self._told = True
                say(
                    f"{self.path} cannot be written ({error.strerror}): its lines are kept in memory and written when "
                    "there is room again; the run continues"
                )
        else:
            self._told = False

    @property
    def waiting(self) -> bool:
        """True if lines wait for room."""
        return bool(self._pending)

    def close(self) -> None:
        if self._file < 0:
            return
        self.write(b"")
        if lost := len([lines for lines in self._pending if lines]):
            say(f"{self.path}: {lost} lines could not be written and are lost")
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # a network file system reports a full disk here, as the line above did
            os.close(file)

    def _append(self, lines: bytes) -> None:
        written = 0
        try:
            while written < len(lines):
                written += os.pwrite(self._file, lines[written:], self._end + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)  # part of a line would make the file unreadable
            raise
        self._end += written


def say(sentence: str) -> None:
    """Prints a line as this plugin, and ignores a failure."""
    with contextlib.suppress(OSError):  # the console may be on the same full disk
        print(f"verl_ext: {sentence}", flush=True)


def _end_of_whole_lines(file: int) -> int:
    """Returns the offset after the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - 65536, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
