"""Router agreement: the number of experts that training and inference have in common for the same token.

Shape legend: N tokens, n tokens of a block, L MoE layers, K experts per token (top-k), B trajectories.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from verl_ext.core.blocks import Scratch
from verl_ext.core.tokens import blocks

TOKENS_AT_ONCE = 32_768  # tokens taken at a time: 25 MB per temporary for 94 layers
PAIRS_AT_ONCE, PAIRS_AT_ONCE_ON_GPU = 2**16, 2**20  # pairs of token and layer in a block, which fits a CPU core's cache
COMPARISONS_AT_ONCE = 2**22  # comparisons of ids at a time, a byte each
WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))  # bytes, and a dtype of that size


def expert_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """Returns |T and I| per token and layer, [N, L] uint8: how many of the K expert ids are in both sets.

    The order of the ids inside a set does not matter; ids within one set are distinct, as top-k's are. The integer
    dtypes may differ. K is at most 255.

    Raises:
        ValueError: the two tensors differ in shape.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routing of the training engine {tuple(train_NLK.shape)} and of the rollout "
            f"{tuple(infer_NLK.shape)} differ in shape [tokens, layers, top_k]"
        )
    if train_NLK.is_cuda and find_spec("triton"):
        from verl_ext.core.overlap_triton import fused_overlap

        return fused_overlap(train_NLK, infer_NLK)
    return blockwise_overlap(train_NLK, infer_NLK)


def blockwise_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """Computes `expert_overlap` in plain torch, on any device; its temporaries do not grow with N.

    Most sets are equal, and in the same order, because both engines sort by score. Comparing the bytes of whole sets as
    words finds these; only in the other sets are the ids compared with each other.
    """
    N, L, K = train_NLK.shape
    dtype = torch.promote_types(train_NLK.dtype, infer_NLK.dtype)
    overlap_NL = torch.full((N, L), K, dtype=torch.uint8, device=train_NLK.device)
    tokens, scratch = max(1, PAIRS_AT_ONCE // max(1, L)), Scratch(train_NLK.device)
    for start in range(0, N, tokens):
        part = slice(start, start + tokens)
        train_PK = train_NLK[part].to(dtype).contiguous().view(-1, K)
        infer_PK = infer_NLK[part].to(dtype).contiguous().view(-1, K)
        train_PW, infer_PW = _view_words(train_PK, infer_PK)
        unequal_P = train_PW[:, 0] != infer_PW[:, 0]
        for word in range(1, train_PW.shape[1]):
            unequal_P |= train_PW[:, word] != infer_PW[:, word]
        overlap_P, size = overlap_NL[part].view(-1), max(1, COMPARISONS_AT_ONCE // K**2)
        chunks: Iterable[Tensor | slice] = [slice(first, first + size) for first in range(0, len(unequal_P), size)]
        if 2 * unequal_P.count_nonzero() < len(unequal_P):  # else picking them out costs more than it saves
            chunks = unequal_P.nonzero().squeeze(1).split(size)
        for chunk in chunks:
            scratch.next_block()
            overlap_P[chunk] = _count_common(train_PW[chunk].view(dtype), infer_PW[chunk].view(dtype), scratch)
    return overlap_NL


def _view_words(train_PK: Tensor, infer_PK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same bytes as the widest words that fill a row and are aligned in both tensors."""
    places = (train_PK.shape[1], train_PK.storage_offset(), infer_PK.storage_offset())
    size = train_PK.element_size()
    word = next(dtype for width, dtype in WORDS if all(place * size % width == 0 for place in places))
    return train_PK.view(word), infer_PK.view(word)


def _count_common(train_PK: Tensor, infer_PK: Tensor, scratch: Scratch) -> Tensor:
    """Returns [P] uint8 by K * K comparisons. Each of the K ids has its own plane, so that comparisons and sums are
    vector instructions along contiguous memory."""
    (P, K), dtype = train_PK.shape, train_PK.dtype
    # In three dimensions: torch's copy of a transposed matrix is several times slower.
    train_KP = scratch.empty(K, P, 1, dtype=dtype).copy_(train_PK.T.unsqueeze(2)).squeeze(2)
    infer_KP = scratch.empty(K, P, 1, dtype=dtype).copy_(infer_PK.T.unsqueeze(2)).squeeze(2)
    # 0 or 1 in the dtype of the ids: torch compares wider ids into bool one by one.
    same_KKP = scratch.empty(K, K, P, dtype=dtype)
    torch.eq(train_KP.unsqueeze(1), infer_KP.unsqueeze(0), out=same_KKP)
    return same_KKP.sum((0, 1), dtype=dtype).to(torch.uint8)


@dataclass(frozen=True)
class RouterSums:
    """Sums over the compared tokens of each trajectory, float64: float32 would stop counting at 2^24.

    A token is compared if the model generated it and the rollout's routing of it is known, and not refused.
    Trajectories whose routing was not sent have only `left_out`; trajectories without generated tokens have all sums 0.

    Attributes:
        agree: [B, L], of |T and I| / K.
        exact: [B, L], tokens with T = I.
        first: [B, L], tokens whose first differing layer this is.
        own: [B, L], of the agreement of the experts that the training router would have chosen by itself; equal to
            `agree` unless routing is replayed.
        margin_equal, margin_differs: [B, 1], of the router's margin over tokens and layers with T = I, and with T != I.
            The margin is the gap between the k-th and the (k+1)-th of the scores from which the top-k is taken.
        tokens, unknown: [B, 1], tokens compared; generated tokens whose routing the rollout did not return.
        left_out: [B, 1], generated tokens of a trajectory that was not to be compared.
        refused: [B, R], generated tokens whose routing cannot come from a router, for each of the R REASONS.
    """

    agree: Tensor
    exact: Tensor
    first: Tensor
    own: Tensor
    margin_equal: Tensor
    margin_differs: Tensor
    tokens: Tensor
    unknown: Tensor
    left_out: Tensor
    refused: Tensor

    @classmethod
    def zeros(cls, rows: int, layers: int, device: torch.device | None = None) -> "RouterSums":
        return cls.unpack(torch.zeros(rows, 4 * layers + 5 + len(REASONS), dtype=torch.float64, device=device))

    def pack(self) -> Tensor:
        """Returns [B, 4 L + 5 + R], the form that the workers send to the controller."""
        return torch.cat(list(vars(self).values()), dim=1)

    @classmethod
    def unpack(cls, packed: Tensor) -> "RouterSums":
        layers = (packed.shape[1] - 5 - len(REASONS)) // 4
        return cls(*packed.split([layers] * 4 + [1] * 5 + [len(REASONS)], dim=1))


@torch.no_grad()
def agreement(
    overlap_NL: Tensor,
    top_k: int,
    mask_N: Tensor,
    known_N: Tensor,
    offsets: Tensor,
    *,
    left_out_B: Tensor | None = None,
    refused_N: Tensor | None = None,
    margin_NL: Tensor | None = None,
    own_NL: Tensor | None = None,
    block: int = TOKENS_AT_ONCE,
) -> tuple[Tensor, RouterSums]:
    """Computes the agreement of every token, and the sums that `router_metrics` reads.

    Args:
        overlap_NL: integer, |T and I| (`expert_overlap`) with T the experts that the training engine used.
        mask_N: bool, tokens that the model generated.
        known_N: bool, tokens whose routing the rollout returned and which is not refused; the others count as unknown
            or refused, and as agreeing in the result per token.
        offsets: [B + 1] int64, where each trajectory starts; the last entry is N.
        left_out_B: bool, trajectories that are not to be compared: their tokens are neither known nor unknown, and NaN
            in the result per token.
        refused_N: uint8, the reason why a token's routing is refused, from `refused_rows`; 0 where it is not.
        margin_NL: the router's margin, any float; 0 where it is left out.
        own_NL: the overlap of the experts that the training router would have chosen, where others were replayed.
        block: tokens taken at a time, in whole trajectories.

    Returns:
        [N] float32, mean over layers of |T and I| / K; and the sums.
    """
    rows, layers = len(offsets) - 1, overlap_NL.shape[1]
    per_token = torch.ones(len(overlap_NL), device=overlap_NL.device)
    sums = RouterSums.zeros(rows, layers, overlap_NL.device)
    codes_R = torch.arange(1, 1 + len(REASONS), device=overlap_NL.device)
    for part, of in blocks(offsets, block):
        lengths = offsets[of.start : of.stop + 1].diff()
        row_n = torch.repeat_interleave(lengths, output_size=part.stop - part.start)
        known_n, mask_n = known_N[part], mask_N[part]
        if left_out_B is not None:
            left_out_n = left_out_B[of][row_n]
            sums.left_out[of].index_add_(0, row_n, (mask_n & left_out_n).unsqueeze(1).double())
            mask_n = mask_n & ~left_out_n
        counts_n = mask_n & known_n
        counts_n1 = counts_n.unsqueeze(1)
        overlap_nL = overlap_NL[part]
        exact_nL = overlap_nL == top_k
        mean_n = overlap_nL.float().mean(1) / top_k
        per_token[part] = torch.where(known_n, mean_n, 1.0)
        if left_out_B is not None:
            per_token[part].masked_fill_(left_out_n, torch.nan)

        def add(
            to: Tensor, values: Tensor, of: slice = of, row_n: Tensor = row_n, counts_n1: Tensor = counts_n1
        ) -> None:
            to[of].index_add_(0, row_n, values.double() * counts_n1)

        add(sums.agree, overlap_nL)
        if own_NL is not None:
            add(sums.own, own_NL[part])
        add(sums.exact, exact_nL)
        add(sums.tokens, torch.ones_like(counts_n1))
        without_n1 = (mask_n & ~known_n).unsqueeze(1)
        if refused_N is not None:
            refused_n1 = refused_N[part].unsqueeze(1)
            sums.refused[of].index_add_(0, row_n, (without_n1 & (refused_n1 == codes_R)).double())
            without_n1 &= refused_n1 == 0
        sums.unknown[of].index_add_(0, row_n, without_n1.double())
        differs_n = counts_n & ~exact_nL.all(1)
        first_n = exact_nL[differs_n].to(torch.uint8).argmin(1)  # of equal values, the first
        ones = sums.first.new_ones(len(first_n))
        sums.first[of].index_put_((row_n[differs_n], first_n), ones, accumulate=True)
        if margin_NL is not None:
            margin_nL = torch.where(counts_n1, margin_NL[part].double(), 0.0)  # NaN * 0 is NaN
            add(sums.margin_equal, (margin_nL * exact_nL).sum(1, keepdim=True))
            add(sums.margin_differs, (margin_nL * ~exact_nL).sum(1, keepdim=True))
    if own_NL is None:
        sums.own.copy_(sums.agree)
    sums.agree.div_(top_k)
    sums.own.div_(top_k)
    return per_token, sums


def router_metrics(packed_BC: Tensor) -> dict[str, float]:
    """Returns the `router/*` metrics from the trajectories' packed `RouterSums`; {} if the model generated no token.

    They are described in `verl_ext.base.metrics.ours.ROUTING`. Left out are means over no token, margins if the
    engine's adapter does not record them, and the sampling error if all trajectories were compared.
    """
    packed_BC = packed_BC.double()
    sampled, sums = _sampling_error(RouterSums.unpack(packed_BC)), RouterSums.unpack(packed_BC.sum(0, keepdim=True))
    n, unknown, invalid = sums.tokens.item(), sums.unknown.item(), sums.refused.sum().item()
    generated = n + unknown + invalid
    if generated == 0:
        return sampled
    metrics = {"router/tokens": n, "router/unknown": unknown / generated, "router/invalid": invalid / generated}
    metrics |= sampled
    if n == 0:
        return metrics
    for name, sums_1L in (("agreement", sums.agree), ("exact_match", sums.exact), ("first_differs", sums.first)):
        per_layer = (sums_1L[0] / n).tolist()
        metrics |= {f"router/{name}/layer_{layer:02d}": value for layer, value in enumerate(per_layer)}
    layers = sums.agree.shape[1]
    equal, any_differs = sums.exact.sum().item(), sums.first.sum().item()
    differs = n * layers - equal
    metrics["router/agreement"] = sums.agree.mean().item() / n
    metrics["router/own_agreement"] = sums.own.mean().item() / n
    metrics["router/exact_match"] = equal / (n * layers)
    metrics["router/any_layer_differs"] = any_differs / n
    if any_differs:
        numbers = torch.arange(layers, dtype=torch.float64, device=sums.first.device)
        metrics["router/first_differing_layer"] = (sums.first[0] @ numbers).item() / any_differs
    margins = sums.margin_equal.item(), sums.margin_differs.item()
    if any(margins):  # else the engine does not record them
        if equal:
            metrics["router/margin_equal"] = margins[0] / equal
        if differs:
            metrics["router/margin_differs"] = margins[1] / differs
    return metrics


def _sampling_error(sums: RouterSums) -> dict[str, float]:
    """Returns the error of `router/agreement` if m of M trajectories with generated tokens were compared; {} if m = M.

    The agreement is a ratio R = sum a / sum n over the m compared trajectories: n is a trajectory's tokens, a the sum
    over them of the mean over layers. Its standard error, if the m were drawn at random:

        sqrt((1 - m / M) m / (m - 1) sum (a - R n)^2) / sum n

    Cochran, Sampling Techniques, 3rd ed., ch. 6: the ratio is linearised around the batch's, so the error is too small
    for few trajectories. A systematic sample, as in upstream/agent_loop.py, has a smaller error.
    """
    compared_B = (sums.tokens + sums.unknown + sums.refused.sum(1, keepdim=True))[:, 0] > 0
    m = int(compared_B.sum())
    M = m + int((sums.left_out > 0).sum())
    if m == M:
        return {}
    metrics = {"router/sampled": m / M}
    n_m, a_m = sums.tokens[compared_B, 0], sums.agree[compared_B].mean(1)
    if m > 1 and (n := n_m.sum()) > 0:
        residual_m = a_m - a_m.sum() / n * n_m
        variance = (1 - m / M) * m / (m - 1) * residual_m.square().sum() / n**2
        metrics["router/agreement/error"] = variance.sqrt().item()
    return metrics


# Odd, and otherwise arbitrary (the 64 bits of Steele et al., "Fast splittable pseudorandom number generators", 2014).
WORD, PLACE, TOKEN = -7046029254386353131, -4658895280553007687, -7723592293110705685


def route_terms(routes_TLK: Tensor, tokens_T: Tensor, places_T: Tensor) -> Tensor:
    """Returns [T] int64 terms, whose sum over a trajectory (modulo 2^64) is the checksum of its routes.

    A row's term is (sum over words w = 1, 2, ... of word_w WORD^w) times an odd number computed from its place and
    token. The checksum changes if an id changes, moves to another layer or token, or belongs to another token. It does
    not depend on the dtype of the ids, and a row of zeros adds nothing.

    Args:
        routes_TLK: any integers of at most 16 bits.
        tokens_T, places_T: int64, each row's token id, and its place in prompt and response.
    """
    ids_TI = routes_TLK.to(torch.int16).flatten(1)
    if ids_TI.shape[1] % 4 or ids_TI.storage_offset() % 4:  # a word is four ids, and must be aligned
        ids_TI = torch.nn.functional.pad(ids_TI, (0, -ids_TI.shape[1] % 4)).clone()
    words_TW = ids_TI.contiguous().view(torch.int64)
    powers_W = torch.full_like(words_TW[0], WORD).cumprod(0) if len(words_TW) else words_TW.new_zeros(words_TW.shape[1])
    # On a CPU a matrix product is four times as fast; on a GPU torch has none for integers.
    rows_T = (words_TW * powers_W).sum(1) if words_TW.is_cuda else words_TW @ powers_W
    return rows_T * ((places_T * PLACE + tokens_T * TOKEN) | 1)


REASONS = {
    "out_of_range": "name an expert that the model lacks: the rollout counts shared or redundant experts too, runs "
    "another model, or its ids passed through too narrow a dtype",
    "repeated": "name an expert twice in a layer, which no top-k does: zeros of a kernel that captures nothing, or ids "
    "that wrapped",
    "stuck": "have the experts of every other token of their trajectory, in some layer: a capture that never changes",
}
"""The reasons to refuse a row; the first that holds counts. Number i is i + 1 in `refused_rows`."""
OUT_OF_RANGE, REPEATED, STUCK = range(1, 1 + len(REASONS))

STUCK_TOKENS = 32  # tokens of a trajectory that must all have the same experts before it counts as an error
WITNESS_TOKENS = 4  # of these, looked at first


def known_rows(routes_TLK: Tensor) -> Tensor:
    """Returns [T] bool: rows whose routing the rollout returned. The other rows are zeros: never forwarded, or lost.

    With top-1, a row of expert 0 in every layer counts as unknown too.
    """
    return routes_TLK.flatten(1).any(1).bool()  # any() of uint8 is uint8


@torch.no_grad()
def refused_rows(routes_TLK: Tensor, experts: int, offsets: Tensor) -> Tensor:
    """Returns [T] uint8: the number of the reason why a row cannot come from a model's routers; 0 if it can.

    Rows without routing (`known_rows`) are not refused. The result for a row depends only on its trajectory, so that
    every pass over it, in any micro-batch, refuses the same rows.

    Args:
        routes_TLK: any integers, of the MoE layers only: a dense layer's zeros would be refused.
        experts: the model's number of experts; ids are below this.
        offsets: [B + 1] int64, where each trajectory starts; the last entry is T.
    """
    T, L, K = routes_TLK.shape
    refused_T = torch.zeros(T, dtype=torch.uint8, device=routes_TLK.device)
    if routes_TLK.numel() == 0:
        return refused_T
    known_T = torch.empty(T, dtype=torch.bool, device=routes_TLK.device)
    size = max(1, (PAIRS_AT_ONCE_ON_GPU if routes_TLK.is_cuda else PAIRS_AT_ONCE) // L)
    narrow = torch.uint8 if experts <= 256 else routes_TLK.dtype  # holds all ids in range, and is faster
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
    """Returns [p] bool, whether two of the K ids are the same; each id has its own plane, and each pair is compared."""
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
    """Returns [t] bool; None if the dtype cannot hold such an id. True for all rows if the dtype is too narrow for the
    ids of `experts` experts."""
    limits = torch.iinfo(routes_tLK.dtype)
    if limits.max < experts - 1:
        return torch.ones(len(routes_tLK), dtype=torch.bool, device=routes_tLK.device)
    if limits.max < experts and limits.min == 0:
        return None
    ids_tI = routes_tLK.flatten(1)
    return (ids_tI.amax(1) > experts - 1) | (ids_tI.amin(1) < 0)  # `experts` itself may not fit the dtype


def _stuck(routes_TLK: Tensor, known_T: Tensor, offsets: Tensor) -> Tensor:
    """Returns [B] bool: some layer has the same experts for all known rows, of which there are STUCK_TOKENS."""
    rows = known_T.nonzero().squeeze(1)
    starts = torch.searchsorted(rows, offsets)  # among the known rows
    counts = starts.diff()
    long_b = (counts >= STUCK_TOKENS).nonzero().squeeze(1)
    stuck_B = torch.zeros_like(counts, dtype=torch.bool)
    steps = torch.arange(WITNESS_TOKENS, device=rows.device)
    picked_bw = starts[long_b, None] + steps * (counts[long_b, None] - 1) // (WITNESS_TOKENS - 1)
    sets_bwLK = routes_TLK[rows[picked_bw]].sort(-1).values
    for place, layer in (sets_bwLK == sets_bwLK[:, :1]).all(-1).all(1).nonzero().tolist():  # hardly ever any
        trajectory = long_b[place]
        sets_nK = routes_TLK[rows[starts[trajectory] : starts[trajectory + 1]], layer].sort(-1).values
        stuck_B[trajectory] |= (sets_nK == sets_nK[0]).all()
    return stuck_B


@dataclass(frozen=True)
class RouteCounts:
    """Tokens whose routing is accepted, unknown, or refused, by reason.

    Attributes:
        compared, left_out: how many trajectories came with routing, and how many the agent loop left out.
    """

    accepted: int
    unknown: int
    refused: Mapping[str, int]
    compared: int = 0
    left_out: int = 0

    @property
    def tokens(self) -> int:
        return self.accepted + self.unknown + sum(self.refused.values())

    @classmethod
    def from_sums(cls, packed_BC: Tensor) -> "RouteCounts":
        """Counts the generated tokens from the trajectories' packed RouterSums."""
        rows, sums = RouterSums.unpack(packed_BC), RouterSums.unpack(packed_BC.sum(0, keepdim=True))
        # verl's rows to fill the batch have no token.
        came = (rows.tokens + rows.unknown)[:, 0] + rows.refused.sum(1) > 0
        refused = dict(zip(REASONS, map(int, sums.refused[0].tolist()), strict=True))
        return cls(int(sums.tokens), int(sums.unknown), refused, int(came.sum()), int((rows.left_out > 0).sum()))

    @classmethod
    def from_routes(cls, routes: Sequence[Tensor]) -> "RouteCounts":
        """Counts the tokens of a few trajectories from their routes [n, l, K], without each last token, which has none.

        A layer of zeros counts as dense, and every id that is not negative as an expert.
        """
        routes = [rows[:-1] for rows in routes]
        routes_TLK = torch.cat(routes)
        routes_TLK = routes_TLK[:, routes_TLK.any(0).bool().any(1)]
        offsets = torch.tensor([0, *map(len, routes)]).cumsum(0)
        refused_T = refused_rows(routes_TLK, torch.iinfo(routes_TLK.dtype).max + 1, offsets)
        refused = {name: int((refused_T == 1 + index).sum()) for index, name in enumerate(REASONS)}
        known = int(known_rows(routes_TLK).sum())
        return cls(known - sum(refused.values()), len(routes_TLK) - known, refused)

    def numbers(self) -> dict[str, int]:
        """Returns the counts by name, as a worker sends them; `from_numbers` reads them."""
        return {name: value for name, value in vars(self).items() if name != "refused"} | dict(self.refused)

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, int]) -> "RouteCounts":
        refused = {name: numbers[name] for name in REASONS}
        return cls(refused=refused, **{name: count for name, count in numbers.items() if name not in REASONS})

    @property
    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        refused = sum(self.refused.values())
        return {"router/unknown": self.unknown / self.tokens, "router/invalid": refused / self.tokens}
