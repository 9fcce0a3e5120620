"""The lab's figures, and its page in a browser."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.browser import launched, lowest_contrast, needs_browser, open_page
from tests.unit.lab.standin import curves
from tests.unit.report.made_runs import NAN, make
from verl_ext.lab.figures import LAB_PANELS, seeds_chart, variant_styles, write_lab_page
from verl_ext.lab.summary import Variant, summarise
from verl_ext.lab.table import Experiment
from verl_ext.report.figures.overlay import seed_spread
from verl_ext.report.page import OVERVIEW, PAGE, spec_of

PANEL = {panel.key: panel for panel in LAB_PANELS}
NAMES = ("exact", "none", "tis", "icepop", "kpop")


def runs_of(name: str, seeds: int, steps: int = 120) -> list:
    found = []
    for seed in range(seeds):
        rows = curves(name, seed, steps)
        found.append(make({key: [row[key] for row in rows] for key in rows[0]}))
    return found


RUNS = {name: runs_of(name, seeds=3) for name in NAMES}


def drawn(key: str, runs) -> dict:
    return spec_of(seeds_chart(PANEL[key], runs, variant_styles(list(runs))))


@given(arrays(np.float64, (3, 7), elements=st.one_of(st.floats(1e-6, 1e3), st.just(0.0), st.just(NAN))), st.booleans())
def test_the_line_is_the_mean_of_the_seeds_and_the_band_reaches_to_both_ends(values, log):
    middle, low, high = seed_spread(values, log=log)
    for at, column in enumerate(values.T):
        there = [value for value in column if value == value and (value > 0 or not log)]
        if not there:
            assert np.isnan([middle[at], low[at], high[at]]).all()
            continue
        mean = np.exp(np.mean(np.log(there))) if log else np.mean(there)
        assert [middle[at], low[at], high[at]] == pytest.approx([mean, min(there), max(there)])


@pytest.mark.slow
def test_every_panel_draws_a_line_a_variant_and_a_band():
    assert PANEL.keys() == {
        "reward",
        "vllm_kl",
        "dropped",
        "router_agreement",
        "response_length",
        "entropy",
        "grad_norm",
    }
    for key in PANEL:
        chart = drawn(key, RUNS)
        assert len(json.dumps(chart, allow_nan=False)) < 1_000_000
        names = ["icepop"] if key == "dropped" else list(NAMES)
        lines = [layer for layer in chart["layer"] if "color" in layer["encoding"]]
        assert lines[0]["encoding"]["color"]["scale"]["domain"] == names, key
        areas = [layer for layer in chart["layer"] if layer["mark"]["type"] == "area"]
        assert len(areas) == len(names), key


def test_single_seeds_are_drawn_where_they_are_few():
    def thin(runs) -> int:
        return sum(layer["mark"].get("opacity") == 0.35 for layer in drawn("reward", runs)["layer"])

    assert thin(RUNS) == 15
    assert thin(RUNS | {"mis": RUNS["tis"]}) == 0
    assert thin({"none": RUNS["none"][:1]}) == 0


def test_a_seed_that_stopped_early_ends_there_and_zeros_have_no_place_on_a_logarithmic_axis():
    assert drawn("reward", {"none": [RUNS["none"][0], *runs_of("none", seeds=1, steps=30)]})
    zeros = make({"vllm_kl/k3": [0.0] * 50, "critic/score/mean": [0.5] * 50})
    alone = drawn("vllm_kl", {"exact": [zeros, zeros]})
    assert "log" not in json.dumps(alone), "nothing is above 0: the axis is linear"
    both = drawn("vllm_kl", {"exact": [zeros, zeros], "none": RUNS["none"]})
    assert '"domain": ["none"]' in json.dumps(both)


def test_the_line_and_the_band_end_where_the_first_run_did():
    runs = {"none": [*runs_of("none", seeds=2), *runs_of("none", seeds=1, steps=40)]}
    chart, ends = drawn("reward", runs), {}
    for layer in chart["layer"]:
        kind = "seed" if layer["mark"].get("opacity") == 0.35 else layer["mark"]["type"]
        ends.setdefault(kind, set()).add(max(row["step"] for row in chart["datasets"][layer["data"]["name"]]))
    assert ends == {"area": {39}, "line": {39}, "point": {39}, "seed": {39, 119}}, "a point stands for two steps"


def test_variants_beyond_the_colours_are_told_apart_by_dashes_in_the_legend_too():
    names = ["exact", "none", *(f"v{number}" for number in range(12))]
    found = variant_styles(names)
    assert len(set(found.values())) == len(names)
    lines = drawn("reward", {name: RUNS["tis"][:2] for name in names})["layer"]
    dashes = next(layer["encoding"]["strokeDash"] for layer in lines if "strokeDash" in layer["encoding"])
    assert dashes["scale"]["domain"] == names and len({str(dash) for dash in dashes["scale"]["range"]}) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab")
    variants = [
        Variant(
            name,
            (f"stability={name}",),
            {seed: summarise(run) for seed, run in enumerate(runs)},
            curves=dict(enumerate(runs)),
        )
        for name, runs in RUNS.items()
    ]
    write_lab_page("The lab: stale", "5 variants", Experiment(variants), out)
    return out


@pytest.mark.slow
def test_the_folder_holds_the_page_and_the_pictures(folder):
    assert {file.name for file in folder.iterdir()} == {PAGE, OVERVIEW, "figures"}
    assert {file.stem for file in (folder / "figures").iterdir()} == PANEL.keys()
    assert (folder / OVERVIEW).read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def browser():
    with launched() as running:
        yield running


TEXT = "document.querySelectorAll('#variants th, #variants td, #variants li, figcaption, h1, h2')"


class TestInABrowser:
    pytestmark = needs_browser

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_it_is_drawn_offline_and_legible(self, folder, browser, dark):
        with open_page(folder / PAGE, dark=dark, browser=browser) as (page, errors):
            for key in PANEL:
                page.locator(f"[data-figure={key}]").scroll_into_view_if_needed()
                page.wait_for_selector(f"[data-figure={key}][data-drawn={'dark' if dark else 'light'}] canvas")
            ratio, text = lowest_contrast(page, TEXT)
            assert ratio >= 4.5, text
            assert errors == []

    def test_the_table_says_what_the_terminals_does(self, folder, browser):
        with open_page(folder / PAGE, browser=browser) as (page, _):
            rows = page.locator("#variants tbody th").all_inner_texts()
            assert rows == ["exact", "tis", "icepop", "kpop", "none, baseline"]
            assert page.locator("#variants tbody tr").nth(1).locator("td.better").count() == 1
            assert "The gap costs" in page.locator("#variants li").first.inner_text()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
