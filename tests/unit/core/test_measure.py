"""`measure` against plain Python floats, written from the formulas, and changes that must not affect its result.

A batch is a list of trajectories, a trajectory a list of (l_infer, l_old, m, entropy) that float32 holds exactly.
"""

import math
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import measure_oracle
from tests.support.examples import at_most
from tests.support.measure_oracle import CHOICES, oracle, pack, random_agreement, random_batch, records
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens, segment_sums, total

REL = 1e-5  # k and the weights are float32, and so are their sums
# A difference of numbers of size 1 to 100 keeps some 1e-16 of their size, whatever is left of it. The deviation is the
# root of such a difference; k3 is one of k - 1 and log k, both near 0 where it is.
FLOORS = {"prob_diff_std": 1e-6, "k3": 1e-15}
FLOOR = 1e-12
# Of a product of float32 factors. Kernels round exp otherwise in whole vectors than in the rest of a block, so that a
# weight's last bits depend on its token's place.
ROUNDING = 2e-6

LOG_PROBS = st.floats(-30, 0, width=32) | st.floats(-2, 0, width=32) | st.sampled_from([-100.0, 0.0])
ODD = st.sampled_from([math.nan, math.inf, -math.inf])
TOKEN = st.tuples(LOG_PROBS | LOG_PROBS | LOG_PROBS | ODD, LOG_PROBS, st.booleans(), st.floats(0, 12, width=32))
CLOSE = st.tuples(st.sampled_from([-0.5, -0.75]), st.just(-0.625), st.booleans(), st.sampled_from([0.0, 0.5, 3.0]))
BATCH = st.lists(st.lists(TOKEN, max_size=12) | st.lists(CLOSE, max_size=12), max_size=5)
FEW = at_most(50)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        floor = next((floor for part, floor in FLOORS.items() if part in name.split("/")), FLOOR)
        assert found[name] == pytest.approx(value, rel=REL, abs=floor), name


def same_weights(found, expected):
    """Compares element by element, because nothing cancels in a weight and 0 must stay 0."""
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0)


def counts(found):
    return found.tokens, found.kept, found.non_finite


@pytest.mark.parametrize("corrections", CHOICES, ids=lambda c: "+".join(c or ["none"]))
@given(batch=BATCH, with_entropy=st.booleans(), breakdown=st.booleans())
@example(batch=[], with_entropy=True, breakdown=True)
@example(batch=[[], []], with_entropy=True, breakdown=True)
@example(batch=[[(-1.0, -1.5, False, 1.0)]], with_entropy=True, breakdown=True)
@example(batch=[[(0.0, -100.0, True, 1.0)]], with_entropy=True, breakdown=True)  # sum k is 2e-9
@example(batch=[[(-100.0, 0.0, True, 1.0), (-0.25, -0.25 + 2**-13, True, 1.0)]], with_entropy=True, breakdown=True)
@example(batch=[[(-1.0, -1.0 + 2**-13, True, 1.0)] * 9], with_entropy=True, breakdown=True)  # a healthy run
def test_measure_equals_the_oracle(corrections, batch, with_entropy, breakdown):
    tokens = pack(batch, with_entropy)
    found, (counted, _) = measure(tokens, corrections, breakdown=breakdown), records(batch, corrections or {})
    assert_same(found.metrics, oracle(batch, corrections, with_entropy, breakdown))
    masked = sum(m for row in batch for _, _, m, _ in row)
    assert counts(found) == (masked, sum(t["w"] != 0 for t in counted), masked - len(counted))
    if not corrections:
        assert found.weight is None
        return
    expected = [0.0] * len(tokens.mask)
    for t in counted:
        expected[t["place"]] = t["w"]
    assert found.weight.dtype == torch.float32
    assert found.weight.tolist() == pytest.approx(expected, rel=REL, abs=0)


@FEW
@given(
    batch=BATCH,
    ages=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 1]), st.integers(0, 6)), min_size=5, max_size=5),
    corrections=st.sampled_from(CHOICES[:4]),
    breakdown=st.booleans(),
    compared=st.sampled_from([None, [1.0], [0.5, math.nan, 1.0]]),
    block=st.sampled_from([None, 3]),
)
def test_by_lag_and_server_equals_the_oracle_whatever_else_is_broken_down(
    batch, ages, corrections, breakdown, compared, block
):
    by = {
        "lag": [(newest, newest + span, fresh) for newest, span, fresh in ages[: len(batch)]],
        "replica": [newest % 3 for newest, *_ in ages[: len(batch)]],
        "agreement": compared and [*islice(cycle(compared), sum(map(len, batch)))],
    }
    found = measure(pack(batch, **by), corrections, breakdown=breakdown, block=block)
    assert_same(found.metrics, oracle(batch, corrections, with_entropy=True, breakdown=breakdown, **by))


EVERY = measure_oracle.EVERY[0] | measure_oracle.EVERY[1]


def test_every_correction_is_compared_with_the_oracle():
    before = {name for name, method in CORRECTIONS.items() if not method.in_update}
    chosen = {name for choice in CHOICES for name in choice or {}}
    assert chosen == before, "an entry in CHOICES of tests/support/measure_oracle.py, and its formula there"


@pytest.mark.parametrize("block", [None, 1, 1000])
def test_long_trajectories_of_many_turns_equal_the_oracle(block):
    batch = random_batch(rows=8, longest=5000)
    agreement = random_agreement(batch)
    found = measure(pack(batch, agreement=agreement), EVERY, block=block).metrics
    assert_same(found, oracle(batch, EVERY, with_entropy=True, agreement=agreement))
    for measured in ("vllm_kl/k1", "router/agreement"):
        assert {f"{measured}/position/4096-16384", f"{measured}/turn/07-"} <= found.keys()
    assert found["router/disagreement_gap_correlation"] > 0.3
    assert found["router/gap_differs"] > 2 * found["router/gap_equal"]


@FEW
@given(batch=BATCH, odd=ODD, corrections=st.sampled_from(CHOICES[1:]))
def test_padded_and_jagged_batches_give_the_same(batch, odd, corrections):
    longest = max(map(len, batch), default=0)
    padding = (odd, odd, False, odd)
    columns = pack([row + [padding] * (longest - len(row)) for row in batch])
    padded = Tokens.from_padded(*(value.reshape(len(batch), longest) for value in columns.per_token().values()))
    jagged, found = measure(pack(batch), corrections), measure(padded, corrections)
    valid = torch.tensor([[i < len(row) for i in range(longest)] for row in batch], dtype=torch.bool).reshape(-1)
    same_weights(found.weight[valid], jagged.weight)
    assert not found.weight[~valid].any()
    assert_same(found.metrics, jagged.metrics)
    assert counts(found) == counts(jagged)


@FEW
@given(batch=BATCH, corrections=st.sampled_from(CHOICES[1:]), block=st.sampled_from([1, 3, 7]))
def test_the_block_size_does_not_matter(batch, corrections, block):
    found, expected = measure(pack(batch), corrections, block=block), measure(pack(batch), corrections)
    same_weights(found.weight, expected.weight)
    assert_same(found.metrics, expected.metrics)
    assert counts(found) == counts(expected)


@FEW
@given(batch=BATCH, odd=ODD | st.floats(-100, 100, width=32), corrections=st.sampled_from(CHOICES))
def test_what_stands_outside_the_mask_has_no_effect(batch, odd, corrections):
    changed = [[token if token[2] else (odd, -odd, False, odd) for token in row] for row in batch]
    found, expected = (measure(pack(version), corrections) for version in (changed, batch))
    assert found.metrics == expected.metrics and counts(found) == counts(expected)
    if corrections:
        assert torch.equal(found.weight, expected.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_any_dtype_are_read_in_float64_and_left_alone(dtype):
    batch = random_batch(rows=5, longest=50)
    tokens = pack(batch, dtype=dtype, agreement=random_agreement(batch))
    before = {name: value.clone() for name, value in tokens.per_token().items()}
    found = measure(tokens, EVERY)
    for name, value in tokens.per_token().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    doubled = {name: value.double() for name, value in before.items() if name != "mask"}
    assert found.metrics == measure(replace(tokens, **doubled), EVERY).metrics


PAST_FLOAT32 = 2**24 + 3  # tokens; 2**24 + 1 is not a float32


def test_more_tokens_are_counted_than_float32_holds():
    ones = torch.ones(PAST_FLOAT32)
    assert total(ones).item() == PAST_FLOAT32
    assert segment_sums(ones, torch.tensor([0, PAST_FLOAT32 - 1, 1])).tolist() == [0, PAST_FLOAT32 - 1, 1]


def test_the_total_of_nothing_is_zero():
    assert total(torch.ones(0)).item() == 0
