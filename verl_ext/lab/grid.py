"""The runs of an experiment: one process each, forked from a process that has imported the packages. Finished runs are
not repeated.

A pool of concurrent.futures would fail as a whole if one of its processes is killed, as by the kernel for its memory.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext import __version__
from verl_ext.base.errors import UserError
from verl_ext.base.printable import printable
from verl_ext.report.files import is_regular, open_regular, written_whole

if TYPE_CHECKING:
    from rich.console import Console

METRICS, DONE, LOG = "metrics.jsonl", "done.json", "errors.log"
RUN_FILES = ("metrics.*", DONE, LOG)  # written by a run, and removed before the next one in its folder
# torch reads the first when it is imported. glibc reads the others when a process starts: without them it asks the
# kernel for the memory of each tensor above 128 KiB, and the kernel clears it, which took a tenth of a step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Arm:
    """One of the compared configurations.

    Attributes:
        name: the name of its folder, and in tables.
        overrides: overrides of verl's config, including `+lab=grpo`.
    """

    name: str
    overrides: tuple[str, ...]


RunArm = Callable[[Arm, int, Path, Callable[[int], None]], None]


@dataclass(frozen=True)
class GridCell:
    """One arm with one seed."""

    arm: Arm
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that identify the run."""
        overrides = list(self.arm.overrides)
        return {"overrides": overrides, "seed": self.seed, "steps": self.steps, "version": __version__}

    def folder(self, out: Path) -> Path:
        return out / self.arm.name / f"seed{self.seed}"

    def settings_done(self, out: Path) -> dict[str, Any] | None:
        """Returns the settings of the finished run in its folder; None if there is none."""
        try:
            with open_regular(self.folder(out) / DONE) as file:
                done = json.load(file)
        except (OSError, ValueError):  # no run yet, or not ours
            return None
        return done.get("settings") if isinstance(done, dict) else None

    def begin(self, out: Path) -> Path:
        """Removes the files of an earlier run from its folder; returns the folder."""
        folder = self.folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in RUN_FILES for file in folder.glob(pattern)):
            if is_regular(file) or file.is_symlink():
                file.unlink()
        return folder

    def mark_done(self, out: Path, seconds: float) -> None:
        with written_whole(self.folder(out) / DONE) as file:
            file.write(json.dumps({"settings": self.settings, "seconds": round(seconds, 1)}, indent=2).encode())


def cells_of(arms: Sequence[Arm], seeds: Sequence[int]) -> list[GridCell]:
    """Returns every arm with every seed, in the order to run them.

    The first arm's runs come first and warm up the seeds' models in parallel; the others follow seed by seed, so that
    the arms can be compared after an interruption.
    """
    from verl_ext.lab.arms import setup_of

    steps = setup_of(arms[0], seeds[0]).config.trainer.total_training_steps
    first, *others = arms
    return [
        *(GridCell(first, seed, steps) for seed in seeds),
        *(GridCell(arm, seed, steps) for seed in seeds for arm in others),
    ]


@dataclass
class GridResult:
    """The unfinished runs of a grid.

    Attributes:
        failed: the error of each, in one line.
        interrupted: True after Ctrl-C.
    """

    failed: dict[GridCell, str] = field(default_factory=dict)
    interrupted: bool = False


def run_missing(cells: Sequence[GridCell], out: Path, jobs: int | None, console: "Console") -> GridResult:
    """Runs the cells that `out` does not have yet with these settings. Shows a bar in a terminal, elsewhere a line for
    each finished run.

    Args:
        jobs: runs at a time; None for one per core.
    """
    from rich import progress

    from verl_ext.lab.arms import run_arm

    out.mkdir(parents=True, exist_ok=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    left, changed = left_to_do(cells, out)
    for name, keys in changed.items():
        say(f"{name} runs again, because these settings have changed: {', '.join(keys)}")
    runs, ended, steps = len(cells), len(cells) - len(left), cells[0].steps
    if ended:
        say(f"{ended} of {runs} runs are done already, in {out}")
    parts = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("steps, {task.fields[ended]} of {task.fields[runs]} runs,"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("elapsed,"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    result, at = GridResult(), Counter[GridCell]()
    with (
        closing(run_grid(left, out, run_arm, jobs or len(os.sched_getaffinity(0)))) as events,
        progress.Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=runs * steps, completed=ended * steps, ended=ended, runs=runs)
        try:
            for cell, event in events:
                reached = steps if isinstance(event, str) else event  # a run may end before its last step
                bar.advance(task, max(reached - at[cell], 0))
                at[cell] = reached
                if isinstance(event, str):
                    ended += 1
                    bar.update(task, ended=ended)
                    if event:
                        result.failed[cell] = event
                        say(f"{cell} failed: {event}")
                    elif not console.is_terminal:
                        say(f"{ended} of {runs}: {cell}")
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def left_to_do(cells: Sequence[GridCell], out: Path) -> tuple[list[GridCell], dict[str, list[str]]]:
    """Returns the unfinished runs, and for each arm done with other settings, the names of the changed settings."""
    left: list[GridCell] = []
    changed: dict[str, list[str]] = {}
    for cell in cells:
        before = cell.settings_done(out)
        if before == cell.settings:
            continue
        left.append(cell)
        if before is not None:
            keys = [key for key, value in cell.settings.items() if before.get(key) != value]
            changed[cell.arm.name] = list(dict.fromkeys([*changed.get(cell.arm.name, []), *keys]))
    return left, changed


def run_grid(
    cells: Iterable[GridCell], out: Path, run: RunArm, jobs: int
) -> Generator[tuple[GridCell, int | str], None, None]:
    """Runs the cells, `jobs` at a time. Yields the number of each step that a run has made, and at its end the error in
    one line, which is empty after a success.

    A failing run does not stop the others. To stop early, close the iterator (`contextlib.closing`): it ends all
    processes. Interrupted runs count as unfinished.

    Args:
        run: `verl_ext.lab.arms.run_arm`, or another function of a module: the processes import it from there.
    """
    waiting, running = deque(cells), dict[Connection, tuple[GridCell, ForkServerProcess]]()
    _prepare(run)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                with _defer_ctrl_c():
                    events, theirs = FORKS.Pipe(duplex=False)
                    process = FORKS.Process(target=_work, args=(run, cell, out, theirs), daemon=True)
                    process.start()
                    theirs.close()  # now only the worker holds that end: reading ends if it dies
                    running[events] = cell, process
            wait(running)
            for events in [each for each in running if each.poll()]:
                cell, process = running[events]
                try:
                    event = events.recv()
                except EOFError:
                    process.join()
                    code = process.exitcode or 0
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                    event = f"its process {how}, without an error message; see the log in its folder"
                if isinstance(event, str):
                    del running[events]
                    events.close()
                    process.join()
                yield cell, event
    finally:
        for _, process in running.values():
            process.kill()
        for events, (_, process) in running.items():
            process.join()
            events.close()


def _prepare(run: RunArm) -> None:
    """Starts the process from which the runs are forked. It imports the packages while the first run waits.

    The runs have ENVIRONMENT and ignore Ctrl-C: the command decides which ones end.
    """
    FORKS.set_forkserver_preload([run.__module__, __name__])
    heeding, before = signal.signal(signal.SIGINT, signal.SIG_IGN), dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, heeding)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _defer_ctrl_c() -> Iterator[None]:
    """Defers a Ctrl-C to the end of the block: a partial start would leave a process that nothing tracks."""
    heard = list[int]()
    heeding = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeding)
        for number in heard[:1]:
            signal.raise_signal(number)


def _work(run: RunArm, cell: GridCell, out: Path, events: Connection) -> None:
    """Runs one cell, in its own process; its output goes to the log in its folder, its steps and its end to `events`.

    If the command has ended, sending fails and the run ends at its next step: no worker outlives the command.
    """
    start = time.monotonic()
    try:
        folder = cell.begin(out)
        _print_to(folder / LOG)
        run(cell.arm, cell.seed, folder, events.send)
        cell.mark_done(out, time.monotonic() - start)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        events.send(printable(" ".join(f"{kind}{error}".split())))
    else:
        events.send("")


def _print_to(log: Path) -> None:
    """Redirects the descriptors, not only Python's streams: C code prints too, and would tear the progress bar."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
