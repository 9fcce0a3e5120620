"""In bypass mode: what the workers measured, out of the metrics of the update that they came with."""

from collections.abc import MutableMapping

from verl_ext.core.measure import Measured

MEASURED = ("actor/vllm_kl/", "actor/correction/")  # verl puts what workers tell under actor/
TOLD = "actor/first_pass/"


def take_measured(metrics: MutableMapping[str, float]) -> tuple[Measured, bool]:
    """What was measured of the first mini-batch, and whether the workers refused the batch by it; nothing, of no token,
    where no update was made.

    Takes both out of the metrics, and has the policy's entropy stand under the name that compute_log_prob's has, where
    the update computed it: it is verl's same mean.
    """
    found = {name.removeprefix("actor/"): float(metrics.pop(name)) for name in [*metrics] if name.startswith(MEASURED)}
    told = {name.removeprefix(TOLD): int(metrics.pop(name)) for name in [*metrics] if name.startswith(TOLD)}
    refused = bool(told.pop("refused", 0))
    if "actor/entropy_loss" in metrics:
        metrics["actor/entropy"] = metrics["actor/entropy_loss"]
    return Measured(None, found, **{"tokens": 0, "kept": 0, "non_finite": 0, **told}), refused
