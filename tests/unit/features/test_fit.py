"""A preset switches on what a run can have; what the user wrote is refused."""

import pytest

from tests.support.example_launches import LAUNCHES, NOT_COMPOSED, SAMPLE, UNMEASURED, UNSCORED
from verl_ext.base.errors import ConfigError
from verl_ext.features.feature import Need
from verl_ext.features.fit import fit_run
from verl_ext.features.table import left_out, table_lines

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
VLLM = "actor_rollout_ref.rollout.name=vllm"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
ASYNC = "trainer.v1.trainer_mode=colocate_async"
PIPELINE = "model_engine=megatron actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
UNKNOWN = "actor_rollout_ref.actor.strategy=fsdp_turbo"
UNHOOKED = "stability.router_agreement=false stability.replay=disabled"
SILENT = "actor_rollout_ref.rollout.calculate_log_probs=False"


@pytest.fixture
def fit(compose):
    """fit(override, ...) -> the features of the run, and what was left out: overrides -> reason."""

    def fitted(*overrides):
        run = fit_run(compose(VLLM, *overrides), overrides, read_model=False)
        return run, {row.setting.removeprefix("now "): row.where for row in left_out(run)}

    return fitted


def names(run):
    return [chosen.name for chosen in run.stability.correction]


def test_a_preset_that_can_be_had_whole_is_left_as_it_is(fit):
    run, without = fit("stability=moe", ASYNC)
    assert without == {} and names(run) == ["tis", "opsm"]
    assert run.stability.router_agreement and Need.HOOKED_ROUTERS in run.needs and Need.OUR_LOSS in run.needs


@pytest.mark.parametrize(
    ("overrides", "without"),
    [
        ("", "stability.correction=tis stability.opsm=null"),
        (f"{BYPASS} {ASYNC}", "stability.correction=opsm"),
        (f"{BYPASS} {ASYNC} {PIPELINE}", "stability.router_agreement=false stability.correction=opsm"),
        (f"{CORRECTED} {ASYNC}", "stability.correction=opsm"),
        (f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "stability.correction=none"),
        (SILENT, "actor_rollout_ref.rollout.calculate_log_probs=True"),
        (UNKNOWN, f"{UNHOOKED} stability.correction=tis"),
        ("distillation.enabled=true", "stability.correction=tis"),
        (f"recipe=cpu_veomni {ACTOR}.veomni.router_replay.mode=R2", "stability.replay=null"),
        (f"recipe=cpu_megatron {MODEL}.use_remove_padding=false", UNHOOKED),
        (f"recipe=cpu_megatron {ACTOR}.megatron.pad_to_length=true", UNHOOKED),
        (f"recipe=cpu_veomni {MODEL}.use_remove_padding=false", "stability.replay=disabled"),
    ],
)
def test_what_moe_cannot_have_is_left_out_with_a_reason(fit, overrides, without):
    run, found = fit(*overrides.split(), "stability=moe")
    assert set(without.split()) <= {one for setting in found for one in setting.split()}
    assert all(found.values())
    assert Need.MEASURED_BATCHES in run.needs and any(line.name == "batch skip" for line in table_lines(run))


@pytest.mark.parametrize("overrides", [[UNKNOWN], ["distillation.enabled=true"], ["model_engine=torchtitan"]])
@pytest.mark.parametrize("preset", ["m2po", "seq_mask_tis"])
def test_an_uncut_ratio_goes_with_what_bounds_it(fit, preset, overrides):
    run, without = fit(*overrides, f"stability={preset}")
    if preset == "m2po":  # acts in the update, which these runs leave to verl
        assert names(run) == [] and list(without) == ["stability.correction=none stability.tis=null"]
    else:
        assert names(run) == ["tis", "geo_mask"] and without == {}


@pytest.mark.parametrize(
    ("overrides", "kept", "without"),
    [
        (f"{BYPASS} stability=mis", ["mis"], ["stability.mis.weight=one"]),  # it keeps its mask
        (f"{BYPASS} {CORRECTED} stability=icepop", ["icepop"], []),  # verl weighs nothing by rollout_is there
        (f"{UNKNOWN} {ACTOR}.policy_loss.loss_mode=geo_mean stability=tis", [], ["stability.correction=none"]),
    ],
)
def test_what_is_left_of_a_correction(fit, overrides, kept, without):
    run, left_out = fit(*overrides.split())
    assert names(run) == kept and list(left_out) == without


@pytest.mark.parametrize(
    "written", [["stability.correction=none"], ["stability.correction=opsm", "stability.opsm.delta=0.1"]]
)
def test_rules_go_with_the_correction_that_they_read(fit, written):
    run, without = fit("stability=guard", *written)
    assert {"stability.guard.rules.dropped=null", "stability.guard.rules.mask=null"} <= set(without)
    assert not {"dropped", "mask"} & {rule.name for rule in run.stability.rules}


def test_on_an_unknown_engine_only_the_controller_acts(fit):
    run, _ = fit(UNKNOWN, "stability=moe")
    assert names(run) == ["tis"] and Need.TOKEN_WEIGHTS in run.needs and Need.RULES in run.needs
    assert not run.own_workers


def test_the_guard_goes_on_without_the_band_to_narrow(fit):
    run, without = fit(CORRECTED, "stability=guard")
    assert list(without) == [
        "stability.correction=none",
        "stability.guard.rules.boundary.action=warn",
        "stability.guard.rules.dropped=null",
        "stability.guard.rules.mask=null",
    ]
    assert {rule.name: rule.action for rule in run.stability.rules}["boundary"] == "warn"


@pytest.mark.parametrize(
    ("overrides", "written"),
    [
        (CORRECTED, "stability.correction=tis"),
        (CORRECTED, "stability.correction=[tis,opsm]"),
        (f"{BYPASS} {PIPELINE}", "stability.router_agreement=true"),
        (UNKNOWN, "stability.replay=R3"),
        (CORRECTED, "stability.tis.cap=3.0"),
    ],
)
def test_what_the_user_wrote_is_refused(compose, overrides, written):
    arguments = [*overrides.split(), "stability=moe", written]
    with pytest.raises(ConfigError):
        fit_run(compose(VLLM, *arguments), arguments, read_model=False)


def test_a_rule_of_a_preset_can_be_left_out(fit):
    run, _ = fit("stability=guard", "stability.guard.rules.entropy=null")
    assert "entropy" not in [rule.name for rule in run.stability.rules]


def test_the_reasons_travel_with_the_config(compose):
    arguments = [CORRECTED, "stability=tis"]
    config = compose(VLLM, *arguments)
    fit_run(config, arguments, read_model=False)
    again = fit_run(config, arguments, read_model=False)
    assert list(again.stability.left_out) == ["stability.correction=none"] == list(config.stability.left_out)


@pytest.mark.parametrize("preset", ["moe", "tis", "icepop", "opsm", "guard", "quantized"])
@pytest.mark.parametrize("launch", SAMPLE)
def test_presets_fit_the_launches_that_people_start_from(fit, launch, preset):
    run, _ = fit(*LAUNCHES[launch], f"stability={preset}")
    assert Need.MEASURED_BATCHES in run.needs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([UNKNOWN, "stability=icepop_loss"], "loss_mode=icepop"),  # a method is not replaced
        ([*LAUNCHES[UNMEASURED], "stability=moe"], r"measured by the workers' loss.*bypass_mode=False"),
    ],
)
def test_a_preset_that_can_do_nothing_is_refused(compose, arguments, said):
    with pytest.raises(ConfigError, match=said):
        fit_run(compose(*arguments), arguments, read_model=False)


def test_no_preset_mends_a_reward_manager_that_would_stop(compose, fit):
    log = "reward.reward_kwargs.overlong_buffer_cfg.log"
    arguments = [*LAUNCHES[UNSCORED], "stability=moe"]
    with pytest.raises(ConfigError) as refused:
        fit_run(compose(VLLM, *arguments), arguments, read_model=False)
    assert [problem.fix for problem in refused.value.problems] == [(f"++{log}=False",)]
    run, _ = fit(*arguments, f"+{log}=null")  # verl reads it as false
    assert Need.MEASURED_BATCHES in run.needs


@pytest.mark.slow
@pytest.mark.parametrize("launch", sorted(set(LAUNCHES) - {*SAMPLE, *NOT_COMPOSED, UNMEASURED, UNSCORED}))
def test_moe_fits_every_launch(fit, launch):
    run, _ = fit(*LAUNCHES[launch], "stability=moe")
    assert Need.MEASURED_BATCHES in run.needs


PENALTY = "reward.reward_kwargs.overlong_buffer_cfg"
NO_KL = f"{ACTOR}.use_kl_loss=False"


@pytest.mark.parametrize(
    ("overrides", "without"),
    [
        ("stability=dapo data.max_response_length=1000", [f"{PENALTY}.len=200"]),  # DAPO has 4096 of 20480
        ("stability=dapo data.max_response_length=8192", []),
        (f"stability=dapo data.max_response_length=8192 +{PENALTY}.len=512", []),  # both add it: the user's counts
        (f"stability=deepseek_v32 {NO_KL}", [f"{ACTOR}.kl_loss_type=low_var_kl"]),
    ],
)
def test_a_setting_of_a_preset_gives_way_to_the_launch(fit, overrides, without):
    run, found = fit(*overrides.split())
    assert list(found) == without
    if PENALTY in overrides:
        assert run.config.reward.reward_kwargs.overlong_buffer_cfg.len == 512


@pytest.mark.parametrize(
    "overrides",
    [
        f"stability=dapo data.max_response_length=1000 {PENALTY}.len=2000",
        f"stability=deepseek_v32 {NO_KL} {ACTOR}.kl_loss_type=unbiased",
    ],
)
def test_what_the_user_wrote_of_verls_settings_is_refused(fit, overrides):
    with pytest.raises(ConfigError):
        fit(*overrides.split())
