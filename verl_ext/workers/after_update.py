"""How far an update has moved the policy, and the engines apart: a few trajectories of its batch, scored once more.

What verl logs of a step is measured before its last optimizer step; of one update a step, nothing is measured after it.
Accepting or rejecting each update by the policy that it makes is MIPU's idea (arXiv 2606.29526).
"""

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import response_from_nested

from verl_ext.core.mismatch import k3_sum
from verl_ext.fields import OLD_LOG_PROBS, RESPONSE_MASK, ROLLOUT_LOG_PROBS

PREFIX = "after_update"
# One trajectory a forward pass: so few need not fit the run's micro-batches.
ALONE = {"calculate_entropy": False, "compute_loss": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}


def score_again(worker: Any, data: TensorDict, count: int) -> dict[str, float]:
    """`after_update/*` of the first trajectories of each rank; all ranks enter together, and are told the same.

    Args:
        worker: verl's training worker, its update done.
        data: what it was sent, [B] jagged; with l_old where compute_log_prob came first.
        count: of trajectories of a batch, which the ranks share.
    """
    engine = worker.engine
    ranks = engine.get_data_parallel_size()
    rows = tu.index_select_tensor_dict(data, list(range(min(-(-count // ranks), len(data)))))
    tu.assign_non_tensor(rows, **ALONE)
    output = worker.infer_batch(rows)
    sums = torch.zeros(3, dtype=torch.float64)
    if engine.is_mp_src_rank_with_outputs():
        l_new = response_from_nested(output["log_probs"], rows[RESPONSE_MASK]).values().cpu()
        mask = rows[RESPONSE_MASK].values().bool().cpu()
        l_old, l_infer = (rows[name].values().cpu() for name in (OLD_LOG_PROBS, ROLLOUT_LOG_PROBS))
        moved, apart = (k3_sum((l_new.double() - of)[mask]) for of in (l_old, l_infer))
        sums = torch.stack([mask.sum(), moved, apart])
    sums = sums.to(get_device_id())
    torch.distributed.all_reduce(sums)
    tokens, moved, apart = sums.tolist()
    return {f"{PREFIX}/policy_kl": moved / max(tokens, 1.0), f"{PREFIX}/vllm_kl": apart / max(tokens, 1.0)}
