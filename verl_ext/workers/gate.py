"""Which optimizer steps the training workers take, decided by all ranks together.

With several mini-batches a step, the later ones are off-policy: what the trainer saw before the update no longer holds.
The gate stands between verl's backward pass and its optimizer step. Every rank enters it once a mini-batch, so one
all-reduce over the engine's ranks lets all of them decide alike, and none waits for another in the optimizer.

Shape legend: B trajectories of a micro-batch, T response tokens (padded).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_ext.core.mismatch import LOG_RATIO_BOUND
from verl_ext.fields import FIRST_PASS
from verl_ext.settings.guard import MiniBatchGate
from verl_ext.upstream.patching import wrap
from verl_ext.workers.first_pass import FirstPass


class Gate:
    """Stands around a training worker's `train_mini_batch`, and its engine's `train_batch` and `optimizer_step`.

    Attributes:
        limits: what is refused beyond mini-batches without a token, whose gradients are 0 but whose step would still
            move the weights by momentum and weight decay.
        first_pass: in bypass mode, what judges the batch besides.
    """

    def __init__(self, worker: Any):
        self.engine = engine = worker.engine
        self.limits = MiniBatchGate()
        self.first_pass: FirstPass | None = None
        wrap("mini_batch_gate", worker, "train_mini_batch", self.train_mini_batch, "data")
        wrap("mini_batch_gate", engine, "train_batch", self.train_batch, "data, loss_function")
        wrap("mini_batch_gate", engine, "optimizer_step", self.optimizer_step, "")
        self._data: TensorDict | None = None  # of the mini-batch at work
        self._taken = True
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._metrics: dict[str, list[float]] = {}

    def train_mini_batch(self, verls: Callable, data: TensorDict) -> Any:
        """verl's, on one batch and all mini-batches of it."""
        asked = tu.pop(data, FIRST_PASS)
        if self.first_pass is not None:
            self.first_pass.begin_update(**asked)
        return verls(data)

    def train_batch(self, verls: Callable, data: TensorDict, loss_function: Callable) -> Any:
        """verl's, with gate/refused (0 or 1) and what it was decided by among the metrics, where limits are set; of the
        first in bypass mode, with what was measured."""
        self._data, self._taken, self._metrics = data, True, {}
        if self.first_pass is not None:
            self.first_pass.begin_mini_batch()
        self._sums = torch.zeros(3, dtype=torch.float64)
        try:
            outputs = verls(data, loss_function)
        finally:
            self._data = None
        if self.engine.is_mp_src_rank_with_outputs():
            outputs["metrics"].update(self._metrics)
            if not self._taken:  # a norm of 0 would be averaged in with those of real steps
                outputs["metrics"].pop("grad_norm", None)
        return outputs

    @torch.no_grad()
    def observe(self, l_theta: Tensor, l_old: Tensor, l_infer: Tensor, mask: Tensor) -> None:
        """Add a micro-batch: [B, T] log-probabilities, and the mask of the tokens that count."""
        mask = mask.bool()
        current = l_theta[mask].double()
        tokens = current.new_tensor(len(current))
        sums = torch.stack([tokens, _k3(current - l_old[mask]), _k3(current - l_infer[mask])])
        self._sums = self._sums.to(sums.device) + sums

    def optimizer_step(self, verls: Callable[[], float]) -> float:
        """verl's, which returns the gradient's norm; or none, and 0."""
        # verl counts the tokens of the mini-batch over all ranks, those that compute no loss included.
        if self._data is not None and tu.get_non_tensor_data(self._data, "batch_num_tokens", default=None) == 0:
            self._taken = False
            return 0.0
        if self._data is not None and self.limits.active:
            signals = self._agree()
            self._taken = not past(signals, asdict(self.limits))
            told = signals | {"refused": float(not self._taken)}
            self._metrics = {f"gate/{name}": [value] for name, value in told.items()}
        if self._data is not None and self.first_pass is not None:
            taken, measured = self.first_pass.judge(counts=self.engine.is_mp_src_rank_with_outputs())
            self._taken &= taken
            self._metrics |= {name: [value] for name, value in measured.items()}
        return verls() if self._taken else 0.0

    def _agree(self) -> dict[str, float]:
        """The mini-batch's signals, the same on every rank."""
        norm = 0.0 if self.limits.grad_norm is None else gradient_norm(self.engine)
        sums = torch.cat([self._sums.to(get_device_id()), self._sums.new_tensor([norm, 1.0]).to(get_device_id())])
        # Ranks that share a mini-batch (tensor, sequence parallelism) add it equally often, so means stay means.
        torch.distributed.all_reduce(sums)
        tokens, policy_kl, vllm_kl, norms, ranks = sums.tolist()
        signals = {"policy_kl": policy_kl / max(tokens, 1.0), "vllm_kl": vllm_kl / max(tokens, 1.0)}
        if self.first_pass is not None:  # l_old is l_infer
            del signals["policy_kl"]
        if self.limits.grad_norm is not None:
            signals["grad_norm"] = norms / ranks  # which differ in the last digit where groups of ranks reduce apart
        return signals


def past(signals: Mapping[str, float], limits: Mapping[str, float | None]) -> bool:
    """Whether a divergence is not finite, or a signal past its limit.

    A gradient that is not finite is left to the engine, which leaves such a step out itself, and under fp16 has to see
    it to lower the scale of the loss.
    """

    def bad(name: str, value: float) -> bool:
        limit = limits[name]
        if not math.isfinite(value):
            return name != "grad_norm"
        return limit is not None and value > limit

    return any(bad(name, value) for name, value in signals.items())


def gradient_norm(engine: Any) -> float:
    """Of all gradients of an FSDP2 engine, before clipping and without fp16's loss scale; the same on every rank."""
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    scaler = getattr(engine, "scaler", None)
    return norm.item() / (scaler.get_scale() if scaler is not None else 1.0)


def _k3(log_ratio: Tensor) -> Tensor:
    """Sum of r - log r - 1 over [n] log-ratios, clamped to +-20; NaN where one is not finite."""
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isfinite(), torch.expm1(x) - x, math.nan).sum()
