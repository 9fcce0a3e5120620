"""The FSDP adapter around an engine's forward_step: what it records, replays and refuses."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.routing_families import EXPERTS, build, moe_layers
from tests.support.routing_ranks import LENGTHS, Case, batch, rollout_routes
from verl_ext.errors import HookError
from verl_ext.routing.fsdp import OLD_ROUTES, ROLLOUT_ROUTES, FsdpRouting, top_k_margin


class Engine:
    """The part of verl's engine that the adapter touches, without padding removal; test_routing_engine has the real."""

    def __init__(self, family="qwen3_moe", mode="disabled"):
        self.module = build(family).eval()
        self.model_config = SimpleNamespace(hf_config=self.module.config)
        self.config = SimpleNamespace(engine_config=SimpleNamespace(router_replay=SimpleNamespace(mode=mode)))

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], padding=0)
        lengths = micro_batch["input_ids"].offsets().diff()
        self.module(ids, attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long())
        return 0.0, {"model_output": {}, "metrics": {}}


def attached(engine):
    routing = FsdpRouting(engine.config)
    routing.prepare(engine)
    return routing


def micro_batch(case, **settings):
    return batch(case, use_remove_padding=False, **settings)


def compute_log_prob(engine, data):
    with torch.no_grad():
        return engine.forward_step(data, loss_function=None, forward_only=True)[1]["model_output"]


def test_only_the_pass_for_old_log_probs_compares():
    case, engine = Case(), Engine()
    routing = attached(engine)
    assert routing.hooks() == ("Qwen3MoeTopKRouter", 3)
    found = compute_log_prob(engine, micro_batch(case, calculate_entropy=True))
    assert found["router_agreement"].values().tolist() == [1.0] * sum(response for _, response in LENGTHS)
    assert compute_log_prob(engine, micro_batch(case, calculate_entropy=False)) == {}
    assert engine.forward_step(micro_batch(case), loss_function=None, forward_only=False)[1]["model_output"] == {}
    without = micro_batch(case, calculate_entropy=True).exclude(ROLLOUT_ROUTES)
    assert compute_log_prob(engine, without) == {}


def test_rollouts_that_ship_the_moe_layers_alone_are_understood_too():
    case, engine = Case("deepseek_v3", planted=[(0, 1, 2)]), Engine("deepseek_v3")
    attached(engine)
    data = micro_batch(case, calculate_entropy=True)
    every_layer = compute_log_prob(engine, data)
    rows = [routes[:, moe_layers(case.family)] for routes in rollout_routes(case)]
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    moe_alone = compute_log_prob(engine, data)
    assert torch.equal(moe_alone["router_sums"], every_layer["router_sums"])
    assert every_layer["router_agreement"].values().min() == 0.75  # one of two experts in one of two layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: torch.cat([routes, routes], 1), r"6, 2\) \[tokens, layers, top_k\].*3 decoder layers.*top-2"),
        (lambda routes: routes[..., :1], r"3, 1\).*top-2.*router_agreement=false"),
        (lambda routes: routes + EXPERTS, r"names expert 1\d of a model with 8.*shared or redundant"),
    ],
)
def test_routing_that_does_not_fit_the_model_is_an_error_with_the_remedy(change, message):
    engine = Engine()
    attached(engine)
    data = micro_batch(Case(), calculate_entropy=True)
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor(
        [change(routes) for routes in rollout_routes(Case())], layout=torch.jagged
    )
    with pytest.raises(HookError, match=message):
        compute_log_prob(engine, data)


@pytest.mark.parametrize(("mode", "field"), [("R2", OLD_ROUTES), ("R3", ROLLOUT_ROUTES)])
def test_replay_without_routing_is_an_error_that_names_the_field(mode, field):
    engine = Engine(mode=mode)
    attached(engine)
    data = micro_batch(Case(mode=mode)).exclude(ROLLOUT_ROUTES)
    with pytest.raises(HookError, match=f"mode={mode} has nothing to replay: the batch has no {field}"):
        engine.forward_step(data, loss_function=None, forward_only=False)


def test_without_verls_flag_nothing_is_replayed():
    engine = Engine(mode="R3")
    routing = attached(engine)
    data = micro_batch(Case(mode="R3"), enable_routing_replay=False)
    assert engine.forward_step(data, loss_function=None, forward_only=False)[1]["metrics"] == {}
    assert routing.current is None


def test_a_router_that_does_not_run_is_an_error():
    engine = Engine()
    routing = attached(engine)
    engine.module.model.layers[1].mlp.gate.forward = lambda hidden: routing.points[0].module(hidden)
    with pytest.raises(HookError, match=r"router 0 of 3 ran twice"):
        compute_log_prob(engine, micro_batch(Case(), calculate_entropy=True))
    engine.module.model.layers = engine.module.model.layers[:1]
    with pytest.raises(HookError, match=r"1 of 3 routers ran"):
        compute_log_prob(engine, micro_batch(Case(), calculate_entropy=True))


def test_the_first_pass_after_an_update_starts_anew():
    """The routing of an update stays for its backward pass, and no longer."""
    engine = Engine(mode="R3")
    routing = attached(engine)
    engine.forward_step(micro_batch(Case(mode="R3")), loss_function=None, forward_only=False)
    assert routing.current is not None
    compute_log_prob(engine, micro_batch(Case(mode="R3"), enable_routing_replay=False))
    assert routing.current is None


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**31))
def test_margin_is_the_gap_in_the_sorted_scores(tokens, top_k, more, seed):
    scores = torch.randn(tokens, top_k + more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = top_k_margin(scores, scores.topk(top_k).indices)
    ordered = [sorted(row, reverse=True) for row in scores.tolist()]
    expected = [row[top_k - 1] - row[top_k] if more else 0.0 for row in ordered]
    assert found.tolist() == torch.tensor(expected, dtype=torch.float32).tolist()


def test_margin_is_0_where_a_group_has_no_other_expert():
    scores = torch.tensor([[0.6, 0.4, -torch.inf, -torch.inf]])
    assert top_k_margin(scores, torch.tensor([[0, 1]])).tolist() == [0.0]
