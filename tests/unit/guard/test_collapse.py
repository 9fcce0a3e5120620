"""The rule for dead runs: verdict, first step and first move, on made-up series, recorded ones and noise."""

import json
import subprocess
import sys
from itertools import accumulate, pairwise

import numpy as np
import pytest

from tests import ROOT
from verl_ext.guard.collapse import ENTROPY, GRADIENT, K3, LENGTH, REWARD, STAYS, STRETCH, find_collapse

DATA = ROOT / "tests" / "support" / "data"


def series(**values):
    """Turns lists of values into series that start at step 1."""
    names = {"reward": REWARD, "k3": K3, "gradient": GRADIENT, "entropy": ENTROPY, "length": LENGTH}
    return {names[key]: [(step, float(value)) for step, value in enumerate(each, 1)] for key, each in values.items()}


def until(found, last):
    return {name: [reading for reading in readings if reading[0] <= last] for name, readings in found.items()}


def noise(size, length, seed=0):
    return size * np.random.default_rng(seed).normal(size=length)


def falling(high, low, calm=40, over=10, dead=STAYS + 10):
    """Returns a level, a straight line to another level, and that level."""
    return np.concatenate([np.full(calm, high), np.linspace(high, low, over + 2)[1:-1], np.full(dead, low)])


def test_a_reward_that_fell_to_a_tenth_and_stays_there_has_collapsed():
    found = find_collapse(series(reward=np.abs(falling(0.55, 0.03) + noise(0.02, 84))))
    assert found.best == pytest.approx(0.55, abs=0.03) and found.now == pytest.approx(0.03, abs=0.02)
    assert abs(found.step - 41) <= 2, "the first reading of the line that leaves the noise"
    assert found.since == found.step and not found.gap_first
    assert "from step 4" in str(found) and str(found).endswith("Nothing else that is logged moved before it.")
    assert f"before step {found.step}, and lower the learning rate" in found.remedy


def test_it_is_told_when_it_has_stayed_there():
    reward = [0.5] * 40 + [0.02] * 60
    reported = [last for last in range(1, 101) if find_collapse(until(series(reward=reward), last))]
    assert reported == list(range(40 + STAYS, 101))


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


def test_one_good_batch_in_the_ruins_changes_nothing_and_a_lucky_one_in_a_sparse_reward_makes_no_best():
    ruins = [0.5] * 40 + [0.01] * 40
    ruins[60] = 0.3
    assert find_collapse(series(reward=ruins))
    sparse = [0.0] * 80
    sparse[10] = 0.125
    assert find_collapse(series(reward=sparse)) is None


def test_what_moved_first():
    """In the three runs for which the rule was written, gradient norms rose from 0.6 to 2.5 before the reward fell."""
    reward = np.abs(falling(0.55, 0.03, calm=60) + noise(0.02, 104))
    gradient = np.where(np.arange(104) < 50, 0.6, 2.5) * np.exp(noise(0.1, 104, 1))
    length = np.where(np.arange(104) < 64, 200, 400) + noise(5, 104, 2)
    found = find_collapse(series(reward=reward, gradient=gradient, length=length, k3=[1e-12] * 104))
    assert [move.signal for move in found.moves] == [GRADIENT, LENGTH]
    first, then = found.moves
    assert (
        first.step == 51 and first.before == pytest.approx(0.6, rel=0.1) and first.after == pytest.approx(2.5, rel=0.2)
    )
    assert then.step == 65 and found.step == pytest.approx(61, abs=2) and found.since == 51 and not found.gap_first
    assert "Before it moved the gradient norm (0." in str(found) and "; with or after it, the response length" in str(
        found
    )
    assert "before step 51, and lower the learning rate" in found.remedy


def test_engines_that_come_apart_first_are_to_blame():
    reward = np.abs(falling(0.55, 0.03, calm=60) + noise(0.02, 104))
    k3 = 1e-4 * np.exp(np.clip(np.arange(104) - 30, 0, 40) * 0.2 + noise(0.1, 104, 1))
    gradient = np.where(np.arange(104) < 58, 0.6, 2.5) * np.exp(noise(0.1, 104, 2))
    found = find_collapse(series(reward=reward, gradient=gradient, k3=k3))
    assert [move.signal for move in found.moves] == [K3, GRADIENT] and found.gap_first
    assert 40 <= found.since <= 50, "where it passes a hundredth of the boundary"
    assert found.remedy.startswith("The engines came apart first")


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
    found = find_collapse(series(reward=falling(0.55, 0.03, calm=60), k3=k3))
    assert not found.gap_first and found.moves == ()


def test_what_is_not_logged_or_only_now_and_then_is_left_out():
    found = series(reward=falling(0.55, 0.03, calm=60), gradient=[0.6] * 50 + [2.5] * 54)
    found[GRADIENT] = found[GRADIENT][::2]
    assert [move.step for move in find_collapse(found).moves] == [51]
    found[GRADIENT] = found[GRADIENT][:6]
    assert find_collapse(found).moves == ()


def recorded(name):
    found = json.loads((DATA / f"{name}.json").read_text())
    return {key: list(enumerate(values, 1)) for key, values in found.items() if key != "what"}


def test_recorded_runs_that_died_of_their_learning_rate():
    """One with equal engines, and one whose rollout rounds to fp4."""
    died = {name: recorded(name) for name in ("collapsed_lr_1e-2", "collapsed_fp4")}
    reported = {name: [last for last in range(1, 101) if find_collapse(until(run, last))] for name, run in died.items()}
    assert all(steps == list(range(steps[0], 101)) for steps in reported.values()), "and do not come back"
    assert reported["collapsed_lr_1e-2"][0] < 65 and reported["collapsed_fp4"][0] < 55
    equal, rounded = (find_collapse(run) for run in died.values())
    assert str(equal) == (
        "The reward fell from 0.6 to 0.042, from step 11 on, and stays there. Nothing else that is logged moved "
        "before it; with or after it, the gradient norm (0.44 to 0.9, from step 14), then the entropy (0.31 to 0.45, "
        "from step 15), then the response length (17 to 20, from step 18)."
    )
    assert not equal.gap_first and rounded.gap_first
    assert "Before it moved k3 (0.061 to 0.25, from step 15)" in str(rounded)


def test_a_recorded_noisy_run_that_learns_is_none():
    run = recorded("noisy_lr_3e-3")
    reward = [value for _, value in run[REWARD]]
    assert max(abs(later - sooner) for sooner, later in pairwise(reward)) > 0.2
    assert not any(find_collapse(until(run, last)) for last in range(1, len(reward) + 1, 4))


def correlated(dice, count, correlation):
    """First-order autoregressive noise with a standard deviation of 1."""
    steps = np.sqrt(1 - correlation**2) * dice.normal(size=count)
    steps[0] = dice.normal()
    return np.array(list(accumulate(steps, lambda before, step: correlation * before + step)))


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("steps", [8, 40, 200])
def test_noise_is_no_collapse(correlation, steps):
    """A sample of the claims in docs/report.md: rewards of 0.5 to 0.87 that go up and down by 0.2, and lower flat
    ones."""
    for seed in range(10):
        wander = correlated(np.random.default_rng([steps, seed]), steps, correlation)
        noisy = np.clip(np.linspace(0.5, 0.87, steps) + 0.1 * wander, 0, 1)
        low = np.clip(0.3 + 0.1 * wander, 0, 1)
        for reward in (noisy, low):
            found = series(reward=reward)
            assert not any(find_collapse(until(found, last)) for last in range(8, steps + 1, 16))


def test_it_is_importable_without_torch():
    words = "import sys, verl_ext.guard.collapse; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0


def test_values_as_large_as_a_float_can_be_are_no_error():
    huge = [1e308] * 40 + [0.0] * 40
    assert find_collapse(series(reward=huge, gradient=huge)) is None
    odd = [1e308, -1e308] * 20 + [0.5] * 40
    assert find_collapse(series(reward=[0.5] * 40 + [0.0] * 40, gradient=odd, entropy=huge, k3=odd)).step == 41
