"""Runs as a spawned rank of test_loss_ranks.py."""

import torch
import torch.distributed as dist
from verl.workers.config import FSDPActorConfig

from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

CASES = [
    ({"loss_mode": "vanilla"}, {}),
    ({"loss_mode": "llds", "coef": 2.0, "base": "gspo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
    ({"loss_mode": "geo_mean"}, {"use_kl_loss": True, "kl_loss_type": "unbiased"}),
]


def gradients(batch, rows, dp_size):
    """Gradient of every case by the response log-probabilities of all rows, from these rows alone."""
    found = []
    for policy_loss, fields in CASES:
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
        settings = LossSettings.from_dict({"corrections": {"opsm": {"delta": 0.05}}, "policy_loss": policy_loss})
        batch.settings["dp_size"] = dp_size
        model_output, data = batch.part(rows)
        build_worker_loss(config, settings)[0](model_output=model_output, data=data)[0].backward()
        found.append(batch.take_gradients())
    return torch.stack(found)


def rank_main(rank, batch, address, results):
    """Gradients averaged over two ranks, as FSDP averages them, into results[rank]."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    mine = gradients(batch, [[0, 3], [1, 2]][rank], dp_size=2)
    dist.all_reduce(mine)
    results[rank].copy_(mine / 2)
    dist.destroy_process_group()
