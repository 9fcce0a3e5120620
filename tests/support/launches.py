"""The settings of the whole runs, found without running one: their tests are run up to where they would start it."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest

from tests import ROOT
from tests.stack import replaying, running, switching
from tests.support import forking

STACK = ROOT / "tests" / "stack"
# These start an engine alone, or build a cluster or a file system before a run on it, with settings that others have.
LEFT_OUT = ("test_clusters.py", "test_kills.py", "test_sglang_engine.py")
FILES = [
    file
    for file in sorted(STACK.glob("test_*.py"))
    if running.__name__ in file.read_text(encoding="utf-8") and file.name not in LEFT_OUT
]
NO_STEP = "no_step"  # the mark of a test whose run ends before its first step
NOWHERE = "/nowhere/python"


@dataclass(frozen=True)
class Launch:
    """A launch of a whole run, or a step of one that changes its settings as it goes.

    Attributes:
        test: the name of the first test that starts it.
        module: what `python -m` runs.
        overrides: of Hydra, each setting once.
    """

    test: str
    module: str
    overrides: tuple[str, ...]


class Recorder:
    """The plugin of pytest that notes each run's command."""

    def __init__(self) -> None:
        self.item: pytest.Item
        self.commands: dict[tuple[str, ...], str] = {}  # the command -> the first test that starts it
        self.failed: list[str] = []

    def note(self, command: list[str], *_: object, **__: object) -> None:
        if not self.item.get_closest_marker(NO_STEP):
            self.commands.setdefault(tuple(map(str, command)), self.item.originalname)
        pytest.skip("noted")

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.item = item

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.longreprtext)


@contextlib.contextmanager
def unforked(*options: str, environment: dict[str, str] | None = None) -> Iterator[forking.Forked]:
    yield forking.Forked({name: NOWHERE for name in forking.VARIABLES})


def launches() -> list[Launch]:
    """Every launch of a whole run that makes a step."""
    recorder = Recorder()
    with (
        mock.patch.multiple(running, run=recorder.note, live=recorder.note),
        mock.patch.object(forking, "forked", unforked),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        options = ("-m", "e2e", "-p", "no:cacheprovider", "-p", "no:xdist")
        pytest.main([*map(str, FILES), *options], plugins=[recorder])
    assert not recorder.failed, recorder.failed[0]
    return [launch for command, test in recorder.commands.items() for launch in _steps(list(command), test)]


def _steps(command: list[str], test: str) -> Iterator[Launch]:
    """Those of a command; none where our entry point does not run."""
    module, *arguments = command[command.index("-m") + 1 :]
    given = [one for one in arguments if "=" in one]
    for more in _changes(module, arguments, given):
        last = {one.partition("=")[0].lstrip("+"): one for one in (*given, *more)}
        yield Launch(test, module, tuple(last.values()))


def _changes(module: str, arguments: list[str], given: list[str]) -> list[tuple[str, ...]]:
    """Returns what each step of a launch sets by itself."""
    if module == switching.__name__:
        return switching.SCHEDULES[arguments[0]]
    if module == replaying.__name__:
        entries = dict.fromkeys(replaying.SCHEDULE)
        return [tuple(f"{name}={value}" for name, value in replaying.settings_of(entry).items()) for entry in entries]
    return [()] if module.startswith(("verl_ext.", "tests.")) else []
