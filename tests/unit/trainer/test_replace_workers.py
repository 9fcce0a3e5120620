"""The effects of a config on the batches that are measured, and on the classes of the workers."""

from types import SimpleNamespace

import pytest
import ray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_ext.base.patching import actor_class
from verl_ext.features.feature import Need
from verl_ext.features.stability import stability_config
from verl_ext.features.table import read_features
from verl_ext.trainer.trainers import StabilityTrainerSeparateAsync, classes_of_workers, replace_workers
from verl_ext.workers.actor import (
    LossActorRolloutRefWorker,
    LossDetachActorWorker,
    RoutingActorRolloutRefWorker,
    RoutingDetachActorWorker,
)

MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.fixture
def features(compose):
    def read(*overrides):
        config = compose("actor_rollout_ref.rollout.name=vllm", *overrides)
        return read_features(config, stability_config(config.stability))

    return read


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stability=none"], False),
        (["stability=none", "algorithm.adv_estimator=qae"], False),
        (["stability=none", "stability.router_agreement=true"], False),
        (["stability=none", "stability.metrics=true"], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=icepop"], True),
    ],
)
def test_batches_are_measured_where_something_reads_that(features, overrides, expected):
    assert (Need.MEASURED_BATCHES in features(*overrides).needs) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stability=none", "stability.metrics=true"], ActorRolloutRefWorker),
        (["stability=icepop"], LossActorRolloutRefWorker),
        (["stability=icepop", "stability.router_agreement=true"], RoutingActorRolloutRefWorker),
        (["stability=r2"], RoutingActorRolloutRefWorker),
        (
            ["stability=none", "model_engine=megatron", "actor_rollout_ref.actor.megatron.router_replay.mode=R3"],
            LossActorRolloutRefWorker,
        ),
    ],
)
def test_the_actors_worker_is_ours_where_something_of_ours_runs_in_it(features, overrides, expected):
    roles = {Role.ActorRollout: ray.remote(ActorRolloutRefWorker), Role.Critic: ray.remote(TrainingWorker)}
    replace_workers(roles, classes_of_workers(features(*overrides)))
    assert actor_class(roles[Role.ActorRollout]) is expected
    assert actor_class(roles[Role.Critic]) is TrainingWorker


@pytest.mark.parametrize(("agreement", "expected"), [(False, LossDetachActorWorker), (True, RoutingDetachActorWorker)])
@pytest.mark.parametrize(("hybrid", "role"), [(True, Role.ActorRolloutRef), (False, Role.Actor)])
def test_our_worker_is_the_actors_of_verls_separate_async_without_hybrid_replicas_too(
    compose, features, agreement, expected, hybrid, role
):
    overrides = (
        "actor_rollout_ref.rollout.name=vllm",
        "stability=icepop",
        f"stability.router_agreement={str(agreement).lower()}",
        "trainer.v1.trainer_mode=separate_async",
        f"actor_rollout_ref.hybrid_engine={str(hybrid).lower()}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    trainer = object.__new__(StabilityTrainerSeparateAsync)
    trainer.config, trainer._enable_hybrid_replicas = compose(*overrides), hybrid
    trainer.stability_run = SimpleNamespace(features=features(*overrides))
    trainer._init_resource_pool_mgr()
    workers = {one: actor_class(worker) for one, worker in trainer.role_worker_mapping.items() if one != Role.Critic}
    assert workers == {role: expected} | ({} if hybrid else {Role.RefPolicy: DetachActorWorker})
