"""Run a command; when it ends or is interrupted, end every process it started, daemons included.

    python tools/clean_exit.py COMMAND [ARGUMENT ...]

Ray's daemons and vLLM's engine processes can outlive a driver that is interrupted. This process becomes their
parent when theirs dies (PR_SET_CHILD_SUBREAPER, Linux), so that none is out of its reach.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

import psutil

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 15  # for the driver to disconnect from Ray after Ctrl-C, before everything is killed


def kill_descendants() -> None:
    """Kills until none is left: a process may start another while it is being killed."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)


def main(command: list[str]) -> int:
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if command else 2
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER failed")
    # A session of its own: a terminal's Ctrl-C reaches only this process, which passes it on once, to all of them.
    driver = subprocess.Popen(command, start_new_session=True)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return driver.wait()
    except KeyboardInterrupt:
        print("interrupted: shutting Ray and vLLM down", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(PATIENCE_S)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the clean-up
        kill_descendants()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
