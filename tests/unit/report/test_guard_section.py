"""The section of the page about the guard."""

from dataclasses import replace

import pytest

from tests.support.browser import launched, needs_browser, open_page
from tests.unit.report.made_runs import event, full
from verl_ext.guard.state import Event
from verl_ext.report.page import MOST_DECISIONS, MOST_OPEN, write_report
from verl_ext.report.verdict import judge_run

pytestmark = needs_browser
HOSTILE = "<b>why</b> </script><script>alert(1)</script>"
RUN = full(120, layers=1)


@pytest.fixture(scope="module")
def browser():
    with launched() as running:
        yield running


def written(tmp_path, *events: Event):
    run = replace(RUN, events=events)
    return write_report(run, judge_run(run), tmp_path, pictures=False)


def test_every_action_has_a_word_and_hostile_text_is_text(browser, tmp_path):
    actions = ("skip", "tighten", "warn", "rollback", "stop", "recover", "restored", "own & new")
    events = [event(step, action, HOSTILE) for step, action in enumerate(actions, start=1)]
    with open_page(written(tmp_path, *events), browser=browser) as (page, errors):
        section = page.locator("main + #guard")
        assert section.locator("h2").inner_text() == "The guard's decisions"
        assert section.locator("thead th[scope=col]").all_inner_texts() == ["step", "action", "rule", "reason"]
        rows = [row.locator("th, td").all_inner_texts() for row in section.locator("tbody tr").all()]
        words = ["update skipped", "band narrowed", "warning", "rollback", "stop", "recovered", "restored", "own & new"]
        assert rows == [[str(step), word, "rule", HOSTILE] for step, word in enumerate(words, start=1)]
        assert section.locator("tbody th[scope=row]").count() == len(actions)
        assert section.get_by_role("table", name="The guard's decisions").count() == 1
        assert section.locator("details, b, p").count() == 0 and errors == []


@pytest.mark.parametrize("count", [MOST_OPEN, MOST_OPEN + 1, MOST_DECISIONS, MOST_DECISIONS + 7])
def test_many_decisions_are_folded_and_the_last_hundred_shown(browser, tmp_path, count):
    with open_page(written(tmp_path, *(event(step, "skip") for step in range(1, count + 1))), browser=browser) as (
        page,
        errors,
    ):
        table = page.locator("#guard table")
        assert table.is_visible() == (count <= MOST_OPEN)
        if count > MOST_OPEN:
            page.locator("#guard summary").click()
        assert table.is_visible()
        steps = [int(step) for step in table.locator("tbody th").all_inner_texts()]
        assert steps == list(range(max(1, count - MOST_DECISIONS + 1), count + 1))
        said = page.locator("#guard p").all_inner_texts()
        assert said == ([] if count <= MOST_DECISIONS else ["The first 7 of 107 decisions are left out."])
        assert errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_narrow_screen(browser, tmp_path, dark):
    long = Event(123_456, "a_rule_with_a_long_name_" * 3, "x", 1.0, 0.5, "skip", f"vllm_kl/{'k' * 300} and more " * 3)
    with open_page(written(tmp_path, long), browser=browser, width=390, dark=dark) as (page, errors):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        boxes = [cell.bounding_box() for cell in page.locator("#guard td, #guard th").all()]
        assert all(box["x"] + box["width"] <= 390 and box["width"] > 50 for box in boxes)
        assert page.locator("#guard tbody th").bounding_box()["height"] > 0
        assert page.locator("#guard tbody th").evaluate("one => one.scrollWidth <= one.clientWidth")
        assert errors == []


def test_a_run_whose_guard_did_nothing_has_no_such_section(browser, tmp_path):
    with open_page(written(tmp_path), browser=browser) as (page, _):
        assert page.locator("#guard").count() == 0
