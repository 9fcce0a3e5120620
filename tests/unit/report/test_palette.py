"""Colours that colour-blind readers can distinguish, with contrast to the page, light and dark.

Colour blindness: the matrices of Machado, Oliveira and Fernandes (2009) for severity 1, on linear RGB.
Distance: CIE 1976 in CIELAB under D65; 2.3 is just noticeable. Contrast: WCAG 2.
"""

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from typing import get_args

import numpy as np
import pytest

from tests.unit.report.made_runs import event, full
from verl_ext.report.figures.charts import (
    BUCKET_COLOURS,
    CIVIDIS,
    DARK_COLOURS,
    GRID,
    INK,
    LINE_COLOURS,
    MUTED,
    PAPER,
)
from verl_ext.report.figures.columns import OTHER_STAGE, STAGES
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.page import asset, spec_of
from verl_ext.report.verdict import State

VISION = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ @ np.ones(3)
STACKED = [colour for _, colour in (*STAGES.values(), OTHER_STAGE)]
BOTH = {*CIVIDIS, *BUCKET_COLOURS} - DARK_COLOURS.keys()  # the same on light and dark paper


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour, vision):
    xyz = TO_XYZ @ np.clip(np.array(VISION[vision]) @ linear(colour), 0, 1) / WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one, other, vision):
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def contrast(one, other):
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) + 0.05 for colour in (one, other))
    return high / low


def scheme(colours, dark):
    return [DARK_COLOURS.get(colour, colour) if dark else colour for colour in colours]


@pytest.fixture(scope="module")
def specs():
    """The specs of every panel of a run that has all panels, with every mark of the guard."""
    run = full(30, layers=3)
    marks = [event(step, action) for step, action in enumerate(("skip", "rollback", "stop", "tighten", "warn"), 3)]
    run = replace(run, events=tuple(marks))
    return {panel.key: spec_of(panel.chart(run)) for panel in PANELS}


def test_the_arithmetic_on_known_colours():
    assert lab("#ffffff", "full") == pytest.approx([100, 0, 0], abs=0.01)
    assert lab("#ff0000", "full") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    for vision in VISION:  # all matrices leave greys alone
        assert np.array(VISION[vision]).sum(1) == pytest.approx(np.ones(3), abs=1e-5)
    assert apart("#cc3333", "#669933", "deuteranopia") < 0.6 * apart("#cc3333", "#669933", "full")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_colours_used_together_stay_apart(specs, vision, dark):
    pairs = {*combinations(LINE_COLOURS, 2), *pairwise(BUCKET_COLOURS), *pairwise(STACKED)}
    for key, spec in specs.items():
        if key not in ("by_probability", "by_position", "by_lag", "by_replica", "step_time"):
            ranges = re.findall(r'"range": (\[[^]]*\])', json.dumps(spec))
            for colours in map(json.loads, ranges):
                pairs |= set(combinations([colour for colour in colours if colour in DARK_COLOURS], 2))
    close = {pair: apart(*scheme(pair, dark), vision) for pair in pairs}
    pair, least = min(close.items(), key=lambda item: item[1])
    assert least > 10, pair


def test_a_heat_map_is_in_order_for_every_reader():
    for vision in VISION:
        lightness = [lab(colour, vision)[0] for colour in CIVIDIS]
        assert min(b - a for a, b in pairwise(lightness)) > 3, vision


def test_lines_stand_out_from_the_paper():
    """Okabe and Ito's orange and sky blue are light on purpose: 2.2 on white, where the other colours have 3."""
    lines = {*LINE_COLOURS, *BUCKET_COLOURS, *STACKED, INK, MUTED}
    assert min(contrast(colour, PAPER) for colour in lines) >= 2.1
    assert min(contrast(colour, DARK_COLOURS[PAPER]) for colour in scheme(lines, True)) >= 3
    strong = lines - {"#e69f00", "#56b4e9", "#cc79a7"}
    assert min(contrast(colour, PAPER) for colour in strong) >= 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_legible_and_the_grid_stays_behind(dark):
    ink, muted, grid, paper = scheme((INK, MUTED, GRID, PAPER), dark)
    assert contrast(ink, paper) >= 10 and contrast(muted, paper) >= 4.5 and contrast(grid, paper) < 1.6


def test_every_colour_of_a_figure_has_one_for_the_dark(specs):
    for key, spec in specs.items():
        text = json.dumps(spec)
        used = set(re.findall(r"#[0-9a-fA-F]{3,8}\b", text))
        assert used - DARK_COLOURS.keys() - BOTH == set(), key
        named = re.findall(r'"(?:color|fill|stroke|background)": "(?!#)([a-z]+)"', text)
        assert named == [], key


def test_every_verdict_has_its_colour_on_the_page():
    style = asset("report.css")
    assert all(re.search(rf"\.verdict\.{state.replace(' ', '-')}[, {{]", style) for state in get_args(State))
