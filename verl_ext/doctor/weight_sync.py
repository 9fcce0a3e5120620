"""Weight syncs, older weights that the rollout keeps, and batches that wait."""

from collections.abc import Iterable
from math import ceil

from verl_ext.doctor.checks import CheckResult, Context, check, error, note, ok, warning
from verl_ext.doctor.hooks import errors_once, features_of
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.verl_config import MERGE_LORA, MODE, MODEL, sends_adapter, trains_lora

CANARY = "stability.sync_canary.trajectories"
STOP_AFTER = "stability.guard.stop_after"
NO_ADAPTERS = "0.5.12"  # the SGLang that verl 0.9.1 pins


@check("weight sync", needs="config")
def weight_sync(context: Context) -> Iterable[CheckResult]:
    """Weight syncs that do not happen, and whether the run would notice.

    Source: verl issue 7495: of a LoRA, `update_weights` (workers/engine_workers.py, 0.9.1) sends a checkpoint engine
    what `get_per_tensor_param()` gives by default, the base, and drops the adapter's config; vLLM's list of adapters
    stays empty, and the gap looks like old rollouts. `lora.merge=true` sends full weights. Names that vLLM has no
    module for are dropped without a word (vLLM issues 34186 and 48019). When the canary is on by itself:
    `features.sync_canary.canary_settings`. For SGLang, `update_weights` (workers/rollout/sglang_rollout) passes
    `serialized_named_tensors` to LoadLoRAAdapterFromTensorsReqInput, whose field is `serialized_tensors` in 0.5.12: a
    TypeError at the first sync, seen in a run on CPU cores.
    """
    if sends_adapter(context.config, "sglang") and context.version("sglang") in (None, NO_ADAPTERS):
        why = f"verl 0.9.1 sends it in a form that SGLang {NO_ADAPTERS} does not take: the run ends at the first sync"
        yield error(f"a LoRA as an adapter of SGLang {NO_ADAPTERS}", why, MERGE_LORA)
    watched = _watched(context)
    separate = context.get(MODE) == "separate_async"
    if sends_adapter(context.config) and separate:
        why = "verl 0.9.1 sends the servers the base model at each sync and never the LoRA (verl issue 7495)"
        yield warning("a LoRA in separate_async", why, MERGE_LORA)
    elif not watched and (separate or trains_lora(context.config)):
        found = "weights go to the rollout by a checkpoint engine" if separate else "a LoRA is sent to the rollout"
        why = f"a sync that fails looks like old rollouts; {CANARY}=8 finds it at the first sync"
        yield note(f"{found}, and no sync is checked", why)
    if watched:
        yield ok(f"each weight sync is checked, on {watched} trajectories")
        if context.drafter:
            why = "vLLM was seen to give wrong prompt log-probs with MTP drafts, of some requests (vLLM issue 53488)"
            yield warning("the sync canary with speculative decoding", why, f"{CANARY}=0")


def _watched(context: Context) -> int:
    """Returns how many trajectories the canary scores: as set, or by default."""
    if context.plugin_modules or errors_once(context):
        return context.get(CANARY, 0)
    return canary_settings(features_of(context.config, read_model=False)).trajectories or 0


@check("speculative decoding", needs="with_vllm")
def speculative_decoding(context: Context) -> Iterable[CheckResult]:
    """Drafts of a model that training leaves behind.

    Source: vLLM issue 48296 (what speculative decoding lacks in RL). verl 0.9.1 loads each sync into the drafter too
    where its method is `mtp`, and into no other (`_use_mtp_drafter_weight_sync`,
    workers/rollout/vllm_rollout/utils.py). What is sampled is the target's distribution whatever the draft, and its
    log-probs are of the target's logits (`RejectionSampler` of v1/sample/rejection_sampler.py, vLLM 0.27): an old draft
    costs speed.
    """
    if not (method := context.drafter):
        return
    if method != "mtp":
        why = "verl updates no drafter but MTP's: ever fewer drafts are accepted as training goes on (vLLM issue 48296)"
        yield note(f"speculative decoding by {method}", why)
    elif not context.get(f"{MODEL}.mtp.enable_train"):
        why = "the head is sent to the rollout as it began: ever fewer drafts are accepted as the policy moves"
        yield note("speculative decoding by mtp, whose head is not trained (mtp.enable_train)", why)
    else:
        yield ok("speculative decoding by mtp: trained, and synchronised")


@check("waiting batches")
def waiting_batches(context: Context) -> Iterable[CheckResult]:
    """A guard that stops the run before newer rollouts can reach it.

    Batches that were sampled before an update is refused are as far from the policy as the refused one.

    Source: recipes/collapse, where with 32 batches waiting, stop_after=10 ended a run that went on, and lived, with 50.
    """
    mode = context.get(MODE, "sync")
    stop_after = context.get(STOP_AFTER)
    if mode == "sync" or stop_after is None or not _skips_updates(context):
        return
    waiting = ceil(context.get(f"trainer.v1.{mode}.num_warmup_batches", 0))
    if waiting < stop_after:
        yield ok(f"{STOP_AFTER}={stop_after} with {waiting} batches waiting")
        return
    why = "all of them may be refused like the first, and the run stops before one of today's weights comes"
    found = f"{STOP_AFTER}={stop_after} with trainer.v1.{mode}.num_warmup_batches={waiting}"
    yield warning(found, why, f"{STOP_AFTER}={waiting + stop_after}")


def _skips_updates(context: Context) -> bool:
    skips = any(rule.get("action") == "skip" for rule in context.guard_rules)
    return skips or context.get("stability.batch_skip.threshold") is not None
