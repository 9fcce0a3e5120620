"""verl's three trainers with the stability features in their training step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from verl_ext.base.patching import actor_class, patch
from verl_ext.features.advantages import register_estimators, session_keys
from verl_ext.features.feature import Engines, Need, RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.features.table import print_table, verify
from verl_ext.trainer import checkpoints
from verl_ext.trainer.queue import drop_heavy_fields, row_multiple
from verl_ext.trainer.run import StabilityRun
from verl_ext.trainer.watch import watch_of
from verl_ext.upstream.agent_loop import check_manager

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # the classes below name verl's

ACCELERATOR = "accelerator_type:"  # Ray's resource of a node, with the kind behind it
CANARY_TIMER = "sync_canary"  # timing_s/sync_canary: the canary's time per step


def accelerators_of_nodes() -> dict[str, str]:
    """Returns address -> the kind of the accelerators, of each node of Ray that has any: {"10.0.0.1": "H100"}."""
    found = {}
    for node in ray.nodes():
        kinds = [name.removeprefix(ACCELERATOR) for name in node["Resources"] if name.startswith(ACCELERATOR)]
        if kinds:
            found[node["NodeManagerAddress"]] = " ".join(sorted(kinds))
    return found


class StabilityMixin(VerlTrainer):
    """verl's PPOTrainer with a StabilityRun: each override calls verl's method, and the run before or after it."""

    def __init__(self, config: DictConfig):
        self.stability_run = StabilityRun(config, stability_config(config.stability))
        register_estimators()  # including those of stability.plugins
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        replace_workers(self.role_worker_mapping, classes_of_workers(self.stability_run.features))

    def init(self) -> None:
        super().init()
        features = self.stability_run.features
        managers = self._rollout_server_managers()
        print_table(verify(features, type(self), Engines(self.actor_rollout_wg, managers)))
        addresses = (address for manager in managers for address in manager.server_addresses)
        self.stability_run.use_servers(addresses, accelerators_of_nodes())

    def on_init_end(self) -> None:
        if check := self.stability_run.sync_check:
            # In separate_async the other manager's servers belong to the training ranks.
            check.watch(getattr(self, "standalone_checkpoint_manager", self.checkpoint_manager))
        super().on_init_end()

    def _load_checkpoint(self) -> None:
        run = self.stability_run
        with checkpoints.loading(run.guard, run.actions.diagnosis, self.config):
            super()._load_checkpoint()
        if run.guard.state.first_load:
            run.share_first_load(self.actor_rollout_wg)

    def _save_checkpoint(self) -> None:
        run = self.stability_run
        if not run.guard.state.first_load:
            run.share_first_load(self.actor_rollout_wg)
        with checkpoints.saving(run.guard, run.actions.diagnosis, self.config, self.global_steps):
            super()._save_checkpoint()

    def fit(self, agent_loop_manager: Any) -> None:
        check_manager(agent_loop_manager)
        slow_step_s = self.stability_run.features.stability.guard.slow_step_s
        with self.stability_run.writing(resumed=self.global_steps), watch_of(self, agent_loop_manager, slow_step_s):
            super().fit(agent_loop_manager)

    def on_step_begin(self) -> None:
        self.stability_run.actions.stop_if_asked()
        super().on_step_begin()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self.stability_run.guard.begin(self.global_steps)
        batch = super().step(metrics, timing_raw)
        if Need.COMPARED_ROUTERS in self.stability_run.features.needs:
            metrics.update(next(filter(None, self.actor_rollout_wg.take_expert_load()), {}))
        critic = {str(Role.Critic): self.critic_wg} if self.use_critic else {}
        self.stability_run.end_step(metrics, {"actor": self.actor_rollout_wg, **critic})
        if canary := self.stability_run.canary:
            with marked_timer(CANARY_TIMER, timing_raw):
                canary.after_update(self.global_steps, self.actor_rollout_wg)
        return batch

    def on_step_end(self) -> None:
        super().on_step_end()
        run = self.stability_run
        if run.canary:
            with marked_timer(CANARY_TIMER, self.timing_raw):
                # The last manager: in separate_async it has the synchronised servers, which never sleep.
                handles = self._rollout_server_managers()[-1].server_handles
                run.actions.record_decision(run.canary.after_sync(run.guard.step, handles))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if Need.OLD_VERSIONS in self.stability_run.features.needs and self.local_trigger_step == 0:
            with marked_timer("rescore", self.timing_raw):
                self.stability_run.rescore(batch, self.actor_rollout_wg)
        sent = self.stability_run.worker_fields.log_prob_batch(batch, self.stability_run.features)
        if self.stability_run.begin_batch(batch):
            return batch
        done = super()._compute_old_log_prob(sent, metrics)
        return batch if done is sent else done  # verl's bypass mode returns its argument

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        run = self.stability_run
        sent = run.worker_fields.reference_batch(batch, run.features, in_actor=self.ref_in_actor)
        return super()._compute_ref_log_prob(sent, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._compute_values(drop_heavy_fields(batch), metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.stability_run.measure(batch, metrics, self.tokenizer)
        refused = self.stability_run.outcome.refused is not None
        with self.stability_run.joined_calls(), session_keys(batch.keys, refused=refused):
            batch = super()._compute_advantage(batch, metrics)
        return self.stability_run.settle(batch, metrics, self.tokenizer)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.stability_run.outcome.refused is None:
            super()._update_critic(drop_heavy_fields(batch), metrics)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if (canary := self.stability_run.canary) and canary.waits:
            sent = self.stability_run.worker_fields.canary_batch(batch, self.stability_run.features)
            canary.choose(sent, self.actor_rollout_wg, row_multiple(self.actor_rollout_wg, self.config))
        if self.stability_run.outcome.refused is None:
            first = self.local_trigger_step == 0
            super()._update_actor(self.stability_run.update_batch(batch, first), metrics)
            self.stability_run.judge_first_pass(metrics)
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        if canary := self.stability_run.canary:
            metrics.update(canary.metrics)
        if check := self.stability_run.sync_check:
            metrics.update(check.take_metrics())
        self.stability_run.judge_logged(metrics)


class StabilityTrainerSync(StabilityMixin, PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync`"""


class StabilityTrainerColocateAsync(StabilityMixin, PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=colocate_async`"""


class StabilityTrainerSeparateAsync(StabilityMixin, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=separate_async`"""


def install_trainers() -> None:
    """Replaces verl's trainers by ours, in this process.

    verl's `register_trainer` refuses a taken name, and much of its trainer compares the mode's name, so a
    mode of our own would not work.
    """
    patch("stability_trainers", TRAINER_REGISTRY, "sync", StabilityTrainerSync)
    patch("stability_trainers", TRAINER_REGISTRY, "colocate_async", StabilityTrainerColocateAsync)
    patch("stability_trainers", TRAINER_REGISTRY, "separate_async", StabilityTrainerSeparateAsync)


def classes_of_workers(features: RunFeatures) -> Mapping[type, type]:
    """Returns verl's worker class -> ours; {} if nothing of ours runs in the workers."""
    from verl_ext.workers.actor import LOSS_WORKERS, ROUTING_WORKERS

    if not features.own_workers:
        return {}
    return ROUTING_WORKERS if Need.HOOKED_ROUTERS in features.needs else LOSS_WORKERS


def replace_workers(role_worker_mapping: dict[Role, Any], classes: Mapping[type, type]) -> None:
    """Replaces verl's worker classes of the actor by ours."""
    for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
        if classes and role in role_worker_mapping:
            verls = actor_class(role_worker_mapping[role])
            patch("stability_workers", role_worker_mapping, role, ray.remote(classes[verls]))
