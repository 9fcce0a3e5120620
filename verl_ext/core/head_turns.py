"""The heads of several calls of the rollout engine, put to the tokens of the trajectory that came of them.

Shape legend: n tokens that one call generated, r response tokens of a trajectory, K tokens of a head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One call of the rollout engine: a turn, or a part of one that was interrupted.

    Attributes:
        prompt: the tokens that it continued, those of earlier turns among them.
        tokens: the n that it generated.
        ids: [n, K] int32.
        log_q: [n, K] float32.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    ids: np.ndarray
    log_q: np.ndarray


def heads_of(calls: Iterable[Call], prompt: Sequence[int], response: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """ids [r, K] int32 and log q [r, K] float32 of a trajectory's response; log q is -inf where no call generated the
    token: tool output, a template's, one that the agent loop has put in the place of another.

    A call belongs where the trajectory begins with its prompt, so that of the trajectories of an agent loop that
    returns several each has its own. Its heads belong to the tokens up to the first that the trajectory has not: what
    comes behind was sampled after other tokens.
    """
    sequence = [*prompt, *response]
    ids: np.ndarray = np.zeros((len(response), k), np.int32)
    log_q: np.ndarray = np.full((len(response), k), -np.inf, np.float32)
    for call in calls:
        start = len(call.prompt)
        if sequence[:start] != list(call.prompt):
            continue
        kept = np.asarray(sequence[start : start + len(call.tokens)])
        differs = (kept != np.asarray(call.tokens[: len(kept)])).nonzero()[0]
        same = np.arange(int(differs[0]) if len(differs) else len(kept))
        rows: np.ndarray = same + start - len(prompt)
        same, rows = same[rows >= 0], rows[rows >= 0]
        ids[rows], log_q[rows] = call.ids[same], call.log_q[same]
    return torch.from_numpy(ids), torch.from_numpy(log_q)
