"""A batch that is taken in blocks reaches the update as it would whole."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from recipes.make_assets import build_tokenizer
from tests.support.store import compute_advantage, made_batch
from verl_ext.base.errors import BatchError
from verl_ext.features.settings import TrajectoryDump
from verl_ext.trainer import batch as batch_module
from verl_ext.trainer import trainers
from verl_ext.trainer.trajectories import Dump, TrajectoryLog

LENGTHS = [5, 1, 9, 3, 3, 4, 8, 2, 1, 6, 6, 7]
SETTINGS = {
    "weights": {"correction": ["icepop", "geo_mask"], "geo_mask": {"low": 0.7, "high": 1.4}},
    "filters": {"filters": {"zero_variance": {}, "off_policy_negative": {"delta": 0.01}, "retokenization_drift": {}}},
    "kept": {"correction": "icepop", "denominator": "kept"},
    "tightened": {
        "correction": "icepop",
        "guard": {"rules": {"r": {"signal": "vllm_kl/k3", "above": 1e-6, "action": "tighten"}}},
    },
    "nothing left": {"filters": {"low_probability": {"threshold": 1.0}}},
    "metrics": {"metrics": True},
}


class VerlTrainer:
    def __init__(self, config):
        self.config, self.global_steps, self.tokenizer = config, 7, build_tokenizer()

    def _compute_advantage(self, batch, metrics):
        compute_advantage(batch, self.advantages, self.rejected)
        return batch


class Trainer(trainers.StabilityMixin, VerlTrainer):
    pass


@pytest.fixture
def after(monkeypatch, tmp_path):
    """after(settings, at_once) -> what a batch of LENGTHS becomes: metrics, store, trainer, lines of the dump."""

    def run(settings, at_once, rejects=False, change=lambda row: None, bypass=False):
        monkeypatch.setattr(batch_module, "BLOCK_TOKENS", at_once)
        batch, store = made_batch(LENGTHS, 3, seed=1, added={2})
        for row in store.rows.values():
            row["old_log_probs"].nan_to_num_(-1.0)
            change(row)
        store.install(monkeypatch)
        parts = {
            "actor": {"policy_loss": {"loss_mode": "vanilla"}},
            "rollout": {"response_length": 9},
            "model": {"path": "/no/such/model"},
        }
        config = {"stability": settings, "actor_rollout_ref": parts, "algorithm": {"adv_estimator": "grpo"}}
        config["algorithm"]["rollout_correction"] = {"bypass_mode": bypass}
        trainer = Trainer(OmegaConf.create(config | {"trainer": {"default_local_dir": "/no/such/folder"}}))
        trainer.advantages = torch.nested.as_nested_tensor(
            [row["advantages"] for row in store.rows.values()], layout=torch.jagged
        )
        masks = [row["response_mask"].clone() for row in store.rows.values()]
        for mask, row in zip(masks, store.rows.values(), strict=True):
            mask[(row["old_log_probs"] - row["rollout_log_probs"]).abs().argmax()] = 0  # the worst of each
        trainer.rejected = torch.nested.as_nested_tensor(masks, layout=torch.jagged) if rejects else None
        path, asked = tmp_path / f"{at_once}.jsonl", TrajectoryDump(4)
        trainer.stability_run.dump = Dump(TrajectoryLog(path, asked, resumed=0), asked)
        trainer.stability_run.guard.begin(7)
        metrics = {}
        trainer._compute_advantage(batch, metrics)
        trainer.stability_run.dump.close()
        return metrics, store, trainer, [json.loads(line) for line in path.read_text().splitlines()]

    return run


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_in_blocks_as_whole(after, name, rejects):
    metrics, store, trainer, lines = after(SETTINGS[name], 1000, rejects)
    in_parts, parts, other, other_lines = after(SETTINGS[name], 16, rejects)
    assert store.most == sum(LENGTHS) and parts.most <= sum(sorted(LENGTHS)[-4:]), "the dump's four are the most"
    assert in_parts == pytest.approx(metrics, rel=1e-5, abs=1e-7) and len(metrics) > 10
    written = {"rollout_is_weights", "response_mask", "loss_mask"}
    for key, row in store.rows.items():
        assert row.keys() == parts.rows[key].keys()
        for field in written & row.keys():
            torch.testing.assert_close(row[field], parts.rows[key][field], rtol=1e-6, atol=0)
    refused, also = trainer.stability_run.outcome.refused, other.stability_run.outcome.refused
    assert (refused and refused.reason) == (also and also.reason)
    assert bool(refused) == (name == "nothing left")
    assert trainer.stability_run.outcome.filter_scale == other.stability_run.outcome.filter_scale
    assert lines == other_lines and len(lines) == 4


@pytest.mark.parametrize("at_once", [16, 1000])
def test_what_verl_rejects_is_measured_all_the_same(after, at_once):
    settings = {"correction": "geo_mask", "geo_mask": {"low": 0.8, "high": 1.2}, "denominator": "kept"}
    metrics, store, *_ = after(settings, at_once)
    rejecting, left, *_ = after(settings, at_once, rejects=True)
    measured = [name for name in metrics if name.startswith(("vllm_kl/", "correction/"))]
    assert {name: rejecting[name] for name in measured} == pytest.approx({name: metrics[name] for name in measured})
    assert "vllm_kl/k3/advantage/negative" in measured and 0 < metrics["correction/sequences_dropped"] < 1
    for key, row in store.rows.items():
        assert torch.equal(row["rollout_is_weights"], left.rows[key]["rollout_is_weights"])
        dropped = (row["rollout_is_weights"] == 0).all()
        assert not (dropped and left.rows[key]["response_mask"].any()), "the masks go by the weights of the loss"
        assert torch.equal(left.rows[key]["response_mask"], left.rows[key]["loss_mask"])


def test_what_is_written_is_not_the_batch_as_it_was(after):
    _, store, *_ = after(SETTINGS["weights"], 16)
    assert any((row["rollout_is_weights"] != 1).any() for row in store.rows.values())
    _, store, *_ = after(SETTINGS["filters"], 16)
    assert all(torch.equal(row["response_mask"], row["loss_mask"]) for row in store.rows.values())
    assert any(not row["response_mask"].any() for row in store.rows.values())
    _, store, *_ = after(SETTINGS["nothing left"], 16)
    assert all(row["response_mask"].any() for row in store.rows.values() if len(row["response_mask"]) > 2)


@pytest.mark.parametrize("at_once", [16, 1000])
@pytest.mark.parametrize("bypass", [False, True])
def test_a_batch_without_a_generated_token_names_the_tensor(after, at_once, bypass):
    with pytest.raises(BatchError, match="response_mask is 0 everywhere"):
        after({"metrics": True}, at_once, change=lambda row: row["response_mask"].zero_(), bypass=bypass)


@pytest.mark.parametrize("at_once", [16, 1000])
def test_values_that_are_not_finite_are_counted_by_field(after, at_once):
    def change(row):
        row["old_log_probs"][row["response_mask"].bool()] = torch.nan
        row["rollout_log_probs"][row["response_mask"] == 0] = torch.nan  # of what the model did not generate

    _, store, trainer, _ = after({"correction": "icepop"}, at_once, change=change)
    count = sum(int(row["response_mask"].sum()) for row in store.rows.values())
    assert trainer.stability_run.outcome.refused.reason == f"old_log_probs has {count} non-finite values"
