"""The settings of our advantage estimators, under verl's `algorithm`: `algorithm.qae`, `algorithm.grpo_positive`."""

from typing import Any

from verl_ext.base.methods import Chosen, Method, build
from verl_ext.core.advantages import ESTIMATORS


def estimator_settings(method: Method, algorithm: Any) -> Any:
    """The validated settings of an estimator; `algorithm` is verl's node, or None for the defaults.

    Raises:
        ConfigError: a setting is unknown, not a number or out of range.
    """
    given = algorithm.get(method.name, None) if algorithm is not None else None
    return build(method.settings, given, f"algorithm.{method.name}")


def estimator_of(config: Any) -> Chosen[Method] | None:
    """The estimator of ours that a run's config names."""
    method = ESTIMATORS.get(config.algorithm.adv_estimator)
    return None if method is None else Chosen(method, estimator_settings(method, config.algorithm))
