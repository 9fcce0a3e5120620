"""Runs on a cluster: submitted to its head, and over a network that breaks, on nodes of which one loses its raylet.

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
    live,
    processes,
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
    """A node of one logical GPU, started as in docs/cluster.md; its processes end with the test."""
    mark = uuid.uuid4().hex
    folder = tmp_path_factory.mktemp("ray")
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | CPU | imports.environment | {MARK: mark, "PATH": path, "RAY_AUTH_MODE": "disabled"}
    port, dashboard, agent = free_port(), free_port(), free_port()
    ports = (f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}")
    options = (f"--temp-dir=/tmp/ray_{mark[:8]}", "--num-cpus=16", "--num-gpus=1", "--disable-usage-stats")
    try:
        command = [f"{BIN}/ray", "start", "--head", *ports, *options]
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


def test_a_run_is_submitted_stopped_and_resumed_to_its_end(cluster, imports, assets, tmp_path):
    run_dir, name = tmp_path / "run", f"job-{uuid.uuid4().hex[:8]}"
    variables = [item for key, value in CPU.items() for item in ("--env", f"{key}={value}")]
    overrides = (
        *SMALL,
        f"assets={assets}",
        "stability=icepop",
        "trainer.total_training_steps=8",  # so that it is stopped before its end
        "trainer.save_freq=1",
        f"{PY_EXECUTABLE}={imports.python}",
    )
    started = submit("run", "--run-dir", str(run_dir), *variables, "--id", name, "--detach", *overrides, env=cluster)
    assert started.returncode == 0, started.stderr
    assert f"{name} submitted; everything it writes goes to {run_dir}" in started.stderr

    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    with live([f"{BIN}/verl-ext", "submit", "logs", name, "--follow"], tmp_path, cluster) as watching:
        watching.wait_for(tracker.exists, 800)
        assert f"{name} STOPPED" in submit("stop", name, env=cluster).stderr
        assert watching.process.wait(60) != 0
    assert "STOPPED" in submit("status", name, env=cluster).stdout

    resumed = submit("resume", name, env=cluster)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr
    assert "Resuming from" in resumed.stdout and "SUCCEEDED" in resumed.stderr
    steps = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line.startswith('{"step":')]
    assert steps[0].startswith('{"step":1,') and steps[-1].startswith('{"step":8,')
    assert tracker.read_text() == "8"
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
        environment = head.environment | {"RAY_AUTH_MODE": "disabled"}
        with live(nodes.inside(0, head.python, *settings), tmp_path, environment, nodes.mark) as run:
            run.wait_for(lambda: has_saved(tmp_path, 1))
            nodes.cable("down")
            before = last_saved(tmp_path)
            time.sleep(CUT_S)
            nodes.cable("up")
            run.wait_for(lambda: has_saved(tmp_path, before + 2))
            (runner,) = (process for process in processes(nodes.mark) if process.name().startswith("ray::StabilityT"))
            nodes.raylet(1 - nodes.number_of(runner)).kill()
            run.wait_for_end(1)
            wait_for_no_worker(nodes.mark)
    assert_one_error(run.console, r"a worker of the run died|has died")
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


def names(mark):
    """Titles of the run's processes; one may end while they are asked."""
    for process in processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process.name()
