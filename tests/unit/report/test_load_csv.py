import math
from pathlib import Path

import pytest

from tests.unit.report.made_files import noted, values
from verl_ext.report.load import Reader, read_run, read_runs
from verl_ext.report.run import ReportError


def write(tmp_path: Path, *lines: str, name: str = "export.csv", end: str = "\n") -> Path:
    file = tmp_path / name
    file.write_text("\n".join(lines) + end)
    return file


CHART = '"Step","lively-1 - critic/score/mean","lively-1 - critic/score/mean__MIN","lively-1 - critic/score/mean__MAX"'
TWO = CHART + ',"my - exp - critic/score/mean","my - exp - critic/score/mean__MIN","my - exp - critic/score/mean__MAX"'


@pytest.mark.parametrize("step", ["Step", "_step", "trainer/global_step", "training/global_step", "global_step"])
def test_a_history_has_one_column_a_metric(tmp_path, step):
    file = write(
        tmp_path, f'"_runtime",{step},"a","b/c"', "1.5,1,0.5,", "2.5,2.0,,3", "4,4,1e-3,-4", name="history.csv"
    )
    run = read_run(file)
    assert (run.name, run.sources, run.notes) == ("history", (file,), ())
    assert run.steps.tolist() == [1, 2, 4]
    assert values(run, "a") == {1: 0.5, 4: 1e-3}
    assert values(run, "b/c") == {2: 3, 4: -4}
    assert step not in run.metrics


def test_a_column_of_text_names_the_runs_if_steps_repeat(tmp_path):
    rows = ["step,note,method,a", "2,x,ppo,0.2", "1,y,ppo,0.1", "1,x,grpo,0.3", "2,y,grpo,0.4", "3,z,grpo,0.5"]
    file = write(tmp_path, *rows)
    with pytest.raises(ReportError, match=r"2 runs in this file: 1 = ppo, 2 = grpo"):
        read_run(file)
    run = read_run(file, which=2)
    assert run.name == "grpo" and values(run, "a") == {1: 0.3, 2: 0.4, 3: 0.5}
    worker = write(tmp_path, rows[0].replace("method", "worker"), *rows[1:], name="worker.csv")
    assert values(read_run(worker), "a")[3] == 0.5, "only a column of a telling name is looked into"


@pytest.mark.parametrize(
    ("header", "rows", "found"),
    [
        # A column that does not name runs: the second has no first step, as it was resumed; a step repeats within a
        # name; no step repeats; numbers are a metric.
        ("step,run,a", "1,first,0.1 2,first,0.2 2,second,0.3 3,second,0.4", {1: 0.1, 2: 0.3, 3: 0.4}),
        ("step,run,a", "1,a,0.1 1,a,0.2 2,b,0.3 3,b,0.4", {1: 0.2, 2: 0.3, 3: 0.4}),
        ("step,run,a", "1,a,0.1 2,b,0.3 3,a,0.4", {1: 0.1, 2: 0.3, 3: 0.4}),
        ("step,run,a", "1,7,0.1 1,8,0.2 2,7,0.3 3,8,0.4", {1: 0.2, 2: 0.3, 3: 0.4}),
        ("training/global_step,_step,a", "7,1,0.5", {7: 0.5}),  # W&B's own step counts calls of its logger
        (
            "Step,a",
            '1,NaN 2,Infinity 3,-Infinity 4,true 5,False 6,text 7,"[1,2]" 8, 9,2',
            {1: math.nan, 2: math.inf, 3: -math.inf, 4: 1, 5: 0, 9: 2},
        ),
        ("Step,b,a", "3,,3 0,,0 2,,2 2,5, 2,,9 1,,1", {0: 0, 1: 1, 2: 9, 3: 3}),  # merged, and put in order
    ],
)
def test_the_cells_of_a_history(tmp_path, header, rows, found):
    run = read_run(write(tmp_path, header, *rows.split(" ")))
    assert values(run, "a") == pytest.approx(found, nan_ok=True)
    assert run.steps.tolist() == list(found) and run.notes == ()


def test_a_row_without_a_step_and_a_short_one_are_told_but_not_a_cut_last_one(tmp_path):
    run = read_run(write(tmp_path, "Step,a,b", "1,1,1", ",2,2", "3,3", "x,1,1", "4,4,4", "5,5", end=""))
    assert run.steps.tolist() == [1, 4]
    noted(run, "cut: 3 .*row 3")


def test_a_charts_export_has_the_runs_name_in_its_columns(tmp_path):
    run = read_run(write(tmp_path, CHART, '"1","0.5","0.4","0.6"', '"2","0.7","0.7","0.7"'))
    assert run.name == "lively-1"
    assert list(run.metrics) == ["critic/score/mean"]
    assert values(run, "critic/score/mean") == {1: 0.5, 2: 0.7}


def test_a_charts_export_of_several_runs_wants_a_choice(tmp_path):
    file = write(tmp_path, TWO, "1,0.5,0.5,0.5,,,", "2,,,,0.7,0.7,0.7", name="two.csv")
    with pytest.raises(
        ReportError,
        match=r"two\.csv: 2 runs in this file: 1 = lively-1, 2 = my - exp; .*--run 2, FILE:my - exp",
    ):
        read_run(file)
    one, two = read_run(file, which=1), read_run(file, which=2)
    assert (one.name, values(one, "critic/score/mean")) == ("lively-1", {1: 0.5})
    assert (two.name, values(two, "critic/score/mean")) == ("my - exp", {2: 0.7})
    with pytest.raises(ReportError, match="there is no run 3: 2 runs are in it"):
        read_run(file, which=3)
    assert read_run(file, which="my - exp").name == read_run(Path(f"{file}:my - exp")).name == two.name
    with pytest.raises(ReportError, match="there is no run of the name lively; similar: lively-1"):
        read_run(file, which="lively")


def test_of_a_file_without_a_last_run_all_are_read(tmp_path):
    chart = write(tmp_path, TWO, "1,0.5,0.5,0.5,,,", "2,,,,0.7,0.7,0.7", name="two.csv")
    assert [run.name for run in read_runs(chart)] == ["lively-1", "my - exp"]
    history = write(tmp_path, "step,reward", "1,0.5", "2,0.7")
    assert [run.name for run in read_runs(history)] == ["export"]
    with pytest.raises(ReportError, match="this is W&B's table of runs"):
        read_runs(write(tmp_path, "Name,State", "a,finished", name="runs.csv"))


def test_a_chart_over_another_axis_than_the_step(tmp_path):
    run = read_run(write(tmp_path, "Relative Time (Process),r - _step,r - _step__MIN,r - a,r - a__MIN", "0.5,3,3,1,1"))
    assert values(run, "a") == {3: 1}
    assert list(run.metrics) == ["a"]
    with pytest.raises(ReportError, match="export the chart with Step"):
        read_run(write(tmp_path, "Relative Time (Process),r - a,r - a__MIN", "0.5,1,1"))


def test_metrics_that_only_look_like_a_charts(tmp_path):
    run = read_run(write(tmp_path, "Step,a - b,c__MIN,c", "1,2,3,4"))
    assert sorted(run.metrics) == ["a - b", "c", "c__MIN"]


def test_which_counts_the_only_run_of_a_history(tmp_path):
    file = write(tmp_path, "Step,a", "1,1")
    assert values(read_run(file, which=1), "a") == {1: 1}
    with pytest.raises(ReportError, match="no run 2: 1 run is in it"):
        read_run(file, which=2)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["time,a", "1,1"], "no column for the step; one of step"),
        ([""], "no column for the step"),
        (["Step,a"], "no row with a step and a number"),
        (["Step,a", "1,text"], "no row with a step and a number"),
        (["Name,State,_step,a", "r,finished,5,1"], "table of runs"),
    ],
)
def test_what_is_no_runs_export_is_refused(tmp_path, lines, says):
    with pytest.raises(ReportError, match=rf"export\.csv: {says}|export\.csv: .*{says}") as error:
        read_run(write(tmp_path, *lines))
    assert "\n" not in str(error.value)


def test_a_folder_may_hold_an_export_among_other_csv_files(tmp_path):
    write(tmp_path, "name,age", "x,1", name="people.csv")
    export = write(tmp_path, "\ufeffStep,a", "1,1")
    assert read_run(tmp_path).sources == (export,)
    write(tmp_path, "_step,a", "1,1", name="second.csv")
    with pytest.raises(ReportError, match=r"name one of export\.csv, second\.csv"):
        read_run(tmp_path)


def test_refresh_reads_another_export(tmp_path):
    reader = Reader(write(tmp_path, "Step,a", "1,1"))
    first = reader.refresh()
    assert reader.refresh() is first
    write(tmp_path, "Step,b", "1,1", "2,2")
    assert values(reader.refresh(), "b") == {1: 1, 2: 2}
