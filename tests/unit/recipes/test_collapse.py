"""The kept runs of recipes/collapse support the claims of its page."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

RECIPE = ROOT / "recipes" / "collapse"
FP4, FP4_REPLAYED = ("quantized", "none"), ("quantized", "r3")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collapse_results", RECIPE / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewards(file: Path) -> list[float]:
    return values(file, "critic/score/mean")


def values(file: Path, key: str) -> list[float]:
    return [json.loads(line)["data"][key] for line in file.read_text().splitlines()]


def ends(regime: str, arm: str, key: str) -> list[float]:
    """Returns the mean of the last 20 steps, by seed."""
    files = sorted((RECIPE / "runs" / regime / arm).glob("seed*/metrics.jsonl"))
    return [sum(values(file, key)[-20:]) / 20 for file in files]


def test_the_tables_are_of_the_runs_that_are_kept(results):
    page = (RECIPE / "README.md").read_text()
    assert results.with_tables(page) == page
    for regime in results.REGIMES:
        assert (f"<!-- {regime} -->" in page) == (RECIPE / "runs" / regime).exists()


def test_what_the_picture_is_there_to_show():
    """Without a remedy every seed falls below half of its peak; with one, none does; with IcePop, some do."""
    last, lived = {}, {}
    for file in (RECIPE / "runs" / "stale").glob("*/seed*/metrics.jsonl"):
        arm, earned = file.parts[-3], rewards(file)
        means = [sum(earned[i - 20 : i]) / 20 for i in range(20, len(earned) + 1)]
        last.setdefault(arm, []).append(means[-1])
        lived.setdefault(arm, []).append(all(m >= 0.5 * max(means[: i + 1]) for i, m in enumerate(means)))
    assert set(last) == {"exact", "none", "icepop", "moe", "opsm", "guard", "rollback"}
    assert all(len(each) == 3 for each in last.values())
    assert not any(lived.pop("none")) and any(lived["icepop"]) and not all(lived.pop("icepop"))
    assert all(map(all, lived.values()))
    assert max(last["none"]) < min(last["moe"] + last["opsm"] + last["guard"] + last["rollback"])
    assert max(last["moe"] + last["opsm"]) < min(last["exact"])


def test_what_rounding_costs_and_what_replay_does_to_the_gap():
    """Each of the three seeds shows the effect on the gap. Replay makes no difference to the reward."""
    exact, none, replay = (ends(*arm, "critic/score/mean") for arm in (("stale", "exact"), FP4, FP4_REPLAYED))
    assert len(exact) == len(none) == len(replay) == 3
    assert all(a > max(b, c) for a, b, c in zip(exact, none, replay, strict=True))
    gaps = zip(ends(*FP4, "vllm_kl/k3"), ends(*FP4_REPLAYED, "vllm_kl/k3"), strict=True)
    assert all(plain > replayed for plain, replayed in gaps)


def test_a_run_that_the_guard_ended_has_no_final_reward(results, tmp_path):
    stop = {"rule": "r", "signal": "s", "value": 0.2, "limit": 0.1, "action": "stop", "reason": "past it"}
    for arm, steps in {"none": (40, 40), "guard": (25, 40), "all": (25, 12)}.items():
        for seed, last in enumerate(steps):
            folder = tmp_path / "stale" / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            rows = [{"step": 1 + step, "data": {"critic/score/mean": 0.5, "vllm_kl/k3": 0.1}} for step in range(last)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            if last < 40:
                (folder / "metrics.guard.jsonl").write_text(json.dumps(stop | {"step": last}) + "\n")
    _, _, *lines = results.table("stale", tmp_path).splitlines()
    rows = {
        cells[1].strip(" *"): [cell.strip() for cell in cells[2:6]] for cells in (line.split("|") for line in lines)
    }
    assert rows == {
        "none": ["0.50, 0.50", "0.50", "0.50", "0 of 2"],
        "guard": ["ended at 25, 0.50", "", "0.50", "0 of 1"],
        "all": ["ended at 25, ended at 12", "", "0.50", ""],
    }


def test_only_runs_that_are_done_are_kept_and_only_what_is_read(results, tmp_path):
    row = {"step": 1, "data": {"critic/score/mean": 0.123456789, "perf/mfu/actor": 0.0}}
    for arm in ("none", "tis"):
        folder = tmp_path / "made" / "stale" / arm / "seed0"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "made" / "stale" / "none" / "seed0" / "done").touch()
    assert results.keep(tmp_path / "made", tmp_path / "runs") == [tmp_path / "runs" / "stale" / "none" / "seed0"]
    kept: Mapping = json.loads((tmp_path / "runs" / "stale" / "none" / "seed0" / "metrics.jsonl").read_text())
    assert kept == {"step": 1, "data": {"critic/score/mean": 0.12346}}
