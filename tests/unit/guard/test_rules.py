import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from verl_ext.diagnosis.findings.registry import find_all
from verl_ext.diagnosis.series import Act, Readings, Series
from verl_ext.features.guard import AFTER_RULE
from verl_ext.guard.rules import ACTIONS, Rule, RuleState, apply_rule, describe, next_bound
from verl_ext.report.figures.kl import SHAPES

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)


def rule(**settings):
    return Rule("r", "s", **({"bound": 1.0, "setting": "stability.guard.rules.r.above"} | settings))


def fires(rule, values):
    state = RuleState()
    return [apply_rule(rule, state, value).fires for value in values]


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        pytest.param({}, [0.9, 1.0, 1.1], [0, 0, 1], id="a value at the bound is not past it"),
        pytest.param({"side": "below"}, [1.1, 1.0, 0.9], [0, 0, 1], id="nor at one below which the rule fires"),
        pytest.param({"patience": 3}, [2, 2, 0, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1], id="patience counts in a row"),
        pytest.param({"patience": 2}, [2, 2, 0, 2, 2], [0, 1, 0, 0, 1], id="patience anew after a recovery"),
        pytest.param({"recover": 0.5}, [2, 0.8, 0.6, 0.5, 0.8, 2], [1, 1, 1, 0, 0, 1], id="fires until it is back"),
        pytest.param(
            {"side": "below", "recover": 1.5}, [0, 1.2, 1.4, 1.5, 1.2], [1, 1, 1, 0, 0], id="back above the bound"
        ),
        pytest.param(
            {"bound": 0.5, "side": "below", "baseline": 2}, [1, 3, 1, 0.9], [0, 0, 0, 1], id="baseline, below"
        ),
        pytest.param(
            {"bound": 2.0, "baseline": 2, "least": 9.0}, [1, 1, 8, 10], [0, 0, 0, 1], id="least over baseline"
        ),
        pytest.param(
            {"bound": 0.0, "recover": 0.0, "baseline": 1, "least": 2.0},
            [5, 1.9, 2.1, 2.0],
            [0, 0, 1, 0],
            id="least alone where the bound is 0",
        ),
    ],
)
def test_when_a_rule_fires(settings, values, expected):
    assert fires(rule(**settings), values) == expected


def test_a_baseline_is_the_mean_of_the_first_readings_and_stays():
    one = rule(bound=2.0, baseline=3)
    assert fires(one, [1, 2, 3, 4, 4.1, 100, 3]) == [False, False, False, False, True, True, False]
    assert describe(one, 4.1, 4.0) == (
        "s=4.1 passes 4, 2 times the mean of its first 3 readings (stability.guard.rules.r.above)"
    )


@pytest.mark.parametrize(("side", "bound", "recover"), [("above", 2.0, 1.5), ("below", 0.5, 0.75)])
@pytest.mark.parametrize("mean", [0.0, 1.0, 2.5, 4.0, 5.0, 100.0])
def test_a_baseline_recovers_at_the_same_share_of_its_threshold(side, bound, recover, mean):
    one = rule(side=side, bound=bound, recover=recover, baseline=2, least=6.0)
    threshold = max(bound * mean, 6.0)
    back, outward = threshold * recover / bound, 1.001 if side == "above" else 0.999
    values = [threshold * outward, back * outward, back / outward, threshold / outward]
    assert fires(one, [mean, mean, *values]) == [False, False, True, True, False, False]
    reason = describe(one, threshold * outward, threshold)
    assert f"{threshold:g}" in reason and ("the least" in reason) == (bound * mean <= 6.0)


@given(
    values=st.lists(st.integers(-3, 3).map(float), max_size=30),
    side=st.sampled_from(["above", "below"]),
    patience=st.integers(1, 3),
    hysteresis=st.booleans(),
    adaptive=st.sampled_from([{}, {"zscore_window": 8}, {"zscore_window": 12}, {"baseline": 2, "least": 1.0}]),
)
def test_the_next_bound_is_what_the_next_reading_is_judged_by(values, side, patience, hysteresis, adaptive):
    recover = {True: 0.5 if side == "above" or "zscore_window" in adaptive else 1.5, False: None}[hysteresis]
    one = rule(side=side, patience=patience, recover=recover, **adaptive)
    state = RuleState()
    for value in values:
        bound = next_bound(one, state)
        expected = bound is not None and one.is_past(value, bound)
        reading = apply_rule(one, state, value)
        assert (reading.fires and reading.threshold is not None) is expected


def oracle(values, window, bound, side):
    """Robust z-scores from the definition: median and median absolute deviation of the readings before."""
    result = []
    for index, value in enumerate(values):
        before = values[max(0, index - window) : index]
        if len(before) < 8:
            result.append(False)
            continue
        middle = statistics.median(before)
        mad = statistics.median([abs(other - middle) for other in before])
        distance = (value - middle) if side == "above" else (middle - value)
        result.append(mad > 0 and distance > bound * 1.4826 * mad)
    return result


@given(st.lists(st.integers(-50, 50), max_size=40), st.integers(8, 20), st.sampled_from(["above", "below"]))
def test_an_adaptive_rule_fires_as_the_robust_z_score_says(values, window, side):
    adaptive = rule(side=side, zscore_window=window, bound=3.0)
    state = RuleState()
    found = []
    for value in values:
        state.firing, state.streak = False, 0  # the bound alone, without hysteresis
        found.append(apply_rule(adaptive, state, float(value)).fires)
    assert found == oracle(values, window, 3.0, side)
    assert len(state.history) <= window


@given(st.lists(FLOATS, max_size=30), st.integers(1, 4), FLOATS)
def test_it_never_fires_sooner_than_its_patience(values, patience, bound):
    patient = rule(patience=patience, bound=bound)
    for index, firing in enumerate(fires(patient, values)):
        if firing and not any(fires(patient, values[:index])):
            assert all(value > bound for value in values[index + 1 - patience : index + 1])


def test_the_reason_names_value_bound_and_setting():
    assert describe(rule(bound=0.1), 0.132, 0.1) == "s=0.132 passes stability.guard.rules.r.above=0.1"
    below = rule(bound=0.5, side="below", patience=2, setting="stability.guard.rules.r.below")
    assert describe(below, 0.4, 0.5) == "s=0.4 is below stability.guard.rules.r.below=0.5 for 2 readings"
    assert "passes 7.5" in describe(rule(zscore_window=8, bound=6.0), 9.0, 7.5)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_is_known_wherever_actions_are_named(action):
    assert action in AFTER_RULE, "the start-up table"
    assert action in SHAPES, "a mark in the report's figure"
    seen = find_all(Readings({"x": Series(np.array([1]), np.array([0.0]))}, acts=[Act(1, "gap", action, "made up.")]))
    assert [name for name in seen if name.startswith("guard_")], "a finding"
    assert f"`{action}`" in (Rule.__doc__ or ""), "docs/settings.md"
    assert f"\n| `{action}` |" in (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")
