"""The parts of a feature: its needs of a run's processes, its lines of the start-up table, and its functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

from omegaconf import DictConfig

from verl_ext.base.errors import HookError, Problem
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.verl_config import replay_mode

# Place in a line's `at` -> its name before the engines run.
PLACES = {
    "loss": "worker_loss on every training rank",
    "routers": "routers of the training engine",
    "trainer": "PPOTrainer",
}
IN_THE_STEP = "{trainer}._compute_advantage"
VLLM = "vLLM's workers"


class Need(Enum):
    """Something that a feature needs of a run's processes."""

    ROLLOUT_LOG_PROBS = auto()  # every batch has l_infer
    MEASURED_BATCHES = auto()  # l_infer of every batch is compared with the training engine's log-probabilities
    MEASURED_IN_UPDATE = auto()  # the workers compare them in the update, because compute_log_prob does not run
    REUSED_LOG_PROBS = auto()  # l_old is l_theta of the update, if a batch has one optimizer step
    TOKEN_WEIGHTS = auto()  # the loss weighs tokens
    LOSS_MASK = auto()  # tokens are taken out of the loss's mask
    OUR_LOSS = auto()  # the workers run our loss around verl's
    RULES = auto()  # the guard judges every batch by its rules
    OLD_VERSIONS = auto()  # the workers keep weights of earlier steps, and score with them
    SENT_WEIGHTS = auto()  # the workers record the weights that they send
    HOOKED_ROUTERS = auto()
    COMPARED_ROUTERS = auto()  # the experts of both engines are compared
    TOP_TOKENS = auto()  # the rollout returns the most likely tokens at each place, and the workers read them
    TOP_TOKENS_IN_UPDATE = auto()  # the update reads them too, in addition to compute_log_prob


@dataclass(frozen=True)
class Demand:
    """Something that a setting switches on, and what it needs.

    Attributes:
        setting: the setting, as an error names it.
        needs: empty if it acts in the trainer itself or in the rollout engine.
        off: overrides that leave it out; () if only the user can decide that.
    """

    setting: str
    needs: frozenset[Need] = frozenset()
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFeatures:
    """The features that a run's config switches on.

    Attributes:
        config, stability: the run's config, and its `stability` node parsed.
        demands: the demands of all features; () if the run is verl's own.
        read_model: whether rules may read the model's files. transformers runs their code if the config trusts it.
    """

    config: DictConfig
    stability: StabilityConfig
    demands: tuple[Demand, ...] = ()
    read_model: bool = True

    @cached_property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need]().union(*(demand.needs for demand in self.demands))

    @property
    def compares_top_tokens(self) -> bool:
        """Returns True if compute_log_prob compares the rollout's top tokens and leaves sums in the batch."""
        return Need.TOP_TOKENS in self.needs and Need.MEASURED_IN_UPDATE not in self.needs

    @property
    def own_workers(self) -> bool:
        """Returns True if the actor's worker classes are ours, because some of our code runs in them."""
        ours = {Need.HOOKED_ROUTERS, Need.OUR_LOSS, Need.OLD_VERSIONS, Need.SENT_WEIGHTS}
        return not ours.isdisjoint(self.needs) or replay_mode(self.config) != "disabled"


@dataclass(frozen=True)
class TableLine:
    """A line of the start-up table: a feature that is on, or a part of one.

    Attributes:
        name: what is on.
        setting: what it is set to.
        at: the place where it acts; `{loss}`, `{routers}` and `{trainer}` stand for PLACES.
        in_loss: returns True if a worker's loss has it, from the result of `configure_loss` there.
        proof: returns the place where the started engines have it, which replaces `at`. A feature that acts in the
            trainer itself needs neither this nor `in_loss`.
    """

    name: str
    setting: str
    at: str
    in_loss: Callable[[Mapping[str, Any]], bool] | None = None
    proof: "Callable[[Engines], str] | None" = None

    @property
    def where(self) -> str:
        """The place as it is named before any engine runs."""
        return self.at.format(**PLACES)


class Engines:
    """The started engines.

    Args:
        workers: verl's worker group of the actor.
        server_managers: verl's managers of the rollout's servers.

    Attributes:
        losses: what is active in the workers' loss on each rank, once it is installed.
    """

    def __init__(self, workers: Any, server_managers: Sequence[Any]):
        self.workers = workers
        self.servers = [handle for manager in server_managers for handle in manager.server_handles]
        self.losses: list[dict[str, Any]] = []

    def install_loss(self, settings: Mapping[str, Any]) -> None:
        """Installs the workers' loss, with `LossSettings` from `table.loss_settings`."""
        self.losses = self.workers.configure_loss(settings)

    @cached_property
    def routers(self) -> str:
        """The routers that the training ranks have hooked.

        Raises:
            HookError: they are not the same on all ranks.
        """
        per_rank = self.workers.routing_hooks()
        if len(set(per_rank)) != 1:
            raise HookError(f"the training ranks hooked different routers: {sorted(set(per_rank))}")
        name, count = per_rank[0]
        return f"{count} x {name} on {len(per_rank)} rank(s)"

    def ask(self, function: Callable[..., Any]) -> list[Any]:
        """Returns the answers of all servers to `upstream.engine_calls.call`."""
        from verl_ext.upstream import engine_calls

        return [answer for server in self.servers for answer in engine_calls.call(server, function)]


class Idle(NamedTuple):
    """Metrics and settings that do nothing in a run, because something is off.

    Attributes:
        metrics: the names of metrics that the run does not log, as a pattern of `fnmatch`: no rule can act on them.
        why: the reason, as a clause.
        switch: the overrides that turn it on; () if none do.
        settings: names under `stability`, such as "rescoring.versions". A run that changes one of them is refused.
    """

    metrics: str
    why: str
    switch: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feature:
    """One feature, as its file defines it.

    Attributes:
        needs: yields its demands; none if it is off. If they depend on what other features need, it reads
            `RunFeatures.needs`; it is called again until no demand is new.
        problems: yields the settings that it cannot work with, or that it needs and the run lacks.
        apply: sets the feature in verl's config.
        agent_loop: returns its requests to verl's agent loop: fields of `upstream.agent_loop.Extras`.
        loss_settings: returns its settings of the workers' loss: fields of `workers.worker_loss.LossSettings`.
        lines: its lines of the start-up table.
        prove: raises HookError if the started engines lack something that no line shows.
        idle: yields those of its metrics and settings that do nothing in the run.
    """

    needs: Callable[[RunFeatures], Iterable[Demand]] = field(default=lambda run: ())
    problems: Callable[[RunFeatures], Iterable[Problem]] = field(default=lambda run: ())
    apply: Callable[[RunFeatures], None] = field(default=lambda run: None)
    agent_loop: Callable[[RunFeatures], Mapping[str, Any]] = field(default=lambda run: {})
    loss_settings: Callable[[RunFeatures], Mapping[str, Any]] = field(default=lambda run: {})
    lines: Callable[[RunFeatures], Iterable[TableLine]] = field(default=lambda run: ())
    prove: Callable[[RunFeatures, Engines], None] = field(default=lambda run, engines: None)
    idle: Callable[[RunFeatures], Iterable[Idle]] = field(default=lambda run: ())
