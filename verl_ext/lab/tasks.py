"""The lab's tasks: digits in, digits out, by a rule that can be checked token by token.

Shape legend: B prompts, n digits, T response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.base.methods import require, require_one_of

BASE = 10
ASK, END = 10, 11  # tokens after the ten digits
VOCABULARY = 12
CHARACTERS = "0123456789:."

# name -> the answer's digits, from the prompt's [B, n].
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "prefix_sums": lambda digits: digits.cumsum(1) % BASE,
    "reverse": lambda digits: digits.flip(1),
    "sort": lambda digits: digits.sort(1).values,
}


@dataclass(frozen=True)
class TaskSettings:
    """The `lab.task` node.

    Attributes:
        name: one of TASKS.
        digits: digits of a prompt; the answer has one more token, its end.
    """

    name: str = "prefix_sums"
    digits: int = 16

    def __post_init__(self) -> None:
        require_one_of(self, "name", tuple(TASKS))
        require(self, "digits", self.digits >= 1, "must be at least 1")


@dataclass(frozen=True)
class GraderSettings:
    """The `lab.grader` node: faults of the rewards.

    Attributes:
        noise: share of the rewards that are replaced by a random one from 0 to 1.
        length: a bonus for a response of full length, right or wrong; shorter ones get it in proportion.
        constant: whether every response gets the same reward.
    """

    noise: float = 0.0
    length: float = 0.0
    constant: bool = False

    def __post_init__(self) -> None:
        require(self, "noise", 0 <= self.noise <= 1, "must be from 0 to 1")

    def grade(self, right: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the rewards [B] that training gets instead of `right`.

        Args:
            lengths: [B], as shares of the longest response.
        """
        if self.constant:
            return torch.full_like(right, 0.5)
        if self.noise:
            drawn, other = torch.rand(2, len(right), generator=generator)
            right = other.where(drawn < self.noise, right)
        return right + self.length * lengths


def draw(task: TaskSettings, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws prompts [count, n + 1], which end with ASK, and their answers [count, n + 1], which end with END."""
    digits = torch.randint(0, BASE, (count, task.digits), generator=generator)
    answers = TASKS[task.name](digits)
    return _close(digits, ASK), _close(answers, END)


def rewards(responses: Tensor, answers: Tensor) -> Tensor:
    """Returns [B] float32, the share of the answer's tokens, END included, before the first wrong one.

    Args:
        responses: [B, T] tokens, T at least the answer's length; tokens after the answer do not matter.
    """
    right = responses[:, : answers.shape[1]] == answers
    return right.cumprod(1).float().mean(1)


def decode(tokens: list[int]) -> str:
    """Returns the text of tokens, for people and for filters that read it."""
    return "".join(CHARACTERS[token] for token in tokens)


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def _close(digits: Tensor, last: int) -> Tensor:
    return torch.cat([digits, torch.full_like(digits[:, :1], last)], 1)
