"""The training engines whose routing and states are seen, by verl's `actor.strategy`; the names of a model's sizes.

Neither engines nor torch are imported here: a launch, `verl-ext doctor` and `plan` read these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

ACTOR = "actor_rollout_ref.actor"
# How the transformers configs of mixtures of experts name them.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


@dataclass(frozen=True)
class Engine:
    """A training engine of verl.

    Attributes:
        settings: where a config has those of the engine.
        adapter: module and class of what sees the engine's routing: made of a worker's config, its `config` builds the
            engine, `prepare(engine)` hooks it, `hooks()` reports that, and `compute(infer, data)` is `infer(data)` with
            `router_agreement` and `router_sums` among its outputs where there is what to compare.
        recorder: module and function: of an engine that is built, hooks that record its model's states.
        hooked: whether it runs models of transformers, whose routers we hook and replay ourselves; verl records and
            replays on the others.
        compares_r3: whether the agreement is measured in a pass that replays the rollout's experts.
    """

    settings: str
    adapter: str
    recorder: str
    hooked: bool = False
    compares_r3: bool = True

    def load_adapter(self) -> type:
        return _load(self.adapter)

    def open_recorder(self, engine: Any) -> Any:
        return _load(self.recorder)(engine)


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


_NAMED = "verl_ext.routing.layers:open_recorder_of_transformers"
_FSDP = Engine(f"{ACTOR}.fsdp_config", "verl_ext.routing.fsdp:FsdpRouting", _NAMED, hooked=True)
_RECORDED = "verl_ext.routing.megatron:RecordedRouting"
_LAYERS = "verl_ext.routing.layers:open_recorder_of_megatron"
ENGINES = {
    "fsdp": _FSDP,
    "fsdp2": _FSDP,
    "megatron": Engine(f"{ACTOR}.megatron", _RECORDED, _LAYERS),
    "veomni": Engine(f"{ACTOR}.veomni", _RECORDED, _NAMED, compares_r3=False),
}
HOOKED = tuple(strategy for strategy, engine in ENGINES.items() if engine.hooked)


def first_of(config: Any, names: tuple[str, ...]) -> int:
    """The first of these that the config has and is not 0; 0 without one."""
    return next((size for name in names if (size := getattr(config, name, None))), 0)
