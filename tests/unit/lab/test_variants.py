"""Intervals over seeds, against Python's statistics and a printed table of Student's t."""

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lab.made_variants import summary, variant
from verl_ext.lab.summary import MEASURES, Variant, interval, ranked_variants

# Upper 2.5 % points, by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
REWARDS = st.floats(0, 1).map(lambda value: round(value, 6))


@given(st.lists(REWARDS, min_size=2, max_size=10))
def test_the_interval_of_a_mean(values):
    found = interval(values)
    half = T[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    assert found.mean == pytest.approx(fmean(values)) and found.seeds == len(values)
    assert found.half == pytest.approx(half, rel=2e-4, abs=1e-9)


def test_one_seed_has_no_interval_and_none_no_mean():
    assert interval([0.4]).half is None and not interval([0.4]).sure and interval([]) is None


@given(st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=10))
def test_differences_are_paired_by_seed(pairs):
    ours, theirs = (variant(name, [pair[at] for pair in pairs]) for at, name in enumerate(("tis", "none")))
    found = ours.difference_to(theirs)
    changes = [a - b for a, b in pairs]
    assert found.mean == pytest.approx(fmean(changes), abs=1e-12)
    assert found.half == pytest.approx(T[len(pairs) - 1] * stdev(changes) / math.sqrt(len(pairs)), rel=2e-4, abs=1e-9)
    assert theirs.difference_to(ours).mean == pytest.approx(-found.mean, abs=1e-12)


def test_only_seeds_that_both_have_count():
    ours = Variant("tis", (), {0: summary(0.9), 3: summary(0.8), 4: summary(None)})
    theirs = Variant("none", (), {3: summary(0.5), 4: summary(0.1), 7: summary(0.2)})
    found = ours.difference_to(theirs)
    assert found.seeds == 1 and found.mean == pytest.approx(0.3)
    assert ours.difference_to(Variant("none", (), {9: summary()})) is None


def test_a_shift_shared_by_all_seeds_is_sure_however_the_seeds_scatter():
    base = [0.1, 0.5, 0.9, 0.3]
    better = [value + shift for value, shift in zip(base, (0.09, 0.1, 0.11, 0.1), strict=True)]
    found = variant("tis", better).difference_to(variant("none", base))
    assert found.sure and found.mean == pytest.approx(0.1)


def test_collapses_and_false_alarms_by_seed():
    runs = {0: summary(0.1, collapsed=90, warned=20), 2: summary(0.8, warned=30), 5: summary(0.8)}
    found = Variant("none", (), runs)
    assert found.collapsed == {0: 90} and found.false_alarms == [2]
    assert set(MEASURES) >= {"final", "k3_before", "warning"} and found.mean("warning") is None


def test_exact_is_first_and_the_best_final_reward_next():
    order = [variant("none", [0.2]), variant("late", []), variant("tis", [0.7]), variant("exact", [0.1])]
    assert [each.name for each in ranked_variants(order)] == ["exact", "tis", "none", "late"]


def test_where_the_guard_ended_runs_nothing_is_compared_and_there_is_no_final_reward():
    runs = {0: summary(0.9), 1: summary(None, last=0.3, stopped=40), 2: summary(None, stopped=9)}
    ours, other = Variant("guard", (), runs), variant("none", [0.2, 0.3, 0.2])
    assert ours.mean("final") is None and ours.difference_to(other) is None and other.difference_to(ours) is None
    assert ours.stopped == {1: 40, 2: 9} and ours.known == 1 and other.known == 3
    assert ours.reward_then.mean == pytest.approx(0.3) and ours.reward_then.seeds == 1 and other.reward_then is None
    assert ours.mean("peak") is not None
    assert [each.name for each in ranked_variants([ours, other])] == ["none", "guard"]
