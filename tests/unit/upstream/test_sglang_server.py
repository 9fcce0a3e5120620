"""SGLang's results on their way through verl's real server class; SGLang itself is tested in test_sglang.py."""

import asyncio
import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from tests.support.agent_loop_worker import client_of
from tests.support.closeness import close
from tests.support.sglang_server import generated, server, verls_server_module
from verl_ext.base.errors import HookError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.base.patching import PatchError
from verl_ext.upstream.agent_loop import ROWS_HELD, TOP_TOKENS_ASKED
from verl_ext.upstream.sglang_server import Cut, decode_experts, decodes, extend_server, normalise, unpack_top

PROMPT, RESPONSE = [5, 6, 7], [8, 9]
LAYERS, TOP_K = 4, 2
ROWS = len(PROMPT) + len(RESPONSE) - 1


def ids(rows=ROWS, layers=LAYERS, top_k=TOP_K, experts=512):
    return np.random.default_rng(rows).integers(0, experts, (rows, layers, top_k)).astype(np.int32)


def text_of(routes):
    """The text of SGLang 0.5.10 to 0.5.12: base64 of the int32, row by row, in this machine's byte order."""
    return base64.b64encode(routes.tobytes()).decode("utf-8")


class Manager:
    """Stands in for SGLang's TokenizerManager as far as verl uses it: one request, one output with everything."""

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
        extend_server(found)
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
    extend_server(module)()  # once more changes nothing, and its undo undoes nothing
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


@pytest.mark.parametrize("moved", ["generate", "set_global_state"])
def test_a_server_of_another_verl_is_refused(moved):
    class SGLangHttpServer:
        def generate(self, prompt_ids, sampling_params, request_id):
            pass

    module = SimpleNamespace(set_global_state=lambda global_state: None, SGLangHttpServer=SGLangHttpServer)
    extend_server(module)()
    setattr(module if moved == "set_global_state" else SGLangHttpServer, moved, lambda self, port: None)
    with pytest.raises(PatchError, match="sglang_server was written for verl 0"):
        extend_server(module)


@given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4))
def test_the_text_is_read_back_as_it_was_written(rows, layers, top_k):
    routes = ids(rows, layers, top_k, experts=2**15)
    found = decode_experts(text_of(routes), rows, layers, top_k)
    assert found.dtype == torch.int16 and np.array_equal(found.numpy(), routes)


@pytest.mark.parametrize(("rows", "layers", "tokens"), [(3, LAYERS, 4), (4, LAYERS + 1, 4), (4, LAYERS, 5)])
def test_ids_of_another_size_are_refused(rows, layers, tokens):
    with pytest.raises(HookError, match=rf"for {tokens} tokens, 4 layers and top-2.*SGLang 0.5.12"):
        decode_experts(text_of(ids(rows, layers)), tokens, LAYERS, TOP_K)


def test_rows_that_are_held_do_not_come_again(module):
    routes, manager, held = ids(), Manager(), 2
    manager.meta["routed_experts"] = text_of(routes[held:])
    output = generated(module, manager, PROMPT, extra_args={ROWS_HELD: held})
    assert manager.asked.routed_experts_start_len == held and "extra_args" not in manager.asked.sampling_params
    assert np.array_equal(output.routed_experts, routes[held:]) and output.extra_fields[ROWS_HELD] == held
    aborted = generated(module, Manager(), PROMPT, extra_args={ROWS_HELD: held})
    assert aborted.routed_experts is None and ROWS_HELD not in aborted.extra_fields


# Top tokens

P = np.array([0.4, 0.3, 0.2, 0.06, 0.04])  # of tokens 10 to 14
K = 4


def answered(*sampled):
    """Returns SGLang's answer for these tokens and for the K most likely ones: log-probabilities of the whole
    vocabulary."""
    log_p = np.log(P).astype(np.float32)
    return {
        "output_token_logprobs": [(float(log_p[token - 10]), token, None) for token in sampled],
        "output_top_logprobs": [[(float(log_p[i]), 10 + i, None) for i in range(K)] for _ in sampled],
    }


def asked(**extra):
    return {"extra_args": {TOP_TOKENS_ASKED: K} | extra}


def test_top_tokens_that_are_asked_for_come_with_the_answer(module):
    manager = Manager(**answered(11, 14))
    output = generated(module, manager, PROMPT, **asked())
    assert manager.asked.top_logprobs_num == K and "extra_args" not in manager.asked.sampling_params
    assert output.extra_fields["global_steps"] == 3
    assert output.extra_fields[TOP_TOKEN_IDS].tolist() == [[10, 11, 12, 13]] * 2
    close(
        torch.from_numpy(output.extra_fields[TOP_TOKEN_LOG_PROBS]),
        torch.log(torch.tensor(P[:K].tolist())).expand(2, -1),
    )
    close(torch.tensor(output.log_probs), torch.log(torch.tensor([0.3, 0.04])))


def test_retractions_are_verls_preemptions(module):
    assert generated(module, Manager(num_retractions=2), PROMPT).num_preempted == 2
    assert generated(module, Manager(), PROMPT).num_preempted == 0  # aborted in the queue, before it ran


def test_a_part_that_an_abort_ends_in_the_queue_brings_no_tokens_without_their_experts(module, no_waiting):
    """A response has three parts, through verl's client. SGLang lost the second part's experts with its cache."""
    routes = ids(rows=8)

    class Interrupted(Manager):
        async def generate_request(self, obj, request=None):
            abort, before = {"type": "abort"}, len(obj.input_ids)
            tokens, reason, rows = next(answers)
            meta = {"finish_reason": abort if reason else {"type": "stop"}, "prompt_tokens": before}
            meta |= {"completion_tokens": len(tokens), "output_token_logprobs": [(-0.5, t, None) for t in tokens]}
            meta |= {"routed_experts": text_of(routes[: before + len(tokens) - 1])} if rows else {}
            yield {"output_ids": list(tokens), "meta_info": meta}

    answers = iter([((8, 9), "abort", True), ((20, 21), "abort", False), ((10, 11), "", True)])

    made = server(module, Interrupted(), response_length=16)
    client = client_of(SimpleNamespace(generate=SimpleNamespace(remote=made.generate)), FullyAsyncLLMServerClient)
    output = asyncio.run(client.generate("a", prompt_ids=PROMPT, sampling_params={"logprobs": True}))
    assert len(output.routed_experts) == len(PROMPT) + len(output.token_ids) - 1, "one for each token but the last"
    assert np.array_equal(output.routed_experts, routes[:6])
    assert output.token_ids == [8, 9, 10, 11] and len(output.log_probs) == 4


def test_what_is_not_asked_for_is_not_there(module):
    manager = Manager()
    output = generated(module, manager, PROMPT, top_k=2)
    assert not getattr(manager.asked, "top_logprobs_num", None)
    assert output.extra_fields.keys() == {"global_steps"} and output.log_probs == [-0.5, -0.5]


def test_log_probs_of_truncated_sampling_are_of_what_was_kept(module):
    output = generated(module, Manager(**answered(11, 10)), PROMPT, **asked(), top_k=3, top_p=0.5)
    expected = torch.log(torch.tensor([4 / 7, 3 / 7, 0, 0]))
    close(torch.from_numpy(output.extra_fields[TOP_TOKEN_LOG_PROBS]), torch.stack([expected] * 2))
    close(torch.tensor(output.log_probs), expected[[1, 0]])


def test_with_raw_log_probs_they_stay_as_sglang_has_them(module):
    made = server(module, Manager(**answered(11, 10)))
    made.config.logprobs_mode = "raw_logprobs"
    sampling = {"logprobs": True, "top_k": 3, "top_p": 0.5} | asked()
    output = asyncio.run(made.generate(list(PROMPT), sampling, "request"))
    close(torch.tensor(output.log_probs), torch.log(torch.tensor([0.3, 0.4])))
    assert np.isfinite(output.extra_fields[TOP_TOKEN_LOG_PROBS]).all()


def test_an_answer_whose_tokens_verl_drops_has_no_top_tokens(module):
    manager = Manager(**answered(11, 10, 12))  # one more than tokens
    output = generated(module, manager, PROMPT, **asked())
    assert output.token_ids == [] and output.extra_fields[TOP_TOKEN_IDS].shape == (0, K)
    aborted = generated(module, Manager(output_token_logprobs=[], output_top_logprobs=[]), PROMPT, **asked())
    assert aborted.extra_fields[TOP_TOKEN_LOG_PROBS].shape == (0, K)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"min_p": 0.1}, "a request has min_p=0.1, so the sampler's top tokens are of another distribution"),
        ({"min_new_tokens": 3}, "a request has min_new_tokens=3"),
        ({"top_k": 5}, "a request has top_k=5 and top_p=1.0, which may keep more than the 4 top tokens"),
        ({"top_p": 0.9}, "give a top_k of at most 4"),
    ],
)
def test_a_distribution_that_the_top_tokens_do_not_show_is_refused(module, sampling, message):
    with pytest.raises(HookError, match=message):
        generated(module, Manager(**answered(11, 10)), PROMPT, **asked(), **sampling)
    generated(module, Manager(**answered(11, 10)), PROMPT, **sampling)  # without top tokens it is of no concern


def test_what_is_asked_of_a_server_that_reads_prompts_goes_to_the_one_that_decodes(module):
    """verl's server calls itself and the server that decodes."""
    requests = []

    async def remote(prompt_ids, sampling_params, request_id, **named):
        requests.append((sampling_params["extra_args"], named["bootstrap_room"]))
        return "decoded"

    made = server(module, Manager(**answered(11, 10)))
    made._disaggregation_role = "prefill"
    made._pd_decode_peers = [SimpleNamespace(generate=SimpleNamespace(remote=remote))]
    made._pd_bootstrap_host, made._disaggregation_bootstrap_port = "here", 1
    assert asyncio.run(made.generate(list(PROMPT), {"logprobs": True} | asked(), "request")) == "decoded"
    assert made.tokenizer_manager.asked.top_logprobs_num == K
    ((extra, room),) = requests
    assert extra == {TOP_TOKENS_ASKED: K} and room == made.tokenizer_manager.asked.bootstrap_room


@pytest.mark.parametrize(
    "places", [[], [[(-1.0, 3, None)]], [[(-1.0, 3, None), (-2.0, 4, None)], None]], ids=["none", "narrow", "one"]
)
def test_top_tokens_of_another_size_are_refused(places):
    with pytest.raises(HookError, match=r"set stability\.top_tokens\.k=0"):
        unpack_top(places, 2, 2)


def test_a_token_of_probability_0_is_no_token():
    _, log_p = unpack_top([[(0.0, 3, None), (float(np.finfo(np.float32).min), 4, None)]], 1, 2)
    assert log_p.tolist() == [[0.0, -np.inf]]


def kept_oracle(p, top_k, top_p):
    """Tokens by probability, in plain Python: which are kept, from `Sampler`'s torch path in SGLang."""
    kept, mass = [], 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token])[:top_k]:
        if mass > top_p:
            break
        kept.append(token)
        mass += p[token]
    return kept, mass


@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers(0, 4))
def test_log_probs_are_normalised_over_what_sglang_kept(seed, top_k, top_p, more):
    random = np.random.default_rng(seed)
    n, vocabulary, k = 6, 40, top_k + more
    logits = random.normal(0, 2, (n, vocabulary))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    kept = [kept_oracle(row.tolist(), top_k, top_p) for row in p]
    sampled = np.array([random.choice(tokens) for tokens, _ in kept], np.int32)
    ids = np.argsort(-p, 1)[:, :k].astype(np.int32)
    log_p = np.log(np.take_along_axis(p, ids, 1)).astype(np.float32)
    own = np.log(p[np.arange(n), sampled]).astype(np.float32)
    log_q, l_own = normalise(ids, log_p, sampled, own, Cut(top_k, top_p))
    for row, (tokens, mass) in enumerate(kept):
        expected = {token: float(np.log(p[row, token] / mass)) for token in tokens}
        close(log_q[row].tolist(), [expected.get(token, -np.inf) for token in ids[row].tolist()], scale=10)
        close(float(l_own[row]), expected[int(sampled[row])], scale=10)
    assert log_q.dtype == l_own.dtype == np.float32


def test_the_sampled_token_decides_where_rounding_does_not():
    """SGLang kept token 12, whose more likely ones hold top_p to the last digit; or one that ties with the last."""
    ids, log_p = np.array([[10, 11, 12, 13]] * 2, np.int32), np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 2, np.float32))
    sampled, own = np.array([12, 10], np.int32), np.log(np.array([0.2, 0.4], np.float32))
    log_q, l_own = normalise(ids, log_p, sampled, own, Cut(4, 0.7 - 1e-6))
    assert (log_q > -np.inf).tolist() == [[True, True, True, False], [True, True, False, False]]
    close(torch.from_numpy(l_own), torch.log(torch.tensor([0.2 / 0.9, 0.4 / 0.7])))
    log_q, l_own = normalise(ids[:1], log_p[:1], np.array([15], np.int32), np.log(np.float32([0.1])), Cut(4, 1.0))
    close(torch.from_numpy(np.exp(log_q[0])), torch.tensor([0.4, 0.3, 0.2, 0.1]) / 1.1)
    assert np.exp(l_own[0]) == pytest.approx(0.1 / 1.1)
