"""The gap of rescored trajectories in two parts: the engines', and what the policy has moved since.

Shape legend: r response tokens of a trajectory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens

PARTED = ("vllm_kl/k1", "vllm_kl/k3")


def split_gap(tokens: Tokens, l_version: Sequence[Tensor]) -> dict[str, float]:
    """`vllm_kl/engine/*` and `vllm_kl/stale/*`, which add up to the gap of these trajectories.

    With l_version, what the training engine gives the tokens under the weights that sampled them, the engines' part is
    the gap of l_infer and l_version; the rest of that of l_infer and l_old is the policy's own movement. Of k1, that is
    mean(l_version - l_old); of k3, by how much the movement raises the estimate, which it may lower.

    Args:
        tokens: of the rescored trajectories, in their order.
        l_version: of each its response tokens, [r].

    Returns {} where no token counts: not masked in, or one of the three not finite.
    """
    then = torch.cat(list(l_version))
    mask = tokens.mask & tokens.l_infer.isfinite() & tokens.l_old.isfinite() & then.isfinite()
    whole = measure(Tokens(tokens.l_infer, tokens.l_old, mask, tokens.offsets), breakdown=False).metrics
    engine = measure(Tokens(tokens.l_infer, then, mask, tokens.offsets), breakdown=False).metrics
    if not whole:
        return {}
    of_engines = {name: engine[name] for name in (*PARTED, "vllm_kl/log_ratio_abs_mean")}
    split = {f"vllm_kl/engine/{name.removeprefix('vllm_kl/')}": value for name, value in of_engines.items()}
    split |= {f"vllm_kl/stale/{name.removeprefix('vllm_kl/')}": whole[name] - engine[name] for name in PARTED}
    return split | {"vllm_kl/rescored": float(len(l_version))}
