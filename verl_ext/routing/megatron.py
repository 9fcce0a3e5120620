"""Compares routing on Megatron with the rollout's: in `compute_log_prob`, where verl records it, or in the update.

Shape legend: T tokens of a batch (prompt and response, packed), t tokens of a block, L MoE layers, l layers as the
rollout sends them, K experts per token (top-k).

Written for verl 0.9.1. An engine built with `router_replay.mode=R2` records in a forward-only pass whose batch carries
the flag `enable_routing_replay` and no `routed_experts`. It gathers the routes over tensor, context and pipeline
parallelism and returns them as `routed_experts`, in the order of the batch (forward_backward_batch in
workers/engine/megatron/transformer_impl.py). The user's mode decides what happens with them:

disabled  Only the engine is built with R2. verl's workers follow the setting and never send the flag
          (_with_routing_replay_flag in workers/engine_workers.py), so no update replays anything. This file sets the
          flag for the pass that records, and drops the routes after comparing them.
R2        verl sends the flag, and the update replays the routes that compute_log_prob recorded. They stay in the output
          and replace the rollout's in the batch, because both are one field. verl records in int16, and the rollout's
          ids may be sent in a byte (upstream/agent_loop.py); TransferQueue takes one dtype for a field.
R3        The engine is built with R3, and in the pass that records it looks like one with R2, whose routers have
          targets. Each router records the experts that it would choose next to those that it uses, in one row of [2K]
          (`RouteRecorder`). verl replays the rollout's routes as it does without this package.

In an update without compute_log_prob, the routers record in the forward pass (`RouteRecorder`), and the routes of a
micro-batch are compared right before its loss. The loss is on the last stage of a pipeline and most routers are on the
others, so this needs a pipeline of one stage.

Recording has a cost in every mode (utils/megatron/router_replay_patch.py): the routers use verl's top-k
instead of the fused one of `moe_router_fusion`, and the all-to-all dispatcher waits for the device at each layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import EngineRouterReplayConfig, TrainingWorkerConfig

from verl_ext.base.errors import HookError
from verl_ext.base.names import COMPARES, ROLLOUT_ROUTES
from verl_ext.base.patching import wrap
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.routing import TOKENS_AT_ONCE, expert_overlap, known_rows
from verl_ext.core.tokens import blocks, fill_gaps, left_out_rows
from verl_ext.routing.outputs import (
    check_captured,
    drop_refused,
    generated_rows,
    is_old_policy,
    narrow_dtype,
    routing_outputs,
    with_outputs,
)

ROUTES = ROLLOUT_ROUTES  # one field: jagged [B, n, l, K] from the rollout, [B, n, L, K] from the engine
WITHOUT_AGREEMENT = "stability.router_agreement=false"
STEP = "batch_iter, model, logits_processor_func, postprocess_micro_batch_func"


@dataclass(frozen=True)
class Recorders:
    """The routers that record in an engine, over all of its pipeline stages.

    Attributes:
        name: class of the routers.
        layers: numbers of the decoder layers with a router, dense ones counted, as verl orders the recorded routes.
        decoder_layers: the number of decoder layers, without layers for multi-token prediction.
        experts: the number of experts; their ids are below it.
    """

    name: str
    layers: list[int]
    decoder_layers: int
    experts: int


class RecordedRouting:
    """Has verl record in `compute_log_prob`, and the routers themselves in the update; compares the routes.

    Args:
        config: the config of the actor's training worker, before it builds the engine.

    Attributes:
        config: the config from which the engine is to be built instead.
    """

    def __init__(self, config: TrainingWorkerConfig):
        self.mode = config.engine_config.router_replay.mode
        recording = replace(config.engine_config, router_replay=EngineRouterReplayConfig(mode="R2"))
        self.config = config if self.mode == "R3" else replace(config, engine_config=recording)
        self.recorder = RouteRecorder(config.engine_config, recording, self._compare)
        self.recorders: Recorders
        self.load: ExpertLoad

    def prepare(self, engine: Any) -> None:
        """Finds the routers that record, once the engine is initialized; call it on all ranks, which may communicate.

        Raises:
            HookError: no router records, or verl would put the layers in the wrong order.
        """
        self.recorders = _find_recorders(engine)
        self.load = ExpertLoad(len(self.recorders.layers), self.recorders.experts, get_device_id())
        self.recorder.prepare(engine)

    def hooks(self) -> tuple[str, int]:
        """Returns (class of the routers, number of recording routers over all pipeline stages)."""
        return self.recorders.name, len(self.recorders.layers)

    def compute(self, infer: Callable[[TensorDict], TensorDict | None], data: TensorDict) -> TensorDict | None:
        """Calls `infer(data)`, the infer_batch of verl's TrainingWorker, and adds the agreement to its outputs.

        Args:
            data: compared only if it has the rollout's `routed_experts`; it is not changed.

        Returns the result of `infer`: None on all ranks of a model replica but one. On that rank it also has
            router_agreement, router_sums: see `routing_outputs`.
            routed_experts: the routes that the engine recorded, only with R2, in the dtype of the rollout's.

        Raises:
            HookError: the engine recorded nothing, or the rollout's routing is of other layers or experts.
        """
        rollout = data.get(ROUTES, None)
        if tu.get_non_tensor_data(data, "no_lora_adapter", default=False):
            # The reference of a LoRA, after the actor: with R2 it replays the actor's routes, which the update needs.
            return _without_routes(infer(data))
        if rollout is None:
            return infer(data)
        # Other passes must neither replay the rollout's routes nor overwrite them, because they are compared later.
        old_policy = is_old_policy(data)
        if self.mode == "R3":
            if not (old_policy and tu.get_non_tensor_data(data, "enable_routing_replay", default=False)):
                return infer(data)
            check_captured(data)  # before they are used
            output = self.recorder.infer(infer, data)
        else:
            batch = data.exclude(ROUTES)
            tu.assign_non_tensor_data(batch, "enable_routing_replay", old_policy)
            output = infer(batch)
        if output is None or not old_policy:
            return output
        recorded = output.get(ROUTES, None)
        if recorded is None:
            raise HookError(
                f"compute_log_prob returned no {ROUTES}, though verl's engine was built to record", (WITHOUT_AGREEMENT,)
            )
        for name, value in self._compare(recorded, data).items():
            output[name] = value.cpu()
        if self.mode != "R2":
            return _without_routes(output)
        if torch.iinfo(rollout.dtype).max < self.recorders.experts - 1:
            raise HookError(
                f"the rollout's {ROUTES} is {rollout.dtype}, which cannot hold the ids of the {self.recorders.experts} "
                "experts that the update would replay: the rollout runs another model",
                fix=(WITHOUT_AGREEMENT,),
            )
        output[ROUTES] = recorded.to(rollout.dtype)
        return output

    def _compare(self, recorded: Tensor, data: TensorDict) -> dict[str, Tensor]:
        replayed = self.mode == "R3"
        if not replayed:  # replayed routes are checked before they are used
            check_captured(data)
        return compare_recorded(recorded, data[ROUTES], self.recorders, data, replayed=replayed, load=self.load)


class RouteRecorder:
    """Records the experts that each Megatron router uses, where verl does not: in an update, and in a forward-only pass
    with replay. With R3, those that it would choose as well.

    verl can record or replay, not both. Its forward_backward_batch asks for records if the engine's mode is R2 and the
    batch has no routes. Its forward_step sets the targets if the routers are to replay, by the rules of the engine's
    mode, and merges the records if they were asked for (workers/engine/megatron/transformer_impl.py). So the batch is
    passed without its routes to an engine of mode R2, and each micro-batch gets them back under the engine's own mode.

    Args:
        users: settings of the engine, of the user's mode.
        recording: the same of mode R2.
        compare: (a micro-batch's routes, jagged [B, n, L, K or 2K], and its data) -> model outputs for the loss.
    """

    CARRIED = "replayed_experts"  # the rollout's routes, while verl must not see them

    def __init__(self, users: Any, recording: Any, compare: Callable[[Tensor, TensorDict], dict[str, Tensor]]):
        self.users, self.recording, self.compare = users, recording, compare
        self.replays = users.router_replay.mode == "R3"
        self.records = False  # in a forward-only pass with replay
        self.records_update = False

    def prepare(self, engine: Any) -> None:
        """Hooks the engine's forward_step and its routers' choice."""
        from verl.utils.megatron.router_replay_utils import iter_model_routers
        from verl.utils.megatron_utils import unwrap_model

        self.engine = engine
        takes = "scores, topk, num_groups, group_topk, default_compute_topk"
        for _, router in iter_model_routers(unwrap_model(engine.module)):
            wrap("megatron_replay", router, "get_replay_topk", partial(self._choose, router), takes)
        wrap("megatron_replay", engine, "forward_step", self._forward_step, STEP)

    def infer(self, infer: Callable[[TensorDict], TensorDict | None], data: TensorDict) -> TensorDict | None:
        """Returns `infer(data)`; its `routed_experts` are jagged [B, n, L, 2K]: K own choices, and the K in use."""
        batch = data.exclude(ROUTES)
        batch[self.CARRIED] = data[ROUTES]
        self.engine.engine_config, self.records = self.recording, True
        try:
            return infer(batch)
        finally:
            self.engine.engine_config, self.records = self.users, False

    def _choose(
        self,
        router: Any,
        verls: Callable,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Any:
        probs, used = verls(scores, topk, num_groups, group_topk, default_compute_topk)
        if self.records or self.records_update:
            recorded = used
            if self.replays:
                _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
                recorded = torch.cat([own, used], 1)
            router.record_indices(recorded)
        return probs, used

    def _forward_step(
        self,
        verls: Callable,
        batch_iter: Any,
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        args = logits_processor_func, postprocess_micro_batch_func
        if self.records:
            return self._replayed_step(verls, next(batch_iter), model, *args)
        micro_batch = next(batch_iter)
        compares = tu.get_non_tensor_data(micro_batch, COMPARES, default=False)
        loss = postprocess_micro_batch_func.keywords["loss_function"]  # None where an update's answers are scored again
        if not compares or loss is None or micro_batch.get(ROUTES, None) is None:
            return verls(iter([micro_batch]), model, *args)
        return self._updating_step(verls, micro_batch, model, *args)

    def _updating_step(
        self, verls: Callable, micro_batch: TensorDict, model: Any, logits_processor_func: Any, postprocess: partial
    ) -> Any:
        """Makes one forward step of an update, whose loss gets the comparison among the model's outputs. With
        recomputation the routers run again in the backward pass, after this, and do not record."""
        micro_batch = micro_batch.to(get_device_id())

        def routes() -> Tensor:
            from verl.utils.megatron.router_replay_utils import iter_model_routers, merge_router_topk_indices
            from verl.utils.megatron_utils import unwrap_model

            found: list[Tensor] = []
            whole = micro_batch.get("attention_mask", None), micro_batch["input_ids"]
            chunk = unwrap_model(model)
            merge_router_topk_indices(*whole, found, self.engine.tf_config, 0, model=chunk)
            for _, router in iter_model_routers(chunk):
                router.record_indices(None)
            return found[0]

        loss = partial(with_outputs, postprocess.keywords["loss_function"], lambda: self.compare(routes(), micro_batch))
        self.records_update = True
        try:
            return verls(iter([micro_batch]), model, logits_processor_func, partial(postprocess, loss_function=loss))
        finally:
            self.records_update = False

    def _replayed_step(self, verls: Callable, carrying: TensorDict, model: Any, *args: Any) -> Any:
        from verl.utils.megatron.router_replay_patch import RouterReplayAction
        from verl.utils.megatron.router_replay_utils import iter_model_routers
        from verl.utils.megatron_utils import unwrap_model

        sizes = self.engine.tf_config
        micro_batch = carrying.exclude(self.CARRIED)
        micro_batch[ROUTES] = carrying[self.CARRIED]
        routers = [router for _, router in iter_model_routers(unwrap_model(model))]
        for router in routers:
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        top_k, self.engine.engine_config = sizes.moe_router_topk, self.users
        if not routers:
            sizes.moe_router_topk = 2 * top_k  # the columns of verl's empty record of this stage
        try:
            return verls(iter([micro_batch]), model, *args)
        finally:
            sizes.moe_router_topk, self.engine.engine_config = top_k, self.recording


def _without_routes(output: TensorDict | None) -> TensorDict | None:
    # What a worker returns is written to the batch: it would replace the routes that are there.
    return None if output is None else output.exclude(ROUTES)


def compare_recorded(
    recorded: Tensor,
    rollout: Tensor,
    recorders: Recorders,
    data: TensorDict,
    *,
    replayed: bool = False,
    load: ExpertLoad | None = None,
    block: int = TOKENS_AT_ONCE,
) -> dict[str, Tensor]:
    """Returns `routing_outputs` from jagged routes of both engines, on any device.

    The training engine's are [B, n, L, K], or [B, n, L, 2K] of `RouteRecorder` with R3, if the rollout's routes were
    replayed. The rollout's are [B, n, l, K]; trajectories that were left out are empty.

    The experts of the compared tokens are added to `load`.

    Refused rows of the rollout (core/routing.py) are not compared. The routes that verl itself replays do not change.

    Raises:
        HookError: the routes are not of the same tokens and layers.
    """
    device, offsets = get_device_id(), data["input_ids"].offsets()
    own_TLK, train_TLK = recorded.values().chunk(2, -1) if replayed else (None, recorded.values())
    infer_TlK = rollout.values()
    left_out_B, starts = left_out_rows(rollout, lengths_B := offsets.diff()), rollout.offsets().tolist()
    tokens, layers = int(offsets[-1]), recorders.layers
    shipped = infer_TlK.shape[1]
    whole = shipped == recorders.decoder_layers
    top_k = train_TLK.shape[2]
    expected = (int(lengths_B[~left_out_B].sum()), shipped if whole else len(layers), top_k)
    if train_TLK.shape != (tokens, len(layers), top_k) or infer_TlK.shape != expected:
        raise HookError(
            f"the rollout's {ROUTES} is {tuple(infer_TlK.shape)} and the training engine's {tuple(train_TLK.shape)} "
            f"[tokens, layers, top_k], where there are {expected[0]} tokens to compare and {recorders.decoder_layers} "
            f"decoder layers, {len(layers)} of them with a router: the two engines number this model's layers "
            "differently",
            fix=(WITHOUT_AGREEMENT,),
        )
    columns = torch.tensor(layers if whole else range(shipped), device=device)
    narrow = narrow_dtype(recorders.experts)
    overlap_TL = torch.zeros(tokens, len(layers), dtype=torch.uint8, device=device)
    own_TL = None if own_TLK is None else torch.zeros_like(overlap_TL)
    known_T = torch.zeros(tokens, dtype=torch.bool, device=device)
    refused_T = torch.zeros(tokens, dtype=torch.uint8, device=device)
    generated_T = generated_rows(data, device)
    routed_l = torch.zeros(shipped, dtype=torch.bool, device=device)
    for part, of in blocks(offsets, block):
        infer_tlK = infer_TlK[starts[of.start] : starts[of.stop]].to(device)
        routed_l |= infer_tlK.any(0).bool().any(1)  # any() of uint8 is uint8
        infer_tLK = fill_gaps(infer_tlK[:, columns], lengths_B[of], left_out_B[of])
        here = offsets[of.start : of.stop + 1] - part.start
        infer_tLK, refused_T[part] = drop_refused(infer_tLK, recorders.experts, here)
        infer_tLK = infer_tLK.to(narrow)
        known_T[part] = known_rows(infer_tLK)
        train_tLK = train_TLK[part].to(device).to(narrow)
        overlap_TL[part] = expert_overlap(train_tLK, infer_tLK)
        if load is not None:
            counts_t = known_T[part] & generated_T[part]
            load.add(train_tLK[counts_t], infer_tLK[counts_t])
        if own_TL is not None and own_TLK is not None:
            own_TL[part] = expert_overlap(own_TLK[part].to(device).to(narrow), infer_tLK)
    _check_layers(routed_l, columns, layers, enough=top_k > 1 and bool((known_T | (refused_T > 0)).any()))
    return routing_outputs(overlap_TL, top_k, known_T, data, left_out_B=left_out_B, refused_T=refused_T, own_TL=own_TL)


def _check_layers(routed_l: Tensor, columns: Tensor, layers: list[int], enough: bool) -> None:
    """Raises HookError unless the rollout routed in exactly the layers that have a router in the training engine.

    A dense layer is all zeros. A router that always chose expert 0 would be too, but not if there are tokens with more
    than one expert (`enough`).
    """
    dense = torch.ones_like(routed_l).index_fill_(0, columns, False)
    extra = (routed_l & dense).nonzero().flatten().tolist()
    missing = [layers[index] for index in (~routed_l[columns]).nonzero().flatten().tolist()] if enough else []
    if extra or missing:
        raise HookError(
            f"the rollout's {ROUTES} has experts in decoder layers {extra}, where the training engine has no router, "
            f"and none in {missing}, where it has: the two engines number this model's layers differently",
            fix=(WITHOUT_AGREEMENT,),
        )


def _find_recorders(engine: Any) -> Recorders:
    """Returns the TopKRouters of Megatron's decoder with verl's RouterReplay; layers for multi-token prediction have
    none."""
    from megatron.core import parallel_state as mpu
    from verl.utils.megatron.router_replay_utils import get_moe_num_layers_to_build, iter_model_routers
    from verl.utils.megatron_utils import unwrap_model

    config = engine.tf_config
    chunks = [[number - 1 for number, _ in iter_model_routers(chunk)] for chunk in unwrap_model(engine.module)]
    stages = [chunks]
    if (size := mpu.get_pipeline_model_parallel_world_size()) > 1:
        stages = [[] for _ in range(size)]
        torch.distributed.all_gather_object(stages, chunks, group=mpu.get_pipeline_model_parallel_group())
    # verl's pp_gather concatenates the stages, once for each virtual stage.
    layers = [layer for virtual in zip(*stages, strict=True) for stage in virtual for layer in sorted(stage)]
    if not layers:
        raise HookError(
            "verl installed no recorder of routing in Megatron: no TopKRouter has a RouterReplay. The model is dense, "
            "or this megatron-core ignores moe_enable_routing_replay",
            fix=(WITHOUT_AGREEMENT,),
        )
    counts = [[len(virtual) for virtual in stage] for stage in stages]
    assumed = counts
    if config.virtual_pipeline_model_parallel_size is not None and size > 1:
        # With virtual stages, verl cuts the result of a stage by these counts, without looking at the stage.
        assumed = [[get_moe_num_layers_to_build(config, v, p) for v in range(len(chunks))] for p in range(size)]
    if layers != sorted(set(layers)) or assumed != counts:
        raise HookError(
            "verl would put the routes of Megatron's pipeline stages in the wrong order: the stages, and their virtual "
            f"ones, hold the layers {stages}, where verl counts {assumed}",
            fix=("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null",),
            otherwise=f"set {WITHOUT_AGREEMENT}",
        )
    return Recorders("TopKRouter", layers, config.num_layers, config.num_moe_experts)
