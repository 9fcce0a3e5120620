"""The report's pages in a real browser, light and dark."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.browser import lowest_contrast, needs_browser, open_page
from tests.unit.report.made_runs import NAN, changed, event, full, make
from verl_ext import __version__
from verl_ext.diagnosis.series import Series
from verl_ext.guard.state import Event
from verl_ext.report.clocks import page_clocks
from verl_ext.report.comparison import compare_runs
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.page import (
    MOST_DECISIONS,
    MOST_OPEN,
    PAGE,
    all_metrics,
    script_json,
    write_comparison,
    write_report,
)
from verl_ext.report.verdict import judge_run

pytestmark = needs_browser
HOSTILE = "<b>run</b> </script><script>alert(1)</script>"
WHY = "<b>why</b> </script><script>alert(1)</script>"
NOTE = "<i>note</i> & <!-- comment"
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])

# Scrolls through the page until every figure has been drawn.
ALL_DRAWN = """async () => {
  for (const place of document.querySelectorAll("[data-figure]")) {
    place.scrollIntoView();
    for (let i = 0; i < 400 && !place.dataset.drawn; i++) await new Promise((done) => setTimeout(done, 20));
  }
}"""

# Of every figure: how many different colours its canvas has, and which theme it was drawn in.
DRAWN = """() => Object.fromEntries([...document.querySelectorAll("[data-figure]")].map((place) => {
  const canvas = place.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set(new Uint32Array(data.buffer));
  return [place.dataset.figure, [place.dataset.drawn, colours.size, [...data.slice(0, 3)]]];
}))"""

# All visible text but that of figures.
TEXT = """[...document.querySelectorAll("body *:not(script):not(noscript)")].filter((one) => one.checkVisibility()
  && !one.closest("svg") && [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()))"""

# The place of step 12's mark in the canvas of the KL.
MARK = """() => {
  const { view } = drawn.get("vllm_kl");
  const [left, top] = view.origin(), padding = view.padding();
  return [view.scale("x")(12) + left + padding.left, 6 + top + padding.top];
}"""


@pytest.fixture(scope="module")
def run():
    made = full(60, layers=4)
    made.metrics["vllm_kl/k3"].values[40:] *= np.exp(0.15 * np.arange(20))
    return replace(made, name=HOSTILE, notes=(NOTE,), events=(event(12, "rollback", "<u>why</u>"), *made.events))


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "new" / "folder"
    return write_report(run, judge_run(run), out, trajectories="trajectories.html", pictures=False)


def drawn(page):
    page.evaluate(ALL_DRAWN)
    return page.evaluate(DRAWN)


@SCHEMES
def test_every_figure_is_drawn_offline_and_again_when_the_scheme_changes(browser, file, dark):
    with open_page(file, dark=dark, browser=browser) as (page, errors):
        for theme, other in (("dark", "light"), ("light", "dark")) if dark else (("light", "dark"),):
            found = drawn(page)
            assert found.keys() == {panel.key for panel in PANELS}
            assert all(is_in == theme for is_in, _, _ in found.values())
            assert min(colours for _, colours, _ in found.values()) > 20
            assert {tuple(corner) for _, _, corner in found.values()} == {
                (27, 30, 34) if theme == "dark" else (255,) * 3
            }
            page.emulate_media(color_scheme=other)
            page.wait_for_function(
                f"[...document.querySelectorAll('[data-figure]')].every((one) => one.dataset.drawn === '{other}')"
            )
        assert errors == []


@SCHEMES
def test_text_is_legible(browser, file, dark):
    with open_page(file, dark=dark, browser=browser) as (page, _):
        ratio, text = lowest_contrast(page, TEXT)
        assert ratio >= 4.5, text


def test_the_verdict_its_evidence_and_what_to_try(browser, file, run):
    verdict = judge_run(run)
    assert verdict.state == "drifting"
    with open_page(file, browser=browser) as (page, errors):
        assert page.locator("#verdict h2").inner_text() == f"{verdict.state} {verdict.sentence}"
        assert len(page.locator("#verdict > p").all()) == (1 if verdict.suspects else 0), "a legend, and no alarm"
        assert page.locator("#verdict .first p").all_inner_texts() == [verdict.first.do, verdict.first.sentence]
        assert tuple(page.locator("#verdict .sides li").all_inner_texts()) == tuple(
            f.dated for f in verdict.facts_beyond_causes
        )
        causes = [text.partition(": ")[2] for text in page.locator("#verdict summary").all_inner_texts()]
        assert causes == [suspect.cause.title for suspect in verdict.suspects]
        assert page.locator("#verdict code").all_inner_texts() == [step.do for step in verdict.steps]
        assert page.locator(".button").get_attribute("href") == "trajectories.html"
        assert page.locator("meta[http-equiv=refresh]").count() == page.locator("#missing").count() == 0
        facts = page.locator("#vllm_kl .facts").inner_text()
        assert "in step 60" in facts and "% per step" in facts
        links = page.locator("nav a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
        assert links == [f"#{panel.key}" for panel in PANELS]
        assert errors == []


def test_names_and_notes_are_text(browser, file):
    with open_page(file, browser=browser) as (page, errors):
        assert page.title() == page.locator("h1").inner_text() == HOSTILE
        assert page.locator("#notes li").all_inner_texts() == [NOTE]
        assert page.locator("h1 b, #notes i").count() == 0 and errors == []


def test_pointing_at_a_line_shows_its_step_and_value(browser, file, run):
    with open_page(file, browser=browser, height=900) as (page, errors):
        page.locator("#vllm_kl").scroll_into_view_if_needed()
        page.wait_for_selector("#vllm_kl [data-drawn] canvas")
        box = page.locator("#vllm_kl canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
        page.mouse.move(box["x"] + box["width"] * 0.5 + 3, box["y"] + box["height"] * 0.5)
        page.wait_for_selector("#vg-tooltip-element.visible")
        names, values = (page.locator(f"#vg-tooltip-element .{kind}").all_inner_texts() for kind in ("key", "value"))
        shown = dict(zip(names, values, strict=True))
        metric = {"k3": "vllm_kl/k3", "|k1|, hollow: negative": "vllm_kl/k1"}[shown["metric"]]
        step = int(shown["step"])
        assert 20 < step < 45
        assert shown.keys() == {"step", "metric", "value"}
        assert float(shown["value"]) == pytest.approx(abs(run.metrics[metric].values[step - 1]), rel=1e-3)
        x, y = page.evaluate(MARK)
        page.mouse.move(box["x"] + x, box["y"] + y)
        page.wait_for_selector("#vg-tooltip-element.visible :text('rollback')")
        assert page.locator("#vg-tooltip-element .value").all_inner_texts() == ["step 12: rollback", "<u>why</u>"]
        assert errors == []


@pytest.mark.parametrize("width", [1366, 390])
def test_no_horizontal_scrolling(browser, file, width):
    with open_page(file, width=width, browser=browser) as (page, errors):
        drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert errors == []


def test_every_metric_is_found_by_a_search_drawn_when_opened_smoothed_and_saved(browser, file, run):
    with open_page(file, browser=browser) as (page, errors):
        names = "#metrics [data-name]"
        assert page.locator(names).count() == sum(series.finite().steps.size > 0 for series in run.metrics.values())
        assert page.locator("#metrics .chart").count() == 0
        page.fill("#metrics input[type=search]", "GRAD_norm")
        found = page.locator(f"{names}:not([hidden])")
        assert [one.split("\n")[0] for one in found.all_inner_texts()] == ["actor/grad_norm"]
        page.wait_for_selector("#metrics .chart[data-drawn]")  # the only hit is opened
        assert found.locator("> a").get_attribute("download") == "actor_grad_norm.csv"
        page.select_option("#metrics select", "5")
        page.check("#metrics input[type=checkbox]")
        page.wait_for_function("figures['actor/grad_norm'].layer.length === 2")
        assert page.evaluate("figures['actor/grad_norm'].layer[1].encoding.y.scale.type") == "log"
        link = "document.querySelector('#metrics [data-name] > a').href"
        csv = page.evaluate(f"fetch({link}).then((found) => found.text())")
        page.fill("#metrics input[type=search]", "nowhere")
        assert page.locator("#metrics > :visible").all_inner_texts()[-1] == "no metric matches"
        page.fill("#metrics input[type=search]", "")
        assert page.locator(f"{names}:not([hidden])").count() == page.locator(names).count() and errors == []
    series = run.metrics["actor/grad_norm"]
    assert [float(line.split(",")[1]) for line in csv.splitlines()[1:]] == pytest.approx(series.values, rel=1e-4)
    assert [int(line.split(",")[0]) for line in csv.splitlines()[1:]] == series.steps.tolist()


def test_all_metrics_of_a_long_run_are_small():
    noise = np.random.default_rng(0)
    run = make({f"x/{name}": noise.normal(size=2000) for name in range(214)})
    assert len(script_json(all_metrics({"": [run]}))) < 600_000


def test_a_figure_is_a_group_with_a_name_and_the_footer_names_whose_work_draws_it(browser, file):
    with open_page(file, browser=browser) as (page, errors):
        named = page.locator("[data-figure][role=group]")
        assert named.count() == len(PANELS)
        assert named.first.get_attribute("aria-label").startswith(f"{PANELS[0].title}. ")
        footer = page.locator("footer").inner_text()
        assert f"verl_ext {__version__}" in footer and "BSD 3-Clause, © University of Washington" in footer
        assert errors == []


def test_values_that_are_no_numbers_are_counted_in_the_notes(browser, tmp_path):
    run = make({"critic/score/mean": [0.1, NAN, 0.3, NAN]}, notes=("another",))
    with open_page(write_report(run, judge_run(run), tmp_path, pictures=False), browser=browser) as (page, errors):
        said = "critic/score/mean was not a finite number in 2 of 4 steps"
        assert page.locator("#notes li").all_inner_texts() == [said, "another"] and errors == []


def test_figures_that_the_run_lacks_are_listed_with_what_to_add(browser, tmp_path):
    run = make({"critic/score/mean": [0.1, 0.2]})
    out = write_report(run, judge_run(run), tmp_path, refresh=30, pictures=False)
    with open_page(out, browser=browser) as (page, errors):
        assert drawn(page).keys() == {"reward"}
        listed = page.locator("#missing dl > div").all_inner_texts()
        assert len(listed) == len(PANELS) - 1
        for panel, text in zip(PANELS[1:], listed, strict=True):
            assert panel.title in text and panel.missing in text and panel.override in text
        assert page.locator("meta[http-equiv=refresh]").get_attribute("content") == "30"
        assert page.locator(".button").count() == 0 and errors == []
        assert page.locator("#verdict").get_attribute("class") == "verdict not-enough-data"


def test_a_run_with_no_figure_at_all_has_a_page(browser, tmp_path):
    run = make({"a/metric/of/my/own": [0.1, 0.2]})
    with open_page(write_report(run, judge_run(run), tmp_path), browser=browser) as (page, errors):
        assert page.locator("#missing dl > div").count() == len(PANELS) and errors == []
    assert [path.name for path in tmp_path.iterdir()] == [PAGE]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    runs = [replace(full(300, layers=2, seed=seed), name=f"run {seed} <&>") for seed in range(6)]
    better = replace(runs[1], metrics={**runs[1].metrics})
    better.metrics["critic/score/mean"] = changed(better, lambda values: values + 3).metrics["critic/score/mean"]
    comparison = compare_runs([runs[0], better, *runs[2:]], window=100)
    return write_comparison(comparison, tmp_path_factory.mktemp("six"), pictures=False), comparison


@SCHEMES
def test_a_comparison_of_six_runs(browser, six, dark):
    file, comparison = six
    with open_page(file, dark=dark, browser=browser) as (page, errors):
        assert page.locator("#comparison thead th").all_inner_texts() == ["metric", *comparison.lines]
        assert page.locator("#comparison tbody tr").count() == len(comparison.rows)
        assert page.locator("#comparison thead th[scope=col]").count() == 7
        assert page.locator("#comparison tbody th[scope=row]").count() == len(comparison.rows)
        assert page.locator("#guard").count() == 0
        reward = page.locator("#comparison tbody tr").first
        assert "critic/score/mean" in reward.inner_text()
        assert reward.locator(".change.better").count() == 1 and reward.locator(".change.within-noise").count() >= 3
        ratio, text = lowest_contrast(page, TEXT)
        assert ratio >= 4.5, text
        assert page.evaluate("document.documentElement.scrollWidth") <= 1366
        if not dark:
            found = drawn(page)
            assert found.keys() == {panel.key for panel in PANELS} and min(n for _, n, _ in found.values()) > 20
            page.set_viewport_size({"width": 390, "height": 800})
            page.wait_for_function("document.documentElement.scrollWidth <= 390")  # figures follow a moment later
        assert errors == []


# Other x axes, and lines that are switched off.

CHOSEN = """(key) => Object.values(viewed(figures[key]).datasets).flat()"""
X = "(key) => viewed(figures[key]).layer[0].encoding.x"


def test_one_choice_of_the_x_axis_is_for_all_figures_and_metrics(browser, tmp_path):
    run = full(60, layers=2)
    run.metrics["num_tokens"] = Series(run.steps, run.steps * 1000.0)
    with open_page(write_report(run, judge_run(run), tmp_path, pictures=False), browser=browser) as (page, errors):
        assert page.locator("#axis option").all_inner_texts() == ["step", "time", "tokens"]
        page.select_option("#axis", label="tokens")
        found = drawn(page)
        assert min(colours for _, colours, _ in found.values()) > 20
        assert page.evaluate(X, "reward")["scale"]["domain"] == [1000, 60_000]
        rows = page.evaluate(CHOSEN, "reward")
        assert [row["at"] for row in rows] == pytest.approx([1000 * row["step"] for row in rows])
        page.select_option("#axis", label="time")
        ends = [row["until"] for row in page.evaluate(CHOSEN, "step_time") if row["step"] == 59.5]
        assert ends == pytest.approx([run.metrics["timing_s/step"].values.sum() / 60] * len(ends), rel=0.01)
        assert page.evaluate(X, "reward")["title"] == "minutes"
        page.fill("#metrics input[type=search]", "grad_norm")
        page.wait_for_selector("#metrics .chart[data-drawn]")
        assert page.evaluate(X, "actor/grad_norm")["field"] == "at" and errors == []


def test_a_clock_is_offered_only_if_every_run_has_it(browser, tmp_path):
    runs = [make({"critic/score/mean": [0.1, 0.2], **more}, name=name) for name, more in (("a", TIMED), ("b", {}))]
    with open_page(write_comparison(compare_runs(runs), tmp_path, pictures=False), browser=browser) as (page, errors):
        assert page.locator("#axis").count() == 0 and errors == []


TIMED = {"timing_s/step": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        (TIMED, {"time": ([0, 1, 2], [0, 2, 5])}),
        ({"_runtime": [10.0, 40.0], **TIMED}, {"time": ([1, 2], [10, 40])}),
        ({"_runtime": [10.0, 4.0], **TIMED}, {"time": ([0, 1, 2], [0, 2, 5])}),  # it began anew
        ({"_timestamp": [1.7e9, 1.7e9 + 30]}, {"time": ([1, 2], [0, 30])}),
        ({"perf/total_num_tokens": [100.0, 200.0]}, {"tokens": ([0, 1, 2], [0, 100, 300])}),
        ({"num_tokens": [100.0, 300.0]}, {"tokens": ([1, 2], [100, 300])}),
        ({"num_tokens": [NAN, 300.0], "timing_s/step": [0.0, 0.0]}, {}),
    ],
)
def test_clocks_are_those_of_the_log(metrics, found):
    clocks = page_clocks({"": [make(metrics)]})
    assert {clock["name"]: tuple(clock["lines"][""]) for clock in clocks} == {
        name: (steps, pytest.approx(values)) for name, (steps, values) in found.items()
    }


def test_twenty_lines_of_seeds_can_be_switched_off_and_every_metric_is_found(browser, tmp_path):
    runs = [
        replace(full(40, layers=1, seed=10 * line + seed), name=f"line{line:02d}_seed{seed}")
        for line in range(20)
        for seed in range(2 if line < 2 else 1)
    ]
    comparison = compare_runs(runs, window=20)
    with open_page(write_comparison(comparison, tmp_path, pictures=False), browser=browser) as (page, errors):
        names = page.locator("#comparison tbody th").all_inner_texts()
        assert names == [*comparison.lines] and names[:3] == ["line00", "line01", "line02_seed0"]
        assert len({str(look) for look in page.evaluate("Object.values(looks)")}) == 20
        assert min(colours for _, colours, _ in drawn(page).values()) > 20
        page.fill("#metrics input[type=search]", "entropy_kept")
        page.wait_for_selector("#metrics .chart[data-drawn]")
        name = "correction/entropy_kept"
        assert len({row["number"] for row in page.evaluate(CHOSEN, name)}) == 22
        page.click("#view button")
        assert page.evaluate(CHOSEN, "reward") == page.evaluate(CHOSEN, name) == []
        page.check("#view input[value=line01]")
        assert {row["run"] for row in page.evaluate(CHOSEN, "reward")} == {"line01"}
        assert len({row["number"] for row in page.evaluate(CHOSEN, name)}) == 2
        link = "document.querySelector('#metrics [data-name] > a').href"
        csv = page.evaluate(f"fetch({link}).then((found) => found.text())").splitlines()
        assert csv[0] == "line,run,step,value" and csv[1].startswith('"line00","line00_seed0",1,')
        assert len({line.split(",")[1] for line in csv[1:]}) == 22 and errors == []


# The guard's decisions.


def guarded(tmp_path, *events: Event):
    run = replace(full(120, layers=1), events=events)
    return write_report(run, judge_run(run), tmp_path, pictures=False)


def test_every_action_has_a_word_and_hostile_text_is_text(browser, tmp_path):
    actions = ("skip", "tighten", "warn", "rollback", "stop", "recover", "restored", "own & new")
    events = [event(step, action, WHY) for step, action in enumerate(actions, start=1)]
    with open_page(guarded(tmp_path, *events), browser=browser) as (page, errors):
        section = page.locator("main + #guard")
        assert section.locator("h2").inner_text() == "The guard's decisions"
        assert section.locator("thead th[scope=col]").all_inner_texts() == ["step", "action", "rule", "reason"]
        rows = [row.locator("th, td").all_inner_texts() for row in section.locator("tbody tr").all()]
        words = ["update skipped", "band narrowed", "warning", "rollback", "stop", "recovered", "restored", "own & new"]
        assert rows == [[str(step), word, "rule", WHY] for step, word in enumerate(words, start=1)]
        assert section.locator("tbody th[scope=row]").count() == len(actions)
        assert section.get_by_role("table", name="The guard's decisions").count() == 1
        assert section.locator("details, b, p").count() == 0 and errors == []


@pytest.mark.parametrize("count", [MOST_OPEN, MOST_OPEN + 1, MOST_DECISIONS, MOST_DECISIONS + 7])
def test_many_decisions_are_folded_and_the_last_hundred_shown(browser, tmp_path, count):
    with open_page(guarded(tmp_path, *(event(step, "skip") for step in range(1, count + 1))), browser=browser) as (
        page,
        errors,
    ):
        table = page.locator("#guard table")
        assert table.is_visible() == (count <= MOST_OPEN)
        if count > MOST_OPEN:  # by the keyboard: the figures above are still growing, and a click could miss
            page.locator("#guard summary").press("Enter")
        table.wait_for(state="visible")
        steps = [int(step) for step in table.locator("tbody th").all_inner_texts()]
        assert steps == list(range(max(1, count - MOST_DECISIONS + 1), count + 1))
        said = page.locator("#guard p").all_inner_texts()
        assert said == ([] if count <= MOST_DECISIONS else ["The first 7 of 107 decisions are left out."])
        assert errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_decisions_fit_a_narrow_screen(browser, tmp_path, dark):
    long = Event(123_456, "a_rule_with_a_long_name_" * 3, "x", 1.0, 0.5, "skip", f"vllm_kl/{'k' * 300} and more " * 3)
    with open_page(guarded(tmp_path, long), browser=browser, width=390, dark=dark) as (page, errors):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        boxes = [cell.bounding_box() for cell in page.locator("#guard td, #guard th").all()]
        assert all(box["x"] + box["width"] <= 390 and box["width"] > 50 for box in boxes)
        assert page.locator("#guard tbody th").bounding_box()["height"] > 0
        assert page.locator("#guard tbody th").evaluate("one => one.scrollWidth <= one.clientWidth")
        assert errors == []


def test_a_run_whose_guard_did_nothing_has_no_such_section(browser, tmp_path):
    with open_page(guarded(tmp_path), browser=browser) as (page, _):
        assert page.locator("#guard").count() == 0
