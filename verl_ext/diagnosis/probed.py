"""What a probe measured: readings of the same tokens, hidden states, and both again after a sync and an update.

A reading is the tokens' log-probabilities, computed by one engine in one way. `decode`: the rollout while sampling;
`prefill`: the rollout, given all tokens at once; `train`: the training engine with its own routing; `replayed`: the
training engine with the rollout's experts; `packed`: the training engine with several sequences in one pass; `base`:
the training engine without its LoRA; `prefill_again`, `train_again`: the same a second time, the rollout in the reverse
order. The distance of the second time from the first is the noise floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

DECODE, PREFILL, TRAIN, REPLAYED, PACKED, BASE = "decode", "prefill", "train", "replayed", "packed", "base"
PREFILL_AGAIN, TRAIN_AGAIN = "prefill_again", "train_again"
FLOORS = ((PREFILL, PREFILL_AGAIN), (TRAIN, TRAIN_AGAIN))
PAIRS = (
    (DECODE, TRAIN),
    (DECODE, PREFILL),
    (PREFILL, TRAIN),
    (DECODE, REPLAYED),
    (DECODE, PACKED),
    (DECODE, BASE),
    *FLOORS,
)
SIDES = dict.fromkeys((DECODE, PREFILL, PREFILL_AGAIN), "rollout")
SIDES |= dict.fromkeys((TRAIN, TRAIN_AGAIN, REPLAYED, PACKED, BASE), "training")
READING_WORDS = {
    "decode": "rollout, sampling",
    "prefill": "rollout, all at once",
    "train": "training",
    "replayed": "training, the rollout's experts",
    "packed": "training, several in a pass",
    "base": "training, without its LoRA",
    "prefill_again": "the same again, in another order",
    "train_again": "the same again",
}
SYNC, UPDATE = "sync", "update"  # a sync of the same weights; one update and the sync after it


@dataclass(frozen=True)
class Pair:
    """The distance between two readings, in float64, over the tokens that are finite in both.

    Attributes:
        one, other: names of the readings; k3 takes the tokens as sampled from `one`.
        k3: mean over the tokens, in nats. This and the next three are None if no token is finite in both.
        k3_error: its standard error, as if tokens were independent.
        largest: the largest |log p - log q|.
        equal: share of tokens whose log-probabilities are equal bit for bit.
        by_probability, by_position: bucket -> k3 of its tokens, for buckets with tokens.
        tokens: number of tokens, finite or not.
        not_finite: tokens left out because one of the readings is NaN or infinite.
        one_not_finite, other_not_finite: tokens for which that reading is NaN or infinite.
        chance: p-value of the difference between this k3 and the k3 of (decode, train), see `chance_of`.
    """

    one: str
    other: str
    k3: float | None
    k3_error: float | None
    largest: float | None
    equal: float | None
    by_probability: dict[str, float]
    by_position: dict[str, float]
    tokens: int = 0
    not_finite: int = 0
    one_not_finite: int = 0
    other_not_finite: int = 0
    chance: float = 1.0


@dataclass(frozen=True)
class Stage:
    """The same tokens scored again after a sync or an update.

    Attributes:
        name: SYNC or UPDATE.
        before, after: k3 between the rollout engine, given all tokens at once, and the training engine. This and the
            next two are means over the finite tokens, and None if there are none.
        rollout_moved, train_moved: mean of |log p after - log p before|, in nats.
        tokens: how many were scored.
        rollout_not_finite, train_not_finite: tokens whose log-probability is then NaN or infinite, in each engine.
    """

    name: str
    before: float | None
    after: float | None
    rollout_moved: float | None
    train_moved: float | None
    tokens: int = 0
    rollout_not_finite: int = 0
    train_not_finite: int = 0

    @property
    def not_finite(self) -> bool:
        return self.rollout_not_finite + self.train_not_finite > 0

    @property
    def numbers(self) -> tuple[float, float, float, float] | None:
        """The four numbers; None if one of them is not known, or is of the finite tokens only."""
        if self.before is None or self.after is None or self.rollout_moved is None or self.train_moved is None:
            return None
        return None if self.not_finite else (self.before, self.after, self.rollout_moved, self.train_moved)


@dataclass(frozen=True)
class Place:
    """The distance between both engines at one point on the way from tokens to logits.

    Attributes:
        point: see `recorder.point_of`.
        error: the norm of the difference divided by the norm of the training engine's state. At an indexer, the share
            of the training engine's positions that the rollout did not choose. Computed over the tokens that are finite
            in both engines; None if there are none.
        differs: share of the tokens whose experts (at a router) or positions (at an indexer) differ; else None.
        weight_gap: at a router, total variation between the softmax weights of the chosen experts, a mean over the
            tokens; else None.
        rollout_not_finite, train_not_finite: tokens whose state has NaN or infinity, in each engine.
        rollout_dtype, train_dtype: dtype of the state in each engine, such as `bfloat16`; at a router, of its logits.
    """

    point: str
    error: float | None
    differs: float | None = None
    weight_gap: float | None = None
    rollout_not_finite: int = 0
    train_not_finite: int = 0
    rollout_dtype: str = ""
    train_dtype: str = ""

    @property
    def not_finite(self) -> bool:
        return self.rollout_not_finite + self.train_not_finite > 0


@dataclass(frozen=True)
class Probe:
    """The numbers of a probe, as the diagnosis reads them.

    Attributes:
        pairs: the first one is (decode, train).
        dtype: the coarser of the two engines' dtypes.
        batches: the gap between sampling and training for each batch with the same weights; () if there was only one.
        head: dtype of the logits in the rollout and in training, "" if it was not recorded.
        swept: name of a changed setting -> the gap with it.
    """

    pairs: Sequence[Pair]
    places: Sequence[Place] = ()
    stages: Sequence[Stage] = ()
    dtype: str = "float32"
    batches: Sequence[Pair] = ()
    head: Sequence[str] = ("", "")
    swept: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def whole(self) -> float:
        """The gap: k3 between sampling and training; 0 if no token is finite in both."""
        return self.pairs[0].k3 or 0.0

    @property
    def is_finite(self) -> bool:
        """True if there are tokens, and all their log-probabilities and states are finite."""
        tokens = all(not each.one_not_finite and not each.other_not_finite for each in self.pairs)
        return tokens and self.pairs[0].k3 is not None and not any(place.not_finite for place in self.places)

    def pair(self, one: str, other: str) -> Pair | None:
        """Returns the distance of two readings; None if one was not made, or no token is finite in both."""
        found = (each for each in self.pairs if (each.one, each.other) == (one, other) and each.k3 is not None)
        return next(found, None)
