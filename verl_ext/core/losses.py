"""The policy losses and their parts: penalties, a KL estimate.

Shape legend: B trajectories, T response tokens (padded).
Notation of CONTRIBUTING.md; `mask` is m, bool or 0/1. A tensor carries a gradient only if its description says so.

Small values are differences of large numbers here (x - log x - 1 is (log x)^2 / 2 near x = 1, and a mean over 30,000
tokens loses digits too), so exponents and sums run in float64 for every input dtype; results are float32.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import Method, Registry, require, require_one_of, settings_of
from verl_ext.core import no_grad, torch
from verl_ext.core.corrections import IcePop, Opsm, icepop, opsm
from verl_ext.core.loss_batch import FIELDS, LossBatch, LossChange, masked_mean, masked_share
from verl_ext.core.tokens import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from torch import Tensor


LossFunction = Callable[..., LossChange]


@dataclass(frozen=True)
class Loss(Method):
    """`function(batch, *, setting, ...) -> LossChange`.

    Attributes:
        reads: optional fields of LossBatch.
        needs_l_old: whether l_old must be the training engine's own; in bypass mode it is the rollout's.
    """

    reads: tuple[str, ...] = ()
    needs_l_old: bool = False


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
        ConfigError: the name is taken, or `reads` has an unknown field.
    """
    if unknown := set(reads) - set(FIELDS):
        raise ConfigError(f"the policy loss {name} reads {sorted(unknown)}; choose from {tuple(FIELDS)}")

    def register(function: LossFunction) -> LossFunction:
        LOSSES.add(Loss(name, function, settings or settings_of(function), reads, **traits))
        return function

    return register


@register_loss("icepop", IcePop, reads=("k",))
def icepop_loss(batch: LossBatch, *, alpha: float, beta: float) -> LossChange:
    """Weighs each token by IcePop's M(k), as the correction `icepop` does: a loss for plain verl.

    Metrics: dropped_low, dropped_high, the shares of tokens below and above the band.
    """
    tokens = icepop(batch.require("k"), alpha, beta)
    metrics = {
        "dropped_low": masked_share(tokens.low, batch.mask),
        "dropped_high": masked_share(tokens.high, batch.mask),
    }
    return LossChange(weight=tokens.weight, metrics=metrics)


register_loss("opsm", Opsm, reads=("l_infer", "lag"))(opsm)


@no_grad
def clip_sides(batch: LossBatch, low: float, high: float) -> dict[str, float]:
    """Returns `actor/clipped_share/{high,low}`, the shares of the tokens whose gradient PPO's clip removes, and
    `actor/clipped_mass/{high,low}`, the sums of p_old over these tokens, over the number of all tokens.

    A token is clipped at the high side if A > 0 and r > 1 + high, at the low side if A < 0 and r < 1 - low. DAPO (arXiv
    2503.14476, section 3.1) found the mean probability of tokens clipped at the high side to be below 0.2: the clip
    holds back unlikely tokens, and so exploration. verl averages over micro-batches, of which some clip no token, so
    that mean is the mass over the share (`name_clipped`).
    """
    p_old, r, metrics = batch.l_old.exp(), (batch.l_theta - batch.l_old).exp(), {}
    for side, clipped in (
        ("high", (batch.advantages > 0) & (r > 1 + high)),
        ("low", (batch.advantages < 0) & (r < 1 - low)),
    ):
        metrics[f"actor/clipped_share/{side}"] = masked_share(clipped, batch.mask)
        metrics[f"actor/clipped_mass/{side}"] = masked_mean(p_old * clipped, batch.mask)
    return metrics


def name_clipped(metrics: MutableMapping[str, float]) -> None:
    """Replaces `actor/clipped_mass/*` by `actor/clipped_probability/*`, the mean p_old of the clipped tokens, if there
    are any."""
    for side in ("high", "low"):
        if mass := metrics.pop(f"actor/clipped_mass/{side}", 0.0):
            metrics[f"actor/clipped_probability/{side}"] = mass / metrics[f"actor/clipped_share/{side}"]


def llds_penalty(l_theta: Tensor, l_old: Tensor, advantages: Tensor, mask: Tensor, gate: str) -> Tensor:
    """Returns max(0, l_old - l_theta) on tokens of preserved actions or responses whose total likelihood falls.

    LLDS of "On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral" (arXiv 2512.04220). Tokens
    with A >= 0 are preserved (Y_pre); the gate is 1 where the sum of l_old - l_theta over the whole is positive. The
    paper adds lambda times the mean over all response tokens, preserved or not, with lambda 0.1. So does the authors'
    code (vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1, dp_actor.py: a masked mean over
    response_mask), where `gate` "action" is `chunk_noreduce`; their model card says that the action-level gate performs
    best. A later revision of the paper has lambda 0.2, and seems to divide by the tokens of the preserved responses
    only.

    Args:
        l_theta: [B, T] with gradient.
        l_old, advantages, mask: [B, T].
        gate: "response" sums over a response; "action" over a run of m = 1 tokens, which ends at tool output or at a
            token that a batch filter dropped.

    Returns:
        [B, T] float32, 0 outside the penalised tokens; its gradient is -1 on them. An action or response with a NaN is
        not penalised.
    """
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
        gate: the unit whose total likelihood has to fall: `action` or `response`.
    """

    coef: float = 0.1
    gate: str = "action"

    def __post_init__(self) -> None:
        require(self, "coef", self.coef >= 0, "must be at least 0")
        require_one_of(self, "gate", ("action", "response"))


@register_loss("llds", Llds, needs_l_old=True)
def llds(batch: LossBatch, *, coef: float, gate: str) -> LossChange:
    """Adds coef times the mean of `llds_penalty` over all response tokens, for any weights (arXiv 2512.04220).

    Metrics: penalised, share of the tokens; penalty, the mean of the penalty.
    """
    penalty = llds_penalty(batch.l_theta, batch.l_old, batch.advantages, batch.mask, gate)
    metrics = {"penalised": masked_share(penalty > 0, batch.mask), "penalty": masked_mean(penalty.detach(), batch.mask)}
    return LossChange(term=coef * penalty, metrics=metrics)


def unbiased_kl(l_theta: Tensor, l_ref: Tensor, l_sampled: Tensor, mask: Tensor) -> Tensor:
    """Returns importance-weighted k3 per token: r' (x - log x - 1), x = pi_ref / pi_theta, r' = pi_theta / pi_sampled.

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
        [B, T] float32, 0 outside the mask for any value there. The value has both log-ratios clamped to +-20. The
        gradient has only r' clamped, as an importance weight, so that it points to the reference from any distance.
        (verl clamps its k3 to +-10 as well, so it has no gradient past log x = 2.6, where the KL is largest. The
        gradient of its `k3+` is that of k2, l_theta - l_ref, unclamped.) A value under the mask that is not finite
        gives NaN.
    """
    chosen = mask.bool()
    # torch.where on the inputs: on the result, it would leave a gradient of 0 * NaN.
    theta = torch.where(chosen, l_theta.double(), 0.0)
    ref = torch.where(chosen, l_ref.detach().double(), 0.0)
    sampled = torch.where(chosen, l_sampled.detach().double(), 0.0)
    fixed = theta.detach()
    ratio = (fixed - sampled).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    log_x = (ref - fixed).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # The gradient in closed form. Autograd's is a difference of two terms that both have x: where a clamp cuts off one,
    # the other remains, 1e8 times too large and of the wrong sign.
    slope = ratio * (fixed - ref)
    return (ratio * (torch.expm1(log_x) - log_x) + slope * (theta - fixed)).float()
