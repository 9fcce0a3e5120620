"""The findings of the guard: each level in a run made for it, and none in a quiet run."""

import numpy as np
import pytest

from tests.support.findings import levels_of, run_of, seen_as
from verl_ext.diagnosis.findings import guard
from verl_ext.diagnosis.findings.registry import find_all
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, PROB_DIFF, REWARD
from verl_ext.diagnosis.series import Act, Readings, Series

NAN = float("nan")
STALE = "training/off_policy/trajectory_staleness/mean"
QUIET, APART = [1e-3] * 40, [1e-3] * 45 + [0.3] * 75
HALVED, FORETOLD = [0.6] * 60 + [0.19] * 60, [1000.0] * 40 + [15.0] * 80
FALLS = np.exp(-0.1 * np.arange(40))
CASES = [
    ("past_boundary.engines", {K3: [0.2, 0.21] * 20}),
    ("past_boundary.engines", {K3: QUIET, "guard/boundary": [1e-4] * 40}),
    ("past_boundary.with_movement", {K3: [0.2] * 40, STALE: [2.0] * 40, f"{K3}/lag/0": QUIET}),
    ("nears_boundary.ahead", {K3: 1e-3 / FALLS}),
    ("nears_boundary.skips", {K3: 1e-3 / FALLS, f"{K3}/lag/0": QUIET, "guard/threshold": [0.1] * 40}),
    ("probabilities_apart.past_limit", {PROB_DIFF: [0.07] * 40}),
    ("above_level.above", {K3: QUIET, "guard/level": [1e-4] * 40}),
    ("gap_not_measured.lately", {K3: [1e-4] * 20 + [NAN] * 40, REWARD: [0.5] * 60}),
    ("gap_of_engines.known", {K3: [0.02] * 40, STALE: [2.0] * 40, f"{K3}/lag/0": QUIET}),
    ("rollouts_old.old", {K3: QUIET, STALE: [2.5] * 40}),
    ("experts_agree.low", {"router/agreement": [0.97] * 40}),
    ("experts_agree.usual", {"router/agreement": [0.99] * 40}),
    ("updates_skipped.most", {"guard/skipped": [0] * 34 + [1] * 6}),
    ("updates_skipped.some", {"guard/skipped": [1, 0, 0] + [0] * 30 + [0.5] * 10}),
    ("updates_skipped.none", {"guard/skipped": [0] * 40}),
    ("tokens_dropped.many", {"correction/dropped": [0.08] * 40}),
    ("tokens_dropped.some", {"correction/dropped": [0.01] * 40}),
    ("tokens_dropped.none", {"correction/dropped": [0.0] * 40}),
    ("mask_blind.blind", {K3: 1e-3 / FALLS, "correction/dropped": FALLS / 100, "guard/mask_blind": [1.0] * 40}),
    ("warned_before.passed", {REWARD: HALVED, K3: APART}),
    ("warned_before.forecast", {REWARD: HALVED, "guard/steps_to_boundary": FORETOLD}),
    ("warned_before.both", {REWARD: HALVED, K3: APART, "guard/steps_to_boundary": FORETOLD}),
    ("k3_moved.moved", {REWARD: HALVED, K3: APART}),
    ("gradient_moved.moved", {REWARD: HALVED, GRADIENT: [0.5] * 50 + [2.0] * 70}),
    ("entropy_moved.moved", {REWARD: HALVED, ENTROPY: [0.5] * 50 + [0.1] * 70}),
    ("length_moved.moved", {REWARD: HALVED, LENGTH: [500.0] * 50 + [900.0] * 70}),
]
# Mark, and the guard's decisions as (step, rule, action) in a run of 40 steps.
ACTED = [
    *((f"guard_{action}.lately", [(31, "gap", action)]) for action in guard.ACTS),
    *((f"guard_{action}.earlier", [(30, "gap", action)]) for action in guard.ACTS),
    ("guard_undo.failed", [(40, "gap", "undo"), (40, "undo", "warn")]),
    ("guard_rollback.failed", [(40, "gap", "rollback"), (40, "rollback", "stop")]),
    ("guard_warned.warned", [(3, "gap", "warn"), (5, "gap", "tighten")]),
]


@pytest.mark.parametrize(("mark", "metrics"), CASES)
def test_a_level_is_found_in_its_run(mark, metrics):
    assert seen_as(mark, run_of(metrics))[0] == mark
    assert mark.partition(".")[0] not in find_all(run_of({K3: QUIET, REWARD: np.linspace(0.2, 0.6, 40)}))


@pytest.mark.parametrize(("mark", "acts"), ACTED)
def test_what_the_guard_did_is_found_with_its_last_step(mark, acts):
    decided = [Act(2, "gap", acts[0][2], "old"), *(Act(*act, "made up.") for act in acts)]
    run = Readings({K3: Series(np.arange(1, 41), np.array(QUIET))}, acts=decided)
    found = find_all(run)[mark.partition(".")[0]]
    assert found.mark == mark and f"step {acts[-1][0]}" in found.text
    assert found.step == (None if mark.startswith("guard_warned") else acts[0][0])


def test_every_level_is_of_some_case():
    assert {mark for mark, _ in (*CASES, *ACTED)} == levels_of(guard)
