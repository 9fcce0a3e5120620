"""Settings without a meaning in bypass mode are refused before Ray starts; the others reach the workers."""

from functools import partial
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from tests.support.closeness import close
from tests.support.fixing import assert_fixed
from tests.support.loss_oracles import m2po_oracle
from tests.support.micro_batches import Micro
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS, Weights, register_correction
from verl_ext.features.feature import Need
from verl_ext.features.stability import stability_config
from verl_ext.features.table import loss_settings, read_features, table_lines
from verl_ext.features.verl_config import BYPASS, bypasses, replay_mode
from verl_ext.launch.compose import stability_choices
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

ON = f"{BYPASS}=True"
LOSS = "actor_rollout_ref.actor.policy_loss"
PIPELINE = "model_engine=megatron actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
METRICS, AGREEMENT = "stability.metrics=true", "stability.router_agreement"
GATE, ENTROPY = "stability.guard.mini_batch", "actor_rollout_ref.actor.calculate_entropy"


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
        ("stability=tis", "stability.correction=tis weighs .*loss_mode=vanilla already has"),
        ("stability=tis_sequence", "set .*bypass_mode=False, or .*loss_mode=gpg"),
        ("stability=mis", "set .*bypass_mode=False, or stability.mis.weight=one, or .*loss_mode=gpg"),
        ("stability=m2po", "set stability.correction=m2po and stability.tis=null, or .*loss_mode=gpg"),
        ("stability=tis stability.tis.cap=1e9", "without a cap .*; set stability.tis=null"),
        (f"stability=seq_mask_tis {LOSS}.loss_mode=gspo", "loss_mode=gspo already has, so it would count twice"),
        ("stability=opsm_loss stability.correction=tis", "loss_mode=opsm already has"),
        ("stability=icepop_loss", "set .*bypass_mode=False, or start from stability=icepop"),
        ("stability=llds_loss", "compares with the training engine's log-probs .*; set .*bypass_mode=False"),
        (f"stability=icepop {LOSS}.loss_mode=bypass_mode", "cannot weight .*loss_mode=bypass_mode"),
        ("stability=icepop stability.denominator=kept", "set .*bypass_mode=False, or .* stability.denominator=full"),
        (f"stability=icepop {AGREEMENT}=true {PIPELINE}", f"on .*strategy=megatron.*set {AGREEMENT}=false"),
        (
            f"stability=icepop stability.filters={{low_agreement:{{threshold:0.5}}}} {AGREEMENT}=true",
            r"stability\.filters\.low_agreement filters by what",
        ),
        (f"{METRICS} {REPLAY}=R2", f"{REPLAY}=R2 replays .*set .*bypass_mode=False, or .*=R3"),
        ("stability=filters", r"stability\.filters\.off_policy_negative .*stability\.correction=opsm does the same"),
        (f"{METRICS} stability.trajectories.per_step=1", "set stability.trajectories=null"),
        ("stability=deepseek_v32 stability.kl_denominator=old", "set stability.kl_denominator=infer"),
        (f"{METRICS} {GATE}.policy_kl=0.1", f"set {GATE}.policy_kl=null and {GATE}.vllm_kl=0.1"),
        (rule("actor/entropy", "warn"), f"set {ENTROPY}=true"),
        (
            f"{rule('actor/entropy', 'skip')} {ENTROPY}=true",
            r"rules\.r: action=skip comes too late: actor/entropy .*set action to warn",
        ),
        (rule("guard/growth_rate", "skip"), "comes too late: guard/growth_rate"),
    ],
)
def test_what_cannot_work_there_names_the_remedy(checked, overrides, message):
    run = partial(checked, *overrides.split())
    with pytest.raises(ConfigError, match=message) as error:
        run()
    assert_fixed(error.value, run)


# Presets whose ratio is never cut -> what is left of them where the loss has this ratio.
UNCUT = {"m2po": ["m2po"], "seq_mask_tis": ["geo_mask"]}


@pytest.mark.parametrize("name", stability_choices())
def test_the_fixes_of_a_preset_keep_its_method_and_launch(checked, with_fixes, compose, name):
    # Lengths for the punishment of dapo; the mode for OPSM of moe, which acts on older rollouts.
    given = (f"stability={name}", "data.max_response_length=8192", "trainer.v1.trainer_mode=colocate_async")
    asked = compose(*given)
    (config, stability), fixes = with_fixes(checked, *given)
    wanted = stability_config(asked.stability)
    assert list(stability.correction_names) == UNCUT.get(name, list(wanted.correction_names)), fixes
    settings = {one.name: one.settings for one in wanted.correction}
    assert all(one.settings == settings[one.name] for one in stability.correction)
    assert (stability.filters, stability.denominator) == (wanted.filters, wanted.denominator)
    assert OmegaConf.select(config, LOSS) == OmegaConf.select(asked, LOSS)
    assert replay_mode(config) == replay_mode(asked)


@pytest.mark.parametrize("name", UNCUT)
def test_the_fix_of_an_uncut_ratio_has_the_methods_gradient(checked, with_fixes, name, actor_config):
    """-M k A / N in float64, M the mask of the paper; no token is past the clip of PPO."""
    (config, stability), fixes = with_fixes(checked, f"stability={name}")
    assert bypasses(config) and fixes == {"stability.correction": UNCUT[name][0], "stability.tis": "null"}
    torch.manual_seed(0)
    lengths, scale = (6, 9, 4, 8), {"m2po": 0.3, "seq_mask_tis": 1e-4}[name]
    infer = [-torch.rand(n) * 3 for n in lengths]
    # The middle of a row, which is outside of geo_mask's band in two of them.
    theta = [row + torch.randn(len(row)) * scale + m for row, m in zip(infer, (0.0, 0.01, 0.0, -0.01), strict=True)]
    advantages = [torch.full((n,), sign) for n, sign in zip(lengths, (1.0, -1.0, 1.0, -1.0), strict=True)]
    mask = [torch.ones(n, dtype=torch.long) for n in lengths]
    rows = {"log_prob": theta, "old_log_probs": infer, "rollout_log_probs": infer}
    batch = Micro({**rows, "advantages": advantages, "response_mask": mask}, prompts=[1, 2, 3, 4])
    settings = LossSettings.from_dict(loss_settings(read_features(config, stability, read_model=False)))
    wide = {"clip_ratio": 0.99, "clip_ratio_low": 0.99, "clip_ratio_high": 9.0, "clip_ratio_c": 1e4}
    loss, _ = build_worker_loss(actor_config(**wide), settings, first_pass=FirstPass(settings.first_pass))
    model_output, data = batch.whole()
    loss(model_output=model_output, data=data)[0].backward()
    log_k = [new.double() - old.double() for new, old in zip(theta, infer, strict=True)]
    if name == "m2po":
        lists = ([row.tolist() for row in values] for values in (infer, theta, advantages, mask))
        keep = [torch.tensor(row) for row in m2po_oracle(*lists, 0.04)[0]]
    else:
        keep = [torch.full((len(row),), float(0.999 <= row.mean().exp() <= 1.002)) for row in log_k]
    expected = -torch.cat([m * k.exp() * a for m, k, a in zip(keep, log_k, advantages, strict=True)]) / sum(lengths)
    assert 0 < (expected == 0).sum() < len(expected)
    close(batch.take_gradients(), expected)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (METRICS, ""),
        ("stability=icepop", "icepop"),
        (f"stability=kpop {LOSS}.loss_mode=cispo", "kpop"),
        ("stability=geo_mask", "geo_mask"),
        ("stability=mis stability.mis.weight=one", "mis"),
        (f"stability=tis {LOSS}.loss_mode=gpg", "tis"),
        ("stability=opsm_loss stability.correction=icepop", "icepop"),
        ("stability=icepop stability.filters=[overlong,zero_variance,retokenization_drift]", "icepop"),
        ("stability=guard actor_rollout_ref.actor.calculate_entropy=true", "icepop"),
        (f"{rule('vllm_kl/prob_diff_mean', 'skip')}", ""),
        (f"{METRICS} {REPLAY}=R3", ""),
        ("stability=deepseek_v32", ""),
    ],
)
def test_what_works_there_is_told_to_the_workers(checked, overrides, names):
    config, stability = checked(*overrides.split())
    settings = loss_settings(read_features(config, stability))["first_pass"]
    assert list(settings["corrections"]) == list(settings["narrowed"]) == names.split()
    assert settings["as_mask"] is (f"{LOSS}.loss_mode=gpg" not in overrides)
    run = read_features(config, stability)
    where = {line.name: line.where for line in table_lines(run)}
    assert (
        Need.OUR_LOSS in run.needs
        and where["mismatch metrics"] == "first mini-batch, worker_loss on every training rank"
    )
    assert all("rollout_is_weights" not in place for place in where.values())


def test_bypass_mode_that_compares_nothing_is_verls_own(checked):
    config, stability = checked("stability=none", f"{REPLAY}=R3")
    assert [feature.name for feature in table_lines(read_features(config, stability))] == ["routing replay"]
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
