"""Where tokens lie in a forward pass: packed tokens go out to its rows and come back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.micro_batches import nested
from verl_ext.errors import HookError
from verl_ext.routing.layout import Layout

CPU = torch.device("cpu")


def layout(lengths, packed):
    rows = [torch.zeros(length, dtype=torch.long) for length in lengths]
    data = TensorDict({"input_ids": nested(rows)}, batch_size=len(rows))
    tu.assign_non_tensor_data(data, "use_remove_padding", packed)
    return Layout.of(data, CPU)


def test_padded_rows_by_hand():
    spread = layout([3, 1], packed=False).spread(torch.tensor([1, 2, 3, 4]), 6)
    assert spread.tolist() == [1, 2, 3, 4, 0, 0]


def test_packed_rows_by_hand():
    spread = layout([3, 1], packed=True).spread(torch.tensor([1, 2, 3, 4]), 6)
    assert spread.tolist() == [1, 2, 3, 4, 0, 0]  # verl pads at the end


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 5))
def test_what_is_spread_is_collected_again(lengths, packed, padding):
    found = layout(lengths, packed)
    values = torch.arange(found.tokens * 6).view(-1, 3, 2)
    rows = found.tokens + padding if packed else len(lengths) * max(lengths)
    spread = found.spread(values, rows)
    assert len(spread) == rows
    assert spread.flatten(1).any(1).sum() == found.tokens
    assert torch.equal(found.collect(spread), values)


@pytest.mark.parametrize(("packed", "rows"), [(True, 3), (False, 5), (False, 7)])
def test_rows_that_do_not_hold_the_tokens_are_an_error_with_the_remedy(packed, rows):
    found = layout([3, 1], packed)
    for call in (lambda: found.collect(torch.zeros(rows)), lambda: found.spread(torch.zeros(4), rows)):
        with pytest.raises(HookError, match=rf"saw {rows} tokens .* 1 rank\(s\).*router_replay.*unset them"):
            call()
