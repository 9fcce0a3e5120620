"""The overrides that make a run a probe, and names that the command and the engines' process share."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.features.verl_config import (
    LORA_RANKS,
    REPLAY,
    ROLLOUT,
    ROLLOUTS,
    passes_at_once,
    rollout_name,
    strategy_of,
    verls_replay_setting,
)
from verl_ext.launch.sizes import data_parallel_size
from verl_ext.routing.engines import ACTOR, ENGINES, TOP_KS, first_of

DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
PROGRESS = "verl_ext: probe: "  # start of the process's progress lines
# Settings of the run's config: the file for what is found, the number of batches, the format of rounded layers.
OUT, BATCHES, LAYERS = "probe_out", "probe_batches", "probe_layers"


def probe_overrides(config: Any, prompts: int, out: Path, batches: int = 1, layers: str = "") -> list[str]:
    """Returns the overrides that turn a run into a probe, to be given after the run's own.

    Args:
        prompts: rounded up so that all ranks of the training engine get equally many, at least two per pass.
        batches: how many are scored before the update.
        layers: the format that groups of weights are rounded to, one at a time; "" for no such sweep.

    Raises:
        ConfigError: the probe does not support the run's engines, or its weights cannot be rounded.
    """
    _check_engines(config)
    if layers:
        _check_rounds(config)
    share = 2 * data_parallel_size(config) * passes_at_once(config)
    prompts = -(-prompts // share) * share
    rollout, trainer = "actor_rollout_ref.rollout", "trainer"
    overrides = [
        "stability.metrics=true",
        "stability.guard.rules=null",
        "stability.filters=null",
        "stability.trajectories=null",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",  # each pass is one sequence
        f"{rollout}.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0",
        f"{rollout}.n=1",
        f"{rollout}.temperature=1.0",
        f"{rollout}.top_p=1",
        f"{rollout}.top_k=-1",
        f"{trainer}.v1.trainer_mode=sync",
        f"{trainer}.total_training_steps=1",
        f"{trainer}.save_freq=-1",
        f"{trainer}.test_freq=-1",
        f"{trainer}.val_before_train=false",
        f"{trainer}.resume_mode=disable",
        f"{trainer}.logger=[console]",
        f"{trainer}.default_local_dir={out}/checkpoints",
        f"hydra.run.dir={out}/hydra",
        f"+{BATCHES}={batches}",
        *([f"+{LAYERS}={layers}"] if layers else []),
    ]
    if experts_of(config):
        overrides += [
            "stability.router_agreement=true",
            "stability.router_agreement_share=1",
            f"{verls_replay_setting(config)}=disabled",
            f"{REPLAY}=R3",
        ]
    return overrides


def _check_engines(config: Any) -> None:
    strategy, rollout = strategy_of(config), rollout_name(config)
    if strategy not in ENGINES:
        raise ConfigError(
            f"the probe reads the training engine of {ACTOR}.strategy={', '.join(ENGINES)}, and this run has {strategy}"
        )
    if rollout not in ROLLOUTS:
        raise ConfigError(f"the probe reads {' and '.join(ROLLOUTS.values())}, and this run samples with {rollout}")
    if strategy == "megatron" and OmegaConf.select(config, DYNAMIC_CONTEXT):
        raise ConfigError(
            f"the probe cannot put together the sequences that {DYNAMIC_CONTEXT}=true splits",
            fix=(f"{DYNAMIC_CONTEXT}=false",),
        )


def _check_rounds(config: Any) -> None:
    if any(OmegaConf.select(config, key) for key in LORA_RANKS.values()):
        raise ConfigError("--sweep layers rounds the weights that a sync sends, and this run's sends a LoRA")
    if quantization := OmegaConf.select(config, f"{ROLLOUT}.quantization"):
        raise ConfigError(
            f"--sweep layers rounds the weights of a rollout in 16 bits, and {ROLLOUT}.quantization={quantization} "
            "rounds all of them",
            fix=(f"{ROLLOUT}.quantization=null",),
        )


def experts_of(config: Any) -> int:
    """Returns how many experts a token uses; 0 for a dense model, or if this machine cannot read the model's config."""
    from verl_ext.features.verl_config import hf_config_of

    model = hf_config_of(config.actor_rollout_ref.model)
    return first_of(model.get_text_config(), TOP_KS) if model else 0
