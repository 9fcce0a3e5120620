"""The sampler's K top tokens at each place, which truncated sampling and score centering need."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.losses import loss_mode
from verl_ext.features.verl_config import (
    ACTOR,
    BYPASS,
    DISAGGREGATED,
    MODEL,
    MTP,
    ROLLOUT,
    ROLLOUTS,
    SGLANG_ARGUMENTS,
    VLLM_ARGUMENTS,
    bypasses,
    cuts,
    drafts,
    hf_config_of,
    rollout_name,
    top_k,
    truncates,
    verls_corrections,
)

FUSED = f"{MODEL}.use_fused_kernels"
MAX = f"{VLLM_ARGUMENTS}.max_logprobs"
USUAL_TOP_K = 512  # prime-rl's
CENTERED_K = 128  # top tokens for score centering, as in the paper
PREFILLED_K = 128  # top tokens that SGLang's prefill server passes on (`MetadataBuffers`, disaggregation/utils.py)
CENTERED = "stability.score_centering=true"
LINEAR = ("vanilla", "gpg")  # losses whose gradient at the first update of a batch is the weighted score


def top_token_count(run: RunFeatures) -> int:
    """Returns how many top tokens the rollout returns at each place; 0 for none.

    Truncated sampling needs top tokens only if a feature compares the engines' log-probabilities.
    """
    if run.stability.top_tokens.k:
        return run.stability.top_tokens.k
    if truncates(run.config) and (Need.ROLLOUT_LOG_PROBS in run.needs or run.stability.score_centering):
        return top_k(run.config)
    return CENTERED_K if run.stability.score_centering else 0


def needs(run: RunFeatures) -> Iterator[Demand]:
    needed = frozenset({Need.ROLLOUT_LOG_PROBS, Need.MEASURED_BATCHES, Need.OUR_LOSS})
    if run.stability.score_centering:
        yield Demand(CENTERED, needed, off=("stability.score_centering=false",))
    if top_token_count(run):
        late = truncates(run.config) or run.stability.score_centering
        read = {Need.TOP_TOKENS, Need.TOP_TOKENS_IN_UPDATE} if late else {Need.TOP_TOKENS}
        yield Demand(_asking(run), needed | read)


def problems(run: RunFeatures) -> Iterator[Problem]:
    if Need.ROLLOUT_LOG_PROBS not in run.needs:
        return
    config, stability, k = run.config, run.stability, top_token_count(run)
    yield from truncation_problems(run)
    if stability.score_centering:
        yield from _centering_problems(run)
    if not k:
        return
    asked = f"the {k} most likely tokens ({_asking(run)})"
    if (name := rollout_name(config)) not in ROLLOUTS:
        yield Problem(f"{asked}: verl returns none with {ROLLOUT}.name={name}", fix=(f"{ROLLOUT}.name=vllm",))
        return
    if name == "vllm":
        most = OmegaConf.select(config, MAX)
        if most is not None and -1 != most < k:
            yield Problem(f"{asked}: {MAX}={most} allows fewer", fix=(f"{MAX}={k}",))
    else:
        yield from _sglang_top_tokens_problems(run, asked, k)
    if OmegaConf.select(config, FUSED):
        yield Problem(f"{asked} are read from logits, and {FUSED}=True makes none", fix=(f"{FUSED}=False",))
    for name in ("fsdp_config.pad_to_length", "megatron.pad_to_length", "megatron.dynamic_context_parallel"):
        if OmegaConf.select(config, setting := f"{ACTOR}.{name}"):
            yield Problem(f"{asked}: verl returns only logits with {setting}=True", fix=(f"{setting}=False",))
    if run.read_model:
        yield from _vocabulary_problems(run, asked, k)


def _asking(run: RunFeatures) -> str:
    if run.stability.top_tokens.k:
        return f"stability.top_tokens.k={run.stability.top_tokens.k}"
    if truncates(run.config):
        return f"{ROLLOUT}.top_k={top_k(run.config)}"
    return CENTERED


def truncation_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields the problems of truncated sampling, if the engines' log-probabilities are compared."""
    config, k = run.config, top_token_count(run)
    if Need.ROLLOUT_LOG_PROBS not in run.needs or not truncates(config):
        return
    rollout, whole = config.actor_rollout_ref.rollout, (f"{ROLLOUT}.top_p=1", f"{ROLLOUT}.top_k=-1")
    asked = f"{ROLLOUT}.top_p={rollout.top_p}"
    if rollout.top_k <= 0:
        yield Problem(
            f"{asked} without top_k keeps any number of tokens, and the training engine needs all of them",
            fix=(f"{ROLLOUT}.top_k={USUAL_TOP_K}",),
            otherwise=f"{ROLLOUT}.top_p=1: prefer it unless answers need top_p, because it sends no top tokens",
        )
        return
    asked = f"{asked} and top_k={rollout.top_k}"
    if rollout.top_k == 1:
        yield Problem(f"{asked} keep one token: its l_old and l_theta are always 0, and so is the gradient", fix=whole)
        return
    if 0 < k < rollout.top_k:
        yield Problem(
            f"{asked} keep more tokens than stability.top_tokens.k={k}",
            fix=(f"stability.top_tokens.k={rollout.top_k}",),
        )
    for setting in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        if OmegaConf.select(config, setting):
            yield Problem(
                f"{asked} normalise l_theta over the kept tokens, and {setting}=True compares it with a reference over "
                "the whole vocabulary",
                fix=whole,
                otherwise=f"{setting}=False",
            )


def _centering_problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that the gradient's mean, which centering subtracts, is known: it is for A w grad log p, but not for a
    clipped ratio."""
    config = run.config
    if bypasses(config):
        yield _uncentered("needs l_old for its weights", f"{BYPASS}=True", f"{BYPASS}=False")
    if cuts(config) and not truncates(config):
        yield _uncentered(
            "needs the distribution that tokens are drawn from",
            f"{ROLLOUT}.top_p, top_k with raw log-probs",
            f"{ROLLOUT}.logprobs_mode=processed_logprobs",
        )
    setting = f"{ACTOR}.policy_loss.loss_mode"
    if (mode := loss_mode(config)) not in LINEAR:
        yield _uncentered(
            "centers A w grad log p, which is not this loss's gradient", f"{setting}={mode}", f"{setting}=vanilla"
        )
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch != mini:
        yield _uncentered(
            "centers the first update of a batch, while l_theta is still l_old",
            f"{ACTOR}.ppo_mini_batch_size={mini} of {batch}",
            f"{ACTOR}.ppo_mini_batch_size={batch}",
        )
    epochs = f"{ACTOR}.ppo_epochs"
    if (count := OmegaConf.select(config, epochs) or 1) > 1:
        yield _uncentered("centers the first update of a batch", f"{epochs}={count}", f"{epochs}=1")
    yield from _centered_weights_problems(run)
    if any(rule.action == "tighten" for rule in run.stability.rules):
        yield _uncentered(
            "would keep using the wide band", "a rule with action=tighten", otherwise="choose another action"
        )


def _centered_weights_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields weights and masks that are known only for the sampled token, not for every top token.

    Corrections that weigh single tokens have weights for every top token. Anything else that depends on the sampled
    tokens would give the weighted score a mean that centering does not subtract.
    """
    stability = run.stability
    for chosen in (*stability.before_update, *stability.in_update):
        if chosen.method.in_update or chosen.method.per_sequence:
            yield _uncentered(
                "knows the weight of each token that might have been sampled, but not of each response",
                f"stability.correction={chosen.name}",
                otherwise="choose tis, icepop, kpop or ipo, or set stability.score_centering=false",
            )
    if stability.denominator == "kept":
        yield _uncentered(
            "subtracts a mean over all tokens", "stability.denominator=kept", "stability.denominator=full"
        )
    for one in stability.filters:
        if one.method.sees_tokens:
            yield _uncentered(
                "does not know which of the tokens that might have been sampled a filter would drop",
                f"stability.filters.{one.name}",
                otherwise="leave the filter out, or set stability.score_centering=false",
            )
    for setting, value in verls_corrections(run.config).items():
        yield _uncentered("does not know verl's own weights", f"{setting}={value}", f"{setting}=null")


def _uncentered(why: str, what: str, *fix: str, otherwise: str = "set stability.score_centering=false") -> Problem:
    return Problem(f"{CENTERED} {why}: {what}", fix=fix, otherwise=otherwise)


def _sglang_top_tokens_problems(run: RunFeatures, asked: str, k: int) -> Iterator[Problem]:
    """Yields settings under which SGLang's top tokens are too few, or not those that it sampled from (0.5.12)."""
    config = run.config
    if k > PREFILLED_K and OmegaConf.select(config, DISAGGREGATED):
        yield Problem(
            f"{asked}: with {DISAGGREGATED}=true the first token of a response has at most {PREFILLED_K} of them",
            fix=(f"{DISAGGREGATED}=false",),
        )
    if not truncates(config):
        return
    if value := OmegaConf.select(config, target := f"{SGLANG_ARGUMENTS}.rl_on_policy_target"):
        yield Problem(
            f"{asked} show which tokens SGLang kept, and {target}={value} rounds their log-probabilities to bfloat16",
            fix=(f"{target}=null",),
        )
    if drafts(config):
        yield Problem(
            f"{asked} show which tokens SGLang kept, and {MTP}.enable_rollout=true keeps other tokens when it verifies",
            fix=(f"{MTP}.enable_rollout=false",),
        )


def _vocabulary_problems(run: RunFeatures, asked: str, k: int) -> Iterator[Problem]:
    if (model := hf_config_of(run.config.actor_rollout_ref.model)) is None:
        return
    vocabulary = getattr(model.get_text_config(), "vocab_size", None)
    if vocabulary is not None and k > vocabulary:
        by_top_k = truncates(run.config) and not run.stability.top_tokens.k
        fix = f"{ROLLOUT}.top_k" if by_top_k else "stability.top_tokens.k"
        yield Problem(f"{asked}: the model's vocabulary has {vocabulary}", fix=(f"{fix}={vocabulary}",))


def apply(run: RunFeatures) -> None:
    """Makes vLLM allow this many log-probabilities; SGLang has no limit."""
    if (k := top_token_count(run)) and rollout_name(run.config) == "vllm" and OmegaConf.select(run.config, MAX) is None:
        OmegaConf.update(run.config, MAX, k, force_add=True)


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    """Returns the fields of the workers' TopTokenUse."""
    if Need.TOP_TOKENS not in run.needs:
        return {}
    of_tokens = [one for one in run.stability.before_update if not one.method.per_sequence]
    use = {
        "truncated": truncates(run.config),
        "centers": run.stability.score_centering,
        "corrections": {one.name: asdict(one.settings) for one in of_tokens},
    }
    return {"top_tokens": use}


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if run.stability.score_centering:
        names = ", ".join(chosen.name for chosen in run.stability.before_update if not chosen.method.per_sequence)
        setting = f"weights of {names}" if names else "no weights"
        yield TableLine("score centering", setting, "{loss}", in_loss=lambda found: found["centers"])
    if k := top_token_count(run):
        setting = f"{k} tokens; l_old and l_theta over what is kept" if truncates(run.config) else f"{k} tokens"
        yield TableLine("sampler's top tokens", setting, "{loss}", in_loss=lambda found: found["top_tokens"])


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not top_token_count(run):
        yield Idle("vllm_kl/head*", "the rollout returns no top tokens", ("stability.top_tokens.k=32",))
    if not run.stability.score_centering:
        yield Idle("actor/score_centering", "scores are not centered", (CENTERED,))


TOP_TOKENS = Feature(
    needs,
    problems,
    apply,
    agent_loop=lambda run: {"top_tokens": top_token_count(run)},
    loss_settings=loss_settings,
    lines=lines,
    idle=idle,
)
