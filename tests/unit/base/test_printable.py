import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.base.printable import MOST, printable


@pytest.mark.parametrize(
    "text",
    [
        "",
        "val-core/openai/gsm8k/acc/mean@1",
        "a  b",
        "[/b] <b>&amp;",
        "\\x1b",
        "größe 数学/正解 ²",
        "n\u00a0%",
        "e\u0301",
    ],
)
def test_visible_text_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\0b", r"a\x00b"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x9b31m", r"\x9b31m"),
        ("\x7f", r"\x7f"),
        ("two\r\nlines\tand\u2028three\x85", r"two\r\nlines\tand\u2028three\x85"),
        ("\udc80\ud800", r"\udc80\ud800"),
        ("\ufffe\uffff\U0001ffff", r"\ufffe\uffff\U0001ffff"),
        ("\u202eeslaf\u2066\u200b\ufeff", r"\u202eeslaf\u2066\u200b\ufeff"),
    ],
)
def test_what_is_hidden_or_obeyed_is_written_as_its_escape(text, shown):
    assert printable(text) == shown


def test_no_character_there_is_can_be_obeyed_or_break_a_page():
    planes = (range(0x20000), range(0xE0000, 0xE0200), range(sys.maxunicode - 0x100, sys.maxunicode + 1))
    text = "".join(chr(code) for plane in planes for code in plane)
    shown = printable(text, most=len(text))
    assert not {unicodedata.category(each) for each in shown} & {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
    assert ElementTree.fromstring(f"<text>{escape(shown)}</text>").text == shown
    assert len(shown.splitlines()) == 1 and shown.encode().decode() == shown


@given(st.text(st.characters(codec=None), min_size=0, max_size=2 * MOST))
def test_what_is_shown_is_short_and_stays_as_it_is(text):
    shown = printable(text)
    assert printable(shown, most=len(shown)) == shown and len(shown) <= 10 * MOST


def test_of_a_long_name_both_ends_are_shown():
    shown = printable("val-core/" + "x" * 1_000_000 + "/mean@1")
    assert len(shown) <= MOST and shown.startswith("val-core/x") and shown.endswith("x/mean@1") and "x...x" in shown
