"""Overrides made from values, read back by Hydra's own parser."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.submit import override

GRAMMAR = "/aé1.-_=,:;#~+@%*?|$(){}[]\\'\" \t\n"  # what Hydra's lexer treats in ways of its own, and a little text


@pytest.fixture(scope="module")
def parse():
    return OverridesParser.create().parse_override


@given(st.text(st.sampled_from(GRAMMAR), max_size=20) | st.text(max_size=20))
@example("null")
@example("TRUE")
@example("1_000")
@example("1e-6")
@example("nan")
@example("")
@example("/runs/lr=1e-6, [a] {b: c} # 'd' \"e\" \\")
@example("${oc.env:HOME}")
@example("choice(a,b)")
def test_hydra_reads_back_the_very_string(parse, value):
    made = parse(override("++a.b", value))
    assert made.value() == value and made.key_or_group == "a.b"
    assert not made.is_sweep_override()


@pytest.mark.parametrize("value", ["/shared/run/checkpoints", "bfloat16", "a-b_c.d"])
def test_what_needs_no_quotes_has_none(value):
    assert override("a", value) == f"a={value}"
