"""Runs the parts one after another, each in a process of its own with a time limit, within a budget of minutes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu import page
from gpu.parts import Part
from gpu.results import CUT, DONE, FAILED, LEFT, NEEDS, TIMEOUT, failed_checks, save

POLL = 0.2  # seconds
MOST_OUTPUT = 6000  # characters that are kept of a failed part's output


def run_parts(
    parts: Mapping[str, Part],
    names: Sequence[str],
    results: dict[str, Any],
    folder: Path,
    *,
    dry: bool,
    tiny: bool,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Runs those of `names` that are not done yet, and writes results.json and results.html after each.

    A part starts only if its time limit still fits into `seconds`; otherwise it is left for the next run.
    """
    ends = time.monotonic() + seconds
    found = results["parts"]

    def write() -> None:
        save(results, folder / "results.json")
        page.write(results, parts, folder / "results.html")

    for name in names:
        part = parts[name]
        if found.get(name, {}).get("state") == DONE:
            say(f"{name}: done before, kept")
            continue
        remaining = ends - time.monotonic()
        if why := _cannot_run(part, dry):
            found[name] = {"state": NEEDS, "why": why}
        elif part.seconds > remaining:
            why = f"it may take {part.seconds:.0f} s, and {max(remaining, 0):.0f} s were left: run the command again"
            found[name] = {"state": LEFT, "why": why}
        else:
            say(f"{name}: {part.title}, at most {part.seconds:.0f} s")
            _run(part, found.setdefault(name, {}), dry, tiny, write)
        write()
        say(f"{name}: {_line(found[name])}")


def _cannot_run(part: Part, dry: bool) -> str | None:
    if dry and part.on_gpu_alone:
        return "needs a GPU"
    missing = [package for package in part.needs if find_spec(package) is None]
    return f"needs {', '.join(missing)}" if missing else None


def _run(part: Part, entry: dict[str, Any], dry: bool, tiny: bool, write: Callable[[], None]) -> None:
    """Fills `entry` from one process, and writes it to disk whenever there is something new."""
    entry.clear()
    entry |= {"state": "running", "lines": []}
    write()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder, "lines"), Path(folder, "output")
        lines.touch()
        options = ["--device", "cpu" if dry else "cuda"]
        if tiny:
            options.append("--tiny")
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu.part", part.module, str(lines), *options],
                env=_environment(dry, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it started ends with it
            )
        try:
            while process.poll() is None and time.monotonic() - begun < part.seconds:
                time.sleep(POLL)
                if len(found := _read(lines)) > len(entry["lines"]):
                    entry["lines"] = found
                    write()
            timed_out = process.poll() is None
        except BaseException:
            entry |= {"state": CUT, "why": "the run was stopped while this part ran"}
            raise
        finally:
            _end(process)
        entry |= {"seconds": round(time.monotonic() - begun, 1), "lines": _read(lines)}
        printed = output.read_text(encoding="utf-8", errors="replace")[-MOST_OUTPUT:]
    if timed_out:
        entry |= {"state": TIMEOUT, "why": f"it took more than {part.seconds:.0f} s", "output": printed}
    elif process.returncode:
        entry |= {"state": FAILED, "why": f"it ended with exit code {process.returncode}", "output": printed}
    elif bad := failed_checks(entry):
        entry |= {"state": FAILED, "why": f"{len(bad)} of its checks do not hold"}
    else:
        entry["state"] = DONE


def _environment(dry: bool, folder: str) -> dict[str, str]:
    # A part's folder is removed with everything that libraries leave in it. verl chooses its platform at its import.
    environment = {"TMPDIR": folder, "HF_HUB_OFFLINE": "1", "VERL_PLATFORM": os.environ.get("VERL_PLATFORM", "nvidia")}
    if dry:
        environment |= {"VERL_PLATFORM": "cpu", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"  # tiny sizes: more threads wait for each other
    return os.environ | environment


def _read(lines: Path) -> list[dict[str, Any]]:
    """Returns all whole lines: the last may be half written."""
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").split("\n")[:-1]]


def _end(process: subprocess.Popen) -> None:
    """Ends the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _line(entry: dict[str, Any]) -> str:
    taken = f" in {entry['seconds']:.0f} s" if "seconds" in entry else ""
    why = f", {entry['why']}" if "why" in entry else ""
    kinds = [line["kind"] for line in entry.get("lines", [])]
    held = f", {kinds.count('check')} checks, {kinds.count('figure')} figures" if kinds else ""
    return f"{entry['state']}{taken}{held}{why}"
