"""The guard's additions to verl's checkpoints: its state, and the sizes of the files, which reveal a truncated one.

`saving` and `loading` are contexts around verl's saving and loading. A checkpoint folder is `global_step_N` under
trainer.default_local_dir; verl names the latest in a tracker file next to them, when it is complete.

A run may be killed between any two writes. It may also write step N where a checkpoint of step N lies already: after a
rollback, or after a restart from an earlier one. A restart must never take a mixture of the two.

**A checkpoint is whole** if its sizes are there and its files have them, or if verl's tracker names it. Without the
guard's state, plain verl wrote it: then the tracker must name it or a later one, and no more can be known. A checkpoint
that the guard gave up is never taken. A restart takes the newest whole checkpoint that is not newer than the tracker's.

**A save of step N** writes in this order:

1. If the tracker names N, it is made to name the newest whole checkpoint before N, or removed.
2. The sizes of the old checkpoint are removed. From here on N is not whole: the tracker names another step.
3. The mark of a checkpoint that was given up is removed, and the states of guard and diagnosis are written.
4. verl writes its files, and last the tracker, which names N. From here on N is whole.
5. The sizes are written. N stays whole when the tracker moves on.

A death before 2 leaves the old checkpoint as it was, with its mark if it was given up. A death between 2 and 4 leaves a
folder that is not whole until step N is saved again, however far the tracker moves. After 4, all files of N are new.
With Megatron's asynchronous saving, the workers write the tracker when their files are complete; the next save
begins with step 5 of this one.

**A rollback to step N** writes the guard's state into checkpoint N, as a restart from there needs it (`go_back`), and
then marks the later checkpoints as given up, the oldest first. The mark of the newest decides. Before it, a restart
takes that newest checkpoint, with its own state, and has not rolled back. After it, a restart takes N and has rolled
back: the count, the cooldown and the checkpoints to go back to are those of the rollback. An undo that gives up
checkpoints marks them in the same order.

These are deaths of processes. A machine that loses power can also lose what it had reported as written; the sizes
reveal a file that became shorter.
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
from verl_ext.diagnosis.judge import RunningDiagnosis
from verl_ext.guard.guard import Guard
from verl_ext.guard.state import read_state

STATE_FILE = "verl_ext.json"
DIAGNOSIS_FILE = "verl_ext_diagnosis.json"
SIZES_FILE = "verl_ext_sizes.json"
GIVEN_UP_FILE = "verl_ext_given_up"
TRACKER_FILE = "latest_checkpointed_iteration.txt"  # verl's
OURS = "verl_ext"  # the prefix of our files' names, half-written ones included
STEP = r"0|[1-9][0-9]{0,17}"  # as verl writes it
TORCHS = ("PytorchStreamWriter", "inline_container")  # in torch.save's message if it cannot write


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be resumed from, or cannot be written."""


@contextmanager
def saving(guard: Guard, diagnosis: RunningDiagnosis, config: DictConfig, step: int) -> Iterator[None]:
    """Context around verl's saving: writes the states of guard and diagnosis before verl's files, and their sizes after
    them.

    Raises:
        CheckpointError: a file, ours or verl's, cannot be written.
    """
    guard.saved(step)
    folder = folder_of(config.trainer.default_local_dir, step)
    with _explain_failure(folder):
        _record_latest(folder.parent)
        forget(folder)
        _save_both(folder, guard, diagnosis)
        yield
        if not config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            save_sizes(folder)


def save_states(guard: Guard, diagnosis: RunningDiagnosis, config: DictConfig, step: int) -> None:
    """Writes the states of guard and diagnosis into the checkpoint of a step. Raises CheckpointError."""
    folder = folder_of(config.trainer.default_local_dir, step)
    with _explain_failure(folder):
        _save_both(folder, guard, diagnosis)


def _save_both(folder: Path, guard: Guard, diagnosis: RunningDiagnosis) -> None:
    save_state(folder, guard.state_dict())
    _replace(folder / DIAGNOSIS_FILE, json.dumps(diagnosis.state_dict()))


def go_back(folder: Path, state: Mapping[str, Any]) -> None:
    """Records that the run has gone back to a checkpoint: a restart takes it, with this state, and no later one. Raises
    CheckpointError."""
    with _explain_failure(folder):
        save_state(folder, state)
        give_up(folder.parent, after=step_of(folder))


@contextmanager
def loading(guard: Guard, diagnosis: RunningDiagnosis, config: DictConfig) -> Iterator[None]:
    """Context around verl's loading: `config` names a whole checkpoint, and guard and diagnosis then load their states
    from it. A diagnosis whose state is missing or damaged begins anew.

    Raises:
        CheckpointError: the requested checkpoint, or every checkpoint, cannot be resumed from.
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
    if (file := folder / DIAGNOSIS_FILE).exists():
        try:
            diagnosis.load_state_dict(_read_json(file))
        except ValueError as error:
            print(f"verl_ext: {file} is damaged ({printable(str(error))}): the diagnosis begins anew", flush=True)


def folder_of(root: str | Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def step_of(folder: Path) -> int:
    """Returns the step at which verl resumes from the folder."""
    return int(folder.name.rpartition("global_step_")[2])


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the guard's state. It comes before verl's files, so that the checkpoint that verl names latest has it."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / STATE_FILE, json.dumps(state))


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
    sizes = {name: size for name, size in _sizes(folder) if not name.startswith(OURS)}
    _replace(folder / SIZES_FILE, json.dumps(sizes))


def give_up(root: str | Path, after: int) -> None:
    """Marks the checkpoints after step `after`, the oldest first: the weights are that step's again, and a restart must
    not continue from later ones."""
    for step in sorted(_steps(Path(root))):
        if step > after:
            (folder_of(root, step) / GIVEN_UP_FILE).touch()


def forget(folder: Path) -> None:
    """Makes a checkpoint count as unfinished, because it is about to be overwritten."""
    root, number = folder.parent, step_of(folder)
    if _latest(root) == number:
        earlier = newest_of(root, (step for step in _steps(root) if step < number))
        if earlier is None:
            (root / TRACKER_FILE).unlink()
        else:
            _replace(root / TRACKER_FILE, str(step_of(earlier)))
    (folder / SIZES_FILE).unlink(missing_ok=True)
    (folder / GIVEN_UP_FILE).unlink(missing_ok=True)


def _record_latest(root: Path) -> None:
    """Writes the sizes of the checkpoint that verl's tracker names, if it lacks them: it was saved asynchronously, or
    the run was killed before they were written."""
    step = _latest(root)
    if step is None:
        return
    folder = folder_of(root, step)
    if (folder / STATE_FILE).exists() and not (folder / SIZES_FILE).exists():
        save_sizes(folder)


def damage(folder: Path) -> str:
    """Returns why a checkpoint is not whole, in one clause; empty if it is, as far as its files show."""
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
        finished = not (folder / STATE_FILE).exists() or _latest(folder.parent) == step_of(folder)
        return "" if finished else "the run ended while it was saved"
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
        CheckpointError: none of the checkpoints can be resumed from, or the tracker names no step.
    """
    latest = _latest(root)
    if latest is None:  # no tracker, or a part of one: checkpoints with saved sizes are complete
        steps = [step for step in _steps(Path(root)) if (folder_of(root, step) / SIZES_FILE).exists()]
    else:
        steps = sorted({latest, *(step for step in _steps(Path(root)) if step <= latest)})
    if not steps:
        tracker = Path(root) / TRACKER_FILE
        if latest is None and tracker.exists():  # verl would raise on it
            raise CheckpointError(
                f"{tracker} names no step, and there is no complete checkpoint; delete it to start from the beginning"
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
    """Context that turns a failed write, here or in a worker, into a CheckpointError."""
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


def _latest(root: str | Path) -> int | None:
    """Returns the step that verl's tracker names; None if there is no tracker, or it names none (it was cut off)."""
    try:
        text = (Path(root) / TRACKER_FILE).read_text(encoding="utf-8").strip()
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
    """Reads a file's JSON. Raises ValueError if it cannot be read, or is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _replace(file: Path, text: str) -> None:
    """Writes the file completely or not at all."""
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
