"""The verdict on a run's metrics: each state, each sentence with its numbers, and how often noise is taken for
trouble."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tests import ROOT
from tests.unit.report.made_runs import NAN, event, full, make, prefix
from verl_ext.base.causes import CAUSES
from verl_ext.guard.diagnosis import JUDGES, LEAST, Suspect
from verl_ext.guard.forecast import FEWEST
from verl_ext.guard.marks import Marks
from verl_ext.guard.state import Event
from verl_ext.report.load import read_run
from verl_ext.report.signals import fall_of
from verl_ext.report.verdict import LAST, TOO_FAR, judge_run

DATA = ROOT / "tests" / "support" / "data"
QUIET = [1e-3] * 40
RATE = "actor_rollout_ref.actor.optim.lr"
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"
MEASURING = ("stability.metrics=true", "stability.router_agreement=true")


def lines(verdict) -> tuple[str, ...]:
    """All sentences, from top to bottom."""
    return (verdict.sentence, *verdict.why, *verdict.evidence)


def said(metrics, *events) -> str:
    return unlabelled(" ".join(lines(judge_run(make(metrics, events)))))


def unlabelled(text: str) -> str:
    """Leaves out what each number is of, which test_now.py checks."""
    return re.sub(r" \((median|means?) of [^)]*\)", "", text)


def tried(verdict) -> list[str]:
    return [override.text for override in verdict.overrides]


def test_a_quiet_run_is_healthy():
    verdict = judge_run(full())
    assert verdict.state == "healthy" and tried(verdict) == []
    assert verdict.sentence == (
        "The run is healthy: the reward is 0.575 (median of the last 5) and began at 0.118 (median of the first 5); "
        "k3 is 0.00097 (median of the last 5), 103 times below the boundary of 0.1, and shows no growth that would "
        "reach it."
    )
    assert verdict.why == () and verdict.evidence == (
        "The correction dropped 1.1 % of the tokens in 120 steps; the most was 1.4 %, in step 111.",
        "The engines agree on 98.94 % of the experts (median of the last 5).",
        "2.5 % of the updates of 120 steps were skipped.",
    )


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"vllm_kl/k3": QUIET}, "k3 is 0.001, 100 times below the boundary of 0.1"),
        ({"vllm_kl/k3": QUIET, "guard/boundary": [0.01]}, "10 times below the boundary of 0.01"),
        ({"vllm_kl/k3": [1e-6] * 9}, "more than 1,000 times below the boundary"),
        ({"vllm_kl/k3": [0.0] * 9}, "k3 is 0, more than 1,000 times below"),
        ({"rollout_corr/k3_kl": QUIET}, "k3 is 0.001, 100 times below"),
        ({"vllm_kl/k3": QUIET, "guard/skipped": [1, 0, 0]}, "33.3 % of the updates of 3 steps were skipped."),
        (
            {"vllm_kl/k3": QUIET, "correction/dropped": [0.0] * 9},
            "The correction looked at every token of 9 steps and dropped none: none was outside its bounds.",
        ),
        (
            {"vllm_kl/k3": QUIET, "correction/dropped": [0.0, 0.002, 0.0002, NAN, *[0.0] * 8]},
            "The correction dropped 0.02 % of the tokens in 11 steps; the most was 0.2 %, in step 2.",
        ),
        ({"vllm_kl/k3": QUIET, "actor/grad_norm": [1, NAN, float("inf")]}, "was not a number in 2 steps."),
        (
            {"vllm_kl/k3": QUIET, "training/off_policy/trajectory_staleness/mean": [2.5] * 9},
            "Rollouts are 2.5 versions behind",
        ),
    ],
)
def test_what_a_healthy_run_is_told(metrics, sentence):
    assert judge_run(make(metrics)).state == "healthy" and sentence in said(metrics)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"vllm_kl/k3": [*QUIET, *[0.25] * LAST]}, "k3 is 0.25, past the boundary of 0.1."),
        ({"vllm_kl/k3": [0.2, 0.2]}, "k3 is 0.2, past the boundary of 0.1."),
        ({"vllm_kl/k3": QUIET, "guard/boundary": [1e-4]}, "k3 is 0.001, past the boundary of 0.0001"),
        ({"vllm_kl/prob_diff_mean": [0.07] * 9}, "Probabilities differ by 0.07 on average; past 0.05,"),
        ({"vllm_kl/k3": [*QUIET, NAN, NAN, 1e-3, NAN]}, "k3 was not a number in 3 of the last 5 steps."),
        ({"vllm_kl/k3": [*QUIET, *[float("inf")] * 4]}, "k3 was not a number in 4 of the last 5 steps."),
        ({"vllm_kl/k3": [NAN] * 9}, "k3 was not a number in 5 of the last 5 steps."),
        ({"vllm_kl/k3": QUIET, "guard/skipped": [0] * 34 + [1] * 6}, "60 % of the updates of the last 10 steps were"),
    ],
)
def test_past_the_boundary(metrics, sentence):
    verdict = judge_run(make(metrics))
    assert verdict.state == "past the boundary" and sentence in said(metrics)
    helping = [text for text in tried(verdict) if text not in MEASURING]
    assert helping[-1] == RESUME and "precision=fp16" in helping and tried(verdict)[: len(helping)] == helping


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            {"vllm_kl/k3": 1e-4 * np.exp(0.05 * np.arange(1, 41))},
            "k3 grows by 5.1 to 5.1 % per step, over the last 32 readings; at this pace it passes 0.1 in about 98",
        ),
        (
            {"vllm_kl/k3": [5e-5] * 30 + [4e-3] * 10},
            "k3 is 80 times what it was in the run's best stretch, and stays there: from 5e-05 to 0.004: did weight",
        ),
        (
            {"vllm_kl/k3": QUIET, "correction/dropped": [0.08] * 9},
            "The correction drops 8.0 % of the tokens; IcePop's authors",
        ),
        (
            {"vllm_kl/k3": QUIET, "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8},
            "The reward fell from 0.7 to 0.2.",
        ),
    ],
)
def test_drifting(metrics, sentence):
    assert judge_run(make(metrics)).state == "drifting" and sentence in said(metrics)


def test_a_rise_far_below_the_boundary_or_of_a_few_steps_is_none():
    for k3 in ([1e-6] * 30 + [1e-4] * 10, [5e-5] * 38 + [4e-3] * 2, [5e-5] * 10 + [4e-3] * 5):
        assert judge_run(make({"vllm_kl/k3": k3})).state == "healthy"


def test_a_reward_that_breaks_down_while_the_engines_agree_is_not_blamed_on_them():
    reward = [0.1] * 8 + [0.7] * 24 + [0.2] * 8
    verdict = judge_run(make({"vllm_kl/k3": QUIET, "critic/score/mean": reward}))
    assert unlabelled(verdict.sentence) == "The reward fell from 0.7 to 0.2."
    assert "k3 is 0.001, 100 times below" in unlabelled(verdict.evidence[0])
    assert tried(verdict) == [f"{RATE}=1e-06", "actor_rollout_ref.actor.use_kl_loss=true", *MEASURING]


@pytest.mark.parametrize(("action", "done"), [("rollback", "rolled back"), ("stop", "stopped the run")])
def test_the_guard_lately_acted(action, done):
    verdict = judge_run(make({"vllm_kl/k3": QUIET}, [event(31, action, "k3 was 0.3")]))
    assert verdict.state == "drifting" and verdict.sentence == f"The guard {done} in step 31: k3 was 0.3."
    assert judge_run(make({"vllm_kl/k3": QUIET}, [event(30, action)])).state == "healthy"
    assert "precision=fp16" in tried(verdict), "by a signal of the gap: the engines are to blame"
    assert not verdict.alarm, "nine steps ago"
    of_reward = Event(40, "rule", "critic/score/mean", 0.1, 0.2, action, "the reward fell")
    by_reward = judge_run(make({"vllm_kl/k3": QUIET}, [of_reward]))
    assert "precision=fp16" not in tried(by_reward), "the engines are not to blame"
    assert by_reward.sentence == f"The guard {done} in step 40: the reward fell."
    assert by_reward.state == ("stopped" if action == "stop" else "drifting")
    assert judge_run(make({"vllm_kl/k3": QUIET}, [event(40, "warn"), event(40, "tighten")])).state == "healthy"


def test_a_rate_of_learning_comes_before_a_reference_where_the_reward_fell():
    fell = {"vllm_kl/k3": QUIET, "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8}
    logged = judge_run(make(fell | {"actor/lr": [*np.linspace(0, 3e-6, 10), *[3e-6] * 30]}))
    assert tried(logged)[:2] == [f"{RATE}=1e-06", "actor_rollout_ref.actor.use_kl_loss=true"]
    assert tried(judge_run(make(fell | {"actor/lr": [0.0] * 40})))[0] == f"{RATE}=1e-06", "verl's own"


def test_a_run_that_is_dead_is_told_so_before_all_else():
    verdict = judge_run(make(recorded("collapsed_lr_1e-2")))
    assert verdict.state == "collapsed"
    assert verdict.sentence == str(fall_of(make(recorded("collapsed_lr_1e-2"))))
    assert verdict.sentence == (
        "The run collapsed at step 30 and is dead: the reward fell from 0.6 to 0.2 between steps 11 and 30 (means of 8 "
        "and of 20 readings), and stays at 0.041 (median of the last 5)."
    )
    assert tuple(map(unlabelled, verdict.why)) == (
        "Nothing warned of it: k3 did not stay past 0.1.",
        "Nothing shows that the engines came apart first, so the learning rate is the first suspect.",
        "k3 is 0, more than 1,000 times below the boundary of 0.1, and shows no growth that would reach it.",
        "Also moved: the gradient norm (0.44 to 0.9, from step 14), then the entropy (0.31 to 0.45, from step 15), "
        "then the response length (17 to 20, from step 18).",
    )
    assert verdict.evidence == ()
    first, *others = verdict.overrides
    assert first.text == f"{RATE}=1e-06 {RESUME}" and "the gradient norm (0.44 to 0.9, from step 14) rose" in first.why
    assert "from before step 11" in first.why
    assert [override.text for override in others] == ["actor_rollout_ref.actor.use_kl_loss=true", *MEASURING]


def test_a_run_whose_engines_came_apart_first_gets_the_advice_on_the_gap_first():
    verdict = judge_run(make(recorded("collapsed_stale")))
    assert verdict.state == "collapsed" and "The likely cause is that the engines came apart." in verdict.why
    assert verdict.why[0] == "k3 passed 0.1 at step 21, 7 steps before the reward began to fall."
    texts = tried(verdict)
    assert texts == [f"precision=fp16 {RESUME}", f"{RATE}=1e-06", *MEASURING], "IcePop is on"
    assert any(line.startswith("k3 is") and "past the boundary" in line for line in verdict.why)


def test_what_is_not_dead_keeps_its_state():
    reward = {"critic/score/mean": [0.1] * 40 + [0.7] * 40 + [0.38] * 40}
    assert judge_run(make(reward | {"vllm_kl/k3": [1e-3] * 120})).state == "drifting"
    assert judge_run(make(reward | {"vllm_kl/k3": [0.2] * 120})).state == "past the boundary"
    for k3 in (1e-3, 0.2):
        half = judge_run(make({"critic/score/mean": [0.5] * 40 + [0.1] * 40, "vllm_kl/k3": [k3] * 80}))
        assert half.state == "collapsed" and "is dead" not in half.sentence
    dead = {"critic/score/mean": [0.5] * 40 + [0.02] * 40}
    assert judge_run(make(dead)).state == "collapsed", "needs no comparison of the engines"
    noisy = recorded("noisy_lr_3e-3")
    assert set(states(noisy, range(8, 201, 8))) == {"healthy"}


def stale_run(seed: int):
    return read_run(ROOT / "recipes" / "collapse" / "runs" / "stale" / "none" / f"seed{seed}")


def test_a_recorded_run_that_lost_half_of_its_reward_to_old_rollouts():
    """The text is in an engineer's reading order: collapse, step and warning; then the cause; then one command."""
    verdict = judge_run(stale_run(0))
    assert verdict.state == "collapsed"
    assert verdict.sentence == (
        "The run collapsed at step 81: the reward fell from 0.51 to 0.25 between steps 62 and 81 (means of 20 "
        "readings), and is now 0.17 (median of the last 5)."
    )
    assert tuple(map(unlabelled, verdict.why)) == (
        "The guard's forecast warned at step 9, and k3 passed 0.1 at step 14: 53 and 48 steps before the reward began "
        "to fall.",
        "The likely cause is the age of the rollouts.",
        "Rollouts are 32.0 versions behind: part of the gap is the policy's own movement.",
        "k3 is 2.38, past the boundary of 0.1 since step 14.",
        "Also moved: the gradient norm (1.2 to 2.8, from step 46), then the response length (13 to 7.4, from step 67).",
    )
    assert verdict.first.text == f"stability=moe stability.batch_skip.threshold=null {RESUME}"
    assert "CHECKPOINT is one from before step 11 (the reward of a step is that of weights 32 versions older)" in (
        verdict.first.why
    )
    assert [other.text for other in verdict.others] == [
        "trainer.v1.trainer_mode=sync",
        f"{RATE}=1e-06",
        "stability.metrics=true",
    ]
    assert tuple(map(unlabelled, verdict.evidence)) == (
        "k3 is 95 times what it was in the run's best stretch, and stays there: from 0.025 to 2.4.",
        "The engines agree on 71.13 % of the experts.",
        "The guard warned or narrowed the band once, in step 4.",
    )


@pytest.mark.parametrize(("seed", "step", "before"), [(0, 81, 53), (1, 75, 57), (2, 71, 49)])
def test_recorded_collapses_are_told_with_what_warned(seed, step, before):
    verdict = judge_run(stale_run(seed))
    assert verdict.sentence.startswith(f"The run collapsed at step {step}: the reward fell from ")
    assert f": {before} and " in verdict.why[0] and verdict.first.text.startswith("stability=moe ")


RUNS = sorted((ROOT / "recipes" / "collapse" / "runs").glob("*/*/seed*"))


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: "/".join(folder.parts[-3:]))
def test_every_recorded_run_has_the_state_that_its_recipe_tells(folder):
    regime, arm = folder.parts[-3:-1]
    states = {"none": "collapsed", "exact": "healthy"} if regime == "stale" else {"none": "suspect", "r3": "suspect"}
    # These logs were cut down to thirteen metrics: what replay leaves of the gap of fp4 has no mark in them.
    cause = {"exact": "", "r3": ""}.get(arm, "old_weights" if regime == "stale" else "quantized")
    verdict = judge_run(read_run(folder))
    assert verdict.state == states.get(arm, "past the boundary")
    assert [suspect.cause.name for suspect in verdict.suspects[:1]] == [cause] * bool(cause)
    assert (verdict.first is None) == (cause == "")
    if verdict.state == "past the boundary":
        assert verdict.first.text == "stability=moe stability.batch_skip.threshold=null"


HALVED = [0.6] * 60 + [
    0.19
] * 60  # the mean of 20 readings is below 0.8 of its best from step 66 on, below half from 75


@pytest.mark.parametrize(
    ("metrics", "warned"),
    [
        ({}, "Nothing could warn of it: k3 was not logged."),
        ({"vllm_kl/k3": [1e-3] * 120}, "Nothing warned of it: k3 did not stay past 0.1."),
        (
            {"vllm_kl/k3": [1e-3] * 80 + [0.3] * 40},
            "Nothing warned before the fall: k3 passed 0.1 at step 81, after it had begun.",
        ),
        (
            {"vllm_kl/k3": [1e-3] * 45 + [0.3] * 75},
            "k3 passed 0.1 at step 46, 20 steps before the reward began to fall.",
        ),
        (
            {"vllm_kl/k3": [0.3] * 20 + [1e-3] * 25 + [0.3] * 75},
            "k3 passed 0.1 at step 46, 20 steps before the reward began to fall.",
        ),
        (
            {"vllm_kl/k3": [1e-3] * 80 + [0.3] * 40, "guard/steps_to_boundary": [1000.0] * 40 + [15.0] * 80},
            "The guard's forecast warned at step 41, 25 steps before the reward began to fall.",
        ),
        (
            {"vllm_kl/k3": [1e-3] * 45 + [0.3] * 75, "guard/steps_to_boundary": [1000.0] * 40 + [15.0] * 80},
            "The guard's forecast warned at step 41, and k3 passed 0.1 at step 46: 25 and 20 steps before the reward "
            "began to fall.",
        ),
    ],
)
def test_what_warned_of_a_collapse(metrics, warned):
    verdict = judge_run(make({"critic/score/mean": HALVED, **metrics}))
    assert verdict.state == "collapsed" and verdict.why[0] == warned


def test_a_gap_that_rose_below_the_boundary_before_the_fall_is_the_cause():
    verdict = judge_run(make(recorded("collapsed_fp4")))
    assert verdict.why[:2] == (
        "k3 rose from 0.061 to 0.25 from step 15 on; the fall began at step 16.",
        "The likely cause is that the engines came apart.",
    )
    assert not any("k3" in sentence for sentence in verdict.why[1:]), "its level now, of a dead run, explains nothing"
    assert unlabelled(verdict.evidence[0]).startswith("k3 is 0.0016, 64 times below the boundary")


def test_a_forecast_that_warned_blames_the_gap():
    soon = {"critic/score/mean": HALVED, "guard/steps_to_boundary": [1000.0] * 40 + [15.0] * 80}
    verdict = judge_run(make(soon | {"vllm_kl/k3": [1e-3] * 80 + [0.3] * 40}))
    assert "The likely cause is that the engines came apart." in verdict.why
    assert verdict.first.text == f"stability=tis {RESUME}"


def test_a_run_whose_updates_are_skipped_is_told_why():
    metrics = {"vllm_kl/k3": [*QUIET, *[0.2] * 40], "guard/skipped": [0] * 60 + [1] * 20}
    forecast = {"guard/steps_to_boundary": [1000.0] * 30 + [15.0] * 50}
    verdict = judge_run(
        make(metrics | forecast, [event(79, "skip", "an old one"), event(80, "skip", "k3=0.2 passes 0.1")])
    )
    assert "100 % of the updates of the last 10 steps were skipped" in verdict.sentence
    assert tuple(map(unlabelled, verdict.why)) == (
        "The last skipped update was refused because k3=0.2 passes 0.1.",
        "k3 is 0.2, past the boundary of 0.1 since step 41.",
        "The guard's forecast warned at step 31, 10 steps before that.",
        "The engines differ so much that the rollouts say little about the policy that is trained on them.",
    )


def test_no_advice_on_tuning_while_an_alarm_is_active():
    """An alarm is an update that was refused or taken back in the last three steps; a warning is not an alarm."""
    calm = judge_run(make({"vllm_kl/k3": QUIET}))
    assert calm.overrides and not calm.alarm
    refused = judge_run(make({"vllm_kl/k3": QUIET}, [event(38, "skip", "k3=0.2 passes 0.1")]))
    assert refused.state == "healthy" and not refused.overrides and refused.first is None and not refused.others
    assert refused.alarm == (
        "Deal with this first, before you tune anything: the guard skipped an update in step 38: k3=0.2 passes 0.1. "
        "The page docs/guard.md#after-the-guard-stopped-a-run lists what to read, to change and to run."
    )
    for quiet in ([event(37, "skip")], [event(40, "warn")], [event(40, "tighten")]):
        assert judge_run(make({"vllm_kl/k3": QUIET}, quiet)).overrides == calm.overrides
    dead = {"critic/score/mean": HALVED, "router/agreement": [0.99] * 120}
    (way_back,) = judge_run(make(dead, [event(120, "skip", "x")])).overrides
    assert RESUME in way_back.text, "what starts the run again deals with the alarm"


def test_a_gap_above_the_normal_level_is_said_and_one_below_it_is_not_suspect():
    level = {"guard/level": [2e-3] * 40}
    above = judge_run(make({"vllm_kl/k3": [3e-3] * 40} | level))
    assert "k3 is 0.003, above the normal level of 0.002" in unlabelled(" ".join(above.evidence))
    assert not any("normal level" in line for line in lines(judge_run(make({"vllm_kl/k3": [1e-3] * 40} | level))))
    apart = {"vllm_kl/k3": [0.02] * 40}
    assert judge_run(make(apart)).state == "suspect"
    assert judge_run(make(apart | {"guard/level": [0.03] * 40})).state == "healthy"


def test_the_first_thing_to_do_about_a_collapse_is_one_command_with_its_checkpoint():
    def first(**metrics):
        named = {name.replace("__", "/"): values for name, values in metrics.items()}
        return judge_run(make({"critic/score/mean": HALVED, "router/agreement": [0.99] * 120} | named)).first

    apart = [1e-3] * 45 + [0.3] * 75
    assert first().text == f"{RATE}=1e-06 {RESUME}", "nothing says that the gap did it"
    assert "The last weights are spoiled: CHECKPOINT is one from before step 47" in first().why
    assert first(vllm_kl__k3=apart).text == f"stability=tis {RESUME}"
    assert first(vllm_kl__k3=apart, router__agreement=[0.9] * 120).text == (
        f"stability=r3 stability.correction=tis {RESUME}"
    )
    old = {STALE.replace("/", "__"): [20.0] * 120, "vllm_kl__k3": apart}
    assert first(**old).text == f"stability=moe stability.batch_skip.threshold=null {RESUME}"
    assert "CHECKPOINT is one from before step 26 " in first(**old).why, "46, less the 20 steps that rewards are late"
    assert first(**old, actor__opsm__dropped=[0.1] * 120).text == f"trainer.v1.trainer_mode=sync {RESUME}"
    older = first(**old | {STALE.replace("/", "__"): [46.0] * 120})
    assert older.text == "stability=moe stability.batch_skip.threshold=null trainer.resume_mode=disable"
    assert "No checkpoint is from before the fall" in older.why


def test_a_run_that_the_guard_stopped_says_so_first_and_then_what_it_came_to():
    metrics = {"critic/score/mean": HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75}
    verdict = judge_run(make(metrics, [event(120, "stop", "k3 was 0.3, after 3 rollbacks")]))
    assert verdict.state == "stopped"
    assert verdict.sentence == "The guard stopped the run in step 120: k3 was 0.3, after 3 rollbacks."
    assert verdict.why[0].startswith("The run collapsed at step 75: ") and "20 steps before" in verdict.why[1]
    assert verdict.overrides == judge_run(make(metrics)).overrides[:1], "the way back, and no tuning"
    went_on = judge_run(make(metrics, [event(119, "stop", "k3 was 0.3")]))
    assert went_on.state == "collapsed" and "The guard stopped the run in step 119: k3 was 0.3." in went_on.evidence


def test_weights_are_not_given_up_where_the_reward_holds():
    past = {"vllm_kl/k3": [1e-3] * 40 + [0.2] * 40}
    holds = judge_run(make(past | {"critic/score/mean": np.linspace(0.3, 0.6, 80)}))
    assert holds.state == "past the boundary" and RESUME not in tried(holds)
    assert unlabelled(holds.sentence) == "k3 is 0.2, past the boundary of 0.1 since step 41."
    assert tuple(map(unlabelled, holds.why)) == (
        "The reward holds: the mean of its last 20 readings is 0.564, of its best ones 0.564.",
    )
    sinks = judge_run(make(past | {"critic/score/mean": [0.6] * 40 + [0.46] * 40}))
    assert any("last 20 readings is 0.46, of its best ones 0.6" in sentence for sentence in sinks.why)
    assert RESUME in tried(sinks)
    assert TOO_FAR in sinks.why


BLIND = {
    "vllm_kl/k3": 1e-4 * np.exp(0.001 * np.arange(1, 41)),
    "vllm_kl/log_ratio_abs_mean": [0.01] * 40,
    "correction/dropped": 1e-3 * np.exp(-0.02 * np.arange(1, 41)),
}


def test_a_mask_that_drops_fewer_tokens_while_the_gap_grows_is_a_sign():
    verdict = judge_run(make(BLIND | {"guard/mask_blind": [0.0] * 20 + [1.0] * 20}))
    assert verdict.state == "drifting", "though the boundary is more than 1,000 steps away"
    assert "IcePop drops fewer and fewer tokens (-2.0 % per step) while k3 grows (+0.1 % per step)" in verdict.sentence
    texts = tried(verdict)
    assert "stability=kpop" in texts and not any("tighten" in text for text in texts)
    for guards in ({"guard/mask_blind": [1.0] * 20 + [0.0] * 20}, {}):
        assert judge_run(make(BLIND | guards)).state == "healthy", (
            "as the guard says it; where IcePop is off it says nothing"
        )
    for share, state in ((0.25, "healthy"), (0.75, "drifting")):  # of the updates of a step
        assert judge_run(make(BLIND | {"guard/mask_blind": [0.0] * 39 + [share]})).state == state


def test_the_worst_state_stands_and_all_evidence_with_it():
    run = make(
        {"vllm_kl/k3": [*[5e-5] * 30, *[0.3] * 10], "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8},
        [event(40, "stop")],
    )
    verdict = judge_run(run)
    assert verdict.state == "stopped", "what the guard did comes first"
    starts = (
        "The guard stopped",
        "k3 is 0.3, past the boundary of 0.1 since step 31 ",
        "The reward fell",
        "k3 is 6000 times",
    )
    at = [next(i for i, line in enumerate(lines(verdict)) if line.startswith(start)) for start in starts]
    assert at == sorted(at)
    assert judge_run(replace(run, events=())).state == "past the boundary"
    few = judge_run(make({"vllm_kl/k3": [1e-3], "correction/dropped": [0.2]}))
    assert few.state == "drifting", "trouble needs no eight readings"


@pytest.mark.parametrize(("count", "text"), [(1, "in 1 step;"), (FEWEST - 1, "in 7 steps;")])
def test_too_few_readings(count, text):
    verdict = judge_run(make({"vllm_kl/k3": [1e-3] * count}))
    assert verdict.state == "not enough data" and text in verdict.sentence and "8 are needed" in verdict.sentence
    assert judge_run(make({"vllm_kl/k3": [1e-3] * FEWEST})).state == "healthy"


def test_without_k3_the_run_is_told_how_to_measure_it():
    verdict = judge_run(make({"critic/score/mean": [0.1, 0.2], "router/agreement": [0.99]}))
    assert verdict.state == "not enough data" and verdict.sentence.startswith("Nothing compares")
    assert verdict.evidence == ("The engines agree on 99.00 % of the experts (the last reading).",)
    assert tried(verdict) == ["stability.metrics=true"] and verdict.first is None, "nothing is known to be wrong"
    assert verdict.why == ("The reward is 0.15 (median of the last 2) and began at 0.1 (the first reading).",)


def test_the_agreement_of_a_share_is_told_with_its_error():
    verdict = judge_run(make({"router/agreement": [0.99] * 3, "router/agreement/error": [0.0005, 0.0006, 0.0007]}))
    (said,) = verdict.evidence
    assert "99.00 % of the experts" in said and "from a share of the trajectories: +- 0.12 % per step" in said


def test_what_to_try_depends_on_what_is_on_and_on_the_cause():
    growing = 1e-4 * np.exp(0.1 * np.arange(1, 41))
    base = {"vllm_kl/k3": growing, "vllm_kl/log_ratio_abs_mean": growing}
    plain = judge_run(make(base | {"router/agreement": [0.99] * 40}))
    assert tried(plain) == ["stability=tis", "precision=fp16"]
    corrected = tried(judge_run(make(base | {"router/agreement": [0.9] * 40, "correction/dropped": [0.01] * 40})))
    assert (
        corrected[:2] == ["stability=r3 stability.correction=tis", "precision=fp16"]
        and "action:tighten" in corrected[2]
    )
    gaps = {"router/agreement": [0.99], "router/gap_differs": [0.3], "router/gap_equal": [0.1]}
    assert tried(judge_run(make(base | gaps))) == ["stability=r3 stability.correction=tis", "precision=fp16"], "no mask"
    stale = {"training/off_policy/trajectory_staleness/mean": [3.0] * 40}
    old = tried(judge_run(make(base | stale | {"router/agreement": [0.9] * 40})))  # the routers' move is the policy's
    assert old == ["stability=moe", "trainer.v1.trainer_mode=sync"]
    assert tried(judge_run(make(base | stale)))[0] == "stability=opsm", "a dense model"


STALE = "training/off_policy/trajectory_staleness/mean"


def test_what_old_rollouts_add_to_k3_is_not_the_engines():
    """The verdict is on lag 0, and on rescored trajectories if there is none; the rest is reported in addition."""
    old = {"vllm_kl/k3": [0.02] * 40, STALE: [2.0] * 40}
    verdict = judge_run(make(old | {"vllm_kl/k3/lag/0": QUIET}))
    assert verdict.state == "healthy"
    assert "k3 of the engines alone is 0.001, 100 times below the boundary of 0.1" in unlabelled(verdict.sentence)
    (behind,) = [line for line in verdict.evidence if line.startswith("Rollouts are 2.0 versions behind")]
    assert "k3 is 0.02 with the policy's own movement, 0.001 without" in behind
    assert judge_run(make(old | {"vllm_kl/engine/k3": QUIET})).evidence == verdict.evidence
    few = judge_run(make(old | {"vllm_kl/k3/lag/0": QUIET[:7]}))
    assert few.sentence.startswith("The run is healthy: k3 is 0.02 "), "their age is known"
    assert "part of the gap is the policy's own" in few.evidence[0]


def test_engines_that_come_apart_are_seen_behind_old_rollouts():
    """k3 over all tokens shows nothing: it does not change."""
    growing = [1e-4 * 1.15**step for step in range(40)]
    verdict = judge_run(make({"vllm_kl/k3": [0.08] * 40, STALE: [1.0] * 40, "vllm_kl/k3/lag/0": growing}))
    assert verdict.state == "drifting" and verdict.sentence.startswith("k3 of the engines alone grows by ")
    assert "stability=tis" in tried(verdict)


def test_rollouts_so_old_that_updates_do_not_follow_them_are_not_taken_for_engines_that_came_apart():
    verdict = judge_run(make({"vllm_kl/k3": [0.3] * 40, STALE: [1.0] * 40, "vllm_kl/k3/lag/0": QUIET}))
    assert verdict.state == "past the boundary"
    assert "The rollouts are so old that they say little about the policy that is trained on them." in verdict.why
    assert unlabelled(verdict.sentence) == (
        "k3 is 0.3, past the boundary of 0.1 since step 1; it includes the policy's movement since the rollouts."
    )
    assert tried(verdict)[:2] == ["stability=opsm stability.batch_skip.threshold=null", "trainer.v1.trainer_mode=sync"]


def states(metrics, prefixes) -> list[str]:
    run = make(metrics)
    return [judge_run(prefix(run, last)).state for last in prefixes]


@pytest.mark.parametrize(("steps", "runs"), [(20, 300), (60, 300), (200, 150), (1000, 60)])
def test_noise_is_healthy(steps, runs):
    """Measured over 400 runs each: 0 of 400 for 8, 20, 60, 200 and 1,000 steps; flat, dependent rewards: below."""
    at, raised = np.arange(1, steps + 1), 0
    for seed in range(runs):
        dice = np.random.default_rng([steps, seed])
        metrics = {
            name: level * np.exp(0.3 * dice.normal(size=steps))
            for name, level in (("vllm_kl/k3", 1e-3), ("vllm_kl/prob_diff_mean", 4e-3), ("correction/dropped", 0.01))
        }
        reward = 0.7 - 0.6 * np.exp(-3 * at / steps) + 0.05 * dice.normal(size=steps)
        raised += judge_run(make(metrics | {"critic/score/mean": reward})).state != "healthy"
    assert raised / runs < 0.01


@pytest.mark.parametrize(("steps", "most"), [(60, 0.02), (200, 0.02), (1000, 0.02)])
@pytest.mark.parametrize("kind", ["flat", "of eight answers"])
def test_a_reward_that_does_not_move_has_not_broken_down(steps, most, kind):
    raised = 0
    for seed in range(200):
        dice = np.random.default_rng([steps, seed])
        flat = 0.5 + 0.05 * dice.normal(size=steps)
        reward = flat if kind == "flat" else dice.binomial(8, 0.3, size=steps) / 8
        raised += judge_run(make({"vllm_kl/k3": [1e-3] * steps, "critic/score/mean": reward})).state != "healthy"
    assert raised / 200 <= most


def test_growth_of_five_percent_is_told_before_k3_is_within_three_of_the_boundary():
    for seed in range(20):
        noise = 0.3 * np.random.default_rng(seed).normal(size=140)
        trend = 1e-3 * np.exp(0.05 * np.maximum(np.arange(140) - 40, 0))
        near = int(np.argmax(trend > 0.1 / 3))
        late = states({"vllm_kl/k3": trend * np.exp(noise)}, range(near - 5, near + 1))
        assert late == ["drifting"] * 6, seed


def recorded(name):
    return {key: values for key, values in json.loads((DATA / f"{name}.json").read_text()).items() if key != "what"}


@pytest.mark.parametrize("name", ["stable_lr_1e-3", "stable_lr_1e-2"])
def test_recorded_stable_runs_are_healthy_at_every_step(name):
    assert states(recorded(name), range(1, 81)) == ["not enough data"] * 7 + ["healthy"] * 73


def test_a_recorded_run_whose_rollout_got_no_weights_drifts_to_its_end():
    """No weight sync reached the rollout from step 10 on. The line's interval shows it in step 16, before k3 is
    0.006."""
    found = states(recorded("frozen_rollout"), range(1, 61))
    assert found.index("drifting") + 1 == 16 and set(found[15:]) == {"drifting"}
    assert set(found[7:15]) == {"healthy"}


def test_a_verdict_does_not_mind_odd_runs():
    for change in (lambda v: v * 0, lambda v: v * NAN, lambda v: -np.abs(v)):
        run = full(40, layers=2)
        odd = replace(run, metrics={name: replace(s, values=change(s.values)) for name, s in run.metrics.items()})
        assert judge_run(odd).sentence


def test_a_gap_that_is_no_longer_measured_is_told():
    run = make({"vllm_kl/k3": [1e-4] * 20 + [NAN] * 40, "critic/score/mean": [0.5] * 60})
    assert any("last measured 40 steps ago" in sentence for sentence in judge_run(run).evidence)


def test_verls_own_name_of_k3_counts_as_not_a_number_too():
    run = make({"rollout_corr/k3_kl": [1e-4] * 20 + [NAN] * 5})
    assert judge_run(run).state == "past the boundary"


def test_a_fall_that_is_small_against_the_rewards_level_is_none():
    falls = {now: np.repeat([0.6, 0.6, now], 40) + np.tile([0.01, -0.01], 60) for now in (0.5, 0.2)}
    found = {now: judge_run(make({"critic/score/mean": reward.tolist()})).state for now, reward in falls.items()}
    assert found == {0.5: "not enough data", 0.2: "collapsed"}


def test_what_the_guard_only_warned_of_is_told():
    warned = [event(12, "warn"), event(20, "tighten"), event(21, "recover")]
    assert "The guard warned or narrowed the band 2 times, last in step 20." in said({"vllm_kl/k3": QUIET}, *warned)
    assert "the band once, in step 12." in said({"vllm_kl/k3": QUIET}, warned[0])


def test_a_gap_near_the_boundary_is_a_share_of_it():
    assert "k3 is 0.04, 40 % of the boundary of 0.1" in said({"vllm_kl/k3": [0.04] * 40})


def test_behind_harmless_rounding_nobody_else_is_accused():
    """bf16 rounding makes a few tokens differ, as respelling does, but respelling comes after it."""
    rounding = {
        "vllm_kl/k3": [4e-4] * 60,
        "vllm_kl/k1": [4e-4] * 60,
        "vllm_kl/log_ratio_abs_mean": [4.8e-4] * 60,
        "vllm_kl/sequence_gap_mean": [1e-3] * 60,
        "vllm_kl/sequence_gap_max": [1.4e-2] * 60,
        "router/agreement": [0.9998] * 60,
        "router/own_agreement": [0.9998] * 60,
    }
    run = make(rounding)
    marks = Marks({name: readings(run, name) for name in rounding})
    points = {name: sum(sign.points for sign in JUDGES[name](marks)) for name in ("two_precisions", "respelled")}
    assert points["two_precisions"] >= points["respelled"] >= LEAST
    verdict = judge_run(run)
    assert [suspect.cause.name for suspect in verdict.suspects] == ["two_precisions"] and verdict.state == "healthy"


def test_harmless_rounding_explains_the_gap_beside_a_cause_that_is_not_of_the_gap():
    named = {
        name: Suspect(CAUSES[name], (), harmless=name == "two_precisions")
        for name in ("learning_rate", "two_precisions", "lost_sync", "old_weights")
    }

    def labels(*names):
        verdict = replace(judge_run(full()), suspects=tuple(named[name] for name in names))
        return [label for label, _ in verdict.labelled()]

    explained = "cause of the gap, which is harmless"
    assert labels("lost_sync", "old_weights") == ["likely cause", "or"]
    assert labels("two_precisions") == [explained]
    assert labels("learning_rate", "two_precisions") == ["likely cause", explained]
    assert labels("lost_sync", "two_precisions") == ["likely cause", "or, which would be harmless"]
    assert labels("learning_rate", "lost_sync", "two_precisions")[2] == "or, which would be harmless"


def test_what_settles_a_cause_of_the_learning_is_not_asked_of_the_rounding_beside_it():
    """The doctor finds two precisions, but nothing that it finds speaks for or against a learning rate."""
    gap = {"vllm_kl/k3": [5e-4] * 60, "vllm_kl/k1": [5e-4] * 60, "vllm_kl/log_ratio_abs_mean": [0.02] * 60}
    routers = {"router/agreement": [0.995] * 60, "router/own_agreement": [0.995] * 60}
    verdict = judge_run(make(gap | routers | {"critic/score/mean": [0.6] * 20 + [0.01] * 40}))
    assert [suspect.cause.name for suspect in verdict.suspects] == ["learning_rate", "two_precisions"]
    assert "round" not in verdict.settle


def test_from_verls_own_metrics_the_report_says_what_to_measure():
    """The gap was there at once and k averages 1: many causes look like this."""
    k3 = 0.05 * (1 + 0.02 * np.random.default_rng(0).standard_normal(60))
    plain = {"rollout_corr/kl": k3, "rollout_corr/k3_kl": k3, "critic/score/mean": [0.5] * 60}
    verdict = judge_run(make(plain))
    assert (verdict.state, verdict.suspects) == ("suspect", ())
    assert verdict.measure.startswith("stability.metrics=true would tell whether it is ")
    assert judge_run(make({name: values * 1e-3 for name, values in plain.items() if "corr" in name})).measure == ""


def test_a_cause_that_is_named_comes_with_the_command_that_settles_it():
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal(60)
    shown = {"rollout_corr/kl": 0.02 * noise, "rollout_corr/k3_kl": 4e-4 * noise}
    verdict = judge_run(make(shown))
    assert verdict.suspects[0].cause.name == "truncated"
    assert verdict.settle.startswith("`verl-ext probe` with the overrides of the launch: if ")


def readings(run, name):
    series = run.get(name)
    return [*zip(series.steps.tolist(), series.values.tolist(), strict=True)]
