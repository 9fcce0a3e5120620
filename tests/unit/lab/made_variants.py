"""Variants over their seeds, made up."""

from collections.abc import Mapping, Sequence

from verl_ext.lab.summary import Summary, Variant


def summary(final: float | None = 0.5, **more) -> Summary:
    empty = dict.fromkeys(Summary.__dataclass_fields__)
    return Summary(**(empty | {"steps": 300, "final": final, "peak": final} | more))


def variant(name: str, finals: Sequence[float], failed: Mapping[int, str] | None = None, **more) -> Variant:
    """Its seeds count from 0."""
    runs = {seed: summary(final, **more) for seed, final in enumerate(finals)}
    return Variant(name, (f"stability={name}",), runs, failed or {})
