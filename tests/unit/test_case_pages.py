"""The counts of judged runs, and the words of the field guide."""

import json
import re

import pytest

from tests import ROOT
from tools import cases


def test_the_front_page_counts_the_field_set():
    field = next(line for line in cases.set_counts().splitlines() if line.startswith("| field "))
    assert field.split(" | ")[2] in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("known", json.loads((cases.CASES / "field.json").read_text()), ids=lambda known: known["case"])
def test_a_symptom_names_a_metric_that_the_run_logged(known):
    """A reader finds it by that name. Forms of one run share a symptom, and log it under other names."""
    named = set(re.findall(r"`([^`]+/[^`]+|\w+)`", known["symptom"]))
    file = cases.CASES / "field" / f"{known['case']}.csv"
    columns = set(file.read_text(encoding="utf-8").partition("\n")[0].split(","))
    quantities = {found.name for name in named if (found := cases.quantity_of(name)) is not None}
    assert columns & (named | {alias.name for name in quantities for alias in cases.aliases_of(name)})
    assert known["cause"] and {"symptom", "helped"} <= known.keys()


def test_aspects_count_what_is_known():
    said = {"state": "suspect", "learning": "learns", "engines": "apart", "causes": ["leak", "quantized"]}
    right = {
        "learning": ["learns", "weak"],
        "never_state": ["healthy"],
        "cause": ["leak"],
        "never_cause": ["positions"],
    }
    assert cases.aspects(right, said) == {"learning": True, "state": True, "cause": True, "accused": True}
    wrong = {"engines": ["close"], "state": ["healthy"], "cause": ["unknown"], "no_cause": True}
    assert cases.aspects(wrong, said) == {"engines": False, "state": False, "cause": False, "accused": False}
    silent = said | {"causes": []}
    assert cases.aspects({"cause": ["unknown"], "no_cause": True}, silent) == {"cause": True, "accused": True}


def test_adding_cases_again_keeps_the_words_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "CASES", tmp_path / "cases")
    (tmp_path / "given" / "A").mkdir(parents=True)
    (tmp_path / "given" / "A" / "run.jsonl").write_text('{"step": 1, "critic/score/mean": 0.123456}\n')
    known = {"id": "A", "source": "here", "kind": "planted", "files": ["run.jsonl"], "expect": {"learning": ["flat"]}}
    (tmp_path / "given" / "A" / "case.json").write_text(json.dumps(known))
    (tmp_path / "cases").mkdir()
    index = tmp_path / "cases" / "field.json"
    index.write_text(json.dumps([{"case": "A", "expect": {}, "symptom": "`reward` 0", "cause": "c", "helped": ""}]))
    cases.add("field", tmp_path / "given")
    added = json.loads(index.read_text())
    assert added == [
        {"case": "A", "source": "here", "kind": "planted", "expect": {"learning": ["flat"]}}
        | {"symptom": "`reward` 0", "cause": "c", "helped": ""}
    ]
    assert (tmp_path / "cases" / "field" / "A.csv").read_text() == "step,critic/score/mean\n1,0.12346\n"
