"""Settings that cannot work stop with one line before Ray starts."""

import pytest
from make_assets import build_tokenizer
from transformers import LlamaConfig, Qwen3MoeConfig

from verl_ext.config import stability_config
from verl_ext.errors import ConfigError
from verl_ext.trainer.checks import apply_engine_settings, check_run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a config and a tokenizer, as check_run reads them: an MoE and a dense model."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("moe", Qwen3MoeConfig(num_experts=8)), ("dense", LlamaConfig())):
        config.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    LlamaConfig().save_pretrained(folder / "no_tokenizer")
    return folder


def check(compose, *overrides):
    config = compose(*overrides)
    check_run(config, stability_config(config.stability))
    return config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stability=icepop", "actor_rollout_ref.rollout.calculate_log_probs=False"],
            "set actor_rollout_ref.rollout.calculate_log_probs=True",
        ),
        (
            ["stability=icepop", "algorithm.rollout_correction.bypass_mode=True"],
            "set algorithm.rollout_correction.bypass_mode=False",
        ),
        (
            ["stability=icepop", "algorithm.rollout_correction.rollout_is=token"],
            "algorithm.rollout_correction.rollout_is=token and stability.correction=icepop both weight the loss",
        ),
        (
            ["stability=icepop", "actor_rollout_ref.actor.policy_loss.loss_mode=icepop"],
            "set stability.correction=none",
        ),
        (["stability=icepop", "trainer.use_v1=False"], "set trainer.use_v1=True"),
        (["stability=icepop", "actor_rollout_ref.rollout.top_p=0.9"], "set actor_rollout_ref.rollout.top_p=1"),
        (["stability=icepop", "actor_rollout_ref.rollout.top_k=50"], "actor_rollout_ref.rollout.top_k=-1"),
        (
            [
                "stability=icepop",
                "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
                "actor_rollout_ref.rollout.temperature=0.7",
            ],
            "leaves out actor_rollout_ref.rollout.temperature=0.7",
        ),
        (
            ["stability=icepop", "actor_rollout_ref.rollout.logprobs_mode=raw_logits"],
            "set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
        ),
        (
            ["stability=icepop", "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"],
            "cannot weight actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        ),
        (
            ["stability=icepop_loss", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
            "overrides the loss of stability=icepop_loss",
        ),
        (
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=icepop",
                "actor_rollout_ref.rollout.calculate_log_probs=False",
            ],
            "set actor_rollout_ref.rollout.calculate_log_probs=True",
        ),
        (
            ["stability=icepop_loss", "algorithm.rollout_correction.rollout_is=sequence"],
            "set algorithm.rollout_correction.rollout_is=null",
        ),
        (
            ["stability=none", "stability.router_agreement=true", "model_engine=megatron"],
            "no adapter for actor_rollout_ref.actor.strategy=megatron",
        ),
        (
            [
                "stability=none",
                "stability.router_agreement=true",
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            ],
            "ulysses_sequence_parallel_size=2",
        ),
        (
            [
                "stability=none",
                "stability.router_agreement=true",
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
            ],
            "ulysses_sequence_parallel_size=4",
        ),
        (
            [
                "stability=none",
                "stability.router_agreement=true",
                "actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
            ],
            "pipeline_model_parallel_size=2",
        ),
        (
            ["stability=none", "stability.router_agreement=true", "actor_rollout_ref.rollout.name=sglang"],
            "set actor_rollout_ref.rollout.name=vllm",
        ),
        (
            ["stability=none", "stability.cascade_attention=off", "actor_rollout_ref.rollout.name=sglang"],
            "set stability.cascade_attention=default",
        ),
        (
            [
                "stability=none",
                "stability.cascade_attention=on",
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
            ],
            "contradicts stability.cascade_attention=on",
        ),
    ],
)
def test_a_combination_that_cannot_work_names_the_remedy(compose, models, overrides, message):
    with pytest.raises(ConfigError) as error:
        check(
            compose,
            f"actor_rollout_ref.model.path={models}/moe",
            "actor_rollout_ref.rollout.name=vllm",
            *overrides,
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)


ROUTING = ("stability=none", "stability.router_agreement=true", "actor_rollout_ref.rollout.name=vllm")


def test_routing_of_a_dense_model_is_refused(compose, models):
    with pytest.raises(ConfigError, match=r"model.path=.*dense is a dense model; set stability.router_agreement"):
        check(compose, *ROUTING, f"actor_rollout_ref.model.path={models}/dense")


def test_a_model_path_that_does_not_exist_is_named(compose):
    with pytest.raises(ConfigError, match=r"model.path=/no/such/model does not exist"):
        check(compose, "stability=icepop", "actor_rollout_ref.model.path=/no/such/model")


def test_routing_of_an_moe_passes_and_sets_the_rollout_to_return_it(compose, models):
    config = check(compose, *ROUTING, f"actor_rollout_ref.model.path={models}/moe")
    assert not config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    apply_engine_settings(config, stability_config(config.stability))
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


def test_a_missing_tokenizer_is_named(compose, models):
    with pytest.raises(ConfigError, match=r"no_tokenizer has no tokenizer.*tokenizer_path"):
        check(compose, "stability=icepop", f"actor_rollout_ref.model.path={models}/no_tokenizer")


@pytest.mark.parametrize(("setting", "disabled"), [("on", False), ("off", True)])
def test_cascade_attention_becomes_vllms_argument(compose, models, setting, disabled):
    config = check(
        compose,
        f"stability.cascade_attention={setting}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.model.path={models}/moe",
    )
    apply_engine_settings(config, stability_config(config.stability))
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn is disabled


def test_nothing_is_set_where_nothing_is_asked_for(compose):
    config, untouched = compose("stability=icepop"), compose("stability=icepop")
    apply_engine_settings(config, stability_config(config.stability))
    assert config == untouched
