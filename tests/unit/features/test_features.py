"""Features that a config switches on, what they need, and their lines of the start-up table."""

import pytest

from tests.support.problems import features_of
from verl_ext.features.feature import Need
from verl_ext.features.guard import AFTER_RULE
from verl_ext.features.table import table_lines
from verl_ext.launch.compose import stability_choices

ACTOR = "actor_rollout_ref.actor"
REPLAY = f"{ACTOR}.fsdp_config.router_replay.mode"
MEASURED = {Need.ROLLOUT_LOG_PROBS, Need.MEASURED_BATCHES}
UNMEASURED = "stability.metrics=false stability.batch_skip.threshold=null"
COMPARED = {Need.HOOKED_ROUTERS, Need.COMPARED_ROUTERS}


@pytest.fixture
def asked(compose):
    """asked("stability=icepop", ...) -> the run."""

    def run(*overrides):
        config = compose(*overrides)
        return features_of(config)

    return run


def test_nothing_is_on_by_default(asked):
    assert asked().demands == asked("stability=none").demands == ()


@pytest.mark.parametrize(
    ("overrides", "names", "needs"),
    [
        ("stability.metrics=true", "mismatch metrics", MEASURED),
        ("stability.correction=icepop", "mismatch metrics, correction", {*MEASURED, Need.TOKEN_WEIGHTS, Need.OUR_LOSS}),
        (
            "stability.correction=icepop stability.denominator=kept",
            "mismatch metrics, correction, denominator",
            {*MEASURED, Need.TOKEN_WEIGHTS, Need.OUR_LOSS, Need.LOSS_MASK},
        ),
        ("stability.filters=[overlong]", "mismatch metrics, batch filter", {*MEASURED, Need.OUR_LOSS, Need.LOSS_MASK}),
        (
            "stability.correction=opsm stability.opsm.delta=0.1",
            "mismatch metrics, correction",
            {*MEASURED, Need.OUR_LOSS},
        ),
        ("stability.batch_skip.threshold=0", "mismatch metrics, batch skip", {*MEASURED, Need.RULES}),
        (
            "stability.guard.rules.r={signal:mine/x,above:1,action:warn}",
            "mismatch metrics, guard rule",
            {*MEASURED, Need.RULES},
        ),
        ("stability.guard.mini_batch.policy_kl=0.1", "mismatch metrics, mini-batch gate", {*MEASURED, Need.OUR_LOSS}),
        ("stability.rescoring.every=10", "mismatch metrics, rescoring", {*MEASURED, Need.OLD_VERSIONS}),
        ("stability.trajectories.per_step=2", "mismatch metrics, trajectories", MEASURED),
        ("stability.router_agreement=true", "router agreement", COMPARED),
        (f"{REPLAY}=R2", "routing replay", {Need.HOOKED_ROUTERS}),
        (f"{REPLAY}=R3", "router agreement, routing replay", COMPARED),
        ("stability.sync_canary.trajectories=8", "mismatch metrics, sync canary", MEASURED),
        ("stability.sync_check={}", "sync check", {Need.SENT_WEIGHTS}),
        ("stability.cascade_attention=off", "cascade attention", set()),
        ("stability.fake_quantization.format=fp4", "fake quantization", set()),
        ("stability.float32_head=true", "float32 logits", {Need.OUR_LOSS}),
        ("algorithm.adv_estimator=qae", "advantages", set()),
        (f"stability=llds_loss {UNMEASURED}", "policy loss, old log-probs", {Need.ROLLOUT_LOG_PROBS, Need.OUR_LOSS}),
        (
            f"stability=icepop_loss {UNMEASURED}",
            "mismatch metrics, policy loss, old log-probs",
            {*MEASURED, Need.OUR_LOSS},
        ),
        (
            f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=unbiased",
            "KL to the reference",
            {Need.ROLLOUT_LOG_PROBS, Need.OUR_LOSS},
        ),
    ],
)
def test_what_turns_what_on(asked, overrides, names, needs):
    run = asked(*overrides.split())
    assert [line.name for line in table_lines(run) if line.name != "normal level"] == names.split(", ")
    assert run.needs == needs


def test_settings_are_said(asked):
    rule = "{signal:critic/score/mean,below:8,zscore_window:64,action:rollback}"
    run = asked(
        "stability.correction=[geo_mask,mis]",
        "stability.filters={low_probability:{threshold:0.01}}",
        f"stability.guard.rules.r={rule}",
        "stability.guard.mini_batch.vllm_kl=0.1",
        "stability.trajectories={per_step:2,every:10}",
    )
    assert [line.setting for line in table_lines(run)] == [
        "vllm_kl/*",
        "geo_mask, low 0.999, high 1.002",
        "mis, cap 2, low 0, weight ratio",
        "low_probability, threshold 0.01",
        "2 every 10 steps",
        "refuse past, vllm_kl 0.1",
        "r: rollback at critic/score/mean < 8 sd of 64",
        "vllm_kl/k3 > 2 x its first 20",
    ]


def test_the_normal_level_is_shown_where_the_gap_is_measured(asked):
    def levels(*overrides):
        return [line.setting for line in table_lines(asked(*overrides)) if line.name == "normal level"]

    assert levels("stability.router_agreement=true") == []
    assert levels("stability.metrics=true", "stability.guard.level=0.002") == ["vllm_kl/k3 > 0.002"]
    assert levels("stability=icepop", "stability.guard.level=0") == []


LORA, SEPARATE = "actor_rollout_ref.model.lora_rank=8", "trainer.v1.trainer_mode=separate_async"


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ([], []),
        ([LORA], ["8 trajectories, each sync"]),
        ([LORA, "++actor_rollout_ref.model.lora.merge=true"], ["8 trajectories, each sync"]),
        ([SEPARATE, "stability.sync_canary.every=5"], ["8 trajectories, every 5 syncs"]),
        ([SEPARATE, "stability.sync_canary.trajectories=0"], []),
        ([SEPARATE, "actor_rollout_ref.rollout.name=trtllm"], []),
        ([SEPARATE, "actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_rollout=true"], []),
        (["trainer.v1.trainer_mode=colocate_async"], []),
    ],
)
def test_the_canary_is_on_where_syncs_were_seen_to_fail(asked, overrides, settings):
    found = table_lines(asked("stability=icepop", *overrides))
    assert [line.setting for line in found if line.name == "sync canary"] == settings
    verls = [one for one in overrides if not one.startswith("stability.")]
    assert not asked("stability=none", *verls).demands, "and where nothing else is on, verl runs as it is"


IN_THE_TRAINER = {"weights in rollout_is_weights", "response_mask and loss_mask", *AFTER_RULE.values()}


@pytest.mark.parametrize("preset", stability_choices())
def test_what_acts_outside_the_trainer_is_proven_on_the_engines(asked, preset):
    run = asked(f"stability={preset}", "stability.cascade_attention=off", "stability.sync_canary.trajectories=8")
    for line in table_lines(run):
        of_trainer = line.at in IN_THE_TRAINER or line.at.startswith("{trainer}")
        counted = line.at.startswith(("{routers}", "{loss}"))  # by verify, for all lines of the kind
        if line.setting == "of compute_log_prob":  # verl's own pass, with the reason why it is not left out
            continue
        assert of_trainer or counted or line.proof or line.in_loss, line
