"""The tool of telling_tool.py, one call of which hangs for a while."""

import itertools
import time

from verl.tools.function_tool import get_function_tool

from tests.stack.telling_tool import double

CALL = 250  # some ten steps into a run
SECONDS = 60  # longer than it takes until a slow step is told, on a slow machine too

_calls = itertools.count()


def hanging_double(digit: int) -> str:
    if next(_calls) == CALL:
        time.sleep(SECONDS)
    return double(digit)


get_function_tool(double.__name__).fn = hanging_double
