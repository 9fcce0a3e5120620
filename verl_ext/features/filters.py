"""Batch filters: trajectories and tokens that `stability.filters` takes out of the loss's mask (core/filters.py)."""

from collections.abc import Iterator

from verl_ext.base.errors import Problem
from verl_ext.features.corrections import MASKED
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.verl_config import age_problems


def needs(run: RunFeatures) -> Iterator[Demand]:
    for chosen in run.stability.filters:
        off = ("stability.filters=null",)  # all filters need the same
        yield Demand(f"stability.filters.{chosen.name}", MASKED, off)


def problems(run: RunFeatures) -> Iterator[Problem]:
    for chosen in run.stability.filters:
        if chosen.method.needs_lag:
            yield from age_problems(
                run.config, f"stability.filters.{chosen.name}", run.stability.without_filter(chosen.name)
            )


def lines(run: RunFeatures) -> Iterator[TableLine]:
    for chosen in run.stability.filters:
        yield TableLine("batch filter", str(chosen), "response_mask and loss_mask")


def idle(run: RunFeatures) -> Iterator[Idle]:
    if Need.LOSS_MASK not in run.needs:
        yield Idle("filter/*", "no token is taken out of the loss's mask", ("stability.filters={overlong:{}}",))


FILTER = Feature(needs, problems, lines=lines, idle=idle)
