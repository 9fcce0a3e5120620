"""The quick compose gives what Hydra composes."""

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.support import quick_compose
from verl_ext.launch.compose import VERL_CONFIGS, prepare

ROLLOUT = "actor_rollout_ref.rollout"
CASES = [
    ["recipe=qwen3_30b_a3b", "stability=r3", "stability.filters={overlong: {}}", f"{ROLLOUT}.temperature=0.7"],
    [
        "model_engine=megatron",
        f"+{ROLLOUT}.engine_kwargs.vllm.dtype=half",
        "~trainer.logger",
        f"{ROLLOUT}.name=null",
        "++new.key=[1,{a: 2}]",
        "trainer.nnodes=${trainer.n_gpus_per_node}",
    ],
    ["hydra.searchpath=[]", "stability=kpop"],
    ["trainer.no_such_key=1"],
    ["trainer.nnodes=[1"],
]


def outcome(compose, overrides):
    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        try:
            config = compose("ppo_trainer", prepare(overrides))
        except HydraException as error:
            return str(error)
    flags = OmegaConf.is_struct(config), OmegaConf.is_readonly(config)
    return OmegaConf.to_yaml(config), flags


@pytest.mark.slow
@pytest.mark.parametrize("overrides", CASES)
def test_it_is_hydras(overrides):
    whole = outcome(quick_compose.whole, overrides)
    for _ in range(2 if isinstance(whole, tuple) else 1):  # made, and made of what was kept
        assert outcome(quick_compose.compose, overrides) == whole


def test_a_change_of_one_config_is_not_seen_in_the_next():
    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        quick_compose.compose("ppo_trainer", prepare([])).trainer.nnodes = 77
        assert quick_compose.compose("ppo_trainer", prepare([])).trainer.nnodes == 1
