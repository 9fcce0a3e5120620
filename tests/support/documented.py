"""Finds logged metrics that `verl_ext.base.metrics` does not know."""

from collections.abc import Iterable

from verl_ext.base.metrics import OURS, find

OPEN = ("actor/**", "filter/*/*")  # families for verl's other losses and for a user's own filters


def undocumented(names: Iterable[str]) -> set[str]:
    """Returns the names that are ours, or the actor's, and have no entry."""
    ours = {name for name in names if name.startswith((*OURS, "actor/"))}
    return {name for name in ours if (metric := find(name)) is None or metric.name in OPEN}
