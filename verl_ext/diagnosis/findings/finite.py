"""Findings about NaN and infinite numbers, about missing log-probabilities, corrections, and the end of the run."""

import re
from collections.abc import Mapping

import numpy as np

from verl_ext.diagnosis.findings.gap import REFERENCE
from verl_ext.diagnosis.findings.registry import OF_BATCH, Seen, finding
from verl_ext.diagnosis.findings.reward import SPREADS, parts_of_reward
from verl_ext.diagnosis.names import ENTROPY, GRADIENT, K1, K3, LOG_RATIO, PROB_DIFF, REWARD
from verl_ext.diagnosis.series import LEVEL_READINGS, NOW_READINGS, Readings, Series, step_from
from verl_ext.diagnosis.statistics import SURE, course_of

UPDATE = (GRADIENT, "actor/pg_loss", "actor/loss")
CRITIC = ("critic/grad_norm", "critic/vf_loss")
GRADIENTS = (GRADIENT, "critic/grad_norm")
TRAINING = (*UPDATE, ENTROPY, REFERENCE, "actor/ppo_kl", *CRITIC)
GAP = (K3, K1, LOG_RATIO, PROB_DIFF)
FORWARD = (ENTROPY, REFERENCE, "actor/ppo_kl", *GAP)  # computed from the weights without a backward pass
FILLED = "vllm_kl/filled"
OFTEN = 0.5  # share of the last readings that are not finite in a metric that is lost, and of all since then
# How a run ended -> words of report/sources/ends.py, or of an error, that tell it; the first that fit. A cause has the
# check of each kind (`check_if`).
KINDS = {
    "user": r"its user|a cancelled Slurm job",
    "memory": r"out ?of ?memory|\bOOM\b|(?:cannot|can't) allocate memory|MemoryError|memory monitor|no available memory"
    r"|lack of memory|limit of v?mem|memlimit",
    # a collective, a store or a call of Ray that waits for another process; a time limit of one's own code is an error
    "hang": r"(?=.*(?:tim(?:ed|e) ?-?out|deadlock))"
    r"(?=.*(?:nccl|gloo|hccl|c10d|watchdog|collective|store|barrier|\bray\.get\b|get ?time))",
    # what PyTorch, Megatron and samplers say of a number that they refuse
    "not_finite": r"(?=.*\b(?:nan|inf)\b)(?=.*(?:grad|loss|logits|prob|norm))",
    "connection": r"a broken connection|connection (?:was |is )?(?:reset|refused|closed|aborted)|connect(?:ion)?error"
    r"|unhandled system error|remote (?:process exited|error)|network is unreachable|no route to host",
    "late": r"(?=.*(?:time(?:d ?|-)?out|deadline exceeded))"
    r"(?=.*(?:request|response|read ?time|http|generat|rollout|tool|grader|sandbox|reward))",
    "disk": r"no space left|quota exceeded|unexpected pos \d+ vs|file write failed|lack of ephemeral-storage",
    "environment": r"\b(?:Import|ModuleNotFound)Error|failed to import|undefined symbol|no kernel image|GLIBC"
    r"|cannot open shared object|driver version is insufficient",
    "index": r"device-side assert|index\w*: block: |srcIndex|index out of (?:bounds|range in self)",
    # of a config, a shape or an argument
    "refused": r".* before its first step.* by \S*\b(?:Type|Key|Value|Attribute|Assertion|NotImplemented|Index)Error"
    r"|.*(?:size mismatch|unexpected keyword|no module or parameter named|Config\w*Error|NotImplementedError)",
}
# Where it ended -> words of the same, the first that fit; in a phase of the step, as report/sources/ends.py names it.
PLACES = {
    "host": r"OOM.?kill|memory monitor|a kill \(|allocate memory|\bMemoryError|lack of memory"
    r"|\bworkers?\b.*\b(?:died|killed)\b",
    "cache": r"no available memory|cache blocks|KV cache",
    "scheduler": r"\bSlurm\b|\bPBS\b|\bLSF\b|Kubernetes|SIGTERM",
    "first": r"\branks? [\d, ]+ in [A-Z_]+ 1, for ",  # a collective, the first of its group
    "sync": " in the weight sync by ",
    "checkpoint": " in a checkpoint by ",
    "log_probs": " in the log-probs by ",
    "update": " in the update by ",
    "critic": " in the critic's update by ",
    "reward": " in the reward by ",
    "rollout": r" in the rollout by |vllm|sglang",
    "start": " before its first step",
}
MEMORY_USED = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/cpu_memory_used_gb")
MEMORY_GREW = 0.1  # share of the memory in use at the end
USUAL_WEIGHT = 0.6, 1.25  # mean of the importance weights, whose expectation is 1 before a cut
CORRECTIONS = ("correction/dropped", "correction/weight_mean", "rollout_corr/rollout_is_mean")


@finding("not_finite", "training gradient critic reward spread reference rollout once | no", check=OF_BATCH)
def numbers_finite(run: Readings) -> Seen:
    """Metrics are NaN or infinite: training's own, the reward, its deviation in a group, or only the metrics that
    compare training with the reference or the rollout. Where only the gradient is, and later forward passes are finite,
    the trainer skipped the updates, as verl's FSDP engine does."""
    levels = {"reward": (REWARD, *parts_of_reward(run)), "spread": SPREADS, "training": TRAINING, "rollout": GAP}
    lost = {level: _lost(run, names) for level, names in levels.items()}
    # What is computed from a number that is none is none either: what began first is the cause, and of one step what
    # is computed first.
    found = [(level, *each) for level, each in lost.items() if each is not None and level != "rollout"]
    if not found and lost["rollout"] is not None:
        name, step = lost["rollout"]
        return "rollout", f"{name} is not a number from step {step} on, and training's own metrics are finite", step
    if found:
        level, name, step = min(found, key=lambda each: each[2])
        if name == REFERENCE and any(run.late(each) is not None for each in UPDATE) and _lost(run, UPDATE) is None:
            return "reference", f"{name} is not a number from step {step} on, although the update is finite", step
        ended = run.ending is not None and _first_of(KINDS, run.ending.reason) == "not_finite"  # what computes is lost
        if name == GRADIENT and not ended and any(_is_finite_after(run, each, step) for each in FORWARD):
            return "gradient", f"{name} is not a number from step {step} on, and the weights still are", step
        level = "critic" if name in CRITIC else level
        return level, f"{name} is not a number from step {step} on", step
    if bad := _bad(run, (*TRAINING, REWARD, *GAP)):
        name, step = _earliest({name: int(series.steps[wrong][0]) for name, (series, wrong) in bad.items()})
        count = int(bad[name][1].sum())
        return "once", f"{name} was not a number in {count} step{'s' * (count != 1)}, first in step {step}", step
    logged = [name for name in (*TRAINING, *GAP) if run.logged(name) is not None]
    return ("no", "all numbers are finite") if logged else None


@finding("log_probs_filled", "some | none", needs=(FILLED,))
def log_probs_filled(run: Readings) -> Seen:
    """Responses have filler values instead of missing log-probabilities."""
    series = run.need(FILLED)
    recent = series.values[-LEVEL_READINGS:]
    if not recent.any():
        return "none", "every l_infer may come from a sampler"
    text = f"{recent.mean():.2g} of the responses have an l_infer of 0 for an unlikely token, or above 0"
    return "some", text, int(series.steps[np.argmax(series.values > 0)])


def lost_gap(run: Readings) -> tuple[str, int] | None:
    """Returns the metric of the gap that is not finite any more, the first of several, and the step since when."""
    return _lost(run, GAP)


def _lost(run: Readings, names: tuple[str, ...]) -> tuple[str, int] | None:
    """Returns the first of these metrics that was lost, and the step: since then it is mostly not finite. In the last
    step alone, it counts if the run ended there, or the update had no finite gradient; such a gradient alone may be a
    loss scaler's."""
    gradient = run.logged(GRADIENT)
    spoiled = run.ending is not None or gradient is None or not np.isfinite(gradient.values[-1])
    steps = {
        name: step_from(series, wrong, OFTEN)
        for name, (series, wrong) in _bad(run, names).items()
        if wrong[-NOW_READINGS:].mean() > OFTEN
        or (wrong[-1] and spoiled and (run.ending is not None or name not in GRADIENTS))
    }
    return _earliest(steps) if steps else None


def _is_finite_after(run: Readings, name: str, step: int) -> bool:
    series = run.logged(name)
    return series is not None and series.steps[-1] > step and bool(np.isfinite(series.values[-1]))


def _bad(run: Readings, names: tuple[str, ...]) -> dict[str, tuple[Series, np.ndarray]]:
    """Returns the metrics that are not always finite: all readings, and which of them are not."""
    found = {name: series for name in names if (series := run.logged(name)) is not None}
    masks = {name: (series, ~np.isfinite(series.values)) for name, series in found.items()}
    return {name: (series, wrong) for name, (series, wrong) in masks.items() if wrong.any()}


def _earliest(steps: dict[str, int]) -> tuple[str, int]:
    return min(steps.items(), key=lambda each: each[1])


@finding(
    "correction_on",
    "far | on",
    subsumed_by=("tokens_dropped",),
    check="whether the weights are products over whole answers; log k by token shows a gap of the engines",
)
def correction_on(run: Readings) -> Seen:
    """A correction weighs tokens or sequences by the gap; the mean weight may be far from 1, its expectation."""
    for name in CORRECTIONS:
        if (series := run.get(name)) is None:
            continue
        if name == "correction/dropped":
            return "on", f"a correction is on, and drops {series.values.mean():.2g} of the tokens"
        if np.abs(series.values - 1).max() > 1e-9 and series.values.any():
            mean = float(np.median(series.values[-5:]))
            level = "on" if USUAL_WEIGHT[0] <= mean <= USUAL_WEIGHT[1] else "far"
            return level, f"a correction is on, with a mean weight of {mean:.2g}"
    return None


@finding("run_ended", f"| {' '.join(KINDS)} error")
def run_ended(run: Readings) -> Seen:
    """An error ended the run: no memory left, a collective that timed out, a number that is none, a connection that
    broke, a request that took too long, a full disk, an import or a driver, an index out of range on the GPU, a config
    or a shape that was refused, or another one; or its user stopped it."""
    if run.ending is None:
        return None
    reason = run.ending.reason
    said = "" if PLACES["start"] in reason else reason.partition(" by ")[2]  # without the phase of the step
    level = _first_of(KINDS, said or reason) or "error"
    return level, f"the run {run.ending.reason.rstrip('.')}", run.ending.step


@finding("ended_in", f"| {' '.join(PLACES)}", subsumed_by=("run_ended",))
def ended_in(run: Readings) -> Seen:
    """The phase of the step, or the part of the machine, in which an error ended the run."""
    if run.ending is None or not (place := _first_of(PLACES, run.ending.reason.partition(", before ")[0])):
        return None
    return place, f"the run {run.ending.reason.rstrip('.')}", run.ending.step


def _first_of(table: Mapping[str, str], text: str) -> str:
    """Returns the first entry whose words are in a text; "" if none is."""
    return next((name for name, words in table.items() if re.search(f"(?i){words}", text)), "")


@finding(
    "memory_grew",
    "grew | steady",
    needs=MEMORY_USED,
    check="what a worker keeps from step to step: tensors with their graph, caches, texts that it logs",
)
def memory_grew(run: Readings) -> Seen:
    """The memory in use grew over the steps, surely and by MEMORY_GREW of its first level."""
    seen: list[tuple[float, str]] = []
    for name in MEMORY_USED:
        course = course_of(run.get(name))
        if course is not None and course.rise.errors >= SURE:
            seen.append(((course.rise.end - course.rise.start) / course.height, f"{name} grew from {course.moved}"))
    if not seen:
        return ("steady", "no memory grows") if any(run.get(name) is not None for name in MEMORY_USED) else None
    share, text = max(seen)
    return ("grew" if share > MEMORY_GREW else "steady"), text
