"""Bypass mode in a worker: measuring a mini-batch in parts gives the result of `measure` on the whole."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.support.measure_oracle import CHOICES, lag_of, oracle, random_batch, ratio
from tests.unit.workers.first_pass_ranks import RANKS, judged, rank_main
from verl_ext.core.answers import SERVER, Servers, server_number
from verl_ext.core.loss_batch import LossBatch
from verl_ext.core.measure import measure
from verl_ext.core.mismatch import advantage_metrics, sums_by_sign
from verl_ext.core.routing import RouteCounts, agreement, router_metrics
from verl_ext.core.tokens import Tokens
from verl_ext.guard.guard import Guard, Limit
from verl_ext.guard.levels import level_rules
from verl_ext.guard.rules import Rule
from verl_ext.workers.first_pass import FirstPass, FirstPassSettings, take_measured, take_routes

ICEPOP = {"icepop": {"alpha": 0.8, "beta": 1.25}}
NARROW = {"icepop": {"alpha": 0.9, "beta": 1.1}}
EVERY = (
    ICEPOP,
    {"kpop": {"phi": 0.01}},
    {"ipo": {"eps": 0.05}},
    {"mis": {"cap": 1.5, "weight": "one"}, "geo_mask": {"low": 0.9, "high": 1.1}},
)


def padded(batch, width=40):
    """(l_infer, l_theta, mask, entropy) of trajectories, [B, width] each."""
    columns = [[[float(token[i]) for token in row] + [0.0] * (width - len(row)) for row in batch] for i in range(4)]
    l_infer, l_theta, mask, entropy = (torch.tensor(column).view(len(batch), width) for column in columns)
    return l_infer, l_theta, mask.bool(), entropy


def sent(ages, mask):
    """The field of the lag as the workers get it: each trajectory's bucket on its tokens, 0 elsewhere."""
    nothing = torch.zeros(mask.shape)
    return replace(Tokens.from_padded(nothing, nothing, mask), lag=lag_of(ages)).lag_buckets().view(mask.shape) * mask


def weighed(one, batch, ages=None):
    l_infer, l_theta, mask, entropy = padded(batch)
    advantages, lag = torch.zeros(mask.shape), None if ages is None else sent(ages, mask)
    loss_batch = LossBatch(l_theta.requires_grad_(), l_infer, advantages, mask, l_infer=l_infer, lag=lag)
    return one.weigh(loss_batch, entropy)


def is_of_the_batch(name):
    """True for what `measure` does not give: counts, and the gap by the advantages' sign."""
    return name.startswith("first_pass/") or "advantage" in name


def of(batch, corrections):
    l_infer, l_theta, mask, entropy = padded(batch)
    return measure(Tokens.from_padded(l_infer, l_theta, mask, entropy), corrections)


@at_most(25)
@given(corrections=st.sampled_from(EVERY), cuts=st.lists(st.integers(0, 6), max_size=3), seed=st.integers(0, 99))
def test_parts_are_measured_as_the_whole_is(corrections, cuts, seed):
    batch = random_batch(rows=6, longest=40, seed=seed)
    one = FirstPass(FirstPassSettings(corrections, as_mask=False))
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), 6], strict=True):
        weighed(one, batch[low:high])
    _, metrics = one.judge()
    whole = of(batch, corrections)
    assert {name for name in metrics if not is_of_the_batch(name)} == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    counted = {"tokens": whole.tokens, "kept": whole.kept, "non_finite": 0, "refused": whole.kept == 0}
    assert {name: metrics[f"first_pass/{name}"] for name in counted} == counted


@at_most(25)
@given(cuts=st.lists(st.integers(0, 6), max_size=3), left_out=st.sets(st.integers(0, 5)), seed=st.integers(0, 99))
def test_the_routing_of_parts_is_measured_as_that_of_the_whole(cuts, left_out, seed):
    batch, layers = random_batch(rows=6, longest=40, seed=seed), 3
    l_infer, l_theta, mask, _ = padded(batch)
    generator = torch.Generator().manual_seed(seed)
    overlap = torch.randint(0, 3, (*mask.shape, layers), generator=generator)
    gone = torch.tensor([row in left_out for row in range(6)])
    ends = torch.arange(0, mask.numel() + 1, mask.shape[1])
    known = ~gone[:, None].expand_as(mask).flatten()
    per_token, sums = agreement(overlap.flatten(0, 1), 2, mask.flatten(), known, ends, left_out_B=gone)
    packed, agreed = sums.pack(), per_token.view(mask.shape)
    one = FirstPass(FirstPassSettings(CHOICES[1], as_mask=False))
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), 6], strict=True):
        part, width = slice(low, high), mask.shape[1]
        fields = {"l_infer": l_infer[part], "router_agreement": agreed[part]}
        rows = LossBatch(l_theta[part], l_infer[part], torch.zeros(high - low, width), mask[part], **fields)
        one.weigh(rows, routers=packed[part])
    _, metrics = one.judge()
    tokens = replace(Tokens.from_padded(l_infer, l_theta, mask), agreement=agreed.flatten())
    expected = measure(tokens, CHOICES[1]).metrics | router_metrics(packed)
    reported = {f"actor/{name}": value for name, value in metrics.items()}
    counts = take_routes(reported)
    assert counts == RouteCounts.from_sums(packed) and take_routes(reported) is None
    measured, _ = take_measured(reported)
    found = {name: value for name, value in measured.metrics.items() if not is_of_the_batch(name)}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12) and not reported


@at_most(25)
@given(cuts=st.lists(st.integers(0, 6), max_size=3), seed=st.integers(0, 99), breakdown=st.booleans())
def test_parts_are_measured_by_server_and_by_the_advantages_sign_as_the_whole_is(cuts, seed, breakdown):
    batch, generator = random_batch(rows=6, longest=40, seed=seed), torch.Generator().manual_seed(seed)
    l_infer, l_theta, mask, _ = padded(batch)
    advantages = torch.randint(-1, 2, mask.shape, generator=generator) * mask.float()
    servers = Servers(addresses := ["a:1", "a:2", "b:1"])
    numbers = torch.tensor([server_number(address) for address in (*addresses, "unknown:1")])
    facts = torch.zeros(6, 3, dtype=torch.long)
    facts[:, SERVER] = numbers[torch.randint(0, 4, (6,), generator=generator)]
    one = FirstPass(FirstPassSettings(breakdown=breakdown))
    one.begin_update(narrowed=False, limits=(), servers=addresses)
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), 6], strict=True):
        rows = slice(low, high)
        part = LossBatch(l_theta[rows], l_infer[rows], advantages[rows], mask[rows], l_infer=l_infer[rows])
        one.weigh(part, facts=facts[rows])
    found = {name: value for name, value in one.judge()[1].items() if not name.startswith("first_pass/")}
    tokens = replace(Tokens.from_padded(l_infer, l_theta, mask), buckets=servers.buckets(facts))
    expected = measure(tokens, breakdown=breakdown).metrics
    if breakdown:
        expected |= advantage_metrics(sums_by_sign(tokens, advantages.flatten()))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


AGES = [(0, 0, 9), (8, 8, 0), (3, 3, 0), (2, 5, 0), (0, 3, 4), (1, 2, 50)]  # newest, oldest; fresh tokens


@at_most(25)
@given(
    corrections=st.sampled_from(CHOICES[:4]),
    breakdown=st.booleans(),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    ages=st.permutations(AGES),
    seed=st.integers(0, 99),
)
def test_parts_are_measured_by_lag_as_the_oracle_says(corrections, breakdown, cuts, ages, seed):
    batch = random_batch(rows=6, longest=40, seed=seed)
    one = FirstPass(FirstPassSettings(corrections or {}, as_mask=False, breakdown=breakdown))
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), 6], strict=True):
        weighed(one, batch[low:high], ages[low:high])
    metrics = {name: value for name, value in one.judge()[1].items() if not is_of_the_batch(name)}
    expected = oracle(batch, corrections, with_entropy=True, breakdown=breakdown, lag=ages)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_a_micro_batch_without_columns_has_no_lag():
    empty = torch.zeros(1, 0)
    batch = LossBatch(empty, empty, empty, empty.bool(), l_infer=empty, lag=empty.long())
    one = FirstPass(FirstPassSettings())
    one.weigh(batch)
    assert one.judge()[1]["first_pass/tokens"] == 0


ENGINES = Rule("engines", "vllm_kl/k3", 0.1, action="skip", engines_only=True)
ZERO = Rule("zero_mismatch", "vllm_kl/k3", 1e-10, action="stop", engines_only=True)
BATCH_SKIP = Rule("batch_skip", "vllm_kl/k3", 0.1, action="skip")
GAP = [(-2.0, -2.0 + log_k, True, 0.5) for log_k in (0.7, -0.5, 0.6, -0.7)]  # its k3 is 0.19
EQUAL = [(-2.0, -2.0, True, 0.5)] * 4


@pytest.mark.parametrize(
    ("rules", "action"),
    [((ENGINES,), "skip"), ((ZERO,), "stop"), (level_rules(0.002), "warn"), ((BATCH_SKIP,), "skip")],
)
@pytest.mark.parametrize(
    ("rows", "ages", "of_engines"),
    [
        ([GAP, GAP], [(8, 8), (8, 8)], False),  # equal engines: only the policy has moved
        ([EQUAL, GAP], [(0, 0), (8, 8)], False),
        ([GAP, EQUAL], [(0, 0), (8, 8)], True),
        ([GAP, GAP], None, True),  # synchronous training
    ],
)
def test_the_workers_refuse_what_the_guard_refuses_and_the_age_of_rollouts_is_no_gap_of_the_engines(
    rules, action, rows, ages, of_engines
):
    guard, one, actions = Guard(rules), FirstPass(FirstPassSettings()), []
    for step in (1, 2, 3):
        guard.begin(step)
        one.begin_update(narrowed=False, limits=guard.limits)
        weighed(one, rows, ages)
        taken, measured = one.judge()
        decision = guard.judge(measured)
        assert taken is (decision.refusal is None)
        actions += [event.action for event in decision.events]
    k3 = measured["vllm_kl/k3"]
    fires = k3 > 0.1 if rules == (BATCH_SKIP,) else of_engines
    assert set(actions) == ({action} if fires else set())
    assert k3 > (0.18 if rows == [GAP, GAP] else 0.09)


@pytest.mark.parametrize("corrections", EVERY, ids=lambda c: "+".join(c))
def test_as_a_mask_what_has_a_weight_weighs_one_and_the_same_is_dropped(corrections):
    batch = random_batch(rows=6, longest=40)
    by_ratio, as_mask = (FirstPass(FirstPassSettings(corrections, as_mask=mask)) for mask in (False, True))
    weights, mask = weighed(by_ratio, batch), weighed(as_mask, batch)
    assert 0 < mask.sum() < padded(batch)[2].sum()
    assert torch.equal(mask, (weights != 0).float()) and not mask.requires_grad
    metrics = [one.judge()[1] for one in (by_ratio, as_mask)]
    assert metrics[0]["correction/dropped"] == metrics[1]["correction/dropped"]


def test_icepop_as_a_mask_is_its_band():
    batch = random_batch(rows=6, longest=40)
    found = weighed(FirstPass(FirstPassSettings(ICEPOP)), batch)
    for row, weights in zip(batch, found.tolist(), strict=True):
        kept = [float(m and 0.8 <= ratio(theta - infer) <= 1.25) for infer, theta, m, _ in row]
        assert weights == kept + [0.0] * (40 - len(row))


def test_a_narrow_band_is_that_updates_alone():
    batch = random_batch(rows=6, longest=40)
    one = FirstPass(FirstPassSettings(ICEPOP, NARROW))
    kept = []
    for narrowed in (False, True, False):
        one.begin_update(narrowed, ())
        kept.append(weighed(one, batch).sum())
    assert kept[1] < kept[0] == kept[2]


MINE = Limit(Rule("mine", "mine/x", 0.0), 0.0)


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ([], True),
        ([Limit(BATCH_SKIP, 1e9)], True),
        ([Limit(BATCH_SKIP, 1e9), Limit(BATCH_SKIP, 1e-9)], False),
        ([MINE], True),
    ],
)
def test_the_first_mini_batch_decides_for_the_whole_update(limits, taken):
    batch = random_batch(rows=6, longest=40)
    one = FirstPass(FirstPassSettings(ICEPOP))
    one.begin_update(narrowed=False, limits=limits)
    near = [[(infer, infer, m, entropy) for infer, _, m, entropy in row] for row in batch]
    for number, rows in enumerate((batch, near, near)):
        one.begin_mini_batch()
        weighed(one, rows)
        found, metrics = one.judge()
        assert found is taken
        assert bool(metrics) is (number == 0)
    one.begin_update(narrowed=False, limits=())
    weighed(one, near)
    found, metrics = one.judge()
    assert found and metrics["first_pass/refused"] == 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("token", "kept", "non_finite"), [((-1.0, 2.0, True, 0.5), 0, 0), ((-1.0, math.nan, True, 0.5), 1, 1)]
)
def test_a_mini_batch_with_nothing_to_learn_from_or_what_is_no_number_takes_no_step(token, kept, non_finite, first):
    fine = (-1.0, -1.0, True, 0.5)
    one = FirstPass(FirstPassSettings(ICEPOP))
    if not first:
        weighed(one, [[fine]])
        assert one.judge()[0]
        one.begin_mini_batch()
    weights = weighed(one, [[token, *[fine] * kept]])
    assert weights[0, 0] == 0
    taken, metrics = one.judge()
    assert not taken
    if first:
        assert (metrics["first_pass/kept"], metrics["first_pass/non_finite"]) == (kept, non_finite)


@pytest.mark.timeout(180)
def test_ranks_decide_alike_by_the_tokens_of_all_each_once(quick_ranks, tmp_path):
    batch = random_batch(rows=6, longest=40)
    near = [[(infer, infer, m, entropy) for infer, _, m, entropy in row] for row in batch]
    nothing = [[(-1.0, -1.0, False, 0.5)]]

    def part(rows, ages):
        return *(columns := padded(rows)), sent(ages, columns[2])

    first, second = [part(batch[:2], AGES[:2])], [part(batch[2:4], AGES[2:4]), part(batch[4:], AGES[4:])]
    # In the later mini-batch, the first rank has no token.
    later = [part(near, AGES)]
    parts = [[first, [part(nothing, AGES[:1])]], [second, later], [second, later]]
    torch.multiprocessing.spawn(rank_main, (parts, f"file://{tmp_path}/store", str(tmp_path)), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert ranks[0] == ranks[1] == ranks[2]
    whole = judged([[part(batch, AGES)], later], ())
    assert {"vllm_kl/k3/lag/0", "vllm_kl/k3/lag/8-", "vllm_kl/k3/lag/span"} <= whole[0][1].keys()
    for name, taken in (("refused", False), ("taken", True)):
        assert [took for took, _ in ranks[0][name]] == [taken, taken]
        assert ranks[0][name][1][1] == {}, "only the first is reported"
        metrics, expected = ranks[0][name][0][1], whole[0][1] | {"first_pass/refused": float(not taken)}
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-12)
