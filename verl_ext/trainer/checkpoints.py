"""The guard's additions to verl's checkpoints: its state, and the sizes of the files, which reveal a truncated one.

`saving` and `loading` are contexts around verl's own. A checkpoint folder is `global_step_N` under
trainer.default_local_dir; verl names the latest in a tracker file next to them, when it is complete.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from ray.exceptions import RayTaskError

from verl_ext.base.errors import UserError
from verl_ext.base.printable import printable
from verl_ext.guard.guard import Guard
from verl_ext.guard.state import read_state

STATE_FILE = "verl_ext.json"
SIZES_FILE = "verl_ext_sizes.json"
GIVEN_UP_FILE = "verl_ext_given_up"
STEP = r"0|[1-9][0-9]{0,17}"  # as verl writes it
TORCHS = ("PytorchStreamWriter", "inline_container")  # in torch.save's message if it cannot write


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be resumed from, or cannot be written."""


@contextmanager
def saving(guard: Guard, config: DictConfig, step: int) -> Iterator[None]:
    """Context of verl's saving: the guard's state is written before its files, their sizes after them.

    Raises:
        CheckpointError: one of them, or of verl's, cannot be written.
    """
    guard.saved(step)
    folder = save_guard(guard, config, step)
    with _explain_failure(folder):
        forget(folder)  # removes the record of an older checkpoint of this step
        yield
        if not config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            save_sizes(folder)


def save_guard(guard: Guard, config: DictConfig, step: int) -> Path:
    """Writes the guard's state into the checkpoint of a step; returns its folder. Raises CheckpointError."""
    folder = folder_of(config.trainer.default_local_dir, step)
    with _explain_failure(folder):
        save_state(folder, guard.state_dict())
    return folder


@contextmanager
def loading(guard: Guard, config: DictConfig) -> Iterator[None]:
    """Context of verl's loading: `config` names a whole checkpoint, and the guard takes over its state afterwards.

    Raises:
        CheckpointError: no checkpoint can be resumed from, or not the requested one.
    """
    folder = _checkpoint_to_resume(config.trainer)
    if folder is None:
        yield
        return
    state = load_state(folder)
    trainer = config.trainer
    asked = trainer.resume_mode, trainer.get("resume_from_path")
    with open_dict(trainer):
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(folder)
        yield
        trainer.resume_mode, trainer.resume_from_path = asked
    if state is not None:
        guard.load_state_dict(state)
        firing = [name for name, rule in guard.state.rules.items() if rule.firing]
        brief = {"skips": guard.state.skips, "rollbacks": guard.state.rollbacks, "firing": firing}
        print(f"verl_ext: guard state of step {step_of(folder)}: {json.dumps(brief)}", flush=True)


def folder_of(root: str | Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def step_of(folder: Path) -> int:
    """Returns the step at which verl resumes from the folder."""
    return int(folder.name.rpartition("global_step_")[2])


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the guard's state, before verl's own files: the checkpoint that verl names the latest then has it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / STATE_FILE, state)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Reads the guard's state; None if a run without the guard wrote the checkpoint.

    Raises:
        CheckpointError: the file is not a guard state.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    try:
        state = _read_json(file)
        read_state(state)
        return state
    except ValueError as error:
        said = printable(str(error))
        raise CheckpointError(f"{file} is damaged ({said}); delete it to resume with a fresh guard") from error


def save_sizes(folder: Path) -> None:
    """Writes the sizes of verl's files that this machine sees, after verl has written them."""
    ours = (STATE_FILE, SIZES_FILE, GIVEN_UP_FILE)  # these are complete or absent
    _write(folder / SIZES_FILE, {name: size for name, size in _sizes(folder) if name not in ours})


def give_up(root: str | Path, after: int) -> None:
    """Marks the checkpoints after step `after`: the weights are that step's again, and a restart must not continue
    from later ones."""
    for step in _steps(Path(root)):
        if step > after:
            (folder_of(root, step) / GIVEN_UP_FILE).touch()


def forget(folder: Path) -> None:
    """Removes our files of a checkpoint that is about to be overwritten."""
    for name in (SIZES_FILE, GIVEN_UP_FILE):
        (folder / name).unlink(missing_ok=True)


def damage(folder: Path) -> str:
    """Returns the damage to a checkpoint's files, in one clause; empty if there is none, or sizes were never saved."""
    if not folder.is_dir():
        return "the folder is missing"
    if (folder / GIVEN_UP_FILE).exists():
        return "the guard gave it up"
    try:
        load_state(folder)
    except CheckpointError as error:
        return str(error)
    file = folder / SIZES_FILE
    if not file.exists():
        return ""
    try:
        saved = _read_json(file)
    except ValueError as error:
        return f"{SIZES_FILE} is not JSON ({error})"
    if not isinstance(saved, dict):
        return f"{SIZES_FILE} is not a mapping from a file to its size"
    return _first_change(saved, dict(_sizes(folder)))


def _first_change(saved: Mapping[str, Any], found: Mapping[str, int]) -> str:
    """Returns the first file that differs from what was saved, in one clause; empty if none does."""
    for name, size in saved.items():
        if type(size) is not int:
            return f"{printable(name)} has a size that is not a whole number in {SIZES_FILE}"
        if name not in found:
            return f"{printable(name)} is missing"
        if found[name] != size:
            return f"{printable(name)} has {found[name]} bytes, but {size} were saved"
    return ""


def newest_whole(root: str | Path) -> Path | None:
    """Returns the newest checkpoint that is complete and not given up, and not newer than the one that verl names the
    latest.

    Prints the ones that it skips. Returns None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and none can be resumed from; or the tracker names none.
    """
    latest = _latest(root)
    if latest is None:  # no tracker, or a part of one: checkpoints with saved sizes are complete
        steps = [step for step in _steps(Path(root)) if (folder_of(root, step) / SIZES_FILE).exists()]
    else:
        steps = sorted({latest, *(step for step in _steps(Path(root)) if step <= latest)})
    if not steps:
        if latest is None and _tracker(root).exists():  # verl would raise on it
            raise CheckpointError(
                f"{_tracker(root)} names no step, and there is no complete checkpoint; delete it to start from the "
                "beginning"
            )
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
        "; ".join(passed_over),
        fix=("trainer.resume_mode=disable",),
        otherwise="copy a complete one there to keep the progress",
    )


def newest_of(root: str | Path, steps: Iterable[int]) -> Path | None:
    """Returns the newest of these checkpoints that exists with its model, and is complete."""
    for step in sorted(steps, reverse=True):
        folder = folder_of(root, step)
        if (folder / "actor").is_dir() and not damage(folder):
            return folder
    return None


@contextmanager
def _explain_failure(folder: Path) -> Iterator[None]:
    """Context in which a checkpoint is written, here and in the workers, all of which have to write their part."""
    try:
        yield
    except (OSError, RayTaskError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        said = str(cause).partition("\n")[0]
        if not isinstance(cause, OSError) and not any(sign in str(cause) for sign in TORCHS):
            raise
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written ({type(cause).__name__}: {said}). Earlier ones are intact: "
            "with trainer.resume_mode=auto, the same command continues from the last complete one"
        ) from error


def _checkpoint_to_resume(trainer: DictConfig) -> Path | None:
    """Returns None if there is no checkpoint to name: verl starts from the beginning, or reports what is missing."""
    if trainer.resume_mode == "auto":
        return newest_whole(trainer.default_local_dir)
    if trainer.resume_mode != "resume_path" or not trainer.resume_from_path:
        return None
    if wrong := damage(Path(trainer.resume_from_path)):
        raise CheckpointError(
            f"trainer.resume_from_path={trainer.resume_from_path} is damaged: {wrong}; choose another checkpoint"
        )
    return Path(trainer.resume_from_path)


def _tracker(root: str | Path) -> Path:
    # Imported here, because that package imports every training engine.
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    return Path(get_checkpoint_tracker_filename(str(root)))


def _latest(root: str | Path) -> int | None:
    """Returns the step that verl's tracker names; None if there is no tracker, or it names none (it was cut off)."""
    try:
        text = _tracker(root).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return int(text) if re.fullmatch(STEP, text) else None


def _steps(root: Path) -> list[int]:
    names = (re.fullmatch(f"global_step_({STEP})", entry.name) for entry in root.iterdir()) if root.is_dir() else ()
    return [int(name.group(1)) for name in names if name]


def _sizes(folder: Path) -> list[tuple[str, int]]:
    return [
        (str(file.relative_to(folder)), file.stat().st_size) for file in sorted(folder.rglob("*")) if file.is_file()
    ]


def _read_json(file: Path) -> Any:
    """Reads a file's JSON.

    Raises:
        ValueError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Writes the file completely or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, file)
