"""What is decided about a batch: measure -> judge -> weigh, then, on verl's advantages, filter.

A batch and scalars in, a decision out. Of what is passed in, the guard alone remembers anything. In bypass mode, the
gap is measured in the update: `judge_before` it, `judge_measured` after.

Shape legend: N response tokens, of a batch or of a part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from verl_ext.base.names import ROLLOUT_LOG_PROBS
from verl_ext.core.filters import FilterBatch, FilterOutcome, apply_filters
from verl_ext.core.measure import Measured, Settings, measure
from verl_ext.core.mismatch import advantage_metrics, mismatch_ratio
from verl_ext.core.tokens import Tokens
from verl_ext.features.stability import StabilityConfig
from verl_ext.guard.guard import Guard
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer.batch import non_finite


class Batch(Protocol):
    """What is judged: its tokens are at hand, or come in parts."""

    @property
    def count(self) -> int:
        """Generated tokens."""

    def measure(self, corrections: Mapping[str, Settings], *, breakdown: bool) -> Measured:
        """As `core.measure.measure`; the last one's weights are the batch's."""

    def non_finite(self) -> dict[str, int]:
        """Field -> how many of its values on generated tokens are NaN or infinite."""


@dataclass(frozen=True)
class Whole:
    """A batch whose tokens are at hand."""

    tokens: Tokens

    @property
    def count(self) -> int:
        return self.tokens.count

    def measure(self, corrections: Mapping[str, Settings], *, breakdown: bool) -> Measured:
        return measure(self.tokens, corrections, breakdown=breakdown)

    def non_finite(self) -> dict[str, int]:
        return non_finite(self.tokens)


@dataclass(frozen=True)
class Judged:
    """A batch before its advantages.

    Attributes:
        measured: what it was measured to be.
        decision: the guard's, and what else refuses the batch.
        metrics: the step's so far, those of this judgement among them.
    """

    measured: Measured
    decision: Decision
    metrics: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What a batch may do to the weights.

    Attributes:
        refused: the event that refuses their update; None where it takes place.
        filter_scale: trajectories with tokens over trajectories that the filters kept.
    """

    refused: Event | None = None
    filter_scale: float = 1.0


def judge(
    batch: Batch, signals: Mapping[str, float], stability: StabilityConfig, guard: Guard, due: str | None = None
) -> Judged:
    """Measure, let the guard judge, and measure again where it has just narrowed the band.

    Args:
        signals: the step's metrics so far.
        due: why a rollback or a stop that an earlier update caused is still to come, if one is.
    """
    narrowed = guard.tightens
    measured = _measure(batch, stability, narrowed)
    metrics = {**signals, **measured.metrics}
    foreseen, jump = guard.foresee(metrics)
    metrics |= foreseen
    found = guard.judge(metrics, batch.non_finite() if measured.non_finite else {})
    if guard.tightens and not narrowed:
        narrowed, measured = True, _measure(batch, stability, narrowed=True)
        metrics |= measured.metrics
    metrics |= _guard_metrics(stability, guard, narrowed)
    decision = _or_by_itself(Decision((*jump.events, *found.events)), measured, stability, guard.step, due)
    return Judged(measured, decision, metrics)


def judge_by_advantage(
    judged: Judged, sums: Tensor, metrics: dict[str, float], stability: StabilityConfig, guard: Guard
) -> tuple[Judged, Decision]:
    """Once there are advantages, log the gap by their sign (`sums_by_sign`), and let the guard judge that; and what it
    adds."""
    found = advantage_metrics(sums)
    metrics.update(found)
    decision = guard.judge(found)
    return replace(judged, decision=Decision((*judged.decision.events, *decision.events))), decision


def judge_before(
    batch: Batch, signals: Mapping[str, float], stability: StabilityConfig, guard: Guard, due: str | None = None
) -> Judged:
    """In bypass mode, let the guard judge what there is before the update; l_old of these tokens is l_infer."""
    count, bad = batch.count, batch.non_finite()[ROLLOUT_LOG_PROBS]
    found = guard.judge(signals, {ROLLOUT_LOG_PROBS: bad})
    unmeasured = Measured(None, {}, tokens=count, kept=count, non_finite=0)
    decision = _or_by_itself(found, unmeasured, stability, guard.step, due)
    return Judged(unmeasured, decision, dict(signals))


def judge_measured(
    measured: Measured, signals: Mapping[str, float], stability: StabilityConfig, guard: Guard, narrowed: bool
) -> tuple[Decision, dict[str, float]]:
    """In bypass mode, let the guard judge what was measured in the update; and what it went by.

    What refuses a batch here has refused its steps in the workers, which were given the guard's limits.

    Args:
        measured: of the first mini-batch, without weights; of no token where the batch was refused before.
        signals: the step's metrics so far.
        narrowed: whether the band was.
    """
    foreseen, jump = guard.foresee({**signals, **measured.metrics})
    bad = {"the training engine's log-probs": measured.non_finite} if measured.non_finite else {}
    found = guard.judge({**measured.metrics, **foreseen}, bad)
    decision = Decision((*jump.events, *found.events))
    if measured.tokens:
        decision = _or_by_itself(decision, measured, stability, guard.step, of="the first mini-batch")
    return decision, {**measured.metrics, **foreseen, **_guard_metrics(stability, guard, narrowed)}


def loss_weights(tokens: Tokens, weight: Tensor | None, loss_reads_k: bool) -> Tensor | None:
    """[N] what goes to the loss for each token: the corrections' weight, or the ratio that the loss icepop bounds."""
    if not loss_reads_k:
        return weight
    return mismatch_ratio(tokens.l_infer, tokens.l_old).nan_to_num_(0.0, 0.0, 0.0) * tokens.mask


def leave_out(batch: FilterBatch, weight: Tensor | None, stability: StabilityConfig) -> FilterOutcome:
    """What filters drop, and with denominator=kept what corrections drop (weight [N]), to be left out of the loss."""
    if stability.denominator == "kept" and weight is not None:
        batch = replace(batch, kept_N=batch.kept_N & (weight > 0))
    return apply_filters(batch, stability.filter_chain())


def refusal(step: int, rule: str, reason: str) -> Event:
    """The event of an update that is left out for another reason than a rule of the guard's."""
    return Event(step, rule, "", None, None, "skip", reason)


def _measure(batch: Batch, stability: StabilityConfig, narrowed: bool) -> Measured:
    return batch.measure(stability.corrections(tightened=narrowed), breakdown=stability.breakdown)


def _guard_metrics(stability: StabilityConfig, guard: Guard, narrowed: bool) -> dict[str, float]:
    """What the guard went by, for the report, which sees nothing but metrics."""
    metrics: dict[str, float] = {}
    if any(rule.action == "tighten" for rule in guard.rules):
        metrics["guard/tightened"] = int(narrowed)
    if (threshold := stability.batch_skip.threshold) is not None:
        metrics["guard/threshold"] = threshold
    if (boundary := stability.guard.boundary).signal == "vllm_kl/k3":
        metrics["guard/boundary"] = boundary.value
    return metrics


def _or_by_itself(
    decision: Decision,
    measured: Measured,
    stability: StabilityConfig,
    step: int,
    due: str | None = None,
    of: str = "the batch",
) -> Decision:
    """The guard's decision, or where it lets the batch pass, what else refuses it."""
    if decision.refusal is None and due:
        return Decision((*decision.events, refusal(step, "due", f"a rollback or stop is due: {due}")))
    if decision.refusal is None and measured.kept == 0:
        reason = f"{' and '.join(stability.correction_names)} dropped all {measured.tokens} tokens of {of}"
        return Decision((*decision.events, refusal(step, "correction", reason)))
    return decision
