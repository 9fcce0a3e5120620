"""The weights of chosen experts through vLLM's own capture classes and verl's own AgentLoopOutput."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.errors import HookError
from verl_ext.fields import ROLLOUT_ROUTES, ROLLOUT_WEIGHTS
from verl_ext.upstream import narrow_routing, routed_weights

PROMPT, RESPONSE, LAYERS, TOP_K = 4, 5, 3, 2


def output(rows):
    return AgentLoopOutput(
        prompt_ids=list(range(PROMPT)),
        response_ids=list(range(RESPONSE)),
        response_mask=[1] * RESPONSE,
        routed_experts=rows,
        metrics=AgentLoopMetrics(),
    )


def captured(tokens, experts=8):
    """What vLLM's scheduler would keep of random choices, and the choices."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts, (tokens, LAYERS, TOP_K), generator=generator)
    weights = torch.rand(tokens, LAYERS, TOP_K, generator=generator)
    layers = [routed_weights.with_weights(ids[:, layer], weights[:, layer]) for layer in range(LAYERS)]
    return torch.stack(layers, 1).numpy().astype(np.uint16), ids, weights.half()


@pytest.fixture
def asked(monkeypatch):
    """asked(experts): as in a process of a run, narrow routing first."""
    undo = []

    def ask(experts):
        monkeypatch.setenv(routed_weights.VARIABLE, str(experts))
        undo.append(narrow_routing.narrow(agent_loop))
        undo.append(routed_weights.in_agent_loop(agent_loop))

    yield ask
    for each in reversed(undo):
        each()


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (512, torch.int16)])
@pytest.mark.parametrize("tokens", [1, PROMPT + RESPONSE - 1, PROMPT + RESPONSE + 2])
def test_ids_and_weights_come_apart_as_they_were(asked, tokens, experts, dtype):
    rows, ids, weights = captured(tokens, experts)
    asked(experts)
    fields = output(rows).as_dict()
    there = min(tokens, PROMPT + RESPONSE)
    for name, expected in ((ROLLOUT_ROUTES, ids.to(dtype)), (ROLLOUT_WEIGHTS, weights)):
        assert fields[name].shape == (PROMPT + RESPONSE, LAYERS, TOP_K) and fields[name].dtype == expected.dtype
        assert torch.equal(fields[name][:there], expected[:there]) and not fields[name][there:].any()


def test_without_routing_there_is_neither_field(asked):
    asked(8)
    assert not {ROLLOUT_ROUTES, ROLLOUT_WEIGHTS} & output(None).as_dict().keys()


def test_ids_without_weights_are_an_error_that_names_the_setting(asked):
    asked(8)
    with pytest.raises(HookError, match=r"uint8 \(9, 3, 2\) where their weights.*stability\.router_weights=false"):
        output(np.zeros((PROMPT + RESPONSE, LAYERS, TOP_K), np.uint8)).as_dict()


@pytest.fixture
def capturer():
    module = pytest.importorskip(routed_weights.CAPTURER)
    undo = routed_weights.in_capturer(module)
    yield module
    undo()


def test_vllms_buffers_hold_ids_and_weights_and_its_own_when_it_is_undone(capturer):
    config = SimpleNamespace(num_experts=8, num_experts_per_tok=TOP_K)
    assert capturer._get_num_experts_per_tok(config) == 2 * TOP_K and capturer.get_num_experts(config) == 2**16


def test_a_kernel_that_hands_out_ids_alone_is_an_error(capturer):
    capture = capturer.RoutedExpertsCapturer.capture
    with pytest.raises(HookError, match="handed out 2 numbers a token where ids and weights are 4"):
        capture(SimpleNamespace(device_buffer=torch.zeros(3, LAYERS, 2 * TOP_K)), 0, torch.zeros(3, TOP_K))


def test_a_router_of_vllm_hands_out_the_weights_of_the_same_call():
    module = pytest.importorskip(routed_weights.ROUTER)

    class Router(module.BaseRouter):
        routing_method_type = None

        def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
            return router_logits.softmax(-1).topk(TOP_K)

    undo = routed_weights.in_router(module)
    try:
        router, taken = Router(TOP_K, 8), []
        router.set_capture_fn(taken.append)
        logits = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        for each in logits:
            router.select_experts(torch.zeros(5, 4), each)
        for rows, each in zip(taken, logits, strict=True):
            ids, weights = routed_weights.apart(rows[:, None].numpy().astype(np.uint16), 8)
            expected = each.softmax(-1).topk(TOP_K)
            assert np.array_equal(ids[:, 0], expected.indices.numpy())
            assert np.array_equal(weights[:, 0], expected.values.half().numpy())
        router.set_capture_fn(None)
        router.select_experts(torch.zeros(5, 4), logits[0])
        assert len(taken) == 2
    finally:
        undo()
