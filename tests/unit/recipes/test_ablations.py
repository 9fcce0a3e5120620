"""The tables of docs/lab.md are those of the results that are kept."""

import json
import subprocess
import sys

import pytest

from recipes.ablations import results, run
from tests import ROOT
from tests.unit.lab.made_variants import summary, variant
from verl_ext.lab.summary import Variant
from verl_ext.lab.table import Experiment, write_results

ENDED = {
    0: summary(0.9, warned=3),
    1: summary(None, last=0.6, stopped=38, warned=3),
    2: summary(None, stopped=12, warned=3),
    3: summary(None, last=0.2, stopped=90, collapsed=80, warned=3, warning=50),
}


def columns(table: str) -> list[dict[str, str]]:
    """A row each, by the titles."""
    titles, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def made(*variants: Variant) -> dict:
    return json.loads(json.dumps(Experiment(variants).results({"steps": 300, "seeds": [0]})))


def test_the_tables_of_results_are_those_of_the_files_beside():
    page = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    assert results.with_tables(page) == page
    kept = json.loads((ROOT / "docs" / "lab" / "ablations.json").read_text(encoding="utf-8"))
    expected = {
        ("forecast", "all"),
        ("lab", "stale"),
        ("lab", "quantized"),
        ("lab", "kernels"),
        ("lab", "candidates"),
        ("lab", "means"),
        ("boundary", "stale"),
        ("along", "answer"),
        ("claims", "all"),
        *(("start", grid["family"]) for grid in kept if grid.get("start")),
        *(("ablations", grid["family"]) for grid in kept if grid["family"] not in ("boundary", "depth", "top_p")),
    }
    assert {mark.groups() for mark in results.MARKS.finditer(page)} == expected


def test_keep_adds_variants_and_leaves_those_that_are_kept(tmp_path):
    def write(folder, *variants, seeds=(0,)):
        about = {"regime": "stale", "steps": 300, "seeds": list(seeds), "complete": True}
        (tmp_path / folder).mkdir(exist_ok=True)
        return write_results(Experiment(variants).results(about), tmp_path / folder).parent

    kept = tmp_path / "kept.json"
    results.keep(write("first", variant("exact", [0.9]), variant("none", [0.2])), kept)
    first = json.loads(kept.read_text())["variants"]
    results.keep(write("second", variant("exact", [0.8]), variant("none", [0.1]), variant("ipo", [0.5])), kept)
    found = {each["name"]: each for each in json.loads(kept.read_text())["variants"]}
    assert list(found) == ["exact", "ipo", "none"]
    assert [found["exact"], found["none"]] == first
    assert found["ipo"]["final_against_none"]["mean"] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="'seeds': "):
        results.keep(write("third", variant("exact", [0.9, 0.9]), seeds=(0, 1)), kept)


def test_a_table_has_what_the_guard_ended_early_in_a_column_of_its_own():
    all_ended = Variant("skip", (), {0: summary(None, stopped=50)})
    exact, none, guard, skip = columns(
        results.variants(
            made(variant("exact", [0.9] * 4), variant("none", [0.2] * 4), Variant("guard", (), ENDED), all_ended)
        )
    )
    early = "ended early by the guard"
    assert (none["collapsed"], none[early], exact[early]) == ("0 of 4", "", "")
    assert guard["collapsed"] == "1 of 2", "of one it lived, of two it is not known"
    assert guard[early] == "3 of 4, steps 12 to 90, reward 0.40 then (of 2)"
    assert skip["collapsed"] == "" and skip[early] == "1 of 1, step 50, no reward then"
    for row in (guard, skip):
        assert row["final reward"] == row["against none"] == ""


def test_what_the_guard_ended_is_none_of_the_others_that_lived(tmp_path, monkeypatch):
    exact = variant("exact", [0.9] * 2)
    for name in ("stale", "quantized"):
        (tmp_path / f"{name}.json").write_text(json.dumps(made(exact, Variant("guard", (), ENDED))))
    monkeypatch.setattr(results, "KEPT", tmp_path)
    row = columns(results.forecasts())[0]
    assert (row["collapsed"], row["others that lived"], row["of them warned"]) == ("1", "1", "1")
    assert row["ended by the guard"] == "2", "the one that had collapsed is a collapse"
    assert row["exact: warnings in steps"] == "0 in 600"


def test_an_ablation_says_what_the_guard_ended():
    kept = run.kept(run.ABLATIONS[0], made(variant("none", [0.2] * 4), Variant("guard", (), ENDED)))
    (row,) = columns(results.ablations([json.loads(json.dumps(kept))]))
    assert row["guard"] == "3 of 4 ended early, 1 of 4 collapsed" and row["none"] == "0.20"


def test_the_candidates_run(tmp_path):
    """In a process of its own, because they change the lab's learner."""
    (each,) = (each for each in run.ABLATIONS if each.family == "candidates")
    given = ["--steps", "2", "--seeds", "0", "--jobs", "1", "--no-page", "--out", str(tmp_path)]
    small = ("lab.model.hidden=16", "lab.model.expert_hidden=8", "lab.task.digits=4", "data.max_response_length=6")
    command = [sys.executable, "-m", "verl_ext.cli", *run.command(each)[1:], *given, *small, "lab.warm_up.reward=0.15"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in ("ess_ones", "ess_seq", "drpo", "opsm"):
        lines = (tmp_path / name / "seed0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = json.loads(lines[-1])["data"]
        assert ("actor/ess_share" in metrics) == name.startswith("ess")
        assert 0 < metrics.get("actor/ess_share", 1) <= 1 and metrics["actor/grad_norm"] > 0


def test_a_claim_has_the_figures_of_its_runs():
    (grid,) = (
        each for each in results.kept("ablations") if each["family"] == "truncated" and "known" in each["changed"]
    )
    (mis,) = (each for each in grid["variants"] if each["name"] == "mis")
    mean = sum(mis["final"].values()) / len(mis["final"])
    assert results.figure(f"truncated/{grid['changed']}/mis/final") == f"{mean:.2f}"
    stale = {each["name"]: each["runs"] for each in results.kept("stale")["variants"]}
    apart = [run["final"] - stale["tis"][seed]["final"] for seed, run in stale["mis"].items()]
    assert results.figure("stale/mis/over tis").startswith(f"{sum(apart) / len(apart):+.2f} ±")
    fallen = sum(run["collapsed"] is not None for run in stale["none"].values())
    assert results.figure("stale/none/collapsed") == f"{fallen} of {len(stale['none'])}"
    with pytest.raises((KeyError, StopIteration, ValueError)):
        results.figure("stale/nothing/final")


@pytest.mark.parametrize(
    ("points", "at"),
    [
        ([(1e-4, 0.0), (1e-2, 0.2)], 1e-3),  # halfway, in log k3
        ([(1e-2, 0.2), (1e-4, 0.0)], 1e-3),
        ([(1e-4, 0.05), (1e-3, 0.09)], None),
        ([(1e-4, 0.3), (1e-3, 0.4)], 1e-4),
        ([(1e-4, 0.0), (1e-3, -0.1), (1e-2, 0.3)], 1e-2 ** (1 / 2) * 1e-3 ** (1 / 2)),
    ],
)
def test_the_boundary_is_the_first_k3_at_which_the_reward_is_lost(points, at):
    assert results.crossing(points) == (None if at is None else pytest.approx(at))


def test_a_boundary_is_a_median_over_the_seeds_that_reach_it():
    def grid(changed, lost):
        by_lag = {"exact": (0.9, 0.9), "lag_4": (0.9, 0.9), "lag_32": tuple(0.9 - each for each in lost)}
        k3 = {"exact": 0.0, "lag_4": 1e-4, "lag_32": 1e-2}
        made = [
            {"name": name, "final": dict(zip("ab", finals, strict=True)), "k3": dict.fromkeys("ab", k3[name])}
            for name, finals in by_lag.items()
        ]
        return {"changed": changed, "variants": made}

    table = results.boundaries([grid("as it is", (0.2, 0.2)), grid("one", (0.2, 0.05)), grid("none", (0.0, 0.0))])
    first, one, none = columns(table)
    assert first["k3 at which 0.1 is lost"] == "1.0e-03 (1.0e-03 to 1.0e-03)" and first["lag_32"] == "1.0e-02: +0.20"
    assert (one["seeds that lose it"], none["seeds that lose it"]) == ("1 of 2", "0 of 2")
    assert none["k3 at which 0.1 is lost"] == ""
