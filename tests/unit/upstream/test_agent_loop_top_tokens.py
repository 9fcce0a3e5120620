"""Top tokens pass through verl's own client, agent loop worker and AgentLoopOutput; vLLM: see test_vllm_engine.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop import agent_loop as verls_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.support.agent_loop_worker import asked_for, changed, client_of
from tests.support.agent_loop_worker import run as run_in_worker
from verl_ext.base.errors import HookError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.base.patching import PatchError
from verl_ext.upstream import agent_loop

K = 3
PROMPT = [7, 8]


def top_tokens(token):
    """Returns top tokens that are recognisable as this token's."""
    return [token, token + 100, token + 200], [-0.1 * token, -1.0, -np.inf]


def answer(ids, stop="completed", k=K):
    ids_of, log_q_of = zip(*(top_tokens(token) for token in ids), strict=True) if ids else ((), ())
    extra = {"global_steps": 1}
    if k:
        extra |= {
            TOP_TOKEN_IDS: np.array(ids_of, np.int32).reshape(-1, K),
            TOP_TOKEN_LOG_PROBS: np.array(log_q_of, np.float32).reshape(-1, K),
        }
    return TokenOutput(
        token_ids=list(ids), log_probs=[-1.0] * len(ids), stop_reason=stop, num_preempted=0, extra_fields=extra
    )


class Server:
    """The actor handle that verl's client calls. It answers as vLLM's server does to a request for top tokens."""

    def __init__(self, *answers):
        self.answers, self.asked = iter(answers), []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id, *, prompt_ids, sampling_params, **_):
        self.asked.append((list(prompt_ids), dict(sampling_params)))
        ids, stop = next(self.answers)
        return answer(ids, stop, sampling_params.get("extra_args", {}).get(agent_loop.TOP_TOKENS_ASKED, 0))


@pytest.fixture
def client_and_loop():
    client, loop = (agent_loop.change_client, llm_server), (agent_loop.change_agent_loop, verls_agent_loop)
    with changed(client, loop, top_tokens=K):
        yield


def run(loop, *, validate=False):
    """Returns the fields that verl's worker would write for an agent loop's outputs."""
    return run_in_worker(loop, lambda outputs: [output.as_dict() for output in outputs], validate=validate)


def output(response, mask, prompt=PROMPT):
    return AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=mask, metrics=AgentLoopMetrics(), num_turns=2
    )


def assert_top_tokens(fields, tokens):
    """Checks the response's top tokens: `tokens` has the token whose are expected, or None where there is none."""
    ids, log_q = fields[TOP_TOKEN_IDS], fields[TOP_TOKEN_LOG_PROBS]
    assert (ids.dtype, log_q.dtype) == (torch.int32, torch.float32)
    assert len(ids) == len(log_q) == len(tokens) == len(fields["responses"])
    for row, token in enumerate(tokens):
        if token is None:
            assert (log_q[row] == -torch.inf).all()
        else:
            assert ids[row].tolist() == top_tokens(token)[0]
            assert log_q[row].tolist() == torch.tensor(top_tokens(token)[1]).tolist()


def test_verls_server_client_and_agent_loop_bring_the_top_tokens(client_and_loop):
    """Two turns with a tool's answer between them; the loop cuts the last token."""
    server = Server(((1, 2), "completed"), ((3, 4, 5), "completed"))
    client = client_of(server)

    async def loop(sampling_params, **_):
        await client.generate("a", prompt_ids=PROMPT, sampling_params=sampling_params)
        await client.generate("a", prompt_ids=[*PROMPT, 1, 2, 50, 51], sampling_params=sampling_params)
        return [output([1, 2, 50, 51, 3, 4], [1, 1, 0, 0, 1, 1])]

    (fields,) = run(loop)
    assert_top_tokens(fields, [1, 2, None, None, 3, 4])
    assert TOP_TOKEN_IDS not in fields["extra_fields"]
    assert [asked[1]["extra_args"] for asked in server.asked] == [{agent_loop.TOP_TOKENS_ASKED: K}] * 2


def test_a_response_that_a_weight_sync_interrupts_has_the_top_tokens_of_both_parts(client_and_loop, no_waiting):
    server = Server(((1, 2), "aborted"), ((3,), "completed"))
    client = client_of(server, FullyAsyncLLMServerClient)

    async def loop(sampling_params, **_):
        found = await client.generate("a", prompt_ids=PROMPT, sampling_params=sampling_params)
        return [output(found.token_ids, [1, 1, 1])]

    assert_top_tokens(run(loop)[0], [1, 2, 3])


def test_each_of_several_trajectories_has_its_own(client_and_loop):
    client = client_of(Server(((1, 2), "completed"), ((1, 2), "completed")))

    async def loop(sampling_params, **_):
        await client.generate("a", prompt_ids=PROMPT, sampling_params=sampling_params)
        await client.generate("b", prompt_ids=[9], sampling_params=sampling_params)
        return [output([1, 2], [1, 1], prompt=[9]), output([1, 3], [1, 1]), output([1], [1], prompt=[5])]

    first, second, third = run(loop)
    assert_top_tokens(first, [1, 2])
    assert_top_tokens(second, [1, None])  # another token stands there than was sampled
    assert_top_tokens(third, [None])


def test_validation_asks_for_none_and_has_no_such_fields(client_and_loop):
    server = Server(((1,), "completed"))
    client = client_of(server)

    async def loop(sampling_params, **_):
        await client.generate("a", prompt_ids=PROMPT, sampling_params=sampling_params)
        return [output([1], [1])]

    (fields,) = run(loop, validate=True)
    assert TOP_TOKEN_IDS not in fields and "extra_args" not in server.asked[0][1]


def test_a_trajectory_without_a_call_has_fields_all_the_same(client_and_loop):
    """All rows of a batch must have the same fields."""

    async def loop(sampling_params, **_):
        return [output([1, 2], [1, 1])]

    assert_top_tokens(run(loop)[0], [None, None])


def test_it_is_off_unless_the_environment_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(agent_loop, "register_post_import_hook", lambda hook, module: asked.append(module))
    monkeypatch.delenv(agent_loop.VARIABLE, raising=False)
    with asked_for():
        agent_loop.install_changes()
        assert asked == []
        monkeypatch.setenv(agent_loop.VARIABLE, "top_tokens:8")
        agent_loop.install_changes()
    assert asked == [agent_loop.SERVER, agent_loop.CLIENT, agent_loop.AGENT_LOOP]


def flat(n, width):
    values = [-float(i) for i in range(n * width)]
    starts = [i * width for i in range(n)]

    class Flat(SimpleNamespace):
        def __len__(self):
            return len(self.start_indices)

    return Flat(start_indices=starts, logprobs=values, token_ids=list(range(n * width)))


def test_what_vllm_returns_flat_becomes_two_arrays_and_the_sampled_tokens_values():
    sampled, ids, log_q = agent_loop.unpack_top_tokens(flat(2, 1 + K), [0, 4])
    assert [value.logprob for value in sampled] == [0, -4]
    assert ids.tolist() == [[1, 2, 3], [5, 6, 7]] and log_q.tolist() == [[-1, -2, -3], [-5, -6, -7]]


@pytest.mark.parametrize(("answered", "tokens"), [(flat(2, 4), 3), (flat(2, 1), 2)])
def test_top_tokens_of_another_number_than_tokens_are_an_error(answered, tokens):
    with pytest.raises(HookError, match=r"stability\.top_tokens\.k=0"):
        agent_loop.unpack_top_tokens(answered, list(range(tokens)))


def test_another_client_is_told(monkeypatch):
    monkeypatch.setattr(LLMServerClient, "generate", lambda self, prompt: None)
    with asked_for(top_tokens=K), pytest.raises(PatchError, match="agent_loop"):
        agent_loop.change_client(llm_server)
