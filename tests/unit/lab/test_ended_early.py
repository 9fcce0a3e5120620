"""A run of the lab that the guard really ends, from its files to the table, the JSON and the page."""

import json

import pytest

from tests.unit.lab.test_training import SMALL
from tests.unit.lab.test_training import composed_quickly as composed_quickly
from verl_ext.cli import main
from verl_ext.lab import arms
from verl_ext.lab.grid import cells_of

STEPS, REFUSED = 30, 22
STOPPING = (*SMALL, "stability.batch_skip.threshold=1e-7", f"stability.guard.stop_after={REFUSED}")


def test_what_the_guard_ended_is_neither_survivor_nor_compared(tmp_path, capsys):
    grid = arms.arms_of("stale", ["none"], {}, STOPPING, steps=STEPS)
    told = {}
    for cell in cells_of(grid, [0, 1]):  # in this process: the command then finds every run done
        arms.run_arm(cell.arm, cell.seed, cell.begin(tmp_path), told.setdefault(str(cell), []).append)
        cell.mark_done(tmp_path, 1.0)
    assert len(list((tmp_path / arms.WARM_UPS).iterdir())) == 2  # one for each seed
    words = ["lab", "stale", "--variants", "none", "--steps", str(STEPS), "--seeds", "2", "--out", str(tmp_path)]
    assert main([*words, *STOPPING]) == 0
    captured = capsys.readouterr()
    assert "4 of 4 runs are done already" in captured.err

    found = json.loads((tmp_path / "results.json").read_text())
    exact, none = found["variants"]
    assert (exact["name"], none["name"]) == ("exact", "none")
    steps, rewards = {}, []
    for seed in ("0", "1"):  # by the raw files
        folder = tmp_path / "none" / f"seed{seed}"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (folder / "metrics.guard.jsonl").read_text().splitlines()]
        assert events[-1]["action"] == "stop" and rows[-1]["data"]["guard/skips"] == REFUSED
        assert [row["step"] for row in rows] == told[f"none, seed {seed}"]
        assert "the guard stopped the run" in (folder / "console.log").read_text()
        steps[seed] = rows[-1]["step"]
        rewards.append(sum(row["data"]["critic/score/mean"] for row in rows[-20:]) / 20)
        assert 20 <= steps[seed] < STEPS
        run = none["runs"][seed]
        assert (run["stopped"], run["final"], run["collapsed"]) == (steps[seed], None, None)
        assert run["last"] == pytest.approx(rewards[-1])
    early = none["ended_early"]
    assert (early["share"], early["of"], early["at"]) == (1.0, 2, steps)
    assert early["reward_then"]["mean"] == pytest.approx(sum(rewards) / 2)
    assert none["collapsed"] == {"share": None, "of": 0, "at": {}}
    assert none["means"]["final"] is none["final_against_exact"] is exact["final_against_none"] is None
    assert exact["ended_early"]["at"] == {} and exact["collapsed"]["of"] == 2

    page = (tmp_path / "report.html").read_text()
    for text in (" ".join(captured.out.split()), page):
        assert (
            "The guard stopped runs early: none in 2 of 2 (step" in text and "No run collapsed among the runs" in text
        )
        assert "2/2 @" in text and "0/2 @" not in text and "The gap costs" not in text
