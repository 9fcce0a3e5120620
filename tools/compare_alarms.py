"""Counts what `verl-ext compare` finds in simulated pairs of runs: false differences, and real ones.

    python tools/compare_alarms.py [--tables 1000]     the table of docs/report.md; four minutes

A table compares 12 metrics of two runs, whose noise is a first-order autoregression with the correlation rho between
neighbours: normal, of Student's t with 3 degrees of freedom, or with spikes. A real difference is one of two standard
deviations in the first metric.
"""

import argparse
import math

import numpy as np

from verl_ext.diagnosis.noise import compare_finals, final, judge_differences
from verl_ext.diagnosis.series import Series

METRICS, BURN_IN, SHIFT = 12, 100, 2.0
READINGS = (10, 20, 50, 100, 200)
FALSE_RHO, FOUND_RHO = (0.0, 0.5, 0.8, 0.9, 0.95), (0.0, 0.3, 0.5, 0.8, 0.9)
KINDS = ("normal", "t", "spikes")


def draw(rng: np.random.Generator, kind: str, runs: int, steps: int, rho: float) -> np.ndarray:
    """Returns series of standard deviation 1 (without the spikes), [runs, steps]."""
    shape = (runs, steps + BURN_IN)
    values = rng.standard_t(3, shape) / math.sqrt(3) if kind == "t" else rng.normal(size=shape)
    for step in range(1, shape[1]):
        values[:, step] = rho * values[:, step - 1] + math.sqrt(1 - rho**2) * values[:, step]
    values = values[:, BURN_IN:]
    if kind == "spikes":
        values += 5 * rng.normal(size=values.shape) * (rng.random(values.shape) < 0.03)
    return values


def tables(rng: np.random.Generator, kind: str, count: int, steps: int, rho: float, shift: float = 0.0):
    """Yields the verdicts of each table."""
    at = np.arange(steps)
    for _ in range(count):
        first, second = (draw(rng, kind, METRICS, steps, rho) for _ in range(2))
        second[0] += shift
        ends = ([final(Series(at, row), steps) for row in rows] for rows in (first, second))
        yield judge_differences([compare_finals(a, b) for a, b in zip(*ends, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=1000)
    count = parser.parse_args().tables
    rng = np.random.default_rng(0)
    heads = [*(f"false, rho {rho}" for rho in FALSE_RHO), *(f"found, rho {rho}" for rho in FOUND_RHO)]
    print(f"| readings | {' | '.join(heads)} |")
    for steps in READINGS:
        false = [
            max(sum("differs" in found for found in tables(rng, kind, count, steps, rho)) for kind in KINDS) / count
            for rho in FALSE_RHO
        ]
        real = [
            sum(found[0] == "differs" for found in tables(rng, "normal", count // 2, steps, rho, SHIFT)) / (count // 2)
            for rho in FOUND_RHO
        ]
        cells = [*(f"{100 * share:.1f} %" for share in false), *(f"{100 * share:.0f} %" for share in real)]
        print(f"| {steps} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
