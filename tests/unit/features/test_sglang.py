"""Runs with SGLang as the rollout engine: every preset passes, and features that SGLang lacks stop with one line."""

import re
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.examples import slow_cases
from tests.support.problems import check_run, check_sizes, features_of
from verl_ext.base.errors import ConfigError
from verl_ext.features.fit import fit_run
from verl_ext.features.mismatch import RAW, RAW_SETTING
from verl_ext.features.routing import sglang_model_problems
from verl_ext.features.table import apply_engine_settings
from verl_ext.features.verl_config import SGLANG_ARGUMENTS as ARGUMENTS
from verl_ext.launch import sizes
from verl_ext.launch.compose import stability_choices

ROLLOUT = "actor_rollout_ref.rollout"
MTP = "actor_rollout_ref.model.mtp"
SGLANG = f"{ROLLOUT}.name=sglang"
FSDP_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
AGREEMENT = "stability.router_agreement=true"
# Megatron's replay is verl's own; the plugin measures beside it.
VERLS_OWN = ("stability.metrics=true", "model_engine=megatron", f"{ROLLOUT}.enable_rollout_routing_replay=true")


@pytest.fixture
def checked(checked):
    """checked("stability=icepop", ...) -> the config of a run with SGLang, as verl gets it."""
    return partial(checked, SGLANG)


@pytest.mark.parametrize("name", slow_cases(sorted(stability_choices())))
def test_every_preset_runs_with_sglang(compose, models, name):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    model = (f"actor_rollout_ref.model.path={models}/moe", "data.max_response_length=8192")
    config = compose("recipe=cpu_smoke", f"stability={name}", *model, SGLANG)
    apply_engine_settings(fit_run(config, (), read_model=True))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


@pytest.mark.parametrize("recipe", slow_cases(["qwen3_30b_a3b", "qwen3_30b_a3b_async", "qwen3_30b_a3b_megatron"]))
def test_a_recipe_takes_sglang_by_one_override(compose, recipe):
    config = compose(f"recipe={recipe}", "stability=icepop", "stability.router_agreement=true", SGLANG)
    check_run(features_of(config, read_model=False))
    check_sizes(config, None)


@pytest.mark.parametrize("overrides", [["stability=none", AGREEMENT], ["stability=r3"]])
def test_routing_is_asked_for_by_verls_own_setting(checked, overrides):
    assert checked(*overrides).actor_rollout_ref.rollout.enable_rollout_routing_replay


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.logprobs_mode=raw_logprobs"],  # after the temperature all the same
        [f"+{RAW_SETTING}='1'"],
        [f"+{RAW_SETTING}='0'", f"{ROLLOUT}.temperature=0.7"],
    ],
)
def test_log_probs_that_vllm_would_not_have(checked, overrides):
    checked("stability=icepop", *overrides)


def test_log_probs_without_the_temperature_are_refused(checked, monkeypatch):
    run = partial(checked, "stability=icepop", f"{ROLLOUT}.temperature=0.7")
    run()
    monkeypatch.setenv(RAW, "true")
    said = f"{RAW}=1 has SGLang leave out {ROLLOUT}.temperature=0.7"
    with pytest.raises(ConfigError, match=re.escape(said) + ".*, or unset it") as error:
        run()
    run(*error.value.fix)


@pytest.mark.parametrize("asked", [["stability=none", AGREEMENT], ["stability=r3"], VERLS_OWN])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{ROLLOUT}.skip_tokenizer_init=false", f"{ROLLOUT}.skip_tokenizer_init=false"),
        (f"{ROLLOUT}.disaggregation.enabled=true", f"{ROLLOUT}.disaggregation.enabled=true"),
        (f"{MTP}.enable=true {MTP}.enable_rollout=true", f"{MTP}.enable_rollout=true"),
        (f"+{ARGUMENTS}.enable_hierarchical_cache=true", f"{ARGUMENTS}.enable_hierarchical_cache=true"),
    ],
)
def test_routing_that_would_not_be_the_models_is_refused(checked, asked, setting, message):
    checked("stability=icepop", *setting.split())  # without routing it is of no concern
    run = partial(checked, *asked, *setting.split())
    with pytest.raises(ConfigError, match="cannot use SGLang's routed experts with") as error:
        run()
    assert message in str(error.value)
    run(*error.value.fix)


def test_a_model_of_which_sglang_knows_no_top_k_is_refused():
    off = AGREEMENT.replace("true", "false")
    assert not [*sglang_model_problems(SimpleNamespace(num_experts_per_tok=8), "a/b", AGREEMENT, off)]
    (problem,) = sglang_model_problems(SimpleNamespace(top_k_experts=8), "a/b", AGREEMENT, off)
    assert "num_experts_per_tok" in problem.found and "path=a/b" in problem.found and problem.fix == (off,)


def test_the_engines_arguments_are_sglangs(compose, monkeypatch):
    recipe = ("recipe=qwen3_30b_a3b", SGLANG, f"+{ARGUMENTS}.moe_runner_backend=triton")
    monkeypatch.setattr(sizes, "engine_arguments", lambda engine: frozenset({"moe_runner_backend"}))
    check_sizes(compose(*recipe), None)
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang.moe_backend is not an argument of SGLang"):
        check_sizes(compose(*recipe, f"+{ARGUMENTS}.moe_backend=triton"), None)
