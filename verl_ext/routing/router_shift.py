"""Keeps the router's scores of the old policy for the update, and measures how far the current router is from them
(RSPO).

Shape legend: N tokens of a forward pass, R response tokens of all trajectories, B trajectories, L MoE layers, K
experts per token, E experts.

compute_log_prob returns the experts that the old router chose and their log-probabilities, per response token; verl
carries both to update_actor through TransferQueue. That is 4 L K bytes per token (int16 + float16; 1.5 KB for 48 layers
and top-8). In the update, the hooks add each layer's deviation to one number per token; no score is kept after its
layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils.device import get_device_id

from verl_ext.base.errors import HookError
from verl_ext.base.names import DEVIATION, RESPONSE_MASK, ROUTER, SHIFT_EXPERTS, SHIFT_SCORES
from verl_ext.base.patching import wrap
from verl_ext.core.losses import router_deviation
from verl_ext.core.tokens import jagged
from verl_ext.routing.choices import CHOICE_METHOD, ChoicePoint, find_choices
from verl_ext.routing.layers import joined_over, megatron_points
from verl_ext.routing.outputs import RowLayout, is_old_policy, packed_rows

Take = Callable[[int, Any, Any], None]  # (number of the layer, router, its output)


class ShiftRecorder:
    """Hooks an FSDP engine's routers and wraps its `forward_step`; does nothing until `enabled`.

    Written for verl 0.9.1, where `forward_step(micro_batch, loss_function, forward_only)` runs the model once and then
    the loss. Gradient checkpointing runs the routers once more in the backward pass; that run is not recorded.

    Raises:
        HookError: there is no router, or a router does not return expert ids and logits.
    """

    def __init__(self, engine: Any):
        self.enabled = False
        self.routers = self._find_routers(engine)
        self._take: Take | None = None
        self._checked: set[int] = set()
        self._hook(engine)

    def _find_routers(self, engine: Any) -> list[Any]:
        return [require_readable(point).module for point in find_choices(engine.module)]

    def _hook(self, engine: Any) -> None:
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._pass, layer))
        wrap("shift_recorder", engine, "forward_step", self.forward_step, "micro_batch, loss_function, forward_only")

    def _rows(self, micro_batch: TensorDict, device: torch.device) -> "ResponseRows | MegatronRows":
        return ResponseRows(micro_batch, device)

    def _ids(self, router: Any, output: Any) -> Tensor:
        return expert_ids(router, output)

    def _logits(self, router: Any, output: Any) -> Tensor:
        return router_logits(router, output)

    def _pass(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        if self._take is not None:
            with torch.no_grad():
                self._take(layer, router, output)

    @contextmanager
    def _taking(self, take: Take) -> Iterator[None]:
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def _records(self, micro_batch: TensorDict, forward_only: bool) -> bool:
        return self.enabled and is_old_policy(micro_batch, forward_only)

    def _compares(self, micro_batch: TensorDict, forward_only: bool) -> bool:
        return self.enabled and not forward_only and SHIFT_SCORES in micro_batch.keys()  # noqa: SIM118 (a TensorDict)

    def forward_step(self, verls: Callable, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """Wraps verl's `forward_step`: records the old policy's scores, or compares the current ones with them."""
        if self._records(micro_batch, forward_only):
            with self._recording(micro_batch) as fields:
                loss, output = verls(micro_batch, loss_function=loss_function, forward_only=True)
            output["model_output"].update(fields())
            return loss, output
        if not self._compares(micro_batch, forward_only):
            return verls(micro_batch, loss_function=loss_function, forward_only=forward_only)
        with self._comparing(micro_batch) as deviation:

            def loss_with_deviation(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
                data[DEVIATION] = deviation()
                return loss_function(model_output=model_output, data=data, dp_group=dp_group)

            return verls(micro_batch, loss_function=loss_with_deviation, forward_only=False)

    @contextmanager
    def _recording(self, micro_batch: TensorDict) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Records the passes inside; yields the function that makes the jagged fields after the passes."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int, router: Any, output: Any) -> None:
            ids_NK, logits_NE = self._ids(router, output), self._logits(router, output)
            if layer not in self._checked:
                refuse_probabilities(router, logits_NE)
                self._checked.add(layer)
            seen[layer] = ids_NK, logits_NE.float().log_softmax(-1).gather(1, ids_NK.long())

        def fields() -> dict[str, Tensor]:
            self._expect(len(seen), "compute_log_prob")
            layers = [seen[layer] for layer in range(len(self.routers))]
            rows, found = self._rows(micro_batch, layers[0][0].device), {}
            # Log-probabilities lie in about [-20, 0], where float16 has three bits more than bfloat16.
            for field, index, dtype in ((SHIFT_EXPERTS, 0, torch.int16), (SHIFT_SCORES, 1, torch.float16)):
                values_RLK = torch.stack([rows.take(kept[index]).to(dtype) for kept in layers], dim=1)
                found[field] = torch.nested.nested_tensor_from_jagged(values_RLK, rows.offsets)
            return found

        with self._taking(keep):
            yield fields

    @contextmanager
    def _comparing(self, micro_batch: TensorDict) -> Iterator[Callable[[], Tensor]]:
        """Compares the routers in the pass inside; yields the function that makes the jagged deviations after it."""
        device = get_device_id()  # where verl's forward_step moves the micro-batch
        rows = self._rows(micro_batch, device)
        ids_RLK = micro_batch[SHIFT_EXPERTS].values().to(device).long()
        old_RLK = micro_batch[SHIFT_SCORES].values().to(device).float()
        deviation_R = torch.zeros(len(ids_RLK), device=device)
        visited: list[int] = []

        def add(layer: int, router: Any, output: Any) -> None:
            current_RE = rows.take(self._logits(router, output)).float().log_softmax(-1)
            deviation_R.add_(router_deviation(old_RLK[:, layer], current_RE.gather(1, ids_RLK[:, layer])))
            visited.append(layer)

        def deviation() -> Tensor:
            self._expect(len(visited), "update_actor")
            return jagged(deviation_R / len(self.routers), micro_batch[RESPONSE_MASK].offsets().to(device))

        with self._taking(add):
            yield deviation

    def _expect(self, calls: int, stage: str) -> None:
        if calls != len(self.routers):
            raise HookError(
                f"{calls} of {len(self.routers)} routers ran in {stage}; the loss router_shift needs each once"
            )


class MegatronShiftRecorder(ShiftRecorder):
    """Does the same for Megatron without pipeline parallelism: the last stage would need the routers of the others.

    verl's `forward_step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)` runs the model and
    returns a partial of the last argument, with the micro-batch and the loss; megatron-core calls it with the output.
    megatron-core's TopKRouter returns no logits, so its method `routing`, which gets them, is hooked.
    """

    def _find_routers(self, engine: Any) -> list[Any]:
        # The layers for multi-token prediction, outside of the decoder, are not in the ratio.
        routers = [point.module for point in megatron_points(engine.module) if point.name.endswith(ROUTER)]
        if not routers:
            raise HookError("the loss router_shift found no router in Megatron's decoder; choose another loss_mode")
        for router in routers:
            if router.score_function != "softmax":
                raise _unreadable_scores(router, f"scores experts by {router.score_function}, not by a softmax")
        return routers

    def _hook(self, engine: Any) -> None:
        for layer, router in enumerate(self.routers):
            wrap("shift_recorder", router, "routing", partial(self._route, layer, router), "logits, ...")
        takes = "batch_iter, model, logits_processor_func, postprocess_micro_batch_func"
        wrap("shift_recorder", engine, "forward_step", self.forward_step_of_megatron, takes)

    def _rows(self, micro_batch: TensorDict, device: torch.device) -> "MegatronRows":
        return MegatronRows(micro_batch, device)

    def _ids(self, router: Any, output: Any) -> Tensor:
        logits_NE, chosen_NE = output
        chosen_NK = logits_NE.float().masked_fill(~chosen_NE, -torch.inf).topk(router.topk).indices
        return chosen_NK.int()  # no collective takes int16

    def _logits(self, router: Any, output: Any) -> Tensor:
        return output[0]

    def _route(self, layer: int, router: Any, verls: Callable, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, chosen_NE = verls(logits, *args, **kwargs)
        self._pass(layer, router, (logits,), (logits.detach().flatten(0, -2), chosen_NE))
        return probs, chosen_NE

    def forward_step_of_megatron(
        self,
        verls: Callable,
        batch_iter: Iterator[TensorDict],
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        """Wraps verl's `forward_step` for Megatron, as `forward_step` does for FSDP."""
        micro_batch = next(batch_iter)
        forward_only = postprocess_micro_batch_func.keywords["forward_only"]

        def run() -> Any:
            return verls(iter([micro_batch]), model, logits_processor_func, postprocess_micro_batch_func)

        if self._records(micro_batch, forward_only):
            with self._recording(micro_batch) as fields:
                output, finish = run()
            found = fields()

            def finish_with_fields(output: Any) -> Any:
                result = finish(output)
                result[-1]["model_output"].update(found)
                return result

            return output, finish_with_fields
        if not self._compares(micro_batch, forward_only):
            return run()
        with self._comparing(micro_batch) as deviation:
            output, finish = run()
        finish.keywords["data"][DEVIATION] = deviation()
        return output, finish


class ResponseRows:
    """The rows of a forward pass that predicted the response tokens of a micro-batch."""

    def __init__(self, micro_batch: TensorDict, device: torch.device):
        self.layout = RowLayout.from_batch(micro_batch, device)
        self.offsets = micro_batch[RESPONSE_MASK].offsets().to(device)
        self.rows = packed_rows(self.layout.lengths, self.offsets.diff())

    def take(self, values_N: Tensor) -> Tensor:
        return self.layout.collect(values_N)[self.rows]


class MegatronRows:
    """The same rows for Megatron, which pads each sequence for the ranks that split it; with context parallelism, each
    rank has two pieces of it."""

    def __init__(self, micro_batch: TensorDict, device: torch.device):
        from megatron.core import parallel_state as mpu
        from verl.models.mcore.util import preprocess_thd_engine

        self.tensor, self.context = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
        offsets = micro_batch["input_ids"].offsets().to(device)
        self.offsets = micro_batch[RESPONSE_MASK].offsets().to(device)
        numbers = torch.arange(1, int(offsets[-1]) + 1, device=device)
        arranged, *_ = preprocess_thd_engine(torch.nested.nested_tensor_from_jagged(numbers, offsets), pre_process=True)
        self.count = arranged.numel()
        placed_m = joined_over(arranged.flatten(), self.context)  # 0 on padding
        (places,) = placed_m.nonzero(as_tuple=True)
        place_T = torch.empty_like(numbers)
        place_T[placed_m[places] - 1] = places
        self.rows = place_T[packed_rows(offsets.diff(), self.offsets.diff())]

    def take(self, values_n: Tensor) -> Tensor:
        """Returns [R, *] from the [n, *] of each rank that shares the sequences."""
        if len(values_n) != self.count:
            values_n = joined_over(values_n, self.tensor)
        if len(values_n) != self.count:
            raise HookError(
                f"Megatron's routers saw {len(values_n)} tokens on all ranks of a sequence, and verl laid out "
                f"{self.count}: the loss router_shift cannot tell which is which; choose another loss_mode"
            )
        return joined_over(values_n, self.context)[self.rows]


def require_readable(point: ChoicePoint) -> ChoicePoint:
    """Raises HookError for a router module that does not choose by itself, and so does not return the chosen ids."""
    if point.method == CHOICE_METHOD:
        raise _unreadable_scores(point.module, "leaves the choice of experts to the block around it")
    return point


def check_outputs(point: ChoicePoint, output: Any) -> None:
    """Raises HookError unless a router returns expert ids and logits."""
    expert_ids(require_readable(point).module, output)
    router_logits(point.module, output)


def expert_ids(router: nn.Module, output: Any) -> Tensor:
    """Returns the [N, K] int32 expert ids among a router's outputs: its one integer tensor."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    found = [v for v in outputs if isinstance(v, Tensor) and not v.is_floating_point() and v.dim() == 2]
    if len(found) != 1:
        raise _unreadable_scores(router, f"returns {len(found)} integer [tokens, top_k] tensors instead of one")
    return found[0].detach().int()  # no collective takes int16


def router_logits(router: nn.Module, output: Any) -> Tensor:
    """Returns [N, E], the widest of a router's [tokens, *] float tensors; the combine weights have only K columns."""
    found = [v for v in output if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 2]
    if not found:
        raise _unreadable_scores(router, "returns no [tokens, experts] logits")
    return max(found, key=lambda value: value.shape[1])


def refuse_probabilities(router: nn.Module, logits_NE: Tensor) -> None:
    """Raises HookError if a router returns its softmax instead of its logits."""
    sums_N = logits_NE.float().sum(1)
    if bool((logits_NE >= 0).all()) and torch.allclose(sums_N, torch.ones_like(sums_N), atol=1e-2):
        raise HookError(
            f"router {type(router).__name__} returns probabilities where the loss router_shift needs logits; choose "
            "another policy_loss.loss_mode"
        )


def _unreadable_scores(router: nn.Module, why: str) -> HookError:
    return HookError(
        f"the loss router_shift cannot read router {type(router).__name__}, which {why}; choose another "
        "policy_loss.loss_mode"
    )
