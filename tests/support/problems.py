"""A run's problems as an error, for tests of what is refused."""

from typing import Any

from omegaconf import DictConfig

from verl_ext.base.errors import ConfigError, errors_of
from verl_ext.features.feature import RunFeatures
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.stability import stability_config
from verl_ext.features.table import problems_of, read_features
from verl_ext.launch.models import ModelShape
from verl_ext.launch.sizes import size_problems


def read_settings(node: Any) -> StabilityConfig:
    """Returns the settings of a `stability` node; raises a ConfigError if they contradict each other."""
    stability = stability_config(node)
    if problems := [*stability.problems()]:
        raise ConfigError.of(problems)
    return stability


def features_of(config: DictConfig, *, read_model: bool = True) -> RunFeatures:
    """Returns the features that a config switches on, before it is fitted."""
    return read_features(config, stability_config(config.stability), read_model=read_model)


def check_run(run: RunFeatures) -> None:
    """Raises a ConfigError of all of a run's errors."""
    if problems := errors_of(problems_of(run)):
        raise ConfigError.of(problems)


def check_sizes(config: DictConfig, shape: ModelShape | None) -> None:
    """Raises a ConfigError of all sizes that contradict each other."""
    if problems := errors_of(size_problems(config, shape)):
        raise ConfigError.of(problems)
