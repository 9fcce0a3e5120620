"""Findings about the size of the updates: the gradient norm, the policy's movement in a step, and its distance from the
reference."""

import numpy as np

from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import GRADIENT
from verl_ext.diagnosis.series import Readings, beginning_of, holds_from, now_of, step_from

REFERENCE, STRIDE, RATE = "actor/kl_loss", "actor/ppo_kl", "actor/lr"
LARGE = 100.0  # larger than the norm of a mean over tokens: the loss is a sum, or the gradient is wrong
SPIKE = 10.0  # times the median
GREW = 10.0  # times the level before
FAR = 0.05  # KL within a step; sound runs of the lab stay below 0.01, published ones below 0.008
RUNAWAY = 3.0  # nats per token from the reference; published sound runs stay below 1
HIGH_RATE = 2e-4  # also for a LoRA; published sound runs have 1e-7 to 1e-4
NOTHING = 1e-6
FEWEST_KL = 5  # readings


@finding("gradient_large", "large | usual", family="gradient", needs=(GRADIENT,))
def gradient_large(run: Readings) -> Seen:
    """The gradient norm is far above that of a mean over tokens."""
    series = run.need(GRADIENT)
    now = now_of(series)
    text = f"the gradient's norm is {now:.3g}"
    if now <= LARGE:
        return "usual", text
    step = int(series.steps[int(np.argmax(series.values > LARGE))])
    return "large", f"{text} (first past {LARGE:g} in step {step})", step


@finding("gradient_grew", "grew | steady", family="gradient", needs=(GRADIENT,))
def gradient_grew(run: Readings) -> Seen:
    """The gradient's norm has grown to a multiple of its level before, and stays there."""
    series = run.need(GRADIENT, fewest=8)
    width = max(len(series.values) // 8, 2)
    calm = min(float(np.median(part)) for part in np.array_split(series.values[:-width], 4) if part.size)
    now = now_of(series, max(width, 3))
    if calm > 0 and now > GREW * calm:
        step = step_from(series, series.values > (calm * now) ** 0.5, 0.7)
        return "grew", f"the gradient's norm grew from {calm:.2g} to {now:.2g}", step
    return "steady", f"the gradient's norm is {now:.2g}, and was {calm:.2g}"


@finding("gradient_spike", "spike | none", needs=(GRADIENT,))
def gradient_spike(run: Readings) -> Seen:
    """Single gradients have many times the usual norm."""
    series = run.need(GRADIENT, fewest=4)
    sizes = np.abs(series.values)
    usual = float(np.median(sizes[sizes > NOTHING])) if (sizes > NOTHING).any() else 0.0
    past = sizes > SPIKE * usual
    past[:2] = False  # an optimizer that warms up may begin with large gradients
    if usual == 0 or not past.any() or past.mean() > 0.25:
        return "none", f"no gradient is more than {SPIKE:g} times the usual norm of {usual:.2g}"
    at = int(np.argmax(np.where(past, sizes, 0)))
    count = int(past.sum())
    more = f"; {count} steps are over {SPIKE:g} times the median" if count > 1 else ""
    text = f"the gradient's norm was {sizes[at]:.3g} in step {series.steps[at]}, its median is {usual:.2g}{more}"
    return "spike", text, int(series.steps[at])


@finding("gradient_zero", "zero | some", needs=(GRADIENT,))
def gradient_zero(run: Readings) -> Seen:
    """The gradient is exactly 0, step after step: nothing is learnt."""
    series = run.need(GRADIENT, fewest=3)
    none = np.abs(series.values) < NOTHING
    began = holds_from(none, 0.9)
    if len(none) - began < max(0.25 * len(none), 3):
        return "some", f"the gradient's norm is {now_of(series):.2g}"
    step = int(series.steps[began])
    return "zero", f"the gradient is 0 in {int(none[began:].sum())} steps, from step {step} on", step


@finding("reference_kl_grew", "grew | near", family="reference", needs=(REFERENCE,))
def reference_kl_grew(run: Readings) -> Seen:
    """The policy runs away from the reference model."""
    series = run.need(REFERENCE, fewest=FEWEST_KL)
    width = max(len(series.values) // 8, 1)
    start, now = beginning_of(series, width), now_of(series, max(width, 3))
    text = f"the KL to the reference went from {start:.2g} to {now:.2g}"
    if now < RUNAWAY or now < GREW * max(start, NOTHING):
        return "near", text
    step = int(series.steps[int(np.argmax(series.values > RUNAWAY))])
    return "grew", f"{text} (first past {RUNAWAY:g} in step {step})", step


@finding("stride", "far | near", needs=(STRIDE,))
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
