"""What a probe found, on the terminal."""

from collections.abc import Mapping
from typing import Any

import rich.table
from rich.console import Console
from rich.text import Text

from verl_ext.probe import stages, sweep
from verl_ext.probe.readings import Pair
from verl_ext.probe.states import Place
from verl_ext.probe.tables import Table, tables
from verl_ext.probe.verdict import NOT_FINITE, Verdict, verdict

WIDTH = 120  # where the output is not a terminal


def conclude(found: Mapping[str, Any]) -> Verdict:
    """Of what the probe wrote."""
    pairs, places = [Pair(**pair) for pair in found["pairs"]], [Place(**place) for place in found["places"]]
    return verdict(pairs, places, found["dtype"])


def agrees(found: Mapping[str, Any], told: Verdict, limit: float) -> bool:
    """Whether every value is finite, after a sync and an update too, and k3 of sampling and training at most this."""
    finite = told.cause != NOT_FINITE and not any(stages.Stage(**one).not_finite for one in found.get("stages", []))
    return finite and found["pairs"][0]["k3"] <= limit


def sentences(found: Mapping[str, Any], told: Verdict) -> list[str]:
    """All that is said of it in words, the verdict first."""
    where = f" They come apart at {told.start}." if told.start and told.cause != "none" else ""
    said = [f"{told.sentence}{where}"]
    said += stages.said_of([stages.Stage(**one) for one in found.get("stages", [])])
    swept = [sweep.Swept(**one) for one in found.get("sweep", [])]
    said += [sweep.said_of(swept)] if swept else []
    said += [f"{one.name} could not be measured: {one.error}" for one in swept[1:] if one.error]
    return said + ([f"What came then could not be measured: {found['error']}"] if found.get("error") else [])


def show(found: Mapping[str, Any], told: Verdict) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables(found, told):
        console.print(_drawn(table))
    for sentence in sentences(found, told):
        console.print(Text(sentence), soft_wrap=True)
    if told.advice:
        console.print(Text(f"next: {told.advice}"), soft_wrap=True)


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=table.title, title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if number < table.labels else "right")
    for number, row in enumerate(table.rows):
        drawn.add_row(*(Text(text) for text in row), style="bold" if number == table.marked else "")
    return drawn
