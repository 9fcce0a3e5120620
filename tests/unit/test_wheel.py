"""A wheel built from what git tracks holds the code, the configs and the entry points."""

import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests import ROOT


@pytest.mark.slow
def test_a_wheel_from_a_clean_checkout_holds_configs_and_entry_points(tmp_path):
    archive = tmp_path / "source.tar"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tarfile.open(archive, "w") as tar:
        for name in tracked.split("\0"):
            if name and (ROOT / name).exists():
                tar.add(ROOT / name, name)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "source", filter="data")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, "./source"],
        cwd=tmp_path,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (entry_points,) = (file.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    for config in (ROOT / "configs").rglob("*.yaml"):
        assert f"verl_ext/configs/{config.relative_to(ROOT / 'configs')}" in names
    assert {
        "verl_ext/plugin.py",
        "verl_ext/core/mismatch.py",
        "verl_ext/cpu/vllm.py",
        "verl_ext/base/metrics/table.md",
    } <= names
    assert not any(name.startswith(("tests/", "configs/", "recipes/")) for name in names)
    for line in (
        "verl-ext = verl_ext.cli:main",
        "verl_ext = verl_ext.plugin",
        "verl_ext = verl_ext.upstream.vllm_plugin:register",
    ):
        assert line in entry_points
