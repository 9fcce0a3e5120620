"""Scoring a few trajectories again, with the weights that sampled them."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import require
from verl_ext.features.feature import Feature, Needs, Part, RunFeatures, TableLine
from verl_ext.features.verl_config import BYPASS, MODE, bypasses, is_asynchronous, strategy_of, trainer_mode

COPIED = ("fsdp", "fsdp2", "veomni", "megatron")  # DetachActorWorker._get_strategy_handlers of verl 0.9.1


@dataclass(frozen=True)
class Rescoring:
    """Rescoring is for `separate_async`, where a batch may have no trajectory of the policy's own weights.

    A few trajectories are scored again with the weights that sampled them. This separates the engines' part of the gap
    from what the policy has moved since (docs/reading-metrics.md#old-rollouts).

    What it costs: verl copies the weights to the host at the start of every step of `separate_async`. The first version
    is that copy, kept until the next one. Each further version is one more copy, of which each rank keeps its shard
    (the bytes of the parameters, no optimizer). A step that rescores copies the present weights once more and loads
    each version that it needs. It computes log-probabilities of that version's trajectories and of a few others, so
    that every rank has as many (one trajectory per pass, or micro-batches by tokens). Then it loads the present weights
    again. The time is logged as `timing_s/rescore`.

    Trajectories that are older than the versions kept, or that several versions sampled, are not rescored. The other
    modes keep no copies, nor does bypass mode; rescoring is refused there.

    Attributes:
        every: rescore every this many steps; 0 never does.
        trajectories: how many trajectories of a batch are rescored, at random among those that a single kept version
            sampled.
        versions: how many old versions of the weights are kept in the host's memory.
    """

    every: int = 0
    trajectories: int = 16
    versions: int = 1

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be a number of steps, or 0 for never")
        for name in ("trajectories", "versions"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")

    def __str__(self) -> str:
        often = "per step" if self.every == 1 else f"every {self.every} steps"
        return f"{self.trajectories} trajectories {often}, {self.versions} version(s) back"


def check(run: RunFeatures) -> None:
    """Checks that verl keeps copies of earlier weights: only in separate_async, and not if it uses l_infer for
    l_old."""
    if not run.stability.rescoring.every:
        return
    where, never = f"stability.rescoring.every={run.stability.rescoring.every}", ("stability.rescoring=null",)
    if (mode := trainer_mode(run.config)) != "separate_async":
        keeps_none = "keeps no copy of the weights that sampled them"
        why = keeps_none if is_asynchronous(run.config) else "has none older than that"
        raise ConfigError(
            f"{where} scores rollouts again that are older than the policy, and {MODE}={mode} {why}: verl copies "
            "weights only in separate_async",
            fix=never,
        )
    if bypasses(run.config):
        raise ConfigError(f"{where}: verl copies no weights where {BYPASS}=True", fix=never)
    if (strategy := strategy_of(run.config)) not in COPIED:
        raise ConfigError(f"{where}: verl copies no weights of actor.strategy={strategy}", fix=never)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if run.stability.rescoring.every:
        parts = frozenset({Part.MEASURE, Part.VERSIONS})
        yield TableLine(
            *("rescoring", str(run.stability.rescoring), "{trainer}._compute_old_log_prob", parts),
            proof=lambda engines: f"copies of the weights on {len(engines.workers.kept_versions())} rank(s)",
        )


NEEDS = Needs(
    ("rescoring.trajectories", "rescoring.versions"),
    met=lambda run: run.stability.rescoring.every > 0,
    why="nothing is rescored",
    switch="stability.rescoring.every=10",
)
RESCORING = Feature(lines, check, needs=(NEEDS,))
