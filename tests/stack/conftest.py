"""Whole verl runs on CPU cores: Ray, vLLM and FSDP2, on the random model of recipes/cpu_tool.

The model spreads its probabilities over all tokens and experts. So answers are short and long, routers have ties, and
all buckets are filled.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from recipes.make_assets import make_assets
from tests.stack.running import CPU, PLAIN_VERL, SMALL, Run, in_float32, run
from tests.stack.small_models import save_model
from tests.stack.switching import BASE, ENGINES, SCHEDULES
from tests.support.forking import Forked, forked

# Two workers take the files one by one: with the longest first, both end at about the same time.
LONGEST = (
    "test_sglang_runs.py",
    "test_methods.py",
    "test_megatron_runs.py",
    "test_runs.py",
    "test_guard_runs.py",
    "test_clusters.py",
    "test_kills.py",
    "test_probe.py",
    "test_megatron_gate.py",
    "test_megatron_recipes.py",
    "test_ends.py",
    "test_sglang_engine.py",
    "test_page.py",
    "test_megatron_engine.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets("cpu_tool", folder)
    return folder


@pytest.fixture(scope="session")
def dense_lora(tmp_path_factory) -> tuple[str, ...]:
    """The overrides that train a LoRA of a dense model: vLLM has none for the experts of its CPU kernels."""
    folder = save_model(tmp_path_factory.mktemp("dense"), "dense_smoke")
    settings = (f"path={folder}", "lora_rank=8", "lora_alpha=64", "target_modules=all-linear")
    return tuple(f"actor_rollout_ref.model.{setting}" for setting in settings)


@pytest.fixture(scope="session")
def stack() -> Iterator[Forked]:
    """The server that most runs fork their processes from."""
    with forked(environment=CPU) as stack:
        yield stack


@pytest.fixture(scope="session")
def sglang_stack() -> Iterator[Forked]:
    """The same for runs that generate with SGLang."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: bash tools/setup_cpu.sh sglang")
    with forked("--rollout", "sglang", environment=CPU) as stack:
        yield stack


@pytest.fixture(scope="session")
def arguments(assets):
    """arguments(overrides..., steps=2) -> Python's for a run, through our entry point or verl's own."""

    def arguments(*overrides: str, steps: int = 2, plain_verl: bool = False) -> list[str]:
        here = (f"assets={assets}", f"trainer.total_training_steps={steps}", *overrides)
        if plain_verl:
            return ["-m", "verl.trainer.main_ppo", *PLAIN_VERL, *here]
        return ["-m", "verl_ext.main_ppo", *SMALL, *in_float32(*here)]

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
def fault_arguments(assets):
    """fault_arguments(scenario, overrides..., steps=2) -> Python's for a run of tests/stack/faults.py."""

    def arguments(scenario: str, *overrides: str, steps: int = 2, recipe: str = SMALL[0]) -> list[str]:
        settings = (recipe, *SMALL[1:], f"assets={assets}", f"trainer.total_training_steps={steps}")
        return ["-m", "tests.stack.faults", scenario, *in_float32(*settings, *overrides, recipe=recipe)]

    return arguments


@pytest.fixture(scope="session")
def with_faults(fault_arguments, request, tmp_path_factory):
    """with_faults(scenario, overrides..., steps=2) -> the finished Run."""

    def train(scenario, *overrides, forked_from="stack", **options):
        folder = tmp_path_factory.mktemp("faults")
        return run(fault_arguments(scenario, *overrides, **options), folder, request.getfixturevalue(forked_from))

    return train


@pytest.fixture(scope="session")
def switching_run_of(assets, tmp_path_factory, request) -> Callable[[str], Run]:
    """switching_run_of(engine) -> the run of that engine which changes its method at each step; answers have two turns
    with a tool between them."""

    @cache
    def train(engine: str) -> Run:
        stack = request.getfixturevalue("sglang_stack" if engine == "sglang" else "stack")
        recipe, *more = ENGINES[engine]
        steps = f"trainer.total_training_steps={len(SCHEDULES[engine])}"
        overrides = (recipe, *SMALL[1:], f"assets={assets}", steps, *BASE, *more)
        return run(["-m", "tests.stack.switching", engine, *overrides], tmp_path_factory.mktemp(engine), stack)

    return train
