"""The page of all metrics: `python tools/metrics_page.py > docs/metrics.md`."""

from collections.abc import Iterator

from verl_ext.base.metrics import SECTIONS, Metric, Section

HEAD = """# Metrics

Made by `python tools/metrics_page.py` from [verl_ext/base/metrics](../verl_ext/base/metrics); a test holds the two
together.

They go through verl's own loggers (console, file, W&B, TensorBoard, ...). In a name, `*` stands for one part, `**` for
all that follows, `{a,b}` for a or b. Notation: `l_infer`, `l_old` and `l_theta` are a token's log-probabilities under
the rollout engine, the training engine before the update, and the policy being updated; `k = exp(l_old - l_infer)`;
logarithms are natural.

*unit*: `log` where runs are compared by ratios. *better*: which way the level of a run is better. *when*: before the
guard judges the batch, so that a rule can skip it; after that; or with a validation. What comes "at times" may stay
away for many steps, and a rule waits for it.
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
    yield metric.meaning.replace("|", "\\|") + (f" (verl's own: `{metric.verls}`)" if metric.verls else "")
    yield ", ".join(filter(None, (metric.unit, "log" * (metric.scale == "log"))))
    yield metric.better
    yield ", ".join(filter(None, (metric.when, "at times" * metric.rare)))


if __name__ == "__main__":
    print(metrics_page(), end="")
