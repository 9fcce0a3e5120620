"""The page of a probe: the tables, what they say, and figures; in the look of the report."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_ext.probe.figures import bucket_chart, states_chart, sweep_chart
from verl_ext.probe.show import sentences
from verl_ext.probe.tables import tables
from verl_ext.probe.verdict import Verdict
from verl_ext.report.figures.panels import Panel
from verl_ext.report.page import write_page


def write_probe_page(
    found: Mapping[str, Any], told: Verdict, out: Path, progress: Callable[[str], None] = lambda what: None
) -> Path:
    """Write `report.html`, `report.png` and the figures to `out`."""
    pair = found["pairs"][0]
    charts = {
        _panel(
            "states",
            "Hidden states",
            "Relative error from the embedding on, rollout against training. A jump is where a cause sits; a slow "
            "climb is rounding.",
        ): states_chart(found["places"], told.start),
        _panel(
            "probability",
            "The gap by probability",
            "k3 between sampling and training, by what the rollout gave the token. Rare tokens hold most of what "
            "rounding leaves.",
        ): bucket_chart(pair["by_probability"]),
        _panel(
            "position",
            "The gap by position",
            "k3 between sampling and training, by the token's place in its response. A climb compounds over the "
            "length.",
        ): bucket_chart(pair["by_position"]),
        _panel(
            "sweep",
            "Settings, one changed at a time",
            "k3 with each, two standard errors to both sides. What stands lower than the launch as it is, and apart "
            "from it, closes the gap.",
        ): sweep_chart(found.get("sweep", [])),
    }
    context = {
        "title": "Probe: rollout against training",
        "about": f"{found['tokens']} tokens in {found['dtype']}",
        "notes": [],
        "tables": [_plain(table) for table in tables(found, told)],
        "said": [*sentences(found, told), *([f"Next: {told.advice}"] if told.advice else [])],
    }
    drawn = {panel: chart for panel, chart in charts.items() if chart is not None}
    return write_page(out, drawn, context, progress=progress)


def _panel(key: str, title: str, reading: str) -> Panel:
    return Panel(key, title, reading, chart=lambda run: None, missing="")


def _plain(table: Any) -> dict[str, Any]:
    return {"title": table.title, "columns": table.columns, "rows": table.rows, "marked": table.marked}
