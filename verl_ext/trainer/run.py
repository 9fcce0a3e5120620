"""The state that our trainers keep from one batch to the next: settings, guard, files, and messages that are printed
once."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base import names
from verl_ext.base.errors import BatchError, HookError
from verl_ext.core.advantages import reward_metrics
from verl_ext.core.measure import split_gap
from verl_ext.core.routing import router_metrics
from verl_ext.core.top_tokens import top_token_metrics
from verl_ext.features.feature import Part, RunFeatures
from verl_ext.features.stability import StabilityConfig
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.table import read_features
from verl_ext.features.verl_config import is_asynchronous, replay_mode, truncates
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer import checkpoints
from verl_ext.trainer.batch import filter_batch, lag_of
from verl_ext.trainer.captured import RETRACTED, CapturedRouting, Counts, retracted_share, sampled_counts
from verl_ext.trainer.guarding import GuardActions, build_guard
from verl_ext.trainer.logs import LineFile, keep_metrics
from verl_ext.trainer.queue import QueueBatch, Stages, get_fields, row_matrix, schema_of
from verl_ext.trainer.rescoring import rescore
from verl_ext.trainer.step import Outcome, Step, update_request
from verl_ext.trainer.sync_canary import CanaryRun
from verl_ext.trainer.trajectories import Dump, TrajectoryLog, forget_trajectories


class StabilityRun:
    """A training run, apart from verl's part.

    Args:
        config: the run's config, the object that verl's trainer has.
        stability: its `stability` node.

    Attributes:
        features: the features that are on; `use` replaces them.
        guard, actions: the guard, with the rules that the run began with, and the object that carries its decisions
            out.
        stages: the fields of a batch that go to the workers.
        dump: the file of trajectories, once the run trains.
        canary: the check of weight syncs, if it is on.
    """

    features: RunFeatures

    def __init__(self, config: DictConfig, stability: StabilityConfig):
        self.use(config, stability)
        self.guard = build_guard(stability)
        self.actions = GuardActions(self.guard, config.trainer.default_local_dir)
        self.stages = Stages()
        self.dump: Dump | None = None
        asked = canary_settings(self.features)
        required = stability.sync_canary.trajectories is not None
        self.canary = CanaryRun(asked, _unprocessed(config), required) if asked.trajectories else None
        self._config = config
        self._routing_dtype_told = False
        self._heads_missed = False  # has been reported
        self._captured = CapturedRouting()
        self._rescored: dict[str, Tensor] = {}  # key -> l of the response under the weights that sampled it
        self._step: Step | None = None  # of the batch at hand, if it is measured
        self._batch: QueueBatch | None = None  # while verl computes its advantages

    def use(self, config: DictConfig, stability: StabilityConfig) -> None:
        """Uses these settings from the next batch on. The guard and the files stay those of the run."""
        self.features = read_features(config, stability)

    @contextmanager
    def writing(self, resumed: int) -> Iterator[None]:
        """Context in which verl trains: opens the run's files; at the end, prints the guard's last messages.

        Args:
            resumed: the step after which the run continues, 0 for a new run. A new run removes the files of an earlier
                run of its name that it does not write itself: they would pass for its own.
        """
        keep_metrics(resume=resumed > 0)
        with ExitStack() as files:
            if self.features.uses(Part.MEASURE):
                events = LineFile(names.events_path(self._config), resume=resumed > 0)
                self.actions.events = files.enter_context(closing(events))
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
        self.judge_first_pass(metrics)  # if there was none: the critic warms up
        if self.features.uses(Part.MEASURE):
            self.actions.end_step(metrics, groups)

    def judge_logged(self, metrics: Mapping[str, float]) -> None:
        """Judges the metrics that verl logs last, and puts the result into the checkpoint, if one was saved in this
        step."""
        if self.features.uses(Part.MEASURE):
            self.actions.judge_logged(metrics)
        now = self.guard.step
        if (now, now) in self.guard.state.unproven:
            checkpoints.save_guard(self.guard, self._config, now)

    def compare_routing(self, batch: KVBatchMeta, data: TensorDict, metrics: dict[str, float]) -> None:
        """Logs `router/*`, from the sums that compute_log_prob left in the batch; warns of routing that cannot be
        right.

        Raises:
            HookError: there is no routing, or none since the start that a replay could use.
        """
        if names.ROUTER_SUMS not in data.keys():  # noqa: SIM118 (a TensorDict)
            raise HookError(
                "compute_log_prob returned no routing: the rollout's batch has no routed_experts",
                fix=("stability.router_agreement=false",),
                otherwise="check that the rollout runs with enable_return_routed_experts",
            )
        if not self._routing_dtype_told:  # not at the start: there is no routing yet
            self._routing_dtype_told = True
            dtype = schema_of(batch).get(names.ROLLOUT_ROUTES, {}).get("dtype")
            print(f"verl_ext: routed_experts is sent as {dtype}", flush=True)
        packed = row_matrix(data[names.ROUTER_SUMS])
        self.judge_routing(Counts.from_sums(packed), router_metrics(packed), metrics)

    def judge_routing(self, counts: Counts, found: dict[str, float], metrics: dict[str, float]) -> None:
        metrics.update(found)
        self.actions.carry_out(self._captured.judge(counts, self.features.config, self.guard.step))

    def judge_heads(self, found: dict[str, float], metrics: dict[str, float]) -> None:
        """Adds `vllm_kl/head*` to the step's metrics, and warns once if tokens that the update reads have no head."""
        metrics.update(found)
        missing = found.get("vllm_kl/head_missing", 0.0)
        if not missing or self._heads_missed or not self.features.uses(Part.HEADS_IN_UPDATE):
            return
        self._heads_missed = True
        what = ["their score is not centered"] * self.features.stability.score_centering
        what += ["their l_old and entropy are over the whole vocabulary"] * truncates(self.features.config)
        reason = (
            f"{missing:.2%} of the model's tokens came without the sampler's head, so {' and '.join(what)}: the agent "
            "loop returns tokens that the rollout engine did not sample there"
        )
        event = Event(self.guard.step, "sampler_head", "vllm_kl/head_missing", missing, 0.0, "warn", reason)
        self.actions.carry_out(Decision((event,)))

    def rescore(self, batch: KVBatchMeta, workers: Any) -> None:
        """Runs `rescoring.rescore`; `measure` turns its result into metrics."""
        rollout = self.features.config.actor_rollout_ref.rollout
        ranks = max(workers._dispatch_info["actor"]) + 1  # as verl's _balance_batch reads it, which ran before
        settings = self.features.stability.rescoring
        self._rescored = rescore(batch, self.guard.step, settings, workers, ranks, rollout.temperature)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the batch at hand: what it may do to the weights."""
        return Outcome() if self._step is None else self._step.outcome

    def measure(self, batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any) -> None:
        """Measures and judges the batch before verl computes advantages, from one read if it is one block.

        verl's own rejection removes the worst tokens from response_mask together with the advantages, and those tokens
        must be measured.

        Raises:
            HookError: the batch lacks a field that compute_log_prob should have added.
        """
        features, self._step = self.features, None
        compares = features.uses(Part.ROUTER_COMPARISON)
        if not compares and (counts := sampled_counts(batch, features.config)) is not None:
            self.judge_routing(counts, counts.metrics, metrics)
        if (share := retracted_share(batch, features.config)) is not None:
            metrics[RETRACTED] = share
            self.actions.carry_out(self._captured.judge_retracted(share, self.guard.step))
        reads_heads = features.uses(Part.HEADS) and not features.uses(Part.MEASURE_IN_UPDATE)
        checks = compares or replay_mode(features.config) == "R3"
        sums = [names.ROUTER_SUMS] * compares + [names.TOP_TOKEN_SUMS] * reads_heads + [names.ROUTE_SUM] * checks
        if features.uses(Part.MEASURE):
            lag = lag_of(batch.tags, self.guard.step) if is_asynchronous(features.config) else None
            view = partial(filter_batch, models=features.config.actor_rollout_ref, tokenizer=tokenizer)
            self._batch = QueueBatch(batch, lag, view if features.uses(Part.MASKS) else None)
            found = self._batch.start(sums)
        elif sums:
            found = get_fields(batch, sums)
        if compares:
            self.compare_routing(batch, found, metrics)
        if checks and names.ROUTE_SUM in found.keys():  # noqa: SIM118 (a TensorDict)
            metrics["router/checked"] = (row_matrix(found[names.ROUTE_SUM]) != 0).double().mean().item()
        if reads_heads:
            self.judge_heads(_compared_heads(found), metrics)
        if self._batch is None:
            return
        keys, scores = self._batch.scores()
        metrics["critic/score/mean"] = scores.mean().item()  # verl logs it after the update
        metrics |= reward_metrics(scores, keys)
        if rescored := self._rescored:
            self._rescored = {}
            tokens, _ = self._batch.tokens_of([batch.keys.index(key) for key in rescored])
            metrics.update(split_gap(tokens, list(rescored.values())))
        self._step = Step(features, self.guard, self.actions)
        self._step.measure(self._batch, metrics)
        if self.dump is not None:
            self.dump.look_at(self._batch, self.guard.step)

    def settle(self, batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any) -> KVBatchMeta:
        """Settles what becomes of the batch, once verl has written the advantages, and writes the fields of the loss.

        Filters may need the advantages' sign, and the rewards of dropped trajectories still belong to their group.

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

    def update_batch(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Returns the batch for the actor's update: a copy.

        Raises:
            BatchError: scores are centered, and the batch is more than one optimizer step.
        """
        self._require_one_step(batch)
        sent = self.stages.update_batch(batch, self.features)
        sent.extra_info |= update_request(self.features, self.guard, self.outcome)
        return sent

    def _require_one_step(self, batch: KVBatchMeta) -> None:
        if not self.features.stability.score_centering:
            return
        rollouts = self.features.config.actor_rollout_ref
        one_step = rollouts.actor.ppo_mini_batch_size * rollouts.rollout.n
        if len(batch.keys) > one_step:
            raise BatchError(
                "stability.score_centering=true centers the first optimizer step of a batch, and this batch of "
                f"{len(batch.keys)} trajectories makes {len(batch.keys) // one_step} steps of {one_step} "
                "(actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n): the agent loop returns several outputs "
                "per prompt, and verl fills the batch up to a multiple",
                fix=("stability.score_centering=false",),
            )

    def judge_first_pass(self, metrics: dict[str, float]) -> None:
        """See `Step.judge_first_pass`."""
        if self._step is not None:
            self._step.judge_first_pass(metrics)


def _compared_heads(data: TensorDict) -> dict[str, float]:
    """Returns `vllm_kl/head*`, from the sums that compute_log_prob left in the batch."""
    if names.TOP_TOKEN_SUMS not in data.keys():  # noqa: SIM118 (a TensorDict)
        raise HookError(
            "compute_log_prob read no heads: the rollout's batch has no top_token_ids",
            otherwise="if VERL_USE_EXTERNAL_PLUGINS is set, check that it names verl_ext on all nodes",
        )
    return top_token_metrics(row_matrix(data[names.TOP_TOKEN_SUMS]))


def _unprocessed(config: DictConfig) -> bool:
    """Returns True if the rollout samples from the model's own distribution, and so returns its log-probabilities."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k in (-1, 0)
