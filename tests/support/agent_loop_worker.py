"""Our change to verl's agent loop, and an agent loop in verl's own client and worker, without Ray."""

import asyncio
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as verls
from verl.workers.rollout.llm_server import LLMServerClient

from verl_ext.upstream import agent_loop


@contextmanager
def asked_for(sampling=None, **wanted):
    """A process that was asked for this; `sampling` decides which trajectories bring their expert ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_loop, "_extras", agent_loop.Extras(**wanted))
        patch.setattr(agent_loop, "_sampling", sampling)
        yield


@contextmanager
def changed(*changes, sampling=None, **wanted):
    """Changes this process as in a run that asks for this; each change is (a function such as change_client, its
    module)."""
    with asked_for(sampling, **wanted):
        undos = [change(module) for change, module in changes]
        try:
            yield
        finally:
            for undo in undos:
                undo()


def client_of(server, kind=LLMServerClient, addresses=("one:1",)):
    """verl's client of one server, which has these addresses in turn, a call each."""
    made = object.__new__(kind)
    rollout = {"name": "vllm", "response_length": 16, "full_determinism": False}
    made.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})

    turns = itertools.cycle(addresses)

    async def acquire(**_):
        return next(turns), server

    made._load_balancer = SimpleNamespace(acquire_server=SimpleNamespace(remote=acquire))
    made._lb_require_acquire_fields, made._only_hybrid = [], False
    made._release_server = lambda *_, **__: None
    return made


def run(loop, written, *, validate=False):
    """Applies `written` to the outputs of an agent loop in verl's worker; returns its result."""
    worker = object.__new__(verls.AgentLoopWorker)
    for name in ("llm_client", "tokenizer", "processor", "hf_model_type", "dataset_cls", "tools"):
        setattr(worker, name, None)
    worker.config = OmegaConf.create({"data": {}})

    async def postprocess(outputs, *_, **__):
        return written(outputs)

    worker._agent_loop_postprocess = postprocess
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": validate}

    async def whole():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(verls._agent_loop_registry, "test", {})
            patch.setattr(verls.hydra.utils, "instantiate", lambda **_: SimpleNamespace(run=loop))
            found = await worker._run_agent_loop({"temperature": 1.0}, trajectory, agent_name="test", trace=False)
        assert agent_loop._trajectory.get() is None, "what was remembered is given up"
        return found

    return asyncio.run(whole())
