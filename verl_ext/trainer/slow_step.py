"""Tell what a step that takes long waits for: verl has no timeout for a tool or a reward function, and says nothing."""

import asyncio
import gc
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import ray

TIMES = 3  # as long as steps usually take
MOST = 4  # places that are told of each role
TIMEOUT_S = 20.0
VERL = str(Path(getattr(find_spec("verl"), "origin", None) or "/no verl").parent) + os.sep
OURS = f"{Path(__file__).parents[1]}{os.sep}"
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def places(actor: Any) -> list[str]:
    """Inside an actor: where each of its asyncio tasks and threads stands, as `function (file:line)`.

    Of a task or thread, that is the innermost frame in code that is not installed, which is the user's; of a task, else
    the innermost one in verl's. What is in neither is left out.
    """
    # Ray calls this beside the thread of the actor's event loop, for which all_tasks would ask.
    # By type: to isinstance, a weak proxy is what it stands for, and raises where that is gone.
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]
    found = [_place(list(_awaited(task.get_coro())), (_of_the_user, _of_verl)) for task in tasks]
    found += [_place(list(_called(frame))[::-1], (_of_the_user,)) for frame in sys._current_frames().values()]
    return [place for place in found if place]


class SlowStep:
    """Looked at now and then, tells of a step that takes longer than `after_s` and than TIMES the median step before.

    It does so again whenever the time has doubled.

    Args:
        step: the number of the step that runs.
        workers: role -> the actors that run the user's tools and rewards; called when there is something to tell.
        after_s: seconds; None never tells.
    """

    def __init__(
        self, step: Callable[[], int], workers: Callable[[], Mapping[str, Iterable[Any]]], after_s: float | None
    ):
        self._step, self._workers, self._after_s = step, workers, after_s
        self._number, self._began, self._told = -1, 0.0, 0.0
        self._taken: list[float] = []

    def look(self, now: float) -> str:
        """What there is to say at `now`, seconds of a clock that only goes forward; "" for nothing."""
        if (number := self._step()) != self._number:
            if self._number >= 0:
                self._taken.append((now - self._began) / (number - self._number))
            self._number, self._began, self._told = number, now, 0.0
        taken, usual = now - self._began, median(self._taken) if self._taken else 0.0
        if self._after_s is None or taken <= max(self._after_s, TIMES * usual, 2 * self._told):
            return ""
        self._told = taken
        before = f" (usually {_duration(usual)})" if self._taken else ""
        return f"step {number} has been going for {_duration(taken)}{before}{_waits(self._workers())}"


def _waits(workers: Mapping[str, Iterable[Any]]) -> str:
    """Where the actors of each role stand, in words. All are asked at once."""
    asked = {role: [actor.__ray_call__.remote(places) for actor in actors] for role, actors in workers.items()}
    if everything := [ref for refs in asked.values() for ref in refs]:
        ray.wait(everything, num_returns=len(everything), timeout=TIMEOUT_S)
    return "".join(f"; {_stands(role, refs)}" for role, refs in asked.items() if refs)


def _stands(role: str, refs: list[Any]) -> str:
    counted: Counter[str] = Counter()
    answered, silent = ray.wait(refs, num_returns=len(refs), timeout=0)
    failed = []
    for ref in answered:
        try:
            counted.update(ray.get(ref))
        except ray.exceptions.RayError as error:
            failed.append(type(error).__name__)
    said = [f"{count} x {place}" for place, count in counted.most_common(MOST)]
    if silent:
        said.append(
            f"{len(silent)} of {len(refs)} do not answer, so something that does not await blocks their event loop"
        )
    if failed:
        said.append(f"{len(failed)} of {len(refs)} could not be asked ({failed[0]})")
    return f"{role}: {', '.join(said) or 'nothing to wait for'}"


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _called(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frames: list[FrameType], whose: tuple[Callable[[str], bool], ...]) -> str:
    """The innermost of these frames, the outermost first, in the first code of `whose` that is in any of them."""
    for theirs in whose:
        for frame in reversed(frames):
            file = frame.f_code.co_filename
            if theirs(file):
                return f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
    return ""


def _of_verl(file: str) -> bool:
    return file.startswith(VERL)


def _of_the_user(file: str) -> bool:
    return Path(file).is_absolute() and not file.startswith((*INSTALLED, VERL, OURS))


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
