import json
import math
from pathlib import Path

import pytest

from tests.unit.report.made_files import noted, train, write
from verl_ext.guard.state import Event
from verl_ext.report.load import Reader, read_run


def metrics(folder: Path, *steps: int) -> Path:
    return write(folder / "run.jsonl", train(*steps))


def event(step: int, rule: str = "gap", **changes) -> str:
    fields = {"signal": "vllm_kl/k3", "value": 0.5, "threshold": 0.1, "action": "skip", "reason": "above"}
    return json.dumps({"step": step, "rule": rule, **fields, **changes}) + "\n"


def guard(folder: Path, *events: str, name: str = "run") -> Path:
    file = folder / f"{name}.guard.jsonl"
    file.write_text("".join(events))
    return file


def steps(run) -> list[int]:
    return [event.step for event in run.events]


def test_the_guards_log_beside_the_metrics_is_read(tmp_path):
    file = metrics(tmp_path, 1, 2, 3)
    log = guard(tmp_path, event(2), event(2, "non_finite", value=None, threshold=None), event(3))
    guard(tmp_path, event(1), name="other")
    run = read_run(file)
    assert run.sources == (file, log)
    assert run.events[:2] == (
        Event(2, "gap", "vllm_kl/k3", 0.5, 0.1, "skip", "above"),
        Event(2, "non_finite", "vllm_kl/k3", None, None, "skip", "above"),
    )
    assert steps(run) == [2, 2, 3]
    assert run.notes == ()


def test_no_log_or_an_empty_one_are_no_events(tmp_path):
    file = metrics(tmp_path, 1)
    assert read_run(file).events == ()
    guard(tmp_path)
    assert read_run(file).events == ()


@pytest.mark.parametrize("broken", ["{oops}\n", '{"rule": "gap"}\n', event(1, value="x"), event(1, reason=5), "[]\n"])
def test_a_broken_line_is_left_out_and_told_but_not_a_cut_last_one(tmp_path, broken):
    guard(tmp_path, event(1), broken, event(2), event(3)[:-9])
    run = read_run(metrics(tmp_path, 1, 2))
    assert steps(run) == [1, 2]
    noted(run, "line 2 of run.guard.jsonl")


RESUMED, TWO_RUNS = (*range(1, 9), *range(5, 9)), (1, 2, 3, 4, 1, 2, 3)


@pytest.mark.parametrize(
    ("logged", "decided", "which", "left"),
    [
        (RESUMED, (2, 5, 6, 8, 5, 7), None, [2, 5, 5, 7]),
        (RESUMED[:-2], (2, 7), None, [2]),  # nothing has been logged for step 7 since
        (TWO_RUNS, (2, 4, 2, 3), None, [2, 3]),  # each run has its part
        (TWO_RUNS, (2, 4, 2, 3), 1, [2, 4]),
        (TWO_RUNS, (2, 3), None, [2, 3]),  # a log that does not tell the runs apart is the last run's
        (TWO_RUNS, (2, 3), 1, []),
    ],
)
def test_decisions_of_another_run_or_of_abandoned_steps_are_left_out(tmp_path, logged, decided, which, left):
    guard(tmp_path, *map(event, decided))
    assert steps(read_run(metrics(tmp_path, *logged), which=which)) == left


def test_decisions_on_rows_that_a_resumed_run_overwrote_are_left_out(tmp_path):
    """The resumed run decided nothing in these steps, so that only the values show which rows were judged."""
    rows = [(step, 0.9 if step == 7 else math.nan if step == 8 else 0.01) for step in range(1, 9)]
    rows += [(step, 0.01) for step in range(5, 13)]
    file = write(tmp_path / "run.jsonl", [(step, {"vllm_kl/k3": k3}) for step, k3 in rows])
    named = event(6, "diagnosis", signal="", value=None, action="warn")
    guard(tmp_path, event(2, value=0.01), named, event(7, value=0.9), event(12, value=0.01))
    assert steps(read_run(file)) == [2, 12]
    guard(tmp_path, named, event(8, value=None, action="stop"), event(9, value=0.01))
    assert steps(read_run(file)) == [9]
    guard(tmp_path, event(6, value=0.01), named)  # as the valid row has it
    assert steps(read_run(file)) == [6, 6]


def test_decisions_of_later_steps_than_the_metrics_are_another_runs(tmp_path):
    file = metrics(tmp_path, 1, 2, 3)
    guard(tmp_path, event(2), event(4), event(5))  # in step 4 the guard may have stopped the run
    run = read_run(file)
    assert steps(run) == [2, 4]
    noted(run, "^1 decisions? of the guard")
    guard(tmp_path, event(5), event(9))
    run = read_run(file)
    assert steps(run) == []
    noted(run, "^2 decisions? of the guard")


def test_beside_other_files_the_only_log_is_read(tmp_path):
    file = tmp_path / "export.csv"
    file.write_text("Step,a\n1,1\n2,2\n")
    guard(tmp_path, event(2), name="one")
    assert steps(read_run(file)) == [2]
    guard(tmp_path, event(1), name="two")
    assert read_run(file).events == ()


def test_refresh_reads_on_and_starts_over(tmp_path):
    reader = Reader(metrics(tmp_path, 1, 2, 3))
    assert reader.refresh().events == ()
    log = guard(tmp_path, event(1), event(2)[:-4])
    first = reader.refresh()
    assert steps(first) == [1]
    assert reader.refresh() is first
    with open(log, "a") as opened:
        opened.write(event(2)[-4:] + event(3).rstrip())  # whole but for its newline
    assert steps(reader.refresh()) == [1, 2, 3]
    with open(log, "a") as opened:
        opened.write("\n" + event(3))
    assert steps(reader.refresh()) == [1, 2, 3, 3]
    guard(tmp_path, event(2))
    assert steps(reader.refresh()) == [2]
    log.unlink()
    assert reader.refresh().events == ()
