"""The router's part of `measure` against plain Python floats.

A batch is a list of trajectories, a trajectory a list of (l_infer, l_old, m, entropy, agreement) that float32 holds
exactly; float64 holds every 1 - agreement exactly. A token with an agreement of NaN was not compared.
"""

import bisect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import at_most
from verl_ext.base.names import BUCKETS, ENTROPY_EDGES, POSITION_EDGES, PROBABILITY_EDGES
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Lag, Tokens

CHOICES = (None, {"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {"low": 0.7, "high": 1.4}})
CORRELATION = "router/disagreement_gap_correlation"
EDGES = {"prob": PROBABILITY_EDGES, "entropy": ENTROPY_EDGES, "position": POSITION_EDGES}
EDGES |= dict.fromkeys(("turn", "calls"), tuple(range(8)))

LOG_PROBS = st.floats(-30, 0, width=32) | st.floats(-2, 0, width=32) | st.sampled_from([-100.0, 0.0])
ODD = st.sampled_from([math.nan, math.inf, -math.inf])
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


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def pearson(xs, ys):
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    x_mean, y_mean = mean(xs), mean(ys)
    xs, ys = [x - x_mean for x in xs], [y - y_mean for y in ys]
    x_norm, y_norm = (math.sqrt(math.fsum(v * v for v in values)) for values in (xs, ys))
    return math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / x_norm / y_norm


def counted(batch):
    """Returns one dictionary per counted token."""
    found = []
    for row, trajectory in enumerate(batch):
        turn, before = -1, False
        for position, (infer, old, m, entropy, agreement) in enumerate(trajectory):
            turn += m and not before
            before = m
            if m and math.isfinite(infer) and math.isfinite(old):
                where = {"prob": math.exp(infer), "entropy": entropy, "position": position, "turn": turn}
                found.append({"agreement": agreement, "gap": abs(old - infer), "row": row} | where)
        found = [{**t, "calls": turn} if t["row"] == row else t for t in found]
    return found


def hardly_varies(batch):
    tokens = [t for t in counted(batch) if not math.isnan(t["agreement"])]
    for values in ([1 - t["agreement"] for t in tokens], [t["gap"] for t in tokens]):
        if values and math.fsum((v - mean(values)) ** 2 for v in values) < 1e-9 * math.fsum(v * v for v in values):
            return True
    return False


def oracle(batch, breakdown=True):
    everything, metrics = counted(batch), {}
    tokens = [t for t in everything if not math.isnan(t["agreement"])]
    correlation = pearson([1 - t["agreement"] for t in tokens], [t["gap"] for t in tokens])
    if correlation is not None:
        metrics[CORRELATION] = correlation
    for name, inside in (
        ("equal", [t["gap"] for t in tokens if t["agreement"] == 1]),
        ("differs", [t["gap"] for t in tokens if t["agreement"] < 1]),
    ):
        if inside:
            metrics[f"router/gap_{name}"] = mean(inside)
    for axis, edges in EDGES.items():
        buckets = {bisect.bisect_right(edges, t[axis]) - 1 for t in everything}
        for bucket in buckets if breakdown and len(buckets) > 1 else ():
            inside = [t["agreement"] for t in tokens if bisect.bisect_right(edges, t[axis]) - 1 == bucket]
            if inside:
                metrics[f"router/agreement/{axis}/{BUCKETS[axis][bucket]}"] = mean(inside)
    return metrics


def pack(batch, dtype=torch.float32):
    tokens = [token for trajectory in batch for token in trajectory]
    infer, old, entropy, agreement = (torch.tensor([t[i] for t in tokens], dtype=dtype) for i in (0, 1, 3, 4))
    mask = torch.tensor([t[2] for t in tokens], dtype=torch.bool)
    return Tokens(infer, old, mask, torch.tensor([0, *map(len, batch)]).cumsum(0), entropy, agreement)


def of_router(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("router/")}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def random_batch(rows, longest, seed=0):
    """Multi-turn trajectories where a token's log-ratio grows with its disagreement; entries that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in torch.randint(0, longest + 1, (rows,), generator=generator).tolist():
        infer = -torch.empty(length).exponential_(1, generator=generator)
        agreement = 1 - torch.randint(0, 30, (length,), generator=generator).sub(10).clamp(min=0) / 384
        old = infer + torch.randn(length, generator=generator) * (0.01 + 1 - agreement)
        mask = torch.rand(length, generator=generator).sub(0.3).sign().cumsum(0) % 7 > 0
        entropy = torch.rand(length, generator=generator) * 3
        columns = (infer, old, mask, entropy, agreement)
        batch.append([*zip(*(column.tolist() for column in columns), strict=True)])
    return batch


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


@pytest.mark.parametrize("block", [None, 1, 1000, 20_000])
def test_long_trajectories_of_many_turns_equal_the_oracle(block):
    batch = random_batch(rows=8, longest=5000)
    found = of_router(measure(pack(batch), CHOICES[1], block=block).metrics)
    assert_same(found, oracle(batch))
    assert found[CORRELATION] > 0.3 and found["router/gap_differs"] > 2 * found["router/gap_equal"]
    assert {"router/agreement/position/4096-16384", "router/agreement/turn/07-"} <= found.keys()


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
    axes = tuple(f"router/agreement/{axis}/" for axis in EDGES)
    assert {name for name in of_router(found.metrics) if not name.startswith(axes)} == {
        name for name in of_compared if not name.startswith(axes)
    }


def test_where_no_trajectory_was_compared_there_is_no_agreement():
    batch = random_batch(rows=6, longest=40)
    assert not of_router(measure(pack(less(batch, [True] * 6)), block=20).metrics)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_agreement_of_any_dtype_is_read_in_float64_and_left_alone(dtype):
    tokens = pack(random_batch(rows=5, longest=50))
    tokens = replace(tokens, agreement=tokens.agreement.to(dtype))
    before = tokens.agreement.clone()
    found = measure(tokens).metrics
    assert torch.equal(tokens.agreement, before)
    assert found == measure(replace(tokens, agreement=before.double())).metrics


def test_agreement_needs_one_value_a_token():
    tokens = pack(random_batch(rows=2, longest=9))
    with pytest.raises(ValueError, match="agreement"):
        replace(tokens, agreement=tokens.agreement[1:])
