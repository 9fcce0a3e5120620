"""Routing and top tokens in the training step: how they are used, and which stage gets them."""

import pytest
import torch
from tensordict import NonTensorStack

from tests.support.store import nested
from tests.support.training_step import COLUMNS, READ, ran, router_sums
from verl_ext.base.errors import BatchError, HookError
from verl_ext.core.routing import REPEATED, RouterSums


def test_routing_is_not_sent_to_stages_that_do_not_read_it(step, capsys):
    routes = torch.zeros(2, 1, dtype=torch.uint8)
    trainer, metrics, _ = step({"router_agreement": True}, router_sums=router_sums(1, 1), routed_experts=routes)
    assert "routed_experts is sent as torch.uint8" in capsys.readouterr().out
    assert metrics["router/agreement/layer_01"] == pytest.approx(3 / 4)
    assert metrics["router/any_layer_differs"] == pytest.approx(1 / 2)
    assert metrics["router/tokens"] == 4
    assert trainer.ran[1:] == [("critic", [*READ, *COLUMNS]), ("actor", READ)]


@pytest.mark.parametrize(
    ("strategy", "engine", "mode", "sent"),
    [
        ("fsdp2", "fsdp_config", "R2", "old_routed_experts"),
        ("fsdp2", "fsdp_config", "R3", "routed_experts"),
        ("megatron", "megatron", "R2", "routed_experts"),
        ("megatron", "megatron", "R3", "routed_experts"),
        ("veomni", "veomni", "R2", "old_routed_experts"),
        ("veomni", "veomni", "R3", "routed_experts"),
    ],
)
def test_the_update_is_sent_the_routing_that_it_replays(step, strategy, engine, mode, sent):
    actor = {"strategy": strategy, engine: {"router_replay": {"mode": mode}}}
    trainer, _, _ = step({"router_agreement": True}, actor=actor, router_sums=router_sums(0, 0))
    assert trainer.ran[1:] == [("critic", [*READ, *COLUMNS]), ("actor", [*READ, sent])]
    assert set(trainer.scored) == {*READ, "routed_experts", "old_routed_experts", "router_sums"}


def test_a_rollout_that_returns_no_routing_is_an_error_with_the_remedy(step):
    with pytest.raises(HookError, match=r"set stability.router_agreement=false"):
        step({"router_agreement": True})


def test_top_tokens_become_metrics_before_the_guard_judges(step):
    sums = torch.nested.as_nested_tensor([torch.tensor([3.0, 1, 0.4, 1.8, 1])] * 2, layout=torch.jagged)
    settings = {"top_tokens": {"k": 8}, "batch_skip": {"metric": "vllm_kl/head", "threshold": 0.1}}
    _trainer, metrics, _ = step(settings, top_token_sums=sums)
    assert metrics["vllm_kl/head"] == pytest.approx(0.2) and metrics["vllm_kl/head_mass"] == pytest.approx(0.9)
    assert metrics["vllm_kl/head_differs"] == pytest.approx(0.5)
    assert metrics["vllm_kl/head_missing"] == pytest.approx(1 / 3)
    assert metrics["guard/skipped"] == 1


CENTERED = {"score_centering": True}
MISSING = "verl_ext: step 7: warn: 33.33% of the model's tokens came without the sampler's top tokens"


def token_sums(missing):
    return torch.nested.as_nested_tensor([torch.tensor([3.0, missing, 0.4, 1.8, 1])] * 2, layout=torch.jagged)


@pytest.mark.parametrize(
    ("settings", "missing", "said"),
    [(CENTERED, 1.0, True), (CENTERED, 0.0, False), ({"top_tokens": {"k": 8}}, 1.0, False)],
    ids=["read by the update", "none", "for the KL alone"],
)
def test_missing_top_tokens_are_told_where_the_update_reads_them(step, capsys, settings, missing, said):
    trainer, _, _ = step(settings, top_token_sums=token_sums(missing), actor={"ppo_mini_batch_size": 2})
    printed = capsys.readouterr().out
    assert (MISSING in printed) == said and ("so their score is not centered" in printed) == said
    trainer._compute_advantage(trainer.batch, {})  # once is enough
    assert "came without" not in capsys.readouterr().out


def test_a_batch_of_more_than_one_optimizer_step_is_refused_where_scores_are_centered(step):
    """An agent loop with several outputs makes such a batch: verl fills it up to a multiple of the mini-batch."""
    sums = {"top_token_sums": token_sums(0.0)}
    step(CENTERED, actor={"ppo_mini_batch_size": 2}, **sums)
    step({"top_tokens": {"k": 8}}, actor={"ppo_mini_batch_size": 1}, **sums)
    with pytest.raises(BatchError, match=r"2 trajectories makes 2 steps of 1 .*; set stability\.score_centering=false"):
        step(CENTERED, actor={"ppo_mini_batch_size": 1}, **sums)


def test_a_rollout_that_returns_no_top_tokens_is_an_error(step):
    with pytest.raises(HookError, match="compute_log_prob read no top tokens"):
        step({"top_tokens": {"k": 8}})


def refused_sums(believed, repeated):
    sums = RouterSums.zeros(2, 2)
    for values in (sums.tokens, sums.agree, sums.exact, sums.own):
        values[:] = believed
    sums.refused[:, REPEATED - 1] = repeated
    return nested(*sums.pack().tolist())


def test_refused_routing_is_told_and_counted_and_a_rule_can_act_on_it(step, capsys):
    rule = {"signal": "router/invalid", "above": 0.1, "action": "skip"}
    settings = {"router_agreement": True, "guard": {"rules": {"invalid": rule}}}
    trainer, metrics, _ = step(settings, router_sums=refused_sums(3, 1))
    assert metrics["router/invalid"] == 0.25 and metrics["router/unknown"] == 0 and metrics["router/agreement"] == 1
    assert ran(trainer) == ["advantage"] and metrics["guard/skipped"] == 1
    said = capsys.readouterr().out
    assert "step 7: warn: 2 of 8 tokens name an expert twice in a layer" in said
    assert "update skipped: router/invalid=0.25" in said


def test_trajectories_with_a_checksum_of_their_routes_are_counted(step):
    sums = torch.nested.as_nested_tensor([torch.tensor([5]), torch.tensor([0])], layout=torch.jagged)
    _, metrics, _ = step({"router_agreement": True}, router_sums=refused_sums(3, 0), routed_experts_sum=sums)
    assert metrics["router/checked"] == 0.5


def test_sglangs_retractions_are_counted_and_told_once(step, capsys):
    counts = NonTensorStack(*({"num_preempted": count} for count in (0, 2)))
    rollout = {"name": "sglang", "enable_rollout_routing_replay": True}
    _, metrics, _ = step({"metrics": True}, rollout=rollout, metrics=counts)
    assert metrics["router/retracted"] == 0.5
    assert "step 7: warn: SGLang ran out of KV cache and read the tokens of 50.00%" in capsys.readouterr().out
    _, metrics, _ = step({"metrics": True}, metrics=counts)
    assert "router/retracted" not in metrics  # vLLM sends experts before it preempts


def test_a_replay_of_nothing_but_refused_routing_stops_the_run(step):
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": "R3"}}}
    with pytest.raises(HookError, match=r"R3 has nothing to replay: 8 of 8 tokens name an expert twice.*=disabled"):
        step({"router_agreement": True}, actor=actor, router_sums=refused_sums(0, 4))


def test_where_verl_replays_the_rollouts_routing_a_sample_of_it_is_looked_at(step, capsys):
    actor = {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}
    good = torch.tensor([[[1, 2]], [[3, 4]], [[0, 0]]])
    bad = torch.tensor([[[5, 5]], [[0, 0]]])
    _, metrics, _ = step({"metrics": True}, actor=actor, routed_experts=nested(good.tolist(), bad.tolist()))
    assert metrics["router/invalid"] == pytest.approx(1 / 3) and metrics["router/unknown"] == 0
    assert "1 of 3 tokens name an expert twice" in (said := capsys.readouterr().out)
    assert "verl still replays them; set actor_rollout_ref.actor.megatron.router_replay.mode=disabled" in said
    with pytest.raises(HookError, match=r"megatron.router_replay.mode=R3 has nothing to replay"):
        step({"metrics": True}, actor=actor, routed_experts=nested((0 * good).tolist(), (0 * bad).tolist()))
