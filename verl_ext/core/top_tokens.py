"""The sampler's most likely tokens ("top tokens"), and the training engine's log-probabilities of the same tokens.

For each token, the rollout returns the K most likely tokens at its place, and their log-probabilities log q. From the
training engine's log-probabilities of the same tokens come l_theta over the tokens that the sampler could take, a KL
between the engines without sampling noise, and score centering.

Shape legend: N places, K top tokens of a place, V tokens of the vocabulary, or this rank's part of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_rank

from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.tokens import LOG_RATIO_BOUND, segment_sums

LOGITS_AT_ONCE = 2**22  # logits that are in float32 at once: 16 MB
LEAST_TAIL = 1e-6  # smaller mass outside the top tokens may be rounding (score centering, appendix A.3)

# Computes the weight of tokens from (k, p_infer, p_old), as a correction does; both probabilities are 0 for the tail,
# which has no tokens.
WeightOf = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TopTokens:
    """The top tokens that the sampler returned.

    Attributes:
        ids: [N, K] int64.
        log_q: [N, K] float32, normalised over all that the sampler could take; -inf where there is no token, and in all
            K if the place has no top tokens.
    """

    ids: Tensor
    log_q: Tensor

    @property
    def allowed(self) -> Tensor:
        """[N, K] bool: tokens that the sampler could take."""
        return self.log_q > -torch.inf

    @property
    def present(self) -> Tensor:
        """[N] bool: places that have top tokens."""
        return self.allowed.any(1)


@dataclass(frozen=True)
class Reading:
    """The training engine's log-probabilities, float32, with gradient where the logits have one.

    Attributes:
        l_own: [N], of the token that was sampled.
        l_top: [N, K], of the top tokens.
        entropy: [N], of the distribution over the tokens that the sampler could take, in nats; NaN at places without
            top tokens, where it would be the vocabulary's, which is not computed here. None if no place is truncated.
    """

    l_own: Tensor
    l_top: Tensor
    entropy: Tensor | None = None


class _LogProbsAt(torch.autograd.Function):
    """log_softmax(logits).gather(ids) by blocks of rows; the backward pass keeps only the logits themselves."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, group: ProcessGroup | None) -> Tensor:
        first = 0 if group is None else get_rank(group) * logits.shape[1]
        here = (ids >= first) & (ids < first + logits.shape[1])
        local = (ids - first).masked_fill(~here, 0)
        highest = torch.empty(len(logits), device=logits.device)
        total = torch.empty_like(highest)
        picked = torch.empty(ids.shape, device=logits.device)
        for rows in _blocks(logits):
            block = logits[rows].float()
            highest[rows] = block.amax(1)
            total[rows] = (block - highest[rows, None]).exp_().sum(1)
            picked[rows] = block.gather(1, local[rows])
        picked.masked_fill_(~here, 0)
        if group is not None:
            own = highest.clone()
            all_reduce(highest, ReduceOp.MAX, group)
            total *= (own - highest).exp()
            all_reduce(total, group=group)
            all_reduce(picked, group=group)
        log_z = highest + total.log()
        ctx.save_for_backward(logits, local, here, log_z)
        return picked - log_z[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, log_z = ctx.saved_tensors
        (of_picked,) = gradients
        found = torch.empty_like(logits)
        for rows in _blocks(logits):
            block = (logits[rows].float() - log_z[rows, None]).exp_()
            block *= -of_picked[rows].sum(1, keepdim=True)
            block.scatter_add_(1, local[rows], of_picked[rows] * here[rows])
            found[rows] = block
        return found, None, None


def log_probs_at(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns [N, K] float32 log-probabilities of the tokens `ids` [N, K], with gradient; a token may occur twice in
    `ids`.

    Computes in float32 by blocks of rows: only the gradient is as large as the logits.

    Args:
        logits: [N, V], of any float dtype, not to be changed before the backward pass.
        group: the ranks that hold the vocabulary, in the order of its parts; all must call this.
    """
    return _LogProbsAt.apply(logits, ids, group)


def _blocks(logits: Tensor) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def read(
    logits: Tensor, sampled: Tensor, top: TopTokens, *, truncated: bool, group: ProcessGroup | None = None
) -> Reading:
    """Reads the training engine's log-probabilities of the sampled tokens [N] and of the top tokens.

    Args:
        truncated: the sampler chose only from the top tokens (top-k, top-p), and log q is normalised over them. Then
            the log-probabilities here are, too: otherwise every ratio would include the mass of the cut tokens ("keep
            sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). A sampled token that is not a top token,
            because it ties with the last, counts as one. Places without top tokens use the whole vocabulary.
    """
    l_all = log_probs_at(logits, torch.cat([sampled[:, None], top.ids], 1), group)
    l_own, l_top = l_all[:, 0], l_all[:, 1:]
    if not truncated:
        return Reading(l_own, l_top)
    allowed = top.allowed
    own_again = (allowed & (top.ids == sampled[:, None])).any(1, keepdim=True)
    support = torch.cat([~own_again, allowed], 1)
    log_z = l_all.masked_fill(~support, -torch.inf).logsumexp(1)
    log_z = torch.where(top.present, log_z, 0.0)
    l_support = (l_all - log_z[:, None]).masked_fill(~support, -torch.inf)
    entropy = -(l_support.exp() * l_support.masked_fill(~support, 0.0)).sum(1)
    entropy = torch.where(top.present, entropy, torch.nan)
    return Reading(l_own - log_z, l_top - log_z[:, None], entropy)


@dataclass(frozen=True)
class Divergence:
    """The divergence of two distributions at N places, float64; 0 where there are no top tokens.

    Attributes:
        kl: KL(q || p) in nats, with all other tokens as one: a lower bound of the KL over the vocabulary, and equal to
            it where the top tokens hold all mass. It has no sampling noise, because it does not use the sampled token.
        mass: the probability that the sampler gives to the top tokens.
        differs: 1.0 where p and q differ in the most likely of the top tokens.
    """

    kl: Tensor
    mass: Tensor
    differs: Tensor


@torch.no_grad()
def divergence(reading: Reading, top: TopTokens, *, truncated: bool) -> Divergence:
    """Computes the divergence of the training engine from the sampler."""
    known, allowed = top.present, top.allowed
    log_q = top.log_q.double()
    log_p = reading.l_top.double()
    q = log_q.exp()
    terms = torch.where(allowed, q * (log_q - log_p), 0.0)
    kl = terms.sum(1)
    mass = q.sum(1)
    if not truncated:
        q_tail, p_tail = (1 - mass).clamp(min=LEAST_TAIL), (1 - _mass(log_p, allowed)).clamp(min=LEAST_TAIL)
        kl = kl + q_tail * (q_tail / p_tail).log()
    differs = log_q.argmax(1) != log_p.masked_fill(~allowed, -torch.inf).argmax(1)

    def where_known(value: Tensor) -> Tensor:
        return torch.where(known, value.double(), 0.0)

    return Divergence(where_known(kl), where_known(mass), where_known(differs))


def centering(reading: Reading, top: TopTokens, weight_of: WeightOf, *, truncated: bool) -> Tensor:
    """Returns [N] float32 whose gradient is the expected score under the sampler, weighted as the sampled token's
    score:

        sum over v of q(v) w(v) grad log p(v),   w(v) = weight_of(p(v) / q(v), ...)

    Subtracted from w(y) grad log p(y), it leaves a mean of 0 under the sampler, so that the drift E_q[A] E_q[w grad log
    p] of a policy gradient vanishes: "Score Centering Stabilizes Off-policy Reinforcement Learning" (Marek and
    Ryabinin, arXiv 2609.20807). Outside the top tokens, q is taken to be p times rho = (1 - Q) / (1 - P), with Q and P
    the mass of the top tokens; because sum p grad log p = 0, the tail can be written with the top tokens as well:

        sum over the top tokens of [q w(p / q) - rho w(1 / rho) p] grad log p

    in which the brackets are constants. The result is exact where the top tokens are all that the sampler could take,
    and where the tails are proportional. 0 where there are no top tokens.
    """
    with torch.no_grad():
        allowed = top.allowed
        log_p = reading.l_top.detach().masked_fill(~allowed, -torch.inf)
        p, q = log_p.exp(), top.log_q.exp()
        k = (reading.l_top - top.log_q).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        coefficient = q * weight_of(k, q.double(), p.double())
        if not truncated:
            rho = (1 - _mass(top.log_q.double(), allowed)).clamp(min=LEAST_TAIL)
            rho = (rho / (1 - _mass(log_p.double(), allowed)).clamp(min=LEAST_TAIL))[:, None]
            nothing = torch.zeros_like(rho)
            coefficient = coefficient - (rho * weight_of(1 / rho, nothing, nothing)).float() * p
        coefficient = torch.where(allowed, coefficient, 0.0)
    return (coefficient * reading.l_top.masked_fill(~allowed, 0.0)).sum(1)


def weights_of(corrections: Mapping[str, Mapping[str, Any]]) -> WeightOf:
    """Returns a function that multiplies the weights of corrections of single tokens, by name and settings; 1 without
    any."""

    def weight(k: Tensor, p_infer: Tensor, p_old: Tensor) -> Tensor:
        quantities = {"k": k, "p_infer": p_infer, "p_old": p_old}
        found = torch.ones_like(k)
        for name, settings in corrections.items():
            method = CORRECTIONS[name]
            found = found * method.function(*(quantities[one] for one in method.reads), **settings).weight.to(k.dtype)
        return found

    return weight


def _mass(log_probs: Tensor, allowed: Tensor) -> Tensor:
    return log_probs.masked_fill(~allowed, -torch.inf).exp().sum(1)


@dataclass(frozen=True)
class Call:
    """One call of the rollout engine: a turn, or a part of one that was interrupted.

    Attributes:
        prompt: the tokens that it continued, including those of earlier turns.
        tokens: the n tokens that it generated.
        ids: [n, K] int32.
        log_q: [n, K] float32.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    ids: np.ndarray
    log_q: np.ndarray


def top_tokens_of(
    calls: Iterable[Call], prompt: Sequence[int], response: Sequence[int], k: int
) -> tuple[Tensor, Tensor]:
    """Returns ids [r, K] int32 and log q [r, K] float32 of a trajectory's response. log q is -inf if no call generated
    the token: tool output, a template's token, or one that the agent loop has replaced.

    A call belongs to a trajectory that begins with its prompt, so that if an agent loop returns several trajectories,
    each gets its own calls. The call's top tokens are used up to the first token that the trajectory lacks: later
    tokens were sampled after a different text.
    """
    sequence = [*prompt, *response]
    ids: np.ndarray = np.zeros((len(response), k), np.int32)
    log_q: np.ndarray = np.full((len(response), k), -np.inf, np.float32)
    for call in calls:
        start = len(call.prompt)
        if sequence[:start] != list(call.prompt):
            continue
        kept = np.asarray(sequence[start : start + len(call.tokens)])
        differs = (kept != np.asarray(call.tokens[: len(kept)])).nonzero()[0]
        same = np.arange(int(differs[0]) if len(differs) else len(kept))
        rows: np.ndarray = same + start - len(prompt)
        same, rows = same[rows >= 0], rows[rows >= 0]
        ids[rows], log_q[rows] = call.ids[same], call.log_q[same]
    return torch.from_numpy(ids), torch.from_numpy(log_q)


COLUMNS = ("tokens", "without", "kl", "mass", "differs")


def top_token_sums(found: Divergence, known_N: Tensor, mask_N: Tensor, offsets: Tensor) -> Tensor:
    """Returns [B, 5] float64 over the tokens that the model generated: their number, the number without top tokens, and
    the sums of the divergence over the others.

    Args:
        known_N, mask_N: bool.
        offsets: [B + 1] int64, where each trajectory starts among the N.
    """
    counted = mask_N & known_N
    columns = (mask_N, mask_N & ~known_N, found.kl * counted, found.mass * counted, found.differs * counted)
    return torch.stack([segment_sums(value.double(), offsets.diff()) for value in columns], 1)


def top_token_metrics(sums_BC: Tensor) -> dict[str, float]:
    """Returns `vllm_kl/head*` of a batch; the divergence's metrics only if a token has top tokens."""
    totals = dict(zip(COLUMNS, sums_BC.double().sum(0).tolist(), strict=True))
    if not totals["tokens"]:
        return {}
    metrics = {"vllm_kl/head_missing": totals["without"] / totals["tokens"]}
    if known := totals["tokens"] - totals["without"]:
        metrics["vllm_kl/head"] = totals["kl"] / known
        metrics["vllm_kl/head_mass"] = totals["mass"] / known
        metrics["vllm_kl/head_differs"] = totals["differs"] / known
    return metrics
