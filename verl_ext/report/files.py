"""Files in folders that others can write to: only regular ones are read, and nothing is written through a link."""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
