"""`measure` against plain Python floats, written from formulas.md; and what must not change its result.

A batch is a list of trajectories, a trajectory a list of (l_infer, l_old, m, entropy) that float32 holds exactly.
"""

import bisect
import math
from dataclasses import replace

import pytest
import torch
from examples import at_most
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens

REL = 1e-5  # k and the weights are float32, and so are their sums
# A difference of numbers of size 1 to 100 keeps some 1e-16 of their size, whatever is left of it. The deviation is the
# root of such a difference; k3 is one of k - 1 and log k, both near 0 where it is.
FLOORS = {"prob_diff_std": 1e-6, "k3": 1e-15}
FLOOR = 1e-12
# Of a product of float32 factors. Kernels round exp otherwise in whole vectors than in the rest of a block, so that a
# weight's last bits depend on where its token stands.
ROUNDING = 2e-6

CHOICES = (
    None,
    {"tis": {"cap": 2.0}},
    {"tis_sequence": {"cap": 2.0}},
    {"icepop": {"alpha": 0.5, "beta": 5.0}},
    {"kpop": {"phi": 0.1}},
    {"mis": {"cap": 2.0, "weight": "ratio"}},
    {"mis": {"cap": 2.0, "weight": "one"}},
    {"geo_mask": {"low": 0.7, "high": 1.4}},
    {"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {"low": 0.7, "high": 1.4}},
    {"kpop": {"phi": 0.3}, "tis": {"cap": 1.5}, "mis": {"cap": 3.0, "weight": "ratio"}, "tis_sequence": {"cap": 2.5}},
)
LOG_PROBS = st.floats(-30, 0, width=32) | st.floats(-2, 0, width=32) | st.sampled_from([-100.0, 0.0])
ODD = st.sampled_from([math.nan, math.inf, -math.inf])
TOKEN = st.tuples(LOG_PROBS | LOG_PROBS | LOG_PROBS | ODD, LOG_PROBS, st.booleans(), st.floats(0, 12, width=32))
CLOSE = st.tuples(st.sampled_from([-0.5, -0.75]), st.just(-0.625), st.booleans(), st.sampled_from([0.0, 0.5, 3.0]))
BATCH = st.lists(st.lists(TOKEN, max_size=12) | st.lists(CLOSE, max_size=12), max_size=5)
FEW = at_most(50)


def ratio(log_k):
    return math.exp(max(-20.0, min(20.0, log_k)))


def binary_kl(p, q):
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def bounded(value, low, high, weight):
    return (weight if low <= value <= high else 0.0), value < low, value > high


def kpop(x, infer, old, phi):
    p, q = math.exp(old), math.exp(infer)
    out = binary_kl(p, q) > phi or binary_kl(q, p) > phi
    return (0.0 if out else ratio(x)), out and x < 0, out and x >= 0


# Each gives weight, low, high: of (log k, l_infer, l_old) for tokens, of (log rho, log g) for sequences.
OF_TOKENS = {
    "tis": lambda x, infer, old, cap: (min(ratio(x), cap), False, ratio(x) > cap),
    "icepop": lambda x, infer, old, alpha, beta: bounded(ratio(x), alpha, beta, ratio(x)),
    "kpop": kpop,
}
OF_SEQUENCES = {
    "tis_sequence": lambda rho, g, cap: (min(ratio(rho), cap), False, ratio(rho) > cap),
    "mis": lambda rho, g, cap, weight: bounded(ratio(rho), 0, cap, ratio(rho) if weight == "ratio" else 1.0),
    "geo_mask": lambda rho, g, low, high: bounded(ratio(g), low, high, 1.0),
}
AXES = {  # lower edges of all buckets but the first, and the names
    "prob": ((0.01, 0.1, 0.5, 0.9), ("0-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "0.9-")),
    "entropy": ((0.1, 0.5, 1.0, 2.0), ("0-0.1", "0.1-0.5", "0.5-1", "1-2", "2-")),
    "position": ((256, 1024, 4096, 16384), ("0-256", "256-1024", "1024-4096", "4096-16384", "16384-")),
    "turn": (range(1, 8), ("00", "01", "02", "03", "04", "05", "06", "07-")),
}


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def records(batch, corrections):
    """One dictionary a counted token, with its place in the packed batch; and per sequence with one, what was found."""
    found, of_sequences, place = [], [], 0
    for row, trajectory in enumerate(batch):
        turn, before, own = -1, False, []
        for position, (infer, old, m, entropy) in enumerate(trajectory):
            turn += m and not before
            before = m
            if m and math.isfinite(infer) and math.isfinite(old):
                where = {"prob": math.exp(infer), "entropy": entropy, "position": position, "turn": turn}
                own.append({"place": place, "row": row, "infer": infer, "old": old, "x": old - infer} | where)
            place += 1
        if not own:
            continue
        rho = math.fsum(t["x"] for t in own)
        whole = {n: OF_SEQUENCES[n](rho, rho / len(own), **corrections[n]) for n in corrections if n in OF_SEQUENCES}
        of_sequences.append(whole)
        for t in own:
            values = (t["x"], t["infer"], t["old"])
            t["by"] = {n: OF_TOKENS[n](*values, **corrections[n]) for n in corrections if n in OF_TOKENS}
            every = [*t["by"].values(), *whole.values()]
            t["w"] = math.prod(w for w, _, _ in every)
            t["low"] = t["w"] == 0 and any(low for _, low, _ in every)
            t["high"] = t["w"] == 0 and not t["low"]
        found += own
    return found, of_sequences


def oracle(batch, corrections, with_entropy, breakdown=True):
    tokens, of_sequences = records(batch, corrections or {})
    if not tokens:
        return {}
    k = [ratio(t["x"]) for t in tokens]
    difference = [abs(math.exp(t["infer"]) - math.exp(t["old"])) for t in tokens]
    center = mean(difference)
    gaps = [abs(mean(-t["x"] for t in tokens if t["row"] == row)) for row in {t["row"] for t in tokens}]

    def k3(t):
        bound = max(-20.0, min(20.0, t["x"]))
        return math.expm1(bound) - bound

    metrics = {
        "vllm_kl/k1": mean(-t["x"] for t in tokens),
        "vllm_kl/k3": mean(map(k3, tokens)),
        "vllm_kl/prob_diff_mean": center,
        "vllm_kl/prob_diff_max": max(difference),
        "vllm_kl/prob_diff_std": math.sqrt(mean((d - center) ** 2 for d in difference)),
        "vllm_kl/log_ratio_abs_mean": mean(abs(t["x"]) for t in tokens),
        "vllm_kl/log_ratio_abs_max": max(abs(t["x"]) for t in tokens),
        "vllm_kl/ess": math.fsum(k) ** 2 / math.fsum(x * x for x in k) / len(k),
        "vllm_kl/chi2": mean(math.expm1(2 * math.log(x)) for x in k),
        "vllm_kl/sequence_gap_mean": mean(gaps),
        "vllm_kl/sequence_gap_max": max(gaps),
    }
    measures = {"vllm_kl/k1": lambda t: -t["x"], "vllm_kl/k3": k3}
    if corrections:
        zero = {t["row"] for t in tokens} - {t["row"] for t in tokens if t["w"]}
        kinds = {"dropped": [t for t in tokens if not t["w"]], "kept": [t for t in tokens if t["w"]]}
        metrics |= {
            "correction/dropped": len(kinds["dropped"]) / len(tokens),
            "correction/dropped_low": mean(t["low"] for t in tokens),
            "correction/dropped_high": mean(t["high"] for t in tokens),
            "correction/sequences_dropped": len(zero) / len(gaps),
            "correction/weight_mean": mean(t["w"] for t in tokens),
        }
        for kind, members in kinds.items():
            if members and with_entropy:
                metrics[f"correction/entropy_{kind}"] = mean(t["entropy"] for t in members)
        for name in corrections:
            every = [t["by"][name] for t in tokens] if name in OF_TOKENS else [found[name] for found in of_sequences]
            metrics[f"correction/{name}/low"] = mean(low for _, low, _ in every)
            metrics[f"correction/{name}/high"] = mean(high for _, _, high in every)
        measures |= {f"correction/dropped_{side}": lambda t, side=side: t[side] for side in ("low", "high")}
    for axis, (edges, names) in AXES.items():
        used = {bisect.bisect_right(edges, t[axis]) for t in tokens}
        if not breakdown or len(used) < 2 or (axis == "entropy" and not with_entropy):
            continue
        for bucket in used:
            inside = [t for t in tokens if bisect.bisect_right(edges, t[axis]) == bucket]
            metrics[f"vllm_kl/share/{axis}/{names[bucket]}"] = len(inside) / len(tokens)
            metrics |= {f"{name}/{axis}/{names[bucket]}": mean(map(of, inside)) for name, of in measures.items()}
    return metrics


def pack(batch, with_entropy=True, dtype=torch.float32):
    tokens = [token for trajectory in batch for token in trajectory]
    infer, old, entropy = (torch.tensor([token[i] for token in tokens], dtype=dtype) for i in (0, 1, 3))
    mask = torch.tensor([m for _, _, m, _ in tokens], dtype=torch.bool)
    offsets = torch.tensor([0, *map(len, batch)]).cumsum(0)
    return Tokens(infer, old, mask, offsets, entropy if with_entropy else None)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        floor = next((floor for part, floor in FLOORS.items() if part in name.split("/")), FLOOR)
        assert found[name] == pytest.approx(value, rel=REL, abs=floor), name


def same_weights(found, expected):
    """Each by itself: nothing cancels in a weight, and 0 stays 0."""
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


def random_batch(rows, longest, seed=0):
    """Multi-turn trajectories of many lengths, near the policy with a few outliers; entries that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in torch.randint(0, longest + 1, (rows,), generator=generator).tolist():
        infer = -torch.empty(length).exponential_(1, generator=generator)
        old = infer + torch.randn(length, generator=generator) * torch.tensor(0.3)
        mask = torch.rand(length, generator=generator).sub(0.3).sign().cumsum(0) % 7 > 0
        entropy = torch.rand(length, generator=generator) * 3
        batch.append([*zip(infer.tolist(), old.tolist(), mask.tolist(), entropy.tolist(), strict=True)])
    return batch


EVERY = CHOICES[-1] | CHOICES[-2]


@pytest.mark.parametrize("block", [None, 1000])
def test_long_trajectories_of_many_turns_equal_the_oracle(block):
    batch = random_batch(rows=8, longest=5000)
    found = measure(pack(batch), EVERY, block=block)
    assert_same(found.metrics, oracle(batch, EVERY, with_entropy=True))
    assert {"vllm_kl/k1/position/4096-16384", "vllm_kl/k1/turn/07-"} <= found.metrics.keys()


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


def test_more_tokens_than_one_block_holds():
    tokens = pack(random_batch(rows=60, longest=5000, seed=9))
    assert len(tokens.mask) > 2 * 65_536
    k = (tokens.l_old.double() - tokens.l_infer).exp()
    assert all((k / bound - 1).abs().min() > 5e-6 for bound in (0.5, 1.5, 5.0)), "no ratio hangs on a bound"
    found, expected = measure(tokens, EVERY), measure(tokens, EVERY, block=len(tokens.mask))
    same_weights(found.weight, expected.weight)
    assert_same(found.metrics, expected.metrics)


@FEW
@given(batch=BATCH, corrections=st.sampled_from(CHOICES[1:]), seed=st.integers(0, 99))
def test_groups_of_trajectories_weigh_what_they_weigh_in_the_whole_batch(batch, corrections, seed):
    cuts = sorted(torch.randint(0, len(batch) + 1, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
    groups = [batch[low:high] for low, high in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    parts = [measure(pack(group), corrections).weight for group in groups]
    same_weights(torch.cat(parts), measure(pack(batch), corrections).weight)


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
    tokens = pack(random_batch(rows=5, longest=50), dtype=dtype)
    before = {name: value.clone() for name, value in tokens.per_token().items()}
    found = measure(tokens, EVERY)
    for name, value in tokens.per_token().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    doubled = {name: value.double() for name, value in before.items() if name != "mask"}
    assert found.metrics == measure(replace(tokens, **doubled), EVERY).metrics
