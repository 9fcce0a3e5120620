"""The tool of telling_tool.py, one call of which hangs until the run has reported it."""

import itertools
import time

from verl.tools.function_tool import get_function_tool

from tests.stack.switching import hang_report
from tests.stack.telling_tool import double

CALL = 5  # in the first step: later ones are reported after four times as long as the others took
SECONDS = 120  # without a report, the call ends by itself, and the test fails

_calls = itertools.count()


def hanging_double(digit: int) -> str:
    if next(_calls) == CALL:
        end = time.monotonic() + SECONDS
        while not hang_report().exists() and time.monotonic() < end:
            time.sleep(0.2)
        hang_report().unlink(missing_ok=True)
    return double(digit)


get_function_tool(double.__name__).fn = hanging_double
