"""The table of published levels, the rule made from it, and its copy in the docs."""

import json
import math

import numpy as np
import pytest

from tests import ROOT
from tests.support.guarding import guarded_step
from verl_ext.diagnosis.levels import LEVELS, published
from verl_ext.guard import levels
from verl_ext.guard.guard import Guard
from verl_ext.guard.levels import level_rules

K3 = "vllm_kl/k3"


def steps(guard, values):
    """Feeds one k3 a step, and returns (step, action) of all events."""
    signals = [k3 if isinstance(k3, dict) else {K3: k3} for k3 in values]
    events = [event for step, early in enumerate(signals, 1) for event in guarded_step(guard, step, early, {})[1]]
    return [(event.step, event.action) for event in events]


@pytest.mark.parametrize("rate", ["1e-3", "1e-2"])
def test_how_much_k3_moves_in_a_sound_run_is_what_the_docs_say(rate):
    k3 = np.array(json.loads((ROOT / "tests" / "support" / "data" / f"stable_lr_{rate}.json").read_text())[K3])
    doubled = sum(k3[step] > 2 * np.median(k3[step - 20 : step]) for step in range(20, 80))
    medians = [np.median(k3[step : step + 20]) for step in range(0, 80, 20)]
    low, high = (f"{value:.1e}".replace("e-0", "e-") for value in (min(medians), max(medians)))
    row = f"| {rate} | {doubled} of 60 | {k3.max() / np.median(k3):.0f} | {low}, {high} |"
    assert row in (ROOT / "docs" / "reading-metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"{level.model} {level.format}")
def test_each_level_is_found_by_its_model_and_stands_in_the_docs(level):
    model = {"model_type": level.model_type, "hidden_size": level.hidden_size or 1}
    assert published(model, level.format) is level
    assert level.k3 >= levels.LEAST
    row = f"| {level.model} | `{level.model_type}` | {level.format} | {level.k3:g} | {level.source} |"
    assert row in (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")


def test_the_docs_have_no_level_that_the_table_lacks():
    page = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")
    table = page.partition("<!-- levels -->")[2].partition("<!-- /levels -->")[0]
    assert table.count("\n| ") == len(LEVELS) + 1


def test_a_level_that_is_set_warns_after_three_readings_and_recovers():
    guard = Guard(level_rules(0.002))
    assert guard.level == 0.002
    assert steps(guard, [0.003, 0.001, 0.003, 0.003, 0.003, 0.002, 0.0015]) == [(5, "warn"), (7, "recover")]


def test_a_runs_own_level_is_twice_the_mean_of_its_first_twenty_steps():
    first = [0.001 * (1 + step % 3) for step in range(20)]
    bound = 2 * math.fsum(first) / 20
    guard = Guard(level_rules(None))
    assert steps(guard, first[:19]) == [] and guard.level is None
    guard.load_state_dict(guard.state_dict())
    assert steps(guard, first[19:]) == [] and guard.level == pytest.approx(bound)
    assert steps(guard, [0.99 * bound] * 5) == []
    assert steps(guard, [1.01 * bound] * 3) == [(3, "warn")]


def test_a_runs_own_level_is_not_below_the_lowest_of_the_table():
    guard = Guard(level_rules(None))
    assert steps(guard, [1e-6] * 20 + [9e-4] * 10) == [] and guard.level == levels.LEAST
    assert steps(guard, [2e-3] * 3) == [(3, "warn")]


@pytest.mark.parametrize("mean", [1e-5, 4e-4, 6e-4, 3e-3])
def test_the_warning_at_a_runs_own_level_lasts_until_three_quarters_of_it(mean):
    """Whether LEAST or the run's mean decides the level, a k3 that hovers around it is reported once."""
    guard, level = Guard(level_rules(None)), max(2 * mean, levels.LEAST)
    assert steps(guard, [mean] * 20) == [] and guard.level == pytest.approx(level)
    assert steps(guard, [1.01 * level] * 3 + [0.99 * level, 0.76 * level, 1.01 * level] * 5) == [(3, "warn")]
    assert steps(guard, [0.74 * level]) == [(1, "recover")]


def test_a_reading_is_the_batch_of_one_update():
    """In separate_async, a step judges the batch of each of its local updates."""
    guard, judged = Guard(level_rules(None)), []
    for step in range(1, 7):
        guard.begin(step)
        for k3 in [1e-3] * 4 if step < 6 else [3e-3] * 4:
            judged += [(step, event.action) for event in guard.judge({K3: k3}).events]
        guard.judge_late({})
        assert (guard.level is None) == (4 * step < levels.OWN_READINGS)
    assert judged == [(6, "warn")], "after three of the four batches"


def test_the_age_of_rollouts_is_no_reason_to_warn():
    """The engines' part is judged if the batch shows it; a batch with only old rollouts is not judged."""
    old = {K3: 0.5, "vllm_kl/share/lag/4-7": 1.0}
    guard = Guard(level_rules(0.002))
    assert steps(guard, [old] * 5 + [old | {f"{K3}/lag/0": 0.001}] * 5) == []
    assert steps(guard, [old | {f"{K3}/lag/0": 0.003}] * 3) == [(3, "warn")]
    assert not guard.unread, "a signal that is logged is not missing"


def test_zero_makes_no_rule():
    assert level_rules(0) == () and Guard(()).level is None
