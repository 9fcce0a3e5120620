"""The share of an update that reached the rollout: on made-up scores whose answer is known."""

import math
from statistics import fmean, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.trainer.sync_canary import SIGMAS, arrival

N = 4096


def scores(share, moved, rounding, seed=0, count=N):
    """Two scorings of both engines: training moves by `moved`, the rollout by `share` of it; each rounds
    differently."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    start, x = -normal(1.0).abs(), normal(moved)
    before, infer_before = start + normal(rounding), start + normal(rounding)
    after, infer_after = start + x + normal(rounding), start + share * x + normal(rounding)
    return (before, after), (infer_before, infer_after)


def by_hand(train, infer):
    """The formula in plain Python."""
    before, after, infer_before, infer_after = (each.tolist() for each in (*train, *infer))
    x = [b - a for a, b in zip(before, after, strict=True)]
    y = [b - a for a, b in zip(infer_before, infer_after, strict=True)]
    power = fmean(a * a for a in x)
    common = fmean(a * b for a, b in zip(x, y, strict=True))
    share = common / power
    error = SIGMAS * math.sqrt(fmean((a * (b - share * a)) ** 2 for a, b in zip(x, y, strict=True)) / len(x))
    least = power - 2 * variance([a - b for a, b in zip(before, infer_before, strict=True)])
    high = max(common + error, 0) / least if least > 0 else math.inf
    return max(common - error, 0) / power, high, math.sqrt(power)


@given(st.floats(0, 1), st.floats(1e-3, 1), st.floats(0, 0.3), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_it_is_the_formula(share, moved, rounding, seed):
    given = scores(share, moved, rounding, seed, count=64)
    found = arrival(*given)
    assert (found.low, found.high, found.moved) == pytest.approx(by_hand(*given), rel=1e-9)


@pytest.mark.parametrize("rounding", [0.0, 1e-3, 3e-3])
def test_an_update_that_arrived_and_one_that_did_not(rounding):
    there, lost = (arrival(*scores(share, 0.01, rounding)) for share in (1.0, 0.0))
    assert there.arrived and not there.missing and there.low <= 1 <= there.high + 1e-9
    assert lost.missing and not lost.arrived


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_part_of_an_update_is_missing_where_the_rest_is(share):
    found = arrival(*scores(share, 0.05, 2e-3))
    assert found.missing and found.low <= share <= found.high


@pytest.mark.parametrize("moved", [3e-3, 1e-3])
def test_an_update_below_the_gap_of_the_engines_is_seen_to_arrive_or_nothing_is_said(moved):
    assert arrival(*scores(1.0, 6e-3, 5e-3, count=32_768)).low > 0.25
    for share in (0.0, 1.0):
        assert not arrival(*scores(share, moved, 5e-3)).missing, "the gap may hide it"


@given(st.floats(1e-4, 1), st.floats(0, 1), st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_no_false_alarm_whatever_moves_and_rounds(moved, rounding, seed):
    assert not arrival(*scores(1.0, moved, rounding, seed, count=256)).missing


def test_nothing_moved_or_nothing_to_compare_tells_nothing():
    still, nan = torch.zeros(32), torch.full((32,), math.nan)
    same = (still, still)
    for train, infer in ((same, same), ((still, nan), same), ((still[:0],) * 2, (still[:0],) * 2)):
        found = arrival(train, infer)
        assert (found.low, found.high, found.moved) == (0, math.inf, 0)
        assert not found.missing and not found.arrived


def test_a_token_that_one_engine_has_no_number_for_is_left_out():
    train, infer = scores(1.0, 0.1, 0.0, count=64)
    infer[1][3] = -math.inf
    rest = torch.arange(64) != 3
    left_out = arrival(tuple(each[rest] for each in train), tuple(each[rest] for each in infer))
    assert arrival(train, infer) == left_out
