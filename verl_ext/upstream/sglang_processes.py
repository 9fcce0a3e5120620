"""Starts SGLang's processes so that one that fails reports its reason.

SGLang's scheduler and detokenizer log a failure to their own stderr and send SIGQUIT to their parent process. Under
verl that ends a Ray actor without any hint of the cause. If processes are forked (tools/prefork.py), it ends the server
that forks them, and the run with it. With this change the process first sends the reason to the actor that started it,
and then SIGQUIT. The actor keeps the reason in Ray's store, from which the end of the run reads it.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from verl_ext.base.errors import WorkerDiedError
from verl_ext.base.patching import Undo, apply_all, expect, patch, wrap
from verl_ext.upstream import engine_calls

MODULES = {"scheduler": "sglang.srt.managers.scheduler", "detokenizer": "sglang.srt.managers.detokenizer_manager"}
ANSWER_S = 10.0  # how long a process that ends waits for its actor to store the reason
LONGEST = 500  # characters of a reason
NAMESPACE, PREFIX = b"verl_ext", b"sglang_died/"

# In the process that is started


def run_process(name: str, actor: Connection, process: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls `process`, SGLang's function for this process, with the actor as its parent."""
    parent = Parent(name, actor)
    try:
        module = importlib.import_module(MODULES[name])
        patch("sglang_processes", module, "psutil", parent)
        if name == "scheduler":
            from verl_ext.upstream import fake_quantization  # imports torch, which the actor's launch does not need

            engine_calls.answer_in_scheduler(module)
            fake_quantization.round_in_scheduler()
        process(*args, **kwargs)
    except Exception:  # before SGLang handles any
        parent.send_signal(signal.SIGQUIT)
        raise


class Parent:
    """Replaces `psutil` in these modules, which use it only to send SIGQUIT to their parent process."""

    def __init__(self, name: str, actor: Connection) -> None:
        self._name, self._actor = name, actor

    def Process(self) -> "Parent":  # noqa: N802
        return self

    def parent(self) -> "Parent":
        return self

    def send_signal(self, number: int) -> None:
        error = sys.exc_info()[1]  # SGLang calls this while it handles the error
        reason = f"SGLang's {self._name} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        with contextlib.suppress(OSError, EOFError):
            self._actor.send(reason[:LONGEST].rstrip("."))  # without the full stop: it becomes part of a sentence
            self._actor.poll(ANSWER_S)
        if (starter := multiprocessing.parent_process()) and starter.pid:
            os.kill(starter.pid, number)


# In the actor


def start_processes(server_module: Any, run: Callable[..., None] = run_process) -> Undo:
    """Makes the SGLang servers that verl starts in this process start their processes through `run`."""
    engine = expect("sglang_processes", server_module, "sglang.srt.entrypoints.engine.Engine")
    launch = expect("sglang_processes", engine, "_launch_subprocesses", "server_args, ...")

    def launch_subprocesses(*args: Any, **kwargs: Any) -> Any:
        heed_sigquit()
        here, there = multiprocessing.Pipe()
        threading.Thread(target=keep_reasons, args=(here,), name="verl_ext sglang", daemon=True).start()
        for name in MODULES:
            process = f"run_{name}_process_func"
            kwargs[process] = partial(run, name, there, kwargs[process])
        return launch(*args, **kwargs)

    watchdog = expect("sglang_processes", server_module, "sglang.srt.entrypoints.engine.SubprocessWatchdog")
    return apply_all(
        lambda: patch("sglang_processes", engine, "_launch_subprocesses", staticmethod(launch_subprocesses)),
        lambda: wrap("sglang_processes", watchdog, "_check_processes", keep_exit_codes, "self"),
    )


def heed_sigquit() -> None:
    """Makes SIGQUIT end this process, as SGLang expects.

    A shell script starts a background command (`&`) with SIGQUIT ignored, and every process below it inherits that.
    Python sets signals only in the main thread, and Ray runs an actor in another thread, so this calls the C library.
    """
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        set_signal = ctypes.CDLL(None).signal
        set_signal.argtypes, set_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        set_signal(signal.SIGQUIT, None)  # SIG_DFL is 0


def keep_reasons(reasons: Connection) -> None:
    """Stores the reasons that the processes send. Runs in a thread of the actor."""
    while True:
        try:
            keep(reasons.recv())
            reasons.send("kept")
        except (EOFError, OSError):  # the processes are gone, as at the end of every run
            return


def keep_exit_codes(check: Callable[[Any], bool], watchdog: Any) -> bool:
    """Wraps SGLang's check of its processes, which ends the actor if one of them was killed; keeps the exit codes."""
    for process in watchdog._processes:
        if not process.is_alive() and process.exitcode:
            keep(f"an SGLang process (pid {process.pid}) ended with exit code {process.exitcode}")
    return check(watchdog)


def keep(reason: str) -> None:
    """Stores the reason under this process's id. Only the first is kept, because later failures follow from it."""
    from ray.experimental.internal_kv import _internal_kv_initialized, _internal_kv_put

    print(f"verl_ext: {reason}", file=sys.stderr, flush=True)
    if _internal_kv_initialized():
        _internal_kv_put(PREFIX + b"%d" % os.getpid(), reason.encode(), overwrite=False, namespace=NAMESPACE)


# Where the run ends


def worker_died(sentence: str, checkpoints: str) -> WorkerDiedError:
    """Returns the error for a run in which a process has died, with the reasons that SGLang's processes left."""
    reason = why_they_died()
    return WorkerDiedError(
        f"{sentence}{reason and f': {reason}'}. The checkpoints are in {checkpoints}: with trainer.resume_mode=auto, "
        "the same command continues from the last complete one"
    )


def why_they_died() -> str:
    """Returns the reasons that SGLang's processes left; "" if there are none or Ray is gone."""
    ray = sys.modules.get("ray")
    if not (ray and ray.is_initialized()):
        return ""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    try:
        keys = _internal_kv_list(PREFIX, namespace=NAMESPACE)
        return "; ".join(dict.fromkeys(_internal_kv_get(key, namespace=NAMESPACE).decode() for key in keys))
    except Exception:  # the cluster is going down, and there is an error to report already
        return ""
