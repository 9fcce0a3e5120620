"""What the guard adds to verl's checkpoints: its state, and the sizes of the files, by which a truncated one is known.

A checkpoint folder is `global_step_N` under trainer.default_local_dir; verl names the latest in a tracker file beside
them, when it is complete.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from verl_ext.errors import UserError

STATE_FILE = "verl_ext.json"
SIZES_FILE = "verl_ext_sizes.json"
GIVEN_UP_FILE = "verl_ext_given_up"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be resumed from."""


def folder_of(root: str | Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Before verl's own files: a checkpoint that verl names the latest has its state."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / STATE_FILE, state)


def load_state(folder: Path) -> dict[str, Any] | None:
    """None where a run without the guard wrote the checkpoint.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}); delete it to resume with a fresh guard") from error


def save_sizes(folder: Path) -> None:
    """After verl's own files, of those that this machine sees."""
    ours = (STATE_FILE, SIZES_FILE, GIVEN_UP_FILE)  # which are whole or not there
    _write(folder / SIZES_FILE, {name: size for name, size in _sizes(folder) if name not in ours})


def give_up(root: str | Path, after: int) -> None:
    """A rollback went back to step `after`: a restart must not go on from what came later."""
    for step in _steps(Path(root)):
        if step > after:
            (folder_of(root, step) / GIVEN_UP_FILE).touch()


def forget(folder: Path) -> None:
    """The checkpoint is about to be written anew."""
    for name in (SIZES_FILE, GIVEN_UP_FILE):
        (folder / name).unlink(missing_ok=True)


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint's files, in one clause; empty where nothing is, or sizes were never saved."""
    if not folder.is_dir():
        return "the folder is missing"
    if (folder / GIVEN_UP_FILE).exists():
        return "a rollback gave it up"
    file = folder / SIZES_FILE
    if not file.exists():
        return ""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{SIZES_FILE} is not JSON ({error})"
    found = dict(_sizes(folder))
    for name, size in saved.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes and was saved with {size}"
    return ""


def newest_whole(root: str | Path) -> Path | None:
    """The newest checkpoint that is whole and not given up, none newer than the one that verl names the latest.

    Prints those that it passes over. Returns None where there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and none can be resumed from.
    """
    latest = _latest(root)
    if latest is None:  # no tracker, or a part of one: those whose sizes were saved are complete
        steps = [step for step in _steps(Path(root)) if (folder_of(root, step) / SIZES_FILE).exists()]
    else:
        steps = sorted({latest, *(step for step in _steps(Path(root)) if step <= latest)})
    if not steps:
        return None
    passed_over: list[str] = []
    for step in sorted(steps, reverse=True):
        folder = folder_of(root, step)
        if not (wrong := damage(folder)):
            for line in passed_over:
                print(f"verl_ext: {line}; resuming from {folder}", flush=True)
            return folder
        passed_over.append(f"checkpoint {folder} cannot be resumed from: {wrong}")
    raise CheckpointError(
        f"{'; '.join(passed_over)}; put a whole one there, or set trainer.resume_mode=disable to start anew"
    )


def newest_of(root: str | Path, steps: Iterable[int]) -> Path | None:
    """The newest of these checkpoints that is there with its model, and whole."""
    for step in sorted(steps, reverse=True):
        folder = folder_of(root, step)
        if (folder / "actor").is_dir() and not damage(folder):
            return folder
    return None


def _latest(root: str | Path) -> int | None:
    """The step that verl's tracker names; None where there is none, or it was cut off."""
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    text = tracker.read_text(encoding="utf-8").strip() if tracker.exists() else ""
    return int(text) if text.isdigit() else None


def _steps(root: Path) -> list[int]:
    names = (re.fullmatch(r"global_step_(\d+)", entry.name) for entry in root.iterdir()) if root.is_dir() else ()
    return [int(name.group(1)) for name in names if name]


def _sizes(folder: Path) -> list[tuple[str, int]]:
    return [
        (str(file.relative_to(folder)), file.stat().st_size) for file in sorted(folder.rglob("*")) if file.is_file()
    ]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, file)
