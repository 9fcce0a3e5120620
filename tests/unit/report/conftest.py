"""A small run on disk, a folder for its report, and a browser that shows it."""

from pathlib import Path

import pytest

from tests.support.browser import launched
from tests.unit.report.made_runs import make, write


@pytest.fixture
def file(tmp_path) -> Path:
    return write(make({"critic/score/mean": [0.1, 0.2, 0.3]}), tmp_path / "run.jsonl")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def browser():
    with launched() as running:
        yield running
