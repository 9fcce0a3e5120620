"""The regimes: gaps between the training engine and the rollout, and faults of training.

A regime is a function from the rollout's engine and the history of weights to the changed engine, or in training, from
the weights and the model's settings to nothing: it changes the weights after a step. Its keyword-only arguments are the
settings `lab.NAME` of the config. Several regimes can be applied one after another.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from verl_ext.base.arguments import similar_names
from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import (
    ABOVE_0,
    SHARE,
    ConfiguredMethod,
    Method,
    Registry,
    Rule,
    at_least,
    one_of,
    settings_of,
)
from verl_ext.core.fake_quant import FORMATS, fake_quantized
from verl_ext.lab.model import ATTENTION, EXPERTS, FLOAT32_BITS, HEAD, ROUTER, ModelSettings, RolloutEngine, Weights


class History:
    """The weights after each update; it keeps the first, the newest, and those that a regime needs.

    Args:
        keeps: a function from an update's number and the newest one's to whether the weights after that update are
            needed now or later.

    Attributes:
        versions: update -> the weights after it, as far as they are kept.
        updates: the number of updates.
    """

    def __init__(self, keeps: Callable[[int, int], bool]):
        self._keeps = keeps
        self.versions: dict[int, Weights] = {}
        self.updates = -1

    @property
    def first(self) -> Weights:
        """The weights before any update."""
        return self.versions[0]

    def add(self, weights: Weights) -> None:
        """Adds the first weights, then those after each update; copied, because an optimizer changes them in place."""
        now = self.updates = self.updates + 1
        self.versions = {each: kept for each, kept in self.versions.items() if each == 0 or self._keeps(each, now)}
        self.versions[now] = {name: value.detach().clone() for name, value in weights.items()}

    def ago(self, updates: int) -> Weights:
        """Returns the weights before the last `updates` updates; the first weights, if there were not so many."""
        return self.versions[max(self.updates - updates, 0)]


@dataclass(frozen=True)
class Regime(Method):
    """`function(engine, history, **settings) -> engine`, or in training `function(weights, model, **settings)`.

    Attributes:
        stands_for: the real set-up that it imitates.
        trainer_mode: verl's trainer mode with this gap.
        keeps: a function from the settings, an update's number and the newest one's to whether the regime needs the
            weights after that update now or later.
        in_training: whether it changes the weights of training after a step, and not the rollout.
    """

    stands_for: str
    trainer_mode: str = "sync"
    keeps: Callable[[Any, int, int], bool] = lambda settings, update, now: False
    in_training: bool = False


REGIMES: Registry[Regime] = Registry("regime")


def register_regime(
    name: str, stands_for: str, rules: Mapping[str, Rule] | None = None, **traits: Any
) -> Callable[[Callable], Callable]:
    """Registers a regime's function, which becomes `verl-ext lab NAME`; `traits` are further attributes of Regime.

    Args:
        rules: what must hold of the value of a setting, by its name.
    """

    def register(function: Callable) -> Callable:
        REGIMES.add(Regime(name, function, settings_of(function, rules=rules), stands_for, **traits))
        return function

    return register


@dataclass(frozen=True)
class Regimes:
    """The regimes of a run with their settings, in the order in which they are applied."""

    chosen: tuple[ConfiguredMethod[Regime], ...]

    def keeps(self, update: int, now: int) -> bool:
        """Returns True if one of them needs the weights after this update in the newest one, `now`, or later."""
        return any(regime.method.keeps(regime.settings, update, now) for regime in self.chosen)

    def engine(self, history: History) -> RolloutEngine:
        """Returns the rollout's engine."""
        engine = RolloutEngine((history.ago(0),))
        for regime in self.chosen:
            if not regime.method.in_training:
                engine = regime.method.function(engine, history, **asdict(regime.settings))
        return engine

    def train(self, weights: Weights, model: ModelSettings) -> None:
        """Changes the weights of training after a step."""
        for regime in self.chosen:
            if regime.method.in_training:
                regime.method.function(weights, model, **asdict(regime.settings))


def regimes_named(text: str) -> list[str]:
    """Parses `stale+quantized` into names; `exact` gives none.

    Raises:
        ConfigError: a name is not known.
    """
    names = [name for name in text.split("+") if name != "exact"]
    for name in names:
        if name not in REGIMES:
            known = ", ".join(["exact", *REGIMES])
            found = f"the regime {name} is not known; choose one of: {known}, or several joined by +"
            raise ConfigError(found + similar_names(name, REGIMES))
    return names


@register_regime(
    "stale",
    "asynchronous RL: separate_async, partial rollouts, weights updated in flight",
    {"lag": at_least(0), "every": at_least(1), "span": at_least(0)},
    trainer_mode="separate_async",
    keeps=lambda settings, update, now: now - update < settings.lag + settings.every + settings.span,
)
def stale(engine: RolloutEngine, history: History, *, lag: int = 32, every: int = 1, span: int = 0) -> RolloutEngine:
    """The rollout has older weights.

    Args:
        lag: updates that the rollout is behind.
        every: updates from one weight sync to the next, between which the lag grows.
        span: updates that happen while a response is sampled; its earlier tokens come from the older weights.
    """
    behind = lag + history.updates % every
    parts = tuple(history.ago(behind + ago) for ago in range(span, -1, -1))
    newest, oldest = (min(ago, history.updates) for ago in (behind, behind + span))
    return replace(engine, parts=parts, lag=(newest, oldest))


@register_regime(
    "missed_sync",
    "a weight sync that does not arrive: a LoRA under the wrong name, a lost replica",
    {"update": at_least(0), "count": at_least(0)},
    keeps=lambda settings, update, now: update == settings.update,
)
def missed_sync(engine: RolloutEngine, history: History, *, update: int = 30, count: int = 0) -> RolloutEngine:
    """Weight syncs after an update do not arrive: the rollout's weights stay as they are.

    Args:
        update: the last update that reaches the rollout.
        count: the number of updates that do not reach it, before updates arrive again; 0 for all later updates.
    """
    missed = history.updates - update
    arrives = missed <= 0 or 0 < count < missed
    return engine if arrives else replace(engine, parts=(history.ago(missed),))


@register_regime(
    "partial_sync",
    "a weight sync that loses some names: a bucket, a layer, experts under another name",
    {"layers": at_least(-1)},
)
def partial_sync(engine: RolloutEngine, history: History, *, layers: int = 1, names: str = "all") -> RolloutEngine:
    """Some of the rollout's weights stay as they were at the start.

    Args:
        layers: the number of first layers whose weights do not arrive; -1 for all weights except the embedding, the
            norm and the head.
        names: ends of the names of the weights that do not arrive, joined by +; or all.
    """
    lost = names.split("+")

    def stays(name: str) -> bool:
        layer, _, end = name.rpartition(".")
        return bool(layer) and (layers == -1 or int(layer) < layers) and (names == "all" or end in lost)

    kept = {name: value for name, value in history.first.items() if stays(name)}
    return with_weights(engine, lambda weights: {**weights, **kept})


@register_regime("scaled_update", "a LoRA that is merged or served with another alpha / rank than it was trained with")
def scaled_update(engine: RolloutEngine, history: History, *, scale: float = 2.0) -> RolloutEngine:
    """The change of the weights in training arrives in the rollout multiplied by a factor."""
    first = history.first
    return with_weights(
        engine, lambda weights: {name: first[name] + scale * (now - first[name]) for name, now in weights.items()}
    )


@register_regime(
    "quantized",
    "a quantised rollout: FP8, INT8, INT4, NVFP4",
    {
        "format": one_of(*FORMATS),
        "group": (
            lambda group: group in ("tensor", "channel") or (group.isdecimal() and int(group) > 0),
            "must be tensor, channel, or a number of inputs",
        ),
    },
)
def quantized(
    engine: RolloutEngine,
    history: History,
    *,
    format: str = "fp4",
    group: str = "32",
    router: bool = True,
    head: bool = False,
) -> RolloutEngine:
    """The rollout's weights are rounded to a grid.

    Args:
        format, group: see verl_ext.core.fake_quant.
        router, head: whether the weights of routers and head are rounded too, like those of attention and experts.
    """
    kinds = {*ATTENTION, *EXPERTS} | ({ROUTER} if router else set()) | ({HEAD} if head else set())
    size = int(group) if group.isdecimal() else group

    def rounded(weights: Weights) -> Weights:
        return {
            name: fake_quantized(value, format, size) if name.rpartition(".")[2] in kinds else value
            for name, value in weights.items()
        }

    try:
        return with_weights(engine, rounded)
    except ValueError as error:
        raise ConfigError(f"lab.quantized.group={group}: {error}") from error


@register_regime("bf16", "two engines with different kernels and precision")
def bf16(engine: RolloutEngine, history: History) -> RolloutEngine:
    """Weights and arithmetic of the rollout are bfloat16, those of the training engine float32."""
    return replace(engine, dtype=torch.bfloat16)


@register_regime(
    "kernels",
    "kernels that round what a layer hands on, and that sum in another order",
    {"bits": (lambda bits: 1 <= bits <= FLOAT32_BITS, f"must be from 1 to {FLOAT32_BITS}")},
)
def kernels(engine: RolloutEngine, history: History, *, bits: int = 8, head: bool = False) -> RolloutEngine:
    """The rollout rounds the residual stream, keys, values, the routers' logits, and attention's sums after each block
    of keys.

    Args:
        bits: significant bits that remain: 8 for bfloat16, 11 for float16, 24 for float32.
        head: whether the logits are rounded too; false is a head in float32 (MiniMax-M1, arXiv 2506.13585).
    """
    return replace(engine, faults=replace(engine.faults, bits=bits, head_bits=bits if head else FLOAT32_BITS))


@register_regime(
    "truncated",
    "top-p or top-k in the rollout, unknown to the training engine",
    {"top_p": (lambda share: 0 < share <= 1, "must be above 0 and at most 1"), "top_k": at_least(0)},
)
def truncated(
    engine: RolloutEngine, history: History, *, top_p: float = 0.9, top_k: int = 0, known: bool = False
) -> RolloutEngine:
    """The rollout samples from the head of the distribution, and normalises its log-probabilities over the head.

    Args:
        top_p, top_k: as in vLLM; top_k 0 means none.
        known: whether the training engine normalises over the tokens that sampling kept, as in a run with verl_ext.
    """
    return replace(engine, top_p=top_p, top_k=top_k, reports_kept=known)


@register_regime(
    "wrong_temperature",
    "a temperature that only one engine applies (raw log-probs, a generation config)",
    {"temperature": ABOVE_0},
)
def wrong_temperature(engine: RolloutEngine, history: History, *, temperature: float = 1.3) -> RolloutEngine:
    """The rollout samples at another temperature than the training engine's, which is 1."""
    return replace(engine, temperature=temperature)


@register_regime(
    "raw_log_probs",
    "log-probs from before the temperature (vLLM's raw_logprobs), which is not 1",
    {"temperature": ABOVE_0},
)
def log_probs_before_temperature(engine: RolloutEngine, history: History, *, temperature: float = 1.3) -> RolloutEngine:
    """The rollout samples at the training engine's temperature, but returns log-probabilities at another one."""
    return replace(engine, reported=temperature)


@register_regime("router_dtype", "routers in bfloat16 in one engine and in float32 in the other")
def routers_in_bf16(engine: RolloutEngine, history: History) -> RolloutEngine:
    """The rollout's routers compute in bfloat16, everything else in float32."""
    return replace(engine, faults=replace(engine.faults, router_dtype=torch.bfloat16))


@register_regime("router_bias", "a bias for the choice of experts (e_score_correction_bias) that one engine drops")
def router_bias(engine: RolloutEngine, history: History, *, scale: float = 0.5) -> RolloutEngine:
    """The rollout chooses experts with a bias that the training engine does not have.

    Args:
        scale: standard deviation of the bias, in logits.
    """
    routers = [weight for name, weight in engine.parts[0].items() if name.endswith(f".{ROUTER}")]
    generator = torch.Generator().manual_seed(0)
    bias = scale * torch.randn(len(routers), len(routers[0]), generator=generator)
    return replace(engine, faults=replace(engine.faults, router_bias=bias))


@register_regime(
    "wrong_weights",
    "weights converted wrongly: experts in another order, another layer's tensor",
    {"kind": one_of("permuted", "neighbour")},
)
def wrong_weights(engine: RolloutEngine, history: History, *, layer: int = 0, kind: str = "permuted") -> RolloutEngine:
    """In the rollout, the experts of a layer are in another order, or a layer has the experts of its neighbour.

    Args:
        layer: the number of the layer.
        kind: `permuted` experts, or those of the `neighbour` layer.
    """
    source = layer if kind == "permuted" else layer - 1 if layer else 1

    def changed(weights: Weights) -> Weights:
        experts = {f"{layer}.{end}": weights[f"{source}.{end}"] for end in EXPERTS}
        return {**weights, **{name: value.roll(int(source == layer), 0) for name, value in experts.items()}}

    return with_weights(engine, changed)


@register_regime("packed_leak", "packed sequences without a mask between them; a prefix cache of another prompt")
def packed_leak(engine: RolloutEngine, history: History) -> RolloutEngine:
    """Tokens of a response also attend to the previous sequence of the batch."""
    return replace(engine, faults=replace(engine.faults, leaks=True))


@register_regime("positions_off", "position ids off by one: padding, a prompt's end, a cut turn")
def positions_off(engine: RolloutEngine, history: History, *, places: int = 1) -> RolloutEngine:
    """The position ids of a response's tokens are larger than in the training engine, by `places`."""
    return replace(engine, faults=replace(engine.faults, positions_off=places))


@register_regime(
    "respelled",
    "retokenisation: text that is decoded and encoded again between rollout and training",
    {"share": SHARE},
)
def respelled(engine: RolloutEngine, history: History, *, share: float = 0.01) -> RolloutEngine:
    """Training reads other tokens instead of a share of the sampled ones."""
    return replace(engine, respelled=share)


@register_regime("misrouted", "routes that are replayed for other tokens: rows in another order, a slice that is off")
def misrouted(engine: RolloutEngine, history: History) -> RolloutEngine:
    """Each trajectory has the experts of another one, half a batch away."""
    return replace(engine, misrouted=True)


@register_regime(
    "router_collapse",
    "a router without a loss or bias that balances its load: experts die",
    {"rate": SHARE},
    in_training=True,
)
@torch.no_grad()
def router_collapse(weights: Weights, model: ModelSettings, *, rate: float = 0.05) -> None:
    """Training's routers come to choose among few experts: 2 of each layer for each one that a token uses.

    The first experts' rows of a router are drawn towards pairs of opposite ones, of which one always wins, and the
    others' towards 0.

    Args:
        rate: share of the way that each step moves the rows.
    """
    for name, rows in weights.items():
        if name.endswith(f".{ROUTER}"):
            goal, paired = torch.zeros_like(rows), 2 * min(model.top_k, len(rows) // 2)
            goal[:paired:2], goal[1:paired:2] = rows[:paired:2], -rows[:paired:2]
            rows.lerp_(goal, rate)


def with_weights(engine: RolloutEngine, change: Callable[[Weights], Weights]) -> RolloutEngine:
    """Returns the engine with every version of its weights changed."""
    return replace(engine, parts=tuple(change(part) for part in engine.parts))
