"""Scores a few trajectories with the weights that sampled them, if the rollouts are older than the policy.

The workers keep verl's copies of earlier weights (`verl_ext.workers.actor`). In a step that is due, they load one copy
after another, run verl's own compute_log_prob, and load the present weights again. This leaves log-probs and routing of
old weights in the batch, which verl's own pass then replaces.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.names import ONE_A_PASS
from verl_ext.features.settings import Rescoring
from verl_ext.trainer.queue import computed_log_probs

NOW = "present weights"  # a key of verl's copies


def rescore(
    batch: KVBatchMeta, step: int, settings: Rescoring, workers: Any, multiple: int, temperature: float
) -> dict[str, Tensor]:
    """Returns key -> log-probabilities [r] of the response under the newest weights that sampled it; {} in a step that
    is not due.

    Called once per step, before verl's own pass for the step's first update.

    Args:
        workers: verl's worker group of the actor.
        multiple: `queue.row_multiple`. verl has padded the batch to a multiple of its ranks (`_balance_batch`).
        temperature: the rollout's.
    """
    kept = workers.keep_version(step - 2, oldest=step - 1 - settings.versions)[0]
    chosen = choose_by_version(batch.tags, kept, settings.trajectories, seed=step) if step % settings.every == 0 else {}
    if not chosen:
        return {}
    found: dict[str, Tensor] = {}
    workers.save_model_to_cpu(NOW)
    for version, rows in chosen.items():
        filled = fill_rows(rows, multiple, len(batch))
        if not filled:
            continue
        workers.use_version(version)
        sent = batch.select_keys([batch.keys[row] for row in filled])
        sent.extra_info |= ONE_A_PASS | {"temperature": temperature}
        workers.compute_log_prob(sent)
        asked = batch.select_keys([batch.keys[row] for row in rows if row in filled])
        found |= dict(zip(asked.keys, computed_log_probs(asked).unbind(), strict=True))
    workers.restore_model_from_cpu(NOW)
    workers.clear_cpu_model(NOW)
    return found


def choose_by_version(
    tags: Sequence[Mapping[str, Any]], kept: Sequence[int], count: int, seed: int
) -> dict[int, list[int]]:
    """Returns version -> rows: up to `count` at random, of the trajectories whose newest version is kept."""
    able = [row for row, tag in enumerate(tags) if tag["max_global_steps"] in kept and not tag.get("is_padding", False)]
    picked = sorted(random.Random(seed).sample(able, min(count, len(able))))
    by_version: dict[int, list[int]] = {}
    for row in picked:
        by_version.setdefault(tags[row]["max_global_steps"], []).append(row)
    return by_version


def fill_rows(rows: Sequence[int], multiple: int, size: int) -> list[int]:
    """Returns these rows, and others of the batch until their number is a multiple of `multiple`; fewer of them if the
    batch is too small for that."""
    rows = rows[: size // multiple * multiple]
    taken = set(rows)
    others = [row for row in range(size) if row not in taken]
    return [*rows, *others[: -len(rows) % multiple]]
