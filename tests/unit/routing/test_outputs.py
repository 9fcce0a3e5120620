"""Packed tokens go out to a pass's rows and come back; a planted disagreement is found where it was planted."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.micro_batches import nested
from tests.support.route_sum import route_sum
from verl_ext.base.errors import BatchError, HookError
from verl_ext.core.routing import RouterSums
from verl_ext.routing.outputs import RowLayout, check_captured, drop_refused, packed_rows, routing_outputs
from verl_ext.workers.actor import SharingTrainingWorker

LAYERS, TOP_K = 3, 4
LENGTHS = [(4, 3), (2, 5), (1, 1), (3, 0)]  # prompt and response length of each trajectory
TOKENS = sum(prompt + response for prompt, response in LENGTHS)


def batch(masks=None):
    fields = {
        "input_ids": nested([torch.zeros(sum(pair), dtype=torch.long) for pair in LENGTHS]),
        "response_mask": nested(masks or [torch.ones(response, dtype=torch.long) for _, response in LENGTHS]),
    }
    return TensorDict(fields, batch_size=len(LENGTHS))


def row_of(trajectory, token):
    """Returns the row of the pass over the token before response token `token`, by counting."""
    return sum(sum(pair) for pair in LENGTHS[:trajectory]) + LENGTHS[trajectory][0] + token - 1


def full():
    return torch.full((TOKENS, LAYERS), TOP_K, dtype=torch.uint8), torch.ones(TOKENS, dtype=torch.bool)


def outputs(overlap, known, data=None, **more):
    found = routing_outputs(overlap, TOP_K, known, data if data is not None else batch(), **more)
    return found["router_agreement"], RouterSums.unpack(found["router_sums"])


def test_packed_rows_by_hand():
    # Sequences of 5, 2, 3 and 4 tokens with responses of 2, 0, 1 and 3.
    rows = packed_rows(torch.tensor([5, 2, 3, 4]), torch.tensor([2, 0, 1, 3]))
    assert rows.tolist() == [2, 3, 8, 10, 11, 12]


def test_packed_rows_of_nothing():
    none = torch.zeros(0, dtype=torch.long)
    assert packed_rows(none, none).tolist() == []
    assert packed_rows(torch.tensor([3]), torch.tensor([0])).tolist() == []


@pytest.mark.parametrize(("trajectory", "token"), [(0, 0), (0, 2), (1, 0), (1, 4), (2, 0)])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_planted_disagreement_is_found_at_its_token_and_layer(trajectory, token, layer):
    overlap, known = full()
    overlap[row_of(trajectory, token), layer] = 1
    agreement, sums = outputs(overlap, known)

    expected = [torch.ones(response) for _, response in LENGTHS]
    expected[trajectory][token] = 1 - (TOP_K - 1) / TOP_K / LAYERS
    torch.testing.assert_close(agreement.values(), torch.cat(expected))
    lost = torch.zeros(len(LENGTHS), LAYERS)
    lost[trajectory, layer] = 1
    counts = torch.tensor([[float(response)] for _, response in LENGTHS])
    assert sums.agree.tolist() == (counts - lost * (TOP_K - 1) / TOP_K).tolist()
    assert sums.exact.tolist() == (counts - lost).tolist()
    assert sums.first.tolist() == lost.tolist()


def test_rows_of_the_prompt_and_of_the_last_token_do_not_count():
    overlap, known = full()
    kept = {row_of(i, j) for i, (_, response) in enumerate(LENGTHS) for j in range(response)}
    others = [row for row in range(TOKENS) if row not in kept]
    overlap[others], known[others] = 0, False
    agreement, sums = outputs(overlap, known)
    assert agreement.values().tolist() == [1.0] * len(kept)
    assert sums.tokens.sum() == len(kept) and sums.unknown.sum() == 0


def test_tool_tokens_do_not_count_but_keep_their_agreement():
    masks = [torch.ones(response, dtype=torch.long) for _, response in LENGTHS]
    masks[1][1:3] = 0
    overlap, known = full()
    overlap[row_of(1, 2), 0] = 0
    agreement, sums = outputs(overlap, known, batch(masks))
    assert sums.tokens.flatten().tolist() == [3, 3, 1, 0]
    assert sums.agree[1].tolist() == sums.exact[1].tolist() == [3.0] * LAYERS
    assert agreement.unbind()[1][2] == pytest.approx(1 - 1 / LAYERS)


def test_margin_and_own_are_taken_at_the_same_rows():
    overlap, known = full()
    overlap[row_of(0, 1), 1] = 3
    own = torch.zeros_like(overlap)
    own[row_of(0, 1), 2] = TOP_K
    margin = torch.zeros(TOKENS, LAYERS)
    margin[row_of(0, 1)] = torch.tensor([0.5, 0.25, 2.0])
    _, sums = outputs(overlap, known, margin_TL=margin, own_TL=own)
    assert sums.own[0].tolist() == [0, 0, 1]
    assert sums.margin_equal[0].item() == 2.5 and sums.margin_differs[0].item() == 0.25


def test_refused_rows_count_by_their_reason_and_as_agreeing():
    overlap, known = full()
    refused = torch.zeros(TOKENS, dtype=torch.uint8)
    for row, reason in ((row_of(1, 3), 2), (row_of(1, 4), 1), (row_of(0, 0), 3), (row_of(0, 0) - 1, 3)):
        overlap[row], known[row], refused[row] = 0, False, reason
    known[row_of(2, 0)] = False
    agreement, sums = outputs(overlap, known, refused_T=refused)
    assert agreement.values().tolist() == [1.0] * 9
    assert sums.refused.tolist() == [[0, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert sums.unknown.flatten().tolist() == [0, 0, 1, 0]
    assert sums.tokens.flatten().tolist() == [2, 3, 0, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_what_is_refused_is_made_zeros_in_a_copy(dtype):
    routes = torch.tensor([[[1, 2]], [[3, 3]], [[0, 0]], [[4, 9]]], dtype=dtype)
    given = routes.clone()
    found, refused = drop_refused(routes, 8, torch.tensor([0, 1, 4]))
    assert found.tolist() == [[[1, 2]], [[0, 0]], [[0, 0]], [[0, 0]]] and refused.tolist() == [0, 2, 0, 1]
    assert torch.equal(routes, given)
    assert (
        drop_refused(routes[:1], 8, torch.tensor([0, 1]))[0].data_ptr() == routes.data_ptr()
    )  # nothing refused: no copy


@pytest.mark.parametrize("name", ["overlap_TL", "known_T", "margin_TL", "refused_T"])
def test_another_number_of_rows_is_an_error_that_names_the_tensor(name):
    overlap, known = full()
    given = {"overlap_TL": overlap, "known_T": known, "margin_TL": overlap.float(), "refused_T": known.byte()}
    given[name] = given[name][:-1]
    with pytest.raises(ValueError, match=rf"{name} has {TOKENS - 1} rows .* {TOKENS} tokens"):
        routing_outputs(given.pop("overlap_TL"), TOP_K, given.pop("known_T"), batch(), **given)


def test_the_result_pads_to_its_longest_response():
    overlap, known = full()
    agreement, _ = outputs(overlap, known)
    assert agreement.to_padded_tensor(0.0).shape == (len(LENGTHS), 5)


CPU = torch.device("cpu")


def layout(lengths, packed):
    rows = [torch.zeros(length, dtype=torch.long) for length in lengths]
    data = TensorDict({"input_ids": nested(rows)}, batch_size=len(rows))
    tu.assign_non_tensor_data(data, "use_remove_padding", packed)
    return RowLayout.from_batch(data, CPU)


def test_padded_tokens_are_spread_by_hand():
    spread = layout([3, 1], packed=False).spread(torch.tensor([1, 2, 3, 4]), 6)
    assert spread.tolist() == [1, 2, 3, 4, 0, 0]


def test_packed_tokens_are_spread_by_hand():
    spread = layout([3, 1], packed=True).spread(torch.tensor([1, 2, 3, 4]), 6)
    assert spread.tolist() == [1, 2, 3, 4, 0, 0]  # verl pads at the end


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 5))
def test_what_is_spread_is_collected_again(lengths, packed, padding):
    found = layout(lengths, packed)
    values = torch.arange(found.tokens * 6).view(-1, 3, 2)
    rows = found.tokens + padding if packed else len(lengths) * max(lengths)
    spread = found.spread(values, rows)
    assert len(spread) == rows
    assert spread.flatten(1).any(1).sum() == found.tokens
    assert torch.equal(found.collect(spread), values)


@pytest.mark.parametrize(("packed", "rows"), [(True, 3), (False, 5), (False, 7)])
def test_rows_that_do_not_hold_the_tokens_are_an_error_with_the_remedy(packed, rows):
    found = layout([3, 1], packed)
    for call in (lambda: found.collect(torch.zeros(rows)), lambda: found.spread(torch.zeros(4), rows)):
        with pytest.raises(HookError, match=rf"saw {rows} tokens .* 1 rank\(s\).*router_replay.*unset them"):
            call()


def captured(change=lambda rows: rows, total=route_sum, generated=1):
    """A batch whose second trajectory is changed after it got its checksum."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 99, (n,), generator=generator) for n in (5, 6, 4)]
    routes = [torch.randint(0, 9, (len(each), LAYERS, TOP_K), generator=generator) for each in ids]
    sums = [torch.tensor([total(rows, tokens)]) for rows, tokens in zip(routes, ids, strict=True)]
    routes[1] = change(routes[1])
    masks = [torch.full((2,), generated) for _ in ids]
    fields = {"input_ids": ids, "routed_experts": routes, "response_mask": masks, "routed_experts_sum": sums}
    return TensorDict({name: nested(rows) for name, rows in fields.items()}, batch_size=3), ids[1].tolist()


@pytest.mark.parametrize("change", [lambda rows: rows.roll(1, 0), lambda rows: rows.roll(1, 1), lambda rows: rows + 1])
def test_routes_that_are_not_what_was_captured_are_an_error_that_names_the_trajectory(change):
    data, ids = captured(change)
    with pytest.raises(
        BatchError, match=f"of the trajectory of 6 tokens that begins with {re.escape(str(ids))} is not"
    ):
        check_captured(data)
    check_captured(captured(change, total=lambda rows, tokens: 0)[0])  # no checksum came
    check_captured(captured(change, generated=0)[0])  # a copy that verl has cut, to fill the batch
    check_captured(data.exclude("routed_experts_sum"))


def test_routes_that_were_captured_or_left_out_are_no_error():
    check_captured(captured()[0])
    check_captured(captured(lambda rows: rows[:0])[0])
    check_captured(captured(lambda rows: rows.byte().long())[0])


@pytest.mark.parametrize(
    ("strategy", "mode", "checked"),
    [("megatron", "R3", True), ("megatron", "R2", False), ("veomni", "R3", False), ("fsdp2", "R3", False)],
)
def test_a_worker_checks_the_routes_that_verl_replays(strategy, mode, checked):
    """The field has the engine's own routes with R2; where we replay, each micro-batch is checked."""
    worker = object.__new__(SharingTrainingWorker)
    worker.engine_config = SimpleNamespace(strategy=strategy, router_replay=SimpleNamespace(mode=mode))
    data, _ = captured(lambda rows: rows.roll(1, 0))
    with pytest.raises(BatchError, match="is not what its rollout captured") if checked else nullcontext():
        worker.check_replayed(data)
