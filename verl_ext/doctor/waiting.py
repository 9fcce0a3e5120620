"""What is waiting while an asynchronous run refuses updates."""

from collections.abc import Iterable
from math import ceil

from verl_ext.doctor.context import ASYNCHRONOUS, MODE, Context
from verl_ext.doctor.findings import Finding, check

STOP_AFTER = "stability.guard.stop_after"


@check("waiting batches")
def waiting_batches(context: Context) -> Iterable[Finding]:
    """A guard that stops the run before newer rollouts can reach it.

    Batches that were sampled before an update is refused are as far from the policy as the refused one.

    Source: recipes/collapse, where with 32 batches waiting, stop_after=10 ended a run that went on, and lived, with 50.
    """
    mode = context.get(MODE)
    stop_after = context.get(STOP_AFTER)
    if mode not in ASYNCHRONOUS or stop_after is None or not _skips(context):
        return
    waiting = ceil(context.get(f"trainer.v1.{mode}.num_warmup_batches", 0))
    if waiting < stop_after:
        yield Finding("ok", f"{STOP_AFTER}={stop_after} with {waiting} batches waiting")
        return
    why = "all of them may be refused like the first, and the run stops before one of today's weights comes"
    found = f"{STOP_AFTER}={stop_after} with trainer.v1.{mode}.num_warmup_batches={waiting}"
    yield Finding("warning", found, why, (f"{STOP_AFTER}={waiting + stop_after}",))


def _skips(context: Context) -> bool:
    rules = (context.get("stability.guard.rules") or {}).values()
    return context.get("stability.batch_skip.threshold") is not None or any(
        rule and rule.get("action") == "skip" for rule in rules
    )
