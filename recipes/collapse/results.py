"""Compares the runs of run.sh: tables by the lab's rules, and pictures.

    python recipes/collapse/results.py            write the tables into README.md, draw PICTURES
    python recipes/collapse/results.py --keep     first copy the finished runs of .collapse into recipes/collapse/runs

A copied run has the metrics of KEPT, to five digits, and the guard's events.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from verl_ext.base.names import EVENTS
from verl_ext.lab.figures import LAB_PANELS, seeds_chart, variant_styles
from verl_ext.lab.grid import METRICS
from verl_ext.lab.summary import (
    DROPPED,
    FORECAST,
    K3,
    LEVEL_STEPS,
    NORM,
    REWARD,
    ROLLBACKS,
    SKIPPED,
    Interval,
    Summary,
    Variant,
    ranked_variants,
    summarise,
)
from verl_ext.report.load import read_run
from verl_ext.report.page import overview, png, spec_of
from verl_ext.report.run import Run

HERE = Path(__file__).parent
MADE, RUNS = Path(".collapse"), HERE / "runs"
DOCS = HERE.parents[1] / "docs"
PICTURES = {"collapse.png": None, "remedy.png": ("exact", "moe", "none")}  # file in docs -> its arms, None for all
README = HERE / "README.md"
KEPT = (
    *(REWARD, K3, DROPPED, NORM, FORECAST, SKIPPED, ROLLBACKS, "guard/collapsed", "router/agreement", "actor/entropy"),
    *("response_length/mean", "training/off_policy/trajectory_staleness/mean", "vllm_kl/ess", "timing_s/step"),
)
DIGITS = 5
REGIMES = {"stale": "weights 32 updates old", "quantized": "weights in fp4"}
TITLE = "verl, vLLM and FSDP2 on two CPU cores: {what}, three seeds"
PANELS = (REWARD, K3)


def keep(made: Path, runs: Path) -> list[Path]:
    """Copies the finished runs; returns their new folders."""
    taken = []
    for done in sorted(made.glob("*/*/seed*/done")):
        to = runs / done.parent.relative_to(made)
        to.mkdir(parents=True, exist_ok=True)
        with (done.parent / METRICS).open() as lines, (to / METRICS).open("w") as file:
            file.writelines(_trimmed(line) for line in lines)
        events = (done.parent / METRICS).with_suffix(EVENTS)
        if events.exists():
            shutil.copyfile(events, to / events.name)
        taken.append(to)
    return taken


def _trimmed(line: str) -> str:
    row = json.loads(line)
    data = {key: float(f"{row['data'][key]:.{DIGITS}g}") for key in KEPT if key in row["data"]}
    return json.dumps({"step": row["step"], "data": data}) + "\n"


def runs_of(regime: str, folder: Path = RUNS) -> dict[str, dict[int, Run]]:
    """Reads the runs of a regime, by arm and seed. Every regime shares one exact arm, which is kept once."""
    found: dict[str, dict[int, Run]] = {}
    files = {*(folder / regime).glob(f"*/seed*/{METRICS}"), *(folder / "stale" / "exact").glob(f"seed*/{METRICS}")}
    for file in sorted(files):
        arm, seed = file.parent.parent.name, int(file.parent.name.removeprefix("seed"))
        found.setdefault(arm, {})[seed] = read_run(file)
    return found


def table(regime: str, folder: Path = RUNS) -> str:
    """Returns the regime's table in Markdown: the exact rollout first, then by the reward at the end."""
    runs = runs_of(regime, folder)
    variants = [Variant(arm, (), {seed: summarise(run) for seed, run in each.items()}) for arm, each in runs.items()]
    lines = [
        f"| {REGIMES[regime]} | final reward, by seed | mean | peak | collapsed | k3 at the end | updates refused | "
        "rolled back |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in ranked_variants(variants):
        finals = ", ".join(_final(variant.runs[seed]) for seed in sorted(variant.runs))
        steps = ", ".join(str(step) for step in sorted(variant.collapsed.values()))
        collapsed = f"{len(variant.collapsed)} of {variant.known}" + (f" (step {steps})" if steps else "")
        ends = [run.get(K3).values[-LEVEL_STEPS:].mean() for run in runs[variant.name].values()]
        cells = (
            f"**{variant.name}**" if variant.name == "none" else variant.name,
            finals,
            _mean(variant.mean("final")),
            _mean(variant.mean("peak")),
            collapsed if variant.known else "",
            f"{sum(ends) / len(ends):.2g}",
            *(_mean(variant.mean(name), "{:.0f}") for name in ("skipped", "rollbacks")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _final(run: Summary) -> str:
    return f"{run.final:.2f}" if run.stopped is None else f"ended at {run.stopped}"


def _mean(found: Interval | None, how: str = "{:.2f}") -> str:
    return "" if found is None else how.format(found.mean)


def draw(regime: str, folder: Path = RUNS, arms: Sequence[str] | None = None) -> bytes:
    """Returns a PNG with the reward and k3 of these arms, or of all."""
    runs = {arm: list(each.values()) for arm, each in runs_of(regime, folder).items() if arms is None or arm in arms}
    look = variant_styles(sorted(runs, key=lambda arm: (arm != "exact", arm != "none", arm)))
    panels = [panel for metric in PANELS for panel in LAB_PANELS if panel.metric == metric]
    charts = {panel: chart for panel in panels if (chart := seeds_chart(panel, runs, look)) is not None}
    pictures = {panel.key: png(spec_of(chart), panel.title) for panel, chart in charts.items()}
    return overview(pictures, TITLE.format(what=REGIMES[regime]))


def with_tables(page: str, folder: Path = RUNS) -> str:
    """Returns the page, with each regime's table between its marks."""
    for regime in REGIMES:
        mark, end = f"<!-- {regime} -->\n", "<!-- end -->"
        if mark in page:
            before, _, rest = page.partition(mark)
            page = f"{before}{mark}{table(regime, folder)}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="first copy the finished runs")
    if parser.parse_args().keep:
        for folder in keep(MADE, RUNS):
            print(f"kept {folder.relative_to(HERE)}")
    README.write_text(with_tables(README.read_text()))
    for name, arms in PICTURES.items():
        (DOCS / name).write_bytes(draw("stale", arms=arms))
    print(f"wrote {', '.join([README.name, *PICTURES])}")


if __name__ == "__main__":
    main()
