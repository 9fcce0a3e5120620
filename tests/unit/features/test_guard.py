import json

import pytest
from omegaconf import OmegaConf

from tests import ROOT
from tests.support.problems import features_of, read_settings
from verl_ext.base.errors import ConfigError
from verl_ext.features.fit import fit_run
from verl_ext.features.guard import published_level
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings
from verl_ext.guard.rules import Rule, describe


def guard(**settings):
    return read_settings(OmegaConf.create({"guard": settings}))


def rules(**rule):
    return guard(rules={"r": {"signal": "vllm_kl/k3", "action": "warn"} | rule})


def test_a_rule_is_read_with_its_defaults():
    assert rules(above=1).rules == (Rule("r", "vllm_kl/k3", 1.0, setting="stability.guard.rules.r.above"),)


@pytest.mark.parametrize("signal", ["vllm_kl/k3/prob/0-0.01", "critic/vf_loss", "val-core/a/b/c", "mine/k3", "x"])
def test_a_signal_may_be_of_a_family_or_the_users_own(signal):
    assert rules(above=1, signal=signal).rules[0].signal == signal


def test_advice_is_said_with_the_reason():
    (rule,) = rules(above=1, advice="try stability=kpop").rules
    said = "vllm_kl/k3=2 passes stability.guard.rules.r.above=1"
    assert describe(rule, 2.0, 1.0) == f"{said}: try stability=kpop"
    (bare,) = rules(above=1, advice=None).rules
    assert describe(bare, 2.0, 1.0) == said


def test_batch_skip_is_the_first_rule():
    node = {"batch_skip": {"threshold": 0.1}, "guard": {"rules": {"r": {"signal": "x", "below": 0, "action": "stop"}}}}
    first, second = read_settings(OmegaConf.create(node)).rules
    assert (first.name, first.signal, first.bound, first.action) == ("batch_skip", "vllm_kl/k3", 0.1, "skip")
    assert (second.side, second.bound) == ("below", 0.0)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({}, "needs one bound: above or below"),
        ({"above": 1, "below": 0}, "needs one bound: above or below"),
        ({"above": 1, "signal": None}, "r.signal must be given"),
        ({"above": 1, "action": "explode"}, "action=explode is not known; choose one of: warn, tighten"),
        ({"above": 1, "patiense": 2}, "r.patiense is not known; similar names: patience"),
        ({"treshold": 3}, "r.treshold is not known; its settings are: above, action, advice, baseline, below"),
        ({"above": "high"}, "r.above=high must be a finite number"),
        ({"above": float("nan")}, "r.above=nan must be a finite number"),
        ({"above": True}, "r.above=True must be a finite number"),
        ({"above": 1, "advice": 3}, "r.advice=3 must be text"),
        ({"above": 1, "patience": 0}, "r.patience=0 must be a whole number of readings, at least 1"),
        ({"above": 1, "patience": 1.5}, "r.patience=1.5 must be a whole number"),
        ({"above": 1, "zscore_window": 3}, "r.zscore_window=3 must be a whole number of readings, at least 8"),
        ({"above": -1, "zscore_window": 8}, "must be above 0"),
        ({"above": 2, "baseline": 0}, "r.baseline=0 must be a whole number of readings, at least 1"),
        ({"above": 2, "baseline": 9, "zscore_window": 9}, "are two ways to find the threshold; keep one of them"),
        ({"above": 2, "least": 0.1}, "r.least=0.1 needs baseline"),
        ({"above": 2, "least": "low", "baseline": 9}, "r.least=low must be a finite number"),
        ({"above": 2, "locate": 1}, "r.locate=1 must be true or false"),
        ({"below": 2, "locate": True}, "r.locate=true needs a bound above which the gap is too large"),
        ({"above": 2, "engines_only": True, "signal": "actor/entropy"}, "needs a metric of the gap, vllm_kl/*, and"),
        ({"above": 1, "recover": 2}, "r.recover=2 lies past above=1"),
        ({"below": 1, "recover": 0.5}, "r.recover=0.5 lies past below=1"),
        ({"below": 4, "recover": 5, "zscore_window": 8}, "r.recover=5 lies past below=4"),
        ({"above": 1, "action": "skip", "signal": "actor/grad_norm"}, "comes with the update"),
        ({"above": 1, "action": "skip", "signal": "response_length/mean"}, "comes with the update"),
        ({"above": 1, "action": "skip", "signal": "val-core/acc"}, "comes with the update"),
        ({"above": 1, "action": "skip", "signal": "rollout_corr/kl"}, "comes with the update"),
        ({"above": 1, "signal": "vllm_kl/k33"}, "r.signal=vllm_kl/k33 is not known; similar names: vllm_kl/k3, "),
        ({"above": 1, "signal": "corrections/dropped"}, "similar names: correction/dropped, "),
        ({"above": 1, "signal": "guard/x"}, "A metric of your own needs a name unlike these"),
        ({"above": 1, "action": "tighten"}, "name icepop in stability.correction"),
        ({"above": 1, "action": "tighten", "signal": "correction/dropped"}, "would not recover"),
    ],
)
def test_what_cannot_work_is_refused(rule, said):
    with pytest.raises(ConfigError, match=r"stability\.guard\.rules\.r") as error:
        rules(**rule)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "signal", "remedy"),
    [
        ("", "router/agreement", "stability.router_agreement=true"),
        ("", "router/agreement/layer_3", "stability.router_agreement=true"),
        ("stability.router_agreement=true", "router/own_agreement", "stability.guard.rules.r=null"),
        ("", "correction/dropped", "stability.correction=icepop"),
        ("stability.correction=opsm stability.opsm.delta=0.1", "correction/dropped", "stability.correction=icepop"),
        ("stability.correction=tis", "correction/icepop/low", "stability.guard.rules.r=null"),
        ("stability.correction=tis", "guard/mask_blind", "stability.correction=icepop"),
        ("", "actor/opsm/dropped", "stability.guard.rules.r=null"),
        ("", "actor/after_update/policy_kl", "stability.guard.after_update.trajectories=16"),
        ("", "actor/gate/vllm_kl", "stability.guard.rules.r=null"),
        ("", "sync/arrived_high", "stability.sync_canary.trajectories=8"),
        ("", "filter/kept_tokens", "stability.filters={overlong:{}}"),
        ("", "vllm_kl/head", "stability.top_tokens.k=32"),
        ("", "vllm_kl/engine/k3", "stability.rescoring.every=10"),
        ("", "vllm_kl/k3/lag/0", "stability.guard.rules.r=null"),
        ("stability.breakdown=false", "vllm_kl/k3/position/0-256", "stability.breakdown=true"),
        ("stability.breakdown=false", "vllm_kl/advantage_skew", "stability.breakdown=true"),
    ],
)
def test_a_rule_whose_signal_the_run_does_not_log_is_refused(compose, overrides, signal, remedy):
    rule = f"stability.guard.rules.r={{signal:{signal},above:1,action:warn}}"
    asked = ["actor_rollout_ref.rollout.name=vllm", "stability=none", *overrides.split(), rule]
    with pytest.raises(ConfigError, match=r"rules\.r: \S+ is not logged: ") as error:
        fit_run(compose(*asked), asked, read_model=False)
    assert error.value.fix == (remedy,)


def test_the_signal_of_the_forecast_is_one_that_the_run_logs(compose):
    asked = ["stability=tis", "stability.guard.boundary.signal=router/agreement"]
    with pytest.raises(ConfigError, match=r"boundary\.signal: router/agreement is not logged"):
        fit_run(compose(*asked), asked, read_model=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rules": ["a"]}, "stability.guard.rules=['a'] must be a mapping"),
        ({"rules": {"r": 3}}, "stability.guard.rules.r=3 must be a mapping"),
        ({"stop_after": 0}, "stability.guard.stop_after=0 must be at least 1"),
        ({"slow_step_s": 0}, "stability.guard.slow_step_s=0 must be above 0 seconds"),
        ({"level": -1}, "stability.guard.level=-1 must be at least 0 and finite, or null"),
        ({"rules": {"level": {"signal": "x", "above": 1, "action": "warn"}}}, "the name is taken by stability.guard"),
        ({"tighten_factor": 1.0}, "stability.guard.tighten_factor=1 must be between 0 and 1"),
        ({"max_rollbacks": -1}, "stability.guard.max_rollbacks=-1"),
        ({"mini_batch": {"vllm_kl": 0}}, "stability.guard.mini_batch.vllm_kl=0 must be above 0"),
        ({"boundary": {"signal": "vllm_kl/chi"}}, "stability.guard.boundary.signal=vllm_kl/chi is not known; similar"),
        ({"boundary": {"value": 0}}, "stability.guard.boundary.value=0"),
        ({"boundary": {"window": 4}}, "stability.guard.boundary.window=4 must be at least 8"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        guard(**settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"tighten_factor": 0.25},
            "stability.guard.tighten_factor is set, and no rule has action=tighten; give a rule",
        ),
        ({"lower_lr": {"hold": 2}}, "stability.guard.lower_lr is set, and no rule has action=lower_lr"),
        ({"max_rollbacks": 1}, "stability.guard.max_rollbacks is set, and no rule has action=rollback"),
        ({"rollback_cooldown": 9}, "rollback_cooldown is set, and no rule has action=rollback or undo"),
    ],
)
def test_a_setting_of_an_action_that_no_rule_has_is_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        guard(**settings, rules={"r": {"signal": "vllm_kl/k3", "above": 1, "action": "stop"}})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("action", "settings"),
    [
        ("lower_lr", {"lower_lr": {"hold": 2}}),
        ("rollback", {"max_rollbacks": 1, "rollback_cooldown": 9}),
        ("undo", {"rollback_cooldown": 9}),
        ("warn", {"lower_lr": {"factor": 0.5}, "tighten_factor": 0.5}),  # the defaults, written out
    ],
)
def test_a_setting_of_an_action_that_a_rule_has_is_read(action, settings):
    assert guard(**settings, rules={"r": {"signal": "vllm_kl/k3", "above": 1, "action": action}}).rules


def test_a_rule_may_not_take_the_name_of_batch_skip():
    node = {"batch_skip": {"threshold": 0.1}, "guard": {"rules": {"batch_skip": {"signal": "x", "above": 1}}}}
    node["guard"]["rules"]["batch_skip"]["action"] = "warn"
    with pytest.raises(ConfigError, match=r"the name is taken by stability\.batch_skip"):
        read_settings(OmegaConf.create(node))


def test_the_tightened_band_is_narrower_in_logarithms():
    rule = {"r": {"signal": "vllm_kl/k3", "above": 1, "action": "tighten"}}
    node = {"correction": ["icepop", "geo_mask"], "guard": {"tighten_factor": 0.25, "rules": rule}}
    narrowed = read_settings(OmegaConf.create(node)).corrections(narrowed=True)
    assert narrowed["icepop"] == {"alpha": 0.5**0.25, "beta": 5.0**0.25}
    assert narrowed["geo_mask"] == {"low": 0.999, "high": 1.002} and list(narrowed) == ["icepop", "geo_mask"]


def test_a_band_without_one_cannot_be_narrowed():
    rule = {"r": {"signal": "vllm_kl/k3", "above": 1, "action": "tighten"}}
    node = {"correction": "icepop", "icepop": {"alpha": 2.0, "beta": 3.0}, "guard": {"rules": rule}}
    with pytest.raises(ConfigError, match=r"outside stability\.icepop\.alpha=2 to beta=3"):
        read_settings(OmegaConf.create(node))


@pytest.fixture
def run_of(compose, tmp_path):
    """run_of(config.json, overrides...) -> the features of a run of that model."""

    def run(model, *overrides):
        (tmp_path / "config.json").write_text(json.dumps(model))
        config = compose(f"actor_rollout_ref.model.path={tmp_path}", "stability=icepop", *overrides)
        return features_of(config)

    return run


QWEN = {"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 2048}}
FP8 = "actor_rollout_ref.rollout.quantization=fp8"
W4A4 = ("actor_rollout_ref.actor.fsdp_config.qat.enable=true", "actor_rollout_ref.actor.fsdp_config.qat.mode=w4a4")


@pytest.mark.parametrize(
    ("model", "overrides", "level"),
    [
        (QWEN, (), 0.002),
        (QWEN, (FP8,), 0.005),
        (QWEN, ("+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8",), 0.005),
        (QWEN | {"text_config": {"hidden_size": 4096}}, (), 0.004),
        ({"model_type": "deepseek_v3", "hidden_size": 2048}, (), 0.001),
        ({"model_type": "deepseek_v3", "hidden_size": 7168}, (), None),
        ({"model_type": "nemotron_h"}, W4A4, 0.1),
        ({"model_type": "gpt_oss"}, (FP8,), None),
        ({"model_type": "gpt_oss"}, ("stability.guard.level=0.5",), 0.5),
        ({"model_type": "gpt_oss"}, ("stability.guard.level=0",), 0),
        ({"model_type": "llama"}, (), None),
    ],
)
def test_the_launch_sets_the_published_level(run_of, model, overrides, level):
    run = run_of(model, *overrides)
    apply_engine_settings(run)
    assert run.config.stability.guard.level == level


def test_a_model_that_is_not_here_has_no_published_level(compose):
    assert published_level(compose("actor_rollout_ref.model.path=/no/such/model")) is None
    assert published_level(compose("actor_rollout_ref.model.path=owner/not-in-the-cache")) is None


def test_the_docs_have_each_rule_of_the_preset(compose):
    page = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")
    table = page.partition("## The rules of `stability=guard`")[2].partition("\n## ")[0]
    rows = {row.split("`")[1]: row.split(" | ") for row in table.splitlines() if row.startswith("| `")}
    preset = {rule.name: rule for rule in stability_config(compose("stability=guard").stability).rules[1:]}
    assert rows.keys() == preset.keys()
    for name, (_, fires, action, recovers) in rows.items():
        rule = preset[name]
        assert f"`{rule.signal}`" in fires and f"{rule.bound:g}" in fires.split() + fires.replace(",", "").split()
        assert action == rule.action
        assert recovers == f"{rule.bound if rule.recover is None else rule.recover:g} |"
        assert ("three times in a row" in fires) is (rule.patience == 3)
        assert ("64 steps" in fires) is (rule.zscore_window == 64)
        assert ("below" in fires or "<" in fires) is (rule.side == "below")
