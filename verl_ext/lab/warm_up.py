"""The warm-up before RL: supervised training on right answers, until the model samples some of them."""

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import SHARE, require_rules
from verl_ext.lab.model import ModelSettings, RolloutEngine, Routing, forward, init_weights, sample_responses
from verl_ext.lab.tasks import VOCABULARY, GraderSettings, TaskSettings, draw, rewards
from verl_ext.report.files import written_whole

LOOK_EVERY, SAMPLED = 10, 128  # steps between two measurements of the reward, and answers per measurement


@dataclass(frozen=True)
class WarmUpSettings:
    """The `lab.warm_up` node.

    Attributes:
        reward: the reward at which it ends.
        lr, batch: learning rate of Adam, and examples per step.
        balance: coefficient of the load-balancing loss, as in Switch Transformers (arXiv 2101.03961, eq. 4).
        most_steps: the number of steps after which a warm-up fails.
    """

    reward: float = 0.4
    lr: float = 3e-3
    batch: int = 64
    balance: float = 0.01
    most_steps: int = 5000

    def __post_init__(self) -> None:
        require_rules(self, {"reward": SHARE})


@dataclass(frozen=True)
class LabSettings:
    """The `lab` node of a config, without its regimes."""

    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    warm_up: WarmUpSettings = field(default_factory=WarmUpSettings)
    grader: GraderSettings = field(default_factory=GraderSettings)


def warm_up(lab: LabSettings, length: int, seed: int, folder: Path) -> dict[str, Tensor]:
    """Returns the weights that RL begins with, float32; from a file of `folder`, if an earlier run left them.

    Args:
        length: the largest number of tokens of a response.

    Raises:
        ConfigError: the reward was not reached.
    """
    model = {name: value for name, value in asdict(lab).items() if name != "grader"}
    settings = json.dumps([model, length, seed], sort_keys=True)
    file = folder / f"{zlib.crc32(settings.encode()):08x}-{seed}.pt"
    if file.exists():
        return torch.load(file)
    weights = _train_supervised(lab, length, torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as out:  # several processes may write the same file
        torch.save(weights, out)
    return weights


def _train_supervised(lab: LabSettings, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    model, task, settings = lab.model, lab.task, lab.warm_up
    weights = init_weights(model, VOCABULARY, task.digits + 1 + length, generator)
    for value in weights.values():
        value.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=settings.lr, betas=(0.9, 0.98), fused=True)
    reached = 0.0
    for step in range(settings.most_steps):
        prompts, answers = draw(task, settings.batch, generator)
        tokens = torch.cat([prompts, answers], 1)[:, :-1]
        logits, routing = forward(weights, model, tokens, last=answers.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten()) + settings.balance * _imbalance(routing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            prompts, _ = draw(task, SAMPLED, generator)
            sampled = sample_responses(RolloutEngine((weights,)), model, prompts, length, generator)
            reached = rewards(task, prompts, sampled.responses).mean().item()
            if reached >= settings.reward:
                return {name: value.detach() for name, value in weights.items()}
    raise ConfigError(
        f"lab.warm_up.reward={settings.reward:g} was not reached in {settings.most_steps} steps (the last: "
        f"{reached:.2f}); lower it, or make the task easier (lab.task.digits) or the model larger (lab.model.hidden)"
    )


def _imbalance(routing: Routing) -> Tensor:
    """Returns the sum over layers of E sum_e f_e p_e, which is 1 per layer at balance.

    f_e is expert e's share of the choices, p_e its mean probability.
    """
    total = torch.zeros(())
    for experts, logits in zip(routing.experts, routing.logits, strict=True):
        E = logits.shape[-1]
        share = torch.bincount(experts.flatten(), minlength=E) / experts.numel()
        total = total + E * (share * logits.softmax(-1).flatten(0, -2).mean(0)).sum()
    return total
