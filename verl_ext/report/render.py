"""From a chart to what a browser draws, and to a PNG. vl-convert does both without a network or a browser."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from markupsafe import Markup

from verl_ext.report.figures.lines import READINGS
from verl_ext.report.figures.style import CONFIG

SCALE = 2  # pixels of a PNG for one of the figure
OVERVIEW_COLUMNS = 3

Spec = dict[str, Any]


def spec_of(chart: alt.LayerChart) -> Spec:
    """As the page embeds it: as wide as its column, answering the pointer."""
    return chart.properties(width="container").to_dict() | {"config": CONFIG}


def png(chart: alt.LayerChart, title: str) -> bytes:
    return _draw({**_still(chart, title), "config": CONFIG | {"padding": 12}}, SCALE)


def overview(charts: Mapping[str, alt.LayerChart], title: str) -> bytes:
    """All figures in one picture, by title."""
    stills = [_still(chart, name) for name, chart in charts.items()]
    datasets = {key: value for still in stills for key, value in still.pop("datasets", {}).items()}
    together = {
        "title": {"text": title, "fontSize": 20, "offset": 18},
        "concat": stills,
        "columns": OVERVIEW_COLUMNS,
        "spacing": {"row": 36, "column": 44},
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "datasets": datasets,
        "config": CONFIG | {"padding": 24},
    }
    return _draw(together, 1)


def libraries() -> Markup:
    """Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle().replace("</script", r"<\/script"))  # type: ignore[call-arg]  # its stub forgets that both have defaults


def _still(chart: alt.LayerChart, title: str) -> Spec:
    """Without what only a pointer needs."""
    spec = chart.properties(title=title).to_dict()
    layers: Sequence[Spec] = [layer for layer in spec["layer"] if layer.get("name") != READINGS]
    return {key: value for key, value in spec.items() if key not in ("params", "$schema", "config")} | {"layer": layers}


def _draw(spec: Spec, scale: float) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(json.dumps(spec), scale=scale)
