"""Files that a report writes into its folder, and files that it does not touch there."""

from types import SimpleNamespace

import pytest

from tests.unit.report.made_runs import make, write
from tests.unit.report.made_trajectories import dump, line
from verl_ext.cli import main
from verl_ext.report import folder
from verl_ext.report.page import libraries

USERS = ("figures/entropy.png", "report.png", "trajectories.html")


def put(out, *names):
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("the user's own")


def kept(out):
    return [name for name in USERS if (out / name).exists()]


def page(out, name="report.html"):
    return (out / name).read_text(encoding="utf-8")


def watched(monkeypatch, file, out, *between, words=()):
    """Runs --watch in this process: one look, then a function of `between` instead of each wait, then Ctrl-C."""
    calls = iter(between)

    def sleep(seconds):
        if (call := next(calls, None)) is None:
            raise KeyboardInterrupt
        call()

    monkeypatch.setattr("verl_ext.report.command.time", SimpleNamespace(sleep=sleep))
    return main(["report", str(file), "--watch", "1", "--out", str(out), *words])


@pytest.mark.parametrize("before", [None, "<html><p>my own report, made with verl_ext</p>", " " * 2000])
def test_files_that_stood_in_the_folder_before_any_report_stay(before, file, out):
    put(out, *USERS)
    if before is not None:
        put(out, "report.html")
        (out / "report.html").write_text(
            before + '<meta name="generator" content="verl_ext 1">' * (before == " " * 2000)
        )
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert kept(out) == list(USERS)
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert kept(out) == []  # by now they would pass for the report's


def test_a_comparison_keeps_them_too(file, out):
    put(out, *USERS)
    assert main(["compare", str(file), str(file), "--out", str(out)]) == 0
    assert kept(out) == list(USERS)


def test_the_pages_of_a_watch_are_not_taken_for_an_earlier_report(file, out, monkeypatch):
    put(out, *USERS)
    more = make({"critic/score/mean": [0.1] * 5})
    assert watched(monkeypatch, file, out, lambda: write(more, file, range(4, 6), mode="a")) == 0
    assert "steps 1 to 5" in page(out) and kept(out) == list(USERS)


def test_what_an_earlier_report_left_is_removed(file, out):
    trajectories = dump(file.parent, [line(1, "a", count=30)])
    assert main(["report", str(file), "--pictures", "--out", str(out)]) == 0
    assert (out / "trajectories.html").exists() and (out / "figures" / "reward.png").exists()
    trajectories.unlink()
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == ["report.html"]


def test_trajectories_of_later_steps_are_another_runs(file, out):
    dump(file.parent, [line(step, f"key-{step}", count=30) for step in (3, 4, 5, 6)])
    assert main(["report", str(file), "--out", str(out)]) == 0
    shown = page(out, "trajectories.html")
    assert "2 trajectories have later steps than the metrics: left out" in shown
    assert [f"key-{step}" in shown for step in (3, 4, 5, 6)] == [True, True, False, False]
    dump(file.parent, [line(9, "a", count=30)])
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert not (out / "trajectories.html").exists() and 'href="trajectories.html"' not in page(out)
    assert "1 trajectory has a later step than the metrics: left out; it belongs to another run" in page(out)


def test_the_dump_is_of_the_files_last_run(file, out):
    write(make({"critic/score/mean": [0.5, 0.6, 0.7]}), file, mode="a")
    dump(file.parent, [line(1, "a", count=30)])
    words = ["--out", str(out)]
    for other in ([f"{file}:1"], [str(file), "--run", "1"]):
        assert main(["report", *other, *words]) == 0
        assert not (out / "trajectories.html").exists() and "trajectories of the file&#39;s last run" in page(out)
    for last in ([f"{file}:2"], [str(file), "--run", "2"], [str(file)]):
        assert main(["report", *last, *words]) == 0
        assert (out / "trajectories.html").exists() and "file&#39;s last run" not in page(out)


def test_of_many_trajectories_the_newest_are_shown(file, out, monkeypatch):
    monkeypatch.setattr(folder, "MOST_TOKENS", 100)
    dump(file.parent, [line(step, f"key-{step}-{n}", count=30) for step in (1, 2, 3) for n in (0, 1)])
    assert main(["report", str(file), "--out", str(out)]) == 0
    shown = page(out, "trajectories.html")
    assert "the newest 3 of 6 trajectories are shown" in shown
    assert [f"key-{step}-{n}" in shown for step in (1, 2, 3) for n in (0, 1)] == [False] * 3 + [True] * 3
    monkeypatch.setattr(folder, "MOST_TOKENS", 1)  # one is shown, however long
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert "the newest 1 of 6" in page(out, "trajectories.html") and "key-3-1" in page(out, "trajectories.html")
    monkeypatch.setattr(folder, "MOST_TOKENS", 180)
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert "the newest" not in page(out, "trajectories.html")


@pytest.mark.parametrize("large", [True, False])
def test_the_page_of_a_large_dump_is_written_when_the_watch_ends(large, file, out, monkeypatch):
    size = sum(
        dump(file.parent, [line(step, "a", count=30)], name).stat().st_size
        for step, name in ((1, "run.trajectories.1.jsonl"), (2, "run.trajectories.jsonl"))
    )
    monkeypatch.setattr(folder, "LARGE_DUMP", size - large)
    seen = []

    def look():
        seen.append(((out / "trajectories.html").exists(), "written when the watch ends" in page(out)))

    assert watched(monkeypatch, file, out, look) == 0
    assert seen == [(not large, large)]
    assert (out / "trajectories.html").exists() and "written when the watch ends" not in page(out)


def test_a_watch_that_cannot_write_says_so_and_tries_again(file, out, monkeypatch, capsys):
    out.write_text("a file where the folder should be")
    seen = []

    def free():
        out.unlink()

    assert watched(monkeypatch, file, out, free, lambda: seen.append((out / "report.html").exists())) == 0
    assert seen == [True]
    assert "no page:" not in capsys.readouterr().out  # the screen at the end
    (out / "report.html").unlink()
    out.rmdir()
    out.write_text("again")
    assert watched(monkeypatch, file, out) == 2  # the pages at the end are not tried again
    captured = capsys.readouterr()
    assert "no page:" in captured.out and captured.err.count("\n") == 1


def test_the_library_of_the_figures_is_put_together_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: made.append(1) or "vega</script>")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        libraries.cache_clear()
        assert libraries() == r"vega<\/script>"
    assert len(made) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no cache there
    libraries.cache_clear()
    assert libraries() == r"vega<\/script>" and len(made) == 2
    libraries.cache_clear()
