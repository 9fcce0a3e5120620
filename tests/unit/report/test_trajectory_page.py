"""The page of single trajectories in a real browser, light and dark."""

import math
import re
from itertools import pairwise

import pytest

from tests.support.browser import lowest_contrast, needs_browser, open_page
from tests.unit.report.made_trajectories import dump, line
from verl_ext.report.notebook import TokenView
from verl_ext.report.trajectories import read_trajectories, write_trajectory_page

pytestmark = needs_browser
DASH = "\N{EN DASH}"  # what the page shows of a number that is not there
HOSTILE = [
    "<b>bold</b>",
    "</script>",
    "<script>alert(1)</script>",
    "<!--",
    "\u202e",
    "\u2028",
    "&amp;",
    "x" * 400,
    "\n",
]
ROWS = [
    line(1, "first", count=300, notes="a field of a later version"),
    line(2, "hostile", texts=HOSTILE),
    line(3, "dense", count=200, correction=False, agreement=False),
    line(4, "long one & more=1", count=4000, total=10_952, skipped="|log k| 0.031 > 0.02"),
]
TOOL = next(i for i, own in enumerate(ROWS[0]["generated"]) if not own)
JOINED = ROWS[0]["text"].index("你")
MODES = ("gap", "agreement", "probability", "masked")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    trajectories, notes = read_trajectories(dump(folder, ROWS))
    out = folder / "new folder" / "trajectories.html"
    return write_trajectory_page(trajectories, out, title="run <1>", report="report.html", notes=notes)


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def opened(request, browser, file):
    with open_page(file, dark=request.param, browser=browser) as (page, errors):
        yield page
        assert errors == []


def gaps(row):
    """Returns |log k| of each token, 0 if it has none."""
    pairs = zip(row["l_infer"], row["l_old"], strict=True)
    return [0 if infer is None else abs(old - infer) for infer, old in pairs]


def rgb(colour):
    return [int(part) for part in re.findall(r"\d+", colour)]


def tip(page):
    names, values = (page.locator(f"#tip {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def style(page, i, what):
    return page.evaluate(f"getComputedStyle(document.querySelector('[data-i=\"{i}\"]')).{what}")


TEXT = """document.querySelectorAll(
  ".t, .hint, dt, dd, td, th button, code, .switch button, #skipped, kbd, .cut, h1")"""


def test_text_is_legible_under_every_switch(opened):
    opened.keyboard.press("ArrowLeft")  # nothing before the first
    for _ in ROWS:
        opened.hover("[data-i='0']")
        for mode in opened.locator("#switch button").all():
            mode.click()
            ratio, text = lowest_contrast(opened, TEXT)
            assert ratio >= 4.5, (mode.inner_text(), text)
        opened.keyboard.press("j")


def test_switches_colour_the_right_tokens(opened):
    row = ROWS[0]
    own = [i for i, mine in enumerate(row["generated"]) if mine]
    paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")

    def distances():
        """Measures the strength of each token's colour: its distance from the page's background."""
        colours = opened.evaluate("state.spans.map(span => getComputedStyle(span).backgroundColor)")
        colours = [paper if colour == "rgba(0, 0, 0, 0)" else colour for colour in colours]
        pairs = [zip(rgb(colour), rgb(paper), strict=True) for colour in colours]
        return [sum(abs(a - b) for a, b in pair) for pair in pairs]

    agreement = {i: 1 - row["agreement"][i] for i in own}
    surprise = {i: -row["l_infer"][i] for i in own}
    for mode, low, values in (
        ("gap", 1e-3, gaps(row)),
        ("agreement", 0.02, agreement),
        ("probability", -math.log(0.7), surprise),
    ):
        opened.click(f"[data-mode={mode}]")
        assert opened.locator("#switch [aria-pressed=true]").get_attribute("data-mode") == mode
        distance = distances()
        order = sorted(own, key=values.__getitem__)
        assert all(distance[i] == 0 for i in order if values[i] < 0.98 * low)
        assert distance[order[-1]] > 300 > 60 > distance[next(i for i in order if values[i] > 1.02 * low)] > 0
        # From white to a dark colour over a bright one: the channels do not all move the same way at once.
        assert all(later >= earlier - 25 for earlier, later in pairwise(distance[i] for i in order)), mode
    opened.click("[data-mode=masked]")
    distance = distances()
    dropped = next(i for i in own if row["weight"][i] == 0)
    filtered = next(i for i in own if row["weight"][i] and not row["kept"][i])
    plain = next(i for i in own if row["weight"][i] and row["kept"][i])
    assert "line-through" in style(opened, dropped, "textDecorationLine") and distance[dropped] > 60
    assert style(opened, filtered, "textDecorationStyle") == "dotted" and distance[filtered] > 60
    assert style(opened, TOOL, "fontStyle") == "italic" and distance[TOOL] > 20
    assert style(opened, plain, "textDecorationLine") == "none" and distance[plain] == 0


def test_colours_mean_the_same_in_every_trajectory(browser, tmp_path):
    gaps = [0.0005, 0.02, 0.5, 3.0]
    rows = [
        line(step, "a", texts=list("wxyz"), l_infer=[-5.0] * 4, l_old=[gap * sign - 5 for gap in gaps])
        for step, sign, gaps in ((1, 1, gaps), (2, -1, gaps[::-1]))
    ]
    out = write_trajectory_page(read_trajectories(dump(tmp_path, rows))[0], tmp_path / "page.html", title="t")
    with open_page(out, browser=browser) as (page, _):
        first = [style(page, i, "backgroundColor") for i in range(4)]
        page.keyboard.press("j")
        assert [style(page, 3 - i, "backgroundColor") for i in range(4)] == first and len(set(first)) == 4


def test_the_tip_tells_the_numbers_of_the_token(opened):
    row = ROWS[0]
    i = row["text"].index(".\n\n")
    opened.hover(f"[data-i='{i}']")
    got = tip(opened)
    log_k = row["l_old"][i] - row["l_infer"][i]
    assert got["Position"] == str(i) and got["Token"] == r'".\n\n"' and got["id"] == str(row["id"][i])
    for name, value in (
        ("p rollout", math.exp(row["l_infer"][i])),
        ("p training", math.exp(row["l_old"][i])),
        ("log k", log_k),
        ("k", math.exp(log_k)),
        ("Weight", row["weight"][i]),
        ("Entropy", row["entropy"][i]),
    ):
        # The page shows four digits.
        assert float(got[name].split()[0]) == pytest.approx(value, rel=6e-4, abs=1e-6), name
    assert float(got["Agreement"].rstrip("%")) == pytest.approx(100 * row["agreement"][i], rel=1e-3)
    assert got["log k"][0] in "+-" and f"(log {row['l_infer'][i]:.4g}"[:9] in got["p rollout"]
    assert got["In the loss"] == "yes"

    opened.hover(f"[data-i='{TOOL}']")
    assert tip(opened) == {
        "Position": str(TOOL),
        "Token": '"<tool_response>"',
        "id": str(row["id"][TOOL]),
        "In the loss": "no: not the model's token",
    }
    dropped = next(i for i, weight in enumerate(row["weight"]) if weight == 0)
    opened.hover(f"[data-i='{dropped}']")
    assert tip(opened)["In the loss"] == "no: dropped by the correction (weight 0)"


def test_a_pinned_token_stays_and_is_in_the_link(opened):
    opened.click("[data-i='5']")
    opened.hover("[data-i='9']")
    assert tip(opened)["Position"] == "5" and opened.evaluate("location.hash") == "#step=1&key=first&at=5"
    opened.keyboard.press("Escape")
    assert opened.locator("#tip").is_hidden() and opened.evaluate("location.hash") == "#step=1&key=first"
    opened.focus("#response")  # and by keyboard alone
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "Enter"):
        opened.keyboard.press(key)
    assert tip(opened)["Position"] == "1" and opened.evaluate("location.hash") == "#step=1&key=first&at=1"


def test_tokens_of_one_character_are_held_together(opened):
    assert opened.locator(".join").all_inner_texts() == ["你", "🙂"]
    opened.hover(f"[data-i='{JOINED - 1}']")
    assert tip(opened)["Token"] == '"" (part of "你")'
    assert opened.locator(".t").count() == len(ROWS[0]["text"])


def test_a_response_is_shown_as_text(opened):
    opened.keyboard.press("j")
    shown = "".join(HOSTILE).replace("\u202e", "⟨202E⟩").replace("\u2028", "⟨2028⟩")
    assert opened.evaluate("response.textContent") == shown
    assert opened.locator("#response b, #response script").count() == 0
    assert opened.locator("h1").inner_text() == "run <1>"
    opened.hover("[data-i='4']")
    assert tip(opened)["Token"] == r'"\u202e"'


def test_list_keys_and_links(browser, file):
    with open_page(f"{file.as_uri()}#step=4&key=long+one+%26+more%3D1&at=10951", browser=browser) as (page, errors):
        assert "long one & more=1" in page.locator("#heading").inner_text()
        assert tip(page)["Position"] == "10,951"
        assert page.locator("#skipped").inner_text() == "The whole update of step 4 was skipped: |log k| 0.031 > 0.02"
        assert page.locator(".cut").all_inner_texts() == ["6,952 tokens left out here"]
        mean = sum(gaps(ROWS[3])) / sum(ROWS[3]["generated"])
        summary = page.locator("#summary").inner_text()
        assert f"{max(gaps(ROWS[3])):.4g}" in summary and f"{mean:.4g}" in summary and "4,000 shown" in summary
        page.keyboard.press("k")
        assert page.locator("#heading").inner_text() == "Step 3 dense · largest gap"
        assert page.locator("#skipped").is_hidden() and page.locator("[data-mode=agreement]").count() == 0
        for override in ("stability.router_agreement=true", "stability=icepop"):
            assert override in page.locator("#missing").inner_text()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("location.hash") == "#step=4&key=long+one+%26+more%3D1"
        page.evaluate("location.hash = '#step=2&key=hostile'")
        page.wait_for_function("document.querySelector('#heading').textContent.startsWith('Step 2')")
        assert page.locator("tr.chosen").inner_text().split()[0] == "2"

        def steps():
            return [int(text) for text in page.locator("#rows td:first-child").all_inner_texts()]

        page.click("th:has-text('Max')")
        largest = {row["step"]: max(gaps(row)) for row in ROWS}
        assert steps() == sorted(largest, key=largest.get, reverse=True)
        for text, left in (("3-9", {3, 4}), ("2", {2}), ("FIRST", {1}), ("nobody", set())):
            page.fill("#filter", text)
            assert set(steps()) == left
        page.fill("#filter", "")
        page.select_option("#why", "largest gap")
        assert set(steps()) == {1, 3}
        assert page.locator("#report").get_attribute("href") == "report.html"
        assert errors == []


def test_the_strip_and_the_largest_gap_lead_to_their_tokens(browser, file):
    with open_page(f"{file.as_uri()}#step=4", browser=browser) as (page, errors):
        box = page.locator("#map").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + 10)
        assert page.evaluate("state.token") == pytest.approx(3000, abs=10)
        token = page.locator("[data-i='3000']").bounding_box()
        assert 150 < token["y"] < 768
        page.evaluate("document.querySelector('main').scrollTop = 0")
        page.click("#summary button")
        assert page.evaluate("state.pinned") == gaps(ROWS[3]).index(max(gaps(ROWS[3])))
        assert errors == []


def test_a_number_that_was_not_finite_stands_out(browser, tmp_path):
    row = line(1, "a", texts=["a", "b"], l_infer=[-1.0, -2.0], l_old=[None, -2.0])
    out = write_trajectory_page(read_trajectories(dump(tmp_path, [row]))[0], tmp_path / "page.html", title="t")
    with open_page(out, browser=browser) as (page, errors):
        assert (style(page, 0, "outlineStyle"), style(page, 1, "outlineStyle")) == ("dashed", "none")
        page.hover("[data-i='0']")
        assert tip(page)["p training"] == tip(page)["k"] == DASH
        assert "Without a number" in page.locator("#summary").inner_text() and errors == []


@pytest.mark.parametrize("width", [1366, 390])
def test_no_horizontal_scrolling(browser, file, width):
    with open_page(file, width=width, browser=browser) as (page, errors):
        for _ in ROWS:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            wide = "[...document.querySelectorAll('main, .list, #response')].filter(e => e.scrollWidth > e.clientWidth)"
            assert page.evaluate(f"{wide}.map(e => e.id || e.className)") == []
            page.keyboard.press("j")
        assert errors == []


def test_a_long_response_is_drawn_in_under_a_second(browser, file):
    with open_page(f"{file.as_uri()}#step=4", browser=browser) as (page, _):
        assert page.locator(".t").count() == 4000
        times = page.evaluate(
            "[1, 2, 3].map(() => { const t = performance.now(); choose(3); document.body.offsetHeight;"
            " return performance.now() - t; })"
        )
        assert min(times) < 1000, times


def test_a_notebook_shows_the_page_in_a_frame(tmp_path, browser, file):
    view = TokenView("run <1>", read_trajectories(file.parents[1] / "run.trajectories.jsonl")[0][1])
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{view._repr_html_()}", encoding="utf-8")
    with open_page(cell, browser=browser) as (page, errors):
        frame = page.frame_locator("iframe")
        assert frame.locator("h1").inner_text() == "run <1>"
        assert "<b>bold</b>" in frame.locator("body").inner_text()
        assert errors == []
