"""What a run's metrics say: each state, each sentence with its numbers, and how often noise is taken for trouble."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests import ROOT
from tests.unit.report.made_runs import NAN, event, full, make, prefix
from verl_ext.guard.boundary import FEWEST
from verl_ext.guard.state import Event
from verl_ext.report.reward import collapse_of
from verl_ext.report.verdict import LAST, judge

DATA = ROOT / "tests" / "support" / "data"
QUIET = [1e-3] * 40
RATE = "actor_rollout_ref.actor.optim.lr"
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"


def said(metrics, *events) -> str:
    return " ".join(judge(make(metrics, events)).evidence)


def tried(verdict) -> list[str]:
    return [override.text for override in verdict.overrides]


def test_a_quiet_run_is_healthy():
    verdict = judge(full())
    assert verdict.state == "healthy" and tried(verdict) == []
    assert "k3 is 0.00097, 103 times below the boundary of 0.1, and shows no growth" in verdict.evidence[0]
    assert verdict.evidence[1:] == (
        "The correction drops 0.94 % of the tokens.",
        "The engines choose 98.94 % of the experts alike.",
        "3 of 120 updates were skipped.",
    )


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"vllm_kl/k3": QUIET}, "k3 is 0.001, 100 times below the boundary of 0.1"),
        ({"vllm_kl/k3": QUIET, "guard/boundary": [0.01]}, "10 times below the boundary of 0.01"),
        ({"vllm_kl/k3": [1e-6] * 9}, "more than 1,000 times below the boundary"),
        ({"vllm_kl/k3": [0.0] * 9}, "k3 is 0, more than 1,000 times below"),
        ({"rollout_corr/k3_kl": QUIET}, "k3 is 0.001, 100 times below"),
        ({"vllm_kl/k3": QUIET, "guard/skipped": [1, 0, 0]}, "1 of 3 updates were skipped."),
        ({"vllm_kl/k3": QUIET, "actor/grad_norm": [1, NAN, float("inf")]}, "was not a number in 2 steps."),
        (
            {"vllm_kl/k3": QUIET, "training/off_policy/trajectory_staleness/mean": [2.5] * 9},
            "Rollouts are 2.5 versions behind",
        ),
    ],
)
def test_what_a_healthy_run_is_told(metrics, sentence):
    assert judge(make(metrics)).state == "healthy" and sentence in said(metrics)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"vllm_kl/k3": [*QUIET, *[0.25] * LAST]}, "k3 is 0.25, past the boundary of 0.1 (median of the last 5)."),
        ({"vllm_kl/k3": [0.2, 0.2]}, "k3 is 0.2, past the boundary of 0.1 (median of the last 2)."),
        ({"vllm_kl/k3": QUIET, "guard/boundary": [1e-4]}, "k3 is 0.001, past the boundary of 0.0001"),
        ({"vllm_kl/prob_diff_mean": [0.07] * 9}, "Probabilities differ by 0.07 on average; past 0.05,"),
        ({"vllm_kl/k3": [*QUIET, NAN, NAN, 1e-3, NAN]}, "k3 was not a number in 3 of the last 5 steps."),
        ({"vllm_kl/k3": [*QUIET, *[float("inf")] * 4]}, "k3 was not a number in 4 of the last 5 steps."),
        ({"vllm_kl/k3": [NAN] * 9}, "k3 was not a number in 5 of the last 5 steps."),
        ({"vllm_kl/k3": QUIET, "guard/skipped": [0] * 34 + [1] * 6}, "6 of the last 10 updates were skipped"),
    ],
)
def test_past_the_boundary(metrics, sentence):
    verdict = judge(make(metrics))
    assert verdict.state == "past the boundary" and sentence in said(metrics)
    assert "trainer.resume_from_path" in tried(verdict)[-1] and "precision=fp16" in tried(verdict)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            {"vllm_kl/k3": 1e-4 * np.exp(0.05 * np.arange(1, 41))},
            "k3 grows by 5.1 to 5.1 % a step; at this pace it passes 0.1 in about 98 steps.",
        ),
        (
            {"vllm_kl/k3": [5e-5] * 30 + [4e-3] * 10},
            "k3 is 80 times what it was in the run's best stretch (5e-05 to 0.004)",
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
    assert judge(make(metrics)).state == "drifting" and sentence in said(metrics)


def test_a_rise_far_below_the_boundary_or_of_a_few_steps_is_none():
    for k3 in ([1e-6] * 30 + [1e-4] * 10, [5e-5] * 38 + [4e-3] * 2, [5e-5] * 10 + [4e-3] * 5):
        assert judge(make({"vllm_kl/k3": k3})).state == "healthy"


def test_a_reward_that_breaks_down_while_the_engines_agree_is_not_blamed_on_them():
    reward = [0.1] * 8 + [0.7] * 24 + [0.2] * 8
    verdict = judge(make({"vllm_kl/k3": QUIET, "critic/score/mean": reward}))
    assert "k3 is 0.001, 100 times below" in verdict.evidence[1]
    assert tried(verdict)[-1] == "actor_rollout_ref.actor.use_kl_loss=true" and "precision=fp16" not in tried(verdict)


@pytest.mark.parametrize(("action", "done"), [("rollback", "rolled back"), ("stop", "stopped the run")])
def test_the_guard_lately_acted(action, done):
    verdict = judge(make({"vllm_kl/k3": QUIET}, [event(31, action, "k3 was 0.3")]))
    assert verdict.state == "drifting" and f"The guard {done} in step 31: k3 was 0.3." in verdict.evidence
    assert judge(make({"vllm_kl/k3": QUIET}, [event(30, action)])).state == "healthy"
    assert "precision=fp16" in tried(verdict), "by a signal of the gap: the engines are to blame"
    of_reward = Event(40, "rule", "critic/score/mean", 0.1, 0.2, action, "the reward fell")
    by_reward = judge(make({"vllm_kl/k3": QUIET}, [of_reward]))
    assert "precision=fp16" not in tried(by_reward), "the engines are not to blame"
    assert ("The guard stopped the run: see why" in by_reward.sentence) == (action == "stop")
    assert judge(make({"vllm_kl/k3": QUIET}, [event(40, "warn"), event(40, "tighten")])).state == "healthy"


def test_a_rate_of_learning_comes_before_a_reference_where_the_reward_fell():
    fell = {"vllm_kl/k3": QUIET, "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8}
    logged = judge(make(fell | {"actor/lr": [*np.linspace(0, 3e-6, 10), *[3e-6] * 30]}))
    assert tried(logged)[-2:] == [f"{RATE}=1e-06", "actor_rollout_ref.actor.use_kl_loss=true"]
    assert tried(judge(make(fell | {"actor/lr": [0.0] * 40})))[-2] == f"{RATE}=1e-06", "verl's own"


def test_a_run_that_is_dead_is_told_so_before_all_else():
    verdict = judge(make(recorded("collapsed_lr_1e-2")))
    assert verdict.state == "collapsed"
    assert verdict.sentence == (
        "The run is dead. Nothing says that the engines came apart first: go back to a checkpoint from before step 11, "
        "and lower the learning rate."
    )
    assert verdict.evidence[0] == str(collapse_of(make(recorded("collapsed_lr_1e-2"))))
    assert verdict.evidence[0].startswith("The reward fell from 0.6 to 0.042, from step 11 on, and stays there.")
    assert verdict.evidence[1].startswith("k3 is 0, more than 1,000 times below the boundary")
    assert not any("The reward fell" in line for line in verdict.evidence[1:])
    first, *others = verdict.overrides
    assert first.text == f"{RATE}=1e-06" and "the gradient norm (0.44 to 0.9, from step 14) speaks" in first.why
    texts = [override.text for override in others]
    assert texts.index("actor_rollout_ref.actor.use_kl_loss=true") < texts.index(RESUME)
    assert "precision=fp16" not in texts and "from before step 11" in others[-1].why


def test_a_run_whose_engines_came_apart_first_gets_the_advice_on_the_gap_first():
    verdict = judge(make(recorded("collapsed_stale")))
    assert verdict.state == "collapsed" and "came apart first" in verdict.sentence
    texts = tried(verdict)
    assert texts.index("precision=fp16") < texts.index(f"{RATE}=1e-06") < texts.index(RESUME) == len(texts) - 1
    assert any(line.startswith("k3 is") and "past the boundary" in line for line in verdict.evidence)


def test_what_is_not_dead_keeps_its_state():
    reward = {"critic/score/mean": [0.5] * 40 + [0.1] * 40}
    assert judge(make(reward | {"vllm_kl/k3": [1e-3] * 80})).state == "drifting"
    assert judge(make(reward | {"vllm_kl/k3": [0.2] * 80})).state == "past the boundary"
    dead = {"critic/score/mean": [0.5] * 40 + [0.02] * 40}
    assert judge(make(dead)).state == "collapsed", "needs no comparison of the engines"
    noisy = recorded("noisy_lr_3e-3")
    assert set(states(noisy, range(8, 201, 8))) == {"healthy"}


BLIND = {
    "vllm_kl/k3": 1e-4 * np.exp(0.001 * np.arange(1, 41)),
    "vllm_kl/log_ratio_abs_mean": [0.01] * 40,
    "correction/dropped": 1e-3 * np.exp(-0.02 * np.arange(1, 41)),
}


def test_a_mask_that_drops_fewer_tokens_while_the_gap_grows_is_a_sign():
    verdict = judge(make(BLIND | {"guard/mask_blind": [0.0] * 20 + [1.0] * 20}))
    assert verdict.state == "drifting", "though the boundary is more than 1,000 steps away"
    assert (
        "IcePop drops fewer and fewer tokens (-2.0 % a step) while k3 grows (+0.1 % a step): its fixed band does not "
        "see what comes apart." in verdict.evidence
    )
    texts = tried(verdict)
    assert "stability=kpop" in texts and not any("tighten" in text for text in texts)
    for guards in ({"guard/mask_blind": [1.0] * 20 + [0.0] * 20}, {}):
        assert judge(make(BLIND | guards)).state == "healthy", (
            "as the guard says it; where IcePop is off it says nothing"
        )


def test_the_worst_state_stands_and_all_evidence_with_it():
    run = make(
        {"vllm_kl/k3": [*[5e-5] * 30, *[0.3] * 10], "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8},
        [event(40, "stop")],
    )
    verdict = judge(run)
    assert verdict.state == "past the boundary"
    starts = ("k3 is 0.3, past", "k3 is 6000 times", "The reward fell", "The guard stopped")
    assert all(any(line.startswith(start) for line in verdict.evidence) for start in starts)
    few = judge(make({"vllm_kl/k3": [1e-3], "correction/dropped": [0.2]}))
    assert few.state == "drifting", "trouble needs no eight readings"


@pytest.mark.parametrize(("count", "text"), [(1, "in 1 step;"), (FEWEST - 1, "in 7 steps;")])
def test_too_few_readings(count, text):
    verdict = judge(make({"vllm_kl/k3": [1e-3] * count}))
    assert verdict.state == "not enough data" and text in verdict.sentence and "8 are needed" in verdict.sentence
    assert judge(make({"vllm_kl/k3": [1e-3] * FEWEST})).state == "healthy"


def test_without_k3_the_run_is_told_how_to_measure_it():
    verdict = judge(make({"critic/score/mean": [0.1, 0.2], "router/agreement": [0.99]}))
    assert verdict.state == "not enough data" and verdict.sentence.startswith("Nothing compares")
    assert verdict.evidence == ("The engines choose 99.00 % of the experts alike.",)
    assert tried(verdict) == ["stability.metrics=true"]


def test_the_agreement_of_a_share_is_told_with_its_error():
    verdict = judge(make({"router/agreement": [0.99] * 3, "router/agreement/error": [0.0005, 0.0006, 0.0007]}))
    (said,) = verdict.evidence
    assert said == "The engines choose 99.00 % of the experts alike (by a share of the trajectories: +- 0.12 % a step)."


def test_what_to_try_depends_on_what_is_on_and_on_the_cause():
    growing = 1e-4 * np.exp(0.1 * np.arange(1, 41))
    base = {"vllm_kl/k3": growing, "vllm_kl/log_ratio_abs_mean": growing}
    plain = judge(make(base | {"router/agreement": [0.99] * 40}))
    assert tried(plain) == ["stability=icepop", "precision=fp16"]
    corrected = tried(judge(make(base | {"router/agreement": [0.9] * 40, "correction/dropped": [0.01] * 40})))
    assert (
        corrected[:2] == ["stability=r3 stability.correction=tis", "precision=fp16"]
        and "action:tighten" in corrected[2]
    )
    gaps = {"router/agreement": [0.99], "router/gap_differs": [0.3], "router/gap_equal": [0.1]}
    assert "stability=r3" in tried(judge(make(base | gaps)))
    stale = {"training/off_policy/trajectory_staleness/mean": [3.0] * 40}
    old = tried(judge(make(base | stale | {"router/agreement": [0.9] * 40})))  # the routers' move is the policy's
    assert old == ["trainer.v1.trainer_mode=sync", "stability=opsm"]


STALE = "training/off_policy/trajectory_staleness/mean"


def test_what_old_rollouts_add_to_k3_is_not_the_engines():
    """The verdict is on lag 0, and on what was rescored where there is none; the rest is said beside it."""
    old = {"vllm_kl/k3": [0.02] * 40, STALE: [2.0] * 40}
    verdict = judge(make(old | {"vllm_kl/k3/lag/0": QUIET}))
    assert verdict.state == "healthy"
    assert "k3 of the engines alone is 0.001, 100 times below the boundary of 0.1" in verdict.evidence[0]
    assert "Rollouts are 2.0 versions behind: k3 is 0.02 with the policy's own movement, 0.001 without." in (
        verdict.evidence
    )
    assert judge(make(old | {"vllm_kl/engine/k3": QUIET})).evidence == verdict.evidence
    few = judge(make(old | {"vllm_kl/k3/lag/0": QUIET[:7]}))
    assert few.evidence[0].startswith("k3 is 0.02, ") and "part of the gap is the policy's own" in few.evidence[1]


def test_engines_that_come_apart_are_seen_behind_old_rollouts():
    """Of all of k3 nothing would be seen: it stands still."""
    growing = [1e-4 * 1.15**step for step in range(40)]
    verdict = judge(make({"vllm_kl/k3": [0.08] * 40, STALE: [1.0] * 40, "vllm_kl/k3/lag/0": growing}))
    assert verdict.state == "drifting" and verdict.evidence[0].startswith("k3 of the engines alone grows by ")
    assert "stability=icepop" in tried(verdict)


def test_rollouts_so_old_that_updates_do_not_follow_them_are_not_taken_for_engines_that_came_apart():
    verdict = judge(make({"vllm_kl/k3": [0.3] * 40, STALE: [1.0] * 40, "vllm_kl/k3/lag/0": QUIET}))
    assert verdict.state == "past the boundary"
    assert verdict.sentence == "The rollouts are so much older than the policy that updates no longer follow them."
    assert "k3 is 0.3, past the boundary of 0.1; what the policy moved since the rollouts is in it." in verdict.evidence
    assert tried(verdict)[0] == "trainer.v1.trainer_mode=sync" and "stability=opsm" in tried(verdict)


def states(metrics, prefixes) -> list[str]:
    run = make(metrics)
    return [judge(prefix(run, last)).state for last in prefixes]


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
        raised += judge(make(metrics | {"critic/score/mean": reward})).state != "healthy"
    assert raised / runs < 0.01


@pytest.mark.parametrize(("steps", "most"), [(60, 0.02), (200, 0.02), (1000, 0.02)])
@pytest.mark.parametrize("kind", ["flat", "of eight answers"])
def test_a_reward_that_does_not_move_has_not_broken_down(steps, most, kind):
    raised = 0
    for seed in range(200):
        dice = np.random.default_rng([steps, seed])
        flat = 0.5 + 0.05 * dice.normal(size=steps)
        reward = flat if kind == "flat" else dice.binomial(8, 0.3, size=steps) / 8
        raised += judge(make({"vllm_kl/k3": [1e-3] * steps, "critic/score/mean": reward})).state != "healthy"
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
    """From step 10 on; no weight sync reached the rollout. The line's interval tells in step 16, before k3 is 0.006."""
    found = states(recorded("frozen_rollout"), range(1, 61))
    assert found.index("drifting") + 1 == 16 and set(found[15:]) == {"drifting"}
    assert set(found[7:15]) == {"healthy"}


def test_a_verdict_does_not_mind_odd_runs():
    for change in (lambda v: v * 0, lambda v: v * NAN, lambda v: -np.abs(v)):
        run = full(40, layers=2)
        odd = replace(run, metrics={name: replace(s, values=change(s.values)) for name, s in run.metrics.items()})
        assert judge(odd).sentence


def test_a_gap_that_is_no_longer_measured_is_told():
    run = make({"vllm_kl/k3": [1e-4] * 20 + [NAN] * 40, "critic/score/mean": [0.5] * 60})
    assert any("last measured 40 steps ago" in sentence for sentence in judge(run).evidence)


def test_verls_own_name_of_k3_counts_as_not_a_number_too():
    run = make({"rollout_corr/k3_kl": [1e-4] * 20 + [NAN] * 5})
    assert judge(run).state == "past the boundary"


def test_a_fall_that_is_small_against_the_rewards_level_is_none():
    falls = {now: np.repeat([0.6, 0.6, now], 40) + np.tile([0.01, -0.01], 60) for now in (0.5, 0.2)}
    found = {now: judge(make({"critic/score/mean": reward.tolist()})).state for now, reward in falls.items()}
    assert found == {0.5: "not enough data", 0.2: "drifting"}


def test_what_the_guard_only_warned_of_is_told():
    warned = [event(12, "warn"), event(20, "tighten"), event(21, "recover")]
    assert "The guard warned or narrowed the band 2 times, last in step 20." in said({"vllm_kl/k3": QUIET}, *warned)
    assert "the band once, last in step 12." in said({"vllm_kl/k3": QUIET}, warned[0])


def test_a_gap_near_the_boundary_is_a_share_of_it():
    assert "k3 is 0.04, 40 % of the boundary of 0.1" in said({"vllm_kl/k3": [0.04] * 40})
