"""Which run is read: a folder stands for the only run in it, FILE:N for the Nth run of a file."""

import pytest

from tests.unit.report.made_files import train, write
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import ReportError


def test_a_folder_stands_for_the_only_run_in_it(tmp_path):
    with pytest.raises(ReportError, match=r"no metrics in this folder; trainer\.logger=\[console,file\]"):
        read_run(tmp_path)
    one = write(tmp_path / "project" / "deep" / "one.jsonl", train(1))
    (tmp_path / "project" / "deep" / "one.guard.jsonl").write_text("")
    for ending in (".trajectories.jsonl", ".trajectories.1.jsonl"):
        write(tmp_path / "project" / "deep" / f"one{ending}", train(1))
    (tmp_path / "project" / "rollouts").mkdir()
    (tmp_path / "project" / "rollouts" / "1.jsonl").write_text('{"input": "x", "step": 1}\n')  # rollout_data_dir
    write(tmp_path / "project" / "global_step_5" / "x.jsonl", train(1))
    write(tmp_path / ".hidden" / "x.jsonl", train(1))
    assert read_run(tmp_path).sources[0] == one
    write(tmp_path / "project" / "two.jsonl", train(1))
    with pytest.raises(ReportError, match=r"name one of project/two\.jsonl, project/deep/one\.jsonl"):
        read_run(tmp_path)
    here = write(tmp_path / "here.jsonl", train(2))  # what lies in the folder itself goes before
    assert read_run(tmp_path).sources[0] == here
    with pytest.raises(ReportError, match="nothing: no such file or folder"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize("ending", ["guard", "trajectories", "trajectories.1"])
def test_a_log_beside_the_metrics_is_not_taken_for_them(tmp_path, ending):
    with pytest.raises(ReportError, match="name the metrics file next to it"):
        read_run(write(tmp_path / f"run.{ending}.jsonl", train(1)))


def test_many_candidates_are_not_all_listed(tmp_path):
    for number in range(30):
        write(tmp_path / f"run{number:02d}.jsonl", train(1))
    with pytest.raises(ReportError, match=r"run09\.jsonl and 20 more$"):
        read_run(tmp_path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "run.jsonl", [*train(1, 2, 3), *train(1, 2), *train(1)])


def numbered(file, number):
    return file.with_name(f"{file.name}:{number}")


def test_a_number_behind_the_path_is_the_run_of_the_file(file):
    for number, last in ((1, 3), (2, 2), (3, 1)):
        run = read_run(numbered(file, number))
        assert (run.steps[-1], run.name, run.sources) == (last, f"run:{number}", (file,))
        assert run.last == (number == 3)
        assert run.steps.tolist() == read_run(file, which=number).steps.tolist()
    assert read_run(file).name == "run" and read_run(file).last
    assert read_run(file.parent.with_name(f"{file.parent.name}:2")).name == "run:2"  # the only file in a folder


def test_the_only_run_of_a_file_keeps_its_name(tmp_path):
    assert read_run(numbered(write(tmp_path / "one.jsonl", train(1)), 1)).name == "one"


def test_a_file_of_that_very_name_goes_before(file):
    own = write(numbered(file, 1).with_suffix(".jsonl:2"), train(1, 2, 3, 4))
    assert own.name == "run.jsonl:2" and read_run(own).steps[-1] == 4


@pytest.mark.parametrize("number", [0, 4])
def test_a_number_of_no_run_is_told(file, number):
    with pytest.raises(ReportError, match=rf"run\.jsonl: there is no run {number}: 3 runs are in it"):
        read_run(numbered(file, number))


def test_what_names_no_run_is_a_missing_file(file):
    with pytest.raises(ReportError, match=r"run\.jsonl:: no such file or folder"):
        read_run(numbered(file, ""))
    for name in ("x", "²", "-1"):
        with pytest.raises(ReportError, match=rf"run\.jsonl: there is no run of the name {name}"):
            read_run(numbered(file, name))
    with pytest.raises(ReportError, match=r"other\.jsonl:1: no such file or folder"):
        read_run(file.with_name("other.jsonl:1"))


def test_two_numbers_must_agree(file):
    assert read_run(numbered(file, 2), which=2).steps[-1] == 2
    with pytest.raises(ReportError, match=r"run\.jsonl:2: --run 1 is given too"):
        read_run(numbered(file, 2), which=1)


def test_a_run_of_a_file_that_is_still_to_come(tmp_path):
    reader = Reader(tmp_path / "run.jsonl:2")
    with pytest.raises(ReportError, match="no such file"):
        reader.refresh()
    file = write(tmp_path / "run.jsonl", train(1, 2))
    with pytest.raises(ReportError, match="there is no run 2"):
        reader.refresh()
    write(file, [*train(1, 2), *train(1)])
    assert reader.refresh().steps.tolist() == [1]
