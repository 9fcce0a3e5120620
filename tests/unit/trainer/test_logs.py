"""Files of lines lose no line: resumed, cut off, on a full disk; verl's own logger writes such a file."""

import json
import resource
import subprocess
import sys

import pytest
from verl.utils import tracking

from verl_ext.trainer.logs import LineFile, keep_metrics


@pytest.mark.parametrize(("resume", "steps"), [(True, [1, 2]), (False, [2])])
def test_verls_file_logger_goes_on_in_the_file_of_a_resumed_run(monkeypatch, tmp_path, resume, steps):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "data": {}}\n')
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))
    monkeypatch.setattr(tracking, "FileLogger", tracking.FileLogger)  # restored after the test
    keep_metrics(resume=resume)
    logger = tracking.Tracking("project", "experiment", default_backend=["file"])
    logger.log({"critic/score/mean": 0.5}, step=2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == steps


def test_a_fresh_file_starts_empty_and_a_resumed_one_goes_on(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    for resume, expected in ((False, b"a\n"), (True, b"a\na\n"), (False, b"a\n")):
        file = LineFile(path, resume=resume)
        file.write(b"a\n")
        file.close()
        file.close()
        assert path.read_bytes() == expected


@pytest.mark.parametrize("rest", [b'{"step": 3', b"x" * 200_000, b""])
def test_what_a_killed_run_left_of_a_line_goes(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"1\n2\n" + rest)
    file = LineFile(path, resume=True)
    file.write(b"3\n")
    file.close()
    assert path.read_bytes() == b"1\n2\n3\n"


def test_a_file_without_a_whole_line_starts_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 100_000)
    file = LineFile(path, resume=True)
    file.write(b"1\n")
    assert path.read_bytes() == b"1\n"


def test_a_process_that_changes_its_folder_takes_no_file_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = LineFile("metrics.jsonl", resume=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file.write(b"1\n")
    file.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"1\n"
    assert not list(elsewhere.iterdir())
    assert not capsys.readouterr().out


def test_a_full_device_is_told_once_and_ends_nothing(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = LineFile(path, resume=False)
    file.write(b"1\n")
    file.write(b"2\n")
    out = capsys.readouterr().out
    assert out.count("cannot be written (No space left on device)") == 1
    file.close()
    assert "2 lines could not be written and are lost" in capsys.readouterr().out


LIMITED = """
import resource, signal, sys
from verl_ext.trainer.logs import LineFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = LineFile(sys.argv[1], resume=False)
line = b'{"step": 1, "data": {"x": 0.125}}\\n'
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for _ in range(5):
    file.write(line)
open(sys.argv[1] + ".full", "wb").write(open(sys.argv[1], "rb").read()[:100])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(line)
file.close()
"""


def test_a_line_that_does_not_fit_is_taken_back_and_written_when_there_is_room(tmp_path):
    """The limit on a file's size makes the kernel write part of a line and refuse the rest, as a full disk does."""
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=True, timeout=60)
    full = (tmp_path / "metrics.jsonl.full").read_text()
    assert [json.loads(line)["step"] for line in full.splitlines()] == [1, 1], "what is there can be read"
    assert len(path.read_text().splitlines()) == 6, "and no line is lost"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_close_that_fails_is_none_of_the_runs_business(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "x.jsonl", resume=False)
    file.write(b"{}\n")
    with monkeypatch.context() as full:
        full.setattr("os.close", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        file.close()
    file.close()
    assert (tmp_path / "x.jsonl").read_bytes() == b"{}\n"
