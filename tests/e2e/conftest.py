"""Whole verl runs on CPU cores: Ray, vLLM and FSDP2, on the model of recipes/cpu_smoke."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from make_assets import make_assets

REPO = Path(__file__).parent.parent.parent
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
        lines = (self.folder / "verl_ext" / "cpu_smoke.jsonl").read_text().splitlines()
        return [json.loads(line)["data"] for line in lines]


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


@pytest.fixture
def command(assets):
    """command(overrides..., steps=2) -> the argument list of a run, through our entry point or verl's own."""

    def arguments(*overrides: str, steps: int = 2, plain_verl: bool = False) -> list[str]:
        entry = ("verl.trainer.main_ppo", *PLAIN_VERL) if plain_verl else ("verl_ext.main_ppo", *SMALL)
        scope = (sys.executable, str(REPO / "tools" / "clean_exit.py"))
        settings = (f"assets={assets}", f"trainer.total_training_steps={steps}")
        return [*scope, sys.executable, "-m", *entry, *settings, *overrides]

    return arguments


@pytest.fixture
def train(command, tmp_path):
    """train(overrides..., steps=2) -> the finished Run; the same arguments as `command`."""

    def run(*overrides: str, **options) -> Run:
        finished = subprocess.run(
            command(*overrides, **options),
            cwd=tmp_path,
            env=os.environ | {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "RAY_DEDUP_LOGS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        (tmp_path / "console.log").write_text(finished.stdout)
        return Run(finished.returncode, finished.stdout, tmp_path)

    return run
