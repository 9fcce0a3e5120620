"""Settings of the routing: the features that they switch on, and combinations that cannot work."""

from functools import partial
from unittest import mock

import pytest
from omegaconf import OmegaConf
from transformers import DeepseekV2Config
from verl.utils.config import omega_conf_to_dataclass

from recipes.make_assets import build_tokenizer
from tests.support.fixing import assert_fixed, assert_refused
from tests.support.problems import features_of
from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS, register_correction
from verl_ext.core.loss_batch import LossChange
from verl_ext.core.losses import register_loss
from verl_ext.features.feature import Need
from verl_ext.features.losses import LOSS, LOSSES
from verl_ext.features.routing import replayed_field
from verl_ext.features.table import table_lines
from verl_ext.features.verl_config import replay_mode, verls_replay_setting
from verl_ext.upstream.agent_loop import VARIABLE, parse_extras

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ASYNC = "trainer.v1.trainer_mode=colocate_async"
STAGES_2, VERLS = f"{ROLLOUT}.pipeline_model_parallel_size=2", f"{ACTOR}.megatron.router_replay.mode"
FSDP = f"{ACTOR}.fsdp_config.router_replay.mode"

AGREEMENT = ("stability=none", "stability.router_agreement=true", "model_engine=megatron")


def compares(config):
    return Need.COMPARED_ROUTERS in features_of(config).needs


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_r3_under_fsdp_needs_no_other_setting(checked, plus):
    config = checked("stability=none", f"{plus}{FSDP}=R3")
    assert replay_mode(config) == "R3"
    assert replayed_field(config) == "routed_experts"
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert compares(config)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config)
    assert engine.router_replay.mode == "R3"


def test_r2_under_fsdp_asks_nothing_of_the_rollout(checked):
    config = checked("stability=none", f"{FSDP}=R2")
    assert replayed_field(config) == "old_routed_experts"
    assert not config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert not compares(config)


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(("preset", "mode"), [("r2", "R2"), ("r3", "R3"), ("moe", "R3"), ("quantized", "R3")])
def test_the_presets_replay_and_compare_on_each_engine(checked, preset, mode, engine):
    config = checked(f"stability={preset}", f"model_engine={engine}", ASYNC)
    assert replay_mode(config) == mode
    assert OmegaConf.select(config, verls_replay_setting(config)) == mode
    assert compares(config)
    lines = {line.name: line.setting for line in table_lines(features_of(config))}
    assert lines["routing replay"].startswith(mode)
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni"])
def test_a_preset_without_its_replay(checked, engine):
    for override in ("stability.replay=null", "stability.replay=disabled"):
        config = checked("stability=moe", f"model_engine={engine}", ASYNC, override)
        assert replay_mode(config) == "disabled" and compares(config)


def test_replay_is_off_unless_asked_for(checked):
    config = checked("stability=icepop")
    assert replay_mode(config) == "disabled"
    assert replayed_field(config) is None
    assert OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.router_replay") is None


def test_megatrons_replay_is_left_to_verl(checked):
    setting = "actor_rollout_ref.actor.megatron.router_replay.mode"
    config = checked("stability=icepop", "model_engine=megatron", f"{setting}=R3")
    assert replayed_field(config) == "routed_experts"
    assert not compares(config)
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    config = checked("stability=icepop", "model_engine=megatron", f"{setting}=R2")
    assert not config.actor_rollout_ref.rollout.enable_rollout_routing_replay


def test_on_veomni_the_routers_are_hooked_and_its_own_setting_decides_too(checked):
    setting = "actor_rollout_ref.actor.veomni.router_replay.mode"
    config = checked("stability=icepop", "model_engine=veomni", f"{setting}=R3")
    assert replayed_field(config) == "routed_experts" and compares(config)
    config = checked("stability=icepop", "model_engine=veomni", f"{setting}=R2")
    assert replayed_field(config) == "old_routed_experts" and not compares(config)
    config = checked("stability=moe", "model_engine=veomni", ASYNC)
    assert OmegaConf.select(config, setting) == "R3" and compares(config)


def test_agreement_on_megatron_asks_nothing_of_its_replay(checked):
    config = checked("stability=none", "stability.router_agreement=true", "model_engine=megatron")
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "disabled"  # the worker builds it to record
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


SHARE = ("stability=none", "stability.router_agreement=true", "stability.router_agreement_share=0.25")
LOAD_BALANCE = "actor_rollout_ref.rollout.moe_load_balance_metrics_interval"


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_a_share_is_asked_for_in_every_process_and_named(checked, engine):
    config = checked(*SHARE, f"model_engine={engine}")
    assert parse_extras(config.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["share"] == 0.25
    (feature,) = table_lines(features_of(config))
    assert feature.setting == "compute_log_prob, share 0.25"
    assert parse_extras(checked(*SHARE[:2]).ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["share"] == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{FSDP}=R2", f"without routing, which {FSDP}=R2 replays; set stability.router_agreement_share=1"),
        (f"{FSDP}=R3", f"without routing, which {FSDP}=R3 replays"),
        (f"model_engine=megatron {ACTOR}.megatron.router_replay.mode=R2", "mode=R2 replays"),
        (f"{LOAD_BALANCE}=10", f"{LOAD_BALANCE}=10 would count their tokens for expert 0; set {LOAD_BALANCE}=0"),
    ],
)
def test_what_reads_all_routing_does_not_go_with_a_share(checked, overrides, message):
    error = assert_refused(partial(checked, *SHARE, *overrides.split()), message)
    assert len(error.problems) == 1


def test_methods_that_read_agreement_do_not_go_with_a_share(checked):
    with mock.patch.dict(CORRECTIONS), mock.patch.dict(LOSSES):
        register_correction("by_agreement", reads=("router_agreement",), in_update=True)(lambda batch: LossChange())
        register_loss("of_agreement", reads=("router_agreement",))(lambda batch: LossChange())
        for override in ("stability.correction=by_agreement", f"{LOSS}.loss_mode=of_agreement"):
            with pytest.raises(ConfigError, match=f"{override} reads the routers' agreement of every token") as error:
                checked(*SHARE, override)
            assert error.value.fix == ("stability.router_agreement_share=1",)
            checked(*SHARE, override, *error.value.fix)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.model.use_remove_padding=false", "set actor_rollout_ref.model.use_remove_padding=true"),
        ("actor_rollout_ref.actor.megatron.pad_to_length=true", "set .*megatron.pad_to_length=false"),
    ],
)
def test_agreement_where_verl_cannot_record_names_the_remedy(checked, override, message):
    run = partial(checked, *AGREEMENT, "stability.metrics=true", override)
    with pytest.raises(ConfigError, match=message) as error:
        run()
    assert_fixed(error.value, run)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{FSDP}=R4", r"router_replay.mode=R4 is not known; choose one of: disabled, R2, R3"),
        (f"{FSDP}=R3 {ROLLOUT}.name=trtllm", "name=vllm, or set .*router_replay.mode=disabled"),
        (f"{FSDP}=R3 {STAGES_2}", "mode=R3 needs vLLM without pipeline parallelism"),
        (f"{FSDP}=R3 {ROLLOUT}.name=sglang {STAGES_2}", "mode=R3 needs SGLang without pipeline parallelism"),
        ("stability.replay=R4", r"stability.replay=R4 is not known; choose one of: disabled, R2, R3"),
        (
            f"stability=r3 model_engine=megatron {VERLS}=R2",
            f"stability.replay=R3 and {VERLS}=R2 ask for different replays",
        ),
        (f"stability=r3 {FSDP}=R2", rf"stability.replay=R3 and {FSDP}=R2 ask for different replays"),
        (f"model_engine=megatron {FSDP}=R3", r"is for FSDP.*leave it out and set stability.replay"),
        (
            f"model_engine=megatron {VERLS}=R3 {STAGES_2}",
            "megatron.router_replay.mode=R3 needs vLLM without pipeline parallelism",
        ),
        (f"model_engine=torchtitan {FSDP}=R3", "mode=R3 has no adapter for .*strategy=torchtitan"),
    ],
)
def test_a_replay_that_cannot_work_names_the_remedy(checked, overrides, message):
    run = partial(checked, "stability.metrics=true", *overrides.split())
    with pytest.raises(ConfigError, match=message) as error:
        run()
    assert_fixed(error.value, run)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replay_is_refused_where_some_experts_have_no_weight(checked, mode, models):
    limited = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_routed_experts": 8}
    DeepseekV2Config(**limited).save_pretrained(models / "limited")
    build_tokenizer().save_pretrained(models / "limited")
    with pytest.raises(ConfigError, match=r"(?m)topk_method=group_limited_greedy.*set .*router_replay.mode=disabled$"):
        checked(f"stability={mode.lower()}", model="limited")


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replay_of_a_dense_model_is_refused(checked, mode):
    with pytest.raises(ConfigError, match=f"mode={mode} needs a mixture of experts.*dense is a dense model") as error:
        checked("stability=none", f"{FSDP}={mode}", model="dense")
    assert error.value.fix == (f"{FSDP}=disabled",)
