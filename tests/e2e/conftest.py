"""Whole verl runs on CPU cores: Ray, vLLM and FSDP2, on the model of recipes/cpu_smoke."""

import sys
from pathlib import Path

import pytest
from make_assets import make_assets
from running import CLEAN_EXIT, PLAIN_VERL, REPO, SMALL, Run, run
from switching import BASE, SCHEDULE


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


@pytest.fixture(scope="session")
def command(assets):
    """command(overrides..., steps=2) -> the argument list of a run, through our entry point or verl's own."""

    def arguments(*overrides: str, steps: int = 2, plain_verl: bool = False) -> list[str]:
        entry = ("-m", "verl.trainer.main_ppo", *PLAIN_VERL) if plain_verl else ("-m", "verl_ext.main_ppo", *SMALL)
        settings = (f"assets={assets}", f"trainer.total_training_steps={steps}")
        return [*CLEAN_EXIT, sys.executable, *entry, *settings, *overrides]

    return arguments


@pytest.fixture(scope="session")
def train_in(command):
    """train_in(folder, overrides..., steps=2) -> the finished Run; the same arguments as `command`."""
    return lambda folder, *overrides, **options: run(command(*overrides, **options), folder)


@pytest.fixture
def train(train_in, tmp_path):
    """train(overrides..., steps=2) -> the finished Run, in a folder of its own."""
    return lambda *overrides, **options: train_in(tmp_path, *overrides, **options)


@pytest.fixture(scope="session")
def switching_run(assets, tmp_path_factory) -> Run:
    """One run in two turns, a tool between them, that goes on to the next entry of `switching.SCHEDULE` each step."""
    tools = f"tool_folder={REPO}/recipes/cpu_tool"
    base = ("recipe=cpu_tool", *SMALL[1:], f"assets={assets}", tools, f"trainer.total_training_steps={len(SCHEDULE)}")
    script = str(REPO / "tests" / "e2e" / "switching.py")
    return run([*CLEAN_EXIT, sys.executable, script, *base, *BASE], tmp_path_factory.mktemp("switching"), timeout=1500)
