"""Findings about the reward: whether it rose, did not move, fell, or is the same for all answers.

`diagnosis.statistics` has the rules for a rise, a fall and a collapse.
"""

import re

import numpy as np

from verl_ext.base.names import PROMPT_EFFECT
from verl_ext.diagnosis import statistics
from verl_ext.diagnosis.findings.gap import REFERENCE
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import (
    ENTROPY,
    GRADIENT,
    K3,
    LENGTH,
    LOG_RATIO,
    PROB_DIFF,
    REWARD,
    REWARD_MAX,
    REWARD_MIN,
    VALIDATION,
    quantity_of,
)
from verl_ext.diagnosis.series import (
    LEVEL_READINGS,
    Readings,
    cached_per_run,
    holds_from,
    now_of,
    require_logged,
)
from verl_ext.diagnosis.statistics import FALLS, FEWEST, LIKELY, SAME, SURE, Course, level_change

SPREADS = ("critic/score/std", "reward_std")
ADVANTAGE_MAX, ADVANTAGE_MIN = "critic/advantages/max", "critic/advantages/min"
DEAD_GROUPS = "filter/zero_variance/dropped_trajectories"
PART_OF_REWARD = re.compile(r"rewards?/[^/]+(?:/mean)?")
ADDS_UP = 0.02  # of the reward's height, by which its parts may not add up to it
SPREADS_OF_PARTS = ("std", "max", "min")
OF_SEVERAL = re.compile("/(?:best|maj)@")  # verl's scores of n answers together
SMALL = 0.05  # spread of the rewards, as a share of their mean: too little to learn from
CEILING = 0.9  # share of what the best answers get
SURE_CEILING = 0.95  # of rewards from 0 to 1, if it is not known what the best answers get
MOSTLY = 0.8  # share of the steps since a reward is constant
NEARLY = 0.01  # of the range of the mean reward, by which it may still move
SOLVED = 0.8  # rate of success from which groups are alike because they are right
ALL_DEAD, MOST_DEAD, SOME_DEAD = 0.98, 0.6, 0.2  # shares of the groups, or of the steps
LARGEST_ADVANTAGE = 100.0  # of a group of 10,000 answers
OTHERS = (GRADIENT, ENTROPY, REFERENCE, K3, LOG_RATIO, PROB_DIFF)  # move if the policy or an engine changes
SUDDEN, STANDS = 5.0, 1.5  # noises of a change within one step; factor by which a series stands
FEWEST_OTHERS = 2


@cached_per_run
def reward_course(run: Readings) -> Course | None:
    """Returns the course of the reward; None if there are too few readings."""
    return statistics.course_of(run.get(REWARD), run.get(REWARD_MIN))


@finding(
    "reward_constant",
    "constant | solved varies",
    family="reward_spread",
    needs=(REWARD_MAX, REWARD_MIN),
    subsumed_by=("learning.dead",),
)
def reward_constant(run: Readings) -> Seen:
    """All answers get the same reward, and it is not the best one, so that nothing can be learnt from it."""
    series, rows = run.get(REWARD), rows_of_spread(run)
    if series is None or not len(rows):
        return None
    values = series.values
    scale = SAME * max(float(np.abs(values).max()), SAME)
    same = rows[:, 1] <= scale
    # One step with other answers may move the mean a little, but not as a success does.
    away = np.abs(values - values[-1]) > max(NEARLY * float(np.ptp(values)), scale)
    last = int(series.steps[away][-1]) if away.any() else -1
    began = max(holds_from(same, MOSTLY), int(np.searchsorted(rows[:, 0], last, side="right")))
    if began > len(same) / 2:
        return "varies", "answers get different rewards"
    text = f"all answers of a step get a reward of {values[-1]:.3g}"
    return ("solved", f"{text}, the best one") if is_solved(run) else ("constant", text, int(rows[began, 0]))


def rows_of_spread(run: Readings) -> np.ndarray:
    """Returns [steps, 2]: a step, and the spread of the rewards of its answers. If no spread is logged, it is the
    distance of the step's mean from the median of all; no rows for too few steps."""
    logged = logged_spread(run)
    if len(logged):
        return logged
    series = run.get(REWARD)
    if series is None or len(series.steps) < FEWEST:
        return np.empty((0, 2))
    return np.column_stack([series.steps, np.abs(series.values - np.median(series.values))])


@cached_per_run
def logged_spread(run: Readings) -> np.ndarray:
    """Returns [steps, 2]: a step, and the spread of its rewards, or of its advantages; no rows if none is logged."""
    for most, least in ((REWARD_MAX, REWARD_MIN), (ADVANTAGE_MAX, ADVANTAGE_MIN)):
        if len(bounds := run.joined(most, least)):
            return np.column_stack([bounds[:, 0], bounds[:, 1] - bounds[:, 2]])
    for name in SPREADS:
        if len(deviations := run.joined(name, REWARD)):
            small = deviations[:, 1] <= (SMALL * np.abs(deviations[:, 2]) if name == SPREADS[0] else 0)
            return np.column_stack([deviations[:, 0], np.where(small, 0.0, deviations[:, 1])])
    return np.empty((0, 2))


@finding(
    "reward_fell",
    "collapsed falls | holds",
    family="reward",
    needs=(REWARD,),
    subsumed_by=("learning.falling", "learning.collapsed"),
)
def reward_fell(run: Readings) -> Seen:
    """The reward is far below its best level."""
    course = require_logged(reward_course(run))
    if course.collapsed or course.falls:
        level = "collapsed" if course.collapsed else "falls"
        return level, f"the reward fell from {course.fell}", course.step
    return "holds", f"the reward is {course.now:.2g}, its best level {course.best:.2g}"


@finding("reward_peaked", "peaked | still_best", family="reward", needs=(REWARD,))
def reward_peaked(run: Readings) -> Seen:
    """The best level was reached during the run, and is lost again."""
    course = require_logged(reward_course(run))
    if course.falls and course.best - course.first > FALLS * course.height:
        return "peaked", f"the reward was best at step {course.best_step}, at {course.best:.2g}", course.best_step
    return "still_best", "the reward has no peak behind it"


@finding("fall_came_back", "| yes no", needs=(REWARD,))
def fall_came_back(run: Readings) -> Seen:
    """The reward once fell below half of its best level, and came back in part."""
    course = reward_course(run)
    if course is None or len(course.series.values) < 20 or course.series.values.min() < 0:
        return None
    levels = np.convolve(course.series.values, np.full(5, 1 / 5), mode="valid")
    best = np.maximum.accumulate(levels)
    least = float((levels[best > 0] / best[best > 0]).min()) if (best > 0).any() else 1.0
    if least < 0.5 and best.max() > 0 and not course.collapsed:
        return "yes", f"the reward fell to {least:.0%} of its best level, and came back in part"
    return "no", f"the reward was never below {least:.0%} of its best level and back"


@finding(
    "reward_flat",
    "flat | fell at_ceiling rose_little rose",
    needs=(REWARD,),
    subsumed_by=("learning.flat", "learning.dead"),
)
def reward_flat(run: Readings) -> Seen:
    """The reward did not move over the whole run."""
    course = require_logged(reward_course(run))
    text = f"the reward went from {course.moved}"
    if course.falls or course.collapsed:
        return "fell", text
    if course.rise.errors >= SURE:
        return "rose", text
    if course.rise.errors >= LIKELY:
        return "rose_little", f"the reward went from {course.rise.beyond_noise}"
    if at_ceiling(run, course):
        return "at_ceiling", f"{text}, near the best that an answer gets"
    if course.is_open:
        return None
    level = "fell" if course.rise.errors <= -SURE else "flat"
    return level, f"the reward went from {course.rise.beyond_noise}"


def at_ceiling(run: Readings, course: Course) -> bool:
    """Returns True if the reward is near the best that an answer gets."""
    most, values = run.values(REWARD_MAX), course.series.values
    if most.size:
        return bool(course.now > CEILING * most.max() > 0)
    return bool(0 <= values.min() <= values.max() <= 1 and course.now > SURE_CEILING)


@cached_per_run
def is_solved(run: Readings) -> bool:
    """Returns True if nearly all answers get the best reward that any answer got. Where all get the same one, the
    reward has risen to it and stays there, above 0, or the log begins later than the run, with a reward of 1: a grader
    that always gives 1 looks the same from the first step on."""
    series, most, least = run.get(REWARD), run.values(REWARD_MAX), run.late(REWARD_MIN)
    if series is None:
        return False
    now, highest = now_of(series), float(np.concatenate([most, series.values]).max())
    if most.size and least is not None and now_of(run.need(REWARD_MAX)) > least:
        return (now - least) / (highest - least) > SOLVED
    constant = float(np.ptp(series.values)) <= SAME and len(logged_spread(run)) > 0
    if highest <= 1 and now > (SURE_CEILING if constant else SOLVED) and (series.steps[0] > 1 or not constant):
        return True
    quarter = max(len(series.values) // 4, 1)
    first, last, lowest = series.values[:quarter], series.values[-quarter:], float(series.values.min())
    stays = highest - min(now, float(last.min())) <= (1 - CEILING) * (highest - lowest)  # it does not rise any more
    return now > 0 and stays and now - float(first.mean()) > SAME * max(highest, 1.0)


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


@finding(
    "validation_fell",
    "fell | rose holds",
    check="answers of the validation now and at its best; whether training rewards what it does not count",
)
def validation_fell(run: Readings) -> Seen:
    """The score of a validation set is far below its best. Of a set whose mean is logged, the best of n answers and
    the majority's do not count: they scatter far more."""
    known = ((name, quantity_of(name)) for name in run.names())
    names = [name for name, quantity in known if quantity is not None and quantity.name == VALIDATION]
    means = {name.rpartition("/")[0] for name in names if "/mean@" in name}
    names = [name for name in names if not (OF_SEVERAL.search(name) and OF_SEVERAL.split(name)[0] in means)]
    scores = {name: series for name in names if len((series := run.need(name)).steps) >= 3}
    falls, rises = [], []
    for name, series in scores.items():
        values, at = series.values, int(series.values.argmax())
        best, now = float(values[at]), float(values[-2:].mean() if len(values) - at > 2 else values[-1])
        least = max(0.15 * abs(best), SURE * statistics.difference_noise(values))
        if best - now > least and best > 0:
            peak = int(series.steps[at])
            falls.append((best - now, f"{name} was best in step {peak}, at {best:.3g}, and is {now:.3g} now", peak))
        elif now - values[0] > least:
            rises.append((now - values[0], f"{name} rose from {values[0]:.3g} to {now:.3g}", None))
    for level, found in (("fell", falls), ("rose", rises)):
        if found:
            _, text, step = max(found)
            return level, text, step
    return ("holds", "the validation holds") if scores else None


@cached_per_run
def without_signal(run: Readings) -> tuple[float, str] | None:
    """Returns the share of the last steps, or of their groups, whose answers have one reward only; None if that is not
    known. A step whose mean is the least possible reward, 0, has no other answers."""
    rows, groups, rewards = logged_spread(run)[:, 1], run.late(DEAD_GROUPS), run.values(REWARD)
    if not len(rows) and len(rewards) and rewards.min() == 0:
        rows = rewards
    steps = float((rows[-LEVEL_READINGS:] <= SAME).mean()) if len(rows) else 0.0
    if groups is not None and groups >= steps:
        return groups, f"in {groups:.0%} of the groups, all answers get one reward"
    return (steps, f"in {steps:.0%} of the last steps, all answers get one reward") if len(rows) else None


def has_signal(run: Readings) -> bool:
    """Returns True if answers to one prompt get different rewards, by the groups or the advantages that were logged.
    The spread of a whole step does not show that."""
    groups, advantages = run.late(DEAD_GROUPS), run.joined(ADVANTAGE_MAX, ADVANTAGE_MIN)[-LEVEL_READINGS:]
    if groups is not None:
        return groups < MOST_DEAD
    return len(advantages) > 0 and float((advantages[:, 1] - advantages[:, 2] > SAME).mean()) > 1 - MOST_DEAD


@finding(
    "groups_dead",
    "all most some | solved few",
    family="reward_spread",
    needs=(DEAD_GROUPS,),
    subsumed_by=("reward_constant", "learning.dead"),
    check="the prompts, which may be too hard or too easy, and the grader on a few answers",
)
def groups_dead(run: Readings) -> Seen:
    """Groups, or whole steps, have no spread, so that they teach nothing."""
    share, text = require_logged(without_signal(run))
    if share >= SOME_DEAD and is_solved(run):
        return "solved", f"{text}, because nearly all are right"
    bounds = {"all": ALL_DEAD, "most": MOST_DEAD, "some": SOME_DEAD}
    return next((level for level, bound in bounds.items() if share >= bound), "few"), text


@finding(
    "penalties_vanish",
    "only | no",
    needs=(REWARD, REWARD_MAX),
    check="whether any answer can get a reward above 0: a few answers to the easiest prompts",
)
def penalties_vanish(run: Readings) -> Seen:
    """The reward rises to 0 and not above: penalties vanish, and no answer succeeds."""
    course, most = reward_course(run), run.need(REWARD_MAX)
    if course is None or course.rise.errors < LIKELY:
        return None
    if np.abs(most.values).max() > SAME or course.rise.start >= 0:
        return "no", "the best answers do not always get 0"
    return "only", "the best answers always get 0: penalties vanish, and nothing is solved"


def parts_of_reward(run: Readings) -> list[str]:
    """Returns the names of the rewards of single functions, and of other metrics named so."""
    return [name for name in run.every_name() if PART_OF_REWARD.fullmatch(name)]


@finding(
    "reward_part",
    "fell | holds",
    needs=(REWARD,),
    check="answers now and at the best step of that reward; the weights of the rewards in their sum",
)
def reward_part(run: Readings) -> Seen:
    """One of several rewards falls while their sum rises: the others are learnt at its expense."""
    course = reward_course(run)
    parts = [name for name in parts_of_reward(run) if quantity_of(name) is None and not name.endswith(SPREADS_OF_PARTS)]
    if course is None or len(parts) < 2 or course.rise.errors < SURE:
        return None
    rows = run.joined(REWARD, *parts)
    if not len(rows) or np.median(np.abs(rows[:, 2:].sum(1) - rows[:, 1])) > ADDS_UP * course.height:
        return None  # weighted, or no parts of it
    courses = {name: found for name in parts if (found := statistics.course_of(run.get(name))) is not None}
    # A penalty that grows is no such part.
    lost = (name for name, each in courses.items() if each.falls and each.rise.errors <= -SURE and each.best > 0)
    fallen = {name: courses[name] for name in lost}
    if not fallen:
        return "holds", "no part of the reward falls"
    name = max(fallen, key=lambda each: fallen[each].best - fallen[each].now)
    return "fell", f"its part {name} fell from {fallen[name].fell}", fallen[name].step


@finding("environment", "changed | same", needs=(REWARD, LENGTH))
def environment_changed(run: Readings) -> Seen:
    """Reward and length move to other levels in one step, while the metrics of the policy and of the engines stand: not
    the policy changed."""
    reward, length = run.need(REWARD), run.need(LENGTH)
    fell, moved = statistics.step_change(reward), statistics.step_change(length)
    if fell is None or moved is None or fell[1] > -SUDDEN or abs(moved[1]) < SUDDEN or abs(fell[0] - moved[0]) > 1:
        return "same", "reward and length never changed together in one step"
    step, others = fell[0], [series for name in OTHERS if (series := run.get(name)) is not None]
    ratios = [level_change(series, step) for series in others]
    moves = any(ratio is not None and not 1 / STANDS < ratio < STANDS for ratio in ratios)
    if moves or sum(ratio is not None for ratio in ratios) < FEWEST_OTHERS:
        return "same", "other metrics moved with reward and length"
    return "changed", "reward and length changed in one step, and gradient, entropy and KL did not", step


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
    flat = (course := reward_course(run)) is not None and course.rise.errors < SURE
    if share >= MOST_DEAD and 0.05 < rate < SOLVED and flat and rate**4 + (1 - rate) ** 4 < share:
        text = f"at a rate of success of {rate:.2f}, {share:.0%} of the groups have no spread: too few answers a prompt"
        return "small", text
    return "enough", f"at a rate of success of {rate:.2f}, {share:.0%} of the groups have no spread"


@finding(
    "advantages",
    "zero huge | some",
    family="reward_spread",
    needs=(ADVANTAGE_MAX,),
    subsumed_by=("reward_constant",),
    check="what divides the advantages: the deviation of a group of nearly equal rewards is nearly 0",
)
def advantages(run: Readings) -> Seen:
    """All advantages are 0, or one is larger than the rewards spread, and than a group can have after division by its
    deviation: of n answers, at most sqrt(n - 1)."""
    most, bounds = require_logged(run.late(ADVANTAGE_MAX)), (run.values(REWARD_MAX), run.values(REWARD_MIN))
    spread = float(bounds[0].max() - bounds[1].min()) if all(each.size for each in bounds) else 0.0
    level = "zero" if most < SAME else "huge" if most > max(LARGEST_ADVANTAGE, spread) else "some"
    return level, f"the largest advantage is {most:.2g}"


@finding("prompts_matter", "no | unclear yes", needs=(PROMPT_EFFECT,))
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
