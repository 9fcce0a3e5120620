"""The state that our trainers keep from one batch to the next: settings, guard, files, and messages that are printed
once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any

from omegaconf import DictConfig
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base import names
from verl_ext.base.errors import BatchError
from verl_ext.core.advantages import reward_metrics
from verl_ext.core.answers import Servers
from verl_ext.core.losses import name_clipped
from verl_ext.core.measure import split_gap
from verl_ext.features.feature import Need
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.table import read_features
from verl_ext.features.verl_config import bypasses
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer import checkpoints
from verl_ext.trainer.batch import QueueBatch, read_batch
from verl_ext.trainer.captured import CapturedRouting, CapturedTopTokens
from verl_ext.trainer.guard_actions import GuardActions, build_guard
from verl_ext.trainer.logs import LineFile, keep_metrics
from verl_ext.trainer.queue import WorkerFields, row_multiple
from verl_ext.trainer.rescoring import rescore
from verl_ext.trainer.step import Outcome, Step, update_request
from verl_ext.trainer.sync_canary import CanaryRun
from verl_ext.trainer.sync_check import SyncCheck
from verl_ext.trainer.trajectories import Dump, TrajectoryLog, forget_trajectories
from verl_ext.workers.first_pass import take_routes


class StabilityRun:
    """Our part of a training run.

    Args:
        config: the run's config, the object that verl's trainer has.
        stability: its `stability` node.

    Attributes:
        features: the features that are on.
        guard, actions: the guard, with the rules that the run began with; the object that carries out its decisions.
        worker_fields: the fields of a batch that go to the workers.
        dump: the file of trajectories, once the run trains.
        canary, sync_check: the checks of weight syncs, by scores and tensor by tensor, if they are on.
    """

    def __init__(self, config: DictConfig, stability: StabilityConfig):
        self.features = read_features(config, stability)
        self.guard = build_guard(stability)
        self.actions = GuardActions(self.guard, config.trainer.default_local_dir)
        self.worker_fields = WorkerFields()
        self._servers = Servers()
        self.dump: Dump | None = None
        asked = canary_settings(self.features)
        required = stability.sync_canary.trajectories is not None
        self.canary = CanaryRun(asked, _unprocessed(config), required) if asked.trajectories else None
        check = stability.sync_check
        self.sync_check = SyncCheck(check, self.actions.record_decision) if check is not None else None
        self._config = config
        self._routing, self._top_tokens = CapturedRouting(), CapturedTopTokens()
        self._is_reused = False  # of the batch at hand
        self._rescored: dict[str, Tensor] = {}  # key -> l of the response under the weights that sampled it
        self._step: Step | None = None  # of the batch at hand, if it is measured
        self._batch: QueueBatch | None = None  # while verl computes its advantages

    def use_servers(self, addresses: Iterable[str], accelerators: Mapping[str, str]) -> None:
        """Breaks the gap down by these servers of the rollout, and prints their numbers if there are several; arguments
        as for `Servers`."""
        self._servers = Servers(addresses, accelerators)
        if len(self._servers.addresses) > 1 and Need.MEASURED_BATCHES in self.features.needs:
            print(f"verl_ext: replicas of the rollout: {self._servers}", flush=True)

    @contextmanager
    def writing(self, resumed: int) -> Iterator[None]:
        """Context in which verl trains: opens the run's files; at the end, prints the guard's last messages.

        Args:
            resumed: the step after which the run continues, 0 for a new run. A new run removes the files of an earlier
                run of its name that it does not write itself: they would pass for its own.
        """
        keep_metrics(resume=resumed > 0)
        with ExitStack() as files:
            if self.features.needs & {Need.MEASURED_BATCHES, Need.SENT_WEIGHTS}:  # whose decisions are logged
                events = LineFile(names.events_path(self._config), resume=resumed > 0)
                self.actions.log_to(files.enter_context(closing(events)))
                if kinds := self._servers.mixed:
                    reason = f"the rollout's servers have different accelerators, and so different kernels: {kinds}"
                    event = Event(resumed, "servers", "", None, None, "warn", reason)
                    self.actions.record_decision(Decision((event,)))
            elif not resumed:
                names.events_path(self._config).unlink(missing_ok=True)
            settings, path = self.features.stability.trajectories, names.trajectories_path(self._config)
            if settings.per_step:
                log = TrajectoryLog(path, settings, resumed=resumed)
                self.dump = files.enter_context(closing(Dump(log, settings)))
            elif not resumed:
                forget_trajectories(path)
            yield
        self.actions.end_run()

    def end_step(self, metrics: dict[str, float], groups: Mapping[str, Any]) -> None:
        """See `GuardActions.end_step`."""
        self.judge_first_pass(metrics)  # if there was no update, because the critic warms up
        if Need.MEASURED_BATCHES in self.features.needs:
            self.actions.end_step(metrics, groups)

    def judge_logged(self, metrics: Mapping[str, float]) -> None:
        """Judges the metrics that verl logs last, and puts the result into the checkpoint, if one was saved in this
        step."""
        if Need.MEASURED_BATCHES in self.features.needs:
            self.actions.judge_logged(metrics)
        now = self.guard.step
        if (now, now) in self.guard.state.unproven:
            checkpoints.save_states(self.guard, self.actions.diagnosis, self._config, now)

    def share_first_load(self, workers: Any) -> None:
        """Has the guard's state and the workers know the same first load of the experts: the one that either has."""
        if Need.COMPARED_ROUTERS in self.features.needs:
            state = self.guard.state
            state.first_load = next(filter(None, workers.first_expert_load(state.first_load)), [])

    def rescore(self, batch: KVBatchMeta, workers: Any) -> None:
        """Runs `rescoring.rescore`; `measure` turns its result into metrics."""
        rollout = self.features.config.actor_rollout_ref.rollout
        settings, multiple = self.features.stability.rescoring, row_multiple(workers, self.features.config)
        self._rescored = rescore(batch, self.guard.step, settings, workers, multiple, rollout.temperature)

    def begin_batch(self, batch: KVBatchMeta) -> bool:
        """Begins a batch of the update. Returns whether compute_log_prob is left out: if log-probs are reused, for a
        batch of one optimizer step. The agent loop may return several outputs per prompt, which make more."""
        reuses = Need.REUSED_LOG_PROBS in self.features.needs
        self._is_reused = reuses and len(batch.keys) <= trajectories_of_step(self.features.config)
        return self._is_reused

    @property
    def _is_late(self) -> bool:
        """Whether the training engine's log-probs of the batch are first known in the update."""
        return self._is_reused or bypasses(self.features.config)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the current batch."""
        return Outcome() if self._step is None else self._step.outcome

    def measure(self, batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any) -> None:
        """Measures and judges the batch before verl computes advantages.

        With the advantages, verl's own rejection removes the worst tokens from response_mask; they must be measured
        too.

        Raises:
            HookError: the batch lacks a field that compute_log_prob should have added.
        """
        self._step = self._batch = None
        read = read_batch(batch, self.features, self.guard.step, tokenizer, self._servers)
        for found, decision in (
            self._routing.judge(read, self.features, self.guard.step, late=self._is_late),
            self._top_tokens.judge(read, self.features, self.guard.step),
        ):
            metrics.update(found)
            self.actions.record_decision(decision)
        if Need.MEASURED_BATCHES not in self.features.needs:
            return
        keys, scores = read.scores()
        metrics["critic/score/mean"] = scores.mean().item()  # verl logs it after the update
        metrics |= reward_metrics(scores, keys)
        metrics |= read.answer_metrics(self.features.config.actor_rollout_ref, tokenizer)
        metrics |= self._rescored_metrics(read)
        self._step = Step(self.features, self.guard, self.actions, self._is_late)
        self._step.measure(read, metrics)
        if self.dump is not None:
            self.dump.look_at(read, self.guard.step)
        self._batch = read

    def _rescored_metrics(self, batch: QueueBatch) -> dict[str, float]:
        """Splits the gap of the trajectories that were scored with the weights that sampled them."""
        rescored, self._rescored = self._rescored, {}
        if not rescored:
            return {}
        tokens, _ = batch.tokens_of(batch.rows_of(rescored))
        return split_gap(tokens, list(rescored.values()))

    def joined_calls(self) -> AbstractContextManager[None]:
        """Context in which verl computes the advantages: `QueueBatch.joined`, if the batch is measured at once."""
        return self._batch.joined() if self._batch is not None and self._batch.is_one_block else nullcontext()

    def settle(self, batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any) -> KVBatchMeta:
        """Decides about the batch, once verl has computed the advantages, and writes the fields that the loss reads.

        It comes this late because filters may need the advantages' sign, and because the rewards of dropped
        trajectories still count in their group.

        Returns the batch, as verl's own `_compute_advantage` does: its meta names the new fields.
        """
        queued, self._batch = self._batch, None  # so that a whole batch's tensors are not kept through the update
        if self._step is None or queued is None:
            return batch
        refused = self._step.settle(queued, metrics).refused
        batch = queued.write(batch)
        if self.dump is not None:
            self.dump.write(batch, tokenizer, skipped=refused.reason if refused else "")
        return batch

    def update_batch(self, batch: KVBatchMeta, first: bool) -> KVBatchMeta:
        """Returns the batch for the actor's update: a copy.

        Args:
            first: the first update with the rollout's weights; in separate_async, l_old of later ones is older.

        Raises:
            BatchError: scores are centered, and the batch is more than one optimizer step.
        """
        self._require_one_step(batch)
        sent = self.worker_fields.update_batch(batch, self.features, late=self.outcome.late)
        sent.extra_info |= update_request(self.features, self.guard, self.outcome, first and not self._is_late)
        if self.outcome.late and self.features.stability.breakdown and len(self._servers.addresses) > 1:
            sent.extra_info[names.FIRST_PASS]["servers"] = tuple(self._servers.addresses)
        return sent

    def _require_one_step(self, batch: KVBatchMeta) -> None:
        if not self.features.stability.score_centering:
            return
        if len(batch.keys) > (one_step := trajectories_of_step(self.features.config)):
            raise BatchError(
                "stability.score_centering=true centers only the first optimizer step of a batch, and this batch of "
                f"{len(batch.keys)} trajectories makes {len(batch.keys) // one_step} steps of {one_step} "
                "(actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n): the agent loop returns several outputs "
                "per prompt, and verl fills the batch up to a multiple",
                fix=("stability.score_centering=false",),
            )

    def judge_first_pass(self, metrics: dict[str, float]) -> None:
        """Judges the routing that the update compared, then `Step.judge_first_pass`; completes the update's metrics."""
        name_clipped(metrics)
        if (counts := take_routes(metrics)) is not None:
            self.actions.record_decision(self._routing.judge_counts(counts, self.features.config, self.guard.step))
        if self._step is not None:
            self._step.judge_first_pass(metrics)


def trajectories_of_step(config: DictConfig) -> int:
    """Returns how many trajectories verl's `_update_actor` takes for an optimizer step."""
    rollouts = config.actor_rollout_ref
    return rollouts.actor.ppo_mini_batch_size * rollouts.rollout.n


def _unprocessed(config: DictConfig) -> bool:
    """Returns True if the rollout samples from the model's own distribution, and so returns its log-probabilities."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k in (-1, 0)
