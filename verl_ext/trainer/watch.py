"""Ends a run if one of its processes has died, and reports what a slow step waits for.

verl 0.9.1 waits forever for the answers of a dead process, and all GPUs wait with it. It has no timeout for a tool or a
reward function either, and prints nothing.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, Self

import ray

from verl_ext.base.errors import UserError
from verl_ext.trainer.logs import say
from verl_ext.upstream.sglang_processes import worker_died

EVERY_S, TIMEOUT_S = 10.0, 60.0
PLACES_TIMEOUT_S = 20.0
LATE_S = 30.0  # an error of a collective comes before Ray knows that a node has died
AGAIN_S = 0.5
SIGNAL = signal.SIGUSR2
STORAGE = "TransferQueueStorageUnit#"  # the prefix of its actors' names
SLOW = 3  # times the usual duration of a step
MOST_PLACES = 4  # that are printed for each role
VERL = str(Path(getattr(find_spec("verl"), "origin", None) or "/no verl").parent) + os.sep
OURS = f"{Path(__file__).parents[1]}{os.sep}"
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def engine_died(actor: Any) -> bool:
    """Returns True if an actor of verl has a vLLM engine that has ended (`AsyncLLM.errored`); runs inside the actor."""
    return bool(getattr(getattr(actor, "engine", None), "errored", False))


def watch_of(trainer: Any, agent_loop_manager: Any, slow_step_s: float | None = None) -> "Watch":
    """Returns the watch on the actors that a trainer of verl waits for; `slow_step_s` is SlowStep's `after_s`."""
    storage: list[Any] = []

    def watched() -> dict[str, list[Any]]:
        if not storage:
            storage.extend(ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(STORAGE))
        servers = [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]
        workers = agent_loop_manager.agent_loop_workers
        return {"rollout server": servers, "agent loop worker": workers, "TransferQueue's storage unit": storage}

    def running_the_users_code() -> dict[str, list[Any]]:
        rewards = trainer.reward_loop_manager.reward_loop_workers
        return {"agent loop": agent_loop_manager.agent_loop_workers, "reward": rewards}

    def answerable() -> dict[str, list[Any]]:
        return watched() | {"training worker": trainer.actor_rollout_wg.workers}

    slow_step = SlowStep(lambda: trainer.global_steps, running_the_users_code, slow_step_s)
    return Watch(watched, trainer.config.trainer.default_local_dir, slow_step, answerable)


class Watch:
    """Asks these actors repeatedly, from a thread, while the training runs in the main thread.

    A dead actor interrupts the training, and leaves the context as a WorkerDiedError. An actor that does not answer in
    time is busy, and is asked again.

    Args:
        actors: role -> handles; called at each check, because verl creates some of them late.
        folder: the folder of the checkpoints, for the message.
        slow_step: checked as often; its message is printed.
        answerable: role -> handles, including those that are busy for long; asked after an error, to find whose it is.
    """

    def __init__(
        self,
        actors: Callable[[], Mapping[str, Iterable[Any]]],
        folder: str,
        slow_step: "SlowStep | None" = None,
        answerable: Callable[[], Mapping[str, Iterable[Any]]] | None = None,
        every_s: float = EVERY_S,
    ):
        self._actors, self._folder, self._slow_step, self._every_s = actors, folder, slow_step, every_s
        self._answerable = answerable or actors
        self._ended = threading.Event()
        self._died = ""
        self._before: Any = None
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._look_on, name="verl_ext watch", daemon=True)

    def __enter__(self) -> Self:
        self._before = signal.signal(SIGNAL, _interrupt)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._every_s)
        signal.signal(SIGNAL, self._before)
        if isinstance(error, UserError | ray.exceptions.RayActorError):  # it names the actor, and Ray's the reason
            return
        cause = error if isinstance(error, Exception) else None
        if cause is not None:  # a death may have caused it
            with contextlib.suppress(ray.exceptions.RayError):
                self._died = _died(self._answerable(), LATE_S)
        elif not isinstance(error, KeyboardInterrupt):
            return
        if self._died:
            waits = ", and verl would wait for its answers without end" if cause is None else ""
            raise worker_died(f"{self._died}{waits}", self._folder) from cause

    def _look_on(self) -> None:
        if ray.is_initialized():
            self._actors()  # at once: an actor is found by name only while it lives
        while not self._ended.wait(self._every_s):
            self._died = _died(self._actors(), TIMEOUT_S)
            if self._died and not self._ended.is_set():
                signal.pthread_kill(self._main, SIGNAL)  # a signal, because it also ends a wait for a lock
                return
            if self._slow_step:
                self._tell(self._slow_step)

    def _tell(self, slow_step: "SlowStep") -> None:
        try:
            if said := slow_step.look(time.monotonic()):
                say(said)
        except Exception as error:  # the check for dead actors must continue
            self._slow_step = None
            say(f"cannot find what a slow step waits for: {type(error).__name__}: {error}")


def _interrupt(number: int, frame: Any) -> None:
    """Raises the only exception that `check_signals` of Ray's _raylet.pyx lets out of a wait."""
    raise KeyboardInterrupt


def _died(actors: Mapping[str, Iterable[Any]], timeout_s: float) -> str:
    """Returns who has died, in words; "" for nobody. All are asked at once: a busy one does not delay the others."""
    asked = {
        actor.__ray_call__.remote(engine_died): (actor, f"{role} {number}")
        for role, those in actors.items()
        for number, actor in enumerate(those)
    }
    deadline = time.monotonic() + timeout_s
    while asked and time.monotonic() < deadline:
        answered, _ = ray.wait(list(asked), timeout=max(deadline - time.monotonic(), 0))
        if not answered:  # in time
            return ""
        actor, name = asked.pop(answered[0])
        try:
            if ray.get(answered[0]):
                return f"the engine of {name} has died"
        except ray.exceptions.ActorUnavailableError:  # out of reach for now, or for good
            time.sleep(AGAIN_S)
            asked[actor.__ray_call__.remote(engine_died)] = actor, name
        except ray.exceptions.RayTaskError:
            continue  # not an actor as we know it
        except ray.exceptions.OutOfMemoryError:
            return f"{name} has been killed by Ray: the node's memory ran out"
        except ray.exceptions.RayError:
            return f"{name} has died"
    return ""


class SlowStep:
    """Reports a step that takes longer than `after_s` and than SLOW times the median step, if it is checked then.

    It reports again whenever the time has doubled.

    Args:
        step: the number of the step that runs.
        workers: role -> the actors that run the user's tools and rewards; called when there is something to report.
        after_s: seconds; None never reports.
    """

    def __init__(
        self, step: Callable[[], int], workers: Callable[[], Mapping[str, Iterable[Any]]], after_s: float | None
    ):
        self._step, self._workers, self._after_s = step, workers, after_s
        self._number, self._began, self._told = -1, 0.0, 0.0
        self._taken: list[float] = []

    def look(self, now: float) -> str:
        """Returns the message at `now`, seconds of a clock that only goes forward; "" for nothing."""
        if (number := self._step()) != self._number:
            if self._number >= 0:
                self._taken.append((now - self._began) / (number - self._number))
            self._number, self._began, self._told = number, now, 0.0
        taken, usual = now - self._began, median(self._taken) if self._taken else 0.0
        if self._after_s is None or taken <= max(self._after_s, SLOW * usual, 2 * self._told):
            return ""
        self._told = taken
        before = f" (usually {_duration(usual)})" if self._taken else ""
        return f"step {number} has been running for {_duration(taken)}{before}{_describe_waits(self._workers())}"


def places(actor: Any) -> list[str]:
    """Returns the place of each asyncio task and thread of an actor, as `function (file:line)`; runs inside the actor.

    The place is the innermost frame in code that is not installed, which is the user's. A task without one has the
    innermost frame in verl's code. Tasks in neither are left out.
    """
    # Ray calls this in another thread than that of the actor's event loop, which all_tasks would need.
    # By type: isinstance looks through a weak proxy, and raises if its object is gone.
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]
    found = [_place(list(_awaited_frames(task.get_coro()))[::-1], (_is_users, _is_verls)) for task in tasks]
    for innermost in sys._current_frames().values():
        found.append(_place([frame for frame, _ in traceback.walk_stack(innermost)], (_is_users,)))
    return [place for place in found if place]


def _describe_waits(workers: Mapping[str, Iterable[Any]]) -> str:
    """Returns the places of each role's actors, in words. All are asked at once."""
    asked = {role: [actor.__ray_call__.remote(places) for actor in actors] for role, actors in workers.items()}
    if everything := [ref for refs in asked.values() for ref in refs]:
        ray.wait(everything, num_returns=len(everything), timeout=PLACES_TIMEOUT_S)
    return "".join(f"; {_describe_places(role, refs)}" for role, refs in asked.items() if refs)


def _describe_places(role: str, refs: list[Any]) -> str:
    counted: Counter[str] = Counter()
    answered, silent = ray.wait(refs, num_returns=len(refs), timeout=0)
    failed = []
    for ref in answered:
        try:
            counted.update(ray.get(ref))
        except ray.exceptions.RayError as error:
            failed.append(type(error).__name__)
    said = [f"{count} x {place}" for place, count in counted.most_common(MOST_PLACES)]
    if silent:
        said.append(
            f"{len(silent)} of {len(refs)} do not answer, so something that does not await blocks their event loop"
        )
    if failed:
        said.append(f"{len(failed)} of {len(refs)} could not be asked ({failed[0]})")
    return f"{role}: {', '.join(said) or 'nothing to wait for'}"


def _awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """Yields the frames of a suspended coroutine, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _place(frames: list[FrameType], owners: tuple[Callable[[str], bool], ...]) -> str:
    """Returns the first of these frames, the innermost first, in the code of the first owner that has any of them."""
    for is_owners in owners:
        for frame in frames:
            file = frame.f_code.co_filename
            if is_owners(file):
                return f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
    return ""


def _is_verls(file: str) -> bool:
    return file.startswith(VERL)


def _is_users(file: str) -> bool:
    return Path(file).is_absolute() and not file.startswith((*INSTALLED, VERL, OURS))


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
