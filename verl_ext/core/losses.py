"""The policy losses, and the parts of them and of the workers' loss: sequence masks, penalties, a KL estimate.

Shape legend: B trajectories, T response tokens (padded), N tokens, L MoE layers, K experts per token.
Notation of CONTRIBUTING.md; `mask` is m, bool or 0/1. A tensor carries a gradient only if its description says so.

Small values are differences of large numbers here (x - log x - 1 is (log x)^2 / 2 near x = 1, and a mean over 30,000
tokens loses digits too), so exponents and sums run in float64 for every input dtype; results are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from verl_ext.base.methods import Chosen, Method, Registry, require, settings_of
from verl_ext.base.names import BUCKETS
from verl_ext.core import no_grad, torch
from verl_ext.core.corrections import IcePop, icepop, register_correction
from verl_ext.core.tokens import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from torch import Tensor


READABLE = ("k", "l_infer", "entropy", "router_agreement", "router_deviation", "lag")


@dataclass(frozen=True)
class LossBatch:
    """The inputs of a policy loss, [B, T] each. An optional one is given if the loss is registered to read it.

    Attributes:
        l_theta: with gradient.
        mask: m, bool.
        k: the mismatch ratio exp(l_old - l_infer), 0 where it is not a number.
        entropy: of the training policy before the update, in nats.
        router_agreement: share of a token's experts that both engines chose, mean over layers.
        router_deviation: |log r_theta - log r_old| of the router, mean over experts and layers.
        lag: int, the trajectory's bucket of `Lag`; None, though a method reads it, in synchronous training.
    """

    l_theta: Tensor
    l_old: Tensor
    advantages: Tensor
    mask: Tensor
    k: Tensor | None = None
    l_infer: Tensor | None = None
    entropy: Tensor | None = None
    router_agreement: Tensor | None = None
    router_deviation: Tensor | None = None
    lag: Tensor | None = None

    def require(self, name: str) -> Tensor:
        """Returns the optional tensor `name`; raises ValueError if the registration does not name it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch comes without {name}: register the function with reads=({name!r},)")
        return value


@dataclass(frozen=True)
class LossChange:
    """The changes to the base loss; None leaves a part as it is.

    Attributes:
        weight: [B, T], multiplied into the tokens' weights; always detached.
        log_factor: [B, T], added to the log-ratio before the base clips; detached too.
        term: [B, T] with gradient, whose mean over all response tokens is added to the loss, in every loss_agg_mode.
        metrics: of this micro-batch, logged as `actor/<name>/<metric>`.
    """

    weight: Tensor | None = None
    log_factor: Tensor | None = None
    term: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


LossFunction = Callable[..., LossChange]


@dataclass(frozen=True)
class Loss(Method):
    """`function(batch, *, setting, ...) -> LossChange`.

    Attributes:
        reads: optional fields of LossBatch.
        rescales: it gives a log_factor, so the base must have a ratio.
        needs_l_old: l_old must be the training engine's own; in bypass mode it is the rollout's.
    """

    reads: tuple[str, ...] = ()
    rescales: bool = False
    needs_l_old: bool = False

    @property
    def gives(self) -> tuple[str, ...]:
        return ("weight", "term", "log_factor") if self.rescales else ("weight", "term")


LOSSES: Registry[Loss] = Registry("policy loss")


def register_loss(
    name: str, settings: type | None = None, *, reads: tuple[str, ...] = (), **traits: bool
) -> Callable[[LossFunction], LossFunction]:
    """Registers a function of a LossBatch and settings, which becomes `policy_loss.loss_mode=NAME`; `traits` are
    further attributes of Loss.

    Args:
        settings: a dataclass whose fields are the keyword arguments of the function; by default it is made from the
            function's keyword-only arguments.

    Raises:
        ValueError: the name is taken, or `reads` has an unknown field.
    """
    if unknown := set(reads) - set(READABLE):
        raise ValueError(f"the policy loss {name} reads {sorted(unknown)}; choose from {READABLE}")

    def register(function: LossFunction) -> LossFunction:
        LOSSES.add(Loss(name, function, settings or settings_of(function), reads, **traits))
        return function

    return register


def change(chosen: Chosen, batch: LossBatch, gives: Collection[str]) -> LossChange:
    """Calls a method with its settings on a batch.

    Raises:
        ValueError: the method gives a part that is not in `gives`, or a tensor that is not [B, T].
    """
    found = chosen.method.function(batch, **asdict(chosen.settings))
    expected = tuple(batch.mask.shape)
    for name in ("weight", "log_factor", "term"):
        if (tensor := getattr(found, name)) is None:
            continue
        if name not in gives:
            raise ValueError(f"{chosen.name} gives a {name}; it is registered to give {' and '.join(gives)}")
        if tensor.shape != expected:
            raise ValueError(
                f"{chosen.name} gives a {name} of shape {tuple(tensor.shape)} where {expected} is expected"
            )
    return found


GATES = ("action", "response")


@register_loss("icepop", IcePop, reads=("k",))
def icepop_loss(batch: LossBatch, *, alpha: float, beta: float) -> LossChange:
    """Each token weighted by IcePop's M(k), the correction `icepop`: a loss of its own for plain verl.

    Metrics: dropped_low, dropped_high, the shares of tokens below and above the band.
    """
    tokens = icepop(batch.require("k"), alpha, beta)
    metrics = {"dropped_low": _share(tokens.low, batch.mask), "dropped_high": _share(tokens.high, batch.mask)}
    return LossChange(weight=tokens.weight, metrics=metrics)


@dataclass(frozen=True)
class SequenceDivergence:
    """Per sequence, means over its m = 1 tokens, [B] float64 each; 0 for a sequence without such a token.

    Attributes:
        mismatch: mean(l_infer - l_old), the disagreement of the two engines.
        staleness: mean(l_old - l_theta), the movement of the policy since then.
    """

    mismatch: Tensor
    staleness: Tensor

    @property
    def whole(self) -> Tensor:
        """mean(l_infer - l_theta), which OPSM compares with delta; the two parts add up to it exactly."""
        return self.mismatch + self.staleness


@no_grad
def sequence_divergence(l_infer: Tensor, l_old: Tensor, l_theta: Tensor, mask: Tensor) -> SequenceDivergence:
    """Splits the divergence of DeepSeek-V3.2's eq. 9 into engine mismatch and policy staleness.

    Args:
        l_infer, l_old, l_theta: [B, T] log-probabilities, any float dtype.
        mask: [B, T].
    """
    chosen = mask.bool()
    n = chosen.sum(-1).clamp(min=1)
    # torch.where, not a product: whatever stands in padding, NaN included, stays out of the mean.
    return SequenceDivergence(
        *(torch.where(chosen, part, 0.0).sum(-1) / n for part in (l_infer.double() - l_old, l_old.double() - l_theta))
    )


@dataclass(frozen=True)
class Opsm:
    """The bound of off-policy sequence masking, and the choice of the sequences that it may mask.

    Attributes:
        delta: drop a response of negative advantage whose mean of l_infer - l_theta is above this many nats per token.
            Any sign works: the mean can be negative. The paper gives no value, so it has to be set. `stability=opsm`
            has 0.1; a report finds 0.05 to 0.2 reasonable (Trinity-RFT PR 420).
        stale_only: keep all trajectories that the policy's own weights sampled; in the `sync` mode these are all.
    """

    delta: float = field(metadata={"for example": 0.1})
    stale_only: bool = False

    def __post_init__(self) -> None:
        require(self, "delta", math.isfinite(self.delta), "must be a finite number of nats a token")


def opsm_mask(divergence: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """Off-policy sequence masking: 0 where A < 0 and the sequence's divergence passes delta, else 1.

    DeepSeek-V3.2 (arXiv 2512.02556) eq. 9. Its pi_old "denotes the sampling probability directly returned by the
    inference framework", so the divergence is mean(l_infer - l_theta), with l_theta of the current update step.
    A sequence whose divergence is NaN counts as past delta. TRL has the same as `off_policy_mask_threshold`.

    Args:
        divergence: [B], `SequenceDivergence.whole`.
        advantages: [B, T].
        delta: threshold in nats per token.

    Returns:
        [B, T] float32 of zeros and ones, to multiply into a token's weight.
    """
    near = divergence <= delta  # false for NaN
    return ((advantages >= 0) | near[:, None]).float()


@register_correction("opsm", Opsm, reads=("l_infer", "lag"), in_update=True)
@register_loss("opsm", Opsm, reads=("l_infer", "lag"))
def opsm(batch: LossBatch, *, delta: float, stale_only: bool = False) -> LossChange:
    """Weight 0 on the tokens of stale or mismatched sequences of negative advantage: `opsm_mask`.

    `stale_only` is ours. If the engines disagree much, masking by their disagreement ended every run of the lab
    (docs/lab.md); with `stale_only`, only stale sequences can be masked. Without lags, no sequence is stale.

    Metrics: dropped and sequences_dropped, shares of the tokens and of the sequences with a token; mismatch and
    staleness, the two parts of the divergence, means over those sequences. If rollouts can be older than the policy,
    `mismatch` includes the policy's movement since then. So sequences_dropped and mismatch are also logged by lag, as
    the contribution of each.
    """
    parts = sequence_divergence(batch.require("l_infer"), batch.l_old, batch.l_theta, batch.mask)
    keep = opsm_mask(parts.whole, batch.advantages, delta)
    if stale_only:
        stale = torch.zeros_like(parts.whole, dtype=torch.bool) if batch.lag is None else batch.lag.amax(-1) > 0
        keep = torch.where(stale[:, None], keep, 1.0)
    dropped = (keep == 0) & batch.mask
    rows = batch.mask.any(-1)
    metrics = {
        "dropped": _share(dropped, batch.mask),
        "sequences_dropped": _share(dropped.any(-1), rows),
        "mismatch": _mean(parts.mismatch, rows),
        "staleness": _mean(parts.staleness, rows),
    }
    if batch.lag is not None:
        for index, name in enumerate(BUCKETS["lag"]):
            # Parts of a mean, not means: verl averages over micro-batches and ranks, all of which must have all names.
            of_lag = rows & (batch.lag.amax(-1) == index)
            metrics[f"mismatch/lag/{name}"] = _mean(torch.where(of_lag, parts.mismatch, 0.0), rows)
            metrics[f"sequences_dropped/lag/{name}"] = _share(dropped.any(-1) & of_lag, rows)
    return LossChange(weight=keep, metrics=metrics)


@dataclass(frozen=True)
class M2po:
    """The bound on the second moment of the ratio.

    Attributes:
        threshold: the largest mean of (l_theta - l_infer)^2 over the tokens that an update moves further from the
            rollout, in nats squared.
    """

    threshold: float = 0.04

    def __post_init__(self) -> None:
        require(self, "threshold", 0 < self.threshold < math.inf, "must be above 0 and finite")


@register_correction("m2po", M2po, reads=("l_infer",), in_update=True)
def m2po(batch: LossBatch, *, threshold: float) -> LossChange:
    """Weight 0 on the tokens that an update moves further from the rollout, largest (log r)^2 first, until the mean of
    the rest is at most `threshold`; r = exp(l_theta - l_infer).

    M2PO, "Prosperity before Collapse" (ICLR 2026, arXiv 2510.01161), algorithm 1, whose threshold is 0.04. It considers
    the tokens with A > 0 and r > 1, or A < 0 and r < 1, as PPO's clip does. Its objective weighs the others by r; here
    `tis` does that, or the loss in bypass mode. The mean is of a micro-batch, as in the authors' code
    (Infini-AI-Lab/M2PO), which clips PPO's ratio at the resulting bound. AReaL's `m2_threshold` takes all tokens, for
    either sign of A, and l_old instead of l_theta. NaN weighs 0.

    Metrics: dropped, share of the tokens; second_moment, the mean before any is dropped.
    """
    log_r = (batch.l_theta.double() - batch.require("l_infer")).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    moved = batch.mask & (batch.advantages.sign() * log_r > 0)  # false for NaN
    squares, order = log_r[moved].square().sort()
    # The running mean of sorted values never falls, so what is within the bound is a prefix.
    within = squares.cumsum(0) <= threshold * torch.arange(1, len(squares) + 1, device=squares.device)
    keep = (~log_r.isnan()).float()
    keep[moved] = within.float()[order.argsort()]
    metrics = {"dropped": _share(keep == 0, batch.mask), "second_moment": _mean(log_r.square(), moved)}
    return LossChange(weight=keep, metrics=metrics)


def llds_penalty(l_theta: Tensor, l_old: Tensor, advantages: Tensor, mask: Tensor, gate: str) -> Tensor:
    """Returns max(0, l_old - l_theta) on the tokens of preserved actions or responses whose likelihood falls as a
    whole.

    LLDS of "On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral" (arXiv 2512.04220). Tokens
    with A >= 0 are preserved (Y_pre); the gate is 1 where the sum of l_old - l_theta over the whole is positive. The
    paper adds lambda times the mean over all response tokens, preserved or not, with lambda 0.1. So does the authors'
    code (vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1, dp_actor.py: a masked mean over
    response_mask), where `gate` "action" is `chunk_noreduce`; their model card: the action-level gate performs best. A
    later revision of the paper has lambda 0.2, and seems to divide by only the tokens of the preserved responses.

    Args:
        l_theta: [B, T] with gradient.
        l_old, advantages, mask: [B, T].
        gate: "response" sums over a response; "action" over a run of m = 1 tokens, which tool output ends, and so does
            a token that a batch filter took out.

    Returns:
        [B, T] float32, 0 outside the penalised tokens; its gradient is -1 on them. An action or response with a NaN is
        not penalised.

    Raises:
        ValueError: `gate` is neither of the two.
    """
    if gate not in GATES:
        raise ValueError(f"gate={gate} is not known; choose action or response")
    preserved = mask.bool() & (advantages >= 0)
    with torch.no_grad():
        fall = torch.where(preserved, l_old.double() - l_theta, 0.0)
        if gate == "response":
            whole = fall.sum(-1, keepdim=True).expand_as(fall)
        else:
            starts = preserved.clone()
            starts[:, 1:] &= ~preserved[:, :-1]
            action = starts.long().cumsum(-1)  # 0 before the first one
            sums = fall.new_zeros(fall.shape[0], fall.shape[1] + 1).scatter_add_(1, action, fall)
            whole = sums.gather(1, action)
        penalised = preserved & (whole > 0) & (fall > 0)
    return torch.where(penalised, l_old.detach().float() - l_theta.float(), 0.0)


@dataclass(frozen=True)
class Llds:
    """The weight of the penalty, and its gate.

    Attributes:
        coef: the factor of the penalty, the paper's lambda.
        gate: the unit whose likelihood has to fall as a whole: `action` or `response`.
    """

    coef: float = 0.1
    gate: str = "action"

    def __post_init__(self) -> None:
        require(self, "coef", self.coef >= 0, "must be at least 0")
        require(self, "gate", self.gate in GATES, "is not known; choose action or response")


@register_loss("llds", Llds, needs_l_old=True)
def llds(batch: LossBatch, *, coef: float, gate: str) -> LossChange:
    """Adds coef times the mean of `llds_penalty` over all response tokens, for any weights (arXiv 2512.04220).

    Metrics: penalised, share of the tokens; penalty, its mean.
    """
    penalty = llds_penalty(batch.l_theta, batch.l_old, batch.advantages, batch.mask, gate)
    metrics = {"penalised": _share(penalty > 0, batch.mask), "penalty": _mean(penalty.detach(), batch.mask)}
    return LossChange(term=coef * penalty, metrics=metrics)


def unbiased_kl(l_theta: Tensor, l_ref: Tensor, l_sampled: Tensor, mask: Tensor) -> Tensor:
    """r' (x - log x - 1), x = pi_ref / pi_theta, r' = pi_theta / pi_sampled: k3, importance-weighted, per token.

    DeepSeek-V3.2 (arXiv 2512.02556) eq. 7. The gradient passes through r' as well, which makes it
    r' (l_theta - l_ref) per token, the unbiased gradient of KL(pi_theta || pi_ref); plain k3 has 1 - x
    instead. The paper's denominator is the policy that "o is sampled from": with two engines that is l_infer;
    TRL (`use_bias_correction_kl`) and slime use l_old.

    Args:
        l_theta: [B, T] with gradient.
        l_ref: [B, T] under the reference policy.
        l_sampled: [B, T], l_infer or l_old.
        mask: [B, T].

    Returns:
        [B, T] float32, 0 outside the mask for any value there. In the value, both log-ratios are clamped to +-20. In
        the gradient only r' is clamped, as an importance weight, so that it points to the reference from any distance.
        (verl clamps its k3 to +-10 as well: no gradient past log x = 2.6, where the KL is largest. Its `k3+` has the
        gradient of k2, l_theta - l_ref, unclamped.) A value under the mask that is not finite gives NaN.
    """
    chosen = mask.bool()
    # torch.where on what goes in: on what comes out, it would leave a gradient of 0 * NaN.
    theta, ref, sampled = (
        torch.where(chosen, values.double(), 0.0) for values in (l_theta, l_ref.detach(), l_sampled.detach())
    )
    fixed = theta.detach()
    ratio = (fixed - sampled).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    log_x = (ref - fixed).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # The gradient in closed form. Autograd's is a difference of two terms with x in both: where a clamp cuts one of
    # them off, the other stays, 1e8 times too large and of the wrong sign.
    slope = ratio * (fixed - ref)
    return (ratio * (torch.expm1(log_x) - log_x) + slope * (theta - fixed)).float()


@no_grad
def router_deviation(old_NK: Tensor, current_NK: Tensor) -> Tensor:
    """Returns [N] float32, mean over K of |log r_theta(e) - log r_old(e)| in one layer (RSPO, arXiv 2510.23027).

    Args:
        old_NK, current_NK: log-probabilities, over all experts, of the K experts that the old router chose.
    """
    return (current_NK.float() - old_NK.float()).abs().mean(-1)


@no_grad
def router_shift_factor(deviation: Tensor, floor: float) -> Tensor:
    """Returns max(exp(-deviation), floor), float32: the detached factor on a token's importance ratio.

    RSPO ("Towards Stable and Effective Reinforcement Learning for Mixture-of-Experts", arXiv 2510.23027): gamma =
    exp(-1/L sum_l 1/K sum_k |log r_theta - log r_old|), over the experts that were active under the old policy.
    Version 2 and the ACL 2026 text multiply it into the ratio before clipping; version 1 after. NaN gives the floor.

    Args:
        deviation: `router_deviation` averaged over the layers, any shape.
        floor: gamma_min in [0, 1].
    """
    return deviation.float().neg().exp().clamp(min=floor).nan_to_num(nan=floor)


@dataclass(frozen=True)
class RouterShift:
    """The bound of the factor on the ratio.

    Attributes:
        floor: the smallest factor on a token's ratio, the paper's gamma_min, between 0 and 1.
    """

    floor: float = 0.8

    def __post_init__(self) -> None:
        require(self, "floor", 0 <= self.floor <= 1, "must be between 0 and 1")


@register_loss("router_shift", RouterShift, reads=("router_deviation",), rescales=True)
def router_shift(batch: LossBatch, *, floor: float) -> LossChange:
    """Each token's ratio multiplied by its `router_shift_factor`; on `geo_mean` it is the paper's own combination.

    Metrics: factor, its mean; floored, the share of tokens at the floor.
    """
    factor = router_shift_factor(batch.require("router_deviation"), floor)
    metrics = {"factor": _mean(factor, batch.mask), "floored": _share(factor <= floor, batch.mask)}
    # A floor of 0 lets the factor be 0, whose logarithm the base's clamp of the log-ratio then bounds.
    return LossChange(log_factor=factor.clamp(min=torch.finfo(factor.dtype).tiny).log(), metrics=metrics)


def _share(chosen: Tensor, mask: Tensor) -> float:
    return ((chosen.bool() & mask).sum() / mask.sum().clamp(min=1)).item()


def _mean(values: Tensor, mask: Tensor) -> float:
    return (torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)).item()
