"""From a chart to what a browser draws, and to a PNG. vl-convert does both without a network or a browser."""

import io
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import altair as alt
from markupsafe import Markup

from verl_ext.report.figures.lines import READINGS
from verl_ext.report.figures.style import CONFIG, INK, PAPER, WIDTH

SCALE = 2  # pixels of a PNG for one of the figure
OVERVIEW_COLUMNS, OVERVIEW_MARGIN, OVERVIEW_TITLE = 3, 24, 22  # the last two in pixels

Spec = dict[str, Any]


def spec_of(chart: alt.LayerChart) -> Spec:
    """As the page embeds it: as wide as its column, answering the pointer."""
    return chart.properties(width="container").to_dict() | {"config": CONFIG}


def png(spec: Spec, title: str) -> bytes:
    """The figure alone, under its title, without what only a pointer needs."""
    import vl_convert

    layers: Sequence[Spec] = [layer for layer in spec["layer"] if layer.get("name") != READINGS]
    still = {key: value for key, value in spec.items() if key != "params"}
    still |= {"layer": layers, "width": WIDTH, "title": title, "config": CONFIG | {"padding": 12}}
    return vl_convert.vegalite_to_png(json.dumps(still), scale=SCALE)


def overview(pictures: Mapping[str, bytes], title: str) -> bytes:
    """All figures in one picture, half as large as they are."""
    from PIL import Image, ImageDraw, ImageFont

    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures.values()]
    small = [image.resize((image.width // SCALE, image.height // SCALE), Image.Resampling.LANCZOS) for image in images]
    width, height = (max(getattr(image, side) for image in small) for side in ("width", "height"))
    columns = min(OVERVIEW_COLUMNS, len(small))
    top = 2 * OVERVIEW_MARGIN + OVERVIEW_TITLE
    size = (columns * width + 2 * OVERVIEW_MARGIN, -(-len(small) // columns) * height + top)
    sheet = Image.new("RGB", size, PAPER)
    font = ImageFont.load_default(OVERVIEW_TITLE)
    ImageDraw.Draw(sheet).text((OVERVIEW_MARGIN + 12, OVERVIEW_MARGIN), title, fill=INK, font=font)
    for place, image in enumerate(small):
        sheet.paste(image, (OVERVIEW_MARGIN + place % columns * width, top + place // columns * height))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    return written.getvalue()


@lru_cache(maxsize=1)
def libraries() -> Markup:
    """Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`."""
    import vl_convert

    script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub forgets that both have defaults
    return Markup(script.replace("</script", r"<\/script"))
