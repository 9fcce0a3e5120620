"""Makes the outputs about routing that are sent with the log-probabilities, from the rows that routers see.

Shape legend: B trajectories, T tokens of all of them (prompt and response, packed), R response tokens of all of them,
n rows of the forward pass on this rank, L MoE layers, K experts per token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)

from verl_ext.base.errors import BatchError, HookError
from verl_ext.base.names import AGREEMENT, RESPONSE_MASK, ROLLOUT_ROUTES, ROUTE_SUM, ROUTER_SUMS
from verl_ext.core.routing import agreement, refused_rows, route_terms
from verl_ext.core.tokens import jagged


def is_old_policy(data: TensorDict, forward_only: bool = True) -> bool:
    """Returns True in the pass for old_log_probs, and False in rescoring, the canary, and a LoRA's reference: in verl
    0.9.1 only the former asks for the entropy."""
    return forward_only and tu.get_non_tensor_data(data, "calculate_entropy", default=False)


@dataclass(frozen=True)
class RowLayout:
    """The places of a micro-batch's tokens among the rows that a rank's routers see.

    verl 0.9.1 runs the packed tokens, padded at their end and split over Ulysses sequence parallelism. Without padding
    removal, it pads every sequence to the longest.

    Attributes:
        lengths: [B] int64, prompt and response.
        packed: padding is removed.
    """

    lengths: Tensor
    packed: bool

    @classmethod
    def from_batch(cls, micro_batch: TensorDict, device: torch.device) -> "RowLayout":
        lengths = micro_batch["input_ids"].offsets().diff().to(device)
        return cls(lengths, tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True))

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def spread(self, values_T: Tensor, rows: int) -> Tensor:
        """Returns [n, ...], the rows that this rank's routers see, 0 on padding, from [T, ...] packed tokens.

        Raises:
            HookError: the routers see fewer rows than there are tokens, or not as many as the padded batch has.
        """
        self._check(rows)
        ranks = get_ulysses_sequence_parallel_world_size()
        whole = values_T.new_zeros(rows * ranks, *values_T.shape[1:])
        if self.packed:
            whole[: len(values_T)] = values_T
        else:
            whole[self._padded_rows()] = values_T
        return whole.tensor_split(ranks)[get_ulysses_sequence_parallel_rank()]

    def collect(self, values_n: Tensor) -> Tensor:
        """Returns [T, ...] packed tokens from the [n, ...] rows of every rank: the inverse of `spread`.

        Raises:
            HookError: as `spread`.
        """
        self._check(len(values_n))
        if not self.packed:
            return values_n[self._padded_rows()]
        # No gradient passes here; without a sequence-parallel group this returns its argument.
        return gather_outputs_and_unpad(values_n.contiguous(), gather_dim=0)[: self.tokens]

    def _padded_rows(self) -> Tensor:
        width = int(self.lengths.max())
        firsts_B = torch.arange(len(self.lengths), device=self.lengths.device) * width
        starts_B = self.lengths.cumsum(0) - self.lengths
        places_T = torch.arange(self.tokens, device=self.lengths.device)
        return torch.repeat_interleave(firsts_B - starts_B, self.lengths) + places_T

    def _check(self, rows: int) -> None:
        ranks = get_ulysses_sequence_parallel_world_size()
        expected = self.tokens if self.packed else len(self.lengths) * int(self.lengths.max())
        if rows * ranks < expected or (not self.packed and rows != expected):
            raise HookError(
                f"the routers saw {rows} tokens on each of {ranks} rank(s) for a micro-batch of {expected}: this "
                "engine splits sequences in a way that stability.router_agreement and router_replay do not know; "
                "unset them"
            )


def narrow_dtype(experts: int) -> torch.dtype:
    """Returns the narrowest integer dtype that holds the ids of this many experts."""
    return torch.uint8 if experts <= 256 else torch.int16


def packed_rows(lengths_B: Tensor, response_lengths_B: Tensor) -> Tensor:
    """Returns [R] int64: the row, among the T, of the forward pass that predicted each response token.

    Row t of a sequence is the forward pass over token t, which predicts token t + 1. So the routing behind response
    token j is in row prompt_length + j - 1. The rollout never forwarded the last token, and its row is not returned.

    Args:
        lengths_B: int64, prompt and response.
        response_lengths_B: int64, each at most the length minus one: a response token without a token before it has no
            forward pass.
    """
    ends_B = lengths_B.cumsum(0)
    response_ends_B = response_lengths_B.cumsum(0)
    count = int(response_ends_B[-1]) if len(response_ends_B) else 0
    shift_B = ends_B - 1 - response_ends_B  # the row of a response token, less its place among the R
    shift_R = torch.repeat_interleave(shift_B, response_lengths_B, output_size=count)
    return shift_R + torch.arange(count, device=lengths_B.device)


def generated_rows(batch: Mapping[str, Tensor], device: Any) -> Tensor:
    """Returns [T] bool: rows of the forward pass that predicted a token which the model generated."""
    mask = batch[RESPONSE_MASK]
    lengths_B = batch["input_ids"].offsets().diff().to(device)
    rows_R = packed_rows(lengths_B, mask.offsets().to(device).diff())
    generated_T = torch.zeros(int(lengths_B.sum()), dtype=torch.bool, device=device)
    return generated_T.index_copy_(0, rows_R, mask.values().to(device).bool())


def check_captured(data: TensorDict) -> None:
    """Checks that the routes of each trajectory are those that its rollout captured for these tokens.

    Trajectories without a checksum or without routes are not checked, nor the rows that verl adds to fill a batch.

    Raises:
        BatchError: the routes of a trajectory do not have its checksum.
    """
    routes, sums = data.get(ROLLOUT_ROUTES, None), data.get(ROUTE_SUM, None)
    if routes is None or sums is None:
        return
    fields = (routes, data["input_ids"], data[RESPONSE_MASK], sums)
    for rows, ids, mask, expected in zip(*(field.unbind() for field in fields), strict=True):
        if not (expected.any() and mask.any() and len(rows) == len(ids)):
            continue
        rows, ids = rows.to(get_device_id()), ids.to(get_device_id())
        if int(route_terms(rows, ids, torch.arange(len(ids), device=ids.device)).sum()) != int(expected):
            raise BatchError(
                f"{ROLLOUT_ROUTES} of the trajectory of {len(ids)} tokens that begins with {ids[:12].tolist()} is not "
                "what its rollout captured for these tokens: an id, a layer or a token has moved on the way",
                otherwise="set VERL_EXT_AGENT_LOOP=turns:0 to continue without the checksum, and report this",
            )


def drop_refused(routes_TLK: Tensor, experts: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a rollout's routing with zeros in refused rows, as in unknown ones, and [T] uint8 the reasons
    (`core.routing.refused_rows`).

    For these tokens the training router chooses, and they do not count in the agreement.
    """
    refused_T = refused_rows(routes_TLK, experts, offsets)
    if refused_T.any():
        routes_TLK = routes_TLK.masked_fill((refused_T > 0)[:, None, None], 0)
    return routes_TLK, refused_T


def routing_outputs(
    overlap_TL: Tensor,
    top_k: int,
    known_T: Tensor,
    batch: Mapping[str, Tensor],
    *,
    left_out_B: Tensor | None = None,
    refused_T: Tensor | None = None,
    margin_TL: Tensor | None = None,
    own_TL: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns the agreement of the response tokens of a batch, or micro-batch, from the overlap of all of its tokens.

    Args:
        overlap_TL: integer, |T and I| of each token's forward pass, packed in the order of the batch.
        known_T: bool, rows whose routing the rollout returned (`core.routing.known_rows`) and is not refused.
        batch: with jagged `input_ids` [B, n] and `response_mask` [B, r], on any device.
        left_out_B: bool, trajectories whose routing was not sent (`core.tokens.left_out_rows`).
        refused_T: the reasons why rows are refused, from `drop_refused`.
        margin_TL, own_TL: see `core.routing.agreement`.

    Returns model outputs, on the device of `overlap_TL`:
        router_agreement: jagged [B, r] float32, per response token the mean over layers of |T and I| / K; NaN in the
            trajectories that are left out.
        router_sums: [B, *] float64, `RouterSums.pack()`.

    Raises:
        ValueError: a tensor has another number of rows than the batch has tokens.
    """
    device, mask = overlap_TL.device, batch[RESPONSE_MASK]
    offsets = mask.offsets().to(device)
    lengths_B = batch["input_ids"].offsets().diff().to(device)
    tokens = int(lengths_B.sum())
    given = {"overlap_TL": overlap_TL, "known_T": known_T, "margin_TL": margin_TL, "own_TL": own_TL}
    given |= {"refused_T": refused_T}
    for name, value in given.items():
        if value is not None and len(value) != tokens:
            raise ValueError(f"{name} has {len(value)} rows where input_ids of the batch has {tokens} tokens")
    rows_R = packed_rows(lengths_B, offsets.diff())
    per_token_R, sums = agreement(
        overlap_TL[rows_R],
        top_k,
        mask.values().to(device).bool(),
        known_T.to(device)[rows_R],
        offsets,
        left_out_B=None if left_out_B is None else left_out_B.to(device),
        refused_N=None if refused_T is None else refused_T.to(device)[rows_R],
        margin_NL=None if margin_TL is None else margin_TL[rows_R],
        own_NL=None if own_TL is None else own_TL[rows_R],
    )
    return {AGREEMENT: jagged(per_token_R, offsets), ROUTER_SUMS: sums.pack()}


def with_outputs(
    loss_function: Callable, more: Callable[[], dict[str, Tensor]], model_output: dict[str, Any], **others: Any
) -> Any:
    """Calls an update's loss with more model outputs, which verl does not get to see."""
    return loss_function(model_output={**model_output, **more()}, **others)
