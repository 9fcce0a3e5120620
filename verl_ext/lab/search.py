"""Successive halving: every candidate on one seed, the better half on one more, and so on.

Source: Jamieson and Talwalkar (arXiv 1502.07943), with seeds as the resource. What wins has been chosen among many on
these very seeds, so its reward on them is too high: it counts on others only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FEWEST = 2  # that go on to the next seed


@dataclass(frozen=True)
class Standing:
    """A candidate where it left the search.

    Attributes:
        rewards: of the seeds it ran on, in their order.
    """

    name: str
    rewards: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def halving(
    names: Sequence[str], seeds: Sequence[int], rewards: Callable[[Sequence[str], int], dict[str, float]]
) -> list[Standing]:
    """The candidates, best first: who saw more seeds before who saw fewer, then by the mean.

    Args:
        rewards: runs candidates on a seed, and gives their final rewards. One that is not in it failed, or the guard
            ended its run: it is out.
    """
    left = [Standing(name, ()) for name in names]
    gone: list[Standing] = []
    for seed in seeds:
        if not left:
            break
        found = rewards([each.name for each in left], seed)
        left = [Standing(each.name, (*each.rewards, found[each.name])) for each in left if each.name in found]
        left.sort(key=lambda each: each.mean, reverse=True)
        if seed != seeds[-1]:
            keep = max(FEWEST, math.ceil(len(left) / 2))
            left, gone = left[:keep], [*left[keep:], *gone]
    return [*left, *gone]
