"""Compares off-policy sequence masking with TRL's `GRPOTrainer.get_off_policy_mask`.

Its importance-sampling modes (token_truncate, token_mask, sequence_truncate, sequence_mask) are in the middle of
`GRPOTrainer._generate_and_score_completions` and cannot be called without a model (trl 1.14.2): not compared.
"""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from verl_ext.core.corrections import opsm_mask, sequence_divergence


@pytest.fixture(scope="module")
def trl_mask() -> Iterator[Callable]:
    folder = f"{sys.prefix}/opt/trl"  # apart from verl, which fails where it finds TRL: tools/setup_cpu.sh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, folder])
        from trl.trainer.grpo_trainer import GRPOTrainer

        yield GRPOTrainer.get_off_policy_mask
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        del sys.modules[name]


def masks(trl_mask, l_infer, l_theta, advantages_B, mask, delta):
    """[B] theirs, [B, T] ours. TRL's sampling policy is the rollout engine's, as in the paper."""
    theirs = trl_mask(advantages_B[:, None], l_theta, l_infer, mask.float(), delta)
    divergence = sum(sequence_divergence(l_infer, l_theta, l_theta, mask))
    return theirs.squeeze(1), opsm_mask(divergence, advantages_B[:, None].expand_as(mask), delta)


@pytest.mark.parametrize("delta", [0.0, 0.01, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_opsm_equals_trls_off_policy_mask(trl_mask, seed, delta):
    generator = torch.Generator().manual_seed(seed)
    l_infer = -torch.rand(64, 32, generator=generator) * 5
    l_theta = l_infer + torch.randn(64, 32, generator=generator) * 0.5
    mask = torch.rand(64, 32, generator=generator) < 0.7
    mask[:4] = False  # a sequence without a token stays
    advantages = torch.randn(64, generator=generator).where(torch.arange(64) % 8 > 0, 0.0)
    theirs, ours = masks(trl_mask, l_infer, l_theta, advantages, mask, delta)
    assert torch.equal(ours, theirs[:, None].expand_as(ours))
    assert 0 < theirs.mean() < 1


def test_both_keep_a_sequence_at_delta_itself(trl_mask):
    l_infer = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    l_theta = l_infer - torch.tensor([[0.5, 0.0], [0.5, 0.0625]])
    theirs, ours = masks(trl_mask, l_infer, l_theta, -torch.ones(2), torch.ones(2, 2, dtype=torch.bool), 0.25)
    assert theirs.tolist() == ours[:, 0].tolist() == [1.0, 0.0]
