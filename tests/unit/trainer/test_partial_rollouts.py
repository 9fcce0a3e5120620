"""Responses of verl's asynchronous client that a weight sync interrupts; doctor reports them."""

import asyncio

import numpy as np
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

PROMPT = [7, 8, 9]


def answer(asked, version, ids, stop):
    """Answers as vLLM does: the log-probs of its own tokens, and the experts of every token but the last, all from
    these weights."""
    rows = len(asked) + len(ids) - 1
    return TokenOutput(
        token_ids=list(ids),
        log_probs=[-float(version)] * len(ids),
        routed_experts=np.full((rows, 1, 1), version),
        stop_reason=stop,
        num_preempted=0,
        extra_fields={"global_steps": version},
    )


def test_each_token_keeps_the_log_prob_and_the_experts_of_the_weights_that_sampled_it(monkeypatch, no_waiting):
    parts = iter([(1, (1, 2), "aborted"), (2, (), "aborted"), (3, (3, 4, 5), "completed")])
    asked = []

    async def generate(self, request_id, *, prompt_ids, **_):
        asked.append(list(prompt_ids))
        return answer(prompt_ids, *next(parts))

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    client = object.__new__(FullyAsyncLLMServerClient)
    client.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 16}}})
    found = asyncio.run(client.generate("one", prompt_ids=PROMPT, sampling_params={}))
    assert asked == [PROMPT, [*PROMPT, 1, 2], [*PROMPT, 1, 2]]
    assert found.token_ids == [1, 2, 3, 4, 5] and found.log_probs == [-1, -1, -3, -3, -3]
    # A row for every token but the last; that of token 2 is of the pass that sampled 3, by the newer weights.
    assert found.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 3, 3, 3]
    assert (found.extra_fields["min_global_steps"], found.extra_fields["max_global_steps"]) == (1, 3)
