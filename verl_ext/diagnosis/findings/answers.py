"""Findings about the answers: whether they grow or shrink, are cut at the limit, loop, or are rewarded for length."""

from collections.abc import Mapping

import numpy as np

from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.findings.reward import at_ceiling, reward_course
from verl_ext.diagnosis.names import LENGTH, REWARD, REWARD_MAX, REWARD_MIN
from verl_ext.diagnosis.series import (
    LEVEL_READINGS,
    NOW_READINGS,
    Readings,
    Series,
    beginning_of,
    cached_per_run,
    now_of,
    require_logged,
    step_from,
)
from verl_ext.diagnosis.statistics import LIKELY, SURE

CUT = "response_length/clip_ratio"
SURELY_CUT = "answers/cut"  # ours: at the limit, without an end token
LOOPS = "answers/looped"
EMPTY = "response/aborted_ratio"  # verl's: without a token, not even an end token
LONGEST, SHORTEST = "response_length/max", "response_length/min"
MOST_CUT, MANY_CUT = 0.5, 0.2  # shares of the answers
MANY_LOOP, SOME_LOOP = 0.2, 0.05
MANY_EMPTY, SOME_EMPTY = 0.2, 0.02
EXPLODED = 2.5  # times the shortest level before
GREW = 1.5  # times the length at the start
SHRANK, VANISHED = 5.0, 10.0  # times shorter than at the start
SHORT = 64  # tokens; answers of one length may be complete if they are shorter
ALIKE = 1e-3  # relative spread of lengths that are all the limit
FEWEST_LENGTHS = 3  # readings of a length
LASTING = 0.8  # share of the readings from the step on at which something began


@cached_per_run
def cut_share(run: Readings) -> Series | None:
    """Returns the share of answers that were cut at the length limit; verl's metric counts those as long as the longest
    of their batch.

    If it is not logged, all answers of a step count as cut if the longest and the shortest have one length, the run's
    largest; or if the mean length, of at least SHORT tokens, is the same in nearly all steps. No model ends its answers
    like that.
    """
    for name in (SURELY_CUT, CUT):
        if (logged := run.get(name)) is not None:
            return logged
    ends = run.joined(LENGTH, LONGEST, SHORTEST)
    if len(ends):
        same = (ends[:, 2] - ends[:, 3] <= ALIKE * ends[:, 2]) & (ends[:, 2] >= (1 - ALIKE) * ends[:, 2].max())
        return Series(ends[:, 0].astype(np.int64), same.astype(np.float64))
    length = run.get(LENGTH)
    if length is None or len(length.steps) < 2 * FEWEST_LENGTHS or float(np.median(length.values)) < SHORT:
        return None
    at_limit = length.values >= (1 - ALIKE) * length.values.max()
    return Series(length.steps, at_limit.astype(np.float64)) if at_limit.mean() >= 0.9 else None


def share_now(series: Series) -> float:
    """Returns a share of the answers now: the mean of the last readings, since the median of shares of few answers is
    0 or 1."""
    return float(series.values[-LEVEL_READINGS:].mean())


@finding(
    "answers_cut",
    "most many | few",
    family="cut",
    needs=(CUT,),
    subsumed_by=("cut_and_low",),
    check="a few answers to their end: whether the model ever ends one; the limit against its usual length",
)
def answers_cut(run: Readings) -> Seen:
    """Answers are cut at the length limit, before they have given the result."""
    return _share_seen(require_logged(cut_share(run)), {"most": MOST_CUT, "many": MANY_CUT}, "are cut at the limit")


def _share_seen(series: Series, limits: Mapping[str, float], words: str) -> Seen:
    """Returns the first level whose limit the share of answers reaches, and the step at which it began; else `few`."""
    now = share_now(series)
    text = f"{now:.0%} of the answers {words}"
    for level, limit in limits.items():
        if now >= limit:
            step = step_from(series, series.values >= limit, LASTING)
            return level, f"{text} ({limit:.0%} or more since step {step})", step
    return "few", text


@finding(
    "answers_loop", "many some | few", needs=(LOOPS,), check="the looping answers; the sampling's temperature and top_p"
)
def answers_loop(run: Readings) -> Seen:
    """Answers end in a loop of the same few tokens."""
    return _share_seen(run.need(LOOPS), {"many": MANY_LOOP, "some": SOME_LOOP}, "end in a loop")


@finding("answers_empty", "many some | few", needs=(EMPTY,), check="the rollout's log: which requests were aborted")
def answers_empty(run: Readings) -> Seen:
    """Answers have no token. An answer that the model itself ends has at least an end token."""
    return _share_seen(run.need(EMPTY), {"many": MANY_EMPTY, "some": SOME_EMPTY}, "have no token")


@finding("cut_began", "| at_once later", family="cut", needs=(CUT,))
def cut_began(run: Readings) -> Seen:
    """Whether answers were cut from the start, or grew until they were."""
    series = cut_share(run)
    if series is None or share_now(series) < MANY_CUT:
        return None
    start, now = beginning_of(series), share_now(series)
    text = f"{now:.0%} of the answers are cut at the limit, {start:.0%} in the first steps"
    return "at_once" if start >= MOST_CUT * now else "later", text


@finding("cut_and_low", "| yes no", needs=(CUT, REWARD))
def cut_and_low(run: Readings) -> Seen:
    """Most answers are cut, and the reward is low: they are cut before they have given the result.

    Answers of one length may all reach the limit and be complete. Low means the lowest quarter of the scale, whose top
    is the best reward of an answer, or at least 1 if that is not logged. Of answers that are known to lack their end,
    it is enough that the reward does not rise, and is not at its ceiling.
    """
    cut, series, course = cut_share(run), run.get(REWARD), reward_course(run)
    if cut is None or series is None:
        return None
    now, best = now_of(series), run.values(REWARD_MAX)
    bottom = course.bottom if course else min(0.0, *run.values(REWARD_MIN), *series.values)
    top = float(best.max()) if best.size else max(1.0, float(series.values.max()))
    low = now - bottom < 0.25 * max(top - bottom, 1e-9) or top <= bottom
    text = f"{share_now(cut):.0%} of the answers are cut at the limit, and the reward is {now:.2g}"
    long = len(series.values) >= 2 * LEVEL_READINGS  # in a short run, no reward has risen yet
    stands = course is not None and long and course.rise.errors < LIKELY and not at_ceiling(run, course)
    if not low and stands and run.get(SURELY_CUT) is not None:
        low, text = True, f"{share_now(cut):.0%} of the answers are cut, and the reward ({now:.2g}) does not rise"
    return ("yes" if low and share_now(cut) >= MOST_CUT else "no"), text


@cached_per_run
def _lengths(run: Readings) -> tuple[Series, float, float, float] | None:
    """Returns the length, its first level, its lowest level, and the level now."""
    series, reward = run.get(LENGTH), run.get(REWARD)
    if series is None or len(series.steps) < FEWEST_LENGTHS:
        return None
    if reward is not None and (reward.steps < series.steps[0]).mean() > 0.05:
        return None  # a length that is logged only later does not show its growth
    width = min(max(len(series.values) // 10, 1), 10)
    levels = np.lib.stride_tricks.sliding_window_view(series.values, width).mean(axis=1)
    if levels.min() <= 0:
        return None
    return series, float(levels[0]), float(levels.min()), now_of(series, min(max(width, 3), NOW_READINGS))


@finding("length_exploded", "exploded | grew steady", family="length", needs=(LENGTH,))
def length_exploded(run: Readings) -> Seen:
    """Answers have grown to a multiple, and the reward did not rise with them or they are cut.

    In a sound run, answers may grow as it learns: the reward rises with the length.
    """
    found = require_logged(_lengths(run))
    series, first, shortest, now = found
    text = f"answers grew from {shortest:.0f} to {now:.0f} tokens"
    if now < EXPLODED * shortest or now < GREW * first:
        if now > GREW * first:
            return "grew", f"answers are {now / first:.2g} times as long as at the start"
        return "steady", f"answers are {now / first:.2g} times as long as at the start"
    course, cut = reward_course(run), cut_share(run)
    pays = course is not None and not course.falls and course.rise.errors >= SURE
    if pays and (cut is None or share_now(cut) < MANY_CUT):
        return "grew", f"{text}, and the reward rose with them"
    middle = (now * shortest) ** 0.5
    step = step_from(series, series.values > middle, LASTING)
    return "exploded", f"{text} (past {middle:.0f} since step {step})", step


@finding("length_collapsed", "collapsed | no", family="length", needs=(LENGTH,))
def length_collapsed(run: Readings) -> Seen:
    """Answers have become very short without a gain in reward, or nothing is left of them."""
    series, first, _, now = require_logged(_lengths(run))
    course = reward_course(run)
    gained = course is not None and not course.falls and course.rise.errors >= SURE
    if now < first / (VANISHED if gained else SHRANK):
        step = step_from(series, series.values < first / SHRANK, LASTING)
        text = f"answers shrank from {first:.0f} to {now:.0f} tokens"
        return "collapsed", f"{text} (under {first / SHRANK:.3g} since step {step})", step
    return "no", f"answers are {now / max(first, 1e-9):.2g} times as long as at the start"


@finding("reward_pays_length", "| yes no", needs=(LENGTH, REWARD, CUT))
def reward_pays_length(run: Readings) -> Seen:
    """Answers grow to the limit, and the reward follows their length step by step."""
    both = run.joined(LENGTH, REWARD)
    cut = cut_share(run)
    if len(both) < 20 or cut is None:
        return None
    length, reward = both[:, 1], both[:, 2]
    start = max(len(both) // 8, 3)
    longer = float(np.median(length[-start:])) / max(float(np.median(length[:start])), 1e-9)
    richer = float(reward[-start:].mean() - reward[:start].mean()) > 0.1 * float(np.abs(reward[:start]).mean())
    follows = 0.0 if np.ptp(length) == 0 or np.ptp(reward) == 0 else float(np.corrcoef(length, reward)[0, 1])
    text = f"answers are {longer:.2g} times as long as at the start, {share_now(cut):.0%} of them at the limit"
    if longer > GREW and richer and follows > 0.5 and share_now(cut) >= MOST_CUT:
        return "yes", f"{text}, and the reward follows their length (correlation {follows:.2f})"
    return "no", text
