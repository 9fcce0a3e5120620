"""The sampler's head, as a run's config asks for it. Nothing of torch or verl is imported."""

from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.settings.config import StabilityConfig
from verl_ext.settings.head import FOR_CENTERING

ROLLOUT = "actor_rollout_ref.rollout"


def logprobs_mode(config: DictConfig) -> tuple[str, str]:
    """vLLM's, and the setting that decides it."""
    setting = f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode"  # goes over rollout's own
    if above := OmegaConf.select(config, setting):
        return above, setting
    return OmegaConf.select(config, f"{ROLLOUT}.logprobs_mode") or "", f"{ROLLOUT}.logprobs_mode"


def rollout_name(config: DictConfig) -> str:
    return OmegaConf.select(config, f"{ROLLOUT}.name", throw_on_missing=False) or "vllm"


def top_k(config: DictConfig) -> int:
    """0 for none."""
    return max(OmegaConf.select(config, f"{ROLLOUT}.top_k") or 0, 0)


def cuts(config: DictConfig) -> bool:
    """Whether the rollout takes from a part of the vocabulary."""
    return (OmegaConf.select(config, f"{ROLLOUT}.top_p") or 1) < 1 or top_k(config) > 0


def truncates(config: DictConfig) -> bool:
    """Whether its log-probabilities are normalised over that part, so that the training engine's have to be."""
    return rollout_name(config) == "vllm" and cuts(config) and logprobs_mode(config)[0] == "processed_logprobs"


def head_k(config: DictConfig, stability: StabilityConfig, *, compares: bool) -> int:
    """How many tokens of each place the rollout is asked for.

    Args:
        compares: something else compares the engines' log-probabilities, which truncated sampling then concerns.
    """
    if stability.head.k:
        return stability.head.k
    if truncates(config) and (compares or stability.score_centering):
        return top_k(config)
    return FOR_CENTERING if stability.score_centering else 0


def reads_in_update(config: DictConfig, stability: StabilityConfig) -> bool:
    """Whether the update reads the heads, and not compute_log_prob alone."""
    return stability.score_centering or truncates(config)


def head_use(config: DictConfig, stability: StabilityConfig) -> dict[str, Any]:
    """The fields of the workers' HeadUse."""
    of_tokens = [one for one in stability.before_update if not one.method.per_sequence]
    return {
        "truncated": truncates(config),
        "centers": stability.score_centering,
        "corrections": {one.name: asdict(one.settings) for one in of_tokens},
    }
