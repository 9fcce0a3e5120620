"""The extras for GPUs and their pins, against the requirements of verl and of its packages."""

import json
import subprocess
import sys
from distutils.core import run_setup
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from verl_ext.cpu.changes import VLLM_CPU
from verl_ext.launch.packages import EXTRAS

tomllib = pytest.importorskip("tomllib")

FOLDER = ROOT / "requirements"
OPTION = "--extra-index-url"  # of verl's wheelhouse; what stands below it comes from there
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.11", "sys_platform": "linux"}
GLIBC = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PLATFORMS = [*GLIBC, "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
SOURCES = {"antlr4-python3-runtime", "pylatexenc"}  # plain Python that has no wheel

each_extra = pytest.mark.parametrize("extra", EXTRAS)


def pins(extra, wheelhouse=True):
    """Canonical name -> version of an extra's file; `wheelhouse=False` leaves out what verl builds."""
    lines = (FOLDER / f"{extra}.txt").read_text(encoding="utf-8").splitlines()
    if not wheelhouse:
        lines = lines[: next(index for index, line in enumerate(lines) if line.startswith(OPTION))]
    pinned = (line.split("==") for line in lines if line and not line.startswith(("#", "-")))
    return {canonicalize_name(name): version for name, version in pinned}


@pytest.fixture(scope="module")
def overrides():
    """(packages that verl overrides, packages whose own requirements it leaves out), of gpu.toml."""
    settings = tomllib.loads((FOLDER / "gpu.toml").read_text(encoding="utf-8"))
    replaced = {canonicalize_name(Requirement(line).name) for line in settings["override-dependencies"]}
    return replaced, {canonicalize_name(one["name"]) for one in settings["dependency-metadata"]}


@pytest.fixture(scope="module")
def ours():
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        return run_setup(ROOT / "setup.py", stop_after="init")


def unmet(wanted, versions, requirements_of, without=()):
    """Returns the requirements that the pins do not meet, as `parent -> requirement`, over all pinned packages.

    Args:
        requirements_of: canonical name -> the lines of its metadata; None where they are not known.
        without: canonical names whose own requirements do not count.
    """

    def asked_by(parent, lines, extra=""):
        found = map(Requirement, lines)
        env = {**PYTHON, "extra": extra}
        return [(parent, one) for one in found if one.marker is None or one.marker.evaluate(env)]

    found, seen, todo = set(), set(), asked_by("", wanted)
    while todo:
        parent, one = todo.pop()
        name = canonicalize_name(one.name)
        if name not in versions or not one.specifier.contains(versions[name], prereleases=True):
            found.add(f"{parent} -> {name}")
            continue
        for extra in ("", *one.extras):
            if (name, extra) in seen or name in without:
                continue
            seen.add((name, extra))
            todo += asked_by(name, requirements_of(name) or (), extra)
    return found


@each_extra
def test_an_extra_is_that_of_verl(ours, extra):
    verls, *more = (Requirement(line) for line in ours.extras_require[extra])
    assert (verls.name, str(verls.specifier)) == ("verl", f"=={metadata.version('verl')}")
    assert verls.extras == set(EXTRAS[extra])
    assert [str(one) for one in more] == (["megatron-core==0.18.0"] if extra == "gpu-megatron" else [])
    assert ours.extras_require["gpu"] == ours.extras_require["gpu-fsdp"]


@each_extra
def test_the_pins_are_what_verl_and_this_project_ask_for(ours, extra):
    versions = pins(extra)
    asked = [*ours.install_requires, *ours.extras_require[extra]]
    assert unmet(asked, versions, lambda name: metadata.requires("verl") if name == "verl" else None) == set()


@each_extra
def test_the_pins_agree_with_verls_overrides(extra):
    settings = tomllib.loads((FOLDER / "gpu.toml").read_text(encoding="utf-8"))
    versions = pins(extra)
    for line in map(Requirement, settings["override-dependencies"]):
        if line.marker is not None and not line.marker.evaluate():
            assert line.name not in versions
        elif line.name in versions:
            assert line.specifier.contains(versions[line.name]), line
    for one in settings["dependency-metadata"]:
        assert "version" not in one or versions.get(one["name"], one["version"]) == one["version"]


def test_what_is_pinned_twice_and_asked_for_otherwise_is_found():
    lines = {"a": ["b>=2", "c; extra == 'more'"], "b": ["d; python_version < '3'"]}
    assert unmet(["a"], {"a": "1", "b": "2"}, lines.get) == set()
    assert unmet(["a[more]"], {"a": "1", "b": "1"}, lines.get) == {"a -> b", "a -> c"}
    assert unmet(["a"], {"a": "1"}, lines.get, without={"a"}) == set()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """described(name -> version) -> name -> pip's report of that package; each is looked up once, a second each.

    Uses a pip whose dry run reads the metadata of a wheel without downloading the wheel.
    """
    folder, known = tmp_path_factory.mktemp("pip"), {}
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", folder / "pip", "pip>=25.3"]
    subprocess.run(pip, check=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", "3.12", "--target", folder / "none", *platforms]
    report = ["--dry-run", "--no-deps", "--use-feature=fast-deps", "--report", folder / "report.json"]
    command = [sys.executable, folder / "pip" / "pip", "install", "-q", *report, *target, "-r", folder / "pins.txt"]

    def look_up(versions):
        lines = {name: f"{name}=={version}" for name, version in versions.items()}
        if new := [line for line in lines.values() if line not in known]:
            (folder / "pins.txt").write_text("\n".join(new))
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            for one in json.loads((folder / "report.json").read_text())["install"]:
                said = one["metadata"]
                known[f"{canonicalize_name(said['name'])}=={said['version']}"] = one
        return {name: known[line] for name, line in lines.items()}

    return look_up


@pytest.mark.network
@each_extra
def test_every_pin_is_a_wheel_and_asks_for_nothing_else(ours, overrides, described, extra):
    """Leaves out the packages of verl's wheelhouse, which may be out of reach."""
    found = described(pins(extra, wheelhouse=False))
    sources = {name for name, one in found.items() if not one["download_info"]["url"].endswith(".whl")}
    assert sources <= SOURCES
    asked = [*ours.install_requires, *ours.extras_require[extra]]

    def requirements(name):
        return found[name]["metadata"].get("requires_dist") if name in found else None

    replaced, without = overrides
    missing = unmet(asked, pins(extra), requirements, without)
    assert {line for line in missing if line.partition(" -> ")[2] not in replaced} == set()
    if extra == "gpu-fsdp":  # the one that pip's own resolver would take
        assert missing == set()


def cpu_pins(name):
    """Canonical name -> version of a file for CPUs, of the interpreter that runs this."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    asked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [one for one in asked if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in here}


def test_the_newest_vllm_for_cpus_is_one_that_the_patches_know():
    newest = cpu_pins("cpu-newest.txt")
    for file in ("cpu.txt", "cpu-newest.txt"):
        assert Requirement(f"x{VLLM_CPU['vllm-cpu']}").specifier.contains(cpu_pins(file)["vllm-cpu"])
    assert newest.items() & cpu_pins("cpu.txt").items() == set(), "what cpu.txt has is not said again"


def test_the_newest_vllm_for_cpus_is_the_last_that_the_matrix_runs():
    newest = (FOLDER / "cpu-newest.txt").read_text(encoding="utf-8").split("vllm-cpu==")[1].split()[0]
    script = (ROOT / "tools" / "matrix.sh").read_text(encoding="utf-8")
    (line,) = [line for line in script.splitlines() if "set -- " in line]
    assert line.split()[-1] == newest
