"""Stands in for TransferQueue in this process, as far as the trainer uses it; and verl's use of it around the
advantages."""

from types import SimpleNamespace

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from verl_ext.trainer import queue


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


class Installed:
    def install(self, monkeypatch):
        for module in (queue, trainer_base):
            monkeypatch.setattr(module, "tq", self)
        return self


class Store(Installed):
    """Put and get of a batch's fields.

    Attributes:
        read, written: names, of each call.
    """

    def __init__(self, **fields):
        self.fields, self.read, self.written = fields, [], []

    def kv_batch_get(self, keys, partition_id, select_fields):
        self.read.append(set(select_fields))
        found = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(found, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.written.append(set(fields.keys()))
        self.fields.update(fields.items())
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id, fields=list(self.fields))

    def get_client(self):
        return self

    def kv_retrieve_meta(self, keys, partition_id):
        schema = {
            name: {"dtype": getattr(field, "dtype", None), "is_non_tensor": not isinstance(field, torch.Tensor)}
            for name, field in self.fields.items()
        }
        return SimpleNamespace(field_schema=schema)


VERLS = {"response_mask", "rm_scores"}  # what it reads, of what the tests have


def compute_advantage(batch, advantages, rejected=None):
    """Computes as verl's trainer does: one read, one write. The write includes verl's own rejection, where that is
    on."""
    tq, where = trainer_base.tq, {"keys": batch.keys, "partition_id": batch.partition_id}
    data = tq.kv_batch_get(**where, select_fields=sorted(VERLS))
    assert set(data.keys()) == VERLS
    masks = {} if rejected is None else {"response_mask": rejected}
    tq.kv_batch_put(**where, fields=TensorDict({"advantages": advantages, **masks}, batch_size=len(batch)))


class Rows(Installed):
    """TransferQueue by trajectory.

    Attributes:
        rows: key -> field -> [r], of the partition "train"; `of` has those of any.
        most: tokens whose log-probabilities were read at once.
    """

    def __init__(self, rows):
        self.rows, self.most = rows, 0
        self._partitions = {"train": rows}

    def of(self, partition):
        return self._partitions.setdefault(partition, {})

    def kv_batch_get(self, keys, partition_id, select_fields):
        found = [self.of(partition_id)[key] for key in keys]
        rows = {name: [row[name] for row in found] for name in select_fields if name in found[0]}
        self.most = max(self.most, sum(map(len, rows.get("old_log_probs", []))))
        fields = {name: torch.nested.as_nested_tensor(found, layout=torch.jagged) for name, found in rows.items()}
        return TensorDict(fields, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        for name, field in fields.items():
            for key, row in zip(keys, field.unbind(), strict=True):
                self.of(partition_id).setdefault(key, {})[name] = row
        names = list(fields.keys())
        return KVBatchMeta(keys=keys, tags=tags or [{}] * len(keys), partition_id=partition_id, fields=names)

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.of(partition_id)[key]


def made_batch(lengths, group, seed, *, added=()):
    """A batch of trajectories, `group` to a prompt and shuffled: its meta, and a store of it."""
    dice = torch.Generator().manual_seed(seed)
    names = [f"p{row // group}_{row % group}_0" for row in range(len(lengths))]
    rows = {}
    for row in torch.randperm(len(names), generator=dice).tolist():
        r = lengths[row]
        l_infer = -3 * torch.rand(r, generator=dice)
        l_old = l_infer + 0.4 * torch.randn(r, generator=dice)
        l_old[torch.rand(r, generator=dice) < 0.05] = torch.nan
        mask = (torch.rand(r, generator=dice) < 0.8).long()
        rows[names[row]] = {
            "rollout_log_probs": l_infer,
            "old_log_probs": l_old,
            "response_mask": mask,
            "loss_mask": mask,
            "entropy": torch.rand(r, generator=dice),
            "router_agreement": (4 * torch.rand(r, generator=dice)).round() / 4,
            "rm_scores": torch.nn.functional.pad(torch.randint(0, 2, (1,), generator=dice).float(), (r - 1, 0)),
            # Of most the same on all generated tokens, of every third another on each, of some none.
            "advantages": torch.randn(r if row % 3 == 2 else 1, generator=dice).expand(r) * mask * (row % 5 > 0),
            "prompts": torch.tensor([11, 12]),
            "responses": torch.randint(10, 30, (r,), generator=dice),
        }
    tags = [
        {"response_len": len(one["responses"]), "is_padding": row in added} for row, one in enumerate(rows.values())
    ]
    return KVBatchMeta(keys=list(rows), tags=tags, partition_id="train", fields=["old_log_probs"]), Rows(rows)
