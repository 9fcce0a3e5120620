"""The tables of docs/lab.md, from the lab's results in docs/lab.

    python -m recipes.ablations.results                    write them into docs/lab.md
    python -m recipes.ablations.results --keep .lab/stale  first add its results.json to docs/lab/stale.json

--keep adds new variants, and does not change existing ones. A table stands between two marks, such as
`<!-- lab/stale -->` and `<!-- end -->`:

lab/GRID          the whole grid that is kept in GRID.json
ablations/FAMILY  the rewards of a family of run.py in ablations.json
start/FAMILY      its metrics of the first steps
boundary/stale    the family "boundary"
along/answer      the gap along the answer, from along.json
forecast/all      how early the guard warned, in the runs of whole grids and of recipes/collapse
claims/all        claims.txt beside this file, with its figures
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from verl_ext.lab.summary import EXACT, Summary, Variant, summarise
from verl_ext.lab.table import RESULTS, Experiment, results_text
from verl_ext.report.load import read_run
from verl_ext.report.terminal import step_range

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "lab.md"
KEPT = PAGE.parent / "lab"
RECORDED = HERE.parent / "collapse" / "runs"
STACK = "stack"  # in a claim: verl's own stack
FORMS = {"final": ".2f", "dropped_with_k3": "+.2f", "k3_start": ".1e"}  # of a claim's measures
LOST = 0.1  # reward: what a run without a correction may lose against exact
EARLY = 20  # steps ahead of a fall that a warning should come
MARKS = re.compile(
    r"<!-- (lab|ablations|start|boundary|along|forecast|claims)/([\w-]+) -->\n.*?<!-- end -->", re.DOTALL
)
CLAIMS = HERE / "claims.txt"
FIGURE = re.compile(r"\{([^{}]+)\}")  # of a claim: `{stale/icepop/final}`
SOME = 0.005  # the smallest share of dropped tokens that the table shows
HEAD = ("final reward", "against none", "collapsed", "ended early by the guard", "tokens dropped", "with k3")

Row = dict[str, Any]


def with_tables(page: str) -> str:
    def written(mark: re.Match) -> str:
        kind, name = mark[1], mark[2]
        tables: dict[str, Callable[[], str]] = {
            "lab": lambda: variants(kept(name)),
            "ablations": lambda: ablations(grids(name)),
            "start": lambda: starts(grids(name)),
            "boundary": lambda: boundaries(grids(kind)),
            "along": lambda: along(kept("along")),
            "forecast": forecasts,
            "claims": lambda: FIGURE.sub(lambda found: figure(found[1]), CLAIMS.read_text(encoding="utf-8").strip()),
        }
        return f"<!-- {kind}/{name} -->\n{tables[kind]()}\n<!-- end -->"

    return MARKS.sub(written, page)


def kept(name: str) -> Any:
    return json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))


def grids(family: str) -> list[Row]:
    return [each for each in kept("ablations") if each["family"] == family]


def figure(path: str) -> str:
    """Returns the figure of a claim.

    Args:
        path: GRID/VARIANT/MEASURE of a whole grid or of `stack` (the runs of recipes/collapse with old weights), with
            the measures `final`, `collapsed`, `dropped`, `dropped_with_k3`, `k3_start` and `over NAME` (the difference
            of the final rewards, paired by seed); or FAMILY/CHANGED/VARIANT/final, or FAMILY/CHANGED/start/TITLE.
    """
    where, name, measure = path.split("/", 2)
    if where != STACK and not (KEPT / f"{where}.json").exists():
        (grid,) = (each for each in grids(where) if each["changed"] == name)
        name, measure = measure.split("/", 1)
        if name == "start":
            return _small(grid["start"][measure])
        return next(_ended(each) for each in grid["variants"] if each["name"] == name)
    variants = _on_the_stack("stale") if where == STACK else map(_variant, kept(where)["variants"])
    found = {each.name: each for each in variants}
    variant = found[name]
    if measure.startswith("over "):
        difference = variant.difference_to(found[measure.removeprefix("over ")])
        assert difference is not None, path
        return difference.text("+.2f")
    if measure == "collapsed":
        return f"{len(variant.collapsed)} of {variant.known}"
    mean = variant.mean(measure)
    assert mean is not None, path
    if measure == "dropped":
        return f"{100 * mean.mean:.0f} %"
    return format(mean.mean, FORMS[measure])


@cache
def _on_the_stack(regime: str) -> list[Variant]:
    """Returns the runs of recipes/collapse, by arm."""
    arms = sorted(folder for folder in (RECORDED / regime).iterdir() if folder.is_dir())
    runs = {arm: {int(file.parent.name[4:]): file for file in sorted(arm.glob("seed*/metrics.jsonl"))} for arm in arms}
    return [
        Variant(arm.name, (), {seed: summarise(read_run(file)) for seed, file in files.items()})
        for arm, files in runs.items()
    ]


def keep(made: Path, file: Path) -> None:
    """Writes the results of a grid into `file`, or adds the variants that it lacks.

    Raises:
        ValueError: the grid has other seeds, steps or gaps than what is kept.
    """
    new = json.loads((made / RESULTS).read_text(encoding="utf-8"))
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {**new, "variants": []}
    about = {name: old[name] for name in ("regime", "steps", "seeds", "complete")}
    if (given := {name: new[name] for name in about}) != about:
        raise ValueError(f"{made} has {given}, where {file} has {about}")
    found = {each["name"]: _variant(each) for each in (*new["variants"], *old["variants"])}
    every = list(found.values())
    file.write_text(results_text(Experiment(every).results(about)) + "\n", encoding="utf-8")


def _variant(found: Row) -> Variant:
    runs = {int(seed): Summary(**run) for seed, run in found["runs"].items()}
    return Variant(found["name"], tuple(found["overrides"]), runs)


def variants(found: Row) -> str:
    """Returns a row for each variant, in the order of the results: the exact one, then by the final reward."""
    rows = [["", *HEAD]]
    for each in found["variants"]:
        means, collapsed = each["means"], each["collapsed"]
        dropped = means["dropped"]
        masks = dropped is not None and dropped["mean"] >= SOME
        rows.append(
            [
                f"**{each['name']}**" if each["name"] == "none" else each["name"],
                _interval(means["final"]),
                _against(each["final_against_none"]),
                f"{len(collapsed['at'])} of {collapsed['of']}" if collapsed["of"] else "",
                _early(each["ended_early"]),
                f"{100 * dropped['mean']:.0f} %" if masks else "",
                f"{means['dropped_with_k3']['mean']:+.2f}" if masks and means.get("dropped_with_k3") else "",
            ]
        )
    return _markdown(rows)


def ablations(family: list[Row]) -> str:
    """Returns a row for each grid, and a column for each variant: the mean final reward, and how many collapsed."""
    names = [variant["name"] for variant in family[0]["variants"]]
    names.sort(key=lambda name: (name != "exact", name != "none"))
    rows = [["", *names]]
    for grid in family:
        found = {variant["name"]: variant for variant in grid["variants"]}
        rows.append([grid["changed"], *(_ended(found[name]) for name in names)])
    return _markdown(rows)


def starts(family: list[Row]) -> str:
    """Returns a row for each grid, and a column for each metric that its runs keep of the first steps."""
    rows = [["", *family[0]["start"]]]
    for grid in family:
        means = grid["start"].values()
        rows.append([grid["changed"], *("" if mean is None else _small(mean) for mean in means)])
    return _markdown(rows)


def along(found: Row) -> str:
    """Returns two rows for each step, the means of |log k| and of the share of experts that differ, and a column for
    each stretch of the answer; means over the seeds."""
    stretches = range(len(found["looks"][0]["log_k"]))
    rows = [["step", "", *(f"{n * found['tokens']}-" for n in stretches)]]
    for step in sorted({look["step"] for look in found["looks"]}):
        looks = [look for look in found["looks"] if look["step"] == step]
        for name, title, form in (("log_k", r"mean \|log k\|", ".3f"), ("differ", "experts that differ", ".1%")):
            means = (fmean(look[name][n] for look in looks) for n in stretches)
            rows.append([str(step), title, *(f"{mean:{form}}" for mean in means)])
    return _markdown(rows)


def boundaries(family: list[Row]) -> str:
    """Returns a row for each grid: each variant's k3 and the reward that it loses, means over the seeds; and the k3 at
    which a run loses LOST, median and range over the seeds that reach it."""
    names = [variant["name"] for variant in family[0]["variants"] if variant["name"] != EXACT]
    names.sort(key=lambda name: int(name.rpartition("_")[2]))  # lag_16
    rows = [["", EXACT, *names, f"k3 at which {LOST} is lost", "seeds that lose it"]]
    for grid in family:
        found = {variant["name"]: variant for variant in grid["variants"]}
        finals, k3s = ({name: list(each[key].values()) for name, each in found.items()} for key in ("final", "k3"))
        losses = {
            name: [best - final for best, final in zip(finals[EXACT], finals[name], strict=True)] for name in names
        }
        cells = [f"{fmean(k3s[name]):.1e}: {fmean(losses[name]):+.2f}" for name in names]
        by_seed = zip(*(zip(k3s[name], losses[name], strict=True) for name in names), strict=True)
        at = sorted(filter(None, map(crossing, by_seed)))
        said = f"{median(at):.1e} ({at[0]:.1e} to {at[-1]:.1e})" if at else ""
        rows.append(
            [grid["changed"], f"{fmean(finals[EXACT]):.2f}", *cells, said, f"{len(at)} of {len(finals[EXACT])}"]
        )
    return _markdown(rows)


def crossing(points: Iterable[tuple[float, float]]) -> float | None:
    """Returns the smallest k3 at which the loss of (k3, loss) passes LOST, interpolated in log k3; None if none does,
    the first k3 if all do."""
    points = sorted(points)
    for (below, less), (above, more) in zip([points[0], *points], points, strict=False):
        if more >= LOST:
            part = (LOST - less) / (more - less) if less < LOST else 0.0
            return below * (above / below) ** part
    return None


def forecasts() -> str:
    """Returns a row for the runs of each regime: how early collapses had a warning, and how many other runs had one."""
    rows = [["runs", "collapsed", f"warned {EARLY} steps or more before the fall", "1 to 19", "not before it"]]
    rows[0] += ["exact: warnings in steps", "others that lived", "of them warned", "ended by the guard"]
    for title, runs in _forecast_runs():
        fallen = [run["warning"] for name, run in runs if run["collapsed"] is not None]
        early = sum(warning is not None and warning >= EARLY for warning in fallen)
        late = sum(warning is not None and 0 < warning < EARLY for warning in fallen)
        exact = [run for name, run in runs if name == EXACT]
        others = [run for name, run in runs if name != EXACT and run["collapsed"] is None]
        lived = [run for run in others if run["stopped"] is None]
        alarms = sum(run["warned"] is not None for run in exact)
        numbers = (len(fallen), early, late, len(fallen) - early - late)
        false_alarms = f"{alarms} in {sum(run['steps'] for run in exact):,}" if exact else ""
        warned = sum(run["warned"] is not None for run in lived)
        ended = len(others) - len(lived)
        rows.append([title, *map(str, numbers), false_alarms, str(len(lived)), str(warned), str(ended)])
    return _markdown(rows)


def _forecast_runs() -> Iterator[tuple[str, list[tuple[str, Row]]]]:
    """Yields a title and its runs, each with the variant's name and the summary."""
    for name, what in (("stale", "old weights"), ("quantized", "fp4 with the routers")):
        found = kept(name)
        runs = [(each["name"], run) for each in found["variants"] for run in each["runs"].values()]
        yield f"the lab, {what}", runs
    for name, what in (("stale", "old weights"), ("quantized", "fp4")):
        runs = [(arm.name, asdict(run)) for arm in _on_the_stack(name) for run in arm.runs.values()]
        yield f"verl's stack, {what}", runs


def _early(found: Row) -> str:
    """Describes the runs that ended early: how many, at which steps, and the reward then."""
    if not (steps := sorted(found["at"].values())):
        return ""
    then = found["reward_then"]
    reward = "no reward then" if then is None else f"reward {then['mean']:.2f} then"
    if then is not None and then["seeds"] < len(steps):
        reward += f" (of {then['seeds']})"
    return f"{len(steps)} of {found['of']}, {step_range(steps)}, {reward}"


def _ended(variant: Row) -> str:
    final, fallen = variant["final"].values(), len(variant["collapsed"])
    early = sum(reward is None for reward in final)
    ended = f"{early} of {len(final)} ended early" if early else f"{sum(final) / len(final):.2f}"
    return ended + (f", {fallen} of {len(final)} collapsed" if fallen else "")


def _small(mean: float) -> str:
    return f"{mean:.1e}" if abs(mean) < 0.1 else f"{mean:.3f}"


def _interval(found: Row | None) -> str:
    if found is None:
        return ""
    return f"{found['mean']:.2f}{_half(found)}"


def _against(found: Row | None) -> str:
    if found is None:
        return ""
    sure = "low" in found and not found["low"] <= 0 <= found["high"]
    return f"{found['mean']:+.2f}{_half(found)}" + (" *" if sure else "")


def _half(found: Row) -> str:
    return f" ±{(found['high'] - found['low']) / 2:.2f}" if "low" in found else ""


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="the folder of a finished grid")
    arguments = parser.parse_args()
    if arguments.keep:
        keep(arguments.keep, KEPT / f"{arguments.keep.name}.json")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
