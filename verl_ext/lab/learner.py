"""The lab's training worker: it drives the lab's engine as verl's worker drives an engine on one rank.

It converts a rollout and the training engine's scores to the inputs of the plugin's step, loss and gate. The gate wraps
it as it wraps verl's TrainingWorker (`workers/engine_workers.py` of verl 0.9.1).

Shape legend: B trajectories, T columns of padded responses, N response tokens of all of them, P tokens of a prompt,
L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict

from verl_ext.base import names
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.filters import FilterBatch
from verl_ext.core.mismatch import sums_by_sign
from verl_ext.core.routing import agreement, expert_overlap
from verl_ext.core.tokens import Lag, Tokens
from verl_ext.core.top_tokens import divergence, top_token_metrics, top_token_sums
from verl_ext.features.feature import RunFeatures
from verl_ext.features.table import loss_settings
from verl_ext.features.verl_config import replay_mode
from verl_ext.lab.engine import LabEngine, Scores, equal_rows, score, split
from verl_ext.lab.model import ModelSettings, Samples
from verl_ext.lab.tasks import END, decode, encode
from verl_ext.workers.gate import Gate
from verl_ext.workers.top_tokens import TopTokenUse
from verl_ext.workers.worker_loss import LossSettings, install_loss


@dataclass
class LabBatch:
    """The trajectories of a step, in one block in memory: the batch that the plugin's step takes
    (`verl_ext.trainer.step.Batch`).

    Attributes:
        prompts: [B, P].
        sampled: the rollout's result.
        rewards: [B].
        keys: verl's trajectory ids, `{uid}_{session}_{index}`.
        lag: the age of the weights that sampled them, if the rollout reports it.
        scored: the training engine's scores, once there are some.
        tokens: the N response tokens with their scores.
        fields: the update's inputs in addition to the tokens, [B, T] by name of verl_ext.base.names; the step adds to
            them.
    """

    prompts: Tensor
    sampled: Samples
    rewards: Tensor
    keys: Sequence[str]
    lag: Lag | None = None
    scored: Scores = field(init=False)
    tokens: Tokens = field(init=False)
    fields: dict[str, Tensor] = field(init=False)

    @property
    def offsets(self) -> Tensor:
        """[B + 1], the start of each response among the N."""
        lengths = self.sampled.mask.sum(1)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def packed(self, values: Tensor) -> Tensor:
        """Returns the generated tokens' values, [N, ...], from [B, T, ...]."""
        return values[self.sampled.mask]

    def padded(self, values: Tensor) -> Tensor:
        """Returns [B, T] from [N] values, 0 past the end."""
        return values.new_zeros(self.sampled.mask.shape).masked_scatter(self.sampled.mask, values)

    def token_rewards(self) -> Tensor:
        """Returns [B, T]: each reward on the response's last token, as in verl."""
        last = self.sampled.mask.sum(1, keepdim=True) - 1
        return torch.zeros(self.sampled.mask.shape).scatter(1, last, self.rewards.unsqueeze(1))

    def begin_step(self, agreement_N: Tensor | None, *, bypass: bool) -> None:
        """Sets tokens and fields, once the batch is scored. In bypass mode, l_old of the update is l_infer."""
        self.tokens = Tokens(
            l_infer=self.packed(self.sampled.l_infer),
            l_old=self.packed(self.scored.log_probs.detach()),
            mask=torch.ones(int(self.sampled.mask.sum()), dtype=torch.bool),
            offsets=self.offsets,
            entropy=self.packed(self.scored.entropy),
            agreement=agreement_N,
            lag=self.lag,
        )
        self.fields = {
            names.RESPONSE_MASK: self.sampled.mask,
            names.OLD_LOG_PROBS: self.sampled.l_infer if bypass else self.scored.log_probs.detach(),
            names.ENTROPY: self.scored.entropy,
        }
        if agreement_N is not None:
            self.fields[names.AGREEMENT] = self.padded(agreement_N)

    def blocks(self, *, by_sign: bool) -> Iterator[tuple[None, Tokens]]:
        yield None, self.tokens

    def put(self, block: None, fields: Mapping[str, Tensor]) -> None:
        self.fields.update({name: self.padded(values) for name, values in fields.items()})

    def sums_by_sign(self) -> Tensor:
        return sums_by_sign(self.tokens, self.packed(self.fields[names.ADVANTAGES]))

    def views(self, *, weighed: bool) -> Iterator[tuple[None, FilterBatch, Tensor | None]]:
        view = FilterBatch(
            tokens=self.tokens,
            keys=self.keys,
            rewards_B=self.rewards.double(),
            advantages_N=self.packed(self.fields[names.ADVANTAGES]),
            responses_N=self.packed(self.sampled.responses),
            max_response_length=self.sampled.mask.shape[1],
            eos_ids=frozenset({END}),
            decode=decode,
            encode=encode,
        )
        yield None, view, self.packed(self.fields[names.WEIGHTS]) if weighed and names.WEIGHTS in self.fields else None


class Learner:
    """The actor's worker of a lab run, with the gate and the loss of a run's workers.

    Args:
        weights: the weights that training begins with.
        knows_kept: whether the training engine knows which tokens truncated sampling kept.

    Attributes:
        engine: the policy that is trained.
        loss_fn: the loss of its updates.
    """

    loss_fn: Callable

    def __init__(self, features: RunFeatures, model: ModelSettings, weights: Mapping[str, Tensor], knows_kept: bool):
        config = features.config
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        settings = LossSettings.from_dict(loss_settings(features))
        use = replace(settings.top_tokens or TopTokenUse(), truncated=True) if knows_kept else settings.top_tokens
        self.engine = LabEngine(model, weights, actor, use)
        self.gate = Gate(self)
        install_loss(self.gate, actor, settings)
        self._replay_mode = replay_mode(config)
        size = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        self._sizes = {"mini_batch_size": size, "epochs": actor.ppo_epochs}
        self._model = model
        self._reference = {name: value.detach().clone() for name, value in weights.items()}

    def score_old(self, batch: LabBatch) -> Scores:
        """Returns the scores of compute_log_prob under the current weights."""
        replayed = batch.sampled.experts if self._replay_mode == "R3" else None
        return self.engine.score_old(batch.prompts, batch.sampled.responses, replayed, batch.sampled.top_tokens)

    def score_reference(self, batch: LabBatch) -> Tensor:
        """Returns [B, T] log-probabilities under the weights that training began with."""
        with torch.no_grad():
            return score(self._reference, self._model, batch.prompts, batch.sampled.responses).log_probs

    def update(self, batch: LabBatch, asked: Mapping[str, Any]) -> dict[str, float]:
        """Makes all updates of a step; returns the metrics of loss, gate and optimizer, as means over the updates.

        Args:
            asked: the requests of a run's trainer to its workers: `UPDATE`, `FIRST_PASS` and `FILTER_SCALE`.
        """
        output = self.train_mini_batch(self.update_data(batch, asked))
        metrics = rename_dict(tu.get(output, "metrics"), "actor/")
        return {name: float(value) for name, value in reduce_metrics(metrics).items()}

    def update_data(self, batch: LabBatch, asked: Mapping[str, Any]) -> TensorDict:
        """Returns the batch that a run sends to its workers for the update.

        Prompts and responses are jagged with rows of one length, because verl reads their lengths from them. The other
        fields are padded: the losses would pad jagged ones first.
        """
        sampled = batch.sampled
        tensors: dict[str, Any] = {
            names.PROMPTS: equal_rows(batch.prompts),
            names.RESPONSES: equal_rows(sampled.responses),
            names.ROLLOUT_LOG_PROBS: sampled.l_infer,
            **batch.fields,
            names.RESPONSE_MASK: batch.fields[names.RESPONSE_MASK].long(),
        }
        if self._replay_mode == "R2":
            tensors[names.OLD_ROUTES] = batch.scored.routing.stacked()
        if self._replay_mode == "R3":
            tensors[names.ROLLOUT_ROUTES] = sampled.experts
        if sampled.top_tokens is not None:
            rows = (*sampled.mask.shape, -1)
            tensors[names.TOP_TOKEN_IDS] = sampled.top_tokens.ids.view(rows)
            tensors[names.TOP_TOKEN_LOG_PROBS] = sampled.top_tokens.log_q.view(rows)
        settings = {name: NonTensorData(value) for name, value in {**self._sizes, **asked}.items()}
        return TensorDict(tensors | settings, len(batch.keys))

    def set_loss_fn(self, loss_fn: Callable) -> None:
        self.loss_fn = loss_fn

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Makes all updates of a batch, `epochs` times through mini-batches of `mini_batch_size` trajectories.

        Returns `metrics`: name -> one value per mini-batch.
        """
        size, epochs = tu.pop(data, "mini_batch_size"), tu.pop(data, "epochs")
        metrics: dict[str, Any] = {}
        for mini_batch in split(data, size, epochs):
            found = self.engine.train_batch(mini_batch, loss_function=self.loss_fn)["metrics"]
            single = {name: value.aggregate() for name, value in found.items() if isinstance(value, Metric)}
            append_to_dict(metrics, found | single)
        return TensorDict({"metrics": NonTensorData(metrics)})

    def infer_batch(self, data: TensorDict) -> dict[str, Tensor]:
        """Returns `log_probs` of prompts and responses, packed."""
        with torch.no_grad():
            return self.engine.forward_backward_batch(data, None, forward_only=True)["model_output"]

    def top_token_metrics(self, batch: LabBatch) -> dict[str, float]:
        """Returns `vllm_kl/head*`; nothing if the rollout returns no top tokens."""
        use, top, reading = self.engine.use, batch.sampled.top_tokens, batch.scored.reading
        if use is None or top is None or reading is None:
            return {}
        apart = divergence(reading, top, truncated=use.truncated)
        mask = batch.sampled.mask.flatten()
        places = torch.arange(0, len(mask) + 1, batch.sampled.mask.shape[1])
        return top_token_metrics(top_token_sums(apart, top.present, mask, places))

    def take_back(self, after: int) -> list[int | None]:
        """Returns the answer of each worker of a run to an undo; the lab has one worker."""
        return [self.gate.take_back(after)]

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        """Has the signature of verl's worker groups; see `LabEngine.load_checkpoint`."""
        self.engine.load_checkpoint(Path(local_path))


def compare_routing(batch: LabBatch, load: ExpertLoad) -> tuple[Tensor, Tensor]:
    """Compares the experts of both engines at the response tokens: agreement [N], and the packed `RouterSums`. Adds
    them to the load."""
    P, T = batch.prompts.shape[1], batch.sampled.mask.shape[1]
    rows = slice(P - 1, P - 1 + T)  # the passes that predict the response tokens
    routing = batch.scored.routing
    rollout, used, own = (
        batch.packed(experts[:, rows])
        for experts in (batch.sampled.experts, routing.stacked(), torch.stack(routing.own, 2))
    )
    load.add(used, rollout)
    ones = torch.ones(len(used), dtype=torch.bool)
    overlap, own_overlap = expert_overlap(used, rollout), expert_overlap(own, rollout)
    per_token, sums = agreement(overlap, used.shape[-1], ones, ones, batch.offsets, own_NL=own_overlap)
    return per_token, sums.pack()
