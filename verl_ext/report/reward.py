"""What became of the reward.

Three rules give the words, and the first that holds decides. A level is the mean of WINDOW readings in a row.

    nine tenths   "collapsed", and dead: the reward has lost nine tenths of its best and stays there. The guard judges
                  by the same rule during the run (`guard.collapse`).
    half          "collapsed": the level fell below half of its highest, by more than noise, and has not come back to
                  eight tenths of it. The half is the lab's rule (docs/lab.md).
    most of it    "drifting": the reward lost most of what it had gained since its start, by more than noise, but is not
                  below half of its best, or not for long enough.

Half, eight and nine tenths are of the height above 0, or above -1 where a reading is negative (rewards of 1 and -1).
Where a reading is below -1 nobody knows how far down the scale goes: then "half" does not apply.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.guard.collapse import READ, REWARD, Collapse, Readings, find_collapse, what_moved
from verl_ext.guard.forecast import FEWEST, LARGEST_AUTOCORRELATION
from verl_ext.report.growth import staleness
from verl_ext.report.run import Run, Series

WINDOW = 20  # readings of a level
HALF, SOUND = 0.5, 0.8  # of the highest level: below the one it has collapsed, from the other on it has not
STRETCHES = 8  # that a run is divided into, to compare levels and to measure their noise
BROKEN = 0.5  # of the way from its first level to its best, lost again
SIGMAS = 5.0  # that a loss must exceed the noise by


@dataclass(frozen=True)
class Fall:
    """A reward that has collapsed.

    Attributes:
        collapse: its best and last level, the step at which it began to fall, and what else moved.
        step: the first at which half was lost.
        level: the level there.
        sound: weights from before this step are good: they made rollouts before the reward fell, and before anything
            else moved. A reward is of the policy that sampled, so old rollouts date it back.
        dead: whether nine tenths are lost.
    """

    collapse: Collapse
    step: int
    level: float
    sound: int
    dead: bool

    def __str__(self) -> str:
        best, now, began = self.collapse.best, self.collapse.now, self.collapse.step
        fell = f"the reward fell from {best:.2g} to {self.level:.2g} between steps {began} and {self.step}"
        if self.dead:
            return f"The run collapsed at step {self.step} and is dead: {fell}, and stays at {now:.2g}."
        return f"The run collapsed at step {self.step}: {fell}, and is {now:.2g} now."

    def moved(self, but: str = "") -> Iterator[str]:
        """What else moved around the fall, the earliest first; `but` is a metric of which the reader knows."""
        if moves := [str(move) for move in self.collapse.moves if move.signal != but]:
            yield f"Also moved: {', then '.join(moves)}."


def fall_of(run: Run) -> Fall | None:
    """The collapse that the reward has not come back from."""
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < WINDOW:
        return None
    series = {name: _readings(found) for name in READ if (found := run.get(name)) is not None}
    dead = find_collapse(series)
    bottom = 0.0 if reward.values.min() >= 0 else -1.0
    if dead is None and (len(reward.steps) < 2 * WINDOW or reward.values.min() < bottom):
        return None
    heights = _levels(reward.values) - bottom
    peaks = np.maximum.accumulate(heights)
    sound = np.flatnonzero(heights >= SOUND * peaks)
    began = int(sound[-1]) + 1 if sound.size else 0
    lost = began + np.flatnonzero(heights[began:] < HALF * peaks[began:])
    if not lost.size:
        return None
    at, best = int(lost[0]), float(peaks[-1])
    if dead is None and best - heights[at:].min() <= _noise(reward.values):
        return None
    first, step = (int(reward.steps[index + WINDOW - 1]) for index in (began, at))
    if dead is None:
        moves = what_moved(series, first, step)
        collapse = Collapse(best + bottom, float(heights[-1]) + bottom, first, moves)
        # The fall began somewhere in the readings of the first level that was low.
        since = min([int(reward.steps[began]), *(move.step for move in moves[:1])])
    else:
        collapse = replace(dead, step=min(dead.step, first))
        since = collapse.since
    return Fall(collapse, step, float(heights[at]) + bottom, since - round(staleness(run)), dead is not None)


def broken_reward(run: Run) -> tuple[float, float] | None:
    """The best level of the reward and the last one, where most of what was won is lost; levels are means."""
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < 4 * FEWEST:
        return None
    levels = [float(part.mean()) for part in np.array_split(reward.values, STRETCHES)]
    first, best, last = levels[0], max(levels), levels[-1]
    lost, noise = best - last, SIGMAS * _error(reward.values, len(reward.values) / STRETCHES)
    gained = max(best - first, abs(best) / 2)  # a reward that was high from the start has gained nothing
    return (best, last) if lost > BROKEN * gained + noise else None


@dataclass(frozen=True)
class Levels:
    """The first, the highest and the last level of a reward, each the mean of `count` readings."""

    first: float
    best: float
    last: float
    count: int


def level_of(run: Run) -> Levels | None:
    """The reward's levels, of fewer readings in a run that is shorter than two; None without a reward."""
    reward = run.get(REWARD)
    if reward is None:
        return None
    count = min(WINDOW, max(len(reward.values) // 2, 1))
    levels = _levels(reward.values, count)
    return Levels(float(levels[0]), float(levels.max()), float(levels[-1]), count)


def _levels(values: np.ndarray, count: int = WINDOW) -> np.ndarray:
    """The mean of `count` readings in a row, from each one on."""
    return np.lib.stride_tricks.sliding_window_view(values, count).mean(axis=1)


def _readings(series: Series) -> Readings:
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def _noise(values: np.ndarray) -> float:
    """What two levels, the best and the lowest of a run, may differ by without a fall."""
    stretches = min(STRETCHES, len(values) // WINDOW)
    return SIGMAS * float(np.sqrt(2)) * _error(values, WINDOW, stretches=stretches, jumps=1, caution=1.0)


def _error(
    values: np.ndarray, count: float, *, stretches: int = STRETCHES, jumps: int = 2, caution: float = 0.0
) -> float:
    """The standard error of the mean of `count` readings in a row, where neighbours may depend on each other.

    Args:
        stretches: parts in which the noise is looked for, each around its own mean.
        jumps: how many of them are left out, those that scatter most: the reward may have jumped there.
        caution: standard errors that are added to the correlation of neighbours.
    """
    parts = sorted((part - part.mean() for part in np.array_split(values, stretches)), key=np.var)[:-jumps]
    length = sum(map(len, parts)) / len(parts)
    power = sum(float(np.mean(part**2)) for part in parts) / len(parts) * length / (length - 1)
    if power == 0:
        return 0.0
    rho: float = sum(float(np.mean(part[1:] * part[:-1])) for part in parts) / len(parts) / power
    rho += (1 + 3 * max(rho, 0.0)) / length + caution / float(np.sqrt(length * len(parts)))  # short parts hide some
    rho = min(max(rho, 0.0), LARGEST_AUTOCORRELATION)
    return float(np.sqrt(power / count * (1 + rho) / (1 - rho)))
