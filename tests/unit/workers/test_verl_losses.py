"""The losses of verl that presets choose, with the presets' settings, against the papers' formulas in float64."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from tests.support.closeness import close

SEEDS = pytest.mark.parametrize("seed", range(3))


@pytest.fixture
def chosen(compose, make_batch):
    """chosen(preset, seed, ...) -> verl's loss and gradient, the actor's config, and the batch in float64."""

    def run(preset, seed, *overrides, moved=(1.0,) * 4):
        config = compose(f"stability={preset}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *overrides)
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        batch = make_batch(seed, lengths=(9, 17, 8, 15), scale=0.4, masked_row=None)
        names = ("old_log_probs", "log_prob", "advantages", "response_mask")
        old, theta, advantages, mask = (batch.padded(name) for name in names)
        theta = old + (theta - old) * torch.tensor(moved)[:, None]
        advantages = advantages * torch.linspace(0.3, 3, advantages.shape[1])  # not equal along a response
        leaf = theta.clone().requires_grad_()
        loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            old_log_prob=old,
            log_prob=leaf,
            advantages=advantages,
            response_mask=mask.bool(),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        loss.backward()
        return (loss.item(), leaf.grad), actor, [each.double() for each in (old, theta, advantages, mask)]

    return run


def check(found, oracle, leaf):
    oracle.backward()
    loss, gradient = found
    close(loss, oracle.item(), scale=1.0)
    assert gradient.count_nonzero() > 5
    close(gradient, leaf.grad.float())


@SEEDS
def test_gspo_clips_the_geometric_mean_of_a_responses_ratios(seed, chosen):
    """Eq. 5 to 7 of arXiv 2507.18071, in the form with an advantage per token (eq. 13), with the paper's clips."""
    found, actor, (old, theta, advantages, mask) = chosen(
        "gspo", seed, moved=(1e-4, 1.0, 1e-4, 1.0)
    )  # two within the clips
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)
    leaf, total = theta.requires_grad_(), 0.0
    for row in range(len(theta)):
        own = mask[row].bool()
        log_s = (leaf[row, own] - old[row, own]).mean()
        s = log_s.detach().exp() * (leaf[row, own] - leaf[row, own].detach()).exp()
        a = advantages[row, own]
        total = total - torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a).mean() / len(theta)
    check(found, total, leaf)


def covariance(theta, advantages, mask):
    """Eq. 10 of arXiv 2505.22617: the product of both deviations from the batch's means, per token."""
    n = mask.sum()
    means = (advantages * mask).sum() / n, (theta * mask).sum() / n
    return (advantages - means[0]) * (theta - means[1])


@SEEDS
def test_clip_cov_takes_out_tokens_whose_covariance_is_within_its_bounds(seed, chosen):
    """Eq. 11: all such tokens here, because verl draws the share from them."""
    every = "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=1.0"
    found, actor, (old, theta, advantages, mask) = chosen("clip_cov", seed, every)
    low, high = actor.policy_loss.clip_cov_lb, actor.policy_loss.clip_cov_ub
    assert (low, high) == (1.0, 5.0)
    leaf = theta.requires_grad_()
    r = (leaf - old).exp()
    plain, clipped = -advantages * r, -advantages * r.clamp(0.8, 1.2)
    by_clip = clipped > plain
    cov = covariance(leaf, advantages, mask).detach()
    out = (cov > low) & (cov < high) & ~by_clip & mask.bool()
    assert out.any() and (mask.bool() & ~out & ~by_clip).any()
    check(found, (torch.maximum(plain, clipped) * ~out * mask).sum() / mask.sum(), leaf)


@SEEDS
def test_kl_cov_penalises_the_tokens_of_the_largest_covariance(seed, chosen):
    """Eq. 12: here a fifth of the tokens, in a batch of few."""
    found, actor, (old, theta, advantages, mask) = chosen(
        "kl_cov", seed, "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.2"
    )
    assert actor.policy_loss.ppo_kl_coef == 1.0
    leaf, n = theta.requires_grad_(), int(mask.sum())
    cov = covariance(leaf, advantages, mask).detach().masked_fill(mask == 0, -torch.inf).flatten()
    chosen_tokens = torch.zeros_like(cov).index_fill(0, cov.topk(max(1, int(n * 0.2))).indices, 1).view_as(mask)
    log_r = leaf - old
    losses = -advantages * log_r.exp() + chosen_tokens * log_r.abs()
    check(found, (losses * mask).sum() / n, leaf)
