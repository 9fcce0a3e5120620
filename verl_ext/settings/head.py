"""The `stability.head` settings: how much of the sampler's distribution comes with each token."""

from dataclasses import dataclass

from verl_ext.methods import require

FOR_CENTERING = 128  # the paper's


@dataclass(frozen=True)
class HeadSettings:
    """Attributes:
    k: most likely tokens at each place, with their log-probabilities: 8 bytes each. 0 leaves it to what needs them,
        score centering (128) and truncated sampling (top_k).
    """

    k: int = 0

    def __post_init__(self) -> None:
        require(self, "k", self.k >= 0, "must be a number of tokens, or 0")
