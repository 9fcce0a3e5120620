"""Whether one of the rollout's servers is further from training than the others."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings.gap import AGREE
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import K3
from verl_ext.diagnosis.noise import student_p
from verl_ext.diagnosis.series import LEVEL_READINGS, Readings, Series
from verl_ext.diagnosis.statistics import level_error

FURTHER = 2.0  # times the k3 of the others
FEWEST = 8  # readings
FALSE_ALARMS = 1e-3  # probability, for all servers together
SAME = 0.8  # share of a server's excess: if its whole node has more than this, the node is named


@dataclass(frozen=True)
class Excess:
    """How far the k3 of a server, or of a node, is above the others'.

    Attributes:
        ratios: for each step, log(its k3 / the median of the others').
        level: the mean of the last ratios.
    """

    where: str
    ratios: Series
    level: float


@finding("server_differs", "one | alike", needs=(f"{K3}/replica/01",))
def server_differs(run: Readings) -> Seen:
    """The tokens of one server or node have a far larger gap than the others', by more than noise.

    All servers get prompts at random, so their gaps have one level. A server is compared with the median of the others,
    which a few deviating servers do not move.
    """
    replicas, nodes = _by_server(run, "replica"), _by_server(run, "node")
    if len(replicas) < 2:
        return None
    furthest = max(_excesses("replica", replicas), key=lambda each: each.level, default=None)
    if furthest is None:
        return "alike", f"{len(replicas)} servers have gaps of one size"
    node = max(_excesses("node", nodes), key=lambda each: each.level, default=None)
    if node is not None and node.level > SAME * furthest.level:
        furthest = node
    # It begins at the step from which the sum of (ratio minus half of the excess) is largest.
    after = np.cumsum((furthest.ratios.values - furthest.level / 2)[::-1])[::-1]
    step = int(furthest.ratios.steps[after.argmax()])
    text = f"k3 of {furthest.where} is {np.exp(furthest.level):,.1f} times that of the others since step {step}"
    return "one", text, step


def _by_server(run: Readings, axis: str) -> dict[str, Series]:
    names = {bucket: f"{K3}/{axis}/{bucket}" for bucket in BUCKETS[axis] if bucket != "other"}
    return {bucket: found for bucket, name in names.items() if (found := run.get(name)) is not None}


def _excesses(axis: str, of_server: Mapping[str, Series]) -> list[Excess]:
    """Returns the servers whose gap is FURTHER away than the others', by more than noise."""
    steps = sorted({step for series in of_server.values() for step in series.steps.tolist()})
    place = {step: row for row, step in enumerate(steps)}
    k3_TR = np.full((len(steps), len(of_server)), np.nan)
    for column, series in enumerate(of_server.values()):
        k3_TR[[place[step] for step in series.steps.tolist()], column] = np.maximum(series.values, AGREE)
    found = []
    for column, bucket in enumerate(of_server):
        others = np.delete(k3_TR, column, axis=1)
        seen = np.isfinite(k3_TR[:, column]) & np.isfinite(others).any(1)
        ratios = np.log(k3_TR[seen, column] / np.nanmedian(others[seen], axis=1))
        if len(ratios) < FEWEST:
            continue
        late = ratios[-LEVEL_READINGS:]
        level = float(late.mean())
        if level > np.log(FURTHER) and _chance_of_noise(late) * len(of_server) < FALSE_ALARMS:
            found.append(Excess(f"{axis} {bucket}", Series(np.array(steps)[seen], ratios), level))
    return found


def _chance_of_noise(values: np.ndarray) -> float:
    """Returns the probability that noise makes a mean of this size."""
    error = level_error(values, len(values))
    return student_p(float(values.mean()) / error, len(values) - 1) if error else 0.0
