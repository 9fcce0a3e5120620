"""The overlong punishment, against DAPO's equation and against verl's own reward manager."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_ext.core.rewards import soft_overlong_punishment
from verl_ext.errors import ConfigError

RELAXED = settings(deadline=None)  # the cores are shared

OVERRIDES = (  # as the docstring of verl_ext.core.rewards gives them
    "reward.reward_manager.name=dapo",
    "+reward.reward_kwargs.max_resp_len=${data.max_response_length}",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=true",
    "+reward.reward_kwargs.overlong_buffer_cfg.len=4",
    "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
    "+reward.reward_kwargs.overlong_buffer_cfg.log=true",
    "data.max_response_length=10",
)


def equation_13(length, longest, cache):
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@RELAXED
@given(st.integers(0, 200), st.integers(1, 100), st.integers(1, 100))
def test_it_equals_equation_13(length, longest, cache):
    cache = min(cache, longest)
    assert soft_overlong_punishment(length, longest, cache) == equation_13(length, longest, cache)


@pytest.mark.parametrize("cache", [0, -1, 11])
def test_an_impossible_cache_names_itself(cache):
    with pytest.raises(ConfigError, match=f"cache_length={cache} must be above 0 and at most max_length=10"):
        soft_overlong_punishment(5, 10, cache)


def test_verls_dapo_manager_with_the_documented_overrides_gives_the_same(compose):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.protocol import DataProto

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "answer"

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    config = compose(*OVERRIDES)
    manager_class = get_reward_manager_cls(config.reward.reward_manager.name)

    async def rewards():
        manager = manager_class(config, Tokenizer(), compute_score)
        found = []
        for length in range(1, 11):
            row = {
                "responses": torch.zeros(1, length, dtype=torch.long),
                "attention_mask": torch.ones(1, 3 + length, dtype=torch.long),
            }
            meta = {"data_source": "d", "reward_model": {"ground_truth": "g"}}
            data = DataProto(
                batch=TensorDict(row, batch_size=1),
                non_tensor_batch={name: np.array([value], dtype=object) for name, value in meta.items()},
            )
            found.append(float((await manager.run_single(data))["reward_score"]))
        return found

    expected = [1.0 + soft_overlong_punishment(length, 10, 4) for length in range(1, 11)]
    assert asyncio.run(rewards()) == pytest.approx(expected)
