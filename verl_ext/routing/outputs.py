"""From the overlap of two routings to what travels with the log-probabilities, whichever engine recorded them.

Shape legend: B trajectories, T tokens of all of them (prompt and response, packed), R response tokens of all of them,
L MoE layers, K experts per token.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_ext.core.routing import agreement, refused_rows
from verl_ext.core.tokens import jagged
from verl_ext.fields import AGREEMENT, RESPONSE_MASK, ROUTER_SUMS


def narrow_dtype(experts: int) -> torch.dtype:
    """The narrowest integers that hold the ids of so many experts."""
    return torch.uint8 if experts <= 256 else torch.int16


def packed_rows(lengths_B: Tensor, response_lengths_B: Tensor) -> Tensor:
    """[R] int64 row, among the T, of the forward pass that predicted each response token, trajectory after trajectory.

    Row t of a sequence is the forward pass over token t, which predicts token t + 1: the routing behind response token
    j stands at row prompt_length + j - 1. The last token was never forwarded by the rollout, and its row is not among
    these.

    Args:
        lengths_B: int64, prompt and response.
        response_lengths_B: int64, each at most the length less one: a response token without a token before it has no
            forward pass.
    """
    ends_B = lengths_B.cumsum(0)
    response_ends_B = response_lengths_B.cumsum(0)
    count = int(response_ends_B[-1]) if len(response_ends_B) else 0
    shift_B = ends_B - 1 - response_ends_B  # the row of a response token, less its place among the R
    shift_R = torch.repeat_interleave(shift_B, response_lengths_B, output_size=count)
    return shift_R + torch.arange(count, device=lengths_B.device)


def believed(routes_TLK: Tensor, experts: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """A rollout's routing with zeros in the rows that are refused, as it leaves them where it has none; and [T] uint8
    why, see `core.captured.refused_rows`. Those tokens then route themselves, and count in no agreement."""
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
    """Agreement of the response tokens of a batch, or micro-batch, from the overlap of all of its tokens.

    Args:
        overlap_TL: integer, |T and I| of each token's forward pass, packed in the order of the batch.
        known_T: bool, rows whose routing the rollout returned (`core.captured.known_rows`) and is not refused.
        batch: with jagged `input_ids` [B, n] and `response_mask` [B, r], on any device.
        left_out_B: bool, trajectories whose routing did not travel (`core.tokens.left_out`).
        refused_T: why rows are refused, as of `believed`.
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
