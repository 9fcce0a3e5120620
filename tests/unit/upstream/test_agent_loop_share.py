"""A share of the trajectories keeps its routing, on verl's own AgentLoopOutput."""

import math
import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.experimental.agent_loop import agent_loop as verls_agent_loop

from tests.support.agent_loop_worker import asked_for, changed
from tests.support.agent_outputs import PROMPT, RESPONSE, assert_same_but_routes, output
from verl_ext.base.names import ROLLOUT_ROUTES
from verl_ext.upstream import agent_loop
from verl_ext.upstream.agent_loop import Systematic

LAYERS, TOP_K = 3, 2


def some_rows(dtype):
    rows = np.arange((PROMPT + RESPONSE) * LAYERS * TOP_K, dtype=dtype).reshape(PROMPT + RESPONSE, LAYERS, TOP_K)
    rows.flags.writeable = False  # as Ray hands it out
    return torch.tensor(rows) if dtype is np.int32 else rows  # as SGLang's are decoded


@pytest.fixture
def hooked():
    """hooked(take): sets this process up as in a run that samples every trajectory (take=True) or none."""
    with ExitStack() as stack:
        change = agent_loop.change_agent_loop, verls_agent_loop

        def hook(take):
            stack.enter_context(changed(change, sampling=Systematic(float(take), 0.0), narrow=True))

        yield hook


def without_a_share(rows):
    with asked_for(narrow=True):
        return output(rows).as_dict()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_what_is_left_out_is_empty_and_all_else_is_verls(hooked, dtype):
    hooked(False)
    found = output(some_rows(dtype)).as_dict()
    whole = without_a_share(some_rows(dtype))
    assert_same_but_routes(found, whole)
    routes = found[ROLLOUT_ROUTES]
    assert routes.shape == (0, LAYERS, TOP_K) and routes.dtype == whole[ROLLOUT_ROUTES].dtype
    assert routes.untyped_storage().nbytes() == 0, "of a larger tensor, which would stay"


def test_what_is_sampled_is_as_without_a_share(hooked):
    hooked(True)
    found = output(some_rows(np.uint16)).as_dict()
    whole = without_a_share(some_rows(np.uint16))
    assert torch.equal(found[ROLLOUT_ROUTES], whole[ROLLOUT_ROUTES]) and len(found[ROLLOUT_ROUTES]) == PROMPT + RESPONSE


def test_a_trajectory_without_routing_has_no_field_and_does_not_count(hooked):
    hooked(False)
    assert ROLLOUT_ROUTES not in output(None).as_dict()
    half = Systematic(0.5, 0.5)
    with asked_for(sampling=half):
        agent_loop.as_dict(lambda output: {}, output(None))
    assert half.take()


@given(st.floats(0.01, 1), st.floats(0, 1, exclude_max=True), st.integers(1, 300), st.integers(0, 99))
def test_of_any_in_a_row_the_share_is_taken_to_within_one(share, start, n, skip):
    sampling = Systematic(share, start)
    taken = [sampling.take() for _ in range(skip + n)][skip:]
    assert math.floor(n * share - 1e-9) <= sum(taken) <= math.ceil(n * share + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_starts_are_even_so_that_each_trajectory_is_taken_as_often(share):
    starts, places = 1000, 20
    taken = np.zeros(places)
    for start in range(starts):
        sampling = Systematic(share, (start + 0.5) / starts)
        taken += [sampling.take() for _ in range(places)]
    assert np.abs(taken / starts - share).max() <= 1 / starts


def test_pythons_own_random_state_is_left_alone(monkeypatch):
    monkeypatch.setenv(agent_loop.VARIABLE, "share:0.5")
    monkeypatch.setattr(agent_loop, "register_post_import_hook", lambda hook, module: None)
    random.seed(1)
    before, starts = random.getstate(), []
    with asked_for():
        for _ in range(2):
            agent_loop.install_changes()
            starts.append(agent_loop._sampling._due)
    assert random.getstate() == before
    assert len(set(starts)) == 2 and all(0 <= start < 1 for start in starts)


def test_a_forked_process_takes_its_own_environment_and_nothing_is_changed_twice(fresh_python):
    """Forks as tools/prefork.py does: the modules are imported and changed before the environment changes."""
    code = (
        "import os, verl_ext.plugins.verl, numpy as np\n"
        "from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput\n"
        "from verl_ext.upstream import agent_loop\n"
        "output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics(),\n"
        "                         routed_experts=np.ones((2, 1, 2), np.uint8))\n"
        "for value in ('narrow:1', 'narrow:1', ''):\n"
        "    os.environ[agent_loop.VARIABLE] = value\n"
        "    agent_loop.install_changes()\n"
        "    fields = output.as_dict()\n"
        "    print(len(fields['routed_experts']), fields['routed_experts'].dtype,\n"
        "          hasattr(AgentLoopOutput.as_dict.__wrapped__, '__wrapped__'))"
    )
    done = fresh_python(code, **{agent_loop.VARIABLE: "share:1e-9"})
    assert done.stdout.splitlines()[-3:] == ["2 torch.uint8 False", "2 torch.uint8 False", "2 torch.int16 False"], (
        done.stderr
    )
