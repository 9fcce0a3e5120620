"""The lab's training workers: a policy, what it says about sampled tokens, and its updates, mini-batch by mini-batch.

A rollout and the training engine's reading of it are put into the forms that the plugin's step and verl's loss take.

Shape legend: B trajectories, T columns of padded responses, N response tokens of all of them, P tokens of a prompt,
L layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer

from verl_ext.base.names import (
    ADVANTAGES,
    DEVIATION,
    ENTROPY,
    FILTER_SCALE,
    OLD_LOG_PROBS,
    RESPONSE_MASK,
    RESPONSES,
    ROLLOUT_LOG_PROBS,
)
from verl_ext.core.head import Head, Reading, centering, divergence, head_metrics, head_sums, read, weights_of
from verl_ext.core.losses import router_deviation
from verl_ext.core.mismatch import k3_sum
from verl_ext.core.overlap import expert_overlap
from verl_ext.core.routing import agreement
from verl_ext.core.tokens import Lag, Tokens, jagged
from verl_ext.features.losses import LOSSES
from verl_ext.features.stability import StabilityConfig
from verl_ext.features.table import loss_settings, read_features
from verl_ext.features.verl_config import replay_mode
from verl_ext.lab.model import ModelSettings, Routing, Samples, Weights, forward
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.gate import AFTER_UPDATE, Undo, scaled_lr
from verl_ext.workers.head import CENTERING, HeadUse
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

CHECKPOINT = "model.pt"


@dataclass(frozen=True)
class LabBatch:
    """The trajectories of a step.

    Attributes:
        prompts: [B, P].
        sampled: what the rollout returned.
        rewards: [B].
        keys: verl's ids of trajectories, `{uid}_{session}_{index}`.
        lag: how old the weights are that sampled them, where the rollout says so.
    """

    prompts: Tensor
    sampled: Samples
    rewards: Tensor
    keys: Sequence[str]
    lag: Lag | None = None

    @property
    def uids(self) -> list[str]:
        return [key.split("_")[0] for key in self.keys]

    @property
    def offsets(self) -> Tensor:
        """[B + 1], where the response of each starts among the N."""
        lengths = self.sampled.mask.sum(1)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def packed(self, values: Tensor) -> Tensor:
        """[N, ...] of [B, T, ...]."""
        return values[self.sampled.mask]

    def padded(self, values: Tensor) -> Tensor:
        """[B, T] of [N], 0 past the end."""
        return values.new_zeros(self.sampled.mask.shape).masked_scatter(self.sampled.mask, values)

    def token_rewards(self) -> Tensor:
        """[B, T], each reward on the response's last token, where verl's rewards stand."""
        last = self.sampled.mask.sum(1, keepdim=True) - 1
        return torch.zeros(self.sampled.mask.shape).scatter(1, last, self.rewards.unsqueeze(1))

    def tokens(self, scored: Scores, agreement_N: Tensor | None) -> Tokens:
        """The response tokens as the plugin measures, weighs and filters them."""
        return Tokens(
            l_infer=self.packed(self.sampled.l_infer),
            l_old=self.packed(scored.log_probs.detach()),
            mask=torch.ones(int(self.sampled.mask.sum()), dtype=torch.bool),
            offsets=self.offsets,
            entropy=self.packed(scored.entropy),
            agreement=agreement_N,
            lag=self.lag,
        )


@dataclass(frozen=True)
class Scores:
    """The training engine's reading of a rollout.

    Attributes:
        log_probs: [B, T], with gradient where one was asked for.
        entropy: [B, T] in nats, without.
        reading: of the sampler's head, at all B T places; None where there is none.
        routing: of each token's forward pass, the one that predicted response token t at P - 1 + t.
    """

    log_probs: Tensor
    entropy: Tensor
    routing: Routing
    reading: Reading | None = None


@dataclass(frozen=True)
class LossFields:
    """The fields of a batch that the loss reads besides its tokens: [B, T] each.

    Attributes:
        mask: bool, the tokens that filters left.
        others: by name of verl_ext.base.names; what a loss asks for and no one else.
        filter_scale: see verl_ext.base.names.
    """

    l_old: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    filter_scale: float = 1.0


class Learner:
    """A policy and the loss that the workers of such a run would have.

    Args:
        knows_kept: whether the training engine knows which tokens truncated sampling kept.

    Attributes:
        policy: what is trained.
        use: what is made of the sampler's heads; None where the rollout need not return them.
    """

    def __init__(
        self,
        config: DictConfig,
        stability: StabilityConfig,
        model: ModelSettings,
        weights: Mapping[str, Tensor],
        knows_kept: bool = False,
    ):
        self._actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self._mini_batch = self._actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        settings = LossSettings.from_dict(loss_settings(read_features(config, stability)))
        self._rescored_after, self._undoes = settings.after_update, settings.undo
        self.use = replace(settings.head or HeadUse(), truncated=True) if knows_kept else settings.head
        self._first_pass = FirstPass(settings.first_pass) if settings.first_pass is not None else None
        self._loss, active = build_worker_loss(self._actor, settings, first_pass=self._first_pass)
        ours = LOSSES.get(active["policy_loss"]["loss_mode"])
        self._reads_deviation = ours is not None and "router_deviation" in ours.reads
        self._replay_mode = replay_mode(config)
        self._model = model
        self._reference = {name: value.detach().clone() for name, value in weights.items()}
        self.policy = Policy(weights, self._actor.optim)

    def score_old(self, batch: LabBatch, rows: slice = slice(None)) -> Scores:
        """The scores of compute_log_prob, under the weights of now.

        They have a gradient, because a first update on the whole batch starts from them.
        """
        return self._score(batch, rows, batch.sampled.experts[rows] if self._replay_mode == "R3" else None)

    def score_reference(self, batch: LabBatch) -> Tensor:
        """[B, T] log-probabilities under the weights that training began with."""
        with torch.no_grad():
            return score(self._reference, self._model, batch.prompts, batch.sampled.responses).log_probs

    def update(
        self, batch: LabBatch, old: Scores, fields: LossFields, *, step: int, lr_scale: float, asked: Mapping[str, Any]
    ) -> dict[str, float]:
        """All updates of a step; means over them of what the loss and the optimizer tell, and what is seen after them.

        Args:
            step, lr_scale: as of `verl_ext.workers.gate.Gate.begin_update`.
            asked: in bypass mode, of `FirstPass.begin_update`.
        """
        collected: dict[str, list[float]] = {}
        if self._first_pass is not None:
            self._first_pass.begin_update(**asked)
        for number, rows in enumerate(self._mini_batches(len(batch.keys))):
            if not fields.mask[rows].any():  # as verl_ext.workers.gate: no step on nothing
                continue
            whole = number == 0 and self._mini_batch >= len(batch.keys)
            current = old if whole else self._score_now(batch, old, rows)
            data = mini_batch(batch, fields, rows)
            if self._reads_deviation:
                data[DEVIATION] = self._deviation(old, current, batch, rows)
            loss, metrics = self._loss(self._model_output(batch, current, rows), data)
            if self._judge(metrics):
                if self._undoes and self.policy.undo.of != step:  # as verl_ext.workers.gate
                    self.policy.undo.keep(step)
                metrics["actor/grad_norm"] = self.policy.update(loss, lr_scale)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(_as_float(value))
        found = {name: sum(values) / len(values) for name, values in collected.items()}
        return found | (self._score_again(batch, fields) if self._rescored_after else {})

    def _score_again(self, batch: LabBatch, fields: LossFields) -> dict[str, float]:
        """Means of k3 after the last update, as `verl_ext.workers.gate.score_again` measures them."""
        rows = slice(self._rescored_after)
        mask = fields.mask[rows]
        with torch.no_grad():
            l_new = self.score_old(batch, rows).log_probs
        before = {"policy_kl": fields.l_old, "vllm_kl": batch.sampled.l_infer}
        tokens = max(int(mask.sum()), 1)
        return {
            f"actor/{AFTER_UPDATE}/{name}": float(k3_sum((l_new.double() - log_probs[rows])[mask])) / tokens
            for name, log_probs in before.items()
        }

    def _judge(self, metrics: dict[str, Any]) -> bool:
        """Whether a mini-batch's step may be taken; in bypass mode it is measured, as in verl_ext.workers.gate."""
        if self._first_pass is None:
            return True
        taken, measured = self._first_pass.judge()
        self._first_pass.begin_mini_batch()
        metrics.update({f"actor/{name}": value for name, value in measured.items()})
        return taken

    def _mini_batches(self, rows: int) -> Iterator[slice]:
        for _ in range(self._actor.ppo_epochs):
            for start in range(0, rows, self._mini_batch):
                yield slice(start, min(start + self._mini_batch, rows))

    def _score_now(self, batch: LabBatch, old: Scores, rows: slice) -> Scores:
        replayed = {"R2": old.routing.stacked(), "R3": batch.sampled.experts}.get(self._replay_mode)
        return self._score(batch, rows, None if replayed is None else replayed[rows])

    def _score(self, batch: LabBatch, rows: slice, replayed: Tensor | None) -> Scores:
        prompts, responses = batch.prompts[rows], batch.sampled.responses[rows]
        truncated = self.use is not None and self.use.truncated
        return score(
            self.policy.weights, self._model, prompts, responses, replayed, batch.sampled.head_of(rows), truncated
        )

    def _model_output(self, batch: LabBatch, current: Scores, rows: slice) -> dict[str, Tensor]:
        """The engine's output as the workers' HeadReader completes it."""
        terms = {}
        head = batch.sampled.head_of(rows)
        if self.use is not None and self.use.centers and current.reading is not None and head is not None:
            weight_of = weights_of(self.use.corrections)
            term = centering(current.reading, head, weight_of, truncated=self.use.truncated)
            terms[CENTERING] = term.view_as(current.log_probs)
        return model_output(current.log_probs, **terms)

    def head_metrics(self, batch: LabBatch, scored: Scores) -> dict[str, float]:
        """`vllm_kl/head*`; none where the rollout returns no heads."""
        head = batch.sampled.head
        if self.use is None or head is None or scored.reading is None:
            return {}
        apart = divergence(scored.reading, head, truncated=self.use.truncated)
        mask = batch.sampled.mask.flatten()
        places = torch.arange(0, len(mask) + 1, batch.sampled.mask.shape[1])
        return head_metrics(head_sums(apart, head.known, mask, places))

    def _deviation(self, old: Scores, current: Scores, batch: LabBatch, rows: slice) -> Tensor:
        """[B, T], mean over layers of how far the router has moved on the experts that it chose (RSPO)."""
        first = batch.prompts.shape[1] - 1  # the pass that predicts the first response token
        by_layer = []
        layers = zip(old.routing.experts, old.routing.logits, current.routing.logits, strict=True)
        for experts, before, now in layers:
            chosen = experts[rows, first:].flatten(0, 1)
            was, now_is = (x.log_softmax(-1).flatten(0, 1) for x in (before[rows, first:], now[:, first:]))
            by_layer.append(router_deviation(was.gather(-1, chosen), now_is.gather(-1, chosen)))
        return torch.stack(by_layer).mean(0).view_as(current.log_probs)


class Policy:
    """Weights with verl's optimizer and schedule.

    Attributes:
        weights: that require gradients.
    """

    def __init__(self, weights: Weights, settings: FSDPOptimizerConfig):
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        self._clip = settings.clip_grad
        self.optimizer = build_optimizer(list(self.weights.values()), settings)
        self._schedule = get_constant_schedule_with_warmup(self.optimizer, max(settings.lr_warmup_steps, 0))
        self.undo = Undo(lambda: self.weights, self.optimizer, self._schedule)

    def update(self, loss: Tensor, lr_scale: float = 1.0) -> float:
        """One step; the gradient's norm before it is clipped. As in verl's engines, one that is not finite changes
        nothing.

        Args:
            lr_scale: what the schedule's learning rate is multiplied by.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self._clip)
        if norm.isfinite():
            with scaled_lr(self.optimizer, lr_scale):
                self.optimizer.step()
        return norm.item()

    def take_back(self, after: int) -> list[int | None]:
        """The answer of each worker of a run to an undo; there is one here."""
        return [self.undo.take_back(after)]

    def end_step(self) -> float:
        """The learning rate of this step's updates; the schedule moves on, once a step, as verl's does."""
        rate = self.optimizer.param_groups[0]["lr"]
        self._schedule.step()
        return rate

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach() for name, value in self.weights.items()}
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, folder / CHECKPOINT)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        """Weights and optimizer of a checkpoint, called as verl's worker groups are; the schedule goes on."""
        saved = torch.load(Path(local_path) / CHECKPOINT)
        rate = self.optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for name, value in saved["weights"].items():
                self.weights[name].copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0]["lr"] = rate


def score(
    weights: Weights,
    model: ModelSettings,
    prompts: Tensor,
    responses: Tensor,
    replayed: Tensor | None = None,
    head: Head | None = None,
    truncated: bool = False,
) -> Scores:
    """Log-probabilities of [B, T] response tokens after [B, P] prompts, at temperature 1.

    Args:
        replayed: [B, P + T - 1, L, K] experts to use.
        head: the sampler's, of the B T places; `truncated`: normalise over the tokens that it kept.
    """
    tokens = torch.cat([prompts, responses], 1)[:, :-1]
    logits, routing = forward(weights, model, tokens, last=responses.shape[1], replayed=replayed)
    if head is not None:
        reading = read(logits.flatten(0, 1), responses.flatten(), head, truncated=truncated)
    all_log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    if head is not None and reading.entropy is not None:
        of_head = reading.entropy.detach().view_as(responses)
        entropy = torch.where(head.known.view_as(responses), of_head, entropy)
        return Scores(reading.l_own.view_as(responses), entropy, routing, reading)
    own = all_log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    return Scores(own, entropy, routing, reading if head is not None else None)


def compare_routing(batch: LabBatch, scored: Scores) -> tuple[Tensor, Tensor]:
    """Compares the experts of both engines at the response tokens: agreement [N], and the packed `RouterSums`."""
    P, T = batch.prompts.shape[1], batch.sampled.mask.shape[1]
    rows = slice(P - 1, P - 1 + T)  # of the passes that predict them
    rollout, used, own = (
        batch.packed(experts[:, rows])
        for experts in (batch.sampled.experts, scored.routing.stacked(), torch.stack(scored.routing.own, 2))
    )
    ones = torch.ones(len(used), dtype=torch.bool)
    own_overlap = expert_overlap(own, rollout)
    overlap = expert_overlap(used, rollout)
    per_token, sums = agreement(overlap, used.shape[-1], ones, ones, batch.offsets, own_NL=own_overlap)
    return per_token, sums.pack()


def mini_batch(batch: LabBatch, fields: LossFields, rows: slice) -> TensorDict:
    """These trajectories as verl's loss reads a mini-batch, one micro-batch of it.

    What is jagged in a run is padded here, as the loss would pad it first. Of prompts and responses it reads the
    lengths only: 1, and T for all, whose tokens past the end are not in the mask.
    """
    sampled = batch.sampled
    count, T = sampled.mask[rows].shape
    tensors = {
        RESPONSE_MASK: fields.mask.long(),
        ROLLOUT_LOG_PROBS: sampled.l_infer,
        OLD_LOG_PROBS: fields.l_old,
        ADVANTAGES: fields.advantages,
        ENTROPY: fields.entropy,
        **fields.others,
    }
    there = {name: values[rows] for name, values in tensors.items()}
    there["prompts"] = jagged(batch.prompts[rows, -1], torch.arange(count + 1))
    there[RESPONSES] = jagged(sampled.responses[rows].flatten(), torch.arange(0, (count + 1) * T, T))
    data = TensorDict(there, batch_size=count)
    tokens = int(fields.mask[rows].sum())
    scale = {} if fields.filter_scale == 1 else {FILTER_SCALE: fields.filter_scale}
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=count, **scale)
    return data


def model_output(l_theta: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """[B, T] log-probabilities as engines return them: packed, of every token of a sequence the one that follows it;
    and others of the kind."""
    return {name: torch.nn.functional.pad(x, (0, 1)).flatten() for name, x in {"log_probs": l_theta, **others}.items()}


def _as_float(value: Any) -> float:
    return float(value.aggregate() if isinstance(value, Metric) else value)
