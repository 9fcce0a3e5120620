"""What the table shows, in sentences."""

from collections.abc import Iterator, Sequence

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
    yield f"Collapsed ({rule}): {'; '.join(died)}." if died else f"Nothing collapsed ({rule})."
    exact = named(variants, EXACT)
    if exact is not None and exact.collapsed:
        yield f"{EXACT} collapses by itself: what happens here is not the gap's doing alone."


def _collapse(variant: Variant) -> str:
    steps, seeds = sorted(variant.collapsed.values()), ", ".join(map(str, variant.collapsed))
    at = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    return f"{variant.name} in {len(steps)} of {len(variant.runs)} (seed {seeds}; {at})"


def _warnings(variants: Sequence[Variant]) -> Iterator[str]:
    died = sum(len(variant.collapsed) for variant in variants)
    lived = sum(len(variant.runs) for variant in variants) - died
    early = [int(lead) for variant in variants for lead in variant.of("warning").values() if lead > 0]
    span = f", {min(early)} to {max(early)} steps ahead of the fall" if early else ""
    came = [f"in {len(early)} of {died} collapses in time{span}"] if died else []
    if false := sum(len(variant.false_alarms) for variant in variants):
        came.append(f"in {false} of the {lived} runs that did not collapse")
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
