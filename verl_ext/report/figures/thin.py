"""Fewer points that draw the same line: a figure of some 600 pixels shows no more."""

import numpy as np

from verl_ext.report.run import Series

POINTS = 500  # of a line: nearly one a pixel
TREND = 120  # of the medians drawn over a line that was thinned


def thin(series: Series, most: int = POINTS) -> Series:
    """Of each of most / 2 stretches of steps, the readings with the least and the largest value: no spike is lost."""
    if len(series.steps) <= most:
        return series
    # Stretches are equal in steps, so that a validation every tenth step does not crowd out what comes between.
    stretch = _stretches(series.steps, most // 2)
    order = np.lexsort((series.values, stretch))
    ends = np.flatnonzero(np.diff(stretch[order], prepend=-1, append=-1))
    keep = np.unique(order[np.concatenate([ends[:-1], ends[1:] - 1])])
    return Series(series.steps[keep], series.values[keep])


def medians(series: Series, most: int = TREND) -> Series:
    """The median of each of `most` stretches of steps, at the stretch's middle."""
    if len(series.steps) <= most:
        return series
    starts = np.unique(_stretches(series.steps, most), return_index=True)[1]
    parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(series.steps)], strict=True)]
    steps = np.array([int(np.median(series.steps[part])) for part in parts])
    return Series(steps, np.array([np.median(series.values[part]) for part in parts]))


def binned(series: Series, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many readings each interval [edges[i], edges[i + 1]) of steps has, and their sum."""
    which = np.asarray(np.searchsorted(edges, series.steps, side="right")) - 1
    inside = (which >= 0) & (which < len(edges) - 1)
    count = np.bincount(which[inside], minlength=len(edges) - 1)
    return count, np.bincount(which[inside], weights=series.values[inside], minlength=len(edges) - 1)


def means(series: Series, edges: np.ndarray) -> np.ndarray:
    """The mean of the readings in each interval; NaN where there are none."""
    count, total = binned(series, edges)
    return np.divide(total, count, out=np.full(len(edges) - 1, np.nan), where=count > 0)


def step_edges(steps: np.ndarray, most: int) -> np.ndarray:
    """Edges of at most `most` intervals of whole steps that hold all of `steps`, equal but for the last."""
    first, last = int(steps[0]), int(steps[-1])
    width = -(-(last - first + 1) // most)
    return np.append(np.arange(first, last + 1, width), last + 1)


def _stretches(steps: np.ndarray, count: int) -> np.ndarray:
    return (steps - steps[0]) * count // (steps[-1] - steps[0] + 1)
