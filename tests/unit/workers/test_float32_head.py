"""The training engine's logits in float32: their values against float64, and gradients that are the engine's own."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from verl_ext.base.errors import HookError
from verl_ext.workers.float32_head import compute_in_float32, float32_product

DTYPES = (torch.bfloat16, torch.float16)


class Model(nn.Module):
    """A decoder of no layers: states -> logits; `tuples` returns them as Megatron's head does."""

    def __init__(self, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(32, 50, bias=bias, dtype=dtype)

    def forward(self, states):
        return self.lm_head(states)


def hooked(model: nn.Module) -> int:
    return compute_in_float32(SimpleNamespace(module=model, engine_config=SimpleNamespace(strategy="fsdp2")))


def exact_logits(states, head):
    """The same in float64, from the values that the engine has."""
    found = states.double() @ head.weight.double().T
    return found if head.bias is None else found + head.bias.double()


def product(states, weight, dtype):
    found = torch.full((states.shape[0], weight.shape[0]), torch.nan)
    float32_product(states, weight, None, dtype, out=found)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_exact_and_gradients_are_the_engines_own(dtype, bias):
    states = torch.randn(2, 7, 32).to(dtype)
    factor = torch.randn(2, 7, 50)
    grads = {}
    for on in (False, True):
        model = Model(dtype, bias)
        if on:
            assert hooked(model) == 1
        own = states.clone().requires_grad_()
        logits = model(own)
        (logits.float() * factor).sum().backward()
        grads[on] = [own.grad, *(each.grad for each in model.parameters())]
        exact = exact_logits(states, model.lm_head)
        error = (logits.double() - exact).abs().max() / exact.abs().max()
        assert logits.dtype == (torch.float32 if on else dtype)
        assert error < 1e-6 if on else error > 1e-4
    for without, with_hook in zip(grads[False], grads[True], strict=True):
        assert torch.equal(without, with_hook)


def test_autocast_rounds_the_weight_but_not_the_logits():
    model = Model(torch.float32)
    hooked(model)
    states = torch.randn(5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(states)
    exact = states.bfloat16().double() @ model.lm_head.weight.bfloat16().double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-6 * exact.abs().max().item())


def test_an_engine_in_float32_is_unchanged():
    states = torch.randn(5, 32)
    plain, other = Model(torch.float32), Model(torch.float32)
    hooked(other)
    torch.testing.assert_close(other(states), plain(states))


def test_the_logits_may_be_changed_in_place():
    """verl divides them by the temperature in place (Megatron)."""
    model = Model(torch.bfloat16)
    hooked(model)
    logits = model(torch.randn(3, 32).bfloat16())
    logits.div_(torch.tensor(2.0))
    logits.sum().backward()
    assert model.lm_head.weight.grad.isfinite().all()


def test_a_head_with_an_adapter_is_refused():
    model = Model(torch.bfloat16)
    model.lm_head.base_layer = nn.Linear(32, 50)
    with pytest.raises(HookError, match="adapter"):
        hooked(model)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 20), st.sampled_from(DTYPES), st.floats(1e-3, 1e3))
def test_product_of_any_shape_and_scale(n, d, V, dtype, scale):
    generator = torch.Generator().manual_seed(n + d + V)
    states = (scale * torch.randn(n, 1, d, generator=generator)).to(dtype)
    weight = torch.randn(V, d, generator=generator).to(dtype)
    exact = states.flatten(0, 1).double() @ weight.double().T
    bound = 1e-6 * (states.flatten(0, 1).double().abs() @ weight.double().abs().T) + 1e-30
    found = product(states, weight, dtype).double()
    assert ((found - exact).abs() <= bound).all()


def test_product_keeps_values_that_are_not_finite():
    states = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [1.0, 1.0]])
    found = product(states, torch.ones(1, 2), torch.float32)
    assert found[0].isnan() and found[1].isinf() and found[2] == 2
