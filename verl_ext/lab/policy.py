"""The lab's training engine: the weights that are trained, their optimizer, and what they say about sampled tokens.

Shape legend: B trajectories, P tokens of a prompt, T of a response, L layers, E experts, K experts per token.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer

from verl_ext.core.head import Head, Reading, read
from verl_ext.lab.model import Routing, Weights, forward
from verl_ext.lab.settings import ModelSettings
from verl_ext.workers.gate import scaled_lr
from verl_ext.workers.undo import Undo

FILE = "model.pt"


@dataclass(frozen=True)
class Scored:
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


def score(
    weights: Weights,
    model: ModelSettings,
    prompts: Tensor,
    responses: Tensor,
    replayed: Tensor | None = None,
    head: Head | None = None,
    truncated: bool = False,
) -> Scored:
    """Log-probabilities of [B, T] response tokens after [B, P] prompts, at temperature 1.

    Args:
        replayed: [B, P + T - 1, L, K] experts to use.
        head: the sampler's, of the B T places; `truncated`: over what it could take alone.
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
        return Scored(reading.l_own.view_as(responses), entropy, routing, reading)
    own = all_log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    return Scored(own, entropy, routing, reading if head is not None else None)


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
        """As the workers of a run, which are one here."""
        return [self.undo.take_back(after)]

    def end_step(self) -> float:
        """The learning rate of this step's updates; the schedule moves on, once a step, as verl's does."""
        rate = self.optimizer.param_groups[0]["lr"]
        self._schedule.step()
        return rate

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach() for name, value in self.weights.items()}
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, folder / FILE)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        """Weights and optimizer of a checkpoint, called as verl's worker groups are; the schedule goes on."""
        saved = torch.load(Path(local_path) / FILE)
        rate = self.optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for name, value in saved["weights"].items():
                self.weights[name].copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0]["lr"] = rate
