"""Whole verl runs on CPU cores: Ray, vLLM and FSDP2, on the random model of recipes/cpu_tool.

Its probabilities spread over every token and every expert: short and long answers, ties of routers, all buckets filled.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.cpu_tool.make_assets import make_assets
from tests import ROOT
from tests.stack.running import CPU, PLAIN_VERL, SMALL, Run, run
from tests.stack.switching import BASE, SCHEDULE
from tests.support.forking import Forked, forked


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


@pytest.fixture(scope="session")
def stack() -> Iterator[Forked]:
    """What most runs get their processes from."""
    with forked(environment=CPU) as stack:
        yield stack


@pytest.fixture(scope="session")
def arguments(assets):
    """arguments(overrides..., steps=2) -> Python's for a run, through our entry point or verl's own."""

    def arguments(*overrides: str, steps: int = 2, plain_verl: bool = False) -> list[str]:
        entry = ("-m", "verl.trainer.main_ppo", *PLAIN_VERL) if plain_verl else ("-m", "verl_ext.main_ppo", *SMALL)
        return [*entry, f"assets={assets}", f"trainer.total_training_steps={steps}", *overrides]

    return arguments


@pytest.fixture(scope="session")
def train_in(arguments, stack):
    """train_in(folder, overrides..., steps=2) -> the finished Run."""
    return lambda folder, *overrides, **options: run(arguments(*overrides, **options), folder, stack)


@pytest.fixture
def train(train_in, tmp_path):
    """train(overrides..., steps=2) -> the finished Run, in a folder of its own."""
    return lambda *overrides, **options: train_in(tmp_path, *overrides, **options)


@pytest.fixture(scope="session")
def switching_run(assets, stack, tmp_path_factory) -> Run:
    """One run in two turns, a tool between them, that goes on to the next entry of `switching.SCHEDULE` each step."""
    tools = f"tool_folder={ROOT}/recipes/cpu_tool"
    base = ("recipe=cpu_tool", *SMALL[1:], f"assets={assets}", tools, f"trainer.total_training_steps={len(SCHEDULE)}")
    return run(["-m", "tests.stack.switching", *base, *BASE], tmp_path_factory.mktemp("switching"), stack)
