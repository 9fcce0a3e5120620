"""The share of an update that reached the rollout: on made-up scores whose answer is known."""

import math
from dataclasses import astuple
from itertools import count as numbers
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from verl_ext.core.arrival import (
    FEWEST_PROMPTS,
    FEWEST_TOKENS,
    STANDARD_ERRORS,
    UPPER_TO_MEDIAN,
    arrival,
    movement,
    new_prefixes,
    prompt_numbers,
    spread_rows,
)

N, PROMPTS = 4096, 8


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


def prompts(count=N, several=PROMPTS):
    """Numbers of the tokens' prompts, the tokens of a prompt next to each other."""
    return torch.arange(count) * several // count


def found_in(given):
    return arrival(*given, prompts(len(given[0][0])))


def by_hand(train, infer, of):
    """The formulas in plain Python: medians, and the jackknife that leaves out a prompt at a time."""
    before, after, infer_before, infer_after = (each.tolist() for each in (*train, *infer))
    x = [b - a for a, b in zip(before, after, strict=True)]
    y = [b - a for a, b in zip(infer_before, infer_after, strict=True)]
    gap = [a - b for a, b in zip(before, infer_before, strict=True)]
    most = sorted(range(len(x)), key=lambda i: -abs(x[i]))[: (len(x) + 1) // 2]
    shares = [y[i] / x[i] for i in most]
    middle = median(shares)
    others = [median([y[i] / x[i] for i in most if of[i] != each]) for each in {of[i] for i in most}]
    error = STANDARD_ERRORS * math.sqrt(math.fsum((each - middle) ** 2 for each in others))
    center = median(gap[i] for i in most)
    rounding = median(abs(gap[i] - center) for i in most) / median(abs(x[i]) for i in most)
    least = 1 - 2 * UPPER_TO_MEDIAN * rounding**2
    high = max(middle + error, 0) / least if least > 0 else math.inf
    moved = math.sqrt(math.fsum(a * a for a in x) / len(x))
    spread, apart = (median(abs(each - center) for each in shares) for center in (middle, 1))
    return max(middle - error, 0), high, moved, middle, spread, apart, rounding


@given(st.floats(0, 1), st.floats(1e-3, 1), st.floats(0, 0.3), st.integers(0, 1000))
@at_most(25)
def test_it_is_the_formula(share, moved, rounding, seed):
    given = scores(share, moved, rounding, seed, count=64)
    of = torch.randint(PROMPTS, (64,), generator=torch.Generator().manual_seed(seed))
    assert astuple(arrival(*given, of)) == pytest.approx(by_hand(*given, of.tolist()), rel=1e-9)


def test_the_larger_half_of_a_normal_variable():
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    larger = x[x > x.median()]
    assert (larger.median() / x.median()) ** 2 == pytest.approx(UPPER_TO_MEDIAN, rel=0.01)


@pytest.mark.parametrize("rounding", [0.0, 1e-4, 5e-4])
def test_an_update_that_arrived_and_one_that_did_not(rounding):
    there, lost = (found_in(scores(share, 0.01, rounding)) for share in (1.0, 0.0))
    assert there.arrived and not there.missing and there.low <= 1 <= there.high + 1e-9
    assert lost.missing and not lost.arrived


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8])
def test_part_of_an_update_is_missing_where_the_rest_is(share):
    found = found_in(scores(share, 0.05, 2e-3))
    assert found.missing and not found.arrived and found.low <= share + 0.01 and share - 0.01 <= found.high


@pytest.mark.parametrize("moved", [3e-3, 1e-3])
def test_an_update_below_the_gap_of_the_engines_is_not_judged(moved):
    for share in (0.0, 1.0):
        found = found_in(scores(share, moved, 5e-3))
        assert not found.missing and not found.arrived, "the gap may hide it"


@given(st.floats(1e-4, 1), st.floats(0, 1), st.integers(0, 10_000))
def test_no_false_alarm_whatever_moves_and_rounds(moved, rounding, seed):
    assert not found_in(scores(1.0, moved, rounding, seed, count=256)).missing


@pytest.mark.parametrize("equal", [1, 2, 4, 8])
def test_a_token_that_several_answers_share_does_not_decide(equal):
    """Eight answers, the first `equal` of which begin with the same token. Its experts flipped in training alone."""
    answers, length = 8, 17
    (before, after), infer = scores(1.0, 0.01, 1e-4, count=answers * length)
    first = length * torch.arange(equal)
    for each in (before, *infer):
        each[first] = each[0].item()
    after[first] = before[0].item() + 5.0
    for of in (prompts(answers * length), prompts(answers * length, 2)):
        found = arrival((before, after), infer, of)
        assert not found.missing
        assert math.isnan(found.median) or found.median == pytest.approx(1, abs=0.02)


def test_answers_that_moved_in_one_engine_only_widen_the_interval():
    """In two of eight answers, all tokens moved in training only: their prompt's experts flipped."""
    (before, after), infer = scores(1.0, 0.01, 1e-4, count=256)
    after[:64] += 0.1
    found = arrival((before, after), infer, prompts(256))
    assert found.high > 0.95 and not found.missing and not found.arrived


@pytest.mark.parametrize("several", range(1, 6))
def test_a_few_prompts_tell_nothing(several):
    found = arrival(*scores(0.0, 0.05, 1e-4), prompts(several=several))
    assert found.missing == (several >= FEWEST_PROMPTS)
    assert found.moved == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
def test_a_multiplied_update_moves_every_token_by_the_same_share_and_a_part_of_one_does_not(factor):
    train, infer = scores(factor, 0.05, 1e-4)
    multiplied = arrival(train, infer, prompts())
    assert multiplied.median == pytest.approx(factor, rel=0.01) and multiplied.spread < 0.01
    places = 2 * factor * torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    part = arrival(train, (infer[0], infer[0] + places * (train[1] - train[0])), prompts())
    assert part.median == pytest.approx(factor, rel=0.1) and part.spread > 0.2 * factor


def test_nothing_moved_or_nothing_to_compare_tells_nothing():
    still, nan = torch.zeros(32), torch.full((32,), math.nan)
    same = (still, still)
    for train, infer in ((same, same), ((still, nan), same), ((still[:0],) * 2, (still[:0],) * 2)):
        found = arrival(train, infer, prompts(len(train[0])))
        assert (found.low, found.high, found.moved) == (0, math.inf, 0)
        assert math.isnan(found.median) and math.isnan(found.spread)
        assert not found.missing and not found.arrived


def test_a_token_that_one_engine_has_no_number_for_is_left_out():
    train, infer = scores(1.0, 0.1, 0.0, count=64)
    infer[1][3] = -math.inf
    rest = torch.arange(64) != 3
    without = (tuple(each[rest] for each in both) for both in (train, infer))
    assert arrival(train, infer, prompts(64)) == arrival(*without, prompts(64)[rest])


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


def test_rows_are_one_answer_of_each_prompt_before_a_second_one():
    keys = ["a_0_0", "a_1_0", "b_c_0_0", "b_c_0_1", "a_2_0", "d_0_0"]
    of = prompt_numbers(keys)
    assert of == [0, 0, 1, 1, 0, 2]
    assert [keys[row] for row in spread_rows(of, 4)] == ["a_0_0", "b_c_0_0", "d_0_0", "a_1_0"]
    assert sorted(spread_rows(of, 9)) == list(range(6))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_a_prefix_is_new_once(sequences):
    seen, expected = set(), []
    for tokens in sequences:
        ends = [tuple(tokens[: end + 1]) for end, _ in zip(numbers(), tokens, strict=False)]
        expected.append([end not in seen for end in ends])
        seen |= set(ends)
    assert new_prefixes(sequences) == expected
