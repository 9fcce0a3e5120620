"""The runs of an experiment: one process each, forked from a process that has imported the packages. Finished runs are
not repeated."""

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
    """Runs the cells that `out` does not have yet with these settings, and shows the progress.

    Args:
        jobs: runs at a time; None for one per core.
    """
    from verl_ext.lab.arms import run_arm

    out.mkdir(parents=True, exist_ok=True)
    left, changed = left_to_do(list(cells), out)
    for name, keys in changed.items():
        console.print(
            f"{name} runs again, because these settings have changed: {', '.join(keys)}", highlight=False, markup=False
        )
    if done := len(cells) - len(left):
        console.print(f"{done} of {len(cells)} runs are done already, in {out}", highlight=False, markup=False)
    with closing(run_grid(left, out, run_arm, jobs or len(os.sched_getaffinity(0)))) as events:
        return _show_progress(events, len(left), len(cells), cells[0].steps, console)


def left_to_do(cells: list[GridCell], out: Path) -> tuple[list[GridCell], dict[str, list[str]]]:
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


@dataclass(frozen=True)
class RunStep:
    """A run has made this many steps."""

    cell: GridCell
    step: int


@dataclass(frozen=True)
class RunEnd:
    """A run has ended, successfully if `error`, one line, is empty."""

    cell: GridCell
    error: str = ""


def run_grid(cells: Iterable[GridCell], out: Path, run: RunArm, jobs: int) -> Generator[RunStep | RunEnd, None, None]:
    """Runs the cells, `jobs` at a time, and yields each step and each end as it comes.

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
                    events, process = _start(run, cell, out)
                    running[events] = cell, process
            ready = wait(running)
            for events in [each for each in running if each in ready]:
                cell, process = running[events]
                event = _receive(events, cell, process)
                if isinstance(event, RunEnd):
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


def _show_progress(
    events: Iterator[RunStep | RunEnd], left: int, runs: int, steps: int, console: "Console"
) -> GridResult:
    """Shows the events of a grid until it ends: a bar in a terminal, elsewhere a line for each finished run.

    Args:
        left: number of runs to make, of `runs` in total; the others were done before.
        steps: steps of a run.
    """
    from rich import progress

    parts = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("steps, {task.fields[ended]} of {task.fields[runs]} runs,"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("elapsed,"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    result, at, ended = GridResult(), Counter[GridCell](), runs - left
    with progress.Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=runs * steps, completed=ended * steps, ended=ended, runs=runs)
        try:
            for event in events:
                reached = event.step if isinstance(event, RunStep) else steps  # a run may end before its last step
                bar.advance(task, max(reached - at[event.cell], 0))
                at[event.cell] = max(reached, at[event.cell])
                if not isinstance(event, RunEnd):
                    continue
                ended += 1
                bar.update(task, ended=ended)
                line = "" if console.is_terminal else f"{ended} of {runs}: {event.cell}"
                if event.error:
                    result.failed[event.cell] = event.error
                    line = f"{event.cell} failed: {event.error}"
                if line:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def _start(run: RunArm, cell: GridCell, out: Path) -> tuple[Connection, ForkServerProcess]:
    events, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_work, args=(run, cell, out, theirs), daemon=True)
    process.start()
    theirs.close()  # now only the worker holds that end: reading ends if it dies
    return events, process


def _receive(events: Connection, cell: GridCell, process: ForkServerProcess) -> RunStep | RunEnd:
    try:
        return events.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return RunEnd(cell, f"its process {how}, without an error message; see the log in its folder")


def _prepare(run: RunArm) -> None:
    """Starts the process from which the runs are forked. It imports the packages while the first run waits.

    The runs have ENVIRONMENT and ignore Ctrl-C: the command decides which ones end.
    """
    FORKS.set_forkserver_preload([run.__module__, __name__])
    heeding, before = signal.signal(signal.SIGINT, signal.SIG_IGN), {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, heeding)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
        run(cell.arm, cell.seed, folder, lambda step: events.send(RunStep(cell, step)))
        cell.mark_done(out, time.monotonic() - start)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        events.send(RunEnd(cell, printable(" ".join(f"{kind}{error}".split()))))
    else:
        events.send(RunEnd(cell))


def _print_to(log: Path) -> None:
    """Redirects the descriptors, not only Python's streams: C code prints too, and would tear the progress bar."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
