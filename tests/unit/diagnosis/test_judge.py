"""The two states of a run, and the diagnosis while it runs."""

import json
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.causes import Cause
from verl_ext.diagnosis.findings.registry import RULES, find_all, finding
from verl_ext.diagnosis.judge import (
    FIRST_KEPT,
    LAST_KEPT,
    LOOK_EVERY,
    LOOKS,
    RunningDiagnosis,
    judge,
    judge_engines,
    judge_learning,
)
from verl_ext.diagnosis.series import Readings

STEPS = 60
NAN, INF = math.nan, math.inf
AT = np.arange(1, STEPS + 1)
NOISE = 0.01 * np.random.default_rng(4).normal(size=STEPS)


def made(metrics):
    """Returns the readings of a run: each metric a list from step 1 on, or one value for all steps."""
    lists = {name: [v] * STEPS if np.isscalar(v) else list(v) for name, v in metrics.items()}
    return Readings.of_pairs({name: list(enumerate(found, start=1)) for name, found in lists.items()})


def course(*levels):
    """Returns a noisy course over the whole run, straight between these levels."""
    return np.interp(AT, np.linspace(1, STEPS, len(levels)), levels) + NOISE


def reward(values, **more):
    return {"critic/score/mean": values, **more}


def learning(metrics):
    run = made(metrics)
    return judge_learning(run, find_all(run))


def engines(metrics):
    run = made(metrics)
    return judge_engines(run, find_all(run))


# ----------------------------------------------------------------------------------------------------------- learning

RISES, HOLDS, FALLS = course(0.2, 0.5, 0.7, 0.8), course(0.5, 0.5), course(0.2, 0.8, 0.8, 0.5)
DIES = course(0.2, 0.8, 0.8, 0.1, 0.1)
RANGE = {"critic/score/max": 1.0, "critic/score/min": 0.0}
LEARNING = {  # what the run logs -> state, and the first and the last step at which it may have begun
    "the reward rises": (reward(RISES), "learns", None),
    "it reaches the ceiling and stays there": (
        reward(np.minimum(RISES + 0.4, 1), **{"critic/score/max": 1.0, "critic/score/min": [0.0] * 50 + [1.0] * 10}),
        "learns",
        None,
    ),
    "it rises by less than is sure": (reward(course(0.5, 0.513)), "weak", None),
    "it stands": (reward(HOLDS), "flat", None),
    "it falls": (reward(FALLS), "falling", (30, 60)),
    "it falls from the start": (reward(course(0.8, 0.5, 0.5)), "falling", (1, 40)),
    "it falls and comes back in part": (reward(course(0.2, 0.8, 0.8, 0.2, 0.55)), "collapsed", (25, 50)),
    "it dies": (reward(DIES), "collapsed", (25, 50)),
    "a negative reward dies": (reward(DIES - 1.2), "collapsed", (25, 50)),
    "all answers get the same": (reward(0.0, **{"critic/score/max": 0.0, "critic/score/min": 0.0}), "dead", (1, 1)),
    "all answers get the same, and nothing logs their range": (reward(0.0), "dead", (1, 1)),
    "no gradient, and the reward stands": (reward(0.25, **{"actor/grad_norm": 0.0}), "dead", (1, 1)),
    "no gradient from step 31 on, and the reward stands": (
        reward([0.5, 0.51] * 15 + [0.5] * 30, **RANGE, **{"actor/grad_norm": [0.5] * 30 + [0.0] * 30}),
        "dead",
        (31, 31),
    ),
    "no gradient that is logged, and the reward rises": (reward(RISES, **{"actor/grad_norm": 0.0}), "learns", None),
    "the entropy explodes": (reward(HOLDS, **{"actor/entropy": [0.3] * 40 + [4.0] * 20}), "unstable", (41, 41)),
    "the policy leaves the reference": (reward(HOLDS, **{"actor/kl_loss": 1e-3 * 1.3**AT}), "unstable", (20, 60)),
    "answers explode": (
        reward(HOLDS, **{"response_length/mean": [500.0] * 40 + [4000.0] * 20}),
        "unstable",
        (41, 41),
    ),
    "the gradient explodes": (reward(HOLDS, **{"actor/grad_norm": [0.5] * 30 + [5000.0] * 30}), "unstable", (31, 31)),
    "the policy moves too far in a step": (
        reward(HOLDS, **{"actor/ppo_kl": [1e-3] * 40 + [2.0] * 20}),
        "unstable",
        (41, 50),
    ),
    "the gradient is no number": (reward(HOLDS, **{"actor/grad_norm": [0.5] * 40 + [NAN] * 20}), "unstable", (41, 41)),
    "the loss is infinite": (reward(RISES, **{"actor/pg_loss": [0.1] * 50 + [INF] * 10}), "unstable", (51, 51)),
    "one gradient is no number": (reward(RISES, **{"actor/grad_norm": [0.5, NAN] + [0.5] * 58}), "learns", None),
    "an unstable run that dies": (reward(DIES, **{"actor/entropy": [0.3] * 40 + [4.0] * 20}), "collapsed", (25, 50)),
    "no reward": ({"actor/entropy": 0.3}, "too short", None),
    "nothing": ({}, "too short", None),
    "four rewards": (reward([0.1, 0.5, 0.2, 0.9]), "too short", None),
    "four rewards that are numbers": (reward([0.1, 0.5, NAN, 0.2, INF, 0.9]), "too short", None),
}


@pytest.mark.parametrize(("now", "state"), [(0.8, "flat"), (0.76, "flat"), (0.68, "falling")])
def test_a_fall_by_more_than_noise_is_not_called_noise(now, state):
    found = learning(reward(np.where(AT <= STEPS / 2, 0.8, now) + NOISE))
    assert found.state == state and ("no more than noise" in found.text) == (now == 0.8)


@pytest.mark.parametrize(("values", "word"), [(RISES, "rose"), (HOLDS, "holds")])
def test_a_reward_beside_what_explodes_is_told_as_it_moved(values, word):
    assert f"the reward {word}" in learning(reward(values, **{"actor/entropy": [0.3] * 40 + [4.0] * 20})).text


# ------------------------------------------------------------------------------------------------------------ engines


def gap(values):
    return {"vllm_kl/k3": values}


JITTER = np.exp(10 * NOISE)
SIZE, DIFFERENCE, K1 = "vllm_kl/log_ratio_abs_mean", "vllm_kl/prob_diff_mean", "vllm_kl/k1"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
GROWS = 1e-4 * np.exp(0.12 * AT) * JITTER  # to 0.13
ENGINES = {
    "nothing compares them": ({}, "unmeasured", None),
    "only the reward is logged": (reward(RISES), "unmeasured", None),
    "rounding": (gap(1e-3 * JITTER), "close", None),
    "no gap": (gap(0.0), "close", None),
    "k1 of rounding": ({K1: 1e-3 * JITTER}, "close", None),
    "a k1 that is negative": ({K1: -0.1 * JITTER}, "apart", None),
    "more than rounding": (gap(0.05 * JITTER), "apart", None),
    "log-probabilities apart": ({SIZE: 0.2 * JITTER}, "apart", None),
    "probabilities apart": ({DIFFERENCE: 0.1 * JITTER}, "apart", None),
    "probabilities apart, where k3 is not": (gap(1e-3 * JITTER) | {DIFFERENCE: 0.1 * JITTER}, "apart", None),
    "a correlation": ({CORRELATION: 0.9}, "apart", None),
    "a correlation of sound engines": ({CORRELATION: 0.999}, "close", None),
    "no correlation": ({CORRELATION: 0.1}, "broken", None),
    "more than k3 of 1": (gap(30.0 * JITTER), "broken", None),
    "log-probabilities far apart": ({SIZE: 5.0 * JITTER}, "broken", None),
    "not a number": (gap([1e-3] * 40 + [NAN] * 20), "broken", (41, 41)),
    "infinite": ({K1: [1e-3] * 40 + [INF] * 20}, "broken", (41, 41)),
    "never a number": (gap(NAN), "broken", (1, 1)),
    "it grows": (gap(GROWS), "growing", (20, 60)),
    "it grows below rounding": (gap(GROWS / 100), "growing", (20, 60)),
    "it grows past 1": (gap(GROWS * 100), "broken", (20, 60)),
    "it jumps": (gap([1e-3] * 40 + [0.2] * 20), "growing", (41, 41)),
    "it has just jumped": (gap([1e-3] * 57 + [0.2] * 3), "growing", (58, 58)),
    "it jumps with the first sync": (gap([1e-5] * 3 + [0.2] * 57), "growing", (4, 4)),
    "it jumps and comes back": (gap([1e-3] * 30 + [0.2] * 5 + [1e-3] * 25), "close", None),
    "one reading": (gap([0.05]), "apart", None),
    "one reading is no number": (gap([1e-3, NAN] + [1e-3] * 58), "close", None),
}


EITHER = [(judged, *case) for judged, cases in ((learning, LEARNING), (engines, ENGINES)) for case in cases.values()]


@pytest.mark.parametrize(("judged", "metrics", "state", "steps"), EITHER, ids=[*LEARNING, *ENGINES])
def test_the_state_of_the_learning_and_of_the_engines(judged, metrics, state, steps):
    found = judged(metrics)
    assert found.state == state
    assert found.text and "\n" not in found.text and "nan" not in found.text
    if steps is None:
        assert found.step is None
    else:
        assert steps[0] <= found.step <= steps[1]


# ----------------------------------------------------------------------------------- neither depends on the other one

OF_THE_GAP = (
    "vllm_kl/k3",
    K1,
    SIZE,
    DIFFERENCE,
    CORRELATION,
    "vllm_kl/k3/lag/0",
    "vllm_kl/sequence_gap_max",
    "router/agreement",
    "router/own_agreement",
    "sync/arrived_low",
    "sync/arrived_high",
)
OF_LEARNING = (
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "actor/entropy",
    "actor/grad_norm",
    "actor/kl_loss",
    "actor/pg_loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "val-core/gsm8k/acc/mean@1",
)
levels = st.sampled_from([0.0, 1e-9, 1e-3, 0.05, 0.9, 1.0, 30.0, 1e6, -0.1, NAN, INF])
turns = st.tuples(levels, levels, st.integers(0, STEPS))  # from one level to another, and after which step


def turned(more):
    return {name: [before] * after + [then] * (STEPS - after) for name, (before, then, after) in more.items()}


@given(st.sampled_from(list(LEARNING)), st.dictionaries(st.sampled_from(OF_THE_GAP), turns))
@example("the policy moves too far in a step", {K1: (1.5, 1.5, 0)})
def test_the_learning_does_not_depend_on_the_gap(case, more):
    metrics = LEARNING[case][0]
    with_gap, without = learning(metrics | turned(more)), learning(metrics)
    assert (with_gap.state, with_gap.step) == (without.state, without.step)


@given(st.sampled_from(list(ENGINES)), st.dictionaries(st.sampled_from(OF_LEARNING), turns))
@example("not a number", {"actor/grad_norm": (0.5, NAN, 40)})
def test_the_engines_do_not_depend_on_the_learning(case, more):
    metrics = {name: found for name, found in ENGINES[case][0].items() if name not in OF_LEARNING}
    with_learning, without = engines(metrics | turned(more)), engines(metrics)
    assert (with_learning.state, with_learning.step) == (without.state, without.step)


def test_a_judgement_has_both_states_and_what_speaks_for_them():
    run = made(reward(DIES, **gap([1e-3] * 40 + [0.2] * 20), **{"router/agreement": 0.9}))
    found = judge(run)
    assert (found.learning.state, found.engines.state, found.moe) == ("collapsed", "growing", True)
    assert found.learning == judge_learning(run, found.findings) and found.engines == judge_engines(run, found.findings)
    assert found.has("reward_fell.collapsed") and found.has("x.y", "gap_jumped.later")
    assert not found.has("reward_fell.falls", "reward_fell")
    assert not judge(made(reward(RISES))).moe


def test_causes_to_choose_from_can_be_given():
    mine = Cause("mine", "Mine", "gap", "it", shows={"gap_level": {"apart": "always"}})
    assert [suspect.cause.name for suspect in judge(made(gap(0.05)), [mine]).suspects] == ["mine"]
    assert judge(made(gap(1e-3)), [mine]).first is None


def test_where_all_routers_agree_a_cause_is_behind_them_and_in_no_layer():
    agree = {name: 1.0 for name in ("router/agreement", "router/own_agreement", "router/agreement/layer_00")}
    run = reward(RISES) | gap(0.03 * JITTER) | {K1: 0.03 * JITTER} | agree
    names = BUCKETS["prob"]
    tilted = {f"vllm_kl/k1/prob/{name}": 0.12 * (1 if at < len(names) / 2 else -1) for at, name in enumerate(names)}
    tilted |= {f"vllm_kl/k3/prob/{name}": 0.02 for name in names}
    assert judge(made(run)).has("routers_agree.everywhere")
    assert not {"wrong_weights", "two_precisions"} & {each.cause.name for each in judge(made(run)).suspects}
    assert judge(made(run | tilted)).first.cause.name == "temperature"


def test_harmless_rounding_is_no_first_cause():
    rounding = Cause("r", "R", "gap", "it", harmless_if_close=True, shows={"gap_spike": {"none": "always"}})
    found = judge(made(gap(1e-3)), [rounding])
    assert [suspect.cause.name for suspect in found.suspects] == ["r"] and found.first is None
    assert judge(made(gap(0.05)), [rounding]).first.cause.name == "r"


# -------------------------------------------------------------------------------------------------- while the run runs

DEAD = {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/score/min": 0.0, "actor/grad_norm": 0.0}


def follow(metrics_of_step, steps=STEPS):
    """Returns the diagnosis after these steps, and what it reported: (step, cause)."""
    diagnosis, told = RunningDiagnosis(), []
    for step in range(1, steps + 1):
        if (suspect := diagnosis.add(step, metrics_of_step(step))) is not None:
            told.append((step, suspect.cause.name))
    return diagnosis, told


def learns_until(last, then):
    """Returns the metrics of a run that learns up to this step."""
    return lambda step: (
        {"critic/score/mean": float(RISES[step - 1]), **RANGE, "actor/grad_norm": 0.5, **gap(1e-3)}
        | (then if step > last else {})
    )


def test_a_sound_run_names_no_cause():
    diagnosis, told = follow(learns_until(STEPS, {}))
    assert told == [] and diagnosis.look() is None and diagnosis.reported == ""


class Scripted(RunningDiagnosis):
    """A diagnosis whose looks find these causes, "" for none."""

    def __init__(self, names):
        super().__init__()
        self.names = iter(names)

    def look(self):
        name = next(self.names)
        suspect = judge(made(DEAD)).suspects[0]
        return replace(suspect, cause=Cause(name, name, "run", "it")) if name else None


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ("aaa", [(3, "a")]),
        ("aa", []),
        ("aabaa", []),
        ("aa aa", []),
        ("aaaaaa", [(3, "a")]),
        ("aaabbb", [(3, "a"), (6, "b")]),
        ("aaabaaa", [(3, "a")]),
        ("aaa   aaa", [(3, "a")]),  # it was named already
        ("aaabbbaaa", [(3, "a"), (6, "b"), (9, "a")]),
        ("   ", []),
    ],
)
def test_a_cause_is_named_after_looks_in_a_row_and_again_only_if_it_changed(looks, told):
    assert LOOKS == 3
    diagnosis = Scripted([name.strip() for name in looks])
    named = {step: diagnosis.add(step, {"x": 1.0}) for step in range(1, LOOK_EVERY * len(looks) + 1)}
    assert [(step / LOOK_EVERY, each.cause.name) for step, each in named.items() if each] == told


@pytest.mark.parametrize(
    "odd",
    [
        {"note": "text", "list": [1.0], "none": None, "flag": True},
        {"critic/score/std": NAN, "timing_s/step": INF, "response_length/mean": -INF},
        {"vllm_kl/k3": np.float64(1e-3), "vllm_kl/k1": 0, "actor/lr": 3},
    ],
    ids=["no numbers", "not finite", "other numbers"],
)
def test_odd_metrics_do_not_stop_the_run(odd):
    _, told = follow(lambda step: DEAD | odd)
    assert "no_signal" in [name for _, name in told]


@given(st.lists(st.dictionaries(st.sampled_from([*OF_THE_GAP, *OF_LEARNING, "mine"]), levels), max_size=30))
def test_a_run_is_followed_whatever_it_logs(rows):
    diagnosis, _ = follow(lambda step: rows[step - 1], steps=len(rows))
    assert diagnosis.look() is None or diagnosis.look().speaks_for


def test_a_metric_that_is_no_longer_a_number_is_seen():
    _, told = follow(learns_until(30, gap(NAN)))
    ((step, name),) = told
    assert name == "rollout_not_finite" and 30 + (LOOKS - 1) * LOOK_EVERY < step <= 30 + (LOOKS + 1) * LOOK_EVERY


def test_a_finding_of_a_package_that_fails_is_left_out():
    with mock.patch.dict(RULES):
        finding("mine", "yes | no")(lambda run: ("yes", f"{1 / 0}"))
        with pytest.warns(UserWarning, match="mine"):
            found = find_all(made(DEAD))
        assert "mine" not in found and "reward_constant" in found


def test_memory_is_bounded_and_keeps_the_beginning():
    diagnosis = RunningDiagnosis()
    steps = FIRST_KEPT + LAST_KEPT + 1000
    for step in range(1, steps + 1):
        diagnosis.add(LOOK_EVERY * step + 1, {"actor/entropy": float(step), "mine": 1.0})  # never at a look
    assert {len(found) for found in diagnosis._readings.values()} == {FIRST_KEPT + LAST_KEPT}
    kept = [value for _, value in diagnosis._readings["actor/entropy"]]
    assert kept == [*range(1, FIRST_KEPT + 1), *range(steps - LAST_KEPT + 1, steps + 1)]


def test_a_resumed_diagnosis_goes_on_where_it_was():
    """A cause that was reported is not reported again."""
    whole, told = follow(lambda step: DEAD)
    assert told
    for stop in (LOOK_EVERY + 2, STEPS - 1):
        before, first = follow(lambda step: DEAD, stop)
        resumed = RunningDiagnosis()
        resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
        rest = [(step, each) for step in range(stop + 1, STEPS + 1) if (each := resumed.add(step, DEAD))]
        assert [*first, *((step, suspect.cause.name) for step, suspect in rest)] == told
        assert resumed.look() == whole.look()


@pytest.mark.parametrize("saved", [{}, [], {"first": {}}, {"first": {"a": 1}, "last": {}, "seen": [], "reported": ""}])
def test_another_state_is_refused(saved):
    with pytest.raises(ValueError, match="no readings"):
        RunningDiagnosis().load_state_dict(saved)


def test_names_of_other_frameworks_are_the_same_quantity():
    """A metric under two names is one series: the first name of the table that is finite."""
    diagnosis = RunningDiagnosis()
    diagnosis.add(1, {"rollout_corr/k3_kl": 0.5, "vllm_kl/k3": NAN})
    diagnosis.add(2, {"rollout_corr/k3_kl": 0.5, "vllm_kl/k3": 0.25})
    assert diagnosis._readings == {"vllm_kl/k3": [(1, 0.5), (2, 0.25)]}


def test_a_run_and_its_log_name_the_same_cause():
    """The diagnosis of a short run has all its readings, so that it finds what the report finds."""
    metrics = reward(DIES, **gap([1e-3] * 25 + [3.0] * 35), **{"actor/entropy": course(0.5, 0.4)})
    diagnosis, _ = follow(lambda step: {name: float(found[step - 1]) for name, found in metrics.items()})
    assert diagnosis.look() == judge(made(metrics)).first
