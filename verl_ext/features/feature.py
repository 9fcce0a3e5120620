"""The parts of a feature: the lines that it adds to the start-up table, and its functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl_ext.base.errors import HookError
from verl_ext.features.verl_config import replay_mode

if TYPE_CHECKING:
    from verl_ext.features.stability import StabilityConfig

# Places in a line's `at`, and their names before the engines run.
PLACES = {
    "loss": "worker_loss on every training rank",
    "routers": "routers of the training engine",
    "trainer": "PPOTrainer",
}
IN_THE_STEP = "{trainer}._compute_advantage"
VLLM = "vLLM's workers"


class Part(Enum):
    """A part of the plugin that features use."""

    LOG_PROBS = auto()  # every batch has the rollout's log-probabilities
    MEASURE = auto()  # every batch is measured: l_infer next to the training engine's log-probabilities
    MEASURE_IN_UPDATE = auto()  # the workers measure, in the update: in bypass mode there is no compute_log_prob
    WEIGHTS = auto()  # the loss weighs tokens
    MASKS = auto()  # tokens are taken out of the loss's mask
    LOSS = auto()  # the workers run our loss around verl's
    GUARD = auto()
    VERSIONS = auto()  # the workers keep weights of earlier steps, and score with them
    ROUTERS = auto()  # the workers hook their routers
    ROUTER_COMPARISON = auto()  # the experts of both engines are compared
    HEADS = auto()  # the rollout returns the most likely tokens of each place, and the workers read them
    HEADS_IN_UPDATE = auto()  # the update reads them too, in addition to compute_log_prob


MEASURED = frozenset({Part.LOG_PROBS, Part.MEASURE})


@dataclass(frozen=True)
class TableLine:
    """A line of the start-up table: something of a feature that is on.

    Attributes:
        name: what is on.
        setting: what it is set to.
        at: the place where it acts; `{loss}`, `{routers}` and `{trainer}` stand for PLACES.
        parts: the parts of the plugin that it uses.
        in_loss: whether it is in a worker's loss, read from the result of `configure_loss` there.
        off: overrides that leave it out; () if only the user can decide that.
        proof: asks the started engines for it and returns the place where it was found, which replaces `at`. A feature
            that acts in the trainer itself needs neither this nor `in_loss`.
    """

    name: str
    setting: str
    at: str
    parts: frozenset[Part] = frozenset()
    in_loss: Callable[[Mapping[str, Any]], bool] | None = None
    off: tuple[str, ...] = ()
    proof: "Callable[[Engines], str] | None" = None

    @property
    def where(self) -> str:
        """The place, before any engine runs."""
        return self.at.format(**PLACES)


@dataclass(frozen=True)
class RunFeatures:
    """The features that a run's config switches on.

    Attributes:
        config, stability: the run's config, and its `stability` node parsed.
        lines: the lines of all features that are on; () if the run is verl's own.
        read_model: whether checks may read the model's files. transformers runs code of theirs if the config trusts it.
    """

    config: DictConfig
    stability: "StabilityConfig"
    lines: tuple[TableLine, ...] = ()
    read_model: bool = True

    def uses(self, part: Part) -> bool:
        return any(part in line.parts for line in self.lines)

    @property
    def own_workers(self) -> bool:
        """Returns True if the actor's worker classes are ours: something of ours runs in them."""
        ours = any(self.uses(part) for part in (Part.ROUTERS, Part.LOSS, Part.VERSIONS))
        return ours or replay_mode(self.config) != "disabled"


class Engines:
    """The started engines.

    Args:
        workers: verl's worker group of the actor.
        server_managers: verl's managers of the rollout's servers.
        loss_settings: the settings of the workers' loss, from `table.loss_settings`.
    """

    def __init__(self, workers: Any, server_managers: Sequence[Any], loss_settings: Mapping[str, Any]):
        self.workers = workers
        self.servers = [handle for manager in server_managers for handle in manager.server_handles]
        self._loss_settings = loss_settings

    @cached_property
    def losses(self) -> list[dict[str, Any]]:
        """Installs the workers' loss; returns what is active in it, by rank."""
        return self.workers.configure_loss(self._loss_settings)

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
        """Returns the answers of `upstream.engine_calls.call` of all servers."""
        from verl_ext.upstream import engine_calls

        return [answer for server in self.servers for answer in engine_calls.call(server, function)]


@dataclass(frozen=True)
class Needs:
    """Settings that act only while something is on. A run that changes one of them without that is refused.

    Attributes:
        settings: the names under `stability`, such as "rescoring.versions".
        met: returns True if they act in the run.
        why: the reason why they do not act otherwise, as a clause.
        switch: an override with which they act.
    """

    settings: tuple[str, ...]
    met: Callable[[RunFeatures], bool]
    why: str
    switch: str


@dataclass(frozen=True)
class Feature:
    """One feature, as its file defines it.

    Attributes:
        lines: its lines of the start-up table, none if it is off.
        check: raises ConfigError for settings that it cannot work with.
        apply: sets the feature in verl's config.
        agent_loop: its requests to verl's agent loop: fields of `upstream.agent_loop.Extras`.
        loss_settings: its settings of the workers' loss: fields of `workers.worker_loss.LossSettings`.
        prove: raises HookError if the started engines lack something that no line shows.
        needs: its settings that act only while something is on.
        depends: its lines depend on other features: its `lines` is called last, and sees the other lines.
    """

    lines: Callable[[RunFeatures], Iterable[TableLine]] = field(default=lambda run: ())
    check: Callable[[RunFeatures], None] = field(default=lambda run: None)
    apply: Callable[[RunFeatures], None] = field(default=lambda run: None)
    loss_settings: Callable[[RunFeatures], Mapping[str, Any]] = field(default=lambda run: {})
    agent_loop: Callable[[RunFeatures], Mapping[str, Any]] = field(default=lambda run: {})
    prove: Callable[[RunFeatures, Engines], None] = field(default=lambda run, engines: None)
    needs: tuple[Needs, ...] = ()
    depends: bool = False
