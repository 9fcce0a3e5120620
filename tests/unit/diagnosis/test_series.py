"""Readings of a run: levels of its beginning and its end, steps that metrics share, and what is not a number."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.diagnosis.names import Alias
from verl_ext.diagnosis.series import Readings, Series, beginning_of, cached_per_run, holds_from, now_label, now_of

VALUES = st.floats(allow_nan=True, allow_infinity=True, min_value=None, max_value=None, width=32)
PAIRS = st.dictionaries(st.integers(0, 60), VALUES, max_size=40).map(lambda found: sorted(found.items()))
NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def series(values) -> Series:
    return Series(np.arange(1, len(values) + 1), np.array(values, dtype=np.float64))


def finite(pairs) -> list[tuple[int, float]]:
    return [(step, value) for step, value in pairs if math.isfinite(value)]


@given(PAIRS)
def test_a_metric_is_its_finite_readings_and_none_without_one(pairs):
    run = Readings.of_pairs({"a": pairs})
    found, logged = run.get("a"), run.logged("a")
    assert (found.pairs() if found else []) == finite(pairs)
    assert run.has("a") == bool(finite(pairs)) == (found is not None)
    assert (logged.steps.tolist() if logged else []) == [step for step, _ in pairs]
    assert run.last_step == max((step for step, _ in pairs), default=0)


@given(NUMBERS)
def test_levels_of_the_beginning_and_the_end(values):
    n, near = len(values), {"rel": 1e-12, "abs": 1e-12 * max(map(abs, values))}
    count = min(5, max(n // 2, 1))
    assert now_of(series(values)) == pytest.approx(median(values[-count:]), **near)
    assert beginning_of(series(values)) == pytest.approx(median(values[:count]), **near)
    run = Readings.of_pairs({"a": list(enumerate(values))})
    first, last = values[: min(20, max(n // 2, 1))], values[-20:]
    assert run.late("a") == pytest.approx(math.fsum(last) / len(last), **near)
    assert run.early("a") == pytest.approx(math.fsum(first) / len(first), **near)


def test_the_first_of_several_metrics_that_was_logged_counts():
    run = Readings.of_pairs({"never": [(1, math.nan)], "b": [(1, 2.0)], "c": [(1, 3.0)]})
    assert run.values("never", "b", "c").tolist() == [2.0]
    assert run.late("c", "b") == 3.0
    assert run.late("never") is None and run.early("missing") is None and run.values("missing").size == 0
    assert list(run.names()) == ["b", "c"] and not run.has("nev")


@given(st.tuples(PAIRS, PAIRS, PAIRS))
def test_joined_metrics_have_the_steps_at_which_all_are_finite(pairs):
    run = Readings.of_pairs(dict(zip("abc", pairs, strict=True)))
    tables = [dict(finite(each)) for each in pairs]
    common = sorted(set.intersection(*map(set, tables)))
    joined = run.joined("a", "b", "c")
    assert joined.shape == (len(common), 4)
    assert joined.tolist() == [[step, *(table[step] for table in tables)] for step in common]


def test_an_alias_is_converted_to_its_quantity():
    found = series([1.0, math.nan, 3.0]).converted(Alias("x", ("verl",), scale=-2.0, offset=1.0))
    assert found.steps.tolist() == [1, 2, 3]
    assert found.finite().pairs() == [(1, -1.0), (3, -5.0)]


@given(st.lists(st.booleans(), max_size=40), st.sampled_from([0.5, 0.8, 1.0]))
def test_what_holds_but_for_a_few_steps_starts_at_a_step_at_which_it_holds(holds, share):
    starts = (i for i in range(len(holds)) if holds[i] and sum(holds[i:]) / (len(holds) - i) >= share)
    assert holds_from(np.array(holds, dtype=bool), share) == next(starts, len(holds))


@pytest.mark.parametrize(("count", "named"), [(1, None), (3, None), (5, 2), (40, 5)])
def test_the_label_of_the_value_now_has_the_number_of_its_readings(count, named):
    digits = [word for word in now_label(series([1.0] * count)).split() if word.isdigit()]
    assert digits == ([] if named is None else [str(named)])


def test_an_answer_is_computed_once_for_each_run():
    asked = []

    @cached_per_run
    def answer(run):
        asked.append(run)
        return run.last_step or None

    first, second = Readings.of_pairs({}), Readings.of_pairs({"a": [(7, 1.0)]})
    assert [answer(run) for run in (first, second, first, second)] == [None, 7, None, 7]
    assert asked == [first, second]
