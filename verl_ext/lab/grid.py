"""Runs beside each other, a process each, forked from one that has imported what they need."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from verl_ext.lab.cells import Cell
from verl_ext.lab.worker import End, RunArm, Step, work

# Read by torch as it is imported, and by glibc, which asks the kernel anew for each tensor of 128 KiB and clears it: of
# a step, a tenth.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
FORKS = multiprocessing.get_context("forkserver")


def run_grid(cells: Iterable[Cell], out: Path, run: RunArm, jobs: int) -> Generator[Step | End, None, None]:
    """Run the cells, `jobs` at a time, and tell of each step and each end as it comes.

    A run that fails does not stop the others. Close the iterator (`contextlib.closing`) to stop early: no process is
    left then. Runs that were cut short are not done.

    Args:
        run: `verl_ext.lab.arms.run_arm`, or another function of a module, with which processes find it.
    """
    waiting, running = deque(cells), dict[Connection, tuple[Cell, ForkServerProcess]]()
    _prepare(run)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                with _ctrl_c_waits():
                    events, process = _start(run, cell, out)
                    running[events] = cell, process
            ready = wait(running)
            for events in [each for each in running if each in ready]:
                cell, process = running[events]
                event = _received(events, cell, process)
                if isinstance(event, End):
                    del running[events]
                    events.close()
                    process.join()
                yield event
    finally:
        for _, process in running.values():
            process.kill()
        for events, (_, process) in running.items():
            process.join()
            events.close()


def _start(run: RunArm, cell: Cell, out: Path) -> tuple[Connection, ForkServerProcess]:
    events, told = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=work, args=(run, cell, out, told), daemon=True)
    process.start()
    told.close()  # its other end is the worker's alone: where that dies, reading ends
    return events, process


def _received(events: Connection, cell: Cell, process: ForkServerProcess) -> Step | End:
    try:
        return events.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        return End(cell, f"its process was {how}, without a word" if code < 0 else f"its process {how}, without a word")


def _prepare(run: RunArm) -> None:
    """Start the process that the others are forked from; it imports while the first of them waits."""
    FORKS.set_forkserver_preload([run.__module__, work.__module__])
    with _inherited():
        forkserver.ensure_running()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """One that comes meanwhile is heard afterwards: half a start leaves a process of which nobody knows."""
    heard = list[int]()
    heeding = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeding)
        for number in heard[:1]:
            signal.raise_signal(number)


@contextmanager
def _inherited() -> Iterator[None]:
    """What is started now is deaf to Ctrl-C: the command alone decides what ends. And it has ENVIRONMENT."""
    heeding, before = signal.signal(signal.SIGINT, signal.SIG_IGN), {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeding)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
