"""The page of features by engine is made from the checks and the tests; a test counts only if the feature is on."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.engines_page import PAIRS, composed, is_of, joined, marked_tests, names_of, refusal, rows, write_model
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.core.losses import LOSSES
from verl_ext.guard.rules import ACTIONS

FSDP_VLLM, _, MEGATRON_VLLM, MEGATRON_SGLANG, VEOMNI = PAIRS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import hydra

    from verl_ext.launch.compose import VERL_CONFIGS

    path = tmp_path_factory.mktemp("model")
    write_model(path)
    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        yield str(path)


def row_of(pair, name, group=""):
    (found,) = [row for its in rows(pair).values() for row in its if (row.name.strip("`"), row.group) == (name, group)]
    return found


@pytest.mark.slow
def test_the_page_is_current():
    made = subprocess.run(
        [sys.executable, "-m", "tests.engines_page"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert made.returncode == 0, made.stderr[-3000:]
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert page == made.stdout, "python -m tests.engines_page > docs/engines.md"


def test_every_method_and_action_has_a_row():
    by_section = {section: {row.name.strip("`") for row in its} for section, its in rows(FSDP_VLLM).items()}
    assert set(CORRECTIONS) <= by_section["Corrections"]
    assert set(LOSSES) <= by_section["Policy losses"]
    assert {*ESTIMATORS, *BATCH_FILTERS} <= by_section["Advantages and filters"]
    assert set(ACTIONS) <= by_section["Guard"]
    assert len({tuple(names_of(pair)) for pair in PAIRS}) == 1, "every column has the same rows"


@pytest.mark.parametrize(
    ("pair", "name", "group", "reason"),
    [
        (FSDP_VLLM, "undo", "a rule's action", ""),
        (MEGATRON_VLLM, "undo", "a rule's action", ""),
        (MEGATRON_SGLANG, "score centering", "", ""),
        (MEGATRON_SGLANG, "cascade_attention=off", "", "is a setting of vLLM"),
        (VEOMNI, "R3 with router agreement", "", ""),
        (MEGATRON_VLLM, "verl-ext probe", "", ""),
    ],
)
def test_a_refusal_is_that_of_the_features_own_check(folder, pair, name, group, reason):
    said = refusal(pair, row_of(pair, name, group), folder)
    assert reason in said and bool(reason) == bool(said)
    assert "; " not in said, "the remedy is for who launches"


def test_a_row_is_on_where_its_overrides_are_and_nowhere_else(folder):
    base = ("recipe=cpu_smoke", f"assets={folder}")
    row = row_of(FSDP_VLLM, "lower_lr", "a rule's action")
    on, preset, off = (composed((*base, *more), "") for more in (row.overrides, ("stability=guard",), ()))
    assert is_of(on, FSDP_VLLM) and not is_of(on, MEGATRON_VLLM)
    assert row.is_on(on) and not row.is_on(off)
    tighten = row_of(FSDP_VLLM, "tighten", "a rule's action")
    assert any(rule.action == "tighten" for rule in preset.stability.rules)
    assert not tighten.is_on(preset), "a preset's rule is there in every run, and fires in few"


def test_an_override_that_leaves_its_row_off_is_an_error(folder):
    row = row_of(FSDP_VLLM, "sync canary")._replace(overrides=("stability.metrics=true",))
    with pytest.raises(AssertionError, match="do not switch it on"):
        refusal(FSDP_VLLM, row, folder)


def test_marks_name_rows_and_engines():
    engines = {engine for pair in PAIRS for engine in pair[:2]}
    assert marked_tests()["undo", "fsdp2"] == ["test_an_update_is_taken_back_bit_for_bit_on_every_rank"]
    for name, engine in marked_tests():
        assert name in names_of(FSDP_VLLM) and engine in engines


def test_rows_of_a_group_that_say_the_same_are_one_line():
    shown = {("of", "a"): ("x",), ("of", "b"): ("y",), ("of", "c"): ("x",), ("", "d"): ("x",), ("", "e"): ("x",)}
    assert list(joined(shown)) == [("of: a, c", ("x",)), ("of: b", ("y",)), ("d, e", ("x",))]


def test_the_switching_runs_entries_are_launches_of_their_own(monkeypatch):
    from tests.stack.switching import SCHEDULES
    from tests.support.launches import _steps

    command = ["-m", "tests.stack.switching", "fsdp2", "recipe=cpu_tool", "stability=icepop"]
    steps = list(_steps(command, "test"))
    assert len(steps) == len(SCHEDULES["fsdp2"])
    assert "stability=tis" in next(step for step in steps if "stability.tis.cap=1.0" in step.overrides).overrides
    assert all(
        len({one.partition("=")[0].lstrip("+") for one in step.overrides}) == len(step.overrides) for step in steps
    )
    assert not list(_steps(["-m", "verl.trainer.main_ppo", "recipe=cpu_smoke"], "test")), "verl's own entry point"
