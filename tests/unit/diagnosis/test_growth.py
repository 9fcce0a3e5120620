"""Growth that is more than noise, against textbook formulas and counted false alarms."""

import json
import math
import random
from collections import deque
from itertools import combinations
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.support.examples import slow_cases
from verl_ext.diagnosis.growth import HORIZON, estimate_growth, is_seen_enough, scatter, spread

DATA = ROOT / "tests" / "support" / "data"
WINDOW = 32
FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_spread_and_scatter(values):
    ordered, n = sorted(values), len(values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    off = sorted(abs(value - middle) for value in values)
    robust = 1.4826 * (off[(n - 1) // 2] + off[n // 2]) / 2
    assert spread(values) == pytest.approx((middle, robust), rel=1e-12, abs=1e-12)
    assert scatter(values) == pytest.approx(max(float(np.std(values)), robust), rel=1e-9, abs=1e-9)


def growths(values, boundary=0.1, window=WINDOW):
    """The estimate after every value, None while there are too few."""
    readings = deque(maxlen=window)
    for step, delta in enumerate(values):
        readings.append((step, delta))
        yield estimate_growth(readings, boundary)


def alarms(values, boundary=0.1):
    return [growth is not None and 0 < growth.steps < HORIZON for growth in growths(values, boundary)]


def growth_oracle(readings, boundary):
    """Theil-Sen's slope, and the narrower of Sen's interval and six scatters over the window, in (rate, low, high,
    level, steps)."""
    steps, logs = [s for s, _ in readings], [math.log(max(delta, 1e-12)) for _, delta in readings]
    n = len(logs)
    slopes = sorted((logs[j] - logs[i]) / (steps[j] - steps[i]) for i, j in combinations(range(n), 2))
    rate = median(slopes)
    heights = [y - rate * (s - steps[-1]) for s, y in zip(steps, logs, strict=True)]
    level = median(heights)
    off = np.array([height - level for height in heights])
    ranks = np.searchsorted(np.sort(off), off) - (n - 1) / 2
    widened = 1.0
    if np.abs(off).max() >= 1e-9 and (ranks**2).sum() > 0:
        seen = (ranks[:-1] * ranks[1:]).sum() / (ranks**2).sum()
        rho = min(max(seen + (2 + 4 * max(seen, 0)) / n, 0), 0.9)
        widened = (1 + rho) / (1 - rho)
    half = 4 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18 * widened)
    outside = math.floor((len(slopes) - half) / 2)
    low, high = (slopes[outside], slopes[-1 - outside]) if outside >= 0 else (-math.inf, math.inf)
    if n >= 16:
        robust = 1.4826 * float(np.median(np.abs(off - np.median(off))))
        wide = 6 * max(float(off.std()), robust) / (steps[-1] - steps[0])
        low, high = max(low, rate - wide), min(high, rate + wide)
    to_go = math.log(boundary) - level
    left = 0.0 if to_go <= 0 else HORIZON if low <= 0 else min(to_go / rate, HORIZON)
    return rate, low, high, math.exp(level), left


@given(
    st.lists(st.floats(1e-15, 10), min_size=8, max_size=40),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.floats(-0.5, 0.5),
)
def test_growth_is_its_formula(values, gaps, rate):
    steps = np.cumsum(gaps)[: len(values)].tolist()
    readings = [(step, delta * math.exp(rate * step)) for step, delta in zip(steps, values, strict=True)]
    growth = estimate_growth(readings, 0.1)
    found = (growth.rate, growth.low, growth.high, growth.level, growth.steps)
    assert found == pytest.approx(growth_oracle(readings, 0.1), rel=1e-8, abs=1e-11)
    assert growth.low <= growth.rate <= growth.high


NOISE = [(noise, *kind) for noise in (0.1, 0.5, 1.0) for kind in ((0.0, 0.0), (0.0, 0.05), (0.5, 0.05), (0.8, 0.0))]


@pytest.mark.parametrize(("noise", "dependence", "spikes"), slow_cases(NOISE))
def test_false_alarms_on_a_stable_series_are_under_one_percent(noise, dependence, spikes):
    """Counts alarms per step. The logarithm has Gaussian noise, independent or following the step before, and
    spikes."""
    rng = random.Random(7)
    raised = []
    for _ in range(20):
        deviation, values = rng.gauss(0, noise), []
        for _ in range(200):
            deviation = dependence * deviation + math.sqrt(1 - dependence**2) * rng.gauss(0, noise)
            values.append(1e-3 * math.exp(deviation + (2.5 if rng.random() < spikes else 0.0)))
        raised += alarms(values)
    assert sum(raised) / len(raised) < 0.01


@pytest.mark.parametrize(("rate", "within"), [(0.05, 60), (0.1, 35)])
def test_growth_is_found_soon_after_it_begins(rate, within):
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        values = [1e-4 * math.exp(rate * max(0, step - 50) + rng.gauss(0, 0.3)) for step in range(130)]
        raised = alarms(values, boundary=1e9)
        found.append(raised.index(True) - 50 if any(raised) else HORIZON)
    assert all(0 < delay <= within for delay in found)


def test_a_plateau_after_growth_ends_the_alarm():
    rng = random.Random(1)
    raised = alarms([1e-4 * math.exp(0.1 * min(step, 40) + rng.gauss(0, 0.1)) for step in range(120)])
    assert any(raised[:45]) and not any(raised[-40:])


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ([0.5] * 10, 0.0),  # past the boundary
        ([10.0 ** min(30 * step, 308) for step in range(1, 21)], 0.0),
        ([1e-3] * WINDOW, HORIZON),
        ([1e-3 * 0.9**step for step in range(WINDOW)], HORIZON),
        ([0.0] * WINDOW, HORIZON),
    ],
)
def test_no_growth_has_no_boundary_in_sight_and_past_it_no_step_is_left(values, left):
    *_, growth = growths(values)
    assert growth.steps == left and math.isfinite(growth.rate) and math.isfinite(growth.level)


def test_fewer_than_eight_readings_give_no_estimate():
    assert list(growths([1e-3] * 7)) == [None] * 7


@pytest.mark.parametrize(
    ("name", "boundary", "first"),
    [("stable_lr_1e-3", 0.1, None), ("stable_lr_1e-2", 0.1, None), ("frozen_rollout", 0.03, 16)],
)
def test_growth_of_recorded_runs(name, boundary, first):
    """Single tokens move k3 tenfold in one step in the first two. In the third, no weight sync reaches the rollout from
    step 9 on: k3 grows from 8e-5 to 0.03 in 24 steps."""
    k3 = json.loads((DATA / f"{name}.json").read_text())["vllm_kl/k3"]
    raised = alarms(k3, boundary)
    assert (raised.index(True) + 1 if any(raised) else None) == first
    if first:
        crossing = next(step for step, value in enumerate(k3, 1) if value > boundary)
        foretold = first + list(growths(k3, boundary))[first - 1].steps
        assert first + 2 <= foretold <= crossing == 33, "a line is faster than growth that slows down"


@pytest.mark.parametrize(
    ("steps", "now", "enough"),
    [
        (range(1, 9), 8, True),
        (range(1, 8), 7, False),
        (range(1, 9), 40, True),  # a window ago
        (range(1, 9), 41, False),
        (range(50, 450, 50), 449, True),  # rescored every 50 steps
        (range(50, 450, 50), 750, True),
        (range(50, 450, 50), 751, False),
    ],
)
def test_readings_count_until_they_have_been_missing_for_as_long_as_they_took(steps, now, enough):
    assert is_seen_enough(list(steps), now, window=32) is enough
