"""Agent loop managers: verl's, its subclasses, and classes of one's own, which need not run verl's AgentLoopWorker."""

import pytest
import ray
from omegaconf import OmegaConf
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from tests.stack.own_manager import OwnManager
from tests.support.agent_loop_worker import asked_for
from verl_ext.base.errors import HookError
from verl_ext.base.patching import actor_class
from verl_ext.upstream.agent_loop import MANAGER, check_manager

ALL = {"narrow": True, "share": 0.5, "turns": True, "top_tokens": 8, "answers": True}
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}})


class OwnWorker(AgentLoopWorker):
    pass


class OwnWorkerTQ(actor_class(AgentLoopWorkerTQ)):
    pass


class WithOwnWorkers(AgentLoopManager):
    def __init__(self, *args, **kwargs):
        self.agent_loop_workers_class = ray.remote(OwnWorkerTQ)
        super().__init__(*args, **kwargs)


class WithOwnWorkersOfTheClass(AgentLoopManager):
    agent_loop_workers_class = ray.remote(OwnWorker)


class WithOtherWorkers(AgentLoopManager):
    agent_loop_workers_class = ray.remote(type("Other", (), {}))


@pytest.mark.parametrize(
    "manager",
    [AgentLoopManagerTQ, AgentLoopManager, WithOwnWorkers, WithOwnWorkersOfTheClass],
    ids=lambda one: one.__name__,
)
def test_verls_manager_and_subclasses_with_workers_of_its_lack_nothing(manager, capsys):
    with asked_for(**ALL):
        check_manager(manager(CONFIG, None))
    assert capsys.readouterr().out == ""


class WithWorkersThatAreNoActors(OwnManager):
    agent_loop_workers_class = "threads"


OWN = (OwnManager(None), WithWorkersThatAreNoActors(None), WithOtherWorkers(CONFIG, None))


@pytest.mark.parametrize("manager", OWN, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("wanted", "said", "error"),
    [
        ({}, [], None),
        ({"narrow": True}, [], None),
        ({"turns": True}, ["router/checked"], None),
        ({"turns": True, "answers": True}, ["router/checked", "answers/*"], None),
        ({"turns": True, "share": 0.5}, [], "stability.router_agreement_share=1"),
        ({"answers": True, "top_tokens": 8}, [], "stability.top_tokens.k=0"),
    ],
)
def test_a_manager_of_ones_own_leaves_out_with_a_line_or_is_refused(manager, wanted, said, error, capsys):
    with asked_for(**wanted):
        if error:
            with pytest.raises(HookError, match=f"{MANAGER}=.*{type(manager).__name__}.*{error}"):
                check_manager(manager)
        else:
            check_manager(manager)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said) and all(name in lines[0] for name in said)
