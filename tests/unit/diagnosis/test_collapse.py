"""The rule for dead runs: verdict, first step and what moved first, on made-up runs, recorded ones and noise."""

import json

import numpy as np
import pytest

from tests import ROOT
from verl_ext.diagnosis.collapse import STAYS, STRETCH, find_collapse, moves_before
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, REWARD
from verl_ext.diagnosis.series import Readings

DATA = ROOT / "tests" / "support" / "data"
CALM, FALLEN = 60, 70  # readings before the fall of `FALL`, and before its end


def series(**values):
    """Turns lists of values into readings that start at step 1."""
    names = {"reward": REWARD, "k3": K3, "gradient": GRADIENT, "entropy": ENTROPY, "length": LENGTH}
    return Readings.of_pairs({names[key]: enumerate(each, 1) for key, each in values.items()})


def until(run, last):
    return Readings.of_pairs(
        {name: [each for each in run.get(name).pairs() if each[0] <= last] for name in run.names()}
    )


def noise(size, seed=0):
    return size * np.random.default_rng(seed).normal(size=104)


FALL = np.concatenate([np.full(CALM, 0.55), np.linspace(0.55, 0.03, 12)[1:-1], np.full(STAYS + 10, 0.03)])


def test_a_reward_that_fell_to_a_tenth_and_stays_there_has_collapsed():
    found = find_collapse(series(reward=np.abs(FALL + noise(0.02))))
    assert found.best == pytest.approx(0.55, abs=0.03) and found.now == pytest.approx(0.03, abs=0.02)
    assert abs(found.step - CALM - 1) <= 2, "the first reading of the line that leaves the noise"
    assert found.since == found.step and found.moves == () and not found.gap_first


@pytest.mark.parametrize(
    ("reward", "collapsed"),
    [
        ([0.0] * 100, False),  # nothing was ever won
        ([0.02] * 100, False),  # a warm start that is low
        ([0.0] * 40 + [0.5] * 40, False),
        ([0.5] * (STRETCH - 1) + [0.0] * STAYS, False),  # too short
        ([0.5] * STRETCH + [0.0] * STAYS, True),
        ([0.0] * 40 + [0.5] * 40 + [0.0] * 40, True),  # from 0 and back
        ([0.2] * 40 + [0.9] * 40 + [0.2] * 40, False),  # what was won is lost, a fifth of the best is not
        ([0.5] * 40 + [0.06] * 40, False),
        ([0.5] * 40 + [0.04] * 40, True),
        ([0.5] * 40 + [0.01] * 40 + [0.4] * 8, False),  # it came back
        ([0.5] * 40 + [0.01] * 40 + [0.09] * 40, True),  # and here it did not: below a fifth
        ([0.5] * 40 + [0.01] * 20 + [0.3] + [0.01] * 20, True),  # one good batch
        ([0.0] * 10 + [0.125] + [0.0] * 69, False),  # a lucky one
        ([0.1] * 40 + [-0.94] * 40, True),  # rewards of 1 and -1
        ([-0.8] * 40 + [0.6] * 40 + [-0.9] * 40, True),
        ([-0.8] * 40 + [0.6] * 40 + [-0.1] * 40, False),
        ([-0.2] * 40 + [-1.7] * 40, True),  # of 1 and -1, less up to 1 for overlong responses (DAPO)
        ([-0.1] * 20 + [0.1] * 20 + [-0.3] * 40, False),
        ([-2.0] * 40 + [-9.0] * 40, False),  # who knows how far down it goes
        ([0.5] * 40 + [-9.0] * 40, False),
        ([-2.0] * 40 + [3.0] * 40 + [-2.0] * 40, False),
        ([6.0] * 40 + [5.0] * 40, False),
        ([6.0] * 40 + [0.5] * 40, True),
    ],
)
def test_nine_tenths_of_the_scale(reward, collapsed):
    assert (find_collapse(series(reward=reward)) is not None) == collapsed


def test_what_moved_first():
    """In the three runs for which the rule was written, gradient norms rose from 0.6 to 2.5 before the reward fell."""
    gradient = np.where(np.arange(104) < 50, 0.6, 2.5) * np.exp(noise(0.1, 1))
    length = np.where(np.arange(104) < 64, 200, 400) + noise(5, 2)
    found = find_collapse(series(reward=np.abs(FALL + noise(0.02)), gradient=gradient, length=length, k3=[1e-12] * 104))
    assert [(move.signal, move.step) for move in found.moves] == [(GRADIENT, 51), (LENGTH, 65)]
    assert found.moves[0].before == pytest.approx(0.6, rel=0.1)
    assert found.moves[0].after == pytest.approx(2.5, rel=0.2)
    assert found.step == pytest.approx(61, abs=2) and found.since == 51 and not found.gap_first


def test_engines_that_come_apart_first_are_to_blame():
    k3 = 1e-4 * np.exp(np.clip(np.arange(104) - 30, 0, 40) * 0.2 + noise(0.1, 1))
    gradient = np.where(np.arange(104) < 58, 0.6, 2.5) * np.exp(noise(0.1, 2))
    found = find_collapse(series(reward=np.abs(FALL + noise(0.02)), gradient=gradient, k3=k3))
    assert [move.signal for move in found.moves] == [K3, GRADIENT] and found.gap_first
    assert 40 <= found.since <= 50, "where it passes a hundredth of the boundary"


@pytest.mark.parametrize(
    "k3",
    [
        [1e-12] * 50 + [1e-9] * 54,  # grows a thousandfold, and is nothing
        [2e-3] * 104,
        [2e-3] * 90 + [0.5] * 14,  # after the fall
        [0.05] * 50 + [2e-3] * 54,  # gets better
    ],
)
def test_a_gap_that_did_not_grow_before_is_not_to_blame(k3):
    found = find_collapse(series(reward=FALL, k3=k3))
    assert not found.gap_first and found.moves == ()


@pytest.mark.parametrize(
    ("name", "before", "after", "moves"),
    [
        ("gradient", 0.6, 2.5, True),
        ("gradient", 2.5, 0.6, False),  # only a rise breaks a run
        ("entropy", 0.3, 0.9, True),
        ("entropy", 0.9, 0.3, True),
        ("length", 200, 215, False),  # less than a tenth
        ("length", 200, 100, True),
    ],
)
def test_which_moves_count(name, before, after, moves):
    found = moves_before(series(**{name: [before] * 40 + [after] * 60}), CALM, FALLEN)
    assert [(move.step, move.before, round(move.after, 9)) for move in found] == [(41, before, after)] * moves


def test_what_is_logged_only_now_and_then_counts_if_it_is_seen_often_enough():
    gradient = series(gradient=[0.6] * 50 + [2.5] * 54).get(GRADIENT).pairs()
    assert [move.step for move in moves_before(Readings.of_pairs({GRADIENT: gradient[::2]}), CALM + 1, FALLEN)] == [51]
    assert moves_before(Readings.of_pairs({GRADIENT: gradient[::2][:6]}), CALM + 1, FALLEN) == ()


def recorded(name):
    found = json.loads((DATA / f"{name}.json").read_text())
    return Readings.of_pairs({key: enumerate(values, 1) for key, values in found.items() if key != "what"})


@pytest.mark.parametrize(
    ("name", "by", "began", "moves"),
    [
        ("collapsed_lr_1e-2", 65, 11, [(GRADIENT, 14), (ENTROPY, 15), (LENGTH, 18)]),  # engines that are equal
        ("collapsed_fp4", 55, None, [(K3, 15)]),  # a rollout that rounds to fp4
    ],
)
def test_recorded_runs_that_died_of_their_learning_rate(name, by, began, moves):
    run = recorded(name)
    reported = [last for last in range(1, 101) if find_collapse(until(run, last))]
    assert reported == list(range(reported[0], 101)) and reported[0] < by, "and do not come back"
    found = find_collapse(run)
    assert [(move.signal, move.step) for move in found.moves][: len(moves)] == moves
    assert began in (None, found.step) and found.gap_first is (moves[0][0] == K3)


def test_a_recorded_noisy_run_that_learns_is_not_dead():
    run = recorded("noisy_lr_3e-3")
    assert np.abs(np.diff(run.get(REWARD).values)).max() > 0.2
    assert not any(find_collapse(until(run, last)) for last in range(1, len(run.get(REWARD).steps) + 1, 4))


@pytest.mark.parametrize("correlation", [0.0, 0.8])
@pytest.mark.parametrize("steps", [40, 200])
def test_noise_is_no_collapse(correlation, steps):
    """Samples the claims in docs/report.md: rewards of 0.5 to 0.87 that go up and down by 0.2, and lower flat ones."""
    for seed in range(10):
        wander = np.random.default_rng([steps, seed]).normal(size=steps)
        for i in range(1, steps):
            wander[i] = correlation * wander[i - 1] + np.sqrt(1 - correlation**2) * wander[i]
        for reward in (np.linspace(0.5, 0.87, steps) + 0.1 * wander, 0.3 + 0.1 * wander):
            found = series(reward=np.clip(reward, 0, 1))
            assert not any(find_collapse(until(found, last)) for last in range(8, steps + 1, 16))


def test_values_as_large_as_a_float_can_be_are_no_error():
    huge = [1e308] * 40 + [0.0] * 40
    assert find_collapse(series(reward=huge, gradient=huge)) is None
    odd = [1e308, -1e308] * 20 + [0.5] * 40
    assert find_collapse(series(reward=[0.5] * 40 + [0.0] * 40, gradient=odd, entropy=huge, k3=odd)).step == 41
