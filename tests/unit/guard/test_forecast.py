"""The guard's forecasts: growth towards the boundary, the engines' part, a blind mask, and a run that is dead."""

import json
import math

import numpy as np
import pytest

from tests import ROOT
from tests.support.guarding import guarded_step
from verl_ext.diagnosis.collapse import STAYS, find_collapse
from verl_ext.diagnosis.growth import FEWEST_FOR_GROWTH, HORIZON
from verl_ext.diagnosis.names import GRADIENT, K3, LOG_RATIO, REWARD
from verl_ext.diagnosis.series import Readings
from verl_ext.guard.forecast import AGE_IN_IT, MIXED, engines_part, engines_value, holds_age, owner_clause, place_clause
from verl_ext.guard.guard import Guard

DATA = ROOT / "tests" / "support" / "data"
DROPPED = "correction/dropped"


def recorded(name):
    found = json.loads((DATA / f"{name}.json").read_text())
    return {key: values for key, values in found.items() if key != "what"}


@pytest.mark.parametrize(("name", "steps"), [("stable_lr_1e-3", []), ("stable_lr_1e-2", []), ("frozen_rollout", [13])])
def test_a_recorded_run_is_suspected_only_of_a_lost_sync(name, steps):
    """In the third, no weight sync reaches the rollout from step 9 on. Single tokens move k3 tenfold in the others."""
    assert [event.step for event in walk(Guard(), recorded(name))[1]] == steps


FRESH, OLD = {"vllm_kl/share/lag/0": 1.0}, {"vllm_kl/share/lag/0": 0.4, "vllm_kl/share/lag/2": 0.6}


def forecasts(steps):
    """Returns the guard's forecasts in each step, from signals by step."""
    guard, found = Guard(), []
    for step, signals in enumerate(steps, 1):
        guard.begin(step)
        found.append(guard.foresee(signals))
    return found


def test_the_engines_part_is_of_lag_0_or_of_what_was_rescored():
    signals = {K3: 0.3, "vllm_kl/k3/lag/0": 0.1, "vllm_kl/engine/k3": 0.2}
    assert engines_part(K3, signals) == ("vllm_kl/k3/lag/0", 0.1)
    assert engines_part(K3, {K3: 0.3, "vllm_kl/engine/k3": 0.2}) == ("vllm_kl/engine/k3", 0.2)
    assert engines_part(K3, {K3: 0.3, "vllm_kl/k3/lag/1": 0.3}) is None
    assert engines_part("mine/k3", {"mine/k3": 0.3}) is None
    assert (
        holds_age(K3, OLD)
        and not holds_age(K3, FRESH)
        and not holds_age(K3, {K3: 0.3})
        and not holds_age("mine/k3", OLD)
    )


def test_the_forecast_is_of_the_engines_alone_where_that_is_seen():
    steps = [
        OLD | {K3: 1e-3 * math.exp(0.2 * step), "vllm_kl/k3/lag/0": 1e-4 * math.exp(0.05 * step)} for step in range(12)
    ]
    *early, (metrics, _) = forecasts(steps)
    assert metrics["guard/growth_rate"] == pytest.approx(0.05) and metrics[MIXED] == 0
    assert [seen[MIXED] for seen, _ in early] == [1.0] * (FEWEST_FOR_GROWTH - 1) + [0.0] * (11 - FEWEST_FOR_GROWTH + 1)
    assert early[FEWEST_FOR_GROWTH - 2][0].get("guard/growth_rate") is None, "seven readings of either are too few"


def test_it_is_of_all_of_the_gap_where_only_that_is_seen():
    steps = [OLD | {K3: 1e-3 * math.exp(0.2 * step)} for step in range(12)]
    metrics, _ = forecasts(steps)[-1]
    assert metrics["guard/growth_rate"] == pytest.approx(0.2) and metrics[MIXED] == 1


def test_a_step_is_one_reading_and_eight_make_a_forecast():
    guard = Guard(mask=DROPPED)
    for step in range(1, FEWEST_FOR_GROWTH + 1):
        guard.begin(step)
        for value in (1e-3, 0.5):  # of two updates; the first counts
            metrics, _ = guard.foresee({K3: value * math.exp(0.2 * step), DROPPED: value, REWARD: value})
        assert ("guard/growth_rate" in metrics) is (step == FEWEST_FOR_GROWTH) and MIXED not in metrics
        assert metrics["guard/steps_to_boundary"] == HORIZON
    steps = list(range(1, FEWEST_FOR_GROWTH + 1))
    assert guard.state.growth == [(step, 1e-3 * math.exp(0.2 * step)) for step in steps]
    assert guard.state.dropped == guard.state.record[REWARD] == [(step, 1e-3) for step in steps]
    guard.foresee({K3: 1.0})
    assert guard.state.growth[-1][0] == steps[-1], "of the same step"


@pytest.mark.parametrize(
    ("before", "jumps_at", "not_at"),
    [
        ([0.01, 0.01], None, 1.0),  # too few readings
        ([0.01, 0.01, 0.01], 0.051, 0.05),  # five times the median
        ([0.01, 0.02, 0.03, 0.04, 0.05], 0.151, 0.15),  # beyond six deviations, 0.119, too
        ([0.001, 0.05, 0.06, 0.07, 0.2, 0.3], 0.42, 0.41),  # six deviations above it are 0.416, five times 0.325
        ([1.0] * 5 + [0.01] * 8, 0.051, 0.05),  # of the last eight readings
    ],
)
def test_a_jump_is_far_above_the_median_and_beyond_the_scatter(before, jumps_at, not_at):
    def rules(last, suffix=""):
        steps = [{LOG_RATIO: value} | ({LOG_RATIO + suffix: value} if suffix else {}) for value in [*before, last]]
        return [event.rule for _, decision in forecasts(steps)[len(before) :] for event in decision.events]

    for suffix in ("", "/lag/0"):
        assert rules(not_at, suffix) == []
        assert jumps_at is None or rules(jumps_at, suffix) == ["weight_sync"]


def test_older_rollouts_are_no_missed_weight_sync():
    usual = OLD | {LOG_RATIO: 0.01, f"{LOG_RATIO}/lag/0": 0.01}
    *_, (_, older) = forecasts([usual] * 4 + [usual | {LOG_RATIO: 0.2}])
    assert older.events == ()
    *_, (_, missed) = forecasts([usual] * 4 + [usual | {LOG_RATIO: 0.2, f"{LOG_RATIO}/lag/0": 0.2}])
    (event,) = missed.events
    assert event.signal == f"{LOG_RATIO}/lag/0" and "stale rollouts" not in event.reason
    without = {name: value for name, value in usual.items() if name != f"{LOG_RATIO}/lag/0"}
    *_, (_, unknown) = forecasts([without] * 4 + [without | {LOG_RATIO: 0.2}])
    assert unknown.events[0].signal == LOG_RATIO and "stale rollouts" in unknown.events[0].reason


@pytest.mark.parametrize(
    ("signal", "more", "said"),
    [
        (K3, {"vllm_kl/k3/lag/0": 0.012}, " (engines only: vllm_kl/k3/lag/0=0.012)"),
        (K3, {"vllm_kl/engine/k3": 0.02}, " (engines only: vllm_kl/engine/k3=0.02)"),
        (K3, {}, AGE_IN_IT),
        ("vllm_kl/prob_diff_mean", {}, AGE_IN_IT),
        ("vllm_kl/k3/lag/2", {}, ""),
        ("vllm_kl/engine/k3", {}, ""),
        ("guard/steps_to_boundary", {MIXED: 0.0}, " (engines only)"),
        ("guard/growth_rate", {MIXED: 1.0}, AGE_IN_IT),
        ("guard/steps_to_boundary", {}, ""),
        ("critic/score/mean", {}, ""),
    ],
)
def test_whose_gap_a_signal_is(signal, more, said):
    assert owner_clause(signal, OLD | more) == said
    assert owner_clause(K3, FRESH | {"vllm_kl/k3/lag/0": 0.1}) == ""


def walk(guard, signals, first=1):
    """The metrics of each step, and all events; `signals` are lists."""
    metrics, events = [], []
    for index in range(max(map(len, signals.values()))):
        now = {name: values[index] for name, values in signals.items() if index < len(values)}
        late = {GRADIENT: now.pop(GRADIENT, 1.0)}
        seen, decided = guarded_step(guard, first + index, now, late)
        metrics.append(seen)
        events += decided
    return metrics, events


def trend(rate, length, level=1e-3, noise=0.1, seed=0):
    return (level * np.exp(rate * np.arange(length) + noise * np.random.default_rng(seed).normal(size=length))).tolist()


def blind(k3, dropped, mask=DROPPED):
    metrics, _ = walk(Guard(mask=mask), {K3: k3, DROPPED: dropped})
    return [step.get("guard/mask_blind") for step in metrics]


@pytest.mark.parametrize(
    ("k3", "dropped", "is_blind"),
    [
        (trend(0.05, 60), trend(-0.05, 60, seed=1), True),  # what KPop's authors saw
        (trend(0.05, 60), trend(0.05, 60, seed=1), False),  # the mask sees the gap
        (trend(0.05, 60), trend(0.0, 60, seed=1), False),
        (trend(-0.05, 60), trend(-0.05, 60, seed=1), False),  # the engines come together
        (trend(0.0, 60), trend(-0.05, 60, seed=1), False),
        ([1e-3] * 60, trend(-0.05, 60, seed=1), False),  # an interval of exactly 0
        (trend(0.05, 60), [0.0] * 60, False),  # a mask that never dropped anything drops no fewer
        (trend(0.05, 60), [0.001] * 60, False),
        (trend(0.05, 7), trend(-0.05, 7), False),
    ],
)
def test_a_mask_that_drops_fewer_while_the_gap_grows_is_blind(k3, dropped, is_blind):
    found = blind(k3, dropped)
    assert found[-1] == is_blind and set(found[:7]) == {0.0}
    assert is_blind or not any(found)


def test_it_stands_until_one_of_the_two_turns():
    """A run without such a mask has no metric of it."""
    assert set(blind(trend(0.05, 10), trend(-0.05, 10), mask="")) == {None}
    k3 = [*trend(0.05, 40), *trend(0.0, 20, level=1e-3 * math.exp(2.0), seed=2), *trend(-0.05, 60, level=7e-3, seed=3)]
    dropped = [*trend(-0.05, 40, seed=1), *trend(0.0, 80, level=1e-3 * math.exp(-2.0), seed=4)]
    found = blind(k3, dropped)
    changes = [step for step in range(1, len(found)) if found[step] != found[step - 1]]
    assert len(changes) == 2 and changes[0] < 40 < changes[1], "not in and out while the intervals touch 0"
    found = blind([*trend(0.05, 40), *[7e-3] * 40], trend(-0.05, 80, seed=1))
    assert found[39] and not found[-1], "a slope of exactly 0 is no growth"


def test_noise_makes_no_mask_blind():
    raised = 0
    for seed in range(4):
        found = blind(trend(0.0, 60, noise=0.3, seed=seed), trend(0.0, 60, noise=0.3, seed=100 + seed))
        raised += any(found)
    assert raised == 0


def death(calm=40, dead=STAYS + 20):
    return {REWARD: [0.5] * calm + [0.02] * dead, GRADIENT: [0.6] * (calm - 10) + [2.5] * (dead + 10)}


def test_a_dead_run_is_said_once_in_the_reports_words():
    metrics, events = walk(Guard(), death())
    (event,) = events
    assert (event.step, event.rule, event.action, event.signal) == (40 + STAYS, "collapse", "warn", REWARD)
    found = find_collapse(Readings.of_pairs({name: enumerate(values, 1) for name, values in death().items()}))
    assert event.reason == f"{found} {found.remedy}"
    assert "the gradient norm (0.6 to 2.5, from step 31)" in event.reason
    assert [step["guard/collapsed"] for step in metrics] == [0.0] * (39 + STAYS) + [1.0] * 21


def test_it_is_over_when_half_of_what_was_lost_is_back():
    signals = {REWARD: death()[REWARD] + [0.24] * 20 + [0.4] * 20}
    _, events = walk(Guard(), signals)
    assert [event.action for event in events] == ["warn", "recover"]
    assert events[-1].reason == "critic/score/mean is back at 0.28: half of the loss is regained"


def test_long_after_its_best_is_forgotten_the_run_is_still_dead():
    metrics, events = walk(Guard(), {REWARD: [0.5] * 40 + [0.02] * 600})
    assert len(events) == 1 and metrics[-1]["guard/collapsed"] == 1.0


def test_checkpoints_of_the_fall_are_not_good():
    guard = Guard()
    signals = death(calm=40, dead=60)
    for step in range(1, 101):
        walk(guard, {name: values[step - 1 : step] for name, values in signals.items()}, first=step)
        if step % 5 == 0:
            guard.saved(step)
    assert guard.state.good == [5, 10, 15, 20, 25, 30], (
        "the gradients of step 31 were the first that spoke against the weights"
    )


def test_a_rollback_forgets_the_reward_of_what_was_given_up():
    guard = Guard()
    walk(guard, death())
    guard.rolled_back(20)
    assert not guard.state.collapsed and guard.state.record[REWARD][-1][0] == 21
    _, events = walk(guard, {REWARD: [0.5] * 60}, first=100)
    assert events == []


def test_a_resumed_run_says_it_at_the_same_step():
    whole, first = Guard(), Guard()
    signals = death()
    expected = walk(whole, signals)
    early = walk(first, {name: values[:50] for name, values in signals.items()})
    second = Guard()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    late = walk(second, {name: values[50:] for name, values in signals.items()}, first=51)
    assert (early[0] + late[0], early[1] + late[1]) == expected


def test_a_recorded_collapse_is_warned_of_and_noise_is_not():
    for name, rules in (("collapsed_lr_1e-2", ["collapse"]), ("noisy_lr_3e-3", [])):
        assert [event.rule for event in walk(Guard(), recorded(name))[1]] == rules


def test_a_step_without_a_reward_is_no_reading():
    metrics, _ = walk(Guard(), {K3: [1e-4] * 3})
    assert "guard/collapsed" not in metrics[-1]
    guard = Guard()
    walk(guard, {REWARD: [0.5, math.nan, 0.5]})
    assert guard.state.record[REWARD] == [(1, 0.5), (3, 0.5)]


def test_the_engines_value_is_not_that_of_old_rollouts():
    old = {K3: 0.5, "vllm_kl/share/lag/2": 1.0}
    assert engines_value(K3, {K3: 0.5}) == 0.5
    assert engines_value(K3, old) is None and engines_value(K3, {}) is None
    assert engines_value(K3, old | {f"{K3}/lag/0": 0.1}) == 0.1


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ({}, ""),
        ({"router/agreement/layer_00": 1.0, "router/agreement/layer_01": 1.0}, " (routers agree in all layers)"),
        (
            {"router/agreement/layer_09": 0.9, "router/agreement/layer_10": 0.5, "router/agreement/layer_00": 1.0},
            " (routers disagree from layer 9 on)",
        ),
        (
            {f"{K3}/position/0-256": 1e-10, f"{K3}/position/256-1024": 1e-5, f"{K3}/position/16384-": 1e-4},
            " (the gap begins at positions 256-1024)",
        ),
        (
            {"router/agreement/layer_3": 0.0, f"{K3}/position/0-256": 1.0},
            " (routers disagree from layer 3 on; the gap begins at positions 0-256)",
        ),
    ],
)
def test_where_a_gap_begins(signals, said):
    assert place_clause(K3, 1e-10, signals) == said
