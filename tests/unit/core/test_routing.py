"""Agreement per token and the router metrics, against loops over Python's sets."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.route_sum import route_sum
from verl_ext.core.routing import REASONS, RouterSums, agreement, route_terms, router_metrics


def draw(lengths, layers, top_k, seed, share=1.0):
    """Overlaps, masks and margins of random routings, and the sets themselves."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    train, infer, own = (
        torch.rand(n, layers, top_k + 2, generator=generator).argsort(-1)[..., :top_k] for _ in range(3)
    )
    keep = torch.rand(n, generator=generator) < 0.5
    infer = torch.where(keep[:, None, None], train, infer)  # half of the tokens agree in every layer
    return {
        "train": train,
        "infer": infer,
        "own": own,
        "mask": torch.rand(n, generator=generator) < 0.8,
        "known": (known := torch.rand(n, generator=generator) < 0.8),
        "refused": torch.where(known, 0, torch.randint(0, 1 + len(REASONS), (n,), generator=generator)).byte(),
        "margin": torch.rand(n, layers, generator=generator),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "left_out": torch.rand(len(lengths), generator=generator) >= share,
    }


def overlap(a, b):
    counts = [
        [len(set(x) & set(y)) for x, y in zip(*rows, strict=True)] for rows in zip(a.tolist(), b.tolist(), strict=True)
    ]
    return torch.tensor(counts, dtype=torch.uint8).view(a.shape[:2])


def computed(drawn, top_k, **settings):
    return agreement(
        overlap(drawn["train"], drawn["infer"]),
        top_k,
        drawn["mask"],
        drawn["known"],
        drawn["offsets"],
        left_out_B=drawn["left_out"],
        refused_N=drawn["refused"],
        margin_NL=drawn["margin"],
        own_NL=overlap(drawn["own"], drawn["infer"]),
        **settings,
    )


def ratio_error(pairs, M):
    """Standard error of sum a / sum n of m pairs (a, n) out of M, in float64 (Cochran, ch. 6)."""
    m, n = len(pairs), math.fsum(n for _, n in pairs)
    ratio = math.fsum(a for a, _ in pairs) / n
    return math.sqrt((1 - m / M) * m / (m - 1) * math.fsum((a - ratio * n_b) ** 2 for a, n_b in pairs)) / n


def expected_metrics(drawn, top_k):
    """Computes the metrics from the definitions, token by token."""
    rows = torch.repeat_interleave(drawn["offsets"].diff()).tolist()
    asked = drawn["mask"] & ~drawn["left_out"][rows]
    counted = (asked & drawn["known"]).nonzero()[:, 0].tolist()
    generated = int(asked.sum())
    written = {row for row, m in zip(rows, drawn["mask"], strict=True) if m}
    compared = [row for row in sorted(written) if not drawn["left_out"][row]]
    part = {} if len(compared) == len(written) else {"router/sampled": len(compared) / len(written)}
    if not generated:
        return part
    refused = sum(bool(reason) for reason, m in zip(drawn["refused"], asked, strict=True) if m)
    found = part | {
        "router/tokens": len(counted),
        "router/unknown": (generated - len(counted) - refused) / generated,
        "router/invalid": refused / generated,
    }
    if not counted:
        return found
    layers = drawn["train"].shape[1]

    def shares(name):
        a, b = drawn[name].tolist(), drawn["infer"].tolist()
        return [[len(set(a[t][layer]) & set(b[t][layer])) / top_k for layer in range(layers)] for t in counted]

    agree, own, margin = shares("train"), shares("own"), drawn["margin"].double().tolist()
    first = [next((layer for layer in range(layers) if row[layer] < 1), None) for row in agree]
    for layer in range(layers):
        column = [row[layer] for row in agree]
        found[f"router/agreement/layer_{layer:02d}"] = sum(column) / len(column)
        found[f"router/exact_match/layer_{layer:02d}"] = sum(x == 1 for x in column) / len(column)
        found[f"router/first_differs/layer_{layer:02d}"] = first.count(layer) / len(counted)
    flat = [(x, margin[t][layer]) for t, row in zip(counted, agree, strict=True) for layer, x in enumerate(row)]
    found["router/agreement"] = sum(x for x, _ in flat) / len(flat)
    if part and len(compared) > 1:
        means = [sum(row) / layers for row in agree]
        of_row = [[x for x, t in zip(means, counted, strict=True) if rows[t] == row] for row in compared]
        pairs = [(sum(values), len(values)) for values in of_row]
        found["router/agreement/error"] = ratio_error(pairs, len(written))
    found["router/own_agreement"] = sum(map(sum, own)) / len(flat)
    found["router/exact_match"] = sum(x == 1 for x, _ in flat) / len(flat)
    differing = [layer for layer in first if layer is not None]
    found["router/any_layer_differs"] = len(differing) / len(counted)
    if differing:
        found["router/first_differing_layer"] = sum(differing) / len(differing)
    for name, values in (
        ("router/margin_equal", [m for x, m in flat if x == 1]),
        ("router/margin_differs", [m for x, m in flat if x < 1]),
    ):
        if values:
            found[name] = sum(values) / len(values)
    return found


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)


@given(lengths, st.integers(1, 4), st.integers(1, 4), seeds, st.integers(1, 20), st.sampled_from([1.0, 0.6, 0.3]))
def test_metrics_equal_their_definitions_whatever_the_block(lengths, layers, top_k, seed, block, share):
    drawn = draw(lengths, layers, top_k, seed, share)
    per_token, sums = computed(drawn, top_k, block=block)
    assert router_metrics(sums.pack()) == pytest.approx(expected_metrics(drawn, top_k), rel=1e-6, abs=1e-7)
    for t in range(sum(lengths)):
        a, b = drawn["train"][t].tolist(), drawn["infer"][t].tolist()
        mean = math.fsum(len(set(x) & set(y)) / top_k for x, y in zip(a, b, strict=True)) / layers
        row = int((drawn["offsets"] <= t).sum()) - 1
        expected = math.nan if drawn["left_out"][row] else mean if drawn["known"][t] else 1.0
        assert per_token[t].item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


@given(lengths, st.integers(1, 3), seeds)
def test_sums_are_of_each_trajectory_and_survive_the_way(lengths, layers, seed):
    drawn = draw(lengths, layers, 2, seed)
    _, sums = computed(drawn, 2)
    packed = sums.pack()
    assert packed.shape == (len(lengths), 4 * layers + 5 + len(REASONS))
    for name, value in vars(RouterSums.unpack(packed)).items():
        assert torch.equal(value, getattr(sums, name))
    counted = (drawn["mask"] & drawn["known"]).split(lengths)
    assert sums.tokens[:, 0].tolist() == [int(part.sum()) for part in counted]
    reasons = torch.where(drawn["mask"], drawn["refused"], 0).split(lengths)
    assert sums.refused.tolist() == [[int((part == 1 + i).sum()) for i in range(len(REASONS))] for part in reasons]


def test_without_replay_the_own_choice_is_what_is_used():
    drawn = draw([5, 3], 2, 2, seed=1)
    _, sums = agreement(overlap(drawn["train"], drawn["infer"]), 2, drawn["mask"], drawn["known"], drawn["offsets"])
    assert torch.equal(sums.own, sums.agree)
    assert sums.margin_equal.sum() == sums.margin_differs.sum() == 0


def test_255_experts_a_token_and_more_layers_than_a_byte_counts():
    overlap_NL = torch.full((2, 300), 255, dtype=torch.uint8)
    overlap_NL[1, 299] = 0
    yes = torch.ones(2, dtype=torch.bool)
    per_token, sums = agreement(overlap_NL, 255, yes, yes, torch.tensor([0, 2]))
    assert per_token.tolist() == pytest.approx([1.0, 299 / 300])
    assert sums.first[0].nonzero().tolist() == [[299]]
    assert router_metrics(sums.pack())["router/first_differing_layer"] == 299


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_margins_of_tokens_that_are_not_compared_do_not_matter(odd):
    drawn = draw([9, 4], 3, 2, seed=0)
    compared = (drawn["mask"] & drawn["known"])[:, None]
    assert 0 < compared.sum() < len(compared)
    changed = drawn | {"margin": torch.where(compared, drawn["margin"], odd)}
    (_, expected), (_, found) = computed(drawn, 2), computed(changed, 2)
    assert torch.equal(found.pack(), expected.pack())


def test_sums_over_long_trajectories_keep_their_digits():
    """A margin of 0.1 over 400,000 tokens reads 0.10005 in float32, and 20 million agreements cannot be counted."""
    N, K = 400_000, 255
    overlap_NL = torch.full((N, 1), K, dtype=torch.uint8)
    overlap_NL[::4] = K - 2
    yes, margin_NL = torch.ones(N, dtype=torch.bool), torch.full((N, 1), 0.1)
    _, sums = agreement(overlap_NL, K, yes, yes, torch.tensor([0, N]), margin_NL=margin_NL)
    found = router_metrics(sums.pack())
    assert found["router/margin_equal"] == pytest.approx(margin_NL[0, 0].item(), rel=1e-12)
    assert found["router/margin_differs"] == pytest.approx(margin_NL[0, 0].item(), rel=1e-12)
    assert found["router/agreement"] == pytest.approx(1 - 2 / K / 4, rel=1e-12)


def sums_of(agree, tokens, left_out):
    """Returns the packed sums of trajectories with these sums over two layers, some of them left out."""
    agree, tokens = (torch.tensor(values, dtype=torch.float64).unsqueeze(1) for values in (agree, tokens))
    here, sums = ~torch.tensor(left_out).unsqueeze(1), RouterSums.zeros(len(agree), 2)
    for by_layer in (sums.agree, sums.exact, sums.own):
        by_layer[:] = torch.cat([agree - 0.25, agree + 0.25], 1) * here
    sums.tokens[:], sums.left_out[:] = tokens * here, tokens * ~here
    return sums.pack()


def every_sample(agree, tokens, m):
    """(agreement, its error) of each way to draw m of the trajectories."""
    for kept in itertools.combinations(range(len(agree)), m):
        found = router_metrics(sums_of(agree, tokens, [row not in kept for row in range(len(agree))]))
        assert found["router/sampled"] == m / len(agree)
        yield found["router/agreement"], found["router/agreement/error"]


def spread_and_mean_error(samples):
    agreements, errors = zip(*samples, strict=True)
    mean = math.fsum(agreements) / len(agreements)
    spread = math.fsum((x - mean) ** 2 for x in agreements) / len(agreements)
    return spread, math.fsum(error**2 for error in errors) / len(errors)


@pytest.mark.parametrize("m", [2, 3, 5])
def test_of_trajectories_of_one_length_the_error_is_the_spread_of_all_samples(m):
    """Then the ratio is a mean, and the square of the error is an unbiased estimate of its variance."""
    spread, squares = spread_and_mean_error(every_sample([9.0, 8.0, 6.5, 9.5, 7.0, 9.9], [10.0] * 6, m))
    assert squares == pytest.approx(spread, rel=1e-9)


def test_the_error_says_nothing_of_a_single_trajectory_or_of_none_left_out():
    agree, tokens = [9.0, 8.0, 6.5], [10.0, 10.0, 0.0]  # the last has no generated token
    one = router_metrics(sums_of(agree, tokens, [True, False, False]))
    assert one["router/sampled"] == 0.5 and "router/agreement/error" not in one
    every = router_metrics(sums_of(agree, tokens, [False] * 3))
    assert not {"router/sampled", "router/agreement/error"} & every.keys()
    assert router_metrics(sums_of(agree, tokens, [True] * 3)) == {"router/sampled": 0.0}


def checksum(routes, tokens, first=0):
    return int(route_terms(routes, tokens, torch.arange(first, first + len(tokens))).sum())


@pytest.mark.parametrize(("layers", "top_k"), [(1, 1), (3, 2), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_the_checksum_of_routes_against_pythons_integers(layers, top_k, dtype):
    generator = torch.Generator().manual_seed(0)
    routes = torch.randint(0, 256, (11, layers, top_k), generator=generator)
    tokens = torch.randint(0, 150_000, (11,), generator=generator)
    whole = checksum(routes.to(dtype), tokens)
    assert whole == route_sum(routes, tokens)
    parts = checksum(routes.to(dtype)[:4], tokens[:4]), checksum(routes.to(dtype)[4:], tokens[4:], first=4)
    assert (sum(parts) + 2**63) % 2**64 - 2**63 == whole
    assert checksum(torch.cat([routes, 0 * routes]), tokens.repeat(2)) == whole, "a row of zeros adds nothing"


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 2), st.integers(0, 7), st.integers(1, 255))
def test_the_checksum_sees_every_id_layer_place_and_token(row, other, layer, k, more):
    generator = torch.Generator().manual_seed(1)
    routes = torch.rand(11, 3, 8, generator=generator).argsort(-1) + 8 * torch.arange(11).view(-1, 1, 1)
    tokens = torch.arange(20, 31)
    whole = checksum(routes, tokens)
    changed = routes.clone()
    changed[row, layer, k] = (changed[row, layer, k] + more) % 256
    assert checksum(changed, tokens) != whole
    if row != other:
        moved = torch.arange(11)
        moved[[row, other]] = moved[[other, row]]
        assert checksum(routes[moved], tokens) != whole
        assert checksum(routes, tokens[moved]) != whole
    assert checksum(routes.roll(1, 1), tokens) != whole
    assert checksum(routes.roll(1, 0), tokens) != whole
    assert checksum(routes, tokens, first=1) != whole
