"""What the reward shows: a small run for every level, and sound runs of which nothing is to be heard."""

import math
import re
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.findings import levels_of, line, run_of, seen_as
from verl_ext.base.names import PROMPT_EFFECT
from verl_ext.diagnosis.findings import reward as subject
from verl_ext.diagnosis.findings.answers import CUT
from verl_ext.diagnosis.findings.registry import find_all, notable
from verl_ext.diagnosis.findings.reward import DEAD_GROUPS, SPREADS, reward_course
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, REWARD, REWARD_MAX, REWARD_MIN
from verl_ext.diagnosis.statistics import FEW, FEWEST, LIKELY, SURE

ADVANTAGES, VALIDATION = "critic/advantages/max", "val-core/gsm8k/acc/mean@1"


def wave(level, height, count=30):
    """A level with readings above and below it in turn."""
    return [level + height * (-1) ** i for i in range(count)]


def noisy_rise(errors):
    """Sixty readings with independent noise; the last third is so many standard errors above the first."""
    noise = np.random.default_rng(5).normal(size=(3, 20))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    return (0.5 + 0.05 * (noise + errors * (2 / 20) ** 0.5 * np.array([[0], [0.5], [1]]))).ravel().tolist()


def zeroes_and_ones(values, spread=1.0):
    return {REWARD: values, REWARD_MAX: [spread] * len(values), REWARD_MIN: [0.0] * len(values)}


def parts(accuracy):
    """A reward that rises by its format alone, while its accuracy goes like this."""
    form = line(0.4, 1.0, len(accuracy))
    total = [a + b for a, b in zip(accuracy, form, strict=True)]
    return {REWARD: total, "rewards/accuracy_reward": accuracy, "rewards/format_reward": form}


FELL = line(0.1, 0.8, 20) + [0.05] * 20  # in step 21
LOST = line(0.1, 0.8, 20) + wave(0.4, 0.01, 20)
BROKE = {REWARD: wave(0.6, 0.01, 20) + wave(0.1, 0.01, 20), LENGTH: wave(500, 5, 20) + wave(90, 5, 20)}
BROKE |= {GRADIENT: wave(0.3, 0.01, 40)}
TURNED_CONSTANT = {REWARD: [0.5] * 8 + [0.0] * 12, REWARD_MAX: [1.0] * 8 + [0.0] * 12, REWARD_MIN: [0.0] * 20}
CASES = [
    ("reward_constant.constant", 1, zeroes_and_ones([0.0] * 10, 0.0)),
    ("reward_constant.constant", 1, {REWARD: [0.5] * 10}),  # no spread is logged
    ("reward_constant.constant", 1, {REWARD: [0.5] * 10, SPREADS[0]: [0.01] * 10}),
    ("reward_constant.constant", 9, TURNED_CONSTANT),
    ("reward_constant.constant", 1, {REWARD: [1.0] * 10, SPREADS[0]: [0.0] * 10}),  # from the start: the grader?
    (
        "reward_constant.solved",
        None,
        {REWARD: [*line(0.05, 0.5, 10), *[0.5] * 12], SPREADS[0]: [0.2] * 10 + [0.0] * 12},
    ),
    ("reward_constant.constant", 11, {REWARD: [*line(-1, 0, 10), *[0.0] * 12], SPREADS[0]: [0.2] * 10 + [0.0] * 12}),
    ("reward_constant.varies", None, {REWARD: [0.5] * 10, SPREADS[0]: [0.4] * 10}),
    ("reward_constant.varies", None, zeroes_and_ones([0.5] * 10)),
    (
        "reward_constant.solved",
        None,
        {REWARD: line(0, 1, 5) + [1.0] * 15, REWARD_MAX: [1.0] * 20, REWARD_MIN: [0.0] * 4 + [1.0] * 16},
    ),
    ("reward_fell.collapsed", 21, {REWARD: FELL}),
    ("reward_fell.collapsed", 21, {REWARD: line(-0.8, 0.8, 20) + [-0.9] * 20, REWARD_MIN: [-1.0] * 40}),
    ("reward_fell.falls", 21, {REWARD: LOST}),
    ("reward_fell.falls", 6, {REWARD: [0.9, 0.8, 0.85, 0.9, 0.88, 0.5, 0.55, 0.5]}),  # by the order of few readings
    ("reward_fell.falls", 31, {REWARD: wave(0.8, 0.01) + wave(0.68, 0.01)}),  # from the start, by a sixth
    ("reward_fell.holds", None, {REWARD: wave(0.8, 0.01) + wave(0.75, 0.01)}),
    ("reward_fell.holds", None, {REWARD: line(0.1, 0.8)}),
    ("reward_fell.holds", None, {REWARD: line(0.1, 0.8, 20) + [0.7] * 20}),
    ("reward_fell.holds", None, {REWARD: wave(0.5, 0.2)}),
    ("reward_peaked.peaked", 20, {REWARD: line(0.1, 0.8, 20) + wave(0.4, 0.01, 20)}),
    ("reward_peaked.still_best", None, {REWARD: [0.8] * 10 + [0.4] * 20}),  # best from the start
    ("reward_peaked.still_best", None, {REWARD: line(0.1, 0.8)}),
    ("fall_came_back.yes", None, {REWARD: [0.7] * 20 + [0.2] * 10 + [0.65] * 20}),
    ("fall_came_back.no", None, {REWARD: line(0.1, 0.9)}),
    ("fall_came_back.no", None, {REWARD: FELL}),
    ("reward_flat.flat", None, {REWARD: noisy_rise(0)}),
    ("reward_flat.fell", None, {REWARD: FELL}),
    ("reward_flat.fell", None, {REWARD: wave(0.8, 0.01) + wave(0.75, 0.01)}),
    ("reward_flat.at_ceiling", None, {REWARD: [0.96, 0.98] * 20, REWARD_MAX: [1.0] * 40}),
    ("reward_flat.rose_little", None, {REWARD: noisy_rise(3)}),
    ("reward_flat.rose", None, {REWARD: noisy_rise(6)}),
    ("reward_gain.nothing", None, zeroes_and_ones([0.3] * 40)),
    ("reward_gain.stopped_low", None, zeroes_and_ones(line(0.1, 0.5, 20) + [0.5] * 60)),
    ("reward_gain.little", None, zeroes_and_ones(line(0.3, 0.5))),
    ("reward_gain.much", None, zeroes_and_ones(line(0.1, 0.95))),
    ("validation_fell.fell", 4, {VALIDATION: [0.2, 0.4, 0.5, 0.6, 0.3, 0.25, 0.25, 0.25]}),
    ("validation_fell.fell", 5, {VALIDATION: [0.3, 0.5, 0.6, 0.65, 0.66, 0.5, 0.4, 0.3, 0.2, 0.1]}),
    ("validation_fell.rose", None, {VALIDATION: [0.2, 0.4, 0.6, 0.58]}),
    ("validation_fell.holds", None, {VALIDATION: [0.58, 0.6, 0.61, 0.58]}),
    ("groups_dead.all", None, {DEAD_GROUPS: [1.0] * 10}),
    ("groups_dead.most", None, {DEAD_GROUPS: [0.7] * 10}),
    ("groups_dead.most", None, {REWARD: wave(0.5, 0.1, 10), SPREADS[1]: [0.0] * 7 + [0.3] * 3}),  # whole steps
    ("groups_dead.most", None, {REWARD: [0.0, 0.0, 0.25, 0.0] * 5}),  # a mean of 0 has no other answers
    ("groups_dead.solved", None, {DEAD_GROUPS: [0.7] * 10, REWARD: wave(0.9, 0.02, 10)}),
    ("groups_dead.most", None, {DEAD_GROUPS: [0.08, 0.83, 0.9, 0.83], REWARD: [0.45, 0.8, 0.73, 0.81]}),  # a flat run
    (
        "groups_dead.all",
        None,
        {SPREADS[1]: [0.3] * 4 + [0.0] * 36, REWARD: list(np.linspace(0.6, 0.64, 40))},
    ),  # it rises
    ("groups_dead.some", None, {DEAD_GROUPS: [0.3] * 10}),
    ("groups_dead.few", None, {DEAD_GROUPS: [0.05] * 10}),
    ("penalties_vanish.only", None, {REWARD: line(-0.1, 0.0, 40), REWARD_MAX: [0.0] * 40}),
    ("reward_part.fell", 20, parts(line(0.2, 0.0, 40))),
    ("reward_part.holds", None, parts(line(0.2, 0.3, 40))),
    ("reward_part.holds", None, parts(line(0.0, -0.2, 40))),  # a penalty that grows
    ("penalties_vanish.no", None, {REWARD: line(-0.1, 0.3, 40), REWARD_MAX: [0.0] * 30 + [1.0] * 10}),
    ("environment.changed", 21, BROKE | {ENTROPY: wave(0.4, 0.01, 40)}),
    ("environment.same", None, BROKE | {ENTROPY: wave(0.4, 0.01, 20) + wave(0.1, 0.01, 20)}),
    ("environment.same", None, BROKE | {LENGTH: wave(500, 5, 40)}),
    ("group_size.small", None, {DEAD_GROUPS: [0.8] * 10, **zeroes_and_ones(wave(0.3, 0.02, 10))}),
    ("group_size.enough", None, {DEAD_GROUPS: [0.2] * 10, **zeroes_and_ones(wave(0.3, 0.02, 10))}),
    ("group_size.enough", None, {DEAD_GROUPS: [0.8] * 10, **zeroes_and_ones(wave(0.95, 0.02, 10))}),  # all correct
    ("advantages.zero", None, {ADVANTAGES: [0.0] * 10}),
    ("advantages.huge", None, {ADVANTAGES: [7428.0]}),
    ("advantages.some", None, {ADVANTAGES: [400.0], REWARD_MAX: [1000.0], REWARD_MIN: [0.0]}),  # not divided
    ("advantages.some", None, {ADVANTAGES: [1.2] * 10}),
    ("prompts_matter.no", None, {PROMPT_EFFECT: wave(1.0, 0.2, 40)}),
    ("prompts_matter.unclear", None, {PROMPT_EFFECT: wave(1.2, 0.2, 40)}),
    ("prompts_matter.yes", None, {PROMPT_EFFECT: wave(3.0, 0.2, 40)}),
]


@pytest.mark.parametrize(("mark", "step", "metrics"), CASES, ids=[mark for mark, _, _ in CASES])
def test_level_and_step(mark, step, metrics):
    assert seen_as(mark, run_of(metrics)) == (mark, step)


def test_every_level_has_a_case():
    assert {mark for mark, _, _ in CASES} == levels_of(subject)


def test_one_odd_batch_at_the_end_is_no_fall():
    sound = wave(0.8, 0.01, 40)
    assert seen_as("reward_fell", run_of({REWARD: [*sound, 0.1]})) == ("reward_fell.holds", None)
    assert seen_as("reward_fell", run_of({REWARD: [*sound, 0.1, 0.1, 0.1, 0.1]})) == ("reward_fell.collapsed", 41)


def test_a_collapse_is_claimed_of_the_value_now():
    """Two odd batches at the end of a sound run, while the table of the report has 0.15 as the value now."""
    run = run_of({REWARD: [0.16, 0.2] * 20 + [0.15, 0.15, 0.15, 0.02, 0.02]})
    course = reward_course(run)
    assert course.now == 0.15 and not course.collapsed
    assert reward_course(run_of({REWARD: [*course.series.values, 0.02, 0.02]})).collapsed


@pytest.mark.parametrize("errors", [0, 3.5, 6, -3.5, -6, -30])
def test_only_the_test_of_the_noise_calls_a_difference_noise(errors):
    rise = reward_course(run_of({REWARD: noisy_rise(errors)})).rise
    assert errors == 0 or rise.errors * errors > 0
    assert ("no more than noise" in rise.beyond_noise) == (abs(rise.errors) < LIKELY)
    assert ("more than noise (" in rise.beyond_noise) == (abs(rise.errors) >= SURE)


def test_the_best_of_several_answers_is_no_score_beside_the_mean():
    best, mean = ("val-core/aime/acc/best@16/mean", "val-core/aime/acc/mean@16")
    falls, holds = [0.2, 0.4, 0.6, 0.2, 0.2, 0.2], [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]
    assert seen_as("validation_fell", run_of({best: falls})) == ("validation_fell.fell", 3)
    assert seen_as("validation_fell", run_of({best: falls, mean: holds})) == ("validation_fell.rose", None)
    assert seen_as("validation_fell", run_of({best: holds, mean: falls})) == ("validation_fell.fell", 3)


@pytest.mark.parametrize("odd_ends", [False, True])
def test_a_rise_is_told_with_numbers_that_show_it(odd_ends):
    """The first readings of a noisy run may be high by chance; its thirds show the rise then."""
    values = [0.58] * 3 + noisy_rise(8)[3:-3] + [0.5] * 3 if odd_ends else noisy_rise(6)
    course = subject.reward_course(run_of({REWARD: values}))
    assert course.rise.errors > subject.SURE
    start, end = (float(word) for word in re.findall(r"0\.\d+", course.moved))
    assert end > start and ("median" in course.moved) == (not odd_ends)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("reward_constant", {REWARD_MAX: [1.0] * 10, REWARD_MIN: [1.0] * 10}),
        ("reward_fell", {REWARD: [0.5, 0.4, 0.3, 0.2]}),
        ("reward_flat", {REWARD: [0.5] * 4 + [np.nan] * 40}),
        ("reward_gain", {REWARD: line(0.1, 0.9)}),
        ("validation_fell", {VALIDATION: [0.6, 0.1]}),
        ("validation_fell", {"val-core/gsm8k/acc/best@8/std": [0.6, 0.4, 0.1, 0.1]}),
        ("group_size", {DEAD_GROUPS: [0.8] * 10, REWARD: [0.3] * 10}),
        ("prompts_matter", {PROMPT_EFFECT: [1.0] * 39}),
    ],
)
def test_what_is_not_logged_or_too_short_shows_nothing(name, metrics):
    assert name not in find_all(run_of(metrics))


# ---------------------------------------------------------------------------------------------------------- sound runs


def ceiling(rate):
    """A reward that rises to its ceiling."""
    return (1 - 0.8 * np.exp(-rate * np.arange(60))).tolist()


LEARNS = zeroes_and_ones(line(0.2, 0.7, 60))
SOUND = {
    "answers grow while the reward rises": LEARNS | {LENGTH: line(200, 1200, 60), CUT: [0.02] * 60},
    "a large but steady gradient": LEARNS | {GRADIENT: wave(60, 10, 60)},
    "a reward at its ceiling": zeroes_and_ones(wave(0.97, 0.02, 60)),
    "a reward that comes to its ceiling": zeroes_and_ones(ceiling(0.1)),
    "groups that are all correct": {
        **zeroes_and_ones(np.minimum(ceiling(0.15), 1).tolist()),
        DEAD_GROUPS: line(0.1, 0.55, 60),
        ADVANTAGES: [1.5] * 60,
    },
    "answers that are all correct at last": {
        REWARD: line(0.2, 1.0, 20) + [1.0] * 40,
        REWARD_MAX: [1.0] * 60,
        REWARD_MIN: [0.0] * 20 + [1.0] * 40,
    },
    "an entropy that falls slowly while the reward rises to its ceiling": {
        **zeroes_and_ones(ceiling(0.08)),
        ENTROPY: (0.6 * np.exp(-0.015 * np.arange(60))).tolist(),
        GRADIENT: line(0.6, 0.2, 60),
    },
    "engines that agree": LEARNS | {K3: wave(4e-4, 1e-4, 60), GRADIENT: wave(0.5, 0.1, 60)},
}


@pytest.mark.parametrize("metrics", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_nothing_is_to_be_heard_of_a_sound_run(metrics, noise):
    dice = np.random.default_rng(0)
    noisy = {name: np.array(values) * (1 + noise * dice.normal(size=60)) for name, values in metrics.items()}
    if REWARD_MAX in metrics:
        noisy |= {name: metrics[name] for name in (REWARD_MAX, REWARD_MIN)}
        noisy[REWARD] = np.clip(noisy[REWARD], metrics[REWARD_MIN], metrics[REWARD_MAX])
    assert [found.mark for found in notable(find_all(run_of(noisy)))] == []


# --------------------------------------------------------------------------------------------------------- its numbers


@pytest.mark.parametrize("scale", [1e-3, 1e6])
@pytest.mark.parametrize("values", [FELL, LOST, line(0.1, 0.8), wave(0.5, 0.1)])
def test_a_course_does_not_depend_on_the_scale(values, scale):
    plain, scaled = (reward_course(run_of({REWARD: [each * by for each in values]})) for by in (1.0, scale))
    assert (scaled.falls, scaled.collapsed, scaled.step) == (plain.falls, plain.collapsed, plain.step)
    assert (scaled.lost, scaled.of_gain) == pytest.approx((plain.lost, plain.of_gain), rel=1e-9, abs=1e-9)
    assert scaled.best == pytest.approx(plain.best * scale)


@given(st.lists(st.floats(0, 1), min_size=FEWEST, max_size=60))
def test_levels_of_a_course_are_means_of_readings_in_a_row(values):
    course = reward_course(run_of({REWARD: values}))
    levels = [math.fsum(values[i : i + course.width]) / course.width for i in range(len(values) - course.width + 1)]
    long = len(values) <= FEW or course.width > 5
    now = levels[-1] if long else max(levels[-1], statistics.median(values[-5:]))
    assert (course.first, course.now, course.best) == pytest.approx((levels[0], now, max(levels)), abs=1e-12)
    at = course.best_step - course.width
    assert levels[at] == pytest.approx(max(levels), abs=1e-12)
    since = values[at:]
    wide = min(2 * course.width, len(since))
    least = min(math.fsum(since[i : i + wide]) / wide for i in range(len(since) - wide + 1))
    assert (course.lowest, course.least) == pytest.approx((min(levels[: at + 1]), least), abs=1e-12)
    assert course.bottom == 0 and 1 <= course.step <= len(values)


@pytest.mark.parametrize(("noise", "most"), [(0.04, 3), (0.1, 6)])
def test_noise_rarely_falls(noise, most):
    runs = [np.clip(0.4 + noise * np.random.default_rng(seed).normal(size=60), 0, 1) for seed in range(60)]
    assert sum(reward_course(run_of({REWARD: values})).falls for values in runs) <= most


def tosses(kind):
    """[steps, answers] the rewards of answers that are 0 or 1, of any value, or of prompts of different difficulty."""
    dice = np.random.default_rng(0)
    even = dice.random((400, 64))
    chances = {"coins": 0.3, "prompts": dice.random((400, 8)).repeat(8, 1)}
    return even if kind == "even" else (even < chances[kind]).astype(float)


@pytest.mark.parametrize(("kind", "level"), [("coins", "unclear"), ("even", "no"), ("prompts", "yes")])
@pytest.mark.parametrize("updates", [1, 4])
def test_batches_are_compared_with_coin_tosses(kind, level, updates):
    """In separate_async, verl averages router/tokens over a step's local updates, and logs the rest over all of them.

    The variance of a batch's mean is that of coins, a third of it, or more, as each prompt has its own chance.
    """
    rewards = tosses(kind)
    dice = np.random.default_rng(1)
    generated, prompt = (dice.integers(5, 30, rewards.shape) for _ in range(2))
    metrics = {
        REWARD: rewards.mean(1),
        REWARD_MAX: np.ones(400),
        REWARD_MIN: np.zeros(400),
        "router/tokens": generated.reshape(400, updates, -1).sum(2).mean(1),
        LENGTH: generated.mean(1),
    }
    if updates > 1:
        metrics |= {"prompt_length/mean": prompt.mean(1), "perf/total_num_tokens": (generated + prompt).sum(1)}
    assert find_all(run_of(metrics))["prompts_matter"].level == level
    short = {name: values[:79] for name, values in metrics.items()}
    assert "prompts_matter" not in find_all(run_of(short))
