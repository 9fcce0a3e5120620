"""Replaces the lab's arms and regimes with runs that only write curves, by the name of their arm."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from verl_ext.base.errors import ConfigError

REGIMES = {"stale": SimpleNamespace(stands_for="asynchronous RL"), "bf16": SimpleNamespace(stands_for="two kernels")}
FINAL = {"exact": 0.9, "none": 0.2, "tis": 0.75, "icepop": 0.6}  # where the reward ends


@dataclass(frozen=True)
class Arm:
    name: str
    overrides: tuple[str, ...]


def arms_of(
    regime: str, names: Sequence[str], added: Mapping[str, str], overrides: Sequence[str], steps: int | None
) -> list[Arm]:
    for name in regime.split("+"):
        if name not in ("exact", *REGIMES):
            raise ConfigError(f"the regime {name} is not known; choose one of: {', '.join(REGIMES)}")
    common = (*overrides, f"steps={steps or 20}")
    settings = {name: f"stability={name}" for name in names} | dict(added)
    if "refused" in settings:
        raise ConfigError("stability.tis.high=0 must be above 0", fix=("stability.tis.high=2",))
    arms = [Arm(name, (own, f"lab={regime}", *common)) for name, own in settings.items()]
    return [Arm("exact", ("stability=none", "lab=exact", *common)), *arms]


def variants() -> tuple[str, ...]:
    return ("none", "tis", "icepop")


def setup_of(arm: Arm, seed: int) -> SimpleNamespace:
    trainer = SimpleNamespace(total_training_steps=_steps(arm))
    return SimpleNamespace(config=SimpleNamespace(trainer=trainer))


def run_arm(arm: Arm, seed: int, folder: Path, on_step: Callable[[int], None]) -> None:
    steps = _steps(arm)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"said by a library with {threads} thread", file=sys.stderr, flush=True)
    if arm.name == "cold":
        raise ConfigError("lab.warm_up.reward=0.9 was not reached")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:  # as verl's logger, which appends
        for step, data in enumerate(curves(arm.name, seed, steps), start=1):
            file.write(json.dumps({"step": step, "data": data}) + "\n")
            file.flush()
            on_step(step)
            if arm.name == "cut" and step == 30:
                return
            if arm.name == "broken" and step == 3:
                raise RuntimeError("the experts\nare gone")
            if arm.name == "dies" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if arm.name == "slow":
                time.sleep(0.05)


def _steps(arm: Arm) -> int:
    return next(int(each.removeprefix("steps=")) for each in arm.overrides if each.startswith("steps="))


def curves(name: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Returns curves: a rise to 0.9, or a rise to 0.6 and a fall from the middle on; k3 of the regime; noise."""
    dice = np.random.default_rng(seed)
    end = FINAL.get(name, 0.5)
    found = []
    for step in range(1, steps + 1):
        share = step / steps
        reward = 0.3 + (end - 0.3) * min(2 * share, 1.0) if end > 0.3 else 0.6 if share < 0.5 else end
        data = {
            "critic/score/mean": float(np.clip(reward + 0.02 * dice.normal() + 0.01 * seed, 0, 1)),
            "vllm_kl/k3": 1e-14 if name == "exact" else 1e-3 * math.exp((6 if name == "none" else 2) * share),
            "actor/grad_norm": float(np.exp(0.3 * dice.normal())),
            "actor/entropy": 0.5 - 0.2 * share,
            "router/agreement": 0.99 - 0.05 * share,
            "response_length/mean": 20.0 + seed,
            "timing_s/step": 0.04,
        }
        if name == "icepop":
            data["correction/dropped"] = 0.02
        if name == "none":
            data |= {"guard/steps_to_boundary": 1000.0 if share < 0.3 else 10.0, "guard/skipped": float(step == 2)}
        found.append(data)
    return found
