"""The grid with runs that only write curves: processes, failures, resuming."""

import json
import multiprocessing
import signal
import time
from contextlib import closing
from multiprocessing import forkserver

import pytest

from tests.unit.lab.standin import Arm, run_arm
from verl_ext.lab.grid import GridCell, left_to_do, run_grid

STEPS = 8


def cells(*names: str, seeds=(0, 1), steps: int = STEPS) -> list[GridCell]:
    return [GridCell(Arm(name, (f"steps={steps}",)), seed, steps) for seed in seeds for name in names]


def errors(events) -> dict[str, str]:
    """Returns the error of each run that has ended; "" for none."""
    return {str(cell): event for cell, event in events if isinstance(event, str)}


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_run_tells_its_steps_and_its_end_and_is_done(tmp_path, jobs):
    grid = cells("none", "tis")
    events = list(run_grid(grid, tmp_path, run_arm, jobs))
    for cell in grid:
        assert [event for of, event in events if of == cell] == [*range(1, STEPS + 1), ""]
        lines = (cell.folder(tmp_path) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
        done = json.loads((cell.folder(tmp_path) / "done.json").read_text())
        assert done["settings"] == cell.settings and done["seconds"] >= 0
    assert left_to_do(grid, tmp_path) == ([], {})
    assert (tmp_path / "none" / "seed1" / "errors.log").read_text() == "said by a library with 1 thread\n"


def test_runs_stand_beside_each_other(tmp_path):
    list(run_grid(cells("none", seeds=[0]), tmp_path, run_arm, 1))  # what they are forked from is there
    start = time.monotonic()
    list(run_grid(cells("slow", seeds=range(4), steps=20), tmp_path, run_arm, 4))
    assert time.monotonic() - start < 3.0  # one behind the other: 4 s of sleep alone


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    grid = cells("broken", "dies", "none")
    found = errors(run_grid(grid, tmp_path, run_arm, 2))
    assert found["none, seed 0"] == found["none, seed 1"] == ""
    assert found["broken, seed 0"] == "RuntimeError: the experts are gone"
    assert "killed by signal 9" in found["dies, seed 1"]
    assert "Traceback" in (grid[0].folder(tmp_path) / "errors.log").read_text()
    left, changed = left_to_do(grid, tmp_path)
    assert [str(cell) for cell in left] == ["broken, seed 0", "dies, seed 0", "broken, seed 1", "dies, seed 1"]
    assert changed == {}


def test_an_error_for_the_user_is_told_in_its_own_words(tmp_path):
    found = errors(run_grid(cells("cold", seeds=[0]), tmp_path, run_arm, 1))
    assert found["cold, seed 0"] == "lab.warm_up.reward=0.9 was not reached"


def test_a_grid_without_runs_ends_at_once(tmp_path):
    assert list(run_grid([], tmp_path, run_arm, 2)) == []


def test_closing_it_early_leaves_no_process_and_no_half_run_done(tmp_path):
    grid = cells("slow", seeds=range(3), steps=1000)
    with closing(run_grid(grid, tmp_path, run_arm, 2)) as events:
        next(events)
        processes = multiprocessing.active_children()
        assert len(processes) == 2
    assert not any(process.is_alive() for process in processes) and multiprocessing.active_children() == []
    assert left_to_do(grid, tmp_path)[0] == grid


def test_ctrl_c_while_a_run_starts_waits_for_the_start_and_leaves_no_process(tmp_path, monkeypatch, capfd):
    asked = forkserver.connect_to_new_process
    started = []

    def interrupted(fds):
        ends = asked(fds)  # the process is there; what it is to do was not sent yet
        if started:
            signal.raise_signal(signal.SIGINT)
        started.append(ends)
        return ends

    monkeypatch.setattr(forkserver, "connect_to_new_process", interrupted)
    grid = cells("slow", seeds=range(3), steps=1000)
    heeding = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(run_grid(grid, tmp_path, run_arm, 2))
    finally:
        assert signal.signal(signal.SIGINT, heeding) is signal.default_int_handler
    assert len(started) == 2 and multiprocessing.active_children() == []
    assert "Traceback" not in capfd.readouterr().err and left_to_do(grid, tmp_path)[0] == grid


def test_a_run_that_was_cut_short_begins_anew(tmp_path):
    (cell,) = grid = cells("none", seeds=[3])
    folder = cell.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "data": {"of/before": 77}}\n')
    (folder / "metrics.guard.jsonl").write_text("{}\n")
    (folder / "notes.md").write_text("mine")
    list(run_grid(grid, tmp_path, run_arm, 1))
    assert "of/before" not in (folder / "metrics.jsonl").read_text() and not (folder / "metrics.guard.jsonl").exists()
    assert (folder / "notes.md").read_text() == "mine"


def test_what_has_changed_runs_again_and_is_named(tmp_path):
    grid = cells("none", "tis")
    list(run_grid(grid, tmp_path, run_arm, 2))
    longer = cells("none", "tis", steps=STEPS + 1)
    left, changed = left_to_do(longer, tmp_path)
    assert left == longer and changed == {"none": ["overrides", "steps"], "tis": ["overrides", "steps"]}
    (grid[0].folder(tmp_path) / "done.json").write_text("[1")
    (grid[1].folder(tmp_path) / "done.json").write_text("[]")
    assert left_to_do(grid, tmp_path) == (grid[:2], {})


def test_another_version_of_the_plugin_is_a_change(tmp_path, monkeypatch):
    grid = cells("none", seeds=[0])
    list(run_grid(grid, tmp_path, run_arm, 1))
    monkeypatch.setattr("verl_ext.lab.grid.__version__", "0.0.0")
    assert left_to_do(grid, tmp_path) == (grid, {"none": ["version"]})
