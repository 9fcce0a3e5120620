"""Batch filters: trajectories and tokens that `stability.filters` takes out of the loss's mask (core/filters.py)."""

from collections.abc import Iterator

from verl_ext.base.errors import ConfigError
from verl_ext.features.corrections import MASKED
from verl_ext.features.feature import Demand, Feature, RunFeatures, TableLine
from verl_ext.features.verl_config import MODE, is_asynchronous


def needs(run: RunFeatures) -> Iterator[Demand]:
    for chosen in run.stability.filters:
        off = ("stability.filters=null",)  # all filters need the same
        yield Demand(f"stability.filters.{chosen.name}", MASKED, off)


def check(run: RunFeatures) -> None:
    for chosen in run.stability.filters:
        if chosen.method.needs_lag and not is_asynchronous(run.config):
            raise ConfigError(
                f"stability.filters.{chosen.name} drops rollouts by their lag, which is always 0 with {MODE}=sync; "
                "leave the filter out, or train in an asynchronous mode",
                fallback=run.stability.without_filter(chosen.name),
            )


def lines(run: RunFeatures) -> Iterator[TableLine]:
    for chosen in run.stability.filters:
        yield TableLine("batch filter", str(chosen), "response_mask and loss_mask")


FILTER = Feature(needs, check, lines=lines)
