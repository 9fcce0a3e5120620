"""Run a command whose Python processes are forked from one that has imported torch, verl and its rollout engine.

    python tools/prefork.py [--rollout vllm|sglang] [--preload MODULE,...] [--log FILE] COMMAND [ARGUMENT ...]

A start of verl on a CPU is a dozen processes that import the same libraries, ten seconds each: on two cores, most of
the start. Here one server imports them once, next to COMMAND, and the processes are forked from it. PREFORK_PYTHON in
COMMAND's environment is the path of a program that takes Python's arguments; the recipes for CPUs give it to Ray as
`ray_kwargs.ray_init.runtime_env.py_executable`. Processes that Ray's workers start through multiprocessing are forked
too: vLLM's engine and its workers, SGLang's scheduler. All of them end when COMMAND does. Only for CPU runs: CUDA does
not survive a fork. The program is prefork_client.py, which describes the protocol.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefork_client import LENGTH, PASSED_ON

VERL = (
    "verl_ext.trainer.trainers",
    "verl_ext.workers.actor",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "ray._private.workers.default_worker",
)
ROLLOUTS = {
    "vllm": (
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3_moe",
    ),
    "sglang": (
        "verl.workers.rollout.sglang_rollout.async_sglang_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.qwen3_moe",
    ),
}
MOST_FILES = 253  # the most files in one message (SCM_MAX_FD)
# Unique to this run: verl names a socket in /tmp after it, through which the weights go.
JOB = secrets.token_hex(4)
RECIPE = Path(__file__).parent.parent / "configs" / "recipe" / "cpu_smoke.yaml"

# The server: forks a process for each client, and reports to it how that process ended.


class Server:
    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clients: dict[int, socket.socket] = {}  # process -> connection to the client that waits for it
        self.woken, self.wake = socket.socketpair()
        self.woken.setblocking(False)
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # it wakes the selector
        self.selector = selectors.DefaultSelector()
        for end in (listener, self.woken):
            self.selector.register(end, selectors.EVENT_READ)

    def serve(self) -> dict:
        """Never returns in the server; in a child, returns its client's request."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    if request := self.accept():
                        return request
                elif key.fileobj is self.woken:
                    self.woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self.abandon(key.fileobj, key.data)
            self.report_ends()

    def accept(self) -> dict | None:
        connection, _ = self.listener.accept()
        try:
            request, files = receive(connection)
        except (ValueError, PermissionError):  # a client that was killed while it sent, or another user
            connection.close()
            return None
        server = os.getpid()
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            die_with(server)
            os.setpgid(0, 0)  # Ray kills the whole group of a worker that it is done with
            for end in (self.selector, self.listener, self.woken, self.wake, connection, *self.clients.values()):
                end.close()
            take_over(request, files)
            return request
        for file in files:
            os.close(file)
        self.clients[process] = connection
        self.selector.register(connection, selectors.EVENT_READ, process)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % process)
        return None

    def abandon(self, connection: socket.socket, process: int) -> None:
        """Ends the process of a client that is gone; its connection is readable, although a client sends no more."""
        self.selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def report_ends(self) -> None:
        while self.clients:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            connection = self.clients.pop(process)
            with contextlib.suppress(KeyError, OSError):
                self.selector.unregister(connection)
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            connection.close()


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"user {user} asks for a process of user {os.getuid()}")
    length, ancillary, _, _ = connection.recvmsg(LENGTH, socket.CMSG_SPACE(MOST_FILES * array("i").itemsize))
    files = array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    with connection.makefile("rb") as stream:
        body = stream.read(int.from_bytes(length, "big"))
    return json.loads(body), files.tolist()


# A child of the server becomes the process that its client stands for.


def take_over(request: dict, files: list[int]) -> None:
    """Takes over the client's open files under their numbers, its environment and folder, and resets the signals."""
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    above = max((*files, *request["files"])) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])


def renew() -> None:
    """Renews state that the server's imports have read from its environment, or that must differ between processes."""
    import multiprocessing
    import random

    multiprocessing.set_executable(os.environ["PREFORK_PYTHON"])
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if agent_loop := sys.modules.get("verl_ext.upstream.agent_loop"):
        agent_loop.install_changes()  # as this process's environment asks
    if scheduler := sys.modules.get("sglang.srt.managers.scheduler"):
        scheduler.TEST_RETRACT = scheduler.envs.SGLANG_TEST_RETRACT.get()
    if ray := sys.modules.get("ray"):
        ray._raylet.Config.initialize("")  # RAY_* once more: whether the cluster wants a token, for example
        ray._private.ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("prefork_worker.py"))
        ray._private.state.next_job_id = lambda: ray.JobID(bytes.fromhex(JOB))  # which every cluster counts from 1
        fork_daemons(ray._private.services)


def fork_daemons(services: Any) -> None:
    """Makes the cluster that this process may start fork its daemons too: five of them are Python."""
    start, python = services.start_ray_process, services._build_python_executable_command_memory_profileable
    forked = os.environ["PREFORK_PYTHON"]

    def start_forked(command: list[str], *rest: Any, **options: Any) -> Any:  # the monitors and the dashboard
        return start([forked, *command[1:]] if command[0] == sys.executable else command, *rest, **options)

    services.start_ray_process = start_forked
    # The raylet starts its two agents with this command.
    services._build_python_executable_command_memory_profileable = lambda *a, **k: [forked, *python(*a, **k)[1:]]


def run(arguments: list[str], path: list[str]) -> None:
    """Does what `python ARGUMENTS` would; `path` has the entries for the standard library and installed packages."""
    import runpy
    import types

    by_line = False
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        option = arguments.pop(0)
        by_line |= option == "-u"
        if option in ("-X", "-W"):
            arguments.pop(0)
    for name, file, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 1 if by_line or file == 2 or os.isatty(file) else -1
        setattr(sys, name, open(file, mode, buffering, encoding="utf-8", closefd=False))  # noqa: SIM115
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    what, *rest = arguments
    if what == "-m":
        sys.argv, sys.path = rest, [os.getcwd(), *from_environment(), *path]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv, sys.path = ["-c", *rest[1:]], ["", *from_environment(), *path]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path = arguments, [os.path.dirname(os.path.realpath(what)), *from_environment(), *path]
        main.__file__ = what
        with open(what, "rb") as script:
            exec(compile(script.read(), what, "exec"), main.__dict__)


def from_environment() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def end_after(run_it: Callable[[], None]) -> None:
    """Runs, and exits as Python would, but without tearing down a gigabyte of modules one by one."""
    import atexit
    import threading

    code = 0
    try:
        run_it()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


# The start of both: the server next to the command.


def preload(modules: list[str]) -> None:
    import gc
    import importlib
    import traceback

    # OpenBLAS's second thread would be missing in the children. For OpenMP, Ray gives its workers one thread.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # Ray's C++ side reads these only once: a worker's job, and the process that it ends with.
    os.environ |= {"RAY_JOB_ID": JOB, "RAY_RAYLET_PID": str(os.getpid())}
    if set(VERL) <= set(modules):
        read_workers_environment()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # the process that needs the module meets the same error, and ends with it
            traceback.print_exc()
    gc.freeze()  # a collection in a child would touch, and so copy, the pages that all of them share


def read_workers_environment() -> None:
    """Sets the variables that the recipes for CPUs and verl put into the environment of Ray's workers: some modules
    read them on import."""
    import yaml

    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    os.environ |= recipe["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV

    os.environ |= PPO_RAY_RUNTIME_ENV["env_vars"] | {"TRANSFER_QUEUE_ENABLE": "1"}


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # gone already
        os._exit(1)


def main(modules: list[str], log: str | None, command: list[str]) -> None:
    """Starts a server, and becomes COMMAND; the server ends with it. `log` gets what the imports print."""
    own = from_environment()
    path = [entry for entry in sys.path[1:] if entry not in own]
    address = f"prefork-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ |= {"PREFORK_ADDRESS": address, "PREFORK_PYTHON": str(Path(__file__).with_name("prefork_client.py"))}
    os.environ["PREFORK_RAY"] = "imported" if set(VERL) <= set(modules) else ""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")  # without a file, which would have to be removed
    listener.listen(64)
    parent = os.getpid()
    if os.fork() == 0:
        die_with(parent)
        os.setpgid(0, 0)  # only the command acts on a terminal's Ctrl-C
        if log:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
        sys.path = [*own, *path]
        preload(modules)
        request = Server(listener).serve()
        end_after(lambda: (renew(), run(request["arguments"], path)))
    listener.close()
    os.execvp(command[0], command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", choices=ROLLOUTS, default="vllm", help="the engine that the run generates with")
    parser.add_argument("--preload", help="modules (default: what a run of verl with that engine imports)")
    parser.add_argument("--log", help="file for what the imports print (default: the terminal)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error("no COMMAND")
    modules = given.preload.split(",") if given.preload else [*VERL, *ROLLOUTS[given.rollout]]
    main(modules, given.log, given.command)
