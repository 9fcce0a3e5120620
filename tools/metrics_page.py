"""The page of all metrics: `python tools/metrics_page.py > docs/metrics.md`."""

from collections.abc import Iterator

from verl_ext.base.metrics import SECTIONS, Metric, Section
from verl_ext.diagnosis.names import aliases_of

HEAD = """# Metrics

Every metric of the plugin, and those of verl that the report and the guard read. verl's own loggers write them
(console, file, W&B, TensorBoard, ...). `python tools/metrics_page.py` generates this page from
[verl_ext/base/metrics](../verl_ext/base/metrics), and a test compares them.

Notation: `l_infer`, `l_old` and `l_theta` are a token's log-probabilities under the rollout engine, under the training
engine before the update, and under the policy while it is updated; `k = exp(l_old - l_infer)`. Logarithms are natural.
In a name, `*` is one part, `**` any number of parts, and `{a,b}` is a or b.

| column | meaning |
|---|---|
| unit | `log`: runs are compared by ratios |
| better | the direction in which a run is better |
| when: before | logged before the guard judges the batch, so a rule can skip the batch by it |
| when: after, validation | logged later; logged with a validation |
| when: at times | missing in many steps; a rule waits for it |
"""
COLUMNS = ("name", "meaning", "unit", "better", "when")


def metrics_page() -> str:
    return "\n".join([HEAD, *("\n".join(_section(section)) + "\n" for section in SECTIONS)]).rstrip("\n") + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.logged}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for metric in section.metrics:
        yield f"| {' | '.join(_cells(metric))} |"


def _cells(metric: Metric) -> Iterator[str]:
    yield f"`{metric.name}`"
    ours, *others = aliases_of(metric.name)
    own = [each.name for each in others if "verl" in each.frameworks and "verl_ext" in ours.frameworks]
    yield metric.meaning.replace("|", "\\|") + (f" (verl's own: `{own[0]}`)" if own else "")
    yield ", ".join(filter(None, (metric.unit, "log" * (metric.scale == "log"))))
    yield metric.better
    yield ", ".join(filter(None, (metric.when, "at times" * metric.rare)))


if __name__ == "__main__":
    print(metrics_page(), end="")
