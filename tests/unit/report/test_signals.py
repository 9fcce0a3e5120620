"""The rule that a reward below half of its best has collapsed, on made-up rewards, recorded ones and noise."""

import numpy as np
import pytest

from tests import ROOT
from tests.unit.guard.test_collapse import correlated
from tests.unit.report.made_runs import make, prefix
from verl_ext.guard.collapse import find_collapse
from verl_ext.lab.summary import fall, levels
from verl_ext.report.load import read_run
from verl_ext.report.signals import broken_reward, fall_of

RUNS = sorted((ROOT / "recipes" / "collapse" / "runs").glob("*/*/seed*"))


def found(reward, **metrics):
    return fall_of(make({"critic/score/mean": reward, **metrics}))


@pytest.mark.parametrize(
    ("reward", "step"),
    [
        ([0.6] * 60 + [0.19] * 60, 75),  # with 15 of 20 readings at 0.19 the mean is below 0.3
        ([0.6] * 60 + [0.31] * 60, None),  # just above half
        ([0.6] * 60 + [0.19] * 14, None),  # not for long enough
        ([0.6] * 60 + [0.19] * 40 + [0.45] * 40, 75),  # below eight tenths of its best, it has not come back
        ([0.6] * 60 + [0.19] * 40 + [0.5] * 40, None),  # and here it has
        ([0.6] * 20 + [0.19] * 19, None),  # too short
        ([0.6] * 20 + [0.19] * 20, 35),
        ([0.4] * 60 + [-0.4] * 60, 78),  # rewards of 1 and -1: half of the height above -1 is at -0.3
        ([0.4] * 60 + [-0.2] * 60, None),
        ([-1.5] * 60 + [-1.9] * 60, None),  # nobody knows how far down it goes
        ([0.0] * 120, None),
        ([0.1] * 40 + [0.7] * 40 + [0.4] * 40, None),
    ],
)
def test_half_of_the_best(reward, step):
    fell = found(reward)
    assert (fell.step if fell else None) == step


def test_the_words_and_the_numbers():
    fell = found([0.6] * 60 + [0.19] * 60)
    assert str(fell) == (
        "The run collapsed at step 75: the reward fell from 0.6 to 0.29 between steps 66 and 75 (means of 20 "
        "readings), and is now 0.19 (median of the last 5)."
    )
    assert not fell.dead and fell.sound == 47 and list(fell.moved()) == []
    dead = found([0.6] * 60 + [0.03] * 60)
    assert dead.dead and str(dead) == (
        "The run collapsed at step 71 and is dead: the reward fell from 0.6 to 0.29 between steps 61 and 71 (means of "
        "8 and of 20 readings), and stays at 0.03 (median of the last 5)."
    )
    assert dead.sound == 61


def test_what_else_moved_is_told_and_dates_the_sound_weights():
    norm = [0.5] * 40 + [2.0] * 80
    fell = found([0.6] * 60 + [0.2] * 60, **{"actor/grad_norm": norm})
    assert list(fell.moved()) == ["Also moved: the gradient norm (0.5 to 2, from step 41)."]
    assert fell.sound == 41 and list(fell.moved(but="actor/grad_norm")) == []


def test_a_dead_run_is_dead_whatever_its_scale():
    """This rule finds each reward that the rule of nine tenths finds, which has limits of its own."""
    dice = np.random.default_rng(0)
    dead = 0
    for _ in range(300):
        best, low = dice.uniform(-0.5, 1), dice.uniform(-1.9, 0.05)
        reward = np.concatenate([np.full(dice.integers(8, 60), best), np.full(dice.integers(24, 60), low)])
        run = make({"critic/score/mean": reward + 0.01 * dice.normal(size=len(reward))})
        fell = fall_of(run)
        judged = {name: list(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for name, s in run.metrics.items()}
        if find_collapse(judged):
            dead += 1
            assert fell.dead and fell.collapse.step <= fell.step <= run.steps[-1] and "is dead" in str(fell)
    assert dead > 50


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: "/".join(folder.parts[-3:]))
def test_a_collapse_has_the_steps_of_the_lab(folder):
    run = read_run(folder)
    fell, by_lab = fall_of(run), fall(levels(run.get("critic/score/mean")))
    assert ((fell.collapse.step, fell.step) if fell else (None, None)) == by_lab


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("steps", [40, 200])
def test_noise_is_no_collapse(correlation, steps):
    """A sample of the claims in docs/report.md."""
    for seed in range(20):
        wander = correlated(np.random.default_rng([steps, seed]), steps, correlation)
        for reward in (np.linspace(0.5, 0.87, steps) + 0.1 * wander, 0.5 + 0.1 * wander):
            run = make({"critic/score/mean": np.clip(reward, 0, 1)})
            assert not any(fall_of(prefix(run, last)) for last in range(32, steps + 1, 8))


def test_a_low_and_noisy_reward_is_rarely_taken_for_a_collapse():
    raised = 0
    for seed in range(200):
        dice = np.random.default_rng(seed)
        raised += found(dice.binomial(8, 0.1, size=200) / 8) is not None
        raised += found(np.clip(0.3 + 0.1 * correlated(dice, 200, 0.8), 0, 1)) is not None
    assert raised / 400 <= 0.02


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.17])
@pytest.mark.parametrize("over", [1, 20, 60])
def test_a_fall_under_noise_is_found_soon_after_it_has_ended(noise, over):
    calm = np.linspace(0.3, 0.6, 60)
    for seed in range(5):
        reward = np.concatenate([calm, np.linspace(0.6, 0.2, over + 2)[1:-1], np.full(40, 0.2)])
        noisy = np.clip(reward + noise * np.random.default_rng([seed, over]).normal(size=len(reward)), 0, 1)
        assert found(noisy) is not None


def test_what_lost_most_of_its_gain_but_not_half_is_broken_and_not_collapsed():
    reward = [0.1] * 40 + [0.7] * 40 + [0.38] * 40
    assert broken_reward(make({"critic/score/mean": reward})) == (pytest.approx(0.7), pytest.approx(0.38))
    assert found(reward) is None
