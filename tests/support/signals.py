"""Signals in the processes that tests start."""

import signal


def heeds_ctrl_c() -> None:
    """A shell starts what it puts in the background deaf to SIGINT; the tests may be among it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
