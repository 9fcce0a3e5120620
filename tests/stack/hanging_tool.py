"""The tool of recipes/cpu_tool, one call of which hangs for a while.

Agent loops run in the process that imports it: it tells there, too, how much of a second turn's routing came.
"""

import itertools
import time

from verl.tools.function_tool import get_function_tool

from recipes.cpu_tool.tool import double
from verl_ext.upstream.agent_loop import Turn

CALL, SECONDS = (
    250,
    60,
)  # some ten steps into a run; longer than it takes until a slow step is told, on a slow machine too

_calls = itertools.count()
joined = Turn.joined


def telling(turn, held, new):
    rows, memory = joined(turn, held, new)
    print(f"turn_routes: {held} rows were held and {len(new)} came, after {len(turn.tokens)} tokens", flush=True)
    return rows, memory


Turn.joined = telling


def hanging_double(digit: int) -> str:
    if next(_calls) == CALL:
        time.sleep(SECONDS)
    return double(digit)


get_function_tool(double.__name__).fn = hanging_double
