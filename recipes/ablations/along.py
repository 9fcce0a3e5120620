"""The gap along the answer, in the regime of docs/lab.md#a-gap-of-the-kernels-alone-in-long-answers.

    python -m recipes.ablations.along    train two seeds without a correction, and write docs/lab/along.json

At the first step and at some later ones, a batch is sampled and scored by both engines, and is not trained on.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.ablations.run import KERNELS, SEEDS
from verl_ext.core.routing import expert_overlap
from verl_ext.lab.arms import WARM_UPS, arms_of, setup_of
from verl_ext.lab.training import Training
from verl_ext.lab.warm_up import warm_up

ROOT = Path(__file__).parents[2]
OUT, KEPT = ROOT / ".lab" / "along", ROOT / "docs" / "lab" / "along.json"
STEPS = (1, 30, 60, 120)
TOKENS = 32  # in a stretch of the answer


def looks(seed: int) -> Iterator[dict[str, Any]]:
    """Yields, before each of STEPS, the means of |log k| and of the share of experts that differ, by stretch."""
    (_, arm) = arms_of("kernels", ["none"], {}, KERNELS)
    setup = setup_of(arm, seed, OUT)
    length = setup.config.data.max_response_length
    training = Training(setup, warm_up(setup.lab, length, seed, OUT / WARM_UPS))
    for step in range(1, max(STEPS) + 1):
        if step in STEPS:
            batch = training.rollout(step)
            scored = training.learner.score_old(batch)
            rows = slice(batch.prompts.shape[1] - 1, -1)  # the passes that predict the tokens before END
            mask = batch.sampled.mask[:, :-1]
            log_k = (scored.log_probs.detach() - batch.sampled.l_infer)[:, :-1].abs()
            ours, theirs = scored.routing.stacked()[:, rows], batch.sampled.experts[:, rows]
            same = expert_overlap(ours.flatten(0, 1), theirs.flatten(0, 1)).float().mean(1) / ours.shape[-1]
            values = {"log_k": log_k, "differ": 1 - same.view_as(log_k)}
            yield {"seed": seed, "step": step} | {name: _by_stretch(each, mask) for name, each in values.items()}
        training.step(step)


def _by_stretch(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    parts = zip(values.split(TOKENS, 1), mask.split(TOKENS, 1), strict=True)
    return [float(f"{part[kept].mean().item():.3g}") for part, kept in parts if kept.any()]


def main() -> None:
    torch.set_num_threads(1)
    found = [look for seed in map(int, SEEDS.split(",")) for look in looks(seed)]
    KEPT.write_text(json.dumps({"tokens": TOKENS, "looks": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
