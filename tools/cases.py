"""The corpus of judged runs, `tests/cases`: makes value files from runs, and freezes what the report says of each.

    python tools/cases.py add SET FOLDER     make the value files of SET (field, lab, stack) from cases in FOLDER
    python tools/cases.py judge              write what the report says of each case now; `git diff` shows what changed
    python tools/cases.py table              how many of each set are judged as is known of them

A value file is a CSV with a column for the step and one for each metric whose name the report knows, five digits each.
A case in FOLDER is a folder with its files and `case.json`: id, source, framework, model, kind, files, and `expect`,
what a report must and must not say. A value file keeps the names that the run logged, so that the table of names is
tried too.
"""

import argparse
import csv
import gzip
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.load import read_run
from verl_ext.report.machine import as_json
from verl_ext.report.run import Run
from verl_ext.report.verdict import judge_run

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
JUDGED = CASES / "judged.json"
SETS = ("field", "lab", "stack")
ENDINGS = {"field": ".csv", "lab": ".csv.gz", "stack": ".csv.gz"}  # other people's runs can be read in a diff
ALSO = (
    "vllm_kl/",
    "router/",
    "sync/",
    "correction/",
    "guard/",
    "filter/",
)  # what only we log


def write_values(run: Run, file: Path) -> None:
    """Writes the metrics of a run whose names the report knows, five digits each."""
    names = [name for name in run.metrics if quantity_of(name) is not None or name.startswith(ALSO)]
    cells = {name: dict(zip(run.metrics[name].steps, run.metrics[name].values, strict=True)) for name in names}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["step", *names])
    for step in run.steps:
        table.writerow([step, *(_cell(cells[name].get(step)) for name in names)])
    file.parent.mkdir(parents=True, exist_ok=True)
    content = text.getvalue().encode()
    file.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def add(which: str, folder: Path) -> None:
    index = []
    for path in sorted(folder.glob("*/case.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        for name in known["files"]:
            stem = known["id"] if len(known["files"]) == 1 else f"{known['id']}-{Path(name).stem}"
            write_values(read_run(path.parent / name), CASES / which / f"{stem}{ENDINGS[which]}")
            expect = known["expect"] | known.get("expect_file", {}).get(name, {})
            about = {key: known[key] for key in ("source", "framework", "model", "kind") if known.get(key)}
            index.append({"case": stem, **about, "expect": expect})
    (CASES / f"{which}.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def cases() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yields (set, file of the run, what is known of it)."""
    for which in SETS:
        index = CASES / f"{which}.json"
        for known in json.loads(index.read_text(encoding="utf-8")) if index.exists() else ():
            file = ROOT / known["run"] if "run" in known else CASES / which / f"{known['case']}{ENDINGS[which]}"
            yield which, file, known


def judgement(file: Path) -> dict[str, Any]:
    """Returns what the report says of a run, as far as it is frozen."""
    run = _read(file)
    said = as_json(run, judge_run(run))
    return {
        "state": said["state"],
        "learning": said["learning"]["state"],
        "engines": said["engines"]["state"],
        "causes": [cause["id"] for cause in said["causes"] if not cause["harmless"]],
    }


def _read(file: Path) -> Run:
    if file.suffix != ".gz":
        return read_run(file)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / file.stem
        unpacked.write_bytes(gzip.decompress(file.read_bytes()))
        return read_run(unpacked)


def is_right(expect: dict[str, Any], said: dict[str, Any]) -> bool:
    """Returns True if the frozen part of a judgement is as is known of the run."""
    first = said["causes"][0] if said["causes"] else "unknown"
    return (
        all(said[axis] in expect[axis] for axis in ("learning", "engines", "state") if axis in expect)
        and said["state"] not in expect.get("never_state", ())
        and not (expect.get("no_cause") and said["causes"])
        and ("cause" not in expect or first in expect["cause"])
        and not set(said["causes"]) & set(expect.get("never_cause", ()))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("set", choices=SETS)
    adding.add_argument("folder", type=Path)
    commands.add_parser("judge")
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "add":
        add(arguments.set, arguments.folder)
        return 0
    said = {f"{which}/{known['case']}": judgement(file) for which, file, known in cases()}
    if arguments.command == "judge":
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in said.items())
        JUDGED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    counts: Counter[tuple[str, bool]] = Counter()
    for which, _, known in cases():
        counts[which, is_right(known["expect"], said[f"{which}/{known['case']}"])] += 1
    for which in SETS:
        whole = counts[which, True] + counts[which, False]
        if whole:
            print(f"{which:6} {counts[which, True]:4} of {whole} judged as is known of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
