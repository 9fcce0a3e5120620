"""Findings about the entropy of the policy."""

import numpy as np

from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.findings.reward import reward_course
from verl_ext.diagnosis.names import ENTROPY, LENGTH, REWARD, REWARD_MAX
from verl_ext.diagnosis.series import Readings, Series, beginning_of, now_of, require_logged, step_from
from verl_ext.diagnosis.statistics import FEWEST, level_medians

GONE, LOW = 0.2, 0.35  # shares of the entropy at the start
EXPLODED, ROSE = 3.0, 1.2  # times the lowest level, and times the start
LARGEST_ENTROPY = 13.0  # nats: the logarithm of a vocabulary of 440,000 tokens
FLAT_ENTROPY = 1.0  # nats per token: an entropy that has risen above this is that of no language


@finding(
    "entropy_gone",
    "gone | low kept",
    family="entropy",
    needs=(ENTROPY,),
    check="whether answers to one prompt are alike; the clip's upper bound, and a term that keeps the entropy",
)
def entropy_gone(run: Readings) -> Seen:
    """The entropy is a small part of what it was: answers become alike."""
    series, start, now = _start_and_now(run)
    share = now / start
    text = f"the entropy is {share:.0%} of what it was ({start:.2g} to {now:.2g})"
    if share < GONE:
        return "gone", text, step_from(series, series.values < GONE * start, 1.0)
    return "low" if share < LOW else "kept", text


@finding("sure_of_wrong", "| yes no", needs=(ENTROPY, REWARD, REWARD_MAX))
def sure_of_wrong(run: Readings) -> Seen:
    """Whether the policy has become sure while the mean reward is below half of what the best answers get."""
    series, reward, most = run.get(ENTROPY), run.late(REWARD), run.late(REWARD_MAX)
    if series is None or reward is None or most is None or most <= 0 or (start := beginning_of(series)) <= 0:
        return None
    share = now_of(series) / start
    text = f"the entropy is {share:.0%} of what it was, and the reward {reward / most:.0%} of what the best answers get"
    return ("yes" if share < GONE and reward < most / 2 else "no"), text


@finding(
    "entropy_exploded",
    "exploded | rose steady",
    family="entropy",
    needs=(ENTROPY,),
    check="whether answers are still text; the weights of the entropy's and the KL's terms",
)
def entropy_exploded(run: Readings) -> Seen:
    """The entropy has grown to a multiple: answers become noise."""
    series, start, now = _start_and_now(run)
    top = float(level_medians(series.values, _few(series)).max())
    low = float(np.median(series.values[: max(len(series.values) // 2, 1)]))
    calm = min(start, low)
    if (now > EXPLODED * calm and now > start) or (top > 10 * calm and top > FLAT_ENTROPY and now > ROSE * calm):
        step = int(series.steps[np.argmax(series.values > (calm * top) ** 0.5)])
        return "exploded", f"the entropy rose from {calm:.2g} to {max(now, top):.2g}", step
    text = f"the entropy is {now / start:.0%} of what it was"
    return "rose" if now > ROSE * start else "steady", text


@finding("entropy_at_fall", "| low high", needs=(ENTROPY, REWARD))
def entropy_at_fall(run: Readings) -> Seen:
    """Whether the entropy had come down before the reward fell."""
    course, series = reward_course(run), run.get(ENTROPY)
    fell = course is not None and (course.falls or course.collapsed)
    if course is None or series is None or not fell or len(series.steps) < FEWEST:
        return None
    before = series.values[series.steps <= course.step][-4:]
    start = beginning_of(series, _few(series))
    if not before.size or start <= 0:
        return None
    share = float(before.mean()) / start
    text = f"the entropy was {share:.0%} of its start when the reward fell"
    if share >= LOW and not course.collapsed:
        return None  # a small loss may begin with the fall of the entropy
    return "low" if share < LOW else "high", text


def per_token(run: Readings) -> Series:
    """Returns the entropy of a token. An entropy above the logarithm of the largest vocabularies is the sum over a
    response: it is divided by the length. Raises NotLoggedError without an entropy, or without that length."""
    series = run.need(ENTROPY, fewest=3)
    if float(np.median(series.values)) <= LARGEST_ENTROPY:
        return series
    steps, sums, lengths = run.joined(ENTROPY, LENGTH).T
    return require_logged(Series(steps.astype(np.int64), sums / np.maximum(lengths, 1)) if len(steps) >= 3 else None)


def _start_and_now(run: Readings) -> tuple[Series, float, float]:
    """Returns the entropy, and its values at the start and now. Raises NotLoggedError if it does not start above 0."""
    series = per_token(run)
    start = beginning_of(series, _few(series))
    return require_logged(series if start > 0 else None), start, now_of(series, _few(series))


def _few(series: Series) -> int:
    return min(5, max(len(series.values) // 8, 1))
