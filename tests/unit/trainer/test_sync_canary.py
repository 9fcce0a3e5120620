"""Findings about the weight syncs of a run, from made-up scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.trainer.sync_canary import SIGNAL, SyncCanary

N = 512
PROMPTS = torch.arange(N) // (N // 8)


def normal(scale, seed):
    return scale * torch.randn(N, generator=torch.Generator().manual_seed(seed))


class Run:
    """Two rollout engines that get every update but those in `lost`, as (step, engine)."""

    def __init__(self, lost=(), moved=0.05, start=0):
        self.lost, self.moved = set(lost), moved
        self.train = normal(1.0, 99)
        self.engines = [self.train.clone(), self.train.clone()]
        self.canary, self.events, self.metrics = SyncCanary(), [], []
        self.canary.begin(start, self.train, self.engines, PROMPTS)

    def step(self, number):
        self.train = self.train + normal(self.moved, number)
        self.engines = [
            had if (number, engine) in self.lost else self.train + normal(1e-3, 100 * number + engine)
            for engine, had in enumerate(self.engines)
        ]
        metrics, decision = self.canary.check(number, self.train, self.engines)
        self.metrics.append(metrics)
        self.events += decision.events

    def events_after(self, steps):
        for number in range(1, steps + 1):
            self.step(number)
        return [(event.step, event.action) for event in self.events]


def test_a_run_whose_syncs_arrive_is_told_nothing():
    run = Run()
    assert run.events_after(8) == []
    assert all(0.8 < metrics["sync/arrived_low"] <= 1 for metrics in run.metrics)
    assert all(metrics[SIGNAL] > 0.9 for metrics in run.metrics)
    assert all(metrics["sync/moved"] == pytest.approx(0.05, rel=0.2) for metrics in run.metrics)


def test_the_first_sync_that_one_engine_misses_is_told_once_and_so_is_its_recovery():
    run = Run(lost=[(1, 1), (2, 1), (3, 1)])
    assert run.events_after(5) == [(1, "warn"), (4, "recover")]
    assert "since step 0" in run.events[0].reason and "rollout engine 1 of 2" in run.events[0].reason
    assert run.events[0].rule == "weight_sync" and run.events[0].signal == SIGNAL
    assert run.events[0].value == run.metrics[0][SIGNAL] < 0.1
    assert run.metrics[2]["sync/arrived_low"] == 0


def test_an_engine_without_new_weights_has_not_moved_since_the_check_before():
    run = Run(lost=[(2, 0), (3, 0)])
    run.events_after(4)
    followed = [metrics["sync/followed"] for metrics in run.metrics]
    assert followed[1:3] == [0, 0] and followed[0] == pytest.approx(1, rel=0.1), "of the engine that moved least"
    assert followed[3] == pytest.approx(1, rel=0.1), "the other engine: the late one makes up for three updates at once"

    run.engines[0] = run.engines[0].index_fill(0, torch.arange(N // 4), -torch.inf)
    run.step(5)
    assert run.metrics[-1]["sync/followed"] == pytest.approx(1, rel=0.1), "tokens without a number decide nothing"


@pytest.mark.parametrize("missing", [0.5, 0.32, 0.25])
@pytest.mark.parametrize("rounding", [0.0, 2e-3])
def test_a_part_that_never_arrives_is_told_once_and_never_said_to_be_back(missing, rounding):
    """Each token lacks another share of the updates, from 0 to twice `missing`."""
    share = 1 - missing * torch.rand(N, generator=torch.Generator().manual_seed(5)) * 2
    start = train = normal(1.0, 99)
    canary, events = SyncCanary(), []
    canary.begin(0, train, [start + normal(rounding, 1)], PROMPTS)
    for number in range(1, 61):
        train = train + normal(0.05, number)
        metrics, decision = canary.check(number, train, [start + share * (train - start) + normal(rounding, -number)])
        events += [event.action for event in decision.events]
    assert events == ["warn"]
    assert metrics["sync/apart"] == pytest.approx(missing, rel=0.2)


@pytest.mark.parametrize("rounding", [1e-4, 2e-3])
def test_of_a_sound_run_what_is_missing_is_rounding(rounding):
    start = train = normal(1.0, 99)
    canary = SyncCanary()
    canary.begin(0, train, [start + normal(rounding, 1)], PROMPTS)
    for number in range(1, 31):
        train = train + normal(0.05, number)
        metrics, decision = canary.check(number, train, [train + normal(rounding, -number)])
        assert not decision.events
    assert 0.5 * metrics["sync/rounding"] < metrics["sync/apart"] < 2 * metrics["sync/rounding"]


def test_updates_too_small_to_see_add_up():
    """Each update moves a quarter of the gap's rounding, by which the engines' scores differ from the start."""
    lost = [(step, engine) for step in range(1, 200) for engine in (0, 1)]
    run = Run(lost, moved=2.5e-4)
    run.engines = [engine + normal(1e-3, 7) for engine in run.engines]
    run.canary.begin(0, run.train, run.engines, PROMPTS)
    found = run.events_after(60)
    assert [action for _, action in found] == ["warn", "warn"]
    assert 10 < found[0][0] < 60, "not before the sum is larger than the gap may hide"
    assert SIGNAL not in run.metrics[0]


def test_a_step_without_an_update_says_nothing():
    run = Run(moved=0.0)
    run.engines = [run.train, run.train]
    metrics, decision = run.canary.check(1, run.train, run.engines)
    assert metrics == {"sync/moved": 0} and not decision.events


@given(st.lists(st.sampled_from(["update", "refused", "lost"]), min_size=1, max_size=6), st.sampled_from([0.0, 1e-3]))
def test_no_arrival_is_logged_after_a_refused_batch_and_one_is_after_every_update(steps, rounding):
    """A refused batch leaves the weights as they are. Each scoring rounds differently, in either engine."""
    weights = synced = normal(1.0, 99)

    def scores(number):
        return weights + normal(rounding, 2 * number), synced + normal(rounding, 2 * number + 1)

    canary = SyncCanary()
    train, infer = scores(0)
    canary.begin(0, train, [infer], PROMPTS)
    has_moved = False  # training, since the last sync that arrived
    for number, step in enumerate(steps, 1):
        if step != "refused":
            weights, has_moved = weights + normal(0.05, 1000 + number), True
        if step != "lost":
            synced = weights
        train, infer = scores(number)
        metrics, _ = canary.check(number, train, [infer])
        assert ("sync/arrived_low" in metrics) == (SIGNAL in metrics) == has_moved
        if has_moved:
            assert (metrics["sync/arrived_low"] > 0.8) == (step != "lost")
        has_moved = has_moved and step == "lost"


def test_an_engine_that_tells_nothing_does_not_hide_what_the_other_tells():
    run = Run()
    run.step(1)
    train = run.train + normal(0.05, 2)
    unscored = torch.full_like(train, torch.nan)
    metrics, _ = run.canary.check(2, train, [train, unscored])
    assert metrics["sync/arrived_low"] > 0.8 and metrics[SIGNAL] > 0.9
