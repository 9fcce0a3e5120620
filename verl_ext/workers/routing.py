"""Routing capture in the FSDP engine, and its comparison with the rollout's.

Shape legend: N tokens, L MoE layers, K experts per token, B trajectories, R response tokens of all of them.

The transformers library names each MoE model's router class in `_can_record_outputs["router_logits"]`;
forward hooks on those modules see the expert ids they choose. The ids never leave the worker: what travels is
the agreement per response token and a few sums per trajectory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from verl_ext.core.routing import expert_overlap
from verl_ext.errors import HookError

OFF = "set stability.router_agreement=false, and another policy_loss.loss_mode than router_shift"


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> router module, in layer order, for a transformers MoE that declares its router class.

    Raises:
        HookError: the model declares none, or none of its modules is one.
    """
    specs = [
        spec
        for module in model.modules()
        for spec in _as_list((getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    routers = {
        name: module for name, module in model.named_modules() if any(_matches(spec, name, module) for spec in specs)
    }
    if not routers:
        raise HookError(
            f"no router was found in {type(model).__name__}: a dense model has none ({OFF}), and an MoE has to declare "
            "its router class in _can_record_outputs['router_logits'], as transformers' own do"
        )
    return routers


def _as_list(spec: Any) -> list[Any]:
    if spec is None:
        return []
    return list(spec) if isinstance(spec, list | tuple) else [spec]


def _matches(spec: Any, name: str, module: nn.Module) -> bool:
    """`spec` is a module class, or transformers' OutputRecorder around one."""
    target = getattr(spec, "target_class", spec)
    layer_name = getattr(spec, "layer_name", None)
    return isinstance(module, target) and (layer_name is None or layer_name in name)


def probe_routers(hf_config: Any) -> None:
    """Prove on a model without weights that the routers of this architecture are found and can be read.

    Raises:
        HookError: no router is declared, or one does not return [tokens, top_k] expert ids.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
        for router in {type(router): router for router in find_routers(model).values()}.values():
            try:
                output = router(torch.empty(2, hf_config.get_text_config().hidden_size, dtype=model.dtype))
            except (TypeError, ValueError, RuntimeError) as error:
                raise _unreadable(router, f"does not run on [tokens, hidden] alone ({error})") from error
            expert_ids(router, output)


def _unreadable(router: nn.Module, why: str) -> HookError:
    return HookError(f"cannot read router {type(router).__name__}, which {why}; {OFF}")


class RoutingRecorder:
    """Collects the expert ids that a model's routers choose while `recording()` is open."""

    def __init__(self, model: nn.Module):
        self.routers = find_routers(model)
        self._ids: list[Tensor | None] | None = None
        for layer, router in enumerate(self.routers.values()):
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def keep_ids(module: nn.Module, args: Any, output: Any) -> None:
            if self._ids is not None:
                self._ids[layer] = expert_ids(module, output)

        return keep_ids

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._ids = [None] * len(self.routers)
        try:
            yield
        finally:
            self._ids = None

    def experts(self) -> Tensor:
        """[N, L, K] int16 expert ids of the forward just recorded; call inside `recording()`.

        Raises:
            HookError: a router did not run.
        """
        ids = self._ids or []
        missing = [name for name, value in zip(self.routers, ids, strict=True) if value is None]
        if missing:
            raise HookError(f"these routers did not run in compute_log_prob: {', '.join(missing)}")
        return torch.stack([value for value in ids if value is not None], dim=1)


def expert_ids(router: nn.Module, output: Any) -> Tensor:
    """The [N, K] expert ids among a router's outputs: its one integer tensor."""
    candidates = [
        value
        for value in (output if isinstance(output, tuple | list) else (output,))
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2
    ]
    if len(candidates) != 1:
        raise _unreadable(router, f"returns {len(candidates)} integer [tokens, top_k] tensors instead of one")
    return candidates[0].detach().to(torch.int16)


def response_rows(starts_B: Tensor, lengths_B: Tensor, response_lengths_B: Tensor) -> Tensor:
    """[R] row of the forward pass that predicted each response token, trajectory after trajectory.

    Row t of a sequence is the forward pass over token t, which predicts token t + 1: the routing behind
    response token j stands at row prompt_length + j - 1. The last token was never forwarded by the rollout,
    and its row is not among these.
    """
    first_B = starts_B + lengths_B - response_lengths_B - 1
    ends_B = response_lengths_B.cumsum(0)
    within = torch.arange(int(ends_B[-1]), device=starts_B.device)
    return torch.repeat_interleave(first_B - (ends_B - response_lengths_B), response_lengths_B) + within


@dataclass(frozen=True)
class ForwardRows:
    """Where the response tokens of a micro-batch stand among the tokens of its forward pass.

    Attributes:
        rows: [R], row of the forward pass that predicted each response token.
        response_offsets: [B + 1], where each trajectory's response starts among the R.
        lengths: [B], prompt and response.
        expected: tokens that the forward pass must have at least; verl may pad the packed ones at their end.
    """

    rows: Tensor
    response_offsets: Tensor
    lengths: Tensor
    expected: int

    def check(self, tokens: int) -> None:
        """Raise HookError unless the routers saw whole sequences."""
        if tokens < self.expected:
            raise HookError(
                f"the routers saw {tokens} tokens of a micro-batch of {self.expected}: this rank holds a part of each "
                "sequence, which stability.router_agreement and the loss router_shift cannot put together; unset them"
            )


def forward_rows(micro_batch: TensorDict, device: torch.device) -> ForwardRows:
    """The rows of a micro-batch with jagged `input_ids` and `response_mask`, packed or padded as verl will run it."""
    lengths_B = micro_batch["input_ids"].offsets().diff().to(device)
    offsets = micro_batch["response_mask"].offsets().to(device)
    if tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True):
        starts_B, expected = lengths_B.cumsum(0) - lengths_B, int(lengths_B.sum())
    else:
        width = int(lengths_B.max())
        starts_B, expected = torch.arange(len(lengths_B), device=device) * width, len(lengths_B) * width
    return ForwardRows(response_rows(starts_B, lengths_B, offsets.diff()), offsets, lengths_B, expected)


def agreement_outputs(train_NLK: Tensor, micro_batch: TensorDict) -> dict[str, Tensor]:
    """Compare one micro-batch's routing with the rollout's `routed_experts`.

    Args:
        train_NLK: expert ids of this forward; tokens packed, or padded to the longest sequence.
        micro_batch: with nested `input_ids`, `response_mask` [B, r] and `routed_experts` [B, n, L, K].

    Returns model outputs that travel with `log_probs`:
        router_agreement: nested [B, r] float32, per response token the mean over layers of |T and I| / K.
        router_sums: [B, 2L + 2] float32, sums over generated tokens: agreement per layer, exact matches per
            layer, tokens with any layer differing, tokens.

    Raises:
        HookError: the rollout's routing has another shape than this model's.
    """
    device = train_NLK.device
    forward = forward_rows(micro_batch, device)
    forward.check(len(train_NLK))

    infer_NLK = micro_batch["routed_experts"].values().to(device, torch.int16)
    tokens = int(forward.lengths.sum())
    if infer_NLK.shape[1:] != train_NLK.shape[1:] or len(infer_NLK) != tokens:
        raise HookError(
            f"the rollout's routed_experts is {tuple(infer_NLK.shape)} [tokens, layers, top_k] where the training "
            f"engine has {tokens} tokens, {train_NLK.shape[1]} routers and top-{train_NLK.shape[2]}: "
            "the two engines number this model's layers differently; set stability.router_agreement=false"
        )
    response_offsets = forward.response_offsets
    response_lengths_B = response_offsets.diff()
    packed_starts_B = forward.lengths.cumsum(0) - forward.lengths
    overlap_RL = expert_overlap(
        train_NLK[forward.rows],
        infer_NLK[response_rows(packed_starts_B, forward.lengths, response_lengths_B)],
    )
    top_k = train_NLK.shape[2]
    agree_RL = overlap_RL.float() / top_k
    exact_RL = (overlap_RL == top_k).float()
    differs_R1 = 1 - exact_RL.amin(1, keepdim=True)
    mask_R1 = micro_batch["response_mask"].values().to(device).float().unsqueeze(1)
    per_token = torch.cat([agree_RL, exact_RL, differs_R1, torch.ones_like(differs_R1)], dim=1) * mask_R1
    sums = torch.zeros(len(response_lengths_B), per_token.shape[1], device=device)
    sums.index_add_(0, torch.repeat_interleave(response_lengths_B), per_token)
    return {
        "router_agreement": torch.nested.nested_tensor_from_jagged(agree_RL.mean(1), response_offsets),
        "router_sums": sums,
    }


def attach(engine: Any) -> RoutingRecorder:
    """Record routing in this FSDP engine's forward-only steps on batches that bring `routed_experts`.

    Written for verl 0.9.1: `forward_step(micro_batch, loss_function, forward_only)` returns (loss, output), and
    every tensor in `output["model_output"]` is put back in batch order and returned by `compute_log_prob`.
    """
    recorder = RoutingRecorder(engine.module)
    forward_step = engine.forward_step

    def recorded_forward_step(micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        if not forward_only or "routed_experts" not in micro_batch.keys():  # noqa: SIM118 (a TensorDict)
            return forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        with recorder.recording():
            loss, output = forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
            output["model_output"].update(agreement_outputs(recorder.experts(), micro_batch))
        return loss, output

    engine.forward_step = recorded_forward_step
    return recorder
