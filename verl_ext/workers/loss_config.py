"""The settings of our policy losses in verl's config, built by `actor.policy_loss._target_`.

Apart from `workers.losses`, because processes and the doctor build verl's config without verl's algorithms.
"""

from dataclasses import dataclass
from typing import Any

from verl.workers.config.actor import PolicyLossConfig

from verl_ext.features.losses import BASES, LOSSES, VERLS_SETTINGS, base_of, chosen_loss, require_base


@dataclass
class ComposedLossConfig(PolicyLossConfig):
    """verl's settings with those of the loss `loss_mode`, and with the loss that it builds upon."""

    base: str = "vanilla"
    settings: Any = None


def build_loss_config(**given: Any) -> PolicyLossConfig:
    """Builds verl's config of a policy loss, ours or not, from flat settings.

    Raises:
        ConfigError: as for `chosen_loss`, or verl has no loss `base`.
    """
    if given.get("loss_mode") not in LOSSES:
        return PolicyLossConfig(**given)
    chosen, base = chosen_loss(given), base_of(given)
    if base not in BASES:  # the user's own loss: verl's registry takes seconds to import
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        # bypass_mode discards the weights.
        require_base(base, set(POLICY_LOSS_REGISTRY) - {*LOSSES, "bypass_mode"})
    verls = {name: value for name, value in given.items() if name in VERLS_SETTINGS}
    return ComposedLossConfig(**verls, base=base, settings=chosen.settings)
