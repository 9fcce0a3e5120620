"""What of ours a run has switched on."""

from dataclasses import dataclass

from omegaconf import DictConfig

from verl_ext.launch.checks import needs_our_loss, uses_icepop_loss
from verl_ext.launch.routing_checks import replayed_field, replays_here
from verl_ext.settings.config import StabilityConfig


@dataclass(frozen=True)
class Active:
    """What is asked of a config, asked once.

    Attributes:
        config, stability: the run's config, and its `stability` node parsed.
        compares_engines: every batch is measured: the rollout's log-probabilities beside the training engine's.
        icepop_loss: the policy loss is icepop, which takes the ratio k for the weight.
        filters: tokens are taken out of the loss's mask, by filters or by denominator=kept.
        our_loss: the workers run our loss around verl's.
        replays_here: we replay routing (on Megatron and VeOmni verl does).
        replayed: the batch's field whose routing the update replays; None where it replays none.
    """

    config: DictConfig
    stability: StabilityConfig
    compares_engines: bool
    icepop_loss: bool
    filters: bool
    our_loss: bool
    replays_here: bool
    replayed: str | None

    @property
    def sees_routing(self) -> bool:
        """Whether the workers hook their routers."""
        return self.stability.router_agreement or self.replays_here


def read_active(config: DictConfig, stability: StabilityConfig) -> Active:
    icepop_loss = uses_icepop_loss(config)
    return Active(
        config,
        stability,
        compares_engines=stability.needs_log_probs or icepop_loss,
        icepop_loss=icepop_loss,
        filters=bool(stability.filters) or stability.denominator == "kept",
        our_loss=needs_our_loss(config, stability),
        replays_here=replays_here(config),
        replayed=replayed_field(config),
    )
