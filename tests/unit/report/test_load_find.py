import pytest

from tests.unit.report.made_files import train, write
from verl_ext.report.load import read_run
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


def test_a_file_called_metrics_is_named_after_its_folder(tmp_path):
    assert read_run(write(tmp_path / ".quickstart" / "metrics.jsonl", train(1))).name == "quickstart"
    assert read_run(write(tmp_path / ".quickstart" / "own.jsonl", train(1))).name == "own"
