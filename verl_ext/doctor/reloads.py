"""The rollout engine over weight syncs and drafts: kernels that cannot take new weights, states that outlive them,
sampling that repeats.

vLLM was read in 0.23 to 0.32, SGLang in 0.5.12, verl in 0.9.1, transformers in 5.10.
"""

import math
from collections.abc import Iterable

from verl_ext.doctor.checks import CheckResult, Context, check, error, note, warning
from verl_ext.doctor.engine import MOE_BACKEND, SGLANG_RUNNER, captures_routing
from verl_ext.doctor.updates import RECURRENT
from verl_ext.features.verl_config import MODEL, MTP, ROLLOUT, RUNTIME, VLLM_ARGUMENTS, sends_adapter

BLACKWELL = 10  # major compute capability of the GPUs whose kernels lay the weights out in blocks
BLOCKS = ("auto", "flashinfer_trtllm")
FLAT_VLLM = (0, 31)  # from here on these weights keep their shape (vLLM PR 54699)
CAPTURED_VLLM = (0, 26)  # from here on a draft layer has an id of its own (vLLM PR 48622)
DETERMINISM = f"{ROLLOUT}.full_determinism"
SPECULATION = f"{VLLM_ARGUMENTS}.speculative_config"
EPLB = f"{VLLM_ARGUMENTS}.enable_eplb"
FLASHINFER = "VLLM_USE_FLASHINFER_MOE_FP16"
LINEAR = (*RECURRENT, "qwen3_5", "qwen3_5_moe")  # model_type with layers of linear attention, or Mamba's
DRAFTS_FIRST = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "exaone_moe", "mimo_v2")  # whose draft has id 0
NEAR = 1e-3  # relative; factors nearer than this are the same


@check("sync of experts", needs="engine")
def sync_of_experts(context: Context) -> Iterable[CheckResult]:
    """Kernels on Blackwell that lay out the experts' weights in blocks, which a sync does not fill.

    Source: verl issue 7978, PR 7987 (open): vLLM 0.24 picks them by itself
    (model_executor/layers/fused_moe/oracle/unquantized.py), and the first sync ends with a ValueError; from 0.31 on
    weights keep their shape. SGLang issue 27787: moe_runner_backend=auto picks them (srt/server_args.py), and the shape
    comes back for `flashinfer_trtllm_routed` only (srt/layers/quantization/unquant.py). NeMo-RL PRs 2586 and 3296.
    """
    if context.gpu is None or context.gpu.capability[0] != BLACKWELL or not context.has_experts:
        return
    if context.model_type == "gpt_oss" or context.engine_argument("quantization")[1]:
        return
    setting = MOE_BACKEND if context.with_vllm else SGLANG_RUNNER
    backend = str(context.get(setting, "auto")).lower()
    old = not context.with_vllm or context.vllm_before(*FLAT_VLLM)
    if backend in BLOCKS and old and not sends_adapter(context.config):
        found = f"experts in bf16 on a {context.gpu.name} with {setting.rpartition('.')[2]}={backend}"
        why = "the kernel keeps their weights in blocks, and the first weight sync ends with an error of shapes"
        yield error(found, f"{why} (verl issue 7978)", f"++{setting}=triton")


@check("moved experts", needs="with_vllm")
def moved_experts(context: Context) -> Iterable[CheckResult]:
    """Experts that vLLM has moved, and a sync that fills them where they were.

    Source: vLLM PR 55228 (open), prime-rl PR 3583: a reload goes by the first map of experts, the routing by the one
    after rebalancing.
    """
    if context.get(EPLB):
        why = "a weight sync fills the experts by their first places, and tokens go to where they are now"
        yield warning("enable_eplb=true", f"{why} (vLLM PR 55228)", f"++{EPLB}=false")


@check("drafts of hybrids", needs="with_vllm")
def drafts_of_hybrids(context: Context) -> Iterable[CheckResult]:
    """MTP drafts of models with recurrent layers: their states, and their experts.

    Source: vLLM issue 53912 (open, 0.28) and SkyRL issue 1981: prefix hits restore wrong states (26 % of answers right,
    9 % with it). vLLM PR 48622: before 0.26 the draft layer of these models has the id of the first layer, and its
    experts take the place of those (routed_experts_capturer.py).
    """
    if context.drafter != "mtp":
        return
    setting, cached = context.engine_argument("enable_prefix_caching")
    if cached and context.model_type in LINEAR:
        why = "a prefix hit restores states that drafts have overwritten: answers go wrong (vLLM issue 53912)"
        yield warning(f"MTP and prefix caching with {context.model_type}", why, f"{setting}=False")
    if context.vllm_before(*CAPTURED_VLLM) and captures_routing(context) and context.model_type in DRAFTS_FIRST:
        why = "before 0.26 the draft's experts take the place of the first layer's (vLLM PR 48622)"
        off = f"{MTP}.enable_rollout=False" if context.get(f"{MTP}.enable_rollout") else f"++{SPECULATION}=null"
        yield warning(f"routing capture of {context.vllm} with MTP", why, off)


@check("one answer for all", needs="with_vllm")
def one_answer_for_all(context: Context) -> Iterable[CheckResult]:
    """A seed that all responses of a prompt share.

    Source: `generate` of workers/rollout/vllm_rollout/vllm_async_server.py and workers/rollout/router.py: with
    full_determinism every request of trainer V1 has the same id and seed (verl PR 6857 names it for SGLang).
    """
    if context.get(DETERMINISM) and context.get(f"{ROLLOUT}.n", 1) > 1:
        why = "all responses to a prompt get the same seed and are the same: no group has an advantage"
        fix = f"{DETERMINISM}=False"
        yield warning("rollout.full_determinism=True", f"{why}; VLLM_BATCH_INVARIANT=1 repeats results without it", fix)


@check("flashinfer variable", needs="with_vllm")
def flashinfer_variable(context: Context) -> Iterable[CheckResult]:
    """An environment variable that vLLM no longer reads.

    Source: verl issue 6847 (closed): with it vLLM's rollouts were garbage after the first sync. vLLM 0.23 reads it, and
    0.24 has no such variable (vLLM PR 43148).
    """
    value = context.get(f"{RUNTIME}.{FLASHINFER}", context.environ.get(FLASHINFER))
    if value is None:
        return
    if context.vllm_before(0, 24) and str(value) == "1":
        yield warning(f"{FLASHINFER}=1", "rollouts are garbage after the first weight sync (verl issue 6847)")
    else:
        yield note(f"{FLASHINFER}={value}", f"vLLM from 0.24 on does not read it; ++{MOE_BACKEND} chooses the kernel")


@check("attention factor", needs="model_config")
def attention_factor(context: Context) -> Iterable[CheckResult]:
    """YaRN's factor of attention, which the engines take from different settings.

    Source: `_compute_yarn_parameters` of transformers/modeling_rope_utils.py reads attention_factor, or the ratio of
    mscale and mscale_all_dim; vLLM (rotary_embedding/__init__.py) and SGLang (factory.py) read attn_factor alone where
    rope_type is yarn (vLLM issue 48621, PR 48351 is open).
    """
    rope = getattr(context.model_config.get_text_config(), "rope_parameters", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn" or "mscale" in rope:
        return
    usual = 0.1 * math.log(max(rope.get("factor") or 1.0, 1.0)) + 1.0
    training = rope.get("attention_factor") or usual
    rollout = usual * (rope.get("attn_factor") or 1.0)
    if not math.isclose(training, rollout, rel_tol=NEAR):
        found = f"{MODEL}.path: YaRN with attention_factor={training:.3g}, and {rollout:.3g} in {context.engine}"
        yield warning(
            found, "the engines scale queries and keys differently: every attention differs; edit config.json"
        )
