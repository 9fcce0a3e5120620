"""Routing that is returned and is not what the routers chose, as far as versions, GPU and model tell it."""

from collections.abc import Iterable

from verl_ext.doctor.context import ROLLOUT, VLLM_ARGUMENTS, Context
from verl_ext.doctor.engine import captures_routing
from verl_ext.doctor.findings import Finding, check

MOE_BACKEND = f"{VLLM_ARGUMENTS}.moe_backend"
REFUSING_VLLM = "0.27"  # from here on vLLM reads its monolithic kernels, or refuses them
WIDE_VERL = "0.9.1"  # from here on verl records in int16
BYTE = 256
RUNNER = f"{ROLLOUT}.engine_kwargs.sglang.moe_runner_backend"
SILENT = ("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4")  # of SGLang, by its own names


@check("captured routing")
def captured_routing(context: Context) -> Iterable[Finding]:
    """Kernels of the rollout that choose experts inside, and return zeros.

    Source: vLLM issues 44116 (GB200, Qwen3-30B-A3B in bfloat16: zeros of the right shape by default, the right experts
    with moe_backend=triton) and 54730 (0.26.0). From 0.27 on, `GPUModelRunner._bind_routed_experts_capturer`
    (v1/worker/gpu_model_runner.py, read in 0.27.1) has these kernels return what they chose, as PR 44214 lets them, and
    raises where one cannot. With `moe_backend=auto`, on Blackwell they are what vLLM picks. Of SGLang: `_of_sglang`.
    """
    from packaging.version import Version

    if context.with_sglang and captures_routing(context):
        yield from _of_sglang(context)
        return
    version = context.versions.get("vllm")
    if not context.with_vllm or version is None or not captures_routing(context):
        return
    if Version(version) >= Version(REFUSING_VLLM):
        yield Finding("ok", f"vLLM {version} reads what its kernels choose, or stops at its start")
        return
    backend = str(context.get(MOE_BACKEND, "auto")).lower()
    why = "a kernel that chooses experts inside returns zeros for them (vLLM issue 54730): there is nothing to replay"
    fix = (f"++{MOE_BACKEND}=triton",)
    if backend == "triton":
        yield Finding("ok", f"vLLM {version} with moe_backend=triton returns what it chooses")
    elif backend.startswith("flashinfer"):
        yield Finding("warning", f"routing capture of vLLM {version} with moe_backend={backend}", why, fix)
    elif context.gpu is None:
        yield Finding("note", f"routing capture of vLLM {version}, GPU unknown: give --gpu", f"on Blackwell, {why}")
    elif context.gpu.capability[0] >= 10:
        yield Finding("warning", f"routing capture of vLLM {version} on a {context.gpu.name}", why, fix)
    else:
        yield Finding("ok", f"routing capture of vLLM {version} on a {context.gpu.name}")


def _of_sglang(context: Context) -> Iterable[Finding]:
    """Source: SGLang 0.5.12. `TopK.forward_cuda` (srt/layers/moe/topk.py) captures in `select_experts` alone, which the
    backends of SILENT do without. `ServerArgs` (srt/server_args.py) picks one of them for moe_runner_backend=auto: for
    gpt-oss on NVIDIA's GPUs, and on Blackwell for Qwen3-MoE and Qwen3-Next, DeepSeek-V3 and their relatives.
    """
    backend = str(context.get(RUNNER, "auto")).lower()
    why = "this kernel chooses experts inside, and SGLang returns zeros for them: there is nothing to replay"
    fix = (f"++{RUNNER}=triton",)
    auto = "SGLang then takes a kernel that chooses experts inside, and returns zeros for them"
    if backend in SILENT:
        yield Finding("warning", f"routing capture of SGLang with moe_runner_backend={backend}", why, fix)
    elif backend != "auto":
        yield Finding("ok", f"SGLang with moe_runner_backend={backend} returns what it chooses")
    elif getattr(context.model_config, "model_type", "") == "gpt_oss":
        yield Finding("warning", "routing capture of SGLang with gpt-oss, moe_runner_backend=auto", auto, fix)
    elif context.gpu is None:
        found = "routing capture of SGLang, moe_runner_backend=auto, GPU unknown: give --gpu"
        yield Finding("note", found, f"on Blackwell, {auto}")
    elif context.gpu.capability[0] >= 10:
        yield Finding("warning", f"routing capture of SGLang on a {context.gpu.name}", auto, fix)
    else:
        yield Finding("ok", f"routing capture of SGLang on a {context.gpu.name}")


@check("recorded routing")
def recorded_routing(context: Context) -> Iterable[Finding]:
    """More experts than a byte counts, where verl records them in one.

    Source: verl/utils/megatron/router_replay_utils.py: `to(torch.uint8)` in 0.9.0, int16 from 0.9.1 on (PR 7407).
    """
    from packaging.version import Version

    from verl_ext.launch.routing_checks import replay_mode, replay_setting
    from verl_ext.routing.config_names import EXPERT_COUNTS, first_of

    agreement = context.get("stability.router_agreement")
    if context.strategy != "megatron" or context.model_config is None or "verl" not in context.versions:
        return
    if replay_mode(context.config) != "R2" and not agreement:
        return
    experts = first_of(context.model_config.get_text_config(), EXPERT_COUNTS)
    if experts <= BYTE:
        return
    if Version(context.versions["verl"]) >= Version(WIDE_VERL):
        yield Finding("ok", f"verl records the ids of {experts} experts in int16")
        return
    fix = [f"{replay_setting(context.config)}=disabled", *["stability.router_agreement=false"] * bool(agreement)]
    yield Finding(
        "error",
        f"verl {context.versions['verl']} records the ids of {experts} experts in a byte",
        f"ids from {BYTE} on lose {BYTE}, and other experts are replayed; verl {WIDE_VERL} keeps them (PR 7407)",
        tuple(fix),
    )
