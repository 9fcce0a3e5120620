"""Terminal, page and JSON say the same, from one verdict; the terminal may shorten reasons."""

import html
import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests import ROOT
from tests.unit.report.hostile import OBEYED, harmless
from tests.unit.report.made_runs import event, full, make
from tests.unit.report.shown import printed
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.diagnosis.findings.registry import Finding
from verl_ext.diagnosis.rank import Evidence, Suspect
from verl_ext.report import page
from verl_ext.report.load import read_run
from verl_ext.report.terminal import LINE_WIDTH, MOST_CAUSE_LINES, Dashboard
from verl_ext.report.verdict import NextStep, judge_run

FIELD = sorted((ROOT / "tests" / "cases" / "field").glob("*.csv"))
RECIPES = sorted((ROOT / "recipes" / "collapse" / "runs").glob("*/*/seed0"))
EACH_RUN = pytest.mark.parametrize(
    "path", [*FIELD, *RECIPES], ids=lambda path: path.stem if path.suffix else path.parent.name
)
STOPPED = make({"critic/score/mean": [0.6] * 60 + [0.19] * 60, "vllm_kl/k3": [0.3] * 120}, [event(120, "stop", "why")])


@cache
def known(path):
    run = read_run(path)
    return run, judge_run(run)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def paged(tmp_path, monkeypatch):
    """paged(run, verdict) -> the visible text of the page, without figures."""
    monkeypatch.setattr(page, "PANELS", ())
    monkeypatch.setattr(page, "libraries", str)

    def written(run, verdict) -> str:
        text = page.write_report(run, verdict, tmp_path, pictures=False).read_text(encoding="utf-8")
        return flat(html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)))

    return written


@EACH_RUN
def test_every_fact_cause_and_step_is_in_all_three(path, paged):
    run, verdict = known(path)
    shown = {"terminal": flat(printed(Dashboard(run, verdict), 10_000)), "page": paged(run, verdict)}
    said = verdict.as_json(run)
    assert [(each["id"], each["text"], each["step"]) for each in said["findings"]] == [
        (fact.name, fact.text, fact.step) for fact in verdict.facts
    ]
    evidence = {sign.finding.name for suspect in verdict.suspects for sign in suspect.evidence}
    for fact in verdict.facts:
        elsewhere = verdict.is_said(fact.name) or {f.name for f in verdict.facts}.union(evidence).intersection(
            fact.subsumed_by
        )
        assert elsewhere or all(flat(fact.text).lower() in text.lower() for text in shown.values()), fact
    for text in shown.values():
        assert flat(verdict.sentence) in text and flat(verdict.alarm) in text
        assert all(suspect.cause.title in text for suspect in verdict.suspects)
        assert all(step.do in text for step in verdict.steps)
    assert [cause["title"] for cause in said["causes"]] == [suspect.cause.title for suspect in verdict.suspects]
    assert [step["do"] for step in said["next"]] == [step.do for step in verdict.steps]
    assert flat(verdict.measure) in shown["page"] and flat(verdict.settle) in shown["page"]
    assert not verdict.measure or any(step.do in verdict.measure for step in verdict.steps) or verdict.alarm
    assert not verdict.settle or any(f"`{step.do}`" in verdict.settle for step in verdict.steps) or verdict.alarm


@EACH_RUN
def test_the_terminal_says_no_fact_twice(path):
    run, verdict = known(path)
    above, _, _ = printed(Dashboard(run, verdict), 10_000).partition("first ")
    lines = [line.strip(" -") for line in above.splitlines() if line.startswith(" - ")]
    assert len(lines) == len(set(lines))
    for fact in verdict.other_facts:
        assert flat(above).count(flat(fact.text)) <= 1 + len(verdict.suspects), fact
        assert sum(fact.text in line for line in lines) <= 1


def lines_of_causes(run, verdict) -> list[int]:
    """The number of lines that each cause takes on a terminal; a blank line ends the causes."""
    starts = tuple(f" {label}: " for label, _ in verdict.labelled())
    heading = [line.rstrip() for line in printed(Dashboard(run, verdict)).splitlines()]
    heading = heading[: heading.index("")] if "" in heading else heading
    places = [place for place, line in enumerate(heading) if starts and line.startswith(starts)]
    return [end - place for place, end in zip(places, [*places[1:], len(heading)], strict=False)]


@EACH_RUN
def test_a_cause_takes_at_most_four_lines(path):
    run, verdict = known(path)
    counts = lines_of_causes(run, verdict)
    assert len(counts) == len(verdict.suspects) and all(1 < count <= MOST_CAUSE_LINES for count in counts)


LONG = "a reason of so many words that it takes more than one line of a terminal, whatever else is on that line, " * 2
REASONS = [("short",), ("short", "other"), (LONG,), ("short", LONG), (LONG, LONG, LONG)]


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_every_cause_takes_at_most_four_lines_with_any_evidence(name):
    run = make({"vllm_kl/k3": [0.02] * 8})
    for reasons, against in product(REASONS, [(), ("not so",), (LONG,)]):
        signs = [Evidence(3.0, Finding(f"for_{place}", "x", text, 12)) for place, text in enumerate(reasons)]
        signs += [Evidence(-1.5, Finding(f"against_{place}", "x", text)) for place, text in enumerate(against)]
        suspect = Suspect(CAUSES[name], tuple(signs))
        verdict = replace(judge_run(run), suspects=(suspect,), facts=(), steps=())
        (count,) = lines_of_causes(run, verdict)
        text = printed(Dashboard(run, verdict))
        assert 2 < count <= MOST_CAUSE_LINES, text
        assert CAUSES[name].title in flat(text) and f"+ step 12: {reasons[0][:40]}" in flat(text)
        assert max(map(len, text.splitlines())) <= LINE_WIDTH


def test_a_run_that_the_guard_stopped_is_told_once():
    verdict = judge_run(STOPPED)
    text = flat(printed(Dashboard(STOPPED, verdict), 10_000).partition("first ")[0])
    assert text.count("The guard stopped the run in step 120") == 1 and "Do this first" not in text


def test_an_alarm_is_told_before_what_to_do():
    run = replace(STOPPED, events=(event(120, "skip", "why"),))
    verdict = judge_run(run)
    text = flat(printed(Dashboard(run, verdict), 10_000))
    assert 0 < text.index(verdict.alarm) < text.index(f"{verdict.first_heading} {verdict.first.do}")
    assert verdict.first_heading.startswith("After that")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_texts_are_printable_everywhere(encoding, paged):
    run = replace(full(20, layers=1), name="run")
    finding = Finding("for", "x", OBEYED, 3)
    verdict = replace(
        judge_run(run),
        state="collapsed",
        sentence=f"a {OBEYED}",
        facts=(Finding("own", "x", f"b {OBEYED}", 2),),
        suspects=(Suspect(CAUSES["leak"], (Evidence(3.0, finding),)),),
        measure=f"c {OBEYED}",
        settle=f"`d` {OBEYED}",
        alarm=f"e {OBEYED}",
        steps=(NextStep(f"f={OBEYED}", f"g {OBEYED}"), NextStep(f"h={OBEYED}", f"i {OBEYED}")),
    )
    shown = printed(Dashboard(run, verdict), encoding=encoding)
    assert harmless(shown) and "\\x1b" in shown
    assert harmless(paged(run, verdict))
