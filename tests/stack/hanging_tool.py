"""The tool of recipes/cpu_tool, one call of which hangs until it is reported.

Agent loops run in the process that imports it. It prints, too, how much of a second turn's routing came.
"""

import functools
import itertools
import threading

from verl.tools.function_tool import get_function_tool

from recipes.cpu_tool.tool import double
from verl_ext.trainer import watch
from verl_ext.upstream.agent_loop import Turn

CALL = 250  # some ten steps into a run
SECONDS = 60  # if nobody reports it: longer than that takes on a slow machine

_calls, _reported = itertools.count(), threading.Event()
joined, places = Turn.joined, watch.places


def telling(turn, held, new):
    rows, memory = joined(turn, held, new)
    print(f"turn_routes: {held} rows were held and {len(new)} came, after {len(turn.tokens)} tokens", flush=True)
    return rows, memory


Turn.joined = telling


def hanging_double(digit: int) -> str:
    if next(_calls) == CALL:
        _reported.wait(SECONDS)
    return double(digit)


@functools.wraps(places)  # by whose name the watch has it called in this process
def places_and_go_on(actor):
    found = places(actor)
    if any(place.startswith(hanging_double.__name__) for place in found):
        _reported.set()
    return found


watch.places = places_and_go_on
get_function_tool(double.__name__).fn = hanging_double
