"""The adapter around an engine's forward_step: it records, replays and refuses routes."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu

from tests.support.recorded_routes import worker_config
from tests.support.routing_families import EXPERTS, build, moe_layers
from tests.support.routing_ranks import LENGTHS, Case, batch, rollout_routes
from verl_ext.base.errors import BatchError, HookError
from verl_ext.base.names import COMPARES, ROUTE_SUM
from verl_ext.core.routing import RouterSums, router_metrics
from verl_ext.routing.hooked import OLD_ROUTES, ROLLOUT_ROUTES, HookedRouting, top_k_margin


class Engine:
    """The part of verl's engine that the adapter touches, without padding removal; test_routing_engine has the real."""

    def __init__(self, family="qwen3_moe", mode="disabled"):
        self.module = build(family).eval()
        self.model_config = SimpleNamespace(hf_config=self.module.config)
        self.config = worker_config(mode, "fsdp2")

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], padding=0)
        lengths = micro_batch["input_ids"].offsets().diff()
        self.module(ids, attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long())
        if loss_function is not None:
            loss_function(model_output={}, data=micro_batch, dp_group=None)
        return 0.0, {"model_output": {}, "metrics": {}}


def attached(engine):
    routing = HookedRouting(engine.config)
    routing.prepare(engine)
    return routing


def micro_batch(case, **settings):
    return batch(case, use_remove_padding=False, **settings)


def compute_log_prob(engine, data):
    with torch.no_grad():
        return engine.forward_step(data, loss_function=None, forward_only=True)[1]["model_output"]


@pytest.mark.parametrize("strategy", ["fsdp2", "veomni"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_the_engine_is_built_without_a_replay_of_its_own(strategy, mode):
    config = worker_config(mode, strategy, param_offload=True)
    routing = HookedRouting(config)
    assert routing.mode == config.engine_config.router_replay.mode == mode
    assert routing.config.engine_config.router_replay.mode == "disabled" and routing.config.engine_config.param_offload


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


@pytest.mark.parametrize("mode", ["disabled", "R3"])
def test_an_update_that_is_asked_to_compares_as_the_pass_for_old_log_probs_does(mode):
    case, engine, seen = Case(mode=mode, planted=[(0, 1, 2), (2, 0, 1)]), Engine(mode=mode), []

    def loss(model_output, data, dp_group):
        seen.append(model_output)

    attached(engine)
    before = compute_log_prob(engine, micro_batch(case, calculate_entropy=True))
    for asked in (True, False):
        data = micro_batch(case, **({COMPARES: True} if asked else {}))
        assert engine.forward_step(data, loss_function=loss, forward_only=False)[1]["model_output"] == {}
    in_update, plain = seen
    assert plain == {} and in_update.keys() == before.keys() == {"router_agreement", "router_sums"}
    assert torch.equal(in_update["router_agreement"].values(), before["router_agreement"].values())
    assert torch.equal(in_update["router_sums"], before["router_sums"])


@pytest.mark.parametrize(("mode", "forward_only"), [("disabled", True), ("R3", True), ("R3", False)])
def test_routes_that_moved_on_the_way_are_refused_where_they_are_used(mode, forward_only):
    engine = Engine(mode=mode)
    attached(engine)
    data = micro_batch(Case(mode=mode), calculate_entropy=True)
    moved = [row.roll(int(index == 2), 0) for index, row in enumerate(data[ROLLOUT_ROUTES].unbind())]
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor(moved, layout=torch.jagged)
    ids = data["input_ids"][2].tolist()
    with pytest.raises(
        BatchError, match=f"trajectory of {len(ids)} tokens that begins with {re.escape(str(ids))} is not"
    ):
        engine.forward_step(data, loss_function=None, forward_only=forward_only)


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_only_replay_is_refused_with_a_router_that_gives_some_experts_no_weight(mode):
    engine = Engine(mode=mode)
    engine.module.config.topk_method = "group_limited_greedy"
    if mode == "disabled":
        attached(engine)
        return
    with pytest.raises(HookError, match="group_limited_greedy"):
        attached(engine)


def test_rollouts_that_ship_the_moe_layers_alone_are_understood_too():
    case, engine = Case("deepseek_v3", planted=[(0, 1, 2)]), Engine("deepseek_v3")
    attached(engine)
    data = micro_batch(case, calculate_entropy=True)
    every_layer = compute_log_prob(engine, data)
    rows = [routes[:, moe_layers(case.family)] for routes in rollout_routes(case)]
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    del data[ROUTE_SUM]  # of all layers
    moe_alone = compute_log_prob(engine, data)
    assert torch.equal(moe_alone["router_sums"], every_layer["router_sums"])
    assert every_layer["router_agreement"].values().min() == 0.75  # one of two experts in one of two layers


def emptied(field, left_out):
    """Empties the rows of the trajectories left out, as upstream/agent_loop.py does."""
    rows = [row[:0] if gone else row for row, gone in zip(field.unbind(), left_out, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("left_out", [(1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_rest_of_a_batch_is_compared_as_if_it_were_alone(family, left_out):
    case, engine = Case(family, planted=[(0, 1, 2), (2, 0, 1)]), Engine(family)
    attached(engine)
    data = micro_batch(case, calculate_entropy=True)
    kept = [row for row, gone in enumerate(left_out) if not gone]
    whole = compute_log_prob(engine, data)
    alone = compute_log_prob(engine, tu.index_select_tensor_dict(data, kept)) if kept else None
    data[ROLLOUT_ROUTES] = emptied(data[ROLLOUT_ROUTES], left_out)
    found = compute_log_prob(engine, data)
    assert torch.equal(found["router_sums"][kept], whole["router_sums"][kept])
    rest = RouterSums.unpack(found["router_sums"][[row for row, gone in enumerate(left_out) if gone]])
    assert rest.left_out.flatten().tolist() == [LENGTHS[row][1] for row, gone in enumerate(left_out) if gone]
    assert not any(values.any() for name, values in vars(rest).items() if name != "left_out")
    for row, (ours, of_all) in enumerate(
        zip(found["router_agreement"].unbind(), whole["router_agreement"].unbind(), strict=True)
    ):
        assert ours.isnan().all() if left_out[row] else torch.equal(ours, of_all)
    metrics = router_metrics(found["router_sums"])
    assert metrics.pop("router/sampled") == len(kept) / 4
    metrics.pop("router/agreement/error", None)
    assert metrics == pytest.approx(router_metrics(alone["router_sums"]) if kept else {}, rel=1e-5)


def test_a_row_that_verl_has_added_is_neither_compared_nor_left_out():
    """The routing of such a row is zeros of the row's own length."""
    case, engine = Case(), Engine()
    attached(engine)
    data = micro_batch(case, calculate_entropy=True)
    routes, masks = list(data[ROLLOUT_ROUTES].unbind()), list(data["response_mask"].unbind())
    routes[0], routes[3], masks[3] = routes[0][:0], 0 * routes[3], 0 * masks[3]
    for name, rows in ((ROLLOUT_ROUTES, routes), ("response_mask", masks)):
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = compute_log_prob(engine, data)
    sums = RouterSums.unpack(found["router_sums"])
    assert sums.left_out.flatten().tolist() == [LENGTHS[0][1], 0, 0, 0] and not sums.unknown.any()
    assert sums.tokens.flatten().tolist() == [0, LENGTHS[1][1], LENGTHS[2][1], 0]
    assert router_metrics(found["router_sums"])["router/sampled"] == 2 / 3


def test_routing_that_came_for_a_part_of_a_trajectory_is_an_error():
    engine = Engine()
    attached(engine)
    data = micro_batch(Case(), calculate_entropy=True)
    rows = [row[:1] if index == 1 else row for index, row in enumerate(data[ROLLOUT_ROUTES].unbind())]
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(HookError, match="the training engine has 23 tokens"):
        compute_log_prob(engine, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: torch.cat([routes, routes], 1), r"6, 2\) \[tokens, layers, top_k\].*3 decoder layers.*top-2"),
        (lambda routes: routes[..., :1], r"3, 1\).*top-2.*router_agreement=false"),
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


REFUSED = {(0, 0): [EXPERTS, 1], (1, 2): [3, 3], (3, 3): [0, 0]}
"""(trajectory, response token) -> what the rollout has there in layer 1."""


def refused_batch(mode, **settings):
    """Builds a batch whose rollout has other experts than the model in every row, and impossible ones in some rows."""
    routes = [(rows + 1) % EXPERTS for rows in rollout_routes(Case())]
    for rows in routes:
        rows[-1] = 0  # not returned
    for (trajectory, token), ids in REFUSED.items():
        routes[trajectory][LENGTHS[trajectory][0] + token - 1, 1] = torch.tensor(ids)
    data = micro_batch(Case(mode=mode), **settings)
    del data[ROUTE_SUM]  # as if the engine had captured what follows
    data[ROLLOUT_ROUTES] = torch.nested.as_nested_tensor([rows.to(torch.uint8) for rows in routes], layout=torch.jagged)
    return data


@pytest.mark.parametrize("mode", ["disabled", "R3"])
def test_refused_routing_is_counted_and_not_compared(mode):
    engine = Engine(mode=mode)
    attached(engine)
    found = compute_log_prob(engine, refused_batch(mode, calculate_entropy=True))
    sums = RouterSums.unpack(found["router_sums"])
    assert sums.refused.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert sums.tokens.flatten().tolist() == [2, 4, 1, 3] and not sums.unknown.any()
    agreement = found["router_agreement"].unbind()
    assert all(agreement[trajectory][token] == 1 for trajectory, token in REFUSED)
    assert (found["router_agreement"].values().sum() == sum(response for _, response in LENGTHS)) == (mode == "R3")


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_token_whose_routing_is_refused_routes_itself(forward_only):
    engine = Engine(mode="R3")
    routing = attached(engine)
    passes = []
    routing._compare = lambda now, *rest: passes.append(now) or {}
    data = refused_batch("R3", calculate_entropy=forward_only)
    engine.forward_step(data, loss_function=None, forward_only=forward_only)
    now = passes[0] if forward_only else routing.current
    rollout = data[ROLLOUT_ROUTES].values()
    starts = data["input_ids"].offsets()
    itself = torch.zeros(len(rollout), dtype=torch.bool)
    itself[starts[1:] - 1] = True
    for trajectory, token in REFUSED:
        itself[starts[trajectory] + LENGTHS[trajectory][0] + token - 1] = True
    own, used = now.packed(now.own), now.packed(now.used)
    assert torch.equal(used[itself], own[itself]) and torch.equal(used[~itself], rollout[~itself])
    assert not (own[~itself] == rollout[~itself]).all((1, 2)).any()


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
