"""The rule for a dead reward, and the metrics that moved before it fell.

The guard applies it while a run trains. Therefore it is stricter than `findings.reward.Course`, which judges what has
been logged: a reward is dead only if it lost nine tenths of its best level and stays there.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from statistics import median

from verl_ext.diagnosis.growth import scatter
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, REWARD

STRETCH, STAYS = 8, 24  # readings of a level; readings at the bottom that count as staying there
NINE_TENTHS = 0.9  # of the scale
KNOWN = -2.0  # the scale of a reward below this is unknown: DAPO's penalty for overlong answers reaches -2
BEFORE = 64  # readings before the fall; a series is taken to be calm in the earlier half of these
DEVIATIONS = 3.0
LEAST_MOVE = 0.1  # of the calm level; smaller moves do not break a run
HARMLESS_GAP = 1e-3  # k3 below this is harmless: a hundredth of the boundary
SIGNAL_WORDS = {K3: "k3", GRADIENT: "the gradient norm", ENTROPY: "the entropy", LENGTH: "the response length"}
RISES_ONLY = (K3, GRADIENT)
RECORDED = (REWARD, *SIGNAL_WORDS)

Pairs = Sequence[tuple[int, float]]  # (step, value), finite, with ascending steps


@dataclass(frozen=True)
class Move:
    """A series that left its calm level for another level, and the step at which it left."""

    signal: str
    step: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"{SIGNAL_WORDS[self.signal]} ({self.before:.2g} to {self.after:.2g}, from step {self.step})"


@dataclass(frozen=True)
class Collapse:
    """The collapse of a reward.

    Attributes:
        best: the best level of the reward.
        now: the mean of its last STAYS readings.
        step: the step at which it began to fall.
        moves: the other series that moved before it had fallen, the earliest first.
    """

    best: float
    now: float
    step: int
    moves: tuple[Move, ...] = ()

    @property
    def gap_first(self) -> bool:
        """True if the engines came apart before anything else moved."""
        return bool(self.moves) and self.moves[0].signal == K3 and self.moves[0].step <= self.step

    @property
    def since(self) -> int:
        """The step of the first move, the reward's included."""
        return min(self.step, self.moves[0].step) if self.moves else self.step

    @property
    def remedy(self) -> str:
        back = f"go back to a checkpoint from before step {self.since}"
        if self.gap_first:
            return f"The engines came apart first: {back}, and close their gap, or lower the learning rate."
        return f"The engines did not come apart first, as far as is logged: {back}, and lower the learning rate."

    def __str__(self) -> str:
        before = [str(move) for move in self.moves if move.step < self.step]
        after = [str(move) for move in self.moves if move.step >= self.step]
        first = f"Before it moved {', then '.join(before)}" if before else "Nothing else that is logged moved before it"
        then = f"; with or after it, {', then '.join(after)}" if after else ""
        fell = f"The reward fell from {self.best:.2g} to {self.now:.2g}, from step {self.step} on, and stays there."
        return f"{fell} {first}{then}."


def find_collapse(series: Mapping[str, Pairs]) -> Collapse | None:
    """Returns the collapse of a reward that is dead at its last reading; for a run that still trains.

    It is dead if it has lost nine tenths of its best level and stays there. A level is the mean of STRETCH readings in
    a row (docs/report.md lists the rule's false alarms):

    - The best is the highest level before the last STAYS readings. The scale reaches from the best to the bottom, which
      is 0, or -1 if a reading is negative. If a reading up to the best is below -1, or any reading below KNOWN, the
      bottom is unknown and the run is not judged.
    - The mean of STAYS readings in a row has come into the lowest tenth of the scale. No level since then, nor in the
      last STAYS readings, has left the lowest fifth.
    - None of the last STAYS readings is as high as the second-lowest reading of the best level.

    Args:
        series: name of a metric -> its readings; those of RECORDED that were logged.

    Returns None if the run is not dead, or has fewer than STRETCH + STAYS readings.
    """
    reward = series.get(REWARD, ())
    early = len(reward) - STAYS
    if early < STRETCH:
        return None
    values = [value for _, value in reward]
    levels = _means(values, STRETCH)  # index i: the level that begins at reading i
    at = max(range(early - STRETCH + 1), key=levels.__getitem__)
    best, calm = levels[at], values[at : at + STRETCH]
    bottom = 0.0 if min(values) >= 0 else -1.0
    if min(values[: at + STRETCH]) < bottom or min(values) < KNOWN or max(values[early:]) >= sorted(calm)[1]:
        return None
    tenth = (1 - NINE_TENTHS) * (best - bottom)
    high = [i for i, level in enumerate(levels) if level > bottom + 2 * tenth]
    if not high or high[-1] >= early or min(_means(values[high[-1] + 1 :], STAYS)) > bottom + tenth:
        return None
    # The scatter of calm readings may be as wide as the fall.
    low = median(calm) - min(DEVIATIONS * scatter(calm), (best - bottom) / 2)
    left = _leaves(values[at + STRETCH :], lambda value: value < low)
    began = early if left is None else min(at + STRETCH + left, early)
    until = reward[high[-1] + STRETCH][0]
    step = reward[began][0]
    return Collapse(best, sum(values[early:]) / STAYS, step, what_moved(series, step, until))


def what_moved(series: Mapping[str, Pairs], began: int, until: int) -> tuple[Move, ...]:
    """Returns the series other than the reward that left their calm before `until`, the earliest first.

    A series leaves its calm at the first reading that begins a move: of STRETCH readings from there, all but one lie on
    the same side of the calm level, by more than DEVIATIONS times the scatter of the calm readings.

    Args:
        series: name of a metric -> its readings; those of RECORDED that were logged.
        began, until: the step in which the reward began to fall, and the step in which it had fallen.
    """
    found = (_move(name, series.get(name, ()), began, until) for name in SIGNAL_WORDS)
    return tuple(sorted((move for move in found if move is not None), key=lambda move: move.step))


def _move(name: str, readings: Pairs, began: int, until: int) -> Move | None:
    """Returns the move of one series, if it left its calm before `until`; the arguments are those of `what_moved`."""
    before = [value for step, value in readings if step <= began][-BEFORE:]
    start = bisect_right(readings, began, key=itemgetter(0)) - len(before)
    values = [value for _, value in readings[start:]]
    calm = values[: max(len(before) // 2, STRETCH)]
    if len(calm) < STRETCH:
        return None
    middle, off = median(calm), max(DEVIATIONS * scatter(calm), LEAST_MOVE * abs(median(calm)))
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
    """Returns the means of `count` readings in a row, from each reading on; empty if there are fewer readings."""
    sums = [0.0, *accumulate(values)]
    return [(later - sooner) / count for sooner, later in zip(sums, sums[count:], strict=False)]


def _leaves(values: Sequence[float], outside: Callable[[float], bool]) -> int | None:
    """Returns the index of the first reading outside that begins STRETCH readings with at most one inside."""
    out = [outside(value) for value in values]
    return next((i for i in range(len(out) - STRETCH + 1) if out[i] and sum(out[i : i + STRETCH]) >= STRETCH - 1), None)
