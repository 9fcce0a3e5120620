"""The facts of an answer, through verl's own client and agent loop worker."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.experimental.agent_loop import agent_loop as verls_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.support.agent_loop_worker import asked_for, changed, client_of
from tests.support.agent_loop_worker import run as run_in_worker
from verl_ext.base.names import ANSWER_FACTS
from verl_ext.base.patching import PatchError
from verl_ext.core.answers import server_number
from verl_ext.upstream import agent_loop


@pytest.fixture(autouse=True)
def facts_wanted():
    client, loop = (agent_loop.change_client, llm_server), (agent_loop.change_agent_loop, verls_agent_loop)
    with changed(client, loop, answers=True):
        yield


class Server:
    """The actor handle that verl's client calls: it answers with these stop reasons, a token each, under these versions
    of its weights."""

    def __init__(self, *stops, versions=None):
        self.stops, self.versions = iter(stops), iter(versions or [3] * len(stops))
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, **_):
        return TokenOutput(
            token_ids=[7],
            log_probs=[-1.0],
            stop_reason=next(self.stops),
            extra_fields={"global_steps": next(self.versions)},
        )


def facts(client, *, calls=1, tokens=(7,)):
    """Returns the facts that verl's worker would write for a trajectory of so many calls."""

    async def loop(sampling_params, **_):
        asked = [client.generate("a", prompt_ids=[1], sampling_params=sampling_params) for _ in range(calls)]
        await asyncio.gather(*asked)
        response = {"response_ids": list(tokens), "response_mask": [1] * len(tokens)}
        return [AgentLoopOutput(prompt_ids=[1], **response, metrics=AgentLoopMetrics())]

    (fields,) = run_in_worker(loop, lambda outputs: [output.as_dict() for output in outputs])
    assert fields[ANSWER_FACTS].dtype == torch.int64
    return fields[ANSWER_FACTS].tolist()


@pytest.mark.parametrize("kind", [LLMServerClient, FullyAsyncLLMServerClient])
def test_a_trajectory_brings_its_server_its_loop_and_its_last_token(kind):
    client = client_of(Server(*["completed"] * 2), kind, addresses=("a:1", "b:2"))
    assert facts(client) == [server_number("a:1"), 0, 7, 1]
    assert facts(client, tokens=[3, *[5, 6] * 40]) == [server_number("b:2"), 80, 6, 1]


def test_several_servers_of_a_trajectory_are_none():
    assert facts(client_of(Server(*["completed"] * 2), addresses=("a:1", "b:2")), calls=2)[0] == 0
    assert facts(client_of(Server(*["completed"] * 2)), calls=2)[0] == server_number("one:1")


@pytest.mark.parametrize(("versions", "fresh"), [([3, 3, 3], 3), ([3, 4, 4], 2), ([3, 4, 6], 1), ([None] * 3, 0)])
def test_the_tokens_of_the_newest_weights_are_counted_over_interruptions(no_waiting, versions, fresh):
    server = Server("aborted", "aborted", "completed", versions=versions)
    assert facts(client_of(server, FullyAsyncLLMServerClient))[-1] == fresh


def test_an_answer_that_a_weight_sync_moves_to_another_server_has_none(no_waiting):
    client = client_of(Server("aborted", "completed"), FullyAsyncLLMServerClient, addresses=("a:1", "b:2"))
    assert facts(client)[0] == 0


def test_an_agent_loop_that_asks_no_server_of_verls_has_none():
    with asked_for(answers=True):
        output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
        assert output.as_dict()[ANSWER_FACTS].tolist() == [0, 0, 2, 0]


def test_a_client_that_chooses_its_server_elsewhere_is_refused():
    with pytest.raises(PatchError, match="VERL_EXT_AGENT_LOOP=answers:0"):
        agent_loop.change_client(SimpleNamespace(LLMServerClient=object))
