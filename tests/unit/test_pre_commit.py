"""The hooks of git run the checks of the test command."""

import re

import pytest
import yaml

from tests import ROOT

FILE = ROOT / ".pre-commit-config.yaml"


def test_the_hooks_are_the_checks_of_the_test_command():
    (repo,) = yaml.safe_load(FILE.read_text(encoding="utf-8"))["repos"]
    *checks, tests = (hook["entry"] for hook in repo["hooks"])
    command = (ROOT / "tools" / "test.sh").read_text(encoding="utf-8")
    assert checks == [f".venv/bin/{line}" for line in re.findall(r"^(?:ruff|mypy).*$", command, flags=re.MULTILINE)]
    assert tests == "bash tools/test.sh --fast"


def test_pre_commit_can_read_them():
    assert pytest.importorskip("pre_commit.clientlib").load_config(str(FILE))
