"""The corrections that act in the update, against the oracles of tests/support/loss_oracles.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.loss_oracles import batches, m2po_oracle, mean, opsm_oracle, random_batch, tensors
from verl_ext.base.names import BUCKETS
from verl_ext.core.corrections import m2po, opsm, opsm_mask, sequence_divergence
from verl_ext.core.loss_batch import LossBatch


@given(batches(), st.sampled_from([-0.5, 0.0, 0.1, 30.0]))
def test_opsm_equals_the_oracle_and_its_parts_add_up(batch, delta):
    l_infer, l_old, l_theta, advantages, mask = tensors(batch)
    total = sum(sequence_divergence(l_infer, l_old, l_theta, mask))
    whole = [
        mean([i - t for i, t, on in zip(*row, strict=True) if on])
        for row in zip(batch[0], batch[2], batch[4], strict=True)
    ]
    assert total.tolist() == pytest.approx(whole, rel=1e-12, abs=1e-12)
    if all(abs(value - delta) > 1e-9 for value in whole):
        expected = opsm_oracle(batch[0], batch[2], batch[3], batch[4], delta)
        assert opsm_mask(total, advantages, delta).tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_what_each_lag_brings_to_opsms_metrics_adds_up_to_them(seed):
    l_infer, l_old, l_theta, advantages, mask = tensors(random_batch(seed))
    buckets = [0, 1, 1, 4, 6]  # lags 0, 1, 1, 4 to 7, and a span
    lag = torch.tensor(buckets)[:, None].expand_as(mask) * mask
    found = opsm(LossBatch(l_theta, l_old, advantages, mask, l_infer=l_infer, lag=lag), delta=0.0).metrics
    rows = mask.any(-1)
    for metric in ("mismatch", "sequences_dropped"):
        parts = {name: found.pop(f"{metric}/lag/{name}") for name in BUCKETS["lag"]}
        assert sum(parts.values()) == pytest.approx(found[metric])
        assert all(value == 0 for name, value in parts.items() if name not in ("0", "1", "4-7", "span"))
    mean_gap = (l_infer - l_old)[3][mask[3]].double().mean()
    whole = opsm(LossBatch(l_theta, l_old, advantages, mask, l_infer=l_infer, lag=lag), delta=0.0).metrics
    assert whole["mismatch/lag/4-7"] == pytest.approx((mean_gap / rows.sum()).item(), rel=1e-5)
    alone = opsm(LossBatch(l_theta, l_old, advantages, mask, l_infer=l_infer), delta=0.0).metrics
    assert found == alone, "without a lag, no more than before"


@pytest.mark.parametrize("seed", range(3))
def test_opsm_of_what_is_stale_alone_leaves_the_rest(seed):
    *values, mask = tensors(random_batch(seed))
    l_infer, l_old, l_theta, advantages = values
    lag = torch.tensor([0, 1, 0, 4, 6])[:, None].expand_as(mask) * mask
    batch = LossBatch(l_theta, l_old, advantages, mask, l_infer=l_infer, lag=lag)
    masked, found = opsm(batch, delta=-1.0).weight, opsm(batch, delta=-1.0, stale_only=True)
    stale = [1, 3, 4]
    assert found.weight[[0, 2]].eq(1).all() and torch.equal(found.weight[stale], masked[stale])
    assert masked[[0, 2]].eq(0).any() and found.metrics["dropped"] == ((found.weight == 0) & mask).sum() / mask.sum()
    without = LossBatch(l_theta, l_old, advantages, mask, l_infer=l_infer)
    assert opsm(without, delta=-1.0, stale_only=True).weight.eq(1).all(), "no trajectory is known to be stale"


def test_opsm_masks_a_sequence_with_nan_only_where_the_advantage_is_negative():
    nan = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    whole = sum(sequence_divergence(nan, nan * 0, torch.zeros(2, 2), torch.ones(2, 2)))
    advantages = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])
    assert opsm_mask(whole, advantages, 0.1).tolist() == [[0, 1], [1, 1]]


def m2po_of(l_infer, l_theta, advantages, mask, threshold):
    return m2po(LossBatch(l_theta, l_theta, advantages, mask, l_infer=l_infer), threshold=threshold)


@given(batches(), st.sampled_from([1e-4, 0.04, 1.0, 50.0, 1e6]))
def test_m2po_keeps_what_the_papers_loop_keeps(batch, threshold):
    l_infer, _, l_theta, advantages, mask = tensors(batch)
    found = m2po_of(l_infer, l_theta, advantages, mask, threshold)
    expected, moments = m2po_oracle(batch[0], batch[2], batch[3], batch[4], threshold)
    if all(abs(value - threshold) > 1e-9 * threshold for value in moments):
        squares = (l_theta.double() - l_infer).clamp(-20, 20).square()
        # Of two that are equally far, either may go.
        kept, wanted = (sorted(squares[(keep == 1) & mask].tolist()) for keep in (found.weight, torch.tensor(expected)))
        assert kept == wanted
    assert found.weight[~mask].eq(1).all() and not found.weight.requires_grad
    assert found.metrics["second_moment"] == pytest.approx(moments[0] if moments else 0.0)
    assert found.metrics["dropped"] == pytest.approx(((found.weight == 0) & mask).sum() / mask.sum().clamp(min=1))


def test_m2po_of_one_token_of_none_and_of_what_is_no_number():
    one = torch.ones(1, 1)
    assert m2po_of(-one, -0.9 * one, one, one.bool(), 0.04).weight.item() == 1
    assert m2po_of(-one, -0.5 * one, one, one.bool(), 0.04).weight.item() == 0
    assert m2po_of(-one, -0.5 * one, -one, one.bool(), 0.04).weight.item() == 1, "it moves back"
    nothing = m2po_of(-one, -0.5 * one, one, ~one.bool(), 0.04)
    assert nothing.weight.item() == 1 and nothing.metrics == {"dropped": 0, "second_moment": 0}
    # l_infer is NaN; the rollout gave the token no probability; the policy gives it none.
    odd = torch.tensor([[math.nan, -math.inf, -1.0]]), torch.tensor([[-1.0, -1.0, -math.inf]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    up, down = (m2po_of(*odd, sign * torch.ones(1, 3), mask, 0.04) for sign in (1, -1))
    assert up.weight.tolist() == [[0, 0, 1]] and down.weight.tolist() == [[0, 1, 0]]
    assert up.metrics["second_moment"] == down.metrics["second_moment"] == 400
