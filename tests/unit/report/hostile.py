"""Files as a crash, another program or an attacker may leave them, and the results that a report of them may have."""

import json
import struct
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.unit.report.shown import printed
from verl_ext.base.names import BUCKETS
from verl_ext.report import page
from verl_ext.report.comparison import ComparisonTable, compare_runs
from verl_ext.report.folder import write_pages
from verl_ext.report.load import read_run
from verl_ext.report.page import write_comparison
from verl_ext.report.run import ReportError, Run
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import judge_run

OBEYED = "\x1b]0;x\x07\x9b31m\ud800\uffff\u202e\0"  # what a terminal obeys, or a page or a figure cannot hold
METRICS = (
    *("critic/score/mean", "vllm_kl/k1", "vllm_kl/k3", "vllm_kl/prob_diff_max", "vllm_kl/prob_diff_mean"),
    *("correction/dropped", "router/agreement", "router/agreement/layer_00", "router/agreement/layer_1"),
    *("response_length/mean", "actor/entropy", "actor/grad_norm", "timing_s/step", "timing_s/gen"),
    *("guard/boundary", "guard/threshold", "guard/skipped", "val-core/gsm8k/acc/mean@1"),
    *("training/off_policy/trajectory_staleness/mean", f"vllm_kl/k3/prob/{BUCKETS['prob'][0]}"),
)
PREFIXES = ("val-core/", "router/agreement/layer_", "vllm_kl/k3/prob/", "")

words = st.text(st.characters(codec=None), max_size=12) | st.sampled_from((*OBEYED, OBEYED, "²", "9" * 30, "x" * 5000))
names = st.sampled_from(METRICS) | st.builds("".join, st.tuples(st.sampled_from(PREFIXES), words))
edges = [sign * (2**power + more) for sign in (1, -1) for power in (31, 53, 63, 64, 200, 1100) for more in (-1, 0, 1)]
steps = st.integers(0, 40) | st.integers() | st.sampled_from(edges)
numbers = st.floats(-10, 10) | st.floats() | st.integers() | st.sampled_from([*edges, 1e308, -1e308, 5e-324, -3.4e38])
leaves = st.none() | st.booleans() | numbers | words
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=8
)


def lines(records: st.SearchStrategy) -> st.SearchStrategy[bytes]:
    """Returns files with such a record per line, among lines of any JSON or any bytes; some are cut or joined."""
    whole = (records | documents).map(lambda record: json.dumps(record).encode())
    cut = st.builds(lambda line, at: line[: at % (len(line) + 1)], whole, st.integers(0, 1000))
    line = whole | whole | cut | st.binary(max_size=20)
    return st.lists(st.tuples(line, st.sampled_from([b"\n", b"\n", b"\n", b"", b"\r\n"])), max_size=30).map(
        lambda rows: b"".join(text + end for text, end in rows)
    )


def look(path: Path, out: Path, *, panels: Sequence[page.Panel] = (), compared: bool = False) -> str:
    """Reports a file: returns "page", or the one-line error. Anything else fails the test.

    Args:
        panels: figures of the page, which take most of the time.
        compared: also compare two runs from the file.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")  # they would stand among the lines
        patch.setattr(page, "PANELS", panels)
        patch.setattr(page, "libraries", str)  # Vega
        try:
            run = read_run(path)
            verdict = judge_run(run)
            _on_screen(Dashboard(run, verdict))
            written = list(write_pages(run, verdict, out, pictures=False).values())
            if compared:
                written.append(_compare(run, out / "compared"))
        except ReportError as error:
            said = str(error)
            assert harmless(said) and "\n" not in said and len(said) < 5000
            return said
        assert all(harmless(file.read_text(encoding="utf-8")) for file in written)
    return "page"


def _compare(run: Run, out: Path) -> Path:
    runs = [replace(run, name=f"{run.name} {index}") for index in (1, 2)]
    comparison = compare_runs(runs, extra=sorted(run.metrics)[:3])
    _on_screen(ComparisonTable(comparison))
    return write_comparison(comparison, out, pictures=False)


def harmless(text: str) -> bool:
    return text.isprintable() or not {unicodedata.category(each) for each in set(text) - {"\n"}} & {
        "Cc",
        "Cf",
        "Cs",
        "Cn",
    }


def one_line(capsys) -> str:
    """Returns the line in which a command said why it failed."""
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("verl-ext ") and harmless(said)
    return said


def _on_screen(screen) -> None:
    for encoding in ("utf-8", "ascii"):
        said = printed(screen, encoding=encoding)
        assert harmless(said) and len(said) < 50_000


def record(content: bytes) -> bytes:
    """One record of a TensorBoard file, whatever is in it."""
    return header(len(content)) + content + _checksum(content)


def header(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + _checksum(size)


def _checksum(content: bytes) -> bytes:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return struct.pack("<I", masked_crc32c(content))
