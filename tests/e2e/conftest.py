"""Whole verl runs on CPU cores: Ray, vLLM and FSDP2, on the model of recipes/cpu_smoke."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from make_assets import make_assets
from switching import BASE, SCHEDULE

REPO = Path(__file__).parent.parent.parent
CLEAN_EXIT = (sys.executable, str(REPO / "tools" / "clean_exit.py"))
SMALL = (
    "recipe=cpu_smoke",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    f"recipe_folder={REPO}/recipes/cpu_smoke",
    f"reward.custom_reward_function.path={REPO}/tests/e2e/dense_reward.py",
)

# verl's own entry point finds the recipe through the search path.
PLAIN_VERL = ("hydra.searchpath=[pkg://verl_ext.configs]", f"+{SMALL[0]}", *SMALL[1:])


@dataclass(frozen=True)
class Run:
    """What a finished run left: exit code, console, and each step's metrics."""

    code: int
    console: str
    folder: Path

    @property
    def tail(self) -> str:
        """For a failing assertion: the end of the console."""
        return self.console[-4000:]

    @property
    def steps(self) -> list[dict[str, float]]:
        (file,) = (self.folder / "verl_ext").glob("*.jsonl")  # the file logger names it after the experiment
        return [json.loads(line)["data"] for line in file.read_text().splitlines()]


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


def run(command: list[str], folder: Path, timeout: int = 900) -> Run:
    """Run a command of the real stack in `folder`, and keep its console there."""
    finished = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "RAY_DEDUP_LOGS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    (folder / "console.log").write_text(finished.stdout)
    return Run(finished.returncode, finished.stdout, folder)


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
