"""What needs rollouts that are older than the policy, or the weights that they are of."""

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.launch.bypass import BYPASS, bypasses
from verl_ext.settings.config import StabilityConfig

MODE = "trainer.v1.trainer_mode"
COPIED = ("fsdp", "fsdp2", "veomni", "megatron")  # DetachActorWorker._get_strategy_handlers of verl 0.9.1


def is_asynchronous(config: DictConfig) -> bool:
    """Whether a rollout may be of older weights than those that l_old is of."""
    return (OmegaConf.select(config, MODE) or "sync") != "sync"


def check_lag(config: DictConfig, stability: StabilityConfig) -> None:
    """Raise ConfigError for what would have nothing to do in this trainer mode."""
    for chosen in stability.filters:
        if chosen.method.needs_lag and not is_asynchronous(config):
            raise ConfigError(
                f"stability.filters.{chosen.name} drops by the age of the rollouts, and {MODE}=sync has none that are "
                "older than the policy; leave the filter out, or train in an asynchronous mode"
            )
    if stability.rescoring.every:
        _check_rescoring(config, stability)


def _check_rescoring(config: DictConfig, stability: StabilityConfig) -> None:
    """verl keeps copies of earlier weights in separate_async alone, and there unless it takes l_infer for l_old."""
    where, never = f"stability.rescoring.every={stability.rescoring.every}", ("stability.rescoring.every=0",)
    if (mode := OmegaConf.select(config, MODE) or "sync") != "separate_async":
        why = (
            "keeps no copy of the weights that sampled them" if is_asynchronous(config) else "has none older than that"
        )
        raise ConfigError(
            f"{where} scores rollouts again that are older than the policy, and {MODE}={mode} {why}: verl copies "
            "weights in separate_async alone",
            fix=never,
        )
    if bypasses(config):
        raise ConfigError(f"{where}: verl copies no weights where {BYPASS}=True", fix=never)
    if (strategy := config.actor_rollout_ref.actor.strategy) not in COPIED:
        raise ConfigError(f"{where}: verl copies no weights of actor.strategy={strategy}", fix=never)
