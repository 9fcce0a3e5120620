"""Made-up runs, as the report reads them: every metric that a panel draws, in all kinds of trouble."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.series import Series
from verl_ext.guard.state import Event
from verl_ext.report.run import Run

NAN = float("nan")


def make(metrics: dict[str, Sequence[float]], events: Sequence[Event] = (), first: int = 1, **more) -> Run:
    """Makes a run from lists of values, each starting at step `first`."""
    length = max(map(len, metrics.values()))
    steps = np.arange(first, first + length)
    series = {key: Series(steps[: len(values)], np.array(values, np.float64)) for key, values in metrics.items()}
    return replace(Run("run", (Path("run.jsonl"),), steps, series, tuple(events)), **more)


def event(step: int, action: str, reason: str = "made up") -> Event:
    return Event(step, "rule", "vllm_kl/k3", 0.2, 0.1, action, reason)


def full(steps: int = 120, layers: int = 8, seed: int = 0) -> Run:
    """A healthy run with every metric that any panel knows."""
    dice = np.random.default_rng(seed)
    at = np.arange(1, steps + 1)

    def noise(level: float, size: float = 0.1) -> np.ndarray:
        return level * np.exp(size * dice.normal(size=steps))

    seconds = {name: noise(each) for name, each in (("gen", 60), ("old_log_prob", 10), ("ref", 8), ("adv", 3))}
    seconds |= {"update_actor": noise(20), "update_weights": noise(4)}
    buckets = {f"vllm_kl/k3/prob/{name}": noise(1e-3 / 3**place) for place, name in enumerate(BUCKETS["prob"])}
    buckets |= {f"vllm_kl/k3/position/{name}": noise(1e-4 * 2**place) for place, name in enumerate(BUCKETS["position"])}
    metrics = {
        "critic/score/mean": 0.6 - 0.5 * np.exp(-at / 40) + 0.02 * dice.normal(size=steps),
        "val-core/gsm8k/acc/mean@1": 0.3 + at / 1000,
        "val-core/math/acc/mean@1": 0.1 + at / 1000,
        "vllm_kl/k1": 1e-3 + 1e-4 * dice.normal(size=steps),  # k averages 1
        "vllm_kl/k3": noise(1e-3),
        "vllm_kl/log_ratio_abs_mean": noise(0.01),
        "vllm_kl/prob_diff_max": noise(0.4),
        "vllm_kl/prob_diff_mean": noise(0.004),
        "correction/dropped_low": noise(0.006),
        "correction/dropped_high": noise(0.005),
        "correction/dropped": noise(0.011),
        "correction/entropy_dropped": noise(1.8),
        "correction/entropy_kept": noise(0.3),
        "router/load_max": np.clip(noise(1.6, 0.05), 1, None),
        **{f"router/load_max/layer_{i:02d}": np.clip(noise(1.3 + i / 10, 0.05), 1, None) for i in range(layers)},
        "router/agreement": np.clip(noise(0.99, 0.001), 0, 1),
        **{f"router/agreement/layer_{i:02d}": np.clip(noise(0.99 - i / 1000, 0.001), 0, 1) for i in range(layers)},
        **buckets,
        "response_length/max": noise(4000),
        "response_length/mean": noise(1000),
        "response_length/clip_ratio": noise(0.02),
        "actor/entropy": noise(0.4),
        "actor/kl_loss": noise(0.01),
        "actor/pg_clipfrac": noise(0.01),
        "actor/pg_clipfrac_lower": noise(0.001),
        "actor/grad_norm": noise(0.5, 0.5),
        "timing_s/step": sum(seconds.values()) + 5,
        **{f"timing_s/{stage}": each for stage, each in seconds.items()},
        "guard/boundary": np.full(steps, 0.1),
        "guard/threshold": np.full(steps, 0.05),
        "guard/skipped": (at % 50 == 7).astype(float),
        **{f"vllm_kl/k3/lag/{name}": noise(1e-3 * 2**place) for place, name in enumerate(BUCKETS["lag"]) if place},
        **{f"vllm_kl/k3/replica/{name}": noise(1e-4) for name in BUCKETS["replica"][:3]},
    }
    events = [event(step, "skip", "vllm_kl/k3 0.2 > 0.05") for step in range(7, steps + 1, 50)]
    return make(metrics, events)


def changed(run: Run, change: Callable[[np.ndarray], np.ndarray]) -> Run:
    """Returns the same run with changed values."""
    return replace(run, metrics={name: Series(s.steps, change(s.values)) for name, s in run.metrics.items()})


def thinned(run: Run, keep: Callable[[str, np.ndarray], np.ndarray]) -> Run:
    """Returns the run without the readings for which keep(metric, steps) is false."""
    metrics = {}
    for name, series in run.metrics.items():
        kept = keep(name, series.steps)
        metrics[name] = Series(series.steps[kept], series.values[kept])
    steps = np.unique(np.concatenate([series.steps for series in metrics.values()]))
    return replace(run, metrics=metrics, steps=steps, events=tuple(e for e in run.events if e.step in set(steps)))


def prefix(run: Run, last: int) -> Run:
    """Returns the run up to this step."""
    return thinned(run, lambda name, steps: steps <= last)


def write(run: Run, file: Path, steps: range | None = None, mode: str = "w") -> Path:
    """Writes the run as verl's file logger does."""
    with file.open(mode, encoding="utf-8") as lines:
        for step in run.steps.tolist() if steps is None else steps:
            at = {name: series.values[series.steps == step] for name, series in run.metrics.items()}
            row = {"step": step, "data": {name: float(found[0]) for name, found in at.items() if found.size}}
            lines.write(json.dumps(row) + "\n")
    return file
