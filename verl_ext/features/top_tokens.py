"""The sampler's K top tokens at each place, which truncated sampling and score centering need."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.features.feature import Demand, Feature, Need, RunFeatures, TableLine
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


def check(run: RunFeatures) -> None:
    if Need.ROLLOUT_LOG_PROBS not in run.needs:
        return
    config, stability, k = run.config, run.stability, top_token_count(run)
    if truncates(config):
        _check_truncated(config, k)
    if stability.score_centering:
        _check_centering(run)
    _check_signals(run, k)
    if not k:
        return
    asked = f"the {k} most likely tokens ({_asking(run)})"
    if (name := rollout_name(config)) not in ROLLOUTS:
        raise ConfigError(f"{asked}: verl returns none with {ROLLOUT}.name={name}", fix=(f"{ROLLOUT}.name=vllm",))
    if name == "vllm":
        most = OmegaConf.select(config, MAX)
        if most is not None and -1 != most < k:
            raise ConfigError(f"{asked}: {MAX}={most} allows fewer", fix=(f"{MAX}={k}",))
    else:
        _check_sglang_top_tokens(run, asked, k)
    if OmegaConf.select(config, FUSED):
        raise ConfigError(f"{asked} are read from logits, and {FUSED}=True makes none", fix=(f"{FUSED}=False",))
    for name in ("fsdp_config.pad_to_length", "megatron.pad_to_length", "megatron.dynamic_context_parallel"):
        if OmegaConf.select(config, setting := f"{ACTOR}.{name}"):
            raise ConfigError(f"{asked}: verl returns only logits with {setting}=True", fix=(f"{setting}=False",))
    if run.read_model:
        _check_vocabulary(run, asked, k)


def _asking(run: RunFeatures) -> str:
    if run.stability.top_tokens.k:
        return f"stability.top_tokens.k={run.stability.top_tokens.k}"
    if truncates(run.config):
        return f"{ROLLOUT}.top_k={top_k(run.config)}"
    return CENTERED


def _check_truncated(config: DictConfig, k: int) -> None:
    rollout = config.actor_rollout_ref.rollout
    asked = f"{ROLLOUT}.top_p={rollout.top_p}"
    if rollout.top_k <= 0:
        raise ConfigError(
            f"{asked} without top_k keeps any number of tokens, and the training engine needs all of them",
            fix=(f"{ROLLOUT}.top_k={USUAL_TOP_K}",),
            otherwise=f"{ROLLOUT}.top_p=1",
        )
    asked = f"{asked} and top_k={rollout.top_k}"
    if rollout.top_k == 1:
        raise ConfigError(
            f"{asked} keep one token: its l_old and l_theta are always 0, and so is the gradient",
            fix=(f"{ROLLOUT}.top_k={USUAL_TOP_K}",),
        )
    if 0 < k < rollout.top_k:
        raise ConfigError(
            f"{asked} keep more tokens than stability.top_tokens.k={k}",
            fix=(f"stability.top_tokens.k={rollout.top_k}",),
        )
    for setting in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        if OmegaConf.select(config, setting):
            raise ConfigError(
                f"{asked} normalise l_theta over the kept tokens, and {setting}=True compares it with a reference over "
                "the whole vocabulary",
                fix=(f"{setting}=False",),
                otherwise=f"{ROLLOUT}.top_p=1 and top_k=-1",
            )


def _check_centering(run: RunFeatures) -> None:
    """Checks that the gradient's mean, which centering subtracts, is known: it is for A w grad log p, but not for a
    clipped ratio."""
    config = run.config
    if bypasses(config):
        _refuse("needs l_old for its weights", f"{BYPASS}=True", f"{BYPASS}=False")
    if cuts(config) and not truncates(config):
        _refuse(
            "needs the distribution that tokens are drawn from",
            f"{ROLLOUT}.top_p, top_k with raw log-probs",
            f"{ROLLOUT}.logprobs_mode=processed_logprobs",
        )
    setting = f"{ACTOR}.policy_loss.loss_mode"
    if (mode := loss_mode(config)) not in LINEAR:
        _refuse("centers A w grad log p, which is not this loss's gradient", f"{setting}={mode}", f"{setting}=vanilla")
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch != mini:
        _refuse(
            "centers the first update of a batch, while l_theta is still l_old",
            f"{ACTOR}.ppo_mini_batch_size={mini} of {batch}",
            f"{ACTOR}.ppo_mini_batch_size={batch}",
        )
    epochs = f"{ACTOR}.ppo_epochs"
    if (count := OmegaConf.select(config, epochs) or 1) > 1:
        _refuse("centers the first update of a batch", f"{epochs}={count}", f"{epochs}=1")
    _check_centered_weights(run)
    if any(rule.action == "tighten" for rule in run.stability.rules):
        _refuse("would keep using the wide band", "a rule with action=tighten", otherwise="choose another action")


def _check_centered_weights(run: RunFeatures) -> None:
    """Refuses weights and masks that are known only for the sampled token, not for every top token.

    Corrections that weigh single tokens have weights for every top token. Anything else that depends on the sampled
    tokens would give the weighted score a mean that centering does not subtract.
    """
    stability = run.stability
    for chosen in (*stability.before_update, *stability.in_update):
        if chosen.method.in_update or chosen.method.per_sequence:
            _refuse(
                "knows the weight of each token that might have been sampled, but not of each response",
                f"stability.correction={chosen.name}",
                otherwise="choose tis, icepop, kpop or ipo, or set stability.score_centering=false",
            )
    if stability.denominator == "kept":
        _refuse("subtracts a mean over all tokens", "stability.denominator=kept", "stability.denominator=full")
    for one in stability.filters:
        if one.method.sees_tokens:
            _refuse(
                "does not know which of the tokens that might have been sampled a filter would drop",
                f"stability.filters.{one.name}",
                otherwise="leave the filter out, or set stability.score_centering=false",
            )
    for name in ("rollout_is", "rollout_rs"):
        setting = f"algorithm.rollout_correction.{name}"
        if value := OmegaConf.select(run.config, setting):
            _refuse("does not know verl's own weights", f"{setting}={value}", f"{setting}=null")


def _refuse(why: str, what: str, *fix: str, otherwise: str = "set stability.score_centering=false") -> None:
    raise ConfigError(f"{CENTERED} {why}: {what}", fix=fix, otherwise=otherwise)


def _check_signals(run: RunFeatures, k: int) -> None:
    signals = {rule.setting: rule.signal for rule in run.stability.rules}
    signals["stability.guard.boundary.signal"] = run.stability.guard.boundary.signal
    for setting, signal in signals.items():
        if not signal.startswith("vllm_kl/head"):
            continue
        if not k:
            raise ConfigError(f"{setting}: {signal} needs the sampler's top tokens", fix=("stability.top_tokens.k=32",))
        if bypasses(run.config):
            raise ConfigError(
                f"{setting}: {signal} comes from compute_log_prob, which does not run with {BYPASS}=True",
                fix=(f"{BYPASS}=False",),
                otherwise="use vllm_kl/k3",
            )


def _check_sglang_top_tokens(run: RunFeatures, asked: str, k: int) -> None:
    """Refuses settings under which SGLang's top tokens are too few, or not those that it sampled from (0.5.12)."""
    config = run.config
    if k > PREFILLED_K and OmegaConf.select(config, DISAGGREGATED):
        raise ConfigError(
            f"{asked}: with {DISAGGREGATED}=true the first token of a response has at most {PREFILLED_K} of them",
            fix=(f"{DISAGGREGATED}=false",),
        )
    if not truncates(config):
        return
    if value := OmegaConf.select(config, target := f"{SGLANG_ARGUMENTS}.rl_on_policy_target"):
        raise ConfigError(
            f"{asked} show which tokens SGLang kept, and {target}={value} rounds their log-probabilities to bfloat16",
            fix=(f"{target}=null",),
        )
    if drafts(config):
        raise ConfigError(
            f"{asked} show which tokens SGLang kept, and {MTP}.enable_rollout=true keeps other tokens when it verifies",
            fix=(f"{MTP}.enable_rollout=false",),
        )


def _check_vocabulary(run: RunFeatures, asked: str, k: int) -> None:
    if (model := hf_config_of(run.config.actor_rollout_ref.model)) is None:
        return
    vocabulary = getattr(model.get_text_config(), "vocab_size", None)
    if vocabulary is not None and k > vocabulary:
        by_top_k = truncates(run.config) and not run.stability.top_tokens.k
        fix = f"{ROLLOUT}.top_k" if by_top_k else "stability.top_tokens.k"
        raise ConfigError(f"{asked}: the model's vocabulary has {vocabulary}", fix=(f"{fix}={vocabulary}",))


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


TOP_TOKENS = Feature(
    needs,
    check,
    apply,
    agent_loop=lambda run: {"top_tokens": top_token_count(run)},
    loss_settings=loss_settings,
    lines=lines,
)
