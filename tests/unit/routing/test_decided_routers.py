"""The random models of these tests choose experts by margins that rounding does not reach.

Other tests require the same expert ids on two paths through a model: a sequence by itself and in a packed or padded
batch, or in two engines. If a choice depended on the last bits, such a test would depend on the CPU.
"""

import pytest
import torch

from tests.support.routing_families import FAMILIES, build, noise
from tests.support.routing_ranks import sequence_routes, sequences

SEEDS = range(3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_chooses_by_a_margin(family):
    model = build(family)

    def routes():
        return torch.cat(
            [sequence_routes(family, ids, last_token=True, model=model).sort(-1).values for ids in sequences()]
        )

    expected = routes()
    for seed in SEEDS:
        with noise(model, seed=seed):
            assert torch.equal(routes(), expected)
