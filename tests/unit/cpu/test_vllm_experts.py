"""The kernel that replaces vLLM's packed ones of 0.31, against a float64 oracle written from vLLM's own."""

import math

import pytest
import torch

from tests.support.closeness import close
from verl_ext.cpu.vllm import plain_experts

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K = 5, 8, 6, 7, 2


def gated(row: list[float], act: str) -> list[float]:
    """One row of gates and ups, in plain Python."""
    if act == "swigluoai":
        pairs = zip(row[::2], row[1::2], strict=True)
        return [(max(-7, min(up, 7)) + 1) * _swish(min(gate, 7), 1.702) for gate, up in pairs]
    gates, ups = row[:WIDTH], row[WIDTH:]
    of = {
        "silu": lambda x: _swish(x, 1.0),
        "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }[act]
    return [of(gate) * up for gate, up in zip(gates, ups, strict=True)]


def _swish(x: float, steepness: float) -> float:
    return x / (1 + math.exp(-steepness * x))


def oracle(x, w13, w2, b13, b2, weights, ids, act, skip_weighted):
    rows = []
    for token in range(TOKENS):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for place, expert in enumerate(ids[token].tolist()):
            inner = w13[expert].double() @ x[token].double() + (0 if b13 is None else b13[expert].double())
            hidden = torch.tensor(gated(inner.tolist(), act), dtype=torch.float64)
            out = w2[expert].double() @ hidden + (0 if b2 is None else b2[expert].double())
            total += out if skip_weighted else out * float(weights[token, place])
        rows.append(total)
    return torch.stack(rows)


def arguments(biased: bool, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    w13 = 3 * torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)  # large: swigluoai clamps at 7
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)
    b13 = torch.randn(EXPERTS, 2 * WIDTH, generator=generator) if biased else None
    b2 = torch.randn(EXPERTS, HIDDEN, generator=generator) if biased else None
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
    tensors = [None if one is None else one.to(dtype) for one in (x, w13, w2, b13, b2)]
    return [*tensors, weights, ids]  # the last expert is nobody's


@pytest.mark.parametrize("skip_weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_plain_experts_are_the_oracles(act, biased, skip_weighted):
    given = arguments(biased)
    actual = plain_experts(*given, act, "vec", skip_weighted)
    close(actual, oracle(*given, act, skip_weighted).float())


def test_half_precision_is_summed_in_float32_and_comes_back_as_it_was():
    given = arguments(biased=True, dtype=torch.bfloat16)
    actual = plain_experts(*given, "silu", "amx")
    assert actual.dtype == torch.bfloat16
    expected = oracle(*given, "silu", False)
    assert (actual.double() - expected).norm() < 0.02 * expected.norm()


def test_no_token_and_an_activation_that_vllm_has_and_we_have_not():
    x, *rest, weights, ids = arguments(biased=False)
    empty = plain_experts(x[:0], *rest, weights[:0], ids[:0], "silu", "vec")
    assert empty.shape == (0, HIDDEN)
    with pytest.raises(KeyError, match="relu2"):
        plain_experts(x, *rest, weights, ids, "relu2", "vec")


@pytest.mark.slow
def test_torch_compile_does_not_look_into_it():
    given = arguments(biased=False)
    compiled = torch.compile(lambda *of: plain_experts(*of, "silu", "vec"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), plain_experts(*given, "silu", "vec"))
