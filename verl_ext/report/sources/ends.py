"""How the processes of a log ended: the last line of a traceback, or the words of whoever killed them."""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from verl_ext.guard.state import Event
from verl_ext.report.run import ENDED
from verl_ext.report.sources.table import FIRST_STEPS

ERROR_CHARACTERS = 200  # characters of the error
KEPT_BYTES = 4 << 20  # bytes behind the last row
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What launchers and loggers put in front of a line: Ray, torchrun, `srun --label`, a time, a level.
PREFIX = re.compile(
    r"\s*(?:\([^()\n]{1,80}\bpid=\d+[^()\n]{0,80}\)|\[rank\d+\]:?|\d{1,4}:(?=\s)"
    r"|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*\]?:?"
    r"|\[?(?:ERROR|CRITICAL|WARNING|INFO)\]?(?: \d\d-\d\d \d\d:\d\d:\d\d)?(?: \[[^\]\n]{1,80}\])?:?(?=\s))\s?"
)
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
TRACEBACK = "Traceback (most recent call last)"
NEAR_LINES = 6  # lines at the end of a text, where an error without a traceback counts too
# What a line must have to be looked at; bytes, because most lines of a log have none of it.
SIGNS = re.compile(
    rb"Traceback|Error|Exception|Interrupt|[Kk]illed|KILL|CANCELLED|oom|OOM|fault|Bus error|exit ?code|Watchdog"
    rb"|inal validation|%\|"
)
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?:\([\w., ]*\))?(?:: .*|$)")
# What killed a process from outside, in the words of Slurm, Ray, Kubernetes, the shell and the kernel.
KILLS = (
    (re.compile(r"slurmstepd: .*CANCELLED .*DUE TO TIME LIMIT"), "Slurm's time limit"),
    (re.compile(r"slurmstepd: .*CANCELLED .*DUE TO (PREEMPTION|NODE FAILURE)"), "Slurm, {0}"),
    (re.compile(r"slurmstepd: .*\*\*\* (?:JOB|STEP) .*CANCELLED"), "a cancelled Slurm job"),
    (re.compile(r"(?i)slurmstepd: .*oom.?kill|OOM Killed|oom-kill:|Out of memory: Killed process"), "the OOM killer"),
    (re.compile(r"OOMKilled"), "Kubernetes' OOM killer"),
    (
        re.compile(r"killed due to the node running low on memory|ray\.exceptions\.OutOfMemoryError"),
        "Ray's memory monitor",
    ),
    (
        re.compile(r"(?:^|task \d+: )Killed$|line \d+: +\d+ Killed\s|Signal 9 \(SIGKILL\)|exitcode *: -9\b"),
        "a kill (SIGKILL)",
    ),
    (re.compile(r"Segmentation fault|Fatal Python error: (\w[\w ]*)"), "a segmentation fault"),
    (re.compile(r"Bus error"), "a bus error"),
    (re.compile(r"terminated with exit code 137"), "a kill (exit code 137)"),
)
# Errors that only report that another process is gone: the cause is an earlier line.
FOLLOWING = re.compile(
    r"SystemExit|KeyboardInterrupt|(?:ray\.exceptions\.)?(?:ActorDiedError|ActorUnavailableError|WorkerCrashedError"
    r"|OwnerDiedError)|torch\.distributed\.elastic|ChildFailedError|\w*(?:BrokenPipe|ConnectionReset|Connection)Error"
    r"|subprocess\.CalledProcessError|(?:[\w.]+\.)?(?:DistBackendError|EngineDeadError)"
)
NCCL = re.compile(r"Watchdog caught collective operation timeout")
FINISHED = re.compile(r"[Ff]inal validation metrics|Training Progress: 100%")
BAR = re.compile(r"\d+%\|.*(?:it/s|s/it)")
HANDLED = 2  # times that later steps followed an error which the run's processes handle
ALIKE = 40  # characters by which an error is known again, digits aside
# Errors that no process goes on with, and those whose words do not tell one from another.
FATAL = re.compile(r"[Oo]ut ?[Oo]f ?[Mm]emory|CUDA|NCCL|RayTaskError|^[\w.]+$")
RESTARTED = re.compile(rb"Started a local Ray instance|to existing Ray cluster|Resuming from|Training from scratch")
BARS_BEHIND = 3  # progress bars behind an error; one is printed again when a process ends


def plain(line: bytes) -> str:
    """Returns a line as text, without colours."""
    return ANSI.sub("", line.decode("utf-8", errors="replace"))


@dataclass(frozen=True)
class Error:
    """What ended a process.

    Attributes:
        rank: 3: a kill from outside; 2: an error; 1: a timeout of NCCL, where another rank may have failed; 0: an error
            that follows from another one.
    """

    what: str
    rank: int

    @property
    def kind(self) -> str:
        """What is alike in the same error elsewhere."""
        return re.sub(r"\d+", "", self.what)[:ALIKE]


def last_error(text: bytes, handled: Collection[str] = ()) -> Error | None:
    """Returns the error that a text of a log ends with: the last of the highest rank; None if there is none.

    An error without a traceback counts near the end only, because answers of models and handled errors look alike. None
    counts if progress bars follow. After the run had finished, only a traceback or a kill does.

    Args:
        handled: kinds of errors that this run's processes handle.
    """
    found: Error | None = None
    traced, finished, bars = False, False, 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not SIGNS.search(line):
            continue
        said = _without_prefixes(plain(line))
        if FINISHED.search(said):
            found, traced, finished, bars = None, False, True, 0
        elif BAR.search(said):
            bars += 1
            if bars >= BARS_BEHIND:
                found, traced = None, False
        elif TRACEBACK in said:
            traced = True
        elif (error := _error_of(said)) and error.kind not in handled:
            seen = traced if error.rank == 2 else error.rank == 3
            if seen or (not finished and (error.rank < 2 or number > len(lines) - NEAR_LINES)):
                found, bars = (error if found is None or error.rank >= found.rank else found), 0
    return found


def _without_prefixes(line: str) -> str:
    line = REPEATED.sub("", line).strip()
    while prefix := PREFIX.match(line):
        line = line[prefix.end() :]
    return line


def _error_of(line: str) -> Error | None:
    for pattern, what in KILLS:
        if found := pattern.search(line):
            return Error(what.format(*(each.lower() for each in found.groups() if each)), 3)
    if NCCL.search(line):
        return Error("a timeout of NCCL (the watchdog)", 1)
    if EXCEPTION.match(line):
        return Error(line[:ERROR_CHARACTERS], 0 if FOLLOWING.match(line) else 2)
    return None


class Ends:
    """Looks for the ends of a log's processes.

    An error ends a process if no row of a later step follows: either none at all, or the steps go back, because the run
    was started again. So only the text that follows such a row is examined. An error that later steps followed HANDLED
    times, without a restart, is one that the run goes on with, such as an answer's that a reward cannot read.
    """

    def __init__(self) -> None:
        self._run = 1  # counted as table.py does
        self._step: int | None = None
        self._found: tuple[tuple[int, int, Error], ...] = ()  # (run, step, error)
        self._behind: list[bytes] = []  # the text after the last row
        self._size = 0
        self._survived: Counter[str] = Counter()  # kind of an error -> rows of a later step that followed it

    def row(self, step: int, validates: bool = False) -> None:
        """Notes a row of a step. A row that only validates may belong to the step before it."""
        if self._step is not None and (step < self._step or (step == self._step and not validates)):
            self._found = (*self._found, *self._look())
            self._run += step <= FIRST_STEPS and step < self._step
        elif TRACEBACK.encode() in (text := b"".join(self._behind)) and not RESTARTED.search(text):
            lines = (_without_prefixes(plain(line)) for line in text.splitlines() if SIGNS.search(line))
            found = {error for line in lines if (error := _error_of(line)) and error.rank == 2}
            self._survived.update({error.kind for error in found if not FATAL.search(error.what)})
        self._step = step
        if self._size:
            self._behind, self._size = [], 0

    def add(self, text: bytes) -> None:
        """Notes text without a row. If there is much of it, only its beginning and its end are kept."""
        self._behind.append(text)
        self._size += len(text)
        if self._size > 2 * KEPT_BYTES:
            kept = b"".join(self._behind)
            self._behind = [kept[: KEPT_BYTES // 2], b"\n", kept[-KEPT_BYTES // 2 :]]
            self._size = KEPT_BYTES + 1

    def events(self, run: int, runs: int, tail: bytes = b"") -> tuple[Event, ...]:
        """Returns the ends of one of the log's runs; of the last one, if the table counts them differently.

        Args:
            tail: what follows the last newline, if it has no row.
        """
        number = run if runs == self._run else self._run - (runs - run)
        return tuple(
            Event(step, ENDED, "", None, None, ENDED, f"ended at step {step} by {error.what}")
            for of, step, error in (*self._found, *self._look(tail))
            if of == number
        )

    def _look(self, tail: bytes = b"") -> tuple[tuple[int, int, Error], ...]:
        """Returns how the process of the last row ended, if it did."""
        handled = {kind for kind, times in self._survived.items() if times >= HANDLED}
        error = None if self._step is None else last_error(b"".join([*self._behind, tail]), handled)
        return () if error is None or self._step is None else ((self._run, self._step, error),)
