"""What compares the engines: a small run for every level, and facts about the mean of k from simulated tokens."""

import math

import numpy as np
import pytest

from tests.support.findings import levels_of, run_of, seen_as, then
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings import gap as subject
from verl_ext.diagnosis.findings.gap import (
    CORRELATION,
    LEVEL,
    RATE,
    STALENESS,
    gap_of,
    in_errors,
    sound_level,
    stale_steps,
)
from verl_ext.diagnosis.findings.registry import find_all
from verl_ext.diagnosis.levels import LEVELS
from verl_ext.diagnosis.names import K1, K3, LOG_RATIO, PROB_DIFF, REWARD

LARGEST, MEAN, DRIFTED = "vllm_kl/sequence_gap_max", "vllm_kl/sequence_gap_mean", "filter/retokenization_drift/drifted"
OWN = "router/own_agreement"


def wave(level, share=0.02, count=40):
    """A level with readings above and below it in turn."""
    return [level * (1 + share * (-1) ** i) for i in range(count)]


def grows(first, last, count=40):
    return np.geomspace(first, last, count).tolist()


def gap(k3, k1=None, size=None, **noise):
    """The gap's metrics; k1 is k3 if k averages 1."""
    readings = {K3: k3, K1: k3 if k1 is None else k1, LOG_RATIO: abs(k3) ** 0.5 if size is None else size}
    return {name: wave(level, **noise) for name, level in readings.items()}


def by_probability(*shares, k3=0.01):
    """k1 of each bucket as a share of sqrt(2 k3)."""
    buckets = dict(zip(BUCKETS["prob"], shares, strict=True))
    found = {f"vllm_kl/k1/prob/{name}": [share * (2 * k3) ** 0.5] * 40 for name, share in buckets.items()}
    return found | {f"vllm_kl/k3/prob/{name}": [k3] * 40 for name in buckets} | {K3: [k3] * 40}


def trajectories(largest, mean):
    return {LARGEST: [largest] * 40, MEAN: [mean] * 40}


SPIKED = [*[1e-3] * 24, 0.5, *[1e-3] * 15]
CASES = [
    ("gap_level.broken", None, {K3: [5.0] * 10}),
    ("gap_level.broken", None, {K3: [1e-3] * 10, PROB_DIFF: [0.7] * 10}),  # the measure that is the worst
    ("gap_level.broken", None, {CORRELATION: [0.2] * 10}),
    ("gap_level.close", None, {K3: [0.008], K1: [-0.05]}),  # one reading of k1 is noise
    ("gap_level.apart", None, {K3: [8e-4, 9e-4] * 10, K1: [0.03, 0.031] * 10}),  # top_p that training does not know
    ("gap_level.broken", None, {LOG_RATIO: [2.0] * 10}),
    ("gap_level.apart", None, {K3: [0.05] * 10}),
    ("gap_level.apart", None, {K1: [-0.05] * 10}),
    ("gap_level.apart", None, {LOG_RATIO: [0.2] * 10}),
    ("gap_level.apart", None, {PROB_DIFF: [0.05] * 10}),
    ("gap_level.apart", None, {CORRELATION: [0.9] * 10}),
    ("gap_level.close", None, {K3: [1e-3] * 10}),
    ("gap_level.close", None, {K3: [0.5] * 6 + [1e-3] * 5}),  # now
    ("gap_level.close", None, {LOG_RATIO: [0.01] * 10}),
    ("gap_level.close", None, {CORRELATION: [0.999] * 10}),
    ("gap_level.none", None, {K3: [1e-9] * 10}),
    ("gap_at_once.unrelated", 1, {K3: [5.0, 0.1, 0.1]}),
    ("gap_at_once.unrelated", 1, {CORRELATION: [0.1, 0.9, 0.9]}),
    ("gap_at_once.apart", 1, {K3: [0.1, 5.0, 5.0]}),
    ("gap_at_once.close", 1, {K3: [0.001, 5.0, 5.0]}),
    ("gap_at_once.close", 1, {CORRELATION: [0.999, 0.1, 0.1]}),
    ("gap_at_once.apart", 1, {CORRELATION: [0.7, 0.9, 0.9]}),
    ("gap_at_once.close", 1, {K3: [0.001, 0.001], CORRELATION: [0.7, 0.9]}),  # k3 shows more
    ("gap_started.at_once", None, {LOG_RATIO: wave(0.1)}),
    ("gap_started.in_part", None, {LOG_RATIO: then(0.01, 0.1, 5)}),
    ("gap_started.with_updates", None, {LOG_RATIO: grows(1e-3, 0.1)}),
    ("gap_started.with_updates", None, {LOG_RATIO: grows(0.05, 0.1), OWN: (1 - np.geomspace(1e-3, 0.1, 40)).tolist()}),
    ("gap_started.suddenly", None, {LOG_RATIO: [1e-7, 0.07, 0.09, 0.12, 0.15, 0.16, 0.18, 0.19, 0.18]}),
    ("gap_started.suddenly", None, {LOG_RATIO: then(1e-3, 0.1, 10)}),
    ("gap_started.comes_and_goes", None, {K3: [*SPIKED[:24], 5.0, *SPIKED[25:]]}),
    ("gap_jumped.at_first_sync", 4, {K3: then(1e-4, 0.5, 3)}),
    ("gap_jumped.at_first_sync", 2, {K3: then(1e-4, 0.5, 1)}),
    ("gap_jumped.later", 26, {K3: then(1e-4, 0.5, 25)}),
    ("gap_jumped.later", 26, {LOG_RATIO: then(1e-3, 0.5, 25)}),
    ("gap_jumped.later_and_grows", 26, {K3: then(1e-4, 0.2, 25, 30) + grows(0.3, 3.0, 20)}),
    ("gap_jumped.passed", 26, {K3: then(1e-4, 0.5, 25, 30) + [1e-4] * 10}),
    ("gap_jumped.passed", 26, {K3: [1e-4] * 25 + ([0.5] * 6 + [1e-4]) * 5 + [0.5] * 6}),  # it has not stayed
    ("gap_jumped.no", None, {K3: grows(1e-4, 0.5)}),
    ("gap_jumped.no", None, {K3: then(1e-6, 1e-3, 25)}),  # both are rounding
    ("gap_grew.grew", 21, {K3: grows(1e-4, 0.5)}),
    ("gap_grew.grew", 21, {K3: then(1e-3, 0.1, 20)}),
    ("gap_grew.steady", None, {K3: grows(1e-6, 1e-3)}),  # no more than rounding
    ("gap_grew.steady", None, {K3: wave(0.1)}),
    ("gap_spike.broken", 25, {K3: [*SPIKED[:24], 5.0, *SPIKED[25:]]}),
    ("gap_spike.spike", 25, {K3: SPIKED}),
    ("gap_spike.none", None, {K3: wave(1e-3, 0.5)}),
    ("gap_spike.none", None, {K3: [1e-3, 0.5, 1e-3, 1e-3, 0.5] * 8}),  # too many
    ("gap_spike.none", None, {K3: then(1e-3, 0.5, 30)}),  # it stays
    ("mean_of_k.far_above", None, gap(5.0, k1=0.1)),
    ("mean_of_k.above", None, gap(0.01, k1=-0.02)),
    ("mean_of_k.one", None, gap(0.01)),
    ("mean_of_k.one", None, gap(0.01, k1=0.0099)),
    ("mean_of_k.one", None, gap(0.0099, k1=0.01)),
    ("mean_of_k.unclear", None, {K1: [0.01] * 40, K3: wave(0.005, 0.98)}),
    ("mean_of_k.below", None, gap(0.008, k1=0.01)),
    ("mean_of_k.a_little_below", None, gap(0.005, k1=0.01)),
    ("mean_of_k.far_below", None, gap(4e-4, k1=0.02)),
    ("k1_sign.negative", None, gap(0.01, k1=-0.02, size=0.05)),
    ("k1_sign.a_little_negative", None, gap(0.01, k1=-0.002, size=0.05)),
    ("k1_sign.none", None, {K1: [0.01 * (-1) ** i for i in range(40)]}),
    ("k1_sign.positive", None, gap(0.01)),
    ("gap_side.one_side", None, gap(0.01, k1=0.045, size=0.05)),
    ("gap_side.one_side_of_a_large_gap", None, gap(0.5, k1=0.95, size=1.0)),
    ("gap_side.most", None, gap(0.01, k1=0.042, size=0.05)),
    ("gap_side.more", None, gap(0.01, k1=0.03, size=0.05)),
    ("gap_side.both", None, gap(0.01, k1=0.001, size=0.05)),
    ("gap_scaled.scaled", None, {K1: [0.98] * 10, CORRELATION: [0.99] * 10}),
    ("gap_scaled.no", None, {K1: [0.98] * 10, CORRELATION: [0.6] * 10}),
    ("gap_scaled.no", None, {LOG_RATIO: [0.01] * 10, CORRELATION: [0.999] * 10}),
    ("gap_at_rest.grows", None, {LOG_RATIO: grows(0.1, 0.4), RATE: [0.0] * 40}),
    ("gap_at_rest.no", None, {LOG_RATIO: [0.1001, 0.1102] * 20, RATE: [0.0] * 40}),
    ("gap_jumped.at_first_sync", 5, {K3: [3.4e-4] * 4 + [8.7e-3] * 36}),  # below the limit, to 25 times
    ("gap_grew.grew", 21, {LOG_RATIO: grows(0.0115, 0.04)}),  # below the limit
    ("gap_by_probability.tilted", None, by_probability(1.2, 1.0, 0.0, -0.9, -0.8)),
    ("gap_by_probability.in_bulk", None, by_probability(0.9, 0.9, 0.9, 0.8, 0.7)),
    ("gap_by_probability.even", None, by_probability(0.3, 0.4, 0.5, 0.4, 0.1)),
    ("gap_tokens.few", None, gap(0.05, size=0.05)),
    ("gap_tokens.many", None, gap(0.0025, size=0.05)),
    ("gap_trajectories.whole", None, trajectories(20.0, 3.0)),
    ("gap_trajectories.few", None, trajectories(0.8, 0.1)),
    ("gap_trajectories.some", None, trajectories(0.6, 0.1)),
    ("gap_trajectories.most", None, trajectories(0.3, 0.1)),
    ("gap_trajectories.all", None, trajectories(0.15, 0.1)),
    ("tokens_drifted.some", None, {DRIFTED: [0.0] * 39 + [0.02]}),
    ("tokens_drifted.none", None, {DRIFTED: [0.0] * 40}),
    ("rollout_age.new", None, {STALENESS: [0.3] * 40}),
    ("rollout_age.old", None, {STALENESS: then(0.0, 4.0, 5), LOG_RATIO: wave(0.1)}),
    ("rollout_age.beside", None, {STALENESS: then(0.0, 4.0, 5), K3: [0.04] * 40, "vllm_kl/engine/k3": [0.03] * 40}),
    ("rollout_age.always_old", None, {STALENESS: [4.0] * 40, LOG_RATIO: wave(0.1)}),
]


@pytest.mark.parametrize(("mark", "step", "metrics"), CASES, ids=[mark for mark, _, _ in CASES])
def test_level_and_step(mark, step, metrics):
    assert seen_as(mark, run_of(metrics)) == (mark, step)


def test_every_level_has_a_case():
    assert {mark for mark, *_ in CASES} == levels_of(subject)


@pytest.mark.parametrize(
    ("name", "metrics", "first"),
    [
        ("gap_level", {REWARD: [0.5] * 40}, 1),
        ("gap_level", {K3: [math.nan] * 40}, 1),
        ("gap_at_once", {K3: [5.0] * 40}, 51),  # a resumed run does not know how it began
        ("gap_at_once", {CORRELATION: [0.3] * 40}, 51),
        ("gap_started", {LOG_RATIO: [0.1] * 40}, 51),
        ("gap_started", {LOG_RATIO: [0.1] * 40, STALENESS: [4.0] * 40}, 1),  # nor does one whose rollouts are old
        ("gap_started", {K3: [1e-9] * 40}, 1),
        ("mean_of_k", {K1: [0.02] * 7, K3: [1e-3] * 7}, 1),
        ("mean_of_k", {K1: [1e-9] * 40, K3: [1e-9] * 40}, 1),
        ("k1_sign", {K1: [-0.02] * 7}, 1),
        ("gap_tokens", {LOG_RATIO: [0.0] * 40, K3: [0.1] * 40}, 1),
        ("gap_trajectories", {MEAN: [0.1] * 40}, 1),
        ("gap_by_probability", {f"vllm_kl/{k}/prob/0.9-": [0.1] * 40 for k in ("k1", "k3")} | {K3: [0.1] * 40}, 1),
    ],
)
def test_what_is_not_logged_or_too_short_shows_nothing(name, metrics, first):
    assert name not in find_all(run_of(metrics, first))


# -------------------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize("level", sorted({level.k3 for level in LEVELS}))
@pytest.mark.parametrize("kept", [float, np.float32])
def test_the_published_level_of_the_model_is_what_rounding_stays_below(level, kept):
    run = run_of({LEVEL: [float(kept(level))] * 40, K3: [0.9 * level] * 40})
    assert sound_level(run) == level
    assert find_all(run)["gap_level"].level == "close"
    above = run_of({LEVEL: [float(kept(level))] * 40, K3: [1.1 * level] * 40})
    assert find_all(above)["gap_level"].level == "apart"


def test_the_gap_of_the_engines_alone_is_judged_if_it_is_seen_often_enough():
    """Old rollouts have a gap of the policy's own movement; trajectories of lag 0 and rescored ones do not."""
    old = {K3: [0.5] * 40}
    of_lag_0 = {f"{K3}/lag/0": [0.002] * 20}  # of the first half of the steps
    rescored = {"vllm_kl/engine/k3": [math.nan, 0.003] * 20}
    seen = gap_of(run_of(old | of_lag_0 | rescored))
    expected = [0.002] * 20 + [0.003] * 10
    assert seen.alone and seen.series.values.tolist() == expected
    assert seen.series.steps.tolist() == [*range(1, 21), *range(22, 41, 2)]
    assert find_all(run_of(old | of_lag_0))["gap_level"].level == "close"
    rare = gap_of(run_of(old | {f"{K3}/lag/0": [0.002] * 7}))
    assert not rare.alone and rare.series.values.tolist() == [0.5] * 40


def test_a_gap_is_judged_by_the_first_measure_that_was_logged():
    every = {K3: [1e-3] * 4, K1: [2e-3] * 4, LOG_RATIO: [0.03] * 4, PROB_DIFF: [0.004] * 4}
    for name in (K3, K1, LOG_RATIO, PROB_DIFF):
        assert gap_of(run_of(every)).measure.name == name
        del every[name]
    assert gap_of(run_of({REWARD: [0.5] * 4})) is None


def test_heights_grow_as_k3_does():
    """A gap of x in every token has |log k| = x and k3 = x^2 / 2."""
    shifts = np.geomspace(1e-3, 0.1, 10)
    k3, size = (gap_of(run_of({name: values})).heights for name, values in ((K3, shifts**2 / 2), (LOG_RATIO, shifts)))
    assert size / size[0] == pytest.approx(k3 / k3[0])


def test_steps_with_rollouts_of_older_weights():
    assert stale_steps(run_of({STALENESS: [0.0, 0.4, 0.5, 1.0, 0.0]})) == {3, 4}
    assert stale_steps(run_of({})) == set()


# ----------------------------------------------------------------------------------------------------- the mean of k


@pytest.mark.parametrize("count", [8, 30, 80])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_mean_in_its_standard_errors(count, scale):
    values = np.random.default_rng(count).normal(0.3, 1, count)
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count)
    assert in_errors(scale * values) == pytest.approx(mean / error)
    assert in_errors(np.zeros(count)) == 0.0
    assert in_errors(values[:7]) is None


def simulated(l_infer, l_old, sampled):
    """Returns 40 steps of k1, k3 and |log k| of tokens drawn from `sampled`; the arguments are log-probabilities."""
    dice = np.random.default_rng(0)
    tokens = dice.choice(len(sampled), (40, 3000), p=np.exp(sampled))
    log_k = (l_old - l_infer)[tokens]
    return {K1: -log_k.mean(1), K3: (np.expm1(log_k) - log_k).mean(1), LOG_RATIO: np.abs(log_k).mean(1)}


def normalized(logits):
    return logits - np.log(np.exp(logits).sum())


LOGITS = np.random.default_rng(1).normal(0, 2, 50)
PLAIN, WARM = normalized(LOGITS), normalized(LOGITS / 1.3)
NUCLEUS = np.where(np.argsort(np.argsort(PLAIN)) >= 35, PLAIN, -np.inf)
TRAINED, ROUNDED = (normalized(LOGITS + np.random.default_rng(2).normal(0, size, 50)) for size in (0.2, 0.02))


@pytest.mark.parametrize(
    ("l_infer", "l_old", "sampled", "mass", "sign"),
    [
        (PLAIN, TRAINED, PLAIN, "one", "positive"),  # other weights
        (WARM, PLAIN, WARM, "one", "positive"),  # another temperature, and the log-probabilities of it
        (WARM, PLAIN, PLAIN, "above", "negative"),  # log-probabilities of a distribution that was not sampled from
        (normalized(NUCLEUS), ROUNDED, normalized(NUCLEUS), "far_below", "positive"),  # training does not cut it
    ],
)
def test_k_averages_1_if_tokens_were_sampled_from_the_distribution_of_l_infer(l_infer, l_old, sampled, mass, sign):
    run = run_of(simulated(l_infer, l_old, sampled))
    found = find_all(run)
    assert (found["mean_of_k"].level, found["k1_sign"].level) == (mass, sign)
    with np.errstate(invalid="ignore"):
        k = np.where(np.isfinite(sampled), np.exp(sampled + l_old - l_infer), 0.0).sum()
    assert (mass == "one") == (abs(k - 1) < 1e-9)
    assert run.late(K3) - run.late(K1) == pytest.approx(k - 1, abs=0.01)


def test_most_tokens_that_move_to_one_side_are_seen_on_either_side():
    """Compares a bucket whose tokens all move a little with one of which a few move far."""
    dice = np.random.default_rng(0)
    noise = 0.01 * dice.standard_normal((80, 200))
    bulk, few = noise + 0.02, noise + 3 * (dice.random(noise.shape) < 0.01)

    def level(log_k):
        readings = {"0.1-0.5": log_k, "0.01-0.1": noise, "0.5-0.9": noise, "0.9-": noise}
        metrics = {f"vllm_kl/k1/prob/{name}": -values.mean(1) for name, values in readings.items()}
        metrics |= {f"vllm_kl/k3/prob/{name}": (np.expm1(each) - each).mean(1) for name, each in readings.items()}
        return find_all(run_of(metrics | {K3: [1e-3] * 80}))["gap_by_probability"].level

    assert [level(each) for each in (bulk, -bulk, noise, few, -few)] == ["in_bulk", "in_bulk", "even", "even", "even"]
