"""What is decided about a batch: measure -> judge -> weigh, then, on verl's advantages, filter.

Tensors and scalars in, a decision out. Of what is passed in, the guard alone remembers anything.

Shape legend: N response tokens of all trajectories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from verl_ext.core.filtering import FilterBatch, FilterOutcome, apply_filters
from verl_ext.core.measure import Measured, measure
from verl_ext.core.mismatch import mismatch_ratio
from verl_ext.core.tokens import Tokens
from verl_ext.guard.guard import Guard
from verl_ext.guard.state import Decision, Event
from verl_ext.settings.config import StabilityConfig
from verl_ext.trainer.batch import non_finite


@dataclass(frozen=True)
class Judged:
    """A batch before its advantages.

    Attributes:
        tokens, measured: what was measured, and what came of it.
        decision: the guard's, and what else refuses the batch.
        metrics: the step's so far, those of this judgement among them.
    """

    tokens: Tokens
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
    tokens: Tokens, signals: Mapping[str, float], stability: StabilityConfig, guard: Guard, due: str | None = None
) -> Judged:
    """Measure, let the guard judge, and measure again where it has just narrowed the band.

    Args:
        signals: the step's metrics so far.
        due: why a rollback or a stop that an earlier update caused is still to come, if one is.
    """
    narrowed = guard.tightens
    measured = _measure(tokens, stability, narrowed)
    metrics = {**signals, **measured.metrics}
    foreseen, jump = guard.foresee(metrics)
    metrics |= foreseen
    found = guard.judge(metrics, non_finite(tokens) if measured.non_finite else {})
    if guard.tightens and not narrowed:
        narrowed, measured = True, _measure(tokens, stability, narrowed=True)
        metrics |= measured.metrics
    metrics |= _guard_metrics(stability, guard, narrowed)
    events = (*jump.events, *found.events)
    if found.refusal is None and (refused := _refuse_by_itself(measured, stability, guard.step, due)):
        events = (*events, refused)
    return Judged(tokens, measured, Decision(events), metrics)


def loss_weights(judged: Judged, loss_reads_k: bool) -> Tensor | None:
    """[N] what goes to the loss for each token: the corrections' weights, or the ratio that the loss icepop bounds."""
    if not loss_reads_k:
        return judged.measured.weight
    tokens = judged.tokens
    return mismatch_ratio(tokens.l_infer, tokens.l_old).nan_to_num_(0.0, 0.0, 0.0) * tokens.mask


def leave_out(batch: FilterBatch, weight: Tensor | None, stability: StabilityConfig) -> FilterOutcome:
    """What filters drop, and with denominator=kept what corrections drop (weight [N]), to be left out of the loss."""
    if stability.denominator == "kept" and weight is not None:
        batch = replace(batch, kept_N=batch.kept_N & (weight > 0))
    return apply_filters(batch, stability.filter_chain())


def refusal(step: int, rule: str, reason: str) -> Event:
    """The event of an update that is left out for another reason than a rule of the guard's."""
    return Event(step, rule, "", None, None, "skip", reason)


def _measure(tokens: Tokens, stability: StabilityConfig, narrowed: bool) -> Measured:
    return measure(tokens, stability.corrections(tightened=narrowed), breakdown=stability.breakdown)


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


def _refuse_by_itself(measured: Measured, stability: StabilityConfig, step: int, due: str | None) -> Event | None:
    if due:
        return refusal(step, "due", f"a rollback or stop is due: {due}")
    if measured.kept == 0:
        dropped_by = " and ".join(stability.correction_names)
        return refusal(step, "correction", f"{dropped_by} dropped all {measured.tokens} tokens of the batch")
    return None
