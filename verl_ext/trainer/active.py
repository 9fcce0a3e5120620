"""What of ours a run has switched on."""

from dataclasses import dataclass

from omegaconf import DictConfig

from verl_ext.features.feature import Part, RunFeatures
from verl_ext.features.losses import loss_reads_k
from verl_ext.features.routing import replayed_field
from verl_ext.features.stability import StabilityConfig
from verl_ext.features.table import read_features
from verl_ext.features.verl_config import is_asynchronous


@dataclass(frozen=True)
class Active:
    run: RunFeatures
    config: DictConfig
    stability: StabilityConfig
    asynchronous: bool
    compares_engines: bool
    measures_in_update: bool
    loss_reads_k: bool
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
        return self.run.own_workers or self.replayed is not None


def read_active(config: DictConfig, stability: StabilityConfig) -> Active:
    run = read_features(config, stability)
    return Active(
        run,
        config,
        stability,
        asynchronous=is_asynchronous(config),
        compares_engines=run.uses(Part.MEASURE),
        measures_in_update=run.uses(Part.MEASURE_IN_UPDATE),
        loss_reads_k=loss_reads_k(config),
        filters=run.uses(Part.MASKS),
        rescores=run.uses(Part.VERSIONS),
        our_loss=run.uses(Part.LOSS),
        sees_routing=run.uses(Part.ROUTERS),
        compares_routing=run.uses(Part.ROUTER_COMPARISON),
        replayed=replayed_field(config),
        has_heads=run.uses(Part.HEADS),
        update_reads_heads=run.uses(Part.HEADS_IN_UPDATE),
    )
