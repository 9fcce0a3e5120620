"""The kit itself: a dry run on a CPU, so that no part runs for the first time on a GPU; and a tiny one on a GPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from gpu.__main__ import main
from gpu.parts import PARTS
from gpu.results import failed_checks

from tests import ROOT
from tests.support.forking import forked

# Of all that the parts import, what takes its time; one process imports it, and theirs are forked from that.
IMPORTS = (
    "triton",
    "tensordict",
    "ray",
    "transformers.modeling_utils",
    "verl.workers.engine.fsdp",
    "verl_ext.plugins.verl",
)


def states(folder):
    """Returns the state of every part; fails on a part that failed and shows why."""
    parts = json.loads((folder / "results.json").read_text(encoding="utf-8"))["parts"]
    for part in parts.values():
        if part["state"] == "failed":
            raise AssertionError([part["why"], part.get("output"), failed_checks(part)])
    return {name: part["state"] for name, part in parts.items()}


@pytest.mark.e2e
def test_the_whole_kit_runs_dry(tmp_path, monkeypatch):
    dry = {"TRITON_INTERPRET": "1", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tools")))
    with forked("--preload", ",".join(IMPORTS), environment=dry | {"PYTHONPATH": path}) as libraries:
        for name, value in (libraries.environment | {"PYTHONPATH": path}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "executable", libraries.python)
        monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--out", str(tmp_path)])
        main()
    assert states(tmp_path) == {name: "not run" if part.on_gpu_alone else "done" for name, part in PARTS.items()}


def test_the_command_says_what_it_can_do_and_what_is_wrong(tmp_path):
    def kit(*arguments):
        environment = os.environ | {"PYTHON": sys.executable}
        return subprocess.run(
            ["bash", str(ROOT / "tools/gpu.sh"), *arguments], env=environment, capture_output=True, text=True
        )

    usage = kit("--help").stdout
    assert all(part.title in usage for part in PARTS.values())
    assert "no such part: overlapp; choose from overlap, measure" in kit("overlapp").stderr
    if shutil.which("nvidia-smi") is None:
        without = kit("--out", str(tmp_path))
        assert without.returncode == 2 and "no GPU was found here" in without.stderr and "--dry" in without.stderr


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU: there is no nvidia-smi here")
@pytest.mark.parametrize("name", PARTS)
def test_a_part_on_the_gpu(name, tmp_path):
    command = ["bash", str(ROOT / "tools/gpu.sh"), "--tiny", "--out", str(tmp_path), name]
    subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, check=False)
    if (state := states(tmp_path)[name]) == "not run":
        pytest.skip(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["parts"][name]["why"])
    assert state == "done"
