"""Which fields of a batch a stage is sent."""

import torch
from transfer_queue import KVBatchMeta

from tests.support.store import Store
from verl_ext.trainer.queue import schema_of, without, without_heavy

STORED = {"uid": "a", "multi_modal_inputs": {}, "input_ids": torch.ones(1, 3), "routed_experts": torch.ones(1, 3, 2, 2)}


def batch(fields):
    return KVBatchMeta(keys=["a_0_0"], tags=[{}], partition_id="train", fields=fields, extra_info={"temperature": 1})


def test_which_fields_are_numbers_is_asked_without_reading_one(monkeypatch):
    store = Store(**STORED).install(monkeypatch)
    numbers = {"uid": False, "multi_modal_inputs": False, "input_ids": True, "routed_experts": True}
    for fields in (None, ["uid"]):
        schema = schema_of(batch(fields))
        assert {name: not of["is_non_tensor"] for name, of in schema.items()} == numbers
        assert schema["routed_experts"]["dtype"] == torch.float32
    assert store.read == []


def test_a_copy_is_left_without_fields(monkeypatch):
    whole = batch(["uid", "input_ids", "routed_experts"])
    sent = without(whole, {"uid", "of no batch"})
    assert sent.fields == ["input_ids", "routed_experts"] and whole.fields == ["uid", "input_ids", "routed_experts"]
    assert (sent.keys, sent.tags, sent.extra_info) == (whole.keys, whole.tags, whole.extra_info)
    assert without_heavy(whole).fields == ["uid", "input_ids"]
    assert without_heavy(whole, {"routed_experts"}).fields == whole.fields
    assert without(batch(None), {"uid"}).fields is None  # all of them, whatever they are
