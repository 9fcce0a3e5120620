"""The guard's additions to verl's checkpoints: its state, and the sizes of the files, which reveal a truncated one.

`saving` and `loading` stand around verl's own. A checkpoint folder is `global_step_N` under trainer.default_local_dir;
verl names the latest in a tracker file beside them, when it is complete.
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
TORCHS = ("PytorchStreamWriter", "inline_container")  # in what torch.save says where it cannot write


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be resumed from, or not be written."""


@contextmanager
def saving(guard: Guard, config: DictConfig, step: int) -> Iterator[None]:
    """Context of verl's saving: the guard's state is written before its files, their sizes after them.

    Raises:
        CheckpointError: one of them, or of verl's, cannot be written.
    """
    guard.saved(step)
    folder = save_guard(guard, config, step)
    with _explain_failure(folder):
        forget(folder)  # what was known of an older checkpoint of this step
        yield
        if not config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            save_sizes(folder)


def save_guard(guard: Guard, config: DictConfig, step: int) -> Path:
    """The guard's state into the checkpoint of a step; its folder. Raises CheckpointError."""
    folder = folder_of(config.trainer.default_local_dir, step)
    with _explain_failure(folder):
        save_state(folder, guard.state_dict())
    return folder


@contextmanager
def loading(guard: Guard, config: DictConfig) -> Iterator[None]:
    """Context of verl's loading: `config` names a whole checkpoint, and the guard takes over its state afterwards.

    Raises:
        CheckpointError: none can be resumed from, or not the one that was asked for.
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
    """The step that verl resumes from the folder at."""
    return int(folder.name.rpartition("global_step_")[2])


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the guard's state, before verl's own files: a checkpoint that verl names the latest has its state."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / STATE_FILE, state)


def load_state(folder: Path) -> dict[str, Any] | None:
    """None where a run without the guard wrote the checkpoint.

    Raises:
        CheckpointError: the file is not a state of the guard's.
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
    """Write the sizes of verl's files that this machine sees, once verl has written them."""
    ours = (STATE_FILE, SIZES_FILE, GIVEN_UP_FILE)  # which are whole or not there
    _write(folder / SIZES_FILE, {name: size for name, size in _sizes(folder) if name not in ours})


def give_up(root: str | Path, after: int) -> None:
    """The weights are again those of step `after`: a restart must not go on from what came later."""
    for step in _steps(Path(root)):
        if step > after:
            (folder_of(root, step) / GIVEN_UP_FILE).touch()


def forget(folder: Path) -> None:
    """The checkpoint is about to be written anew."""
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
    """The first file that is not as it was saved, in one clause; empty where all are."""
    for name, size in saved.items():
        if type(size) is not int:
            return f"{printable(name)} has a size that is not a whole number in {SIZES_FILE}"
        if name not in found:
            return f"{printable(name)} is missing"
        if found[name] != size:
            return f"{printable(name)} has {found[name]} bytes and was saved with {size}"
    return ""


def newest_whole(root: str | Path) -> Path | None:
    """The newest checkpoint that is whole and not given up, none newer than the one that verl names the latest.

    Prints those that it passes over. Returns None where there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and none can be resumed from; or only a tracker that names none.
    """
    latest = _latest(root)
    if latest is None:  # no tracker, or a part of one: those whose sizes were saved are complete
        steps = [step for step in _steps(Path(root)) if (folder_of(root, step) / SIZES_FILE).exists()]
    else:
        steps = sorted({latest, *(step for step in _steps(Path(root)) if step <= latest)})
    if not steps:
        if latest is None and _tracker(root).exists():  # verl would end on it
            raise CheckpointError(
                f"{_tracker(root)} names no step, and no complete checkpoint is there; delete it to start anew"
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
        otherwise="put a whole one there instead of starting anew",
    )


def newest_of(root: str | Path, steps: Iterable[int]) -> Path | None:
    """The newest of these checkpoints that is there with its model, and whole."""
    for step in sorted(steps, reverse=True):
        folder = folder_of(root, step)
        if (folder / "actor").is_dir() and not damage(folder):
            return folder
    return None


@contextmanager
def _explain_failure(folder: Path) -> Iterator[None]:
    """Context of what is written to a checkpoint, here or in the workers, all of which have to write their part."""
    try:
        yield
    except (OSError, RayTaskError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        said = str(cause).partition("\n")[0]
        if not isinstance(cause, OSError) and not any(sign in str(cause) for sign in TORCHS):
            raise
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written ({type(cause).__name__}: {said}). Those before it stand: with "
            "trainer.resume_mode=auto, the same command goes on from the last whole one"
        ) from error


def _checkpoint_to_resume(trainer: DictConfig) -> Path | None:
    """None where there is no checkpoint to name: verl starts anew, or says what is missing."""
    if trainer.resume_mode == "auto":
        return newest_whole(trainer.default_local_dir)
    if trainer.resume_mode != "resume_path" or not trainer.resume_from_path:
        return None
    if wrong := damage(Path(trainer.resume_from_path)):
        raise CheckpointError(
            f"trainer.resume_from_path={trainer.resume_from_path} is damaged: {wrong}; name another one"
        )
    return Path(trainer.resume_from_path)


def _tracker(root: str | Path) -> Path:
    # Here, because that package imports every training engine there is.
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    return Path(get_checkpoint_tracker_filename(str(root)))


def _latest(root: str | Path) -> int | None:
    """The step that verl's tracker names; None where there is none, or it names none (it was cut off)."""
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
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, file)
