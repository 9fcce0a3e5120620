"""What became of the reward: whether it has collapsed, or lost most of what it had won."""

import numpy as np

from verl_ext.guard.boundary import FEWEST, LARGEST_AUTOCORRELATION
from verl_ext.guard.collapse import READ, REWARD, Collapse, find_collapse
from verl_ext.report.run import Run

STRETCHES = 8  # that a run is divided into, to compare levels
BROKEN = 0.5  # of the way from its first level to its best, lost again
SIGMAS = 5.0  # that such a loss must exceed the reward's noise by


def collapse_of(run: Run) -> Collapse | None:
    """Whether the run is dead, in the guard's words."""
    found = {name: series for name in READ if (series := run.get(name)) is not None}
    return find_collapse(
        {name: list(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for name, s in found.items()}
    )


def broken_reward(run: Run) -> tuple[float, float] | None:
    """The best level of the reward and the last one, where most of what was won is lost; levels are means."""
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < 4 * FEWEST:
        return None
    stretches = np.array_split(reward.values, STRETCHES)
    levels = [float(part.mean()) for part in stretches]
    first, best, last = levels[0], max(levels), levels[-1]
    lost, noise = best - last, SIGMAS * _error(stretches)
    gained = max(best - first, abs(best) / 2)  # a reward that was high from the start has gained nothing
    return (best, last) if lost > BROKEN * gained + noise else None


def _error(stretches: list[np.ndarray]) -> float:
    """The standard error of a stretch's mean, where neighbouring steps may depend on each other."""
    calm = sorted((part - part.mean() for part in stretches), key=np.var)[:-2]  # it may have jumped in two
    length = sum(map(len, calm)) / len(calm)
    power = sum(float(np.mean(part**2)) for part in calm) / len(calm) * length / (length - 1)
    if power == 0:
        return 0.0
    rho: float = sum(float(np.mean(part[1:] * part[:-1])) for part in calm) / len(calm) / power
    rho = min(max(rho + (1 + 3 * max(rho, 0.0)) / length, 0.0), LARGEST_AUTOCORRELATION)  # short stretches hide some
    return float(np.sqrt(power / length * (1 + rho) / (1 - rho)))
