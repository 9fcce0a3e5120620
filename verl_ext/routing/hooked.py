"""Routing on FSDP, FSDP2 and VeOmni: recorded and compared in `compute_log_prob`, or in the update of a run without it,
and replayed if asked.

Shape legend: T tokens of a micro-batch (prompt and response), n rows of its forward pass on this rank, L MoE layers,
L' layers as the rollout sends them, K experts per token (top-k), E experts.

These engines run transformers models. verl's `router_replay.mode` does nothing on FSDP. On VeOmni, verl 0.9.1 has a
controller of its own, which neither reports the router's own choice nor looks at what it replays; the engine is built
without it here. The modes:

R2  compute_log_prob returns the experts that it used, and the update uses the same.
R3  compute_log_prob and the update use the experts of the rollout ("rollout routing replay", arXiv 2510.11370).

In both, the weights of the experts come from the training router's own scores. A token whose routing the rollout did
not return (the last one of a sequence, and padding), or whose routing is refused (core/routing.py), is routed by the
training router.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import EngineRouterReplayConfig, TrainingWorkerConfig

from verl_ext.base.errors import HookError
from verl_ext.base.names import COMPARES, OLD_ROUTES, ROLLOUT_ROUTES
from verl_ext.base.patching import wrap
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.routing import expert_overlap, known_rows
from verl_ext.core.tokens import fill_gaps, left_out_rows
from verl_ext.routing.choices import (
    REPLAY_OFF,
    WITHOUT_ROUTING,
    ChoicePoint,
    Choose,
    check_replayable,
    expert_counts,
    find_choices,
)
from verl_ext.routing.outputs import (
    RowLayout,
    check_captured,
    drop_refused,
    generated_rows,
    is_old_policy,
    narrow_dtype,
    routing_outputs,
    with_outputs,
)

OWN_AGREEMENT = "router_own_agreement"  # verl logs it as actor/router_own_agreement


class ForwardPass:
    """One micro-batch in one forward pass: the experts that the routers choose, and those that they are to use."""

    def __init__(self, layout: RowLayout, layers: int, dtype: torch.dtype, replayed_TLK: Tensor | None, compares: bool):
        self.layout, self.layers, self.dtype, self.compares = layout, layers, dtype, compares
        self.replayed_TLK = replayed_TLK
        self.replayed_nLK: Tensor | None = None
        self.known_n1: Tensor | None = None
        self.own: dict[int, Tensor] = {}  # layer -> [n, K], by the router itself
        self.used: dict[int, Tensor] = {}
        self.margin: dict[int, Tensor] = {}  # layer -> [n]
        self.over = False

    def choose(self, layer: int, scores_nE: Tensor, ids_nK: Tensor) -> Tensor:
        """Returns the ids that layer number `layer`, of L, is to use; called by its router."""
        used_nK = ids_nK
        if self.replayed_TLK is not None:
            if self.replayed_nLK is None or self.known_n1 is None:
                self.replayed_nLK = self.layout.spread(self.replayed_TLK, len(ids_nK))
                self.known_n1 = known_rows(self.replayed_nLK).unsqueeze(1)
            used_nK = torch.where(self.known_n1, self.replayed_nLK[:, layer].long(), ids_nK)
        if not self.over:  # after that, the backward pass with gradient checkpointing runs the router once more
            if layer in self.used:
                raise HookError(f"router {layer} of {self.layers} ran twice in one forward pass")
            self.own[layer] = ids_nK.to(self.dtype)
            self.used[layer] = self.own[layer] if used_nK is ids_nK else used_nK.to(self.dtype)
            if self.compares:
                self.margin[layer] = top_k_margin(scores_nE, ids_nK)
        return used_nK

    def end(self) -> None:
        """Ends the recording, while replay continues. Raises HookError unless every router ran."""
        self.over = True
        if len(self.used) != self.layers:
            raise HookError(f"{len(self.used)} of {self.layers} routers ran in the forward pass; each must run once")

    def packed(self, by_layer: dict[int, Tensor]) -> Tensor:
        """Returns the recorded values as [T, L, ...]."""
        return self.layout.collect(torch.stack([by_layer[layer] for layer in range(self.layers)], dim=1))

    def own_agreement(self) -> float:
        """Returns the share of the replayed experts that this rank's routers would have chosen too."""
        if self.replayed_nLK is None or self.known_n1 is None:
            return 1.0
        own_nLK = torch.stack([self.own[layer] for layer in range(self.layers)], dim=1)
        overlap_nL = expert_overlap(own_nLK, self.replayed_nLK)
        share_n = overlap_nL.float().mean(1) / own_nLK.shape[2]
        return float((share_n * self.known_n1[:, 0]).sum() / self.known_n1.sum().clamp(min=1))


def top_k_margin(scores_nE: Tensor, ids_nK: Tensor) -> Tensor:
    """Returns [n] float32: the k-th score minus the best score that was not chosen; 0 if there is no such score.

    The scores are those of the router's top-k: probabilities for most models, probability plus bias for DeepSeek-V3,
    logits for gpt_oss.
    """
    scores_nE = scores_nE.detach()
    kth_n = scores_nE.gather(1, ids_nK).amin(1)
    next_n = scores_nE.scatter(1, ids_nK, -torch.inf).amax(1)
    return (kth_n - next_n).float().nan_to_num_(0.0, 0.0, 0.0)


class HookedRouting:
    """Hooks on the routers of a transformers model, and around its engine's `forward_step`.

    Args:
        config: the config of the actor's training worker, before it builds the engine.

    Attributes:
        config: the config from which the engine is to be built instead: without verl's own replay.

    Written for verl 0.9.1: `forward_step(micro_batch, loss_function, forward_only)` returns (loss, output), and every
    tensor in `output["model_output"]` is put back in batch order and returned by `compute_log_prob`.
    """

    points: list[ChoicePoint]

    def __init__(self, config: TrainingWorkerConfig):
        self.mode = config.engine_config.router_replay.mode
        without_replay = replace(config.engine_config, router_replay=EngineRouterReplayConfig())
        self.config = replace(config, engine_config=without_replay)

    def prepare(self, engine: Any) -> None:
        """Hooks the routers of the initialized engine. Raises HookError if it has none, or they cannot replay."""
        hf_config = engine.model_config.hf_config
        if self.mode != "disabled":
            check_replayable(hf_config)
        self.points = find_choices(engine.module)
        self.experts, self.top_k = expert_counts(hf_config)
        self.decoder_layers = hf_config.get_text_config().num_hidden_layers
        self.load = ExpertLoad(len(self.points), self.experts, get_device_id())
        self.current: ForwardPass | None = None
        for index, point in enumerate(self.points):
            point.intercept(self.experts, self.top_k, partial(self._choose, index))
        wrap("hooked_routing", engine, "forward_step", self.forward_step, "micro_batch, loss_function, forward_only")

    def hooks(self) -> tuple[str, int]:
        """Returns (class of the routers, number of hooked routers)."""
        return type(self.points[0].module).__name__, len(self.points)

    def compute(self, infer: Callable[[TensorDict], TensorDict | None], data: TensorDict) -> TensorDict | None:
        """Returns `infer(data)`, whose micro-batches pass through `forward_step`."""
        return infer(data)

    def _choose(self, layer: int) -> Choose | None:
        return None if self.current is None else partial(self.current.choose, layer)

    def forward_step(self, verls: Callable, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """Wraps verl's `forward_step`: records, compares and replaces the routers' choices."""
        old_policy = is_old_policy(micro_batch, forward_only)
        in_update = not forward_only and tu.get_non_tensor_data(micro_batch, COMPARES, default=False)
        asked = tu.get_non_tensor_data(micro_batch, "enable_routing_replay", default=False)
        replays = self.mode != "disabled" and asked
        records = replays and self.mode == "R2" and old_policy
        rollout_TLK = refused_T = None
        if old_policy or in_update or (replays and self.mode == "R3"):
            rollout_TLK, refused_T = self._rollout_routes(micro_batch)
        replayed_TLK = None
        if replays and not records:
            replayed_TLK = rollout_TLK if self.mode == "R3" else self._old_routes(micro_batch)
            if replayed_TLK is None:
                raise HookError(
                    f"router_replay.mode={self.mode} has nothing to replay: the batch has no "
                    f"{ROLLOUT_ROUTES if self.mode == 'R3' else OLD_ROUTES}",
                    fix=REPLAY_OFF,
                    otherwise="for R3 check that the rollout runs with enable_return_routed_experts",
                )
        compared_TLK = rollout_TLK if old_policy or in_update else None
        if compared_TLK is None and not replays:
            self.current = None
            return verls(micro_batch, loss_function=loss_function, forward_only=forward_only)

        layout = RowLayout.from_batch(micro_batch, get_device_id())
        compares = compared_TLK is not None
        now = ForwardPass(layout, len(self.points), narrow_dtype(self.experts), replayed_TLK, compares)
        self.current = now  # stays until the next forward pass: the backward pass of this one may run the routers again
        compare = partial(self._compare, now, compared_TLK, refused_T, micro_batch)
        if in_update and compares:
            loss_function = partial(with_outputs, loss_function, compare)
        loss, output = verls(micro_batch, loss_function=loss_function, forward_only=forward_only)
        now.end()
        if old_policy and compares:
            output["model_output"].update(compare())
        if records:
            offsets = micro_batch["input_ids"].offsets().to(layout.lengths.device)
            output["model_output"][OLD_ROUTES] = torch.nested.nested_tensor_from_jagged(now.packed(now.used), offsets)
        if forward_only:
            self.current = None
        else:
            output["metrics"][OWN_AGREEMENT] = now.own_agreement()
        return loss, output

    def _compare(
        self, now: ForwardPass, rollout_TLK: Tensor, refused_T: Tensor | None, micro_batch: TensorDict
    ) -> dict[str, Tensor]:
        """Returns `routing_outputs` of a forward pass that is over, and adds its load of the experts."""
        now.end()
        used_TLK, own_TL, known_T = now.packed(now.used), None, known_rows(rollout_TLK)
        counts_T = known_T & generated_rows(micro_batch, known_T.device)
        self.load.add(used_TLK[counts_T], rollout_TLK[counts_T])
        if now.replayed_TLK is not None:
            own_TL = expert_overlap(now.packed(now.own), rollout_TLK)
        return routing_outputs(
            expert_overlap(used_TLK, rollout_TLK),
            self.top_k,
            known_T,
            micro_batch,
            left_out_B=left_out_rows(micro_batch[ROLLOUT_ROUTES], micro_batch["input_ids"].offsets().diff()),
            refused_T=refused_T,
            margin_TL=now.packed(now.margin),
            own_TL=own_TL,
        )

    def _rollout_routes(self, micro_batch: TensorDict) -> tuple[Tensor | None, Tensor | None]:
        """Returns the rollout's routes [T, L, K], layers in the order of the routers, and [T] the reasons why rows are
        refused (`drop_refused`); (None, None) if the batch has no routes. Trajectories that were left out are zeros.

        vLLM and SGLang send a row for each decoder layer, dense ones included; others send only the MoE layers.
        """
        if (routes := micro_batch.get(ROLLOUT_ROUTES, None)) is None:
            return None, None
        routes_TLK, offsets = routes.values(), micro_batch["input_ids"].offsets()
        left_out_B = left_out_rows(routes, lengths_B := offsets.diff())
        tokens, layers, top_k = int(lengths_B[~left_out_B].sum()), routes_TLK.shape[1], routes_TLK.shape[2]
        if layers not in (self.decoder_layers, len(self.points)) or top_k != self.top_k or len(routes_TLK) != tokens:
            raise HookError(
                f"the rollout's {ROLLOUT_ROUTES} is {tuple(routes_TLK.shape)} [tokens, layers, top_k] where the "
                f"training engine has {tokens} tokens, {self.decoder_layers} decoder layers, {len(self.points)} of "
                f"them with a router, and top-{self.top_k}: "
                "the two engines number this model's layers differently",
                WITHOUT_ROUTING,
            )
        check_captured(micro_batch)
        if layers != len(self.points):
            routes_TLK = routes_TLK[:, [point.layer for point in self.points]]
        routes_TLK = fill_gaps(routes_TLK.to(get_device_id()), lengths_B, left_out_B)
        routes_TLK, refused_T = drop_refused(routes_TLK, self.experts, offsets)
        return routes_TLK.to(narrow_dtype(self.experts)), refused_T

    def _old_routes(self, micro_batch: TensorDict) -> Tensor | None:
        """Returns the routes [T, L, K] that `compute_log_prob` returned."""
        routes = micro_batch.get(OLD_ROUTES, None)
        return None if routes is None else routes.values().to(get_device_id(), narrow_dtype(self.experts))
