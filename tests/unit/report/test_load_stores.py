"""Stores of many runs, W&B's and both of MLflow's: which processes are one run, and which run is read."""

import sys

import pytest

from tests.unit.report.made_files import noted, train, values
from tests.unit.report.made_stores import mlflow_database, mlflow_rows, mlflow_run, wandb_file, wandb_run
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import ReportError


@pytest.fixture(params=["wandb", "MLflow's folder", "MLflow's database"])
def store(request, tmp_path):
    """The place where a logger keeps runs, and a function that adds one."""
    if request.param == "MLflow's database":
        place, add = mlflow_database(tmp_path / "mlruns.db"), mlflow_rows
    else:
        place = tmp_path / "store"
        add = wandb_run if request.param == "wandb" else mlflow_run
        place.mkdir()
    return place, lambda rows, **who: add(place, rows, **who)


def test_a_resumed_run_is_one_and_another_start_another(store):
    place, add = store
    add(train(1, 2, 3, 4, 5, 6), started=1, run="one")
    add(train(1, value=0.25), started=2, run="other", name="other")
    add(train(3, 4, 5, value=0.5), started=3, run="two")
    add([], started=4, run="begun")
    run = read_run(place)
    assert (run.name, run.last, values(run)) == ("exp", True, {1: 1, 2: 2, 3: 3.5, 4: 4.5, 5: 5.5})
    what = "folder" if place.is_dir() else "file"
    runs = f"the {what} has 2 runs.*: 1 = proj/other, 2 = proj/exp"
    noted(run, "steps 3 to 5 .*twice", "step 6 .*left out", runs)
    other = read_run(place.with_name(f"{place.name}:1"))
    assert (other.name, other.last, values(other)) == ("other:1", False, {1: 1.25})
    add(train(1, value=0.75), started=5, run="again")
    assert [values(read_run(place, which))[1] for which in (1, 2, 3)] == [1.25, 1, 1.75]
    with pytest.raises(ReportError, match="there is no run 4: 3 runs are in it"):
        read_run(place, 4)


def test_a_store_without_a_step_is_told_and_looked_at_again(store):
    place, add = store
    add([], run="begun")
    reader = Reader(place)
    with pytest.raises(ReportError, match="has the run finished its first step"):
        reader.refresh()
    add(train(1), started=2, run="next")
    first = reader.refresh()
    assert values(first) == {1: 1} and reader.refresh() is first
    add(train(1, 2), started=3, run="last")
    assert values(reader.refresh()) == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("name", "content", "package", "said"),
    [
        ("run-abc.wandb", wandb_file([]), "wandb.proto.wandb_internal_pb2", "this is W&B's file; .* pip install wandb"),
        ("events.out.tfevents.1.host", b"", "tensorboard.compat.proto", "pip install tensorboard"),
    ],
)
def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch, name, content, package, said):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ReportError, match=said) as error:
        read_run(tmp_path)
    assert "\n" not in str(error.value)


def test_many_runs_are_not_all_listed(store):
    place, add = store
    for number in range(1, 15):
        add(train(1), started=number, run=f"r{number}", name=f"e{number}")
    (note,) = read_run(place).notes
    assert "shows another: 4 more, 5 = proj/e5," in note and note.endswith("14 = proj/e14")
