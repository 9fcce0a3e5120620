import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from recipes.make_assets import build_tokenizer
from tests.support.problems import check_run, features_of
from verl_ext.base.errors import ConfigError
from verl_ext.features.table import apply_engine_settings


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with a config and a tokenizer, as check_run reads them: an MoE and a dense model."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("moe", Qwen3MoeConfig(num_experts=8)), ("dense", LlamaConfig())):
        config.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    LlamaConfig().save_pretrained(folder / "no_tokenizer")
    return folder


@pytest.fixture
def checked(compose, models):
    """checked(*overrides, model="moe") -> the config of a run with vLLM that passes, as verl gets it."""

    def run(*overrides, model="moe"):
        given = (f"actor_rollout_ref.model.path={models}/{model}", "actor_rollout_ref.rollout.name=vllm")
        config = compose(*given, *overrides)
        check_run(features_of(config))
        apply_engine_settings(features_of(config))
        return config

    return run


@pytest.fixture(scope="session")
def with_fixes():
    """with_fixes(run, overrides...) -> what `run(overrides..., fixes...)` returns with the fix of each of its errors,
    and these fixes."""

    def call(run, *overrides):
        fixes = {}
        for _ in range(5):
            try:
                return run(*overrides, *(f"{setting}={value}" for setting, value in fixes.items())), fixes
            except ConfigError as error:
                if not error.fix:
                    raise
                fixes |= dict(one.split("=", 1) for one in error.fix)
        raise AssertionError(f"{overrides} is still refused with {fixes}")

    return call
