from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guarding import guarded_step
from verl_ext.base.errors import ConfigError
from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import LowerLr, LrState, Rule, hold_rate, lower_rate, lr_scale


def after(settings, firing):
    """Returns the scale at the end of each step, with a rule that fires in these steps."""
    state, scales, fired = LrState(), [], False
    for step, fires in enumerate(firing, start=1):
        if fires and not fired:
            lower_rate(settings, state, step)
        if fired and not fires:
            state.since = step
        hold_rate(settings, state, step, fires)
        scales.append(lr_scale(settings, state))
        fired = fires
    return scales


def test_it_is_lowered_while_a_rule_fires_and_raised_afterwards():
    settings = LowerLr(factor=0.5, least=0.2, hold=3)
    assert after(settings, [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) == [
        1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1,
    ]  # fmt: skip


def test_it_stays_low_where_it_is_not_to_recover():
    assert after(LowerLr(hold=1, recover=False), [1, 0, 0, 0, 0]) == [0.5] * 5


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.floats(0.1, 0.9), st.floats(0.01, 1.0), st.integers(1, 6))
def test_it_moves_by_one_factor_in_hold_steps_within_its_bounds(firing, factor, part, hold):
    settings = LowerLr(factor=factor, least=factor * part, hold=hold)
    scales = after(settings, firing)
    assert all(settings.least <= each <= 1 for each in scales)
    assert all(
        now == pytest.approx(before) or settings.least / before <= now / before <= 1.0001 / settings.factor
        for before, now in pairwise(scales)
    )
    assert after(settings, [*firing, *[False] * (hold + 1) * 80])[-1] == 1


@pytest.mark.parametrize(
    "given", [{"factor": 1.0}, {"factor": 0.0}, {"least": 0.0}, {"factor": 0.1, "least": 0.2}, {"hold": 0}]
)
def test_settings_out_of_range(given):
    with pytest.raises(ConfigError, match=next(iter(given)) if len(given) == 1 else "least"):
        LowerLr(**given)


def test_a_guard_remembers_the_rate_over_a_restart():
    rules = [Rule("long", "response_length/mean", 9.0, action="lower_lr", setting="s.above")]
    guard = Guard(rules, lower_lr=LowerLr(hold=2))
    events_by_step = []
    for step, length in enumerate([5, 10, 10, 10, 5, 5, 5], start=1):
        _, events = guarded_step(guard, step, {}, {"response_length/mean": length})
        events_by_step.append([(event.action, event.reason.rpartition(": ")[2]) for event in events])
        resumed = Guard(rules, lower_lr=LowerLr(hold=2))
        resumed.load_state_dict(guard.state_dict())
        assert resumed.lr_scale == guard.lr_scale and resumed.state == guard.state
    assert events_by_step == [
        [],
        [("lower_lr", "the learning rate is 0.5 of the schedule's")],
        [],
        [("lower_lr", "the learning rate is 0.25 of the schedule's")],
        [("recover", "response_length/mean=5, long recovers")],
        [],
        [("recover", "the learning rate is 0.5 of the schedule's")],
    ]
