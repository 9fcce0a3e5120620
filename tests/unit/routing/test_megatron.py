"""The adapter for engines that record: the user's settings, and the routes that come back."""

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.controller import FieldMeta
from verl.utils import tensordict_utils as tu

from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    MOE,
    as_rollout,
    batch,
    check_planted,
    nested,
    plant,
    some_routes,
    worker_config,
)
from verl_ext.base.errors import HookError
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.routing import RouterSums
from verl_ext.routing.megatron import RecordedRouting, Recorders, compare_recorded


@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_the_engine_is_built_to_record_and_the_users_setting_stays(mode):
    config = worker_config(mode, param_offload=True)
    built = RecordedRouting(config).config
    assert built.engine_config.router_replay.mode == "R2" and built.engine_config.param_offload
    assert config.engine_config.router_replay.mode == mode


# --- what the adapter asks of verl's infer_batch and makes of its output


class Verl:
    """TrainingWorker.infer_batch on an engine built with R2, as far as routing goes.

    verl 0.9.1, workers/engine_workers.py:413 pops `no_lora_adapter`, :436 returns None but on one rank of a replica;
    workers/engine/megatron/transformer_impl.py:923 records if the flag is set and the batch has no routed_experts,
    and :954 replays what it has otherwise.
    """

    def __init__(self, routes, collects=True):
        self.routes, self.collects = routes, collects
        self.replayed = None

    def __call__(self, data):
        tu.pop(data, key="no_lora_adapter", default=False)
        present = data.get("routed_experts", None)
        self.replayed = None
        output = {"log_probs": nested([torch.zeros(sum(pair)) for pair in LENGTHS])}
        if tu.get_non_tensor_data(data, "enable_routing_replay", default=False):
            if present is None:
                output["routed_experts"] = nested(self.routes)
            else:
                self.replayed = present
        return TensorDict(output, batch_size=len(LENGTHS)) if self.collects else None


def adapter(mode):
    routing = RecordedRouting(worker_config(mode))
    routing.recorders = Recorders("TopKRouter", MOE, LAYERS, EXPERTS)
    routing.load = ExpertLoad(len(MOE), EXPERTS)
    return routing


def accepted_by_transferqueue(first, second):
    """Does what the controller does when a worker writes to a field that is there; it logs a refusal and continues."""
    schemas = [
        {
            "dtype": field.dtype,
            "is_nested": True,
            "per_sample_shapes": dict(enumerate(row.shape for row in field.unbind())),
        }
        for field in (first, second)
    ]
    rows = [*range(len(LENGTHS))]
    FieldMeta(set(rows), **schemas[0]).update(schemas[1], rows)


@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_each_mode_compares_and_only_r2_returns_the_routes(mode):
    routes = some_routes()
    rollout = plant(as_rollout(routes), 1, 3, MOE[2])
    flag = {"enable_routing_replay": True} if mode == "R2" else {}  # sent by verl's worker, or not
    data = batch(routed=rollout, **flag)
    verl = Verl(routes)
    output = adapter(mode).compute(verl, data)
    check_planted(output, 1, 3, 2)
    assert verl.replayed is None
    assert ("routed_experts" in output.keys()) == (mode == "R2")  # noqa: SIM118 (a TensorDict)
    if mode == "R2":
        written = output["routed_experts"]
        assert all(torch.equal(*pair) for pair in zip(written.to(torch.int16).unbind(), routes, strict=True))
        accepted_by_transferqueue(data["routed_experts"], written)
    assert torch.equal(data["routed_experts"].values(), nested(rollout).values())
    assert tu.get_non_tensor_data(data, "enable_routing_replay", default=False) == (mode == "R2")


def test_r2_never_writes_ids_that_the_rollouts_dtype_cannot_hold():
    routing, rollout = adapter("R2"), as_rollout(some_routes())
    routing.recorders = Recorders("TopKRouter", MOE, LAYERS, 257)
    verl = Verl(some_routes())
    with pytest.raises(HookError, match=r"uint8, which cannot hold the ids of the 257 experts.*router_agreement=false"):
        routing.compute(verl, batch(routed=rollout, enable_routing_replay=True))
    output = routing.compute(verl, batch(routed=[rows.to(torch.int16) for rows in rollout], enable_routing_replay=True))
    assert output["routed_experts"].dtype == torch.int16


@pytest.mark.parametrize("mode", ["disabled", "R2"])
@pytest.mark.parametrize("kept", [True, False])
def test_the_reference_of_a_lora_never_returns_routes(mode, kept):
    """The batch already holds the actor's own routes under R2, unless a trainer left them out."""
    routes = some_routes()
    flag = {"enable_routing_replay": True} if mode == "R2" else {}
    data = batch(routed=routes if kept else None, no_lora_adapter=True, **flag)
    verl = Verl(routes)
    output = adapter(mode).compute(verl, data)
    assert set(output.keys()) == {"log_probs"}
    assert (verl.replayed is not None) == (mode == "R2" and kept)


@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_a_pass_with_other_weights_neither_replays_nor_writes_routes(mode):
    """Rescoring runs before the pass for old_log_probs, which still has to compare the rollout's."""
    flag = {"enable_routing_replay": True} if mode == "R2" else {}
    verl = Verl(some_routes())
    data = batch(routed=as_rollout(some_routes()), calculate_entropy=False, **flag)
    assert set(adapter(mode).compute(verl, data).keys()) == {"log_probs"}
    assert verl.replayed is None


@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_a_batch_without_the_rollouts_routing_goes_to_verl_as_it_is(mode):
    flag = {"enable_routing_replay": True} if mode == "R2" else {}
    output = adapter(mode).compute(Verl(some_routes()), batch(**flag))
    assert "router_sums" not in output.keys()  # noqa: SIM118 (a TensorDict)
    assert ("routed_experts" in output.keys()) == (mode == "R2")  # noqa: SIM118 (a TensorDict)


@pytest.mark.parametrize("lora", [True, False])
def test_a_rank_without_outputs_returns_none(lora):
    data = batch(routed=as_rollout(some_routes()), no_lora_adapter=lora)
    assert adapter("disabled").compute(Verl(some_routes(), collects=False), data) is None


def test_an_engine_that_records_nothing_is_an_error():
    with pytest.raises(HookError, match=r"compute_log_prob returned no routed_experts"):
        adapter("disabled").compute(
            lambda data: TensorDict({}, batch_size=len(LENGTHS)), batch(routed=as_rollout(some_routes()))
        )


# --- layers, tokens, experts


def compared(routes, rollout, recorders=None, **settings):
    recorders = recorders or Recorders("TopKRouter", MOE, LAYERS, EXPERTS)
    return compare_recorded(nested(routes), nested(rollout), recorders, batch(), **settings)


def test_a_rollout_that_ships_moe_layers_alone_is_compared_as_it_is():
    routes = some_routes()
    rollout = plant(as_rollout(routes, range(3), 3), 3, 0, 1)
    check_planted(compared(routes, rollout), 3, 0, 1)


def test_tool_tokens_and_unknown_rows_are_not_compared():
    routes = some_routes()
    rollout = as_rollout(routes)
    rollout[1][LENGTHS[1][0] + 2 - 1] = 0  # response token 2: the rollout lost it
    data = batch()
    masks = [torch.ones(response, dtype=torch.long) for _, response in LENGTHS]
    masks[0][1] = 0
    data["response_mask"] = nested(masks)
    found = compare_recorded(nested(routes), nested(rollout), Recorders("TopKRouter", MOE, LAYERS, EXPERTS), data)
    sums = RouterSums.unpack(found["router_sums"])
    assert sums.tokens.flatten().tolist() == [2, 4, 1, 4] and sums.unknown.flatten().tolist() == [0, 1, 0, 0]
    assert sums.exact.tolist() == [[n] * 3 for n in (2, 4, 1, 4)]
    assert found["router_agreement"].values().tolist() == [1.0] * sum(response for _, response in LENGTHS)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (lambda routes: as_rollout(routes, MOE, 5), r"\(23, 5, 2\).*\(23, 3, 2\).*4 decoder layers, 3 of them"),
        (lambda routes: [rows[..., :1] for rows in as_rollout(routes)], r"\(23, 4, 1\).*\(23, 3, 2\)"),
        (lambda routes: [rows[1:] for rows in as_rollout(routes)], r"\(19, 4, 2\).*there are 23 tokens"),
        (lambda routes: as_rollout(routes, [0, 1, 2]), r"experts in decoder layers \[0\].*none in \[3\]"),
        (lambda routes: as_rollout([r[:, :2] for r in routes], [1, 2]), r"decoder layers \[\].*none in \[3\]"),
    ],
)
def test_routing_of_another_model_is_an_error_with_the_remedy(rollout, message):
    routes = some_routes()
    with pytest.raises(HookError, match=f"{message}.*set stability.router_agreement=false"):
        compared(routes, rollout(routes))


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_refused_rows_are_counted_by_their_reason_and_not_compared(block):
    routes = some_routes()
    rollout = as_rollout(routes)
    rollout[1][LENGTHS[1][0] + 2 - 1, MOE[1]] = 5  # response token 2
    rollout[3][LENGTHS[3][0] + 0 - 1, MOE[0]] = torch.tensor([1, EXPERTS], dtype=torch.uint8)
    found = compared(routes, rollout, block=block)
    sums = RouterSums.unpack(found["router_sums"])
    assert sums.refused.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert sums.tokens.flatten().tolist() == [3, 4, 1, 3] and not sums.unknown.any()
    assert sums.exact.tolist() == [[n] * 3 for n in (3, 4, 1, 3)]
    assert found["router_agreement"].values().tolist() == [1.0] * sum(response for _, response in LENGTHS)


@pytest.mark.parametrize("left_out", [(1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_the_rest_of_a_batch_is_compared_as_if_it_were_alone(left_out, block):
    routes, recorders = some_routes(), Recorders("TopKRouter", MOE, LAYERS, EXPERTS)
    rollout = plant(plant(as_rollout(routes), 1, 3, MOE[2]), 3, 0, MOE[0])
    rollout[1][LENGTHS[1][0] - 1] = 0  # unknown
    rollout[0][LENGTHS[0][0], MOE[1]] = 5  # refused
    kept = [row for row, gone in enumerate(left_out) if not gone]
    shipped = [rows[:0] if gone else rows for rows, gone in zip(rollout, left_out, strict=True)]
    found = compared(routes, shipped, block=block)
    sums = RouterSums.unpack(found["router_sums"])
    gone, agreement = torch.tensor(left_out).bool(), found["router_agreement"].unbind()
    assert torch.equal(sums.left_out[:, 0], gone * torch.tensor(LENGTHS)[:, 1])
    assert found["router_sums"][gone].sum() == sums.left_out.sum()
    assert all(agreement[row].isnan().all() for row in gone.nonzero()[:, 0])
    if kept:
        alone = compare_recorded(
            nested([routes[row] for row in kept]), nested([rollout[row] for row in kept]), recorders, batch(which=kept)
        )
        assert torch.equal(found["router_sums"][kept], alone["router_sums"])
        assert torch.equal(torch.cat([agreement[row] for row in kept]), alone["router_agreement"].values())


def test_top_1_of_one_expert_is_no_reason_to_refuse():
    routes = [torch.zeros(sum(pair), 1, 1, dtype=torch.int16) for pair in LENGTHS]
    found = compared(routes, routes, Recorders("TopKRouter", [0], 1, EXPERTS))
    assert RouterSums.unpack(found["router_sums"]).unknown.sum() == 13
