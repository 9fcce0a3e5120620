"""The tables of all metrics in docs/metrics.md: `python tools/metrics_page.py` prints them."""

from collections.abc import Iterator

from verl_ext.base.metrics import SECTIONS, Metric, Section, ours
from verl_ext.diagnosis.names import aliases_of

COLUMNS = ("name", "meaning", "unit", "better", "when")


def tables() -> str:
    return "\n".join("\n".join(_section(section)) + "\n" for section in SECTIONS)


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.logged}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for metric in section.metrics:
        yield f"| {' | '.join(_cells(metric, section in ours.SECTIONS))} |"


def _cells(metric: Metric, of_ours: bool) -> Iterator[str]:
    yield f"`{metric.name}`"
    own = [alias.name for alias in aliases_of(metric.name) if of_ours and "verl" in alias.frameworks]
    yield metric.meaning.replace("|", "\\|") + (f" (verl's own: `{own[0]}`)" if own else "")
    yield ", ".join(filter(None, (metric.unit, "log" if metric.scale == "log" else "")))
    yield metric.better
    yield ", ".join(filter(None, (metric.when, "at times" if metric.rare else "")))


if __name__ == "__main__":
    print(tables(), end="")
