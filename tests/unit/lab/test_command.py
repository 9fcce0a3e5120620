"""`verl-ext lab` as a user types it, on runs that only write curves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.signals import heeds_ctrl_c
from tests.unit.lab import standin
from verl_ext.cli import main
from verl_ext.lab.command import parse_seeds

SMALL = ["--steps", "40", "--seeds", "2", "--jobs", "2"]


@pytest.fixture(autouse=True)
def the_standin(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "verl_ext.lab.arms", standin)
    monkeypatch.setitem(sys.modules, "verl_ext.lab.regimes", standin)
    monkeypatch.chdir(tmp_path)


def done(out: Path) -> set[str]:
    return {str(file.parent.relative_to(out)) for file in out.rglob("done.json")}


def test_a_table_the_numbers_and_every_run(tmp_path, capsys):
    assert main(["lab", "stale", "--variants", "none,tis", *SMALL, "--no-page"]) == 0
    out = tmp_path / ".lab" / "stale"
    assert done(out) == {f"{name}/seed{seed}" for name in ("exact", "none", "tis") for seed in range(2)}
    said = capsys.readouterr().out
    assert re.search(r"exact +0\.9", said) and "The gap costs" in said and "none in 2 of 2 (seed 0, 1" in said
    assert f" numbers: {Path('.lab/stale/results.json')}\n" in said and "\x1b" not in said
    found = json.loads((out / "results.json").read_text())
    assert (found["regime"], found["steps"], found["seeds"], found["complete"]) == ("stale", 40, [0, 1], True)
    assert [each["name"] for each in found["variants"]] == ["exact", "tis", "none"]
    assert "lab=exact" in found["variants"][0]["overrides"]


def test_the_same_command_goes_on_and_more_seeds_are_added(tmp_path, capsys):
    words = ["lab", "stale", "--variants", "none", "--steps", "25", "--no-page"]
    assert main([*words, "--seeds", "2"]) == 0
    first = (tmp_path / ".lab/stale/none/seed0/done.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main([*words, "--seeds", "0-2"]) == 0
    captured = capsys.readouterr()
    assert "4 of 6 runs are done already" in captured.err and "5 of 6:" in captured.err
    assert (tmp_path / ".lab/stale/none/seed0/done.json").stat().st_mtime_ns == first
    assert main([*words, "--seeds", "2", "lab.stale.lag=8"]) == 0
    assert "none runs again, because these settings have changed: overrides" in capsys.readouterr().err


def test_a_run_that_ended_early_by_itself_is_none_that_lived(capsys):
    main(["lab", "stale", "--variants", "none", "--add", "cut=stability=tis", *SMALL, "--no-page"])
    said = " ".join(capsys.readouterr().out.split())
    folder = Path(".lab/stale/cut/seed0")
    assert (
        f"cut, seed 0 failed: it ended at step 30 of 40, but the guard did not stop it; remove {folder} to run it"
        in said
    )


def test_json_alone_on_the_standard_output(capsys):
    assert main(["lab", "bf16", "--variants", "icepop", *SMALL, "--json", "--no-page"]) == 0
    found = json.loads(capsys.readouterr().out)
    icepop = found["variants"][1]
    assert icepop["name"] == "icepop" and icepop["means"]["dropped"]["mean"] == pytest.approx(0.02)
    assert icepop["final_against_none"] is None and icepop["final_against_exact"]["high"] < 0


def test_added_variants_overrides_of_all_and_a_mixture(capsys):
    words = ["lab", "stale+bf16", "--variants", "none", "--add", "both=stability=r3 stability.correction=icepop"]
    assert main([*words, *SMALL, "--json", "--no-page", "lab.stale.lag=9"]) == 0
    by_name = {each["name"]: each for each in json.loads(capsys.readouterr().out)["variants"]}
    assert by_name["both"]["overrides"][:2] == ["stability=r3 stability.correction=icepop", "lab=stale+bf16"]
    assert all("lab.stale.lag=9" in each["overrides"] for each in by_name.values())
    assert set(by_name) == {"exact", "none", "both"}


def test_plugins_are_imported_here_and_named_to_every_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_lab_plugin.py").write_text("import sys\nsys.lab_plugin = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "lab_plugin", False, raising=False)
    words = ["--plugins", "my_lab_plugin", "--variants", "none", "--steps", "3", "--seeds", "1", "--json", "--no-page"]
    assert main(["lab", "stale", *words]) == 0 and sys.lab_plugin
    found = json.loads(capsys.readouterr().out)
    assert all("stability.plugins=[my_lab_plugin]" in each["overrides"] for each in found["variants"])
    assert main(["lab", "stale", "--plugins", "no_such_module"]) == 2
    assert "no_such_module cannot be imported" in one_line(capsys)


def test_failing_runs_are_told_at_once_and_in_the_table_and_the_code_is_1(tmp_path, capsys):
    assert main(["lab", "stale", "--variants", "none", "--add", "broken=x", *SMALL, "--no-page"]) == 1
    captured = capsys.readouterr()
    assert "broken, seed 0 failed: RuntimeError: the experts are gone" in captured.err
    table = " ".join(captured.out.split())
    assert "broken; 2" in table and "broken, seed 1 failed: RuntimeError: the experts are gone" in table
    assert json.loads((tmp_path / ".lab/stale/results.json").read_text())["variants"][-1]["failed"].keys() == {"0", "1"}


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("verl-ext lab: ") and captured.out == ""
    return captured.err


def test_what_cannot_be_asked_is_one_line(tmp_path, capsys):
    assert main(["lab", "gone"]) == 2 and "the regime gone is not known" in one_line(capsys)
    assert main(["lab"]) == 2 and "REGIME is missing" in one_line(capsys)
    assert main(["lab", "stale", "--add", "none=x"]) == 2 and "a variant has this name already" in one_line(capsys)
    assert main(["lab", "stale", "--add", "refused=x"]) == 2 and "set stability.tis.high=2" in one_line(capsys)
    assert not (tmp_path / ".lab").exists()
    (tmp_path / "file").touch()
    assert main(["lab", "stale", "--out", str(tmp_path / "file"), *SMALL]) == 2 and "file" in one_line(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["--seeds", "x"],
        ["--seeds", "5-"],
        ["--seeds", "7-3"],
        ["--steps", "0"],
        ["--jobs", "-1"],
        ["--add", "../x=y"],
        ["--add", "name"],
        ["--variants", "a,,b"],
        ["--variants", "../x"],
    ],
)
def test_wrong_usage_exits_with_two_and_one_line(words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["lab", "stale", *words])
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.err.count("\n") == 1 and words[0] in captured.err


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("3-5", (3, 4, 5)), ("0,2", (0, 2)), ("7-7", (7,)), ("1,4-5,1", (1, 4, 5))]
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


def test_list_tells_the_regimes_with_what_they_stand_for_and_the_variants(capsys):
    assert main(["lab", "--list"]) == 0
    said = capsys.readouterr().out
    assert "stale  asynchronous RL" in said and "exact  " in said and "none, tis, icepop" in said


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["lab", "--help"])
    assert "verl-ext lab stale --seeds 5" in capsys.readouterr().out


COMMAND = """
import sys
from tests.unit.lab import standin
sys.modules["verl_ext.lab.arms"] = sys.modules["verl_ext.lab.regimes"] = standin
from verl_ext.cli import main
sys.exit(main(sys.argv[1:]))
"""


def in_group(group: int) -> list[str]:
    """Processes of a process group, as the kernel lists them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def until(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(tmp_path):
    """Ctrl-C is sent as a terminal sends it: to the command and to all that it has started."""
    words = ["stale", "--variants", "none", "--add", "slow=x", "--seeds", "2", "--steps", "200", "--jobs", "2"]
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "lab", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heeds_ctrl_c,
    )
    out = tmp_path / ".lab" / "stale"
    try:
        until(lambda: {"exact/seed0", "none/seed0"} <= done(out) and (out / "slow/seed0/metrics.jsonl").exists())
        os.killpg(command.pid, signal.SIGINT)
        said, errors = command.communicate(timeout=300)
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
    assert command.returncode == 130 and "Traceback" not in errors
    assert "the same command continues" in errors and re.search(r"exact +0\.9", said)
    until(lambda: in_group(command.pid) == [])
    before = done(out)
    assert "slow/seed0" not in before and not (out / "results.json").exists()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.unit.lab.standin.time.sleep", lambda seconds: None)
        assert main(["lab", *words, "--no-page"]) == 0
    assert before < done(out) == {f"{name}/seed{seed}" for name in ("exact", "none", "slow") for seed in range(2)}


@pytest.mark.slow
def test_a_worker_ends_by_itself_where_the_command_was_killed(tmp_path):
    words = ["stale", "--variants", "none", "--add", "slow=x", "--seeds", "1", "--steps", "3000", "--jobs", "3"]
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "lab", *words], cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: (tmp_path / ".lab/stale/slow/seed0/metrics.jsonl").exists())
        command.kill()
        command.wait()
        until(lambda: in_group(command.pid) == [])
    finally:
        if in_group(command.pid):
            os.killpg(command.pid, signal.SIGKILL)
