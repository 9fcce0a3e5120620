"""What can go wrong with a configuration, found on the launching machine before Ray starts."""

import os
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.launch.bypass import bypasses, loss_has_ratio
from verl_ext.launch.bypass_checks import check_bypass
from verl_ext.launch.features import (
    HEAD,
    LOG_PROBS,
    MEASURE,
    features,
    loss_mode,
    loss_reads_k,
    uses,
    uses_unbiased_kl,
)
from verl_ext.launch.head import head_k, head_use, logprobs_mode, truncates
from verl_ext.launch.head_checks import apply_head, check_head
from verl_ext.launch.lag_checks import check_lag
from verl_ext.launch.loss_checks import apply_loss, check_loss
from verl_ext.launch.models import check_folder
from verl_ext.launch.quantization_checks import apply_fake_quantization, check_fake_quantization
from verl_ext.launch.routing_checks import apply_routing, check_routing, check_share, reads_routes, returns_turns
from verl_ext.launch.sglang_checks import check_sglang_log_probs
from verl_ext.settings.config import UNBIASED, StabilityConfig
from verl_ext.settings.losses import LOSS


def loss_settings(config: DictConfig, stability: StabilityConfig) -> dict[str, Any]:
    """What the workers' `configure_loss` takes."""
    inside = {chosen.name: asdict(chosen.settings) for chosen in stability.in_update}
    gate = asdict(stability.guard.mini_batch)
    found: dict[str, Any] = {"corrections": inside, "kl_denominator": stability.kl_denominator, "mini_batch": gate}
    found["undo"] = any(rule.action == "undo" for rule in stability.rules)
    found["after_update"] = stability.guard.after_update.trajectories
    heads = stability.head.k or stability.score_centering or truncates(config)
    if heads and uses(features(config, stability), HEAD):
        found["head"] = head_use(config, stability)
    if bypasses(config) and uses(features(config, stability), MEASURE):
        found["first_pass"] = {
            "corrections": stability.corrections(),
            "narrowed": stability.corrections(tightened=True),
            "as_mask": loss_has_ratio(config),
            "breakdown": stability.breakdown,
        }
    return found


def check_run(config: DictConfig, stability: StabilityConfig, *, read_model: bool = True) -> None:
    """Raise ConfigError for a combination of settings that cannot work; one line that names the remedy.

    `read_model=False` leaves out what needs the model's files, whose own code transformers would run if the config
    trusts it.
    """
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False has no hooks for stability.*", fix=("trainer.use_v1=True",))
    if uses(features(config, stability), LOG_PROBS):
        _check_log_probs(config)
        _check_weights(config, stability)
        check_head(config, stability, _head_k(config, stability), read_model)
    check_loss(config, stability, read_model)
    check_bypass(config, stability)
    _check_kl(config, stability)
    _check_overlong(config)
    check_lag(config, stability)
    check_routing(config, stability.router_agreement, read_model)
    if stability.router_agreement_share < 1:
        check_share(config, stability.router_agreement_share)
    _check_guard(config, stability)
    if stability.cascade_attention != "default":
        _check_cascade(config, stability)
    check_fake_quantization(config, stability, read_model)
    _check_warmup(config)
    if read_model:
        _check_model_files(config.actor_rollout_ref.model)


def apply_engine_settings(config: DictConfig, stability: StabilityConfig) -> None:
    """Set the arguments of the engines that the asked-for features consist of; the start-up table shows them."""
    apply_routing(config, stability)
    apply_loss(config, stability)
    apply_fake_quantization(config, stability)
    apply_head(config, _head_k(config, stability))
    _request_fields(config, stability)
    rollout = "actor_rollout_ref.rollout"
    if stability.cascade_attention != "default":
        disabled = stability.cascade_attention == "off"
        OmegaConf.update(config, f"{rollout}.engine_kwargs.vllm.disable_cascade_attn", disabled, force_add=True)


def _request_fields(config: DictConfig, stability: StabilityConfig) -> None:
    """Have the processes of the rollout send along what the features read, and no more."""
    from verl_ext.upstream import agent_loop

    wanted = agent_loop.Wanted(
        narrow=reads_routes(config, stability),
        share=stability.router_agreement_share,
        turns=returns_turns(config),
        head=_head_k(config, stability),
    )
    agent_loop.request(config, wanted)


def _check_warmup(config: DictConfig) -> None:
    """megatron-core asserts, without a message, that the learning rate's warm-up ends before its schedule does."""
    actor, steps = config.actor_rollout_ref.actor, config.trainer.total_training_steps
    warmup = actor.optim.get("lr_warmup_steps") or 0
    if actor.strategy != "megatron" or steps is None or actor.optim.get("lr_decay_steps") is not None:
        return
    if warmup >= steps:
        setting = "actor_rollout_ref.actor.optim.lr_warmup_steps"
        raise ConfigError(
            f"{setting}={warmup} must be below trainer.total_training_steps={steps} with "
            "actor_rollout_ref.actor.strategy=megatron",
            fix=(f"{setting}=0",),
            otherwise="train for more steps",
        )


def _head_k(config: DictConfig, stability: StabilityConfig) -> int:
    return head_k(config, stability, compares=uses(features(config, stability), LOG_PROBS))


def _check_log_probs(config: DictConfig) -> None:
    """The rollout's log-probabilities must be there and mean what the training engine's mean."""
    rollout = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    if not rollout.calculate_log_probs:
        raise ConfigError(
            f"{prefix}.calculate_log_probs=False leaves stability.* nothing to compare",
            fix=(f"{prefix}.calculate_log_probs=True",),
        )
    if OmegaConf.select(config, f"{prefix}.name") == "sglang":
        check_sglang_log_probs(config)
        return
    mode, setting = logprobs_mode(config)
    if mode == "processed_logprobs":  # of the kept tokens, where there is top-k: check_head
        return
    if mode != "raw_logprobs":
        raise ConfigError(
            f"{setting}={mode} gives no log-probabilities to compare", fix=(f"{setting}=processed_logprobs",)
        )
    if rollout.temperature != 1:
        raise ConfigError(
            f"{setting}=raw_logprobs leaves out {prefix}.temperature={rollout.temperature}, which the training engine "
            "applies",
            fix=(f"{setting}=processed_logprobs",),
        )


def _check_guard(config: DictConfig, stability: StabilityConfig) -> None:
    """What the guard's actions need of verl."""
    strategy = config.actor_rollout_ref.actor.strategy
    if stability.guard.mini_batch.grad_norm is not None and strategy != "fsdp2":
        raise ConfigError(
            "stability.guard.mini_batch.grad_norm reads the gradients of actor.strategy=fsdp2, and this run has "
            f"{strategy}, whose norm is known only with the step",
            fix=("stability.guard.mini_batch.grad_norm=null",),
            otherwise="use a rule on actor/grad_norm",
        )
    again = "stability.guard.after_update.trajectories"
    if stability.guard.after_update.trajectories and strategy != "fsdp2":
        raise ConfigError(
            f"{again} is known to work with actor.strategy=fsdp2 alone, and this run has {strategy}",
            fix=(f"{again}=0",),
        )
    for rule in stability.rules:
        where = f"stability.guard.rules.{rule.name}"
        if rule.action == "rollback":
            _check_rollback(config, where)
        if rule.action == "undo" and strategy != "fsdp2":
            raise ConfigError(
                f"{where}: action=undo keeps the shards of actor.strategy=fsdp2, and this run has {strategy}",
                otherwise="set action to rollback, skip or lower_lr",
            )
        if rule.signal.startswith("actor/after_update/") and not stability.guard.after_update.trajectories:
            raise ConfigError(f"{where}: {rule.signal} needs trajectories that are scored again", fix=(f"{again}=16",))


def _check_rollback(config: DictConfig, where: str) -> None:
    """It goes back to a checkpoint that is there, has all of it, and is not the last one, which is not proven yet."""
    trainer, checkpoint = config.trainer, "actor_rollout_ref.actor.checkpoint"
    if trainer.save_freq < 1:
        raise ConfigError(f"{where}: action=rollback has no checkpoint to go back to; set trainer.save_freq")
    for kept in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        if trainer.get(kept) == 1:
            raise ConfigError(
                f"{where}: action=rollback needs the checkpoint before the last",
                fix=(f"trainer.{kept}=2",),
                otherwise="more",
            )
    if trainer.get("remove_previous_ckpt_in_save"):
        raise ConfigError(
            f"{where}: action=rollback needs the checkpoint before the last",
            fix=("trainer.remove_previous_ckpt_in_save=false",),
        )
    loaded = OmegaConf.select(config, f"{checkpoint}.load_contents") or []
    if missing := {"model", "optimizer"} - set(loaded):
        raise ConfigError(
            f"{where}: action=rollback would not load {' and '.join(sorted(missing))}; name them in "
            f"{checkpoint}.save_contents and load_contents"
        )
    if OmegaConf.select(config, f"{checkpoint}.async_save"):
        raise ConfigError(
            f"{where}: action=rollback cannot tell when a checkpoint is complete",
            fix=(f"{checkpoint}.async_save=false",),
        )


def _check_weights(config: DictConfig, stability: StabilityConfig) -> None:
    """One method only may weight the loss by a ratio, and the loss must use the weight."""
    corrections = stability.corrections()
    if not corrections and not loss_reads_k(config):
        return
    ours = f"stability.correction={_written(stability.correction_names)}"
    if loss_reads_k(config):
        ours = f"{LOSS}.loss_mode={loss_mode(config)}"
        if corrections:
            raise ConfigError(
                f"{ours} and stability.correction={_written(stability.correction_names)} both weight the loss",
                fix=("stability.correction=none",),
            )
    if verls := OmegaConf.select(config, "algorithm.rollout_correction.rollout_is"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={verls} and {ours} both weight the loss",
            fix=("algorithm.rollout_correction.rollout_is=null",),
        )
    if loss_mode(config) == "bypass_mode":
        raise ConfigError(
            f"{ours} cannot weight {LOSS}.loss_mode=bypass_mode, which computes weights of its own",
            fix=("stability.correction=none",),
            otherwise="another loss_mode",
        )


def _written(names: tuple[str, ...]) -> str:
    """As a user writes them on the command line."""
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def _check_kl(config: DictConfig, stability: StabilityConfig) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.get("kl_loss_type") == UNBIASED and not actor.get("use_kl_loss"):
        raise ConfigError(
            f"actor_rollout_ref.actor.kl_loss_type={UNBIASED} does nothing without a KL loss",
            fix=("actor_rollout_ref.actor.use_kl_loss=true",),
        )
    if stability.kl_denominator != "infer" and not uses_unbiased_kl(config):
        raise ConfigError(
            f"stability.kl_denominator={stability.kl_denominator} is of the unbiased KL alone",
            fix=(f"actor_rollout_ref.actor.kl_loss_type={UNBIASED}", "actor_rollout_ref.actor.use_kl_loss=true"),
        )


def _check_overlong(config: DictConfig) -> None:
    """verl's reward manager `dapo` asserts this, once it runs."""
    prefix = "reward.reward_kwargs"
    if OmegaConf.select(config, "reward.reward_manager.name") != "dapo":
        return
    if not OmegaConf.select(config, f"{prefix}.overlong_buffer_cfg.enable"):
        return
    length, limit = (OmegaConf.select(config, f"{prefix}.{k}") for k in ("overlong_buffer_cfg.len", "max_resp_len"))
    if limit is None or length > limit:
        raise ConfigError(
            f"{prefix}.overlong_buffer_cfg.len={length} must be at most {prefix}.max_resp_len={limit}: it is the "
            "stretch before the limit over which the punishment grows"
        )


def _check_cascade(config: DictConfig, stability: StabilityConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        raise ConfigError(
            f"stability.cascade_attention={stability.cascade_attention} is a setting of vLLM, not of "
            f"actor_rollout_ref.rollout.name={rollout.name}",
            fix=("stability.cascade_attention=default",),
        )
    disabled = OmegaConf.select(rollout, "engine_kwargs.vllm.disable_cascade_attn")
    if disabled is not None and disabled != (stability.cascade_attention == "off"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn={disabled} contradicts "
            f"stability.cascade_attention={stability.cascade_attention}; leave the former out"
        )


def _check_model_files(model: DictConfig) -> None:
    """The model folder must be there, with a config and a tokenizer; what is not a local path is left to verl."""
    check_folder(model)
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    path = os.path.expanduser(model[setting])
    if not os.path.isdir(path):
        if os.path.isabs(path):
            raise ConfigError(f"actor_rollout_ref.model.{setting}={path} does not exist; correct the path")
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code")))
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.{setting}={path} has no tokenizer that loads ({type(error).__name__}); save one "
            "beside the model, or point actor_rollout_ref.model.tokenizer_path at one"
        ) from error
