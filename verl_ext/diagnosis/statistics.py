"""The statistics of one series of readings: its noise, its levels, its rise and fall, jumps and spikes.

Report, guard and watch ask this file, so that all mean the same by a fall, a collapse and a jump. It knows no metric.

**Noise.** Readings of neighbouring steps depend on each other, so n of them have the information of n (1 - rho) / (1 +
rho) independent ones, with rho the correlation of neighbours (Bayley and Hammersley, 1946; Zieba, 2010, equations 13
and 20 for the variance). The run may rise, fall and jump around a level, so its noise is taken from the differences of
neighbours, or from short stretches, each around its own line.

**Falls.** A level is the mean of WIDTHS readings in a row. Heights are measured from the bottom of the scale. One rule
with three grades compares the level now with the best one:

    falls       it lost FALLS of its height and a quarter of what it had gained; or half as much, if its whole course
                falls
    collapsed   it lost half of its height, and has not come back to BACK of it
    dead        it lost nine tenths of its height, and has stayed there for STAYS readings (`dead_since`)

The first two need a loss of more than noise, given that the best of so many levels is high by chance. The third is the
guard's, which may stop a run that trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.diagnosis.growth import FLOOR, LARGEST_AUTOCORRELATION, scatter, spread
from verl_ext.diagnosis.series import NOW_READINGS, Series, beginning_label, beginning_of, now_label, now_of

ENOUGH = 32  # from so many readings on, stretches show the correlation of neighbours
STRETCHES = 8  # parts of a run, each around its own line, in which its noise is measured
JUMPS = 2  # parts with the most scatter, which are left out: the values may have jumped there

FEWEST = 5  # readings without which a course cannot be judged
SURE, LIKELY = 3.0, 2.0  # standard errors of a rise, and of a small rise
FELL_SURE = 4.0  # of a fall of the whole course, because two starts are tried
LOST_SURE = 2.75  # standard errors of a loss, beyond what the best of so many levels has by chance
WIDTHS = (1, 2, 5, 10, 20)  # readings of a level
FALLS, HALF, BACK, NINE_TENTHS = 0.2, 0.5, 2 / 3, 0.9  # shares of the height
OF_GAIN = 0.25  # share of what was gained
ONCE_MORE = 0.75  # of these bounds, which the reading before the last has to show too: one odd batch is no fall
FEW = 12  # up to so few readings, one more changes the noise too much for ONCE_MORE
LEAST_TAIL, MOST_TAIL, LOW = 3, 8, 0.1  # last readings that are low in order, and the share of those before as low
SAME = 1e-6  # of the scale; a smaller spread is rounding
STRETCH, STAYS = 8, 24  # readings of a level of `dead_since`; readings at the bottom that count as staying there
KNOWN = -2.0  # the scale of a reward below this is unknown: DAPO's penalty for overlong answers reaches -2
DEVIATIONS = 3.0  # that readings leave a calm level by

JUMP_BEFORE, JUMP_LASTS = 8, 3  # readings with which a jump is compared, and for which it lasts
SURE_JUMP = 2.0  # times the multiple of a jump that is asked for, if fewer than JUMP_LASTS readings are before it
JUMP_NOW, JUMP_DEVIATIONS = 5.0, 6.0  # times the median, and robust deviations above it, of a jump in the last reading
SPIKES_SHARE = 0.25  # share of the readings that may be spikes


def difference_noise(values: np.ndarray) -> float:
    """Returns the standard deviation of one reading around a slow course, from the differences of neighbours.

    The largest tenth of the differences is left out, because the readings may have jumped there. If neighbours depend
    on each other, the result is too small.
    """
    squares = np.sort(np.square(np.diff(values)))
    kept = squares[: len(squares) - max(len(squares) // 10, len(squares) > 2)]
    return float(np.sqrt(kept.mean() / 2)) if kept.size else 0.0


def level_error(values: np.ndarray, count: int) -> float:
    """Returns the standard error of the mean of `count` of these readings in a row.

    From ENOUGH readings on, it includes the dependence of neighbours. Fewer readings do not show that, and give a poor
    estimate of the noise: for these it is a little larger.
    """
    error = difference_noise(values) / count**0.5
    if len(values) >= ENOUGH:
        return max(error, mean_error(values, count, caution=1.0))
    return error * (1 + 2 / len(values))


def mean_error(values: np.ndarray, count: float, *, caution: float = 0.0) -> float:
    """Returns the standard error of the mean of `count` readings in a row, whose neighbours may depend on each other.

    Args:
        values: at least four for each of STRETCHES.
        caution: standard errors that are added to the correlation of neighbours.
    """
    parts = sorted(map(_around_its_line, np.array_split(values, STRETCHES)), key=np.var)[:-JUMPS]
    length = sum(map(len, parts)) / len(parts)
    power = sum(float(np.mean(part**2)) for part in parts) / len(parts) * length / (length - 2)
    if power == 0:
        return 0.0
    rho: float = sum(float(np.mean(part[1:] * part[:-1])) for part in parts) / len(parts) / power
    # Short parts hide some of it.
    rho += (2 + 4 * max(rho, 0.0)) / length + caution / float(np.sqrt(length * len(parts)))
    rho = min(max(rho, 0.0), LARGEST_AUTOCORRELATION)
    return float(np.sqrt(power / count * (1 + rho) / (1 - rho)))


def _around_its_line(values: np.ndarray) -> np.ndarray:
    """Returns the residuals of a least-squares line: a steady rise or fall is no noise."""
    at = np.arange(len(values)) - (len(values) - 1) / 2
    around = values - values.mean()
    return around - at * float(at @ around) / float(at @ at)


@dataclass(frozen=True)
class Course:
    """The course of a series, in levels.

    Attributes:
        width: readings in a level.
        noise: standard error of a level.
        bottom: the lower end of the scale.
        lowest, least: the lowest level up to the best one, and the lowest since, of twice the width.
        now: the last level; for short levels, the median of the last readings if that is higher.
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
    def fell(self) -> str:
        """From where to where it fell, with what the numbers are of; also the lowest level, if it came back in part."""
        is_median = self.now == now_of(self.series)
        now = f"{self.now:.2g} ({now_label(self.series) if is_median else _mean_label('last', self.width)})"
        best = f"{self.best:.2g} ({f'mean of {self.width} readings' if self.width > 1 else 'a single reading'})"
        if self.collapsed and self.lost <= HALF:
            return f"{best} to {self.least:.2g} (mean of {2 * self.width}), and is {now} now"
        return f"{best} to {now}"

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
    def is_open(self) -> bool:
        """True if it may have fallen, and there are too few readings to say."""
        few = len(self.series.values) <= FEW and abs(self.rise.errors) < SURE
        return few and self.lost > FALLS and not self.is_lost

    @property
    def of_gain(self) -> float:
        """The loss, as a share of the gain before it."""
        return (self.best - self.now) / max(self.best - self.lowest, self.height / 4)

    @property
    def surely(self) -> float:
        """The loss over the largest loss that noise explains, given that the best of so many levels is high by
        chance."""
        luck = (2 * math.log(max(len(self.series.values) / self.width, 1))) ** 0.5
        return (self.best - self.now) / max((LOST_SURE * 2**0.5 + luck) * self.noise, SAME * self.height)

    @property
    def is_lost(self) -> bool:
        """True if noise does not explain the loss: its size shows that, or the order of the readings, where the last
        ones are all lower than nearly all before."""
        values = self.series.values
        tail = min(max(len(values) // 4, LEAST_TAIL), MOST_TAIL)
        low = values[:-tail] <= values[-tail:].max()
        in_order = 0 < np.argmax(values) < len(values) - tail and low.mean() <= LOW
        return self.surely > 1 or bool(in_order)

    @property
    def falls(self) -> bool:
        return self.twice and self.has_fallen(1.0)

    def has_fallen(self, share: float) -> bool:
        down = (self.rise.start - self.rise.end) / self.height if self.rise.errors <= -FELL_SURE else 0.0
        whole = min(down, self.lost) > share * FALLS / 2 and len(self.series.values) >= ENOUGH
        return whole or (self.is_lost and self.lost > share * FALLS and self.of_gain > share * OF_GAIN)

    @property
    def collapsed(self) -> bool:
        worst = (self.best - self.least) / self.height
        return self.twice and self.is_lost and max(worst, self.lost) > HALF and self.lost > 1 - BACK


def course_of(series: Series | None, least: Series | None = None) -> Course | None:
    """Returns the course of a series; None if there are too few readings.

    Among several widths of a level, the one with the largest sure loss counts: a run may have died within a few steps,
    or lose a little over many.

    Args:
        least: the least value of each step, such as the lowest reward of an answer, if it is logged. The bottom of a
            scale with negative readings is its median, else the lowest level before the best. Otherwise it is 0.
    """
    if series is None or len(series.steps) < FEWEST:
        return None
    course = _surest(series, least)
    if not (course.falls or course.collapsed) or len(series.steps) <= FEW:
        return course
    before = _surest(Series(series.steps[:-1], series.values[:-1]), least)
    return replace(course, twice=before.has_fallen(ONCE_MORE) or before.collapsed)


def _surest(series: Series, least: Series | None) -> Course:
    n = len(series.steps)
    widths = [width for width in WIDTHS if n / 30 <= width <= (n + 2) / 5] or WIDTHS[-1:]
    courses = [_course(series, least, width) for width in widths if width > 1 or n < 8]
    return max(courses, key=lambda course: (course.surely > 1, course.lost))


def _course(series: Series, least: Series | None, width: int) -> Course:
    values = series.values
    levels = level_means(values, width)
    at = int(levels.argmax())
    best, now, lowest = float(levels[at]), float(levels[-1]), float(levels[: at + 1].min())
    if width <= NOW_READINGS and len(values) > FEW:  # two odd batches move a short mean
        now = max(now, now_of(series))
    noise = level_error(values, width)
    bottom = 0.0
    if values.min() < 0:
        bottom = min(float(np.median(least.values)), lowest) if least is not None else min(lowest, best - abs(best))
    around = values[max(at - 2, 0) : at + max(width, 3) + 2]
    if np.median(around) - bottom < HALF * (around.mean() - bottom):  # rarely above the bottom: high by chance
        noise = max(noise, float(around.std()) / width**0.5)
    edged = np.concatenate([values[:1], values, values[-1:]])
    # Medians of three readings: a single high one is not a recovery.
    short = np.median([edged[:-2], values, edged[2:]], axis=0)
    above = np.flatnonzero(short >= (best + now) / 2)
    fell = min(int(above[-1]) + 1, len(values) - 1) if above.size else at + width - 1
    worst = float(level_means(values[at:], 2 * width).min())
    ends = float(levels[0]), lowest, worst, best, now
    at_best, at_fall = int(series.steps[at + width - 1]), int(series.steps[fell])
    return Course(series, width, noise, bottom, *ends, at_best, at_fall, rise_of(values))


def level_means(values: np.ndarray, width: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(values, min(width, len(values))).mean(axis=1)


def level_medians(values: np.ndarray, width: int) -> np.ndarray:
    return np.median(np.lib.stride_tricks.sliding_window_view(values, min(width, len(values))), axis=1)


@dataclass(frozen=True)
class Rise:
    """A rise, or a fall if `errors` is negative, from the mean of the first `count` readings to that of the last ones.

    Attributes:
        errors: its size in standard errors.
        error: one standard error of it.
        last: readings at the end.
    """

    errors: float
    error: float
    start: float
    count: int
    end: float
    last: int

    @property
    def text(self) -> str:
        """The two means, with what they are of: the numbers from which the rise was judged."""
        start, end = _mean_label("first", self.count), _mean_label("last", self.last)
        return f"{self.start:.3g} ({start}) to {self.end:.3g} ({end})"

    @property
    def beyond_noise(self) -> str:
        """`text`, with what the noise allows to say of it. Only this test may call a difference noise."""
        if abs(self.errors) >= SURE:
            return f"{self.text}, more than noise (+- {self.error:.2g})"
        return f"{self.text}{', which may be noise' if abs(self.errors) >= LIKELY else ': no more than noise'}"


def _mean_label(side: str, count: int) -> str:
    return f"mean of the {side} {count}" if count > 1 else f"the {side} reading"


def rise_of(values: np.ndarray) -> Rise:
    """Returns the surest rise from the first readings to the last third; the surest move if no rise is likely.

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
        found.append(Rise(trust * (end - start) / error, error, start, count, end, third))
    surest = max(found, key=lambda rise: rise.errors)
    return surest if surest.errors >= LIKELY else max(found, key=lambda rise: abs(rise.errors))


def dead_since(values: np.ndarray) -> tuple[float, int, int] | None:
    """Returns the best level of readings that have lost nine tenths of it for good, the index at which they began to
    fall, and the one up to which they fell; None if they have not.

    A level is the mean of STRETCH readings in a row (docs/report.md lists the rule's false alarms):

    - The best is the highest level before the last STAYS readings. The scale reaches from the best to the bottom, which
      is 0, or -1 if a reading is negative. If a reading up to the best is below -1, or any reading below KNOWN, the
      bottom is unknown and the run is not judged.
    - The mean of STAYS readings in a row has come into the lowest tenth of the scale. No level since then, nor in the
      last STAYS readings, has left the lowest fifth.
    - None of the last STAYS readings is as high as the second-lowest reading of the best level.
    """
    early = len(values) - STAYS
    if early < STRETCH:
        return None
    levels = level_means(values, STRETCH)  # index i: the level that begins at reading i
    at = int(levels[: early - STRETCH + 1].argmax())
    best, calm = float(levels[at]), values[at : at + STRETCH]
    bottom = 0.0 if values.min() >= 0 else -1.0
    unknown = values[: at + STRETCH].min() < bottom or values.min() < KNOWN
    if unknown or values[early:].max() >= np.sort(calm)[1]:
        return None
    tenth = (1 - NINE_TENTHS) * (best - bottom)
    high = np.flatnonzero(levels > bottom + 2 * tenth)
    if not high.size or high[-1] >= early or level_means(values[high[-1] + 1 :], STAYS).min() > bottom + tenth:
        return None
    # The scatter of calm readings may be as wide as the fall.
    low = float(np.median(calm)) - min(DEVIATIONS * scatter(calm), (best - bottom) / 2)
    left = leaves(values[at + STRETCH :] < low)
    return best, early if left is None else min(at + STRETCH + left, early), int(high[-1]) + STRETCH


def leaves(outside: np.ndarray) -> int | None:
    """Returns the index of the first reading outside that begins STRETCH readings with at most one inside."""
    if len(outside) < STRETCH:
        return None
    counts = np.lib.stride_tricks.sliding_window_view(outside, STRETCH).sum(axis=1)
    begins = np.flatnonzero(outside[: len(counts)] & (counts >= STRETCH - 1))
    return int(begins[0]) if begins.size else None


def largest_jump(heights: np.ndarray, times: float, floor: float) -> int | None:
    """Returns the index of the largest jump to `times` the readings before, past `floor`, that lasts for JUMP_LASTS
    readings; None if there is none.

    Args:
        heights: readings of a quantity that is never negative.
    """
    if len(heights) < JUMP_LASTS + 1:
        return None
    after = np.lib.stride_tricks.sliding_window_view(np.append(heights, [heights[-1]] * 2), JUMP_LASTS)
    possible = np.flatnonzero(after.min(axis=1)[1:-1] > np.maximum(heights[:-2], floor / times)) + 1
    jumps: dict[int, float] = {}  # index -> times the readings before
    for i in possible.tolist():
        before, now = heights[max(i - JUMP_BEFORE, 0) : i], float(after[i].min())
        asked = times if len(before) >= JUMP_LASTS else SURE_JUMP * times
        if now <= max(before.max(), floor, asked**0.5 * float(before[-1])):  # the last: no ramp over many readings
            continue
        usual = max(float(np.median(before)), FLOOR)  # the slowest part comes last
        if now > asked * usual:
            jumps[i] = now / usual
    return max(jumps, key=jumps.__getitem__, default=None)


def jump_bound(before: Sequence[float]) -> tuple[float, float] | None:
    """Returns the median of the last JUMP_BEFORE readings, and the height past which the next one has jumped; None for
    too few readings. Whether a jump lasts is not known yet: it must be beyond the scatter of the readings too."""
    if len(before) < JUMP_LASTS:
        return None
    usual, deviation = spread(before[-JUMP_BEFORE:])
    return usual, max(JUMP_NOW * usual, usual + JUMP_DEVIATIONS * deviation)


def spikes(sizes: np.ndarray, times: float, least: float = 0.0) -> tuple[np.ndarray, float]:
    """Returns which readings are single ones of more than `times` the usual size and more than `least`, and the usual
    size: the median of those above 0. None are, if more than SPIKES_SHARE would be."""
    usual = float(np.median(sizes[sizes > SAME])) if (sizes > SAME).any() else 0.0
    past = (sizes > times * usual) & (sizes > least)
    if not usual or past.mean() > SPIKES_SHARE:
        past = np.zeros_like(past)
    return past, usual


def step_change(series: Series) -> tuple[int, float] | None:
    """Returns the step at which a series moved to another level within one reading and stayed there, and by how many
    times its noise; the largest of several moves, None for too few readings.

    A level is the mean of JUMP_BEFORE readings, or of all on a side with fewer, at least JUMP_LASTS. Only noise around
    the two levels counts.
    """
    values = series.values - series.values.mean()
    n = len(values)
    at = np.arange(JUMP_LASTS, n - JUMP_LASTS + 1)
    if not at.size:
        return None
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (values, values**2))
    start, end = np.maximum(at - JUMP_BEFORE, 0), np.minimum(at + JUMP_BEFORE, n)
    before, after = (sums[at] - sums[start]) / (at - start), (sums[end] - sums[at]) / (end - at)
    rest = squares[end] - squares[start] - (at - start) * before**2 - (end - at) * after**2
    noise = np.sqrt(np.maximum(rest, 0) / (end - start - 2))
    sizes = (after - before) / np.maximum(noise, max(SAME * float(np.abs(series.values).max()), FLOOR))
    largest = int(np.abs(sizes).argmax())
    return int(series.steps[at[largest]]), float(sizes[largest])


def level_change(series: Series, step: int) -> float | None:
    """Returns the level from a step on, as a multiple of the level before it; None for too few readings."""
    at = int(np.searchsorted(series.steps, step))
    before, after = np.abs(series.values[max(at - JUMP_BEFORE, 0) : at]), np.abs(series.values[at : at + JUMP_BEFORE])
    if min(len(before), len(after)) < JUMP_LASTS:
        return None
    return max(float(np.median(after)), FLOOR) / max(float(np.median(before)), FLOOR)
