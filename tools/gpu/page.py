"""The page of the results: one file, with everything in it."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gpu.parts import Part
from gpu.record import SHARE
from gpu.results import DONE, FAILED, TIMEOUT, failed_checks, summary
from verl_ext.report.files import written_whole

HERE = Path(__file__).parent
PALETTE = HERE.parents[1] / "verl_ext" / "report" / "templates" / "report.css"  # the report's colours and tables
CLASSES = {DONE: "healthy", FAILED: "collapsed", TIMEOUT: "collapsed"}


def write(results: Mapping[str, Any], parts: Mapping[str, Part], file: Path) -> None:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sections = [_section(name, part, results["parts"].get(name)) for name, part in parts.items()]
    page = environment.get_template("page.html.j2").render(
        css=Markup(PALETTE.read_text(encoding="utf-8") + (HERE / "page.css").read_text(encoding="utf-8")),
        machine=results["machine"],
        sections=sections,
    )
    with written_whole(file) as out:
        out.write(page.encode())


def _section(name: str, part: Part, entry: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what the template shows of a part, run or not."""
    entry = entry or {"state": "not run", "why": "it was not requested yet"}
    lines = entry.get("lines", [])
    checks = [line for line in lines if line["kind"] == "check"]
    return {
        "name": name,
        "title": part.title,
        "state": entry["state"],
        "look": CLASSES.get(entry["state"], "not-enough-data"),
        "why": entry.get("why"),
        "seconds": entry.get("seconds"),
        "checks": len(checks),
        "failed": failed_checks(entry),
        "notes": [line for line in lines if line["kind"] == "note"],
        "cases": [(case, [_row(line) for line in found]) for case, found in _by_case(lines)],
        "output": entry.get("output"),
    }


def _by_case(lines: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    figures = [line for line in lines if line["kind"] == "figure"]
    return [(case, list(found)) for case, found in groupby(figures, key=lambda line: line["case"])]


def _row(line: dict[str, Any]) -> dict[str, Any]:
    median, smallest, count = summary(line["repeats"])
    aim = line["at_most"]
    return {
        "name": line["name"],
        "note": line["note"],
        "unit": "" if line["unit"] == SHARE else line["unit"],
        "median": shown(median, line["unit"]),
        "min": shown(smallest, line["unit"]),
        "count": count,
        "aim": None if aim is None else f"at most {shown(aim, line['unit'])}",
        "met": aim is None or median <= aim,
    }


def shown(value: float, unit: str) -> str:
    """Returns the value with four digits, a share in percent."""
    if unit == SHARE:
        return f"{100 * value:.2f} %"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 3 - len(str(int(abs(value)))) + 1)}f}"
