"""One pass less: on where the result is the same, off with a reason where it is not."""

from dataclasses import replace

import pytest

from tests.support.problems import features_of
from verl_ext.features.feature import Need
from verl_ext.features.fit import fit_run
from verl_ext.features.reuse import measured_late, obstacles, reuses
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, loss_settings, table_lines

ONE_STEP = (
    *("actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=64"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=64", "algorithm.adv_estimator=grpo"),
)
ON, AUTO = "stability.reuse_log_probs=on", "stability.reuse_log_probs=auto"
GAE = ("algorithm.adv_estimator=gae", "critic.enable=true")
SEPARATE = "trainer.v1.trainer_mode=separate_async"


@pytest.fixture
def run_of(compose):
    def run(*overrides):
        config = compose(*ONE_STEP, *overrides)
        return features_of(config, read_model=False)

    return run


OBSTACLES = {
    "ppo_mini_batch_size": ["actor_rollout_ref.actor.ppo_mini_batch_size=32"],
    "ppo_epochs=2": ["actor_rollout_ref.actor.ppo_epochs=2"],
    "a critic": [*GAE],
    "use_kl_in_reward": ["algorithm.use_kl_in_reward=true"],
    "adv_estimator=optimal_token_baseline": ["algorithm.adv_estimator=optimal_token_baseline"],
    "rollout_is=token": ["algorithm.rollout_correction.rollout_is=token"],
    "rollout_rs=": ["algorithm.rollout_correction.rollout_rs=token_k1"],
    "bypass_mode=True": ["algorithm.rollout_correction.bypass_mode=true"],
    "parameter_sync_step=4": [SEPARATE],
    "rescoring.every=5": [SEPARATE, "trainer.v1.separate_async.parameter_sync_step=1", "stability.rescoring.every=5"],
    "after_update.trajectories=8": ["stability.guard.after_update.trajectories=8"],
    "top_tokens.k=8": ["stability.top_tokens.k=8"],
    "score_centering": ["stability.score_centering=true"],
    "R2": ["stability.replay=R2"],
    "router_agreement": [
        "stability.router_agreement=true",
        "model_engine=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    ],
    "hidden_dropout": [
        "model_engine=megatron",
        "++actor_rollout_ref.actor.megatron.override_transformer_config.hidden_dropout=0.1",
    ],
    "low_agreement": ["stability.router_agreement=true", "stability.filters={low_agreement:{threshold:0.5}}"],
    "denominator=kept": ["stability.correction=icepop", "stability.denominator=kept"],
    "per_step": ["stability.trajectories.per_step=2"],
    "off_policy_negative": ["stability.filters={off_policy_negative:{delta:0.1}}"],
    "action=skip": ["stability.guard.rules={r:{signal:actor/entropy,above:1,action:skip}}"],
    "distillation": ["distillation.enabled=true"],
}


@pytest.mark.parametrize("named", OBSTACLES)
def test_where_the_result_would_differ_it_is_off_with_the_reason_or_refused(run_of, named):
    overrides = OBSTACLES[named]
    run = run_of("stability.metrics=true", *overrides, AUTO)
    (found, *more) = obstacles(run)
    assert named in found.found and not more and not reuses(run)
    for line in (lines := [line for line in table_lines(run) if line.name == "old log-probs"]):
        assert named in line.where and line.setting == "of compute_log_prob"
    assert len(lines) == (named != "bypass_mode=True"), "there is no such pass in bypass mode"
    forced = run_of("stability.metrics=true", *overrides, ON)
    assert next(obstacles(forced)) == found
    assert found.fix and any(key in " ".join((*found.fix, found.otherwise)) for key in ("off", "R3"))


@pytest.mark.parametrize("preset", ["moe", "r3"])
def test_our_own_hooks_compare_routers_in_the_update(run_of, preset):
    run = run_of(f"stability={preset}")
    assert reuses(run) and {Need.COMPARED_ROUTERS, Need.MEASURED_IN_UPDATE} <= run.needs
    (line,) = [line for line in table_lines(run) if line.name == "router agreement"]
    assert line.setting == "update_actor"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("stability=icepop",),
        ("stability=tis",),
        ("stability=icepop_loss",),
        ("stability=icepop", "stability.router_agreement=true", "model_engine=megatron"),
        ("stability=icepop", "stability.router_agreement=true", "model_engine=veomni"),
    ],
)
def test_elsewhere_it_is_on(run_of, overrides):
    run = run_of(*overrides, AUTO)
    assert reuses(run) and measured_late(run) and Need.OUR_LOSS in run.needs
    assert loss_settings(run)["reuses"]
    assert (Need.MEASURED_IN_UPDATE in run.needs) == bool(overrides)
    (line,) = [line for line in table_lines(run) if line.name == "old log-probs"]
    assert line.in_loss({"reuses": True}) and not line.in_loss({"reuses": False})


def test_the_weights_are_whole_where_the_ratio_is_one(run_of):
    assert loss_settings(run_of("stability=tis", ON))["first_pass"]["as_mask"] is False


@pytest.mark.parametrize(
    ("preset", "on"),
    [
        *((preset, True) for preset in ("none", "icepop", "tis", "opsm", "moe", "r3")),
        *((preset, False) for preset in ("r2", "score_centering")),
    ],
)
def test_what_verls_trainer_then_does_is_set_before_it_starts(compose, preset, on):
    overrides = (*ONE_STEP, f"stability={preset}", AUTO)
    config = compose(*overrides)
    features = fit_run(config, overrides, read_model=False)
    apply_engine_settings(features)
    assert reuses(features) == on == reuses(replace(features, config=config))
    assert (config.algorithm.rollout_correction is None) == on
    assert config.actor_rollout_ref.actor.calculate_entropy == on


def test_a_yaml_switch_is_a_name():
    assert stability_config({"reuse_log_probs": True}).reuse_log_probs == "on"
    assert stability_config({"reuse_log_probs": False}).reuse_log_probs == "off"
