import json
import subprocess
import sys

import pytest

from verl_ext import __version__
from verl_ext.cli import main


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "run.jsonl"
    data = {"critic/score/mean": 0.25, "guard/skipped": 1.0}
    file.write_text(json.dumps({"step": 1, "data": data}) + "\n")
    return file


def test_report_prints_the_table_and_writes_the_figure(run_file, tmp_path, capsys):
    out = tmp_path / "figures" / "run.png"
    assert main(["report", str(run_file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "critic/score/mean" in printed
    assert "0.250" in printed
    assert "updates skipped: 1 of 1" in printed
    assert str(out) in printed
    assert out.read_bytes().startswith(b"\x89PNG")


def test_report_takes_a_folder_and_writes_to_the_current_one(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run_file.parent)]) == 0
    assert (tmp_path / "report.png").exists()


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "folder"])
def test_report_fails_with_one_line_that_names_the_file(name, tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    out = tmp_path / "report.png"
    assert main(["report", str(tmp_path / name), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert name in captured.err
    assert captured.out == ""
    assert not out.exists()


def test_report_fails_with_one_line_when_the_figure_cannot_be_written(run_file, tmp_path, capsys):
    assert main(["report", str(run_file), "--out", str(run_file / "below a file.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 0
    assert "report" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"verl-ext {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["report"], ["no such command"], ["report", "run", "--", "a=b"]])
def test_wrong_usage_exits_with_two_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_importing_the_command_line_is_light():
    heavy = ("torch", "verl", "matplotlib", "rich")
    code = f"import sys, verl_ext.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
