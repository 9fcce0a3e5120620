"""Rounds weights to the values of a narrow format and back: the numbers of a quantised rollout, in any engine.

Shape legend: [..., out, in], as in nn.Linear; [E, out, in] where E experts are one tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _e2m1(x: Tensor) -> Tensor:
    """Rounds to 0, 0.5, 1, 1.5, 2, 3, 4, 6 or their negatives: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round() * step


# The largest value of each format, and the function that rounds values up to it. torch rounds ties to even. That is
# also fp4's own tie rule: the quotient by the step is even exactly where the mantissa's bit is 0.
FORMATS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "fp8": (448, _e4m3),
    "int8": (127, torch.round),
    "int4": (7, torch.round),
    "fp4": (6, _e2m1),
}


def fake_quantized(weight: Tensor, format: str, group: int | str) -> Tensor:
    """Returns `weight` with every value rounded to the nearest point of its group's grid, in the same shape and dtype.

    The grid of a group is the format's values times a scale that puts its largest magnitude at the format's largest
    value; ties go to even, in the integers too. A group of zeros stays zero; NaN or infinity makes all of its group
    NaN. The scale keeps full precision; MXFP4's is a power of two and NVFP4's an e4m3 number under one float32 per
    tensor; the loss that this adds is not simulated. The grid is computed in float32; for a bfloat16 weight its points
    are rounded to bfloat16, as in a kernel that multiplies in bfloat16.

    Args:
        weight: [..., out, in] floating point.
        format: `fp8` (e4m3, up to 448), `int8` (-127 to 127), `int4` (-7 to 7), `fp4` (e2m1, up to 6).
        group: the values that share a scale. `tensor`: a matrix [out, in], each expert by itself; `channel`: a row (an
            output); a number: that many consecutive inputs of a row (NVFP4 16, MXFP4 32, GPTQ's and AWQ's int4 128).

    Raises:
        ValueError: the group does not divide the number of inputs. Kernels refuse that too, for example vLLM's Marlin
            (`marlin_utils.py:verify_marlin_supports_shape`).

    Sources: OCP Microscaling Formats (MX) 1.0 for e4m3, e2m1 and ties to even; NVFP4's values as in vLLM
    (`nvfp4_emulation_utils.py:cast_to_fp4`); one fp8 scale per matrix or row as in
    `vllm/_custom_ops.py:scaled_fp8_quant`; int8 by 127 as in `int8_utils.py`. Int4 is symmetric too; some kernels also
    use -8.
    """
    largest_of_format, rounded = FORMATS[format]
    groups = _group_values(weight.to(torch.promote_types(weight.dtype, torch.float32)), group)
    largest = groups.abs().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1)
    # Divides by `largest` itself, not by a scale computed from it: the largest value is then unchanged to the bit, so a
    # second rounding finds the same grid.
    points = rounded(groups / largest * largest_of_format) / largest_of_format * largest
    return points.reshape(weight.shape).to(weight.dtype)


def _group_values(weight: Tensor, group: int | str) -> Tensor:
    """Reshapes to [..., values that share a scale]."""
    if group == "tensor":
        return weight.flatten(-2)
    if group == "channel":
        return weight
    inputs = weight.shape[-1]
    if inputs % int(group):
        raise ValueError(f"groups of {group} inputs do not divide the {inputs} of a weight {list(weight.shape)}")
    return weight.unflatten(-1, (-1, int(group)))
