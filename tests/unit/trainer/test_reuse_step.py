"""The training step without compute_log_prob, and with it where a batch makes several optimizer steps."""

import pytest
import torch

from tests.support.store import nested
from tests.support.training_step import Trainer, ran
from tests.unit.trainer.test_bypass_step import worker_metrics
from verl_ext.base.errors import HookError

GAP = {f"actor/vllm_kl/prob_diff_{name}": 0.1 for name in ("max", "mean", "std")}
REUSED = {"correction": "tis", "reuse_log_probs": "on"}


@pytest.fixture
def reused(step, monkeypatch):
    """reused(stability, by_workers, of_step=2) -> as `step`; an optimizer step takes `of_step` trajectories."""

    def run(stability, by_workers, of_step=2, actor=None, **fields):
        monkeypatch.setattr(Trainer, "by_workers", by_workers)
        return step(stability, actor={"ppo_mini_batch_size": of_step, **(actor or {})}, **fields)

    return run


def test_the_workers_measure_a_batch_of_one_step(reused):
    trainer, metrics, store = reused(REUSED, worker_metrics(0.02) | GAP, old_log_probs=None)
    assert not hasattr(trainer, "scored"), "no pass"
    assert ran(trainer) == ["advantage", "critic", "actor"] and "rollout_is_weights" not in store.fields
    assert trainer.extra_info["first_pass"] == {"narrowed": False, "limits": ()}
    assert metrics["vllm_kl/k3"] == 0.02 and metrics["actor/entropy"] == 0.7 and metrics["guard/skipped"] == 0
    assert metrics["training/rollout_probs_diff_mean"] == 0.1
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.1 * (3 / 2) ** 0.5)


def test_a_batch_of_several_steps_has_the_pass_and_is_measured_before_the_update(reused):
    trainer, metrics, store = reused(REUSED, {}, of_step=1)
    assert trainer.scored and "rollout_is_weights" in store.fields and "first_pass" not in trainer.extra_info
    assert metrics["vllm_kl/k3"] > 0 and metrics["guard/skipped"] == 0


def test_what_refuses_a_batch_before_the_update_still_does(reused):
    odd = {"rollout_log_probs": nested([float("nan"), -2.0], [-3.0])}
    trainer, metrics, _ = reused(REUSED, {}, old_log_probs=None, **odd)
    assert ran(trainer) == ["advantage"] and metrics["guard/skipped"] == 1


def test_without_a_measurement_only_the_pass_is_left_out(reused):
    trainer, metrics, _ = reused({"reuse_log_probs": "on"}, {}, old_log_probs=None)
    assert not hasattr(trainer, "scored") and not any(name.startswith("vllm_kl") for name in metrics)


def of_routes(accepted, repeated):
    """What the workers report of the experts that the update compared."""
    counts = {"accepted": accepted, "unknown": 0, "compared": 2, "left_out": 0}
    counts |= {"out_of_range": 0, "repeated": repeated, "stuck": 0}
    shares = {"agreement": 0.9, "invalid": repeated / (accepted + repeated), "unknown": 0.0}
    return {
        **{f"actor/first_pass_routes/{name}": float(count) for name, count in counts.items()},
        **{f"actor/router/{name}": share for name, share in shares.items()},
    }


def test_the_routers_are_compared_in_the_update_and_judged_after_it(reused, capsys):
    settings = REUSED | {"router_agreement": True}
    by_workers = worker_metrics(0.02) | GAP | of_routes(accepted=6, repeated=2)
    routes = torch.zeros(2, 1, dtype=torch.uint8)
    actor = {"strategy": "fsdp2"}
    trainer, metrics, _ = reused(settings, by_workers, old_log_probs=None, routed_experts=routes, actor=actor)
    assert not hasattr(trainer, "scored") and "routed_experts" in dict(trainer.ran)["actor"]
    assert metrics["router/agreement"] == 0.9 and metrics["router/invalid"] == 0.25
    assert not any("first_pass" in name for name in metrics)
    said = capsys.readouterr().out
    assert "routed_experts is sent as torch.uint8" in said
    assert "step 7: warn: 2 of 8 tokens name an expert twice in a layer" in said


def test_without_routing_to_compare_the_run_stops(reused):
    with pytest.raises(HookError, match=r"set stability.router_agreement=false"):
        reused(REUSED | {"router_agreement": True}, {}, old_log_probs=None, actor={"strategy": "fsdp2"})
