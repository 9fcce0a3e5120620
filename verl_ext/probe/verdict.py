"""What the readings and the states say, in words, and what to try."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.probe.readings import DECODE, PREFILL, REPLAYED, TRAIN, Pair
from verl_ext.probe.states import Place

NONE = 1e-9  # nats a token: what float32 leaves
MOST = 0.5  # share of the gap from which a cause is called the cause
ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error that a dtype leaves in hidden states
JUMP = 8.0  # times the error of the place before
HEAD = "head"
AMPLIFIED = 1e4  # times the squared error of the last state that k3 may be, were the head the same


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    cause: "none", "sampling path", "routing" or "arithmetic".
    sentence: what it is, and how much of the gap.
    start: the place where the two engines come apart by more than rounding, `head` behind the last state; else "".
    advice: overrides, or what else to do; "" for none.
    """

    cause: str
    sentence: str
    start: str = ""
    advice: str = ""


def verdict(pairs: Sequence[Pair], places: Sequence[Place], dtype: str = "float32") -> Verdict:
    """Of the pairs of `readings.compare`, and of the places of `states.compare_states`.

    Args:
        dtype: the coarser one of the engines.
    """
    k3 = {(pair.one, pair.other): pair.k3 for pair in pairs}
    whole = k3[DECODE, TRAIN]
    sampling = k3.get((DECODE, PREFILL), 0.0)
    start = start_of(places, dtype)
    if not start and places and k3.get((PREFILL, TRAIN), 0.0) > max(AMPLIFIED * places[-1].error ** 2, NONE):
        start = HEAD
    if max(whole, sampling) < NONE:
        return Verdict("none", f"The engines agree: k3 is {whole:.1e} nats a token.", start)
    if sampling >= MOST * whole:
        return Verdict(
            "sampling path",
            "The rollout engine does not agree with itself: k3 between what it said as it sampled and what it says of "
            f"the same tokens at once is {sampling:.1e}, where all of the gap is {whole:.1e}.",
            start,
            "look at prefix caching, chunked prefill, speculative decoding and the attention backend, one at a time",
        )
    replayed = k3.get((DECODE, REPLAYED))
    if replayed is not None and whole - replayed >= MOST * whole:
        return Verdict(
            "routing",
            f"{(whole - replayed) / whole:.0%} of the gap is routing: with the rollout's experts replayed, k3 falls "
            f"from {whole:.1e} to {replayed:.1e}.",
            start,
            "stability=r3",
        )
    rest = "" if replayed is None else f", and with the rollout's experts replayed {replayed:.1e}"
    return Verdict(
        "arithmetic",
        f"The two engines compute differently from the same tokens: k3 is {whole:.1e}{rest}.",
        start,
        _look_at(start, dtype),
    )


def start_of(places: Sequence[Place], dtype: str = "float32") -> str:
    """Where the error first stands out: JUMP times that of the place before, and more than rounding."""
    least = ROUNDING[dtype]
    before = least / JUMP
    for place in places:
        if place.error > JUMP * max(before, least / JUMP):
            return place.point
        before = place.error
    return ""


def _look_at(start: str, dtype: str) -> str:
    if not start:
        return f"nothing stands out: this is what {dtype} leaves, layer by layer; precision=fp16 leaves less"
    if start == HEAD:
        return (
            "look behind the last norm: the head's weights, the temperature, the logits' dtype, and the ids past the "
            "tokenizer's, which verl masks in the rollout alone"
        )
    return f"look at {start} in both engines: weights that did not arrive, a bias, a scale, a dtype"
