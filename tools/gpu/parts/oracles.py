"""Runs the tests that compare the mathematics on the GPU's tensors with oracles in float64; each is a check."""

from pathlib import Path

import pytest

from gpu.record import Place, Record

TESTS = Path(__file__).parents[3] / "tests" / "unit" / "tools" / "gpu" / "test_oracles.py"
# Without the conftest files, whose packages a GPU machine may lack, and without the options of pyproject.toml.
OPTIONS = ("--noconftest", "--override-ini=addopts=--import-mode=importlib", "-p", "no:cacheprovider")


class CheckRecorder:
    """A plugin of pytest that records each test as a check, and the reason of each that is skipped as a note."""

    def __init__(self, record: Record):
        self.record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.location[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            self.record.note(f"not run: {name}: {report.longrepr[2]}")
        elif report.when == "call" or report.failed:
            self.record.check(name, report.passed, report.longreprtext)


def run(record: Record, place: Place) -> None:
    with record.trying("tests"):
        code = pytest.main([str(TESTS), *OPTIONS], plugins=[CheckRecorder(record)])
        record.check("pytest runs them", code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), str(code))
