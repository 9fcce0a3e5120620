"""The worker's `configure_loss`, on the parts of verl's workers that it touches."""

from functools import partial
from types import SimpleNamespace

import pytest
import ray
import torch
from tensordict import NonTensorData
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss

from verl_ext.base.errors import ConfigError, HookError
from verl_ext.guard.guard import Limit
from verl_ext.guard.rules import Rule
from verl_ext.workers.actor import (
    LOSS_WORKERS,
    ROUTING_WORKERS,
    LossMixin,
    RoutingTrainingWorker,
    SharingTrainingWorker,
)
from verl_ext.workers.worker_loss import worker_loss


class Engine:
    """Counts its optimizer steps."""

    steps, scheduled, optimizer = 0, 0, SimpleNamespace(param_groups=[{"lr": 0.1}])
    engine_config, module = SimpleNamespace(strategy="fsdp2"), torch.nn.Module()

    def train_batch(self, data, loss_function):
        loss_function(data)
        return {"metrics": {"grad_norm": self.optimizer_step()}}

    def is_mp_src_rank_with_outputs(self):
        return True

    def optimizer_step(self):
        self.steps += 1
        return 0.5

    def lr_scheduler_step(self):
        self.scheduled += 1
        return 0.01


class Actor:
    """Stands in for the `self.actor` that `init_model` leaves behind."""

    loss_fn = None

    def __init__(self):
        self.engine = Engine()

    def train_mini_batch(self, data):
        """One after another, of (model_output, data) each."""
        parts = [(part, partial(self.loss_fn, model_output)) for model_output, part in data["parts"]]
        return [self.engine.train_batch(*part)["metrics"] for part in parts]

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn


class Worker(LossMixin):
    def __init__(self, loss_fn):
        self.actor = Actor()
        self.loss_fn = loss_fn


def test_configure_loss_installs_the_loss_and_can_be_called_again(make_batch, actor_config):
    worker = Worker(partial(ppo_loss, config=actor_config()))
    active = worker.configure_loss({"corrections": {"opsm": {"delta": 0.1}}})
    assert active["corrections"] == {"opsm": {"delta": 0.1, "stale_only": False}}
    assert worker.actor.loss_fn.func is worker_loss
    model_output, data = make_batch(0).whole()
    assert "actor/opsm/dropped" in worker.actor.loss_fn(model_output=model_output, data=data)[1]
    active = worker.configure_loss({"policy_loss": {"loss_mode": "llds"}})
    assert active["corrections"] == {} and active["policy_loss"]["loss_mode"] == "llds"
    metrics = worker.actor.loss_fn(model_output=model_output, data=data)[1]
    assert "actor/llds/penalty" in metrics and "actor/opsm/dropped" not in metrics
    assert worker.configure_loss({})["policy_loss"]["loss_mode"] == "vanilla"


def test_a_mini_batch_without_a_token_takes_no_optimizer_step(make_batch, actor_config):
    worker = Worker(partial(ppo_loss, config=actor_config()))
    worker.configure_loss({})
    worker.configure_loss({"corrections": {"opsm": {"delta": 0.1}}})  # again: the engine has one gate
    engine = worker.actor.engine
    refused = {"gate/refused": [1.0]}
    for tokens, metrics, steps in ((0, refused, 0), (7, {"grad_norm": 0.5, "gate/refused": [0.0]}, 1), (0, refused, 1)):
        model_output, data = make_batch(0, batch_num_tokens=tokens).whole()
        loss = partial(worker.actor.loss_fn, model_output)
        outputs = engine.train_batch(data, loss)
        assert outputs == {"metrics": metrics}
        assert engine.steps == steps


@pytest.mark.parametrize(("bound", "steps"), [(1e9, 2), (1e-9, 0)])
def test_in_bypass_mode_the_first_mini_batch_decides_over_the_steps_of_all(bound, steps, make_batch, actor_config):
    worker = Worker(partial(ppo_loss, config=actor_config()))
    worker.configure_loss({"first_pass": {"corrections": {"icepop": {"alpha": 0.5, "beta": 5.0}}}})
    parts = []
    for seed in (0, 1):
        batch = make_batch(seed)
        batch.rows["old_log_probs"] = batch.rows["rollout_log_probs"]
        parts.append(batch.whole())
    for update in (1, 2):  # the second update is measured anew
        taken = worker.actor.engine.steps
        asked = {"narrowed": False, "limits": (Limit(Rule("gap", "vllm_kl/k3", bound), bound),)}
        first, second = worker.actor.train_mini_batch({"first_pass": NonTensorData(asked), "parts": parts})
        assert worker.actor.engine.steps - taken == steps
        rate = worker.actor.engine.lr_scheduler_step()
        assert (rate, worker.actor.engine.scheduled) == ((0.01, update) if steps else (0.1, 0)), "as without an update"
        assert first["first_pass/refused"] == [float(steps == 0)] and first["vllm_kl/k3"][0] > 0
        assert ("grad_norm" in first) == ("grad_norm" in second) == (steps > 0)
        assert second.keys() <= {"grad_norm", "gate/refused"}


def test_a_batch_that_compute_log_prob_has_seen_is_not_measured_again(make_batch, actor_config):
    """Agent loops may return more trajectories than one optimizer step takes; then the pass runs as without reuse."""
    worker = Worker(partial(ppo_loss, config=actor_config()))
    active = worker.configure_loss({"reuses": True, "first_pass": {"corrections": {"tis": {"cap": 1.2}}}})
    assert active["reuses"] and active["first_pass"]
    (found,) = worker.actor.train_mini_batch({"parts": [make_batch(0).whole()]})
    assert found == {"grad_norm": 0.5, "gate/refused": [0.0]}
    reused = make_batch(0)
    del reused.rows["old_log_probs"]
    asked = {"narrowed": False, "limits": ()}
    (found,) = worker.actor.train_mini_batch({"first_pass": NonTensorData(asked), "parts": [reused.whole()]})
    assert found["vllm_kl/k3"][0] > 0 and found["first_pass/refused"] == [0.0]


@pytest.mark.parametrize(
    ("coefficient", "reuses", "graph"), [(0.0, True, False), (0.1, True, True), (0.0, False, True)]
)
def test_an_entropy_that_no_loss_reads_has_no_graph(coefficient, reuses, graph, actor_config):
    worker = Worker(partial(ppo_loss, config=actor_config(entropy_coeff=coefficient)))
    worker.actor.engine.compute_entropy_from_logits = entropy_from_logits
    for _ in range(2):
        worker.configure_loss({"reuses": reuses})
    logits = torch.randn(3, 7, requires_grad=True)
    found = worker.actor.engine.compute_entropy_from_logits(logits)
    assert found.requires_grad == graph and torch.equal(found, entropy_from_logits(logits))


def test_a_setting_that_cannot_work_leaves_the_installed_loss(actor_config):
    worker = Worker(partial(ppo_loss, config=actor_config()))
    worker.configure_loss({})
    installed = worker.actor.loss_fn
    with pytest.raises(ConfigError):
        worker.configure_loss({"policy_loss": {"loss_mode": "llds", "coef": -1}})
    assert worker.actor.loss_fn is installed


def test_distillation_is_refused(actor_config):
    worker = Worker(partial(distillation_ppo_loss, config=actor_config()))
    with pytest.raises(HookError, match="this run's loss is distillation_ppo_loss"):
        worker.configure_loss({})


@pytest.mark.parametrize("workers", [LOSS_WORKERS, ROUTING_WORKERS])
@pytest.mark.parametrize("verl_worker", [ActorRolloutRefWorker, DetachActorWorker])
def test_every_worker_class_is_verls_with_configure_loss_on_all_ranks(workers, verl_worker):
    worker = workers[verl_worker]
    assert issubclass(worker, verl_worker)
    assert getattr(worker.configure_loss, MAGIC_ATTR)["dispatch_mode"] is Dispatch.ONE_TO_ALL
    assert worker.actor_worker_cls is (SharingTrainingWorker if workers is LOSS_WORKERS else RoutingTrainingWorker)
    ray.remote(worker)  # verl's trainer wraps it so
