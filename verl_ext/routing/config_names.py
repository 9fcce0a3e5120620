"""What the transformers configs of mixtures of experts call their sizes. No torch is imported for it."""

from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def first_of(config: Any, names: tuple[str, ...]) -> int:
    """The first of these that the config has and is not 0; 0 without one."""
    return next((size for name in names if (size := getattr(config, name, None))), 0)
