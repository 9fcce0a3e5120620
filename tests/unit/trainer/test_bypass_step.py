"""The training step in verl's bypass mode, which is judged after the update, by the workers' measurements."""

import pytest

from tests.support.store import nested
from tests.support.training_step import OLD, Trainer, ran, rows
from verl_ext.guard.guard import Limit

ROLLED = {name: nested([-1.0, -2.0], [-3.0]) for name in ("rollout_log_probs", "old_log_probs")}


def worker_metrics(k3, refused=0.0, tokens=3, kept=3, non_finite=0):
    """Returns the metrics that verl's trainer makes from the workers' report on a first mini-batch."""
    counts = {"tokens": tokens, "kept": kept, "non_finite": non_finite, "refused": refused}
    return {
        "actor/vllm_kl/k3": k3,
        "actor/correction/dropped": 1 - kept / tokens,
        **{f"actor/first_pass/{name}": value for name, value in counts.items()},
        "actor/entropy_loss": 0.7,
        "actor/gate/refused": refused,
    }


@pytest.fixture
def bypassed(step, monkeypatch):
    """bypassed(stability, by_workers, **fields) -> as `step`, in bypass mode, with these metrics of the update."""

    def run(stability, by_workers, **fields):
        monkeypatch.setattr(Trainer, "by_workers", by_workers)
        return step(stability, bypass=True, **(ROLLED | fields))

    return run


def test_in_bypass_mode_what_the_workers_measured_is_judged_behind_the_update(bypassed, capsys):
    settings = {"correction": "icepop", "batch_skip": {"threshold": 0.1}}
    trainer, metrics, store = bypassed(settings, worker_metrics(0.02, kept=2))
    assert ran(trainer) == ["advantage", "critic", "actor"] and "rollout_is_weights" not in store.fields
    guard = trainer.stability_run.guard
    assert trainer.extra_info["first_pass"] == {"narrowed": False, "limits": (Limit(guard.rules[0], 0.1),)}
    assert guard.rules[0].name == "batch_skip"
    assert metrics["vllm_kl/k3"] == 0.02 and metrics["correction/dropped"] == pytest.approx(1 / 3)
    assert not any(name.startswith(("actor/vllm_kl", "actor/correction", "actor/first_pass")) for name in metrics)
    assert metrics["guard/skipped"] == 0 and metrics["guard/steps_to_boundary"] == 1000
    assert metrics["guard/threshold"] == 0.1 and metrics["actor/entropy"] == 0.7
    assert guard.state.updated and guard.state.growth == [(7, 0.02)]
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
    assert "actor/gate/refused" not in metrics, "the guard would report its mini-batches as well"
    assert f"verl_ext: step 7: update skipped: {said}" in capsys.readouterr().out
    trainer.stability_run.judge_first_pass(dict(by_workers))
    assert trainer.stability_run.guard.state.skips == 1, "once"


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
    assert trainer.extra_info["first_pass"] == {"narrowed": False, "limits": ()} and metrics["guard/tightened"] == 0
    assert trainer.stability_run.guard.tightens


def test_in_bypass_mode_r3_replays_what_nothing_compares(step):
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": "R3"}}}
    routes = nested([[[1, 2]], [[3, 4]], [[0, 0]]], [[[5, 5]], [[0, 0]]])
    trainer, metrics, _ = step({"metrics": True}, actor=actor, bypass=True, routed_experts=routes, **ROLLED)
    assert trainer.ran[-1][0] == "actor" and "routed_experts" in trainer.ran[-1][1]
    assert metrics["router/invalid"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("stability", [{"correction": "opsm", "opsm": {"delta": 0.1}}, {"metrics": True}])
def test_in_bypass_mode_the_workers_are_told_the_lag_too(step, stability):
    _, _, store = step(stability, bypass=True, tags=OLD)
    assert rows(store, "version_lag") == [[0, 0], [2]] and "rollout_is_weights" not in store.fields
