"""Weights that a sync sends to the rollout, drafts that it leaves stale, and batches that wait.

vLLM was read in 0.23 to 0.32, SGLang in 0.5.12, verl in 0.9.1, transformers in 5.10.
"""

from collections.abc import Iterable
from math import ceil, floor

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, note, ok, warning
from verl_ext.doctor.experts import MOE_BACKEND, SGLANG_RUNNER, captures_routing
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.verl_config import MERGE_LORA, MODE, MODEL, MTP, VLLM_ARGUMENTS, sends_adapter, trains_lora
from verl_ext.launch.families import DRAFTS_FIRST, LINEAR

CANARY = "stability.sync_canary.trajectories"
SAMPLER = "trainer.v1.sampler"
STOP_AFTER = "stability.guard.stop_after"
NO_ADAPTERS = "0.5.12"  # the SGLang that verl 0.9.1 pins
BLACKWELL = 10  # major compute capability of the GPUs whose kernels store the weights in blocks
BLOCKS = ("auto", "flashinfer_trtllm")
FLAT_VLLM = (0, 31)  # from here on these weights keep their shape (vLLM PR 54699)
CAPTURED_VLLM = (0, 26)  # from here on a draft layer has its own id (vLLM PR 48622)
SPECULATION = f"{VLLM_ARGUMENTS}.speculative_config"
EPLB = f"{VLLM_ARGUMENTS}.enable_eplb"


@check("weight sync", needs="config")
def weight_sync(context: Context) -> Iterable[Problem]:
    """A LoRA in `separate_async`, which verl 0.9.1 never sends (verl issue 7495); a LoRA as an adapter of SGLang
    0.5.12, which verl 0.9.1 sends in a wrong form; the sync canary with speculative decoding; a note if a LoRA, or a
    transfer other than verl's naive one, is not checked.

    Source: verl issue 7495. For a LoRA, `update_weights` (workers/engine_workers.py, 0.9.1) sends a checkpoint engine
    the default of `get_per_tensor_param()`, the base, and drops the adapter's config; vLLM's list of adapters stays
    empty, and the gap looks like old rollouts. `lora.merge=true` sends full weights. vLLM silently drops names for
    which it has no module (vLLM issues 34186 and 48019). `features.sync_canary.canary_settings` has the canary's
    default. For SGLang, `update_weights` (workers/rollout/sglang_rollout) passes `serialized_named_tensors` to
    LoadLoRAAdapterFromTensorsReqInput, whose field is `serialized_tensors` in 0.5.12: the first sync ended with a
    TypeError in a run on CPU cores.
    """
    if sends_adapter(context.config, "sglang") and context.version("sglang") in (None, NO_ADAPTERS):
        why = f"verl 0.9.1 sends it in a form that SGLang {NO_ADAPTERS} refuses: the run ends at the first sync"
        yield error(f"a LoRA as an adapter of SGLang {NO_ADAPTERS}", why, MERGE_LORA)
    watched = canary_settings(context.features).trajectories if context.features is not None else context.get(CANARY)
    separate = context.get(MODE) == "separate_async"
    if sends_adapter(context.config) and separate:
        why = "verl 0.9.1 sends the servers the base model at each sync and never the LoRA (verl issue 7495)"
        yield warning("a LoRA in separate_async", why, MERGE_LORA)
    elif watched == 0 and (separate or (trains_lora(context.config) and not context.get(f"{MODEL}.lora.merge"))):
        found = "weights go to the rollout by a checkpoint engine" if separate else "a LoRA is sent to the rollout"
        why = f"a sync that fails looks like old rollouts; {CANARY}=8 finds it at the first sync"
        yield note(f"{found}, and no sync is checked", why)
    if watched:
        yield ok(f"each weight sync is checked, on {watched} trajectories")
        if context.drafter:
            why = "with MTP drafts, vLLM gave wrong prompt log-probs for some requests (vLLM issue 53488)"
            yield warning("the sync canary with speculative decoding", why, f"{CANARY}=0")


@check("sync of experts", needs="engine")
def sync_of_experts(context: Context) -> Iterable[Problem]:
    """Experts in bf16 on Blackwell, whose kernel does not accept new weights: vLLM before 0.31 (verl issue 7978),
    SGLang 0.5.12.

    Source: verl issue 7978, PR 7987 (open): vLLM 0.24 picks the kernel by default
    (model_executor/layers/fused_moe/oracle/unquantized.py), and the first sync ends with a ValueError; from 0.31 on
    weights keep their shape. SGLang issue 27787: moe_runner_backend=auto picks the kernel (srt/server_args.py), and the
    shape is restored only for `flashinfer_trtllm_routed` (srt/layers/quantization/unquant.py). NeMo-RL PRs 2586 and
    3296.
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
        why = "the kernel stores their weights in blocks, and the first weight sync ends with a shape error"
        yield error(found, f"{why} (verl issue 7978)", f"++{setting}=triton")


@check("moved experts", needs="with_vllm")
def moved_experts(context: Context) -> Iterable[Problem]:
    """`enable_eplb=true`: a sync writes experts to their old places (vLLM PR 55228).

    Source: vLLM PR 55228 (open), prime-rl PR 3583: a reload uses the first map of experts, the routing the map after
    rebalancing.
    """
    if context.get(EPLB):
        why = "a weight sync writes experts to their first places, but tokens are routed to the rebalanced places"
        yield warning("enable_eplb=true", f"{why} (vLLM PR 55228)", f"++{EPLB}=false")


@check("speculative decoding", needs="with_vllm")
def speculative_decoding(context: Context) -> Iterable[Problem]:
    """A note: drafters that verl does not update, or that are not trained (vLLM issue 48296).

    Source: vLLM issue 48296 (speculative decoding in RL). verl 0.9.1 loads each sync into the drafter too, but only if
    its method is `mtp` (`_use_mtp_drafter_weight_sync`, workers/rollout/vllm_rollout/utils.py). A stale drafter costs
    only speed: samples and log-probs are the target model's with any draft (`RejectionSampler` of
    v1/sample/rejection_sampler.py, vLLM 0.27).
    """
    if not (method := context.drafter):
        return
    if method != "mtp":
        why = "verl updates only MTP's drafter: ever fewer drafts are accepted during training (vLLM issue 48296)"
        yield note(f"speculative decoding by {method}", why)
    elif not context.get(f"{MODEL}.mtp.enable_train"):
        why = "the head stays as it was at the start: ever fewer drafts are accepted as the policy moves"
        yield note("speculative decoding by mtp, whose head is not trained (mtp.enable_train)", why)
    else:
        yield ok("speculative decoding by mtp: trained and synchronised")


@check("drafts of hybrids", needs="with_vllm")
def drafts_of_hybrids(context: Context) -> Iterable[Problem]:
    """MTP of a model with recurrent layers, with prefix caching (vLLM issue 53912), or with captured routing before
    vLLM 0.26.

    Source: vLLM issue 53912 (open, 0.28) and SkyRL issue 1981: prefix hits restore wrong states (26 % of answers right
    without prefix caching, 9 % with it). vLLM PR 48622: before 0.26 the draft layer of these models has the id of the
    first layer, and its experts replace those of the first layer (routed_experts_capturer.py).
    """
    if context.drafter != "mtp":
        return
    setting, cached = context.engine_argument("enable_prefix_caching")
    if cached and context.model_type in LINEAR:
        why = "a prefix hit restores states that drafts have overwritten: answers become wrong (vLLM issue 53912)"
        yield warning(f"MTP and prefix caching with {context.model_type}", why, f"{setting}=False")
    if context.vllm_before(*CAPTURED_VLLM) and captures_routing(context) and context.model_type in DRAFTS_FIRST:
        why = "before 0.26 the draft's experts replace the first layer's (vLLM PR 48622)"
        off = f"{MTP}.enable_rollout=False" if context.get(f"{MTP}.enable_rollout") else f"++{SPECULATION}=null"
        yield warning(f"routing capture of {context.vllm} with MTP", why, off)


@check("waiting batches")
def waiting_batches(context: Context) -> Iterable[Problem]:
    """Batches that wait in an asynchronous run, so that each is older than `max_off_policy_threshold` allows when its
    turn comes; a `stop_after` that is at most their number at the start.

    After a refused batch, all batches that were sampled before it may be refused too: they are as far from the policy.

    Source: recipes/collapse: with 32 batches waiting, stop_after=10 ended a run that survived with stop_after=50. verl
    0.9.1: `_stale_terminal_keys` of trainer/ppo/v1/replay_buffer.py; `_add_async_warmup_batches` of v1/trainer_base.py.
    """
    mode = context.get(MODE, "sync")
    stop_after = context.get(STOP_AFTER)
    if mode == "sync":
        return
    waiting = _waiting(context, context.number(f"trainer.v1.{mode}.num_warmup_batches") or 0)
    oldest, drops = (
        context.number(f"{SAMPLER}.max_off_policy_threshold"),
        context.get(f"{SAMPLER}.max_off_policy_strategy"),
    )
    own = any(context.get(one) for one in (f"{SAMPLER}.custom_sampler.path", "skip.rollout_tq.enable"))
    if oldest is not None and drops == "drop" and oldest < 1 + waiting and not own:
        found = f"{SAMPLER}.max_off_policy_threshold={oldest:g} with {waiting} batches waiting"
        why = f"a batch that waited spans {1 + waiting} versions: verl drops it and generates another"
        yield warning(found, why, f"{SAMPLER}.max_off_policy_threshold={1 + waiting}")
    if stop_after is None or not _skips_updates(context):
        return
    if waiting < stop_after:
        yield ok(f"{STOP_AFTER}={stop_after} with {waiting} batches waiting")
        return
    why = "all of them may be refused like the first, and the run stops before a batch of the current weights comes"
    found = f"{STOP_AFTER}={stop_after} with trainer.v1.{mode}.num_warmup_batches={waiting}"
    yield warning(found, why, f"{STOP_AFTER}={waiting + stop_after}")


def _waiting(context: Context, asked: float) -> int:
    """Returns how many batches wait, the last one perhaps in part: verl asks for prompts by whole gen_batch_size."""
    batch = context.number("data.train_batch_size") or 1
    generated = context.number("data.gen_batch_size") or batch
    return ceil(floor(asked * batch / generated) * generated / batch)


def _skips_updates(context: Context) -> bool:
    skips = any(rule.get("action") == "skip" for rule in context.guard_rules)
    return skips or context.get("stability.batch_skip.threshold") is not None
