import io
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl_ext.base.printable import (
    MOST,
    WIDTH,
    number_table,
    print_number_table,
    printable,
    wide_console,
    wrapped,
)


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


KEY = "abcdEFGH" + "1234" * 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"HTTPError: 401 for token=hf_{KEY}", "HTTPError: 401 for token=***"),
        (f"no repository for hf_{KEY}, sorry", "no repository for ***, sorry"),
        (f"AuthenticationError: key sk-proj-{KEY} is wrong", "AuthenticationError: key *** is wrong"),
        (
            f"fatal: https://x-access-token:{KEY}@github.com/a/b.git",
            "fatal: https://x-access-token:***@github.com/a/b.git",
        ),
        (f"fatal: https://{KEY}@github.com/a", "fatal: https://***@github.com/a"),
        ("redis://:pass@host:6379/0", "redis://:***@host:6379/0"),
        (f"{{'Authorization': 'Bearer {KEY}'}}", "{'Authorization': 'Bearer ***'}"),
        (f"WANDB_API_KEY={KEY} python train.py", "WANDB_API_KEY=*** python train.py"),
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY: ***"),
        ("AKIA" + "IOSFODNN7EXAMPLE", "***"),
        ('{"password": "hunter2"}', '{"password": "***"}'),
        (f"kl_hf_{KEY}, run_sk-{KEY}", "kl_***, run_***"),
        (f"GET /x?a=1&X-Amz-Signature={KEY}&b=2", "GET /x?a=1&X-Amz-Signature=***&b=2"),
    ],
)
def test_a_secret_is_not_shown(text, shown):
    assert printable(text) == shown == printable(shown)


@pytest.mark.parametrize(
    "text",
    [
        "data.prompt_key=prompt",
        "algorithm.rollout_correction.rollout_is=token",
        "KeyError: 'pad_token'",
        "unexpected token: <pad>",
        "loss_agg_mode=token-mean-with-a-long-name",
        "tcp://10.0.0.1:6379, ssh://git@host/x",
        "ValueError: basic usage of hf_config is wrong",
        "max_tokens=4096 eos_token_id=151645",
        "timing_s/load_hf_model_conversion_seconds_total",
        "ActorDiedError: 0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_only_looks_like_a_secret_stays(text):
    assert printable(text) == text


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


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a word is whole", 9, ["a word is", "whole"]),
        (
            "x rollout.gpu_memory_utilization=0.9 or so",
            20,
            ["x", "rollout.gpu_memory_", "utilization=0.9 or", "so"],
        ),
        ("actor_rollout_ref.actor.megatron.grad_offload", 42, ["actor_rollout_ref.actor.megatron.", "grad_offload"]),
        ("trace.config_path=/shared/tools.yaml", 32, ["trace.config_path=/shared/", "tools.yaml"]),
        ("no/such/model", 20, ["no/such/model"]),
        ("  two blanks", 7, ["  two", "  blank", "  s"]),
        ("x" * 7, 3, ["xxx", "xxx", "x"]),
        ("", 5, [""]),
    ],
)
def test_a_text_is_broken_between_words_and_a_long_one_at_its_marks(text, width, lines):
    assert wrapped(text, width).split("\n") == lines


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("", WIDTH), ("many", WIDTH)])
def test_the_columns_of_a_pipe(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert wide_console().width == width


@pytest.mark.parametrize("width", [30, 45, 60, 80, 250])
def test_a_table_is_torn_at_no_width(width):
    table = number_table("switched on", "who", "seconds", "share", labels=2)
    rows = [("corrections, vllm_kl/*", "controller, computes", "0.19", "0.01%"), ("all", "", "1234567.5", "99.99%")]
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    print_number_table(Console(file=out, width=width), table)
    said = {word.strip(",│") for word in out.getvalue().split()}
    assert {"0.19", "0.01%", "1234567.5", "99.99%", "corrections"} <= {word.strip("()") for word in said}
    assert "controller" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= width
