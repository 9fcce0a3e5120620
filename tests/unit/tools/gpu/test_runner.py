"""The runner of the GPU kit on parts that fail, hang and do not fit."""

import json
import time
from types import SimpleNamespace

import pytest
from gpu.results import KitError, load

NONE = {"needs": ()}


def test_a_part_that_raises_leaves_its_traceback_and_the_others_go_on(kit):
    ran = kit({"raises": NONE, "good": NONE})
    assert ran.parts["raises"]["state"] == "failed"
    assert "ValueError: the kernel <b>broke</b>" in ran.parts["raises"]["output"]
    assert [line["name"] for line in ran.parts["raises"]["lines"]] == ["before"]
    assert ran.parts["good"]["state"] == "done"
    assert "ValueError: the kernel &lt;b&gt;broke&lt;/b&gt;" in ran.page


def test_a_part_over_its_time_limit_is_ended_and_keeps_what_it_found(kit, tmp_path, monkeypatch):
    results = tmp_path / "results" / "results.json"

    def clock():
        """A clock that jumps when the part has written its figure, so that a slow machine makes no difference."""
        found = results.exists() and '"before"' in results.read_text(encoding="utf-8")
        return time.monotonic() + (31 if found else 0)

    monkeypatch.setattr("gpu.runner.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    ran = kit({"sleeps": NONE, "good": NONE}, seconds=300.0)
    assert ran.parts["sleeps"]["state"] == "timed out"
    assert [line["repeats"] for line in ran.parts["sleeps"]["lines"]] == [[1.0]]
    assert ran.parts["sleeps"]["why"] == "it took more than 30 s"
    assert ran.parts["good"]["state"] == "done"


def test_a_check_that_does_not_hold_fails_the_part_and_a_case_that_raises_does_not_end_it(kit):
    ran = kit({"wrong": NONE})
    assert ran.parts["wrong"]["state"] == "failed"
    assert ran.parts["wrong"]["why"] == "2 of its checks do not hold"
    assert "RuntimeError: in one case alone" in ran.page and "3 of 8 differ" in ran.page


def test_a_second_run_keeps_what_is_done_and_runs_the_rest(kit):
    first = kit({"good": NONE, "raises": NONE})
    file = first.folder / "results.json"
    cut = json.loads(file.read_text(encoding="utf-8"))
    cut["parts"]["good"]["seconds"] = 77.0  # which a second run of it would not say
    cut["parts"]["raises"] = {"state": "running", "lines": []}  # as a machine that was taken away leaves it
    file.write_text(json.dumps(cut), encoding="utf-8")
    assert load(file, cut["machine"])["parts"]["raises"]["state"] == "cut off"
    second = kit({"good": NONE, "raises": NONE})
    assert second.said[0] == "good: done before, kept"
    assert second.parts["good"]["seconds"] == 77.0
    assert second.parts["raises"]["state"] == "failed"


def test_a_part_that_no_longer_fits_is_left_for_the_next_run_and_a_shorter_one_is_not(kit):
    parts = {"sleeps": NONE | {"seconds": 500.0}, "good": NONE}
    ran = kit(parts, seconds=60.0)
    assert ran.parts["sleeps"]["state"] == "left"
    assert ran.parts["good"]["state"] == "done"
    assert "it may take 500 s, and " in ran.page and "run the command again" in ran.page


def test_what_a_part_needs_is_named_and_nothing_is_started(kit):
    ran = kit({"good": {"needs": ("no_such_package", "json")}, "sleeps": {"on_gpu_alone": True, "needs": ()}})
    assert ran.parts["good"] == {"state": "not run", "why": "needs no_such_package"}
    assert ran.parts["sleeps"] == {"state": "not run", "why": "needs a GPU"}


def test_results_of_another_machine_are_not_mixed_with_these(kit):
    file = kit({"good": NONE}).folder / "results.json"
    with pytest.raises(KitError, match=r"gpu was a made-up GPU and is H200; .*--out.*--again"):
        load(file, {"gpu": "H200", "torch": "1.2.3"})
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(KitError, match=r"is no file of results .*--out"):
        load(file, {})
