"""The policy loss of a run: its settings, what it reads, and how both come to the workers."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.launch.routing_checks import check_router_shift
from verl_ext.settings.config import AGREEMENT, EVERY_AGREEMENT, StabilityConfig
from verl_ext.settings.losses import (
    LOSS,
    LOSSES,
    TARGET,
    VERLS_TARGET,
    base_of,
    chosen_loss,
    loss_of_settings,
    require_base,
)

EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"


def check_loss(config: DictConfig, stability: StabilityConfig, read_model: bool) -> None:
    """A loss of ours accepts its settings and has what it reads; another has no such settings beside it."""
    node: Any = OmegaConf.to_container(OmegaConf.select(config, LOSS), resolve=True)
    name, target = node.get("loss_mode"), str(node.get("_target_"))
    _check_overridden(name, target, node)
    if name not in LOSSES:
        return
    if target not in (VERLS_TARGET, TARGET):
        raise ConfigError(
            f"{LOSS}.loss_mode={name} needs what builds its settings, and {LOSS}._target_={target} does not",
            fix=(f"{LOSS}._target_={TARGET}",),
            otherwise="leave it out",
        )
    reads = chosen_loss(node).method.reads
    if not (stability.plugins or OmegaConf.select(config, EXTERNAL_LIB)):  # which may bring a base of their own
        require_base(base_of(node))
    if "router_agreement" in reads and not stability.router_agreement:
        raise ConfigError(f"{LOSS}.loss_mode={name} needs the routers' agreement", fix=(AGREEMENT,))
    if "router_agreement" in reads and stability.router_agreement_share < 1:
        raise ConfigError(f"{LOSS}.loss_mode={name} {stability.needs_every_agreement}", fix=(EVERY_AGREEMENT,))
    if "router_deviation" in reads:
        check_router_shift(config, name, read_model)


def apply_loss(config: DictConfig, stability: StabilityConfig) -> None:
    """Have verl build a loss's settings, and import in every worker what registers methods of the user's own."""
    if OmegaConf.select(config, f"{LOSS}.loss_mode") in LOSSES:
        OmegaConf.update(config, f"{LOSS}._target_", TARGET)
    if stability.plugins:
        modules = OmegaConf.select(config, EXTERNAL_LIB) or []
        modules = [modules] if isinstance(modules, str) else modules
        OmegaConf.update(config, EXTERNAL_LIB, list(dict.fromkeys([*modules, *stability.plugins])))


def _check_overridden(name: Any, target: str, node: Mapping[str, Any]) -> None:
    """`stability=icepop_loss` with another loss_mode would leave IcePop out, and say nothing of it."""
    if target != TARGET:
        return
    ours = name if name in LOSSES else loss_of_settings(node)
    if ours in (None, name):
        return
    # What a loss builds upon; none of ours, nor what is no name: a config may be somebody else's.
    is_base = str(name).isidentifier() and name not in (*LOSSES, "bypass_mode")
    raise ConfigError(
        f"{LOSS}.loss_mode={name} overrides the loss {ours}, whose settings stand beside it and which builds upon "
        f"{LOSS}.base",
        fix=(f"{LOSS}.loss_mode={ours}", *([f"{LOSS}.base={name}"] if is_base else [])),
    )
