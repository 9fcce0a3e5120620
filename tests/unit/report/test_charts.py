"""Fewer points that draw the same line, against plain Python."""

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import (
    interval_means,
    interval_sums,
    log_grid,
    step_edges,
    stretch_medians,
    thin_readings,
)

VALUES = st.floats(-1e6, 1e6)
READINGS = st.dictionaries(st.integers(0, 3000), VALUES, min_size=1, max_size=300)


def series(readings: dict[int, float]) -> Series:
    steps = sorted(readings)
    return Series(np.array(steps), np.array([readings[step] for step in steps]))


def stretches(readings: dict[int, float], count: int) -> list[list[int]]:
    """Returns the steps of each stretch that has readings."""
    first, last = min(readings), max(readings)
    found: dict[int, list[int]] = {}
    for step in sorted(readings):
        found.setdefault((step - first) * count // (last - first + 1), []).append(step)
    return list(found.values())


@given(READINGS, st.integers(1, 60))
def test_thin_keeps_the_extremes_of_every_stretch_and_nothing_that_was_not_there(readings, half):
    thinned = thin_readings(series(readings), 2 * half)
    kept = dict(zip(thinned.steps.tolist(), thinned.values.tolist(), strict=True))
    assert len(kept) == len(thinned.steps) <= 2 * half
    assert list(kept) == sorted(kept) and kept.items() <= readings.items()
    if len(readings) <= 2 * half:
        assert kept == readings
    for steps in stretches(readings, half):
        values = [kept[step] for step in steps if step in kept]
        assert (min(values), max(values)) == (min(map(readings.get, steps)), max(map(readings.get, steps)))


@given(READINGS, st.integers(1, 60))
def test_medians_are_those_of_the_stretches(readings, most):
    found = stretch_medians(series(readings), most)
    if len(readings) <= most:
        assert found.steps.tolist() == sorted(readings)
        return
    parts = stretches(readings, most)
    assert found.steps.tolist() == [int(statistics.median(steps)) for steps in parts]
    oracle = [statistics.median(map(readings.get, steps)) for steps in parts]
    assert found.values.tolist() == pytest.approx(oracle, rel=1e-9, abs=1e-9)
    assert np.all(np.diff(found.steps) > 0) and len(found.steps) <= most


@given(READINGS, st.lists(st.integers(-10, 3100), min_size=2, max_size=20, unique=True).map(sorted))
def test_intervals_count_and_average_their_readings(readings, edges):
    count, total = interval_sums(series(readings), np.array(edges))
    average = interval_means(series(readings), np.array(edges))
    for i, (start, end) in enumerate(pairwise(edges)):
        inside = [value for step, value in readings.items() if start <= step < end]
        assert count[i] == len(inside) and total[i] == pytest.approx(math.fsum(inside), abs=1e-6)
        if inside:
            assert average[i] == pytest.approx(statistics.fmean(inside), abs=1e-6)
        else:
            assert math.isnan(average[i])


@given(st.sets(st.integers(0, 100_000), min_size=1, max_size=30), st.integers(1, 200))
def test_edges_hold_all_steps_in_few_equal_intervals(steps, most):
    edges = step_edges(np.array(sorted(steps)), most)
    assert edges[0] == min(steps) and edges[-1] == max(steps) + 1
    widths = np.diff(edges)
    assert 1 <= len(widths) <= most and 0 < widths[-1] <= widths[0]
    assert len(set(widths[:-1].tolist())) <= 1


@example([11169874387233.0, 111685270462753.0])
@given(st.lists(st.floats(5e-324, 1.7e308), min_size=1, max_size=20))
def test_grid_lines_of_a_logarithmic_axis(values):
    grid = log_grid(np.array(values))
    assert grid == sorted(set(grid)) and all(0 < line < math.inf for line in grid) and 1 <= len(grid) <= 9
    if min(values) > 1e-300 and max(values) < 1e300:
        step = max(1.0, grid[1] / grid[0]) if len(grid) > 1 else 10.0
        assert grid[0] <= min(values) * 1.000001 and grid[-1] * step >= max(values)


def test_grid_lines_are_powers_of_ten_with_2_and_5_where_there_are_few_and_else_equal_steps():
    assert log_grid(np.array([2e-5, 0.3])) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert log_grid(np.array([0.05, 0.8])) == pytest.approx(
        [factor * 10**power for power in (-2, -1, 0) for factor in (1, 2, 5)]
    )
    assert log_grid(np.array([0.231, 0.711])) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert log_grid(np.array([0.501, 0.509])) == pytest.approx([0.501, 0.503, 0.505, 0.507, 0.509])
