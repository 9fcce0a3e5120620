"""The share of an update that reached the rollout: on made-up scores whose answer is known."""

import math
from dataclasses import astuple
from statistics import fmean, median, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.core.arrival import FEWEST_TOKENS, STANDARD_ERRORS, arrival, movement

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
    """The formulas in plain Python. A token's residual is its distance from the slope of all others."""
    before, after, infer_before, infer_after = (each.tolist() for each in (*train, *infer))
    x = [b - a for a, b in zip(before, after, strict=True)]
    y = [b - a for a, b in zip(infer_before, infer_after, strict=True)]
    power = fmean(a * a for a in x)
    common = fmean(a * b for a, b in zip(x, y, strict=True))
    total, product = math.fsum(a * a for a in x), math.fsum(a * b for a, b in zip(x, y, strict=True))
    rest = [b - a * (product - a * b) / (total - a * a) for a, b in zip(x, y, strict=True)]
    error = STANDARD_ERRORS * math.sqrt(fmean((a * b) ** 2 for a, b in zip(x, rest, strict=True)) / len(x))
    least = power - 2 * variance([a - b for a, b in zip(before, infer_before, strict=True)])
    high = max(common + error, 0) / least if least > 0 else math.inf
    moved_most = sorted(zip(x, y, strict=True), key=lambda pair: -abs(pair[0]))[: (len(x) + 1) // 2]
    middle = median(b / a for a, b in moved_most)
    spread = median(abs(b / a - middle) for a, b in moved_most)
    return max(common - error, 0) / power, high, math.sqrt(power), middle, spread


@given(st.floats(0, 1), st.floats(1e-3, 1), st.floats(0, 0.3), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_it_is_the_formula(share, moved, rounding, seed):
    given = scores(share, moved, rounding, seed, count=64)
    found = arrival(*given)
    assert astuple(found) == pytest.approx(by_hand(*given), rel=1e-9)


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


def test_one_token_that_moved_further_than_all_others_does_not_decide():
    """Its experts flipped in the training engine and not in the rollout; all other tokens got the whole update."""
    (before, after), (infer_before, infer_after) = scores(1.0, 0.01, 1e-4, count=256)
    after[7] += 5.0
    found = arrival((before, after), (infer_before, infer_after))
    assert found.low < 0.01 and not found.missing and found.median == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
def test_a_multiplied_update_moves_every_token_by_the_same_share_and_a_part_of_one_does_not(factor):
    train, infer = scores(factor, 0.05, 1e-4)
    multiplied = arrival(train, infer)
    assert multiplied.median == pytest.approx(factor, rel=0.01) and multiplied.spread < 0.01
    places = torch.linspace(0, 2 * factor, N, dtype=torch.float64)
    part = arrival(train, (infer[0], infer[0] + places * (train[1] - train[0])))
    assert part.median == pytest.approx(factor, rel=0.1) and part.spread > 0.2 * factor


def test_nothing_moved_or_nothing_to_compare_tells_nothing():
    still, nan = torch.zeros(32), torch.full((32,), math.nan)
    same = (still, still)
    for train, infer in ((same, same), ((still, nan), same), ((still[:0],) * 2, (still[:0],) * 2)):
        found = arrival(train, infer)
        assert (found.low, found.high, found.moved) == (0, math.inf, 0)
        assert math.isnan(found.median) and math.isnan(found.spread)
        assert not found.missing and not found.arrived


def test_a_token_that_one_engine_has_no_number_for_is_left_out():
    train, infer = scores(1.0, 0.1, 0.0, count=64)
    infer[1][3] = -math.inf
    rest = torch.arange(64) != 3
    left_out = arrival(tuple(each[rest] for each in train), tuple(each[rest] for each in infer))
    assert arrival(train, infer) == left_out


@given(st.integers(FEWEST_TOKENS, 40), st.floats(0, 2), st.integers(0, 99))
def test_the_movement_is_the_ratio_of_the_median_changes(count, share, seed):
    """Compares with sorted lists; torch's median of an even number is the lower one of the middle two."""
    train, infer = scores(share, 0.1, 0.01, seed, count)
    rollout, training = (
        sorted(abs(b - a) for a, b in zip(*map(torch.Tensor.tolist, each), strict=True)) for each in (infer, train)
    )
    middle = (count - 1) // 2
    assert movement(train, infer) == pytest.approx(rollout[middle] / training[middle])


def test_the_movement_is_0_without_new_weights_and_not_known_without_tokens_that_moved():
    train, (infer, _) = scores(1.0, 0.1, 0.01, count=64)
    assert movement(train, (infer, infer)) == 0
    assert math.isnan(movement((train[0], train[0]), (infer, infer)))
    few = torch.arange(64) < FEWEST_TOKENS - 1
    assert math.isnan(movement(tuple(each[few] for each in train), (infer[few], infer[few])))
    hidden = infer.where(few, -math.inf)
    assert math.isnan(movement(train, (hidden, infer)))
