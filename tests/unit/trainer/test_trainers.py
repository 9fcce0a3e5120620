"""The training step's decisions, on a trainer and a store of our own; the real ones run in tests/stack."""

import math
from typing import ClassVar

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from recipes.cpu_smoke.make_assets import build_tokenizer
from tests.support.store import VERLS, Store, compute_advantage, nested
from verl_ext.core.routing import RouterSums
from verl_ext.errors import HookError
from verl_ext.settings.stability import stability_config
from verl_ext.settings.trajectories import TrajectoryDump
from verl_ext.trainer import dump, trainers
from verl_ext.trainer.dump import Dump
from verl_ext.trainer.trajectories import TrajectoryLog

COLUMNS = {"raw_prompt": "of the dataset", "uid": "too"}
IMAGES = {"multi_modal_inputs": "no tensor, and read"}
READ = ["old_log_probs", *IMAGES]


class VerlTrainer:
    """Records which of verl's own steps ran, and the fields that were sent along."""

    by_workers: ClassVar[dict[str, float]] = {}  # metrics of the update

    def __init__(self, config):
        self.config = config
        self.global_steps = 7
        self.ran = []
        self.tokenizer = build_tokenizer()

    def _compute_old_log_prob(self, batch, metrics):
        self.scored = list(batch.fields)
        return batch

    def _compute_advantage(self, batch, metrics):
        self.ran.append(("advantage", None))
        compute_advantage(batch, self.advantages)
        return batch

    def _update_actor(self, batch, metrics):
        self.ran.append(("actor", list(batch.fields)))
        self.told = batch.extra_info
        metrics.update(self.by_workers)
        return batch

    def _update_critic(self, batch, metrics):
        self.ran.append(("critic", list(batch.fields)))
        return batch


class Trainer(trainers.StabilityMixin, VerlTrainer):
    pass


@pytest.fixture
def step(monkeypatch):
    """step(stability, loss_mode, **fields) -> (trainer, metrics, store) after one step on two responses."""

    def run(stability, loss_mode="vanilla", loss_agg_mode="token-mean", actor=None, bypass=False, tags=None, **fields):
        defaults = {
            "rollout_log_probs": nested([-1.0, -2.0], [-3.0]),
            "old_log_probs": nested([-1.5, -2.0], [-0.5]),
            "response_mask": nested([1, 1], [1]),
            "entropy": nested([1.0, 2.0], [3.0]),
            "responses": nested([7, 1], [8]),  # 1 is the end token
            "advantages": nested([1.0, 1.0], [-1.0]),
            "rm_scores": nested([0.0, 1.0], [0.0]),
        }
        store = Store(**(defaults | COLUMNS | IMAGES | fields)).install(monkeypatch)
        actor = {"policy_loss": {"loss_mode": loss_mode}, "loss_agg_mode": loss_agg_mode} | (actor or {})
        parts = {"actor": actor, "rollout": {"response_length": 1}, "model": {"path": "/no/such/model"}}
        saved = {"default_local_dir": "/no/such/folder"}
        saved |= {"v1": {"trainer_mode": "colocate_async"}} if tags else {}
        algorithm = {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": bypass}}
        config = OmegaConf.create(
            {"stability": stability, "actor_rollout_ref": parts, "trainer": saved, "algorithm": algorithm}
        )
        trainer, metrics = Trainer(config), {}
        trainer.advantages = store.fields["advantages"]
        trainer.stability_run.guard.begin(trainer.global_steps)
        fields = [*READ, "routed_experts", "old_routed_experts", "router_sums", *COLUMNS]
        batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=tags or [{}, {}], partition_id="train", fields=fields)
        batch = trainer._compute_old_log_prob(batch, metrics)
        batch = trainer._compute_advantage(batch, metrics)
        batch = trainer._update_critic(batch, metrics)
        trainer._update_actor(batch, metrics)
        return trainer, metrics, store

    return run


def ran(trainer):
    return [name for name, _ in trainer.ran]


def test_icepop_weights_go_into_the_batch(step):
    trainer, metrics, store = step({"correction": "icepop"})
    weights = [row.tolist() for row in store.fields["rollout_is_weights"].unbind()]
    assert weights[0] == pytest.approx([math.exp(-0.5), 1.0], rel=1e-5)
    assert weights[1] == [0.0]  # k = exp(2.5) is past beta
    assert metrics["correction/dropped"] == metrics["correction/dropped_high"] == pytest.approx(1 / 3)
    assert metrics["guard/skipped"] == 0
    assert ran(trainer) == ["advantage", "critic", "actor"]


def test_a_dump_that_fails_does_not_end_the_run(step, monkeypatch, capsys, tmp_path):
    """And each step says what was written, so that the report can show a batch that was skipped too."""
    told = []

    def write_step(log, settings, batch, chosen, tokenizer, **about):
        told.append(about)
        raise KeyError("no such token")

    monkeypatch.setattr(dump, "write_step", write_step)
    settings = TrajectoryDump(1)
    writing = Dump(TrajectoryLog(tmp_path / "x.jsonl", settings, resumed=0), settings)  # which fit() opens

    def with_log(trainer, batch, metrics):
        trainer.stability_run.dump = writing
        return batch

    monkeypatch.setattr(Trainer, "_compute_old_log_prob", with_log)
    trainer, _, _ = step({"trajectories": {"per_step": 1}, "batch_skip": {"threshold": 1e-9}})
    refused = trainer.stability_run.outcome.refused.reason
    assert told == [{"step": 7, "skipped": refused}] and "vllm_kl/k3" in refused
    assert "no more trajectories are written, the run goes on: KeyError('no such token')" in capsys.readouterr().out
    assert ran(trainer) == ["advantage"]
    writing.look_at(None, step=8)
    writing.write(None, None, skipped="")
    assert len(told) == 1


def test_the_boundary_is_logged_where_it_is_one_of_k3(step):
    _, metrics, _ = step({"metrics": True, "guard": {"boundary": {"value": 0.2}}})
    assert metrics["guard/boundary"] == 0.2
    _, metrics, _ = step({"metrics": True, "guard": {"boundary": {"signal": "vllm_kl/chi2"}}})
    assert "guard/boundary" not in metrics


def test_the_loss_icepop_gets_the_raw_ratio(step):
    _, metrics, store = step({}, loss_mode="icepop")
    assert store.fields["rollout_is_weights"].unbind()[1].item() == pytest.approx(math.exp(2.5), rel=1e-5)
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


def rows(store, field):
    return [row.tolist() for row in store.fields[field].unbind()]


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
    assert trainer.told["filter_scale"] == 2
    assert rows(store, "rollout_is_weights")[0] == pytest.approx([math.exp(-0.5), 1.0], rel=1e-5), (
        "the weights stay what they are"
    )
    trainer, _, _ = step({"correction": "icepop"})
    assert trainer.told["filter_scale"] == 1


def test_a_batch_of_which_the_filters_leave_nothing_is_skipped_with_the_reason(step, capsys):
    trainer, metrics, store = step({"filters": {"low_probability": {"threshold": 1.0}}})
    assert ran(trainer) == ["advantage"]
    assert metrics["guard/skipped"] == trainer.stability_run.guard.state.skips == 1
    assert "update skipped: the filters left no token: low_probability dropped 100%" in capsys.readouterr().out
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


def router_sums(*differing):
    """Of one trajectory a row, two layers: two tokens, of which so many differ in one of two experts of layer 1."""
    n = torch.tensor([[2.0]])
    rows = []
    for d in torch.tensor(differing, dtype=torch.float32).view(-1, 1, 1):
        by_layer = [torch.cat([n, n - share * d], 1) for share in (0.5, 1.0)]
        first, zero = torch.cat([0 * d, d], 1), torch.zeros(1, 1)
        rows.append(
            RouterSums(
                agree=by_layer[0],
                exact=by_layer[1],
                first=first,
                own=by_layer[0],
                margin_equal=zero,
                margin_differs=zero,
                tokens=n,
                unknown=zero,
                weight_gap=d / 4,
                weighed=n,
                left_out=zero,
                refused=zero.expand(1, 3),
            ).pack()[0]
        )
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_what_the_step_reads_and_writes_goes_with_verls_own(step):
    settings = {"correction": "icepop", "router_agreement": True}
    _, metrics, store = step(settings, router_sums=router_sums(1, 1))
    (read,), (written,) = store.read, store.written
    assert read > {*VERLS, "router_sums", "rollout_log_probs", "old_log_probs"}
    assert written == {"advantages", "rollout_is_weights"} and "vllm_kl/advantage_skew" in metrics
    _, metrics, store = step({"router_agreement": True}, router_sums=router_sums(1, 1))
    assert store.read == [{*VERLS, "router_sums"}] and metrics["router/tokens"] == 4
    _, _, store = step({"filters": ["overlong"]})
    assert len(store.read) == 1 and store.written == [{"advantages", "response_mask", "loss_mask"}]
    _, _, store = step({})
    assert store.read == [VERLS] and store.written == [{"advantages"}]


def test_weights_that_never_arrive_are_an_error(step):
    settings = {"router_agreement": True, "router_weights": True}
    _, metrics, _ = step(settings, router_sums=router_sums(1, 1))
    assert metrics["router/weight_gap"] > 0
    with pytest.raises(HookError, match=r"has no routed_weights.*router_weights=false, or start the run outside"):
        step(settings, router_sums=refused_sums(3, 1))


def test_routing_is_not_sent_to_stages_that_do_not_read_it(step, capsys):
    routes = torch.zeros(2, 1, dtype=torch.uint8)
    trainer, metrics, _ = step({"router_agreement": True}, router_sums=router_sums(1, 1), routed_experts=routes)
    assert "routed_experts travels as torch.uint8" in capsys.readouterr().out
    assert metrics["router/agreement/layer_01"] == pytest.approx(3 / 4)
    assert metrics["router/any_layer_differs"] == pytest.approx(1 / 2)
    assert metrics["router/weight_gap"] == pytest.approx(1 / 8)
    assert metrics["router/tokens"] == 4
    assert trainer.ran[1:] == [("critic", [*READ, *COLUMNS]), ("actor", READ)]


@pytest.mark.parametrize(
    ("strategy", "engine", "mode", "sent"),
    [
        ("fsdp2", "fsdp_config", "R2", "old_routed_experts"),
        ("fsdp2", "fsdp_config", "R3", "routed_experts"),
        ("megatron", "megatron", "R2", "routed_experts"),
        ("megatron", "megatron", "R3", "routed_experts"),
        ("veomni", "veomni", "R3", "routed_experts"),
    ],
)
def test_the_update_is_sent_the_routing_that_it_replays(step, strategy, engine, mode, sent):
    actor = {"strategy": strategy, engine: {"router_replay": {"mode": mode}}}
    trainer, _, _ = step({"router_agreement": True}, actor=actor, router_sums=router_sums(0, 0))
    assert trainer.ran[1:] == [("critic", [*READ, *COLUMNS]), ("actor", [*READ, sent])]
    assert set(trainer.scored) == {*READ, "routed_experts", "old_routed_experts", "router_sums"}


def test_a_rollout_that_returns_no_routing_is_an_error_with_the_remedy(step):
    with pytest.raises(HookError, match=r"set stability.router_agreement=false"):
        step({"router_agreement": True})


def test_heads_become_metrics_before_the_guard_judges(step):
    sums = torch.nested.as_nested_tensor([torch.tensor([3.0, 1, 0.4, 1.8, 1])] * 2, layout=torch.jagged)
    settings = {"head": {"k": 8}, "batch_skip": {"metric": "vllm_kl/head", "threshold": 0.1}}
    _trainer, metrics, _ = step(settings, sampler_head_sums=sums)
    assert metrics["vllm_kl/head"] == pytest.approx(0.2) and metrics["vllm_kl/head_mass"] == pytest.approx(0.9)
    assert metrics["vllm_kl/head_differs"] == pytest.approx(0.5)
    assert metrics["vllm_kl/head_missing"] == pytest.approx(1 / 3)
    assert metrics["guard/skipped"] == 1


def test_a_rollout_that_returns_no_heads_is_an_error(step):
    with pytest.raises(HookError, match="compute_log_prob read no heads"):
        step({"head": {"k": 8}})


def refused_sums(believed, repeated):
    n = torch.tensor([[float(believed)]])
    by_layer, zero, refused = n.expand(1, 2), torch.zeros(1, 1), torch.tensor([[0.0, repeated, 0.0]])
    sums = RouterSums(by_layer, by_layer, 0 * by_layer, by_layer, zero, zero, n, zero, zero, zero, zero, refused)
    row = sums.pack()[0]
    return torch.nested.as_nested_tensor([row, row], layout=torch.jagged)


def test_refused_routing_is_told_and_counted_and_a_rule_can_act_on_it(step, capsys):
    rule = {"signal": "router/invalid", "above": 0.1, "action": "skip"}
    settings = {"router_agreement": True, "guard": {"rules": {"invalid": rule}}}
    trainer, metrics, _ = step(settings, router_sums=refused_sums(3, 1))
    assert metrics["router/invalid"] == 0.25 and metrics["router/unknown"] == 0 and metrics["router/agreement"] == 1
    assert ran(trainer) == ["advantage"] and metrics["guard/skipped"] == 1
    said = capsys.readouterr().out
    assert "step 7: warn: 2 of 8 tokens name an expert twice in a layer" in said
    assert "update skipped: router/invalid=0.25" in said


def test_a_replay_of_nothing_but_refused_routing_stops_the_run(step):
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": "R3"}}}
    with pytest.raises(HookError, match=r"R3 has nothing to replay: 8 of 8 tokens name an expert twice.*=disabled"):
        step({"router_agreement": True}, actor=actor, router_sums=refused_sums(0, 4))


def test_where_verl_replays_the_rollouts_routing_a_sample_of_it_is_looked_at(step, capsys):
    actor = {"strategy": "megatron", "megatron": {"router_replay": {"mode": "R3"}}}
    good = torch.tensor([[[1, 2]], [[3, 4]], [[0, 0]]])
    bad = torch.tensor([[[5, 5]], [[0, 0]]])
    _, metrics, _ = step({"metrics": True}, actor=actor, routed_experts=nested(good.tolist(), bad.tolist()))
    assert metrics["router/invalid"] == pytest.approx(1 / 3) and metrics["router/unknown"] == 0
    assert "1 of 3 tokens name an expert twice" in (said := capsys.readouterr().out)
    assert "verl replays them all the same; actor_rollout_ref.actor.megatron.router_replay.mode=disabled" in said
    with pytest.raises(HookError, match=r"megatron.router_replay.mode=R3 has nothing to replay"):
        step({"metrics": True}, actor=actor, routed_experts=nested((0 * good).tolist(), (0 * bad).tolist()))


OLD = [{"min_global_steps": 6, "max_global_steps": 6}, {"min_global_steps": 4, "max_global_steps": 4}]  # in step 7


def test_asynchronous_batches_are_measured_by_lag_and_the_workers_are_told_it(step):
    _, metrics, store = step({"metrics": True, "filters": {"too_stale": {"versions": 1}}}, tags=OLD)
    assert metrics["vllm_kl/k1/lag/0"] == pytest.approx(0.25) and metrics["vllm_kl/k1/lag/2"] == pytest.approx(-2.5)
    assert metrics["guard/growth_mixed"] == 1
    assert rows(store, "version_lag") == [[0, 0], [2]]
    assert rows(store, "response_mask") == [[1, 1], [0]] and metrics["filter/too_stale/dropped_trajectories"] == 0.5
    _, metrics, store = step({"metrics": True}, tags=OLD)
    assert "version_lag" not in store.fields, "verl's own loss does not read it"


def test_in_bypass_mode_the_workers_are_told_the_lag_too(step):
    _, _, store = step({"correction": "opsm", "opsm": {"delta": 0.1}}, bypass=True, tags=OLD)
    assert rows(store, "version_lag") == [[0, 0], [2]] and "rollout_is_weights" not in store.fields


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
    run.use(trainer.config, stability_config({"correction": "icepop"}))
    batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train", fields=["old_log_probs"])
    trainer._compute_advantage(batch, metrics)
    assert rows(store, "rollout_is_weights")[1] == [0.0]
    assert [rule.name for rule in run.guard.rules] == ["batch_skip"]
    assert "guard/threshold" not in metrics


ROLLED = {name: nested([-1.0, -2.0], [-3.0]) for name in ("rollout_log_probs", "old_log_probs")}


def worker_metrics(k3, refused=0.0, tokens=3, kept=3, non_finite=0):
    """What verl's trainer makes of what the workers tell of a first mini-batch."""
    told = {"tokens": tokens, "kept": kept, "non_finite": non_finite, "refused": refused}
    return {
        "actor/vllm_kl/k3": k3,
        "actor/correction/dropped": 1 - kept / tokens,
        **{f"actor/first_pass/{name}": value for name, value in told.items()},
        "actor/entropy_loss": 0.7,
    }


@pytest.fixture
def bypassed(step, monkeypatch):
    """bypassed(stability, by_workers, **fields) -> as `step`, in bypass mode, with these metrics of the update."""

    def run(stability, by_workers, **fields):
        monkeypatch.setattr(VerlTrainer, "by_workers", by_workers)
        return step(stability, bypass=True, **(ROLLED | fields))

    return run


def test_in_bypass_mode_what_the_workers_measured_is_judged_behind_the_update(bypassed, capsys):
    settings = {"correction": "icepop", "batch_skip": {"threshold": 0.1}}
    trainer, metrics, store = bypassed(settings, worker_metrics(0.02, kept=2))
    assert ran(trainer) == ["advantage", "critic", "actor"] and "rollout_is_weights" not in store.fields
    limits = (("vllm_kl/k3", "above", 0.1),)
    assert trainer.told["first_pass"] == {"narrowed": False, "limits": limits}
    assert metrics["vllm_kl/k3"] == 0.02 and metrics["correction/dropped"] == pytest.approx(1 / 3)
    assert not any(name.startswith(("actor/vllm_kl", "actor/correction", "actor/first_pass")) for name in metrics)
    assert metrics["guard/skipped"] == 0 and metrics["guard/steps_to_boundary"] == 1000
    assert metrics["guard/threshold"] == 0.1 and metrics["actor/entropy"] == 0.7
    assert trainer.stability_run.guard.state.updated and trainer.stability_run.guard.state.growth == [(7, 0.02)]
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("by_workers", "said"),
    [
        (worker_metrics(0.2, refused=1.0), "vllm_kl/k3=0.2 passes stability.batch_skip.threshold=0.1"),
        (worker_metrics(0.02, refused=1.0, kept=0), "icepop dropped all 3 tokens of the first mini-batch"),
        (worker_metrics(0.02, refused=1.0, non_finite=1), "the training engine's log-probs has 1 non-finite values"),
    ],
)
def test_in_bypass_mode_a_batch_that_the_workers_refused_counts_as_skipped_with_the_reason(
    bypassed, capsys, by_workers, said
):
    trainer, metrics, _ = bypassed({"correction": "icepop", "batch_skip": {"threshold": 0.1}}, by_workers)
    assert metrics["guard/skipped"] == trainer.stability_run.guard.state.skips == 1
    assert not trainer.stability_run.guard.state.updated
    assert f"verl_ext: step 7: update skipped: {said}" in capsys.readouterr().out


def test_in_bypass_mode_what_is_there_before_the_update_refuses_it_there(bypassed, capsys):
    odd = {"rollout_log_probs": nested([float("nan"), -2.0], [-3.0])}
    trainer, metrics, _ = bypassed({"correction": "icepop"}, {}, **odd)
    assert ran(trainer) == ["advantage"] and metrics["guard/skipped"] == 1
    assert "update skipped: rollout_log_probs has 1 non-finite values" in capsys.readouterr().out
    assert metrics["guard/steps_to_boundary"] == 1000 and trainer.stability_run.guard.state.skips == 1
    trainer, metrics, _ = bypassed({"filters": {"low_probability": {"threshold": 1.0}}}, {})
    assert ran(trainer) == ["advantage"] and metrics["guard/skipped"] == 1


def test_in_bypass_mode_a_critic_that_warms_up_is_an_update(bypassed, monkeypatch):
    monkeypatch.setattr(Trainer, "_update_actor", lambda trainer, batch, metrics: batch)
    trainer, metrics, _ = bypassed({"correction": "icepop"}, {})
    assert not trainer.stability_run.guard.state.updated
    trainer.stability_run.end_step(metrics, {})
    assert trainer.stability_run.guard.state.updated and metrics["guard/skipped"] == 0


def test_in_bypass_mode_a_rule_that_fires_narrows_the_band_of_the_next_batch(bypassed):
    rule = {"signal": "vllm_kl/k3", "above": 0.01, "action": "tighten"}
    settings = {"correction": "icepop", "guard": {"rules": {"gap": rule}}}
    trainer, metrics, _ = bypassed(settings, worker_metrics(0.02))
    assert trainer.told["first_pass"] == {"narrowed": False, "limits": ()} and metrics["guard/tightened"] == 0
    assert trainer.stability_run.guard.tightens


def test_in_bypass_mode_r3_replays_what_nothing_compares(step):
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": "R3"}}}
    routes = nested([[[1, 2]], [[3, 4]], [[0, 0]]], [[[5, 5]], [[0, 0]]])
    trainer, metrics, _ = step({"metrics": True}, actor=actor, bypass=True, routed_experts=routes, **ROLLED)
    assert trainer.ran[-1] == ("actor", [*READ, "routed_experts"])
    assert metrics["router/invalid"] == pytest.approx(1 / 3)
