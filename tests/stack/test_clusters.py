"""Runs on a cluster: submitted to two nodes, over a network that breaks, and one whose raylet is killed.

All are in one file, so that no two run at a time: Ray counts the jobs of each cluster from 1, and verl names the socket
of its weights after the job.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests.stack.run_files import SAVES, has_saved, last_saved, shards
from tests.stack.running import (
    CPU,
    MARK,
    PY_EXECUTABLE,
    SMALL,
    assert_one_error,
    kill_all,
    process_titles,
    processes,
    start,
    titled_processes,
    wait_for,
)
from tests.stack.two_nodes import two_nodes
from tests.support.forking import WORKERS, forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BIN = os.path.dirname(sys.executable)


@pytest.fixture(scope="module")
def imports():
    read = CPU | {"TORCH_COMPILE_DISABLE": "1"}  # the recipe's, by torch as it is imported
    with forked("--preload", ",".join(WORKERS), environment=read) as imports:
        yield imports


@pytest.fixture(scope="module")
def cluster(imports, tmp_path_factory):
    """Two nodes of one logical GPU each, started as in docs/cluster.md; their processes end with the test."""
    mark = uuid.uuid4().hex
    folder = tmp_path_factory.mktemp("ray")
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | CPU | imports.environment | {MARK: mark, "PATH": path, "RAY_AUTH_MODE": "disabled"}
    port, dashboard = free_port(), free_port()
    head = ("--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir=/tmp/ray_{mark[:8]}")
    try:
        for role in (head, (f"--address=127.0.0.1:{port}",)):
            # Two nodes on one machine: each agent a port of its own.
            options = ("--num-cpus=8", "--num-gpus=1", "--disable-usage-stats")
            options += (f"--dashboard-agent-listen-port={free_port()}",)
            command = [f"{BIN}/ray", "start", *role, *options]
            subprocess.run(command, cwd=folder, env=environment, check=True, timeout=180)
        yield environment | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        kill_all(mark)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def submit(*arguments, env):
    command = [f"{BIN}/verl-ext", "submit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)


def test_a_run_on_two_nodes_is_submitted_stopped_and_resumed_to_its_end(cluster, imports, assets, tmp_path):
    run_dir, name = tmp_path / "run", f"job-{uuid.uuid4().hex[:8]}"
    variables = [item for key, value in CPU.items() for item in ("--env", f"{key}={value}")]
    overrides = (
        *SMALL,
        f"assets={assets}",
        "stability=icepop",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
        "trainer.nnodes=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"{PY_EXECUTABLE}={imports.python}",
    )
    started = submit("run", "--run-dir", str(run_dir), *variables, "--id", name, "--detach", *overrides, env=cluster)
    assert started.returncode == 0, started.stderr
    assert f"{name} submitted; everything it writes goes to {run_dir}" in started.stderr

    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    log = tmp_path / "log"
    with log.open("w") as file:
        watching = subprocess.Popen(
            [f"{BIN}/verl-ext", "submit", "logs", name, "--follow"],
            env=cluster,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    wait_for(tracker.exists, watching, log, 800)
    assert f"{name} STOPPED" in submit("stop", name, env=cluster).stderr
    assert watching.wait(60) != 0
    assert "STOPPED" in submit("status", name, env=cluster).stdout

    resumed = submit("resume", name, env=cluster)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr
    assert "Resuming from" in resumed.stdout and "SUCCEEDED" in resumed.stderr
    steps = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line.startswith('{"step":')]
    assert steps[0].startswith('{"step":1,') and steps[-1].startswith('{"step":4,')
    assert tracker.read_text() == "4"
    assert (run_dir / "metrics.guard.jsonl").exists() and (run_dir / "hydra").is_dir()


TWO_NODES = (
    "trainer.nnodes=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "++ray_kwargs.ray_init.num_cpus=null",  # the cluster's own
    "++ray_kwargs.ray_init.num_gpus=null",
)
CUT_S = 6


def test_a_network_that_heals_and_a_raylet_that_does_not(arguments, tmp_path):
    with two_nodes(tmp_path) as nodes:
        head = nodes.forked[0]
        settings = arguments("stability=icepop", *SAVES, *TWO_NODES, f"{PY_EXECUTABLE}={head.python}", steps=500)
        try:
            environment = head.environment | {"RAY_AUTH_MODE": "disabled"}
            console, started = start(nodes.inside(0, head.python, *settings), tmp_path, nodes.mark, environment)
            wait_for(lambda: has_saved(tmp_path, 2), started, console)
            nodes.cable("down")
            before = last_saved(tmp_path)
            time.sleep(CUT_S)
            nodes.cable("up")
            wait_for(lambda: has_saved(tmp_path, before + 3), started, console)
            (runner,) = (process for process in processes(nodes.mark) if process.name().startswith("ray::StabilityT"))
            nodes.raylet(1 - nodes.number_of(runner)).kill()
            assert started.wait(150) == 1
            wait_for_no_worker(nodes.mark)
        finally:
            kill_all(nodes.mark)
    assert_one_error(console.read_text(), r"a worker of the run died|has died")
    for rank in (0, 1):
        assert shards(tmp_path, last_saved(tmp_path), rank=rank, of=2), "the last checkpoint can be read"


def wait_for_no_worker(mark):
    """Waits until the run has no worker; Ray's daemons on the living node belong to the cluster and stay."""
    deadline = time.monotonic() + 60
    while found := [name for name in names(mark) if name.startswith(("ray::", "VLLM"))]:
        if all(name.endswith("Agent") for name in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(1)


def test_a_run_whose_raylet_is_killed_leaves_nobody_and_a_checkpoint(arguments, imports, tmp_path):
    """Each worker watches the raylet by itself, because the server that they are forked from has not imported Ray."""
    mark = uuid.uuid4().hex
    settings = arguments("stability=icepop", *SAVES, f"{PY_EXECUTABLE}={imports.python}", steps=500)
    console, started = start([imports.python, *settings], tmp_path, mark, imports.environment)
    try:
        wait_for(lambda: has_saved(tmp_path, 2), started, console)
        (raylet,) = titled_processes("raylet", mark)
        raylet.kill()
        assert started.wait(150) == 1
        wait_for_nobody(mark)
    finally:
        kill_all(mark)
    assert_one_error(console.read_text(), "a worker of the run died")
    assert shards(tmp_path, last_saved(tmp_path)), "the last checkpoint can be read"


def wait_for_nobody(mark):
    deadline = time.monotonic() + 60
    while process_titles(mark) and time.monotonic() < deadline:
        time.sleep(1)
    assert process_titles(mark) == []


def names(mark):
    """Titles of the run's processes; one may end while they are asked."""
    for process in processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process.name()
