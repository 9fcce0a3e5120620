"""Everything in the table, a seed each too, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from verl_ext import __version__
from verl_ext.lab.seeds import COVERAGE, MEASURES, Interval, Variant, named, ranked
from verl_ext.lab.summary import COLLAPSED, WINDOW
from verl_ext.lab.words import EXACT, NONE
from verl_ext.report.files import written_whole

FILE = "results.json"


def results(about: Mapping[str, Any], variants: Sequence[Variant], words: Sequence[str]) -> dict[str, Any]:
    """What JSON can hold; `about` comes first.

    A mean over seeds is {mean, low, high, seeds}, without low and high where there is one seed; null is what was not
    logged. A run that the guard ended early is under `ended_early`; `collapsed` is of the runs of which it is known.
    """
    order = ranked(variants)
    none, exact = named(order, NONE), named(order, EXACT)
    return {
        **about,
        "version": __version__,
        "rule": {"window": WINDOW, "collapsed_below": COLLAPSED, "intervals": COVERAGE},
        "findings": list(words),
        "variants": [
            {
                "name": variant.name,
                "overrides": list(variant.overrides),
                "collapsed": _outcome(variant.collapsed, variant.known),
                "ended_early": _outcome(variant.stopped, len(variant.runs))
                | {"reward_then": _interval(variant.reward_then)},
                "false_alarms": variant.false_alarms,
                "means": {measure: _interval(variant.mean(measure)) for measure in MEASURES},
                f"final_against_{NONE}": _difference(variant, none),
                f"final_against_{EXACT}": _difference(variant, exact),
                "runs": {str(seed): asdict(run) for seed, run in variant.runs.items()},
                "failed": {str(seed): error for seed, error in variant.failed.items()},
            }
            for variant in order
        ],
    }


def as_text(found: Mapping[str, Any]) -> str:
    return orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()


def write_results(found: Mapping[str, Any], out: Path) -> Path:
    with written_whole(out / FILE) as file:
        file.write(as_text(found).encode() + b"\n")
    return out / FILE


def _outcome(at: Mapping[int, int], of: int) -> dict[str, Any]:
    """Of the steps by seed; `of` so many runs."""
    return {"share": len(at) / of if of else None, "of": of, "at": {str(seed): step for seed, step in at.items()}}


def _difference(variant: Variant, other: Variant | None) -> dict[str, float] | None:
    return None if other is None or other is variant else _interval(variant.against(other))


def _interval(found: Interval | None) -> dict[str, float] | None:
    if found is None:
        return None
    ends = {} if found.half is None else {"low": found.mean - found.half, "high": found.mean + found.half}
    return {"mean": found.mean, **ends, "seeds": found.seeds}
