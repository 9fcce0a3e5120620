"""The loss terms against the oracles of tests/support/loss_oracles.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.closeness import close
from tests.support.loss_oracles import batches, kl_oracle, llds_oracle, random_batch, tensors
from verl_ext.core.corrections import opsm_mask, sequence_divergence
from verl_ext.core.losses import llds_penalty, unbiased_kl

LOG_PROB = st.floats(-100, 0, width=32, allow_subnormal=False)
SEEDS = range(4)
EPSILON, TINY = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).tiny


@given(batches(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_outside_the_mask_is_in_no_term_and_no_gradient(batch, odd):
    *inputs, mask = tensors(batch)
    found = []
    for outside in (odd, -1.25):
        l_infer, l_old, l_theta, advantages = (torch.where(mask, values, outside) for values in inputs)
        leaf = l_theta.requires_grad_()
        penalty = llds_penalty(leaf, l_old, advantages, mask, "action")
        kl = unbiased_kl(leaf, l_old, l_infer, mask)
        (penalty + kl).sum().backward()
        whole = sum(sequence_divergence(l_infer, l_old, l_theta, mask))
        found.append([penalty, kl, whole, opsm_mask(whole, advantages, 0.1)[mask], leaf.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gate", ["action", "response"])
@given(batches())
def test_llds_penalty_and_gradient_equal_the_oracle(gate, batch):
    _, l_old, l_theta, advantages, mask = tensors(batch)
    l_theta.requires_grad_()
    penalty = llds_penalty(l_theta, l_old, advantages, mask, gate)
    penalty.sum().backward()
    expected, gradient = llds_oracle(batch[2], batch[1], batch[3], batch[4], gate)
    torch.testing.assert_close(penalty.double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    assert l_theta.grad.tolist() == gradient


def test_llds_leaves_out_what_holds_a_nan():
    l_theta = torch.tensor([[math.nan, -1.0, 0.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1]])
    penalty = llds_penalty(l_theta, torch.zeros(1, 4), torch.ones(1, 4), mask, "action")
    penalty.sum().backward()
    assert penalty.tolist() == [[0, 0, 0, 1]]
    assert l_theta.grad.tolist() == [[0, 0, 0, -1]]


def kl_and_gradient(theta, ref, sampled):
    """[value, gradient by l_theta] of `unbiased_kl`, each as float64 of the shape of the inputs."""
    leaf = theta.detach().clone().requires_grad_()
    value = unbiased_kl(leaf, ref, sampled, torch.ones_like(leaf))
    value.sum().backward()
    return value.detach().double(), leaf.grad.double()


@given(LOG_PROB, LOG_PROB, LOG_PROB)
def test_unbiased_kl_and_gradient_equal_the_oracle(theta, ref, sampled):
    value, gradient = kl_and_gradient(*(torch.tensor([[x]]) for x in (theta, ref, sampled)))
    expected = kl_oracle(theta, ref, sampled)
    # The value is what is left of x - 1 and log x, float64 both, and float32 in the end.
    floor = 4 * EPSILON * abs(expected[1]) + TINY
    assert value.item() == pytest.approx(expected[0], rel=1e-6, abs=floor)
    assert gradient.item() == pytest.approx(expected[1], rel=1e-6, abs=TINY)


@pytest.mark.parametrize("log_ratio", [-30.0, -20.0, -0.1, 0.0, 2.0, 20.0, 20.1, 30.0])  # of r'
def test_the_gradient_of_the_unbiased_kl_points_at_the_reference_however_far_it_is(log_ratio):
    """log x from -40 to 40, inside and outside the bounds of the value."""
    ref = torch.linspace(-40, 40, 401) - 60
    theta = torch.full_like(ref, -60)
    value, gradient = kl_and_gradient(theta, ref, theta - log_ratio)
    expected = [kl_oracle(*map(float, triple)) for triple in zip(theta, ref, theta - log_ratio, strict=True)]
    values, gradients = torch.tensor(expected, dtype=torch.double).T
    torch.testing.assert_close(value, values, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, gradients, rtol=1e-6, atol=0)
    assert torch.equal(gradient.sign(), (theta - ref).double().sign())


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5])
def test_unbiased_kl_keeps_its_digits_near_the_reference(gap):
    theta, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.0 + gap]])
    value, gradient = kl_and_gradient(theta, ref, theta)
    difference = ref.double().item() + 1.0  # what float32 made of the gap
    assert gradient.item() == pytest.approx(-difference, rel=1e-6)  # r' (l_theta - l_ref), unbiased
    assert value.item() == pytest.approx(math.expm1(difference) - difference, rel=1e-6)


def test_gradient_of_the_unbiased_kl_is_the_gradient_of_the_kl():
    """Expectation over all tokens of a small vocabulary, sampled off-policy: exactly grad KL(pi_theta || pi_ref)."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.double, requires_grad=True)
    ref, sampled = torch.randn(2, 6, dtype=torch.double).log_softmax(-1)
    theta = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((theta.exp() * (theta - ref)).sum(), logits, retain_graph=True)
    expectation = (sampled.exp() * unbiased_kl(theta, ref, sampled, torch.ones(6))).sum()
    (estimate,) = torch.autograd.grad(expectation, logits)
    assert (estimate - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_enters_without_losing_more(dtype):
    theta, ref, sampled = (-torch.rand(3, 2, 5) * 3).to(dtype)
    mask = torch.ones(2, 5)
    found = unbiased_kl(theta, ref, sampled, mask)
    assert found.dtype == torch.float32
    assert torch.equal(found, unbiased_kl(theta.double(), ref.double(), sampled.double(), mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_do_not_depend_on_the_batch_they_are_in(seed):
    """A row has the same numbers in every split into micro-batches."""
    l_infer, l_old, l_theta, advantages, mask = tensors(random_batch(seed))
    penalty = llds_penalty(l_theta, l_old, advantages, mask, "action")
    whole = sum(sequence_divergence(l_infer, l_old, l_theta, mask))
    for row in range(len(mask)):
        one = slice(row, row + 1)
        assert torch.equal(llds_penalty(l_theta[one], l_old[one], advantages[one], mask[one], "action"), penalty[one])
        alone = sum(sequence_divergence(l_infer[one], l_old[one], l_theta[one], mask[one]))
        close(alone, whole[one], rtol=1e-12, scale=1.0)
