"""Rows that no router can choose are refused. The oracle checks them one by one with Python's sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from verl_ext.core import routing
from verl_ext.core.routing import OUT_OF_RANGE, REPEATED, STUCK, STUCK_TOKENS, known_rows, refused_rows

EXPERTS = 16


def expected(routes_TLK, experts, lengths):
    """Computes the result from the definitions, row by row."""
    rows, reasons = routes_TLK.tolist(), []
    wide_enough = torch.iinfo(routes_TLK.dtype).max >= experts - 1
    for first, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False):
        known = [row for row in rows[first : first + length] if any(map(any, row))]
        stuck = len(known) >= STUCK_TOKENS and len(known[0][0]) < experts
        stuck &= any(
            len({frozenset(row[layer]) for row in known}) == 1 for layer in range(len(known[0] if known else []))
        )
        for row in rows[first : first + length]:
            if row not in known:
                reasons.append(0)
            elif not wide_enough or any(not 0 <= expert < experts for ids in row for expert in ids):
                reasons.append(OUT_OF_RANGE)
            elif any(len(set(ids)) < len(ids) for ids in row):
                reasons.append(REPEATED)
            else:
                reasons.append(STUCK if stuck else 0)
    return reasons


def draw(lengths, layers, top_k, dtype, seed, experts=EXPERTS):
    """Draws routes, with a few rows lost or wrong. Some trajectories have the same experts in every row of whole
    layers."""
    generator = torch.Generator().manual_seed(seed)

    def some(share, *shape):
        return torch.rand(*shape, generator=generator) < share

    T = sum(lengths)
    routes = torch.rand(T, layers, experts, generator=generator).argsort(-1)[..., :top_k]
    for part in routes.split(lengths):
        if len(part) and some(0.5, 1):
            part[:, 0] = part[0, 0][torch.rand(len(part), top_k, generator=generator).argsort(-1)]  # in any order
            if some(0.5, 1):
                part[-1, 0] = (part[0, 0] + 1) % experts  # all but one
    routes[some(0.1, T)] = 0
    routes[some(0.02, T, layers)] = 0
    wrong = experts if dtype == torch.uint8 else -1
    routes = torch.where(some(0.005, T, layers, top_k), wrong, routes)
    return routes.to(dtype), torch.tensor([0, *lengths]).cumsum(0)


@given(
    st.lists(st.one_of(st.integers(0, 6), st.integers(STUCK_TOKENS - 2, STUCK_TOKENS + 6)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 2**16]),
)
@at_most(60)
def test_each_row_is_refused_for_the_first_reason_that_holds(lengths, layers, top_k, dtype, seed, pairs):
    routes, offsets = draw(lengths, layers, top_k, dtype, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "PAIRS_AT_ONCE", pairs)
        found = refused_rows(routes, EXPERTS, offsets)
    assert found.tolist() == expected(routes, EXPERTS, lengths)


def test_a_trajectory_is_judged_alone():
    """Otherwise compute_log_prob and the update, which divide a batch differently, could disagree."""
    lengths = [STUCK_TOKENS, 3, 2 * STUCK_TOKENS]
    routes, offsets = draw(lengths, 3, 2, torch.uint8, seed=8)
    routes[:STUCK_TOKENS, 1] = torch.tensor([3, 5])
    alone = [refused_rows(part, EXPERTS, torch.tensor([0, len(part)])) for part in routes.split(lengths)]
    together = refused_rows(routes, EXPERTS, offsets)
    assert torch.equal(together, torch.cat(alone)) and (together == STUCK).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_rows_without_routing_are_unknown_and_not_refused(dtype):
    routes = torch.zeros(3 * STUCK_TOKENS, 4, 8, dtype=dtype)
    assert not refused_rows(routes, EXPERTS, torch.tensor([0, 3 * STUCK_TOKENS])).any() and not known_rows(routes).any()


def test_a_byte_does_not_hold_512_experts():
    routes, offsets = draw([9], 3, 4, torch.int16, seed=3, experts=200)
    narrow = routes.to(torch.uint8)
    known = known_rows(narrow)
    assert refused_rows(narrow, 512, offsets)[known].tolist() == [OUT_OF_RANGE] * int(known.sum())


@pytest.mark.parametrize(("dtype", "experts"), [(torch.uint8, 256), (torch.int16, 2**15)])
def test_as_many_experts_as_the_dtype_holds(dtype, experts):
    routes = torch.tensor([[[experts - 1, 0]], [[1, 2]], [[-1, 3]]]).to(dtype)  # -1 is 255 in a byte
    signed = dtype != torch.uint8
    assert refused_rows(routes, experts, torch.tensor([0, 3])).tolist() == [0, 0, OUT_OF_RANGE * signed]


def test_where_every_expert_is_chosen_equal_sets_are_no_reason():
    routes = torch.arange(4).expand(2 * STUCK_TOKENS, 3, 4)
    offsets = torch.tensor([0, 2 * STUCK_TOKENS])
    assert not refused_rows(routes, 4, offsets).any()
    assert refused_rows(routes, 5, offsets).tolist() == [STUCK] * 2 * STUCK_TOKENS


@pytest.mark.parametrize(("tokens", "reason"), [(STUCK_TOKENS - 1, 0), (STUCK_TOKENS, STUCK)])
def test_top_1_that_stands_still(tokens, reason):
    routes = torch.full((tokens, 2, 1), 3, dtype=torch.uint8)
    assert refused_rows(routes, 4, torch.tensor([0, tokens])).tolist() == [reason] * tokens


def test_no_tokens():
    assert refused_rows(torch.zeros(0, 3, 2, dtype=torch.uint8), EXPERTS, torch.tensor([0])).tolist() == []
    assert refused_rows(torch.zeros(0, 3, 2, dtype=torch.uint8), EXPERTS, torch.tensor([0, 0])).tolist() == []


def test_known_rows_are_those_with_any_expert():
    infer = torch.zeros(3, 2, 2, dtype=torch.uint8)
    infer[1, 1] = torch.tensor([0, 3])
    infer[2] = 200
    assert known_rows(infer).tolist() == [False, True, True]
