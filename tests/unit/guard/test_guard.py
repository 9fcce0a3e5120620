import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.guarding import guarded_step
from verl_ext.base.errors import ConfigError
from verl_ext.diagnosis.names import LOG_RATIO
from verl_ext.guard.guard import REFUSED, Guard, Limit
from verl_ext.guard.rules import Rule
from verl_ext.guard.state import Boundary

SKIP = Rule("batch_skip", "vllm_kl/k3", 0.1, action="skip", setting="stability.batch_skip.threshold")


def run_step(guard, step, early=None, late=None):
    """Runs one step; returns the decided actions, in order."""
    early = {"vllm_kl/k3": 1e-4} if early is None else early
    _, events = guarded_step(guard, step, early, {"actor/grad_norm": 1.0} if late is None else late)
    return [event.action for event in events]


@pytest.mark.parametrize(
    ("k3", "skip"), [(0.01, False), (0.1, False), (0.11, True), (math.nan, True), (math.inf, True)]
)
def test_a_batch_past_the_threshold_or_not_finite_is_refused(k3, skip):
    guard = Guard([SKIP])
    assert run_step(guard, 1, {"vllm_kl/k3": k3}) == ["skip"] * skip
    assert guard.state.skips == skip


def test_zero_mismatch_names_the_first_step_layer_and_positions():
    def events_of(action, gaps):
        settings = {"engines_only": True, "locate": True, "setting": "stability.guard.rules.zero_mismatch.above"}
        guard, found = Guard([Rule("zero_mismatch", "vllm_kl/k3", 1e-10, action=action, **settings)]), []
        for step, k3 in enumerate(gaps, 1):
            guard.begin(step)
            layers = {"router/agreement/layer_00": 1.0, "router/agreement/layer_01": 1.0 - (k3 > 1e-10) / 8}
            places = {"vllm_kl/k3/position/0-256": 0.0, "vllm_kl/k3/position/256-1024": 2 * k3}
            found += guard.judge({"vllm_kl/k3": k3} | layers | places).events
        return found

    first, back = events_of("warn", [3e-14, 1e-10, 1e-4, 1e-4, 0.0])
    assert (first.step, first.action) == (3, "warn") and (back.step, back.action) == (5, "recover")
    assert first.reason == (
        "vllm_kl/k3=0.0001 (routers disagree from layer 1 on; the gap begins at positions 256-1024) passes "
        "stability.guard.rules.zero_mismatch.above=1e-10"
    )
    assert [event.action for event in events_of("stop", [0.0, 1e-9])] == ["stop"]


def test_non_finite_log_probs_refuse_and_name_the_tensor():
    guard = Guard()
    guard.begin(1)
    assert guard.judge({}, {"rollout_log_probs": 3, "old_log_probs": 0}).refusal.reason == (
        "rollout_log_probs has 3 non-finite values"
    )


@pytest.mark.parametrize("signal", ["vllm_kl/k1", "actor/entropy", "critic/score/mean", "my/own"])
def test_any_signal_that_is_not_finite_refuses(signal):
    guard = Guard([Rule("own", "my/own", 1.0)])
    assert run_step(guard, 1, {signal: math.nan}) == ["skip"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [{}, {"zscore_window": 8}, {"baseline": 3}])
@pytest.mark.parametrize(
    ("action", "early", "late"),
    [
        ("warn", "skip", "warn"),
        ("tighten", "skip", "warn"),
        ("lower_lr", "skip", "lower_lr"),
        ("undo", "undo", "undo"),
        ("rollback", "rollback", "rollback"),
        ("stop", "stop", "stop"),
    ],
)
def test_a_signal_that_is_not_finite_has_its_rules_action(value, bound, action, early, late):
    rule = Rule("own", "my/own", 1.0, action=action, patience=3, **bound)
    assert run_step(Guard([rule]), 1, {"my/own": value}) == [early]
    guard = Guard([rule])
    assert run_step(guard, 1, late={"my/own": value}) == [late]
    assert (guard.lr_scale < 1) is (action == "lower_lr") and not guard.unread
    assert run_step(guard, 2, late={"my/own": 0.5}) == [], "the value counts for no later reading"


def test_each_rule_of_a_signal_that_is_not_finite_acts():
    rules = [Rule(action, "my/own", 1.0, action=action) for action in ("warn", "lower_lr", "rollback")]
    assert run_step(Guard(rules), 1, late={"my/own": math.nan}) == ["lower_lr", "rollback"]


def test_rollbacks_at_what_is_not_finite_keep_the_cooldown():
    rule = Rule("moved", "actor/after_update/policy_kl", 0.05, action="rollback")
    guard = Guard([rule], cooldown=2, max_rollbacks=1)
    late = {rule.signal: math.inf}
    assert run_step(guard, 1, late=late) == ["rollback"]
    guard.rolled_back(to=0)
    assert [run_step(guard, step, late=late) for step in (2, 3, 4)] == [["warn"], ["warn"], ["stop"]]
    guard = Guard([REWARD], cooldown=1)
    guard.begin(1)
    guard.rolled_back(to=0)
    early = {"critic/score/mean": math.nan}
    assert [run_step(guard, step, early) for step in (2, 3)] == [["skip"], ["rollback"]]


def test_a_gradient_that_is_not_finite_is_no_good_update():
    guard = Guard(stop_after=2)
    assert run_step(guard, 1, late={"actor/grad_norm": math.nan}) == ["warn"]
    assert guard.state.in_a_row == 1
    assert run_step(guard, 2, late={"actor/grad_norm": math.inf}) == ["warn", "stop"]
    assert guard.state.skips == 0, "the batch was not refused"


def test_mini_batches_that_the_workers_refused_are_told():
    guard = Guard()
    assert run_step(guard, 1, late={REFUSED: 0.25}) == ["warn"]
    assert guard.state.in_a_row == 0
    assert run_step(guard, 2, late={REFUSED: 1.0}) == ["warn"]
    assert guard.state.in_a_row == 1, "a step of which no mini-batch was taken"


def test_the_run_stops_after_steps_in_a_row_without_an_update():
    guard = Guard([SKIP], stop_after=3)
    bad = {"vllm_kl/k3": 1.0}
    assert run_step(guard, 1, bad) == run_step(guard, 2, bad) == ["skip"]
    run_step(guard, 3)
    assert guard.state.in_a_row == 0
    actions = [run_step(guard, step, bad) for step in (4, 5, 6)]
    assert actions[-1] == ["skip", "stop"] and guard.state.skips == 5


def test_of_several_updates_in_a_step_one_good_one_is_enough():
    guard = Guard([SKIP], stop_after=1)
    guard.begin(1)
    for k3 in (1.0, 1e-4):
        guard.count(guard.judge({"vllm_kl/k3": k3}).refusal is not None)
    assert guard.state.skips == 1
    assert guard.close().events == ()


def test_tighten_lasts_until_the_rule_recovers():
    rule = Rule("gap", "vllm_kl/k3", 0.01, action="tighten", recover=0.005)
    guard = Guard([rule])
    seen = []
    for step, k3 in enumerate((0.001, 0.02, 0.008, 0.004, 0.008), start=1):
        run_step(guard, step, {"vllm_kl/k3": k3})
        seen.append(guard.tightens)
    assert seen == [False, True, True, False, False]
    assert run_step(guard, 6, {"vllm_kl/k3": 0.02}) == ["tighten"]
    assert run_step(guard, 7, {"vllm_kl/k3": 0.02}) == []
    assert run_step(guard, 8, {"vllm_kl/k3": 0.001}) == ["recover"]


def test_a_rule_that_recovers_is_told_once_and_a_skip_each_time():
    guard = Guard([SKIP, Rule("w", "vllm_kl/k3", 0.05)])
    bad = {"vllm_kl/k3": 0.2}
    assert run_step(guard, 1, bad) == ["skip", "warn"]
    assert run_step(guard, 2, bad) == ["skip"]
    assert run_step(guard, 3) == ["recover", "recover"]


REWARD = Rule("reward", "critic/score/mean", 0.5, side="below", action="rollback")
GOOD, BAD = {"critic/score/mean": 1.0}, {"critic/score/mean": 0.0}


def test_after_a_rollback_comes_no_other_for_the_cooldown():
    guard = Guard([REWARD], cooldown=2)
    run_step(guard, 1, GOOD)
    guard.begin(2)
    decision = guard.judge(BAD)
    assert decision.first("rollback") and decision.refusal
    assert guard.rolled_back(to=1).action == "restored"
    assert guard.state.rollbacks == 1
    actions = [run_step(guard, step, BAD)[0] for step in (3, 4, 5)]
    assert actions == ["skip", "skip", "rollback"]


def test_after_so_many_rollbacks_the_run_stops():
    guard = Guard([REWARD], cooldown=0, max_rollbacks=1)
    run_step(guard, 1, BAD)
    guard.rolled_back(to=0)
    assert run_step(guard, 2, BAD) == ["stop"]


def test_a_rollback_forgets_what_the_given_up_weights_did():
    patient = Rule("patient", "critic/score/mean", 0.5, side="below", action="rollback", patience=2)
    guard = Guard([patient])
    for step in range(1, 5):
        run_step(guard, step, {"vllm_kl/k3": 1e-4} | (GOOD if step < 4 else BAD))
    guard.state.good = [1, 3, 4]
    guard.rolled_back(to=1)
    assert guard.state.good == [] and guard.state.unproven == [(1, 4)], "proven anew"
    assert [step for step, _ in guard.state.growth] == [1, 2], "step 2 measured the weights of checkpoint 1"
    assert guard.state.rules["patient"].streak == 0


def test_a_checkpoint_is_good_once_a_later_step_measured_it():
    guard = Guard([Rule("r", "vllm_kl/k3", 0.05, action="tighten", patience=3), Rule("w", "vllm_kl/k3", 0.0)])
    run_step(guard, 1)
    guard.saved(1)
    run_step(guard, 2, {"vllm_kl/k3": 0.06})
    guard.saved(2)
    run_step(guard, 3)
    guard.saved(3)
    guard.begin(4)
    assert guard.state.good == [2], "in step 2, the rule counts towards firing"
    assert guard.state.unproven == [(3, 3)]


def test_what_is_logged_last_still_counts_for_its_checkpoint():
    guard = Guard([Rule("length", "response_length/mean", 9.0, action="rollback")])
    run_step(guard, 1)
    guard.saved(1)
    run_step(guard, 2)
    guard.saved(2)
    assert guard.judge_late({"response_length/mean": 5.0}).events == ()
    run_step(guard, 3)
    assert guard.judge_late({"response_length/mean": 10.0}).first("rollback")
    guard.begin(4)
    assert guard.state.good == [1] and guard.state.unproven == []


def test_a_step_without_an_update_leaves_the_proof_to_the_next():
    guard = Guard([SKIP])
    run_step(guard, 1)
    guard.saved(1)
    run_step(guard, 2, {"vllm_kl/k3": 1.0})
    guard.begin(3)
    assert guard.state.unproven == [(1, 1)], "its weights are still those of step 1"
    run_step(guard, 3)
    guard.begin(4)
    assert guard.state.good == [1]


def test_a_second_rollback_goes_further_back_than_the_first():
    guard = Guard([REWARD], cooldown=0)
    guard.state.good = [1, 2, 3]
    guard.begin(4)
    guard.rolled_back(to=3)
    guard.begin(5)
    guard.judge(BAD)
    guard.count(True)
    assert guard.state.good == [1, 2]


def test_numpys_scalars_become_pythons():
    guard = Guard([Rule("v", "val-core/acc", 0.5, side="below")])
    guard.begin(1)
    (event,) = guard.judge_late({"val-core/acc": np.float64(0.25), "x": "text"}).events
    assert type(event.value) is float
    guard = Guard([Rule("t", "turns", 2.0, zscore_window=8)])
    for step in range(9):
        guard.begin(step)
        guard.judge_late({"turns": np.int64(step % 3)})
    json.dumps(guard.state_dict())


def test_a_signal_that_comes_with_the_update_cannot_skip_it():
    guard = Guard([Rule("mine", "my/late", 1.0, action="skip")])
    with pytest.raises(ConfigError, match=r"rules\.mine: my/late comes with the update"):
        run_step(guard, 1, late={"my/late": 0.0})


def test_a_late_signal_is_judged_once_and_an_early_one_not_again():
    guard = Guard([Rule("early", "vllm_kl/k3", 0.05, patience=2), Rule("late", "actor/grad_norm", 5.0, patience=2)])
    guard.begin(1)
    guard.judge({"vllm_kl/k3": 0.06})
    for _ in range(3):
        assert guard.judge_late({"vllm_kl/k3": 0.06, "actor/grad_norm": 9.0}).events == ()
    assert guard.state.rules["early"].streak == guard.state.rules["late"].streak == 1
    assert guard.unread == set()


def test_a_missed_weight_sync_is_suspected_once_at_a_jump():
    guard = Guard()
    usual = {LOG_RATIO: 0.01}
    for step in range(1, 6):
        assert run_step(guard, step, {LOG_RATIO: 0.01 * (1 + 0.1 * step)}) == []
    guard.begin(6)
    _, jump = guard.foresee({LOG_RATIO: 0.08})
    assert jump.events[0].rule == "weight_sync" and jump.events[0].action == "warn"
    assert "did the last weight sync reach every rollout engine?" in jump.events[0].reason
    assert run_step(guard, 7, {LOG_RATIO: 0.08}) == []
    assert run_step(guard, 8, usual) == []
    assert run_step(guard, 9, {LOG_RATIO: 0.08}) == ["warn"]


def test_growth_is_no_jump():
    guard = Guard()
    assert not any(run_step(guard, step, {LOG_RATIO: 1e-4 * 1.3**step}) for step in range(1, 60))


def test_a_rule_may_read_the_forecast():
    rule = Rule("near", "guard/steps_to_boundary", 20, side="below", action="tighten")
    guard = Guard([rule], boundary=Boundary(value=0.1))
    first = next(step for step in range(1, 100) if run_step(guard, step, {"vllm_kl/k3": 1e-4 * 1.1**step}))
    k3 = 1e-4 * 1.1**first
    assert 0 < math.log(0.1 / k3) / math.log(1.1) <= 20
    assert guard.tightens


RULES = [
    SKIP,
    Rule("spike", "actor/grad_norm", 4.0, zscore_window=10),
    Rule("gap", "vllm_kl/k3", 0.02, action="tighten", recover=0.01, patience=2),
    REWARD,
]
STEP = st.tuples(
    st.floats(1e-6, 0.5) | st.just(math.nan), st.floats(0, 1), st.floats(0.1, 10) | st.just(math.inf), st.booleans()
)


def play(guard, series, first):
    """Returns the decisions on a series, saving checkpoints where the series asks for it and carrying out rollbacks."""
    decisions = []
    for step, (k3, reward, norm, save) in enumerate(series, start=first):
        actions = run_step(guard, step, {"vllm_kl/k3": k3, "critic/score/mean": reward}, {"actor/grad_norm": norm})
        if "rollback" in actions and guard.state.good:
            guard.rolled_back(guard.state.good[-1])
        if save:
            guard.saved(step)
        decisions.append((actions, guard.tightens, tuple(guard.state.good)))
    return decisions


def new_guard():
    return Guard(RULES, stop_after=4, cooldown=3, boundary=Boundary(window=12))


@settings(deadline=None)
@given(st.lists(STEP, min_size=1, max_size=40), st.integers(0, 40))
def test_a_resumed_run_decides_as_one_that_never_stopped(series, cut):
    whole = new_guard()
    expected = play(whole, series, 1)
    first = new_guard()
    decisions = play(first, series[:cut], 1)
    second = new_guard()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    decisions += play(second, series[cut:], 1 + len(series[:cut]))
    assert decisions == expected
    assert second.state_dict() == whole.state_dict()


def test_state_of_another_set_of_rules_can_be_loaded():
    old = Guard([SKIP])
    run_step(old, 1, {"vllm_kl/k3": 1.0})
    new = Guard([REWARD])
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.state.skips == 1 and new.state.rules.keys() == {"reward"}
    new.load_state_dict({"skips": 3})  # of a version before rules
    assert new.state.skips == 3


def test_a_rule_whose_signal_changed_starts_anew():
    old = Guard([Rule("r", "a", 0.0, patience=5)], boundary=Boundary(signal="a"))
    run_step(old, 1, {"a": 1.0})
    new = Guard([Rule("r", "b", 0.0, patience=5)], boundary=Boundary(signal="b"))
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.state.rules["r"].streak == 0 and new.state.growth == []


def test_the_limits_are_of_rules_that_can_refuse_the_next_batch():
    rollback = Rule("gap", "vllm_kl/prob_diff_mean", 0.05, action="rollback", patience=2)
    guard = Guard([SKIP, rollback, Rule("ess", "vllm_kl/ess", 0.5, side="below", action="warn")])
    assert guard.limits == (Limit(SKIP, 0.1),)
    run_step(guard, 1, {"vllm_kl/k3": 1e-4, "vllm_kl/prob_diff_mean": 0.06})
    assert guard.limits == (Limit(SKIP, 0.1), Limit(rollback, 0.05))


@pytest.mark.parametrize(
    ("value", "side", "expected"),
    [
        (0.1, "above", False),
        (0.2, "above", True),
        (0.05, "below", True),
        (math.nan, "above", True),
        (-math.inf, "above", True),
        (None, "above", False),
    ],
)
def test_a_value_at_its_limit_is_not_past_it_and_nan_is(value, side, expected):
    signals = {} if value is None else {"x": value}
    assert Limit(Rule("r", "x", 9.0, side=side), 0.1).is_past(signals) is expected


OLD = {"vllm_kl/k3": 0.5, "vllm_kl/share/lag/8-": 0.5}


@pytest.mark.parametrize("action", ["skip", "stop"])
@pytest.mark.parametrize(
    ("signals", "refused"),
    [
        ({"vllm_kl/k3": 0.5}, True),
        (OLD, False),
        (OLD | {"vllm_kl/k3/lag/0": 0.05}, False),
        (OLD | {"vllm_kl/k3/lag/0": 0.2}, True),
        (OLD | {"vllm_kl/k3": math.nan}, True),
    ],
)
def test_the_limit_of_a_rule_on_the_engines_judges_their_part(action, signals, refused):
    guard = Guard([Rule("engines", "vllm_kl/k3", 0.1, action=action, engines_only=True)])
    guard.begin(1)
    (limit,) = guard.limits
    assert limit.is_past(signals) is refused is (guard.judge(signals).refusal is not None)
