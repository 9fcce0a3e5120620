"""The training engines whose routing and states can be read, by verl's `actor.strategy`; the names of a model's sizes.

Neither engines nor torch are imported here, because a launch, `verl-ext doctor` and `plan` read these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

ACTOR = "actor_rollout_ref.actor"
# Names of these sizes in the transformers configs of mixtures of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


@dataclass(frozen=True)
class Engine:
    """A training engine of verl.

    Attributes:
        settings: the place of the engine's settings in a config.
        adapter: module and class of the adapter that reads the engine's routing. It is made from a worker's config; the
            engine is built from its `config`; `prepare(engine)` hooks it, `hooks()` reports the hooks, and
            `compute(infer, data)` returns `infer(data)`, with `router_agreement` and `router_sums` if the batch has
            routing to compare.
        recorder: module and function that hooks a built engine, to record its model's states.
        hooked: the engine runs models of transformers, whose routers we hook and replay ourselves; on Megatron
            verl replays.
    """

    settings: str
    adapter: str
    recorder: str
    hooked: bool = False

    def load_adapter(self) -> type:
        return _load(self.adapter)

    def open_recorder(self, engine: Any) -> Any:
        return _load(self.recorder)(engine)


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


_NAMED = "verl_ext.routing.layers:open_recorder_of_transformers"
_HOOKED = "verl_ext.routing.hooked:HookedRouting"
_FSDP = Engine(f"{ACTOR}.fsdp_config", _HOOKED, _NAMED, hooked=True)
_RECORDED = "verl_ext.routing.megatron:RecordedRouting"
_LAYERS = "verl_ext.routing.layers:open_recorder_of_megatron"
ENGINES = {
    "fsdp": _FSDP,
    "fsdp2": _FSDP,
    "megatron": Engine(f"{ACTOR}.megatron", _RECORDED, _LAYERS),
    "veomni": Engine(f"{ACTOR}.veomni", _HOOKED, _NAMED, hooked=True),
}
HOOKED = tuple(strategy for strategy, engine in ENGINES.items() if engine.hooked)


def first_of(config: Any, names: tuple[str, ...]) -> int:
    """Returns the first of these values that the config has and that is not 0; 0 if there is none."""
    return next((size for name in names if (size := getattr(config, name, None))), 0)
