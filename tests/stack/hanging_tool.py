"""The tool of telling_tool.py, one call of which hangs until it is reported."""

import functools
import itertools
import threading

from verl.tools.function_tool import get_function_tool

from tests.stack.telling_tool import double
from verl_ext.trainer import watch

CALL = 250  # some ten steps into a run
SECONDS = 60  # if nobody reports it: longer than that takes on a slow machine

_calls, _reported = itertools.count(), threading.Event()
places = watch.places


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
