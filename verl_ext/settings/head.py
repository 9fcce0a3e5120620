"""The `stability.head` settings: how much of the sampler's distribution comes with each token."""

from dataclasses import dataclass

from verl_ext.base.methods import require

FOR_CENTERING = 128  # the paper's


@dataclass(frozen=True)
class HeadSettings:
    """The head of the sampler's distribution that the rollout returns with each token.

    Attributes:
        k: how many of the rollout's most likely tokens come with each token, with their log-probabilities, 8 bytes
            each. Sets vLLM's `max_logprobs`. With 0, a feature that needs a head sets the number: truncated sampling
            (`top_k`) or score centering (128). More in docs/methods.md#the-samplers-head.
    """

    k: int = 0

    def __post_init__(self) -> None:
        require(self, "k", self.k >= 0, "must be a number of tokens, or 0")
