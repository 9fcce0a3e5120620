"""Where rollouts are older than the policy: which part of the gap the guard goes by, and that it says so."""

import math

import pytest

from verl_ext.guard.alone import AGE_IN_IT, MIXED, alone, has_age, whose
from verl_ext.guard.boundary import FEWEST
from verl_ext.guard.forecast import GAP, speaks
from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import Rule

K3 = "vllm_kl/k3"
FRESH, OLD = {"vllm_kl/share/lag/0": 1.0}, {"vllm_kl/share/lag/0": 0.4, "vllm_kl/share/lag/2": 0.6}


def forecasts(steps):
    """What the guard foresees in each step, of signals by step."""
    guard, found = Guard(), []
    for step, signals in enumerate(steps, 1):
        guard.begin(step)
        found.append(guard.foresee(signals))
    return found


def test_the_engines_part_is_that_of_lag_0_or_else_of_what_was_rescored():
    signals = {K3: 0.3, "vllm_kl/k3/lag/0": 0.1, "vllm_kl/engine/k3": 0.2}
    assert alone(K3, signals) == ("vllm_kl/k3/lag/0", 0.1)
    assert alone(K3, {K3: 0.3, "vllm_kl/engine/k3": 0.2}) == ("vllm_kl/engine/k3", 0.2)
    assert alone(K3, {K3: 0.3, "vllm_kl/k3/lag/1": 0.3}) is None
    assert alone("mine/k3", {"mine/k3": 0.3}) is None
    assert has_age(K3, OLD) and not has_age(K3, FRESH) and not has_age(K3, {K3: 0.3}) and not has_age("mine/k3", OLD)


def test_the_forecast_is_of_the_engines_alone_where_that_is_seen():
    steps = [
        OLD | {K3: 1e-3 * math.exp(0.2 * step), "vllm_kl/k3/lag/0": 1e-4 * math.exp(0.05 * step)} for step in range(12)
    ]
    *early, (metrics, _) = forecasts(steps)
    assert metrics["guard/growth_rate"] == pytest.approx(0.05) and metrics[MIXED] == 0
    assert [seen[MIXED] for seen, _ in early] == [1.0] * (FEWEST - 1) + [0.0] * (11 - FEWEST + 1)
    assert early[FEWEST - 2][0].get("guard/growth_rate") is None, "seven readings of either are too few"


def test_it_is_of_all_of_the_gap_where_only_that_is_seen_and_says_so():
    steps = [OLD | {K3: 1e-3 * math.exp(0.2 * step)} for step in range(12)]
    metrics, _ = forecasts(steps)[-1]
    assert metrics["guard/growth_rate"] == pytest.approx(0.2) and metrics[MIXED] == 1


def test_synchronous_training_has_nothing_to_say_about_it():
    metrics, _ = forecasts([{K3: 1e-3 * math.exp(0.2 * step)} for step in range(12)])[-1]
    assert metrics["guard/growth_rate"] == pytest.approx(0.2) and MIXED not in metrics


@pytest.mark.parametrize(
    ("steps", "now", "speak"),
    [
        (range(1, 9), 8, True),
        (range(1, 8), 7, False),
        (range(1, 9), 40, True),  # a window ago
        (range(1, 9), 41, False),
        (range(50, 450, 50), 449, True),  # rescored every 50 steps
        (range(50, 450, 50), 751, False),
    ],
)
def test_readings_speak_until_they_have_been_missing_for_as_long_as_they_took(steps, now, speak):
    assert speaks(list(steps), now, window=32) is speak


def test_older_rollouts_are_no_missed_weight_sync_where_the_engines_part_is_seen():
    usual = OLD | {GAP: 0.01, f"{GAP}/lag/0": 0.01}
    *_, (_, older) = forecasts([usual] * 4 + [usual | {GAP: 0.2}])
    assert older.events == ()
    *_, (_, missed) = forecasts([usual] * 4 + [usual | {GAP: 0.2, f"{GAP}/lag/0": 0.2}])
    (event,) = missed.events
    assert event.signal == f"{GAP}/lag/0" and "stale rollouts" not in event.reason
    without = {name: value for name, value in usual.items() if name != f"{GAP}/lag/0"}
    *_, (_, unknown) = forecasts([without] * 4 + [without | {GAP: 0.2}])
    assert unknown.events[0].signal == GAP and "stale rollouts" in unknown.events[0].reason


@pytest.mark.parametrize(
    ("signal", "more", "said"),
    [
        (K3, {"vllm_kl/k3/lag/0": 0.012}, " (of the engines alone: vllm_kl/k3/lag/0=0.012)"),
        (K3, {"vllm_kl/engine/k3": 0.02}, " (of the engines alone: vllm_kl/engine/k3=0.02)"),
        (K3, {}, AGE_IN_IT),
        ("vllm_kl/prob_diff_mean", {}, AGE_IN_IT),
        ("vllm_kl/k3/lag/2", {}, ""),
        ("vllm_kl/engine/k3", {}, ""),
        ("guard/steps_to_boundary", {MIXED: 0.0}, " (of the engines alone)"),
        ("guard/growth_rate", {MIXED: 1.0}, AGE_IN_IT),
        ("guard/steps_to_boundary", {}, ""),
        ("critic/score/mean", {}, ""),
    ],
)
def test_whose_gap_a_signal_is(signal, more, said):
    assert whose(signal, OLD | more) == said
    assert whose(K3, FRESH | {"vllm_kl/k3/lag/0": 0.1}) == ""


def test_a_rules_reason_says_whose_gap_it_saw():
    guard = Guard([Rule("skip", K3, 0.1, action="skip", setting="stability.batch_skip.threshold")])
    guard.begin(1)
    refused = guard.judge(OLD | {K3: 0.2, "vllm_kl/k3/lag/0": 0.01}).refusal
    assert refused.reason == (
        "vllm_kl/k3=0.2 (of the engines alone: vllm_kl/k3/lag/0=0.01) passes stability.batch_skip.threshold=0.1"
    )
