"""The tool of recipes/cpu_tool, one call of which hangs for a while."""

import itertools
import time

from verl.tools.function_tool import get_function_tool

from recipes.cpu_tool.tool import double

CALL, SECONDS = 60, 25  # in the first steps of a run; longer than a look at a slow step takes to come

_calls = itertools.count()


def hanging_double(digit: int) -> str:
    if next(_calls) == CALL:
        time.sleep(SECONDS)
    return double(digit)


get_function_tool(double.__name__).fn = hanging_double
