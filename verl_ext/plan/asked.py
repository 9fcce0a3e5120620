"""What of the plugin a config asks for, as far as its cost depends on it."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_ext.plan.sizes import readable, whole

UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
BACKEND = "transfer_queue.backend.storage_backend"
# verl's estimators that may give the tokens of one trajectory advantages of different signs.
BY_TOKEN = ("gae", "reinforce_plus_plus")
WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
USUAL_UNITS, USUAL_WORKERS, USUAL_HEAD = 8, 8, 32  # verl's, verl's; tokens of a head where none is asked for


@dataclass(frozen=True)
class Asked:
    """Attributes:
    measures, weighs, guards, compares, has_heads: the parts of the plugin that are on.
    filters: tokens are taken out of the loss's mask.
    signs: the gap is split by the sign of advantages that differ within a trajectory.
    head: tokens of the sampler's head, or the usual ones.
    head_reads: stages that read it.
    agreement_share: of the trajectories, whose expert ids travel for router agreement.
    replay: `disabled`, R2 or R3, whoever replays; replay_setting: where that is set.
    lag: whether the age of each token's weights travels beside its weight.
    simple: whether TransferQueue stores in its own units; units: how many of them.
    workers: agent loops.
    undoes: whether each update is kept until it has proved itself; versions: old weights that are kept.
    """

    measures: bool = False
    weighs: bool = False
    guards: bool = False
    compares: bool = False
    has_heads: bool = False
    filters: bool = False
    signs: bool = False
    head: int = USUAL_HEAD
    head_reads: int = 1
    agreement_share: float = 1.0
    replay: str = "disabled"
    replay_setting: str = ""
    lag: bool = False
    simple: bool = True
    units: int = USUAL_UNITS
    workers: int = USUAL_WORKERS
    undoes: bool = False
    versions: int = 0


def read_asked(config: DictConfig) -> Asked:
    """From a composed config.

    Raises:
        ConfigError: its `stability` node is wrong, or the number of storage units or of agent loops is none.
    """
    from verl_ext.launch.bypass import bypasses
    from verl_ext.launch.features import GUARD, HEAD, IN_LOSS, LOG_PROBS, MEASURE, WEIGHTS, features, uses
    from verl_ext.launch.head import head_k, reads_in_update
    from verl_ext.launch.lag_checks import is_asynchronous
    from verl_ext.launch.routing_checks import compares_routing, replay_mode, replay_setting
    from verl_ext.settings.stability import stability_config

    stability = stability_config(config.stability)
    found, late = features(config, stability), bypasses(config)  # in bypass mode the workers measure, and weigh
    with readable():
        units, workers = (
            usual if OmegaConf.select(config, key) is None else whole(config, key)
            for key, usual in ((UNITS, USUAL_UNITS), (WORKERS, USUAL_WORKERS))
        )
    return Asked(
        measures=uses(found, MEASURE),
        weighs=uses(found, WEIGHTS) and not late,
        guards=uses(found, GUARD),
        compares=compares_routing(config, stability),
        has_heads=uses(found, HEAD),
        filters=bool(stability.filters) or stability.denominator == "kept",
        signs=stability.breakdown and not late and config.algorithm.adv_estimator in BY_TOKEN,
        head=head_k(config, stability, compares=uses(found, LOG_PROBS)) or USUAL_HEAD,
        head_reads=2 if reads_in_update(config, stability) else 1,
        agreement_share=stability.router_agreement_share,
        replay=replay_mode(config),
        replay_setting=replay_setting(config),
        lag=uses(found, IN_LOSS) and is_asynchronous(config),
        simple=OmegaConf.select(config, BACKEND) in (None, "SimpleStorage"),
        units=units,
        workers=workers,
        undoes=any(rule.action == "undo" for rule in stability.rules),
        versions=stability.rescoring.versions if stability.rescoring.every else 0,
    )
