"""The router's part of `measure` against plain Python floats.

A batch is as in tests/support/measure_oracle.py, with the agreement at the end of each token.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import measure_oracle
from tests.support.examples import at_most
from tests.support.measure_oracle import mean, records
from tests.unit.core.test_measure import LOG_PROBS, ODD
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Lag

CHOICES = (None, measure_oracle.EVERY[0])
CORRELATION = "router/disagreement_gap_correlation"

NEARLY = torch.tensor([0.999, 0.5]).tolist()
AGREEMENT = st.floats(0, 1, width=16) | st.sampled_from([1.0, 1.0, 1 - 2**-24, *NEARLY, math.nan])
ENTROPY = st.sampled_from([0.0, 0.3, 1.5])
TOKEN = st.tuples(LOG_PROBS | LOG_PROBS | LOG_PROBS | ODD, LOG_PROBS, st.booleans(), ENTROPY, AGREEMENT)
CLOSE = st.tuples(
    st.sampled_from([-0.5, -0.5 + 2**-7]), st.just(-20.5), st.booleans(), ENTROPY, st.sampled_from([0.5, 0.5 + 2**-7])
)
ONE_AGREEMENT = st.tuples(LOG_PROBS, LOG_PROBS, st.booleans(), ENTROPY, st.just(NEARLY[0]))
BATCH = st.one_of(*(st.lists(st.lists(token, max_size=12), max_size=5) for token in (TOKEN, CLOSE, ONE_AGREEMENT)))
FEW = at_most(50)


def divided(batch):
    """Returns the batch without the agreement, and the agreement of its tokens."""
    return [[token[:4] for token in row] for row in batch], [token[4] for row in batch for token in row]


def pack(batch, **settings):
    tokens, agreement = divided(batch)
    return measure_oracle.pack(tokens, agreement=agreement, **settings)


def oracle(batch, breakdown=True):
    tokens, agreement = divided(batch)
    return of_router(measure_oracle.oracle(tokens, None, True, breakdown, agreement=agreement))


def hardly_varies(batch):
    tokens, agreement = divided(batch)
    pairs = [(1 - agreement[t["place"]], abs(t["x"])) for t in records(tokens, {})[0]]
    for values in zip(*(pair for pair in pairs if not math.isnan(pair[0])), strict=True):
        if math.fsum((v - mean(values)) ** 2 for v in values) < 1e-9 * math.fsum(v * v for v in values):
            return True
    return False


def of_router(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("router/")}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("corrections", CHOICES, ids=lambda c: "+".join(c or ["none"]))
@given(batch=BATCH, breakdown=st.booleans(), block=st.sampled_from([None, 1, 3, 7]))
@example(batch=[], breakdown=True, block=None)
@example(batch=[[], []], breakdown=True, block=None)
@example(batch=[[(-1.0, -1.5, False, 1.0, 0.5)]], breakdown=True, block=None)
@example(batch=[[(-1.0, -1.5, True, 1.0, 0.5)]], breakdown=True, block=None)
@example(batch=[[(0.0, -(2.0**127), True, 1.0, 1.0), (0.0, -0.5, True, 1.0, 0.5)]], breakdown=True, block=None)
@example(batch=[[(0.0, -(2.0**127), True, 1.0, 0.5), (0.0, -0.5, True, 1.0, 1.0)]], breakdown=True, block=None)
def test_router_metrics_equal_the_oracle_and_the_others_stay(corrections, batch, breakdown, block):
    tokens = pack(batch)
    found = measure(tokens, corrections, breakdown=breakdown, block=block)
    ours, expected = of_router(found.metrics), oracle(batch, breakdown)
    if hardly_varies(batch):  # a part in 30,000: the correlation of float64 sums has lost its digits
        ours.pop(CORRELATION, None), expected.pop(CORRELATION, None)
    assert_same(ours, expected)
    without = measure(replace(tokens, agreement=None), corrections, breakdown=breakdown, block=block)
    assert not of_router(without.metrics)
    assert_same({name: value for name, value in found.metrics.items() if name in without.metrics}, without.metrics)
    assert found.weight is None or torch.equal(found.weight, without.weight)


@pytest.mark.parametrize("block", [None, 5000])
def test_the_correlation_keeps_its_digits_where_both_barely_vary(block):
    # The agreement in the last places of float32, the gap by a thousandth; once next to an outlier that stands first.
    generator = torch.Generator().manual_seed(0)
    lower = torch.rand(20_000, generator=generator) < 0.3
    higher = torch.rand(20_000, generator=generator) < 0.5
    agreement = torch.where(lower, torch.tensor(1 - 2**-23), torch.tensor(1 - 2**-24))
    old = torch.where(lower & higher, torch.tensor(-0.17 - 2**-12), torch.tensor(-0.17))
    for first in (0, 1):
        rows = [(0.0, x, True, 0.0, a) for x, a in zip(old.tolist(), agreement.tolist(), strict=True)]
        rows[0] = (0.0, -100.0, True, 0.0, 0.0) if first else rows[0]
        batch = [rows[i : i + 1000] for i in range(0, len(rows), 1000)]
        found = measure(pack(batch), block=block).metrics
        assert found[CORRELATION] == pytest.approx(oracle(batch)[CORRELATION], rel=1e-6)


@pytest.mark.parametrize("count", [3, 1000, 20_001])
def test_there_is_no_correlation_with_a_constant_however_many_tokens(count):
    old = (-torch.rand(count, generator=torch.Generator().manual_seed(0))).tolist()
    varied = [(0.0, value, True, 0.0, 0.5 + 0.5 * (at % 2)) for at, value in enumerate(old)]
    for rows in ([(*row[:4], 0.9) for row in varied], [(0.0, -0.1, *row[2:]) for row in varied]):
        assert CORRELATION not in measure(pack([rows])).metrics


def less(batch, left_out):
    """Marks these trajectories as not compared."""
    return [
        [(*token[:4], math.nan) for token in row] if gone else row for row, gone in zip(batch, left_out, strict=True)
    ]


@FEW
@given(batch=BATCH, seed=st.integers(0, 2**31), block=st.sampled_from([None, 1, 3, 7]))
def test_trajectories_that_were_not_compared_count_in_all_but_the_agreement(batch, seed, block):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(len(batch), generator=generator) < 0.5
    tokens, lag = pack(less(batch, ~kept)), Lag(*torch.randint(0, 9, (2, len(batch)), generator=generator))
    found = measure(replace(tokens, lag=lag), CHOICES[1], block=block)
    whole = measure(replace(pack(batch), lag=lag), CHOICES[1], block=block)
    assert_same(
        {name: value for name, value in found.metrics.items() if not name.startswith("router/")},
        {name: value for name, value in whole.metrics.items() if not name.startswith("router/")},
    )
    compared = [row for row, stays in zip(batch, kept, strict=True) if stays]
    alone = measure(replace(pack(compared), lag=Lag(lag.newest[kept], lag.oldest[kept])), CHOICES[1], block=block)
    of_compared = of_router(alone.metrics)
    for name, value in of_compared.items():  # an axis that they alone would leave out may be there
        assert found.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    axes = tuple(f"router/agreement/{axis}/" for axis in measure_oracle.AXES)
    assert {name for name in of_router(found.metrics) if not name.startswith(axes)} == {
        name for name in of_compared if not name.startswith(axes)
    }


def test_where_no_trajectory_was_compared_there_is_no_agreement():
    batch = measure_oracle.random_batch(rows=6, longest=40)
    unknown = [math.nan] * sum(map(len, batch))
    assert not of_router(measure(measure_oracle.pack(batch, agreement=unknown), block=20).metrics)


def test_agreement_needs_one_value_a_token():
    with pytest.raises(ValueError, match="agreement"):
        measure_oracle.pack(measure_oracle.random_batch(rows=2, longest=9), agreement=[1.0])
