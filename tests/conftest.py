"""Shared fixtures: the CPU platform, and the real composed config."""

import multiprocessing.spawn
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import ROOT

if TYPE_CHECKING:
    from tests.support.forking import Forked

# Whether a change passes is no matter of luck: the full profile and the fast one try the same examples in each run.
# HYPOTHESIS_PROFILE=explore tries others. Cores are shared: an example that is slow on a busy machine is no failure.
settings.register_profile("full", deadline=None, derandomize=True)
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))

# Before anything imports verl: its platform is chosen once.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # a pipe has as many columns, and workers of xdist inherit those of a terminal
# What the tests start imports as they do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def pytest_report_header() -> list[str]:
    """Warns of an editable installation of another checkout, whose configs this code would use."""
    installed = Path(str(files("verl_ext.configs").joinpath("")))
    if installed.resolve() == (ROOT / "configs").resolve():
        return []
    return [f"configs: those of {installed}, not of this checkout; `pip install -e .` installs this one"]


def pytest_configure(config: pytest.Config) -> None:
    """Forks the workers of `-n` from one process that has imported the libraries, so that each starts faster."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        from tests.support.forking import LIBRARIES, forked

        running = ExitStack()
        config.add_cleanup(running.close)
        libraries = running.enter_context(forked("--preload", ",".join(LIBRARIES)))
        os.environ |= libraries.environment  # of the workers too: see `exported`
        config.option.tx = [f"popen//python={libraries.python}"] * len(config.option.tx)


@pytest.fixture(scope="session", autouse=True)
def quick_composition() -> Iterator[None]:
    """Hydra composes the same files once, for the command line too."""
    from tests.support import quick_compose

    with pytest.MonkeyPatch.context() as patched:
        quick_compose.install(patched.setattr)
        yield


@pytest.fixture(scope="session")
def compose() -> Callable:
    """compose("stability=icepop", ...) -> the config that `verl_ext.main_ppo` gets for these arguments."""
    import hydra

    from verl_ext.launch.compose import VERL_CONFIGS, prepare

    def compose_overrides(*overrides: str):
        with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
            return hydra.compose("ppo_trainer", overrides=prepare(overrides))

    return compose_overrides


@pytest.fixture(scope="session")
def libraries() -> Iterator["Forked"]:
    """Starts the interpreters that `fresh_python` forks from; the workers of `-n` are forked from them too."""
    from tests.support.forking import LIBRARIES, exported, forked

    if found := exported():
        yield found
        return
    with forked("--preload", ",".join(LIBRARIES)) as libraries:
        yield libraries


@pytest.fixture
def fresh_python(libraries) -> Callable:
    """fresh_python(code, argument, ..., NAME=value) -> the process that ran it.

    It has imported other libraries, which makes it quick, but nothing of verl, vLLM or verl_ext. NAME=None removes a
    variable from the environment.
    """

    def run(code: str, *arguments: str, **variables: str | None) -> subprocess.CompletedProcess:
        environment = os.environ | libraries.environment | variables
        return subprocess.run(
            [libraries.python, "-c", code, *arguments],
            env={name: value for name, value in environment.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="module")
def quick_ranks(libraries) -> Iterator[None]:
    """Makes spawned processes start with the libraries imported."""
    before = multiprocessing.spawn.get_executable()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in libraries.environment.items():
            patched.setenv(name, value)
        multiprocessing.set_executable(libraries.python)
        yield
        multiprocessing.set_executable(before)
