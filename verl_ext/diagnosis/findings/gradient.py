"""Findings about the size of the updates: the gradient norm, the policy's movement in a step, and its distance from the
reference."""

import numpy as np

from verl_ext.diagnosis.findings.gap import RATE, REFERENCE, sound_level
from verl_ext.diagnosis.findings.registry import OF_BATCH, Seen, finding
from verl_ext.diagnosis.findings.reward import has_signal
from verl_ext.diagnosis.names import GRADIENT, LOG_RATIO
from verl_ext.diagnosis.series import (
    FIRST_READINGS,
    NOW_READINGS,
    Readings,
    Series,
    beginning_of,
    holds_from,
    now_of,
    step_from,
)
from verl_ext.diagnosis.statistics import spikes

STRIDE, CLIPPED, SELF_GAP = "actor/ppo_kl", "actor/pg_clipfrac", "actor/self_gap"
ABSURD = 1e6  # no clipping makes a direction of it: the gradient is wrong
LARGE = 100.0  # larger than the norm of a mean over tokens: the loss is a sum, or the gradient is wrong
SPIKE = 10.0  # times the median
REFERENCE_SPIKE = 100.0  # times the median: the estimator k3 is exp of a difference, and scatters far more
GREW = 10.0  # times the level before
FAR = 0.05  # KL within a step; sound runs of the lab stay below 0.01, published ones below 0.008
AT_REST, AT_ONCE = 1e-4, 0.02  # ppo_kl at a learning rate of 0, and from the first step on
RUNAWAY = 3.0  # nats per token from the reference; published sound runs stay below 1
HIGH_RATE = 2e-4  # also for a LoRA; published sound runs have 1e-7 to 1e-4
NOTHING = 1e-6
FEWEST_KL = 5  # readings
APART_AT_FIRST = 0.5  # KL to the reference in the first step; the mean over many updates reaches 0.3
MANY_CLIPPED = 0.3  # share of the tokens; GSPO's narrow clip takes half of that


@finding(
    "gradient_large",
    "absurd large | usual",
    family="gradient",
    needs=(GRADIENT,),
    subsumed_by=("gradient_grew",),
    check="whether the loss is a sum, of tokens, answers or micro-batches, instead of a mean; a loss scaler",
)
def gradient_large(run: Readings) -> Seen:
    """The gradient norm is far above that of a mean over tokens."""
    series = run.need(GRADIENT)
    now = now_of(series)
    text = f"the gradient's norm is {now:.3g}"
    if now <= LARGE:
        return "usual", text
    step = int(series.steps[int(np.argmax(series.values > LARGE))])
    return ("absurd" if now > ABSURD else "large"), f"{text} (first past {LARGE:g} in step {step})", step


@finding(
    "gradient_grew",
    "grew | steady",
    family="gradient",
    needs=(GRADIENT,),
    check="the learning rate, and the batches in which it began to grow",
)
def gradient_grew(run: Readings) -> Seen:
    """The gradient's norm has grown to a multiple of its level before, and stays there."""
    series = run.need(GRADIENT, fewest=8)
    width = max(len(series.values) // 8, 2)
    calm = min(float(np.median(part)) for part in np.array_split(series.values[:-width], 4) if part.size)
    now = now_of(series, max(width, NOW_READINGS))
    if calm > 0 and now > GREW * calm:
        step = step_from(series, series.values > (calm * now) ** 0.5, 0.7)
        return "grew", f"the gradient's norm grew from {calm:.2g} to {now:.2g}", step
    return "steady", f"the gradient's norm is {now:.2g}, and was {calm:.2g}"


@finding("gradient_spike", "spike | none", needs=(GRADIENT,), check=OF_BATCH)
def gradient_spike(run: Readings) -> Seen:
    """Single gradients have many times the usual norm."""
    series = run.need(GRADIENT, fewest=4)
    past, usual = spikes(np.abs(series.values), SPIKE)
    past[:2] = False  # an optimizer that warms up may begin with large gradients
    if not past.any():
        return "none", f"no gradient is more than {SPIKE:g} times the usual norm of {usual:.2g}"
    return "spike", *_largest_spike("the gradient's norm", series, past, usual, SPIKE)


def _largest_spike(name: str, series: Series, past: np.ndarray, usual: float, times: float) -> tuple[str, int]:
    """Returns the largest of the readings that are `past`, in words, and its step."""
    at, count = int(np.argmax(np.where(past, np.abs(series.values), 0))), int(past.sum())
    text = f"{name} was {series.values[at]:.3g} in step {series.steps[at]}, its median is {usual:.2g}"
    more = f"; {count} steps are over {times:g} times the median" if count > 1 else ""
    return text + more, int(series.steps[at])


@finding(
    "gradient_zero",
    "zero lost | some",
    needs=(GRADIENT,),
    check="whether answers to one prompt get different rewards, and the mask of the loss",
)
def gradient_zero(run: Readings) -> Seen:
    """The gradient is exactly 0, step after step: nothing is learnt. It is lost if rewards spread all the same: then
    fewer than 3 readings show it, if they are all."""
    signal = has_signal(run)
    series = run.need(GRADIENT, fewest=1 if signal else 3)
    none = np.abs(series.values) < NOTHING
    began = holds_from(none, 0.9)
    if len(none) - began < max(0.25 * len(none), min(3, len(none))):
        return "some", f"the gradient's norm is {now_of(series):.2g}"
    step = int(series.steps[began])
    count = int(none[began:].sum())
    text = f"the gradient is 0 in {count} step{'s' * (count != 1)}, from step {step} on"
    if signal:
        return "lost", f"{text}, although answers to one prompt get different rewards", step
    return "zero", text, step


@finding(
    "reference_kl_grew",
    "grew at_once | near",
    needs=(REFERENCE,),
    check="whether the reference has the run's own checkpoint, adapter, template and dtype; dropout",
)
def reference_kl_grew(run: Readings) -> Seen:
    """The policy runs away from the reference model, or differs from it in the first step already."""
    series = run.need(REFERENCE)
    width = max(len(series.values) // 8, 1)
    start, now = beginning_of(series, width), now_of(series, max(width, 3))
    text = f"the KL to the reference went from {start:.2g} to {now:.2g}"
    if len(series.steps) >= FEWEST_KL and now >= RUNAWAY and now >= GREW * max(start, NOTHING):
        step = int(series.steps[int(np.argmax(series.values > RUNAWAY))])
        return "grew", f"{text} (first past {RUNAWAY:g} in step {step})", step
    first, step = float(series.values[0]), int(series.steps[0])
    if step <= 1 and abs(first) > APART_AT_FIRST:
        return "at_once", f"the KL to the reference was {first:.2g} in the first step", step
    return ("near", text) if len(series.steps) >= FEWEST_KL else None


@finding("reference_kl_spiked", "spiked | calm", needs=(REFERENCE,), check=OF_BATCH)
def reference_kl_spiked(run: Readings) -> Seen:
    """Single readings of the KL to the reference are many times the usual one."""
    series = run.need(REFERENCE, fewest=2 * FEWEST_KL)
    past, usual = spikes(np.abs(series.values), REFERENCE_SPIKE, least=RUNAWAY)
    if not past.any():
        return "calm", "the KL to the reference has no spikes"
    return "spiked", *_largest_spike("the KL to the reference", series, past, usual, REFERENCE_SPIKE)


@finding(
    "self_gap",
    "from_start first | small",
    needs=(STRIDE,),
    check="both passes on one batch: temperature, dtype, dropout, packing, and the micro-batches",
)
def self_gap(run: Readings) -> Seen:
    """The policy of the update differs from that of the old log-probabilities before it has moved: in the first
    mini-batch, by more than two engines differ in sound runs. Where that is not logged: in a step with a learning rate
    of 0, or from the first step on and as much in every step; of fewer steps, the first one is told.

    In bypass mode the old log-probabilities are the rollout's, and the difference is the gap of the engines.
    """
    if (own := run.get(SELF_GAP)) is not None:
        usual = float(np.median(own.values))
        text = f"the k3 of l_old against l_theta at equal weights is {usual:.2g} (median)"
        return ("from_start" if usual > sound_level(run) else "small"), text
    series, clipped, rate = run.need(STRIDE), run.get(CLIPPED), run.get(RATE)
    sizes = np.abs(series.values)
    first, usual = float(np.median(sizes[:FIRST_READINGS])), float(np.median(sizes))
    gap = run.late(LOG_RATIO)
    if gap is not None and usual > gap / 2:
        return None
    text = f"ppo_kl was {first:.2g} in the first steps"
    if clipped is not None:
        text += f", with {beginning_of(clipped, FIRST_READINGS):.1%} of the tokens clipped"
    warms_up = rate is not None and rate.values[0] == 0 < rate.values.max() and series.steps[0] == rate.steps[0]
    if warms_up and sizes[0] > AT_REST:
        return "from_start", f"ppo_kl was {sizes[0]:.2g} in step {series.steps[0]}, at a learning rate of 0", None
    steady = usual / 2 < first < usual * 2 and np.quantile(sizes, 0.9) < 2 * usual
    if len(sizes) < FEWEST_KL and series.steps[0] <= 1 and sizes[0] > FAR:
        return "first", f"ppo_kl was {sizes[0]:.2g} in the first step", int(series.steps[0])
    known = len(sizes) >= FEWEST_KL and series.steps[0] <= FIRST_READINGS
    return ("from_start", f"{text}, as in all later ones") if known and steady and usual > AT_ONCE else ("small", text)


@finding(
    "clipped",
    "many | few",
    needs=(CLIPPED,),
    subsumed_by=("self_gap",),
    check="the age of the rollouts, the updates of a batch, and the clip's bounds",
)
def tokens_clipped(run: Readings) -> Seen:
    """The clip of the loss takes a large part of the tokens out of the update."""
    share = float(np.median(run.need(CLIPPED).values))
    return "many" if share > MANY_CLIPPED else "few", f"{share:.0%} of the tokens are clipped (median)"


@finding(
    "stride", "far | near", needs=(STRIDE,), check="the learning rate, the updates of a batch, and the clip's bounds"
)
def stride(run: Readings) -> Seen:
    """The policy moves far within a step, by the KL that verl logs in its updates.

    With one update per step, the policy has not moved yet when it is measured, and the KL is 0. In bypass mode, the KL
    is the gap of the engines, and is steady from the first step.
    """
    series = run.get(STRIDE)
    if series is None or not np.abs(series.values).any() or len(series.steps) < 5:
        return None
    found = np.abs(series.values)
    width = min(5, max(len(found) // 4, 1))
    means = np.convolve(found, np.full(width, 1 / width), mode="valid")
    at, most = int(means.argmax()), float(means.max())
    text = f"the policy moved by a KL of {most:.2g} within a step"
    if most <= FAR or means.min() > FAR:
        return "near", text
    return "far", text, int(series.steps[min(at + width - 1, len(series.steps) - 1)])


@finding("rate", "| high usual", needs=(RATE,))
def rate(run: Readings) -> Seen:
    """The learning rate is far above the usual ones."""
    series = run.need(RATE)
    highest = float(series.values.max())
    return "high" if highest > HIGH_RATE else "usual", f"the learning rate is up to {highest:.1e}"
