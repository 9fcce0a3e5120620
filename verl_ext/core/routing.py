"""Router agreement: did training and inference choose the same experts for the same token?

Shape legend: N tokens, L MoE layers, K experts per token (top-k), B trajectories.
"""

import torch
from torch import Tensor


def expert_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """|T and I| per token and layer, [N, L] int64: how many of the K expert ids are in both sets.

    The order of the ids inside a set does not matter; ids within one set are distinct, as top-k's are.

    Raises:
        ValueError: the two tensors differ in shape.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routing of the training engine {tuple(train_NLK.shape)} and of the rollout "
            f"{tuple(infer_NLK.shape)} differ in shape [tokens, layers, top_k]"
        )
    overlap = torch.zeros(train_NLK.shape[:2], dtype=torch.long, device=train_NLK.device)
    # One id of the rollout at a time: K comparisons of [N, L, K] instead of one of [N, L, K, K].
    for j in range(infer_NLK.shape[-1]):
        overlap += (train_NLK == infer_NLK[..., j : j + 1]).any(-1)
    return overlap


def router_metrics(agree_BL: Tensor, exact_BL: Tensor, differs_B: Tensor, tokens_B: Tensor) -> dict[str, float]:
    """The `router/*` metrics from per-trajectory sums; {} when there is no token.

    Args:
        agree_BL: sum over a trajectory's tokens of |T and I| / K, per layer.
        exact_BL: number of its tokens with T = I, per layer.
        differs_B: number of its tokens with any layer differing.
        tokens_B: number of its generated tokens.

    Returns:
        router/agreement, router/exact_match: means over tokens and layers.
        router/agreement/layer_XX, router/exact_match/layer_XX: the same per layer, XX counting MoE layers.
        router/any_layer_differs: fraction of tokens with at least one layer where T != I.
        router/tokens: tokens compared.
    """
    n = float(tokens_B.double().sum())
    if n == 0:
        return {}
    metrics = {"router/tokens": n, "router/any_layer_differs": float(differs_B.double().sum()) / n}
    for name, sums_BL in (("agreement", agree_BL), ("exact_match", exact_BL)):
        per_layer = (sums_BL.double().sum(0) / n).tolist()
        metrics[f"router/{name}"] = sum(per_layer) / len(per_layer)
        metrics |= {f"router/{name}/layer_{layer:02d}": value for layer, value in enumerate(per_layer)}
    return metrics
