"""What can go wrong with a configuration, found on the launching machine before Ray starts."""

import contextlib
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.config import StabilityConfig
from verl_ext.errors import ConfigError
from verl_ext.workers.routing import probe_routers

ROUTING_STRATEGIES = ("fsdp", "fsdp2")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ICEPOP_LOSS = "verl_ext.workers.losses.IcePopLossConfig"
# verl's losses that do not multiply a token's loss by its weight (verl/trainer/ppo/core_algos.py, 0.9.1).
UNWEIGHTED_LOSSES = {
    "geo_mean": "takes the geometric mean of a response's weights, which one dropped token pulls towards 0",
    "bypass_mode": "computes weights of its own",
}


def uses_icepop_loss(config: DictConfig) -> bool:
    return OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.loss_mode") == "icepop"


def check_run(config: DictConfig, stability: StabilityConfig) -> None:
    """Raise ConfigError for a combination of settings that cannot work; one line that names the remedy."""
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False has no hooks for stability.*; set trainer.use_v1=True")
    if stability.needs_log_probs or uses_icepop_loss(config):
        _check_log_probs(config)
        _check_weights(config, stability)
    if stability.router_agreement:
        _check_routing(config)
    if stability.cascade_attention != "default":
        _check_cascade(config, stability)
    _check_model_files(config.actor_rollout_ref.model)


def apply_engine_settings(config: DictConfig, stability: StabilityConfig) -> None:
    """Set the rollout arguments that the asked-for features consist of; the start-up table shows them."""
    rollout = "actor_rollout_ref.rollout"
    if stability.router_agreement:
        OmegaConf.update(config, f"{rollout}.enable_rollout_routing_replay", True)
    if stability.cascade_attention != "default":
        disabled = stability.cascade_attention == "off"
        OmegaConf.update(config, f"{rollout}.engine_kwargs.vllm.disable_cascade_attn", disabled, force_add=True)


def _check_log_probs(config: DictConfig) -> None:
    """The rollout's log-probabilities must be there and mean what the training engine's mean."""
    rollout = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    if not rollout.calculate_log_probs:
        raise ConfigError(
            f"{prefix}.calculate_log_probs=False leaves stability.* nothing to compare; set "
            f"{prefix}.calculate_log_probs=True"
        )
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode=True takes the rollout's log-probs for the training engine's, so "
            "no mismatch can be seen; set algorithm.rollout_correction.bypass_mode=False"
        )
    # With top-p or top-k, processed log-probs are normalised over the kept tokens only; raw ones leave out the
    # temperature. The training engine does neither, and every log-ratio would carry the difference.
    if rollout.logprobs_mode == "processed_logprobs":
        if rollout.top_p < 1 or rollout.top_k > 0:
            raise ConfigError(
                f"{prefix}.top_p={rollout.top_p} and top_k={rollout.top_k} make vLLM's processed_logprobs count the "
                f"kept tokens only, which the training engine does not; set {prefix}.top_p=1 and {prefix}.top_k=-1"
            )
    elif rollout.logprobs_mode != "raw_logprobs":
        raise ConfigError(
            f"{prefix}.logprobs_mode={rollout.logprobs_mode} gives no log-probabilities to compare; set "
            f"{prefix}.logprobs_mode=processed_logprobs"
        )
    elif rollout.temperature != 1:
        raise ConfigError(
            f"{prefix}.logprobs_mode=raw_logprobs leaves out {prefix}.temperature={rollout.temperature}, which the "
            f"training engine applies; set {prefix}.logprobs_mode=processed_logprobs"
        )


def _check_weights(config: DictConfig, stability: StabilityConfig) -> None:
    """One method only may weight the loss, and the loss must use the weight."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.get("_target_") == ICEPOP_LOSS and loss.loss_mode != "icepop":
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss.loss_mode} overrides the loss of "
            "stability=icepop_loss; leave it out, or set stability=icepop, which weights other losses"
        )
    if stability.correction == "none" and not uses_icepop_loss(config):
        return
    ours = f"stability.correction={stability.correction}"
    if uses_icepop_loss(config):
        ours = "actor_rollout_ref.actor.policy_loss.loss_mode=icepop"
        if stability.correction != "none":
            raise ConfigError(
                f"{ours} and stability.correction={stability.correction} both weight the loss; set "
                "stability.correction=none"
            )
    if verls := OmegaConf.select(config, "algorithm.rollout_correction.rollout_is"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={verls} and {ours} both weight the loss; set "
            "algorithm.rollout_correction.rollout_is=null"
        )
    if loss.loss_mode in UNWEIGHTED_LOSSES:
        raise ConfigError(
            f"{ours} cannot weight actor_rollout_ref.actor.policy_loss.loss_mode={loss.loss_mode}, which "
            f"{UNWEIGHTED_LOSSES[loss.loss_mode]}; set stability.correction=none or another loss_mode"
        )


def _check_routing(config: DictConfig) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    asked, off = "stability.router_agreement=true", "set stability.router_agreement=false"
    if actor.strategy not in ROUTING_STRATEGIES:
        raise ConfigError(
            f"{asked} has no adapter for actor_rollout_ref.actor.strategy={actor.strategy} (it has: "
            f"{', '.join(ROUTING_STRATEGIES)}); {off}"
        )
    # verl reads the size from either place.
    places = ("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size")
    sequence_parallel = max(OmegaConf.select(actor, place) or 1 for place in places)
    if sequence_parallel > 1:
        raise ConfigError(
            f"{asked} cannot gather routing over actor_rollout_ref.actor.ulysses_sequence_parallel_size="
            f"{sequence_parallel} yet; set it to 1, or {off}"
        )
    if rollout.name != "vllm":
        raise ConfigError(
            f"{asked} reads vLLM's routed experts, not actor_rollout_ref.rollout.name={rollout.name}; set "
            f"actor_rollout_ref.rollout.name=vllm, or {off}"
        )
    if rollout.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{asked} needs vLLM without pipeline parallelism, and actor_rollout_ref.rollout."
            f"pipeline_model_parallel_size={rollout.pipeline_model_parallel_size}; set it to 1, or {off}"
        )
    model = config.actor_rollout_ref.model
    hf_config = _hf_config(model)
    if hf_config is None:
        return
    if not any(getattr(hf_config.get_text_config(), name, None) for name in EXPERT_COUNTS):
        raise ConfigError(
            f"{asked} needs a mixture of experts, and actor_rollout_ref.model.path={model.path} is a dense model; {off}"
        )
    probe_routers(hf_config)


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


def _hf_config(model: DictConfig) -> Any:
    """The model's transformers config; None where this machine cannot read it (a remote path, or no network)."""
    from transformers import AutoConfig

    with contextlib.suppress(OSError):
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.get("trust_remote_code", False))
    return None


def _check_model_files(model: DictConfig) -> None:
    """The model folder must be there, with a tokenizer; what is not a local path is left to verl."""
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    path = os.path.expanduser(model[setting])
    if not os.path.isdir(path):
        if os.path.isabs(path):
            raise ConfigError(f"actor_rollout_ref.model.{setting}={path} does not exist; correct the path")
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path, trust_remote_code=model.get("trust_remote_code", False))
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.{setting}={path} has no tokenizer that loads ({type(error).__name__}); save one "
            "beside the model, or point actor_rollout_ref.model.tokenizer_path at one"
        ) from error
