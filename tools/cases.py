"""The corpus of judged runs, `tests/cases`: makes value files from runs, and freezes what the report says of each.

    python tools/cases.py add SET FOLDER     make the value files of SET (field, lab, stack) from cases in FOLDER
    python tools/cases.py judge              write the report's judgement of each case; `git diff` shows what changed
    python tools/cases.py table              how many of each set are judged correctly, by aspect
    python tools/cases.py noise              the table of false alarms in docs/report.md; two minutes

A value file is a CSV with a column for the step and one for each metric whose name the report knows, five digits each.
A case in FOLDER is a folder with its files and `case.json`: id, source, framework, model, kind, files, and `expect`,
what a report must and must not say. `add` keeps the words for the guide that an index has: `symptom` (it begins with
the metric that shows the problem first), `cause` ("sound" for none) and `helped`. A value file keeps the names that the
run logged, so that the table of names is tried too. `set_counts` and `guide` are parts of docs/ (tools/pages.py).
"""

import argparse
import csv
import gzip
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pages import table

from verl_ext.diagnosis.judge import judge
from verl_ext.diagnosis.names import aliases_of, quantity_of
from verl_ext.diagnosis.series import Readings, Series
from verl_ext.report.load import read_run
from verl_ext.report.run import Run
from verl_ext.report.verdict import judge_run

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
JUDGED = CASES / "judged.json"
WORDS_OF_GUIDE = ("symptom", "cause", "helped")
SETS = ("field", "lab", "stack")
ENDINGS = {"field": ".csv", "lab": ".csv.gz", "stack": ".csv.gz"}  # other people's runs can be read in a diff
# Beginnings of what only we log, as far as the diagnosis reads it.
ALSO = re.compile(
    r"vllm_kl/(k[13]/prob/|k3/lag/|engine/k3|sequence_gap_)|router/|sync/|correction/dropped|filter/|reward/prompt_effect|"
    r"guard/(level|boundary|skipped|steps_to_boundary|mask_blind)"
)


def write_values(run: Run, file: Path) -> None:
    """Writes the metrics of a run that the diagnosis may read, five digits each."""
    names = [name for name in run.metrics if quantity_of(name) is not None or ALSO.match(name)]
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
    file = CASES / f"{which}.json"
    before = {each["case"]: each for each in json.loads(file.read_text(encoding="utf-8"))} if file.exists() else {}
    index = dict(before)
    for path in sorted(folder.glob("*/case.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        for name in known["files"]:
            stem = known["id"] if len(known["files"]) == 1 else f"{known['id']}-{Path(name).stem}"
            write_values(read_run(path.parent / name), CASES / which / f"{stem}{ENDINGS[which]}")
            expect = known["expect"] | known.get("expect_file", {}).get(name, {})
            about = {key: known[key] for key in ("source", "framework", "model", "kind") if known.get(key)}
            words = {key: before[stem][key] for key in WORDS_OF_GUIDE if key in before.get(stem, {})}
            index[stem] = {"case": stem, **about, "expect": expect, **words}
    found = [index[stem] for stem in sorted(index)]
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def cases() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yields (set, file of the run, what is known of it)."""
    for which in SETS:
        index = CASES / f"{which}.json"
        for known in json.loads(index.read_text(encoding="utf-8")) if index.exists() else ():
            file = ROOT / known["run"] if "run" in known else CASES / which / f"{known['case']}{ENDINGS[which]}"
            yield which, file, known


def judgement(file: Path) -> dict[str, Any]:
    """Returns what the report says of a run, as far as it is frozen."""
    run = read_case(file)
    said = judge_run(run).as_json(run)
    return {
        "state": said["state"],
        "learning": said["learning"]["state"],
        "engines": said["engines"]["state"],
        "causes": [cause["id"] for cause in said["causes"] if not cause["harmless"]],
    }


def read_case(file: Path) -> Run:
    if file.suffix != ".gz":
        return read_run(file)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / file.stem
        unpacked.write_bytes(gzip.decompress(file.read_bytes()))
        return read_run(unpacked)


def aspects(expect: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, bool]:
    """Returns, for each aspect that is known of a run, whether the frozen part of a judgement has it right.

    A log may not show its cause. Then "unknown" is one of the causes that are right, and naming none is right too.
    """
    found = {axis: said[axis] in expect[axis] for axis in ("learning", "engines") if axis in expect}
    if "state" in expect or "never_state" in expect:
        wanted = "state" not in expect or said["state"] in expect["state"]
        found["state"] = wanted and said["state"] not in expect.get("never_state", ())
    first = said["causes"][0] if said["causes"] else "unknown"
    if "cause" in expect:
        found["cause"] = first in expect["cause"]
    if "no_cause" in expect or "never_cause" in expect:
        accused = expect.get("no_cause") and said["causes"]
        found["accused"] = not accused and not set(said["causes"]) & set(expect.get("never_cause", ()))
    return found


def freeze(again: bool) -> None:
    """Writes the report's judgement of each case, by set and case, one line each.

    Args:
        again: also judge the cases that are frozen already. Otherwise, if their judgement changes, a test still fails.
    """
    before = {} if again else frozen()
    files = {f"{which}/{known['case']}": file for which, file, known in cases()}
    said = {name: before.get(name) or judgement(file) for name, file in files.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in said.items())
    JUDGED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def frozen() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(JUDGED.read_text(encoding="utf-8"))
    return found


def set_counts() -> str:
    """Returns the counts of each set as a table in Markdown, from the frozen judgements."""
    said = frozen()
    titles = ("set", "cases", "all right", "learning", "engines", "state", "first cause", "of them named")
    rows = [(*titles, "accused wrongly")]
    for which in SETS:
        counts: Counter[tuple[str, bool]] = Counter()
        for known in (known for each, _, known in cases() if each == which):
            judged = said[f"{which}/{known['case']}"]
            found = aspects(known["expect"], judged)
            counts.update(found.items())
            counts["all", all(found.values())] += 1
            counts["named", found.get("cause", False) and bool(judged["causes"])] += 1
        of = {aspect: counts[aspect, True] + counts[aspect, False] for aspect, _ in counts}
        right = [
            f"{counts[each, True]} of {of[each]}" if of.get(each) else ""
            for each in ("all", "learning", "engines", "state", "cause")
        ]
        accused = f"{counts['accused', False]} of {of['accused']}" if of.get("accused") else ""
        rows.append((which, str(of["all"]), *right, str(counts["named", True]), accused))
    return table(rows)


def guide() -> str:
    """Returns the sections of docs/field-guide.md, the symptoms: those of one metric together, the sound runs last.

    Cases with the same symptom are one run in several forms, and share a row.
    """
    said = frozen()
    rows: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for which, _, known in cases():
        if which == "field":
            judged = said[f"field/{known['case']}"]
            causes = ", ".join(f"`{name}`" for name in judged["causes"]) or "no cause"
            says = f"{judged['learning']}, {judged['engines']}; {causes}"
            rows.setdefault(known["symptom"], []).append((known, says))
    sections: dict[str, list[tuple[str, ...]]] = {}
    for symptom, found in rows.items():
        first, sources = found[0][0], dict.fromkeys(_source(known) for known, _ in found)
        told = dict.fromkeys(says for _, says in found)
        quantity = quantity_of(_first_metric(symptom))
        sound = first["cause"] == "sound"
        name = "" if sound else quantity.name if quantity is not None else _first_metric(symptom)
        cells = (symptom, " / ".join(told)) if sound else (symptom, first["cause"], " / ".join(told), first["helped"])
        sections.setdefault(name, []).append((*cells, "<br>".join(sources)))
    parts = []
    for name in sorted(filter(None, sections)):
        others = [f"`{alias.name}`" for alias in aliases_of(name) if not alias.is_family and alias.name != name]
        parts += [f"## {name}", *([f"Also logged as {', '.join(others)}."] if others else [])]
        parts.append(table([("symptom", "cause", "the report says", "what helped", "source"), *sections[name]]))
    parts += ["## Sound runs", "What is normal, also where it looks odd."]
    parts.append(table([("what it looks like", "the report says", "source"), *sections[""]]))
    return "\n\n".join(parts)


def _first_metric(symptom: str) -> str:
    found = re.match(r"`([^`]+)`", symptom)
    if found is None:
        raise ValueError(f"a symptom begins with the name of a metric, in backticks: {symptom}")
    return found[1]


def _source(known: Mapping[str, Any]) -> str:
    """Returns where a case is from, an issue as a link. Ids of a search engine help no reader."""
    source = re.sub(r"\s*\((?:[^()]*look-up id|store id|the repository)[^()]*\)", "", known["source"])
    issue = re.match(r"([\w.-]+/[\w.-]+) (?:issues?|pull request) (\d+)", source)
    if issue is not None:
        link = f"[{issue[0]}](https://github.com/{issue[1]}/issues/{issue[2]})"
        source = f"{link}{source[issue.end() :]}"
    return "; ".join((source, known["framework"], known["kind"]))


RUNS = 200  # of each row of the table of false alarms
COURSES = {  # share of the run -> mean reward
    "flat at 0.5": lambda at: np.full_like(at, 0.5),
    "flat at 0.2": lambda at: np.full_like(at, 0.2),
    "learns from 0.2 to 0.7": lambda at: 0.2 + 0.5 * (1 - np.exp(-4 * at)),
    "learns from 0.3 to 0.4": lambda at: 0.3 + 0.1 * at,
    "falls from 0.6 to 0.4, in the third quarter": lambda at: 0.6 - 0.2 * np.clip(4 * at - 2, 0, 1),
    "falls from 0.6 to 0.2, in the third quarter": lambda at: 0.6 - 0.4 * np.clip(4 * at - 2, 0, 1),
}


LENGTHS = (20, 60, 200)  # steps
GAPS = {"0.001": (0.001, 0.0), "0.05": (0.05, 0.0), "0.001, growing by 5 % per step": (0.001, 0.05)}


def noise() -> str:
    """Returns how often simulated runs of LENGTHS get each state at their last step.

    The noise of a reward has a deviation of 0.1 and is correlated between neighbours by rho; k3 has a noise of 0.3 in
    its logarithm.
    """
    learning, engines = ("learns", "weak", "flat", "falling", "collapsed"), ("close", "apart", "growing", "broken")
    random, rewards, gaps = np.random.default_rng(0), [], []
    for (name, course), rho in product(COURSES.items(), (0.0, 0.5, 0.8)):
        made = [
            [course(np.linspace(0, 1, steps)) + _correlated(random, steps, rho, 0.1) for _ in range(RUNS)]
            for steps in LENGTHS
        ]
        states = [Counter(judge(_made("critic/score/mean", each)).learning.state for each in runs) for runs in made]
        rewards.append((name, f"{rho:g}", *_shares(states, *learning)))
    for (name, (level, rate)), rho in product(GAPS.items(), (0.0, 0.8)):
        made = [
            [level * np.exp(rate * np.arange(steps) + _correlated(random, steps, rho, 0.3)) for _ in range(RUNS)]
            for steps in LENGTHS
        ]
        states = [Counter(judge(_made("vllm_kl/k3", each)).engines.state for each in runs) for runs in made]
        gaps.append((name, f"{rho:g}", *_shares(states, *engines)))
    return "\n\n".join((table([("reward", "rho", *learning), *rewards]), table([("k3", "rho", *engines), *gaps])))


def _shares(counts: list[Counter[str]], *states: str) -> Iterator[str]:
    """Yields for each state its share of the runs of each length, in percent."""
    for state in states:
        shares = [100 * each[state] / RUNS for each in counts]
        yield " / ".join(f"{share:.3g}" for share in shares) if any(shares) else ""


def _made(name: str, values: np.ndarray) -> Readings:
    return Readings({name: Series(np.arange(1, len(values) + 1), values)})


def _correlated(random: np.random.Generator, steps: int, rho: float, deviation: float) -> np.ndarray:
    """Returns first-order autoregressive noise."""
    found = random.normal(size=steps)
    for step in range(1, steps):
        found[step] = rho * found[step - 1] + (1 - rho**2) ** 0.5 * found[step]
    return deviation * found


PRINTED = {"table": set_counts, "noise": noise}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("set", choices=SETS)
    adding.add_argument("folder", type=Path)
    for name in ("judge", *PRINTED):
        commands.add_parser(name)
    arguments = parser.parse_args()
    match arguments.command:
        case "add":
            add(arguments.set, arguments.folder)
            freeze(again=False)
        case "judge":
            freeze(again=True)
        case name:
            print(PRINTED[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
