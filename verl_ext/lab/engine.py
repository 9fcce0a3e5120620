"""The lab's training engine, with the interface of verl's engine.

It takes a mini-batch through forward and backward pass and the optimizer step. The workers' `Gate` can therefore wrap
it as it wraps verl's (`workers/engine/base.py` of verl 0.9.1). It does not inherit verl's base class, whose import
would import Megatron.

Shape legend: B trajectories, P tokens of a prompt, T columns of padded responses, L layers, E experts, K experts per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import FSDPActorConfig
from verl.workers.config.optimizer import build_optimizer

from verl_ext.base import names
from verl_ext.core.top_tokens import Reading, TopTokens, centering, read, weights_of
from verl_ext.lab.model import ModelSettings, Routing, Weights, forward
from verl_ext.workers.top_tokens import CENTERING, TopTokenUse

CHECKPOINT = "model.pt"


@dataclass(frozen=True)
class Scores:
    """The values that the training engine computes for the tokens of a rollout.

    Attributes:
        log_probs: [B, T], with gradient if one was requested.
        entropy: [B, T] in nats; with gradient if the loss has an entropy bonus.
        routing: the experts of each token's forward pass; the pass at P - 1 + t predicted response token t.
        reading: the log-probabilities of the sampler's top tokens, at all B T places; None if there is none.
    """

    log_probs: Tensor
    entropy: Tensor
    routing: Routing
    reading: Reading | None = None


class LabEngine:
    """The policy with its optimizer and schedule, and the passes that score and train it.

    Attributes:
        module: the weights, under their names in `verl_ext.lab.model`.
        weights: the same as a dictionary for the model; they require gradients.
        use: the use of the sampler's top tokens; None if the rollout need not return them.
    """

    def __init__(self, model: ModelSettings, weights: Weights, actor: FSDPActorConfig, use: TopTokenUse | None):
        self.engine_config, self._clip = actor.engine, actor.optim.clip_grad
        self._trains_entropy = actor.entropy_coeff != 0
        self.module, self.use = build_module(weights), use
        self.weights = dict(self.module.named_parameters())
        self.optimizer = build_optimizer(list(self.weights.values()), actor.optim)
        self.lr_scheduler = get_constant_schedule_with_warmup(self.optimizer, max(actor.optim.lr_warmup_steps, 0))
        self._model = model
        self._kept: tuple[Tensor, Scores] | None = None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_size(self) -> int:
        return 1

    def score_old(self, prompts: Tensor, responses: Tensor, replayed: Tensor | None, top: TopTokens | None) -> Scores:
        """Returns the scores of compute_log_prob; see `score`.

        They have a gradient: an update whose first mini-batch has the same trajectories reuses this forward pass.
        """
        scores = self._score(prompts, responses, replayed, top)
        self._kept = responses, scores
        return scores

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict[str, Any]:
        """Takes one optimizer step on a mini-batch; returns the metrics of the loss and the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Runs a pass over a mini-batch, as one micro-batch on one rank."""
        prompts, responses = (data[name].values().view(len(data), -1) for name in (names.PROMPTS, names.RESPONSES))
        top = None
        if names.TOP_TOKEN_IDS in data.keys():  # noqa: SIM118 (a TensorDict)
            top = TopTokens(*(data[name].flatten(0, 1) for name in (names.TOP_TOKEN_IDS, names.TOP_TOKEN_LOG_PROBS)))
        scores = None if forward_only else self._take_kept(responses)
        if scores is None:
            replayed = data.get(names.OLD_ROUTES, data.get(names.ROLLOUT_ROUTES, None))
            scores = self._score(prompts, responses, replayed, top)
        output = {"log_probs": pack(scores.log_probs, prompts.shape[1])}
        if self._trains_entropy:
            output["entropy"] = pack(scores.entropy, prompts.shape[1])
        if loss_function is None:
            return {"model_output": output, "metrics": {}}
        if self.use is not None and self.use.centers and scores.reading is not None and top is not None:
            term = centering(scores.reading, top, weights_of(self.use.corrections), truncated=self.use.truncated)
            output[CENTERING] = pack(term.view_as(scores.log_probs), prompts.shape[1])
        tokens = int(data[names.RESPONSE_MASK].sum())
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(data))
        loss, metrics = loss_function(model_output=output, data=data)
        loss.backward()
        return {"model_output": output, "metrics": metrics}

    def optimizer_step(self) -> float:
        """Takes the step if the gradient norm is finite, as verl does; returns this norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self._clip)
        if norm.isfinite():
            self.optimizer.step()
        return norm.item()

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    def lr_scheduler_step(self) -> float:
        """Advances the schedule; returns the new learning rate."""
        self.lr_scheduler.step()
        return self.lr

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach() for name, value in self.weights.items()}
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, folder / CHECKPOINT)

    def load_checkpoint(self, folder: Path) -> None:
        """Loads weights and optimizer of a checkpoint; the schedule continues."""
        saved = torch.load(folder / CHECKPOINT)
        rate = self.lr
        with torch.no_grad():
            for name, value in saved["weights"].items():
                self.weights[name].copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0]["lr"] = rate

    def _score(self, prompts: Tensor, responses: Tensor, replayed: Tensor | None, top: TopTokens | None) -> Scores:
        truncated = self.use is not None and self.use.truncated
        return score(self.weights, self._model, prompts, responses, replayed, top, truncated, self._trains_entropy)

    def _take_kept(self, responses: Tensor) -> Scores | None:
        """Returns the scores of `score_old` if they belong to these trajectories; only once."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and torch.equal(kept[0], responses) else None


def split(data: TensorDict, size: int, epochs: int) -> Iterator[TensorDict]:
    """Yields the mini-batches of a batch; verl's own iterator takes the rows of jagged fields one by one."""
    if size >= len(data):
        yield from [data] * epochs
        return
    nested = {name: data[name].values().view(len(data), -1) for name in (names.PROMPTS, names.RESPONSES)}
    others = data.exclude(*nested)
    for start in [*range(0, len(data), size)] * epochs:
        mini_batch = others[start : start + size]
        for name, values in nested.items():
            mini_batch[name] = equal_rows(values[start : start + size])
        yield mini_batch


def equal_rows(values: Tensor) -> Tensor:
    """Returns [B, n] as a nested tensor of B rows."""
    B, n = values.shape
    return torch.nested.nested_tensor_from_jagged(values.flatten(), torch.arange(0, B * n + 1, n), max_seqlen=n)


def pack(values: Tensor, prompt: int) -> Tensor:
    """Returns [B, T] values in the packed form of engines, [B (P + T)]: each token has the value of the next one."""
    return F.pad(values, (prompt - 1, 1)).flatten()


def build_module(weights: Weights) -> nn.Module:
    """Builds a module with copies of the weights as its parameters, under the same names and in their order."""
    module = nn.Module()
    for name, value in weights.items():
        path, _, last = name.rpartition(".")
        if path and path not in module._modules:
            module.add_module(path, nn.Module())
        module.get_submodule(path).register_parameter(last, nn.Parameter(value.detach().clone()))
    return module


def score(
    weights: Weights,
    model: ModelSettings,
    prompts: Tensor,
    responses: Tensor,
    replayed: Tensor | None = None,
    top: TopTokens | None = None,
    truncated: bool = False,
    trains_entropy: bool = False,
) -> Scores:
    """Computes log-probabilities of [B, T] response tokens after [B, P] prompts, at temperature 1.

    Args:
        replayed: [B, P + T - 1, L, K] experts to use.
        top: the sampler's top tokens at the B T places.
        truncated: normalise over the tokens that the sampler kept.
        trains_entropy: whether the entropy has a gradient too.
    """
    tokens = torch.cat([prompts, responses], 1)[:, :-1]
    logits, routing = forward(weights, model, tokens, last=responses.shape[1], replayed=replayed)
    if top is not None:
        reading = read(logits.flatten(0, 1), responses.flatten(), top, truncated=truncated)
    all_log_probs = logits.log_softmax(-1)
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    if top is not None and reading.entropy is not None:
        of_top = reading.entropy.detach().view_as(responses)
        entropy = torch.where(top.present.view_as(responses), of_top, entropy)
        return Scores(reading.l_own.view_as(responses), entropy, routing, reading)
    own = all_log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    return Scores(own, entropy, routing, reading if top is not None else None)
