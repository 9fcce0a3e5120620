"""The probe on verl's stack: samples a batch and scores it in several ways, again after a sync and after an update."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_ext.base.errors import HookError
from verl_ext.base.names import ADVANTAGES, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS
from verl_ext.base.patching import patch
from verl_ext.diagnosis.probed import (
    BASE,
    DECODE,
    PACKED,
    PREFILL,
    PREFILL_AGAIN,
    REPLAYED,
    SYNC,
    TRAIN,
    TRAIN_AGAIN,
    UPDATE,
)
from verl_ext.features.routing import replayed_field
from verl_ext.probe.overrides import BATCHES, LAYERS, OUT, PROGRESS, experts_of
from verl_ext.probe.readings import compare_readings, compare_stage, compare_states, head_dtypes
from verl_ext.probe.sweep import GroupGap
from verl_ext.routing.recorder import MOST_ROWS, joined_passes
from verl_ext.trainer.canary_scores import CanaryTrajectories
from verl_ext.trainer.queue import get_fields, put_fields, ranks_of, row_multiple
from verl_ext.trainer.task_runner import StabilityTaskRunner
from verl_ext.trainer.trainers import StabilityMixin, StabilityTrainerSync, replace_workers
from verl_ext.trainer.watch import watch_of
from verl_ext.upstream import engine_states
from verl_ext.workers.actor import LOSS_WORKERS

SEQUENCES = 4  # sequences whose hidden states are compared
TOKENS_AT_ONCE = "log_prob_max_token_len_per_gpu"  # tokens per pass, if the launch puts sequences together


class ProbeTrainer(StabilityTrainerSync):
    """verl's trainer up to its first batch."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if not self.stability_run.features.own_workers:  # our workers record hidden states and fill adapters
            replace_workers(self.role_worker_mapping, LOSS_WORKERS)

    def fit(self, agent_loop_manager: Any) -> None:
        with watch_of(self, agent_loop_manager):
            super(StabilityMixin, self).fit(agent_loop_manager)  # without a run's files

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self.fill_adapters()
        print_progress("sampling")
        batch = self.sampled()
        out = Path(self.config[OUT])
        for found in self.measurements(batch):  # after an error, the file has the measurements before it
            out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
        return batch

    def measurements(self, batch: KVBatchMeta) -> Iterator[dict[str, Any]]:
        """Yields the measurements so far, after each of its parts."""
        found = self.probe(batch)
        yield found
        for name, parts in (("batches", self.batches()), ("layers", self.layers()), ("stages", self.stages(batch))):
            for part in parts:
                found[name] = part
                yield found

    def sampled(self) -> KVBatchMeta:
        """Samples one answer to each of the next prompts."""
        self.prepare_step()
        batch, _ = self.replay_buffer.sample(
            global_steps=self.global_steps, partition_id="train", batch_size=self.config.data.train_batch_size
        )
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return self._balance_batch(batch, metrics={})

    def fill_adapters(self) -> None:
        """Gives a new LoRA weights that change the model: its B is zero, so a missing LoRA would not show."""
        if self.ref_in_actor and all(self.actor_rollout_wg.fill_adapters()):
            self.checkpoint_manager.sleep_replicas()
            self.checkpoint_manager.update_weights(self.global_steps)

    def on_step_end(self) -> None:
        pass

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        pass

    def probe(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Compares the readings and the hidden states of a batch; returns plain values for JSON."""
        workers, server = self.actor_rollout_wg, self._rollout_server_managers()[-1].server_handles[0]
        ranks, multiple = ranks_of(workers), row_multiple(workers, self.config)  # --prompts is a multiple of both
        self.scores = scores = CanaryTrajectories(batch, len(batch), multiple)
        compared = CanaryTrajectories(batch, min(SEQUENCES * ranks, len(batch)), multiple)
        print_progress(f"the rollout engine scores {len(scores.l_infer_N)} tokens")
        readings: dict[str, Tensor] = {DECODE: scores.l_infer_N, PREFILL: scores.score_in_servers([server])[0]}
        readings[PREFILL_AGAIN] = scores.score_in_servers([server], backwards=True)[0]
        engine_states.begin_states(server)
        # One sequence per pass.
        compared.pass_through_server(server, MOST_ROWS)
        rollout = engine_states.end_states(server)
        self.on_sample_end()
        print_progress("the training engine scores them")
        readings[TRAIN] = scores.score_in_workers(workers, replays=False)
        readings[TRAIN_AGAIN] = scores.score_in_workers(workers, replays=False)
        if replayed_field(self.stability_run.features.config) is not None:
            print_progress("and with the experts of the rollout")
            readings[REPLAYED] = scores.score_in_workers(workers)
        print_progress("several in one pass")
        longest = max(map(len, scores.ids)) + 1
        budget = max(self.config.actor_rollout_ref.rollout[TOKENS_AT_ONCE], longest)
        readings[PACKED] = scores.score_in_workers(workers, replays=False, tokens_at_once=budget)
        if self.ref_in_actor:
            readings[BASE] = scores.score_in_workers(workers, replays=False, adapter=False)
        workers.record_states(True)
        compared.score_in_workers(workers, replays=False)
        train = {point: passes for of_rank in workers.record_states(False) for point, passes in of_rank.items()}
        head = head_dtypes(rollout, train)
        lengths = [min(len(ids), MOST_ROWS) for ids in compared.ids[: len(compared.ids) // ranks]]  # of the first rank
        # The rollout's states of the first rank's sequences.
        rollout_rows = {point: rows[: sum(lengths)] for point, rows in joined_passes(rollout).items()}
        places = compare_states(rollout_rows, joined_passes(train, lengths), experts_of(self.config))
        self.now = readings[PREFILL], readings[TRAIN]
        pairs = compare_readings(readings, scores.positions_N)
        self.gap = pairs[0]
        return {
            "tokens": len(scores.l_infer_N),
            "dtype": self.config.actor_rollout_ref.rollout.dtype,
            "pairs": [asdict(pair) for pair in pairs],
            "places": [asdict(place) for place in places],
            "head": head,
        }

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the gaps of all batches so far; each has new answers, sampled after a sync of the same weights."""
        found = [asdict(self.gap)]
        for number in range(2, 1 + self.config.get(BATCHES, 1)):
            print_progress(f"batch {number} with the same weights")
            self.checkpoint_manager.update_weights(self.global_steps)
            batch = self.sampled()
            scores = CanaryTrajectories(batch, len(batch), row_multiple(self.actor_rollout_wg, self.config))
            self.on_sample_end()
            train_N = scores.score_in_workers(self.actor_rollout_wg, replays=False)
            readings = {DECODE: scores.l_infer_N, TRAIN: train_N}
            found.append(asdict(compare_readings(readings, scores.positions_N)[0]))
            tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
            yield found

    def layers(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the gap with each group of the rollout's weights rounded so far; the first has none.

        Raises:
            HookError: the training engine sends its weights in another way.
        """
        if not (rounds_to := self.config.get(LAYERS)):
            return
        workers = self.actor_rollout_wg
        print_progress("nothing rounded")
        workers.round_sent("", rounds_to)
        found = [self.group_gap("", ())]
        yield found
        modules = workers.round_sent("", rounds_to)[0]
        if not modules:
            raise HookError(f"{self.config.actor_rollout_ref.actor.strategy} sent no weights that could be rounded")
        for number, (group, names) in enumerate(modules.items(), 1):
            print_progress(f"{group} in {rounds_to}, {number} of {len(modules)}")
            workers.round_sent(group, rounds_to)
            found.append(self.group_gap(group, names))
            yield found
        workers.round_sent(None, rounds_to)

    def group_gap(self, group: str, modules: Sequence[str]) -> dict[str, Any]:
        """Syncs the weights, with this group rounded, and compares the rollout with training's scores before it."""
        readings = {DECODE: self.synced_rollout(), TRAIN: self.now[1]}
        pair = compare_readings(readings, self.scores.positions_N)[0]
        return asdict(GroupGap(group, pair.k3, pair.k3_error, modules))

    def stages(self, batch: KVBatchMeta) -> Iterator[list[dict[str, Any]]]:
        """Scores the same tokens after a sync of the same weights, and after an update and its sync."""
        found: list[dict[str, Any]] = []
        for name in (SYNC, UPDATE):
            print_progress(f"after one {name}")
            before = self.now
            if name == UPDATE:
                self.update(batch)
            self.now = self.synced()
            found.append(asdict(compare_stage(name, before, self.now)))
            yield found

    def synced(self) -> tuple[Tensor, Tensor]:
        """Syncs the weights, then returns the scores of the rollout engine and of the training engine."""
        return self.synced_rollout(), self.scores.score_in_workers(self.actor_rollout_wg, replays=False)

    def synced_rollout(self) -> Tensor:
        """Syncs the weights, then returns the scores of the rollout engine."""
        self.checkpoint_manager.update_weights(self.global_steps)
        rollout = self.scores.score_in_servers([self._rollout_server_managers()[-1].server_handles[0]])[0]
        self.on_sample_end()
        return rollout

    def update(self, batch: KVBatchMeta) -> None:
        """Makes one update with advantages of 1 and -1 in turn, because a few answers may all have the same reward."""
        verls: Any = super(StabilityMixin, self)
        metrics: dict[str, Any] = {}
        log_probs = get_fields(batch, [ROLLOUT_LOG_PROBS])[ROLLOUT_LOG_PROBS]
        signs = [torch.full((len(row),), 1.0 - 2 * (number % 2)) for number, row in enumerate(log_probs.unbind())]
        made_up = {OLD_LOG_PROBS: log_probs, ADVANTAGES: torch.nested.as_nested_tensor(signs, layout=torch.jagged)}
        batch = put_fields(batch, made_up)
        if self.use_reference_policy:
            batch = verls._compute_ref_log_prob(batch, metrics)
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        verls._update_actor(batch, metrics)


class ProbeTaskRunner(StabilityTaskRunner):
    """verl's task runner, with the probe instead of its trainer."""

    def install(self) -> None:
        super().install()
        patch("probe_trainer", TRAINER_REGISTRY, "sync", ProbeTrainer)


def print_progress(what: str) -> None:
    print(f"{PROGRESS}{what}", flush=True)
