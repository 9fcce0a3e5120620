"""The controller's part of one batch: measure -> judge -> weigh, then, with advantages, judge by sign -> filter.

All decisions about a batch are made here. This file knows neither verl nor Ray nor TransferQueue: verl's trainers drive
a step with the queue's batch (`trainer.batch.QueueBatch`), the lab with its tensors. Without compute_log_prob the
workers measure the gap in the update: the step judges the metrics that exist before it, and the rest after it.

Shape legend: N response tokens of a block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from verl_ext.base import names
from verl_ext.base.errors import BatchError
from verl_ext.core.filters import FilterBatch, FilterOutcome, FilterTally, apply_filters, merge_tallies
from verl_ext.core.measure import Gathered, Measured, gather, put_together
from verl_ext.core.mismatch import advantage_metrics, count_non_finite
from verl_ext.core.tokens import Tokens
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.settings import StabilityConfig
from verl_ext.guard.guard import REFUSED, Guard
from verl_ext.guard.state import Decision, Event
from verl_ext.workers.first_pass import take_measured, verls_gap

if TYPE_CHECKING:
    from verl_ext.trainer.guard_actions import GuardActions  # its checkpoints import Ray

Block = Any  # a batch's own handle of some of its trajectories


class Batch(Protocol):
    """The interface of a batch, in blocks: one if its tokens are in memory, several if they are read one by one.

    All trajectories of a prompt are in the same block.
    """

    def blocks(self, *, by_sign: bool) -> Iterator[tuple[Block, Tokens]]:
        """Yields the tokens as they were sampled, block by block; with `by_sign`, `sums_by_sign` is called later."""

    def put(self, block: Block, fields: Mapping[str, Tensor]) -> None:
        """Takes fields of a block's tokens that the update reads: field of `base.names` -> [N] values."""

    def sums_by_sign(self) -> Tensor:
        """Returns `core.mismatch.sums_by_sign` of the batch, once it has advantages."""

    def views(self, *, weighed: bool) -> Iterator[tuple[Block, FilterBatch, Tensor | None]]:
        """Yields the blocks as filters see them, once there are advantages; if `weighed`, with the weights put before,
        if there are any."""


@dataclass(frozen=True)
class Outcome:
    """The decision about what a batch may do to the weights.

    Attributes:
        refused: the event that refuses the update; None if it takes place.
        filter_scale: trajectories with tokens over trajectories that the filters kept.
        late: whether the workers measure the batch in the update.
        narrowed: whether they then use the narrow band.
    """

    refused: Event | None = None
    filter_scale: float = 1.0
    late: bool = False
    narrowed: bool = False


class Step:
    """The decisions about one batch.

    First `measure`, then verl's advantages, then `settle`; if the workers measure, `judge_first_pass` after the update.

    Each adds to the metrics of the step so far. The batch is not kept between the calls.

    Args:
        features: the features that are on.
        guard, actions: those of the run; only they keep state from one batch to the next.
        late: whether the workers measure the batch in the update; by default, if the run's features say so.

    Attributes:
        outcome: the decision so far; final once it is settled.
    """

    def __init__(self, features: RunFeatures, guard: Guard, actions: "GuardActions", late: bool | None = None):
        self.outcome = Outcome(late=Need.MEASURED_IN_UPDATE in features.needs if late is None else late)
        self._features, self._stability = features, features.stability
        self._guard, self._actions = guard, actions
        self._is_open = False  # the workers' metrics are still to be judged

    def measure(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Measures, weighs and judges a batch as it was sampled; if the workers measure it, judges the metrics that
        exist by then.

        Raises:
            BatchError: the model generated no token of the batch.
        """
        judged = self._judge_unmeasured if self.outcome.late else self._judge_measured
        decision = judged(batch, metrics)
        self._actions.record_decision(decision)
        self.outcome = replace(self.outcome, refused=decision.refusal)

    def settle(self, batch: Batch, metrics: dict[str, float]) -> Outcome:
        """Judges by the advantages' sign, filters, and counts the outcome; if the workers measure, `judge_first_pass`
        does."""
        late, refused = self.outcome.late, self.outcome.refused
        if self._stability.breakdown and not late:
            found = advantage_metrics(batch.sums_by_sign())
            metrics.update(found)
            decision = self._guard.judge(found)
            self._actions.record_decision(decision)
            refused = refused or decision.refusal
        scale = 1.0
        if refused is None and Need.LOSS_MASK in self._features.needs:
            refused, scale = self._filter(batch, metrics)
        self.outcome = Outcome(refused, scale, late, self._guard.tightens)
        self._is_open = late
        if not late:
            self._count(refused is not None, metrics)
        elif refused is not None:  # there will be no update
            self.judge_first_pass(metrics)
        return self.outcome

    def judge_first_pass(self, metrics: dict[str, float]) -> None:
        """Judges the workers' measurements of the update once, if they measure; without an update, records that there
        was none.

        A rule that refuses the batch here has already refused its steps in the workers, by the guard's limits.
        """
        if not self._is_open:
            return
        self._is_open, guard = False, self._guard
        measured, refused = take_measured(metrics)
        if refused:  # by the batch's measurements: its mini-batches are not refused one by one
            metrics.pop(REFUSED, None)
        self._count(refused or self.outcome.refused is not None, metrics)
        foreseen, jump = guard.foresee(metrics | measured.metrics)
        bad = {"the training engine's log-probs": measured.non_finite} if measured.non_finite else {}
        found = guard.judge(measured.metrics | foreseen, bad)
        decision = Decision((*jump.events, *found.events))
        if measured.tokens:
            decision = self._add_refusal(decision, measured, of="the first mini-batch")
        metrics |= measured.metrics | foreseen | self._guard_metrics(self.outcome.narrowed)
        if Need.REUSED_LOG_PROBS in self._features.needs:
            metrics |= verls_gap(measured)
        self._actions.record_decision(decision)

    def _judge_measured(self, batch: Batch, metrics: dict[str, float]) -> Decision:
        """Measures, lets the guard judge, and measures again if the guard has just narrowed the band."""
        guard, narrowed = self._guard, self._guard.tightens
        measured, bad = self._measure(batch, narrowed)
        metrics |= measured.metrics
        foreseen, jump = guard.foresee(metrics)
        metrics |= foreseen
        found = guard.judge(metrics, bad)
        if guard.tightens and not narrowed:
            narrowed, (measured, _) = True, self._measure(batch, narrowed=True)
            metrics |= measured.metrics
        metrics |= self._guard_metrics(narrowed)
        return self._add_refusal(Decision((*jump.events, *found.events)), measured, due=self._actions.due)

    def _judge_unmeasured(self, batch: Batch, metrics: dict[str, float]) -> Decision:
        """Judges a batch before the workers measure it; l_old of its tokens is not known, and is read as l_infer."""
        tokens = bad = 0
        for block, found in batch.blocks(by_sign=False):
            tokens += found.count
            bad += count_non_finite(found.l_infer, found.mask)
            self._put(batch, block, found, None)
        _require_generated(tokens)
        decision = self._guard.judge(metrics, {names.ROLLOUT_LOG_PROBS: bad})
        unmeasured = Measured(None, {}, tokens=tokens, kept=tokens, non_finite=0)
        return self._add_refusal(decision, unmeasured, due=self._actions.due)

    def _measure(self, batch: Batch, narrowed: bool) -> tuple[Measured, dict[str, int]]:
        """Measures like `core.measure.measure`, and puts the weights into the batch. Also returns field -> the number
        of its values on generated tokens that are NaN or infinite."""
        corrections, breakdown = self._stability.corrections(narrowed=narrowed), self._stability.breakdown
        gathered, bad = list[Gathered](), {names.ROLLOUT_LOG_PROBS: 0, names.OLD_LOG_PROBS: 0}
        for block, tokens in batch.blocks(by_sign=breakdown):
            weight, part = gather(tokens, corrections, breakdown=breakdown)
            gathered.append(part)
            if part.non_finite:
                bad[names.ROLLOUT_LOG_PROBS] += count_non_finite(tokens.l_infer, tokens.mask)
                bad[names.OLD_LOG_PROBS] += count_non_finite(tokens.l_old, tokens.mask)
            self._put(batch, block, tokens, weight)
        _require_generated(sum(part.tokens for part in gathered))
        return put_together(gathered, corrections), bad

    def _put(self, batch: Batch, block: Block, tokens: Tokens, weight: Tensor | None) -> None:
        fields = {} if weight is None else {names.WEIGHTS: weight}
        lag = tokens.lag_buckets() if Need.OUR_LOSS in self._features.needs else None
        if lag is not None:
            fields[names.LAG] = lag
        if fields:
            batch.put(block, fields)

    def _filter(self, batch: Batch, metrics: dict[str, float]) -> tuple[Event | None, float]:
        """Removes the dropped tokens from the loss's mask. Returns the refusal if nothing would be left, and the
        filters' scale."""
        step, kept = self._guard.step, self._stability.denominator == "kept"
        tallies, waiting = list[FilterTally](), list[tuple[Block, Tensor]]()
        for block, view, weight in batch.views(weighed=kept):
            left = leave_out(view, weight, self._stability)
            tallies.append(left)
            waiting.append((block, left.keep_N))
            tally = merge_tallies(tallies)
            while waiting and not tally.empty:
                filtered, keep_N = waiting.pop()
                batch.put(filtered, {names.RESPONSE_MASK: keep_N})
        metrics.update(tally.metrics)
        for name, key in tally.examples.items():
            print(f"verl_ext: step {step}: filter {name} dropped tokens of {key}", flush=True)
        if not tally.empty:
            return None, tally.scale
        refused = refusal(step, "filters", tally.reason)
        self._actions.record_decision(Decision((refused,)))
        return refused, tally.scale

    def _add_refusal(
        self, decision: Decision, measured: Measured, *, due: str | None = None, of: str = "the batch"
    ) -> Decision:
        """Returns the guard's decision; if it lets the batch pass, adds another reason to refuse it, if there is one.

        Args:
            due: the reason of a rollback or a stop that is still to come from an earlier update, if there is one.
        """
        if decision.refusal is None and due:
            event = refusal(self._guard.step, "due", f"a rollback or stop is due: {due}")
        elif decision.refusal is None and measured.kept == 0:
            dropping = " and ".join(self._stability.correction_names)
            event = refusal(self._guard.step, "correction", f"{dropping} dropped all {measured.tokens} tokens of {of}")
        else:
            return decision
        return Decision((*decision.events, event))

    def _guard_metrics(self, narrowed: bool) -> dict[str, float]:
        """Returns the guard's limits as metrics, for the report, which reads only metrics."""
        metrics: dict[str, float] = {}
        if any(rule.action == "tighten" for rule in self._guard.rules):
            metrics["guard/tightened"] = int(narrowed)
        if (threshold := self._stability.batch_skip.threshold) is not None:
            metrics["guard/threshold"] = threshold
        if (boundary := self._stability.guard.boundary).signal == "vllm_kl/k3":
            metrics["guard/boundary"] = boundary.value
        if (level := self._guard.level) is not None:
            metrics["guard/level"] = level
        return metrics

    def _count(self, refused: bool, metrics: dict[str, float]) -> None:
        self._guard.count(refused)
        metrics["guard/skipped"] = int(refused)


def update_request(features: RunFeatures, guard: Guard, outcome: Outcome, has_l_old: bool) -> dict[str, Any]:
    """Returns the requests to the workers that go with an update of the batch, by name of base.names.

    Args:
        has_l_old: compute_log_prob had the weights with which the update begins.
    """
    # FILTER_SCALE is for the losses that divide by a number of trajectories, dropped ones included: worker_loss.
    asked: dict[str, Any] = {
        names.FILTER_SCALE: outcome.filter_scale,
        names.UPDATE: {"step": guard.step, "lr_scale": guard.lr_scale, "has_l_old": has_l_old},
    }
    if outcome.late:
        asked[names.FIRST_PASS] = {"narrowed": outcome.narrowed, "limits": guard.limits}
    return asked


def leave_out(batch: FilterBatch, weight: Tensor | None, stability: StabilityConfig) -> FilterOutcome:
    """Returns the tokens to leave out of the loss: those that filters drop, and with denominator=kept those that
    corrections drop (weight [N])."""
    if stability.denominator == "kept" and weight is not None:
        batch = replace(batch, kept_N=batch.kept_N & (weight > 0))
    return apply_filters(batch, stability.filter_chain())


def refusal(step: int, rule: str, reason: str) -> Event:
    """Returns the event of an update that is skipped for a reason other than a guard rule."""
    return Event(step, rule, "", None, None, "skip", reason)


def _require_generated(tokens: int) -> None:
    if not tokens:
        raise BatchError(
            "response_mask is 0 everywhere: no response of this batch has a token that the model generated; check "
            "the agent loop and data.max_response_length"
        )
