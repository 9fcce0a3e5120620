"""Controls the updates of the training workers: steps are judged before they are taken, an update is measured and
undone after it.

With several mini-batches a step, the later ones are off-policy: what the trainer saw before the update no longer holds.
The gate stands between verl's backward pass and its optimizer step. Every rank enters it once a mini-batch, so one
all-reduce over the engine's ranks lets all of them decide alike, and none waits for another in the optimizer.

Shape legend: B trajectories of a batch or micro-batch, T response tokens (padded).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from verl_ext.base.names import FIRST_PASS, OLD_LOG_PROBS, RESPONSE_MASK, ROLLOUT_LOG_PROBS, UPDATE
from verl_ext.base.patching import wrap
from verl_ext.core.mismatch import k3_of
from verl_ext.features.guard import MiniBatchGate
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.undo import KeptUpdate, megatron_optimizers

AFTER_UPDATE = "after_update"  # begins the names of what is measured then
# One trajectory a forward pass: so few need not fit the run's micro-batches.
ONE_A_PASS = {
    "calculate_entropy": False,
    "compute_loss": False,
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 1,
}


class Gate:
    """Stands around a training worker's `train_mini_batch`, and its engine's `train_batch` and `optimizer_step`.

    Attributes:
        limits: what is refused beyond mini-batches without a token, whose gradients are 0 but whose step would still
            move the weights by momentum and weight decay.
        first_pass: in bypass mode, what judges the batch besides.
        undo: keeps what the first optimizer step of an update changes, where a rule may take that back.
        after_update: trajectories of a batch that are scored again after its update.
    """

    def __init__(self, worker: Any):
        self.worker, self.engine = worker, (engine := worker.engine)
        self.limits = MiniBatchGate()
        self.first_pass: FirstPass | None = None
        self.undo: KeptUpdate | None = None
        self.after_update = 0
        self.begin_update(step=0, lr_scale=1.0)
        wrap("mini_batch_gate", worker, "train_mini_batch", self.train_mini_batch, "data")
        wrap("mini_batch_gate", engine, "train_batch", self.train_batch, "data, loss_function")
        wrap("mini_batch_gate", engine, "optimizer_step", self.optimizer_step, "")
        self._data: TensorDict | None = None  # of the mini-batch at work
        self._taken = True
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._metrics: dict[str, list[float]] = {}

    def begin_update(self, step: int, lr_scale: float) -> None:
        """Begin a batch, with what the trainer asks of it.

        Args:
            step: the run's; of its updates, the first begins what an undo takes back.
            lr_scale: what the schedule's learning rate is multiplied by.
        """
        self._step, self._lr_scale = step, lr_scale

    def train_mini_batch(self, verls: Callable, data: TensorDict) -> Any:
        """verl's, on one batch and all mini-batches of it."""
        if (update := tu.pop(data, UPDATE)) is not None:
            self.begin_update(**update)
        asked = tu.pop(data, FIRST_PASS)
        if self.first_pass is not None:
            self.first_pass.begin_update(**asked)
        outputs = verls(data)
        if self.after_update:
            metrics = score_again(self.worker, data, self.after_update)
            if outputs is not None:
                tu.get(outputs, "metrics").update({name: [value] for name, value in metrics.items()})
        return outputs

    def train_batch(self, verls: Callable, data: TensorDict, loss_function: Callable) -> Any:
        """verl's, with gate/refused (0 or 1) and what it was decided by among the metrics, where limits are set; of the
        first in bypass mode, with what was measured."""
        self._data, self._taken, self._metrics = data, True, {}
        if self.first_pass is not None:
            self.first_pass.begin_mini_batch()
        if self.undo is not None:
            self.undo.begin(self._step)
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
        sums = torch.stack([tokens, k3_of(current - l_old[mask]).sum(), k3_of(current - l_infer[mask]).sum()])
        self._sums = self._sums.to(sums.device) + sums

    def optimizer_step(self, verls: Callable[[], float]) -> float:
        """verl's, which returns the gradient's norm; or none, and 0."""
        # verl counts the tokens of the mini-batch over all ranks, those that compute no loss included.
        if self._data is not None and tu.get_non_tensor_data(self._data, "batch_num_tokens", default=None) == 0:
            self._taken = False
            return 0.0
        if self._data is not None and self.limits.active:
            signals = self._agree()
            self._taken = not breaks_limits(signals, asdict(self.limits))
            told = signals | {"refused": float(not self._taken)}
            self._metrics = {f"gate/{name}": [value] for name, value in told.items()}
        if self._data is not None and self.first_pass is not None:
            taken, measured = self.first_pass.judge(counts=self.engine.is_mp_src_rank_with_outputs())
            self._taken &= taken
            self._metrics |= {name: [value] for name, value in measured.items()}
        if not self._taken:
            return 0.0
        if self.undo is not None and self.undo.of != self._step:
            # Before a step that its engine leaves out as well: an undo for its NaN is not of the update before.
            self.undo.keep(self._step)
        if self.engine.engine_config.strategy == "megatron" and not finite_gradients(self.engine):
            return math.nan
        with scaled_lr(self.engine.optimizer, self._lr_scale):
            return verls()

    def take_back(self, after: int) -> int | None:
        """See `KeptUpdate.take_back`; nothing where nothing is kept."""
        return self.undo.take_back(after) if self.undo is not None else None

    def _agree(self) -> dict[str, float]:
        """The mini-batch's signals, the same on every rank."""
        norm = 0.0 if self.limits.grad_norm is None else gradient_norm(self.engine)
        # Ranks that share a mini-batch (tensor, sequence parallelism) add it equally often, so means stay means.
        sums = sum_over_ranks(torch.cat([self._sums, self._sums.new_tensor([norm, 1.0])]))
        tokens, policy_kl, vllm_kl, norms, ranks = sums.tolist()
        signals = {"policy_kl": policy_kl / max(tokens, 1.0), "vllm_kl": vllm_kl / max(tokens, 1.0)}
        if self.first_pass is not None:  # l_old is l_infer
            del signals["policy_kl"]
        if self.limits.grad_norm is not None:
            signals["grad_norm"] = norms / ranks  # which differ in the last digit where groups of ranks reduce apart
        return signals


def score_again(worker: Any, data: TensorDict, count: int) -> dict[str, float]:
    """`after_update/*` of the first trajectories of each rank; all ranks enter together, and are told the same.

    What verl logs of a step is measured before its last optimizer step; of one update a step, nothing is measured after
    it. How far has it moved the policy, and the engines apart? Accepting or rejecting each update by the policy that it
    makes is MIPU's idea (arXiv 2606.29526).

    Args:
        worker: verl's training worker, its update done.
        data: what it was sent, [B] jagged or padded; with l_old where compute_log_prob came first.
        count: of trajectories of a batch, which the ranks share.
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
    """Micro-batches that an interleaved pipeline takes at a time: verl's Megatron engine asserts a multiple of them."""
    interleaved = engine.engine_config.strategy == "megatron" and len(engine.module) > 1
    return engine.tf_config.microbatch_group_size_per_vp_stage if interleaved else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sums over all ranks; `values` in a process alone, such as the lab's."""
    if torch.distributed.is_initialized():
        values = values.to(get_device_id())
        torch.distributed.all_reduce(values)
    return values


@contextmanager
def scaled_lr(optimizer: Any, scale: float) -> Iterator[None]:
    """The schedule's learning rates times `scale`, for one step: the schedule itself stays as it is."""
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

    A gradient that is not finite is left to FSDP's engine, which leaves such a step out itself, and under fp16 has to
    see it to lower the scale of the loss; for Megatron's see `finite_gradients`.
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

    megatron-core 0.16.1 looks for itself only under fp16 (`MixedPrecisionOptimizer.prepare_grads`), and verl 0.9.1 then
    raises. In bfloat16 one NaN goes through the norm that it clips by into every weight and both moments of Adam.
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
def gradient_norm(engine: Any) -> float:
    """The norm of an engine's gradients before clipping, without fp16's loss scale; the same on every rank.

    FSDP2's and Megatron's, as the optimizer's step computes it next.
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
    """megatron-core's own, of the gradients as they come from the backward pass.

    `prepare_grads` (0.16.1) copies them to where the optimizer reads them, and under fp16 then divides them, in place
    where they are float32, by the loss scale, which it moves. The step does that: here they are copied alone, which
    changes nothing that the step's own copy does not write again.
    """
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    for optimizer in megatron_optimizers(engine):
        if optimizer.is_stub_optimizer:  # this rank has nothing of it to train
            continue
        if isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer._copy_model_grads_to_main_grads()
        else:
            optimizer.prepare_grads()  # FP32Optimizer's only copies
    return float(engine.optimizer.get_grad_norm()) / float(engine.optimizer.get_loss_scale())
