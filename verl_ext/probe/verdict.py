"""The result of a probe in sentences and tables: the cause of the gap, and the next step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from rich.text import Text

from verl_ext.base.printable import wide_console
from verl_ext.diagnosis.causes import CAUSES, Cause
from verl_ext.probe.readings import (
    BASE,
    DECODE,
    FLOORS,
    PACKED,
    PREFILL,
    PREFILL_AGAIN,
    REPLAYED,
    SYNC,
    TRAIN,
    TRAIN_AGAIN,
    UPDATE,
    Pair,
    Place,
    Stage,
)
from verl_ext.probe.sweep import (
    LAUNCH,
    GroupGap,
    SweepResult,
    exceeds_noise,
    excess,
    layers_sentences,
    ranked_by_gap,
    ranked_groups,
    sensitive_layers,
    sweep_sentence,
)
from verl_ext.report.tables import ShownTable
from verl_ext.routing.recorder import HEAD, INDEXER, ROUTER

ROUNDED_NATS = 1e-9  # nats per token: the gap that float32 leaves
CAUSE_SHARE = 0.5  # share of the gap that a cause must explain
# The sampling path is the cause if the rollout engine's gap to itself is this many times its gap to training. The ratio
# is 1 if all three readings are equally noisy, and 2 if only the rollout's two readings are noisy.
OWN_RATIO = 1.5
NOISE_P = 0.05  # p-value above which two k3 of the same tokens differ by no more than noise
NOT_FINITE, UNDECIDED = "not finite", "undecided"
# Relative error that a dtype leaves in hidden states.
ROUNDING_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
JUMP_RATIO = 8.0  # times the error of the previous place
CLOSED_SHARE = 0.1  # share of the gap that a replay may leave if only the choice of experts differs
AMPLIFIED_RATIO = 1e4  # k3 with equal heads is at most this many times the squared error of the last state
AFTER = {SYNC: "a sync of the same weights", UPDATE: "an update and its sync"}
WIDER_RATIO, ARRIVED_SHARE = 2.0, 0.5  # times the earlier gap; share of the training engine's movement
WHOLE_SHARE = (0.8, 1.25)  # range of this share if the whole update arrives
SIDES = dict.fromkeys((DECODE, PREFILL, PREFILL_AGAIN), "rollout")
SIDES |= dict.fromkeys((TRAIN, TRAIN_AGAIN, REPLAYED, PACKED, BASE), "training")
READING_WORDS = {
    "decode": "rollout, sampling",
    "prefill": "rollout, all at once",
    "train": "training",
    "replayed": "training, the rollout's experts",
    "packed": "training, several in a pass",
    "base": "training, without its LoRA",
    "prefill_again": "the same again, in another order",
    "train_again": "the same again",
}
FLOOR_SHARE = 0.1  # share of the gap from which the noise of an engine is worth a sentence
HARMS = {  # reading that is further from the rollout than `train` -> verdict, sentence, advice
    REPLAYED: (
        "replay",
        "Replaying the rollout's experts does harm: k3 rises from {whole:.1e} to {other:.1e}.",
        CAUSES["wrong_routes"].advice_for(moe=True),
    ),
    PACKED: (
        "packing",
        "In the training engine, sequences in the same forward pass change each other: with several in a pass, k3 "
        "rises from {whole:.1e} to {other:.1e}.",
        "check what the layers carry from one sequence to the next: attention's cu_seqlens, the states of linear "
        "attention and convolutions, position ids",
    ),
}
FEWEST_BATCHES = 4  # with fewer, growth is not reported
LOOK_FOR_NAN = (
    "look on that side for weights that did not arrive and for an overflow; --sweep fp32 shows if the dtype causes it"
)


@dataclass(frozen=True)
class Conclusion:
    """The cause of the gap.

    Attributes:
        cause: "not finite", "none", "adapter", "replay", "packing", "sampling path", "routing", "arithmetic", or
            "undecided" between causes.
        sentence: the cause in words, and its part of the gap.
        start: where the two engines come apart by more than rounding, `head` if after the last state; "" if nowhere.
        advice: overrides, or other things to do; "" for none.
    """

    cause: str
    sentence: str
    start: str = ""
    advice: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """Everything that a probe wrote to its file.

    Attributes:
        head: dtype of the logits in the rollout and in training, "" if it was not recorded.
        batches: the gap between sampling and training for each batch with the same weights; [] if there was only one.
        swept: results of a sweep, starting with the launch as it is; [] without a sweep.
        layers: the gap with each group of weights rounded, starting with none; [] without this sweep.
        error: the error that ended the probe early; else "".
    """

    tokens: int
    dtype: str
    pairs: list[Pair]
    places: list[Place]
    stages: list[Stage]
    swept: list[SweepResult]
    error: str
    batches: Sequence[Pair] = ()
    head: Sequence[str] = ("", "")
    layers: Sequence[GroupGap] = ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "ProbeResult":
        def each(name: str, kind: Callable[..., Any]) -> list[Any]:
            return [kind(**one) for one in found.get(name, [])]

        engines = each("pairs", Pair), each("places", Place), each("stages", Stage)
        swept, error, batches = each("sweep", SweepResult), found.get("error") or "", each("batches", Pair)
        layers = each("layers", GroupGap)
        return cls(
            found["tokens"], found["dtype"], *engines, swept, error, batches, found.get("head", ("", "")), layers
        )

    @cached_property
    def conclusion(self) -> Conclusion:
        return judge_gap(self.pairs, self.places, self.dtype)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of diagnosis/causes to which the probe points, in the order of readings, special causes first."""
        shown = (*readings_of(self.conclusion, self.pairs, self.places), *map(_stage_reading, self.stages))
        special = sorted(CAUSES.values(), key=lambda cause: len(cause.probe))
        return tuple(dict.fromkeys(cause for reading in shown for cause in special if reading in cause.probe))

    def agrees(self, limit: float) -> bool:
        """Returns True if k3 between sampling and training is at most `limit` and all values are finite."""
        finite = self.conclusion.cause != NOT_FINITE and not any(stage.not_finite for stage in self.stages)
        batches = (self.pairs[0], *self.batches)
        return finite and all(not one.not_finite and one.k3 is not None and one.k3 <= limit for one in batches)

    def sentences(self) -> list[str]:
        """The result in sentences, the verdict first."""
        start = self.conclusion.start
        where = f" They come apart at {start}." if start and self.conclusion.cause != "none" else ""
        said = [f"{self.conclusion.sentence}{where}", *([batches_sentence(self.batches)] if self.batches else [])]
        said += floor_sentences(self.pairs)
        said += dtype_sentences(self.places, self.head)
        said += map(stage_sentence, self.stages)
        if self.causes:
            titles = "; or: ".join(cause.title for cause in self.causes)
            said.append(f"Likely cause, in the words of a report: {titles}. Check {self.causes[0].check}.")
        said += [sweep_sentence(self.swept)] if self.swept else []
        said += layers_sentences(self.layers) if self.layers else []
        said += [f"{one.name} could not be measured: {one.error}" for one in self.swept[1:] if one.error]
        return said + ([f"The rest could not be measured: {self.error}"] if self.error else [])

    def tables(self) -> list[ShownTable]:
        """The tables that have rows.

        "NaN or inf" counts tokens in the first / the second engine or reading; "dtype" is the dtype of both engines, or
        of the first / the second.
        """
        found = [_readings_table(self), _bucket_table(self.pairs[0]), _states_table(self)]
        found += [_batches_table(self.batches), _stages_table(self.stages)]
        found += [_sweep_table(self.swept)] if self.swept else []
        found += [_layers_table(self.layers)] if self.layers else []
        return [table for table in found if table.rows]


def judge_gap(pairs: Sequence[Pair], places: Sequence[Place], dtype: str = "float32") -> Conclusion:
    """Judges the pairs of `readings.compare_readings` and the places of `readings.compare_states`.

    A cause is named only if the difference between two k3 is more than noise by the paired test of
    `readings.chance_of`. It is named if replacing one reading by another (decode by prefill, the training engine's
    experts by the rollout's, the LoRA by none) removes at least CAUSE_SHARE of the gap, or if decode is OWN_RATIO times
    as far from prefill as from training.

    Args:
        dtype: the coarser of the two engines' dtypes.
    """
    start = start_of(places, dtype)
    if words := _not_finite_sentences(pairs, places):
        return Conclusion(NOT_FINITE, words, start, LOOK_FOR_NAN)
    k3 = {(pair.one, pair.other): pair.k3 for pair in pairs if pair.k3 is not None}
    chance = {(pair.one, pair.other): pair.chance for pair in pairs}
    whole, tokens = k3[DECODE, TRAIN], pairs[0].tokens
    sampling, rest = k3.get((DECODE, PREFILL), 0.0), k3.get((PREFILL, TRAIN), whole)
    if not start and places and rest > max(AMPLIFIED_RATIO * (places[-1].error or 0.0) ** 2, ROUNDED_NATS):
        start = HEAD
    base = k3.get((DECODE, BASE), whole)
    if whole - base >= CAUSE_SHARE * whole > ROUNDED_NATS and chance[DECODE, BASE] <= NOISE_P:
        return Conclusion(
            "adapter",
            f"The rollout samples without the LoRA: k3 is {whole:.1e} to the training engine with it, and {base:.1e} "
            "without it.",
            start,
            f"check {CAUSES['lost_sync'].check}",
        )
    replayed = k3.get((DECODE, REPLAYED))
    for reading, (cause, words, advice) in HARMS.items():
        other = k3.get((DECODE, reading), whole)
        if other > max(whole / CAUSE_SHARE, ROUNDED_NATS) and chance[DECODE, reading] <= NOISE_P:
            return Conclusion(cause, words.format(whole=whole, other=other), start, advice)
    if max(whole, sampling) < ROUNDED_NATS:
        return Conclusion("none", f"The engines agree: k3 is {whole:.1e} nats per token.", start)
    claims = (
        (sampling >= OWN_RATIO * whole, (DECODE, PREFILL), f"{sampling:.1e} within the rollout engine"),
        (
            whole - rest >= CAUSE_SHARE * whole > 0,
            (PREFILL, TRAIN),
            f"{rest:.1e} if the rollout engine scores them at once",
        ),
        (
            replayed is not None and whole - replayed >= CAUSE_SHARE * whole > 0,
            (DECODE, REPLAYED),
            f"{replayed or 0:.1e} with the rollout's experts replayed",
        ),
    )
    likely = [(pair, words) for holds, pair, words in claims if holds]
    certain = [pair for pair, _ in likely if chance[pair] <= NOISE_P]
    if certain and certain[0] != (DECODE, REPLAYED):
        return Conclusion(
            "sampling path",
            "The rollout engine does not agree with itself: k3 between its log-probs while sampling and its log-probs "
            f"for the same tokens at once is {sampling:.1e}. Its gap to training is {whole:.1e} while sampling, and "
            f"{rest:.1e} at once.",
            start,
            "look at prefix caching, chunked prefill, speculative decoding and the attention backend, one at a time",
        )
    if certain and replayed is not None:
        return Conclusion(
            "routing",
            f"{(whole - replayed) / whole:.0%} of the gap is routing: with the rollout's experts replayed, k3 falls "
            f"from {whole:.1e} to {replayed:.1e}.",
            start,
            "stability=r3",
        )
    if likely:
        undecided = " and ".join(f"{words} (p = {chance[pair]:.2g})" for pair, words in likely)
        return Conclusion(
            UNDECIDED,
            f"The engines differ, and the cause is not decided: k3 is {whole:.1e}, and {undecided}. Over {tokens} "
            "tokens, such a difference is within noise.",
            start,
            "score more tokens: a larger --prompts",
        )
    within = f", within the rollout engine {sampling:.1e}" if sampling >= ROUNDED_NATS else ""
    replay = "" if replayed is None else f", and with the rollout's experts replayed {replayed:.1e}"
    return Conclusion(
        "arithmetic",
        f"The two engines compute differently from the same tokens: k3 is {whole:.1e}{within}{replay}.",
        start,
        _look_at(start, dtype),
    )


def floor_sentences(pairs: Sequence[Pair]) -> list[str]:
    """Returns a sentence for each engine that differs from itself, scoring the same twice, by much of the gap."""
    whole = pairs[0].k3 or 0.0
    floors = [(pair.one, pair.k3) for pair in pairs if (pair.one, pair.other) in FLOORS and pair.k3 is not None]
    return [
        f"Noise floor: {READING_WORDS[one]}, scored twice, differs from itself by a k3 of {k3:.1e}. What is not larger "
        "is noise."
        for one, k3 in floors
        if k3 > max(FLOOR_SHARE * whole, ROUNDED_NATS)
    ]


def dtype_sentences(places: Sequence[Place], head: Sequence[str] = ("", "")) -> list[str]:
    """Returns a sentence for each part of a layer, and for the logits, whose dtypes differ between the engines."""
    differing = Counter(
        (place.point.rpartition(".")[2], place.rollout_dtype, place.train_dtype)
        for place in places
        if place.rollout_dtype != place.train_dtype and not place.point.endswith(INDEXER)
    )
    parts = [
        f"The output of {count} x {part} is {ours} in the rollout and {theirs} in training."
        for (part, ours, theirs), count in differing.items()
    ]
    ours, theirs = head
    apart = ours and theirs and ours != theirs
    return parts + ([f"The logits are {ours} in the rollout and {theirs} in training."] if apart else [])


def start_of(places: Sequence[Place], dtype: str = "float32") -> str:
    """Returns the first place that is not finite, or whose error is above rounding and JUMP_RATIO times the last."""
    least = ROUNDING_ERROR[dtype]
    before = least / JUMP_RATIO
    for place in places:
        if place.error is None or place.not_finite or place.error > JUMP_RATIO * max(before, least / JUMP_RATIO):
            return place.point
        before = place.error
    return ""


def readings_of(conclusion: Conclusion, pairs: Sequence[Pair], places: Sequence[Place]) -> tuple[str, ...]:
    """Returns the names of the PROBE_READINGS that a conclusion shows.

    Different weights also change the choice of experts, so a replay closes most of their gap too. "choice" is named
    only if a replay closes nearly all of the gap, and states come apart at experts first.
    """
    told = {"replay": ("replay",), "sampling path": ("decode",)}
    if conclusion.cause in told:
        return told[conclusion.cause]
    if conclusion.cause == NOT_FINITE and any(pair.one_not_finite for pair in pairs if pair.one == DECODE):
        return ("not finite",)
    if conclusion.cause not in ("routing", "arithmetic"):
        return ()
    start, routed = conclusion.start, conclusion.cause == "routing"
    if start == HEAD:
        return ("head",)
    error = next((place.error for place in places if place.point == start), None) or 0.0
    if error <= ROUNDING_ERROR["bfloat16"]:
        return ("router",) if start.endswith(ROUTER) else ("rounding",) if routed else ("rounding", "coarse")
    k3 = {(pair.one, pair.other): pair.k3 for pair in pairs}
    whole, replayed = k3[DECODE, TRAIN], k3.get((DECODE, REPLAYED))
    if start.endswith(".experts") and whole and replayed is not None and replayed < CLOSED_SHARE * whole:
        return ("choice",)
    return ("layer", "first attention") if start == "0.attention" else ("layer",)


def _stage_reading(one: Stage) -> str:
    """Returns the name of the PROBE_READING that a stage shows; "" if nothing is wrong, or it is not known."""
    if one.name != UPDATE or one.before is None or one.after is None:
        return ""
    if not one.train_moved or one.rollout_moved is None or not _widens(one.before, one.after):
        return ""
    arrived = one.rollout_moved / one.train_moved
    if arrived < ARRIVED_SHARE:
        return "lost"
    return "" if WHOLE_SHARE[0] < arrived < WHOLE_SHARE[1] else "part"


def batches_sentence(batches: Sequence[Pair]) -> str:
    """Returns a sentence on whether the gap grows from batch to batch while the weights stay the same.

    It grows if each batch of the second half has a larger k3 than each of the first, and their mean is WIDER_RATIO
    times as large. By chance, the first happens in 1 of 6 cases with 4 batches, in 1 of 20 with 6, in 1 of 70 with 8.
    """
    k3 = [one.k3 for one in batches if one.k3 is not None and not one.not_finite]
    if len(k3) < len(batches):
        return f"{len(batches) - len(k3)} of {len(batches)} batches with the same weights have NaN or infinity."
    half = len(k3) // 2
    first, last = k3[:half], k3[-half:]
    means = sum(first) / half, sum(last) / half
    if len(k3) >= FEWEST_BATCHES and min(last) > max(first) and _widens(*means):
        return (
            f"The gap grows while the weights stay the same: k3 is {means[0]:.1e} over the first {half} of {len(k3)} "
            f"batches and {means[1]:.1e} over the last {half}. Check what else a weight sync changes, and what the "
            "engines keep from batch to batch: scales, caches, buffers."
        )
    return f"Over {len(k3)} batches with the same weights, k3 is {min(k3):.1e} to {max(k3):.1e}: no growth is seen."


def stage_sentence(one: Stage) -> str:
    """Returns a sentence on what a stage shows."""
    if one.not_finite:
        words = not_finite_words({PREFILL: one.rollout_not_finite, TRAIN: one.train_not_finite}, one.tokens)
        return f"After {AFTER[one.name]}, {words}."
    if one.before is None or one.after is None or one.rollout_moved is None or one.train_moved is None:
        return f"Before {AFTER[one.name]}, no token was finite in both engines, so the change is not known."
    return _STAGE_SENTENCES[one.name](one.before, one.after, one.rollout_moved, one.train_moved)


def print_probe(result: ProbeResult) -> None:
    console = wide_console()
    for table in result.tables():
        table.print(console)
    for sentence in result.sentences():
        console.print(Text(sentence), soft_wrap=True)
    if result.conclusion.advice:
        console.print(Text(f"next: {result.conclusion.advice}"), soft_wrap=True)


def _not_finite_sentences(pairs: Sequence[Pair], places: Sequence[Place]) -> str:
    """Returns sentences on readings and states with NaN or infinity, or on no scored token; "" if all is finite."""
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


def not_finite_words(counts: Mapping[str, int], tokens: int) -> str:
    """Returns in words how many tokens are not finite in each reading, from reading -> count; "" if all are finite."""
    words = [
        f"{count} of {tokens}{'' if number else ' tokens have a log-probability of NaN or infinity'} "
        f"on the {SIDES[name]} side ({name})"
        for number, (name, count) in enumerate((name, count) for name, count in counts.items() if count)
    ]
    return ", ".join(words)


def _look_at(start: str, dtype: str) -> str:
    if not start:
        return f"no layer stands out: this is the rounding of {dtype}; precision=fp16 rounds less"
    if start == HEAD:
        return (
            "look behind the last norm: the head's weights, the temperature, the logits' dtype "
            "(stability.float32_head=true), and the ids above the tokenizer's length, which verl masks only in vLLM"
        )
    return f"look at {start} in both engines: weights that did not arrive, a bias, a scale, a dtype"


def _widens(before: float, after: float) -> bool:
    """Returns True if a k3 is more than rounding, and WIDER_RATIO times an earlier one."""
    return after > WIDER_RATIO * max(before, ROUNDED_NATS)


def _sync_sentence(before: float, after: float, rollout_moved: float, train_moved: float) -> str:
    if _widens(before, after):
        return (
            f"A weight sync widens the gap: k3 was {before:.1e} and is {after:.1e}. It sends weights other than those "
            "that the rollout had."
        )
    if _widens(before, rollout_moved**2):
        return f"A sync of the same weights moves the rollout by {rollout_moved:.1e} nats per token."
    return "A weight sync does not widen the gap."


def _update_sentence(before: float, after: float, rollout_moved: float, train_moved: float) -> str:
    if train_moved == 0:
        return "The update changed nothing: its learning rate is 0, or its gradients are."
    if rollout_moved < ARRIVED_SHARE * train_moved and _widens(before, after):
        return (
            f"The update does not arrive in the rollout: training moved by {train_moved:.1e} nats per token, the "
            f"rollout by {rollout_moved:.1e}."
        )
    if _widens(before, after):
        return f"One update widens the gap: k3 was {before:.1e} and is {after:.1e}."
    return (
        f"An update moves training by {train_moved:.1e} nats per token, the rollout by {rollout_moved:.1e}; "
        f"k3 is {after:.1e}."
    )


_STAGE_SENTENCES = {SYNC: _sync_sentence, UPDATE: _update_sentence}


def _readings_table(result: ProbeResult) -> ShownTable:
    rows = [
        (
            READING_WORDS[pair.one],
            READING_WORDS[pair.other],
            _k3_text(pair),
            _formatted(pair.largest, ".2e"),
            _formatted(pair.equal, ".0%"),
            f"{pair.one_not_finite} / {pair.other_not_finite}",
        )
        for pair in result.pairs
    ]
    columns = ("one", "other", "k3, nats per token", "max |log p - log q|", "equal", "NaN or inf")
    return ShownTable(f"the same {result.tokens} tokens", columns, rows, labels=2)


def _bucket_table(pair: Pair) -> ShownTable:
    sides = [[(name, f"{k3:.2e}") for name, k3 in by.items()] for by in (pair.by_probability, pair.by_position)]
    rows = [(*one, *other) for one, other in zip_longest(*sides, fillvalue=("", ""))]
    return ShownTable("k3 between sampling and training", ("probability", "k3", "position", "k3"), rows)


def _states_table(result: ProbeResult) -> ShownTable:
    places, start = result.places, result.conclusion.start
    rows = [
        (
            place.point,
            _formatted(place.error, ".1e"),
            "" if place.differs is None else f"{place.differs:.2%}",
            "" if place.weight_gap is None else f"{place.weight_gap:.2%}",
            f"{place.rollout_not_finite} / {place.train_not_finite}",
            _dtypes(place.rollout_dtype, place.train_dtype),
        )
        for place in places
    ]
    if all(result.head):
        rows.append((HEAD, "", "", "", "", _dtypes(*result.head)))
    others = "tokens with other experts, or positions"
    columns = ("at", "relative error", others, "gap of their weights", "NaN or inf", "dtype")
    marked = next((row for row, (point, *_) in enumerate(rows) if point == start), None)
    return ShownTable("hidden states, rollout against training", columns, rows, marked=marked)


def _dtypes(*engines: str) -> str:
    return " / ".join(dict.fromkeys(engines))


def _batches_table(batches: Sequence[Pair]) -> ShownTable:
    rows = [
        (
            str(number),
            str(one.tokens),
            _k3_text(one),
            _formatted(one.largest, ".2e"),
            f"{one.one_not_finite} / {one.other_not_finite}",
        )
        for number, one in enumerate(batches, 1)
    ]
    columns = ("batch", "tokens", "k3, nats per token", "max |log p - log q|", "NaN or inf")
    return ShownTable("sampling and training, a weight sync between batches", columns, rows)


def _stages_table(stages: Sequence[Stage]) -> ShownTable:
    rows = [
        (
            AFTER[one.name],
            *(_formatted(number, ".2e") for number in (one.before, one.after, one.rollout_moved, one.train_moved)),
            f"{one.rollout_not_finite} / {one.train_not_finite}",
        )
        for one in stages
    ]
    columns = ("after", "k3 before", "k3 after", "rollout moved", "training moved", "NaN or inf")
    return ShownTable("the same tokens once more; moved: mean |change of log p|", columns, rows)


def _k3_text(one: Pair | SweepResult | GroupGap) -> str:
    return _formatted(one.k3, ".2e") + ("" if one.k3_error is None else f" ± {one.k3_error:.0e}")


def _formatted(number: float | None, form: str) -> str:
    """Formats a mean over the finite tokens; "none" if there are none."""
    return "none" if number is None else format(number, form)


def _sweep_table(swept: Sequence[SweepResult]) -> ShownTable:
    base, order = swept[0], ranked_by_gap(swept)
    rows = [(one.name or LAUNCH, *_sweep_numbers(one, base)) for one in order]
    columns = ("setting", "k3", "of the launch's", "decode, prefill", "prefill, training", "seconds")
    title = "one setting changed at a time, the least gap first; *: by more than its error"
    return ShownTable(title, columns, rows, marked=order.index(base))


def _layers_table(layers: Sequence[GroupGap]) -> ShownTable:
    base, *groups = layers
    kept = sensitive_layers(layers)
    rows = [
        (f"{one.group}{' *' if one in kept else ''}", _k3_text(one), f"{excess(one, base):.1e}")
        for one in ranked_groups(groups)
    ]
    columns = ("rounded", "k3", "more than with nothing rounded")
    return ShownTable("one group of the rollout's weights rounded at a time; *: stands out", columns, rows)


def _sweep_numbers(one: SweepResult, base: SweepResult) -> tuple[str, ...]:
    if one.error:
        return ("failed", "", "", "", "")
    star = "*" if one.name and exceeds_noise(one, base) else " "
    share = f"{one.k3 / base.k3:.3g}{star}" if base.k3 else ""
    return _k3_text(one), share, f"{one.sampling:.1e}", f"{one.rest:.1e}", f"{one.seconds:.0f}"
