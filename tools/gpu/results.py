"""The file of results: one JSON document, written whole after every change, which a second run continues."""

import json
import os
import platform
import statistics
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ext.report.files import written_whole

PACKAGES = ("torch", "triton", "transformers", "verl", "vllm", "ray", "tensordict", "numpy")
DRY = "none: a dry run"
# The states of a part. The next run keeps those that are done, and runs all others again.
DONE, FAILED, TIMEOUT, CUT, LEFT, NEEDS = "done", "failed", "timed out", "cut off", "left", "not run"


class KitError(Exception):
    """An error that the user has to act on; printed as one line."""


def machine(dry: bool) -> dict[str, str]:
    """Returns hardware and versions, without importing any of the packages.

    Raises:
        KitError: there is no GPU.
    """
    found = {"gpu": DRY} if dry else _gpu()
    found |= {"cpu": f"{os.cpu_count()} cores, {platform.machine()}", "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise KitError(f"no GPU was found here: nvidia-smi failed: {error}; --dry runs everything on a CPU") from error
    if not lines:
        raise KitError("no GPU was found here: nvidia-smi lists none; --dry runs everything on a CPU")
    name, driver, memory = (field.strip() for field in lines[0].split(","))
    return {"gpu": name, "driver": driver, "gpu memory": memory}


def load(file: Path, here: dict[str, str]) -> dict[str, Any]:
    """Returns the results of an earlier run on this machine, or empty ones.

    Raises:
        KitError: the file has another machine's results, or is no file of results.
    """
    if not file.exists():
        return {"machine": here, "parts": {}}
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        there, parts = results["machine"], results["parts"]
    except (ValueError, KeyError, TypeError) as error:
        raise KitError(f"{file} is no file of results ({error}); name another folder with --out") from error
    if there != here:
        differs = next(name for name in here | there if here.get(name) != there.get(name))
        raise KitError(
            f"{file} has results from elsewhere: {differs} was {there.get(differs)} and is {here.get(differs)}; "
            "name another folder with --out, or discard them with --again"
        )
    for part in parts.values():
        if part["state"] == "running":
            part |= {"state": CUT, "why": "the run ended while this part ran"}
    return results


def save(results: dict[str, Any], file: Path) -> None:
    """Writes the file in one step, so that a run which is cut off leaves a whole file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as out:
        out.write(json.dumps(results, indent=1).encode())


def summary(repeats: list[float]) -> tuple[float, float, int]:
    """Returns (median, min, count)."""
    return statistics.median(repeats), min(repeats), len(repeats)


def failed_checks(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in part.get("lines", []) if line["kind"] == "check" and not line["passed"]]
