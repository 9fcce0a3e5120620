"""The training step's decisions, on a trainer and a store of our own; the real ones run in tests/stack."""

import math

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import trainer_base

from tests.support.store import VERLS, compute_advantage, nested
from tests.support.training_step import COLUMNS, OLD, READ, Trainer, VerlTrainer, ran, router_sums, rows
from verl_ext.features.advantages import register_estimators
from verl_ext.features.settings import TrajectoryDump
from verl_ext.features.stability import stability_config
from verl_ext.features.table import read_features
from verl_ext.trainer import trajectories
from verl_ext.trainer.batch import FIELDS, FILTER_FIELDS
from verl_ext.trainer.trajectories import Dump, TrajectoryLog


def test_icepop_weights_go_into_the_batch(step):
    trainer, metrics, store = step({"correction": "icepop"})
    weights = [row.tolist() for row in store.fields["rollout_is_weights"].unbind()]
    assert weights[0] == pytest.approx([math.exp(-0.5), 1.0], rel=1e-5)
    assert weights[1] == [0.0]  # k = exp(2.5) is past beta
    assert metrics["correction/dropped"] == metrics["correction/dropped_high"] == pytest.approx(1 / 3)
    assert metrics["guard/skipped"] == 0
    assert ran(trainer) == ["advantage", "critic", "actor"]


def test_a_dump_that_fails_does_not_end_the_run(step, monkeypatch, capsys, tmp_path):
    """Each step also passes its decision to the dump, so that the report can show a skipped batch too."""
    written = []

    def write_step(log, settings, batch, chosen, tokenizer, **about):
        written.append(about)
        raise KeyError("no such token")

    monkeypatch.setattr(trajectories, "write_step", write_step)
    settings = TrajectoryDump(1)
    writing = Dump(TrajectoryLog(tmp_path / "x.jsonl", settings, resumed=0), settings)  # which fit() opens

    def with_log(trainer, batch, metrics):
        trainer.stability_run.dump = writing
        return batch

    monkeypatch.setattr(Trainer, "_compute_old_log_prob", with_log)
    trainer, _, _ = step({"trajectories": {"per_step": 1}, "batch_skip": {"threshold": 1e-9}})
    refused = trainer.stability_run.outcome.refused.reason
    assert written == [{"step": 7, "skipped": refused}] and "vllm_kl/k3" in refused
    assert "no more trajectories are written; the run continues: KeyError('no such token')" in capsys.readouterr().out
    assert ran(trainer) == ["advantage"]
    writing.look_at(None, step=8)
    writing.write(None, None, skipped="")
    assert len(written) == 1


def test_the_boundary_is_logged_where_it_is_one_of_k3(step):
    _, metrics, _ = step({"metrics": True, "guard": {"boundary": {"value": 0.2}}})
    assert metrics["guard/boundary"] == 0.2
    _, metrics, _ = step({"metrics": True, "guard": {"boundary": {"signal": "vllm_kl/chi2"}}})
    assert "guard/boundary" not in metrics


def test_the_loss_icepop_is_sent_no_field_and_makes_k_itself(step):
    _, metrics, store = step({}, loss_mode="icepop")
    assert "rollout_is_weights" not in store.fields
    assert "correction/dropped" not in metrics
    assert metrics["vllm_kl/k3"] > 0


def test_metrics_alone_leave_the_batch_as_it_is(step):
    trainer, metrics, store = step({"metrics": True})
    assert "rollout_is_weights" not in store.fields
    assert "vllm_kl/k1" in metrics
    assert ran(trainer) == ["advantage", "critic", "actor"]


def test_a_tools_output_weighs_nothing(step):
    _, _, store = step({"correction": "icepop"}, response_mask=nested([1, 0], [1]))
    assert store.fields["rollout_is_weights"].unbind()[0].tolist()[1] == 0


def test_what_a_filter_drops_leaves_both_masks(step, capsys):
    _, metrics, store = step({"filters": ["overlong"]})
    # Both responses are as long as they may be; the first ends in the end token.
    assert rows(store, "response_mask") == rows(store, "loss_mask") == [[1, 1], [0]]
    assert metrics["filter/overlong/dropped_tokens"] == pytest.approx(1 / 3)
    assert metrics["filter/kept_trajectories"] == 0.5
    assert "rollout_is_weights" not in store.fields, "token-mean divides by the tokens that are left"
    assert "verl_ext: step 7: filter overlong dropped tokens of a_1_0" in capsys.readouterr().out


def test_the_workers_are_told_how_many_trajectories_are_left(step):
    trainer, _, store = step({"filters": ["overlong"], "correction": "icepop"}, loss_agg_mode="seq-mean-token-mean")
    assert trainer.extra_info["filter_scale"] == 2
    assert rows(store, "rollout_is_weights")[0] == pytest.approx([math.exp(-0.5), 1.0], rel=1e-5), (
        "the weights stay what they are"
    )
    trainer, _, _ = step({"correction": "icepop"})
    assert trainer.extra_info["filter_scale"] == 1


def test_a_batch_of_which_the_filters_leave_nothing_is_skipped_with_the_reason(step, capsys):
    trainer, metrics, store = step({"filters": {"low_probability": {"threshold": 1.0}}})
    assert ran(trainer) == ["advantage"]
    assert metrics["guard/skipped"] == trainer.stability_run.guard.state.skips == 1
    assert "update skipped: no token is left: low_probability dropped 100%" in capsys.readouterr().out
    assert rows(store, "response_mask") == [[1, 1], [1]]


def test_a_batch_of_which_the_corrections_leave_nothing_is_skipped_with_the_reason(step, capsys):
    trainer, metrics, _ = step({"correction": "icepop", "icepop": {"alpha": 20.0, "beta": 30.0}})
    assert ran(trainer) == ["advantage"]
    assert metrics["guard/skipped"] == 1
    assert "update skipped: icepop dropped all 3 tokens of the batch" in capsys.readouterr().out


def test_denominator_kept_takes_what_a_correction_drops_out_of_both_masks(step):
    _, metrics, store = step({"correction": "icepop", "denominator": "kept"})
    assert rows(store, "response_mask") == rows(store, "loss_mask") == [[1, 1], [0]]
    assert metrics["filter/kept_tokens"] == pytest.approx(2 / 3)


def test_denominator_full_leaves_the_masks_alone(step):
    _, _, store = step({"correction": "icepop"})
    assert rows(store, "response_mask") == [[1, 1], [1]]
    assert "loss_mask" not in store.fields


def test_router_agreement_reaches_the_filter_of_its_name(step):
    sums = router_sums(1, 1)
    settings = {"router_agreement": True, "filters": {"low_agreement": {"threshold": 0.5}}}
    _, metrics, store = step(settings, router_sums=sums, router_agreement=nested([0.25, 0.75], [0.5]))
    assert rows(store, "response_mask") == [[0, 1], [1]]
    assert metrics["filter/low_agreement/dropped_tokens"] == pytest.approx(1 / 3)


def test_a_batch_past_the_threshold_updates_neither_actor_nor_critic(step, capsys):
    trainer, metrics, _ = step({"batch_skip": {"threshold": 0.1}})
    assert ran(trainer) == ["advantage"]
    assert metrics["guard/skipped"] == 1
    assert trainer.stability_run.guard.state.skips == 1
    assert "verl_ext: step 7: update skipped: vllm_kl/k3=" in capsys.readouterr().out


def test_nan_in_the_rollouts_log_probs_skips_without_a_threshold(step, capsys):
    trainer, _, store = step({"correction": "icepop"}, rollout_log_probs=nested([float("nan"), -2.0], [-3.0]))
    assert ran(trainer) == ["advantage"]
    assert "update skipped: rollout_log_probs has 1 non-finite values" in capsys.readouterr().out
    assert torch.isfinite(store.fields["rollout_is_weights"].values()).all()


def test_a_nan_reward_skips_the_update_with_our_estimators_too(step, monkeypatch):
    estimated = []

    def estimate(self, batch, metrics):
        rewards = torch.tensor([[float("nan")], [0.0]])
        estimated.append(get_adv_estimator_fn("qae")(rewards, torch.ones(2, 1), ["a", "a"])[0])
        compute_advantage(batch, self.advantages)
        return batch

    register_estimators()
    monkeypatch.setattr(VerlTrainer, "_compute_advantage", estimate)
    trainer, metrics, _ = step({"correction": "icepop"}, rm_scores=nested([0.0, float("nan")], [0.0]))
    assert ran(trainer) == [] and metrics["guard/skipped"] == 1
    assert estimated[0].isnan().all()


MEASURED = {*FIELDS, "rm_scores", "answer_facts"}


def test_the_step_reads_once_before_verls_advantages_and_writes_once_after_them(step):
    """verl reads nothing that was read before, and its own fields are written with ours."""
    verls, routing = {"advantages"}, {"router_sums", "routed_experts_sum"}
    trainer, metrics, store = step({"correction": "icepop", "router_agreement": True}, router_sums=router_sums(1, 1))
    assert store.read == [{*routing, *MEASURED}]
    assert store.written == [verls | {"rollout_is_weights"}] and "vllm_kl/advantage_skew" in metrics
    assert "rollout_is_weights" in trainer.ran[-1][1], "the update is sent what was written last"
    _, _, store = step({"metrics": True})
    assert store.read == [MEASURED] and store.written == [verls]
    _, metrics, store = step({"router_agreement": True}, router_sums=router_sums(1, 1))
    assert store.read == [routing, VERLS] and metrics["router/tokens"] == 4
    _, _, store = step({"filters": ["overlong"], "correction": "icepop"})
    assert store.read == [MEASURED, set(FILTER_FIELDS) - MEASURED - verls]
    assert store.written == [verls | {"rollout_is_weights", "response_mask", "loss_mask"}]
    _, _, store = step({})
    assert store.read == [VERLS] and store.written == [verls]


def test_verl_may_read_and_write_other_batches_meanwhile(step, monkeypatch):
    def estimate(self, batch, metrics):
        tq = trainer_base.tq
        other = {"keys": ["b_0_0", "b_1_0"], "partition_id": "train"}
        tq.kv_batch_put(**other, fields=TensorDict({"values": torch.ones(2)}, batch_size=2))
        assert tq.kv_batch_get(**other, select_fields=["values"])["values"].tolist() == [1, 1]
        assert tq.get_client() is not None
        compute_advantage(batch, self.advantages)
        assert set(tq.kv_batch_get(batch.keys, "train", ["advantages", "no such field"]).keys()) == {"advantages"}
        return batch

    monkeypatch.setattr(VerlTrainer, "_compute_advantage", estimate)
    _, _, store = step({"metrics": True})
    assert store.read == [MEASURED, {"values"}, {"no such field"}] and store.written == [{"values"}, {"advantages"}]


def test_asynchronous_batches_are_measured_by_lag_and_the_workers_are_told_it(step):
    _, metrics, store = step({"metrics": True, "filters": {"too_stale": {"versions": 1}}}, tags=OLD)
    assert metrics["vllm_kl/k1/lag/0"] == pytest.approx(0.25) and metrics["vllm_kl/k1/lag/2"] == pytest.approx(-2.5)
    assert metrics["guard/growth_mixed"] == 1
    assert rows(store, "version_lag") == [[0, 0], [2]]
    assert rows(store, "response_mask") == [[1, 1], [0]] and metrics["filter/too_stale/dropped_trajectories"] == 0.5
    _, metrics, store = step({"metrics": True}, tags=OLD)
    assert "version_lag" not in store.fields, "verl's own loss does not read it"


def test_what_was_rescored_becomes_metrics_before_the_guard_judges_and_is_then_forgotten(step, monkeypatch):
    def with_scores(trainer, batch, metrics):
        trainer.stability_run._rescored = {"a_1_0": torch.tensor([-2.75])}
        return batch

    monkeypatch.setattr(Trainer, "_compute_old_log_prob", with_scores)
    rule = {"signal": "vllm_kl/stale/k1", "below": -2.0, "action": "skip"}
    trainer, metrics, _ = step({"guard": {"rules": {"old": rule}}}, tags=OLD)
    assert metrics["vllm_kl/engine/k1"] == pytest.approx(-0.25) and metrics["vllm_kl/stale/k1"] == pytest.approx(-2.25)
    assert "vllm_kl/stale/k1=-2.25" in trainer.stability_run.outcome.refused.reason
    assert trainer.stability_run._rescored == {}


def test_nothing_asked_for_changes_nothing(step):
    trainer, metrics, store = step({})
    assert metrics == {}
    assert "rollout_is_weights" not in store.fields
    assert trainer.ran[-1] == ("actor", [*READ, *COLUMNS]) and set(COLUMNS) < set(trainer.scored)


def test_settings_are_taken_over_from_the_next_batch_on_and_the_guard_stays_the_runs(step):
    trainer, _, store = step({"metrics": True, "batch_skip": {"threshold": 9}})
    run, metrics = trainer.stability_run, {}
    run.features = read_features(trainer.config, stability_config({"correction": "icepop"}))
    batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train", fields=["old_log_probs"])
    trainer._compute_advantage(batch, metrics)
    assert rows(store, "rollout_is_weights")[1] == [0.0]
    assert [rule.name for rule in run.guard.rules] == ["batch_skip", "level"]
    assert "guard/threshold" not in metrics
