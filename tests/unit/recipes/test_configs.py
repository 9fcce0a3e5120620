"""Every file of configs/ composes with verl's real config."""

import json

import hydra
import pytest
from omegaconf import OmegaConf

from tests import ROOT
from tests.support.examples import slow_cases
from verl_ext.base.errors import ConfigError
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.stability import stability_config
from verl_ext.launch.compose import VERL_CONFIGS, prepare, stability_choices

CONFIGS = ROOT / "configs"
METHODS = (CONFIGS.parent / "docs" / "methods.md").read_text()


def names(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("name", names("stability"))
def test_each_stability_option_stands_among_the_methods(name):
    assert f"`stability={name}`" in METHODS


def test_each_filter_stands_among_the_methods():
    from verl_ext.core.filters import BATCH_FILTERS

    assert all(f"| `{name}` |" in METHODS for name in BATCH_FILTERS)


def test_the_filters_option_has_all_that_need_no_extra_capture(compose):
    from verl_ext.core.filters import BATCH_FILTERS

    listed = list(compose("stability=filters").stability.filters)
    assert set(listed) == {
        name for name, method in BATCH_FILTERS.items() if not (method.needs_agreement or method.needs_lag)
    }, "a line in configs/stability/filters.yaml"


def test_none_is_verls_own_config_and_a_stability_node_that_is_off(compose):
    ours = OmegaConf.to_container(compose("stability=none"))
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        verls = OmegaConf.to_container(hydra.compose("ppo_trainer"))
    assert stability_config(OmegaConf.create(ours.pop("stability"))) == StabilityConfig()
    assert ours == verls


def test_choices_are_the_files():
    assert list(stability_choices()) == names("stability")


@pytest.mark.parametrize("name", slow_cases(names("stability")))
def test_each_stability_option_passes_our_checks_and_verls_validation(compose, name):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from verl_ext.features.fit import fit_run

    overrides = ("recipe=cpu_smoke", f"stability={name}", "actor_rollout_ref.model.path=some/model")
    config = compose(*overrides, "data.max_response_length=8192")
    fit_run(config, overrides, read_model=True)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


@pytest.mark.parametrize(
    ("name", "parameters", "rollout"),
    [("bf16", "bf16", "bfloat16"), ("fp16", "fp16", "float16"), ("fp32", "fp32", "float32")],
)
def test_a_precision_sets_both_engines(compose, name, parameters, rollout):
    from verl.utils.config import omega_conf_to_dataclass

    config = compose("recipe=cpu_smoke", "stability=icepop", f"precision={name}")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.fsdp_config.mixed_precision["param_dtype"] == parameters
    assert config.actor_rollout_ref.ref.fsdp_config.mixed_precision == actor.fsdp_config.mixed_precision
    assert config.actor_rollout_ref.rollout.dtype == rollout


def test_fp16_on_megatron_is_megatrons_own(compose):
    config = compose("recipe=qwen3_30b_a3b_megatron", "stability=icepop", "precision=fp16_megatron")
    ref = config.actor_rollout_ref
    assert (ref.actor.megatron.dtype, ref.ref.megatron.dtype, ref.rollout.dtype) == ("float16",) * 3


def test_dppo_tv_is_verls_example_of_it(compose):
    """The settings are those of verl's examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh, except for its Dr. GRPO."""
    config = compose("stability=dppo_tv")
    actor = config.actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high) == ("dppo_tv", 0.15, 0.15)
    assert config.algorithm.rollout_correction.bypass_mode is True and actor.clip_ratio_c == 10000


def test_icepop_loss_reaches_verls_actor_config(compose):
    from verl.utils.config import omega_conf_to_dataclass

    from verl_ext.core.corrections import IcePop

    config = compose(
        "stability=icepop_loss",
        "actor_rollout_ref.actor.policy_loss.beta=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    )
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert (type(loss).__name__, loss.loss_mode, loss.settings) == ("ComposedLossConfig", "icepop", IcePop(0.5, 3))


@pytest.mark.parametrize("name", names("recipe"))
def test_each_recipe_composes_and_passes_verls_validation(compose, name):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = compose(f"recipe={name}", "stability=icepop")
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def test_verls_own_groups_can_still_be_overridden(compose):
    config = compose("model_engine=megatron", "algorithm.adv_estimator=grpo")
    assert config.actor_rollout_ref.actor.strategy == "megatron"


def test_of_a_group_the_last_choice_counts():
    given = ["stability=icepop", "recipe=cpu_smoke", "trainer.nnodes=2", "+stability=moe", "trainer.nnodes=4"]
    assert prepare(given) == ["+recipe=cpu_smoke", "trainer.nnodes=2", "+stability=moe", "trainer.nnodes=4"]


def test_groups_are_added_to_a_primary_config_that_does_not_list_them(tmp_path):
    assert prepare(["a=1"]) == ["+stability=none", "a=1"]
    assert prepare(["stability=icepop", "stability.icepop.beta=3", "recipe=cpu_smoke"]) == [
        "+stability=icepop",
        "++stability.icepop.beta=3",
        "+recipe=cpu_smoke",
    ]
    (tmp_path / "mine.yaml").write_text("defaults:\n- ppo_trainer\n- stability: none\n- _self_\n")
    flags = [f"--config-path={tmp_path}", "--config-name=mine"]
    assert prepare([*flags, "stability=icepop"]) == ["stability=icepop", *flags]
    assert prepare(flags) == flags


def test_a_relative_config_path_is_verls():
    config = "--config-path=config"
    assert prepare([config, "stability=icepop"]) == ["+stability=icepop", f"--config-path={VERL_CONFIGS}"]
    assert prepare(["-cp", "config", "-cn", "ppo_megatron_trainer"])[1:] == [
        "-cp",
        str(VERL_CONFIGS),
        "-cn",
        "ppo_megatron_trainer",
    ]


MAIN = """
import contextlib, io, json, runpy, sys
printed = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = [*arguments, "--cfg", "job"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("verl_ext.main_ppo", run_name="__main__", alter_sys=True)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def command_lines(fresh_python, *given):
    """The configs that `python -m verl_ext.main_ppo ARGUMENTS` composes, for each; one process imports for all."""
    result = fresh_python(MAIN, json.dumps(given))
    assert result.returncode == 0, result.stderr
    return [OmegaConf.create(text) for text in json.loads(result.stdout.splitlines()[-1])]


@pytest.mark.slow
def test_configs_as_launch_scripts_name_them(fresh_python, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath:\n  - pkg://verl.trainer.config\n"
        "defaults:\n- ppo_trainer\n- _self_\ndata:\n  train_batch_size: 7\n"
    )
    at_the_end, megatron, mine = command_lines(
        fresh_python,
        ["trainer.total_epochs=3"],  # the flag that `command_lines` adds stays behind it
        ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", "stability=icepop"],
        [f"--config-path={tmp_path}", "--config-name=mine", "stability=icepop", "-c", "job"],
    )
    assert at_the_end.trainer.total_epochs == 3
    assert megatron.actor_rollout_ref.actor.strategy == "megatron", "another of verl's"
    assert mine.data.train_batch_size == 7, "of the user's own, with its own search path"
    assert megatron.stability.correction == mine.stability.correction == "icepop"


@pytest.mark.parametrize(
    ("given", "named"), [("icepopp", "similar: icepop"), ("xyz", "choose one of: .*icepop, icepop_loss, ")]
)
def test_an_unknown_stability_option_lists_similar_or_all_known_ones(given, named):
    with pytest.raises(ConfigError, match=f"stability={given} is not known; {named}"):
        prepare(["a=1", f"stability={given}"])
