"""Settings without a meaning in bypass mode are refused before Ray starts; the others reach the workers."""

from functools import partial
from unittest import mock

import pytest

from tests.support.fixing import assert_fixed
from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS, Weights, register_correction
from verl_ext.features.feature import Part
from verl_ext.features.stability import stability_config
from verl_ext.features.table import check_run, loss_settings, read_features
from verl_ext.features.verl_config import BYPASS

ON = f"{BYPASS}=True"
LOSS = "actor_rollout_ref.actor.policy_loss"
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
METRICS = "stability.metrics=true"


@pytest.fixture
def checked(compose):
    """checked(overrides...) -> config and stability of a run in bypass mode that passes."""

    def run(*overrides):
        config = compose("actor_rollout_ref.rollout.name=vllm", ON, *overrides)
        stability = stability_config(config.stability)
        check_run(read_features(config, stability, read_model=False))
        return config, stability

    return run


def rule(signal, action):
    return f"stability.guard.rules={{r:{{signal:{signal},above:1,action:{action}}}}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stability=tis"],
            "stability.correction=tis weighs a token by a ratio that .*loss_mode=vanilla already has",
        ),
        (["stability=tis_sequence"], "set stability.correction=icepop, or .*loss_mode=gpg"),
        (["stability=mis"], "set stability.mis.weight=one, or .*loss_mode=gpg"),
        (["stability=seq_mask_tis", f"{LOSS}.loss_mode=gspo"], "loss_mode=gspo already has, so it would count twice"),
        (["stability=opsm_loss", "stability.correction=tis"], "loss_mode=opsm already has"),
        (["stability=icepop_loss"], f"set {LOSS}.loss_mode=vanilla and stability.correction=icepop"),
        (["stability=llds_loss"], "compares with the training engine's log-probs .*; set .*bypass_mode=False"),
        (["stability=router_shift_loss"], "compares with the routers of compute_log_prob"),
        (["stability=icepop", f"{LOSS}.loss_mode=bypass_mode"], "cannot weight .*loss_mode=bypass_mode"),
        (["stability=icepop", "stability.denominator=kept"], "set stability.denominator=full"),
        (["stability=icepop", "stability.router_agreement=true"], "set stability.router_agreement=false"),
        ([METRICS, f"{REPLAY}=R2"], f"{REPLAY}=R2 replays what compute_log_prob recorded.*set {REPLAY}=R3"),
        (["stability=filters"], r"stability\.filters\.off_policy_negative .*stability\.correction=opsm does the same"),
        ([METRICS, "stability.trajectories.per_step=1"], "set stability.trajectories.per_step=0"),
        (["stability=deepseek_v32", "stability.kl_denominator=old"], "set stability.kl_denominator=infer"),
        (
            [METRICS, "stability.guard.mini_batch.policy_kl=0.1"],
            "set stability.guard.mini_batch.policy_kl=null and stability.guard.mini_batch.vllm_kl=0.1",
        ),
        ([rule("actor/entropy", "warn")], "set actor_rollout_ref.actor.calculate_entropy=true"),
        (
            [rule("actor/entropy", "skip"), "actor_rollout_ref.actor.calculate_entropy=true"],
            r"rules\.r: action=skip comes too late: actor/entropy .*set action to warn",
        ),
        ([rule("guard/growth_rate", "skip")], "comes too late: guard/growth_rate"),
    ],
)
def test_what_cannot_work_there_names_the_setting_and_the_remedy(checked, overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        checked(*overrides)
    assert_fixed(error.value, partial(checked, *overrides))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([METRICS], []),
        (["stability=icepop"], ["icepop"]),
        (["stability=kpop", f"{LOSS}.loss_mode=cispo"], ["kpop"]),
        (["stability=geo_mask"], ["geo_mask"]),
        (["stability=mis", "stability.mis.weight=one"], ["mis"]),
        (["stability=tis", f"{LOSS}.loss_mode=gpg"], ["tis"]),
        (["stability=opsm_loss", "stability.correction=icepop"], ["icepop"]),
        (["stability=icepop", "stability.filters=[overlong,zero_variance,retokenization_drift]"], ["icepop"]),
        (["stability=guard", "actor_rollout_ref.actor.calculate_entropy=true"], ["icepop"]),
        ([rule("vllm_kl/prob_diff_mean", "skip")], []),
        ([METRICS, f"{REPLAY}=R3"], []),
        (["stability=deepseek_v32"], []),
    ],
)
def test_what_works_there_is_told_to_the_workers(checked, overrides, names):
    config, stability = checked(*overrides)
    settings = loss_settings(read_features(config, stability))["first_pass"]
    assert list(settings["corrections"]) == list(settings["narrowed"]) == names
    assert settings["as_mask"] is (f"{LOSS}.loss_mode=gpg" not in overrides)
    run = read_features(config, stability)
    where = {line.name: line.where for line in run.lines}
    assert run.uses(Part.LOSS) and where["mismatch metrics"] == "first mini-batch, worker_loss on every training rank"
    assert all("rollout_is_weights" not in place for place in where.values())


def test_with_nothing_that_compares_the_engines_bypass_mode_is_verls_own(checked):
    config, stability = checked("stability=none", f"{REPLAY}=R3")
    assert [feature.name for feature in read_features(config, stability).lines] == ["routing replay"]
    assert "first_pass" not in loss_settings(read_features(config, stability))


def test_the_narrow_band_is_icepops(checked):
    config, stability = checked("stability=icepop", "stability.icepop.beta=4")
    assert loss_settings(read_features(config, stability))["first_pass"]["narrowed"] == {
        "icepop": {"alpha": 0.5**0.5, "beta": 2.0}
    }


def test_a_correction_of_ones_own_says_whether_it_drops(checked):
    with mock.patch.dict(CORRECTIONS):
        for name, drops in (("mine", True), ("yours", False)):
            register_correction(name, reads=("k",), by_ratio=True, drops=drops)(lambda k: Weights(k, k, k))
        checked("stability.correction=mine")
        with pytest.raises(ConfigError, match=r"stability\.correction=yours weighs a token by a ratio"):
            checked("stability.correction=yours")
