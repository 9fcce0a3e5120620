"""Every metric is known once: against the source and the names that real runs logged."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.documented import undocumented
from verl_ext.base.metrics import METRICS, OURS, comes_late, find, is_rare, nearest, ours

LOGGED = Path(__file__).with_name("logged_metrics.txt").read_text().split()  # by runs of tests/stack
GAP = "\0"  # what an f-string computes
OURS_IN_UPDATE = "gate|icepop|opsm|m2po|llds|clipped_share|clipped_probability"
NAME = re.compile(rf"({'|'.join(OURS)}|actor/({OURS_IN_UPDATE})/)[\w./{GAP}-]*[\w{GAP}]")


@cache
def written() -> set[str]:
    """Returns our metrics' names in the source, with GAP for computed parts; prefixes of names end in / or _."""
    found = set()
    for file in {*(ROOT / "verl_ext").rglob("*.py")} - {*(ROOT / "verl_ext" / "base" / "metrics").iterdir()}:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {part for string in strings for part in string.values}
        found |= {
            "".join(part.value if isinstance(part, ast.Constant) else GAP for part in string.values)
            for string in strings
        }
        found |= {node.value for node in nodes if isinstance(node, ast.Constant) and node not in parts}
    return {name for name in found if isinstance(name, str) and NAME.fullmatch(name) and not name.endswith("_")}


def could_be(name: str) -> set[str]:
    """Returns the entries that match a name in the source."""
    if GAP not in name:
        return {metric.name} if (metric := find(name)) else set()
    pattern = re.compile(".+".join(map(re.escape, name.split(GAP))))
    return {metric for metric in METRICS if pattern.fullmatch(metric)}


def test_every_name_in_the_source_is_documented():
    names = written()
    assert len(names) > 50 and "vllm_kl/k3" in names and f"router/{GAP}/layer_{GAP}" in names
    assert {name for name in names if not could_be(name)} == set(), "an entry in verl_ext/base/metrics/ours.py"


def test_every_name_that_a_run_logged_is_documented():
    assert undocumented(LOGGED) == set()
    assert {name for name in LOGGED if find(name) is None} == set()


def test_every_entry_of_ours_is_logged_by_something():
    logged = {find(name).name for name in LOGGED} | {entry for name in written() for entry in could_be(name)}
    assert {metric.name for section in ours.SECTIONS for metric in section.metrics} <= logged


def test_no_entry_hides_another():
    for name in METRICS:
        example = re.sub(r"\{[^}]*?([^,}]+)\}|\*+", lambda found: found[1] or "x", name)
        assert find(example).name == name, example


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("vllm_kl/k3", "vllm_kl/k3"),
        ("vllm_kl/k3/position/256-1024", "vllm_kl/k3/{prob,entropy,position,turn,calls}/*"),
        ("vllm_kl/k3/lag/4-7", "vllm_kl/k3/lag/*"),
        ("router/agreement/layer_93", "router/agreement/layer_*"),
        ("correction/of_mine/low", "correction/*/low"),
        ("filter/of_mine/share", "filter/*/*"),
        ("critic/score/mean", "critic/score/mean"),
        ("critic/score/max", "critic/{score,rewards,advantages,returns,values}/{mean,max,min}"),
        ("val-core/openai/gsm8k/reward/mean@1", "val-core/**"),
        ("vllm_kl/k3/layer/1", None),
        ("router/agreement/prob/0-0.01/more", None),
        ("mine/k3", None),
    ],
)
def test_a_name_is_found_by_itself_or_by_its_family(name, entry):
    found = find(name)
    assert (found and found.name) == entry


@pytest.mark.parametrize(
    ("name", "late", "rare"),
    [
        ("vllm_kl/k3", False, False),
        ("actor/entropy", False, False),
        ("critic/score/mean", False, False),
        ("critic/score/max", True, False),
        ("actor/grad_norm", True, False),
        ("filter/kept_tokens", True, False),
        ("guard/steps_to_boundary", False, False),
        ("guard/growth_rate", False, True),
        ("guard/skipped", True, False),
        ("vllm_kl/k3/lag/0", False, True),
        ("vllm_kl/engine/k3", False, True),
        ("rollout_corr/kl", True, False),  # verl computes it when the batch has been judged
        ("training/rollout_probs_diff_mean", False, True),
        ("training/off_policy/trajectory_staleness/mean", True, True),
        ("training/off_policy/evicted_samples", False, True),
        ("val-core/math/acc", True, True),
        ("mine/k3", False, False),
    ],
)
def test_what_the_guard_may_expect_of_a_signal(name, late, rare):
    assert (comes_late(name), is_rare(name)) == (late, rare)


def test_names_near_a_wrong_one():
    assert nearest("vllm_kl/k33")[0] == "vllm_kl/k3"
    assert nearest("corrections/dropped")[0] == "correction/dropped"
    assert nearest("env/success") == nearest("k3") == []
