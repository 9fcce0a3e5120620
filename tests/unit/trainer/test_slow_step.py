"""When a step is told to be slow: by its own length, and by what steps usually take."""

import pytest

from verl_ext.trainer.slow_step import SlowStep


class Run:
    """A run whose steps are looked at every second; when it was told, and of which step."""

    def __init__(self, after_s):
        self.number, self.now, self.told = 0, 0.0, []
        self.slow_step = SlowStep(lambda: self.number, dict, after_s)

    def step(self, seconds):
        self.number += 1
        for _ in range(seconds):
            if said := self.slow_step.look(self.now):
                self.told.append((self.number, round(self.now)))
                self.said = said
            self.now += 1


def test_a_step_is_told_past_the_setting_and_whenever_the_time_has_doubled():
    run = Run(10)
    run.step(100)
    assert run.told == [(1, 11), (1, 23), (1, 47), (1, 95)]
    assert run.said == "step 1 has been going for 2 minutes"


def test_a_step_is_told_past_three_times_what_they_usually_take():
    run = Run(10)
    for seconds in (20, 5, 37):  # the first: told at 11; the last: it would be at 3 x 12.5
        run.step(seconds)
    assert run.told == [(1, 11)]
    run.step(70)
    assert run.told[1:] == [(4, 62 + 61)]
    assert "(usually 20 s)" in run.said


@pytest.mark.parametrize("after_s", [None, 1000])
def test_nothing_is_told_of_a_step_that_is_not_slow(after_s):
    run = Run(after_s)
    run.step(900)
    assert run.told == []
