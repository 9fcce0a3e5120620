"""Weights scale each token's gradient, on every policy loss of verl and with verl's own functions."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

from tests.support.closeness import close
from verl_ext.workers.losses import apply_base

# Every registered loss of verl 0.9.1 but bypass_mode, which makes its own weights and discards these.
BASES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "gpg", "dro")
TERM = 1.0  # the size of what the losses here are means of: terms of both signs


def gradient(base, batch, weights, config, call=apply_base):
    torch.manual_seed(0)  # clip_cov draws the tokens it clips
    log_prob = batch.padded("log_prob").requires_grad_()
    loss, _ = call(
        base,
        weights,
        old_log_prob=batch.padded("old_log_probs"),
        log_prob=log_prob,
        advantages=batch.padded("advantages"),
        response_mask=batch.padded("response_mask").bool(),
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    return loss.item(), log_prob.grad


def config_of(actor_config, base):
    return actor_config(PolicyLossConfig(loss_mode=base, dro_beta=0.1, clip_cov_ratio=0.2, clip_cov_lb=-1.0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("base", BASES)
def test_weights_scale_the_gradient_of_each_token(base, seed, make_batch, actor_config):
    batch, config = make_batch(seed, lengths=(6, 9, 4, 8)), config_of(actor_config, base)
    torch.manual_seed(seed)
    weights = torch.rand(4, 9) * 3 * (torch.rand(4, 9) < 0.7)  # zeros among them
    _, plain = gradient(base, batch, None, config)
    _, weighted = gradient(base, batch, weights, config)
    assert plain.count_nonzero() > 5
    close(weighted, plain * weights)


@pytest.mark.parametrize("base", BASES)
def test_weights_of_one_change_nothing(base, make_batch, actor_config):
    batch, config = make_batch(0), config_of(actor_config, base)
    plain_loss, plain = gradient(base, batch, None, config)
    loss, ones = gradient(base, batch, torch.ones(4, 7), config)
    close(loss, plain_loss, scale=TERM)
    close(ones, plain)


def verls_geo_mean(_, weights, **arguments):
    return get_policy_loss_fn("geo_mean")(rollout_is_weights=weights, **arguments)


def test_geo_mean_weighted_keeps_verls_value_and_a_sequence_that_lost_a_token(make_batch, actor_config):
    batch, config = make_batch(0, masked_row=None), actor_config()
    weights = torch.ones(4, 7)
    weights[1, 0] = 0
    verl_loss, verl_plain = gradient("geo_mean", batch, None, config, call=verls_geo_mean)
    _, verl_dropped = gradient("geo_mean", batch, weights, config, call=verls_geo_mean)
    loss, ours = gradient("geo_mean", batch, weights, config)
    close(loss, verl_loss, scale=TERM)
    close(ours, verl_plain * weights)
    # In verl's loss that one token takes its sequence out, nearly: 1e-10 to the power 1 / |y|.
    assert verl_dropped[1].abs().max() < 0.2 * verl_plain[1].abs().max()


def test_geo_mean_weighted_is_a_mean_over_the_global_batch(make_batch, actor_config):
    batch, config = make_batch(0), actor_config()
    one_batch, _ = gradient("geo_mean", batch, torch.ones(4, 7), config)
    config.global_batch_info.update(dp_size=1, global_batch_size=4)
    close(gradient("geo_mean", batch, torch.ones(4, 7), config)[0], one_batch, scale=TERM)
    config.global_batch_info.update(dp_size=2, global_batch_size=16)  # a half of this rank's rows
    close(gradient("geo_mean", batch, torch.ones(4, 7), config)[0], one_batch / 2, scale=TERM)
