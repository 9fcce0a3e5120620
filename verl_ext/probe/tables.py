"""What a probe found, as tables of text: printed by `show`, and part of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from verl_ext.probe.readings import Pair
from verl_ext.probe.stages import AFTER, Stage
from verl_ext.probe.states import Place
from verl_ext.probe.sweep import Swept, matters, ranked
from verl_ext.probe.verdict import Verdict

WORDS = {
    "decode": "rollout, sampling",
    "prefill": "rollout, all at once",
    "train": "training",
    "replayed": "training, the rollout's experts",
}
LAUNCH = "the launch as it is"


@dataclass(frozen=True)
class Table:
    """Attributes:
    columns: the first `labels` of them are text, the others numbers.
    rows: a text for each column.
    marked: number of the row that stands out, if one does.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    marked: int | None = None


def tables(found: Mapping[str, Any], told: Verdict) -> list[Table]:
    """Returns the tables that have a row. "NaN or inf" counts tokens of the first / the second engine or reading."""
    every = (_readings(found), _by_bucket(found["pairs"][0]), _states(found["places"], told.start))
    more = (_stages(found.get("stages", [])), _sweep(found.get("sweep", [])))
    return [table for table in (*every, *more) if table.rows]


def _readings(found: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            WORDS[pair.one],
            WORDS[pair.other],
            _text(pair.k3, ".2e") + ("" if pair.k3_error is None else f" ± {pair.k3_error:.0e}"),
            _text(pair.largest, ".2e"),
            _text(pair.equal, ".0%"),
            f"{pair.one_not_finite} / {pair.other_not_finite}",
        )
        for pair in (Pair(**each) for each in found["pairs"])
    )
    columns = ("one", "other", "k3, nats a token", "max |log p - log q|", "equal", "NaN or inf")
    return Table(f"the same {found['tokens']} tokens", columns, rows, labels=2)


def _by_bucket(pair: Mapping[str, Any]) -> Table:
    sides = [[(name, f"{k3:.2e}") for name, k3 in pair[by].items()] for by in ("by_probability", "by_position")]
    rows = tuple((*one, *other) for one, other in zip_longest(*sides, fillvalue=("", "")))
    return Table("k3 between sampling and training", ("probability", "k3", "position", "k3"), rows)


def _states(found: Sequence[Mapping[str, Any]], start: str) -> Table:
    places = [Place(**each) for each in found]
    rows = tuple(
        (
            place.point,
            _text(place.error, ".1e"),
            "" if place.differs is None else f"{place.differs:.2%}",
            "" if place.weight_gap is None else f"{place.weight_gap:.2%}",
            f"{place.rollout_not_finite} / {place.train_not_finite}",
        )
        for place in places
    )
    columns = ("at", "relative error", "tokens with other experts, or positions", "gap of their weights", "NaN or inf")
    marked = next((row for row, place in enumerate(places) if place.point == start), None)
    return Table("hidden states, rollout against training", columns, rows, marked=marked)


def _stages(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (
            AFTER[one.name],
            *(_text(number, ".2e") for number in (one.before, one.after, one.rollout_moved, one.train_moved)),
            f"{one.rollout_not_finite} / {one.train_not_finite}",
        )
        for one in (Stage(**each) for each in found)
    )
    columns = ("after", "k3 before", "k3 after", "rollout moved", "training moved", "NaN or inf")
    return Table("the same tokens once more; moved: mean |change of log p|", columns, rows)


def _text(number: float | None, form: str) -> str:
    """Formats a mean over the finite tokens; "none" where there are none."""
    return "none" if number is None else format(number, form)


def _sweep(sweep: Sequence[Mapping[str, Any]]) -> Table:
    if not sweep:
        return Table("", (), ())
    swept = [Swept(**one) for one in sweep]
    base, order = swept[0], ranked(swept)
    rows = tuple(
        (one.name or LAUNCH, "failed" if one.error else f"{one.k3:.2e} ± {one.k3_error:.0e}", *_numbers(one, base))
        for one in order
    )
    columns = ("setting", "k3", "of the launch's", "decode, prefill", "prefill, training", "seconds")
    title = "one setting changed at a time, the least gap first; *: by more than its error"
    return Table(title, columns, rows, marked=order.index(base))


def _numbers(one: Swept, base: Swept) -> tuple[str, ...]:
    if one.error:
        return ("", "", "", "")
    star = "*" if one.name and matters(one, base) else " "
    share = f"{one.k3 / base.k3:.3g}{star}" if base.k3 else ""
    return share, f"{one.sampling:.1e}", f"{one.rest:.1e}", f"{one.seconds:.0f}"
