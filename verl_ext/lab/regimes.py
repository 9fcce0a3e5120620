"""The regimes: gaps between the training engine and the rollout, and faults of training.

A regime is a frozen dataclass. Its fields are the settings `lab.NAME` of the config, and `apply(engine, history)`
returns the changed engine. Several regimes can be applied one after another.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import require, require_one_of
from verl_ext.core.fake_quant import FORMATS, fake_quantized
from verl_ext.lab.model import ATTENTION, EXPERTS, HEAD, ROUTER, ModelSettings, RolloutEngine, Weights

MOST_MISSED = 1000  # updates whose weights are kept


class History:
    """The weights after each update, the newest last; it keeps the first and as many others as any regime needs.

    Attributes:
        first: the weights before any update.
    """

    first: Weights

    def __init__(self, reach: int):
        self._versions: deque[Weights] = deque(maxlen=reach + 1)
        self.updates = -1

    def add(self, weights: Weights) -> None:
        """Adds the first weights, then those after each update; copied, because an optimizer changes them in place."""
        self._versions.append({name: value.detach().clone() for name, value in weights.items()})
        self.updates += 1
        if self.updates == 0:
            self.first = self._versions[0]

    def ago(self, updates: int) -> Weights:
        """Returns the weights before the last `updates` updates, or the oldest that are kept."""
        return self._versions[max(len(self._versions) - 1 - updates, 0)]


class Regime:
    """A gap between the training engine and the rollout, or a fault of training.

    Attributes:
        stands_for: the real set-up that it imitates.
        trainer_mode: verl's trainer mode with this gap.
    """

    stands_for: ClassVar[str]
    trainer_mode: ClassVar[str] = "sync"

    @property
    def reach(self) -> int:
        """The number of updates that it looks back."""
        return 0

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        """Returns the engine with this regime's change."""
        return engine

    def train(self, weights: Weights, model: ModelSettings) -> None:
        """Changes the weights of training after a step."""


REGIMES: dict[str, type[Regime]] = {}


def register_regime(name: str) -> Callable[[type], type]:
    """Registers a regime's class, which becomes `verl-ext lab NAME`."""

    def register(kind: type) -> type:
        REGIMES[name] = kind
        return kind

    return register


def engine_of(regimes: Mapping[str, Regime], history: History) -> RolloutEngine:
    """Returns the rollout's engine under these regimes, applied in this order."""
    engine = RolloutEngine((history.ago(0),))
    for regime in regimes.values():
        engine = regime.apply(engine, history)
    return engine


def regimes_named(text: str) -> list[str]:
    """Parses `stale+quantized` into names; `exact` gives none.

    Raises:
        ConfigError: a name is not known.
    """
    names = [name for name in text.split("+") if name != "exact"]
    for name in names:
        if name not in REGIMES:
            known = ", ".join(["exact", *REGIMES])
            raise ConfigError(f"the regime {name} is not known; choose one of: {known}, or several joined by +")
    return names


@register_regime("stale")
@dataclass(frozen=True)
class Stale(Regime):
    """The rollout has older weights.

    Attributes:
        lag: updates that the rollout is behind.
        every: updates from one weight sync to the next, between which the lag grows.
        span: updates that happen while a response is sampled; its earlier tokens come from the older weights.
    """

    stands_for: ClassVar[str] = "asynchronous RL: separate_async, partial rollouts, weights updated in flight"
    trainer_mode: ClassVar[str] = "separate_async"

    lag: int = 32
    every: int = 1
    span: int = 0

    def __post_init__(self) -> None:
        require(self, "lag", self.lag >= 0, "must be at least 0")
        require(self, "every", self.every >= 1, "must be at least 1")
        require(self, "span", self.span >= 0, "must be at least 0")

    @property
    def reach(self) -> int:
        return self.lag + self.every - 1 + self.span

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        behind = self.lag + history.updates % self.every
        parts = tuple(history.ago(behind + ago) for ago in range(self.span, -1, -1))
        newest, oldest = (min(ago, history.updates) for ago in (behind, behind + self.span))
        return replace(engine, parts=parts, lag=(newest, oldest))


@register_regime("missed_sync")
@dataclass(frozen=True)
class MissedSync(Regime):
    """Weight syncs after an update do not arrive: the rollout's weights stay as they are.

    Attributes:
        update: the last update that reaches the rollout.
        count: the number of updates that do not reach it, before updates arrive again; 0 for all later updates.
    """

    stands_for: ClassVar[str] = "a weight sync that does not arrive: a LoRA under the wrong name, a lost replica"

    update: int = 30
    count: int = 0

    def __post_init__(self) -> None:
        require(self, "update", self.update >= 0, "must be at least 0")
        require(self, "count", 0 <= self.count <= MOST_MISSED, f"must be from 0 to {MOST_MISSED}")

    @property
    def reach(self) -> int:
        return self.count or MOST_MISSED

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        missed = history.updates - self.update
        if missed <= 0 or (self.count and missed > self.count):
            return engine
        return replace(engine, parts=(history.ago(missed),))


@register_regime("partial_sync")
@dataclass(frozen=True)
class PartialSync(Regime):
    """Some of the rollout's weights stay as they were at the start.

    Attributes:
        layers: the number of first layers whose weights do not arrive; -1 for all weights except the embedding, the
            norm and the head.
        names: ends of the names of the weights that do not arrive, joined by +; or all.
    """

    stands_for: ClassVar[str] = "a weight sync that loses some names: a bucket, a layer, experts under another name"

    layers: int = 1
    names: str = "all"

    def __post_init__(self) -> None:
        require(self, "layers", self.layers >= -1, "must be at least -1")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        stays = {name: value for name, value in history.first.items() if self._stays(name)}
        return replace(engine, parts=tuple({**part, **stays} for part in engine.parts))

    def _stays(self, name: str) -> bool:
        layer, _, end = name.rpartition(".")
        return (
            bool(layer)
            and (self.layers == -1 or int(layer) < self.layers)
            and (self.names == "all" or end in self.names.split("+"))
        )


@register_regime("scaled_update")
@dataclass(frozen=True)
class ScaledUpdate(Regime):
    """The change of the weights in training arrives in the rollout multiplied by a factor."""

    stands_for: ClassVar[str] = "a LoRA that is merged or served with another alpha / rank than it was trained with"

    scale: float = 2.0

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        first = history.first
        parts = (
            {name: first[name] + self.scale * (now - first[name]) for name, now in part.items()}
            for part in engine.parts
        )
        return replace(engine, parts=tuple(parts))


@register_regime("quantized")
@dataclass(frozen=True)
class Quantized(Regime):
    """The rollout's weights are rounded to a grid.

    Attributes:
        format, group: see verl_ext.core.fake_quant.
        router, head: whether the weights of routers and head are rounded too, like those of attention and experts.
    """

    stands_for: ClassVar[str] = "a quantised rollout: FP8, INT8, INT4, NVFP4"

    format: str = "fp4"
    group: str = "32"
    router: bool = True
    head: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "format", tuple(FORMATS))
        named = self.group in ("tensor", "channel") or (self.group.isdecimal() and int(self.group) > 0)
        require(self, "group", named, "must be tensor, channel, or a number of inputs")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, parts=tuple(self._rounded(part) for part in engine.parts))

    def _rounded(self, weights: Weights) -> Weights:
        kinds = {*ATTENTION, *EXPERTS} | ({ROUTER} if self.router else set()) | ({HEAD} if self.head else set())
        group = int(self.group) if self.group.isdecimal() else self.group
        try:
            return {
                name: fake_quantized(value, self.format, group) if name.rpartition(".")[2] in kinds else value
                for name, value in weights.items()
            }
        except ValueError as error:
            raise ConfigError(f"lab.quantized.group={group}: {error}") from error


@register_regime("bf16")
@dataclass(frozen=True)
class BFloat16(Regime):
    """Weights and arithmetic of the rollout are bfloat16, those of the training engine float32."""

    stands_for: ClassVar[str] = "two engines with different kernels and precision"

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, dtype=torch.bfloat16)


@register_regime("truncated")
@dataclass(frozen=True)
class Truncated(Regime):
    """The rollout samples from the head of the distribution, and normalises its log-probabilities over the head.

    Attributes:
        top_p, top_k: as in vLLM; top_k 0 means none.
        known: whether the training engine normalises over the tokens that sampling kept, as in a run with verl_ext.
    """

    stands_for: ClassVar[str] = "top-p or top-k in the rollout, unknown to the training engine"

    top_p: float = 0.9
    top_k: int = 0
    known: bool = False

    def __post_init__(self) -> None:
        require(self, "top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        require(self, "top_k", self.top_k >= 0, "must be at least 0")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, top_p=self.top_p, top_k=self.top_k, reports_kept=self.known)


@register_regime("wrong_temperature")
@dataclass(frozen=True)
class WrongTemperature(Regime):
    """The rollout samples at another temperature than the training engine's, which is 1."""

    stands_for: ClassVar[str] = "a temperature that only one engine applies (raw log-probs, a generation config)"

    temperature: float = 1.3

    def __post_init__(self) -> None:
        require(self, "temperature", self.temperature > 0, "must be above 0")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, temperature=self.temperature)


@register_regime("raw_log_probs")
@dataclass(frozen=True)
class RawLogProbs(Regime):
    """The rollout samples at the training engine's temperature, but returns log-probabilities at another one."""

    stands_for: ClassVar[str] = "log-probs from before the temperature (vLLM's raw_logprobs), which is not 1"

    temperature: float = 1.3

    def __post_init__(self) -> None:
        require(self, "temperature", self.temperature > 0, "must be above 0")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, reported=self.temperature)


@register_regime("router_dtype")
@dataclass(frozen=True)
class RouterDtype(Regime):
    """The rollout's routers compute in bfloat16, everything else in float32."""

    stands_for: ClassVar[str] = "routers in bfloat16 in one engine and in float32 in the other"

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, faults=replace(engine.faults, router_dtype=torch.bfloat16))


@register_regime("router_bias")
@dataclass(frozen=True)
class RouterBias(Regime):
    """The rollout chooses experts with a bias that the training engine does not have.

    Attributes:
        scale: standard deviation of the bias, in logits.
    """

    stands_for: ClassVar[str] = "a bias for the choice of experts (e_score_correction_bias) that one engine drops"

    scale: float = 0.5

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        routers = [weight for name, weight in engine.parts[0].items() if name.endswith(f".{ROUTER}")]
        generator = torch.Generator().manual_seed(0)
        bias = self.scale * torch.randn(len(routers), len(routers[0]), generator=generator)
        return replace(engine, faults=replace(engine.faults, router_bias=bias))


@register_regime("wrong_weights")
@dataclass(frozen=True)
class WrongWeights(Regime):
    """In the rollout, the experts of a layer are in another order, or a layer has the experts of its neighbour.

    Attributes:
        layer: the number of the layer.
        kind: `permuted` experts, or those of the `neighbour` layer.
    """

    stands_for: ClassVar[str] = "weights converted wrongly: experts in another order, another layer's tensor"

    layer: int = 0
    kind: str = "permuted"

    def __post_init__(self) -> None:
        require_one_of(self, "kind", ("permuted", "neighbour"))

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, parts=tuple(self._changed(part) for part in engine.parts))

    def _changed(self, weights: Weights) -> Weights:
        changed = dict(weights)
        for end in EXPERTS:
            name = f"{self.layer}.{end}"
            if self.kind == "neighbour":
                changed[name] = weights[f"{self.layer - 1 if self.layer else 1}.{end}"]
            else:
                changed[name] = weights[name].roll(1, 0)
        return changed


@register_regime("packed_leak")
@dataclass(frozen=True)
class PackedLeak(Regime):
    """Tokens of a response also attend to the previous sequence of the batch."""

    stands_for: ClassVar[str] = "packed sequences without a mask between them; a prefix cache of another prompt"

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, faults=replace(engine.faults, leaks=True))


@register_regime("positions_off")
@dataclass(frozen=True)
class PositionsOff(Regime):
    """The position ids of a response's tokens are larger than in the training engine, by `places`."""

    stands_for: ClassVar[str] = "position ids off by one: padding, a prompt's end, a cut turn"

    places: int = 1

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, faults=replace(engine.faults, positions_off=self.places))


@register_regime("respelled")
@dataclass(frozen=True)
class Respelled(Regime):
    """Training reads other tokens instead of a share of the sampled ones."""

    stands_for: ClassVar[str] = "retokenisation: text that is decoded and encoded again between rollout and training"

    share: float = 0.01

    def __post_init__(self) -> None:
        require(self, "share", 0 < self.share < 1, "must be between 0 and 1")

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, respelled=self.share)


@register_regime("misrouted")
@dataclass(frozen=True)
class Misrouted(Regime):
    """Each trajectory has the experts of another one, half a batch away."""

    stands_for: ClassVar[str] = "routes that are replayed for other tokens: rows in another order, a slice that is off"

    def apply(self, engine: RolloutEngine, history: History) -> RolloutEngine:
        return replace(engine, misrouted=True)


@register_regime("router_collapse")
@dataclass(frozen=True)
class RouterCollapse(Regime):
    """Training's routers come to choose among few experts: 2 of each layer for each one that a token uses.

    The first experts' rows of a router are drawn towards pairs of opposite ones, of which one always wins, and the
    others' towards 0.

    Attributes:
        rate: share of the way that each step moves the rows.
    """

    stands_for: ClassVar[str] = "a router without a loss or bias that balances its load: experts die"

    rate: float = 0.05

    def __post_init__(self) -> None:
        require(self, "rate", 0 < self.rate < 1, "must be between 0 and 1")

    @torch.no_grad()
    def train(self, weights: Weights, model: ModelSettings) -> None:
        for name, rows in weights.items():
            if name.endswith(f".{ROUTER}"):
                goal, paired = torch.zeros_like(rows), 2 * min(model.top_k, len(rows) // 2)
                goal[:paired:2], goal[1:paired:2] = rows[:paired:2], -rows[:paired:2]
                rows.lerp_(goal, self.rate)
