"""Bypass mode in a worker: measuring a mini-batch in parts gives the result of `measure` on the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.support.measure_oracle import random_batch, ratio
from tests.unit.workers.first_pass_ranks import RANKS, judged, rank_main
from verl_ext.core.loss_batch import LossBatch
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens
from verl_ext.workers.first_pass import FirstPass, FirstPassSettings, is_past

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


def weighed(one, batch):
    l_infer, l_theta, mask, entropy = padded(batch)
    advantages = torch.zeros(mask.shape)
    return one.weigh(LossBatch(l_theta.requires_grad_(), l_infer, advantages, mask, l_infer=l_infer), entropy)


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
    assert {name for name in metrics if not name.startswith("first_pass/")} == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    counted = {"tokens": whole.tokens, "kept": whole.kept, "non_finite": 0, "refused": whole.kept == 0}
    assert {name: metrics[f"first_pass/{name}"] for name in counted} == counted


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


K3 = ("vllm_kl/k3", "above")


@pytest.mark.parametrize(
    ("limits", "taken"),
    [([], True), ([(*K3, 1e9)], True), ([(*K3, 1e9), (*K3, 1e-9)], False), ([("mine/x", "above", 0)], True)],
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
    first, second = [padded(batch[:2])], [padded(batch[2:4]), padded(batch[4:])]
    # In the later mini-batch, the first rank has no token.
    parts = [[first, [padded(nothing)]], [second, [padded(near)]], [second, [padded(near)]]]
    torch.multiprocessing.spawn(rank_main, (parts, f"file://{tmp_path}/store", str(tmp_path)), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert ranks[0] == ranks[1] == ranks[2]
    whole = judged([[padded(batch)], [padded(near)]], ())
    for name, taken in (("refused", False), ("taken", True)):
        assert [took for took, _ in ranks[0][name]] == [taken, taken]
        assert ranks[0][name][1][1] == {}, "only the first is reported"
        metrics, expected = ranks[0][name][0][1], whole[0][1] | {"first_pass/refused": float(not taken)}
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "side", "expected"),
    [
        (0.1, "above", False),
        (0.2, "above", True),
        (0.05, "below", True),
        (math.nan, "above", True),
        (-math.inf, "above", True),
    ],
)
def test_a_value_at_its_limit_is_not_past_it_and_one_that_is_no_number_is(value, side, expected):
    assert is_past({"x": value}, ("x", side, 0.1)) is expected
