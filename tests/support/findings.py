"""Small runs made of numbers, and what the findings say of them."""

import inspect

import numpy as np

from verl_ext.diagnosis.findings.registry import RULES, find_all
from verl_ext.diagnosis.series import Readings


def run_of(metrics, first=1, ending=None):
    """Returns a run from lists of values, which start at step `first`."""
    return Readings.of_pairs({name: list(enumerate(values, first)) for name, values in metrics.items()}, ending)


def line(first, last, count=40):
    return np.linspace(first, last, count).tolist()


def then(first, last, at=20, count=40):
    """One level up to a step, and another one after it."""
    return [first] * at + [last] * (count - at)


def seen_as(mark, run):
    """Returns the mark and the step of the finding that `mark`, a finding.level, is of."""
    found = find_all(run)[mark.partition(".")[0]]
    return found.mark, found.step


def levels_of(*modules):
    """Returns every finding.level of these modules."""
    rules = [rule for rule in RULES.values() if inspect.getmodule(rule.look) in modules]
    return {f"{rule.name}.{level}" for rule in rules for level in rule.levels}
