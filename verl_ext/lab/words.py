"""What the table shows, in sentences."""

from collections.abc import Collection, Iterator, Sequence

from verl_ext.lab.seeds import COVERAGE, Interval, Variant, named, ranked
from verl_ext.lab.summary import FEW_STEPS, LARGE_K3, WINDOW

EXACT, NONE = "exact", "none"


def findings(variants: Sequence[Variant]) -> list[str]:
    """What the seeds say, and where they say nothing."""
    return list(_findings(ranked(variants)))


def _findings(variants: Sequence[Variant]) -> Iterator[str]:
    exact, none = named(variants, EXACT), named(variants, NONE)
    yield from _damage(exact, none)
    others = [variant for variant in variants if variant.name not in (EXACT, NONE)]
    if none is not None:
        yield from _ranking(others, none)
    yield from _collapses(variants)
    yield from _ended_early(variants)
    yield from _warnings(variants)
    yield from _caveats(variants)
    for variant in variants:
        for seed, error in variant.failed.items():
            yield f"{variant.name}, seed {seed} failed: {error}"


def _damage(exact: Variant | None, none: Variant | None) -> Iterator[str]:
    """Whether there is anything here that a method could win back."""
    if exact is None or none is None or (cost := exact.against(none)) is None:
        return
    if cost.sure and cost.mean > 0:
        yield f"The gap costs {signed(cost).lstrip('+')} of the final reward: {NONE} against {EXACT}."
    else:
        yield f"{EXACT} ends no higher than {NONE} by more than the noise ({signed(cost)}): nothing to win back here."


def _ranking(others: Sequence[Variant], none: Variant) -> Iterator[str]:
    found = [(variant.name, change) for variant in others if (change := variant.against(none)) is not None]
    kinds = {
        f"Better than {NONE} by more than the seeds' noise": [
            each for each in found if each[1].sure and each[1].mean > 0
        ],
        f"Worse than {NONE} by more than it": [each for each in found if each[1].sure and each[1].mean < 0],
        "Within the noise": [each for each in found if not each[1].sure],
    }
    for kind, these in kinds.items():
        if these:
            yield f"{kind}: " + ", ".join(f"{name} ({signed(change)})" for name, change in these) + "."


def _collapses(variants: Sequence[Variant]) -> Iterator[str]:
    rule = f"the {WINDOW}-step mean of the reward below half of its peak"
    died = [_collapse(variant) for variant in variants if variant.collapsed]
    of = " of what the guard did not end before" if any(variant.stopped for variant in variants) else ""
    yield f"Collapsed ({rule}): {'; '.join(died)}." if died else f"Nothing collapsed{of} ({rule})."
    exact = named(variants, EXACT)
    if exact is not None and exact.collapsed:
        yield f"{EXACT} collapses by itself: what happens here is not the gap's doing alone."


def _collapse(variant: Variant) -> str:
    seeds = ", ".join(map(str, variant.collapsed))
    at = span(variant.collapsed.values())
    return f"{variant.name} in {len(variant.collapsed)} of {variant.known} (seed {seeds}; {at})"


def _ended_early(variants: Sequence[Variant]) -> Iterator[str]:
    ended = [_ended(variant) for variant in variants if variant.stopped]
    if ended:
        yield (
            f"The guard ended runs early: {'; '.join(ended)}. Nobody knows what they would have come to, so these "
            "variants have no final reward and are not compared."
        )


def _ended(variant: Variant) -> str:
    then = variant.reward_then
    reward = "before the first level of the reward" if then is None else f"at a reward of {then.mean:.2f}"
    if then is not None and then.seeds < len(variant.stopped):
        reward += f" in {then.seeds}, the others before the first level of it"
    return (
        f"{variant.name} in {len(variant.stopped)} of {len(variant.runs)} ({span(variant.stopped.values())}, {reward})"
    )


def span(steps: Collection[int]) -> str:
    """From the first to the last."""
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _warnings(variants: Sequence[Variant]) -> Iterator[str]:
    died = sum(len(variant.collapsed) for variant in variants)
    lived = sum(variant.known for variant in variants) - died
    early = [int(lead) for variant in variants for lead in variant.of("warning").values() if lead > 0]
    ahead = f", {min(early)} to {max(early)} steps ahead of the fall" if early else ""
    came = [f"in {len(early)} of {died} collapses in time{ahead}"] if died else []
    if false := sum(len(variant.false_alarms) for variant in variants):
        came.append(f"in {false} of the {lived} runs that trained to their end without one")
    if came:
        yield f"Warnings (k3 past {LARGE_K3:g}, or a forecast below {FEW_STEPS} steps) came {', and '.join(came)}."


def _caveats(variants: Sequence[Variant]) -> Iterator[str]:
    if max((len(variant.runs) for variant in variants), default=0) < 2:
        yield "One seed says nothing about noise: take more (--seeds 5)."
        return
    yield (
        f"±: {100 * COVERAGE:.0f} % intervals over the seeds (Student's t), of differences paired by seed, each for "
        "itself: of twenty without any effect, one looks like one."
    )
    most = max(len(variant.runs) for variant in variants)
    if fewer := [f"{each.name} ({len(each.runs)})" for each in variants if len(each.runs) < most]:
        yield f"Fewer runs than the {most} of the others: {', '.join(fewer)}."


def signed(change: Interval) -> str:
    """A difference with its sign, and its interval's half-width."""
    return f"{change.mean:+.2f}" + ("" if change.half is None else f" ±{change.half:.2f}")
