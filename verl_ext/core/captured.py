"""Can the routing that a rollout returned be what its routers chose?

A kernel that captures nothing leaves zeros of the right shape, ids wrap in a dtype too narrow, a buffer is read before
it is written; the loss shows none of it. What no top-k returns is refused here, and its token routes itself.

Shape legend: T tokens of whole trajectories, B of these, t tokens of a block, p pairs of a token and a layer, L MoE
layers, K experts per token (top-k).
"""

import torch
from torch import Tensor

REASONS = {
    "out_of_range": "name an expert that the model has not: the rollout counts shared or redundant experts too, runs "
    "another model, or its ids passed through too narrow a dtype",
    "repeated": "name an expert twice in a layer, which no top-k does: zeros of a kernel that captures nothing, or ids "
    "that wrapped",
    "stuck": "have the experts of every other token of their trajectory, in some layer: a capture that stands still",
}
"""Why a row is refused, the first that holds; number i of them is i + 1 in `refused_rows`."""
OUT_OF_RANGE, REPEATED, STUCK = range(1, 1 + len(REASONS))

FEWEST = 32  # tokens of a trajectory that must all have the same experts before that is no accident
WITNESSES = 4  # of these, looked at first
PAIRS, GPU_PAIRS = 2**16, 2**20  # of a token and a layer, a block: on a CPU it stays near the core


def known_rows(routes_TLK: Tensor) -> Tensor:
    """[T] bool: rows whose routing the rollout returned. It leaves zeros in the others: never forwarded, or lost.

    A row of top-1 experts that are number 0 in every layer counts as unknown too.
    """
    return routes_TLK.flatten(1).any(1).bool()  # any() of uint8 is uint8


@torch.no_grad()
def refused_rows(routes_TLK: Tensor, experts: int, offsets: Tensor) -> Tensor:
    """[T] uint8: why a row cannot be what a model's routers chose, the number of its reason; 0 where it can.

    Rows without routing (`known_rows`) are not refused. What is said of a row depends on its trajectory alone, so that
    every pass over it, in whatever micro-batch, refuses the same.

    Args:
        routes_TLK: any integers, of the MoE layers alone: a dense layer's zeros would be refused.
        experts: the model's; ids are below this.
        offsets: [B + 1] int64, where each trajectory starts; the last entry is T.
    """
    T, L, K = routes_TLK.shape
    refused_T = torch.zeros(T, dtype=torch.uint8, device=routes_TLK.device)
    if routes_TLK.numel() == 0:
        return refused_T
    known_T = torch.empty(T, dtype=torch.bool, device=routes_TLK.device)
    size = max(1, (GPU_PAIRS if routes_TLK.is_cuda else PAIRS) // L)
    narrow = torch.uint8 if experts <= 256 else routes_TLK.dtype  # for ids in range, and faster
    for part in (slice(start, start + size) for start in range(0, T, size)):
        routes_tLK = routes_TLK[part]
        known_T[part] = known_rows(routes_tLK)
        if K > 1:
            repeats_p = _repeats(routes_tLK.to(narrow).reshape(-1, K))
            refused_T[part].masked_fill_(repeats_p.view(-1, L).any(1), REPEATED)
        if (foreign_t := _out_of_range(routes_tLK, experts)) is not None:
            refused_T[part].masked_fill_(foreign_t, OUT_OF_RANGE)
    if experts > K:  # else every token has the same experts
        stuck_B = _stuck(routes_TLK, known_T, offsets.to(routes_TLK.device))
        stuck_T = stuck_B.repeat_interleave(offsets.diff().to(stuck_B.device), output_size=T)
        refused_T.masked_fill_(stuck_T & (refused_T == 0), STUCK)
    return refused_T.masked_fill_(~known_T, 0)


def _repeats(ids_pK: Tensor) -> Tensor:
    """[p] bool, whether two of the K ids are the same; each pair of them is compared, K planes apart."""
    p, K = ids_pK.shape
    # In three dimensions: torch's copy of a transposed matrix is several times slower.
    planes_Kp = ids_pK.new_empty(K, p, 1).copy_(ids_pK.T.unsqueeze(2)).squeeze(2)
    found_p = ids_pK.new_zeros(p)
    # 0 or 1 in the dtype of the ids: torch compares into bool several times slower.
    same_Kp = torch.empty_like(planes_Kp)
    for apart in range(1, K):
        same = torch.eq(planes_Kp[apart:], planes_Kp[:-apart], out=same_Kp[apart:])
        found_p |= same.amax(0)
    return found_p.bool()


def _out_of_range(routes_tLK: Tensor, experts: int) -> Tensor | None:
    """[t] bool; None where the dtype holds no such id. All rows, where it cannot hold the ids of so many experts."""
    limits = torch.iinfo(routes_tLK.dtype)
    if limits.max < experts - 1:
        return torch.ones(len(routes_tLK), dtype=torch.bool, device=routes_tLK.device)
    if limits.max < experts and limits.min == 0:
        return None
    ids_tI = routes_tLK.flatten(1)
    return (ids_tI.amax(1) > experts - 1) | (ids_tI.amin(1) < 0)  # `experts` itself may not fit the dtype


def _stuck(routes_TLK: Tensor, known_T: Tensor, offsets: Tensor) -> Tensor:
    """[B] bool: some layer has the same experts for every known row of the trajectory, of which there are FEWEST."""
    rows = known_T.nonzero().squeeze(1)
    starts = torch.searchsorted(rows, offsets)  # among the known rows
    counts = starts.diff()
    stuck_B = counts >= FEWEST
    long_b = stuck_B.nonzero().squeeze(1)
    stuck_B = torch.zeros_like(stuck_B)
    steps = torch.arange(WITNESSES, device=rows.device)
    picked_bw = starts[long_b, None] + steps * (counts[long_b, None] - 1) // (WITNESSES - 1)
    sets_bwLK = routes_TLK[rows[picked_bw]].sort(-1).values
    for place, layer in (sets_bwLK == sets_bwLK[:, :1]).all(-1).all(1).nonzero().tolist():  # hardly ever any
        trajectory = long_b[place]
        sets_nK = routes_TLK[rows[starts[trajectory] : starts[trajectory + 1]], layer].sort(-1).values
        stuck_B[trajectory] |= (sets_nK == sets_nK[0]).all()
    return stuck_B
