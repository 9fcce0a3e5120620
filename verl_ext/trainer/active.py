"""What of ours a run has switched on."""

from dataclasses import dataclass

from omegaconf import DictConfig

from verl_ext.launch.bypass import bypasses
from verl_ext.launch.features import HEAD, IN_LOSS, MEASURE, ROUTERS, VERSIONS, Feature, features, uses
from verl_ext.launch.head import reads_in_update
from verl_ext.launch.lag_checks import is_asynchronous
from verl_ext.launch.routing_checks import compares_routing, replayed_field
from verl_ext.settings.config import StabilityConfig


@dataclass(frozen=True)
class Active:
    """What is asked of a config, asked once.

    Attributes:
        config, stability: the run's config, and its `stability` node parsed.
        features: all that is on.
        asynchronous: a rollout may be older than the policy.
        compares_engines: every batch is measured: the rollout's log-probabilities beside the training engine's.
        measures_in_update: in its update, by the workers: in bypass mode there is no compute_log_prob.
        filters: tokens are taken out of the loss's mask, by filters or by denominator=kept.
        rescores: the workers keep weights of earlier steps, and score with them.
        our_loss: the workers run our loss around verl's.
        sees_routing: the workers hook their routers.
        compares_routing: the experts of both engines are compared.
        replayed: the batch's field whose routing the update replays; None where it replays none.
        has_heads: the rollout returns the most likely tokens of each place.
        update_reads_heads: and the update reads them too.
    """

    config: DictConfig
    stability: StabilityConfig
    features: tuple[Feature, ...]
    asynchronous: bool
    compares_engines: bool
    measures_in_update: bool
    filters: bool
    rescores: bool
    our_loss: bool
    sees_routing: bool
    compares_routing: bool
    replayed: str | None
    has_heads: bool
    update_reads_heads: bool

    @property
    def own_workers(self) -> bool:
        """The actor's worker classes are ours: something of ours runs in them."""
        return self.sees_routing or self.our_loss or self.rescores or self.replayed is not None


def read_active(config: DictConfig, stability: StabilityConfig) -> Active:
    asked = features(config, stability)
    return Active(
        config,
        stability,
        asked,
        asynchronous=is_asynchronous(config),
        compares_engines=uses(asked, MEASURE),
        measures_in_update=bypasses(config) and uses(asked, MEASURE),
        filters=bool(stability.filters) or stability.denominator == "kept",
        rescores=uses(asked, VERSIONS),
        our_loss=uses(asked, IN_LOSS),
        sees_routing=uses(asked, ROUTERS),
        compares_routing=compares_routing(config, stability),
        replayed=replayed_field(config),
        has_heads=uses(asked, HEAD),
        update_reads_heads=uses(asked, HEAD) and reads_in_update(config, stability),
    )
