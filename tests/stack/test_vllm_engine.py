"""vLLM's engine on CPU against transformers, before and after weight syncs.

They run in float32, so they may differ only by rounding.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.make_assets import build_tokenizer
from tests.stack.small_models import NEAR_TIE
from tests.support.closeness import close
from verl_ext.base.errors import HookError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.core.fake_quant import fake_quantized
from verl_ext.upstream import agent_loop, fake_quantization
from verl_ext.upstream.engine_calls import CALL

vllm = pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM was not built for CPU")

LAYERS_OF_MODEL, EXPERTS, TOP_K = 2, 8, 2
PROMPTS = [
    "one",
    "the quick brown fox",
    "the quick brown fox jumps over the lazy dog, twice",
    "7+8=15; 9+9=18",
]
NEW_TOKENS = 6
TOP_TOKENS = 8


def build_model(vocab_size: int, seed: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS_OF_MODEL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.1,  # far from uniform, so that other weights mean other probabilities
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).float().eval()


class Engine:
    def __init__(self, llm: Any, folder: Path, models: list[Any]) -> None:
        self.llm, self.folder, self.models = llm, folder, models

    def sync(self, model: Any) -> None:
        """Load a model's weights as verl does after a training step."""
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        file = self.folder / "weights.pt"
        torch.save([(name, w.clone()) for name, w in unfuse_moe_params(model.state_dict().items())], file)
        self.llm.collective_rpc("sync_weights_from", args=(str(file),))
        self.llm.reset_prefix_cache()  # the cached keys and values are those of the old weights

    @contextmanager
    def rounding(self, settings: dict[str, Any]) -> Iterator[None]:
        """Round what is synced, as `stability.fake_quantization` has the engine do from its start."""
        self.llm.collective_rpc("round_while_loading", args=(settings,))
        try:
            yield
        finally:
            self.llm.collective_rpc("load_as_it_is")

    def report(self) -> dict[str, Any] | None:
        function = fake_quantization.report
        (report,) = self.llm.collective_rpc(CALL, args=(f"{function.__module__}:{function.__name__}",))
        return report

    def generate(self) -> list[Any]:
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        return self.llm.generate(PROMPTS, sampling, use_tqdm=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("vllm_cpu")
    tokenizer = build_tokenizer()
    models = [build_model(len(tokenizer), seed) for seed in range(3)]
    models[0].save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    environment = dict(os.environ)  # vLLM's CPU platform adds to it
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    llm = None
    try:
        llm = vllm.LLM(
            str(folder / "model"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=32,  # shorter than a prompt, which is then forwarded in parts
            enable_chunked_prefill=True,
            enable_return_routed_experts=True,
            logprobs_mode="processed_logprobs",
            max_logprobs=TOP_TOKENS,
            worker_extension_cls="tests.stack.sync_worker.SyncWorker",
        )
        yield Engine(llm, folder, models)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        os.environ.clear()
        os.environ.update(environment)


def engine_logprobs(output: Any) -> torch.Tensor:
    """Log-probability of each token of prompt and response but the first, [S - 1]."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][1:]
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([step[token].logprob for step, token in zip(steps, tokens, strict=True)])


@torch.no_grad()
def reference(model: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [S - 1] and router logits [S, L, E] of transformers for the same tokens."""
    tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    router_logits: list[torch.Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: router_logits.append(out[0]))
        for layer in model.model.layers
    ]
    logits = model(tokens).logits[0]
    for handle in handles:
        handle.remove()
    logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    return logprobs, torch.stack(router_logits, dim=1)


def decided(logits: torch.Tensor) -> torch.Tensor:
    """[S, L], whether a token's experts are decided: a choice may differ only where the last one in and the first one
    out are as good as equal."""
    ranked = logits.sort(-1, descending=True).values
    return ranked[..., TOP_K - 1] - ranked[..., TOP_K] > NEAR_TIE


def decided_so_far(logits: torch.Tensor) -> torch.Tensor:
    """[S], whether the experts of a token and of all before it are decided, so that its logits are."""
    return decided(logits).all(-1).int().cumprod(0).bool()


def assert_close(actual: torch.Tensor, model: Any, output: Any) -> None:
    """Checks the engine's log-probabilities against transformers', where experts are decided."""
    expected, logits = reference(model, output)
    checked = decided_so_far(logits)[:-1]
    close(actual[checked], expected[checked])


@pytest.mark.e2e
def test_logprobs_follow_every_weight_sync(engine: Engine) -> None:
    previous = engine.models[0]
    for model in (engine.models[1], engine.models[2], engine.models[1]):
        engine.sync(model)
        for output in engine.generate():
            actual = engine_logprobs(output)
            assert_close(actual, model, output)
            assert (actual - reference(previous, output)[0]).abs().max() > 0.1
        previous = model


@pytest.mark.e2e
@pytest.mark.parametrize(
    "part",
    [
        "lm_head",
        "embed_tokens",
        "model.norm",
        "v_proj",
        "q_norm",
        "o_proj",
        "gate.weight",
        "gate_up_proj",
        "down_proj",
    ],
)
def test_logprobs_follow_a_sync_of_one_part(engine: Engine, part: str) -> None:
    """All other weights stay the same, so a stale copy of this one would be visible."""
    old, model = engine.models[0], copy.deepcopy(engine.models[0])
    generator = torch.Generator().manual_seed(0)
    changed = [weight for name, weight in model.named_parameters() if part in name]
    for weight in changed:
        weight.data += 0.3 * weight.data.std().clamp(min=1) * torch.randn(weight.shape, generator=generator)
    assert changed
    engine.sync(model)
    for output in engine.generate():
        actual = engine_logprobs(output)
        assert_close(actual, model, output)
        assert (actual - reference(old, output)[0]).abs().max() > 0.01


@pytest.mark.shows("fake quantization", engine="vllm")
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("besides", "rounded"),
    [({}, ()), ({"router": True}, (".gate.weight",)), ({"head": True}, ("lm_head.weight",))],
    ids=["linear", "router", "head"],
)
def test_logprobs_are_those_of_the_rounded_weights(engine: Engine, besides: dict, rounded: tuple) -> None:
    """transformers computes with the same weights, rounded in its own modules; a later sync is exact again."""
    exact = engine.models[1]
    settings = {"format": "fp4", "group": 16, "router": False, "head": False} | besides
    model = copy.deepcopy(exact)
    for name, weight in model.named_parameters():
        if name.endswith(("_proj.weight", "gate_up_proj", "down_proj", *rounded)):
            weight.data = fake_quantized(weight.data, "fp4", 16)

    assert engine.report() is None
    with engine.rounding(settings):
        engine.sync(exact)
        assert engine.report() == {
            "settings": settings,
            "rounded": {
                "linear": LAYERS_OF_MODEL * (4 + 3 * EXPERTS),
                **{kind: count for kind, count in (("router", LAYERS_OF_MODEL), ("head", 1)) if kind in besides},
            },
        }
    for output in engine.generate():
        actual = engine_logprobs(output)
        assert_close(actual, model, output)
        assert (actual - reference(exact, output)[0]).abs().max() > 0.1
    engine.sync(exact)
    for output in engine.generate():
        assert_close(engine_logprobs(output), exact, output)


@pytest.mark.e2e
@pytest.mark.parametrize("index", [0, 1])
def test_routed_experts_are_those_of_the_routers(engine: Engine, index: int) -> None:
    """Row t is the routing of token t. The last sampled token was never forwarded: it has no row."""
    model = engine.models[index]
    engine.sync(model)
    for output in engine.generate():
        routed = torch.tensor(output.outputs[0].routed_experts.astype("int64"))  # [S - 1, L, K]
        logits = reference(model, output)[1][:-1]
        assert routed.shape == (len(output.prompt_token_ids) + NEW_TOKENS - 1, LAYERS_OF_MODEL, TOP_K)
        same = (routed.sort(-1).values == logits.topk(TOP_K).indices.sort(-1).values).all(-1)
        assert same[decided_so_far(logits)].all()
        assert decided(logits).float().mean() > 0.9


@pytest.mark.e2e
@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": TOP_TOKENS - 2, "top_p": 0.6, "temperature": 0.8}], ids=["all", "kept"]
)
def test_the_top_tokens_are_those_of_what_the_sampler_takes_from(engine: Engine, sampling: dict) -> None:
    """Asks as verl's server does; compares with transformers' logits, cut by the definitions of top-k and top-p."""
    model = engine.models[0]
    engine.sync(model)
    asked = agent_loop.ask_for_top_tokens(
        vllm.SamplingParams,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        extra_args={agent_loop.TOP_TOKENS_ASKED: TOP_TOKENS},
        **{"temperature": 1.0, **sampling},
    )
    assert (asked.logprobs, asked.detokenize, asked.extra_args) == (TOP_TOKENS, False, {})
    for output in engine.llm.generate(PROMPTS, asked, use_tqdm=False):
        answer, found = output.outputs[0], {}
        agent_loop.take_top_tokens(lambda **_: None, output=output, num_prompt_logprobs=None, result_dict=found)
        ids, log_q = (torch.from_numpy(found[name]) for name in (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS))
        tokens = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])
        checked = decided_so_far(reference(model, output)[1])[len(output.prompt_token_ids) - 1 : -1]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1]
        expected = kept(logits.double(), **sampling)[checked]
        ids, log_q = ids[checked], log_q[checked]
        values, _ = expected.topk(TOP_TOKENS, 1)
        close(log_q, values)
        close(log_q[log_q.isfinite()], expected.gather(1, ids.long())[log_q.isfinite()])
        own = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        close(torch.tensor(own)[checked], expected.gather(1, tokens[:, -NEW_TOKENS:].T[checked])[:, 0])
        if sampling:
            close(log_q.exp().sum(1), torch.ones(len(log_q)))


@pytest.mark.parametrize("unknown", [{"repetition_penalty": 1.1}, {"min_p": 0.1}, {"logit_bias": {1: 2.0}}])
def test_another_distribution_is_refused(unknown: dict) -> None:
    (name,) = unknown
    with pytest.raises(HookError, match=f"a request has {name}="):
        agent_loop.ask_for_top_tokens(
            vllm.SamplingParams, extra_args={agent_loop.TOP_TOKENS_ASKED: TOP_TOKENS}, **unknown
        )
    agent_loop.ask_for_top_tokens(vllm.SamplingParams, **unknown)


def kept(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[n, V] log-probabilities over the fewest tokens of the top k that hold top_p of their mass."""
    logits = logits / temperature
    ranks = logits.argsort(1, descending=True).argsort(1)
    logits = logits.masked_fill(ranks >= (top_k or logits.shape[1]), -torch.inf)
    probs, order = logits.softmax(1).sort(1, descending=True)
    before = probs.cumsum(1) - probs
    cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
    return logits.masked_fill(cut, -torch.inf).log_softmax(1)
