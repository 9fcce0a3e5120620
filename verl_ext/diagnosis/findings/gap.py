"""Findings about the gap: how large it is, when it began and how it moves, which tokens have it.

The strongest fact is the mean of k. If l_infer is the log-probability with which a token was sampled, the mean of k =
exp(l_old - l_infer) over the sampled tokens is 1, whatever else is wrong: old weights, rounding, another router. The
metrics contain it as 1 + k3 - k1. If it is not 1, the rollout returned log-probabilities of another distribution than
it sampled from, or training reads other tokens than the sampled ones.
"""

from dataclasses import dataclass

import numpy as np

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.growth import GROWTH_READINGS, estimate_growth, is_seen_enough
from verl_ext.diagnosis.levels import PUBLISHED
from verl_ext.diagnosis.names import K1, K3, LOG_RATIO, PROB_DIFF, engines_names
from verl_ext.diagnosis.series import (
    FIRST_READINGS,
    LEVEL_READINGS,
    Readings,
    Series,
    cached_per_run,
    now_label,
    now_of,
    require_logged,
)
from verl_ext.diagnosis.statistics import SURE, course_of, largest_jump, level_medians

K2 = "optim/kl_sample_train_v2"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
LEVEL = "guard/level"
RATE, REFERENCE = "actor/lr", "actor/kl_loss"
DISAGREEMENT = "the routers' disagreement"
STALENESS = "training/off_policy/trajectory_staleness/mean"
LARGE = 0.01  # k3 that rounding stays below in most sound runs; `sound_level` has the models with more
UNRELATED = 0.7  # nats of |log k| before any update, which no rounding leaves
BROKEN = 1.0  # k3 of engines that do not compute the same function
AGREE = 1e-7  # larger k3 does not come from float32 rounding
NOISE_ERRORS = 4.0  # standard errors that the noise of a mean stays below
# Share of the gap in the first steps: from FROZEN on it was there at once, up to MOVED updates made it.
FROZEN, MOVED = 0.2, 0.05
LEANING = 0.07  # share of the gap to one side; raw log-probs leave 0.09 to 0.57 in the lab
ALIKE = 1.5  # k1 / sqrt(2 k3) of a step, at most; a temperature of 1.5 leaves up to 1.5 for unlikely tokens
# k3 below which rounding acts in both directions; above it, rounding also makes sampled tokens less likely.
ONE_WAY = 0.1
JUMP, GREW, SPIKE = 10.0, 3.0, 10.0  # times the k3 before
MOSTLY, FEWEST_SHARES = 0.5, 3  # share of k3 from which it is mostly the engines'; steps that show it
DIPPED = 0.1  # a jump has not stayed if a larger share of the readings since is below GREW times the level before
BELOW, GREW_BELOW = 0.1, 5.0  # share of the limit from which a gap below it counts; times the k3 before there
RARE = 20.0  # times the mean gap of a trajectory
LONG_AFTER = 20  # readings before a jump that the first weight sync cannot explain
SCALED, IN_STEP = 0.3, 0.97  # nats of |log k| or k1; correlation of the probabilities, still
WHOLE = 2.0  # nats per token over a whole trajectory: such values are not the log-probs of its tokens
ROUNDED = 0.012  # disagreement of the routers: 16 bits leave up to 0.0105 in the lab, 8 bits and fewer 0.0138 and more
RELATED = 0.5  # correlation of the probabilities; it is higher for engines that compute the same function
CLOSE = 0.95  # correlation that rounding leaves, at least


@dataclass(frozen=True)
class Measure:
    """A metric that compares the engines.

    Attributes:
        words: its name in a sentence.
        apart, broken: the values from which rounding no longer explains the gap, and from which the engines cannot
            compute the same function.
        power: the exponent that makes it grow as k3 does.
    """

    name: str
    words: str
    apart: float
    broken: float
    power: float = 1.0


# In order of preference. A gap of x in every token leaves |log k| = x and k3 = x^2 / 2. Rounding leaves larger tails:
# published sound runs have a mean |log k| of 0.003 to 0.023, and a mean difference of probabilities of 0.0013 to 0.006.
MEASURES = (
    Measure(K3, "k3", LARGE, BROKEN),
    Measure(K1, "k1", LARGE, BROKEN),
    Measure(LOG_RATIO, "the mean |log k|", 0.05, 1.5, power=2.0),
    Measure(PROB_DIFF, "the mean difference of probabilities", 0.02, 0.5, power=2.0),
    Measure(K2, "k2", LARGE, BROKEN),
)


WORDS = {each.name: each.words for each in MEASURES}
SIZES = ("broken", "apart", "close", "none")  # of a gap, the worst first


@dataclass(frozen=True)
class Gap:
    """The readings by which the size of the gap is judged.

    Attributes:
        measure: the one of MEASURES that was logged.
        name: its name in sentences.
        alone: whether it covers only the engines' part, in a run whose rollouts are older than the policy.
    """

    series: Series
    measure: Measure
    name: str
    alone: bool = False

    @property
    def heights(self) -> np.ndarray:
        """The readings as they would grow in k3."""
        return np.maximum(np.abs(self.series.values), 1e-12) ** self.measure.power


@cached_per_run
def sound_level(run: Readings) -> float:
    """Returns the k3 that rounding stays below in sound runs: LARGE, or the level published for the model.

    The guard logs its level. A level that is not in the table is the user's, or computed from this run's own first
    steps, and shows nothing about other runs. The comparison is not exact, because some logs store float32.
    """
    logged = run.values(LEVEL)[-1:]
    return max((level for level in PUBLISHED if np.isclose(logged, level, rtol=1e-6, atol=0).any()), default=LARGE)


@cached_per_run
def gap_of(run: Readings) -> Gap | None:
    """Returns k3 of trajectories of lag 0 and of rescored ones, if it was logged often enough lately; else the whole
    k3, else another measure of the gap; None if nothing compares the engines."""
    of_engines: dict[int, float] = {}
    for name in reversed(engines_names(K3)):
        if (series := run.get(name)) is not None:
            of_engines |= dict(series.pairs())
    steps = sorted(of_engines)
    if is_seen_enough(steps, run.last_step, GROWTH_READINGS):
        series = Series(np.array(steps), np.array([of_engines[step] for step in steps]))
        return Gap(series, MEASURES[0], "k3 of the engines alone", alone=True)
    return next(iter(_logged_gaps(run)), None)


def _logged_gaps(run: Readings) -> list[Gap]:
    """Returns the gap by each measure that was logged, in order of preference. Of the two estimates of one KL, k1
    scatters far more, around 0 too: beside k3 it counts only if its mean is more than noise."""
    found = [Gap(series, each, each.words) for each in MEASURES if (series := run.get(each.name)) is not None]
    sure = abs(in_errors(run.values(K1)[-LEVEL_READINGS:]) or 0.0) > NOISE_ERRORS or run.get(K3) is None
    return [each for each in found if each.measure.name != K1 or sure]


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.3g}"


@finding("gap_level", "broken apart | close none", needs=(K3,), subsumed_by=("gap_grew", "past_boundary"))
def gap_level(run: Readings) -> Seen:
    """How large the gap is now, by the measure that shows it most clearly."""
    gap = gap_of(run)
    if gap is None:
        correlation = run.get(CORRELATION)
        if correlation is None:
            return None
        now = now_of(correlation)
        return _level_of_correlation(now), f"the probabilities of the engines have a correlation of {now:.3g}"
    gaps = [gap] if gap.alone else _logged_gaps(run)
    levels = [_level_of(each, abs(now_of(each.series)), run) for each in gaps]
    level = min(levels, key=SIZES.index)
    worst = gaps[levels.index(level)]
    return level, f"{worst.name} is {_number(now_of(worst.series))} ({now_label(worst.series)})"


def _apart(gap: Gap, run: Readings) -> float:
    """Returns the value from which rounding no longer explains this gap."""
    return sound_level(run) if gap.measure.name == K3 else gap.measure.apart


def _level_of(gap: Gap, value: float, run: Readings) -> str:
    if value > gap.measure.broken:
        return "broken"
    return "apart" if value > _apart(gap, run) else "none" if value**gap.measure.power <= AGREE else "close"


def _level_of_correlation(value: float) -> str:
    return "broken" if value < RELATED else "apart" if value < CLOSE else "close"


@finding("gap_at_once", "unrelated apart | close", family="gap_level", needs=(K3, CORRELATION))
def gap_at_once(run: Readings) -> Seen:
    """The gap in the first step, if its rollouts were as new as the policy: whether the engines compute the same
    function."""
    gap, correlation = gap_of(run), run.get(CORRELATION)
    seen: list[tuple[str, str, int]] = []
    if gap is not None and (first := _first_if_fresh(gap.series, run)) is not None:
        step, value = first
        seen.append((_level_of(gap, abs(value), run), f"{gap.name} was {_number(value)}", step))
    if correlation is not None and (first := _first_if_fresh(correlation, run)) is not None:
        step, value = first
        seen.append((_level_of_correlation(value), f"probabilities had a correlation of {value:.3g}", step))
    if not seen:
        return None
    # The correlation is low for unlike probabilities even if few tokens differ by much; otherwise it shows less.
    level, text, step = next((each for each in seen if each[0] == "broken"), seen[0])
    size = run.get(LOG_RATIO)
    if size is not None and (first := _first_if_fresh(size, run)) is not None and first[1] > UNRELATED:
        level = "unrelated"
    level = {"broken": "unrelated", "none": "close"}.get(level, level)
    return level, f"{text} in {'the first step' if step <= 1 else f'step {step}'}", step


def _first_if_fresh(series: Series, run: Readings) -> tuple[int, float] | None:
    """Returns step and value of the first reading; None if it is not of the first steps, or its rollouts were old."""
    step = int(series.steps[0])
    return None if step > FIRST_READINGS or step in stale_steps(run) else (step, float(series.values[0]))


@finding("gap_started", "| at_once in_part with_updates suddenly comes_and_goes", needs=(LOG_RATIO,))
def gap_started(run: Readings) -> Seen:
    """Whether the gap was there before the weights moved. If so, the engines compute differently from the same weights.
    If it came with the updates, these did not arrive in the rollout, or the policy moved to where the engines differ
    more."""
    gap = gap_of(run)
    if gap is None or abs(now_of(gap.series)) ** gap.measure.power <= AGREE:
        return None
    if (spikes := gap_spike(run)) is not None and spikes[0] == "broken":
        return "comes_and_goes", f"the gap comes and goes: {spikes[1]}"
    began = require_logged(beginning(run))
    size, share = began
    floor = BELOW * gap.measure.apart**gap.measure.power
    jump = largest_jump(gap.heights, JUMP, floor) if size != DISAGREEMENT else None
    with_first = jump is not None and jump <= FIRST_READINGS
    if share >= FROZEN and not with_first:
        left = "as large as now" if share == 1 else f"{share:.0%} of what it is now"
        return "at_once", f"{size} was {left} before the weights moved"
    most, mean = run.late("vllm_kl/sequence_gap_max"), run.late("vllm_kl/sequence_gap_mean")
    if most is not None and mean and most > RARE * mean:
        return None  # so few trajectories have the gap that the first steps may have had none of them
    text = f"{size} came with the updates: in the first steps it was {share:.1%} of what it is now"
    if share > MOVED and not with_first:
        return "in_part", text
    # A run that comes apart takes longer than one step.
    sudden = with_first or largest_jump(gap.heights, JUMP**2, floor) is not None
    return "suddenly" if sudden else "with_updates", text


@cached_per_run
def beginning(run: Readings) -> tuple[str, float] | None:
    """Returns the quantity that shows best how a run began, and its first readings as a share of the last ones; None in
    a resumed run.

    As a policy becomes certain, its gap shrinks or grows even with equal weights. The routers' disagreement does not
    depend on that. It is used if it is now larger than rounding leaves. If it began at the level of rounding, the
    smaller of the two shares is used.
    """
    gap, size = None, ""
    for name, power in ((LOG_RATIO, 1.0), (PROB_DIFF, 1.0), (K3, 0.5), (K1, 0.5)):
        if (series := run.get(name)) is not None:
            gap, size = _share_at_first(np.column_stack([series.steps, np.abs(series.values)]), run, power), WORDS[name]
            break
    own = run.get("router/own_agreement") or run.get("router/agreement")
    if own is not None and 1 - float(own.values[-LEVEL_READINGS:].mean()) > ROUNDED:
        disagreement = np.column_stack([own.steps, 1 - own.values])
        share = _share_at_first(disagreement, run)
        if share is not None and (gap is None or gap >= share or disagreement[0, 1] > ROUNDED):
            return DISAGREEMENT, share
    return None if gap is None else (size, gap)


def _share_at_first(readings: np.ndarray, run: Readings, power: float = 1.0) -> float | None:
    """Returns the first of these readings, [steps, 2], as a share of the last ones; None if it is not known.

    Steps whose rollouts are older than the policy are left out, because their gap includes the policy's own movement.
    If all first steps are such steps, the result is None unless even their gap was small. If the second or third
    reading is far larger than those before it, the update before it made the gap.

    Args:
        power: the exponent that makes the readings grow as a mean |log k| does.
    """
    first = readings[:FIRST_READINGS][readings[:FIRST_READINGS, 0] <= FIRST_READINGS]
    stale = stale_steps(run)
    first = first[first[:, 1] > 0]  # a gap of exactly 0 was not measured
    fresh = first[[step not in stale for step in first[:, 0]]]
    if not len(first):
        return None
    early = (fresh if len(fresh) else first)[:, 1] ** power
    for count in range(1, len(early)):
        if early[:count].max() < MOVED * 2 * early[count:].min():
            early = early[:count]
            break
    start, now = early.mean(), np.median(readings[-LEVEL_READINGS:, 1]) ** power
    share = max(float(start / now), 0.0) if start < now else 1.0
    return share if len(fresh) or share < FROZEN else None


@cached_per_run
def stale_steps(run: Readings) -> set[int]:
    """Returns the steps whose rollouts were made with older weights."""
    series = run.get(STALENESS)
    return set() if series is None else {step for step, versions in series.pairs() if versions >= 0.5}


def _jump_of(gap: Gap) -> int | None:
    """Returns the index of the gap's largest lasting jump; one below the limit counts from a tenth of it on."""
    return largest_jump(gap.heights, JUMP, floor=BELOW * gap.measure.apart**gap.measure.power)


@finding("gap_jumped", "at_first_sync later later_and_grows passed | no", needs=(K3,))
def gap_jumped(run: Readings) -> Seen:
    """The gap rose to a multiple from one step to the next, and stayed there for some steps or for good."""
    gap = require_logged(gap_of(run))
    if len(gap.heights) < 4:
        return None
    heights, values, steps = gap.heights, gap.series.values, gap.series.steps
    i = _jump_of(gap)
    if i is None:
        return "no", "the gap never jumped"
    before = slice(max(i - 8, 0), i)
    now, least = _median(heights[-5:]), GREW * _median(heights[before])
    text = f"{gap.name} jumped from {_number(_median(values[before]))} to {_number(_median(values[i : i + 3]))}"
    if now < least or (heights[i:] < least).mean() > DIPPED:
        return "passed", f"{text}, and {'came back' if now < least else 'did not stay'}", int(steps[i])
    grows = now > 2 * _median(heights[i : i + 5])
    level = "at_first_sync" if i <= LONG_AFTER else "later_and_grows" if grows else "later"
    return level, f"{text}, and stays there", int(steps[i])


@finding("gap_grew", "grew | steady", needs=(K3,))
def gap_grew(run: Readings) -> Seen:
    """The gap is a multiple of its first level, and more than rounding; it grows, or has risen and stays."""
    gap = require_logged(gap_of(run))
    if len(gap.heights) < 8:
        return None
    heights, steps = gap.heights, gap.series.steps
    part = max(len(heights) // 8, 3)
    calm, now = _median(heights[:part]), _median(heights[-5:])
    levels = [_median(each) for each in np.array_split(heights, min(8, len(heights) // 2))]
    apart = _apart(gap, run) ** gap.measure.power
    text = f"{gap.name} went from {_number(_median(gap.series.values[:part]))} to {_number(now_of(gap.series))}"
    window = list(zip(steps[-GROWTH_READINGS:].tolist(), heights[-GROWTH_READINGS:].tolist(), strict=True))
    growth = estimate_growth(window, max(apart, 1e-9))
    grows = growth is not None and growth.low > 0
    stays = levels[-1] > GREW * min(levels[: max(len(levels) // 2, 1)])
    if now > apart:
        grew = now > GREW * calm and (grows or stays)
    else:
        grew = now > max(GREW_BELOW * calm, BELOW * apart) and grows
    if not grew:
        return "steady", text
    middle = (calm * now) ** 0.5
    began = int(steps[int(np.argmax(level_medians(heights, 3) > middle)) + 1])  # a single spike is no beginning
    return "grew", f"{text}, past {_number(middle ** (1 / gap.measure.power))} in step {began}", began


@finding("gap_spike", "broken spike | none", needs=(K3,))
def gap_spike(run: Readings) -> Seen:
    """Single steps have a gap of many times the usual one, more than rounding explains."""
    gap = require_logged(gap_of(run))
    if len(gap.heights) < 4:
        return None
    heights, apart = gap.heights, gap.measure.apart**gap.measure.power
    usual = _median(heights)
    spikes = heights > max(SPIKE * usual, apart)
    if spikes.mean() > 0.34:
        return "none", "no single step has a far larger gap"
    for i in np.flatnonzero(spikes):  # it must also be far above the readings around it
        spikes[i] = heights[i] > SPIKE * np.median(np.delete(heights[max(i - 3, 0) : i + 4], min(i, 3)))
    if not spikes.any():
        return "none", "no single step has a far larger gap"
    at, count = int(np.argmax(np.where(spikes, heights, 0))), int(spikes.sum())
    size, step = float(gap.series.values[at]), int(gap.series.steps[at])
    text = f"{gap.name} was {_number(size)} in step {step}, its median is {_number(_median(gap.series.values))}"
    comes_and_goes = usual <= apart and abs(size) > gap.measure.broken
    return "broken" if comes_and_goes else "spike", text + (f"; {count} steps are such" if count > 1 else ""), step


def in_errors(values: np.ndarray) -> float | None:
    """Returns the mean in units of its standard error; None for too few values."""
    if len(values) < 8:
        return None
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    scatters = error > 1e-12 * float(np.abs(values).max())  # more than the rounding of equal readings
    return float(values.mean()) / error if scatters else 0.0


@finding("mean_of_k", "far_above | above one unclear below a_little_below far_below", needs=(K1, K3))
def mean_of_k(run: Readings) -> Seen:
    """Whether k averages 1, as it does if the tokens were sampled from the distribution of l_infer."""
    k1, k3 = run.need(K1), run.need(K3)
    if now_of(k3, 20) > BROKEN and abs(now_of(k1, 20)) < 0.1 * now_of(k3, 20):
        return "far_above", f"k averages {1 + now_of(k3, 20):.3g}: l_infer is not of these tokens"
    _, ones, threes = run.joined(K1, K3)[-4 * LEVEL_READINGS :].T
    excess = in_errors(threes - ones)  # of the mean of k over 1
    if excess is None or now_of(k3) <= AGREE:
        return None
    sided = float(threes.mean() / ones.mean()) if ones.mean() > 0 else None
    if excess > 2 * NOISE_ERRORS and (sided or 2.0) > 1.6:
        return "above", f"k averages more than 1, by {excess:.0f} standard errors"
    if excess < -NOISE_ERRORS and sided is not None and sided < 0.4:
        return "far_below", f"k averages less than 1, by {-excess:.0f} standard errors: k3 / k1 is {sided:.2f}"
    if excess < -2 * NOISE_ERRORS and (sided or 1.0) < 0.97:
        level = "below" if (sided or 0.0) > 0.6 else "a_little_below"
        return level, f"k averages less than 1, by {-excess:.0f} standard errors"
    if sided is not None and 0.6 < sided < 1.6:
        return "one", f"k averages 1 (k3 / k1 is {sided:.2f})"
    if sided is not None and abs(excess) < NOISE_ERRORS:
        return "one", f"k averages 1 but for {abs(excess):.1f} standard errors"
    return "unclear", f"k averages 1 but for {excess:.1f} standard errors"


@finding("gap_scaled", "scaled | no", family="probability", needs=(K1, CORRELATION))
def gap_scaled(run: Readings) -> Seen:
    """The probabilities are far apart and still in step: one engine's logits are a multiple of the other's."""
    correlation = run.get(CORRELATION)
    sizes = [abs(now_of(series)) for name in (LOG_RATIO, K1) if (series := run.get(name)) is not None]
    if correlation is None or not sizes:
        return None
    size, now = max(sizes), now_of(correlation)
    text = f"log-probs differ by {size:.2g}, and the probabilities have a correlation of {now:.3g}"
    return ("scaled" if size > SCALED and now > IN_STEP else "no"), text


@finding("gap_at_rest", "grows | no", needs=(RATE, LOG_RATIO))
def gap_at_rest(run: Readings) -> Seen:
    """The gap grows although the learning rate is 0, so that no weight moves."""
    gap, rate, reference = gap_of(run), run.need(RATE), run.get(REFERENCE)
    moves = reference is not None and np.ptp(reference.values) > 0  # a small rate may be logged as 0
    if gap is None or rate.values.any() or moves or gap.series.is_rounded:
        return None
    course = course_of(gap.series)
    if course is None or course.rise.errors < SURE:
        return "no", "the gap does not grow at a learning rate of 0"
    return "grows", f"{gap.name} went from {course.moved}, at a learning rate of 0"


@finding("k1_sign", "| negative a_little_negative none positive", needs=(K1, LOG_RATIO))
def k1_sign(run: Readings) -> Seen:
    """The sign of k1, which estimates a KL: a KL is not negative."""
    sign = in_errors(run.values(K1)[-4 * LEVEL_READINGS :])
    k3 = run.get(K3)
    if sign is None or (k3 is not None and now_of(k3) <= AGREE):
        return None
    if sign < -NOISE_ERRORS:
        side = leaning(run)
        if side is not None and side > -LEANING:
            return "a_little_negative", f"k1 is negative, but by {-side:.0%} of the gap only"
        return "negative", f"k1 is negative by {-sign:.0f} standard errors, which no KL is"
    return ("positive" if sign > NOISE_ERRORS else "none"), f"k1 is {sign:.0f} of its standard errors"


@cached_per_run
def leaning(run: Readings) -> float | None:
    """Returns k1 over the mean of |log k|: 1 or -1 if every token's gap is to the same side, near 0 for noise."""
    size, k1 = run.values(LOG_RATIO)[-4 * LEVEL_READINGS :], run.values(K1)[-4 * LEVEL_READINGS :]
    if not k1.size or not size.size or size.mean() <= 0:
        return None
    return float(np.clip(k1.mean() / size.mean(), -1, 1))


@finding("gap_side", "| one_side one_side_of_a_large_gap most more both", needs=(K1, LOG_RATIO))
def gap_side(run: Readings) -> Seen:
    """The side of the gap: sampled tokens are less likely in training, or more likely."""
    side, k3 = leaning(run), run.late(K3)
    if side is None or k3 is None or k3 <= AGREE:
        return None
    text = f"{(1 + abs(side)) / 2:.0%} of the gap is to one side"
    if side > 0.88:
        return ("one_side" if k3 < ONE_WAY else "one_side_of_a_large_gap"), text
    return ("most" if side > 0.8 else "more" if side > 0.5 else "both"), text


@cached_per_run
def by_probability(run: Readings) -> dict[str, float] | None:
    """Returns bucket of probability -> k1 / sqrt(2 k3): 1 or -1 if all its tokens move alike, 0 for noise.

    Each value is a mean over the last steps, whose ratios are cut at ALIKE. Otherwise one token with other experts
    would decide a batch.
    """
    found = {}
    for bucket in BUCKETS["prob"]:
        _, k1, k3 = run.joined("vllm_kl/k1/prob/" + bucket, "vllm_kl/k3/prob/" + bucket)[-4 * LEVEL_READINGS :].T
        if (k3 > 0).any():
            ratios = k1[k3 > 0] / (2 * k3[k3 > 0]) ** 0.5
            found[bucket] = float(ratios.clip(-ALIKE, ALIKE).mean())
    return found if len(found) >= 3 else None


@finding(
    "gap_by_probability",
    "| tilted in_bulk even",
    family="probability",
    needs=("vllm_kl/k1/prob/" + BUCKETS["prob"][0],),
)
def gap_by_probability(run: Readings) -> Seen:
    """Whether tokens of one probability move alike.

    Tilted: unlikely tokens move one way and likely ones the other, and all tokens of a bucket alike. Wrong weights in a
    layer may also move nearly certain tokens the other way, but they move all others alike.
    """
    found, k3 = by_probability(run), run.late(K3)
    if found is None or k3 is None or k3 <= AGREE:
        return None
    ratios = list(found.values())
    unlikely, likely = ratios[0], sum(ratios[-2:]) / 2 if len(ratios) > 3 else ratios[-1]
    most_move_up = min(unlikely, found.get("0.1-0.5", 0.0)) > 0.8
    if unlikely * likely < 0 and min(abs(unlikely), abs(likely)) > 0.4 and not most_move_up:
        return "tilted", "unlikely tokens move one way and likely ones the other, all of a probability alike"
    if max(map(abs, ratios)) > 0.6:
        return "in_bulk", "most tokens of some probability move to the same side"
    return "even", "tokens of one probability move to either side"


@finding("gap_tokens", "| few many", needs=(LOG_RATIO,))
def gap_tokens(run: Readings) -> Seen:
    """Whether a few tokens make the gap: k3 over the square of the mean |log k| is 0.5 to 5 if many do."""
    size, k3 = run.late(LOG_RATIO), run.late(K3)
    if not size or k3 is None or k3 <= AGREE:
        return None
    ratio = k3 / size / size  # dividing twice: the square may be out of range
    level = "few" if ratio >= 5 else "many"
    return level, f"{level} tokens make it: k3 is {ratio:.2g} times the squared mean |log k|"


@finding(
    "gap_trajectories",
    "whole | few some most all",
    needs=("vllm_kl/sequence_gap_mean", "vllm_kl/sequence_gap_max"),
)
def gap_trajectories(run: Readings) -> Seen:
    """Whether a few trajectories make the gap: the largest gap of a trajectory over the mean one.

    Whole: the log-probs of a trajectory are off by a mean of WHOLE nats per token, while most trajectories are sound.
    """
    most, mean = (run.late(f"vllm_kl/sequence_gap_{kind}") for kind in ("max", "mean"))
    k3 = run.late(K3)
    if not mean or most is None or (k3 is not None and k3 <= AGREE):
        return None
    ratio = most / mean
    if ratio > 5 and most > WHOLE:
        return "whole", f"the worst trajectory is off by {most:.2g} nats in every token, {ratio:.0f} times the mean"
    level = "few" if ratio > 7 else "some" if ratio >= 5 else "most" if ratio >= 2.5 else "all"
    return level, f"{level} trajectories make it: the largest gap is {ratio:.1f} times the mean"


@finding("tokens_drifted", "some | none", needs=("filter/retokenization_drift/drifted",))
def tokens_drifted(run: Readings) -> Seen:
    """Whether trajectories encode to other tokens than the sampled ones."""
    drifted = require_logged(run.late("filter/retokenization_drift/drifted"))
    return ("some" if drifted > 0 else "none"), f"{drifted:.1%} of the trajectories encode otherwise than sampled"


def engines_share(run: Readings) -> float | None:
    """Returns the engines' part of k3 as a share of the whole, in the last steps that have both; None for too few."""
    shares = [
        both[:, 1] / np.maximum(both[:, 2], AGREE) for name in engines_names(K3) if len(both := run.joined(name, K3))
    ]
    lately = max(shares, key=len, default=np.empty(0))[-LEVEL_READINGS:]
    return _median(lately) if len(lately) >= FEWEST_SHARES else None


@finding("rollout_age", "| always_old old beside new", needs=(STALENESS,))
def rollout_age(run: Readings) -> Seen:
    """How many versions the rollouts are behind the policy, and whether the gap is there without that."""
    staleness = require_logged(run.late(STALENESS))
    text = f"rollouts are {staleness:.1f} versions behind the policy"
    if staleness < 1:
        return "new", text
    if (share := engines_share(run)) is not None and share >= MOSTLY:
        return "beside", f"{text}, but {min(share, 1):.0%} of k3 is the engines' own"
    always = beginning(run) is None and bool(stale_steps(run).intersection(range(FIRST_READINGS + 1)))
    return ("always_old" if always else "old"), text
