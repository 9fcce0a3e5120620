"""A launch is told all its problems at once, and a preset is fitted whatever else is wrong."""

import pytest
from omegaconf import OmegaConf

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.features.fit import fit, fit_run
from verl_ext.features.stability import stability_config
from verl_ext.features.table import left_out
from verl_ext.features.verl_config import is_unknown, judged, mark_unknown

VLLM = ("actor_rollout_ref.rollout.name=vllm",)
FOUR = (
    *("recipe=qwen3_30b_a3b", "stability.correction=[icepop,tis]", "stability.rescoring.every=5"),
    *("stability.cascade_attention=off", "actor_rollout_ref.rollout.name=sglang", "stability.guard.tighten_factor=0.4"),
)


def problems(compose, *overrides):
    return fit(compose(*overrides), overrides, read_model=False).problems


def test_each_setting_that_cannot_work_is_named_once(compose):
    found = [problem.found for problem in problems(compose, *FOUR)]
    named = ("correction=", "guard.tighten_factor", "rescoring.every=5", "cascade_attention=off")
    assert len(found) == len(named)
    assert all(any(one.startswith(f"stability.{name}") for one in found) for name in named)


def test_the_launch_is_refused_with_all_of_them(compose):
    with pytest.raises(ConfigError) as error:
        fit_run(compose(*FOUR), FOUR, read_model=False)
    assert error.value.problems == tuple(problems(compose, *FOUR))
    assert str(error.value).splitlines() == [str(problem) for problem in error.value.problems]
    assert error.value.fix == ("stability.rescoring=null", "stability.cascade_attention=default")


def test_a_preset_is_fitted_although_another_setting_is_refused(compose):
    overrides = (*VLLM, "stability=moe", "stability.cascade_attention=off", "actor_rollout_ref.rollout.name=sglang")
    config = compose(*overrides)
    features, (problem,) = fit(config, overrides, read_model=False)
    assert problem.found.startswith("stability.cascade_attention=off")
    assert [row.setting for row in left_out(features)] == ["now stability.correction=tis stability.opsm=null"]


@pytest.mark.parametrize(
    ("node", "named"),
    [
        (
            {"correction": ["icepop", "icepopp"], "metrics": "perhaps", "replay": "R4"},
            ["stability.correction=icepopp", "stability.metrics=perhaps"],
        ),
        ({"metric": True, "brakdown": False}, ["stability.metric", "stability.brakdown"]),
        (
            {"correction": "icepop", "icepop": {"alpha": "a", "beta": "b"}},
            ["stability.icepop.alpha=a", "stability.icepop.beta=b"],
        ),
        (
            {
                "guard": {
                    "rules": {
                        "a": {"signal": "vllm_kl/k3"},
                        "b": {"signal": "vllm_kl/k4", "above": 1, "action": "warn"},
                    }
                }
            },
            ["stability.guard.rules.a needs one bound", "stability.guard.rules.b.signal=vllm_kl/k4"],
        ),
    ],
)
def test_values_that_cannot_be_read_are_named_together(node, named):
    with pytest.raises(ConfigError) as error:
        stability_config(node)
    found = [problem.found for problem in error.value.problems]
    assert len(found) == len(named) and all(one.startswith(name) for one, name in zip(found, named, strict=True))


def test_a_setting_that_another_problem_names_is_not_called_without_effect(compose):
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    stages = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
    asked = ("model_engine=megatron", stages, "stability.router_agreement=true", bypass)
    (problem,) = problems(compose, *VLLM, *asked)
    assert problem.found.startswith("stability.router_agreement=true compares")


@pytest.mark.parametrize(
    ("mode", "batch", "refused"), [("sync", 3, True), ("sync", 4, False), ("separate_async", 8, True)]
)
def test_a_batch_has_as_many_prompts_as_the_canary_needs(compose, mode, batch, refused):
    """verl takes a batch of separate_async apart into `parameter_sync_step` (4) updates."""
    overrides = (*VLLM, "stability=icepop", "stability.sync_canary.trajectories=4", f"trainer.v1.trainer_mode={mode}")
    found = problems(compose, *overrides, f"data.train_batch_size={batch}")
    assert any(problem.found.startswith("stability.sync_canary.trajectories=4 needs") for problem in found) == refused


VALUES = {
    "count": 3,
    "path": "~/x y/'z",
    "list": [1, "two", None],
    "needed": "???",
    "again": "${a.count}",
    "node": {"b": 1},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_of_unknown_value_keeps_its_default(name):
    config = OmegaConf.create({"a": VALUES})
    usual = None if name == "needed" else OmegaConf.select(config, f"a.{name}")
    mark_unknown(config, f"a.{name}")
    assert is_unknown(config, f"a.{name}") and not is_unknown(config, "a.no_such")
    assert config.a[name] == OmegaConf.select(config, f"a.{name}") == usual


def test_a_problem_has_the_settings_of_unknown_value_that_its_rule_read():
    config = OmegaConf.create({"a": VALUES, "c": {"known": 1}})
    for setting in ("a.count", "a.node", "no.such"):
        mark_unknown(config, setting)

    def rule():
        yield Problem("reads nothing unknown") if config.c.known else None
        yield Problem("reads another setting's value") if OmegaConf.select(config, "a.again") else None
        yield from judged([Problem("judges by itself")])
        yield Problem("reads a node") if config.a.node.b else None

    assert [problem.unknown for problem in judged(rule())] == [(), ("a.count",), (), ("a.count", "a.node")]
