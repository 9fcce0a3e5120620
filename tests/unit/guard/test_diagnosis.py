"""The causes that the marks of a run point to, on made-up runs with one cause's marks each."""

import shlex

import numpy as np
import pytest

from verl_ext.guard.diagnosis import (
    CAUSES,
    JUDGES,
    LEAST,
    LOOK_EVERY,
    LOOKS,
    Diagnosis,
    find_question,
    find_suspects,
    levels_not_logged,
)
from verl_ext.guard.marks import Marks

STEPS = 100
LEARNS = {"critic/score/mean": (0.4, 0.9), "actor/entropy": (0.3, 0.1), "actor/grad_norm": (0.5, 0.5)}
EQUAL = {"router/agreement": 1.0, "router/own_agreement": 1.0}


def routers(first, last, own=None):
    """Agreement of two layers, their mean, and the same of the training router's own choice."""
    mean = (first + last) / 2
    layers = {"router/agreement/layer_00": first, "router/agreement/layer_01": last}
    return layers | {"router/agreement": mean, "router/own_agreement": mean if own is None else own}


def grown_apart(shallow, deep, before=0.1):
    """Returns the agreement of routers whose disagreement was `before` of what it is before the updates."""
    return {name: (1 - before * (1 - level), level) for name, level in routers(shallow, deep).items()}


def by_probability(*shares, k3=0.01):
    """k1 of each bucket as a share of sqrt(2 k3)."""
    names = ("0-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "0.9-")
    levels = {f"vllm_kl/k1/prob/{name}": share * (2 * k3) ** 0.5 for name, share in zip(names, shares, strict=True)}
    return levels | {f"vllm_kl/k3/prob/{name}": k3 for name in names}


def gap(k3, k1=None, size=None, most=3.0):
    """The gap's metrics: k1 is k3 where k averages 1; `most` is the largest gap of a trajectory over the mean."""
    size = k3**0.5 if size is None else size
    return {
        "vllm_kl/k3": k3,
        "vllm_kl/k1": k3 if k1 is None else k1,
        "vllm_kl/log_ratio_abs_mean": size,
        "vllm_kl/sequence_gap_mean": size / 4,
        "vllm_kl/sequence_gap_max": most * size / 4,
    }


def arrived(low, high, spread=0.1):
    """The canary's metrics; `spread` is of the tokens' shares around the middle of the interval."""
    middle = {"sync/arrived_median": (low + high) / 2, "sync/arrived_spread": spread}
    return {"sync/arrived_low": low, "sync/arrived_high": high} | middle


def grown(**levels):
    """Returns the gap's metrics for a gap that comes with the updates."""
    return {name: (value * 1e-6, value) for name, value in gap(**levels).items()}


def alike(share, size):
    """Returns the routers' metrics if tokens that are routed alike have this share of a gap of this size."""
    return {"router/any_layer_differs": 0.1, "router/gap_equal": share * size / 0.9}


def batch(least, most, answers=64):
    """The rewards' range, and the metric that shows how many answers a batch has."""
    return {
        "critic/score/min": least,
        "critic/score/max": most,
        "router/tokens": 17.0 * answers,
        "response_length/mean": 17.0,
    }


SMALL = gap(1e-14)
FELL = tuple(np.interp(np.arange(STEPS), [0, 20, 30, 60, STEPS], [0.7, 0.7, 0.2, 0.7, 0.55]))
RISES = tuple(np.linspace(0.18, 0.26, STEPS))
# What a run with this cause shows, as constants or as (first, last).
SHOWN = {
    "old_weights": grown(k3=0.5) | {"training/off_policy/trajectory_staleness/mean": 8.0},
    "lost_sync": grown(k3=0.5) | arrived(0.0, 0.0, spread=0.0),
    "partial_sync": grown(k3=0.2) | arrived(0.1, 0.6),
    "scaled_update": grown(k3=0.2) | arrived(0.45, 0.55, spread=0.01),
    "two_precisions": gap(5e-4) | routers(0.997, 0.994),
    "quantized": gap(0.05) | routers(0.93, 0.88) | by_probability(0.3, 0.4, 0.5, 0.4, 0.1),
    "router_bias": gap(0.1) | routers(0.83, 0.84) | {"router/gap_differs": 0.5, "router/gap_equal": 0.01},
    "wrong_weights": gap(1.5) | routers(1.0, 0.45),
    "positions": gap(5.0, most=1.4) | routers(0.5, 0.45),
    "leak": gap(0.6, size=0.6, most=11) | routers(0.97, 0.95),
    "respelled": gap(0.3, size=0.1, most=12) | routers(0.993, 0.993),
    "wrong_routes": gap(0.1) | routers(1.0, 1.0, own=0.36),
    "temperature": gap(0.012, size=0.05) | EQUAL | by_probability(1.2, 1.0, 0.0, -0.9, -0.8),
    "truncated": gap(4e-4, k1=0.02, size=0.02) | EQUAL | by_probability(0.9, 0.9, 0.9, 0.8, 0.7, k3=4e-4),
    "raw_log_probs": gap(0.01, k1=-0.02, size=0.05) | EQUAL | by_probability(1.2, 1.0, 0.1, -0.9, -0.8),
    "learning_rate": SMALL | {"critic/score/mean": (0.6, 0.01)},
    "entropy_collapse": SMALL | {"critic/score/mean": (0.2, 0.2), "actor/entropy": (0.8, 0.02)},
    "hacked_reward": SMALL | {"response_length/mean": (17.0, 47.0), "response_length/clip_ratio": 0.97},
    "noisy_reward": SMALL | {"critic/score/mean": (0.5, 0.48), "actor/entropy": (0.3, 0.6)},
    "no_signal": SMALL | {"critic/advantages/max": 0.0, "actor/grad_norm": 0.0, "critic/score/mean": (0.5, 0.5)},
}


def series(shown, steps=STEPS, first=1):
    """Returns readings of each metric, with 2 % noise: one level, from one level to another, or a given series."""
    draw = np.random.default_rng(0)
    found = {}
    for name, level in (LEARNS | shown).items():
        course = level if isinstance(level, tuple) else (level, level)
        share = np.clip(np.arange(steps) / (steps / 3), 0, 1)
        noise = 1 + 0.02 * draw.standard_normal(steps)
        values = np.interp(share, [0, 1], course) if len(course) == 2 else np.array(course[:steps])
        values = 1 - (1 - values) * noise if name.startswith(("router/agr", "router/own")) else values * noise
        found[name] = [*zip(range(first, first + steps), values, strict=True)]
    return found


@pytest.mark.parametrize("cause", CAUSES)
def test_the_marks_of_a_cause_name_it_first(cause):
    found = find_suspects(series(SHOWN[cause]))
    assert [suspect.cause.name for suspect in found[:1]] == [cause]
    assert found[0].points >= LEAST and found[0].speaks_for and found[0].cause.check
    assert found[0].reasons and "check" in found[0].advice


MOVED = np.interp(np.arange(STEPS), [0, STEPS / 3], [0.02, 1.0])
ONE_LOOK = np.where(np.arange(STEPS) == 50, 2.5, 1.0)
# Marks that distinguish similar causes: what the run shows, and which comes first; "" for none.
ALIKE = {
    "a few percent of each update arrive, other shares at other tokens": (
        grown(k3=1.5) | arrived(0.0, 0.09, spread=0.05) | {"sync/moved": (0.02, 1.0)},
        "partial_sync",
    ),
    "nothing but noise, which is the same in nats": (
        grown(k3=1.5) | arrived(0.0, 0.09) | {"sync/moved": (0.02, 1.0), "sync/arrived_spread": tuple(1e-3 / MOVED)},
        "lost_sync",
    ),
    "noise in each share, but the same scores as at the check before": (
        grown(k3=1.5) | arrived(0.0, 0.06, spread=0.3) | {"sync/moved": (0.02, 1.0), "sync/followed": 0.0},
        "lost_sync",
    ),
    "scores that follow": (
        grown(k3=1.5) | arrived(0.0, 0.06, spread=0.3) | {"sync/moved": (0.02, 1.0), "sync/followed": 0.5},
        "partial_sync",
    ),
    "more than an update in one look of a hundred, and longer and longer answers": (
        grown(k3=0.013)
        | {"sync/arrived_low": tuple(0.6 * ONE_LOOK), "sync/arrived_high": tuple(1.4 * ONE_LOOK)}
        | routers(0.99, 0.99)
        | {"response_length/mean": (17.0, 47.0), "response_length/clip_ratio": 0.97},
        "hacked_reward",
    ),
    "rounding that grows past 0.01 as answers do": (
        {name: (value * 0.1, value) for name, value in gap(0.013, size=0.03, most=8).items()}
        | routers(0.992, 0.99)
        | {"response_length/mean": (17.0, 47.0), "response_length/clip_ratio": 0.97},
        "hacked_reward",
    ),
    "rounding that is a third of what old rollouts make": (
        {name: (value * 0.1, value) for name, value in gap(0.016, size=0.02, most=13).items()}
        | {
            "vllm_kl/log_ratio_abs_mean": (0.36 * 0.02, 0.02),
            "training/off_policy/trajectory_staleness/mean": (0.0, 6.0),
        }
        | grown_apart(0.97, 0.92),
        "old_weights",
    ),
    "rounding of a policy that is nearly certain, so that few tokens have it, and a reward that fell": (
        gap(0.008, k1=0.0088, size=0.018, most=13)
        | routers(0.9976, 0.9961)
        | alike(0.55, 0.018)
        | {"critic/score/mean": (0.6, 0.01)},
        "learning_rate",
    ),
    "half of the gap at once, because the policy becomes certain, but not the routers' disagreement": (
        {name: (value / 2, value) for name, value in gap(0.004, size=0.006, most=14).items()}
        | arrived(1.2, 3.0)
        | grown_apart(0.94, 0.92, before=0.05),
        "scaled_update",
    ),
    "more than all of an update arrives": (grown(k3=0.05) | arrived(1.15, 2.0), "scaled_update"),
    "one share of the first update, whose interval one token has made wide": (
        grown(k3=0.1) | arrived(0.0, 0.6, spread=0.004),
        "scaled_update",
    ),
    "one share of the first update, other ones of later ones": (
        grown(k3=0.1) | arrived(0.29, 0.31) | {"sync/arrived_spread": (0.002, 0.3)},
        "scaled_update",
    ),
    "a narrow interval, with other shares at other tokens": (grown(k3=0.1) | arrived(0.29, 0.31), "partial_sync"),
    "log-probs of another temperature beside rounding of the same size, so that k1 is 0": (
        gap(0.005, k1=-1e-5, size=0.03) | routers(0.993, 0.993) | by_probability(1.1, 0.9, 0.3, -0.2, -0.2),
        "raw_log_probs",
    ),
    "a cut beside rounding, so that a tenth of the gap is to the other side": (
        gap(0.002, k1=0.012, size=0.015, most=8) | routers(0.993, 0.993),
        "truncated",
    ),
    "a gap that was a tenth as large before the updates": (
        {name: (value * 0.1, value) for name, value in gap(0.07).items()} | arrived(0.1, 0.6) | grown_apart(0.93, 0.88),
        "partial_sync",
    ),
    "a leak whose gap grows twentyfold as the policy becomes certain": (
        {name: (value / 20, value) for name, value in gap(1.1, size=1.4, most=11).items()}
        | arrived(0.3, 4.0)
        | routers(0.98, 0.93)
        | alike(0.02, 1.4),
        "leak",
    ),
    "another last layer, beside rounding": (
        gap(0.5, size=0.6, most=3.5)
        | routers(0.995, 0.991)
        | alike(0.97, 0.6)
        | by_probability(1.1, 1.2, 0.9, 0.6, 0.2),
        "wrong_weights",
    ),
    "another last layer of a policy that is nearly certain": (
        gap(0.037, size=0.06, most=10) | EQUAL | by_probability(1.5, 1.7, 1.3, 0.0, -0.45),
        "wrong_weights",
    ),
    "a small change of the temperature, smaller than rounding at likely tokens": (
        gap(6e-4, size=0.003, most=12) | routers(0.9956, 0.991) | by_probability(-0.8, -0.5, -0.5, 0.8, 0.1, k3=6e-4),
        "temperature",
    ),
    "a lower temperature in training, beside rounding to few bits": (
        gap(0.046, size=0.2) | routers(0.966, 0.966) | by_probability(-0.8, -0.5, 0.86, 1.0, 1.0, k3=0.046),
        "temperature",
    ),
    "rounding to few bits, as much of it in the first layer": (
        gap(0.05) | routers(0.88, 0.89) | alike(0.16, 0.05**0.5) | {"router/gap_differs": 1.0},
        "quantized",
    ),
    "a fiftieth of the tokens are other ones": (
        gap(0.34, size=0.35, most=7.5) | routers(0.977, 0.977) | alike(0.6, 0.35),
        "respelled",
    ),
    "as large a gap of tokens that were sampled": (
        gap(0.4, size=0.48, most=11) | routers(0.985, 0.985) | alike(0.01, 0.48),
        "leak",
    ),
    "a random reward beside a small learning rate": (
        SMALL | {"critic/score/mean": (0.49, 0.48), "actor/entropy": (0.25, 0.23)} | batch(0.0, 1.0),
        "noisy_reward",
    ),
    "a reward that is not random, and not learnt": (
        SMALL | {"critic/score/mean": (0.49, 0.44), "actor/entropy": (0.25, 0.23)} | batch(0.1, 0.9, answers=2048),
        "",
    ),
    "a reward that fell and came back, under large steps": (
        SMALL | {"critic/score/mean": FELL, "actor/ppo_kl": 0.07},
        "learning_rate",
    ),
    "the same fall without them": (SMALL | {"critic/score/mean": FELL, "actor/ppo_kl": 0.005}, ""),
    "entropy that falls as a noisy task is learnt": (
        SMALL | {"critic/score/mean": (0.71, 0.79), "actor/entropy": (0.17, 0.055)} | batch(0.0, 1.0),
        "",
    ),
    "entropy that falls to a seventh while the reward rises a little": (
        SMALL | {"critic/score/mean": RISES, "actor/entropy": (0.97, 0.14)} | batch(0.0, 0.5),
        "entropy_collapse",
    ),
    "entropy that falls while the reward does not rise": (
        SMALL | {"critic/score/mean": (0.28, 0.27), "actor/entropy": (0.5, 0.05)} | batch(0.0, 1.0),
        "entropy_collapse",
    ),
}


@pytest.mark.parametrize(("shown", "cause"), ALIKE.values(), ids=ALIKE)
def test_causes_that_look_alike_are_told_apart(shown, cause):
    found = find_suspects(series(shown))
    assert [suspect.cause.name for suspect in found[:1]] == [cause] * bool(cause)


def test_the_scatter_of_the_reward_is_that_of_its_draws():
    """Compares with draws: coin tosses give 1, equally likely values a third, prompts of different difficulty more."""
    draw, answers = np.random.default_rng(0), 64

    def scatter(rewards):  # [steps, answers]
        steps = np.arange(len(rewards)) + 1.0
        named = {
            "critic/score/mean": rewards.mean(1),
            "critic/score/max": np.ones(len(rewards)),
            "critic/score/min": np.zeros(len(rewards)),
            "router/tokens": np.full(len(rewards), 17.0 * answers),
            "response_length/mean": np.full(len(rewards), 17.0),
        }
        return Marks({name: np.stack([steps, values], 1) for name, values in named.items()}).reward_scatter

    even = draw.random((4000, answers))
    assert scatter((even < 0.3).astype(float)) == pytest.approx(1, rel=0.1)
    assert scatter(even) == pytest.approx(1 / 3, rel=0.1)
    hard = draw.random((4000, 8)).repeat(8, 1)  # chances of 8 prompts with 8 answers each: 1/2 + 8 / 12 times as much
    assert scatter((even < hard).astype(float)) == pytest.approx(4 * (1 / 6 + 8 / 12), rel=0.1)
    assert scatter(even[:50]) is None, "too few readings"


@pytest.mark.parametrize("updates", [1, 4])
def test_the_scatter_of_the_reward_is_of_all_answers_of_a_step(updates):
    """In separate_async, verl averages router/tokens over a step's local updates, and logs the rest over all of them.

    Half of the trajectories are compared, and responses have tokens of tools.
    """
    draw, answers = np.random.default_rng(0), 64 * updates
    generated, of_tools, prompt = (draw.integers(5, 30, (4000, answers)) for _ in range(3))
    tosses = (draw.random((4000, answers)) < 0.3).astype(float)
    named = {
        "critic/score/mean": tosses.mean(1),
        "critic/score/max": tosses.max(1),
        "critic/score/min": tosses.min(1),
        "router/tokens": generated[:, ::2].reshape(4000, updates, 32).sum(2).mean(1),
        "response_length/mean": (generated + of_tools).mean(1),
        "prompt_length/mean": prompt.mean(1),
        "perf/total_num_tokens": (generated + of_tools + prompt).sum(1),
    }
    steps = np.arange(4000) + 1.0
    marks = Marks({name: np.stack([steps, values], 1) for name, values in named.items()})
    assert marks.reward_scatter == pytest.approx(1, rel=0.1)


def test_most_tokens_that_move_to_one_side_are_seen_on_either_side():
    """Compares with draws: of the bucket 0.1-0.5, all tokens move a little, or a few move far."""
    draw, shape = np.random.default_rng(0), (80, 200)
    noise = 0.01 * draw.standard_normal(shape)
    bulk, few = noise + 0.02, noise + 3 * (draw.random(shape) < 0.01)

    def moves(log_k):
        readings = {"0.1-0.5": log_k} | {bucket: noise for bucket in ("0.01-0.1", "0.5-0.9", "0.9-")}
        named = {f"vllm_kl/k1/prob/{bucket}": -values.mean(1) for bucket, values in readings.items()}
        named |= {f"vllm_kl/k3/prob/{bucket}": (np.expm1(each) - each).mean(1) for bucket, each in readings.items()}
        return Marks({name: [*enumerate(values, 1)] for name, values in named.items()}).moves_in_bulk

    assert moves(bulk) and moves(-bulk)
    assert not moves(noise) and not moves(few) and not moves(-few)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES.values() if cause.override], ids=lambda cause: cause.name)
def test_what_to_try_can_be_pasted_behind_a_launch(compose, cause):
    compose(*shlex.split(cause.override))


def test_every_cause_is_judged():
    assert list(JUDGES) == list(CAUSES)


def test_a_run_that_learns_with_equal_engines_has_no_suspect():
    assert find_suspects(series(SMALL | EQUAL)) == []
    assert find_suspects(series({})) == [], "nothing but a reward that rises"
    assert find_suspects({}) == []


def test_a_few_readings_say_nothing():
    shown = series(SHOWN["truncated"], steps=7)
    assert find_suspects(shown) == []


def test_rounding_is_harmless_as_long_as_it_is_small():
    (first, *_) = find_suspects(series(SHOWN["two_precisions"]))
    assert first.harmless
    (first, *_) = find_suspects(series(SHOWN["quantized"]))
    assert not first.harmless


APART = gap(0.0155, size=0.05) | routers(0.985, 0.975)  # rounding of more than most sound runs have


@pytest.mark.parametrize(
    ("level", "harmless"),
    [
        ({}, False),
        ({"guard/level": 0.002}, False),
        ({"guard/level": 0.015}, False),
        ({"guard/level": 0.02}, True),  # of Nemotron-3
        ({"guard/level": float(np.float32(0.02))}, True),  # as TensorBoard keeps it
        ({"guard/level": 0.031}, False),  # made from this run's own first steps
    ],
)
def test_rounding_below_the_published_level_of_the_model_is_harmless(level, harmless):
    shown = series(APART) | {name: [(step, k3) for step in range(1, STEPS + 1)] for name, k3 in level.items()}
    (first, *_) = find_suspects(shown)
    assert (first.cause.name, first.harmless) == ("quantized", harmless)
    diagnosis = Diagnosis()
    events = [diagnosis.add(step, {name: dict(found)[step] for name, found in shown.items()}) for step in range(1, 101)]
    assert any(events) is not harmless and (diagnosis.look() is None) is harmless


def test_a_gap_below_the_published_level_does_not_hide_what_is_wrong_with_the_learning():
    dead = series(APART | {"critic/score/mean": (0.6, 0.01)})
    published = {"guard/level": [(step, 0.02) for step in range(1, STEPS + 1)]}
    assert find_suspects(dead)[0].cause.name == "quantized"
    assert [suspect.cause.name for suspect in find_suspects(dead | published)] == ["learning_rate", "quantized"]


@pytest.mark.parametrize("cause", [cause.name for cause in CAUSES.values() if not cause.of_gap])
def test_harmless_rounding_does_not_hide_what_is_wrong_with_the_learning(cause):
    assert [suspect.cause.name for suspect in find_suspects(series(SHOWN["two_precisions"]))] == ["two_precisions"]
    first, second = find_suspects(series(SHOWN[cause] | SHOWN["two_precisions"]))
    assert (first.cause.name, second.cause.name, second.harmless) == (cause, "two_precisions", True)


def without(shown, setting):
    """Returns the run without the metrics that a setting measures; without `metrics`, only verl's own are left."""
    left_out = {
        "stability.router_agreement=true": ("router/",),
        "stability.sync_canary.trajectories=8": ("sync/",),
        "stability.breakdown=true": ("vllm_kl/k1/prob/", "vllm_kl/k3/prob/"),
        "stability.metrics=true": ("vllm_kl/", "router/", "sync/"),
    }[setting]
    plain = {name: shown[name] for name in ("vllm_kl/k1", "vllm_kl/k3") if name in shown}  # rollout_corr/* in verl
    left = {name: found for name, found in shown.items() if not name.startswith(left_out)}
    return left | (plain if setting == "stability.metrics=true" else {})


@pytest.mark.parametrize(
    ("cause", "setting", "first_two"),
    [  # from verl's own metrics alone, most causes of a gap look alike
        ("temperature", "stability.metrics=true", {"temperature", "two_precisions"}),
        ("quantized", "stability.router_agreement=true", {"quantized", "two_precisions"}),
        ("leak", "stability.router_agreement=true", {"leak", "respelled"}),
        ("lost_sync", "stability.sync_canary.trajectories=8", {"lost_sync", "partial_sync"}),
        ("temperature", "stability.breakdown=true", {"temperature", "wrong_weights"}),
    ],
)
def test_what_is_asked_for_decides_between_the_first_two(cause, setting, first_two):
    whole = series(SHOWN[cause])
    question = find_question(without(whole, setting))
    assert (question.setting, {question.first.name, question.second.name}) == (setting, first_two)
    assert question.first.title in question.sentence and question.second.title in question.sentence
    assert find_suspects(whole)[0].cause.name == cause


@pytest.mark.parametrize("cause", ["raw_log_probs", "learning_rate", "no_signal", "old_weights"])
def test_nothing_is_asked_for_where_verls_own_metrics_decide(cause):
    """verl's metrics name the planted cause."""
    plain = without(series(SHOWN[cause]), "stability.metrics=true")
    assert find_question(plain) is None
    (first, *_) = find_suspects(plain)
    assert (first.cause.name, first.question) == (cause, None)


@pytest.mark.parametrize("cause", CAUSES)
def test_what_is_logged_is_not_asked_for(cause):
    """No setting is asked for if its metrics are logged, whatever they show."""
    shown = gap(0.1) | EQUAL | by_probability(0.3, 0.4, 0.5, 0.4, 0.1) | arrived(0.9, 1.1) | SHOWN[cause]
    assert find_question(series(shown)) is None


def test_what_is_asked_for_can_be_pasted_behind_a_launch(compose):
    asked = set()
    for logged in ({"vllm_kl/k1": 0.02, "vllm_kl/k3": 0.02}, gap(0.02)):
        asked |= set(levels_not_logged(Marks(series(logged))))
    assert asked == {
        "stability.metrics=true",
        "stability.breakdown=true",
        "stability.router_agreement=true",
        "stability.sync_canary.trajectories=8",
    }
    for setting in asked:
        compose(setting)


def test_a_run_says_what_to_measure_with_the_cause():
    shown = without(series(SHOWN["leak"]), "stability.router_agreement=true")
    diagnosis = Diagnosis()
    for step in range(1, STEPS + 1):
        if event := diagnosis.add(step, {name: dict(found)[step] for name, found in shown.items()}):
            break
    assert "; stability.router_agreement=true would tell whether it is " in event.reason


@pytest.mark.parametrize(("routed", "preset"), [({}, "opsm"), (grown_apart(0.9, 0.9), "moe")])
def test_old_rollouts_get_the_preset_of_their_model(routed, preset):
    """docs/methods.md: `moe` for a mixture of experts, which has metrics of routers, and `opsm` for a dense model."""
    (first, *_) = find_suspects(series(SHOWN["old_weights"] | routed))
    assert first.cause.name == "old_weights" and f"; try stability={preset}" in first.sentence


def test_a_gap_that_comes_slowly_is_not_taken_for_a_lost_sync():
    """A run whose engines come apart step by step, as in IcePop's appendix."""
    steps = np.arange(STEPS)
    shown = series({})
    shown["vllm_kl/k3"] = [*zip(steps + 1, 1e-4 * np.exp(0.07 * steps), strict=True)]
    assert "lost_sync" not in [suspect.cause.name for suspect in find_suspects(shown)]


def test_a_resumed_run_does_not_know_what_its_gap_was_at_once():
    assert Marks(series(SHOWN["quantized"], first=51)).at_once is None
    assert Marks(series(SHOWN["quantized"])).at_once == pytest.approx(1, rel=0.05)


def test_a_short_run_without_a_warm_up_has_its_gap_from_its_first_update():
    sizes = [1e-7, 0.07, 0.09, 0.12, 0.15, 0.16, 0.18, 0.19, 0.18]
    readings = [*zip(range(1, 10), sizes, strict=True)]
    marks = Marks({"vllm_kl/log_ratio_abs_mean": readings})
    assert marks.came_with_updates and marks.at_once == pytest.approx(1e-7 / 0.15)
    assert Marks({"vllm_kl/log_ratio_abs_mean": [(step, 0.1) for step, _ in readings]}).at_once == 1


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_any_missing_metric_is_borne(shown):
    whole = series(shown)
    for name in whole:
        find_suspects({other: found for other, found in whole.items() if other != name})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinite ratios
@pytest.mark.parametrize("value", [0.0, 1e-200, 1e200])
@pytest.mark.parametrize("cause", ["quantized", "respelled", "temperature", "partial_sync", "noisy_reward"])
def test_any_size_of_a_metric_is_borne(cause, value):
    whole = series(SHOWN[cause] | batch(0.0, 1.0) | alike(0.5, 0.1))
    for name, found in whole.items():
        find_suspects(whole | {name: [(step, value) for step, _ in found]})


def test_shares_of_the_gap_are_at_most_one_whatever_the_gap_is():
    marks = Marks(series(gap(0.02, size=1e-200) | routers(0.98, 0.97) | alike(0.5, 0.1)))
    assert marks.leaning == marks.gap_alike == 1 and marks.few_tokens == np.inf


def test_a_run_names_a_cause_once_after_some_looks():
    diagnosis, events = Diagnosis(), []
    shown = series(SHOWN["truncated"])
    for step in range(1, STEPS + 1):
        metrics = {name: dict(found)[step] for name, found in shown.items()}
        events.append(diagnosis.add(step, metrics | {"vllm_kl/k3/turn/00": float("nan")}))
    (event,) = filter(None, events)
    assert (event.rule, event.action) == ("diagnosis", "warn")
    assert event.step <= 10 + LOOKS * LOOK_EVERY and "cuts its distribution" in event.reason
    assert diagnosis.look().cause.name == diagnosis.reported == "truncated"


def test_harmless_rounding_is_not_told():
    diagnosis = Diagnosis()
    shown = series(SHOWN["two_precisions"])
    for step in range(1, STEPS + 1):
        assert diagnosis.add(step, {name: dict(found)[step] for name, found in shown.items()}) is None
    assert diagnosis.look() is None and find_suspects(shown)[0].cause.name == "two_precisions"
