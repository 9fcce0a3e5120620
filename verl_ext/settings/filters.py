"""The `stability.filters` settings: a mapping from a filter's name to its settings, run in the order written.

stability:
  filters:
    overlong: {}
    zero_variance: {}
    low_agreement: {threshold: 0.5}
    low_probability: {threshold: 1.0e-4}
    retokenization_drift: {}
    off_policy_negative: {delta: 0.1}
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext.core.filters import get_batch_filter
from verl_ext.errors import ConfigError


@dataclass(frozen=True)
class LowAgreement:
    """The share of common experts below which a token is dropped."""

    threshold: float

    def __post_init__(self) -> None:
        _require_share("stability.filters.low_agreement.threshold", self.threshold)


@dataclass(frozen=True)
class LowProbability:
    """The rollout's probability below which a token is dropped."""

    threshold: float

    def __post_init__(self) -> None:
        _require_share("stability.filters.low_probability.threshold", self.threshold)


@dataclass(frozen=True)
class OffPolicyNegative:
    """Mean of l_infer - l_old, in nats a token, past which a trajectory's tokens with A < 0 are dropped."""

    delta: float

    def __post_init__(self) -> None:
        setting = "stability.filters.off_policy_negative.delta"
        _require_number(setting, self.delta)
        if not 0 <= self.delta < math.inf:
            raise ConfigError(f"{setting}={self.delta:g} must be at least 0 and finite")


VALIDATED: dict[str, Callable[..., Any]] = {
    "low_agreement": LowAgreement,
    "low_probability": LowProbability,
    "off_policy_negative": OffPolicyNegative,
}


def parse_filters(node: Mapping[str, Mapping[str, Any] | None]) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings for `apply_filters`, in the order of the mapping.

    A filter of the user's own is checked for the names of its settings, which are its keyword arguments.

    Raises:
        ConfigError: a filter or a setting is unknown, missing or out of range.
    """
    filters = []
    for name, given in node.items():
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"stability.filters.{name}={given} must be a mapping of its settings, {{}} for none")
        settings = {str(key): value for key, value in (given or {}).items()}
        _check_names(name, settings)
        if name in VALIDATED:
            VALIDATED[name](**settings)
        filters.append((name, settings))
    return filters


def _check_names(name: str, settings: Mapping[str, Any]) -> None:
    accepted = dict(list(inspect.signature(get_batch_filter(name)).parameters.items())[1:])  # all but the batch
    for key in settings:
        if key not in accepted:
            known = ", ".join(accepted) or "none"
            raise ConfigError(f"stability.filters.{name}.{key} is not known; its settings are: {known}")
    for key, parameter in accepted.items():
        if parameter.default is parameter.empty and key not in settings:
            raise ConfigError(f"stability.filters.{name}.{key} must be given: it has no default")


def _require_number(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{setting}={value} must be a number")


def _require_share(setting: str, value: float) -> None:
    _require_number(setting, value)
    if not 0 <= value <= 1:
        raise ConfigError(f"{setting}={value:g} must be between 0 and 1")
