"""Tests of rescoring: the trajectories scored again, the weights used, and that the present weights come back."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_ext.core.tokens import jagged
from verl_ext.features.settings import Rescoring
from verl_ext.trainer import queue
from verl_ext.trainer.rescoring import NOW, choose_by_version, fill_rows
from verl_ext.trainer.run import StabilityRun


def tag(low, high, **more):
    return {"min_global_steps": low, "max_global_steps": high, **more}


TAGS = [tag(6, 6), tag(5, 5), tag(4, 5), tag(5, 5), tag(3, 3), tag(5, 5, is_padding=True), tag(4, 4)]


def test_only_what_a_kept_version_ended_is_chosen():
    assert choose_by_version(TAGS, kept=[4, 5], count=9, seed=0) == {5: [1, 2, 3], 4: [6]}
    assert choose_by_version(TAGS, kept=[], count=9, seed=0) == {}


def test_as_many_as_are_asked_for_others_in_other_steps_and_the_same_in_the_same():
    tags = [tag(5, 5)] * 40
    found = [tuple(choose_by_version(tags, [5], 4, seed)[5]) for seed in range(20)]
    assert {len(rows) for rows in found} == {4} and len(set(found)) > 15
    assert found == [tuple(choose_by_version(tags, [5], 4, seed)[5]) for seed in range(20)]


@pytest.mark.parametrize(
    ("rows", "ranks", "sent"),
    [
        ([1, 3], 2, [1, 3]),
        ([1, 3], 4, [1, 3, 0, 2]),
        ([2], 1, [2]),
        ([1, 3, 4], 2, [1, 3, 4, 0]),
        ([0, 1, 2, 3, 4], 4, [0, 1, 2, 3]),
        ([1], 6, []),
    ],
)
def test_others_of_the_batch_make_a_number_that_the_workers_can_divide(rows, ranks, sent):
    assert fill_rows(rows, ranks, size=5) == sent


class Workers:
    """verl's worker group of four ranks: each version gives its own number as the log-probability of every token."""

    def __init__(self, store):
        self.store, self.weights, self.saved, self.called = store, 6, {}, []
        self._dispatch_info = {"actor": [0, 1, 2, 3]}

    def keep_version(self, version, oldest):
        self.called.append(("keep", version, oldest))
        return [[4, 5], [4, 5]]

    def save_model_to_cpu(self, key):
        self.saved[key] = self.weights

    def use_version(self, version):
        self.weights = version

    def restore_model_from_cpu(self, key):
        self.weights = self.saved[key]

    def clear_cpu_model(self, key):
        del self.saved[key]

    def compute_log_prob(self, batch):
        self.called.append((self.weights, batch.keys, batch.extra_info))
        for key in batch.keys:
            self.store[key] = self.weights


@pytest.fixture
def rescored(monkeypatch):
    """rescored(step, settings...) -> the result, and the workers."""
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}})

    def run(step, **settings):
        store = {}

        def get_fields(batch, names):
            values = torch.tensor([float(store[key]) for key in batch.keys]).repeat_interleave(2)
            offsets = torch.arange(0, len(values) + 1, 2)
            return {"response_mask": jagged(torch.ones_like(values), offsets), "log_probs": jagged(values, offsets)}

        monkeypatch.setattr(queue, "get_fields", get_fields)
        monkeypatch.setattr("verl.workers.utils.padding.response_from_nested", lambda values, mask: values)
        keys = [f"k{row}" for row in range(len(TAGS))]
        batch = KVBatchMeta(keys=keys, tags=TAGS, partition_id="train", fields=["a"], extra_info={"temperature": 0.3})
        workers = Workers(store)
        features = SimpleNamespace(config=config, stability=SimpleNamespace(rescoring=Rescoring(**settings)))
        run = SimpleNamespace(features=features, guard=SimpleNamespace(step=step))
        StabilityRun.rescore(run, batch, workers)
        assert batch.extra_info == {"temperature": 0.3}, "the update is sent the same batch"
        return run._rescored, workers

    return run


def test_each_version_scores_its_own_trajectories_and_the_present_weights_come_back(rescored):
    found, workers = rescored(7, every=1, versions=3)
    assert {key: row.tolist() for key, row in found.items()} == {
        **{key: [5, 5] for key in ("k1", "k2", "k3")},
        "k6": [4, 4],
    }
    assert workers.weights == 6 and workers.saved == {}
    assert workers.called[0] == ("keep", 5, 3), "verl's copy, of the start of step 6, is of what step 5 left"
    assert [(weights, len(keys)) for weights, keys, _ in workers.called[1:]] == [(5, 4), (4, 4)]
    asked = {"calculate_entropy": False, "compute_loss": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    assert workers.called[1][2] == {"temperature": 0.7} | asked


def test_versions_are_kept_in_every_step_and_scored_with_in_those_that_are_due(rescored):
    found, workers = rescored(7, every=2)
    assert found == {} and workers.called == [("keep", 5, 5)]
    assert rescored(8, every=2)[0].keys() == {"k1", "k2", "k3", "k6"}
    assert NOW not in workers.saved
