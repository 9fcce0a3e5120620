"""The division of a batch's rows among the ranks of a replica, and batches that cannot be divided."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.workers.replica_fetch import FetchedShare, Layout, divide, layout_of, shared_layouts


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(2, 6))
def test_every_row_has_one_rank_and_no_rank_a_row_too_much(sizes, ranks):
    starts = divide(sizes, ranks)
    assert starts[0] == 0 and starts[-1] == len(sizes) and len(starts) == ranks + 1
    assert starts == sorted(starts)
    for start, end in pairwise(starts):
        assert sum(sizes[start:end]) <= sum(sizes) / ranks + max(sizes)


def test_rows_of_one_size_are_divided_evenly():
    assert divide([7] * 12, 4) == [0, 3, 6, 9, 12]


def jagged(*shapes, layout=torch.jagged, dtype=torch.int16):
    return torch.nested.as_nested_tensor([torch.zeros(shape, dtype=dtype) for shape in shapes], layout=layout)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jagged((3, 2, 4), (0, 2, 4)), Layout((3, 0), (2, 4), torch.int16)),
        (jagged((3, 2, 4)), Layout((3,), (2, 4), torch.int16)),
        (jagged((3,), (1,), dtype=torch.uint8), Layout((3, 1), (), torch.uint8)),
        (jagged((3, 2), (3, 4)), None),
        (jagged((3, 2), (2, 4), layout=torch.strided), None),
        (torch.zeros(2, 3), None),
        ([1, 2], None),
    ],
)
def test_a_layout_is_of_a_jagged_tensor_whose_rows_differ_in_length(value, expected):
    assert layout_of(value) == expected


WHOLE = ((1, 2, 3), ("input_ids", "routed_experts"), (0, 2, 3, 3))
TWO, ONE = Layout((5, 6), (2, 4), torch.uint8), Layout((7,), (2, 4), torch.uint8)
PARTS = [
    FetchedShare(WHOLE, {"routed_experts": TWO}),
    FetchedShare(WHOLE, {"routed_experts": ONE}),
    FetchedShare(WHOLE),
]


def test_rows_are_joined_and_a_rank_may_have_none():
    assert shared_layouts(PARTS) == {"routed_experts": [TWO, ONE, replace(ONE, lengths=())]}
    assert shared_layouts([FetchedShare(), FetchedShare()]) == {}


@pytest.mark.parametrize(
    "other",
    [
        FetchedShare(((1, 2, 4), *WHOLE[1:]), {"routed_experts": ONE}),
        FetchedShare(WHOLE, {"routed_experts": None}),
        FetchedShare(WHOLE, {"routed_experts": replace(ONE, tail=(3, 4))}),
        FetchedShare(WHOLE, {"routed_experts": replace(ONE, dtype=torch.int16)}),
    ],
    ids=["trajectories", "not jagged", "layers", "dtype"],
)
def test_parts_of_different_wholes_are_not_joined(other):
    assert shared_layouts([PARTS[0], other, PARTS[2]]) is None
