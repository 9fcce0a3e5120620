"""verl's three trainers with the stability features in their training step."""

import json
import os
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

from verl_ext.config import stability_config
from verl_ext.core.corrections import correction_metrics, icepop
from verl_ext.core.guard import GuardState, Verdict, judge
from verl_ext.core.mismatch import mismatch_metrics, mismatch_ratio
from verl_ext.core.routing import router_metrics
from verl_ext.errors import HookError
from verl_ext.trainer import startup
from verl_ext.trainer.batch import FIELDS, ResponseTokens
from verl_ext.trainer.checks import uses_icepop_loss

ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
ROUTING_FIELDS = ("routed_experts", "router_sums", "router_agreement")
STATE_FILE = "verl_ext.json"


class StabilityMixin:
    """The features around the steps of verl's PPOTrainer; each override calls verl's own.

    Order in a step: old log-probs -> router agreement -> mismatch, correction, verdict -> advantages -> update or skip.
    """

    config: DictConfig
    global_steps: int
    role_worker_mapping: dict[Role, Any]

    def __init__(self, config: DictConfig):
        self.stability = stability_config(config.stability)
        self.icepop_loss = uses_icepop_loss(config)
        self.compares_engines = self.stability.needs_log_probs or self.icepop_loss
        self.guard = GuardState()
        self.verdict = Verdict(False)
        super().__init__(config)  # type: ignore[call-arg]

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        if self.stability.router_agreement:
            from verl_ext.workers.actor import ROUTING_WORKERS

            for role in ACTOR_ROLES:
                if role in self.role_worker_mapping:
                    verl_worker = startup.actor_class(self.role_worker_mapping[role])
                    self.role_worker_mapping[role] = ray.remote(ROUTING_WORKERS[verl_worker])

    def init(self) -> None:
        super().init()  # type: ignore[misc]
        startup.print_table(startup.verify(self))

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        if self.compares_engines:
            # After verl has averaged the local updates of this step: a running count must not be averaged.
            metrics["guard/skips"] = self.guard.skips
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        if self.stability.router_agreement:
            metrics.update(self._router_metrics(batch))
        return batch

    def _router_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["router_sums"])
        if "router_sums" not in data.keys():  # noqa: SIM118 (a TensorDict)
            raise HookError(
                "compute_log_prob returned no routing: the rollout's batch has no routed_experts. Check that vLLM runs "
                "with enable_return_routed_experts, or set stability.router_agreement=false"
            )
        sums = torch.stack(list(data["router_sums"].unbind()))
        layers = (sums.shape[1] - 2) // 2
        agree, exact, differs, tokens = sums.split([layers, layers, 1, 1], dim=1)
        return router_metrics(agree, exact, differs, tokens)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.verdict = Verdict(False)
        if self.compares_engines:
            # Before verl's own rejection takes the worst tokens out of response_mask: they are what is measured.
            self._measure_and_correct(batch, metrics)
        return super()._compute_advantage(batch, metrics)  # type: ignore[misc]

    def _measure_and_correct(self, batch: KVBatchMeta, metrics: dict) -> None:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        tokens = ResponseTokens.from_batch(data)
        metrics.update(mismatch_metrics(tokens.l_infer, tokens.l_old, tokens.mask))
        self._judge(tokens, metrics)
        k = mismatch_ratio(tokens.l_infer, tokens.l_old)
        if self.stability.correction == "icepop":
            result = icepop(k, self.stability.icepop.alpha, self.stability.icepop.beta)
            metrics.update(correction_metrics(result, tokens.mask, tokens.offsets, tokens.entropy))
            k = result.weight
        elif not self.icepop_loss:
            return
        # Response tokens that are not the model's carry no loss, and verl's own weights are 0 there.
        weights = {"rollout_is_weights": tokens.nested(torch.where(tokens.mask, k, torch.zeros_like(k)))}
        # verl's own put, at the end of its _compute_advantage, returns the meta that names this field too; workers
        # are sent the fields that the meta names.
        tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(weights, batch_size=len(batch))
        )

    def _judge(self, tokens: ResponseTokens, metrics: dict) -> None:
        rule = self.stability.batch_skip
        self.verdict = judge(
            metrics,
            tokens=tokens.count,
            non_finite=tokens.non_finite(),
            metric=rule.metric,
            threshold=rule.threshold,
        )
        self.guard.record(self.verdict)
        metrics["guard/skipped"] = int(self.verdict.skip)
        if rule.threshold is not None:
            metrics["guard/threshold"] = rule.threshold
        if self.verdict.skip:
            print(f"verl_ext: step {self.global_steps}: update skipped: {self.verdict.reason}", flush=True)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._compute_ref_log_prob(self._without_routing(batch), metrics)  # type: ignore[misc]

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._compute_values(self._without_routing(batch), metrics)  # type: ignore[misc]

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.verdict.skip:
            return batch
        return super()._update_critic(self._without_routing(batch), metrics)  # type: ignore[misc]

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.verdict.skip:
            return batch
        return super()._update_actor(self._without_routing(batch), metrics)  # type: ignore[misc]

    def _without_routing(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Keep the routing, hundreds of bytes a token, from being sent to stages that do not read it."""
        if self.stability.router_agreement and batch.fields is not None:
            batch.fields = [field for field in batch.fields if field not in ROUTING_FIELDS]
        return batch

    def _save_checkpoint(self) -> None:
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        os.makedirs(folder, exist_ok=True)
        # Before verl's own files: verl names a checkpoint the latest only when it is complete.
        with open(os.path.join(folder, STATE_FILE), "w", encoding="utf-8") as file:
            json.dump(self.guard.state_dict(), file)
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            folder = trainer.resume_from_path
        else:
            folder = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
        path = os.path.join(folder, STATE_FILE)
        if self.global_steps > 0 and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self.guard = GuardState(**json.load(file))


class StabilityTrainerSync(StabilityMixin, PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync`"""


class StabilityTrainerColocateAsync(StabilityMixin, PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=colocate_async`"""


class StabilityTrainerSeparateAsync(StabilityMixin, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=separate_async`"""


def install() -> None:
    """Put our trainers in the place of verl's, in this process.

    verl's `register_trainer` refuses a taken name, and much of its trainer compares the mode's name, so a
    mode of our own would not work.
    """
    TRAINER_REGISTRY.update(
        sync=StabilityTrainerSync,
        colocate_async=StabilityTrainerColocateAsync,
        separate_async=StabilityTrainerSeparateAsync,
    )
