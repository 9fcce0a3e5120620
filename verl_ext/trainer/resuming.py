"""The guard's state in verl's checkpoints: what is done around verl's own saving and loading."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from ray.exceptions import RayTaskError

from verl_ext.guard.guard import Guard
from verl_ext.trainer import checkpoints

TORCHS = ("PytorchStreamWriter", "inline_container")  # in what torch.save says where it cannot write


@contextmanager
def saving(guard: Guard, config: DictConfig, step: int) -> Iterator[None]:
    """Around verl's saving: the guard's state before its files, their sizes after them.

    Raises:
        CheckpointError: one of them, or of verl's, cannot be written.
    """
    guard.saved(step)
    folder = save_state(guard, config, step)
    with _written(folder):
        checkpoints.forget(folder)  # what was known of an older checkpoint of this step
        yield
        if not config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            checkpoints.save_sizes(folder)


def save_state(guard: Guard, config: DictConfig, step: int) -> Path:
    """The guard's state into the checkpoint of a step; its folder. Raises CheckpointError."""
    folder = checkpoints.folder_of(config.trainer.default_local_dir, step)
    with _written(folder):
        checkpoints.save_state(folder, guard.state_dict())
    return folder


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Around what is written to a checkpoint, here or in the workers, all of which have to write their part of it."""
    try:
        yield
    except (OSError, RayTaskError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        said = str(cause).partition("\n")[0]
        if not isinstance(cause, OSError) and not any(sign in str(cause) for sign in TORCHS):
            raise
        raise checkpoints.CheckpointError(
            f"the checkpoint {folder} cannot be written ({type(cause).__name__}: {said}). Those before it stand: with "
            "trainer.resume_mode=auto, the same command goes on from the last whole one"
        ) from error


@contextmanager
def loading(guard: Guard, config: DictConfig) -> Iterator[None]:
    """Around verl's loading: `config` names a checkpoint that is whole, whose state the guard then takes over.

    Raises:
        CheckpointError: none can be resumed from, or not the one that was asked for.
    """
    folder = _to_resume(config.trainer)
    if folder is None:
        yield
        return
    state = checkpoints.load_state(folder)
    trainer = config.trainer
    asked = trainer.resume_mode, trainer.get("resume_from_path")
    with open_dict(trainer):
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(folder)
        yield
        trainer.resume_mode, trainer.resume_from_path = asked
    if state is not None:
        guard.load_state_dict(state)
        print(f"verl_ext: guard state of step {checkpoints.step_of(folder)}: {json.dumps(_brief(guard))}", flush=True)


def _to_resume(trainer: DictConfig) -> Path | None:
    """None where there is no checkpoint to name: verl starts anew, or says what is missing."""
    if trainer.resume_mode == "auto":
        return checkpoints.newest_whole(trainer.default_local_dir)
    if trainer.resume_mode != "resume_path" or not trainer.resume_from_path:
        return None
    if wrong := checkpoints.damage(Path(trainer.resume_from_path)):
        raise checkpoints.CheckpointError(
            f"trainer.resume_from_path={trainer.resume_from_path} is damaged: {wrong}; name another one"
        )
    return Path(trainer.resume_from_path)


def _brief(guard: Guard) -> dict[str, Any]:
    state = guard.state
    firing = [name for name, rule in state.rules.items() if rule.firing]
    return {"skips": state.skips, "rollbacks": state.rollbacks, "firing": firing}
