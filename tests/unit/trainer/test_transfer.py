"""Which fields of a batch a stage is sent."""

import torch
from transfer_queue import KVBatchMeta

from tests.support.store import Store
from verl_ext.trainer.transfer import with_numbers, without_heavy

COLUMNS = {"uid": "a", "raw_prompt": [{"role": "user"}], "extra_fields": {}}
NUMBERS = {"input_ids": torch.ones(1, 3), "routed_experts": torch.ones(1, 3, 2, 2)}
STORED = {**COLUMNS, **NUMBERS, "multi_modal_inputs": {"pixel_values": torch.ones(1)}}


def batch(fields):
    return KVBatchMeta(keys=["a_0_0"], tags=[{}], partition_id="train", fields=fields, extra_info={"temperature": 1})


def test_columns_of_the_dataset_are_not_sent_and_images_are(monkeypatch):
    Store(**STORED).install(monkeypatch)
    for fields in (None, list(STORED)):  # None: all of them, as the replay buffer leaves it
        whole = batch(fields)
        sent = with_numbers(whole)
        assert set(sent.fields) == {*NUMBERS, "multi_modal_inputs"}
        assert whole.fields == fields
        assert (sent.keys, sent.tags, sent.extra_info) == (whole.keys, whole.tags, whole.extra_info)


def test_of_some_fields_no_others_are_sent(monkeypatch):
    Store(**STORED).install(monkeypatch)
    assert with_numbers(batch(["uid", "input_ids", "written_since"])).fields == ["input_ids", "written_since"]
    assert with_numbers(without_heavy(batch(["uid", "input_ids", "routed_experts"]))).fields == ["input_ids"]
    assert without_heavy(batch(None)).fields is None
