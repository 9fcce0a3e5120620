"""Names, files and folders that once broke a report, through all of its output, PNG files included."""

import io
import json
import os
import socket
import stat
import sys
import time

import pytest

from tests.unit.report.hostile import OBEYED, harmless, header, look, one_line, record
from tests.unit.report.made_runs import event, make, write
from tests.unit.report.made_trajectories import dump, line
from verl_ext.base.arguments import INTERRUPTED
from verl_ext.cli import main
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError

REWARD = make({"critic/score/mean": [0.1, 0.2, 0.3]})
NASTY = f"val-core/a{OBEYED}b/mean@1"


def log(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_control_characters_in_names_reach_neither_figure_nor_page_nor_terminal(file, out, capsys):
    rows = [{"step": step, "data": {NASTY: step / 10, "vllm_kl/k3": 1e-3}} for step in range(1, 4)]
    log(file, rows)
    log(
        file.with_suffix(".guard.jsonl"),
        [vars(event(2, action, f"why {OBEYED}")) for action in ("skip", "stop", OBEYED)],
    )
    # An abort of vl-convert would end the tests here.
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert harmless(said) and r"a\x1b]0;x\x07" in "".join(said.split()).replace("val", "")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert r"a\\x1b]0;x\\x07\\x9b31m\\ud800\\uffff\\u202e\\x00b" in page and r"why \x1b]0;x" in page
    assert sorted(each.name for each in (out / "figures").iterdir()) == ["validation.png", "vllm_kl.png"]
    assert main(["compare", str(file), str(file), "--metric", NASTY, "--pictures", "--out", str(out)]) == 0
    assert harmless(capsys.readouterr().out) and (out / "figures" / "validation.png").exists()


@pytest.mark.parametrize(
    "name", [b"caf\xe9.jsonl", OBEYED.replace("\0", "").replace("\ud800", "").encode() + b".jsonl"]
)
def test_a_file_name_that_no_page_can_hold(name, tmp_path, out, monkeypatch, capsys):
    monkeypatch.setattr("verl_ext.report.page.libraries", str)
    folder = os.path.join(os.fsencode(tmp_path), name.removesuffix(b".jsonl"))
    os.mkdir(folder)
    path = os.fsdecode(os.path.join(folder, name))
    with open(path, "w") as opened:
        opened.write(json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}}) + "\n")
    assert main(["report", path, "--out", os.path.join(str(out), os.fsdecode(name))]) == 0
    assert main(["compare", path, path, "--out", str(out)]) == 0
    assert main(["report", path + "x"]) == 2
    captured = capsys.readouterr()
    assert harmless(captured.out) and harmless(captured.err) and captured.err.count("\n") == 1
    assert harmless((out / "report.html").read_text(encoding="utf-8"))


def test_a_terminal_of_ascii_shows_other_paths_too(file, tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["report", str(file), "--out", str(tmp_path / "größe")]) == 0
    terminal.flush()
    assert b"gr??e/report.html" in terminal.buffer.getvalue()


@pytest.mark.parametrize(
    ("metrics", "steps"),
    [
        ({f"router/agreement/layer_{number}": 0.9 for number in ("²", "9" * 5000, "1", "-1", "٣")}, 9),
        ({"guard/skipped": 1e308, "vllm_kl/k3": 1e308, "critic/score/mean": -1e308, "vllm_kl/k1": 1e99}, 40),
        ({"x" * 5_000_000: 1, "val-core/" + "y" * 1_000_000: 0.5}, 2),
        ({f"val-core/{n}": 1 for n in range(300)}, 9),
    ],
    ids=["layers", "sizes", "long names", "many names"],
)  # fmt: skip
def test_metrics_that_no_run_has(metrics, steps, file, out):
    log(file, [{"step": step, "data": metrics} for step in range(1, steps + 1)])
    assert look(file, out, panels=PANELS, compared=len(metrics) < 100) == "page"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "data-figure=" in page and len(page) < 3_000_000


@pytest.mark.parametrize("step", [-(2**63), 2**63 - 1, 2**64, -(2**53), 10**400])
def test_a_step_that_cannot_be_counted_is_a_line_left_out(step, file, out):
    log(file, [{"step": 1, "data": {"vllm_kl/k3": 1}}, {"step": step, "data": {"vllm_kl/k3": 1}}])
    log(file.with_suffix(".guard.jsonl"), [vars(event(1, "skip")), vars(event(step, "skip"))])
    run = read_run(file)
    assert run.steps.tolist() == [1] and len(run.events) == 1 and len(run.notes) == 2


def test_marks_before_the_first_step_do_not_widen_the_figure(file, out):
    rows = [{"step": step, "data": {"vllm_kl/k3": 1e-3}} for step in range(1, 4)]
    log(file, rows)
    log(file.with_suffix(".guard.jsonl"), [vars(event(-(2**50), "skip", "long ago")), vars(event(2, "skip", "now"))])
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    assert (out / "figures" / "vllm_kl.png").stat().st_size < 1_000_000


@pytest.mark.parametrize("value", [-3.4028234663852886e38, 2**53, 2**63, -1e308, 1e20, 1.5])
def test_a_dumped_number_beyond_64_bits_is_shown(value, file, out):
    names = ("l_infer", "l_old", "weight", "entropy")
    rows = [line(1, "a", count=4) | {name: [value, None, -0.5, value]} for name in names]
    dump(file.parent, [row | {"key": str(number)} for number, row in enumerate(rows)])
    assert main(["report", str(file), "--out", str(out)]) == 0
    page = (out / "trajectories.html").read_text()
    assert page.count('id="trajectory-') == len(names) and "could not" not in (out / "report.html").read_text()


@pytest.mark.parametrize(
    "line", [b'{"step":21,"data":' * 280_000, b'{"step": "' * 2_000_000, b'{"step": "' * 500_000, b"x" * 40_000_000]
)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_of_many_beginnings_takes_no_longer_than_others(line, end, file):
    file.write_bytes(line + end + (b'{"step":1,"data":{"a":1}}\n' if end else b""))
    begun = time.process_time()
    if end:
        assert read_run(file).steps.tolist() == [1], "what stands behind it is read"
    else:
        with pytest.raises(ReportError, match="no complete step"):
            read_run(file)
    assert time.process_time() - begun < 10  # 150 s and more where each beginning is read to the end


def test_a_line_that_is_too_long_is_passed_over_while_it_is_written(file, monkeypatch):
    from verl_ext.report.load import Reader

    for name in ("READ_BYTES", "MOST_LINE"):
        monkeypatch.setattr(f"verl_ext.report.files.{name}", 64)
    file.write_text('{"step":1,"data":{"a":1}}\n{"step":2,"data":{"a":"')
    reader = Reader(file)
    for _ in range(5):
        with file.open("a") as more:
            more.write("x" * 100)
        assert reader.refresh().steps.tolist() == [1] and reader.refresh().notes == ()
    with file.open("a") as more:
        more.write('"}}\n{"step":3,"data":{"a":1}}\n{"step":4,"data":{"a":1}}')
    run = reader.refresh()
    assert run.steps.tolist() == [1, 3, 4] and run.notes == ("line 2 of run.jsonl could not be read and is left out",)
    assert read_run(file).steps.tolist() == [1, 3, 4]


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100 << 20])
def test_a_record_of_any_length_is_not_waited_for_in_memory(length, tmp_path):
    file = tmp_path / "events.out.tfevents.1.host"
    scalar = record(b"\x10\x01\x2a\x0a\x0a\x08\x0a\x01a\x15\x00\x00\x80\x3f")  # a = 1 in step 1
    file.write_bytes(scalar + header(length) + b"x" * 100)
    assert read_run(file).metrics["a"].values.tolist() == [1]
    if length < 2**40:  # in a file with a hole
        with file.open("r+b") as opened:
            opened.seek(len(scalar) + 12 + length + 4)
            opened.write(record(b"\x10\x02\x2a\x0a\x0a\x08\x0a\x01a\x15\x00\x00\x80\x3f"))
        run = read_run(file)
        assert run.steps.tolist() == [1, 2] and run.notes == ("1 events could not be read and are left out",)


def pipe(path):
    os.mkfifo(path)


def listen(path):
    made = socket.socket(socket.AF_UNIX)
    made.bind(os.path.relpath(path))  # such names are short


SPECIAL = {"a FIFO": pipe, "a socket": listen, "a device": lambda path: os.symlink("/dev/zero", path)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "events.out.tfevents.1.host"])
def test_what_is_no_file_is_not_read(kind, name, tmp_path, out, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkdir("run")
    SPECIAL[kind](tmp_path / "run" / name)
    assert main(["report", "run/" + name]) == 2
    assert f"run/{name}: this is {kind}, not a file" in one_line(capsys)
    assert main(["report", "run"]) == 2
    said = one_line(capsys)
    assert "no metrics in this folder" in said and (f"{name} (this is {kind}, not a file)" in said or "events" in name)
    write(REWARD, tmp_path / "run" / "run.jsonl")
    for beside in ("run.guard.jsonl", "run.trajectories.jsonl"):
        SPECIAL[kind](tmp_path / "run" / beside)
    out.mkdir()
    SPECIAL[kind](out / "report.html")
    assert main(["report", "run", "--out", str(out)]) == 0
    assert stat.S_ISREG((out / "report.html").lstat().st_mode)


def test_a_folder_that_may_not_be_read_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    closed, scandir = {str(tmp_path / "run")}, os.scandir

    def refusing(path):  # the tests may run as root, who may read everything
        if os.fspath(path) in closed:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert main(["report", str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run'}: Permission denied" in one_line(capsys)
    closed = {str(tmp_path / "run" / "inner")}
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "no metrics in this folder; not read: inner (Permission denied);" in one_line(capsys)


@pytest.mark.slow
def test_nothing_is_written_or_removed_through_a_link(file, out, tmp_path, capsys):
    others = tmp_path / "others"
    others.mkdir()
    victims = [others / name for name in ("victim", "page", "overview", "entropy.png", "reward.png")]
    for victim in victims:
        victim.write_text("another's")
    out.mkdir()
    (out / "report.tmp").symlink_to(victims[0])
    (out / "report.html").symlink_to(victims[1])
    (out / "report.png").symlink_to(victims[2])
    (out / "figures").symlink_to(others)
    for _ in range(2):  # the second one finds a report of its own, and tidies
        assert main(["report", str(file), "--pictures", "--out", str(out)]) == 2
        assert "figures: this is a link" in one_line(capsys)
        assert (out / "report.html").read_text().startswith("<!doctype html>")
    (out / "figures").unlink()
    (out / "figures").mkdir()
    for name in ("reward.png", "entropy.png"):
        (out / "figures" / name).symlink_to(others / name)
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    assert [victim.read_text() for victim in victims] == ["another's"] * len(victims)
    assert not (out / "figures" / "reward.png").is_symlink() and (out / "figures" / "entropy.png").is_symlink()
    left = {path.name for path in out.rglob("*")}
    assert left == {"report.tmp", "report.html", "report.png", "figures", "reward.png", "entropy.png"}


def test_a_page_has_the_mode_that_the_user_asks_for_and_leaves_nothing_when_it_fails(file, out, monkeypatch):
    before = os.umask(0o027)
    try:
        assert main(["report", str(file), "--out", str(out)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((out / "report.html").stat().st_mode) == 0o640
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    assert main(["report", str(file), "--out", str(out)]) == 2
    assert [path.name for path in out.iterdir()] == ["report.html"]


def test_what_fails_in_drawing_pictures_leaves_the_page(file, out, monkeypatch, capsys):
    def refuse(error):
        def png(spec, title):
            raise error

        monkeypatch.setattr("verl_ext.report.page.png", png)

    refuse(KeyboardInterrupt())  # standing for an abort
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == INTERRUPTED
    assert 'data-figure="reward"' in (out / "report.html").read_text()
    refuse(ValueError("no path\nand a stack"))
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 2
    assert "reward.png cannot be drawn (no path); the page was written" in one_line(capsys)


NO_NUMBERS = ["0", "-1", "soon", "²", str(2**63), "9" * 5000, "10000000000", "٣", "\x1b[31m1"]


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("option", ["compare --window", "report --watch"])
def test_a_number_that_nothing_can_count_is_one_line(option, number, file, capsys):
    command, name = option.split()
    with pytest.raises(SystemExit) as ended:
        main([command, *[str(file)] * (1 + (command == "compare")), name, number])
    assert ended.value.code == 2 and name in one_line(capsys)


@pytest.mark.parametrize("run", NO_NUMBERS)
def test_a_run_that_is_not_in_the_file_is_one_line(run, file, capsys):
    assert main(["report", str(file), f"--run={run}"]) == 2
    assert "there is no run " in one_line(capsys)


def test_the_longest_window_is_the_whole_run(file, capsys):
    assert main(["compare", str(file), str(file), "--window", "999999999", "--no-page"]) == 0


def test_a_name_too_long_for_what_stands_beside_it(tmp_path, out):
    file = write(REWARD, tmp_path / f"{'x' * 245}.jsonl")
    assert main(["report", str(file), "--out", str(out)]) == 0
