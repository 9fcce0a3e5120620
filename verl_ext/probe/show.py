"""What a probe found, as tables and a sentence."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_ext.probe.readings import Pair
from verl_ext.probe.states import Place
from verl_ext.probe.verdict import Verdict, verdict

WORDS = {
    "decode": "rollout, sampling",
    "prefill": "rollout, all at once",
    "train": "training",
    "replayed": "training, the rollout's experts",
}
WIDTH = 120  # where the output is not a terminal


def conclude(found: Mapping[str, Any]) -> Verdict:
    """Of what the probe wrote."""
    pairs, places = [Pair(**pair) for pair in found["pairs"]], [Place(**place) for place in found["places"]]
    return verdict(pairs, places, found["dtype"])


def show(found: Mapping[str, Any], told: Verdict) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    readings = Table("one", "other", title=f"the same {found['tokens']} tokens", title_justify="left")
    for title in ("k3, nats a token", "largest |log p - log q|", "bit for bit equal"):
        readings.add_column(title, justify="right")
    for pair in found["pairs"]:
        numbers = (f"{pair['k3']:.2e}", f"{pair['largest']:.2e}", f"{pair['equal']:.0%}")
        readings.add_row(WORDS[pair["one"]], WORDS[pair["other"]], *numbers)
    console.print(readings)
    console.print(_by_bucket(found["pairs"][0]))
    if found["places"]:
        console.print(_states(found["places"], told.start))
    where = f" They come apart at {told.start}." if told.start and told.cause != "none" else ""
    console.print(Text(f"{told.sentence}{where}"), soft_wrap=True)
    if told.advice:
        console.print(Text(f"next: {told.advice}"), soft_wrap=True)


def _by_bucket(pair: Mapping[str, Any]) -> Table:
    table = Table(title="k3 between sampling and training", title_justify="left")
    table.add_column("probability")
    table.add_column("k3", justify="right")
    table.add_column("position")
    table.add_column("k3", justify="right")
    sides = [list(pair[name].items()) for name in ("by_probability", "by_position")]
    for row in range(max(map(len, sides))):
        cells = [side[row] if row < len(side) else None for side in sides]
        table.add_row(*(text for cell in cells for text in ((cell[0], f"{cell[1]:.2e}") if cell else ("", ""))))
    return table


def _states(places: list[Mapping[str, Any]], start: str) -> Table:
    table = Table(title="hidden states, rollout against training", title_justify="left")
    table.add_column("at")
    for title in ("relative error", "tokens with other experts", "gap of their weights"):
        table.add_column(title, justify="right")
    for place in places:
        shares = ["" if place[name] is None else f"{place[name]:.2%}" for name in ("differs", "weight_gap")]
        style = "bold" if place["point"] == start else ""
        table.add_row(place["point"], f"{place['error']:.1e}", *shares, style=style)
    return table
