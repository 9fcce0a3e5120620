import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import Rule

GAP = Rule("gap", "vllm_kl/k3", 0.1, action="undo", setting="s.above")
MOVED = Rule("moved", "actor/after_update/policy_kl", 0.1, action="undo", setting="s.above")


def step(guard, number, k3=0.01, moved=None):
    """Runs one step, and carries out its decisions as the trainer does, whose workers keep the last update."""
    guard.begin(number)
    before = guard.judge({"vllm_kl/k3": k3})
    guard.count(before.refusal is not None)
    after = guard.judge_late({} if moved is None else {MOVED.signal: moved})
    events = [*before.events, *after.events]
    if any(event.action == "undo" for event in events):
        kept = number if guard.state.updated else number - 1
        events.append(guard.undone(kept if kept > guard.state.given_up else None))
    return [event.action for event in [*events, *guard.close().events]]


def test_a_gap_takes_the_update_before_it_back_and_the_next_bad_batch_is_a_skip():
    guard = Guard([GAP], cooldown=2)
    assert [step(guard, n, k3) for n, k3 in enumerate([0.01, 0.01, 0.2, 0.2, 0.01, 0.01, 0.2], start=1)] == [
        [], [], ["undo", "restored"], ["skip"], ["recover"], [], ["undo", "restored"],
    ]  # fmt: skip
    assert guard.state.undos == 2 and guard.state.skips == 3


def test_a_policy_that_moved_too_far_is_taken_back_each_time_it_does():
    guard = Guard([MOVED])
    assert [step(guard, n, moved=moved) for n, moved in enumerate([0.01, 0.2, 0.2, 0.01], start=1)] == [
        [], ["undo", "restored"], ["undo", "restored"], ["recover"],
    ]  # fmt: skip
    assert guard.state.calm_from == 0, "no rollout has had these weights"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_after_which_its_signal_is_no_number_is_taken_back(value):
    guard = Guard([MOVED])
    assert step(guard, 1, moved=value) == ["undo", "restored"]


def test_a_run_whose_every_update_is_taken_back_stops():
    guard = Guard([MOVED], stop_after=3)
    assert [step(guard, n, moved=1.0)[-1] for n in range(1, 4)] == ["restored", "restored", "stop"]


def test_checkpoints_of_the_weights_taken_back_are_not_good():
    guard = Guard([GAP])
    for number in range(1, 5):
        step(guard, number)
        guard.saved(number)
    assert guard.state.good == [1, 2] and guard.state.unproven == [(3, 3), (4, 4)]
    step(guard, 5, k3=0.2)  # the update of step 4 is taken back: its checkpoint has it
    assert guard.state.good == [1, 2, 3] and guard.state.unproven == []


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)), max_size=30))
def test_it_goes_on_after_a_restart_as_it_would_have(series):
    guard, resumed = Guard([GAP, MOVED]), Guard([GAP, MOVED])
    for number, (k3, moved) in enumerate(series, start=1):
        events = step(guard, number, k3, moved)
        fresh = Guard([GAP, MOVED])
        fresh.load_state_dict(resumed.state_dict())
        resumed = fresh
        assert step(resumed, number, k3, moved) == events
        assert resumed.state == guard.state
