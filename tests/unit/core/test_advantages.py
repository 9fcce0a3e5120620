"""QAE and positive GRPO, against the papers' formulas in plain Python floats."""

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f_oneway

from tests.support.closeness import close
from verl_ext.base.errors import BatchError
from verl_ext.core.advantages import (
    Sessions,
    advantages_of_rows,
    group_ids,
    grpo_positive_advantages,
    prompt_effect,
    quantile_baseline_advantages,
    quantile_baselines,
)

REWARD = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.3]) | st.floats(-100, 100, width=32)
SESSIONS = st.lists(st.tuples(REWARD, st.integers(0, 4)), min_size=1, max_size=30)
LEVELS = st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.55, 0.6, 0.7, 0.9])


def columns(sessions):
    rewards, groups = zip(*sessions, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), group_ids(groups)


def by_group(sessions):
    """group -> its rewards"""
    return {name: [reward for reward, group in sessions if group == name] for _, name in sessions}


def quantile(rewards, k):
    """inf{x : F(x) >= k}, F(x) the share of rewards at most x (arXiv 2509.22611, section 4.1)."""
    return min(x for x in rewards if sum(r <= x for r in rewards) / len(rewards) >= k)


def std(rewards):
    return statistics.stdev(rewards) if len(rewards) > 1 else 0.0


@given(SESSIONS, LEVELS, st.booleans())
def test_qae_equals_the_papers_equation_3(sessions, k, norm):
    groups = by_group(sessions)
    expected = [
        (reward - quantile(groups[name], k)) / (std(groups[name]) + 1e-6 if norm else 1.0) for reward, name in sessions
    ]
    found = quantile_baseline_advantages(*columns(sessions), k=k, norm_by_std=norm)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.integers(1, 64), st.integers(0, 64), LEVELS)
def test_a_binary_baseline_is_the_threshold_of_equation_4(size, successes, k):
    successes = min(successes, size)
    rewards = torch.tensor([1.0] * successes + [0.0] * (size - successes))
    found = quantile_baselines(rewards, torch.zeros(size, dtype=torch.long), k)
    # p > 1 - k, in the failures' whole numbers: 1 - k is rounded.
    expected = 1.0 if (size - successes) / size < k else 0.0
    assert found.tolist() == [expected] * size


@given(SESSIONS, st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
def test_grpo_positive_equals_the_formula(sessions, scale, norm):
    groups = by_group(sessions)

    def advantage(reward, rewards):
        alone = len(rewards) == 1
        mean, deviation = (0.0, 1.0) if alone else (math.fsum(rewards) / len(rewards), std(rewards))
        value = (reward - mean) / (deviation + 1e-6 if norm else 1.0)
        return value * scale if value < 0 else value

    expected = [advantage(reward, groups[name]) for reward, name in sessions]
    found = grpo_positive_advantages(*columns(sessions), negative_scale=scale, norm_by_std=norm)
    # 1e-9: what is left of a rounding error of the oracle's mean, divided by 1e-6.
    assert found.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_have_an_advantage_of_exactly_zero(reward, size):
    rewards, groups = torch.full((size,), reward, dtype=torch.float64), torch.zeros(size, dtype=torch.long)
    assert quantile_baseline_advantages(rewards, groups, k=0.4).tolist() == [0.0] * size
    assert grpo_positive_advantages(rewards, groups, negative_scale=1.0).tolist() == [0.0] * size


@given(SESSIONS, st.randoms())
def test_the_order_of_the_sessions_does_not_matter(sessions, random):
    order = list(range(len(sessions)))
    random.shuffle(order)
    rewards, groups = columns(sessions)
    for estimate in (
        lambda r, g: quantile_baseline_advantages(r, g, k=0.4),
        lambda r, g: grpo_positive_advantages(r, g, negative_scale=0.5),
    ):
        # As above: a mean of rewards near 100, its last bits divided by 1e-6 in a group whose rewards all but agree.
        close(estimate(rewards[order], groups[order]), estimate(rewards, groups)[order], rtol=1e-6, scale=100.0)


def test_no_session_has_no_advantage():
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert quantile_baseline_advantages(*nothing, k=0.4).tolist() == []
    assert grpo_positive_advantages(*nothing, negative_scale=0.0).tolist() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_the_tensor(value):
    rewards, groups = torch.tensor([0.0, value, value]), torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"rewards \(verl's rm_scores\) has 2 of 3 values that are NaN or infinite.* at 1"
    ):
        quantile_baseline_advantages(rewards, groups, k=0.4)
    with pytest.raises(ValueError, match="rm_scores"):
        grpo_positive_advantages(rewards, groups, negative_scale=0.0)


def test_sessions_are_read_from_the_keys():
    found = Sessions.from_keys(["a_b_0_0", "a_b_1_10", "c_0_0", "a_b_1_9", "a_b_0_1"])
    assert found.uid_S == ["a_b", "a_b", "c"]
    assert found.session_B == [0, 1, 2, 1, 0]
    assert found.final_S == [4, 1, 2]  # index 10 comes after 9


@pytest.mark.parametrize("key", ["abc", "a_0", "a_0_x", "_0_0", ""])
def test_a_key_of_another_form_is_shown(key):
    with pytest.raises(ValueError, match=f"trajectory id '{key}'"):
        Sessions.from_keys([key])


def test_a_row_has_its_sessions_advantage_and_a_session_counts_once_by_its_last_output():
    keys, uids = ["a_0_1", "b_0_0", "a_0_0", "a_1_0", "b_1_0"], ["a", "b", "a", "a", "b"]
    rewards = torch.tensor([3.0, 5.0, 99.0, 1.0, 7.0])
    above_mean = partial(grpo_positive_advantages, negative_scale=1.0, norm_by_std=False)
    assert advantages_of_rows(above_mean, rewards, uids, keys).tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert advantages_of_rows(above_mean, rewards[:2], ["a", "a"]).tolist() == [-1.0, 1.0]
    assert advantages_of_rows(above_mean, torch.zeros(0), []).tolist() == []


def keys_of(sessions):
    return [f"prompt_{group}_{place}_0" for place, (_, group) in enumerate(sessions)]


@given(SESSIONS)
def test_the_prompt_effect_is_f_of_a_one_way_analysis_of_variance(sessions):
    rewards, _ = columns(sessions)
    found, groups = prompt_effect(rewards, keys_of(sessions)), list(by_group(sessions).values())
    if not 1 < len(groups) < len(sessions) or all(len(set(group)) == 1 for group in groups):
        assert found is None
    elif sum(len(group) * statistics.pvariance(group) for group in groups) > 1e-9:  # SciPy's sums round
        assert found == pytest.approx(f_oneway(*groups).statistic, rel=1e-6, abs=1e-9)


def test_the_prompt_effect_counts_a_session_once_by_its_last_output():
    once = prompt_effect(torch.tensor([1.0, 0.0, 3.0, 2.5]), ["a_0_0", "a_1_0", "b_0_0", "b_1_0"])
    keys = ["a_0_0", "a_0_1", "a_1_0", "b_0_1", "b_0_0", "b_1_0"]
    assert prompt_effect(torch.tensor([9.0, 1.0, 0.0, 3.0, 9.0, 2.5]), keys) == once


def test_the_prompt_effect_of_random_rewards_averages_1_and_of_solved_prompts_is_large():
    draw = torch.Generator().manual_seed(0)
    keys = [f"{prompt}_{session}_0" for prompt in range(8) for session in range(8)]
    effects = [prompt_effect(torch.rand(64, generator=draw), keys) for _ in range(200)]
    # F(7, 56) has mean 1.04 and standard deviation 0.6: 5 standard errors of 200 draws.
    assert statistics.mean(effects) == pytest.approx(1.04, abs=0.21)
    solved = torch.arange(8).repeat_interleave(8) / 8 + 0.1 * torch.rand(64, generator=draw)
    assert prompt_effect(solved, keys) > 100
    with pytest.raises(BatchError, match="rewards"):
        prompt_effect(torch.tensor([math.nan, 1.0, 2.0]), ["a_0_0", "a_1_0", "b_0_0"])
