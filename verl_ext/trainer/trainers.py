"""verl's three trainers with the stability features in their training step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.core.filtering import apply_filters
from verl_ext.core.measure import Measured, measure
from verl_ext.core.mismatch import mismatch_ratio
from verl_ext.core.routing import router_metrics
from verl_ext.core.tokens import Tokens
from verl_ext.errors import HookError
from verl_ext.guard.state import Decision, Event
from verl_ext.launch.checks import loss_settings, needs_our_loss, uses_icepop_loss
from verl_ext.launch.routing_checks import replayed_field, replays_here
from verl_ext.settings.stability import stability_config
from verl_ext.trainer import advantages, startup
from verl_ext.trainer.advantages import session_keys
from verl_ext.trainer.batch import FIELDS, mean_score, nested, non_finite, response_tokens
from verl_ext.trainer.filtering import FILTER_FIELDS, filter_batch
from verl_ext.trainer.guarding import GuardMixin
from verl_ext.trainer.line_file import say
from verl_ext.trainer.logs import trajectories_path
from verl_ext.trainer.trajectories import TrajectoryLog, forget_trajectories, write_step
from verl_ext.upstream import narrow_routing
from verl_ext.upstream.patching import patch

ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
SHIFT_FIELDS = ("router_experts", "router_scores")  # what the loss router_shift compares the current router with
ROUTING_FIELDS = ("routed_experts", "old_routed_experts", "router_sums", *SHIFT_FIELDS)


class StabilityMixin(GuardMixin):
    """The features around the steps of verl's PPOTrainer; each override calls verl's own.

    Order in a step: old log-probs -> router agreement -> mismatch and correction -> advantages -> filters -> update,
    or skip. Filters come after the advantages because they may ask for their sign, and because the rewards of what
    they drop still belong to its group.
    """

    config: DictConfig
    global_steps: int
    role_worker_mapping: dict[Role, Any]
    tokenizer: Any
    actor_rollout_wg: Any
    ref_in_actor: bool

    def __init__(self, config: DictConfig):
        self.stability = stability_config(config.stability)
        advantages.register()  # those of stability.plugins too
        self.icepop_loss = uses_icepop_loss(config)
        self.compares_engines = self.stability.needs_log_probs or self.icepop_loss
        self.replayed = replayed_field(config)
        self.dump: TrajectoryLog | None = None
        self.dumped = -1  # the last step of which trajectories were written
        self.told_dtype = False  # of the routing on its way, once there is some
        self.refused = ""  # why this batch may not update the weights
        self.filter_scale = 1.0  # of this step's batch: trajectories with tokens over trajectories kept
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        from verl_ext.workers.actor import LOSS_WORKERS, ROUTING_WORKERS

        workers: Mapping[type, type]
        if self.stability.router_agreement or replays_here(self.config):
            workers = ROUTING_WORKERS
        elif needs_our_loss(self.config, self.stability):
            workers = LOSS_WORKERS
        else:
            return
        for role in ACTOR_ROLES:
            if role in self.role_worker_mapping:
                verl_worker = startup.actor_class(self.role_worker_mapping[role])
                patch("stability_workers", self.role_worker_mapping, role, ray.remote(workers[verl_worker]))

    def init(self) -> None:
        super().init()  # type: ignore[misc]
        startup.print_table(startup.verify(self))

    def fit(self, agent_loop_manager: Any) -> None:
        path = trajectories_path(self.config)
        if self.stability.trajectories.per_step:
            self.dump = TrajectoryLog(path, self.stability.trajectories, resumed=self.global_steps)
        elif not self.global_steps:
            forget_trajectories(path)  # of an earlier run, which the report would show as this one's
        try:
            super().fit(agent_loop_manager)
        finally:
            if self.dump is not None:
                self.dump.close()

    def configure_loss(self) -> list[dict[str, Any]]:
        """Install our loss in the workers; what is active in it, from each rank."""
        return self.actor_rollout_wg.configure_loss(loss_settings(self.stability))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        if self.stability.router_agreement:
            metrics.update(self._router_metrics(batch))
        return batch

    def _router_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        data = _get(batch, ["router_sums"])
        if "router_sums" not in data.keys():  # noqa: SIM118 (a TensorDict)
            raise HookError(
                "compute_log_prob returned no routing: the rollout's batch has no routed_experts",
                fix=("stability.router_agreement=false",),
                otherwise="check that vLLM runs with enable_return_routed_experts",
            )
        if not self.told_dtype:
            self.told_dtype = True
            dtype = narrow_routing.id_dtype(batch.keys, batch.partition_id)
            print(f"verl_ext: routed_experts travels as {dtype}", flush=True)
        return router_metrics(torch.stack(list(data["router_sums"].unbind())))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.refused, self.filter_scale = "", 1.0
        if not self.compares_engines:
            return self._verls_advantage(batch, metrics)
        # Before verl's own rejection takes the worst tokens out of response_mask: they are what is measured.
        data = _get(batch, (*FIELDS, "rm_scores"))
        metrics["critic/score/mean"] = mean_score(data, batch.tags)  # verl logs it after the update
        tokens = response_tokens(data)
        measured = self._measure_and_judge(tokens, metrics)
        self._put_weights(batch, tokens, measured)
        batch = self._verls_advantage(batch, metrics)
        if not self.refused and (self.stability.filters or self.stability.denominator == "kept"):
            batch = self._filter(batch, tokens, measured, metrics)
        self.guard.count(bool(self.refused))
        metrics["guard/skipped"] = int(bool(self.refused))
        self._dump(batch, tokens, measured)
        return batch

    def _dump(self, batch: KVBatchMeta, tokens: Tokens, measured: Measured) -> None:
        """Of the first update of a step, where it has several."""
        settings, step = self.stability.trajectories, self.global_steps
        if self.dump is None or step % settings.every or step == self.dumped:
            return
        self.dumped = step
        about = {"step": step, "skipped": self.refused}
        try:
            write_step(self.dump, settings, batch, tokens, measured.weight, self.tokenizer, **about)
        except Exception as error:  # whatever a tokenizer may do: what is only to be looked at must not end a run
            log, self.dump = self.dump, None
            log.close()
            say(f"no more trajectories are written, the run goes on: {error!r}")

    def _verls_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with session_keys(batch.keys):
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]

    def _measure_and_judge(self, tokens: Tokens, metrics: dict) -> Measured:
        """Measure, let the guard judge, and measure again where it has just narrowed the band."""
        narrowed = self.guard.tightens
        measured = self._measure(tokens, metrics, narrowed)
        foreseen, jump = self.guard.foresee(metrics)
        metrics.update(foreseen)
        self.carry_out(jump)
        found = self.guard.judge(metrics, non_finite(tokens) if measured.non_finite else {})
        self.carry_out(found)
        self.refused = found.refuses
        if not self.refused and (due := self.guard.state.rollback_due or self.stop_reason):
            self._refuse("due", f"a rollback or stop is due: {due}")  # decided after an earlier update
        if self.guard.tightens and not narrowed:
            narrowed, measured = True, self._measure(tokens, metrics, narrowed=True)
        if any(rule.action == "tighten" for rule in self.guard.rules):
            metrics["guard/tightened"] = int(narrowed)
        if (threshold := self.stability.batch_skip.threshold) is not None:
            metrics["guard/threshold"] = threshold
        if (boundary := self.stability.guard.boundary).signal == "vllm_kl/k3":
            metrics["guard/boundary"] = boundary.value  # for the report, which sees nothing but metrics
        if not self.refused and measured.kept == 0:
            dropped_by = " and ".join(self.stability.correction_names)
            self._refuse("correction", f"{dropped_by} dropped all {measured.tokens} tokens of the batch")
        return measured

    def _measure(self, tokens: Tokens, metrics: dict, narrowed: bool) -> Measured:
        corrections = self.stability.corrections(tightened=narrowed)
        measured = measure(tokens, corrections, breakdown=self.stability.breakdown)
        metrics.update(measured.metrics)
        return measured

    def _refuse(self, rule: str, reason: str) -> None:
        self.refused = reason
        self.carry_out(Decision((Event(self.global_steps, rule, "", None, None, "skip", reason),)))

    def _put_weights(self, batch: KVBatchMeta, tokens: Tokens, measured: Measured) -> None:
        weight = measured.weight
        if self.icepop_loss:
            k = mismatch_ratio(tokens.l_infer, tokens.l_old)
            weight = k.nan_to_num_(0.0, 0.0, 0.0) * tokens.mask
        if weight is None:
            return
        # verl's own put, at the end of its _compute_advantage, returns the meta that names this field too; workers
        # are sent the fields that the meta names.
        _put(batch, {"rollout_is_weights": nested(weight, tokens.offsets)})

    def _filter(self, batch: KVBatchMeta, tokens: Tokens, measured: Measured, metrics: dict) -> KVBatchMeta:
        """Take what filters drop, and with denominator=kept what corrections drop, out of the loss's mask."""
        view = filter_batch(self, tokens, batch.keys, _get(batch, FILTER_FIELDS))
        if self.stability.denominator == "kept" and measured.weight is not None:
            view = replace(view, kept_N=view.kept_N & (measured.weight > 0))
        outcome = apply_filters(view, self.stability.filter_chain())
        metrics.update(outcome.metrics)
        for name, key in outcome.examples.items():
            print(f"verl_ext: step {self.global_steps}: filter {name} dropped tokens of {key}", flush=True)
        if outcome.empty:
            self._refuse("filters", outcome.reason)
            return batch
        self.filter_scale = outcome.scale
        # verl 0.9.1 divides token-mean by the tokens of loss_mask, a copy made at rollout: both have to change.
        mask = nested(outcome.keep_N.long(), tokens.offsets)
        return _put(batch, {"response_mask": mask, "loss_mask": mask})

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # A LoRA's reference is the actor without its adapter, and is routed as the actor is.
        replayed = {self.replayed} if self.ref_in_actor else set()
        return super()._compute_ref_log_prob(self._lean(batch, replayed), metrics)  # type: ignore[misc]

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._compute_values(self._lean(batch), metrics)  # type: ignore[misc]

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.refused:
            super()._update_critic(self._lean(batch), metrics)  # type: ignore[misc]
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.refused:
            lean = self._lean(batch, {self.replayed, *SHIFT_FIELDS})
            # For the losses that divide by a number of trajectories, dropped ones included: worker_loss.
            lean.extra_info = {**lean.extra_info, "filter_scale": self.filter_scale}
            super()._update_actor(lean, metrics)  # type: ignore[misc]
        return batch

    def _lean(self, batch: KVBatchMeta, read: Collection[str | None] = ()) -> KVBatchMeta:
        """The batch without the routing, hundreds of bytes a token, but for the fields of it that a stage reads."""
        if batch.fields is None:
            return replace(batch)
        unread = set(ROUTING_FIELDS) - set(read)
        return replace(batch, fields=[field for field in batch.fields if field not in unread])


class StabilityTrainerSync(StabilityMixin, PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync`"""


class StabilityTrainerColocateAsync(StabilityMixin, PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=colocate_async`"""


class StabilityTrainerSeparateAsync(StabilityMixin, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=separate_async`"""


def _get(batch: KVBatchMeta, fields: Sequence[str]) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _put(batch: KVBatchMeta, fields: dict[str, torch.Tensor]) -> KVBatchMeta:
    """Write fields of the batch; the meta that names all of its fields, these among them."""
    data = TensorDict(fields, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def install() -> None:
    """Put our trainers in the place of verl's, in this process.

    verl's `register_trainer` refuses a taken name, and much of its trainer compares the mode's name, so a
    mode of our own would not work.
    """
    patch("stability_trainers", TRAINER_REGISTRY, "sync", StabilityTrainerSync)
    patch("stability_trainers", TRAINER_REGISTRY, "colocate_async", StabilityTrainerColocateAsync)
    patch("stability_trainers", TRAINER_REGISTRY, "separate_async", StabilityTrainerSeparateAsync)
