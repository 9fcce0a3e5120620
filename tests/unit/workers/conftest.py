"""Fixtures of the worker tests: random micro-batches and verl's ActorConfig."""

from collections.abc import Callable

import pytest
import torch

from tests.support.micro_batches import Micro


@pytest.fixture
def make_batch() -> Callable[..., Micro]:
    """make_batch(seed, lengths=..., scale=...): random ragged rows, advantages equal along each.

    Rows 0 and 2 have a negative advantage; row 0 is far from the rollout on OPSM's side, row 2 on the other.
    """

    def make(seed=0, lengths=(3, 7, 1, 5), scale=0.3, masked_row=2, **settings):
        generator = torch.Generator().manual_seed(seed)

        def noise(n):
            return torch.randn(n, generator=generator)

        rows: dict[str, list[torch.Tensor]] = {}
        for index, n in enumerate(lengths):
            infer = -torch.rand(n, generator=generator) * 3
            old = infer + noise(n) * scale
            mask = (torch.rand(n, generator=generator) < 0.8).long()
            mask[0] = 1
            sign = 1 if index % 2 else -1
            row = {
                "rollout_log_probs": infer + {0: 0.5, 2: -0.5}.get(index, 0.0),
                "old_log_probs": old,
                "log_prob": old + noise(n) * scale,
                "ref_log_prob": old + noise(n) * scale,
                "advantages": torch.full((n,), sign * (0.5 + abs(noise(1).item()))),
                "entropy": torch.rand(n, generator=generator),
                "response_mask": mask * (index != masked_row),
            }
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
        return Micro(rows, prompts=[1 + index for index in range(len(lengths))], settings=settings)

    return make
