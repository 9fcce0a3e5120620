"""Which of the logged values belong to a run, when it was resumed, or started anew in the same place.

A unit is what one process wrote in order: a line of a metrics file, or a whole event file of TensorBoard. Both follow
from the steps alone, because nothing else in these files tells one process from the next:

- A unit that goes back to step 0 or 1 begins another run: verl counts from there.
- A unit that goes back to a later step s is a resumed run. What was logged before of steps after s is abandoned; step s
  itself is merged, because a resumed run may only validate there.
- Units that hold nothing but validation decide neither: they may come late, or be the first of a resumed run.
"""

from dataclasses import dataclass

import numpy as np

FIRST_STEPS = 1  # 0 where the run validates before training, else 1


@dataclass(frozen=True)
class Units:
    """Of each unit: its lowest and highest step (of training, where it has any), and whether it only validates."""

    low: np.ndarray
    high: np.ndarray
    validation: np.ndarray

    def __getitem__(self, part: slice | np.ndarray) -> "Units":
        return Units(self.low[part], self.high[part], self.validation[part])

    def training(self) -> np.ndarray:
        return np.flatnonzero(~self.validation)


@dataclass(frozen=True)
class Resumes:
    """What a run logged of which steps, over all the times it was resumed.

    Attributes:
        keep: by row, whether it stands.
        again: steps that were trained, and then trained again.
        gone: steps of which nothing stands: the resumed run has not come to them.
    """

    keep: np.ndarray
    again: np.ndarray
    gone: np.ndarray

    def notes(self, steps: np.ndarray) -> list[str]:
        notes = []
        if self.again.size:
            notes.append(f"{spans(self.again, steps)} logged twice (the run was resumed); the later values stand")
        if self.gone.size:
            notes.append(f"{spans(self.gone, steps)} logged before the run was resumed, and not since: left out")
        return notes


def run_starts(units: Units) -> list[int]:
    """The first unit of every run."""
    training = units.training()
    low, high = units.low[training], units.high[training]
    starts = [0]
    for index in np.flatnonzero((low[1:] < high[:-1]) & (low[1:] <= FIRST_STEPS)):
        previous, start = int(training[index]), int(training[index + 1])
        while start - 1 > previous and units.low[start - 1] <= units.low[start]:
            start -= 1  # the validation before the training
        starts.append(start)
    return starts


def resumes(units: Units, unit_of_row: np.ndarray, steps: np.ndarray, validation: np.ndarray) -> Resumes:
    """Which rows of one run stand. All but `units` are by row."""
    training = units.training()
    low, high = units.low[training], units.high[training]
    back = np.flatnonzero(low[1:] < high[:-1]) + 1
    if not back.size:
        none = steps[:0]
        return Resumes(np.ones(steps.size, bool), none, none)
    highest = np.iinfo(np.int64).max
    lows = np.append(np.where(units.validation, highest, units.low), highest)
    lowest_later = np.minimum.accumulate(lows[::-1])[::-1][1:]
    keep = steps <= lowest_later[unit_of_row]
    # Validation rows are left out of `again`: a resumed run repeats that of the step it starts from.
    trained = ~validation
    resumed = np.zeros_like(units.low)
    resumed[training[back]] = 1
    attempt = np.cumsum(resumed)[unit_of_row[trained]]
    order = np.argsort(steps[trained], kind="stable")  # attempts stay in order within a step
    of_step, attempt = steps[trained][order], attempt[order]
    twice = (of_step[1:] == of_step[:-1]) & (attempt[1:] != attempt[:-1])
    return Resumes(keep, np.unique(of_step[1:][twice]), np.setdiff1d(steps[~keep], steps[keep]))


def spans(some: np.ndarray, steps: np.ndarray) -> str:
    """`steps 6 to 8 were`; steps that follow each other in `steps` are one span."""
    if some.size == 1:
        return f"step {some[0]} was"
    at = np.searchsorted(np.union1d(steps, some), some)
    parts = np.split(some, np.flatnonzero(np.diff(at) > 1) + 1)
    words = [str(part[0]) if part.size == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    more = f" and {len(words) - 3} more spans" if len(words) > 3 else ""
    return f"steps {', '.join(words[:3])}{more} were"
