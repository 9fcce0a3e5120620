"""`verl-ext report` and `verl-ext compare`, as a user types them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.examples import slow_cases
from tests.support.signals import heeds_ctrl_c
from tests.unit.report.hostile import one_line
from tests.unit.report.made_runs import full, make, write
from tests.unit.report.made_trajectories import dump, line
from verl_ext.base import errors
from verl_ext.cli import main
from verl_ext.report.figures.panels import PANELS

SMALL = make({"critic/score/mean": [0.1, 0.2, 0.3], "vllm_kl/k3": [1e-4, 2e-4, 1e-4]})
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def file(tmp_path):
    return write(SMALL, tmp_path / "run.jsonl")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new" / "out"


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_report_says_a_verdict_and_a_table_and_writes_the_page_and_the_figures(file, out, capsys):
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    assert files(out) == ["figures/reward.png", "figures/vllm_kl.png", "report.html", "report.png"]
    assert all((out / name).read_bytes().startswith(PNG) for name in files(out) if name.endswith("png"))
    said = capsys.readouterr().out
    assert "not enough data" in said and "rollout KL, k3" in said and "stability.metrics=true" in said
    assert f" page: {out / 'report.html'}\n" in said and f" figures: {out / 'figures'}\n" in said


def test_a_path_with_brackets_or_colons_is_written_as_it_is(file, tmp_path, capsys):
    out = tmp_path / "[b]a[/b] :smile:"
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert f" page: {out / 'report.html'}\n" in capsys.readouterr().out


def test_the_folder_of_the_page_is_report_where_none_is_named(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "."]) == 0
    assert files(tmp_path / "report") == ["report.html"]


def test_without_a_page_nothing_is_written(file, out, capsys):
    assert main(["report", str(file), "--no-page", "--out", str(out)]) == 0
    assert not out.exists() and "page:" not in capsys.readouterr().out


def test_no_pictures_are_announced_where_nothing_could_be_drawn(tmp_path, out, capsys):
    file = write(make({"my/own": [1.0]}), tmp_path / "run.jsonl")
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    assert files(out) == ["report.html"] and "figures:" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "broken.jsonl", "folder"])
@pytest.mark.parametrize("command", ["report", "compare"])
def test_what_cannot_be_read_is_one_line_that_names_it(name, command, tmp_path, out, capsys):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text("no metrics\n")
    (tmp_path / "folder").mkdir()
    assert main([command, str(tmp_path / name), *["x"] * (command == "compare"), "--out", str(out)]) == 2
    assert name in one_line(capsys) and not out.exists()


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_folder_that_cannot_be_written_is_one_line(command, file, capsys):
    paths = [str(file)] * (1 + (command == "compare"))
    assert main([command, *paths, "--out", str(file / "below a file")]) == 2
    assert "run.jsonl" in one_line(capsys)


def test_two_runs_of_one_file_are_compared_by_their_numbers(file, capsys):
    write(make({"critic/score/mean": [0.9, 0.8]}), file, mode="a")
    assert main(["compare", f"{file}:1", f"{file}:2", "--no-page"]) == 0
    said = capsys.readouterr().out
    assert "run:1" in said and "run:2" in said and "run:1 (to 3)" in said
    assert main(["report", f"{file}:1", "--no-page"]) == 0
    assert "run:1, step 3" in capsys.readouterr().out
    assert main(["report", f"{file}:1", "--run", "2", "--no-page"]) == 2
    assert "run.jsonl:1: --run 2 is given too" in one_line(capsys)
    for command in ("compare", "report"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "PATH:N is the Nth" in " ".join(capsys.readouterr().out.split())


def test_a_chart_of_several_runs_is_compared_as_it_is(tmp_path, capsys):
    chart = tmp_path / "chart.csv"
    rows = [f"{step},{step / 100},{step / 50}" for step in range(1, 60)]
    chart.write_text("\n".join(["Step,one - reward,two - reward", *rows]))
    assert main(["compare", str(chart), "--no-page"]) == 0
    said = capsys.readouterr().out
    assert "one" in said and "two" in said and "better" in said
    assert main(["report", str(chart), "--run", "two", "--no-page"]) == 0
    assert "two, step 59" in capsys.readouterr().out


def test_a_missing_library_is_named_with_the_packages_to_install(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "verl_ext.report.folder", None)  # an import of it fails
    monkeypatch.setitem(errors.REQUIRED, "verl_ext.report.folder", "pip install it")
    assert main(["report", str(file)]) == 2
    assert one_line(capsys).endswith("verl_ext.report.folder is not installed, and this needs it: pip install it\n")


def test_compare_needs_two_runs_and_takes_any_number(file, capsys):
    for words in ([], [str(file)], ["--group", "a"], ["--group", "a", str(file)]):
        assert main(["compare", *words, "--no-page"]) == 2
        one_line(capsys)
    assert main(["compare", *[str(file)] * 20, "--no-page"]) == 0
    assert "run (20)" in capsys.readouterr().out
    assert main(["compare", str(file), "--group", "both", str(file), str(file), "--no-page"]) == 0
    assert "both (2 runs)" in " ".join(capsys.readouterr().out.split())


def test_a_page_that_cannot_be_written_is_told_before_the_report(file, capsys):
    for words in (["report", str(file)], ["compare", str(file), str(file)]):
        assert main([*words, "--out", str(file / "page")]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and f"cannot write to {file / 'page'}" in captured.err


def test_a_metric_of_ones_own_is_given_a_known_name(tmp_path, capsys):
    file = write(make({"my/score": [0.1, 0.2, 0.3]}), tmp_path / "mine.jsonl")
    for command in (["report", str(file)], ["compare", str(file), str(file)]):
        assert main([*command, "--no-page"]) == 0
        assert "\n reward " not in capsys.readouterr().out
        assert main([*command, "--no-page", "--name", "my/score=reward"]) == 0
        assert "\n reward " in capsys.readouterr().out
        assert main([*command, "--no-page", "--name", "my/score=k3"]) == 0
        assert "\n rollout KL, k3 " in capsys.readouterr().out
    for wrong, said in (("my/score", "form OWN=KNOWN"), ("my/score=mismatch_lk", "similar: mismatch_kl")):
        with pytest.raises(SystemExit):
            main(["report", str(file), "--name", wrong])
        assert said in one_line(capsys)


def test_a_missing_file_gets_the_similar_ones(file, capsys):
    assert main(["report", str(file.with_name("rnu.jsonl"))]) == 2
    assert "similar: run.jsonl" in one_line(capsys)


def test_compare_names_metrics_that_are_similar_to_an_unknown_one(file, capsys):
    assert main(["compare", str(file), str(file), "--metric", "critic/scor/mean", "--no-page"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "critic/scor/mean has no finite value in any run; similar: critic/score/mean" in said


@pytest.mark.slow
def test_compare_writes_a_table_and_a_page(tmp_path, out, capsys):
    for name in ("bf16", "fp16"):
        (tmp_path / name).mkdir()
        write(full(40, layers=2, seed=len(name)), tmp_path / name / "metrics.jsonl")
    paths = [str(tmp_path / name) for name in ("bf16", "fp16")]
    words = ["--metric", "response_length/clip_ratio", "--window", "30", "--out", str(out)]
    assert main(["compare", *paths, *words]) == 0
    said = capsys.readouterr().out
    flat = "".join(said.split())  # names are broken in narrow columns
    assert all(part in flat for part in ("bf16", "fp16", "clip_ratio", "last30steps"))
    assert f" page: {out / 'report.html'}\n" in said and files(out) == ["report.html"]
    page = (out / "report.html").read_text()
    assert all(f'data-figure="{panel.key}"' in page for panel in PANELS)


def test_trajectories_beside_the_metrics_get_a_page_and_a_link(file, out, capsys):
    dump(file.parent, [line(1, "a", count=30)])
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert files(out) == ["report.html", "trajectories.html"]
    assert 'href="trajectories.html"' in (out / "report.html").read_text()
    assert 'href="report.html"' in (out / "trajectories.html").read_text()
    assert f" trajectories: {out / 'trajectories.html'}\n" in capsys.readouterr().out


def test_a_dump_without_a_whole_line_is_a_note_in_the_report(file, out):
    dump(file.parent, [], tail=b'{"step": 1, "key": "cut')
    assert main(["report", str(file), "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert files(out) == ["report.html"] and 'href="trajectories.html"' not in page
    assert "no complete trajectory in this file" in page


class Watch:
    """`verl-ext report FILE --watch 1` in a process of its own."""

    def __init__(self, file, out, *words, **environment):
        command = [sys.executable, "-m", "verl_ext.cli", "report", str(file), "--watch", "1", "--out", str(out), *words]
        self.page, self.said = out / "report.html", file.parent / "said.txt"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                command,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                preexec_fn=heeds_ctrl_c,
            )

    def wait(self, what, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < end, f"nothing in {seconds} s; {self.said.read_text()}"
            time.sleep(0.05)

    def steps(self) -> str:
        found = re.search(r"steps? [\d to]+", self.page.read_text()) if self.page.exists() else None
        return found.group() if found else ""

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture
def watch():
    started = []
    yield lambda *words, **environment: started.append(Watch(*words, **environment)) or started[-1]
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("environment", slow_cases([{"TERM": "dumb", "COLUMNS": "30"}, {}]), ids=str)
def test_watch_waits_for_the_run_follows_it_and_draws_at_the_end(environment, watch, tmp_path, out):
    file = tmp_path / "[run].jsonl"
    watching = watch(file, out, "--pictures", **environment)
    time.sleep(0.5)  # it starts before there is a file
    write(SMALL, file, range(1, 2))
    watching.wait(lambda: watching.steps() == "step 1")
    assert '<meta http-equiv="refresh" content="1">' in watching.page.read_text()
    write(SMALL, file, range(2, 4), mode="a")
    watching.wait(lambda: watching.steps() == "steps 1 to 3")
    assert files(out) == ["report.html"]
    assert watching.stop() == 0, watching.said.read_text()
    assert files(out) == ["figures/reward.png", "figures/vllm_kl.png", "report.html", "report.png"]
    assert 'http-equiv="refresh"' not in watching.page.read_text()
    said = watching.said.read_text()
    assert "Traceback" not in said and "page:" in said


@pytest.mark.slow
def test_a_watch_that_saw_nothing_ends_with_one_line(watch, tmp_path, out):
    # A terminal as rich sees it, or it would not say that it waits; before it does, Ctrl-C ends its imports.
    watching = watch(tmp_path / "never.jsonl", out, PYTHONUNBUFFERED="1", FORCE_COLOR="1")
    watching.wait(lambda: "waiting" in watching.said.read_text())
    assert watching.stop() == 2
    assert watching.said.read_text().rstrip().endswith("never.jsonl: nothing to report on yet") and not out.exists()
