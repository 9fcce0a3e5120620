"""The collapse of a run that trains, and the metrics that moved before its reward fell."""

from dataclasses import dataclass

import numpy as np

from verl_ext.diagnosis.growth import scatter
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K3, LENGTH, REWARD
from verl_ext.diagnosis.series import Readings, Series
from verl_ext.diagnosis.statistics import DEVIATIONS, STAYS, STRETCH, dead_since, leaves, level_means

BEFORE = 64  # readings before the fall; a series is taken to be calm in the earlier half of these
LEAST_MOVE = 0.1  # of the calm level; smaller moves do not break a run
HARMLESS_GAP = 1e-3  # k3 below this is harmless: a hundredth of the boundary
SIGNAL_WORDS = {K3: "k3", GRADIENT: "the gradient norm", ENTROPY: "the entropy", LENGTH: "the response length"}
RISES_ONLY = (K3, GRADIENT)
RECORDED = (REWARD, *SIGNAL_WORDS)


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


def find_collapse(run: Readings) -> Collapse | None:
    """Returns the collapse of a reward that is dead at its last reading (`statistics.dead_since`); None if it is not.

    Args:
        run: the readings of RECORDED that were logged.
    """
    reward = run.get(REWARD)
    found = None if reward is None else dead_since(reward.values)
    if reward is None or found is None:
        return None
    best, began, until = found
    step, now = int(reward.steps[began]), float(reward.values[-STAYS:].mean())
    return Collapse(best, now, step, moves_before(run, step, int(reward.steps[until])))


def moves_before(run: Readings, began: int, until: int) -> tuple[Move, ...]:
    """Returns the series other than the reward that left their calm before `until`, the earliest first.

    A series leaves its calm at the first reading that begins a move: of STRETCH readings from there, all but one lie on
    the same side of the calm level, by more than DEVIATIONS times the scatter of the calm readings.

    Args:
        began, until: the step in which the reward began to fall, and the step in which it had fallen.
    """
    logged = ((name, run.get(name)) for name in SIGNAL_WORDS)
    found = (_move(name, series, began, until) for name, series in logged if series is not None)
    return tuple(sorted((move for move in found if move is not None), key=lambda move: move.step))


def _move(name: str, series: Series, began: int, until: int) -> Move | None:
    """Returns the move of one series, if it left its calm before `until`; the steps are those of `moves_before`."""
    steps, values = series.steps, series.values
    last = int(np.searchsorted(steps, began, side="right"))
    start = max(last - BEFORE, 0)
    calm = values[start:][: max((last - start) // 2, STRETCH)]
    if len(calm) < STRETCH:
        return None
    middle = float(np.median(calm))
    off = max(DEVIATIONS * scatter(calm), LEAST_MOVE * abs(middle))
    high, low = middle + off, middle - off
    if name == K3:
        high = max(high, HARMLESS_GAP)
    begin, end = start + len(calm), int(np.searchsorted(steps, until, side="right"))
    if begin >= end:
        return None
    after = max(level_means(values[begin:end], STRETCH), key=lambda level: abs(level - middle))
    # A slow fall is no beginning of the rise that follows: the side is that of the level furthest away.
    rises = name in RISES_ONLY or after > middle
    left = leaves(values[begin:] > high if rises else values[begin:] < low)
    if left is None or begin + left >= end:
        return None
    return Move(name, int(steps[begin + left]), middle, float(after))
