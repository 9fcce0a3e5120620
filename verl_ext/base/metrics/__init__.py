"""Every metric once: its name, meaning and unit, which direction is better, who logs it and when.

The report's labels, units and directions, the guard's checks of signals, and the tables of docs/metrics.md come from
here.
"""

from difflib import get_close_matches
from functools import lru_cache

from verl_ext.base.metrics import ours
from verl_ext.base.metrics.metric import Metric, Section
from verl_ext.base.metrics.verls import VERL

SECTIONS: tuple[Section, ...] = (*ours.SECTIONS, VERL)
METRICS = {metric.name: metric for section in SECTIONS for metric in section.metrics}
MUST_BE_FINITE = tuple(name for name, metric in METRICS.items() if metric.finite)
_PREFIXES = dict.fromkeys(f"{metric.name.split('/')[0]}/" for section in ours.SECTIONS for metric in section.metrics)
OURS = tuple(prefix for prefix in _PREFIXES if prefix != "actor/")


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """Returns the metric of this name, or the first family that has it; None if there is none."""
    return METRICS.get(name) or next((each for each in METRICS.values() if each.has(name)), None)


def comes_late(name: str) -> bool:
    """Returns True if the metric is known to be logged after the guard has judged the batch."""
    metric = find(name)
    return metric is not None and metric.when in ("after", "validation")


def is_rare(name: str) -> bool:
    """Returns True if the metric may be absent for many steps."""
    metric = find(name)
    return metric is not None and metric.rare


def nearest(name: str) -> list[str]:
    """Returns up to three known names similar to an unknown one; only very similar ones if it could be a user's own."""
    known = [each for each in METRICS if not each.endswith("/**")]
    return get_close_matches(name, known, n=3, cutoff=0.6 if name.startswith(OURS) else 0.85)
