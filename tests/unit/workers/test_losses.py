"""The registered losses `icepop`, `opsm` and `llds`, against the papers written out in float64."""

from dataclasses import fields

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

from tests.support.closeness import close
from tests.support.policy_loss_oracles import (
    icepop_loss_oracle,
    llds_loss_oracle,
    loss_batch,
    opsm_loss_oracle,
)
from verl_ext.base.errors import ConfigError
from verl_ext.core.loss_batch import LossBatch
from verl_ext.features.losses import BASES, LOSSES, VERLS_SETTINGS
from verl_ext.workers.loss_config import build_loss_config
from verl_ext.workers.losses import provide

TERM = 1.0  # the size of what the losses here are means of: terms of both signs


def actor_config(loss_mode="icepop", **loss) -> ActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=build_loss_config(loss_mode=loss_mode, **loss),
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 5.0), (0.9, 1.1)])
def test_icepop_loss_and_gradient_equal_the_oracle(seed, alpha, beta):
    old, new, advantages, mask, k = loss_batch(seed)
    loss, metrics = get_policy_loss_fn("icepop")(
        old, new, advantages, mask, config=actor_config(alpha=alpha, beta=beta), rollout_is_weights=k
    )
    loss.backward()
    expected, gradient = icepop_loss_oracle(old, new, advantages, mask, k, alpha, beta)
    close(loss, expected, scale=TERM)
    close(new.grad, gradient)
    n = mask.sum().item()
    assert metrics["actor/icepop/dropped_low"] == pytest.approx(((k < alpha) & mask).sum().item() / n)
    assert metrics["actor/icepop/dropped_high"] == pytest.approx(((k > beta) & mask).sum().item() / n)


def test_icepop_loss_with_every_ratio_one_is_verls_vanilla_loss():
    old, new, advantages, mask, k = loss_batch(0)
    config = actor_config()
    ours, _ = get_policy_loss_fn("icepop")(
        old, new, advantages, mask, config=config, rollout_is_weights=torch.ones_like(k)
    )
    vanilla, _ = get_policy_loss_fn("vanilla")(old, new, advantages, mask, "token-mean", config, None)
    close(ours, vanilla, scale=TERM)


def test_all_tokens_dropped_gives_a_zero_gradient():
    old, new, advantages, mask, k = loss_batch(0)
    loss, _ = get_policy_loss_fn("icepop")(
        old, new, advantages, mask, config=actor_config(), rollout_is_weights=torch.full_like(k, 100.0)
    )
    loss.backward()
    assert loss.item() == 0
    assert new.grad.abs().max() == 0


def test_missing_ratio_explains_itself():
    old, new, advantages, mask, _ = loss_batch(0)
    with pytest.raises(ConfigError, match="rollout_is=token"):
        get_policy_loss_fn("icepop")(old, new, advantages, mask, config=actor_config())


def test_bounds_that_cross_name_the_setting():
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.actor.policy_loss.alpha=6 must be below"):
        build_loss_config(loss_mode="icepop", alpha=6)


def check(loss_mode, expected, leaf, args, **settings):
    """The registered loss and its gradient equal the float64 `expected` of `leaf`."""
    expected.backward()
    old, new, advantages, mask = args
    loss, metrics = get_policy_loss_fn(loss_mode)(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        config=actor_config(loss_mode, **settings),
    )
    loss.backward()
    close(loss, expected, scale=TERM)
    close(new.grad, leaf.grad)
    return metrics


@pytest.mark.parametrize("seed", range(5))
def test_opsm_loss_and_gradient_equal_the_oracle(seed):
    old, new, advantages, mask, _ = loss_batch(seed)
    l_infer = old + torch.tensor([[0.6], [-0.6], [0.1]])
    leaf = new.detach().double().requires_grad_()
    expected, keep, gap = opsm_loss_oracle(leaf, old, advantages, mask, l_infer, 0.1)
    with provide(LossBatch(new, old, advantages, mask, l_infer=l_infer)):
        metrics = check("opsm", expected, leaf, (old, new, advantages, mask), delta=0.1)
    assert metrics["actor/opsm/dropped"] == pytest.approx((~keep & mask).sum().item() / mask.sum().item())
    total = metrics["actor/opsm/mismatch"] + metrics["actor/opsm/staleness"]
    close(total, gap.mean(), scale=gap.abs().max().item())


@pytest.mark.parametrize("seed", range(5))
def test_llds_loss_and_gradient_equal_the_oracle(seed):
    old, new, advantages, mask, _ = loss_batch(seed)
    leaf = new.detach().double().requires_grad_()
    expected, penalty = llds_loss_oracle(leaf, old, advantages, mask, 0.5)
    metrics = check("llds", expected, leaf, (old, new, advantages, mask), coef=0.5, gate="response")
    close(metrics["actor/llds/penalty"], penalty)


def test_a_loss_under_plain_verl_names_the_entry_point():
    old, new, advantages, mask, _ = loss_batch(0)
    with pytest.raises(ConfigError, match=r"launch with verl_ext\.main_ppo"):
        check("opsm", new.sum(), new, (old, new, advantages, mask), delta=0.1)


def test_under_plain_verl_a_loss_mode_alone_has_the_defaults():
    old, new, advantages, mask, _ = loss_batch(0)
    named, whole = actor_config("vanilla"), actor_config("llds", coef=0.1, gate="action", base="vanilla")
    assert type(named.policy_loss) is PolicyLossConfig
    losses = [get_policy_loss_fn("llds")(old, new, advantages, mask, "token-mean", it)[0] for it in (named, whole)]
    assert losses[0] == losses[1]
    with pytest.raises(ConfigError, match=r"policy_loss\.delta must be given"):
        get_policy_loss_fn("opsm")(old, new, advantages, mask, "token-mean", named)


def test_what_is_known_of_verl_without_importing_it():
    assert set(VERLS_SETTINGS) == {field.name for field in fields(PolicyLossConfig)}
    assert {*BASES, *LOSSES, "bypass_mode"} == set(POLICY_LOSS_REGISTRY)
