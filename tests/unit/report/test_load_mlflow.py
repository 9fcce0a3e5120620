import math
import os
import sqlite3

import pytest

from tests.unit.report.made_files import noted, values
from tests.unit.report.made_stores import mlflow_database, mlflow_rows, mlflow_run
from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError


def train(*steps: int, value: float = 0.0, **more):
    return [(step, {"a": step + value, "critic/score/mean": -step, **more}) for step in steps]


@pytest.fixture(params=["folder", "file"])
def store(request, tmp_path):
    """The place where MLflow keeps runs, and a function that adds one."""
    if request.param == "folder":
        place = tmp_path / "mlruns"
        return place, lambda rows, **who: mlflow_run(place, rows, **who)
    place = mlflow_database(tmp_path / "mlruns.db")
    return place, lambda rows, **who: mlflow_rows(place, rows, **who)


def test_metrics_by_name_and_step(store, tmp_path):
    place, add = store
    odd = {"none": math.nan, "inf": math.inf, "val-core/x/acc/mean_at_1": 0.5, "look_at_me": 1, "system/cpu": 3}
    add(train(1, 2, **odd))
    for named in (place, tmp_path):
        run = read_run(named)
        assert (run.name, run.notes, run.steps.tolist()) == ("exp", (), [1, 2])
        assert values(run, "critic/score/mean") == {1: -1, 2: -2}
        assert values(run, "inf") == {1: math.inf, 2: math.inf} and math.isnan(values(run, "none")[1])
        assert values(run, "val-core/x/acc/mean@1") == {1: 0.5, 2: 0.5}  # as verl calls it
        assert set(run.metrics) == {"a", "critic/score/mean", "none", "inf", "val-core/x/acc/mean@1", "look_at_me"}


def test_one_run_or_one_experiment_of_the_folder(tmp_path):
    one = mlflow_run(tmp_path / "mlruns", train(1), run="one")
    mlflow_run(tmp_path / "mlruns", train(1, 2), run="two", name="'it''s'", started=2)
    assert values(read_run(one)) == {1: 1}
    run = read_run(one.parent)
    assert (run.name, values(run)) == ("it's", {1: 1, 2: 2})
    assert [file.parent.name for file in run.sources] == ["two"]


def test_a_deleted_run_is_none(tmp_path):
    mlflow_run(tmp_path, train(1), run="one")
    mlflow_run(tmp_path, train(2), run="two", started=2, lifecycle_stage="deleted")
    assert values(read_run(tmp_path)) == {1: 1}


def test_lines_that_cannot_be_read_and_a_cut_last_one(tmp_path):
    run = mlflow_run(tmp_path, train(1, 2))
    with (run / "metrics" / "a").open("ab") as file:
        file.write(
            b"7 3.5 3 data 0xabc\n\nnonsense\n7 x 4\n7 4 1e3\n7 4 99999999999999999999\n" + b"9" * 9000 + b"\n7 4 1"
        )
    found = read_run(tmp_path)
    assert values(found) == {1: 1, 2: 2, 3: 3.5}
    noted(found, "abc .*: 8")


def test_links_out_of_the_folder_are_not_followed_and_only_files_read(tmp_path):
    run = mlflow_run(tmp_path / "mlruns", train(1))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("1 2 3\n")
    (run / "metrics" / "linked").symlink_to(tmp_path / "outside")
    (run / "metrics" / "loop").symlink_to(run)
    os.mkfifo(run / "metrics" / "pipe")
    assert set(read_run(tmp_path / "mlruns").metrics) == {"a", "critic/score/mean"}


@pytest.fixture
def database(tmp_path):
    file = mlflow_database(tmp_path / "mlruns.db")
    mlflow_rows(file, train(*range(1, 40)))
    return file


def change(file, script: str) -> None:
    with sqlite3.connect(file) as changed:
        changed.executescript(script)
    changed.close()


@pytest.mark.parametrize("other", [b"", b"no database", b"SQLite format 3\0"])
def test_what_is_no_database_of_mlflow(tmp_path, other):
    file = tmp_path / "some.sqlite"
    file.write_bytes(other)
    with pytest.raises(ReportError, match=r"not a SQLite database|cannot be read as MLflow"):
        read_run(file)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COMPUTED = {
    "a view": f"ALTER TABLE metrics RENAME TO hidden; CREATE VIEW metrics AS {ENDLESS} "
    "SELECT 'abc' AS run_uuid, i AS step, 'a' AS \"key\", 1.0 AS value, 0 AS is_nan FROM n;",
    "a column": "DROP TABLE metrics; CREATE TABLE metrics (key TEXT, run_uuid TEXT, step INT, is_nan INT, "
    "value AS (length(hex(zeroblob(9))))); INSERT INTO metrics VALUES ('a', 'abc', 1, 0)",
}


@pytest.mark.parametrize("script", COMPUTED.values(), ids=COMPUTED)
def test_what_a_foreign_database_defines_is_not_run(database, script):
    change(database, script)
    with pytest.raises(ReportError, match="one of its tables is computed"):
        read_run(database)


def test_rows_of_odd_types(database):
    change(
        database,
        "CREATE TABLE any (key, value, timestamp, run_uuid, step, is_nan); INSERT INTO any SELECT * FROM metrics;"
        "DROP TABLE metrics; ALTER TABLE any RENAME TO metrics;"
        "INSERT INTO metrics VALUES ('a', 'text', 0, 'abc', 50, 0), ('a', x'00ff', 0, 'abc', 51, 0),"
        "('b', 1.5, 0, 'abc', 'x', 0), (x'00', 1.5, 0, 'abc', NULL, 0), (CAST(x'ff' AS TEXT), 2.5, 0, 'abc', 53, 0)",
    )
    run = read_run(database)
    assert values(run)[39] == 39 and 50 not in values(run)
    assert values(run, "\\udcff") == {53: 2.5}
    noted(run, "a step.*: 2")


def test_a_run_whose_name_is_not_utf_8(database):
    change(database, "UPDATE runs SET run_uuid = CAST(x'ff' AS TEXT), name = CAST(x'fe' AS TEXT)")
    change(database, "UPDATE metrics SET run_uuid = CAST(x'ff' AS TEXT)")
    run = read_run(database)
    assert run.name == "\\udcfe" and values(run)[39] == 39


def test_nothing_is_written_beside_a_database(database):
    before = database.read_bytes()
    read_run(database)
    assert database.read_bytes() == before and [file.name for file in database.parent.iterdir()] == ["mlruns.db"]


def test_a_guards_log_beside_a_database_may_be_anothers(database):
    beside = database.with_name("some.guard.jsonl")
    beside.write_text('{"step": 3, "rule": "r", "signal": "a", "action": "skip", "value": 1, "reason": "x"}\n')
    assert read_run(database).events == () and read_run(database).sources == (database,)
