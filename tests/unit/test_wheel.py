"""A wheel built from the files that git tracks: its contents, its metadata, and a run of it in an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT
from verl_ext import __version__

pytestmark = pytest.mark.slow
ONE_RUN = ("--seeds", "1", "--variants", "none", "--no-page")  # all of them take three minutes
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # tests put ROOT there


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", cwd=ROOT)
    for name in tracked.split("\0"):
        if name and (ROOT / name).exists():
            copied = folder / "source" / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copied)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, "./source")
    run(*pip, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_it_holds_configs_and_entry_points(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (entry_points,) = (file.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    for config in (ROOT / "configs").rglob("*.yaml"):
        assert f"verl_ext/configs/{config.relative_to(ROOT / 'configs')}" in names
    assert {"verl_ext/plugins/verl.py", "verl_ext/core/mismatch.py", "verl_ext/cpu/vllm.py"} <= names
    assert {"verl_ext/diagnosis/names.toml", "verl_ext/report/templates/report.html.j2"} <= names
    assert not any(name.startswith(("tests/", "configs/", "recipes/")) for name in names)
    for line in (
        "verl-ext = verl_ext.cli:main",
        "verl_ext = verl_ext.plugins.verl",
        "verl_ext = verl_ext.plugins.vllm:register",
    ):
        assert line in entry_points


def test_its_metadata_is_what_an_index_accepts(wheel):
    if not find_spec("twine"):
        pytest.skip("twine is not installed: pip install '.[dev]', or bash tools/setup_cpu.sh")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=wheel.parent)


def install(wheel, folder):
    """Returns the Python and the packages' folder of a new environment that has the wheel and nothing else."""
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (purelib,) = (folder / "venv" / "lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    return python, purelib


def required(names, found):
    """Returns the distributions that these need, with what they need in turn."""
    for name in names:
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        lines = map(Requirement, found[name].requires or ())
        required([one.name for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})], found)
    return found


def test_with_its_requirements_alone_it_reads_logs_and_checks_launches(wheel, tmp_path):
    """The environment has the packages that the wheel asks for, and the files of verl without what verl needs."""
    _, purelib = install(wheel, tmp_path)
    (described,) = metadata.distributions(name="verl-ext", path=[str(purelib)])
    lines = map(Requirement, described.requires)
    wanted = [one.name for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]
    distributions = required(wanted, {}) | {"verl": metadata.distribution("verl")}
    for distribution in distributions.values():
        for name in {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (purelib / name).exists():
                (purelib / name).symlink_to(distribution.locate_file(name))
    assert not {"torch", "ray", "transformers"} & {path.name for path in purelib.iterdir()}

    command = purelib.parents[2] / "bin" / "verl-ext"
    log = tmp_path / "run.jsonl"
    rows = [{"step": step, "data": {"critic/rewards/mean": 0.1 * step, "vllm_kl/k3": 1e-4}} for step in range(1, 9)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "The reward rose" in run(command, "report", log, cwd=tmp_path)
    assert (tmp_path / "report" / "report.html").stat().st_size
    run(command, "compare", log, log, "--no-page", cwd=tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    launch = ("recipe=qwen3_30b_a3b", "stability=moe", "assets=/shared", "--gpu", "H100")
    rows = json.loads(run(command, "doctor", *launch, "--json", cwd=tmp_path))
    assert "error" not in {row["level"] for row in rows}
    assert {"verl's validation", "hooks", "sizes"} <= {row["check"] for row in rows}
    assert any("nothing can train" in row["found"] for row in rows)
    rows = json.loads(run(command, "doctor", *launch, f"actor_rollout_ref.model.path={model}", "--json", cwd=tmp_path))
    assert not [row["found"] for row in rows if "the check itself" in row["found"]]
    run(command, "plan", *launch, cwd=tmp_path)
    lab = subprocess.run([command, "lab", "exact"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert lab.returncode == 2 and "torch is not installed" in lab.stderr


def test_installed_into_an_empty_environment_it_trains_in_the_lab(wheel, tmp_path):
    """The packages that it needs are those of this environment, whose own installation of the plugin is not seen."""
    python, purelib = install(wheel, tmp_path)
    (purelib / "borrowed.pth").write_text("\n".join(path for path in sys.path if Path(path).name == "site-packages"))

    place = run(python, "-c", "import verl_ext; print(verl_ext.__version__, verl_ext.__file__)", cwd=tmp_path)
    assert place.split() == [__version__, str(purelib / "verl_ext" / "__init__.py")]
    run(purelib.parents[2] / "bin" / "verl-ext", "lab", "exact", "--steps", "5", *ONE_RUN, cwd=tmp_path)
    assert (tmp_path / ".lab" / "exact" / "results.json").stat().st_size
