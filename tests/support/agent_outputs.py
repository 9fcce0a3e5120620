"""The output of verl's agent loop for one trajectory."""

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.base.names import ROLLOUT_ROUTES

PROMPT, RESPONSE = 4, 5  # tokens


def output(rows):
    """Returns an output with this routing, [n, L, K]."""
    return AgentLoopOutput(
        prompt_ids=list(range(PROMPT)),
        response_ids=list(range(RESPONSE)),
        response_mask=[1] * RESPONSE,
        response_logprobs=[-0.5] * RESPONSE,
        routed_experts=rows,
        reward_score=1.0,
        metrics=AgentLoopMetrics(),
        extra_fields={"teacher_ids": torch.arange(3), "other": 1},
    )


def assert_same_but_routes(found, expected):
    """Compares the fields that two outputs write."""
    assert found.keys() == expected.keys()
    for name in found.keys() - {ROLLOUT_ROUTES}:
        if torch.is_tensor(expected[name]):
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name
        else:
            assert found[name] == expected[name], name
