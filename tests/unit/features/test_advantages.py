"""The estimators as verl calls them, against verl's own GRPO and its rule for several outputs a session."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tests.support.closeness import close
from verl_ext.base.errors import BatchError, ConfigError
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.features.advantages import estimator_settings, session_keys

qae, grpo_positive = get_adv_estimator_fn("qae"), get_adv_estimator_fn("grpo_positive")

GRPO = OmegaConf.create({"grpo_positive": {"negative_scale": 1.0}})
TWO_TURNS = ["u_0_0", "u_0_1", "u_1_0", "v_0_0", "v_1_1", "v_1_0", "u_2_0", "v_2_0"]


def batch(rows, seed=0, length=5):
    """Rewards on the last token, a ragged mask with a hole and a row without any token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, length, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    mask[-1] = 0
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.rand(rows, generator=generator) * 4 - 2
    return rewards, mask


def through_verl(estimator, keys, rewards, mask, config):
    data = DataProto(
        batch=TensorDict({"token_level_rewards": rewards, "response_mask": mask}, batch_size=len(keys)),
        non_tensor_batch={"uid": np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)},
    )
    norm = config.get("norm_adv_by_std_in_grpo", True)
    found = compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=estimator, norm_adv_by_std_in_grpo=norm, config=config
    )
    return found.batch["advantages"], found.batch["returns"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_grpo_positive_at_scale_one_is_verls_grpo(seed, norm):
    rewards, mask = batch(9, seed)
    index = np.array(["a", "b", "a", "c", "b", "a", "b", "b", "a"], dtype=object)
    config = OmegaConf.merge(GRPO, {"norm_adv_by_std_in_grpo": norm})
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=norm)
    found, returns = grpo_positive(rewards, mask, index, config)
    close(found, expected)
    assert returns is found
    assert found.dtype == rewards.dtype


@pytest.mark.parametrize("seed", range(4))
def test_several_outputs_a_session_are_treated_as_verl_treats_them_for_grpo(seed):
    rewards, mask = batch(8, seed)
    mask[-1, 0] = 1  # verl takes a session's advantage from the first token of its final output
    expected, _ = through_verl("grpo", TWO_TURNS, rewards, mask, GRPO)
    with session_keys(TWO_TURNS):
        found, _ = through_verl("grpo_positive", TWO_TURNS, rewards, mask, GRPO)
    close(found, expected)


def test_without_the_context_every_row_is_a_session():
    rewards, mask = batch(8)
    index = np.array([key[0] for key in TWO_TURNS])
    found, _ = through_verl("grpo_positive", TWO_TURNS, rewards, mask, GRPO)
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    close(found, expected)


def test_qae_takes_the_rewards_of_final_outputs():
    # u: 1, 0, 0 by final outputs (the first output of session 0 has another reward): 0.4 of them is 0.
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0"]
    rewards = torch.tensor([[-5.0], [1.0], [0.0], [0.0]])
    with session_keys(keys):
        found, _ = through_verl("qae", keys, rewards, torch.ones(4, 1), OmegaConf.create({}))
    assert found.flatten().tolist() == pytest.approx([1 / (1 / 3) ** 0.5] * 2 + [0, 0], rel=1e-5)


def test_settings_come_from_the_algorithm_node():
    rewards, mask = torch.tensor([[0.0], [1.0], [2.0]]), torch.ones(3, 1)
    config = OmegaConf.create({"qae": {"k": 0.6}, "norm_adv_by_std_in_grpo": False})
    assert qae(rewards, mask, ["u"] * 3, config)[0].flatten().tolist() == [-1.0, 0.0, 1.0]
    config.qae.k = 0.9
    assert qae(rewards, mask, ["u"] * 3, config)[0].flatten().tolist() == [-2.0, -1.0, 0.0]


@pytest.mark.parametrize("config", [None, AlgoConfig()])
def test_defaults_hold_without_settings(config):
    rewards, mask = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0]]), torch.ones(5, 1)
    found = qae(rewards, mask, ["u"] * 5, config)[0].flatten()  # p = 0.6 = 1 - K: hard
    assert found.tolist() == pytest.approx([0, 0] + [1 / 0.3**0.5] * 3, rel=1e-5)
    assert grpo_positive(rewards, mask, ["u"] * 5, config)[0].min() == 0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"qae": {"k": 1}}, r"algorithm\.qae\.k=1 must be between 0 and 1"),
        ({"qae": {"k": 0.0}}, r"algorithm\.qae\.k=0 must be"),
        ({"qae": {"k": float("nan")}}, r"algorithm\.qae\.k=nan must be"),
        ({"qae": {"k": "half"}}, r"algorithm\.qae\.k=half must be a number"),
        ({"qae": {"K": 0.4}}, r"algorithm\.qae\.K is not known; its settings are: k"),
        ({"grpo_positive": {"negative_scale": -1}}, r"algorithm\.grpo_positive\.negative_scale=-1 must be at least 0"),
        ({"grpo_positive": {"negative_scale": True}}, r"negative_scale=True must be a number"),
    ],
)
def test_a_bad_setting_is_named(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        estimator_settings(ESTIMATORS[next(iter(algorithm))], OmegaConf.create(algorithm))


def test_a_nan_reward_names_the_tensor():
    with pytest.raises(BatchError, match="rm_scores"):
        qae(torch.tensor([[float("nan")], [1.0]]), torch.ones(2, 1), ["u", "u"])


def test_a_nan_reward_of_a_batch_that_was_refused_ends_nothing():
    rewards, mask = torch.tensor([[float("nan")], [1.0], [0.0]]), torch.tensor([[1.0], [1.0], [0.0]])
    with session_keys(["u_0_0", "u_1_0", "v_0_0"], refused=True):
        assert qae(rewards, mask, ["u", "u", "v"])[0].isnan().all()
        assert qae(rewards.nan_to_num(), mask, ["u", "u", "v"])[0].isfinite().all()


def test_keys_of_another_batch_are_refused():
    with session_keys(["u_0_0"]), pytest.raises(BatchError, match="1 trajectory ids and the batch 2 rows"):
        qae(torch.zeros(2, 1), torch.ones(2, 1), ["u", "u"])


def test_the_keys_are_gone_after_the_context_even_after_an_error():
    with pytest.raises(KeyError), session_keys(["u_0_0"]):
        raise KeyError
    assert qae(torch.zeros(2, 1), torch.ones(2, 1), ["u", "u"])[0].shape == (2, 1)


def test_they_are_registered_with_verl_by_name():
    assert get_adv_estimator_fn("qae") is qae
    assert get_adv_estimator_fn("grpo_positive") is grpo_positive


def test_they_can_be_registered_from_a_hook_on_verls_registry(fresh_python):
    code = (
        "from wrapt import register_post_import_hook\n"
        "from verl_ext.features.advantages import register_estimators\n"
        "register_post_import_hook(lambda _: register_estimators(), 'verl.trainer.ppo.core_algos')\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as f; print(f('qae').func.__module__)"
    )
    result = fresh_python(code)
    assert result.stdout.split()[-1:] == ["verl_ext.features.advantages"], result.stderr


def test_the_settings_compose_with_verls_own_config(compose):
    config = compose("algorithm.adv_estimator=qae", "+algorithm.qae.k=0.6")
    assert estimator_settings(ESTIMATORS["qae"], config.algorithm).k == 0.6
