"""Sums over stretches of tokens that are too long for float32 to count."""

import torch

from verl_ext.core.tokens import segment_sums, total

PAST_FLOAT32 = 2**24 + 3  # tokens; 2**24 + 1 is not a float32


def test_more_tokens_are_counted_than_float32_holds():
    ones = torch.ones(PAST_FLOAT32)
    assert total(ones).item() == PAST_FLOAT32
    assert segment_sums(ones, torch.tensor([0, PAST_FLOAT32 - 1, 1])).tolist() == [0, PAST_FLOAT32 - 1, 1]


def test_the_total_of_nothing_is_zero():
    assert total(torch.ones(0)).item() == 0
