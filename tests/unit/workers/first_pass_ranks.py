"""Runs as a spawned rank of test_first_pass.py: two mini-batches, the first of them far from the rollout."""

import torch
import torch.distributed as dist

from verl_ext.core.loss_batch import LossBatch
from verl_ext.guard.guard import Limit
from verl_ext.guard.rules import Rule
from verl_ext.workers.first_pass import FirstPass, FirstPassSettings

RANKS = 3  # the last one holds the tokens of the second, as a tensor-parallel rank does
K3 = Rule("gap", "vllm_kl/k3", 0.1, action="skip", engines_only=True)
LIMITS = {"refused": (Limit(K3, 1e-6),), "taken": (Limit(K3, 1e6),)}


def judged(parts, limits, counts=True):
    """Returns (whether its step is taken, what is reported) of each mini-batch, a list of micro-batches each."""
    one = FirstPass(FirstPassSettings({"icepop": {"alpha": 0.8, "beta": 1.25}}))
    one.begin_update(False, limits)
    found = []
    for micro_batches in parts:
        one.begin_mini_batch()
        for l_infer, l_theta, mask, entropy, lag in micro_batches:
            one.weigh(LossBatch(l_theta, l_infer, torch.zeros(mask.shape), mask, l_infer=l_infer, lag=lag), entropy)
        found.append(one.judge(counts=counts))
    return found


def rank_main(rank, parts, address, folder):
    """`parts` of this rank, judged with the limits of each name, into folder/RANK.pt."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    found = {name: judged(parts[rank], limits, counts=rank < 2) for name, limits in LIMITS.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
