"""The page of the GPU kit: its content, and its look."""

import pytest
from gpu.page import shown

from tests.support.browser import launched, lowest_contrast, needs_browser, open_page

NONE = {"needs": ()}
ALL = {"good": NONE, "raises": NONE, "wrong": NONE, "sleeps": {"on_gpu_alone": True}}


def test_the_page_has_every_figure_with_its_repeats_and_says_what_was_not_run(kit):
    page = kit(ALL).page
    for part in (
        "a made-up GPU",
        "<dt>torch</dt> <dd>1.2.3</dd>",
        "<td>2.000</td><td>1.000</td><td>3</td><td>ms</td>",  # median, min, count
        "<td>50.00 %</td>",
        "at most 1.030: missed",
        "ran on cpu",
        "sleeps: needs a GPU.",
    ):
        assert part in page, part
    assert "http" not in page and "src=" not in page  # one file, with everything in it


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "ms", "0.000"),
        (1.0, "x", "1.000"),
        (12.345, "ms", "12.35"),
        (4321.0, "GB/s", "4,321"),
        (3.2e-8, "", "3.20e-08"),
        (0.42, "share", "42.00 %"),
    ],
)
def test_numbers_have_four_digits(value, unit, text):
    assert shown(value, unit) == text


class TestInABrowser:
    pytestmark = needs_browser

    @pytest.mark.parametrize("width", [1366, 390])
    @pytest.mark.parametrize("dark", [False, True])
    def test_it_fits_its_width_and_can_be_read(self, kit, width, dark):
        file = kit(ALL).folder / "results.html"
        with launched() as browser, open_page(file, dark=dark, width=width, browser=browser) as (page, errors):
            assert errors == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            ratio, text = lowest_contrast(
                page, "document.querySelectorAll('h1, h2, h3, th, td, small, li, pre, .badge')"
            )
            assert ratio >= 4.5, text
