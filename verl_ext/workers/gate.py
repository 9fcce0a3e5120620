"""Controls the updates of the training workers: judges each step before it is taken, and can measure or undo an update.

With several mini-batches per step, the later ones are off-policy: the trainer's measurements from before the update no
longer hold. The gate is between verl's backward pass and its optimizer step. Every rank enters it once per mini-batch,
so all-reduces over the engine's ranks make all of them decide alike, and none waits for another in the optimizer.

Shape legend: B trajectories of a batch or micro-batch, T response tokens (padded).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from verl_ext.base.names import (
    ADVANTAGES,
    COMPARES,
    FIRST_PASS,
    OLD_LOG_PROBS,
    ONE_A_PASS,
    RESPONSE_MASK,
    ROLLOUT_LOG_PROBS,
    UPDATE,
)
from verl_ext.base.patching import wrap
from verl_ext.core.loss_batch import LossBatch
from verl_ext.core.mismatch import k3_of
from verl_ext.features.settings import MiniBatchLimits
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.undo import KeptUpdate, megatron_optimizers

AFTER_UPDATE = "after_update"  # prefix of the metrics that are measured after an update


class Gate:
    """Wraps a training worker's `train_mini_batch`, and its engine's `train_batch`, `optimizer_step` and
    `lr_scheduler_step`.

    Attributes:
        limits: the bounds for refusing a mini-batch. A mini-batch without a token, or whose loss drops all of them, is
            always refused: its gradients are 0, but its step would still move the weights by momentum and weight decay.
        first_pass: also judges a batch that compute_log_prob has not seen.
        undo: keeps what the first optimizer step of an update changes, if a rule may take it back.
        after_update: number of trajectories of a batch that are scored again after its update.
    """

    def __init__(self, worker: Any):
        self.worker, self.engine = worker, (engine := worker.engine)
        self.limits = MiniBatchLimits()
        self.first_pass: FirstPass | None = None
        self.undo: KeptUpdate | None = None
        self.after_update = 0
        self.begin_update(step=0, lr_scale=1.0)
        wrap("mini_batch_gate", worker, "train_mini_batch", self.train_mini_batch, "data")
        wrap("mini_batch_gate", engine, "train_batch", self.train_batch, "data, loss_function")
        wrap("mini_batch_gate", engine, "optimizer_step", self.optimizer_step, "")
        wrap("mini_batch_gate", engine, "lr_scheduler_step", self.lr_scheduler_step, "")
        self._data: TensorDict | None = None  # of the current mini-batch
        self._taken, self._compares = True, False
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._metrics: dict[str, list[float]] = {}

    @property
    def _measuring(self) -> FirstPass | None:
        """The measurements of the batch at hand, if it is measured in its update."""
        return self.first_pass if self.first_pass is not None and self.first_pass.measures else None

    def begin_update(self, step: int, lr_scale: float, has_l_old: bool = False) -> None:
        """Begins a batch with the trainer's requests.

        Args:
            step: the run's step; an undo takes back everything from its first update on.
            lr_scale: factor on the schedule's learning rate.
            has_l_old: compute_log_prob had the weights with which the update begins.
        """
        self._step, self._lr_scale, self._has_l_old = step, lr_scale, has_l_old

    def train_mini_batch(self, verls: Callable, data: TensorDict) -> Any:
        """Wraps verl's method, which trains on all mini-batches of one batch."""
        if (update := tu.pop(data, UPDATE)) is not None:
            self.begin_update(**update)
        asked = tu.pop(data, FIRST_PASS)
        if self.first_pass is not None:
            if asked is None:
                self.first_pass.measures = False
            else:
                self.first_pass.begin_update(**asked)
                data[COMPARES] = NonTensorData(True)
        outputs = verls(data)
        if self.after_update:
            metrics = score_again(self.worker, data, self.after_update)
            if outputs is not None:
                tu.get(outputs, "metrics").update({name: [value] for name, value in metrics.items()})
        return outputs

    def train_batch(self, verls: Callable, data: TensorDict, loss_function: Callable) -> Any:
        """Wraps verl's method. Adds gate/refused to the metrics, 1 for a mini-batch that is refused. If limits are set,
        adds the signals that they bound; without compute_log_prob, the first mini-batch's measurements; with it, the
        self-gap of the first mini-batch: k3 of l_old against l_theta, which the same weights computed twice."""
        self._data, self._taken, self._metrics = data, True, {}
        biases = [(bias, bias.clone()) for bias in moving_biases(self.engine)]
        if (measuring := self._measuring) is not None:
            measuring.begin_mini_batch()
        if self.undo is not None:
            self.undo.begin(self._step)
        self._compares, self._has_l_old = self._has_l_old, False  # later mini-batches have other weights
        self._sums = torch.zeros(3, dtype=torch.float64)
        try:
            outputs = verls(data, loss_function)
        finally:
            self._data = None
        if not self._taken:
            for bias, before in biases:
                bias.copy_(before)
        if self.engine.is_mp_src_rank_with_outputs():
            outputs["metrics"].update(self._metrics)
            outputs["metrics"]["gate/refused"] = [float(not self._taken)]
            if not self._taken:  # a norm of 0 would be averaged with those of real steps
                outputs["metrics"].pop("grad_norm", None)
        return outputs

    @torch.no_grad()
    def observe(self, batch: LossBatch) -> None:
        """Adds a micro-batch, if its sums are used; limits need its l_infer."""
        if not (self.limits.active or self._compares):
            return
        l_theta = batch.l_theta[batch.mask].double()
        others = (batch.l_old, batch.require("l_infer") if self.limits.active else batch.l_old)
        moved, apart = (k3_of(l_theta - other[batch.mask]).sum() for other in others)
        sums = torch.stack([l_theta.new_tensor(len(l_theta)), moved, apart])
        self._sums = self._sums.to(sums.device) + sums

    def optimizer_step(self, verls: Callable[[], float]) -> float:
        """Takes verl's step, which returns the gradient's norm; or takes no step and returns 0."""
        # verl counts the tokens of the mini-batch over all ranks, including ranks that compute no loss.
        if self._data is not None and tu.get_non_tensor_data(self._data, "batch_num_tokens", default=None) == 0:
            self._taken = False
            return 0.0
        if self._data is not None and (self.limits.active or self._compares):
            signals = self._agree()
            if self._compares:
                self._metrics["self_gap"] = [signals["policy_kl"]]
            if self.limits.active:
                self._taken = not breaks_limits(signals, asdict(self.limits))
                self._metrics |= {f"gate/{name}": [value] for name, value in signals.items()}
        if self._data is not None and (measuring := self._measuring) is not None:
            taken, measured = measuring.judge(counts=self.engine.is_mp_src_rank_with_outputs())
            self._taken &= taken
            self._metrics |= {name: [value] for name, value in measured.items()}
        if self._data is not None and self._taken:
            self._taken = not self._dropped_all(self._data)
        if not self._taken:
            return 0.0
        if self.undo is not None and self.undo.of != self._step:
            # Also before a step that the engine skips: an undo for its NaN must not take back the update before.
            self.undo.keep(self._step)
        if self.engine.engine_config.strategy == "megatron" and not finite_gradients(self.engine):
            return math.nan
        with scaled_lr(self.engine.optimizer, self._lr_scale):
            return verls()

    def lr_scheduler_step(self, verls: Callable[[], float]) -> float:
        """Wraps verl's method, which returns the learning rate. A batch that is refused in its update leaves the
        schedule alone, as one that is refused before it does."""
        if self._measuring is not None and self._measuring.refused:
            return self.engine.optimizer.param_groups[0]["lr"]
        return verls()

    def take_back(self, after: int) -> int | None:
        """Calls `KeptUpdate.take_back`; does nothing if nothing is kept."""
        return self.undo.take_back(after) if self.undo is not None else None

    def _dropped_all(self, data: TensorDict) -> bool:
        """Returns True if tokens have advantages but the gradient is 0; all ranks get the same result.

        This happens if a correction or a policy loss drops every token in the update, and no other term of the loss,
        such as a KL, has a gradient. If all advantages are 0, verl's step is taken, as without the gate.
        """
        advantages, mask = (one.values() if one.is_nested else one for one in (data[ADVANTAGES], data[RESPONSE_MASK]))
        gradients = local_gradients(self.engine)
        # The largest entry, because squares of small ones would underflow to 0.
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)) if gradients else torch.zeros(0)
        own = (advantages[mask.bool()].any(), largest.ne(0).any(), len(gradients) > 0)
        learns, moves, seen = sum_over_ranks(torch.tensor([float(one) for one in own])).tolist()
        return learns > 0 and seen > 0 and moves == 0

    def _agree(self) -> dict[str, float]:
        """Returns the mini-batch's signals, the same on every rank."""
        norm = 0.0 if self.limits.grad_norm is None else gradient_norm(self.engine)
        # Ranks that share a mini-batch (tensor, sequence parallelism) add it equally often, so means stay means.
        sums = sum_over_ranks(torch.cat([self._sums, self._sums.new_tensor([norm, 1.0])]))
        tokens, policy_kl, vllm_kl, norms, ranks = sums.tolist()
        signals = {"policy_kl": policy_kl / max(tokens, 1.0), "vllm_kl": vllm_kl / max(tokens, 1.0)}
        if self._measuring is not None:  # l_old is l_infer, or l_theta itself
            del signals["policy_kl"]
        if self.limits.grad_norm is not None:
            signals["grad_norm"] = norms / ranks  # norms differ in the last digit if groups of ranks reduce separately
        return signals


def moving_biases(engine: Any) -> list[Tensor]:
    """Returns the routers' biases that megatron-core moves where a backward pass ends, before any optimizer step
    (`finalize_model_grads`, with `moe_router_bias_update_rate`)."""
    if engine.engine_config.strategy != "megatron":
        return []
    buffers = (named for chunk in engine.module for named in chunk.named_buffers())
    return [buffer for name, buffer in buffers if name.endswith("router.expert_bias")]


def score_again(worker: Any, data: TensorDict, count: int) -> dict[str, float]:
    """Returns `after_update/*` of the first trajectories of each rank; all ranks call it together and get the same
    result.

    verl's metrics of a step are measured before its last optimizer step; with one update per step, nothing is measured
    after it. This measures how far the update has moved the policy, and the gap after it. Accepting or rejecting each
    update by the policy that it makes is MIPU's idea (arXiv 2606.29526).

    Args:
        worker: verl's training worker, after its update.
        data: the data of its update, [B] jagged or padded.
        count: the number of trajectories of a batch, which the ranks share.
    """
    engine = worker.engine
    each = -(-count // engine.get_data_parallel_size())
    group = _passes_together(engine)
    each = min(-(-each // group), len(data) // group) * group
    rows = tu.index_select_tensor_dict(data, list(range(each)))
    tu.assign_non_tensor(rows, **ONE_A_PASS)
    output = worker.infer_batch(rows)
    sums = torch.zeros(3, dtype=torch.float64)
    if engine.is_mp_src_rank_with_outputs():
        before = rows.select(RESPONSE_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS).to_padded_tensor().cpu()
        l_new, mask = no_padding_2_padding(output["log_probs"], rows).cpu().double(), before[RESPONSE_MASK].bool()
        moved, apart = (k3_of((l_new - before[name])[mask]).sum() for name in (OLD_LOG_PROBS, ROLLOUT_LOG_PROBS))
        sums = torch.stack([mask.sum(), moved, apart])
    tokens, moved, apart = sum_over_ranks(sums).tolist()
    return {f"{AFTER_UPDATE}/policy_kl": moved / max(tokens, 1.0), f"{AFTER_UPDATE}/vllm_kl": apart / max(tokens, 1.0)}


def _passes_together(engine: Any) -> int:
    """Returns how many micro-batches an interleaved pipeline takes at a time: verl's Megatron engine asserts a
    multiple."""
    interleaved = engine.engine_config.strategy == "megatron" and len(engine.module) > 1
    return engine.tf_config.microbatch_group_size_per_vp_stage if interleaved else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the sums over all ranks; `values` itself in a single process, such as the lab's."""
    if torch.distributed.is_initialized():
        values = values.to(get_device_id())
        torch.distributed.all_reduce(values)
    return values


@contextmanager
def scaled_lr(optimizer: Any, scale: float) -> Iterator[None]:
    """Context that multiplies the schedule's learning rates by `scale`, for one step: the schedule itself does not
    change."""
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, rate in rates:
        group["lr"] = rate * scale
    try:
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate


def breaks_limits(signals: Mapping[str, float], limits: Mapping[str, float | None]) -> bool:
    """Returns True if a divergence is not finite, or a signal past its limit.

    A gradient that is not finite is left to FSDP's engine, which skips such a step itself, and under fp16 has to see it
    to lower the scale of the loss. For Megatron see `finite_gradients`.
    """

    def bad(name: str, value: float) -> bool:
        limit = limits[name]
        if not math.isfinite(value):
            return name != "grad_norm"
        return limit is not None and value > limit

    return any(bad(name, value) for name, value in signals.items())


@torch.no_grad()
def finite_gradients(engine: Any) -> bool:
    """Returns True if the gradient of a Megatron engine is finite on all of its ranks; if not, fp16's loss scale is
    lowered.

    megatron-core 0.16.1 checks by itself only under fp16 (`MixedPrecisionOptimizer.prepare_grads`), and verl 0.9.1 then
    raises. In bfloat16 one NaN spreads through the clipping norm into every weight and both moments of Adam.
    """
    parameters = [parameter for chunk in engine.module for parameter in chunk.parameters()]
    gradients = [parameter.main_grad for parameter in parameters if getattr(parameter, "main_grad", None) is not None]
    norms = torch._foreach_norm(gradients) if gradients else []  # a rank may have nothing to train
    bad = torch.stack(norms).isfinite().logical_not().any().float() if norms else torch.zeros(())
    bad = sum_over_ranks(bad)
    if bad:
        for optimizer in megatron_optimizers(engine):
            if (scaler := getattr(optimizer, "grad_scaler", None)) is not None:
                scaler.update(True)
    return not bad


@torch.no_grad()
def local_gradients(engine: Any) -> list[Tensor]:
    """Returns this rank's parts of an engine's gradients, for FSDP, FSDP2, VeOmni and Megatron; none of Megatron FSDP,
    which holds them elsewhere."""
    if getattr(engine.engine_config, "use_megatron_fsdp", False):
        return []
    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [getattr(parameter, "main_grad", parameter.grad) for parameter in parameters]
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in gradients if one is not None]
    return [part for part in parts if part.numel()]


@torch.no_grad()
def gradient_norm(engine: Any) -> float:
    """Returns the norm of an engine's gradients before clipping, without fp16's loss scale; the same on every rank.

    It is the norm that the optimizer's step computes next, for FSDP2, VeOmni and Megatron.
    """
    if engine.engine_config.strategy == "megatron":
        return _megatron_norm(engine)
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    scaler = getattr(engine, "scaler", None)
    return norm.item() / (scaler.get_scale() if scaler is not None else 1.0)


def _megatron_norm(engine: Any) -> float:
    """Returns megatron-core's own norm, of the gradients as they come from the backward pass.

    `prepare_grads` (0.16.1) copies them to where the optimizer reads them. Under fp16 it then divides them by the loss
    scale, in place if they are float32, and moves the scale. The step does that: here they are only copied, and the
    step's own copy overwrites this one.
    """
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    for optimizer in megatron_optimizers(engine):
        if optimizer.is_stub_optimizer:  # this rank has no part of it to train
            continue
        if isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer._copy_model_grads_to_main_grads()
        else:
            optimizer.prepare_grads()  # FP32Optimizer's only copies
    return float(engine.optimizer.get_grad_norm()) / float(engine.optimizer.get_loss_scale())
