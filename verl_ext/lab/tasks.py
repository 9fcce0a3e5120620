"""The lab's tasks: digits in, digits out, by a rule that can be checked token by token.

Shape legend: B prompts, n digits of a prompt, m of an answer, T response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.base.methods import at_least, one_of, require, require_rules

BASE = 10
ASK, END = 10, 11  # tokens after the ten digits
VOCABULARY = 12
CHARACTERS = "0123456789:."


@dataclass(frozen=True)
class TaskRule:
    """The rule of a task, for the m digits of an answer.

    Attributes:
        answer: a function from the prompt's digits, repeated to [B, m], to right answers [B, m].
        right: a function from the same digits and [B, m] response tokens to which of these are right, [B, m] bool.
    """

    answer: Callable[[Tensor, torch.Generator], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]


def one_answer(answer: Callable[[Tensor], Tensor]) -> TaskRule:
    return TaskRule(lambda digits, generator: answer(digits), lambda digits, responses: responses == answer(digits))


def _drawn(digits: Tensor, generator: torch.Generator) -> Tensor:
    return digits.gather(1, torch.randint(digits.shape[1], digits.shape, generator=generator))


def _in_prompt(digits: Tensor, responses: Tensor) -> Tensor:
    return (responses.unsqueeze(-1) == digits.unsqueeze(1)).any(-1)


TASKS = {
    "prefix_sums": one_answer(lambda digits: digits.cumsum(1) % BASE),
    "reverse": one_answer(lambda digits: digits.flip(1)),
    "sort": one_answer(lambda digits: digits.sort(1).values),
    "any_of": TaskRule(_drawn, _in_prompt),
}


@dataclass(frozen=True)
class TaskSettings:
    """The `lab.task` node.

    Attributes:
        name: one of TASKS.
        digits: digits of a prompt.
        answer: digits of an answer, for which the prompt's are repeated; 0 for as many as the prompt has. The answer
            has one more token, its end.
    """

    name: str = "prefix_sums"
    digits: int = 16
    answer: int = 0

    def __post_init__(self) -> None:
        require_rules(self, {"name": one_of(*TASKS), "digits": at_least(1), "answer": at_least(0)})

    def repeated(self, digits: Tensor) -> Tensor:
        """Returns [B, m] digits for an answer of m digits, from the prompt's [B, digits]."""
        return digits[:, torch.arange(self.answer or self.digits) % self.digits]


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
    """Draws prompts [count, n + 1], which end with ASK, and right answers [count, m + 1], which end with END."""
    digits = torch.randint(0, BASE, (count, task.digits), generator=generator)
    answers = TASKS[task.name].answer(task.repeated(digits), generator)
    return _close(digits, ASK), _close(answers, END)


def rewards(task: TaskSettings, prompts: Tensor, responses: Tensor) -> Tensor:
    """Returns [B] float32, the share of the answer's tokens, END included, before the first wrong one.

    Args:
        responses: [B, T] tokens, T at least the answer's length; tokens after the answer do not matter.
    """
    digits = task.repeated(prompts[:, :-1])
    end = digits.shape[1]
    right = TASKS[task.name].right(digits, responses[:, :end])
    return torch.cat([right, responses[:, end : end + 1] == END], 1).cumprod(1).float().mean(1)


def decode(tokens: list[int]) -> str:
    """Returns the text of tokens, for people and for filters that read it."""
    return "".join(CHARACTERS[token] for token in tokens)


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def _close(digits: Tensor, last: int) -> Tensor:
    return torch.cat([digits, torch.full_like(digits[:, :1], last)], 1)
