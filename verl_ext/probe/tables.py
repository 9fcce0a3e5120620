"""What a probe found, as tables of text: printed by `show`, and part of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from verl_ext.probe.sweep import Swept, matters, ranked
from verl_ext.probe.verdict import Verdict

WORDS = {
    "decode": "rollout, sampling",
    "prefill": "rollout, all at once",
    "train": "training",
    "replayed": "training, the rollout's experts",
}
STAGES = {"sync": "a sync of the same weights", "update": "an update and its sync"}
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
    """Those of which there is something."""
    every = (_readings(found), _by_bucket(found["pairs"][0]), _states(found["places"], told.start))
    more = (_stages(found.get("stages", [])), _sweep(found.get("sweep", [])))
    return [table for table in (*every, *more) if table.rows]


def _readings(found: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            WORDS[pair["one"]],
            WORDS[pair["other"]],
            f"{pair['k3']:.2e} ± {pair['k3_error']:.0e}",
            f"{pair['largest']:.2e}",
            f"{pair['equal']:.0%}",
        )
        for pair in found["pairs"]
    )
    columns = ("one", "other", "k3, nats a token", "largest |log p - log q|", "bit for bit equal")
    return Table(f"the same {found['tokens']} tokens", columns, rows, labels=2)


def _by_bucket(pair: Mapping[str, Any]) -> Table:
    sides = [[(name, f"{k3:.2e}") for name, k3 in pair[by].items()] for by in ("by_probability", "by_position")]
    rows = tuple((*one, *other) for one, other in zip_longest(*sides, fillvalue=("", "")))
    return Table("k3 between sampling and training", ("probability", "k3", "position", "k3"), rows)


def _states(places: Sequence[Mapping[str, Any]], start: str) -> Table:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    rows = tuple(
        (place["point"], f"{place['error']:.1e}", share(place["differs"]), share(place["weight_gap"]))
        for place in places
    )
    columns = ("at", "relative error", "tokens with other experts, or positions", "gap of their weights")
    marked = next((row for row, place in enumerate(places) if place["point"] == start), None)
    return Table("hidden states, rollout against training", columns, rows, marked=marked)


def _stages(stages: Sequence[Mapping[str, Any]]) -> Table:
    numbers = ("before", "after", "rollout_moved", "train_moved")
    rows = tuple((STAGES[one["name"]], *(f"{one[name]:.2e}" for name in numbers)) for one in stages)
    columns = ("after", "k3 before", "k3 after", "rollout moved", "training moved")
    return Table("the same tokens once more; moved: mean |change of log p|", columns, rows)


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
