"""The two subjects of a verdict: the gap between the engines, and the reward.

The gap is k3. Its growth is estimated as in the guard's forecast, from the last readings of a run.

A metric's value now is the same number in the whole report: `now_of`, the median of its last readings, next to which
`now_label` says so. Verdict, table and figures take it from here.

Three rules decide whether the reward fell, and the first that holds counts. A level is the mean of WINDOW readings in a
row.

    nine tenths   "collapsed", and dead: the reward has lost nine tenths of its best and stays there. The guard judges
                  by the same rule during the run (`guard.collapse`).
    half          "collapsed": the level fell below half of its highest, by more than noise, and has not come back to
                  eight tenths of it. The half is the lab's rule (docs/lab.md).
    most of it    "drifting": the reward lost most of what it had gained since its start, by more than noise, but is not
                  below half of its best, or not for long enough.

Half, eight and nine tenths are shares of the height above 0, or above -1 if a reading is negative (rewards of 1 and
-1). If a reading is below -1, the lower end of the scale is unknown: then "half" does not apply.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.guard.collapse import READ, REWARD, STRETCH, Collapse, Readings, find_collapse, what_moved
from verl_ext.guard.forecast import (
    FEWEST,
    LARGEST_AUTOCORRELATION,
    Growth,
    engines_names,
    estimate_growth,
    is_seen_enough,
)
from verl_ext.guard.marks import ROUTER, STALENESS
from verl_ext.guard.state import Boundary
from verl_ext.report.run import Run, Series

K3, DROPPED = "vllm_kl/k3", "correction/dropped"
LAST = 5  # readings whose median is the value now: two odd ones do not move it, and it shows a change within three
STALE = 1.0  # versions that rollouts are behind, on average
LOW_AGREEMENT = 0.98
ROUTED_GAP = 2.0  # routing drives the gap if it is this many times larger where experts differ
SOON = 20  # a forecast of fewer steps to the boundary is a warning, as in the lab
WINDOW = 20  # readings of a level
HALF, SOUND = 0.5, 0.8  # shares of the highest level: collapsed below HALF, sound from SOUND on
STRETCHES = 8  # parts of a run, to compare levels and to measure their noise
BROKEN = 0.5  # share of the way from its first level to its best that is lost again
SIGMAS = 5.0  # by which a loss must exceed the noise


@dataclass(frozen=True)
class Gap:
    """The k3 that a verdict on the engines uses.

    Attributes:
        name: its name in sentences.
        alone: whether it covers only the engines, in a run whose rollouts are older than the policy.
    """

    series: Series
    name: str = "k3"
    alone: bool = False


def gap_of(run: Run) -> Gap | None:
    """Returns k3 of trajectories of lag 0, and of rescored ones, if it was logged often enough lately; else the
    whole k3."""
    whole = run.get(K3)
    of_engines: dict[int, float] = {}
    for name in reversed(engines_names(K3)):
        if (series := run.get(name)) is not None:
            of_engines |= dict(_as_readings(series))
    steps = sorted(of_engines)
    if is_seen_enough(steps, int(run.steps[-1]), Boundary.window):
        series = Series(np.array(steps), np.array([of_engines[step] for step in steps]))
        return Gap(series, "k3 of the engines alone", alone=True)
    return None if whole is None else Gap(whole)


def age_drives(run: Run) -> bool:
    """Returns True if the age of the rollouts is the problem, and not the engines.

    That holds if k3 is past the boundary and the engines' part of it is not. If no metric shows that part, it holds
    whenever rollouts are old.
    """
    gap, whole = gap_of(run), run.get(K3)
    if gap is not None and gap.alone and whole is not None:
        return now_of(gap.series) <= boundary_of(run) < now_of(whole)
    return staleness(run) > STALE


def is_moe(run: Run) -> bool:
    """Returns True if the run logged metrics of routers, which only a mixture of experts has."""
    return any(name.startswith(ROUTER) for name in run.metrics)


def routing_drives(run: Run) -> bool:
    """Returns True if the engines agree on too few experts, or the gap is far larger for tokens where they differ."""
    agreement, differs, equal = (latest(run, f"router/{name}") for name in ("agreement", "gap_differs", "gap_equal"))
    return agreement < LOW_AGREEMENT or differs > ROUTED_GAP * equal


def staleness(run: Run) -> float:
    """Returns the number of versions that rollouts are behind, on average."""
    return latest(run, STALENESS, 0.0)


def latest(run: Run, name: str, default: float = np.nan) -> float:
    """Returns the median of a metric's last readings; `default` if it was not logged."""
    return default if (series := run.get(name)) is None else now_of(series)


def now_of(series: Series, readings: int = LAST) -> float:
    """Returns a metric's value now: the median of its last readings, of all if there are fewer."""
    return float(np.median(series.values[-readings:]))


def now_label(series: Series) -> str:
    """Returns what `now_of` is of, for the text next to the number."""
    return _median_label("last", min(LAST, len(series.steps)))


def beginning_of(series: Series, readings: int = LAST) -> float:
    """Returns a metric's value at the start: the median of its first readings, at most half of all."""
    return float(np.median(series.values[: _first_count(series, readings)]))


def beginning_label(series: Series) -> str:
    """Returns what `beginning_of` is of, for the text next to the number."""
    return _median_label("first", _first_count(series, LAST))


def _first_count(series: Series, readings: int) -> int:
    return min(readings, max(len(series.values) // 2, 1))


def _median_label(end: str, count: int) -> str:
    return f"the {end} reading" if count == 1 else f"median of the {end} {count}"


def skipped_share(run: Run, last: int | None = None) -> tuple[float, int] | None:
    """Returns the share of the updates that were skipped, and in how many steps; None if no step logged it.

    A step may have several updates. Then guard/skipped is the share of them, and a step must not count as a whole.

    Args:
        last: number of last steps; all by default.
    """
    skipped = run.get("guard/skipped")
    if skipped is None:
        return None
    shares = skipped.values if last is None else skipped.values[-last:]
    return float(shares.mean()), len(shares)


def passed_at(run: Run, until: int) -> tuple[str, int] | None:
    """Returns the name of the k3 that passed the boundary and stayed there up to this step, and when it passed."""
    gap, whole = gap_of(run), run.get(K3)
    found = [(gap.name, gap.series)] if gap is not None else []
    found += [("k3", whole)] if whole is not None else []
    boundary = boundary_of(run)
    steps = ((name, _outside_since(series, lambda values: values > boundary, until)) for name, series in found)
    return next(((name, step) for name, step in steps if step is not None), None)


def foretold_at(run: Run, until: int) -> int | None:
    """Returns the step from which on the guard's forecast warned, up to this step."""
    forecast = run.get("guard/steps_to_boundary")
    return None if forecast is None else _outside_since(forecast, lambda values: values < SOON, until)


def _outside_since(series: Series, outside: Callable[[np.ndarray], np.ndarray], until: int) -> int | None:
    """Returns the step from which on all readings up to `until` are outside, except for one in any STRETCH of them."""
    seen = series.steps <= until
    out = outside(series.values[seen])
    if len(out) < STRETCH:
        return None
    inside = np.convolve(~out, np.ones(STRETCH, dtype=int), mode="valid")  # readings in the STRETCH from each one on
    broken = np.flatnonzero(inside > 1)
    start = int(broken[-1]) + 1 if broken.size else 0
    if start == len(inside):
        return None
    return int(series.steps[seen][start + int(np.argmax(out[start:]))])


def growth_of(run: Run) -> tuple[Series, Growth] | None:
    """Returns the last readings of k3, as in `gap_of`, and the line through their logarithms; None for too few."""
    gap = gap_of(run)
    return None if gap is None else _fit_growth(gap.series, boundary_of(run))


def _fit_growth(series: Series | None, boundary: float) -> tuple[Series, Growth] | None:
    if series is None:
        return None
    window = Series(series.steps[-Boundary.window :], series.values[-Boundary.window :])
    growth = estimate_growth(_as_readings(window), boundary)
    return None if growth is None else (window, growth)


def blind_mask(run: Run) -> tuple[Growth, Growth] | None:
    """Returns the growth of the share of dropped tokens and of k3, if the guard found IcePop's mask blind
    (`guard.forecast`)."""
    found = run.get("guard/mask_blind")
    share, gap = _fit_growth(run.get(DROPPED), 1.0), _fit_growth(run.get(K3), boundary_of(run))  # a mask sees all of k3
    if found is None or share is None or gap is None:
        return None
    if found.values[-1] <= 0.5:  # a mean over the updates of the step
        return None
    return share[1], gap[1]


def usual_level(run: Run) -> float:
    """Returns the last logged k3 above which the guard warns (guard/level); 0 if there is none."""
    level = run.get("guard/level")
    return 0.0 if level is None else float(level.values[-1])


def boundary_of(run: Run) -> float:
    """Returns the k3 past which a run counts as collapsing: the one that the guard logged, or its default."""
    logged = run.get("guard/boundary")
    return Boundary.value if logged is None or logged.values[-1] <= 0 else float(logged.values[-1])


@dataclass(frozen=True)
class Fall:
    """A reward that has collapsed.

    Attributes:
        collapse: its best and last level, the step at which it began to fall, and the other metrics that moved.
        step: the first step at which half was lost.
        level: the level there.
        now: the reward now, as in the whole report.
        sound: weights from before this step are good: they made rollouts before the reward fell, and before anything
            else moved. A reward belongs to the policy that sampled, so this step is earlier if rollouts are old.
        dead: whether nine tenths are lost.
    """

    collapse: Collapse
    step: int
    level: float
    now: float
    sound: int
    dead: bool

    def __str__(self) -> str:
        levels = f"from {self.collapse.best:.2g} to {self.level:.2g}"
        means = f"means of {STRETCH} and of {WINDOW} readings" if self.dead else f"means of {WINDOW} readings"
        fell = f"the reward fell {levels} between steps {self.collapse.step} and {self.step} ({means})"
        now = f"{self.now:.2g} ({_median_label('last', LAST)})"
        if self.dead:
            return f"The run collapsed at step {self.step} and is dead: {fell}, and stays at {now}."
        return f"The run collapsed at step {self.step}: {fell}, and is now {now}."

    def moved(self, but: str = "") -> Iterator[str]:
        """Lists the other metrics that moved around the fall, the earliest first, except for the metric `but`."""
        if moves := [str(move) for move in self.collapse.moves if move.signal != but]:
            yield f"Also moved: {', then '.join(moves)}."


def fall_of(run: Run) -> Fall | None:
    """Returns the collapse from which the reward has not recovered."""
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < WINDOW:
        return None
    series = {name: _as_readings(found) for name in READ if (found := run.get(name)) is not None}
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
    if dead is None and best - heights[at:].min() <= _level_noise(reward.values):
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
    return Fall(
        collapse,
        step,
        level=float(heights[at]) + bottom,
        now=now_of(reward),
        sound=since - round(staleness(run)),
        dead=dead is not None,
    )


def broken_reward(run: Run) -> tuple[float, float] | None:
    """Returns the best level of the reward and the last one, if most of the gain is lost; levels are means."""
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < 4 * FEWEST:
        return None
    levels = [float(part.mean()) for part in np.array_split(reward.values, STRETCHES)]
    first, best, last = levels[0], max(levels), levels[-1]
    lost, noise = best - last, SIGMAS * _mean_error(reward.values, len(reward.values) / STRETCHES)
    gained = max(best - first, abs(best) / 2)  # a reward that was high from the start has gained nothing
    return (best, last) if lost > BROKEN * gained + noise else None


@dataclass(frozen=True)
class Levels:
    """The highest and the last level of a reward, each the mean of `count` readings."""

    best: float
    last: float
    count: int


def level_of(run: Run) -> Levels | None:
    """Returns the reward's levels, of fewer readings in a run shorter than two levels; None without a reward."""
    reward = run.get(REWARD)
    if reward is None:
        return None
    count = min(WINDOW, max(len(reward.values) // 2, 1))
    levels = _levels(reward.values, count)
    return Levels(float(levels.max()), float(levels[-1]), count)


def _levels(values: np.ndarray, count: int = WINDOW) -> np.ndarray:
    """Returns the moving mean of `count` readings in a row."""
    return np.lib.stride_tricks.sliding_window_view(values, count).mean(axis=1)


def _as_readings(series: Series) -> Readings:
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def _level_noise(values: np.ndarray) -> float:
    """Returns the difference that noise may make between the best and the lowest level of a run."""
    stretches = min(STRETCHES, len(values) // WINDOW)
    return SIGMAS * float(np.sqrt(2)) * _mean_error(values, WINDOW, stretches=stretches, jumps=1, caution=1.0)


def _mean_error(
    values: np.ndarray, count: float, *, stretches: int = STRETCHES, jumps: int = 2, caution: float = 0.0
) -> float:
    """Returns the standard error of the mean of `count` readings in a row, whose neighbours may depend on each other.

    Args:
        stretches: parts in which the noise is measured, each around its own mean.
        jumps: the number of parts with the most scatter to leave out: the reward may have jumped there.
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
