"""Fake quantisation against grids enumerated by hand, in plain Python (float64)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from verl_ext.core.fake_quant import FORMATS, fake_quantized

FEW = at_most(60)
E4M3 = [0.0, *(m / 8 * 2**-6 for m in range(1, 8))] + [
    (1 + m / 8) * 2 ** (e - 7)
    for e in range(1, 16)
    for m in range(8)
    if (e, m) != (15, 7)  # that one is NaN
]
POSITIVE = {"fp8": E4M3, "int8": list(range(128)), "int4": list(range(8)), "fp4": [0, 0.5, 1, 1.5, 2, 3, 4, 6]}
GRIDS = {name: [float(v) for v in (*(-p for p in reversed(values)), *values)] for name, values in POSITIVE.items()}
TIES = {  # of values under a scale of 1, as the largest of the format stands beside them
    "fp8": {17: 16, 19: 20, 2**-10: 0, 3 * 2**-10: 2**-8, 432: 448, 400: 384},
    "int8": {0.5: 0, 1.5: 2, 126.5: 126},
    "int4": {0.5: 0, 1.5: 2, 2.5: 2, 5.5: 6, 6.5: 6},
    "fp4": {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4},
}
DIVISORS = {8: (1, 2, 4, 8), 6: (1, 2, 3, 6), 1: (1,)}


@st.composite
def weights(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """(weight [..., out, in], group) of magnitudes far apart, with zeros and rows of zeros."""
    inputs = draw(st.sampled_from(sorted(DIVISORS)))
    shape = (*draw(st.sampled_from([(), (1,), (3,), (2, 2)])), draw(st.integers(1, 4)), inputs)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(shape, generator=generator)
    weight *= 10.0 ** torch.randint(-2, 2, (*shape[:-1], 1), generator=generator)
    weight *= torch.rand(shape, generator=generator) > 0.1
    weight[..., :1, :] *= draw(st.sampled_from([0, 1]))
    group = draw(st.sampled_from(["tensor", "channel", *DIVISORS[inputs]]))
    return weight.to(draw(st.sampled_from(dtypes))), group


formats = st.sampled_from(sorted(FORMATS))


def groups_of(weight, group):
    """[groups][values] of Python floats: the values that share a scale."""
    out, inputs = weight.shape[-2:]
    size = {"tensor": out * inputs, "channel": inputs}.get(group, group)
    values = weight.double().flatten().tolist()
    return [values[first : first + size] for first in range(0, len(values), size)]


def test_the_formats_are_those_of_the_grids():
    assert {name: largest for name, (largest, _) in FORMATS.items()} == {n: max(g) for n, g in GRIDS.items()}


@FEW
@given(case=weights(), name=formats)
def test_every_value_is_the_nearest_of_its_grid(case, name):
    weight, group = case
    found = fake_quantized(weight, name, group)

    assert (found.shape, found.dtype) == (weight.shape, weight.dtype)
    stored = torch.finfo(weight.dtype)  # a point is rounded once more, to the dtype of the weight
    for before, after in zip(groups_of(weight, group), groups_of(found, group), strict=True):
        largest = max(map(abs, before))
        points = [value * largest / max(GRIDS[name]) for value in GRIDS[name]]
        noise = 1e-6 * largest + stored.tiny * stored.eps
        for x, y in zip(before, after, strict=True):
            nearest = min(abs(x - point) for point in points)
            assert min(abs(y - point) for point in points) <= stored.eps / 2 * abs(y) + noise
            assert abs(x - y) <= nearest + stored.eps / 2 * abs(y) + noise


@pytest.mark.parametrize("name", sorted(TIES))
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_even(name, sign):
    largest = max(GRIDS[name])
    row = torch.tensor([[sign * float(x) for x in TIES[name]] + [largest]])
    expected = [[sign * float(y) for y in TIES[name].values()] + [largest]]
    assert fake_quantized(row, name, "channel").tolist() == expected


@FEW
@given(case=weights(), name=formats)
def test_a_second_rounding_changes_nothing(case, name):
    weight, group = case
    once = fake_quantized(weight, name, group)
    assert torch.equal(fake_quantized(once, name, group), once)


@FEW
@given(case=weights(), name=formats)
def test_signs_and_the_largest_value_of_each_group_stay(case, name):
    weight, group = case
    found = fake_quantized(weight, name, group)
    assert (found * weight >= 0).all() and torch.equal(fake_quantized(-weight, name, group), -found)
    for before, after in zip(groups_of(weight, group), groups_of(found, group), strict=True):
        assert max(map(abs, before)) == max(map(abs, after))


@FEW
@given(case=weights(dtypes=(torch.float32, torch.bfloat16)), name=formats, power=st.integers(-20, 20))
def test_a_power_of_two_goes_through(case, name, power):
    weight, group = case
    assert torch.equal(
        fake_quantized(weight * 2.0**power, name, group), fake_quantized(weight, name, group) * 2.0**power
    )


@FEW
@given(case=weights(), name=formats)
def test_experts_and_rows_do_not_see_each_other(case, name):
    weight, group = case
    matrices = [fake_quantized(matrix, name, group) for matrix in weight.reshape(-1, *weight.shape[-2:])]
    assert torch.equal(fake_quantized(weight, name, group), torch.stack(matrices).view_as(weight))
    if group != "tensor":
        rows = [fake_quantized(row, name, group) for row in weight.reshape(-1, 1, weight.shape[-1])]
        assert torch.equal(fake_quantized(weight, name, group), torch.stack(rows).view_as(weight))


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_value_breaks_its_group_and_no_other(name, broken):
    found = fake_quantized(torch.tensor([[1.0, broken, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0]]), name, 2)
    assert found[0, :2].isnan().all()
    assert torch.equal(found[0, 2:], torch.tensor([2.0, 0.0])) and torch.equal(found[1], torch.tensor([1.0, 1, 1, 0]))


def test_the_smallest_magnitudes_survive():
    """The scale of such a row, 1e-44 / 448, underflows to 0."""
    weight = torch.tensor([[1e-44, -1e-44, 0.0]])
    assert torch.equal(fake_quantized(weight, "fp8", "channel"), weight)


def test_layouts_other_than_contiguous():
    weight = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    for group in ("tensor", "channel", 4):
        assert torch.equal(fake_quantized(weight, "fp4", group), fake_quantized(weight.contiguous(), "fp4", group))


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"groups of 32 inputs do not divide the 48 of a weight \[2, 48\]"):
        fake_quantized(torch.zeros(2, 48), "int4", 32)
