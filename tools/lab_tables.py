"""The tables of docs/lab.md, from the results of the lab that are kept in docs/lab.

    python tools/lab_tables.py                    write them into docs/lab.md
    python tools/lab_tables.py --keep .lab/stale  first take over its results.json as docs/lab/stale.json

Between `<!-- lab/stale -->` and `<!-- end -->` stands the table of stale.json; between `<!-- lab/ablations -->` and its
end, a row for each file of ablations/.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "lab.md"
KEPT = PAGE.parent / "lab"
MARKS = re.compile(r"<!-- lab/([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
SOME = 0.005  # a share of dropped tokens that is worth a word
HEAD = ("final reward", "against none", "collapsed", "tokens dropped", "with k3")

Row = dict[str, Any]


def with_tables(page: str) -> str:
    def written(mark: re.Match) -> str:
        table = ablations() if mark[1] == "ablations" else variants(_read(KEPT / f"{mark[1]}.json"))
        return f"<!-- lab/{mark[1]} -->\n{table}\n<!-- end -->"

    return MARKS.sub(written, page)


def variants(found: Row) -> str:
    """A row for each, in the order of the results: the exact one, then by the final reward."""
    rows = [["", *HEAD]]
    for each in found["variants"]:
        means, runs = each["means"], len(each["runs"])
        dropped = means["dropped"]
        masks = dropped is not None and dropped["mean"] >= SOME
        rows.append(
            [
                f"**{each['name']}**" if each["name"] == "none" else each["name"],
                _interval(means["final"]),
                _against(each["final_against_none"]),
                f"{len(each['collapsed']['at'])} of {runs}",
                f"{100 * dropped['mean']:.0f} %" if masks else "",
                f"{means['dropped_with_k3']['mean']:+.2f}" if masks and means.get("dropped_with_k3") else "",
            ]
        )
    return _markdown(rows)


def ablations() -> str:
    """Conditions below each other, arms beside each other: means of the final reward, and how many collapsed."""
    found = [_read(file) for file in sorted((KEPT / "ablations").glob("*.json"))]
    names = list(dict.fromkeys(each["name"] for condition in found for each in condition["variants"]))
    names.sort(key=lambda name: {"exact": 0, "none": 1}.get(name, 2))
    rows = [["", *names]]
    for condition in found:
        by_name = {each["name"]: each for each in condition["variants"]}
        rows.append([condition["condition"], *(_ended(by_name.get(name)) for name in names)])
    return _markdown(rows)


def keep(out: Path, name: str) -> None:
    shutil.copyfile(out / "results.json", KEPT / f"{name}.json")


def keep_ablation(out: Path, name: str, condition: str) -> None:
    """Without what the row does not need."""
    found = _read(out / "results.json")
    for each in found["variants"]:
        each["means"] = {"final": each["means"]["final"]}
        each["runs"] = {
            seed: {key: run[key] for key in ("final", "peak", "collapsed")} for seed, run in each["runs"].items()
        }
    (KEPT / "ablations").mkdir(exist_ok=True)
    (KEPT / "ablations" / f"{name}.json").write_text(json.dumps({"condition": condition} | found, indent=1) + "\n")


def _ended(each: Row | None) -> str:
    if each is None:
        return ""
    died = len(each["collapsed"]["at"])
    return f"{each['means']['final']['mean']:.2f}" + (f" ({died} of {len(each['runs'])} collapsed)" if died else "")


def _interval(found: Row) -> str:
    half = f" ±{(found['high'] - found['low']) / 2:.2f}" if "low" in found else ""
    return f"{found['mean']:.2f}{half}"


def _against(found: Row | None) -> str:
    if found is None:
        return ""
    sure = "low" in found and not found["low"] <= 0 <= found["high"]
    half = f" ±{(found['high'] - found['low']) / 2:.2f}" if "low" in found else ""
    return f"{found['mean']:+.2f}{half}" + (" *" if sure else "")


def _read(file: Path) -> Row:
    return json.loads(file.read_text(encoding="utf-8"))


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="of a grid that has come to its end")
    parser.add_argument("--condition", metavar="TEXT", help="of an ablation: what is different in it")
    arguments = parser.parse_args()
    if arguments.keep and arguments.condition:
        keep_ablation(arguments.keep, arguments.keep.name, arguments.condition)
    elif arguments.keep:
        keep(arguments.keep, arguments.keep.name)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
