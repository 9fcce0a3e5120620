"""The settings of our policy losses: dataclasses beside verl's PolicyLossConfig, one a loss.

Named by `actor_rollout_ref.actor.policy_loss._target_`; their fields arrive in `config.policy_loss`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.workers.config.actor import PolicyLossConfig

from verl_ext.core.corrections import IcePop
from verl_ext.core.losses import Opsm
from verl_ext.errors import ConfigError
from verl_ext.methods import build

SETTING = "actor_rollout_ref.actor.policy_loss"
RATIO_LOSSES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov")  # l_old enters by the ratio alone


@dataclass
class ComposedLossConfig(PolicyLossConfig):
    """verl's settings with the loss that is built upon; subclasses are named by `policy_loss._target_`."""

    base: str = "vanilla"

    def __post_init__(self) -> None:
        if self.base in RATIO_LOSSES:  # the usual case, and verl's registry takes seconds to import
            return
        # Not above: importing verl's registry imports our losses, which need this module complete.
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        # bypass_mode discards the weights that it is given.
        known = set(POLICY_LOSS_REGISTRY) - {*LOSS_CONFIGS, "bypass_mode"}
        if self.base not in known:
            raise ConfigError(f"{SETTING}.base={self.base} cannot be built upon; choose one of: {sorted(known)}")


@dataclass
class IcePopLossConfig(ComposedLossConfig):
    """IcePop's bounds, both inclusive."""

    loss_mode: str = "icepop"
    alpha: float = 0.5
    beta: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        build(IcePop, {"alpha": self.alpha, "beta": self.beta}, SETTING)


@dataclass
class OpsmLossConfig(ComposedLossConfig):
    """OPSM's threshold in nats per token, which the paper leaves to the user."""

    loss_mode: str = "opsm"
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        build(Opsm, {"delta": self.delta}, SETTING)


@dataclass
class LldsLossConfig(ComposedLossConfig):
    """LLDS: `coef` is the paper's lambda, `gate` the unit whose likelihood has to fall (action or response)."""

    loss_mode: str = "llds"
    coef: float = 0.1
    gate: str = "action"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.coef >= 0:
            raise ConfigError(f"{SETTING}.coef={self.coef:g} must be at least 0")
        if self.gate not in ("action", "response"):
            raise ConfigError(f"{SETTING}.gate={self.gate} is not known; choose action or response")


@dataclass
class RouterShiftLossConfig(ComposedLossConfig):
    """RSPO: the floor gamma_min of the factor."""

    loss_mode: str = "router_shift"
    floor: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base not in RATIO_LOSSES:
            raise ConfigError(f"{SETTING}.base={self.base} has no ratio to rescale; choose one of: {RATIO_LOSSES}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"{SETTING}.floor={self.floor:g} must be between 0 and 1")


LOSS_CONFIGS: dict[str, type[PolicyLossConfig]] = {
    "icepop": IcePopLossConfig,
    "opsm": OpsmLossConfig,
    "llds": LldsLossConfig,
    "router_shift": RouterShiftLossConfig,
}


def target_of(kind: type[PolicyLossConfig]) -> str:
    """The `_target_` that names a class."""
    return f"{kind.__module__}.{kind.__name__}"


def build_policy_loss(settings: Mapping[str, Any]) -> PolicyLossConfig:
    """The dataclass that `_target_` names, made of the other settings; whatever it says, nothing else is called.

    Raises:
        ConfigError: `_target_` is none of LOSS_CONFIGS, or the settings do not fit it.
    """
    given = dict(settings)
    target = given.pop("_target_", None)
    kinds = {target_of(kind): (name, kind) for name, kind in LOSS_CONFIGS.items()}
    if target not in kinds:
        raise ConfigError(f"{SETTING}._target_={target} is no loss of verl_ext; choose one of: {', '.join(kinds)}")
    name, kind = kinds[target]
    try:
        return kind(**given)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        given.pop("rollout_correction", None)
        raise ConfigError(f"{SETTING}={given} does not fit the loss {name}: {error}") from error
