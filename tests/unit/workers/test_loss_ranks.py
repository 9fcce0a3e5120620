"""The workers' loss on two real data-parallel ranks (gloo) gives the gradient of one rank with everything."""

import pytest
import torch

from tests.support.closeness import close
from tests.unit.workers.loss_ranks import gradients, rank_main


@pytest.mark.timeout(180)
def test_two_ranks_give_the_gradient_of_one(quick_ranks, make_batch, tmp_path):
    batch = make_batch(3, lengths=(6, 9, 4, 8))
    whole = gradients(batch, range(4), dp_size=1)
    results = [torch.zeros_like(whole).share_memory_() for _ in range(2)]
    torch.multiprocessing.spawn(rank_main, (batch, f"file://{tmp_path}/store", results), nprocs=2)
    assert (whole.count_nonzero(dim=1) > 5).all()
    for result in results:
        for found, expected in zip(result, whole, strict=True):  # case by case, each at its own scale
            close(found, expected)
