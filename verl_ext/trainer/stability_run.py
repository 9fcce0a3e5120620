"""What our trainers hold of a run: its settings, its guard, its files, and what was decided about the batch at hand."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import BatchError, HookError
from verl_ext.base.names import (
    FILTER_SCALE,
    FIRST_PASS,
    ROLLOUT_ROUTES,
    ROUTER_SUMS,
    UPDATE,
    events_path,
    trajectories_path,
)
from verl_ext.core.routing import router_metrics
from verl_ext.features.stability import StabilityConfig
from verl_ext.features.verl_config import truncates
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer import checkpoints
from verl_ext.trainer.active import Active, read_active
from verl_ext.trainer.batch_step import BatchStep
from verl_ext.trainer.canary_scores import CanaryRun
from verl_ext.trainer.captured import CapturedRouting, Counts
from verl_ext.trainer.guarding import GuardActions, build_guard
from verl_ext.trainer.logs import EventLog, keep_metrics
from verl_ext.trainer.rescoring import rescore
from verl_ext.trainer.step import Outcome, judge_measured
from verl_ext.trainer.trajectories import Dump, TrajectoryLog, forget_trajectories
from verl_ext.trainer.transfer import HEAD_FIELDS, SEEN, SHIFT_FIELDS, of_rows, schema_of, without, without_heavy
from verl_ext.workers.first_pass import take_measured


class StabilityRun:
    """A run of training, but for what is verl's.

    Args:
        config: the run's, the object that verl's trainer has.
        stability: its `stability` node.

    Attributes:
        active: what is switched on; `use` replaces it.
        guard, actions: what decides, with the rules that the run began with, and what carries that out.
        outcome: of the last batch that has its advantages.
        dump: where trajectories go, once the run trains.
        canary: what looks at the weight syncs, where that is asked for.
    """

    active: Active

    def __init__(self, config: DictConfig, stability: StabilityConfig):
        self.use(config, stability)
        self.guard = build_guard(stability)
        self.actions = GuardActions(self.guard, config.trainer.default_local_dir)
        self.outcome = Outcome()
        self.dump: Dump | None = None
        asked = stability.sync_canary
        self.canary = CanaryRun(asked, _unprocessed(config)) if asked.trajectories else None
        self._config = config
        self._routing_dtype_told = False
        self._narrowed = False  # the band, for the update at hand
        self._judges_late = False  # the batch at hand is still to be judged, with its update
        self._heads_missed = False  # has been told
        self._captured = CapturedRouting()
        self._unread: frozenset[str] = frozenset()  # fields of the batch at hand
        self._rescored: dict[str, Tensor] = {}  # key -> l of the response under the weights that sampled it

    def use(self, config: DictConfig, stability: StabilityConfig) -> None:
        """Take these settings from the next batch on. The guard and the files stay those of the run."""
        self.active = read_active(config, stability)

    @contextmanager
    def writing(self, resumed: int) -> Iterator[None]:
        """The files that a run leaves, while verl trains; at the end, what the guard has still to say.

        Args:
            resumed: the step that the run goes on after, 0 for a new one. That removes what an earlier run of its name
                left and this one does not write: it would pass for this one's.
        """
        keep_metrics(resume=resumed > 0)
        with ExitStack() as files:
            if self.active.compares_engines:
                events = EventLog(events_path(self._config), resume=resumed > 0)
                self.actions.events = files.enter_context(closing(events))
            elif not resumed:
                events_path(self._config).unlink(missing_ok=True)
            settings, path = self.active.stability.trajectories, trajectories_path(self._config)
            if settings.per_step:
                log = TrajectoryLog(path, settings, resumed=resumed)
                self.dump = files.enter_context(closing(Dump(log, settings)))
            elif not resumed:
                forget_trajectories(path)
            yield
        self.actions.end_run()

    def saving(self, step: int) -> AbstractContextManager[None]:
        return checkpoints.saving(self.guard, self._config, step)

    def loading(self) -> AbstractContextManager[None]:
        return checkpoints.loading(self.guard, self._config)

    def end_step(self, metrics: dict[str, float], groups: Mapping[str, Any]) -> None:
        """See `GuardActions.end_step`."""
        self.judge_update(metrics)  # where there was none: the critic warms up
        if self.active.compares_engines:
            self.actions.end_step(metrics, groups)

    def judge_logged(self, metrics: Mapping[str, float]) -> None:
        """Judge what verl logs last, and put that into the checkpoint, if one was saved in this step."""
        if self.active.compares_engines:
            self.actions.judge_logged(metrics)
        now = self.guard.step
        if (now, now) in self.guard.state.unproven:
            checkpoints.save_guard(self.guard, self._config, now)

    def compare_routing(self, batch: KVBatchMeta, data: TensorDict, metrics: dict[str, float]) -> None:
        """Log `router/*`, from the sums that compute_log_prob left in the batch; tell what cannot be believed of it.

        Raises:
            HookError: there is no routing, or none from the start that a replay could use.
        """
        if ROUTER_SUMS not in data.keys():  # noqa: SIM118 (a TensorDict)
            raise HookError(
                "compute_log_prob returned no routing: the rollout's batch has no routed_experts",
                fix=("stability.router_agreement=false",),
                otherwise="check that the rollout runs with enable_return_routed_experts",
            )
        if not self._routing_dtype_told:  # not at the start: there is no routing yet
            self._routing_dtype_told = True
            dtype = schema_of(batch).get(ROLLOUT_ROUTES, {}).get("dtype")
            print(f"verl_ext: routed_experts travels as {dtype}", flush=True)
        packed = of_rows(data[ROUTER_SUMS])
        self.judge_routing(Counts.of_sums(packed), router_metrics(packed), metrics)

    def judge_routing(self, counts: Counts, found: dict[str, float], metrics: dict[str, float]) -> None:
        metrics.update(found)
        self.actions.carry_out(self._captured.judge(counts, self.active.config, self.guard.step))

    def judge_heads(self, found: dict[str, float], metrics: dict[str, float]) -> None:
        """Add `vllm_kl/head*` to the step's metrics, and warn once where tokens that the update reads have no head."""
        metrics.update(found)
        missing = found.get("vllm_kl/head_missing", 0.0)
        if not missing or self._heads_missed or not self.active.update_reads_heads:
            return
        self._heads_missed = True
        what = ["their score is not centered"] * self.active.stability.score_centering
        what += ["their l_old and entropy are over the whole vocabulary"] * truncates(self.active.config)
        reason = (
            f"{missing:.2%} of the model's tokens came without the sampler's head, so {' and '.join(what)}: the agent "
            "loop returns tokens that the rollout engine did not sample there"
        )
        event = Event(self.guard.step, "sampler_head", "vllm_kl/head_missing", missing, 0.0, "warn", reason)
        self.actions.carry_out(Decision((event,)))

    def rescore(self, batch: KVBatchMeta, workers: Any) -> None:
        """See `rescoring.rescore`; `judge` makes metrics of it."""
        rollout = self.active.config.actor_rollout_ref.rollout
        ranks = max(workers._dispatch_info["actor"]) + 1  # as verl's _balance_batch reads it, which ran before
        settings = self.active.stability.rescoring
        self._rescored = rescore(batch, self.guard.step, settings, workers, ranks, rollout.temperature)

    def take_rescored(self) -> dict[str, Tensor]:
        """What was rescored of the batch at hand: key -> l of its response under the weights that sampled it."""
        found, self._rescored = self._rescored, {}
        return found

    def batch_step(self, batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any) -> BatchStep:
        """What is to be done around the advantages of the next batch."""
        self.outcome = Outcome()
        return BatchStep(self, batch, metrics, tokenizer)

    def settle(self, outcome: Outcome, metrics: dict[str, float]) -> None:
        """What the batch at hand may do to the weights; in bypass mode that is not all yet."""
        self.outcome = outcome
        self._narrowed, self._judges_late = self.guard.tightens, self.active.measures_in_update
        if not self._judges_late:
            self._count(outcome.refused is not None, metrics)
        elif outcome.refused is not None:
            self.judge_update(metrics)

    def look_at_sync(self, handles: Sequence[Any]) -> None:
        """After a weight sync: did it reach the servers behind these handles?"""
        if self.canary is not None:
            self.actions.carry_out(self.canary.after_sync(self.guard.step, handles))

    def for_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch as compute_log_prob is sent it, a copy: the first stage of a batch that goes to the workers.

        Workers of verl's own and ours read no columns of the dataset, nor what the agent loop notes of a trajectory:
        some twenty fields, and a row of each costs whoever fetches the batch as much as a row of numbers.
        """
        if not self.active.own_workers:  # those of somebody else may read all of it
            self._unread = frozenset()
            return replace(batch)
        schema = schema_of(batch)
        self._unread = frozenset(name for name, of in schema.items() if of["is_non_tensor"] and name != SEEN)
        return without(replace(batch, fields=batch.fields or list(schema)), self._unread)

    def for_reference(self, batch: KVBatchMeta, *, in_actor: bool) -> KVBatchMeta:
        """The batch as the reference is sent it: a copy."""
        # A LoRA's reference is the actor without its adapter, and is routed as the actor is.
        return without(without_heavy(batch, {self.active.replayed} if in_actor else set()), self._unread)

    def for_update(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch as the actor's update is sent it: a copy.

        Raises:
            BatchError: scores are centered, and the batch is more than one optimizer step.
        """
        self._require_one_step(batch)
        heads = HEAD_FIELDS if self.active.update_reads_heads else ()
        sent = without(without_heavy(batch, {self.active.replayed, *SHIFT_FIELDS, *heads}), self._unread)
        # For the losses that divide by a number of trajectories, dropped ones included: worker_loss.
        sent.extra_info[FILTER_SCALE] = self.outcome.filter_scale
        sent.extra_info[UPDATE] = {"step": self.guard.step, "lr_scale": self.guard.lr_scale}
        if self.active.measures_in_update:
            sent.extra_info[FIRST_PASS] = {"narrowed": self._narrowed, "limits": self.guard.limits}
        return sent

    def _require_one_step(self, batch: KVBatchMeta) -> None:
        if not self.active.stability.score_centering:
            return
        rollouts = self.active.config.actor_rollout_ref
        one_step = rollouts.actor.ppo_mini_batch_size * rollouts.rollout.n
        if len(batch.keys) > one_step:
            raise BatchError(
                "stability.score_centering=true centers the first optimizer step of a batch, and this batch of "
                f"{len(batch.keys)} trajectories makes {len(batch.keys) // one_step} steps of {one_step} "
                "(actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n): the agent loop returns several outputs a "
                "prompt, and verl fills the batch up to a multiple",
                fix=("stability.score_centering=false",),
            )

    def judge_update(self, metrics: dict[str, float]) -> None:
        """In bypass mode, judge what the workers measured in the update, and refused by it."""
        if not self._judges_late:
            return
        self._judges_late = False
        measured, refused = take_measured(metrics)
        self._count(refused or self.outcome.refused is not None, metrics)
        decision, found = judge_measured(measured, metrics, self.active.stability, self.guard, self._narrowed)
        metrics.update(found)
        self.actions.carry_out(decision)

    def _count(self, refused: bool, metrics: dict[str, float]) -> None:
        self.guard.count(refused)
        metrics["guard/skipped"] = int(refused)


def _unprocessed(config: DictConfig) -> bool:
    """Whether the rollout samples from the model's own distribution, and so gives its log-probabilities."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k in (-1, 0)
