"""Corrections: weights on the policy-gradient loss, computed from the mismatch between the engines.

Each correction is a pure function of its settings and of the quantities that its registration names.
`core.measure.weigh` computes these quantities, multiplies the weights of all corrections that are switched on, and
counts their effects. Weights are detached constants. A token weighted 0 leaves the numerator of the loss; the trainer
chooses the denominator (`stability.denominator`). A correction that acts in the update, on the policy being updated, is
a function from a LossBatch to a LossChange, like a policy loss (`core.losses`); `opsm` is registered as both.

Shape legend, in the update: B trajectories, T response tokens (padded).

    k = exp(l_old - l_infer)         training over inference, per token (the log-ratio clamped to +-20)
    p_infer, p_old                   the two probabilities, per token
    log_rho = sum over m=1 of log k  per sequence
    log_g = log_rho / |y|            per sequence, the mean
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from verl_ext.base.errors import ConfigError, MethodError
from verl_ext.base.methods import Method, Registry, require, require_one_of, settings_of
from verl_ext.base.names import BUCKETS
from verl_ext.core import Result, no_grad, torch
from verl_ext.core.loss_batch import LossBatch, LossChange, masked_mean, masked_share
from verl_ext.core.tokens import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_QUANTITIES = ("k", "p_infer", "p_old")
SEQUENCE_QUANTITIES = ("log_rho", "log_g")
IN_UPDATE = ("l_infer", "entropy", "router_agreement", "lag")  # optional fields of a LossBatch
CLAMP_P = 1e-6
# A cap of at least this, like a floor of at most its inverse, cuts next to nothing. M2PO's preset sets such a cap,
# because the paper does not cut.
UNCUT = 1e4


@dataclass(frozen=True)
class Weights:
    """The weights of a correction, and which values are outside its bounds; shape and dtype are those of its input.

    A value is below the bounds, above them or inside. NaN is neither below nor above, and weighs 0; an infinite value
    weighs the limit of the formula. If a correction cuts the weight instead of dropping tokens, as `tis` does, values
    that are cut are outside.
    """

    weight: Tensor
    low: Tensor  # 1 below the bounds, else 0
    high: Tensor  # 1 above the bounds, else 0


@dataclass(frozen=True)
class Correction(Method):
    """`function(*quantities, **settings) -> Weights`, or in the update `function(batch, **settings) -> LossChange`.

    Attributes:
        reads: the quantities, or the optional fields of the batch.
        by_ratio: whether it weighs a token by its ratio, or a function from the settings to that. Two such corrections
            would count the ratio twice.
        mask_override: the override of its settings that stops it from weighing by the ratio; empty if there is none.
        is_ratio: a function from the settings to whether the weight is the token's ratio k itself, without a cap. A
            loss that already has this ratio, as in verl's bypass mode, needs no such correction. Any other loss needs a
            second correction that bounds the ratio.
        bounds: whether it bounds the ratio of the tokens that it keeps, and leaves the weight to another correction.
        drops: whether it also drops tokens. In verl's bypass mode the loss already has the ratio k, so only the drops
            have an effect there.
        in_update: whether it acts inside each update step, on the policy being updated, and not before the update.
    """

    reads: tuple[str, ...] = ()
    by_ratio: bool | Callable[[Any], bool] = False
    mask_override: str = ""
    is_ratio: Callable[[Any], bool] = lambda settings: False
    bounds: bool = False
    drops: bool = False
    in_update: bool = False

    @property
    def per_sequence(self) -> bool:
        return self.reads[0] in SEQUENCE_QUANTITIES

    def weighs_by_ratio(self, settings: Any) -> bool:
        return self.by_ratio if isinstance(self.by_ratio, bool) else self.by_ratio(settings)


CORRECTIONS: Registry[Correction] = Registry("correction")


def register_correction(
    name: str, settings: type | None = None, *, reads: tuple[str, ...] = (), in_update: bool = False, **traits: Any
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Registers a correction; `traits` are further attributes of Correction.

    Args:
        settings: a dataclass whose fields are the keyword arguments of the function; by default it is made from the
            function's keyword-only arguments.
        reads: quantities of tokens only, or of sequences only; in the update, some of IN_UPDATE or none.

    Raises:
        ConfigError: the name is taken, or a quantity is unknown or of the other kind.
    """
    if in_update and not set(reads) <= set(IN_UPDATE):
        raise ConfigError(f"correction {name} reads {reads} in the update; choose from {IN_UPDATE}")
    if not in_update and not (reads and any(set(reads) <= set(k) for k in (TOKEN_QUANTITIES, SEQUENCE_QUANTITIES))):
        raise ConfigError(
            f"correction {name} reads {reads}; choose from {TOKEN_QUANTITIES} (per token) or {SEQUENCE_QUANTITIES} "
            "(per sequence), not from both"
        )

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        detached = no_grad(function)
        kind = settings or settings_of(function)
        CORRECTIONS.add(Correction(name, detached, kind, reads=reads, in_update=in_update, **traits))
        return detached

    return register


def check_shapes(name: str, found: Any, like: Tensor) -> None:
    """Refuses a correction's result that is not `Weights` with the shape of a quantity that it reads."""
    if not isinstance(found, Weights):
        raise MethodError(f"stability.correction={name} returned a {type(found).__name__}, which is not a Weights")
    for part in fields(Weights):
        given = getattr(found, part.name)
        if not torch.is_tensor(given) or given.shape != like.shape:
            what = f"of shape {tuple(given.shape)}" if torch.is_tensor(given) else f"that is a {type(given).__name__}"
            said = f"returned a {part.name} {what} for {tuple(like.shape)} values"
            raise MethodError(f"stability.correction={name} {said}; it must be a tensor of their shape")


def check_range(name: str, least: float, largest: float) -> None:
    """Refuses a correction's weights, by the least and the largest of them, unless all are finite and at least 0."""
    if not 0 <= least <= largest < math.inf:  # false for NaN
        said = f"returned weights from {least:g} to {largest:g}; each must be finite and at least 0"
        raise MethodError(f"stability.correction={name} {said}")


def below(value: Tensor, bound: float | Tensor) -> Tensor:
    """Returns 1 where value < bound, else 0, also for NaN, as a float tensor, which torch writes faster than bools."""
    return torch.lt(value, bound, out=torch.empty_like(value))


def above(value: Tensor, bound: float | Tensor) -> Tensor:
    """Returns 1 where value > bound, else 0, also for NaN."""
    return torch.gt(value, bound, out=torch.empty_like(value))


def _zero_outside(value: Tensor, low: Tensor, high: Tensor) -> Weights:
    # A product instead of torch.where, which is ten times slower on a CPU; NaN * 0 and inf * 0 are NaN.
    return Weights(((1 - low).sub_(high).mul_(value)).nan_to_num_(0.0), low, high)


@dataclass(frozen=True)
class Tis:
    """The bounds of truncated importance sampling.

    Attributes:
        cap: the largest weight of a token, the paper's C; a larger k is cut to it.
        floor: the smallest weight of a token; a smaller k is raised to it.
    """

    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _require_cap(self, least="floor")


def _cuts_nothing(settings: Tis) -> bool:
    return settings.cap >= UNCUT and settings.floor <= 1 / UNCUT


@register_correction("tis", Tis, reads=("k",), by_ratio=True, is_ratio=_cuts_nothing)
def tis(k: Tensor, cap: float, floor: float = 0.0) -> Weights:
    """Returns k cut to [floor, cap]: truncated importance sampling, per token.

    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025), min(k, C) with C = 2;
    a floor above 0 is NeMo-RL's `truncated_importance_sampling_ratio_min` (PR 2886).
    """
    return Weights(k.clamp(floor, cap).nan_to_num_(0.0), below(k, floor), above(k, cap))


@dataclass(frozen=True)
class TisSequence:
    """The bounds of truncated importance sampling on sequences.

    Attributes:
        cap: the largest weight of a response's tokens, the paper's C; a larger rho, the product of its k, is cut to it.
        floor: the smallest weight of a response's tokens; a smaller rho is raised to it.
    """

    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _require_cap(self, least="floor")


@register_correction("tis_sequence", TisSequence, reads=("log_rho",), by_ratio=True)
def tis_sequence(log_rho: Tensor, cap: float, floor: float = 0.0) -> Weights:
    """Returns rho cut to [floor, cap], the weight of every token of a sequence; rho is the product of its k. Source: as
    for `tis`."""
    return tis(_exp(log_rho), cap, floor)


@dataclass(frozen=True)
class IcePop:
    """Bounds of the mismatch ratio k inside which a token keeps its weight, both inclusive.

    Attributes:
        alpha: the smallest k at which a token keeps its weight.
        beta: the largest k at which a token keeps its weight.
    """

    alpha: float = 0.5
    beta: float = 5.0

    def __post_init__(self) -> None:
        _require_band(self, "alpha", "beta")

    def narrowed(self, factor: float) -> IcePop:
        """Returns the band narrowed towards 1, in logarithms."""
        return IcePop(self.alpha**factor, self.beta**factor)


@register_correction("icepop", IcePop, reads=("k",), by_ratio=True, drops=True)
def icepop(k: Tensor, alpha: float, beta: float) -> Weights:
    """Returns k where alpha <= k <= beta, else 0.

    "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!" (Ring-mini-2.0), the function M(k) of the
    objective, with its defaults alpha 0.5 and beta 5; in that work, 1 to 2 tokens in a thousand were outside.

    Args:
        k: float tensor of any shape, exp(l_old - l_infer).
        alpha, beta: bounds, both inclusive.
    """
    return _zero_outside(k, below(k, alpha), above(k, beta))


@dataclass(frozen=True)
class KPop:
    """The bound on the binary KL between the engines.

    Attributes:
        phi: the largest binary KL between the engines, in nats, at which a token keeps its weight.
    """

    phi: float = 0.1

    def __post_init__(self) -> None:
        require(self, "phi", 0 < self.phi < math.inf, "must be above 0 and finite")


@register_correction("kpop", KPop, reads=("k", "p_infer", "p_old"), by_ratio=True, drops=True)
def kpop(k: Tensor, p_infer: Tensor, p_old: Tensor, phi: float) -> Weights:
    """Returns k where the binary KL between the engines is at most phi in both directions, else 0.

    D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) over "this token or any other", probabilities clamped to
    [1e-6, 1 - 1e-6]. The bound is wide in ratio for rare tokens and tight for confident ones. Source: "KPop" (Ring
    team, 2026), by IcePop's authors, phi 0.1; also in prime-rl PR 3283 and AReaL PR 1405. p_old is the training
    engine's before the update, as in AReaL; prime-rl takes the policy being updated. A KL of phi itself is kept, as in
    prime-rl, in verl PR 6800 and in AReaL's `_check_bounds`; a draft of AReaL's had a strict bound.

    Args:
        p_infer, p_old: float64: in float32, 1 - 1e-6 leaves two digits of 1 - p.
    """
    p, q = p_old.clamp(CLAMP_P, 1 - CLAMP_P), p_infer.clamp(CLAMP_P, 1 - CLAMP_P)
    log_this, log_other = torch.log(p / q), torch.log((1 - p) / (1 - q))
    forward = p * log_this + (1 - p) * log_other
    backward = -q * log_this - (1 - q) * log_other
    outside = above(torch.maximum(forward, backward), phi)
    low = outside * below(k, 1.0)
    return _zero_outside(k, low, outside - low)


@dataclass(frozen=True)
class Ipo:
    """The bound on how far a token's probability may differ between the engines.

    Attributes:
        eps: the largest |p_old - p_infer| at which a token keeps its weight.
    """

    eps: float = 0.3

    def __post_init__(self) -> None:
        require(self, "eps", 0 < self.eps < 1, "must be between 0 and 1: it bounds a difference of probabilities")


@register_correction("ipo", Ipo, reads=("k", "p_infer", "p_old"), by_ratio=True, drops=True)
def ipo(k: Tensor, p_infer: Tensor, p_old: Tensor, eps: float) -> Weights:
    """Returns k where |p_old - p_infer| <= eps, else 0: the total variation of "this token or any other", for any A.

    INTELLECT Policy Optimization, prime-rl's default since its PR 3418, with eps 0.3 since PR 3586, which also set the
    squared log-ratio that it once added (1e-3) to 0. prime-rl takes the policy being updated for p_old, as this does in
    bypass mode. The mask of DPPO (arXiv 2602.04879), verl's loss `dppo_tv`, also depends on the sign of A.
    """
    gap = p_old - p_infer
    return _zero_outside(k, below(gap, -eps), above(gap, eps))


@dataclass(frozen=True)
class Mis:
    """The bounds of masked importance sampling on sequences, and the weight of kept tokens.

    Attributes:
        cap: drop a response whose rho, the product of its k, is above this.
        low: drop a response whose rho is below this.
        weight: `ratio` gives kept tokens the weight rho, `one` the weight 1.
    """

    cap: float = 2.0
    low: float = 0.0
    weight: str = "ratio"

    def __post_init__(self) -> None:
        _require_cap(self, least="low")
        require_one_of(self, "weight", ("ratio", "one"))


@register_correction(
    "mis", Mis, reads=("log_rho",), by_ratio=lambda settings: settings.weight == "ratio", mask_override="weight=one"
)
def mis(log_rho: Tensor, cap: float, weight: str, low: float = 0.0) -> Weights:
    """Keeps a sequence where low <= rho <= cap; its tokens weigh rho (`weight="ratio"`) or 1 (`weight="one"`), others
    0.

    Masked importance sampling on sequences: "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (Liu et al., 2025), which gives no number for the cap; `ratio` is also TRL's
    `sequence_mask`, whose bound from below is `low` (its PR 4732).
    """
    rho = _exp(log_rho)
    return _zero_outside(rho if weight == "ratio" else _one(rho), below(rho, low), above(rho, cap))


@dataclass(frozen=True)
class GeoMask:
    """Bounds of the geometric mean of a sequence's k, both inclusive (NeMo-RL's seq-mask-tis documents these).

    Attributes:
        low: the smallest g, the geometric mean of a response's k, at which the response is kept.
        high: the largest g at which the response is kept.
    """

    low: float = 0.999
    high: float = 1.002

    def __post_init__(self) -> None:
        _require_band(self, "low", "high")


@register_correction("geo_mask", GeoMask, reads=("log_g",), bounds=True)
def geo_mask(log_g: Tensor, low: float, high: float) -> Weights:
    """Returns 1 where low <= g <= high, else 0, for every token of a sequence; g = exp(mean log k), its geometric mean.

    Source: "When Speed Kills Stability", part 3 (Geo-Mask). NeMo-RL's `seq-mask-tis`, with bounds 0.999 and 1.002,
    weighs kept tokens by k: `correction=[geo_mask, tis]` with a cap out of reach.
    """
    g = _exp(log_g)
    return _zero_outside(_one(g), below(g, low), above(g, high))


@no_grad
def sequence_divergence(l_infer: Tensor, l_old: Tensor, l_theta: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the divergence of DeepSeek-V3.2's eq. 9 into engine mismatch and policy staleness.

    Args:
        l_infer, l_old, l_theta: [B, T] log-probabilities, any float dtype.
        mask: [B, T].

    Returns:
        Means over each sequence's m = 1 tokens, [B] float64 each; 0 for a sequence without such a token.
        mismatch: mean(l_infer - l_old), the disagreement of the two engines.
        staleness: mean(l_old - l_theta), the movement of the policy since then.
        They add up to mean(l_infer - l_theta), which OPSM compares with delta.
    """
    chosen = mask.bool()
    n = chosen.sum(-1).clamp(min=1)
    # torch.where, not a product: padding, even NaN, stays out of the mean.
    mismatch = torch.where(chosen, l_infer.double() - l_old, 0.0).sum(-1) / n
    staleness = torch.where(chosen, l_old.double() - l_theta, 0.0).sum(-1) / n
    return mismatch, staleness


@dataclass(frozen=True)
class Opsm:
    """The bound of off-policy sequence masking, and the choice of the sequences that it may mask.

    Attributes:
        delta: drop a response of negative advantage whose mean of l_infer - l_theta is above this many nats per token.
            It may be negative, as the mean may. The paper gives no value, so it has to be set. `stability=opsm` has
            0.1; a report finds 0.05 to 0.2 reasonable (Trinity-RFT PR 420).
        stale_only: keep all trajectories that the policy's own weights sampled; in the `sync` mode, that is all of
            them.
    """

    delta: float = field(metadata={"for example": 0.1})
    stale_only: bool = False

    def __post_init__(self) -> None:
        require(self, "delta", math.isfinite(self.delta), "must be a finite number of nats per token")


def opsm_mask(divergence: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """Returns 0 where A < 0 and the sequence's divergence is above delta, else 1: off-policy sequence masking.

    DeepSeek-V3.2 (arXiv 2512.02556) eq. 9. Its pi_old "denotes the sampling probability directly returned by the
    inference framework", so the divergence is mean(l_infer - l_theta), with l_theta of the current update step.
    A divergence of NaN counts as above delta. TRL's `off_policy_mask_threshold` is the same.

    Args:
        divergence: [B], the sum of the two parts of `sequence_divergence`.
        advantages: [B, T].
        delta: threshold in nats per token.

    Returns:
        [B, T] float32 of zeros and ones, to multiply into a token's weight.
    """
    near = divergence <= delta  # false for NaN
    return ((advantages >= 0) | near[:, None]).float()


@register_correction("opsm", Opsm, reads=("l_infer", "lag"), in_update=True)
def opsm(batch: LossBatch, *, delta: float, stale_only: bool = False) -> LossChange:
    """Gives weight 0 to stale or mismatched sequences of negative advantage (`opsm_mask`).

    `stale_only` is ours. If the engines disagree much, masking by their disagreement lets runs collapse: 7 of 8 with an
    fp4 rollout in the lab (docs/lab.md). With `stale_only`, only stale sequences can be masked. Without lags, no
    sequence is stale.

    Metrics: dropped and sequences_dropped, shares of the tokens and of the sequences with a token; mismatch and
    staleness, the two parts of the divergence, means over those sequences. If rollouts can be older than the policy,
    `mismatch` includes the policy's movement since then, so sequences_dropped and mismatch are also logged by lag, as
    each lag's contribution.
    """
    mismatch, staleness = sequence_divergence(batch.require("l_infer"), batch.l_old, batch.l_theta, batch.mask)
    keep = opsm_mask(mismatch + staleness, batch.advantages, delta)
    if stale_only:
        stale = torch.zeros_like(mismatch, dtype=torch.bool) if batch.lag is None else batch.lag.amax(-1) > 0
        keep = torch.where(stale[:, None], keep, 1.0)
    dropped = (keep == 0) & batch.mask
    rows = batch.mask.any(-1)
    metrics = {
        "dropped": masked_share(dropped, batch.mask),
        "sequences_dropped": masked_share(dropped.any(-1), rows),
        "mismatch": masked_mean(mismatch, rows),
        "staleness": masked_mean(staleness, rows),
    }
    if batch.lag is not None:
        for index, name in enumerate(BUCKETS["lag"]):
            # Parts of a mean, not means: verl averages over micro-batches and ranks, and each must log every name.
            of_lag = rows & (batch.lag.amax(-1) == index)
            metrics[f"mismatch/lag/{name}"] = masked_mean(torch.where(of_lag, mismatch, 0.0), rows)
            metrics[f"sequences_dropped/lag/{name}"] = masked_share(dropped.any(-1) & of_lag, rows)
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


@register_correction("m2po", M2po, reads=("l_infer",), in_update=True, bounds=True)
def m2po(batch: LossBatch, *, threshold: float) -> LossChange:
    """Gives weight 0 to the tokens that an update moves further from the rollout, largest (log r)^2 first, until the
    mean of the rest is at most `threshold`; r = exp(l_theta - l_infer).

    M2PO, "Prosperity before Collapse" (ICLR 2026, arXiv 2510.01161), algorithm 1, whose threshold is 0.04. It considers
    the tokens with A > 0 and r > 1, or A < 0 and r < 1, as PPO's clip does. Its objective weighs the kept tokens by r;
    here `tis` does that, or the loss in bypass mode. The mean is over a micro-batch, as in the authors' code
    (Infini-AI-Lab/M2PO), which clips PPO's ratio at the resulting bound. AReaL's `m2_threshold` considers all tokens,
    whatever the sign of A, and l_old instead of l_theta. NaN weighs 0.

    Metrics: dropped, share of the tokens; second_moment, the mean before any is dropped.
    """
    log_r = (batch.l_theta.double() - batch.require("l_infer")).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    moved = batch.mask & (batch.advantages.sign() * log_r > 0)  # false for NaN
    squares, order = log_r[moved].square().sort()
    # The running mean of sorted values never falls, so the values within the bound are a prefix.
    within = squares.cumsum(0) <= threshold * torch.arange(1, len(squares) + 1, device=squares.device)
    keep = (~log_r.isnan()).float()
    keep[moved] = within.float()[order.argsort()]
    metrics = {"dropped": masked_share(keep == 0, batch.mask), "second_moment": masked_mean(log_r.square(), moved)}
    return LossChange(weight=keep, metrics=metrics)


def _one(value: Tensor) -> Tensor:
    """Returns 1, and 0 for NaN."""
    return torch.eq(value, value).to(value)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _require_cap(settings: Tis | TisSequence | Mis, least: str) -> None:
    require(settings, "cap", 0 < settings.cap < math.inf, "must be above 0 and finite")
    _require_band(settings, least, "cap")


def _require_band(settings: Any, low: str, high: str) -> None:
    bounds = getattr(settings, low), getattr(settings, high)
    require(settings, low, bounds[0] >= 0, "must be at least 0: it bounds a probability ratio")
    require(settings, low, bounds[0] < bounds[1], f"must be below {high}={bounds[1]:g}")
