"""Findings from the checks of the weight syncs: which share of an update arrives in the rollout."""

import numpy as np

from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import LOG_RATIO
from verl_ext.diagnosis.series import FIRST_READINGS, Readings
from verl_ext.diagnosis.statistics import SURE, level_error

# Share of the checks that find more than a whole update; a single one can, if many tokens change their experts.
OFTEN = 0.1
# Spread of the tokens' shares over their median: up to 0.05 for multiplied updates, 0.054 and more for parts.
SAME = 0.05
HIDDEN = 2.0  # spread of the tokens' shares in nats, over the engines' gap: below it, the gap explains the spread
# Movement of the rollout's scores over training's: in the lab 0 after a lost sync, 0.1 after a partial one.
STILL = 0.01
REST = 0.03  # share of all updates that stays missing: in the lab 0.03 to 0.1 without a tensor
FINE = 0.01, 12.0  # a smaller share that is seen too: from 0.01 on, if it is this many times the first gap
CHECKS, MOST_CHECKS = 10, 200  # that a judgement needs, and that a line is drawn through
CLEAR = 20.0  # movement of a check over the first gap, from which on the gap hides nothing from the middle token
SHORT = 0.95  # upper end of a share that is not whole; of middle tokens, 0.98 in sound lab runs and 0.92 in parts
LOW, HIGH, MIDDLE, MOVED = "sync/arrived_low", "sync/arrived_high", "sync/arrived_median", "sync/moved"
ROUNDING, REMAINDER = "sync/rounding", "sync/apart"
WRONG = "sync/wrong_tensors"


@finding("updates_arrived", "multiplied part scattered none nothing_moves | all unclear", needs=(LOW, HIGH))
def updates_arrived(run: Readings) -> Seen:
    """The share of the last updates that arrived: the median of the last three checks."""
    checks = run.joined(LOW, HIGH)[:, 1:]
    if not len(checks):
        return None
    low, high = (float(each) for each in np.median(checks[-3:], axis=0))
    text = f"{low:.0%} to {high:.0%} of the last updates arrived"
    if (factor := scaled(run, checks)) is not None:
        return "multiplied", f"updates arrive multiplied, by {factor:.2f}"
    if high < 0.1:
        if _is_still(run):
            return "nothing_moves", f"{text}: the rollout's scores of the same tokens do not change"
        if _scatters(run):
            return "scattered", f"{text}, and tokens get different shares of it"
        return "none", text
    if high < SHORT or missing_per_update(run) or missing_in_total(run):
        return "part", text
    return ("all" if low > 0.75 else "unclear"), text


def scaled(run: Readings, checks: np.ndarray) -> float | None:
    """Returns the share of an update that arrived, if all tokens got the same share and it is not 1.

    Only multiplied updates arrive with a share above 1. A share below 1 is judged by the first checks, when updates are
    small: a multiplied update then moves each token by the same share, whereas a partial update moves only some tokens.
    """
    more = checks[checks[:, 0] > 1.1]
    if len(more) > OFTEN * len(checks) and (len(more) > 1 or len(checks) <= FIRST_READINGS):
        return float(np.median(more.mean(1)))
    for median, spread in run.joined(MIDDLE, "sync/arrived_spread")[:2, 1:].tolist():
        if spread < SAME * median and abs(median - 1) > 0.1:
            return float(median)
    return None


def _scatters(run: Readings) -> bool:
    """Returns True if tokens get different shares of the updates since one last arrived, and the differences grow.

    If the rollout's weights stay the same, the spread in nats is noise, and noise does not grow.
    """
    checks = run.joined("sync/arrived_spread", MOVED)
    nats = checks[:, 1] * checks[:, 2]
    lows = run.joined(LOW)
    if (arrived := lows[lows[:, 1] > 0.5, 0]).size:
        nats = nats[checks[:, 0] > arrived[-1]]
    return bool(len(nats) > FIRST_READINGS and nats[-FIRST_READINGS:].min() > 3 * nats[0] and nats[-1] > 0.01)


def _is_still(run: Readings) -> bool:
    """Returns True if the rollout gives the same tokens the same scores as at the previous check.

    Only checks after updates that moved more than the gap may hide are counted.
    """
    followed = run.joined("sync/followed", HIGH)[-FIRST_READINGS:, 1]
    return bool(len(followed)) and float(np.median(followed)) < STILL


@finding("tensors_wrong", "some | none", needs=(WRONG,))
def tensors_wrong(run: Readings) -> Seen:
    """Whether the checked syncs wrote every tensor as it was sent; a sync that is not checked may still be wrong."""
    wrong = run.need(WRONG)
    if not (bad := wrong.values > 0).any():
        return "none", f"every tensor arrived as it was sent in {len(wrong.values)} checked weight syncs"
    first, most = int(wrong.steps[bad][0]), int(wrong.values.max())
    return "some", f"{most} tensors were wrong in the rollout after a weight sync, in {bad.sum()} of {len(bad)}", first


@finding("updates_missing", "each_update stays | fades", needs=(ROUNDING, REMAINDER, MIDDLE, MOVED))
def updates_missing(run: Readings) -> Seen:
    """Whether a share of all updates never arrives, although it may be too small for a single check.

    The sum of all updates shows the smallest tensor if the engines are close. If rounding hides it there, the mean over
    many checks may show it.
    """
    lacks, rest = missing_per_update(run), missing_in_total(run)
    if lacks:
        text = f"the middle token got {1 - lacks:.0%} of an update, in checks where rounding hides nothing"
        return "each_update", text
    if rest:
        return "stays", f"{rest:.0%} of all updates so far is missing in the rollout, more than rounding explains"
    if rest is None:
        return None
    return "fades", "what is missing of all updates so far is no more than rounding"


def missing_per_update(run: Readings) -> float:
    """Returns the share of an update that the middle token lacks; 0 if it may be noise, or if too few checks show it.

    Only checks count whose updates moved the tokens far more than the engines were apart at first: that gap rounds, the
    later gap may be what is missing.
    """
    gap = run.get(LOG_RATIO)
    if gap is None or gap.steps[0] > FIRST_READINGS:
        return 0.0
    middles, moved = run.joined(MIDDLE, MOVED)[:, 1:].T
    middles = middles[moved > CLEAR * gap.values[:FIRST_READINGS].mean()]
    if len(middles) < CHECKS:
        return 0.0
    middle = float(np.median(middles))
    return 1 - middle if middle + SURE * level_error(middles, len(middles)) < SHORT else 0.0


def missing_in_total(run: Readings) -> float | None:
    """Returns the share of all updates that is missing; 0 if it may be rounding, None if too few checks show it.

    Rounding is a share of the updates that falls as they add up. The rest is what the line through the checks has left
    where rounding is 0. The line is Theil's, so that a loss that has ended does not bend it.
    """
    checks = run.joined(ROUNDING, REMAINDER)[:, 1:]
    rounding, missing = checks[:: 1 + len(checks) // MOST_CHECKS].T
    if len(rounding) < CHECKS or rounding.max() < 2 * rounding.min():
        return None
    earlier, later = np.triu_indices(len(rounding), 1)
    steps = rounding[later] - rounding[earlier]
    slopes = (missing[later] - missing[earlier])[steps != 0] / steps[steps != 0]
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    rounding_now, missing_now = (float(np.median(each[-FIRST_READINGS:])) for each in (rounding, missing))
    rest = min(float(np.median(missing - slope * rounding)), missing_now)
    least = min(max(FINE[0], FINE[1] * rounding_now), REST)
    return rest if rest > max(least, 2 * slope * rounding_now) else 0.0


@finding("shares_alike", "| alike hidden different", needs=("sync/arrived_spread", MOVED))
def shares_alike(run: Readings) -> Seen:
    """Whether all tokens got the same share of the first updates, or the engines' own gap hides it."""
    shares = run.joined(MIDDLE, "sync/arrived_spread")[:2, 1:]
    if not len(shares):
        return None
    if any(spread < SAME * median for median, spread in shares.tolist()):
        return "alike", "all tokens got the same share of the first updates"
    checks = run.joined("sync/arrived_spread", MOVED)[:FIRST_READINGS]
    gap = run.get(LOG_RATIO)
    at_first = float(gap.values[0]) if gap is not None and gap.steps[0] <= 1 else 0.0
    if len(checks) and (checks[:, 1] * checks[:, 2]).min() < HIDDEN * at_first:
        return "hidden", "the engines' own gap hides which share of the first updates tokens got"
    return "different", "tokens got different shares of the first updates"
