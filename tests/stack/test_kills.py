"""Runs in which a process is killed or the reward fails: how the run ends, and the files that it leaves."""

import json
import re
import subprocess
import time
from functools import partial

import pytest

from tests import ROOT
from tests.stack.hungry_loss import FILE as HUNGER
from tests.stack.rewards import FILE
from tests.stack.run_files import SAVES, equal_tensors, events, has_saved, last_saved, shards
from tests.stack.running import (
    PY_EXECUTABLE,
    assert_one_error,
    engine_processes,
    live,
    titled_processes,
)

pytestmark = pytest.mark.e2e

ENGINE_CORE = "VLLM::EngineCor"
# Who is killed, by the beginning of its title -> what the run's own error names.
KILLED = {
    ENGINE_CORE: "the engine of rollout server 0 has died",
    "ray::SimpleStor": "TransferQueue's storage unit 0 has died",
}


@pytest.fixture
def file_system(tmp_path):
    """Mounts a file system as the checkpoints' folder."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder)], stderr=subprocess.PIPE)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def begin(arguments, stack, tmp_path):
    """begin(overrides..., **environment) -> a LiveRun, without our wrapper."""

    def begin(*overrides, **environment):
        settings = arguments("stability=icepop", *SAVES, *overrides, steps=500)
        command = [stack.python, *settings, f"{PY_EXECUTABLE}={stack.python}"]
        return live(command, tmp_path, stack.environment | environment)

    return begin


def kill(name, mark):
    victims = engine_processes(mark) if name == ENGINE_CORE else titled_processes(name, mark)
    assert victims, sorted({process.name() for process in titled_processes("", mark)})
    victims[0].kill()


@pytest.mark.parametrize("name", KILLED)
def test_it_ends_with_one_error_and_the_last_checkpoint_can_be_read(begin, tmp_path, name):
    """Before that, the disk of the metrics is full, which ends nothing."""
    (tmp_path / "verl_ext").mkdir()
    (tmp_path / "verl_ext" / "cpu_smoke.jsonl").symlink_to("/dev/full")
    full = "cpu_smoke.jsonl cannot be written (No space left on device)"
    with begin() as run:
        run.wait_for(lambda: has_saved(tmp_path, 1) and full in run.console)
        kill(name, run.mark)
        run.wait_for_end(1)
    assert_one_error(run.console, KILLED[name])
    assert shards(tmp_path, last_saved(tmp_path)), "the last checkpoint can be read"


def read_only(folder, mark):
    """Makes the checkpoints' file system read-only, as after an error of the disk."""
    remount = ["mount", "-o", "remount,ro", str(folder / "checkpoints")]
    deadline = time.monotonic() + 60
    while (mounted := subprocess.run(remount, stderr=subprocess.PIPE)).returncode:  # busy while a checkpoint is written
        assert time.monotonic() < deadline, mounted.stderr
        time.sleep(0.05)


def out_of_memory(folder, mark):
    """The training worker's next update asks for more memory than there is."""
    (folder / "hunger").touch()


def kill_training_worker(folder, mark):
    kill("ray::WorkerDict", mark)


FAULTS = (
    (read_only, r"verl_ext: error: the checkpoint \S+/global_step_\d+ cannot be written \(OSError: .*Read-only"),
    (out_of_memory, r"can't allocate memory: you tried to allocate \d+ bytes"),
    (kill_training_worker, "verl_ext: error: a worker of the run died"),
)


def test_what_a_run_is_denied_ends_it_and_the_same_command_goes_on(begin, file_system, tmp_path):
    """The checkpoints' disk turns read-only, then memory runs out, then the training worker is killed."""
    hungry = ("stability.plugins=[tests.stack.hungry_loss]", "actor_rollout_ref.actor.policy_loss.loss_mode=hungry")
    last = 0
    for fault, said in FAULTS:
        with begin(*hungry, **{HUNGER: str(tmp_path / "hunger"), "PYTHONPATH": str(ROOT)}) as run:
            run.wait_for(partial(has_saved, tmp_path, last + 1))
            fault(tmp_path, run.mark)
            run.wait_for_end(1)
        assert re.search(said, run.console), run.console[-3000:]
        assert last == 0 or f"setting global step to {last}" in run.console
        last = last_saved(tmp_path)
        assert shards(tmp_path, last), "the last checkpoint can be read"
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "checkpoints")], check=True)
        (tmp_path / "hunger").unlink(missing_ok=True)
    assert_one_error(run.console, said)


def test_a_reward_that_is_no_number_then_hangs_and_then_raises(begin, tmp_path):
    word = tmp_path / "reward"
    reward = "reward.custom_reward_function.name=faulty"
    slow = "stability.guard.slow_step_s=5"
    guard, metrics = (tmp_path / "verl_ext" / f"cpu_smoke{kind}.jsonl" for kind in (".guard", ""))
    with begin(reward, slow, **{FILE: str(word), "PYTHONPATH": str(ROOT)}) as run:
        run.wait_for(lambda: has_saved(tmp_path, 1))
        word.write_text("nan")
        run.wait_for(lambda: guard.read_text().count("\n") >= 2)
        word.write_text("hang")
        run.wait_for(lambda: re.search(r"step \d+ has been running for \d+ s\b", run.console), 150)
        last = last_saved(tmp_path)
        word.write_text("")  # not unlinked: the rewards that hang read it
        run.wait_for(lambda: has_saved(tmp_path, last + 1))
        word.write_text("raise")
        run.wait_for_end(1)
    skips = events(tmp_path)
    assert {(skip["rule"], skip["action"], skip["reason"]) for skip in skips} == {
        ("non_finite", "skip", "critic/score/mean is nan")
    }
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 2
    assert "the judge does not answer" in run.console and "no materializable trajectories" in run.console
    first = skips[0]["step"]
    assert equal_tensors(shards(tmp_path, first - 1), shards(tmp_path, first)), "a skipped update changes nothing"
