"""What the readings and the states say, in words, and what to try."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.probe.readings import DECODE, PREFILL, REPLAYED, TRAIN, Pair, not_finite_words
from verl_ext.probe.states import Place

NONE = 1e-9  # nats a token: what float32 leaves
MOST = 0.5  # share of the gap from which a cause is called the cause
# Times the gap to training that the rollout engine's gap to itself must be, to be its own fault. If all three readings
# are equally noisy it is 1, if only the rollout's two are it is 2.
OWN = 1.5
NOISE = 0.05  # p-value above which two k3 of the same tokens differ by no more than noise
NOT_FINITE, UNDECIDED = "not finite", "undecided"
ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error that a dtype leaves in hidden states
JUMP = 8.0  # times the error of the place before
HEAD = "head"
AMPLIFIED = 1e4  # times the squared error of the last state that k3 may be, were the head the same


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    cause: "not finite", "none", "sampling path", "routing", "arithmetic", or "undecided" between causes.
    sentence: what it is, and how much of the gap.
    start: the place where the two engines come apart by more than rounding, `head` behind the last state; else "".
    advice: overrides, or what else to do; "" for none.
    """

    cause: str
    sentence: str
    start: str = ""
    advice: str = ""


def verdict(pairs: Sequence[Pair], places: Sequence[Place], dtype: str = "float32") -> Verdict:
    """Judges the pairs of `readings.compare` and the places of `states.compare_states`.

    A cause is named only where the difference between two k3 is more than noise by the paired test of
    `readings.chance_of`: replacing one reading by another takes at least MOST of the gap away (prefill for decode, or
    the rollout's experts for the training engine's), or decode is OWN times as far from prefill as from training.

    Args:
        dtype: the coarser one of the engines.
    """
    start = start_of(places, dtype)
    if words := _not_finite(pairs, places):
        return Verdict(NOT_FINITE, words, start, _LOOK_FOR_NAN)
    k3 = {(pair.one, pair.other): pair.k3 for pair in pairs if pair.k3 is not None}
    chance = {(pair.one, pair.other): pair.chance for pair in pairs}
    whole, tokens = k3[DECODE, TRAIN], pairs[0].tokens
    sampling, rest = k3.get((DECODE, PREFILL), 0.0), k3.get((PREFILL, TRAIN), whole)
    if not start and places and rest > max(AMPLIFIED * (places[-1].error or 0.0) ** 2, NONE):
        start = HEAD
    if max(whole, sampling) < NONE:
        return Verdict("none", f"The engines agree: k3 is {whole:.1e} nats a token.", start)
    undecided = []
    own, closes = sampling >= OWN * whole, whole - rest >= MOST * whole > 0
    if (own and chance[DECODE, PREFILL] <= NOISE) or (closes and chance[PREFILL, TRAIN] <= NOISE):
        return Verdict(
            "sampling path",
            "The rollout engine does not agree with itself: k3 between what it said as it sampled and what it says of "
            f"the same tokens at once is {sampling:.1e}. Its gap to training is {whole:.1e} as it sampled, and "
            f"{rest:.1e} at once.",
            start,
            "look at prefix caching, chunked prefill, speculative decoding and the attention backend, one at a time",
        )
    if own:
        undecided.append(f"{sampling:.1e} within the rollout engine (p = {chance[DECODE, PREFILL]:.2g})")
    if closes:
        undecided.append(f"{rest:.1e} if the rollout engine scores them at once (p = {chance[PREFILL, TRAIN]:.2g})")
    replayed = k3.get((DECODE, REPLAYED))
    if replayed is not None and whole - replayed >= MOST * whole > 0:
        if chance[DECODE, REPLAYED] <= NOISE:
            return Verdict(
                "routing",
                f"{(whole - replayed) / whole:.0%} of the gap is routing: with the rollout's experts replayed, k3 "
                f"falls from {whole:.1e} to {replayed:.1e}.",
                start,
                "stability=r3",
            )
        undecided.append(f"{replayed:.1e} with the rollout's experts replayed (p = {chance[DECODE, REPLAYED]:.2g})")
    if undecided:
        return Verdict(
            UNDECIDED,
            f"The engines differ, and the cause is not decided: k3 is {whole:.1e}, and "
            f"{' and '.join(undecided)}. Over {tokens} tokens, such a difference is within noise.",
            start,
            "score more tokens: a larger --prompts",
        )
    within = f", within the rollout engine {sampling:.1e}" if sampling >= NONE else ""
    replay = "" if replayed is None else f", and with the rollout's experts replayed {replayed:.1e}"
    return Verdict(
        "arithmetic",
        f"The two engines compute differently from the same tokens: k3 is {whole:.1e}{within}{replay}.",
        start,
        _look_at(start, dtype),
    )


def _not_finite(pairs: Sequence[Pair], places: Sequence[Place]) -> str:
    """Says which readings and states hold NaN or infinity, or that nothing was scored; "" where all is finite."""
    counts: dict[str, int] = {}
    for pair in pairs:
        for name, count in ((pair.one, pair.one_not_finite), (pair.other, pair.other_not_finite)):
            counts[name] = max(count, counts.get(name, 0))
    said = [words] if (words := not_finite_words(counts, pairs[0].tokens)) else []
    if place := next((place for place in places if place.not_finite), None):
        sides = {"rollout": place.rollout_not_finite, "training": place.train_not_finite}
        where = " and ".join(f"{count} tokens on the {side} side" for side, count in sides.items() if count)
        said.append(f"The hidden states have NaN or infinity from {place.point} on: {where}")
    if not said and pairs[0].k3 is None:
        return "No token was scored: every answer is one token long."
    if said and pairs[0].k3 is not None:
        said.append(f"k3 is {pairs[0].k3:.1e} over the {pairs[0].tokens - pairs[0].not_finite} other tokens only")
    return "".join(f"{each}. " for each in said).strip()


def start_of(places: Sequence[Place], dtype: str = "float32") -> str:
    """Returns the first place that is not finite, or whose error is JUMP times the one before and above rounding."""
    least = ROUNDING[dtype]
    before = least / JUMP
    for place in places:
        if place.error is None or place.not_finite or place.error > JUMP * max(before, least / JUMP):
            return place.point
        before = place.error
    return ""


_LOOK_FOR_NAN = (
    "look on that side for weights that did not arrive and for an overflow; --sweep fp32 shows whether it is the dtype"
)


def _look_at(start: str, dtype: str) -> str:
    if not start:
        return f"nothing stands out: this is what {dtype} leaves, layer by layer; precision=fp16 leaves less"
    if start == HEAD:
        return (
            "look behind the last norm: the head's weights, the temperature, the logits' dtype, and the ids past the "
            "tokenizer's, which verl masks in the rollout alone"
        )
    return f"look at {start} in both engines: weights that did not arrive, a bias, a scale, a dtype"
