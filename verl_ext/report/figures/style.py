"""Colours and axes of all figures."""

from typing import Any

# Okabe and Ito's palette, which stays apart under every common colour blindness, and greys; by role in the light page,
# and what the page puts in their place when it is dark (lighter where the original would sink into the background).
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PURPLE, INK, MUTED, GRID, PAPER = "#56b4e9", "#cc79a7", "#1c1e21", "#5f6670", "#e3e6ea", "#ffffff"
DARK = {
    BLUE: "#4aa8e8",
    ORANGE: "#f0b429",
    GREEN: "#2fbf91",
    VERMILION: "#ff7a3c",
    SKY: "#9ad4f7",
    PURPLE: "#e29ac4",
    INK: "#e8eaed",
    MUTED: "#a3abb5",
    GRID: "#363b42",
    PAPER: "#1b1e22",
}
SERIES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)  # where the order of lines means nothing: runs, validation sets
# Cividis, dark to light; made for colour-blind readers too. Five of it for buckets, low to high.
CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
ORDERED = ("#d55e00", "#e69f00", "#8a8678", "#56b4e9", "#0072b2")

WIDTH, HEIGHT = 560, 220  # pixels of a plot in a PNG; in the page it is as wide as its column
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

CONFIG: dict[str, Any] = {
    "background": PAPER,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelFlush": False,
    },
    "axisX": {"grid": False, "domainColor": MUTED, "tickColor": MUTED},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5},
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "title": None,
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "titleFontSize": 11,
        "labelFontSize": 11,
        "labelLimit": 260,
        "symbolStrokeWidth": 2.5,
        "symbolSize": 120,
        "offset": 6,
    },
    "title": {"anchor": "start", "color": INK, "subtitleColor": MUTED, "fontSize": 14, "subtitleFontSize": 11},
}
