"""Which weights verl sends to the rollout, told from a config alone."""

from omegaconf import DictConfig, OmegaConf

MODEL = "actor_rollout_ref.model"
MERGE = f"++{MODEL}.lora.merge=true"


def sends_adapter(config: DictConfig) -> bool:
    """Whether a LoRA goes to vLLM as an adapter: `lora_as_adapter` of verl 0.9.1's server."""

    def of_model(name: str) -> object:
        return OmegaConf.select(config, f"{MODEL}.{name}", throw_on_missing=False)

    rank = of_model("lora_rank") or of_model("lora.rank") or 0
    trained = (isinstance(rank, int) and rank > 0) or of_model("lora_adapter_path") is not None
    vllm = OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False) == "vllm"
    return vllm and trained and not of_model("lora.merge")
