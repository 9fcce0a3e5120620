"""What can go wrong with a configuration, found on the launching machine before Ray starts."""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.config import ConfigError, StabilityConfig

ROUTING_STRATEGIES = ("fsdp", "fsdp2")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def uses_icepop_loss(config: DictConfig) -> bool:
    return OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.loss_mode") == "icepop"


def check_run(config: DictConfig, stability: StabilityConfig) -> None:
    """Raise ConfigError for a combination of settings that cannot work; one line that names the remedy."""
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False has no hooks for stability.*; set trainer.use_v1=True")
    if stability.needs_log_probs:
        _check_log_probs(config, stability)
    if stability.router_agreement:
        _check_routing(config)
    if stability.cascade_attention != "default":
        _check_cascade(config, stability)
    _check_tokenizer(config.actor_rollout_ref.model)


def apply_engine_settings(config: DictConfig, stability: StabilityConfig) -> None:
    """Set the rollout arguments that the asked-for features consist of; the start-up table shows them."""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        if stability.router_agreement:
            rollout.enable_rollout_routing_replay = True
        if stability.cascade_attention != "default":
            rollout.engine_kwargs.vllm.disable_cascade_attn = stability.cascade_attention == "off"


def _check_log_probs(config: DictConfig, stability: StabilityConfig) -> None:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ConfigError(
            "actor_rollout_ref.rollout.calculate_log_probs=False leaves stability.* nothing to compare; "
            "set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    verl_correction = config.algorithm.get("rollout_correction") or {}
    if verl_correction.get("bypass_mode"):
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode=True takes the rollout's log-probs for the training "
            "engine's, so no mismatch can be seen; set algorithm.rollout_correction.bypass_mode=False"
        )
    if stability.correction == "none":
        return
    if verl_correction.get("rollout_is"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={verl_correction['rollout_is']} and "
            f"stability.correction={stability.correction} both weight the loss; set one of them to null or none"
        )
    if uses_icepop_loss(config):
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=icepop and "
            f"stability.correction={stability.correction} both weight the loss; set stability.correction=none"
        )


def _check_routing(config: DictConfig) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy not in ROUTING_STRATEGIES:
        raise ConfigError(
            f"stability.router_agreement=true has no adapter for actor_rollout_ref.actor.strategy={actor.strategy} "
            f"(it has: {', '.join(ROUTING_STRATEGIES)}); set stability.router_agreement=false"
        )
    sequence_parallel = OmegaConf.select(actor, "fsdp_config.ulysses_sequence_parallel_size") or OmegaConf.select(
        actor, "ulysses_sequence_parallel_size", default=1
    )
    if sequence_parallel > 1:
        raise ConfigError(
            f"stability.router_agreement=true cannot gather routing over ulysses_sequence_parallel_size="
            f"{sequence_parallel} yet; set it to 1, or stability.router_agreement=false"
        )
    if rollout.name != "vllm":
        raise ConfigError(
            f"stability.router_agreement=true reads vLLM's routed experts, not actor_rollout_ref.rollout.name="
            f"{rollout.name}; set actor_rollout_ref.rollout.name=vllm or stability.router_agreement=false"
        )
    model = config.actor_rollout_ref.model
    experts = _expert_count(model)
    if experts == 0:
        raise ConfigError(
            f"stability.router_agreement=true needs a mixture of experts, and actor_rollout_ref.model.path="
            f"{model.path} is a dense model; set stability.router_agreement=false"
        )


def _check_cascade(config: DictConfig, stability: StabilityConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        raise ConfigError(
            f"stability.cascade_attention={stability.cascade_attention} is a setting of vLLM, not of "
            f"actor_rollout_ref.rollout.name={rollout.name}; set stability.cascade_attention=default"
        )
    disabled = OmegaConf.select(rollout, "engine_kwargs.vllm.disable_cascade_attn")
    if disabled is not None and disabled != (stability.cascade_attention == "off"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn={disabled} contradicts "
            f"stability.cascade_attention={stability.cascade_attention}; leave the former out"
        )


def _expert_count(model: DictConfig) -> int | None:
    """Experts a layer of the model at `model.path`; None when its config is not on this machine."""
    if not os.path.isdir(model.path):
        return None
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.get("trust_remote_code", False))
    text_config: Any = hf_config.get_text_config()
    return next((count for name in EXPERT_COUNTS if (count := getattr(text_config, name, None))), 0)


def _check_tokenizer(model: DictConfig) -> None:
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    path = model[setting]
    if not os.path.isdir(path):
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path, trust_remote_code=model.get("trust_remote_code", False))
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.{setting}={path} has no tokenizer that loads ({type(error).__name__}); save "
            "one beside the model, or point actor_rollout_ref.model.tokenizer_path at one"
        ) from error
