"""The router's scores of the old policy, kept for the update, and how far the current router is from them (RSPO).

Shape legend: N tokens of a forward pass, R response tokens of all trajectories, B trajectories, L MoE layers, K
experts per token, E experts.

compute_log_prob returns the experts that the old router chose and their log-probabilities, per response token; verl
carries both to update_actor through TransferQueue. That is 4 L K bytes a token (int16 + float16; 1.5 KB for 48 layers
and top-8). In the update, the hooks add each layer's deviation to one number a token; no score outlives its layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils.device import get_device_id

from verl_ext.base.errors import HookError
from verl_ext.base.names import DEVIATION, RESPONSE_MASK, SHIFT_EXPERTS, SHIFT_SCORES
from verl_ext.base.patching import wrap
from verl_ext.core.losses import router_deviation
from verl_ext.core.tokens import jagged
from verl_ext.routing.choices import ROUTES, ChoicePoint, find_choices
from verl_ext.routing.fsdp import is_old_policy
from verl_ext.routing.outputs import RowLayout, packed_rows

TakeOutput = Callable[[int, nn.Module, Any], None]


class ShiftRecorder:
    """Hooks on an FSDP engine's routers and around its `forward_step`; does nothing until `enabled`.

    Written for verl 0.9.1, where `forward_step(micro_batch, loss_function, forward_only)` runs the model once and then
    the loss. Gradient checkpointing runs the routers once more in the backward pass, when nothing records.
    """

    def __init__(self, engine: Any):
        self.enabled = False
        self.routers = [require_readable(point).module for point in find_choices(engine.module)]
        self._take: TakeOutput | None = None
        self._checked: set[int] = set()
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(layer))
        wrap("shift_recorder", engine, "forward_step", self.forward_step, "micro_batch, loss_function, forward_only")

    def _hook(self, layer: int) -> Any:
        def pass_on(module: nn.Module, args: Any, output: Any) -> None:
            if self._take is not None:
                with torch.no_grad():
                    self._take(layer, module, output)

        return pass_on

    @contextmanager
    def _taking(self, take: TakeOutput) -> Iterator[None]:
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def forward_step(self, verls: Callable, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """verl's own, recording where the old policy's scores are made or compared."""
        if self.enabled and is_old_policy(micro_batch, forward_only):
            return self._record(verls, micro_batch, loss_function)
        if self.enabled and not forward_only and SHIFT_SCORES in micro_batch.keys():  # noqa: SIM118 (a TensorDict)
            return self._compare(verls, micro_batch, loss_function)
        return verls(micro_batch, loss_function=loss_function, forward_only=forward_only)

    def _record(self, verls: Callable, micro_batch: TensorDict, loss_function: Any) -> Any:
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int, router: nn.Module, output: Any) -> None:
            ids_NK, logits_NE = expert_ids(router, output), router_logits(router, output)
            if layer not in self._checked:
                refuse_probabilities(router, logits_NE)
                self._checked.add(layer)
            seen[layer] = ids_NK, logits_NE.float().log_softmax(-1).gather(1, ids_NK.long())

        with self._taking(keep):
            loss, output = verls(micro_batch, loss_function=loss_function, forward_only=True)
        self._expect(len(seen), "compute_log_prob")
        layers = [seen[layer] for layer in range(len(self.routers))]
        rows = ResponseRows(micro_batch, layers[0][0].device)
        # Log-probabilities lie in about [-20, 0], where float16 has three bits more than bfloat16.
        for field, index, dtype in ((SHIFT_EXPERTS, 0, torch.int16), (SHIFT_SCORES, 1, torch.float16)):
            values_RLK = torch.stack([rows.take(kept[index]).to(dtype) for kept in layers], dim=1)
            output["model_output"][field] = torch.nested.nested_tensor_from_jagged(values_RLK, rows.offsets)
        return loss, output

    def _compare(self, verls: Callable, micro_batch: TensorDict, loss_function: Any) -> Any:
        device = get_device_id()  # where verl's forward_step moves the micro-batch
        rows = ResponseRows(micro_batch, device)
        ids_RLK = micro_batch[SHIFT_EXPERTS].values().to(device).long()
        old_RLK = micro_batch[SHIFT_SCORES].values().to(device).float()
        deviation_R = torch.zeros(len(ids_RLK), device=device)
        visited: list[int] = []

        def add(layer: int, router: nn.Module, output: Any) -> None:
            current_RE = rows.take(router_logits(router, output)).float().log_softmax(-1)
            deviation_R.add_(router_deviation(old_RLK[:, layer], current_RE.gather(1, ids_RLK[:, layer])))
            visited.append(layer)

        def loss_with_deviation(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            self._expect(len(visited), "update_actor")
            data[DEVIATION] = jagged(deviation_R / len(self.routers), data[RESPONSE_MASK].offsets())
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        with self._taking(add):
            return verls(micro_batch, loss_function=loss_with_deviation, forward_only=False)

    def _expect(self, calls: int, stage: str) -> None:
        if calls != len(self.routers):
            raise HookError(
                f"{calls} of {len(self.routers)} routers ran in {stage}; the loss router_shift needs each once"
            )


class ResponseRows:
    """The rows of a forward pass that predicted the response tokens of a micro-batch."""

    def __init__(self, micro_batch: TensorDict, device: torch.device):
        self.layout = RowLayout.from_batch(micro_batch, device)
        self.offsets = micro_batch[RESPONSE_MASK].offsets().to(device)
        self.rows = packed_rows(self.layout.lengths, self.offsets.diff())

    def take(self, values_N: Tensor) -> Tensor:
        return self.layout.collect(values_N)[self.rows]


def require_readable(point: ChoicePoint) -> ChoicePoint:
    """Raise HookError for a router module that does not choose by itself, and so does not return what it chose."""
    if point.method == ROUTES:
        raise _unreadable_scores(point.module, "leaves the choice of experts to the block around it")
    return point


def check_outputs(point: ChoicePoint, output: Any) -> None:
    """Raise HookError unless a router returns what is read here: expert ids and logits."""
    expert_ids(require_readable(point).module, output)
    router_logits(point.module, output)


def expert_ids(router: nn.Module, output: Any) -> Tensor:
    """The [N, K] int16 expert ids among a router's outputs: its one integer tensor."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    found = [v for v in outputs if isinstance(v, Tensor) and not v.is_floating_point() and v.dim() == 2]
    if len(found) != 1:
        raise _unreadable_scores(router, f"returns {len(found)} integer [tokens, top_k] tensors instead of one")
    return found[0].detach().to(torch.int16)


def router_logits(router: nn.Module, output: Any) -> Tensor:
    """[N, E], the widest of a router's [tokens, *] float tensors: the combine weights have K columns."""
    found = [v for v in output if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 2]
    if not found:
        raise _unreadable_scores(router, "returns no [tokens, experts] logits")
    return max(found, key=lambda value: value.shape[1])


def refuse_probabilities(router: nn.Module, logits_NE: Tensor) -> None:
    """Raise HookError if a router returns its softmax in the place of its logits."""
    if bool((logits_NE >= 0).all()) and torch.allclose(
        logits_NE.float().sum(1), logits_NE.new_ones(1).float(), atol=1e-2
    ):
        raise HookError(
            f"router {type(router).__name__} returns probabilities where the loss router_shift needs logits; choose "
            "another policy_loss.loss_mode"
        )


def _unreadable_scores(router: nn.Module, why: str) -> HookError:
    return HookError(
        f"the loss router_shift cannot read router {type(router).__name__}, which {why}; choose another "
        "policy_loss.loss_mode"
    )
