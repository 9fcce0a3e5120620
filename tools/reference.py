"""The tables in docs/ that list what the code has: metrics, checks of the doctor, changes to upstream code, causes and
findings. `python tools/pages.py` writes them."""

from collections.abc import Callable, Iterator

from needs import HOOKS
from pages import table

from verl_ext.base import changes
from verl_ext.base.metrics import SECTIONS, Metric, Section, ours
from verl_ext.cpu import changes as cpu
from verl_ext.diagnosis.causes import CAUSES, WORDS
from verl_ext.diagnosis.findings.registry import RULES
from verl_ext.diagnosis.names import aliases_of
from verl_ext.doctor import diagnose  # noqa: F401 (registers the checks)
from verl_ext.doctor.checks import CHECKS


def metrics() -> str:
    """Returns a section with a table for each group of metrics."""
    return "\n\n".join(map(_metrics_section, SECTIONS))


def _metrics_section(section: Section) -> str:
    columns = ("name", "meaning", "unit", "better", "when")
    rows = (_metric_cells(metric, section in ours.SECTIONS) for metric in section.metrics)
    return f"## {section.title}\n\n{section.logged}\n\n{table([columns, *rows])}"


def _metric_cells(metric: Metric, of_ours: bool) -> Iterator[str]:
    yield f"`{metric.name}`"
    own = [alias.name for alias in aliases_of(metric.name) if of_ours and "verl" in alias.frameworks]
    yield metric.meaning + (f" (verl's own: `{own[0]}`)" if own else "")
    yield ", ".join(filter(None, (metric.unit, "log" if metric.scale == "log" else "")))
    yield metric.better
    yield ", ".join(filter(None, (metric.when, "at times" if metric.rare else "")))


def checks() -> str:
    """Returns a row for each check of the doctor."""
    rows = ((f"`{name}`", _summary(check)) for name, check in CHECKS.items())
    return table([("check", "what it finds"), *rows])


def upstream_changes() -> str:
    """Returns a row for each change to verl, vLLM and SGLang."""
    columns = ("change", "target", "why", "when", "written for", "test that fails if it breaks")
    rows = (
        (_link(change), change.target, change.why, change.when, change.written_for, f"`{change.test}`")
        for change in (*changes.TABLE, *cpu.TABLE)
    )
    return table([columns, *rows])


def hooks() -> str:
    """Returns a row for each hook, with what it needs in verl's sources."""
    rows = ((_link(hook), "<br>".join(f"`{need}`" for need in hook.needs)) for hook in HOOKS)
    return table([("hook", "needs"), *rows])


def _link(entry: changes.Change | changes.Hook) -> str:
    return f"[{entry.name}](../verl_ext/{entry.file})"


def causes() -> str:
    """Returns a row for each cause of the diagnosis."""
    rows = [("id", "cause", "check", "try", "shown by")]
    for cause in CAUSES.values():
        tries = dict.fromkeys(filter(None, (cause.override, cause.moe_override)))
        signs = (
            f"`{name}`: {', '.join(levels)}"
            for name, words in cause.shows.items()
            if (levels := [level for level, word in words.items() if WORDS[word] > 0])
        )
        cells = (f"`{cause.name}`", cause.title, cause.check, "<br>".join(f"`{each}`" for each in tries))
        rows.append((*cells, "; ".join(signs)))
    return table(rows)


def findings() -> str:
    """Returns a row for each finding of the diagnosis."""
    rows = [("finding", "what it shows", "reported at", "other levels", "from")]
    for rule in sorted(RULES.values(), key=lambda rule: rule.look.__module__):
        told = ", ".join(level for level in rule.levels if level not in rule.usual)
        needs = ", ".join(f"`{name}`" for name in rule.needs)
        rows.append((f"`{rule.name}`", _summary(rule.look), told, ", ".join(rule.usual), needs))
    return table(rows)


def _summary(function: Callable) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())
