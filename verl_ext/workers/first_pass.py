"""Measures, weighs and judges a batch during its update, without extra passes.

In verl's bypass mode, and if log-probs are reused, compute_log_prob does not run: the training engine's
log-probabilities are first known in the forward pass of the update. In its first mini-batch they come from the weights
that compute_log_prob would have had. So that mini-batch is measured and judged for the whole batch, and every
micro-batch is weighed as it comes.

Shape legend: B trajectories of a micro-batch, T response tokens (padded).
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl_ext.core.answers import Servers
from verl_ext.core.loss_batch import LossBatch
from verl_ext.core.measure import Gathered, Measured, gather, merge, put_together
from verl_ext.core.mismatch import advantage_metrics, sums_by_sign
from verl_ext.core.routing import RouteCounts, router_metrics
from verl_ext.core.tokens import Tokens
from verl_ext.guard.guard import Limit

Corrections = Mapping[str, Mapping[str, Any]]
COUNTS = "first_pass/"  # prefix of the counts that are reported with the measurements
ROUTES = "first_pass_routes/"  # prefix of the counts of compared tokens
MEASURED = ("actor/vllm_kl/", "actor/correction/", "actor/router/")  # verl logs the workers' metrics under actor/


@dataclass(frozen=True)
class FirstPassSettings:
    """Settings of the first pass, the same for all updates.

    Attributes:
        corrections, narrowed: name -> settings; the same with IcePop's band narrowed.
        as_mask: the loss has the ratio already, so tokens that the corrections keep have weight 1.
        breakdown: measure by probability, entropy, position and turn too.
    """

    corrections: Corrections = field(default_factory=dict)
    narrowed: Corrections = field(default_factory=dict)
    as_mask: bool = True
    breakdown: bool = True


class FirstPass:
    """The measurements of one training worker in its first pass, and the decision about its steps.

    Attributes:
        measures: whether the batch at hand is measured here; compute_log_prob has come before one of several steps.
        refused: whether its first mini-batch has refused it.
    """

    def __init__(self, settings: FirstPassSettings):
        self._settings = settings
        self.begin_update(narrowed=False, limits=())

    def begin_update(self, narrowed: bool, limits: Iterable[Limit], servers: Iterable[str] = ()) -> None:
        """Begins a batch with the trainer's requests.

        Args:
            narrowed: use the narrow band.
            limits: no step is taken past any of them.
            servers: addresses of the rollout's servers, to measure by server too.
        """
        self._corrections = self._settings.narrowed if narrowed else self._settings.corrections
        self._limits, self._servers = tuple(limits), Servers(servers)
        self.measures = self._is_first = True
        self.refused = False
        self.begin_mini_batch()

    def begin_mini_batch(self) -> None:
        self._parts: list[Gathered] = []
        self._routers: list[Tensor] = []
        self._by_sign = torch.zeros(3, 3, dtype=torch.float64)

    def weigh(
        self,
        batch: LossBatch,
        entropy: Tensor | None = None,
        routers: Tensor | None = None,
        facts: Tensor | None = None,
    ) -> Tensor | None:
        """Returns the weights of a micro-batch by k = exp(l_theta - l_infer), or None without corrections.

        Args:
            batch: with l_infer; with a lag, the measurements are by lag too; with router_agreement, also of routing.
            entropy: l_theta's, [B, T] as the weights are; None where the update computes none.
            routers: [B, *], the trajectories' packed `RouterSums`; None where routers are not compared.
            facts: [B, 4], of `core.answers`; None where the agent loop writes none.
        """
        tokens = Tokens.from_padded(batch.require("l_infer"), batch.l_theta.detach(), batch.mask, entropy)
        if facts is not None:
            buckets = self._servers.buckets(facts)
            tokens = replace(tokens, buckets={axis: of_row.to(batch.mask.device) for axis, of_row in buckets.items()})
        if batch.lag is not None:
            tokens = replace(tokens, lag_bucket=batch.lag.reshape(-1).to(batch.mask.device))
        if batch.router_agreement is not None:
            tokens = replace(tokens, agreement=batch.router_agreement.reshape(-1))
        if routers is not None and self._is_first:
            self._routers.append(routers.cpu())
        breakdown = self._is_first and self._settings.breakdown
        if breakdown:
            self._by_sign += sums_by_sign(tokens, batch.advantages.reshape(-1))
        weight, part = gather(tokens, self._corrections, breakdown=breakdown, as_mask=self._settings.as_mask)
        self._parts.append(part)
        return None if weight is None else weight.view(batch.mask.shape)

    def judge(self, *, counts: bool = True) -> tuple[bool, dict[str, float]]:
        """Judges a mini-batch once all of it has been weighed. Returns whether its step may be taken, and its metrics.

        All ranks call it together and get the same result. The first mini-batch is reported, and decides for the
        others; a later one is refused if it has nothing to learn from, or a value that is not a number.

        Args:
            counts: false on ranks that hold the tokens of another rank.
        """
        own = merge(self._parts), self._routers, self._by_sign
        parts = gather_over_ranks(own if counts else (Gathered({}, 0), [], torch.zeros_like(self._by_sign)))
        measured = put_together([part for part, _, _ in parts], self._corrections)
        unusable = measured.kept == 0 or measured.non_finite > 0
        if not self._is_first:
            return not (self.refused or unusable), {}
        self._is_first = False
        metrics = measured.metrics | advantage_metrics(torch.stack([by_sign for _, _, by_sign in parts]).sum(0))
        counts_of_routes: dict[str, int] = {}
        if routers := [rows for _, of_rank, _ in parts for rows in of_rank]:
            metrics |= router_metrics(packed := torch.cat(routers))
            counts_of_routes = RouteCounts.from_sums(packed).numbers()
        self.refused = unusable or any(limit.is_past(metrics) for limit in self._limits)
        reported = {"tokens": measured.tokens, "kept": measured.kept, "non_finite": measured.non_finite}
        reported["refused"] = self.refused
        metrics |= {f"{COUNTS}{name}": float(n) for name, n in reported.items()}
        return not self.refused, metrics | {f"{ROUTES}{name}": float(n) for name, n in counts_of_routes.items()}


def take_measured(metrics: MutableMapping[str, float]) -> tuple[Measured, bool]:
    """Returns the first mini-batch's measurements, and whether the workers refused the batch because of them.

    Removes both from the metrics. Without an update, the measurements cover no token. If the update computed the
    policy's entropy, it is also logged under the name of compute_log_prob's entropy: verl computes the same mean.
    """
    found = {name.removeprefix("actor/"): float(metrics.pop(name)) for name in [*metrics] if name.startswith(MEASURED)}
    counts = f"actor/{COUNTS}"
    reported = {name.removeprefix(counts): int(metrics.pop(name)) for name in [*metrics] if name.startswith(counts)}
    refused = bool(reported.pop("refused", 0))
    if "actor/entropy_loss" in metrics:
        metrics["actor/entropy"] = metrics["actor/entropy_loss"]
    return Measured(None, found, **{"tokens": 0, "kept": 0, "non_finite": 0, **reported}), refused


def take_routes(metrics: MutableMapping[str, float]) -> RouteCounts | None:
    """Returns the counts of the tokens whose experts the update compared, and removes them from the metrics; None if
    it compared none."""
    start = f"actor/{ROUTES}"
    found = {name.removeprefix(start): int(metrics.pop(name)) for name in [*metrics] if name.startswith(start)}
    return RouteCounts.from_numbers(found) if found else None


def verls_gap(measured: Measured) -> dict[str, float]:
    """Returns verl's own metrics of the gap, which its trainer computes after compute_log_prob
    (`calculate_debug_metrics` of verl 0.9.1)."""
    if not measured.metrics:
        return {}
    gap = {name: measured.metrics[f"vllm_kl/prob_diff_{name}"] for name in ("max", "mean", "std")}
    counted = measured.tokens - measured.non_finite
    gap["std"] *= math.sqrt(counted / (counted - 1)) if counted > 1 else math.nan  # torch.std is the sample's
    return {f"training/rollout_probs_diff_{name}": value for name, value in gap.items()}


def gather_over_ranks(own: Any) -> list[Any]:
    """Returns the parts of all ranks, in their order: one object per rank, some kilobytes, gathered as verl's own
    metrics are; with compared routers, some kilobytes per trajectory."""
    if not torch.distributed.is_initialized():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found
