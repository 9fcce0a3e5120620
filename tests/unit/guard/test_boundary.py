"""The extrapolation of the mismatch, on synthetic series and on recorded runs."""

import json
import math
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.support.examples import some
from verl_ext.guard.boundary import HORIZON, estimate_growth
from verl_ext.guard.guard import Guard

DATA = ROOT / "tests" / "support" / "data"
WINDOW = 32


def at_each_step(series, boundary=0.1, window=WINDOW):
    """The estimate after every value, None while there are too few."""
    readings = deque(maxlen=window)
    for step, delta in enumerate(series):
        readings.append((step, delta))
        yield estimate_growth(readings, boundary)


def alarms(series, boundary=0.1):
    return [growth is not None and 0 < growth.steps < HORIZON for growth in at_each_step(series, boundary)]


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.25])
def test_exact_geometric_growth_gives_the_rate_and_the_step_of_the_crossing(rate):
    series = [1e-5 * math.exp(rate * step) for step in range(WINDOW)]
    *_, growth = at_each_step(series)
    assert [growth.rate, growth.low, growth.high] == pytest.approx([rate] * 3)
    assert growth.level == pytest.approx(series[-1])
    assert growth.steps == pytest.approx(math.log(0.1 / series[-1]) / rate)


def test_the_crossing_is_foretold_within_a_fifth_under_noise():
    rng = random.Random(3)
    rate, noise, crossing = 0.05, 0.2, math.log(0.1 / 1e-4) / 0.05
    series = [1e-4 * math.exp(rate * step + rng.gauss(0, noise)) for step in range(100)]
    last = list(at_each_step(series))[-1]
    assert last.low < rate < last.high
    assert 99 + last.steps == pytest.approx(crossing, rel=0.2)


NOISE = [(noise, *kind) for noise in (0.1, 0.5, 1.0) for kind in ((0.0, 0.0), (0.0, 0.05), (0.5, 0.05), (0.8, 0.0))]


@pytest.mark.parametrize(("noise", "dependence", "spikes"), some(NOISE))
def test_false_alarms_on_a_stable_series_are_under_one_percent(noise, dependence, spikes):
    """Of the steps, with Gaussian noise in the logarithm that is independent or follows the step before, and spikes."""
    rng = random.Random(7)
    raised = []
    for _ in range(20):
        deviation, series = rng.gauss(0, noise), []
        for _ in range(200):
            deviation = dependence * deviation + math.sqrt(1 - dependence**2) * rng.gauss(0, noise)
            series.append(1e-3 * math.exp(deviation + (2.5 if rng.random() < spikes else 0.0)))
        raised += alarms(series)
    assert sum(raised) / len(raised) < 0.01


@pytest.mark.parametrize(("rate", "within"), [(0.05, 60), (0.1, 35)])
def test_growth_is_found_soon_after_it_begins(rate, within):
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        series = [1e-4 * math.exp(rate * max(0, step - 50) + rng.gauss(0, 0.3)) for step in range(130)]
        raised = alarms(series, boundary=1e9)
        found.append(raised.index(True) - 50 if any(raised) else HORIZON)
    assert all(0 < delay <= within for delay in found)


def test_a_plateau_after_growth_ends_the_alarm():
    rng = random.Random(1)
    series = [1e-4 * math.exp(0.1 * min(step, 40) + rng.gauss(0, 0.1)) for step in range(120)]
    raised = alarms(series)
    assert any(raised[:45]) and not any(raised[-40:])


def test_one_spike_in_the_window_changes_little():
    series = [1e-4 * math.exp(0.05 * step) for step in range(WINDOW)]
    *_, clean = at_each_step(series)
    series[20] *= 1000
    *_, spiked = at_each_step(series)
    assert spiked.rate == pytest.approx(clean.rate, rel=0.05)


def test_past_the_boundary_no_step_is_left():
    *_, growth = at_each_step([0.5] * 10)
    assert growth.steps == 0


def test_a_constant_and_a_falling_series_have_no_boundary_in_sight():
    for series in ([1e-3] * WINDOW, [1e-3 * 0.9**step for step in range(WINDOW)], [0.0] * WINDOW):
        *_, growth = at_each_step(series)
        assert growth.steps == HORIZON and math.isfinite(growth.rate)


@given(st.lists(st.floats(1e-10, 10), min_size=8, max_size=40), st.integers(1, 5))
def test_the_rate_is_the_median_of_all_pairwise_slopes(series, apart):
    growth = estimate_growth([(apart * step, delta) for step, delta in enumerate(series)], 0.1)
    logs, steps = np.log(series), apart * np.arange(len(series))
    later, earlier = np.tril_indices(len(series), -1)
    slope = np.median((logs[later] - logs[earlier]) / (steps[later] - steps[earlier]))
    assert growth.rate == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert growth.low <= growth.rate <= growth.high


def test_fewer_than_eight_readings_give_no_estimate():
    assert list(at_each_step([1e-3] * 7)) == [None] * 7


def recorded(name):
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["stable_lr_1e-3", "stable_lr_1e-2"])
def test_stable_recorded_runs_raise_no_alarm_and_no_suspicion(name):
    """In both, single tokens move k3 by tens of times in one step."""
    run = recorded(name)
    assert len(run["vllm_kl/k3"]) == 80
    assert not any(alarms(run["vllm_kl/k3"]))
    assert suspicions(run) == []


def test_a_recorded_run_whose_rollout_got_no_weights_any_more_is_foretold_and_suspected():
    """From step 9 on, no weight sync reaches the rollout: k3 grows from 8e-5 to 0.03 in 24 steps, then levels off."""
    run = recorded("frozen_rollout")
    k3 = run["vllm_kl/k3"]
    raised = alarms(k3, boundary=0.03)
    crossing = next(step for step, value in enumerate(k3, 1) if value > 0.03)
    assert raised.index(True) + 1 == 16 < crossing == 33
    foretold = 16 + list(at_each_step(k3, boundary=0.03))[15].steps
    assert 18 <= foretold <= crossing, "a line is faster than growth that slows down"
    assert suspicions(run) == [13]


def suspicions(run):
    guard = Guard()
    found = []
    for step in range(1, 1 + len(run["vllm_kl/k3"])):
        guard.begin(step)
        _, decision = guard.foresee({name: values[step - 1] for name, values in run.items() if name != "what"})
        found += [event.step for event in decision.events]
    return found


def test_a_mismatch_that_grows_past_all_numbers_is_past_the_boundary():
    readings = [(step, 10.0 ** min(30 * step, 308)) for step in range(1, 21)]
    growth = estimate_growth(readings, 0.1)
    assert growth is not None and growth.steps == 0 and math.isfinite(growth.level)
