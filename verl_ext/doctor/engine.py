"""The rollout engine: attention, lengths, placement, and differences between versions of vLLM.

Claims on newer versions were read in the wheels of vLLM 0.27.1 to 0.33.0, in `VllmConfig` (vllm/config/vllm.py) unless
another file is named.
"""

import math
from collections.abc import Iterable

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import RUNNER, Context, check, error, note, ok, warning
from verl_ext.doctor.experts import MOE_BACKEND
from verl_ext.features.cascade_attention import DISABLED
from verl_ext.features.verl_config import HYBRID, MODE, MODEL, ROLLOUT, RUNTIME, VLLM_ARGUMENTS
from verl_ext.upstream.agent_loop import MANAGER

CASCADE = "stability.cascade_attention"
ISSUE = "vLLM issue 22103"
NEVER_CASCADE = ("TRITON_ATTN", "FLASHINFER")  # values of vLLM's attention_backend
NEWEST = "0.31"  # the newest vLLM that accepts the transformers versions of verl 0.9.1
SAMPLING_MASK = f"{VLLM_ARGUMENTS}.return_sampling_mask"
FLASHINFER = "VLLM_USE_FLASHINFER_MOE_FP16"
SAME_FACTOR = 1e-3  # relative difference below which two factors are the same


@check("cascade attention", needs="with_vllm")
def cascade_attention(context: Context) -> Iterable[Problem]:
    """vLLM's cascade attention on a GPU other than Hopper's; off by default since March 2026.

    Source: vLLM issue 22103 (A100: 10 of 18 answers right, 18 without cascade attention; H100: 18), still open; verl PR
    3595 names A100, L20 and B200, and a gradient norm that explodes. vLLM PR 36318 (March 2026) made it opt-in:
    `disable_cascade_attn` of vllm/config/model.py, read here from the installed source. The Triton, FlashInfer and CPU
    backends answer False in their `use_cascade_attention` (vllm/v1/attention/backends, 0.27); on CPU,
    vllm/platforms/cpu.py turns it off.
    """
    ours = {True: "on", False: "off"}.get(context.get(CASCADE, "default"), context.get(CASCADE, "default"))
    given = context.get(DISABLED)
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
        why = f"its results are wrong on GPUs without FlashAttention 3, such as A100 and L20 ({ISSUE})"
        yield note(f"cascade attention on ({said}), GPU unknown: give --gpu", why)
    elif context.gpu.hopper:
        why = f"on Hopper its results were right where the A100's were wrong ({ISSUE})"
        yield note(f"cascade attention on ({said}), {context.gpu.name}", why)
    else:
        fix = [f"{CASCADE}=off"]
        if given is not None and not given:
            fix.append(f"++{DISABLED}=true")  # `off` contradicts False, and would be refused
        found = f"cascade attention on ({said}), {context.gpu.name} with FlashAttention {context.gpu.flash_attention}"
        why = f"attention over a shared prompt, and so log-probs, are wrong on GPUs other than Hopper's ({ISSUE})"
        yield warning(found, why, *fix)


@check("lengths", needs="engine")
def lengths(context: Context) -> Iterable[Problem]:
    """`max_model_len` above the model's positions; prompts and answers that are longer than them; without chunked
    prefill, `max_num_batched_tokens` below max_model_len.

    Source: `_validate_configs` of verl/workers/rollout/vllm_rollout/vllm_async_server.py (0.9.1), which sets a null
    max_model_len to the positions; `generate` there ends answers at it and refuses a prompt that leaves no room.
    Without chunked prefill it raises max_num_batched_tokens to max_model_len, which verl's own RolloutConfig refuses
    (the field is not among its `_mutable_fields`; tried). With chunked prefill a smaller value is fine. For SGLang,
    verl does the same with the positions (`__init__` of async_sglang_server.py).
    """
    limit = _positions(context)
    asked = int(context.get(f"{ROLLOUT}.max_model_len", 0))
    if asked and limit and asked > limit:
        why = "verl refuses a length that the model has no positions for"
        yield error(f"rollout.max_model_len={asked}, positions: {limit}", why, f"{ROLLOUT}.max_model_len={limit}")
        asked = limit
    prompt, answer = (context.number(f"data.max_{one}_length") or 0 for one in ("prompt", "response"))
    if limit and not asked and prompt + answer > limit:
        found = f"prompts of up to {prompt:g} and answers of up to {answer:g} tokens, positions: {limit}"
        why = f"an answer ends at {limit} tokens with its prompt, as if it were too long"
        why += f"; a prompt of {limit} or more is refused" if prompt >= limit else ""
        yield warning(found, f"{why}; shorten them, or extend the model's positions")
    length, batched = asked or limit, int(context.get(f"{ROLLOUT}.max_num_batched_tokens", 8192))
    if context.with_sglang or context.get(f"{ROLLOUT}.enable_chunked_prefill", True) or not length:
        return
    if batched < length:
        found = f"rollout.max_num_batched_tokens={batched} below max_model_len={length}, without chunked prefill"
        why = "verl tries to change a frozen field, and the rollout server ends with FrozenInstanceError"
        yield error(found, why, f"{ROLLOUT}.max_num_batched_tokens={length}")


@check("rollout placement", needs="config")
def rollout_placement(context: Context) -> Iterable[Problem]:
    """`hybrid_engine=False` in a mode that does not read it; tensor parallelism of the rollout across nodes. The
    plugin supports `hybrid_engine=False` in `separate_async`, where its workers replace verl's `Role.Actor`, and
    `rollout.router_config_path`, with which requests still pass its agent loop.

    Source: verl 0.9.1. With `hybrid_engine=False`, which only `PPOTrainerSeparateAsync` reads, the actor's role is
    `Role.Actor` (trainer/ppo/v1/trainer_base.py). `trainer.trainers.replace_workers` replaces this role too, and the
    servers are those of the second manager of `_rollout_server_managers`. A router of `router_config_path` picks a
    server for a request (workers/rollout/router.py); the request is still made by `LLMServerClient.generate`, which
    `upstream.agent_loop` wraps.
    """
    separate = context.get(MODE) == "separate_async"
    if context.get(HYBRID) is False and not separate and not context.entry:
        why = "only separate_async reads it, and rollouts stay on the GPUs of training"
        found = f"hybrid_engine=False in {context.get(MODE, 'sync')}"
        yield warning(found, f"{why}; for GPUs of their own, set {MODE}=separate_async and {ROLLOUT}.nnodes")
    tensor = f"{ROLLOUT}.tensor_model_parallel_size"
    node = context.get(f"{ROLLOUT if separate else 'trainer'}.n_gpus_per_node", 0)
    if 0 < node < context.get(tensor, 1):
        why = "each layer then adds its parts across nodes for each token; vLLM fails at its start in some set-ups"
        found = f"{tensor}={context.get(tensor)} with {node} GPUs per node"
        yield warning(found, f"{why} (vLLM issue 29447); for experts, use data_parallel_size and expert_parallel_size")


@check("tools", needs="config")
def tools(context: Context) -> Iterable[Problem]:
    """Tools or several turns that the default agent loop never uses (verl issue 5300).

    Source: verl issue 5300. Without a column `agent_name` in the data, `generate_sequences` of v1/agent_loop_tq.py
    takes `default_agent_loop`, which is single_turn_agent. Its prompts have no tools
    (experimental/agent_loop/single_turn_agent_loop.py). Only the old trainer reads `multi_turn.enable`.
    """
    loop, turns = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.multi_turn"
    names = (name for name in ("tool_config_path", "function_tool_path", "enable") if context.get(f"{turns}.{name}"))
    asked = ", ".join(f"multi_turn.{name}={context.get(f'{turns}.{name}')}" for name in names)
    if not asked or context.get(loop) != "single_turn_agent" or context.get(MANAGER):
        return
    found = f"{asked} with default_agent_loop=single_turn_agent"
    why = "this agent loop answers in one turn and offers no tools, unless the data has a column agent_name"
    if context.get("data.custom_cls.path"):  # such a class often adds the column
        yield note(found, why)
    else:
        yield warning(found, why, f"{loop}=tool_agent")


@check("vLLM version", needs="vllm_release")
def vllm_version(context: Context) -> Iterable[Problem]:
    """vLLM 0.32 and newer, which needs newer transformers than verl 0.9.1 accepts; cascade attention on, from 0.29 on.

    Source: the metadata of vllm 0.32.0 and 0.33.0 (transformers>=5.16.1) and of verl 0.9.1 (transformers<5.11);
    `use_v2_model_runner`, from 0.29 on without a list of architectures; vllm/v1/worker/gpu has no cascade attention;
    `disable_cascade_attn` of vllm/config/model.py, in 0.32 "has been removed, so this has no effect".
    """
    version = context.vllm_release
    if version >= (0, 32):
        why = f"verl 0.9.1 needs transformers before 5.11; use vLLM {NEWEST} or older"
        yield warning(f"{context.vllm} needs transformers 5.16.1 or newer", why)
    if context.get(CASCADE) != "on" or version < (0, 29):
        return
    if version >= (0, 32):
        yield error(f"{CASCADE}=on with {context.vllm}", "cascade attention was removed", f"{CASCADE}=default")
    elif not context.first_runner:
        why = f"its default model runner, V2, has none, and the start-up check would stop the run; {RUNNER}=0 uses V1"
        yield error(f"{CASCADE}=on with {context.vllm}", why, f"{CASCADE}=default")


@check("sampling mask", needs="vllm_release")
def sampling_mask(context: Context) -> Iterable[Problem]:
    """`return_sampling_mask` if vLLM would refuse it; a note that verl 0.9.1 does not read it.

    Source: `_verify_sampling_replay_config`. vLLM 0.28 added the argument; it works with speculative decoding from 0.32
    on. verl 0.9.1 does not read the mask (verl/workers/rollout/vllm_rollout/vllm_async_server.py).
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
    if context.first_runner:
        yield error(f"return_sampling_mask with {RUNNER}=0", f"{why}; unset {RUNNER}")
    if version < (0, 32) and context.drafter:
        yield error("return_sampling_mask with speculative decoding", f"{why}; vLLM 0.32 can", off)
    yield note("return_sampling_mask", "verl 0.9.1 does not read the mask: it costs time and corrects nothing")


@check("flashinfer variable", needs="with_vllm")
def flashinfer_variable(context: Context) -> Iterable[Problem]:
    """`VLLM_USE_FLASHINFER_MOE_FP16`: garbage after the first sync with vLLM 0.23 (verl issue 6847); a note: newer
    versions do not read it.

    Source: verl issue 6847 (closed). vLLM 0.23 reads the variable, 0.24 does not have it (vLLM PR 43148).
    """
    value = context.get(f"{RUNTIME}.{FLASHINFER}", context.environ.get(FLASHINFER))
    if value is None:
        return
    if context.vllm_before(0, 24) and str(value) == "1":
        yield warning(f"{FLASHINFER}=1", "rollouts are garbage after the first weight sync (verl issue 6847)")
    else:
        yield note(f"{FLASHINFER}={value}", f"vLLM from 0.24 on does not read it; ++{MOE_BACKEND} chooses the kernel")


@check("attention factor", needs="model_config")
def attention_factor(context: Context) -> Iterable[Problem]:
    """YaRN with an `attention_factor` that the rollout engine reads from another setting (vLLM issue 48621).

    Source: `_compute_yarn_parameters` of transformers/modeling_rope_utils.py reads attention_factor, or the ratio of
    mscale and mscale_all_dim; vLLM (rotary_embedding/__init__.py) and SGLang (factory.py) read only attn_factor if
    rope_type is yarn (vLLM issue 48621, PR 48351 is open).
    """
    rope = getattr(context.model_config.get_text_config(), "rope_parameters", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn" or "mscale" in rope:
        return
    usual = 0.1 * math.log(max(rope.get("factor") or 1.0, 1.0)) + 1.0
    training = rope.get("attention_factor") or usual
    rollout = usual * (rope.get("attn_factor") or 1.0)
    if not math.isclose(training, rollout, rel_tol=SAME_FACTOR):
        found = f"{MODEL}.path: YaRN with attention_factor={training:.3g}, and {rollout:.3g} in {context.engine}"
        yield warning(
            found, "the engines scale queries and keys differently in every attention layer; edit config.json"
        )


def _positions(context: Context) -> int | None:
    """Returns the positions that verl reads: of an override, or of config.json; None if they are not known."""
    places = ("", ".model_config", ".text_config")
    changed = (context.number(f"{MODEL}.override_config{place}.max_position_embeddings") for place in places)
    config = context.model_config
    parts = (config, getattr(config, "text_config", None))
    read = (getattr(part, "max_position_embeddings", None) for part in parts)
    return next((int(one) for one in (*changed, *read) if one is not None), None)
