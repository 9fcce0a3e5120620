"""Every file of configs/ composes with verl's real config."""

from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from verl_ext.compose import prepare, stability_choices
from verl_ext.config import ConfigError, StabilityConfig, stability_config

CONFIGS = Path(__file__).parent.parent / "configs"


def names(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("name", names("stability"))
def test_each_stability_option_composes_and_validates(compose, name):
    config = compose(f"stability={name}")
    assert isinstance(stability_config(config.stability), StabilityConfig)


def test_none_is_verls_own_config_and_a_stability_node_that_is_off(compose):
    ours = OmegaConf.to_container(compose("stability=none"))
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        verls = OmegaConf.to_container(hydra.compose("ppo_trainer"))
    assert not stability_config(OmegaConf.create(ours.pop("stability"))).active
    assert ours == verls


def test_choices_are_the_files():
    assert list(stability_choices()) == names("stability")


def test_icepop_is_the_papers_band_with_the_guard(compose):
    stability = stability_config(compose("stability=icepop").stability)
    assert (stability.correction, stability.icepop.alpha, stability.icepop.beta) == ("icepop", 0.5, 5.0)
    assert (stability.batch_skip.metric, stability.batch_skip.threshold) == ("vllm_kl/k3", 0.1)


def test_icepop_loss_reaches_verls_actor_config(compose):
    from verl.utils.config import omega_conf_to_dataclass

    config = compose(
        "stability=icepop_loss",
        "actor_rollout_ref.actor.policy_loss.beta=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    )
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert (type(loss).__name__, loss.loss_mode, loss.alpha, loss.beta) == (
        "IcePopLossConfig",
        "icepop",
        0.5,
        3,
    )


@pytest.mark.parametrize("name", names("recipe"))
def test_each_recipe_composes_and_passes_verls_validation(compose, name):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = compose(f"recipe={name}", "stability=icepop")
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def test_verls_own_groups_can_still_be_overridden(compose):
    config = compose("model_engine=megatron", "algorithm.adv_estimator=grpo")
    assert config.actor_rollout_ref.actor.strategy == "megatron"


def test_another_of_verls_configs_can_be_the_base(compose):
    config = compose("stability=icepop", base="ppo_megatron_trainer")
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert config.stability.correction == "icepop"


def test_hydras_own_flags_mean_what_they_mean_to_verl(tmp_path):
    assert prepare(["--config-name=ppo_megatron_trainer.yaml", "a=1"]) == ["a=1"]
    flag, folder, rest = prepare(["--config-path=config", "a=1"])
    assert (flag, rest) == ("--config-dir", "a=1")
    assert (Path(folder) / "ppo_trainer.yaml").exists()
    assert prepare(["-cp", str(tmp_path), "-cn", "mine"]) == ["--config-dir", str(tmp_path)]


def test_an_unknown_stability_option_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"stability=icepopp is not known; choose one of: icepop, icepop_loss, none"):
        prepare(["a=1", "stability=icepopp"])
