"""Run the numeric tests as other CPUs would: with older kernels of torch, oneDNN and MKL, and other thread counts.

    python tools/check_kernels.py [--only NAME ...] [--examples 20] [--logs FOLDER] [-- ARGUMENTS OF PYTEST]

The tests are those of every module of FOLDERS that imports torch, except those marked e2e. Each combination runs them
in its own process; hypothesis draws fewer examples than usual, the same in all combinations. The table at the end shows
the requested kernels, and those that the libraries report. It also shows if a machine cannot run a combination: avx512
on a CPU without it has the kernels of the first row. The exit status is 1 if a combination failed.

If two machines have different results although their tests agree here, add a combination to COMBINATIONS.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "routing", "workers", "upstream", "trainer", "support")  # of tests/unit: what computes with tensors
EXAMPLES = "CHECK_KERNELS_EXAMPLES"  # environment variable with their number, for this file as pytest's plugin

# The axes are the kernels of torch, of oneDNN and of MKL (CBWR picks a code path), and the number of parts that a sum
# is cut into. Each axis has its extremes at least once, and there are combinations as whole machines have them.
COMBINATIONS = {
    "as it is": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "torch default": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2 machine": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "AVX512 machine": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "AVX512",
        "OMP_NUM_THREADS": "1",
    },
    "oldest": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
    },
}
AXES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS")

# oneDNN and MKL name their kernels only in their verbose output of a call.
PROBE = """
import json, torch
torch.nn.functional.conv2d(torch.rand(2, 16, 64, 64), torch.rand(16, 16, 3, 3))
torch.rand(64, 64) @ torch.rand(64, 64)
print(json.dumps([torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]))
"""


@dataclass(frozen=True)
class Outcome:
    """The result of one combination: what the libraries reported, and what the tests did."""

    kernels: tuple[str, str, str, str]
    counts: str
    failed: tuple[str, ...]
    ok: bool
    seconds: float
    log: Path


def pytest_configure() -> None:
    """Hook of a pytest plugin: sets fewer examples per property, without a deadline."""
    from hypothesis import settings

    settings.register_profile("kernels", max_examples=int(os.environ[EXAMPLES]), deadline=None, derandomize=True)
    settings.load_profile("kernels")


def numeric_modules() -> list[str]:
    """Returns the test modules of FOLDERS that import torch."""
    modules = sorted(module for folder in FOLDERS for module in (ROOT / "tests" / "unit" / folder).rglob("test_*.py"))
    imports_torch = re.compile(r"^\s*(import torch|from torch)\b", re.MULTILINE)
    return [
        str(module.relative_to(ROOT)) for module in modules if imports_torch.search(module.read_text(encoding="utf-8"))
    ]


def environment(asked: dict[str, str]) -> dict[str, str]:
    """Returns this process's environment, with its choices of kernels and threads replaced by `asked`."""
    inherited = {name: value for name, value in os.environ.items() if name not in AXES}
    return inherited | {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))} | asked


def kernels_in_use(asked: dict[str, str]) -> tuple[str, str, str, str]:
    """Returns (torch, oneDNN, MKL, threads), as they report them; "?" if one reports nothing."""
    verbose = environment(asked) | {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    printed = subprocess.run([sys.executable, "-c", PROBE], env=verbose, capture_output=True, text=True).stdout

    def printed_value(pattern: str) -> str:
        found = re.search(pattern, printed)
        return found[1].strip() if found else "?"

    facts = re.search(r"^\[.*\]$", printed, re.MULTILINE)
    capability, threads = json.loads(facts[0]) if facts else ("?", "?")
    mkl = f"{printed_value(r'architecture (?:Intel.R. )?([^,(]+)')}, CNR {printed_value(r'CNR:([^ ]+)')}"
    return capability, printed_value(r"cpu,isa:(.*)"), mkl, str(threads)


def run(name: str, extra: list[str], examples: int, logs: Path, progress: Callable[[int], None]) -> Outcome:
    """Runs the tests under one combination; `progress` gets the finished share, in percent."""
    asked = COMBINATIONS[name]
    kernels, start = kernels_in_use(asked), time.monotonic()
    log = logs / f"{name.replace(' ', '_')}.log"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q", "-rfE"]
    process = subprocess.Popen(
        [*command, "--tb=short", "-m", "not e2e", *(extra or []), *numeric_modules()],
        cwd=ROOT,
        env=environment(asked) | {"PYTHONPATH": path, EXAMPLES: str(examples)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    with log.open("w", encoding="utf-8") as file:
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            lines.append(line.rstrip())
            if percent := re.search(r"\[ *(\d+)%\]$", lines[-1]):
                progress(int(percent[1]))
    failed = tuple(line.split(" ", 1)[1].split(" - ")[0] for line in lines if re.match(r"(FAILED|ERROR) ", line))
    counts = re.sub(r" in [0-9.]+s.*", "", lines[-1]) if lines else "pytest printed nothing"
    return Outcome(kernels, counts, failed, process.wait() == 0, time.monotonic() - start, log)


def table_of(outcomes: dict[str, Outcome]) -> Table:
    table = Table(title="numeric tests by kernels", show_lines=True)
    for column in ("combination", "requested", "torch", "oneDNN", "MKL", "threads", "tests", "minutes"):
        table.add_column(column, overflow="fold")
    for name, found in outcomes.items():
        asked = "\n".join(f"{key}={value}" for key, value in COMBINATIONS[name].items())
        tests = f"[green]{found.counts}[/]" if found.ok else f"[red]{found.counts}[/]"
        table.add_row(name, asked, *found.kernels, tests, f"{found.seconds / 60:.1f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMBINATIONS, default=[*COMBINATIONS], metavar="NAME")
    parser.add_argument("--examples", type=int, default=20, help="examples per property of hypothesis (default: 20)")
    parser.add_argument("--logs", type=Path, help="folder for pytest's outputs (default: a new one)")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="check_kernels-"))
    logs.mkdir(parents=True, exist_ok=True)
    console, outcomes = Console(), {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("combinations", total=100 * len(arguments.only))
        for index, name in enumerate(arguments.only):
            progress.update(whole, description=name, completed=100 * index)
            outcomes[name] = run(
                name,
                arguments.pytest,
                arguments.examples,
                logs,
                lambda percent, done=100 * index: progress.update(whole, completed=done + percent),
            )
            progress.console.print(f"{name}: {outcomes[name].counts}, {outcomes[name].seconds / 60:.1f} min")
        progress.update(whole, completed=100 * len(arguments.only))
    console.print(table_of(outcomes))
    for name, found in outcomes.items():
        if not found.ok:
            console.print(f"{name} ({found.log}):", *found.failed, sep="\n  ", markup=False)
    return 0 if all(found.ok for found in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
