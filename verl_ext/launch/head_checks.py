"""What the sampler's head, truncated sampling and score centering need; found before Ray starts."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.launch.bypass import BYPASS, bypasses
from verl_ext.launch.head import ROLLOUT, cuts, rollout_name, top_k, truncates
from verl_ext.settings.config import StabilityConfig

ACTOR = "actor_rollout_ref.actor"
FUSED = "actor_rollout_ref.model.use_fused_kernels"
MAX = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
USUAL_TOP_K = 512  # prime-rl's
CENTERED = "stability.score_centering=true"
LINEAR = ("vanilla", "gpg")  # losses whose gradient at the first update of a batch is the weighted score


def check_head(config: DictConfig, stability: StabilityConfig, k: int, read_model: bool) -> None:
    """Raise ConfigError for what heads cannot come with.

    Args:
        k: tokens asked for; 0 for none.
    """
    if truncates(config):
        _check_truncated(config, k)
    if stability.score_centering:
        _check_centering(config, stability)
    _check_signals(config, stability, k)
    if not k:
        return
    asked = f"the {k} most likely tokens ({_asking(config, stability)})"
    if (name := rollout_name(config)) != "vllm":
        raise ConfigError(f"{asked}: {ROLLOUT}.name={name} returns none through verl", fix=(f"{ROLLOUT}.name=vllm",))
    most = OmegaConf.select(config, MAX)
    if most is not None and -1 != most < k:
        raise ConfigError(f"{asked}: {MAX}={most} allows fewer", fix=(f"{MAX}={k}",))
    if OmegaConf.select(config, FUSED):
        raise ConfigError(f"{asked} are read from logits, and {FUSED}=True makes none", fix=(f"{FUSED}=False",))
    for name in ("fsdp_config.pad_to_length", "megatron.pad_to_length", "megatron.dynamic_context_parallel"):
        if OmegaConf.select(config, setting := f"{ACTOR}.{name}"):
            raise ConfigError(
                f"{asked}: verl puts nothing beside logits with {setting}=True", fix=(f"{setting}=False",)
            )
    if read_model:
        _check_vocabulary(config, stability, asked, k)


def apply_head(config: DictConfig, k: int) -> None:
    """Have vLLM allow so many."""
    if k and OmegaConf.select(config, MAX) is None:
        OmegaConf.update(config, MAX, k, force_add=True)


def _asking(config: DictConfig, stability: StabilityConfig) -> str:
    if stability.head.k:
        return f"stability.head.k={stability.head.k}"
    if truncates(config):
        return f"{ROLLOUT}.top_k={top_k(config)}"
    return CENTERED


def _check_truncated(config: DictConfig, k: int) -> None:
    rollout = config.actor_rollout_ref.rollout
    asked = f"{ROLLOUT}.top_p={rollout.top_p}"
    if rollout.top_k <= 0:
        raise ConfigError(
            f"{asked} alone keeps any number of tokens, and the training engine has to be told of all that are kept",
            fix=(f"{ROLLOUT}.top_k={USUAL_TOP_K}",),
            otherwise=f"{ROLLOUT}.top_p=1",
        )
    asked = f"{asked} and top_k={rollout.top_k}"
    if rollout.top_k == 1:
        raise ConfigError(
            f"{asked} keep one token, whose l_old and l_theta are then always 0, and so is the gradient",
            fix=(f"{ROLLOUT}.top_k={USUAL_TOP_K}",),
        )
    if 0 < k < rollout.top_k:
        raise ConfigError(
            f"{asked} keep more tokens than stability.head.k={k}", fix=(f"stability.head.k={rollout.top_k}",)
        )
    for setting in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        if OmegaConf.select(config, setting):
            raise ConfigError(
                f"{asked}: l_theta is then of the kept tokens, and {setting}=True compares it with a reference over "
                "the whole vocabulary",
                fix=(f"{setting}=False",),
                otherwise=f"{ROLLOUT}.top_p=1 and top_k=-1",
            )


def _check_centering(config: DictConfig, stability: StabilityConfig) -> None:
    """It cancels what the gradient of a loss has in the mean: known for A w grad log p, and for no clipped ratio."""
    if bypasses(config):
        _refuse("has no old log-probs to weigh by", f"{BYPASS}=True", f"{BYPASS}=False")
    if cuts(config) and not truncates(config):
        _refuse(
            "needs the distribution that tokens are drawn from",
            f"{ROLLOUT}.top_p, top_k with raw log-probs",
            f"{ROLLOUT}.logprobs_mode=processed_logprobs",
        )
    setting = f"{ACTOR}.policy_loss.loss_mode"
    if (mode := OmegaConf.select(config, setting) or "vanilla") not in LINEAR:
        _refuse("centers A w grad log p, and not what this makes of it", f"{setting}={mode}", f"{setting}=vanilla")
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch != mini:
        _refuse(
            "centers the first update of a batch, where the policy is still l_old",
            f"{ACTOR}.ppo_mini_batch_size={mini} of {batch}",
            f"{ACTOR}.ppo_mini_batch_size={batch}",
        )
    epochs = f"{ACTOR}.ppo_epochs"
    if (count := OmegaConf.select(config, epochs) or 1) > 1:
        _refuse("centers the first update of a batch", f"{epochs}={count}", f"{epochs}=1")
    _check_centered_weights(config, stability)
    if any(rule.action == "tighten" for rule in stability.rules):
        _refuse("would go on with the wide band", "a rule with action=tighten", otherwise="take another action")


def _check_centered_weights(config: DictConfig, stability: StabilityConfig) -> None:
    """What weighs or drops a token by the token that was sampled has to be known of every token of the head.

    Known are the corrections that weigh a single token. Whatever else looks at the sampled tokens would leave the
    weighted score with a mean that centering does not subtract.
    """
    for chosen in (*stability.before_update, *stability.in_update):
        if chosen.method.in_update or chosen.method.per_sequence:
            _refuse(
                "knows the weight of each token that might have been sampled, and not of each response",
                f"stability.correction={chosen.name}",
                otherwise="take tis, icepop or kpop, or set stability.score_centering=false",
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
        if value := OmegaConf.select(config, setting):
            _refuse("does not know verl's own weights", f"{setting}={value}", f"{setting}=null")


def _refuse(why: str, what: str, *fix: str, otherwise: str = "set stability.score_centering=false") -> None:
    raise ConfigError(f"{CENTERED} {why}: {what}", fix=fix, otherwise=otherwise)


def _check_signals(config: DictConfig, stability: StabilityConfig, k: int) -> None:
    signals = {rule.setting: rule.signal for rule in stability.rules}
    signals["stability.guard.boundary.signal"] = stability.guard.boundary.signal
    for setting, signal in signals.items():
        if not signal.startswith("vllm_kl/head"):
            continue
        if not k:
            raise ConfigError(f"{setting}: {signal} needs the sampler's head", fix=("stability.head.k=32",))
        if bypasses(config):
            raise ConfigError(
                f"{setting}: {signal} is of compute_log_prob, which does not run with {BYPASS}=True",
                fix=(f"{BYPASS}=False",),
                otherwise="take vllm_kl/k3",
            )


def _check_vocabulary(config: DictConfig, stability: StabilityConfig, asked: str, k: int) -> None:
    from verl_ext.launch.routing_checks import hf_config_of

    model: Any = hf_config_of(config.actor_rollout_ref.model)
    text = getattr(model, "text_config", None) or model
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary is not None and k > vocabulary:
        by_top_k = truncates(config) and not stability.head.k
        fix = f"{ROLLOUT}.top_k" if by_top_k else "stability.head.k"
        raise ConfigError(f"{asked} of a vocabulary of {vocabulary}", fix=(f"{fix}={vocabulary}",))
