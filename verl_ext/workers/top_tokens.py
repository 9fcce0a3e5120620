"""Reads the sampler's top tokens in the training engine, where its logits are.

verl calls a function on the logits of a micro-batch for distillation: `logits_processor_func`, on FSDP, VeOmni and
Megatron, packed and padded, before it gathers over the ranks of a sequence. It takes [1, n] tensors, one value per
token, and returns them with the log-probabilities. With truncated sampling or score centering our function returns its
own log-probabilities, in compute_log_prob and in the update, and verl computes none (`distillation_only`), so that
logits have one gradient. If only the KL is needed, verl's are not changed.

Shape legend: T tokens of a micro-batch (prompt and response, packed), n rows of its logits on this rank, R response
tokens, V its part of the vocabulary, K top tokens of a place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

from verl_ext.base.errors import BatchError
from verl_ext.base.names import RESPONSE_MASK, TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS, TOP_TOKEN_SUMS
from verl_ext.base.patching import wrap
from verl_ext.core.tokens import fill_added_rows
from verl_ext.core.top_tokens import Divergence, TopTokens, centering, divergence, read, top_token_sums, weights_of
from verl_ext.routing.outputs import is_old_policy, packed_rows

CENTERING = "top_token_centering"  # model output, [B, T] with gradient
ENTROPY = "top_token_entropy"
KNOWN = "top_token_known"
DIVERGENCE_FIELDS = {name: f"top_token_{name}" for name in ("kl", "mass", "differs")}

Corrections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TopTokenUse:
    """The use of the top tokens.

    Attributes:
        truncated: the sampler chose only from the top tokens: log-probabilities and entropy cover the same tokens.
        centers: score centering.
        corrections: name -> settings of the corrections that weigh a single token: the centered score has their
            weights.
    """

    truncated: bool = False
    centers: bool = False
    corrections: Corrections = field(default_factory=dict)

    @property
    def replaces(self) -> bool:
        """True if the log-probabilities read here replace verl's."""
        return self.truncated or self.centers


class TopTokenReader:
    """Wraps a training engine's `forward_backward_batch`.

    Attributes:
        use: the use of the top tokens, from the next batch on; at first only their KL.
    """

    def __init__(self, engine: Any):
        self.use = TopTokenUse()
        takes = "data, loss_function, forward_only"
        wrap("top_token_reader", engine, "forward_backward_batch", self.forward_backward_batch, takes)

    def forward_backward_batch(
        self, verls: Callable, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> Any:
        """Wraps verl's method; adds the values read at the batch's top tokens."""
        old_policy = is_old_policy(data, forward_only)
        if TOP_TOKEN_IDS not in data.keys() or not (self.use.replaces or old_policy):  # noqa: SIM118 (a TensorDict)
            return verls(data, loss_function, forward_only)
        tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=self.use.replaces)
        ours = partial(self._call, loss_function, compares=old_policy, centers=self.use.centers and not forward_only)
        return verls(data, ours, forward_only)

    def _call(
        self, loss_function: Callable | None, *, compares: bool, centers: bool, data: TensorDict, **given: Any
    ) -> Any:
        """Called by verl twice per micro-batch: with its logits, and with all results."""
        if "student_logits" in given:
            return self._read(given["student_logits"], data, given.get("data_format"), compares, centers)
        output = given["model_output"]
        known, entropy = output.pop(KNOWN, None), output.pop(ENTROPY, None)
        if "entropy" in output and entropy is not None:
            output["entropy"] = _choose_known(known, entropy, output["entropy"])
        if compares:
            output[TOP_TOKEN_SUMS] = _packed_sums(output, known, data)
        if loss_function is None:
            return torch.ones((), device=output["log_probs"].device), {}
        return loss_function(model_output=output, data=data, dp_group=given.get("dp_group"))

    def _read(
        self, logits: Tensor, data: TensorDict, data_format: str | None, compares: bool, centers: bool
    ) -> dict[str, Tensor]:
        """Reads the top tokens; all tensors are [1, n]."""
        layout = _packed_layout if data_format is None else partial(_megatron_layout, data_format=data_format)
        sampled, top = layout(data, device=logits.device)
        group = None if data_format is None else _tensor_group()
        rows, truncated = logits.flatten(0, 1), self.use.truncated
        _check_ids(top.ids, rows.shape[1], group)
        reading = read(rows, sampled, top, truncated=truncated, group=group)
        found = {"log_probs": reading.l_own} if self.use.replaces else {}
        if reading.entropy is not None:
            found[ENTROPY] = reading.entropy
        if compares or reading.entropy is not None:
            found[KNOWN] = top.present.float()
        if centers:
            found[CENTERING] = centering(reading, top, weights_of(self.use.corrections), truncated=truncated)
        if compares:
            apart = divergence(reading, top, truncated=truncated)
            found |= {key: getattr(apart, name).float() for name, key in DIVERGENCE_FIELDS.items()}
        return {name: value.view(logits.shape[:2]) for name, value in found.items()}


def _choose_known(known: Tensor, entropy: Tensor, verls: Tensor) -> Tensor:
    """Returns the entropy over the tokens that the sampler could choose at places with top tokens, and verl's entropy
    over the vocabulary elsewhere."""
    values = torch.where(known.values().bool(), entropy.values(), verls.values())
    return torch.nested.nested_tensor_from_jagged(values, verls.offsets())


def _packed_sums(output: dict[str, Tensor], known: Tensor, data: TensorDict) -> Tensor:
    """Returns the sums [B, *] of the tokens' values, and removes the values from `output`."""
    mask = data[RESPONSE_MASK]
    offsets = mask.offsets()
    rows_R = packed_rows(data["input_ids"].offsets().diff(), offsets.diff())
    known_R = known.values()[rows_R].bool()
    found = Divergence(**{name: output.pop(key).values()[rows_R].double() for name, key in DIVERGENCE_FIELDS.items()})
    return top_token_sums(found, known_R, mask.values().to(known_R.device).bool(), offsets.to(known_R.device))


def _token_layout(data: TensorDict, device: torch.device) -> tuple[Tensor, TopTokens]:
    """Returns [T], for each row the next token and its top tokens; only response tokens have any."""
    input_ids, mask = data["input_ids"], data[RESPONSE_MASK]
    lengths_B = mask.offsets().diff()
    ids_RK, log_q_RK = (
        fill_added_rows(data[name], lengths_B, mask).to(device) for name in (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS)
    )
    tokens = input_ids.values().to(device)
    rows_R = packed_rows(input_ids.offsets().diff(), lengths_B).to(device)
    if len(ids_RK) != len(rows_R) or ids_RK.shape != log_q_RK.shape:
        raise BatchError(
            f"{TOP_TOKEN_IDS} is {tuple(ids_RK.shape)} and {TOP_TOKEN_LOG_PROBS} {tuple(log_q_RK.shape)} but the batch "
            f"has {len(rows_R)} response tokens: the rollout's top tokens belong to other tokens"
        )
    ids_TK = ids_RK.new_zeros(len(tokens), ids_RK.shape[1], dtype=torch.long)
    log_q_TK = log_q_RK.new_full(ids_TK.shape, -torch.inf)
    ids_TK[rows_R], log_q_TK[rows_R] = ids_RK.long(), log_q_RK
    return tokens.roll(-1), TopTokens(ids_TK, log_q_TK)


def _packed_layout(data: TensorDict, device: torch.device) -> tuple[Tensor, TopTokens]:
    """Returns [n] in the layout of verl's FSDP and VeOmni engines: all tokens, or this rank's share under Ulysses."""
    sampled, top = _token_layout(data, device)
    if get_ulysses_sequence_parallel_world_size() == 1:
        return sampled, top
    sampled, *of_top = (slice_input_tensor(value[None], dim=1)[0] for value in (sampled, top.ids, top.log_q))
    return sampled, TopTokens(*of_top)


def _megatron_layout(data: TensorDict, device: torch.device, data_format: str) -> tuple[Tensor, TopTokens]:
    """Returns [n] in Megatron's layout, by verl's own functions."""
    from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

    arrange = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
    sampled, top = _token_layout(data, device)
    offsets = data["input_ids"].offsets().to(device)
    sampled, *of_top = (
        arrange(torch.nested.nested_tensor_from_jagged(value, offsets), pre_process=True)[0].flatten(0, 1)
        for value in (sampled, top.ids, top.log_q)
    )
    return sampled, TopTokens(*of_top)


def _tensor_group() -> Any:
    """Returns the ranks that share the vocabulary; None for a single rank."""
    from megatron.core import parallel_state as mpu

    group = mpu.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def _check_ids(ids: Tensor, part: int, group: Any) -> None:
    vocabulary = part * (1 if group is None else group.size())
    if ids.numel() and int(ids.max()) >= vocabulary:
        raise BatchError(
            f"{TOP_TOKEN_IDS} names token {int(ids.max())}, and the training engine's vocabulary has {vocabulary}: the "
            "rollout runs another model; check that both engines load the same one"
        )
