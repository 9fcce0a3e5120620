"""The result of a probe in sentences and tables: what its numbers show, the causes, and the next step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from rich.text import Text

from verl_ext.base.names import HEAD
from verl_ext.base.printable import wide_console
from verl_ext.diagnosis.causes import CAUSES, Cause, known_causes
from verl_ext.diagnosis.findings.probe import AFTER, start_of
from verl_ext.diagnosis.findings.registry import Finding, find_all
from verl_ext.diagnosis.probed import READING_WORDS, Pair, Place, Probe, Stage
from verl_ext.diagnosis.rank import name_causes
from verl_ext.diagnosis.series import Readings
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
from verl_ext.report.run import sentence_of
from verl_ext.report.tables import ShownTable

SAID_WITH_GAP = (
    "probe_values",
    "probe_first_layer",
    "probe_decode",
    "probe_replay",
    "probe_adapter",
    "probe_packing",
)  # their usual levels are no news
LOOK_FOR_NAN = (
    "look on that side for weights that did not arrive and for an overflow; --sweep fp32 shows if the dtype causes it"
)
LOOK_THERE = "look at {start} in both engines: weights that did not arrive, a bias, a scale, a dtype"
MORE_TOKENS = "score more tokens: a larger --prompts"
NEXT = {  # finding.level -> what to do; the first one that was found counts
    **{f"probe_values.{level}": LOOK_FOR_NAN for level in ("rollout", "training", "states", "no_token")},
    **{f"probe_adapter.{level}": f"check {CAUSES['lost_sync'].check}" for level in ("closes", "halves")},
    "probe_replay.harms": CAUSES["wrong_routes"].advice_for(moe=True),
    "probe_packing.harms": "check what the layers carry from one sequence to the next: attention's cu_seqlens, the "
    "states of linear attention and convolutions, position ids",
    "probe_decode.apart": "look at prefix caching, chunked prefill, speculative decoding and the attention backend, "
    "one at a time",
    "probe_replay.closes": "stability=r3",
    "probe_replay.halves": "stability=r3",
    **{f"probe_{name}.undecided": MORE_TOKENS for name in ("decode", "replay", "adapter")},
    "probe_start.head": "look behind the last norm: the head's weights, the temperature, the logits' dtype "
    "(stability.float32_head=true), and the ids above the tokenizer's length, which verl masks only in vLLM",
    "probe_start.nowhere": "precision=fp16 rounds less",
    **{f"probe_start.{level}": LOOK_THERE for level in ("router", "choice", "layer", "rounding")},
}


@dataclass(frozen=True)
class ProbeResult(Probe):
    """Everything that a probe wrote to its file.

    Attributes:
        tokens: how many were scored.
        sweep: results of a sweep, starting with the launch as it is; () without a sweep.
        layers: the gap with each group of weights rounded, starting with none; () without this sweep.
        error: the error that ended the probe early; else "".
    """

    tokens: int = 0
    sweep: Sequence[SweepResult] = ()
    layers: Sequence[GroupGap] = ()
    error: str = ""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "ProbeResult":
        kinds: dict[str, Callable[..., Any]] = {"pairs": Pair, "places": Place, "stages": Stage, "batches": Pair}
        kinds |= {"sweep": SweepResult, "layers": GroupGap}
        each: dict[str, Any] = {name: [kind(**one) for one in found.get(name, ())] for name, kind in kinds.items()}
        swept = {one.name: one.k3 for one in each["sweep"] if one.name and not one.error}
        told = {"dtype": found["dtype"], "head": found.get("head", ("", "")), "error": found.get("error") or ""}
        return cls(**each, **told, swept=swept, tokens=found["tokens"])

    @cached_property
    def _readings(self) -> Readings:
        return Readings({}, probe=self)

    @cached_property
    def found(self) -> dict[str, Finding]:
        """What the numbers show, by the name of the finding."""
        return find_all(self._readings)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The causes that the findings point to, the likeliest first."""
        suspects, _ = name_causes(self._readings, self.found, known_causes().values(), lambda setting: False)
        return tuple(suspect.cause for suspect in suspects)

    @property
    def start(self) -> str:
        """The place where the engines come apart; `lm_head` if that is after the last state, "" if none."""
        return start_of(self)

    @property
    def advice(self) -> str:
        """Overrides, or other things to do; "" for none."""
        marks = {each.mark for each in self.found.values()}
        told = next((text for mark, text in NEXT.items() if mark in marks), "")
        return told.format(start=self.start) or next((f"check {cause.check}" for cause in self.causes), "")

    def has(self, *marks: str) -> bool:
        """Returns True if one of these marks (`finding.level`) was found."""
        return any(each.mark in marks for each in self.found.values())

    def agrees(self, limit: float) -> bool:
        """Returns True if k3 between sampling and training is at most `limit` and all values are finite."""
        finite = self.has("probe_values.finite") and not any(stage.not_finite for stage in self.stages)
        batches = (self.pairs[0], *self.batches)
        return finite and all(not one.not_finite and one.k3 is not None and one.k3 <= limit for one in batches)

    def sentences(self) -> list[str]:
        """The result in sentences: the findings, the causes, a sweep."""
        said = [sentence_of(one.text) for one in self.found.values() if one.notable or one.name not in SAID_WITH_GAP]
        if self.causes:
            titles = "; or: ".join(cause.title for cause in self.causes)
            said.append(f"Likely cause, in the words of a report: {titles}. Check {self.causes[0].check}.")
        said += [sweep_sentence(self.sweep)] if self.sweep else []
        said += layers_sentences(self.layers) if self.layers else []
        said += [f"{one.name} could not be measured: {one.error}" for one in self.sweep[1:] if one.error]
        return said + ([f"The rest could not be measured: {self.error}"] if self.error else [])

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict for `verl-ext probe --json`."""
        found = [{"id": one.name, "level": one.level, "text": one.text} for one in self.found.values()]
        return {
            "findings": found,
            "causes": [cause.name for cause in self.causes],
            "start": self.start,
            "advice": self.advice,
        }

    def tables(self) -> list[ShownTable]:
        """The tables that have rows.

        "NaN or inf" counts tokens in the first / the second engine or reading; "dtype" is the dtype of both engines, or
        of the first / the second.
        """
        found = [_readings_table(self), _bucket_table(self.pairs[0]), _states_table(self)]
        found += [_batches_table(self.batches), _stages_table(self.stages)]
        found += [_sweep_table(self.sweep)] if self.sweep else []
        found += [_layers_table(self.layers)] if self.layers else []
        return [table for table in found if table.rows]


def print_probe(result: ProbeResult) -> None:
    console = wide_console()
    for table in result.tables():
        table.print(console)
    for sentence in result.sentences():
        console.print(Text(sentence), soft_wrap=True)
    if result.advice:
        console.print(Text(f"next: {result.advice}"), soft_wrap=True)


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
    places, start = result.places, result.start
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
