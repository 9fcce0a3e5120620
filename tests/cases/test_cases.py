"""The corpus of judged runs: what the report says of each is frozen, so that a change shows what it changes."""

import pytest

from tools import cases

FROZEN = cases.frozen()
CASES = {f"{which}/{known['case']}": file for which, file, known in cases.cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_judged_as_frozen(name):
    """`python tools/cases.py judge` freezes a change that is meant."""
    assert cases.judgement(CASES[name]) == FROZEN[name]


def test_every_case_is_frozen_and_has_a_source():
    assert FROZEN.keys() == CASES.keys()
    for which, file, known in cases.cases():
        assert file.exists() and known["source"] and known["expect"], (which, known["case"])
        assert known["kind"] in ("owner's file", "typed from a table", "rebuilt from published values", "planted")
