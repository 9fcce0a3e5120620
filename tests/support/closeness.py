"""Closeness that holds on any CPU: differences are measured against the scale of the tensor, not of each element.

Another machine adds the terms of a sum in another order, and rounds its exponentials otherwise. What that changes is a
share of the largest terms, so an element near zero among large ones keeps no digits of its own.
"""

from typing import Any

import torch


def close(found: Any, expected: Any, rtol: float = 1e-5, *, scale: float | None = None, name: str = "") -> None:
    """Assert max |found - expected| <= rtol * scale, in float64; NaN and infinities must be at the same places.

    Args:
        found, expected: tensors, numbers or nested lists of one shape, of any dtypes.
        rtol: float32 keeps some 1e-7 of its largest term; 1e-5 leaves room for sums of thousands.
        scale: default: the largest finite |expected|. Give the size of the terms where `expected` is what is left of
            their cancelling.
        name: what is compared, for the message.
    """
    a, b = (torch.as_tensor(value, dtype=torch.float64, device="cpu").detach() for value in (found, expected))
    title = f"{name}: " if name else ""
    assert a.shape == b.shape, f"{title}shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    finite = b.isfinite()
    odd = ~finite | ~a.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    assert same[odd].all(), f"{title}NaN or infinities differ: {a[odd].tolist()} instead of {b[odd].tolist()}"
    if scale is None:
        scale = b[finite].abs().max().item() if finite.any() else 0.0
    difference = (a - b)[finite].abs()
    if difference.numel() and difference.max() > rtol * scale:
        at = tuple(finite.nonzero()[difference.argmax()].tolist())
        raise AssertionError(
            f"{title}{a[at].item()!r} instead of {b[at].item()!r} at {at}: "
            f"{difference.max().item():.3g} apart, where {rtol:g} of the scale {scale:.3g} is allowed"
        )
