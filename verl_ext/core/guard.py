"""The decision whether a batch may update the weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether to skip the update, and why in one sentence (empty when not skipped)."""

    skip: bool
    reason: str = ""


def judge(
    signals: Mapping[str, float],
    *,
    tokens: int,
    non_finite: Mapping[str, int],
    metric: str,
    threshold: float | None,
) -> Verdict:
    """Refuse a batch that has non-finite log-probabilities, or whose `metric` passes `threshold`.

    Args:
        signals: the step's metrics, `metric` among them.
        tokens: tokens the model generated in this batch, at least one.
        non_finite: tensor name -> its count of NaN and infinite entries.
        metric, threshold: the rule; a threshold of None switches it off, the first one always holds.
    """
    bad = [f"{name} has {count} non-finite values" for name, count in non_finite.items() if count]
    if bad:
        return Verdict(True, f"{' and '.join(bad)} among {tokens} tokens")
    if threshold is None:
        return Verdict(False)
    value = signals[metric]
    if math.isfinite(value) and value <= threshold:
        return Verdict(False)
    return Verdict(True, f"{metric}={value:.3g} passes stability.batch_skip.threshold={threshold:g}")


@dataclass
class GuardState:
    """What survives a restart: it is saved with verl's checkpoint."""

    skips: int = 0

    def record(self, verdict: Verdict) -> None:
        self.skips += verdict.skip

    def state_dict(self) -> dict[str, int]:
        return asdict(self)
