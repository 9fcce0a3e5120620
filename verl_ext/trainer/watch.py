"""Ends a run if one of its processes has died, and reports a slow step.

verl 0.9.1 waits forever for the answers of a dead process, and all GPUs wait with it. It has no timeout for a tool or a
reward function either, and prints nothing.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from statistics import median
from types import TracebackType
from typing import Any, Self

import ray

from verl_ext.base.errors import UserError
from verl_ext.trainer.logs import say
from verl_ext.upstream.sglang_processes import worker_died

EVERY_S, TIMEOUT_S = 10.0, 60.0
LATE_S = 30.0  # an error of a collective comes before Ray knows that a node has died
AGAIN_S = 0.5
SIGNAL = signal.SIGUSR2
STORAGE = "TransferQueueStorageUnit#"  # the prefix of its actors' names
SLOW = 3  # times the usual duration of a step
WHERE = (
    "to see what it waits for: `ray list actors --detail` lists the nodes and pids of the agent loop and reward "
    "workers, and `py-spy dump --pid PID` there shows the line that each thread runs (for a coroutine that awaits, "
    "only its event loop)"
)
Actors = Callable[[], Iterable[Any]]


def engine_died(actor: Any) -> bool:
    """Returns True if an actor of verl has a vLLM engine that has ended (`AsyncLLM.errored`); runs inside the actor."""
    return bool(getattr(getattr(actor, "engine", None), "errored", False))


def watch_of(trainer: Any, agent_loop_manager: Any, slow_step_s: float | None = None) -> "Watch":
    """Returns the watch on the actors that a trainer of verl waits for; `slow_step_s` is SlowStep's `after_s`.

    An agent loop manager of the user's own need not have agent loop workers (`TaskRunnerV1.init_agent_loop_manager`).
    """
    roles: dict[str, Actors] = {
        "rollout server": lambda: [one for each in trainer._rollout_server_managers() for one in each.server_handles],
        "agent loop worker": lambda: agent_loop_manager.agent_loop_workers,
        "TransferQueue's storage unit": cache(_storage_units),
    }
    slow_step = SlowStep(lambda: trainer.global_steps, slow_step_s)
    busy: dict[str, Actors] = {"training worker": lambda: trainer.actor_rollout_wg.workers}
    return Watch(roles, trainer.config.trainer.default_local_dir, slow_step, busy)


def _storage_units() -> list[Any]:
    """Returns the handles of TransferQueue's storage units; those that have died have no name any more."""
    found = []
    for name in ray.util.list_named_actors():
        if name.startswith(STORAGE):
            with contextlib.suppress(ValueError):  # it died in between
                found.append(ray.get_actor(name))
    return found


class Watch:
    """Asks these actors repeatedly, from a thread, while the training runs in the main thread.

    If an actor is dead, the training is interrupted, and the context raises a WorkerDiedError. An actor that does not
    answer in time counts as busy, and is asked again. A role whose handles cannot be read is not watched, with a line.

    Args:
        roles: role -> a function that returns its handles, called at each check, because verl creates some late.
        folder: the folder of the checkpoints, for the message.
        slow_step: checked as often; its message is printed.
        busy: roles whose actors are busy for long; asked only after an error, to find who died.
    """

    def __init__(
        self,
        roles: Mapping[str, Actors],
        folder: str,
        slow_step: "SlowStep | None" = None,
        busy: Mapping[str, Actors] | None = None,
        every_s: float = EVERY_S,
    ):
        self._roles, self._folder, self._slow_step, self._every_s = roles, folder, slow_step, every_s
        self._busy = busy or {}
        self._unwatched: set[str] = set()
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
        if isinstance(error, UserError | ray.exceptions.RayActorError):  # these explain themselves
            return
        cause = error if isinstance(error, Exception) else None
        if cause is not None:  # a death may have caused it
            with contextlib.suppress(Exception):  # the run's own error must come out
                self._died = _died(self._handles({**self._roles, **self._busy}), LATE_S)
        elif not isinstance(error, KeyboardInterrupt):
            return
        if self._died:
            waits = ", and verl would wait for its answers forever" if cause is None else ""
            raise worker_died(f"{self._died}{waits}", self._folder) from cause

    def _look_on(self) -> None:
        if ray.is_initialized():
            self._handles(self._roles)  # at once: an actor is found by name only while it lives
        while not self._ended.wait(self._every_s):
            self._died = _died(self._handles(self._roles), TIMEOUT_S)
            if self._died and not self._ended.is_set():
                signal.pthread_kill(self._main, SIGNAL)  # a signal, because it also ends a wait for a lock
                return
            if self._slow_step:
                self._tell(self._slow_step)

    def _handles(self, roles: Mapping[str, Actors]) -> dict[str, list[Any]]:
        """Returns role -> its actors; prints once why a role is not watched."""
        found = {}
        for role, actors in roles.items():
            try:
                handles = list(actors())
                if not handles or not all(isinstance(one, ray.actor.ActorHandle) for one in handles):
                    raise TypeError(f"no Ray actors in {handles}")
                found[role] = handles
            except Exception as error:  # the other roles must be watched
                if role not in self._unwatched:
                    self._unwatched.add(role)
                    say(f"not watched: {role} ({error})")
        return found

    def _tell(self, slow_step: "SlowStep") -> None:
        try:
            if said := slow_step.look(time.monotonic()):
                say(said)
        except Exception as error:  # the check for dead actors must continue
            self._slow_step = None
            say(f"cannot tell whether a step is slow: {type(error).__name__}: {error}")


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
    """Reports a step that takes longer than `after_s` and longer than SLOW times the median step.

    It reports again whenever the time has doubled.

    Args:
        step: returns the number of the running step.
        after_s: seconds; None never reports.
    """

    def __init__(self, step: Callable[[], int], after_s: float | None):
        self._step, self._after_s = step, after_s
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
        return f"step {number} has been running for {_duration(taken)}{before}; {WHERE}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
