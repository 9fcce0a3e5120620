"""Ctrl-C on a run: nothing of Ray or vLLM stays behind."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

MARK = "VERL_EXT_TEST_RUN"


def marked(value):
    """Command lines of the processes that a run with this mark started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value:
                found.append(" ".join(process.cmdline()) or process.name())
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.e2e
def test_ctrl_c_leaves_no_process_behind(command, tmp_path):
    mark = uuid.uuid4().hex
    with (tmp_path / "console.log").open("w") as log:
        run = subprocess.Popen(
            command("stability=icepop", steps=50),
            cwd=tmp_path,
            env=os.environ | {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", MARK: mark},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while not any("VLLM::EngineCore" in line for line in marked(mark)):
            assert run.poll() is None, (tmp_path / "console.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(1)
        assert any("raylet" in line for line in marked(mark))
        os.killpg(run.pid, signal.SIGINT)  # what a terminal does
        assert run.wait(60) == 130
        assert marked(mark) == []
    finally:
        run.kill()


def test_clean_exit_passes_the_exit_code_on_and_ends_daemons(tmp_path):
    mark = uuid.uuid4().hex
    # A daemon in a session of its own, whose parent is gone: as Ray starts its own.
    script = "setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & exit 7"
    code = subprocess.run(
        [sys.executable, os.path.join("tools", "clean_exit.py"), "sh", "-c", script],
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        env=os.environ | {MARK: mark},
        timeout=60,
    ).returncode
    assert code == 7
    assert marked(mark) == []
