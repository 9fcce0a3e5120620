"""Corrections: a weight on the policy-gradient loss, made from the mismatch between the engines.

Each is a pure function of what its registration says it reads; `core.measure` computes those quantities, multiplies
the weights of all corrections that are asked for, and counts what they did. Weights are detached constants. A token
weighted 0 leaves the numerator of the loss; what divides is the trainer's choice (`stability.denominator`).

    k = exp(l_old - l_infer)         training over inference, per token (the log-ratio clamped to +-20)
    p_infer, p_old                   the two probabilities, per token
    log_rho = sum over m=1 of log k  per sequence
    log_g = log_rho / |y|            per sequence, the mean
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.mismatch import LOG_RATIO_BOUND

TOKEN_QUANTITIES = ("k", "p_infer", "p_old")
SEQUENCE_QUANTITIES = ("log_rho", "log_g")
CLAMP_P = 1e-6


@dataclass(frozen=True)
class Weights:
    """What a correction did, each field of the shape and dtype of what it reads.

    A value is outside the bounds on the low side or on the high side, or inside; NaN is on neither and weighs 0.
    """

    weight: Tensor
    low: Tensor  # 1 below the bounds, else 0
    high: Tensor  # 1 above the bounds, else 0


@dataclass(frozen=True)
class Correction:
    """A registered correction: `function(*quantities, **settings) -> Weights`."""

    name: str
    function: Callable[..., Weights]
    reads: tuple[str, ...]

    @property
    def per_sequence(self) -> bool:
        return self.reads[0] in SEQUENCE_QUANTITIES


CORRECTIONS: dict[str, Correction] = {}


def register_correction(
    name: str, reads: tuple[str, ...]
) -> Callable[[Callable[..., Weights]], Callable[..., Weights]]:
    """Register a correction under `name`; `reads` are quantities of tokens only, or of sequences only.

    Raises:
        ValueError: the name is taken, or a quantity is unknown or of the other kind.
    """
    if name in CORRECTIONS:
        raise ValueError(f"a correction named {name} is registered already")
    if not reads or not any(set(reads) <= set(kind) for kind in (TOKEN_QUANTITIES, SEQUENCE_QUANTITIES)):
        raise ValueError(
            f"correction {name} reads {reads}; choose from {TOKEN_QUANTITIES} (per token) or {SEQUENCE_QUANTITIES} "
            "(per sequence), not from both"
        )

    def register(function: Callable[..., Weights]) -> Callable[..., Weights]:
        CORRECTIONS[name] = Correction(name, torch.no_grad()(function), reads)
        return CORRECTIONS[name].function

    return register


def below(value: Tensor, bound: float | Tensor) -> Tensor:
    """1 where value < bound, else 0, NaN too; a float tensor, which torch writes faster than one of bools."""
    return torch.lt(value, bound, out=torch.empty_like(value))


def above(value: Tensor, bound: float | Tensor) -> Tensor:
    """1 where value > bound, else 0, NaN too."""
    return torch.gt(value, bound, out=torch.empty_like(value))


def _zero_outside(value: Tensor, low: Tensor, high: Tensor) -> Weights:
    # A product instead of torch.where, which is ten times slower on a CPU; NaN * 0 and inf * 0 are NaN.
    return Weights(((1 - low).sub_(high).mul_(value)).nan_to_num_(0.0), low, high)


@register_correction("tis", reads=("k",))
def tis(k: Tensor, cap: float) -> Weights:
    """min(k, cap): truncated importance sampling, per token.

    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025), cap C = 2.
    """
    return Weights(k.clamp(max=cap).nan_to_num_(0.0), torch.zeros_like(k), above(k, cap))


@register_correction("tis_sequence", reads=("log_rho",))
def tis_sequence(log_rho: Tensor, cap: float) -> Weights:
    """min(rho, cap) on every token of a sequence, rho = the product of its k. The same source as `tis`."""
    return tis(_exp(log_rho), cap)


@register_correction("icepop", reads=("k",))
def icepop(k: Tensor, alpha: float, beta: float) -> Weights:
    """k where alpha <= k <= beta, else 0.

    "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!" (Ring-mini-2.0), the function
    M(k) of the objective, with its defaults alpha 0.5 and beta 5; there, 1 to 2 tokens in a thousand were outside.

    Args:
        k: float tensor of any shape, exp(l_old - l_infer).
        alpha, beta: bounds, both inclusive.
    """
    return _zero_outside(k, below(k, alpha), above(k, beta))


@register_correction("kpop", reads=("k", "p_infer", "p_old"))
def kpop(k: Tensor, p_infer: Tensor, p_old: Tensor, phi: float) -> Weights:
    """k where the binary KL between the engines is at most phi in both directions, else 0.

    D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) over "this token or any other", probabilities clamped to
    [1e-6, 1 - 1e-6]. The bound is wide in ratio for rare tokens and tight for confident ones. IcePop's successor, by
    its authors: "KPop" (Ring team, 2026), phi 0.1; implemented in prime-rl PR 3283 and AReaL PR 1405 too. As AReaL
    does, this takes the training engine's l_old; prime-rl takes the policy being updated. A KL of phi itself is kept,
    as in prime-rl, in verl PR 6800 and in AReaL's `_check_bounds`; a draft of AReaL's had a strict bound.

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


@register_correction("mis", reads=("log_rho",))
def mis(log_rho: Tensor, cap: float, weight: str) -> Weights:
    """rho <= cap keeps a sequence, else 0; kept tokens weigh rho (`weight="ratio"`) or 1 (`weight="one"`).

    Masked importance sampling on sequences: "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (Liu et al., 2025), which gives no number for the cap; `ratio` is also TRL's
    `sequence_mask`.
    """
    rho = _exp(log_rho)
    return _zero_outside(rho if weight == "ratio" else _one(rho), torch.zeros_like(rho), above(rho, cap))


@register_correction("geo_mask", reads=("log_g",))
def geo_mask(log_g: Tensor, low: float, high: float) -> Weights:
    """1 where low <= g <= high, else 0, on every token of a sequence; g = exp(mean log k), its geometric mean.

    "When Speed Kills Stability", part 3 (there as Geo-Mask); with k as the weight of the kept tokens, which is
    `correction=[geo_mask, tis]` with a cap out of reach, NeMo-RL's `seq-mask-tis` and its bounds 0.999 and 1.002.
    """
    g = _exp(log_g)
    return _zero_outside(_one(g), below(g, low), above(g, high))


def _one(value: Tensor) -> Tensor:
    """1, and 0 for NaN."""
    return torch.eq(value, value).to(value)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
