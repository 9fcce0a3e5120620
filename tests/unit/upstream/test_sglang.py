"""Tests of SGLang's own classes on a CPU: no run is started.

Skipped where SGLang is not installed (`bash tools/setup_cpu.sh sglang`).
"""

import asyncio
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.closeness import close
from tests.support.sglang_server import generated, verls_server_module
from verl_ext.core.routing import known_rows, refused_rows
from verl_ext.doctor.experts import SILENT
from verl_ext.upstream.sglang_server import Cut, extend_server, normalise

tokenizer_manager = pytest.importorskip(
    "sglang.srt.managers.tokenizer_manager", reason="SGLang does not import here", exc_type=ImportError
)

PROMPT, RESPONSE = [5, 6, 7], [8, 9]
LAYERS, TOP_K, EXPERTS = 4, 2, 16
DENSE = 0  # a layer without a router
TEXT_CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, num_experts_per_tok=TOP_K)


@pytest.fixture
def capturer(monkeypatch):
    from sglang.srt.state_capturer import routed_experts

    arguments = SimpleNamespace(chunked_prefill_size=16, dp_size=1)
    monkeypatch.setattr(routed_experts, "get_global_server_args", lambda: arguments)
    monkeypatch.setattr(routed_experts, "is_dp_attention_enabled", lambda: False)
    return routed_experts.RoutedExpertsCapturer.create(
        enable=True,
        model_config=SimpleNamespace(hf_text_config=TEXT_CONFIG),
        num_fused_shared_experts=0,
        num_tokens=32,
        max_running_requests=4,
        device="cpu",
    )


def forward(capturer, slots, seed):
    """A forward pass over tokens whose keys lie in these slots; returns what each layer's router chose."""
    chosen_nLK = torch.rand(len(slots), LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(TOP_K)[1]
    chosen_nLK[:, DENSE] = 0
    for layer in set(range(LAYERS)) - {DENSE}:
        capturer.capture(layer, chosen_nLK[:, layer].int())
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots))
    capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    return chosen_nLK


def returned(capturer, slots):
    pool = SimpleNamespace(req_to_token=torch.tensor([slots]))
    return capturer.get_topk(req_pool_idx=0, seqlen=len(PROMPT + RESPONSE), req_to_token_pool=pool)


def test_a_row_for_each_token_but_the_last_and_zeros_for_dense_layers(capturer):
    forward(capturer, [10, 11, 12], seed=9)  # of a request before, in the same slots
    chosen = torch.cat([forward(capturer, [10, 11, 12], seed=0), forward(capturer, [20], seed=1)])
    routes = returned(capturer, [10, 11, 12, 20, 21])
    assert routes.dtype == torch.int32 and torch.equal(routes, chosen.int())
    moe = routes[:, DENSE + 1 :]
    assert known_rows(moe).all() and not refused_rows(moe, EXPERTS, torch.tensor([0, len(moe)])).any()


def test_after_a_retraction_the_routing_is_of_the_pass_that_read_the_tokens_again(capturer):
    forward(capturer, [10, 11, 12], seed=0)
    forward(capturer, [20], seed=1)
    again = forward(capturer, [1, 2, 3, 4], seed=2)
    assert torch.equal(returned(capturer, [1, 2, 3, 4, 5]), again.int())


class Manager(tokenizer_manager.TokenizerManager):
    """SGLang's own manager from the scheduler's answer on, without a scheduler."""

    def __init__(self, routes):
        self.routes, self.rid_to_state = routes, {}
        self.model_config = SimpleNamespace(hf_text_config=TEXT_CONFIG)
        self.enable_metrics, self.dump_requests_folder, self.crash_dump_folder = False, "", ""
        self.server_args = SimpleNamespace(
            batch_notify_size=8,
            weight_version="default",
            skip_tokenizer_init=True,
            incremental_streaming_output=False,
            speculative_algorithm=None,
            enable_lora=False,
            dp_size=1,
        )

    async def generate_request(self, obj, request=None):
        obj.normalize_batch_and_arguments()
        nothing = SimpleNamespace(
            first_token_time=0.0,
            set_first_token_time=lambda: None,
            set_finished_time=lambda: None,
            get_e2e_latency=lambda: 0.0,
            trace_ctx=SimpleNamespace(tracing_enable=False),
        )
        state = tokenizer_manager.ReqState([], False, asyncio.Event(), obj, nothing)
        self.rid_to_state[obj.rid] = state
        await self._handle_batch_output(self.answer(obj.rid))
        yield state.out_list[-1]

    def answer(self, rid):
        from sglang.srt.managers.io_struct import BatchTokenIDOutput

        known = {
            "rids": [rid],
            "finished_reasons": [{"type": "length", "length": len(RESPONSE)}],
            "output_ids": [list(RESPONSE)],
            "prompt_tokens": [len(PROMPT)],
            "reasoning_tokens": [0],
            "completion_tokens": [len(RESPONSE)],
            "cached_tokens": [0],
            "input_token_logprobs_val": [[]],
            "input_token_logprobs_idx": [[]],
            "output_token_logprobs_val": [[-0.5, -0.25]],
            "output_token_logprobs_idx": [list(RESPONSE)],
            "routed_experts": [self.routes],
            "retraction_counts": [0],
        }
        return BatchTokenIDOutput(**{field.name: None for field in fields(BatchTokenIDOutput)} | known)


def test_what_sglang_captured_reaches_verls_agent_loop(capturer):
    chosen = torch.cat([forward(capturer, [10, 11, 12], seed=0), forward(capturer, [20], seed=1)])
    routes = returned(capturer, [10, 11, 12, 20, 21])
    with verls_server_module() as module:
        extend_server(module)
        output = generated(module, Manager(routes), PROMPT)
    assert output.token_ids == RESPONSE and output.log_probs == [-0.5, -0.25]
    assert np.array_equal(output.routed_experts, chosen.numpy())


@pytest.fixture
def sample(monkeypatch):
    """sample(logits [B, V], top_k, top_p, temperature, head=K, raw=False) -> the tokens [B] that SGLang's sampler draws
    in plain torch, and its output."""
    from sglang.srt.layers import sampler

    monkeypatch.setattr(sampler, "get_global_server_args", lambda: SimpleNamespace(sampling_backend="pytorch"))
    made = sampler.Sampler.__new__(sampler.Sampler)
    torch.nn.Module.__init__(made)
    made.use_nan_detection = made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made.rl_on_policy_target = None

    def run(logits_BV, top_k, top_p, temperature, *, head=0, raw=False):
        monkeypatch.setattr(sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB", raw)
        B = len(logits_BV)
        asked = SimpleNamespace(
            has_custom_logit_processor=False,
            is_all_greedy=False,
            need_top_p_sampling=True,
            need_top_k_sampling=True,
            need_min_p_sampling=False,
            temperatures=torch.full((B, 1), temperature),
            top_ks=torch.full((B,), top_k),
            top_ps=torch.full((B,), top_p),
            min_ps=torch.zeros(B),
            sampling_seed=None,
            device="cpu",
            grammars=None,
        )
        output = SimpleNamespace(next_token_logits=logits_BV.clone(), next_token_logprobs=None)
        return made.forward(output, asked, True, [head] * B, [None] * B, torch.arange(B)), output

    return run


@pytest.mark.parametrize("raw", [False, True])
def test_log_probs_are_of_all_tokens_whatever_is_sampled_from(sample, raw):
    B, temperature = 5, 0.7
    logits_BV = torch.randn(B, 32, generator=torch.Generator().manual_seed(0))
    tokens_B, output = sample(logits_BV, 4, 0.5, temperature, raw=raw)
    scaled_BV = logits_BV.double() / (1 if raw else temperature)
    expected_B = scaled_BV.log_softmax(-1)[torch.arange(B), tokens_B.long()]
    close(output.next_token_logprobs.double(), expected_B)


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (12, 0.6), (6, 0.7)])
def test_what_is_kept_of_the_top_tokens_is_what_tokens_are_drawn_from(sample, top_k, top_p):
    """Over many draws from one distribution, exactly the kept tokens come, as often as they should."""
    torch.manual_seed(0)
    draws, temperature, K = 20_000, 0.7, 12
    logits_V = torch.randn(32, generator=torch.Generator().manual_seed(3))
    tokens_B, output = sample(logits_V.expand(draws, -1), top_k, top_p, temperature, head=K)
    ids, log_p = (
        np.array([row.tolist() for row in rows])
        for rows in (output.next_token_top_logprobs_idx, output.next_token_top_logprobs_val)
    )
    close(torch.from_numpy(log_p[0]), (logits_V.double() / temperature).log_softmax(-1)[ids[0]])
    log_q, l_own = normalise(
        ids, log_p.astype(np.float32), tokens_B.numpy(), output.next_token_logprobs.numpy(), Cut(top_k, top_p)
    )
    assert (log_q == log_q[0]).all(), "the sampled token decides nowhere"
    kept = {int(token): float(value) for token, value in zip(ids[0], log_q[0], strict=True) if value > -np.inf}
    counts = torch.bincount(tokens_B, minlength=32)
    assert kept.keys() == set(counts.nonzero().flatten().tolist()) and 1 < len(kept) <= top_k
    for token, value in kept.items():
        share, q = counts[token].item() / draws, np.exp(value)
        assert abs(share - q) < 5 * (q * (1 - q) / draws) ** 0.5
    close(l_own.tolist(), [kept[token] for token in tokens_B.tolist()])


def test_the_names_of_sglang_that_we_use_are_its_own():
    from sglang.srt import server_args

    from verl_ext.launch.packages import engine_arguments

    used = {"moe_runner_backend", "enable_hierarchical_cache", "kv_cache_dtype", "quantization", "dtype"}
    assert used <= engine_arguments("sglang") == {field.name for field in fields(server_args.ServerArgs)}
    assert {*SILENT, "triton", "auto"} <= {*server_args.MOE_RUNNER_BACKEND_CHOICES}
