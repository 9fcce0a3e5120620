"""What the training workers do in a step: old log-probabilities, then the updates, mini-batch by mini-batch.

Shape legend: B trajectories, T columns of padded responses, P tokens of a prompt, L layers, K experts per token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric

from verl_ext.core.head import centering, divergence, weights_of
from verl_ext.core.head_sums import head_metrics, head_sums
from verl_ext.core.losses import router_deviation
from verl_ext.core.mismatch import k3_sum
from verl_ext.fields import DEVIATION
from verl_ext.lab.batch import Batch, LossFields, mini_batch, model_output
from verl_ext.lab.policy import Policy, Scored, score
from verl_ext.lab.sampling import head_of
from verl_ext.lab.settings import ModelSettings
from verl_ext.launch.checks import loss_settings
from verl_ext.launch.routing_checks import replay_mode
from verl_ext.settings.config import StabilityConfig
from verl_ext.settings.losses import LOSSES
from verl_ext.workers.after_update import PREFIX
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.head import CENTERING, HeadUse
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss


class Learner:
    """A policy and the loss that the workers of such a run would have.

    Args:
        told: of the tokens that the rollout could take, where those are not all.

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
        told: bool = False,
    ):
        self._actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self._mini_batch = self._actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        settings = LossSettings.from_dict(loss_settings(config, stability))
        self._again, self._undoes = settings.after_update, settings.undo
        self.use = replace(settings.head or HeadUse(), truncated=True) if told else settings.head
        self._first_pass = FirstPass(settings.first_pass) if settings.first_pass is not None else None
        self._loss, active = build_worker_loss(self._actor, settings, first_pass=self._first_pass)
        ours = LOSSES.get(active["policy_loss"]["loss_mode"])
        self._shifts = ours is not None and "router_deviation" in ours.reads
        self._replays = replay_mode(config)
        self._model = model
        self._reference = {name: value.detach().clone() for name, value in weights.items()}
        self.policy = Policy(weights, self._actor.optim)

    def score_old(self, batch: Batch) -> Scored:
        """Under the weights before the update; with gradient, for a first update on the whole batch starts from it."""
        return self._score(batch, slice(None), batch.sampled.experts if self._replays == "R3" else None)

    def score_reference(self, batch: Batch) -> Tensor:
        """[B, T] log-probabilities under the weights that training began with."""
        with torch.no_grad():
            return score(self._reference, self._model, batch.prompts, batch.sampled.responses).log_probs

    def update(
        self, batch: Batch, old: Scored, fields: LossFields, *, step: int, lr_scale: float, asked: Mapping[str, Any]
    ) -> dict[str, float]:
        """All updates of a step; means over them of what the loss and the optimizer tell, and what is seen after them.

        Args:
            step, lr_scale: as of `verl_ext.workers.gate.Gate.begin_update`.
            asked: in bypass mode, of `FirstPass.begin_update`.
        """
        told: dict[str, list[float]] = {}
        if self._first_pass is not None:
            self._first_pass.begin_update(**asked)
        for number, rows in enumerate(self._mini_batches(len(batch.keys))):
            if not fields.mask[rows].any():  # as verl_ext.workers.gate: no step on nothing
                continue
            whole = number == 0 and self._mini_batch >= len(batch.keys)
            current = old if whole else self._score_now(batch, old, rows)
            data = mini_batch(batch, fields, rows)
            if self._shifts:
                data[DEVIATION] = self._deviation(old, current, batch, rows)
            loss, metrics = self._loss(self._model_output(batch, current, rows), data)
            if self._judge(metrics):
                if self._undoes and self.policy.undo.of != step:  # as verl_ext.workers.gate
                    self.policy.undo.keep(step)
                metrics["actor/grad_norm"] = self.policy.update(loss, lr_scale)
            for name, value in metrics.items():
                told.setdefault(name, []).append(_number(value))
        found = {name: sum(values) / len(values) for name, values in told.items()}
        return found | (self._score_again(batch, fields) if self._again else {})

    def _score_again(self, batch: Batch, fields: LossFields) -> dict[str, float]:
        """As verl_ext.workers.after_update."""
        rows = slice(self._again)
        mask = fields.mask[rows]
        with torch.no_grad():
            l_new = self._score(batch, rows, batch.sampled.experts[rows] if self._replays == "R3" else None).log_probs
        before = {"policy_kl": fields.l_old, "vllm_kl": batch.sampled.l_infer}
        tokens = max(int(mask.sum()), 1)
        return {
            f"actor/{PREFIX}/{name}": float(k3_sum((l_new.double() - log_probs[rows])[mask])) / tokens
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

    def _score_now(self, batch: Batch, old: Scored, rows: slice) -> Scored:
        replayed = {"R2": old.routing.stacked(), "R3": batch.sampled.experts}.get(self._replays)
        return self._score(batch, rows, None if replayed is None else replayed[rows])

    def _score(self, batch: Batch, rows: slice, replayed: Tensor | None) -> Scored:
        prompts, responses = batch.prompts[rows], batch.sampled.responses[rows]
        truncated = self.use is not None and self.use.truncated
        return score(
            self.policy.weights, self._model, prompts, responses, replayed, head_of(batch.sampled, rows), truncated
        )

    def _model_output(self, batch: Batch, current: Scored, rows: slice) -> dict[str, Tensor]:
        """As the workers' HeadReader makes it."""
        terms = {}
        head = head_of(batch.sampled, rows)
        if self.use is not None and self.use.centers and current.reading is not None and head is not None:
            weight_of = weights_of(self.use.corrections)
            term = centering(current.reading, head, weight_of, truncated=self.use.truncated)
            terms[CENTERING] = term.view_as(current.log_probs)
        return model_output(current.log_probs, **terms)

    def head_metrics(self, batch: Batch, scored: Scored) -> dict[str, float]:
        """`vllm_kl/head*`; none where the rollout returns no heads."""
        head = batch.sampled.head
        if self.use is None or head is None or scored.reading is None:
            return {}
        apart = divergence(scored.reading, head, truncated=self.use.truncated)
        mask = batch.sampled.mask.flatten()
        places = torch.arange(0, len(mask) + 1, batch.sampled.mask.shape[1])
        return head_metrics(head_sums(apart, head.known, mask, places))

    def _deviation(self, old: Scored, current: Scored, batch: Batch, rows: slice) -> Tensor:
        """[B, T], mean over layers of how far the router has moved on the experts that it chose (RSPO)."""
        first = batch.prompts.shape[1] - 1  # the pass that predicts the first response token
        by_layer = []
        layers = zip(old.routing.experts, old.routing.logits, current.routing.logits, strict=True)
        for experts, before, now in layers:
            chosen = experts[rows, first:].flatten(0, 1)
            was, now_is = (x.log_softmax(-1).flatten(0, 1) for x in (before[rows, first:], now[:, first:]))
            by_layer.append(router_deviation(was.gather(-1, chosen), now_is.gather(-1, chosen)))
        return torch.stack(by_layer).mean(0).view_as(current.log_probs)


def _number(value: Any) -> float:
    return float(value.aggregate() if isinstance(value, Metric) else value)
