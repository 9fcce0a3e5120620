"""A run over two nodes whose network breaks for a while, and one of which then dies."""

import re
import time

import psutil
import pytest

from tests.stack.left import SAVES, last_saved, saved, shards
from tests.stack.running import PY_EXECUTABLE, kill_all, processes, start, wait_for
from tests.stack.two_nodes import two_nodes

pytestmark = pytest.mark.e2e

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
            wait_for(lambda: saved(tmp_path, 2), started, console)
            nodes.cable("down")
            before = last_saved(tmp_path)
            time.sleep(CUT_S)
            nodes.cable("up")
            wait_for(lambda: saved(tmp_path, before + 3), started, console)
            (runner,) = (process for process in processes(nodes.mark) if process.name().startswith("ray::StabilityT"))
            nodes.raylet(1 - nodes.number_of(runner)).kill()
            assert started.wait(150) == 1
            wait_for_no_worker(nodes.mark)
        finally:
            kill_all(nodes.mark)
    text = console.read_text()
    errors = [line for line in text.splitlines() if line.startswith("verl_ext: error:")]
    assert len(errors) == 1 and re.search(r"a worker of the run died|has died", errors[0]), text[-3000:]
    assert "trainer.resume_mode=auto" in errors[0]
    for rank in (0, 1):
        assert shards(tmp_path, last_saved(tmp_path), rank=rank, of=2), "the last checkpoint can be read"


def wait_for_no_worker(mark):
    """Ray's daemons of the node that lives are the cluster's, and stay."""
    deadline = time.monotonic() + 60
    while found := [name for name in map(psutil.Process.name, processes(mark)) if name.startswith(("ray::", "VLLM"))]:
        if all(name.endswith("Agent") for name in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(1)
