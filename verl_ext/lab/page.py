"""The lab's page: the table, what it says, and the curves; in the look of the report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from verl_ext.lab.figures import LAB_PANELS, READINGS, Runs, looks, seeds_chart
from verl_ext.lab.seeds import Variant, ranked
from verl_ext.lab.table import columns, legend, rows
from verl_ext.report.page import write_page


def write_lab_page(
    title: str,
    about: str,
    variants: Sequence[Variant],
    runs: Runs,
    words: Sequence[str],
    out: Path,
    progress: Callable[[str], None] = lambda what: None,
) -> Path:
    """Write `report.html`, `report.png` and the figures; `runs` are those of the variants, by name."""
    order = [variant.name for variant in ranked(variants)]
    named = {name: runs[name] for name in order if runs.get(name)}
    look = looks(order)
    panels = [
        replace(panel, title=panel.title.removesuffix(" by layer"), reading=READINGS[panel.metric], compared="")
        for panel in LAB_PANELS
    ]
    context = {
        "title": title,
        "about": about,
        "notes": [f"{name}: {note}" for name, each in named.items() for run in each for note in run.notes],
        "variants": {
            "titles": [column.title for column in columns(variants)],
            "rows": [asdict(row) for row in rows(variants)],
            "legend": legend(variants),
            "words": words,
        },
    }
    drawn = {panel: chart for panel in panels if (chart := seeds_chart(panel, named, look)) is not None}
    return write_page(out, drawn, context, progress=progress)
