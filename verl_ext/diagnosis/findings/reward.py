"""Findings about the reward: whether it rose, did not move, fell, or is the same for all answers.

A level is the mean of WIDTHS readings in a row. Heights are measured from the bottom of the scale. The bottom is 0 if
no reading is negative, the least reward of an answer if the run logs it, else the lowest level before the best.

One rule with two grades judges a fall. It compares the level now with the best one:

    falls       the reward lost FALLS of its height and a quarter of what it had gained, by more than noise
    collapsed   it lost half of its height, and has not come back to BACK of it

The guard has a stricter rule, for a run that still trains: `diagnosis.collapse`.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.base.names import PROMPT_EFFECT
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import LENGTH, REWARD, REWARD_MAX, REWARD_MIN, VALIDATION, quantity_of
from verl_ext.diagnosis.noise import ENOUGH, difference_noise, level_error
from verl_ext.diagnosis.series import (
    LEVEL_READINGS,
    Readings,
    Series,
    beginning_label,
    beginning_of,
    cached_per_run,
    holds_from,
    now_label,
    now_of,
    require_logged,
)

SPREAD = "critic/score/std"
DEAD_GROUPS = "filter/zero_variance/dropped_trajectories"
OF_SEVERAL = re.compile("/(?:best|maj)@")  # verl's scores of n answers together
FEWEST_REWARDS = 5  # readings without which a reward cannot be judged
SURE, LIKELY = 3.0, 2.0  # standard errors of a rise, and of a small rise
# Standard errors of a loss, beyond the excess that the best of so many levels has by chance; the second is for long
# runs.
LOST_SURE, LOST_SURER = 1.6, 2.2
WIDTHS = (1, 2, 5, 10, 20)  # readings of a level
FALLS, HALF, BACK = 0.2, 0.5, 0.8  # shares of the height
OF_GAIN = 0.25  # share of what was gained
FEW = 12  # up to so few readings, their order decides, because noise cannot be measured
SAME = 1e-6  # of the scale; a smaller spread is rounding
SMALL = 0.05  # spread of the rewards, as a share of their mean: too little to learn from
CEILING = 0.9  # share of what the best answers get
SURE_CEILING = 0.95  # of rewards from 0 to 1, if it is not known what the best answers get
MOSTLY = 0.8  # share of the steps
MOST_DEAD = 0.6  # share of the groups


@dataclass(frozen=True)
class Course:
    """The course of a reward, in levels.

    Attributes:
        width: readings in a level.
        noise: standard error of a level.
        bottom: the lower end of the scale.
        lowest, least: the lowest level up to the best one, and the lowest since, of twice the width.
        best_step: the last step of the best level.
        step: the step from which on the reward is nearer to its level now than to its best, if it fell.
        rise: the surest rise from the beginning of the run to its end.
        twice: whether a loss was there one reading earlier too. One odd batch at the end is no fall.
    """

    series: Series
    width: int
    noise: float
    bottom: float
    first: float
    lowest: float
    least: float
    best: float
    now: float
    best_step: int
    step: int
    rise: "Rise"
    twice: bool = True

    @property
    def height(self) -> float:
        return max(self.best - self.bottom, SAME)

    @property
    def label(self) -> str:
        """What its levels are means of, for the text next to the numbers."""
        return f"means of {self.width} readings" if self.width > 1 else "single readings"

    @property
    def moved(self) -> str:
        """From where to where it went, with what the numbers are of: medians of both ends, or the means by which its
        rise was judged, if the medians show less of it."""
        start, now = beginning_of(self.series), now_of(self.series)
        if now - start < self.rise.end - self.rise.start:
            return self.rise.text
        return f"{start:.3g} ({beginning_label(self.series)}) to {now:.3g} ({now_label(self.series)})"

    @property
    def lost(self) -> float:
        """The loss since the best level, as a share of the height."""
        return (self.best - self.now) / self.height

    @property
    def of_gain(self) -> float:
        """The loss, as a share of the gain before it."""
        return (self.best - self.now) / max(self.best - self.lowest, self.height / 4)

    @property
    def surely(self) -> float:
        """The loss over the largest loss that noise explains, given that the best of so many levels is high by
        chance."""
        best_of_many = (2 * math.log(max(len(self.series.values) / self.width, 1))) ** 0.5
        sure = LOST_SURE if len(self.series.values) < ENOUGH else LOST_SURER
        return (self.best - self.now) / max((sure + best_of_many) * self.noise, SAME * self.height)

    @property
    def is_lost(self) -> bool:
        """True if noise does not explain the loss. For few readings, whose noise is not known, their order decides."""
        values = self.series.values
        before, after = np.split(values, [int(np.argmax(values)) + 1])
        in_order = len(values) <= FEW and len(before) > 1 and len(after) >= FEWEST_REWARDS - 2
        return self.surely > 1 or (in_order and bool(values[-(FEWEST_REWARDS - 2) :].max() < before.min()))

    @property
    def falls(self) -> bool:
        return self.twice and self.is_lost and self.lost > FALLS and self.of_gain > OF_GAIN

    @property
    def collapsed(self) -> bool:
        worst = (self.best - self.least) / self.height
        return self.twice and self.is_lost and max(worst, self.lost) > HALF and self.lost > 1 - BACK


@cached_per_run
def course_of(run: Readings) -> Course | None:
    """Returns the course of the reward; None if there are too few readings.

    Among several widths of a level, the one with the largest sure loss counts: a run may have died within a few steps,
    or lose a little over many.
    """
    series = run.get(REWARD)
    if series is None or len(series.steps) < FEWEST_REWARDS:
        return None
    course = _surest(series, run)
    if not (course.falls or course.collapsed) or len(series.steps) <= FEW:
        return course
    before = _surest(Series(series.steps[:-1], series.values[:-1]), run)
    return replace(course, twice=before.falls or before.collapsed)


def _surest(series: Series, run: Readings) -> Course:
    n = len(series.steps)
    widths = [width for width in WIDTHS if n / 30 <= width <= (n + 2) / 5] or WIDTHS[-1:]
    courses = [_course(series, run, width) for width in widths if width > 1 or n < 8]
    return max(courses, key=lambda course: (course.surely > 1, course.lost))


def _course(series: Series, run: Readings, width: int) -> Course:
    values = series.values
    levels = _level_means(values, width)
    at = int(levels.argmax())
    best, now, lowest = float(levels[at]), float(levels[-1]), float(levels[: at + 1].min())
    noise = level_error(values, width)
    bottom = 0.0
    if values.min() < 0:
        least = run.get(REWARD_MIN)
        bottom = min(float(np.median(least.values)), lowest) if least is not None else min(lowest, best - abs(best))
    around = values[max(at - 2, 0) : at + max(width, 3) + 2]
    if np.median(around) - bottom < HALF * (
        around.mean() - bottom
    ):  # rarely above the bottom: the level is high by chance
        noise = max(noise, float(around.std()) / width**0.5)
    edged = np.concatenate([values[:1], values, values[-1:]])
    # Medians of three readings: a single high one is not a recovery.
    short = np.median([edged[:-2], values, edged[2:]], axis=0)
    above = np.flatnonzero(short >= (best + now) / 2)
    fell = min(int(above[-1]) + 1, len(values) - 1) if above.size else at + width - 1
    return Course(
        series,
        width,
        noise,
        bottom,
        float(levels[0]),
        lowest,
        float(_level_means(values[at:], 2 * width).min()),
        best,
        now,
        int(series.steps[at + width - 1]),
        int(series.steps[fell]),
        _rise(values),
    )


def _level_means(values: np.ndarray, width: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(values, min(width, len(values))).mean(axis=1)


@dataclass(frozen=True)
class Rise:
    """A rise, or a fall if `errors` is negative, from the mean of the first `count` readings to that of the last ones.

    Attributes:
        errors: its size in standard errors.
        last: readings at the end.
    """

    errors: float
    start: float
    count: int
    end: float
    last: int

    @property
    def text(self) -> str:
        """The two means, with what they are of: the numbers from which the rise was judged."""
        start, end = _mean_label("first", self.count), _mean_label("last", self.last)
        return f"{self.start:.3g} ({start}) to {self.end:.3g} ({end})"


def _mean_label(side: str, count: int) -> str:
    return f"mean of the {side} {count}" if count > 1 else f"the {side} reading"


def _rise(values: np.ndarray) -> Rise:
    """Returns the surest rise from the first readings to the last third.

    A run that learns at once shows it only in its first readings, a noisy run in thirds. Because two starts are tried,
    and few readings may be odd, the shorter start has to be surer.
    """
    n = len(values)
    third = max(n // 3, 1)
    end = float(values[-third:].mean())
    found = []
    for count, trust in ((third, 1.0), (max(n // 10, 1), 0.75)):
        start = float(values[:count].mean())
        error = math.hypot(level_error(values, count), level_error(values, third))
        error = max(error, SAME * float(np.abs(values).max()), 1e-12)
        found.append(Rise(trust * (end - start) / error, start, count, end, third))
    return max(found, key=lambda rise: rise.errors)


@finding("reward_constant", "constant | varies", family="reward_spread", needs=(REWARD_MAX, REWARD_MIN))
def reward_constant(run: Readings) -> Seen:
    """All answers get the same reward, below the highest one seen, so that nothing can be learnt from it."""
    series, rows = run.get(REWARD), _rows_of_spread(run)
    if series is None or not len(rows):
        return None
    values, top = series.values, run.values(REWARD_MAX)
    scale = SAME * max(float(np.abs(values).max()), SAME)
    same = rows[:, 1] <= scale
    began = holds_from(same, MOSTLY)
    risen = values[-1] - values[: max(len(values) // 4, 1)].mean() > scale
    if began > len(same) / 2 or (risen and top.size and now_of(series) >= top.max() - scale):
        return "varies", "answers get different rewards"
    return "constant", f"all answers of a step get a reward of {values[-1]:.3g}", int(rows[began, 0])


def _rows_of_spread(run: Readings) -> np.ndarray:
    """Returns [steps, 2]: a step, and the spread of the rewards of its answers. If no spread is logged, it is the
    distance of the step's mean from the median of all; no rows for too few steps."""
    bounds = run.joined(REWARD_MAX, REWARD_MIN)
    if len(bounds):
        return np.column_stack([bounds[:, 0], bounds[:, 1] - bounds[:, 2]])
    deviations = run.joined(SPREAD, REWARD)
    if len(deviations):
        small = deviations[:, 1] <= SMALL * np.abs(deviations[:, 2])
        return np.column_stack([deviations[:, 0], np.where(small, 0.0, deviations[:, 1])])
    series = run.get(REWARD)
    if series is None or len(series.steps) < FEWEST_REWARDS:
        return np.empty((0, 2))
    return np.column_stack([series.steps, np.abs(series.values - np.median(series.values))])


@finding("reward_fell", "collapsed falls | holds", family="reward", needs=(REWARD,))
def reward_fell(run: Readings) -> Seen:
    """The reward is far below its best level."""
    course = require_logged(course_of(run))
    if course.collapsed or course.falls:
        level = "collapsed" if course.collapsed else "falls"
        return level, f"the reward fell from {course.best:.2g} to {course.now:.2g} ({course.label})", course.step
    return "holds", f"the reward is {course.now:.2g}, its best level {course.best:.2g}"


@finding("reward_peaked", "peaked | still_best", family="reward", needs=(REWARD,))
def reward_peaked(run: Readings) -> Seen:
    """The best level was reached during the run, and is lost again."""
    course = require_logged(course_of(run))
    if course.falls and course.best - course.first > FALLS * course.height:
        return "peaked", f"the reward was best at step {course.best_step}, at {course.best:.2g}", course.best_step
    return "still_best", "the reward has no peak behind it"


@finding("fall_came_back", "| yes no", needs=(REWARD,))
def fall_came_back(run: Readings) -> Seen:
    """The reward once fell below half of its best level, and came back in part."""
    course = course_of(run)
    if course is None or len(course.series.values) < 20 or course.series.values.min() < 0:
        return None
    levels = np.convolve(course.series.values, np.full(5, 1 / 5), mode="valid")
    best = np.maximum.accumulate(levels)
    least = float((levels[best > 0] / best[best > 0]).min()) if (best > 0).any() else 1.0
    if least < 0.5 and best.max() > 0 and not course.collapsed:
        return "yes", f"the reward fell to {least:.0%} of its best level, and came back in part"
    return "no", f"the reward was never below {least:.0%} of its best level and back"


@finding("reward_flat", "flat | fell at_ceiling rose_little rose", family="reward_rise", needs=(REWARD,))
def reward_flat(run: Readings) -> Seen:
    """The reward did not move over the whole run."""
    course = require_logged(course_of(run))
    text = f"the reward went from {course.moved}"
    if course.falls or course.collapsed:
        return "fell", text
    if course.rise.errors >= SURE:
        return "rose", text
    if course.rise.errors >= LIKELY:
        return "rose_little", f"{text}, which noise may be"
    if at_ceiling(run, course):
        return "at_ceiling", f"{text}, near the best that an answer gets"
    return "flat", f"{text}: no more than noise"


def at_ceiling(run: Readings, course: Course) -> bool:
    """Returns True if the reward is near the best that an answer gets."""
    most, values = run.values(REWARD_MAX), course.series.values
    if most.size:
        return bool(course.now > CEILING * most.max() > 0)
    return bool(0 <= values.min() <= values.max() <= 1 and course.now > SURE_CEILING)


@finding("reward_gain", "| nothing stopped_low little much", needs=(REWARD, REWARD_MAX))
def reward_gain(run: Readings) -> Seen:
    """How much of the possible gain, up to the reward of the best answers, was made."""
    early, late, best = run.early(REWARD), run.late(REWARD), run.late(REWARD_MAX)
    if early is None or late is None or best is None or best <= early:
        return None
    share = (late - early) / (best - early) if late < 0.9 * best else 1.0
    values = run.values(REWARD)
    third, sixth = len(values) // 3, len(values) // 6
    if share < 0.1:
        return "nothing", f"the reward has gained {max(share, 0):.0%} of what was to be had"
    if len(values) >= 4 * LEVEL_READINGS and best > 0:
        last, before = values[-sixth:].mean(), values[-third:-sixth].mean()
        if last < 0.7 * best and last < 1.03 * before:
            return "stopped_low", f"the reward rises no more, at {last / best:.0%} of what the best answers get"
    if share < 0.35:
        return "little", f"the reward has gained only {share:.0%} of what was to be had"
    return "much", f"the reward has gained {share:.0%} of what was to be had"


@finding("validation_fell", "fell | holds", family="validation")
def validation_fell(run: Readings) -> Seen:
    """The score of a validation set is far below its best. Of a set whose mean is logged, the best of n answers and
    the majority's do not count: they scatter far more."""
    known = ((name, quantity_of(name)) for name in run.names())
    names = [name for name, quantity in known if quantity is not None and quantity.name == VALIDATION]
    means = {name.rpartition("/")[0] for name in names if "/mean@" in name}
    names = [name for name in names if not (OF_SEVERAL.search(name) and OF_SEVERAL.split(name)[0] in means)]
    scores = {name: series for name in names if len((series := run.need(name)).steps) >= 3}
    falls = []
    for name, series in scores.items():
        values, at = series.values, int(series.values.argmax())
        best, now = float(values[at]), float(values[-2:].mean() if len(values) - at > 2 else values[-1])
        if best - now > max(0.15 * best, SURE * difference_noise(values)) and best > 0:
            falls.append((best - now, f"{name} fell from {best:.3g} to {now:.3g}", int(series.steps[at])))
    if falls:
        _, text, step = max(falls)
        return "fell", text, step
    return ("holds", "the validation holds") if scores else None


@finding("groups_dead", "most | some few", family="groups", needs=(DEAD_GROUPS,))
def groups_dead(run: Readings) -> Seen:
    """Most groups have no spread, so that they teach nothing."""
    share = require_logged(run.late(DEAD_GROUPS))
    level = "most" if share >= MOST_DEAD else "some" if share >= 0.2 else "few"
    return level, f"{share:.0%} of the groups have answers of one reward only"


@finding("group_size", "small | enough", needs=(DEAD_GROUPS, REWARD))
def group_size(run: Readings) -> Seen:
    """The groups are too small for the success rate: most have no spread, although prompts are neither always nor never
    solved.

    With a success rate p, a group of n independent answers has no spread with probability p^n + (1 - p)^n.
    """
    share, reward, most, least = (run.late(name) for name in (DEAD_GROUPS, REWARD, REWARD_MAX, REWARD_MIN))
    if share is None or reward is None or most is None or least is None or most <= least:
        return None
    rate = (reward - least) / (most - least)
    flat = (course := course_of(run)) is not None and course.rise.errors < SURE
    if share >= MOST_DEAD and 0.05 < rate < 0.8 and flat and rate**4 + (1 - rate) ** 4 < share:
        text = f"at a rate of success of {rate:.2f}, {share:.0%} of the groups have no spread: too few answers a prompt"
        return "small", text
    return "enough", f"at a rate of success of {rate:.2f}, {share:.0%} of the groups have no spread"


@finding("advantages", "zero | some", family="reward_spread", needs=("critic/advantages/max",))
def advantages(run: Readings) -> Seen:
    """All advantages are 0."""
    most = require_logged(run.late("critic/advantages/max"))
    return "zero" if most < SAME else "some", f"the largest advantage is {most:.2g}"


@finding("prompts_matter", "no | unclear yes", family="prompts", needs=(PROMPT_EFFECT,))
def prompts_matter(run: Readings) -> Seen:
    """Whether rewards depend on the prompt. They do not if the grader cannot separate right answers from wrong ones.

    F of the rewards by prompt is then 1. If F is not logged, batches are compared with coin tosses: prompts are not
    equally hard, so the mean of a batch scatters more than the rewards of single answers explain (1.3 to 3 times in the
    lab).
    """
    effect = run.values(PROMPT_EFFECT)
    if len(effect) >= 2 * LEVEL_READINGS:
        mean = float(effect.mean())
        text = f"rewards differ between prompts {mean:.2g} times as much as within them (F)"
        return "no" if mean < 1.15 else "yes" if mean > 1.3 else "unclear", text
    reward_scatter = require_logged(_reward_scatter(run))
    text = f"batches differ in their mean reward {reward_scatter:.2g} times as much as by tossing coins"
    return "no" if reward_scatter < 0.5 else "yes" if reward_scatter > 1.2 else "unclear", text


def _reward_scatter(run: Readings) -> float | None:
    """Returns the variance of the batches' mean reward, as a multiple of that of coin tosses."""
    _, rewards, most, least = run.joined(REWARD, REWARD_MAX, REWARD_MIN).T
    # Rewards are of the whole step, and so is verl's total. router/tokens is the mean of the step's local updates,
    # over the trajectories that were compared; in the lab, which logs no total, these are all of the step.
    _, total, prompt, response = run.joined("perf/total_num_tokens", "prompt_length/mean", LENGTH).T
    _, tokens, length = run.joined("router/tokens", LENGTH).T
    counts = total / (prompt + response) if total.size else tokens / length
    if len(rewards) < 4 * LEVEL_READINGS or not counts.size:
        return None
    span = ((rewards - least) * (most - rewards)).mean()
    jumps = np.square(np.diff(rewards)).mean() / 2
    return float(jumps * counts.mean() / span) if span > 0 else None
