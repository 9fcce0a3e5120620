"""What answers, entropy, gradient and numbers that are none show: a small run for every level. Random runs for all
findings are at the end."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.findings import levels_of, line, run_of, seen_as, then
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings import answers, entropy, finite, gradient
from verl_ext.diagnosis.findings.answers import CUT, EMPTY, LONGEST, LOOPS, SHORTEST, SURELY_CUT
from verl_ext.diagnosis.findings.finite import FILLED, MEMORY_USED
from verl_ext.diagnosis.findings.gap import RATE, REFERENCE
from verl_ext.diagnosis.findings.gradient import CLIPPED, SELF_GAP, STRIDE
from verl_ext.diagnosis.findings.registry import RULES, find_all, notable
from verl_ext.diagnosis.findings.reward import ADVANTAGE_MAX, ADVANTAGE_MIN, DEAD_GROUPS
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, REWARD, REWARD_MAX, REWARD_MIN
from verl_ext.diagnosis.series import Ending, Readings

NAN, INF = math.nan, math.inf
DROPPED, WEIGHT, K1, LOSS = "correction/dropped", "rollout_corr/rollout_is_mean", "vllm_kl/k1", "actor/pg_loss"


LEARNS, FLAT = line(0.2, 0.8), [0.3 + 0.02 * (-1) ** i for i in range(40)]
FELL = [*line(0.2, 0.8, 20), *[0.05] * 20]  # in step 21
TOP = {REWARD_MAX: [1.0] * 40}
LONGER = {LENGTH: line(100, 300), CUT: line(0.1, 0.9)}
CASES = [
    ("answers_cut.most", 21, {CUT: then(0.0, 0.9)}),
    ("answers_cut.most", 1, {LONGEST: [512] * 9, SHORTEST: [512] * 9, LENGTH: [512] * 9}),  # the share is not logged
    ("answers_cut.most", 1, {LENGTH: [512] * 9}),
    ("answers_cut.many", 21, {CUT: then(0.0, 0.3)}),
    ("answers_cut.few", None, {CUT: [0.02] * 10}),
    ("answers_cut.few", None, {LONGEST: [512] * 9, SHORTEST: [20] * 9, LENGTH: [90] * 9}),
    ("cut_began.at_once", None, {CUT: [0.9] * 10}),
    ("cut_began.later", None, {CUT: then(0.1, 0.9)}),
    ("cut_and_low.yes", None, {CUT: [0.9] * 40, REWARD: [0.05] * 40}),
    ("cut_and_low.yes", None, {CUT: [0.9] * 40, REWARD: [-0.95] * 40, REWARD_MAX: [1.0] * 40, REWARD_MIN: [-1.0] * 40}),
    ("cut_and_low.no", None, {CUT: [0.9] * 40, REWARD: LEARNS}),
    ("cut_and_low.no", None, {SURELY_CUT: [0.9] * 40, REWARD: LEARNS}),
    ("cut_and_low.no", None, {CUT: [0.9] * 40, REWARD: [0.5, 0.52] * 20}),  # they may be complete
    ("cut_and_low.yes", None, {SURELY_CUT: [0.9] * 40, REWARD: [0.5, 0.52] * 20}),
    ("cut_and_low.yes", None, {CUT: [1.0] * 3, REWARD: [0.0] * 3}),  # too short for a course
    ("cut_and_low.no", None, {CUT: [1.0] * 3, REWARD: [0.6] * 3}),
    ("cut_and_low.no", None, {SURELY_CUT: [0.9] * 40, REWARD: [0.97, 0.98] * 20}),  # at the ceiling
    ("cut_and_low.no", None, {SURELY_CUT: [0.9] * 10, REWARD: [0.5, 0.52] * 5}),  # too short to rise
    ("cut_and_low.no", None, {CUT: [0.1] * 40, REWARD: [0.05] * 40}),
    ("length_exploded.exploded", 21, {LENGTH: then(100, 900), REWARD: FLAT}),
    ("length_exploded.exploded", 21, {LENGTH: then(100, 900), REWARD: LEARNS, CUT: then(0.0, 0.9)}),
    ("length_exploded.grew", None, {LENGTH: then(100, 900), REWARD: LEARNS}),
    ("length_exploded.grew", None, {LENGTH: then(100, 200), REWARD: FLAT}),
    ("length_exploded.steady", None, {LENGTH: then(100, 120), REWARD: FLAT}),
    ("length_collapsed.collapsed", 21, {LENGTH: then(500, 70), REWARD: FLAT}),
    ("length_collapsed.collapsed", 21, {LENGTH: then(500, 70)}),
    ("length_collapsed.collapsed", 21, {LENGTH: then(500, 2), REWARD: LEARNS}),
    ("length_collapsed.no", None, {LENGTH: then(500, 70), REWARD: LEARNS}),
    ("length_collapsed.no", None, {LENGTH: [500] * 9 + [480]}),
    ("reward_pays_length.yes", None, LONGER | {REWARD: LEARNS}),
    ("reward_pays_length.no", None, LONGER | {REWARD: FLAT}),
    ("entropy_gone.gone", 21, {ENTROPY: then(0.5, 0.02)}),
    ("entropy_gone.low", None, {ENTROPY: then(0.5, 0.15)}),
    ("entropy_gone.kept", None, {ENTROPY: then(0.5, 0.4)}),
    ("sure_of_wrong.yes", None, {ENTROPY: then(0.5, 0.02), REWARD: FLAT} | TOP),
    ("sure_of_wrong.no", None, {ENTROPY: then(0.5, 0.02), REWARD: [0.8] * 40} | TOP),
    ("sure_of_wrong.no", None, {ENTROPY: then(0.5, 0.4), REWARD: FLAT} | TOP),
    ("entropy_exploded.exploded", 21, {ENTROPY: then(0.3, 3.0)}),
    ("entropy_exploded.exploded", 21, {ENTROPY: [0.1] * 20 + [2.0] * 10 + [0.2] * 10}),  # and came back in part
    ("entropy_exploded.rose", None, {ENTROPY: [0.1] * 20 + [0.9] * 10 + [0.2] * 10}),
    ("entropy_exploded.rose", None, {ENTROPY: then(0.3, 0.5)}),
    ("entropy_exploded.rose", None, {ENTROPY: [0.06] * 20 + [1.6] + [0.06] * 240 + [0.08] * 20}),  # a single reading
    ("entropy_exploded.steady", None, {ENTROPY: then(0.3, 0.2)}),
    ("entropy_at_fall.low", None, {ENTROPY: then(0.5, 0.02, at=10), REWARD: FELL}),
    ("entropy_at_fall.high", None, {ENTROPY: [0.5] * 40, REWARD: FELL}),
    ("gradient_large.large", 21, {GRADIENT: then(1.0, 3000.0)}),
    ("gradient_large.absurd", 1, {GRADIENT: [3e9] * 10}),
    ("gradient_large.usual", None, {GRADIENT: [60.0] * 10}),
    ("gradient_grew.grew", 21, {GRADIENT: then(0.5, 9.0)}),
    ("gradient_grew.grew", 31, {GRADIENT: [5.0] * 10 + [0.5] * 20 + [9.0] * 10}),  # from its lowest level
    ("gradient_grew.steady", None, {GRADIENT: then(0.5, 2.0)}),
    ("gradient_spike.spike", 30, {GRADIENT: then(0.5, 0.5, 29, 29) + [80.0] + [0.5] * 10}),
    ("gradient_spike.none", None, {GRADIENT: [80.0] + [0.5] * 39}),  # an optimizer that warms up
    ("gradient_spike.none", None, {GRADIENT: [0.0] * 10}),
    ("gradient_zero.zero", 21, {GRADIENT: then(0.5, 0.0)}),
    ("gradient_zero.zero", 1, {GRADIENT: [0.0] * 5}),
    ("gradient_zero.lost", 1, {GRADIENT: [0.0] * 20, ADVANTAGE_MAX: [1.0] * 20, ADVANTAGE_MIN: [-1.0] * 20}),
    ("gradient_zero.lost", 1, {GRADIENT: [0.0] * 20, DEAD_GROUPS: [0.5] * 20}),
    ("gradient_zero.lost", 1, {GRADIENT: [0.0], DEAD_GROUPS: [0.0]}),
    ("gradient_zero.some", None, {GRADIENT: [0.5, 0.0, 0.0], DEAD_GROUPS: [0.0] * 3}),
    ("gradient_zero.zero", 1, {GRADIENT: [0.0] * 20, DEAD_GROUPS: [1.0] * 20, REWARD_MAX: [1.0] * 20}),
    ("reference_kl_spiked.spiked", 10, {REFERENCE: [2.0, 2.5] * 4 + [2.0, 3395.0] + [2.0, 2.5] * 10}),
    ("reference_kl_spiked.calm", None, {REFERENCE: [2.0, 2.5] * 10}),
    ("self_gap.from_start", None, {STRIDE: [0.05, 0.06] * 10, CLIPPED: [0.2] * 20}),
    ("self_gap.from_start", None, {STRIDE: [0.002] * 20, RATE: [0.0] + [1e-6] * 19}),  # in a warm-up
    ("self_gap.small", None, {STRIDE: [1e-3] * 20}),
    ("self_gap.first", 1, {STRIDE: [0.2]}),
    ("clipped.many", None, {CLIPPED: [0.4, 0.5]}),
    ("clipped.few", None, {CLIPPED: [0.15] * 10}),  # GSPO
    ("self_gap.from_start", None, {SELF_GAP: [0.04] * 20, STRIDE: [0.0] * 20}),
    ("self_gap.small", None, {SELF_GAP: [1e-6] * 20, STRIDE: [0.05, 0.06] * 10}),  # it moves within a step
    ("memory_grew.grew", None, {MEMORY_USED[0]: line(40, 60)}),
    ("memory_grew.steady", None, {MEMORY_USED[0]: [40.0, 40.1] * 20}),
    ("gradient_zero.some", None, {GRADIENT: then(0.5, 0.0, at=37)}),
    ("reference_kl_grew.grew", 21, {REFERENCE: then(0.01, 8.0)}),
    ("reference_kl_grew.near", None, {REFERENCE: line(0.0, 0.8)}),
    ("reference_kl_grew.at_once", 1, {REFERENCE: [8.0] * 10}),  # another reference from the start
    ("reference_kl_grew.at_once", 1, {REFERENCE: [0.6]}),
    ("reference_kl_grew.grew", 21, {REFERENCE: [0.2, *then(0.2, 8.0)[1:]]}),
    ("stride.far", 25, {STRIDE: then(0.001, 0.2)}),
    ("stride.near", None, {STRIDE: [0.004] * 10}),
    ("stride.near", None, {STRIDE: then(0.06, 0.2)}),  # bypass mode: steady from the first step
    ("rate.high", None, {RATE: line(0.0, 1e-2)}),
    ("rate.usual", None, {RATE: [1e-6] * 10}),
    ("not_finite.training", 21, {GRADIENT: then(0.5, NAN), K3: then(1e-4, NAN)}),
    ("not_finite.training", 20, {GRADIENT: then(0.5, INF, at=21), LOSS: then(0.0, NAN, at=19)}),
    ("not_finite.training", 1, {GRADIENT: [NAN] * 5}),  # never a number
    ("not_finite.critic", 1, {GRADIENT: [0.5], "critic/vf_loss": [NAN]}),
    ("not_finite.gradient", 21, {GRADIENT: then(0.5, NAN), K3: then(1e-4, 1e-4)}),  # the weights are as before
    ("not_finite.training", 40, {GRADIENT: [0.5] * 39 + [NAN], LOSS: [0.0] * 39 + [NAN], K3: [1e-4] * 40}),
    ("not_finite.reference", 1, {"actor/kl_loss": [NAN] * 5, GRADIENT: [0.5] * 5}),
    ("not_finite.training", 1, {"actor/kl_loss": [NAN] * 5}),  # the update is not logged
    ("not_finite.training", 21, {GRADIENT: [0.5] * 4 + [NAN] + [0.5] * 15 + [NAN] * 10, LOSS: [NAN] + [0.0] * 29}),
    ("not_finite.training", 21, {GRADIENT: [0.5] * 20 + [NAN] * 3 + [0.5] * 2}),
    ("not_finite.reward", 21, {REWARD: then(0.5, NAN), GRADIENT: [0.5] * 40}),
    ("not_finite.reward", 1, {REWARD: [NAN] * 5, K3: [NAN] * 5}),
    ("not_finite.reward", 1, {GRADIENT: [NAN] * 5, "rewards/grader/mean": [NAN] * 5}),  # one reward of several
    ("not_finite.rollout", 21, {K3: then(1e-4, NAN), GRADIENT: [0.5] * 40}),
    ("not_finite.once", 21, {GRADIENT: [0.5] * 20 + [INF] + [0.5] * 19}),
    ("not_finite.once", 40, {GRADIENT: [0.5] * 39 + [INF]}),  # a loss scaler's
    ("not_finite.training", 40, {GRADIENT: [0.5] * 39 + [INF], LOSS: [0.0] * 39 + [NAN]}),  # pasted up to there
    ("not_finite.once", 39, {LOSS: [0.0] * 38 + [NAN, 0.0]}),
    ("not_finite.training", 40, {LOSS: [0.0] * 39 + [NAN]}),  # no gradient tells more
    ("not_finite.once", 40, {LOSS: [0.0] * 39 + [NAN], GRADIENT: [0.5] * 40}),  # the update was finite
    ("not_finite.once", 40, {K3: [1e-4] * 39 + [INF], GRADIENT: [0.5] * 40}),
    ("not_finite.spread", 1, {REWARD: [0.25], "reward_std": [NAN], GRADIENT: [NAN]}),  # groups of one answer
    ("not_finite.training", 1, {REWARD: [0.25] * 3, "reward_std": [0.1, 0.1, NAN], GRADIENT: [NAN] * 3}),
    ("not_finite.no", None, {GRADIENT: [0.5] * 40}),
    ("correction_on.on", None, {DROPPED: [0.01] * 10}),
    ("correction_on.on", None, {WEIGHT: [0.98] * 10}),
    ("correction_on.far", None, {WEIGHT: [0.5] * 10}),
    ("answers_loop.many", 21, {LOOPS: then(0.0, 0.4)}),
    ("answers_loop.some", 21, {LOOPS: then(0.0, 0.1)}),
    ("answers_loop.few", None, {LOOPS: [0.01] * 10}),
    ("answers_empty.many", 21, {EMPTY: then(0.0, 0.4)}),
    ("answers_empty.some", 21, {EMPTY: then(0.0, 0.1)}),
    ("answers_empty.few", None, {EMPTY: [0.0] * 10}),
    ("answers_cut.few", None, {SURELY_CUT: [0.0] * 10, CUT: [0.9] * 10}),  # the longest end by themselves
    ("log_probs_filled.some", 21, {FILLED: then(0.0, 0.02)}),
    ("log_probs_filled.none", None, {FILLED: [0.02] + [0.0] * 39}),
]


@pytest.mark.parametrize(("mark", "step", "metrics"), CASES, ids=[mark for mark, _, _ in CASES])
def test_level_and_step(mark, step, metrics):
    assert seen_as(mark, run_of(metrics)) == (mark, step)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("answers_cut", {CUT: then(0.1, 0.9)}),
        ("length_exploded", {LENGTH: then(100.0, 900.0)}),
        ("length_collapsed", {LENGTH: then(900.0, 9.0)}),
        ("gradient_large", {GRADIENT: then(1.0, 900.0)}),
    ],
)
def test_a_value_of_now_is_not_told_as_of_the_step_at_which_it_began(name, metrics):
    found = find_all(run_of(metrics))[name]
    assert found.step == 21 and re.search(r"\bstep 21\b", found.text)


ENDINGS = [
    ("run_ended.memory", "ended with torch.OutOfMemoryError: CUDA out of memory"),
    ("run_ended.memory", "ended with CUDA error: out of memory"),
    ("run_ended.hang", "ended by a timeout of NCCL (the watchdog)"),
    ("run_ended.user", "ended at step 7 in the update by its user (KeyboardInterrupt)"),
    ("run_ended.user", "ended by a cancelled Slurm job"),
    ("run_ended.error", "ended with ValueError: no such file"),
    ("run_ended.late", "ended with TimeoutError: the grader timed out"),
    ("run_ended.late", "ended by ray.exceptions.RayTaskError(TimeoutError): ray::Manager.generate()"),
    ("run_ended.late", "ended in the rollout by httpx.ReadTimeout"),
    ("run_ended.error", "ended by wandb.errors.CommError: Run initialization has timed out after 90.0 sec"),
    ("run_ended.error", "ended by RuntimeError: CUDA error: the launch timed out and was terminated"),
    ("run_ended.connection", "ended by a broken connection between processes: mlx5: got completion with error"),
    ("run_ended.connection", "ended in the reward by requests.exceptions.ConnectionError: HTTPConnectionPool"),
    ("run_ended.connection", "ended by torch.distributed.DistBackendError: NCCL error: unhandled system error"),
    ("run_ended.hang", "ended by ray.exceptions.GetTimeoutError: Get timed out"),
    ("run_ended.not_finite", "ended by RuntimeError: found NaN in local grad norm for bucket #0"),
    ("run_ended.not_finite", "ended by RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
    ("run_ended.disk", "ended by OSError: [Errno 28] No space left on device"),
    ("run_ended.environment", "ended by ImportError: x.so: undefined symbol: y"),
    ("run_ended.index", "ended by x.cu:1: indexSelectLargeIndex: block: [259,0,0] Assertion `srcIndex < n` failed."),
    ("run_ended.refused", "ended in the weight sync by RuntimeError: size mismatch for lm_head.weight"),
    ("run_ended.refused", "ended before its first step by TypeError: got an argument"),
    ("ended_in.host", "ended in the log-probs by Ray's memory monitor"),
    ("ended_in.host", "ended by a kill (SIGKILL)"),
    ("ended_in.cache", "ended in the rollout by ValueError: No available memory for the cache blocks"),
    ("ended_in.scheduler", "ended by Slurm's time limit"),
    ("ended_in.first", "ended by a timeout of NCCL (the watchdog): ranks 0, 1 in ALLREDUCE 1, for 600 s"),
    ("ended_in.sync", "ended in the weight sync by KeyError: 'a'"),
    ("ended_in.checkpoint", "ended in a checkpoint by KeyError: 'a'"),
    ("ended_in.log_probs", "ended in the log-probs by KeyError: 'a'"),
    ("ended_in.update", "ended at step 7 in the update by KeyError: 'a'"),
    ("ended_in.critic", "ended in the critic's update by KeyError: 'a'"),
    ("ended_in.reward", "ended before its first step in the reward by KeyError: 'a'"),
    ("ended_in.rollout", "ended by RuntimeError: vLLM's engine is dead"),
    ("ended_in.start", "ended before its first step by RuntimeError: server launch failed"),
]


@pytest.mark.parametrize(("mark", "reason"), ENDINGS)
def test_what_ended_a_run(mark, reason):
    assert seen_as(mark, run_of({REWARD: [0.5] * 7}, ending=Ending(7, reason))) == (mark, 7)
    assert "run_ended" not in find_all(run_of({REWARD: [0.5] * 7}))


def test_every_level_has_a_case():
    assert {mark for mark, *_ in (*CASES, *ENDINGS)} == levels_of(answers, entropy, finite, gradient)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("answers_cut", {LENGTH: line(100, 200)}),
        ("cut_began", {CUT: [0.1] * 10}),  # too few are cut
        ("length_exploded", {LENGTH: [100.0, 900.0]}),
        ("reward_pays_length", {REWARD: LEARNS, LENGTH: line(100, 300)}),
        ("entropy_gone", {ENTROPY: [-0.1] * 10}),
        ("entropy_at_fall", {ENTROPY: then(0.5, 0.02), REWARD: LEARNS}),  # no fall
        ("gradient_grew", {GRADIENT: [0.5] * 6 + [50.0]}),
        ("stride", {STRIDE: [0.0] * 10}),  # one update a step
        ("correction_on", {WEIGHT: [1.0] * 10}),
        ("not_finite", {REWARD: [0.5] * 10}),
    ],
)
def test_what_is_not_logged_or_too_short_shows_nothing(name, metrics):
    assert name not in find_all(run_of(metrics))


def test_a_length_that_is_logged_only_later_shows_no_growth():
    pairs = {REWARD: [*enumerate(FLAT, 1)], LENGTH: [*zip(range(21, 41), line(100, 900, 20), strict=True)]}
    assert "length_exploded" not in find_all(Readings.of_pairs(pairs))


# --------------------------------------------------------------------------------------------------------- all findings


OTHERS = (
    *(SHORTEST, LONGEST, "critic/score/std", "val-core/gsm8k/acc/mean@1", "val-core/math/reward/mean@8"),
    *("vllm_kl/k3/lag/0", "vllm_kl/engine/k3", "vllm_kl/prob_diff_mean", LOSS, "actor/loss", "correction/weight_mean"),
    *("training/rollout_actor_probs_pearson_corr", "training/off_policy/trajectory_staleness/mean", "guard/level"),
    *("perf/total_num_tokens", "prompt_length/mean", "router/tokens", "router/own_agreement", DROPPED, WEIGHT),
    *("sync/arrived_median", "sync/followed", "router/agreement/layer_02"),
    *(f"vllm_kl/{k}/prob/{bucket}" for k in ("k1", "k3") for bucket in BUCKETS["prob"]),
)
NAMES = sorted({name for rule in RULES.values() for name in rule.needs if name[-1] not in "/_"} | set(OTHERS))
ODD = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 5e-324, 1e-200, 1e99, -1e99, 1e200, 1e308, -1e308])
SIZES = {
    "any": st.floats(),
    "odd": ODD,
    "shares": st.floats(0, 1),
    "gaps": st.floats(-15, 3).map(lambda power: 10.0**power),
    "signed": st.floats(-10, 10),
    "mostly shares": st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), ODD),
}


@st.composite
def runs(draw):
    """Runs of some of the metrics, each with values of one kind, at steps with holes."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=30))
    steps = sorted(draw(st.sets(st.integers(0, 70), max_size=40)))
    values = SIZES[draw(st.sampled_from(sorted(SIZES)))]
    metrics = {}
    for name in names:
        if draw(st.integers(0, 4)) == 0:  # all equal
            metrics[name] = [(step, value) for value in [draw(values)] for step in steps]
        elif draw(st.booleans()):
            metrics[name] = [(step, draw(values)) for step in steps]
        else:
            metrics[name] = [(step, draw(values)) for step in steps if step % draw(st.integers(1, 4)) == 0]
    return metrics


def check_findings(metrics):
    """Checks what holds for the findings of any run."""
    found = find_all(Readings.of_pairs(metrics))
    steps = {step for pairs in metrics.values() for step, _ in pairs}
    for name, each in found.items():
        rule = RULES[name]
        assert each.name == name and each.level in rule.levels
        assert each.notable == (each.level not in rule.usual)
        assert each.text.strip() == each.text != "" and len(each.text.splitlines()) == 1, each
        assert not re.search(r"\bnan\b", each.text), each
        assert each.step is None or (type(each.step) is int and each.step in steps), each
    told = notable(found)
    assert {each.name for each in told} == {name for name, each in found.items() if each.notable}
    begun = [each.step for each in told if each.step is not None]
    assert begun == sorted(begun) and all(each.step is None for each in told[len(begun) :])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(runs())
def test_any_run_has_findings_that_can_be_read(metrics):
    check_findings(metrics)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(8))
def test_any_run_with_many_metrics_has_findings_that_can_be_read(seed):
    """Random values find more of what depends on several metrics than examples do that are made to be small."""
    dice = np.random.default_rng(seed)
    odd = [NAN, INF, 0.0, -1.0, 1e99, -1e99, 1e308, 5e-324, 1.0]
    for _ in range(12):
        steps = np.sort(dice.choice(70, dice.integers(0, 41), replace=False)).tolist()
        names = dice.choice(NAMES, dice.integers(1, len(NAMES) + 1), replace=False).tolist()
        share, whole = dice.random(), 10.0 ** dice.uniform(-15, 3)
        metrics = {}
        for name in names:
            values = whole * dice.random(len(steps)) if dice.random() < share else dice.normal(size=len(steps))
            spoiled = dice.random(len(steps)) < dice.choice([0.0, 0.1, 0.9])
            values[spoiled] = dice.choice(odd, int(spoiled.sum()))
            metrics[name] = list(zip(steps, values.tolist(), strict=True))
        check_findings(metrics)
