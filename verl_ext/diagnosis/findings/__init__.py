"""Findings from the metrics of a run: one file per subject, with small functions that `registry.finding` registers.

find_all(readings)["entropy_gone"]    Finding(level="gone", text="the entropy is 4% of what it was", step=31)
"""

from verl_ext.diagnosis.findings import (  # noqa: F401 (registers the findings, in this order)
    answers,
    entropy,
    finite,
    gap,
    gradient,
    guard,
    probe,
    reward,
    routers,
    servers,
    sync,
)
