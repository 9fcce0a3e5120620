import math

import pytest

from verl_ext.core.guard import GuardState, Verdict, judge


def verdict(k3=0.01, threshold=0.1, tokens=10, non_finite=None):
    return judge(
        {"vllm_kl/k3": k3},
        tokens=tokens,
        non_finite=non_finite or {},
        metric="vllm_kl/k3",
        threshold=threshold,
    )


@pytest.mark.parametrize(
    ("k3", "threshold", "skip"),
    [(0.01, 0.1, False), (0.1, 0.1, False), (0.11, 0.1, True), (1e-9, 0.0, True), (5.0, None, False)],
)
def test_a_batch_is_skipped_past_the_threshold_only(k3, threshold, skip):
    assert verdict(k3, threshold).skip is skip


def test_the_reason_names_metric_value_and_setting():
    reason = verdict(0.132, 0.1).reason
    assert reason == "vllm_kl/k3=0.132 passes stability.batch_skip.threshold=0.1"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_signal_that_is_not_finite_skips(value):
    assert verdict(value).skip


def test_non_finite_log_probs_skip_without_a_threshold_and_name_the_tensor():
    found = verdict(threshold=None, non_finite={"rollout_log_probs": 3, "old_log_probs": 0})
    assert found == Verdict(True, "rollout_log_probs has 3 non-finite values among 10 tokens")


def test_state_counts_skips_and_survives_a_round_trip():
    state = GuardState()
    for skip in (True, False, True):
        state.record(Verdict(skip))
    assert GuardState(**state.state_dict()).skips == 2
