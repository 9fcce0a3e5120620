"""Runs in numbers, against the rule written out step by step."""

import math
from dataclasses import replace
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.report.made_runs import NAN, make
from verl_ext.diagnosis.series import Series
from verl_ext.guard.state import Event
from verl_ext.lab.summary import DROPPED, FORECAST, K3, NORM, REWARD, ROLLBACKS, SKIPPED, fall, levels, summarise
from verl_ext.report.run import Run

RISE_AND_FALL = [*np.linspace(0.4, 0.8, 60), *np.linspace(0.8, 0.1, 40), *[0.1] * 30]


def oracle(rewards: list[float]) -> dict:
    """Applies the rule of the module step by step, keeping all readings. Steps count from 1."""
    peak, below, died, found = -math.inf, None, None, []
    for step in range(20, len(rewards) + 1):
        level = math.fsum(rewards[step - 20 : step]) / 20
        peak = max(peak, level)
        found.append(level)
        if died is None:
            if level >= 0.8 * peak:
                below = None
            elif below is None:
                below = step
            if level < 0.5 * peak:
                died = step
    return {"peak": peak, "final": found[-1], "collapsed": died, "fell": below if died else None}


@given(st.lists(st.floats(0, 1), min_size=20, max_size=120), st.integers(0, 3))
@example(RISE_AND_FALL, 1)
@example(RISE_AND_FALL[:80], 1)
def test_peak_final_and_collapse_are_those_of_the_rule(rewards, power):
    rewards = [round(reward**power, 3) for reward in rewards]
    found, wanted = summarise(make({REWARD: rewards})), oracle(rewards)
    assert found.peak == pytest.approx(wanted["peak"]) and found.final == pytest.approx(wanted["final"])
    level = levels(make({REWARD: rewards}).metrics[REWARD])
    # Where a level is on a bound to the last digit, sums in another order may differ.
    peaks = np.maximum.accumulate(level.values)
    if not any(np.isclose(level.values, part * peaks, rtol=1e-9, atol=1e-12).any() for part in (0.5, 0.8)):
        assert found.collapsed == wanted["collapsed"]
        assert fall(level)[0] == wanted["fell"]


def test_a_reward_of_zero_throughout_has_no_peak_to_fall_from():
    found = summarise(make({REWARD: [0.0] * 50}))
    assert found.peak == 0 and found.collapsed is None


@pytest.mark.parametrize("length", [1, 5, 19])
def test_a_run_that_stops_early_has_no_level(length):
    found = summarise(make({REWARD: [0.5] * length, K3: [0.2] * length}))
    assert (found.steps, found.peak, found.final, found.collapsed) == (length, None, None, None)
    assert found.k3_start == found.k3_before == pytest.approx(0.2) and found.warned == 1


def test_what_is_not_a_number_is_left_out():
    rewards = [0.5] * 30 + [NAN] * 5 + [0.7] * 20
    found = summarise(make({REWARD: rewards, K3: [NAN, 1e-3] * 28, NORM: [1.0, NAN, 3.0, math.inf]}))
    assert found.final == pytest.approx(0.7) and found.peak == pytest.approx(0.7)
    assert found.k3_start == found.k3_before == pytest.approx(1e-3)
    assert (found.grad_norm_median, found.grad_norm_max) == (2.0, 3.0)
    only = summarise(make({REWARD: [NAN] * 40}))
    assert only.peak is None and only.k3_start is None and only.skipped is None


def test_k3_at_the_start_and_before_the_collapse():
    k3 = [0.001 * step for step in range(1, len(RISE_AND_FALL) + 1)]
    found = summarise(make({REWARD: RISE_AND_FALL, K3: k3}))
    assert found.k3_start == pytest.approx(fmean(k3[:5]))
    ends = found.collapsed - 10  # steps count from 1: k3[ends - 1] is that of step `ends`
    assert found.k3_before == pytest.approx(fmean(k3[ends - 10 : ends]))
    lives = summarise(make({REWARD: [0.5] * 100, K3: k3[:100]}))
    assert lives.k3_before == pytest.approx(fmean(k3[90:100]))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50))
def test_shares_and_norms(values):
    found = summarise(make({DROPPED: values, NORM: values}))
    assert found.dropped == pytest.approx(fmean(values))
    assert (found.grad_norm_median, found.grad_norm_max) == (pytest.approx(median(values)), max(values))


def test_the_warning_counts_to_the_last_fall_below_four_fifths():
    dip = [0.8] * 40 + [0.3] * 10 + [0.8] * 60  # below 0.8 of the peak for a while, and back
    rewards = [*dip, *np.linspace(0.8, 0.1, 40), *[0.1] * 20]
    steps = len(rewards)
    fell, collapsed = fall(levels(make({REWARD: rewards}).metrics[REWARD]))
    assert len(dip) < fell < collapsed == oracle(rewards)["collapsed"] and fell == oracle(rewards)["fell"]
    forecast = [1000.0] * 100 + [10.0] * (steps - 100)
    k3 = [0.01] * 90 + [0.2] * (steps - 90)
    assert summarise(make({REWARD: rewards, FORECAST: forecast})).warning == fell - 101
    assert summarise(make({REWARD: rewards, FORECAST: forecast, K3: k3})).warning == fell - 91
    assert summarise(make({REWARD: rewards})).warning is None


def test_a_warning_behind_the_fall_is_late_and_one_without_a_fall_false():
    k3 = [0.01] * 115 + [0.2] * 15
    late = summarise(make({REWARD: RISE_AND_FALL, K3: k3}))
    assert late.warning < 0 and not late.false_alarm
    false = summarise(make({REWARD: [0.5] * 130, K3: k3}))
    assert false.warning is None and false.warned == 116 and false.false_alarm


def test_skipped_updates_are_counted_and_rollbacks_are_a_count_already():
    found = summarise(make({SKIPPED: [0.0, 1.0, 0.0, 1.0], ROLLBACKS: [0.0, 0.0, 1.0, 2.0]}))
    assert (found.skipped, found.rollbacks) == (2, 2)


def test_levels_of_steps_that_are_missing():
    steps = np.arange(1, 81, 2)
    level = levels(Series(steps, np.ones(40)))
    assert level.steps[0] == 39 and level.steps[-1] == 79 and len(level.steps) == 21


@pytest.mark.parametrize(
    ("dropped", "wanted"), [(lambda k3: 2 * k3, 1), (lambda k3: 1 - k3, -1), (lambda k3: 0.1, None)]
)
def test_whether_a_mask_sees_more_where_the_gap_is_larger(dropped, wanted):
    k3 = list(np.linspace(0.001, 0.3, 107))
    found = summarise(make({REWARD: [0.5] * 107, K3: k3, DROPPED: [dropped(value) for value in k3]}))
    assert found.dropped_with_k3 == (wanted if wanted is None else pytest.approx(wanted))


def test_masking_is_compared_in_ranks_of_stretches():
    dice = np.random.default_rng(0)
    k3, dropped = dice.random(200), dice.random(200)
    ranks = [np.argsort(np.argsort(each.reshape(20, 10).mean(axis=1))) for each in (k3, dropped)]
    found = summarise(make({REWARD: [0.5] * 200, K3: list(k3), DROPPED: list(dropped)}))
    differences = ranks[0] - ranks[1]
    assert found.dropped_with_k3 == pytest.approx(1 - 6 * float(differences @ differences) / (20 * (400 - 1)))
    assert summarise(make({REWARD: [0.5] * 40, K3: list(k3[:40]), DROPPED: list(dropped[:40])})).dropped_with_k3 is None


def ended(steps: int, at: int, action: str = "stop") -> Run:
    run = make({REWARD: [0.5] * (steps - 30) + [0.7] * 30, K3: [0.2] * steps})
    return replace(run, events=(Event(at, "batch_skip", K3, 0.2, 0.1, action, "past it"),))


def test_a_run_that_the_guard_ended_has_a_last_level_and_no_final_reward():
    found = summarise(ended(65, at=65), steps=300)
    assert (found.stopped, found.final, found.collapsed) == (65, None, None)
    assert found.last == pytest.approx(0.7) and found.warned == 1
    assert not found.known and not found.false_alarm


@pytest.mark.parametrize(
    ("run", "steps"),
    [(ended(65, at=65), 65), (ended(65, at=40), 300), (ended(65, at=65, action="skip"), 65)],
    ids=["behind the last step", "and went on after a resume", "no end"],
)
def test_a_run_that_trained_to_its_end_is_none_that_the_guard_ended(run, steps):
    found = summarise(run, steps)
    assert found.stopped is None and found.final == found.last == pytest.approx(0.7)
    assert found.known and found.false_alarm


def test_a_collapse_before_the_guard_ended_the_run_is_known():
    run = make({REWARD: RISE_AND_FALL})
    run = replace(run, events=(Event(len(RISE_AND_FALL), "r", REWARD, 0.1, 0.2, "stop", "below"),))
    found = summarise(run, steps=300)
    assert found.known and found.collapsed is not None and found.stopped == len(RISE_AND_FALL) and found.final is None
