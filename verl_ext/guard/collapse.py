"""Whether a run is dead: its reward has lost nine tenths of its best and stays there, since when, and what moved first.

A level is the mean of STRETCH readings in a row. The rule, whose false alarms docs/report.md lists:

- the best is the highest level before the last STAYS readings, and the scale reaches from there to the bottom: 0, or -1
  where a reading is negative (rewards of 1 and -1). Where one up to the best is below -1, or any below -2, which DAPO's
  penalty of overlong responses can reach, the bottom is not known, and nothing is said;
- the mean of STAYS readings in a row has come into the lowest tenth of that scale, and no level since, nor in the last
  STAYS readings, has left its lowest fifth;
- none of the last STAYS readings is as high as all but one of those that make the best level.

Each series left its calm at the first reading from which on all but one of STRETCH lie to one side of what it had been,
by more than SIGMAS times its scatter there.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from statistics import median

from verl_ext.guard.rules import scatter

Readings = Sequence[tuple[int, float]]  # (step, value), finite, with ascending steps

REWARD, K3, GRADIENT, ENTROPY, LENGTH = (
    "critic/score/mean",
    "vllm_kl/k3",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
)
READ = (REWARD, K3, GRADIENT, ENTROPY, LENGTH)
LOST = 0.9  # of the scale
LEAST = -2.0  # a reward whose scale is known
STRETCH, STAYS = 8, 24  # readings of a level; at the bottom, before that counts as staying there
BEFORE = 64  # readings before the fall in whose earlier half a series is taken to be calm
SIGMAS = 3.0
LEAST_MOVE = 0.1  # of what it was; less is not what breaks a run
HARMLESS_GAP = 1e-3  # k3 below it is not either: a hundredth of the boundary
WORDS = {K3: "k3", GRADIENT: "the gradient norm", ENTROPY: "the entropy", LENGTH: "the response length"}
RISES_ONLY = (K3, GRADIENT)


@dataclass(frozen=True)
class Move:
    """A series that left its calm level for another one, at this step."""

    signal: str
    step: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"{WORDS[self.signal]} ({self.before:.2g} to {self.after:.2g}, from step {self.step})"


@dataclass(frozen=True)
class Collapse:
    """The best level of the reward and the mean of its last STAYS readings, the step at which it began to fall, and
    what else moved until it had fallen, the earliest first."""

    best: float
    now: float
    step: int
    moves: tuple[Move, ...] = ()

    @property
    def gap_first(self) -> bool:
        """Whether the engines came apart before anything else moved."""
        return bool(self.moves) and self.moves[0].signal == K3 and self.moves[0].step <= self.step

    @property
    def since(self) -> int:
        """The step in which the first of all moved."""
        return min(self.step, self.moves[0].step) if self.moves else self.step

    @property
    def remedy(self) -> str:
        back = f"go back to a checkpoint from before step {self.since}"
        if self.gap_first:
            return f"The engines came apart first: {back}, and close their gap, or lower the learning rate."
        return f"Nothing says that the engines came apart first: {back}, and lower the learning rate."

    def __str__(self) -> str:
        before = [str(move) for move in self.moves if move.step < self.step]
        after = [str(move) for move in self.moves if move.step >= self.step]
        first = f"Before it moved {', then '.join(before)}" if before else "Nothing else that is logged moved before it"
        then = f"; with or after it, {', then '.join(after)}" if after else ""
        fell = f"The reward fell from {self.best:.2g} to {self.now:.2g}, from step {self.step} on, and stays there."
        return f"{fell} {first}{then}."


def find_collapse(series: Mapping[str, Readings]) -> Collapse | None:
    """Judges the reward at its last reading.

    Args:
        series: name of a metric -> its readings; of READ, those that there are.

    Returns None where the run is not dead, or younger than STRETCH + STAYS readings.
    """
    reward = series.get(REWARD, ())
    early = len(reward) - STAYS
    if early < STRETCH:
        return None
    values = [value for _, value in reward]
    levels = _means(values, STRETCH)  # each from that reading on
    at = max(range(early - STRETCH + 1), key=levels.__getitem__)
    best, calm = levels[at], values[at : at + STRETCH]
    bottom = 0.0 if min(values) >= 0 else -1.0
    if min(values[: at + STRETCH]) < bottom or min(values) < LEAST or max(values[early:]) >= sorted(calm)[1]:
        return None
    tenth = (1 - LOST) * (best - bottom)
    high = [i for i, level in enumerate(levels) if level > bottom + 2 * tenth]
    if not high or high[-1] >= early or min(_means(values[high[-1] + 1 :], STAYS)) > bottom + tenth:
        return None
    low = median(calm) - min(SIGMAS * scatter(calm), (best - bottom) / 2)  # its own scatter may be as wide as the fall
    left = _leaves(values[at + STRETCH :], lambda value: value < low)
    began = early if left is None else min(at + STRETCH + left, early)
    until = reward[high[-1] + STRETCH][0]
    step = reward[began][0]
    return Collapse(best, sum(values[early:]) / STAYS, step, what_moved(series, step, until))


def what_moved(series: Mapping[str, Readings], began: int, until: int) -> tuple[Move, ...]:
    """The series other than the reward that left their calm before `until`, the earliest first.

    Args:
        series: name of a metric -> its readings; of READ, those that there are.
        began, until: the steps in which the reward began to fall, and in which it had fallen.
    """
    found = (_move(name, series.get(name, ()), began, until) for name in WORDS)
    return tuple(sorted((move for move in found if move is not None), key=lambda move: move.step))


def _move(name: str, readings: Readings, began: int, until: int) -> Move | None:
    """How the series left its calm before `until`, the step in which the reward, falling since `began`, had fallen."""
    before = [value for step, value in readings if step <= began][-BEFORE:]
    start = bisect_right(readings, began, key=itemgetter(0)) - len(before)
    values = [value for _, value in readings[start:]]
    calm = values[: max(len(before) // 2, STRETCH)]
    if len(calm) < STRETCH:
        return None
    middle, off = median(calm), max(SIGMAS * scatter(calm), LEAST_MOVE * abs(median(calm)))
    high, low = middle + off, middle - off
    if name == K3:
        high = max(high, HARMLESS_GAP)
    rest = values[len(calm) :]
    sides = [_leaves(rest, lambda value: value > high)]
    if name not in RISES_ONLY:
        sides.append(_leaves(rest, lambda value: value < low))
    left = min((side for side in sides if side is not None), default=None)
    if left is None or (step := readings[start + len(calm) + left][0]) > until:
        return None
    away = values[len(calm) + left : bisect_right(readings, until, key=itemgetter(0)) - start]
    after = max(_means(away, STRETCH) or [sum(away) / len(away)], key=lambda level: abs(level - middle))
    return Move(name, step, middle, after)


def _means(values: Sequence[float], count: int) -> list[float]:
    """The mean of `count` readings, from each one on; none for fewer."""
    sums = [0.0, *accumulate(values)]
    return [(later - sooner) / count for sooner, later in zip(sums, sums[count:], strict=False)]


def _leaves(values: Sequence[float], outside: Callable[[float], bool]) -> int | None:
    """The first reading that is outside and from which on all but one of STRETCH are."""
    out = [outside(value) for value in values]
    return next((i for i in range(len(out) - STRETCH + 1) if out[i] and sum(out[i : i + STRETCH]) >= STRETCH - 1), None)
