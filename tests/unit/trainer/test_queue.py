"""A batch in blocks has the same result as whole, and is never in memory at once; the fields that a stage is sent."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from tests.support.examples import at_most
from tests.support.store import Store, made_batch
from verl_ext.core.measure import gather, measure, put_together
from verl_ext.core.mismatch import sums_by_sign
from verl_ext.core.tokens import Tokens
from verl_ext.trainer import batch as batches
from verl_ext.trainer import queue
from verl_ext.trainer.batch import QueueBatch, parts_of
from verl_ext.trainer.queue import drop_fields, drop_heavy_fields, row_multiple, schema_of

CORRECTIONS = {"icepop": {"alpha": 0.5, "beta": 2.0}, "geo_mask": {"low": 0.5, "high": 2.0}}


def made(lengths, group, seed):
    """Returns a made-up batch in blocks, and all its tokens one after another."""
    batch, store = made_batch(lengths, group, seed, added={1})
    first = next(iter(store.rows.values()))
    whole = {name: torch.cat([one[name] for one in store.rows.values()]) for name in first}
    offsets = torch.tensor([0, *(tag["response_len"] for tag in batch.tags)]).cumsum(0)
    tokens = Tokens(
        whole["rollout_log_probs"],
        whole["old_log_probs"],
        whole["response_mask"].bool(),
        offsets,
        whole["entropy"],
        whole["router_agreement"],
    )
    return batch, store, tokens, whole


@at_most(60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=14),
    group=st.integers(1, 4),
    at_once=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_in_blocks_as_whole(lengths, group, at_once, seed):
    batch, store, tokens, whole = made(lengths, group, seed)
    if not tokens.mask.any():
        return
    lengths_of = tokens.offsets.diff().tolist()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches, "BLOCK_TOKENS", at_once)
        patched.setattr(queue, "tq", store)
        blocks = QueueBatch(batch)
        blocks.start(["router_sums"])
        assert blocks.numbers("router_sums") is None, "which this batch does not have"
        wanted, gathered = measure(tokens, CORRECTIONS), []
        for block, found in blocks.blocks(by_sign=True):
            weight, part = gather(found, CORRECTIONS)
            gathered.append(part)
            blocks.put(block, {"rollout_is_weights": weight})
        found = put_together(gathered, CORRECTIONS)
        assert (found.tokens, found.kept, found.non_finite) == (wanted.tokens, wanted.kept, wanted.non_finite)
        assert sum(part.non_finite for part in gathered) == wanted.non_finite
        assert found.metrics.keys() == wanted.metrics.keys()
        for name, value in wanted.metrics.items():
            # k is added up in float32, block by block; a correlation is what is left of two sums of squares.
            assert found.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        for mine, theirs in zip(blocks.log_k_sums(), tokens.log_k_sums(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
        scores = [float(one["rm_scores"].double().sum()) for one in store.rows.values()]
        real = [score for place, score in enumerate(scores) if place != 1]
        keys, found_scores = blocks.scores()
        assert found_scores.tolist() == pytest.approx(real, rel=1e-6) and blocks.added == {1}
        assert keys == [key for place, key in enumerate(store.rows) if place != 1]
        largest = max(sum(n for row, n in enumerate(lengths) if row // group == one) for one in range(len(lengths)))
        assert blocks.is_one_block or store.most <= max(at_once, largest)
        slow_cases = [len(lengths) - 1, 0]
        picked, weight = blocks.tokens_of(slow_cases)
        last, first = (slice(*tokens.offsets[row : row + 2].tolist()) for row in slow_cases)
        assert picked.offsets.diff().tolist() == [lengths_of[row] for row in slow_cases]
        assert torch.equal(picked.l_infer, torch.cat([tokens.l_infer[last], tokens.l_infer[first]]))
        assert torch.equal(weight, torch.cat([wanted.weight[last], wanted.weight[first]]))
        by_sign = sums_by_sign(tokens, whole["advantages"])
        torch.testing.assert_close(blocks.sums_by_sign(), by_sign, rtol=1e-9, atol=1e-12)
        assert blocks.write(batch) is batch or blocks.is_one_block
        assert torch.equal(torch.cat([one["rollout_is_weights"] for one in store.rows.values()]), wanted.weight)


def test_a_prompts_trajectories_are_never_divided(monkeypatch):
    monkeypatch.setattr(batches, "BLOCK_TOKENS", 10)
    batch, *_ = made([4, 4, 4, 4, 4, 4, 1, 1], 2, 0)
    parts = parts_of(batch)
    prompts = [{batch.keys[row].split("_")[0] for row in part.rows} for part in parts]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == 4 and len(parts) == 3
    assert sorted(row for part in parts for row in part.rows) == list(range(8))
    assert all(part.batch.keys == [batch.keys[row] for row in part.rows] for part in parts)


def test_lengths_that_nobody_tells_make_one_block(monkeypatch):
    monkeypatch.setattr(batches, "BLOCK_TOKENS", 1)
    batch = KVBatchMeta(keys=["a_0_0", "b_0_0"], tags=[{}, {}], partition_id="train")
    assert [part.rows for part in parts_of(batch)] == [[0, 1]]


@pytest.mark.parametrize(("stages", "virtual", "multiple"), [(4, 2, 8), (4, None, 2), (1, None, 2)])
def test_rows_divide_among_the_ranks_and_the_passes_of_an_interleaved_pipeline(stages, virtual, multiple):
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": "megatron", "megatron": sizes}}})
    assert row_multiple(SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]}), config) == multiple


STORED = {"uid": "a", "multi_modal_inputs": {}, "input_ids": torch.ones(1, 3), "routed_experts": torch.ones(1, 3, 2, 2)}


def meta(fields):
    return KVBatchMeta(keys=["a_0_0"], tags=[{}], partition_id="train", fields=fields, extra_info={"temperature": 1})


def test_which_fields_are_numbers_is_asked_without_reading_one(monkeypatch):
    store = Store(**STORED).install(monkeypatch)
    numbers = {"uid": False, "multi_modal_inputs": False, "input_ids": True, "routed_experts": True}
    for fields in (None, ["uid"]):
        schema = schema_of(meta(fields))
        assert {name: not of["is_non_tensor"] for name, of in schema.items()} == numbers
        assert schema["routed_experts"]["dtype"] == torch.float32
    assert store.read == []


def test_a_copy_is_left_without_fields(monkeypatch):
    whole = meta(["uid", "input_ids", "routed_experts"])
    sent = drop_fields(whole, {"uid", "of no batch"})
    assert sent.fields == ["input_ids", "routed_experts"] and whole.fields == ["uid", "input_ids", "routed_experts"]
    assert (sent.keys, sent.tags, sent.extra_info) == (whole.keys, whole.tags, whole.extra_info)
    assert drop_heavy_fields(whole).fields == ["uid", "input_ids"]
    assert drop_heavy_fields(whole, {"routed_experts"}).fields == whole.fields
    assert drop_fields(meta(None), {"uid"}).fields is None  # all of them, whatever they are
