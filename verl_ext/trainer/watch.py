"""End a run part of which has died: verl 0.9.1 waits for its answers, and all GPUs with it, for good."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import ray

from verl_ext.errors import UserError, WorkerDiedError
from verl_ext.trainer.line_file import say
from verl_ext.trainer.slow_step import SlowStep
from verl_ext.upstream.sglang_processes import why_they_died

EVERY_S, TIMEOUT_S = 10.0, 60.0
LATE_S = 30.0  # an error of a collective comes before Ray knows of the node that has died
AGAIN_S = 0.5
SIGNAL = signal.SIGUSR2
STORAGE = "TransferQueueStorageUnit#"  # begins the names of its actors


def engine_died(actor: Any) -> bool:
    """Inside an actor of verl: whether it has a vLLM engine that has ended. `AsyncLLM.errored` of vLLM."""
    return bool(getattr(getattr(actor, "engine", None), "errored", False))


def watch_of(trainer: Any, agent_loop_manager: Any, slow_step_s: float | None = None) -> "Watch":
    """On the actors that a trainer of verl waits for; `slow_step_s` as SlowStep's `after_s`."""
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
    """Asks these actors again and again, from a thread, while the training runs in the main one.

    What has died interrupts that, and leaves the context as a WorkerDiedError. An actor that does not answer in time is
    busy, and is asked again.

    Args:
        actors: role -> handles; called at each look, for verl makes some of them late.
        folder: of the checkpoints, for what is told.
        slow_step: looked at as often; what it tells is printed.
        answerable: role -> handles, of those too that are busy for long; asked when an error has come: is it theirs?
    """

    def __init__(
        self,
        actors: Callable[[], Mapping[str, Iterable[Any]]],
        folder: str,
        slow_step: SlowStep | None = None,
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
        if isinstance(error, UserError | ray.exceptions.RayActorError):  # which says itself who, and Ray's why
            return
        if isinstance(error, Exception):  # it may be what a death has led to
            with contextlib.suppress(ray.exceptions.RayError):
                self._died = _died(self._answerable(), LATE_S)
        elif not isinstance(error, KeyboardInterrupt):
            return
        if self._died:
            waits = "" if isinstance(error, Exception) else ", and verl would wait for its answers without end"
            reason = why_they_died()
            raise WorkerDiedError(
                f"{self._died}{waits}{reason and f': {reason}'}. Checkpoints stand in {self._folder}: with "
                "trainer.resume_mode=auto, the same command goes on from the last whole one"
            ) from (error if isinstance(error, Exception) else None)

    def _look_on(self) -> None:
        if ray.is_initialized():
            self._actors()  # at once: what is found by its name is found while it lives
        while not self._ended.wait(self._every_s):
            self._died = _died(self._actors(), TIMEOUT_S)
            if self._died and not self._ended.is_set():
                signal.pthread_kill(self._main, SIGNAL)  # a signal indeed: it ends a wait for a lock as well
                return
            if self._slow_step:
                self._tell(self._slow_step)

    def _tell(self, slow_step: SlowStep) -> None:
        try:
            if said := slow_step.look(time.monotonic()):
                say(said)
        except Exception as error:  # the look at who lives must go on
            self._slow_step = None
            say(f"what a slow step waits for cannot be told: {type(error).__name__}: {error}")


def _interrupt(number: int, frame: Any) -> None:
    """The one exception that `check_signals` of Ray's _raylet.pyx lets out of a wait."""
    raise KeyboardInterrupt


def _died(actors: Mapping[str, Iterable[Any]], timeout_s: float) -> str:
    """Who has died, in words; "" for nobody. All are asked at once: one that is busy keeps no other waiting."""
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
