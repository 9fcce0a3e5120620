"""The distribution of the rollout's samples and log-probabilities, and corrections in bypass mode."""

from collections.abc import Iterable

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, note, ok, warning
from verl_ext.doctor.precision import BOTH_HEADS, FLOAT32, has_float32_head, training_dtype
from verl_ext.doctor.zero_mismatch import SWITCHES
from verl_ext.features.feature import Need
from verl_ext.features.mismatch import RAW, RAW_SETTING, raw_log_probs
from verl_ext.features.top_tokens import USUAL_TOP_K, truncation_problems
from verl_ext.features.verl_config import ACTOR, BYPASS, CORRECTION, MODEL, ROLLOUT, needs_reference, truncates

USUAL = {"rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"}
DETERMINISM = f"{ROLLOUT}.full_determinism"


@check("truncated sampling", needs="engine")
def truncated_sampling(context: Context) -> Iterable[Problem]:
    """Top-p or top-k that the training engine does not know. vLLM's `processed_logprobs` are then over the kept tokens;
    its `raw_logprobs`, SGLang's log-probs and the training engine's are over all tokens.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, "Keep Sampling Mask"; verl issue 6240; prime-rl PR 2979,
    which reports that such runs collapse. `ModelConfig.logprobs_mode` of vllm/config/model.py (0.27): processed
    log-probs are computed after top-p and top-k, raw ones before. SGLang computes them before (srt/layers/sampler.py,
    0.5.12); with top tokens, our change to verl's server normalises them over the kept tokens. verl 0.9.1 passes
    rollout.top_p and top_k to the rollout (verl/trainer/ppo/v1/agent_loop_tq.py), but not to its training engines. With
    `stability.top_tokens` the rollout returns the kept tokens, and both engines normalise over them (TRL issue 7269).
    """
    if context.features is not None and any(truncation_problems(context.features)):
        return
    top_p, top_k = context.get(f"{ROLLOUT}.top_p", 1), context.get(f"{ROLLOUT}.top_k", -1)
    if top_p >= 1 and top_k <= 0:
        yield ok("sampling from the whole vocabulary (top_p=1, no top_k)")
        return
    if _knows_kept_tokens(context):
        yield ok(f"rollout.top_p={top_p}, top_k={top_k}: l_old and l_theta are over the kept tokens too")
        return
    _, mode = context.engine_argument("logprobs_mode")
    if top_k == 1:
        why = "the rollout is greedy: all answers to a prompt are equal, and a group has no advantage"
    elif context.with_vllm and mode == "processed_logprobs":
        why = "vLLM's log-probs are over the kept tokens, the training engine's over all, so every ratio is biased"
    else:
        why = "only the kept tokens are sampled, but the log-probs of both engines are over all, so ratios are biased"
    # The reference's log-probs are over the whole vocabulary, so a KL to it needs that of the policy, too.
    kept = 1 < top_k <= USUAL_TOP_K and not needs_reference(context.config)
    if context.engine and mode == "processed_logprobs" and kept:
        yield warning(f"rollout.top_p={top_p}, top_k={top_k}", why, f"stability.top_tokens.k={top_k}")
        return
    fix = [f"{ROLLOUT}.top_p=1"] if top_p < 1 else []
    fix += [f"{ROLLOUT}.top_k=-1"] if top_k > 0 else []
    yield warning(f"rollout.top_p={top_p}, top_k={top_k}", why, *fix)


def _knows_kept_tokens(context: Context) -> bool:
    return truncates(context.config) and context.features is not None and Need.TOP_TOKENS in context.features.needs


@check("log-prob mode")
def rollout_logprobs(context: Context) -> Iterable[Problem]:
    """Raw log-probs with a temperature other than 1; logits instead of log-probs.

    Source: `ModelConfig.logprobs_mode` of vllm/config/model.py (0.27), whose default is raw_logprobs, before the
    temperature; `_scale_logits_by_temperature` of verl/workers/engine/fsdp/transformer_impl.py (0.9.1) applies the
    temperature. For SGLang: `verl_ext.features.mismatch.raw_log_probs`.
    """
    if context.with_sglang:
        yield from _sglang_log_probs(context)
    if not context.with_vllm:
        return
    setting, mode = context.engine_argument("logprobs_mode")
    mode, temperature = mode or "raw_logprobs", context.get(f"{ROLLOUT}.temperature", 1)
    fix = f"{setting}=processed_logprobs"
    if mode not in ("raw_logprobs", "processed_logprobs"):
        yield warning(f"logprobs_mode={mode}", "the rollout returns logits, but log-probs are compared", fix)
    elif mode == "raw_logprobs" and temperature != 1:
        why = "vLLM's log-probs leave out the temperature, which the training engine applies"
        yield warning(f"logprobs_mode=raw_logprobs with rollout.temperature={temperature}", why, fix)
    else:
        yield ok(f"logprobs_mode={mode} with rollout.temperature={temperature}")


def _sglang_log_probs(context: Context) -> Iterable[Problem]:
    temperature = context.get(f"{ROLLOUT}.temperature", 1)
    raw = raw_log_probs(context.config, context.environ)
    if raw and temperature != 1:
        why = "SGLang's log-probs leave out the temperature, which the training engine applies"
        yield warning(f"{RAW}=1 with rollout.temperature={temperature}", why, f"++{RAW_SETTING}='0'")
    else:
        yield ok(f"SGLang's log-probs are of the whole vocabulary, at rollout.temperature={temperature}")


@check("temperature", needs="config")
def temperature_rounding(context: Context) -> Iterable[Problem]:
    """A temperature other than 1 under FSDP: verl divides bfloat16 logits in bfloat16, vLLM and SGLang in float32.

    Source: `_scale_logits_by_temperature` of verl/workers/engine/fsdp/transformer_impl.py (0.9.1) casts the temperature
    to the logits' dtype (a logit of 20.5 at 0.7 becomes 29.375 in bfloat16 instead of 29.286); `Sampler.forward` of
    vllm/v1/sample/sampler.py (0.27) divides in float32. So does SGLang, whose logits are float32 from
    srt/layers/logits_processor.py on (0.5.12). In miles PR 1554 the same division increased the gap. The division of
    fused kernels, Megatron and VeOmni is elsewhere and was not read.
    """
    temperature = context.get(f"{ROLLOUT}.temperature", 1)
    if not context.on_fsdp or temperature == 1:
        return
    if context.get(f"{MODEL}.use_fused_kernels") or training_dtype(context) == FLOAT32 or context.get(BOTH_HEADS):
        return
    found = f"rollout.temperature={temperature} with logits in {training_dtype(context)}"
    why = f"verl divides the logits by it in their own dtype, {context.engine or 'vLLM'} in float32"
    fix = f"{BOTH_HEADS}=true" if has_float32_head(context) else f"{ROLLOUT}.temperature=1"
    yield warning(found, f"{why}; bfloat16 changes each logit by up to 0.4%", fix)


@check("one answer for all", needs="with_vllm")
def one_answer_for_all(context: Context) -> Iterable[Problem]:
    """`rollout.full_determinism` with several responses: all get one seed.

    Source: `generate` of workers/rollout/vllm_rollout/vllm_async_server.py and workers/rollout/router.py: with
    full_determinism every request of trainer V1 has the same id and seed (verl PR 6857 reports it for SGLang).
    """
    if context.get(DETERMINISM) and context.get(f"{ROLLOUT}.n", 1) > 1:
        why = "all responses to a prompt get the same seed and are identical: no group has an advantage"
        fix = f"{DETERMINISM}=False"
        yield warning("rollout.full_determinism=True", f"{why}; VLLM_BATCH_INVARIANT=1 repeats results without it", fix)


@check("validation", needs="config")
def validation(context: Context) -> Iterable[Problem]:
    """Several answers per validation prompt, or `do_sample`, at temperature 0, which is greedy; `do_sample=False` above
    it, which samples. A note: validation of weights that do not change, whose scores still differ.

    Source: v1/agent_loop_tq.py applies val_kwargs.temperature, 0 by default, whatever val_kwargs.do_sample is. verl
    issues 4121 and 6802: the engines' kernels round by the batch, so that greedy answers differ between validations.
    """
    kwargs = f"{ROLLOUT}.val_kwargs"
    several, temperature = context.get(f"{kwargs}.n", 1), context.get(f"{kwargs}.temperature", 0)
    validates = context.get("trainer.test_freq", -1) > 0 or context.get("trainer.val_before_train")
    greedy = f"{kwargs}.do_sample" in context.given and context.get(f"{kwargs}.do_sample") is False
    if temperature != 0 and validates and greedy and context.get("trainer.use_v1"):
        why = "trainer V1 samples at this temperature, whatever do_sample is"
        yield warning(f"val_kwargs.do_sample=False with temperature={temperature}", why, f"{kwargs}.temperature=0")
    if temperature != 0 or not validates:
        return
    if several > 1 or context.get(f"{kwargs}.do_sample"):
        asked = f"n={several}" if several > 1 else "do_sample=True"
        same = ": all answers to a prompt are identical" if several > 1 else ", whatever do_sample is"
        why = f"verl decodes greedily at temperature 0{same}"
        yield warning(f"val_kwargs.{asked} with temperature=0", why, f"{kwargs}.temperature=1.0")
    if context.get(f"{ACTOR}.optim.lr") == 0 and not _is_repeatable(context):
        why = "greedy answers depend on what else is in the engine's batch: no sign of other weights (verl issue 6802)"
        yield note("validation at temperature 0 of weights that do not change (lr=0): its scores still differ", why)


def _is_repeatable(context: Context) -> bool:
    """Returns True if the rollout engine's results do not depend on what else is in a batch."""
    switches = (one for one in SWITCHES if context.get(f"{ROLLOUT}.name") in one.engines)
    return bool(context.get(DETERMINISM)) or any(one.is_on(context) for one in switches)


@check("bypass mode")
def bypass_mode(context: Context) -> Iterable[Problem]:
    """A correction that verl would leave out in its bypass mode (verl issue 4912).

    Source: verl issue 4912. In verl 0.9.1, `_compute_advantage` of trainer V1 skips the correction in bypass mode;
    only the loss `compute_policy_loss_bypass_mode` applies it, from `policy_loss.rollout_correction`.
    """
    if not context.get(BYPASS):
        return
    asked = {name: context.get(f"{CORRECTION}.{name}") for name in USUAL}
    ignored = [f"{name}={value}" for name, value in asked.items() if value != USUAL[name]]
    if not ignored or context.get(f"{ACTOR}.policy_loss.loss_mode") == "bypass_mode":
        yield ok("bypass mode, and no correction that verl would leave out")
        return
    why = "verl 0.9.1's trainer skips the correction (verl issue 4912); its bypass loss and our masks do not"
    fix = [f"{CORRECTION}.{name}={'null' if value is None else value}" for name, value in USUAL.items()]
    found = f"{CORRECTION}: no effect in bypass mode: {', '.join(ignored)}"
    yield warning(found, why, *fix, "stability.correction=icepop")
