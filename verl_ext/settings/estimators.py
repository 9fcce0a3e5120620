"""The settings of our advantage estimators, under verl's `algorithm`: `algorithm.qae`, `algorithm.grpo_positive`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_ext.errors import ConfigError


@dataclass(frozen=True)
class Qae:
    """`algorithm.qae`: the quantile. The paper's default is 0.4; it takes 0.6 where the entropy is low."""

    k: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.k < 1:
            raise ConfigError(f"algorithm.qae.k={self.k:g} must be between 0 and 1, both excluded")


@dataclass(frozen=True)
class GrpoPositive:
    """`algorithm.grpo_positive`: what a negative advantage is multiplied by; 0 drops it, 1 is GRPO."""

    negative_scale: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.negative_scale < math.inf:
            raise ConfigError(
                f"algorithm.grpo_positive.negative_scale={self.negative_scale:g} must be at least 0 and finite: it "
                "multiplies the negative advantages, and 0 drops them"
            )


ESTIMATOR_SETTINGS: dict[str, Any] = {"qae": Qae, "grpo_positive": GrpoPositive}


def estimator_settings(name: str, algorithm: Any) -> Any:
    """The validated settings of one of ESTIMATOR_SETTINGS; `algorithm` is verl's node, or None for the defaults.

    Raises:
        ConfigError: a setting is unknown, not a number or out of range.
    """
    node: Mapping[str, Any] = (algorithm.get(name, None) if algorithm is not None else None) or {}
    if not isinstance(node, Mapping):
        raise ConfigError(f"algorithm.{name}={node} must be a mapping of its settings")
    known = [field.name for field in fields(ESTIMATOR_SETTINGS[name])]
    for key, value in node.items():
        if key not in known:
            raise ConfigError(f"algorithm.{name}.{key} is not known; known is: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"algorithm.{name}.{key}={value} must be a number")
    return ESTIMATOR_SETTINGS[name](**node)
