"""Ctrl-C on a run: nothing of Ray or vLLM stays behind."""

import os
import signal
import subprocess
import sys
import uuid

import pytest
from running import MARK, marked, start, wait_for


@pytest.mark.e2e
def test_ctrl_c_leaves_no_process_behind(command, tmp_path):
    mark = uuid.uuid4().hex
    console, run = start(command("stability=icepop", steps=50), tmp_path, mark)
    try:
        wait_for(lambda: any("VLLM::EngineCore" in line for line in marked(mark)), run, console)
        assert any("raylet" in line for line in marked(mark))
        os.killpg(run.pid, signal.SIGINT)  # what a terminal does
        assert run.wait(120) == 130
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
