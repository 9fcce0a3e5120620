"""SGLang's routed experts on their way through verl's real server class; what SGLang does is in test_sglang.py."""

import asyncio
import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from tests.support.sglang_server import generated, server, verls_server_module
from verl_ext.base.errors import HookError
from verl_ext.base.patching import PatchError
from verl_ext.upstream.sglang_routing import decode_experts, decode_routing, decodes

PROMPT, RESPONSE = [5, 6, 7], [8, 9]
LAYERS, TOP_K = 4, 2
ROWS = len(PROMPT) + len(RESPONSE) - 1


def ids(rows=ROWS, layers=LAYERS, top_k=TOP_K, experts=512):
    return np.random.default_rng(rows).integers(0, experts, (rows, layers, top_k)).astype(np.int32)


def text_of(routes):
    """As SGLang 0.5.10 to 0.5.12 write it: base64 of the int32, row by row, in this machine's byte order."""
    return base64.b64encode(routes.tobytes()).decode("utf-8")


class Manager:
    """What verl asks of SGLang's TokenizerManager: one request, one output with everything."""

    model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS, num_experts_per_tok=TOP_K))

    def __init__(self, **meta):
        self.meta, self.asked, self.closed = meta, None, False

    async def generate_request(self, obj, request=None):
        self.asked = obj
        meta = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(RESPONSE),
            "output_token_logprobs": [(-0.5, token, None) for token in RESPONSE],
        }
        try:
            yield {"output_ids": list(RESPONSE), "meta_info": meta | self.meta}
        finally:
            self.closed = True


@pytest.fixture
def module():
    with verls_server_module() as found:
        decode_routing(found)
        yield found


def test_verls_server_returns_what_sglang_captured(module):
    routes, manager = ids(), Manager()
    manager.meta["routed_experts"] = text_of(routes)
    output = generated(module, manager, PROMPT)
    assert manager.asked.return_routed_experts and manager.asked.return_logprob
    assert output.token_ids == RESPONSE and output.log_probs == [-0.5, -0.5]
    assert np.array_equal(output.routed_experts, routes)
    fields = AgentLoopOutput(
        prompt_ids=PROMPT,
        response_ids=RESPONSE,
        response_mask=[1, 1],
        response_logprobs=output.log_probs,
        routed_experts=output.routed_experts,
        metrics=AgentLoopMetrics(),
    ).as_dict()
    carried = fields["routed_experts"]  # row t is of the pass over token t, and zeros are where there was none
    assert carried.shape == (len(PROMPT) + len(RESPONSE), LAYERS, TOP_K) and carried.dtype == torch.int16
    assert np.array_equal(carried[:-1].numpy(), routes) and not carried[-1].any()
    assert fields["rollout_log_probs"].tolist() == [-0.5, -0.5]


def test_without_the_change_verl_stops_at_the_text(module):
    decode_routing(module)()  # once more changes nothing, and its undo undoes nothing
    made = server(module, Manager())
    assert decodes(made)
    made.tokenizer_manager = Manager(routed_experts=text_of(ids()))
    assert not decodes(made)
    with pytest.raises(AttributeError, match="'str' object has no attribute 'numpy'"):
        asyncio.run(made.generate(list(PROMPT), {"logprobs": True}, "request"))


@pytest.mark.parametrize("given_routes", [None, torch.from_numpy(ids())], ids=["aborted", "sglang 0.5.9"])
def test_what_is_no_text_passes_as_it_is(module, given_routes):
    output = generated(module, Manager(routed_experts=given_routes), PROMPT)
    assert output.routed_experts is None or np.array_equal(output.routed_experts, given_routes.numpy())


def test_a_client_over_http_gets_the_text_and_the_request_is_closed(module):
    text = text_of(ids())
    made = server(module, Manager(routed_experts=text))

    async def first(request):
        outputs = made.tokenizer_manager.generate_request(SimpleNamespace(), request)
        output = await outputs.__anext__()
        await outputs.aclose()
        return output["meta_info"]["routed_experts"]

    assert asyncio.run(first(SimpleNamespace())) == text
    assert torch.is_tensor(asyncio.run(first(None)))
    assert made.tokenizer_manager.closed


def test_a_server_of_another_verl_is_refused():
    with pytest.raises(PatchError, match="sglang_routing was written for verl 0"):
        decode_routing(SimpleNamespace(set_global_state=lambda state, port: None))


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 4))
def test_the_text_is_read_back_as_it_was_written(tokens, layers, top_k):
    routes = ids(tokens - 1, layers, top_k, experts=2**15)
    found = decode_experts(text_of(routes), tokens, layers, top_k)
    assert found.dtype == torch.int16 and np.array_equal(found.numpy(), routes)


@pytest.mark.parametrize(("rows", "layers", "tokens"), [(3, LAYERS, 5), (4, LAYERS + 1, 5), (4, LAYERS, 6)])
def test_ids_of_another_size_are_refused(rows, layers, tokens):
    with pytest.raises(HookError, match=rf"for {tokens} tokens, 4 layers and top-2.*SGLang 0.5.12"):
        decode_experts(text_of(ids(rows, layers)), tokens, LAYERS, TOP_K)
