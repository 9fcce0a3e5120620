"""How the processes of a log ended: the last line of a traceback, or the words of whoever killed them."""

import re
from dataclasses import dataclass

from verl_ext.guard.state import Event
from verl_ext.report.sources.table import FIRST_STEPS

ENDED = "ended"  # rule and action of the event
SHOWN = 200  # characters of the error
KEPT = 4 << 20  # bytes behind the last row
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
RAY_PREFIX = re.compile(r"^\s*\([^()\n]{1,80}\bpid=\d+[^()\n]{0,80}\)\s?")
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
# What a line must have to be looked at; bytes, because most lines of a log have none of it.
SIGNS = re.compile(
    rb"Traceback|Error|Exception|Interrupt|[Kk]illed|KILLED|CANCELLED|TIME LIMIT|oom|OOM|fault|Bus error"
    rb"|exit code|died|final validation|Final validation|Training Progress: 100%"
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
    (re.compile(r"(?:^|: )(?:line \d+: +\d+ )?Killed\b(?!\w)"), "a kill (SIGKILL)"),
    (re.compile(r"Segmentation fault|Fatal Python error: (\w[\w ]*)"), "a segmentation fault"),
    (re.compile(r"Bus error"), "a bus error"),
    (re.compile(r"terminated with exit code 137"), "a kill (exit code 137)"),
)
# Errors that only report that another process is gone: the cause is an earlier line.
FOLLOWING = re.compile(
    r"SystemExit|KeyboardInterrupt|(?:ray\.exceptions\.)?(?:ActorDiedError|ActorUnavailableError|WorkerCrashedError"
    r"|OwnerDiedError)|torch\.distributed\.elastic|ChildFailedError|\w*(?:BrokenPipe|ConnectionReset|Connection)Error"
    r"|subprocess\.CalledProcessError"
)
FINISHED = re.compile(r"[Ff]inal validation metrics|Training Progress: 100%")


def plain(line: bytes) -> str:
    """Returns a line as text, without colours."""
    return ANSI.sub("", line.decode("utf-8", errors="replace"))


@dataclass(frozen=True)
class _End:
    run: int  # from 1
    step: int
    what: str
    rank: int  # 2: killed from outside; 1: an error; 0: an error that follows from another


class Ends:
    """Looks for the ends of a log's processes.

    An error ends a process if no row of a later step follows: either none at all, or the steps go back, because the run
    was started again. So only what stands behind such a row is looked at.
    """

    def __init__(self) -> None:
        self._run = 1  # counted as table.py does
        self._step: int | None = None
        self._found: tuple[_End, ...] = ()
        self._behind: list[bytes] = []  # what stands behind the last row
        self._size = 0

    def row(self, step: int) -> None:
        """Notes a row of a step."""
        if self._step is not None and step <= self._step:
            self._found = (*self._found, *self._look())
            self._run += step <= FIRST_STEPS and step < self._step
        self._step = step
        if self._size:
            self._behind, self._size = [], 0

    def add(self, text: bytes) -> None:
        """Notes text without a row. If there is much of it, only its beginning and its end are kept."""
        if self._step is None:
            return
        self._behind.append(text)
        self._size += len(text)
        if self._size > 2 * KEPT:
            kept = b"".join(self._behind)
            self._behind = [kept[: KEPT // 2], b"\n", kept[-KEPT // 2 :]]
            self._size = KEPT + 1

    def events(self, run: int, runs: int, tail: bytes = b"") -> tuple[Event, ...]:
        """Returns the ends of one of the log's runs; of the last one, if the table counts them otherwise.

        Args:
            tail: what follows the last newline, if it has no row.
        """
        number = run if runs == self._run else self._run - (runs - run)
        return tuple(
            Event(end.step, ENDED, "", None, None, ENDED, f"ended at step {end.step} by {end.what}")
            for end in (*self._found, *self._look(tail))
            if end.run == number
        )

    def _look(self, tail: bytes = b"") -> tuple[_End, ...]:
        """Returns how the process of the last row ended, if it did: its last error, but a killer before all errors, and
        an error before those that follow from it."""
        found: _End | None = None
        if self._step is None:
            return ()
        for line in b"".join([*self._behind, tail]).splitlines():
            if not SIGNS.search(line):
                continue
            text = REPEATED.sub("", RAY_PREFIX.sub("", plain(line))).strip()
            if FINISHED.search(text):
                return ()
            end = _end_of(text, self._run, self._step)
            if end is not None and (found is None or end.rank >= found.rank):
                found = end
        return () if found is None else (found,)


def _end_of(line: str, run: int, step: int) -> _End | None:
    for pattern, what in KILLS:
        if found := pattern.search(line):
            return _End(run, step, what.format(*(each.lower() for each in found.groups() if each)), 2)
    if EXCEPTION.match(line):
        return _End(run, step, line[:SHOWN], 0 if FOLLOWING.match(line) else 1)
    return None
