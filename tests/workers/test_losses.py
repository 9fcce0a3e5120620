"""The registered loss `icepop`, against the clipped objective written out in float64."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, FSDPActorConfig

from verl_ext.errors import ConfigError
from verl_ext.workers.losses import IcePopLossConfig, icepop_loss


def actor_config(**loss) -> ActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=IcePopLossConfig(**loss),
    )


def batch(seed, rows=3, length=7):
    torch.manual_seed(seed)
    old = -torch.rand(rows, length) * 3
    new = (old + torch.randn(rows, length) * 0.3).requires_grad_()
    mask = torch.rand(rows, length) < 0.8
    mask[:, 0] = True
    return old, new, torch.randn(rows, length), mask, torch.exp(torch.randn(rows, length) * 1.5)


def oracle(old, new, advantages, mask, k, alpha, beta, low=0.2, high=0.28, dual=3.0):
    """-1/N sum over tokens of M(k) min(r A, clip(r) A), with PPO's dual clip for A < 0, in float64."""
    old, advantages, k = old.double(), advantages.double(), k.double()
    leaf = new.detach().double().requires_grad_()
    ratio = torch.exp(leaf - old)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    weight = torch.where((k >= alpha) & (k <= beta), k, 0.0)
    loss = -(objective * weight)[mask].sum() / mask.sum()
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 5.0), (0.9, 1.1)])
def test_icepop_loss_and_gradient_equal_the_oracle(seed, alpha, beta):
    old, new, advantages, mask, k = batch(seed)
    loss, metrics = icepop_loss(
        old, new, advantages, mask, config=actor_config(alpha=alpha, beta=beta), rollout_is_weights=k
    )
    loss.backward()
    expected, gradient = oracle(old, new, advantages, mask, k, alpha, beta)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(new.grad.double(), gradient, rtol=1e-4, atol=1e-7)
    n = mask.sum().item()
    assert metrics["actor/icepop/dropped_low"] == pytest.approx(((k < alpha) & mask).sum().item() / n)
    assert metrics["actor/icepop/dropped_high"] == pytest.approx(((k > beta) & mask).sum().item() / n)


def test_icepop_loss_with_every_ratio_one_is_verls_vanilla_loss():
    old, new, advantages, mask, k = batch(0)
    config = actor_config()
    ours, _ = icepop_loss(old, new, advantages, mask, config=config, rollout_is_weights=torch.ones_like(k))
    vanilla, _ = get_policy_loss_fn("vanilla")(old, new, advantages, mask, "token-mean", config, None)
    assert ours.item() == vanilla.item()


def test_all_tokens_dropped_gives_a_zero_gradient():
    old, new, advantages, mask, k = batch(0)
    loss, _ = icepop_loss(
        old, new, advantages, mask, config=actor_config(), rollout_is_weights=torch.full_like(k, 100.0)
    )
    loss.backward()
    assert loss.item() == 0
    assert new.grad.abs().max() == 0


def test_missing_ratio_explains_itself():
    old, new, advantages, mask, _ = batch(0)
    with pytest.raises(ConfigError, match="rollout_is=token"):
        icepop_loss(old, new, advantages, mask, config=actor_config())


def test_bounds_that_cross_name_the_setting():
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.actor.policy_loss.alpha=6 must be below"):
        IcePopLossConfig(alpha=6)


def test_the_loss_is_registered_with_verl_by_name():
    assert get_policy_loss_fn("icepop") is icepop_loss
