"""Runs that a user or a signal ends: no written data is lost, and no process stays behind."""

import json
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest
import torch

from tests import ROOT
from tests.stack.run_files import SAVES, events, has_saved, last_saved, logged_events, shards, weights
from tests.stack.running import (
    CLEAN_EXIT,
    MARK,
    PY_EXECUTABLE,
    assert_engines_agree,
    forked_command,
    live,
    process_titles,
    suspected_causes,
)
from tests.support.forking import PREFORK


@pytest.mark.e2e
def test_in_float32_the_engines_agree_until_ctrl_c_which_leaves_no_process_behind(arguments, tmp_path):
    """The run starts as the quick start does."""
    train = f'exec "$PREFORK_PYTHON" "$@" {PY_EXECUTABLE}="$PREFORK_PYTHON"'
    preforked = [*CLEAN_EXIT, sys.executable, str(PREFORK), "--log", os.devnull, "sh", "-c", train, "sh"]
    settings = arguments("stability=zero_mismatch", "precision=fp32", steps=50)
    metrics = tmp_path / "verl_ext" / "cpu_smoke.jsonl"
    with live([*preforked, *settings], tmp_path) as run:
        run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        started = psutil.Process(run.process.pid).children(recursive=True)
        assert len(started) > 20, "Ray's, vLLM's and verl's"
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
        run.wait_for_end(130)
        assert not [process for process in started if process.is_running()]
        assert process_titles(run.mark) == []
    may_warn = set()
    for line in map(json.loads, metrics.read_text().splitlines()):
        assert line["data"]["router/checked"] == 1
        if not assert_engines_agree(line["data"], k3=1e-12):
            may_warn |= {(line["step"], "zero_mismatch", "warn"), (line["step"] + 1, "zero_mismatch", "recover")}
    assert {*logged_events(tmp_path)} <= may_warn, "zero_mismatch held in every step"


def test_clean_exit_passes_the_exit_code_on_and_ends_daemons(tmp_path):
    mark = uuid.uuid4().hex
    # A daemon in a session of its own, whose parent is gone: as Ray starts its own.
    script = "setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & exit 7"
    code = subprocess.run(
        [sys.executable, os.path.join("tools", "clean_exit.py"), "sh", "-c", script],
        cwd=ROOT,
        env=os.environ | {MARK: mark},
        timeout=60,
    ).returncode
    assert code == 7
    assert process_titles(mark) == []


@pytest.mark.e2e
def test_killed_in_the_middle_and_resumed_past_a_truncated_checkpoint(arguments, train_in, stack, assets, tmp_path):
    """Threshold 0 skips every update: counts continue across the restart, weights and optimizer do not change. All
    answers get the same reward, which the report names."""
    settings = (
        "stability=guard",
        "stability.batch_skip.threshold=0",
        "stability.guard.stop_after=9",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.sampler.custom_sampler.name=FastPollReplayBufferAsync",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "reward.custom_reward_function.name=same_for_all",
        *SAVES,
    )
    command = forked_command(arguments(*settings, steps=50), stack)
    with live(command, tmp_path, stack.environment) as run:
        run.wait_for(lambda: has_saved(tmp_path, 3))
    (metrics,) = [file for file in (tmp_path / "verl_ext").glob("*.jsonl") if ".guard." not in file.name]
    before = metrics.read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    last = last_saved(tmp_path)
    model = tmp_path / "checkpoints" / f"global_step_{last}" / "actor" / "model_world_size_1_rank_0.pt"
    model.write_bytes(model.read_bytes()[:1000])

    resumed = train_in(tmp_path, *settings, steps=50)
    assert resumed.code == 3, resumed.tail
    assert (
        f"global_step_{last} cannot be resumed from: actor/model_world_size_1_rank_0.pt has 1000 bytes"
        in resumed.console
    )
    assert f"guard state of step {last - 1}" in resumed.console
    assert "the guard stopped the run: 9 steps in a row without an update" in resumed.console
    assert metrics.read_bytes().startswith(before), "metrics already written stay"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["data"]["guard/skips"] for row in rows] == [row["step"] for row in rows]
    assert all("actor/grad_norm" not in row["data"] for row in rows)
    assert rows[-1]["step"] == 9
    stops = [event for event in events(tmp_path) if event["action"] == "stop"]
    assert [event["step"] for event in stops] == [9]
    assert suspected_causes(resumed)[0] == "no_signal"

    initial = weights(assets / "model")
    for step in (1, 9):
        found = weights(tmp_path / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")
        assert found.keys() == initial.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.to(initial[name].dtype), initial[name]), name
    assert not shards(tmp_path, 9, "optim")["state"], "an optimizer that never stepped has no moments"
    assert shards(tmp_path, 9, "extra_state")["lr_scheduler"]["last_epoch"] == 0
